"""Copies of arrays where jax's CPU uses them in place, in memory that the system gets back."""

import mmap
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

#: bytes to which arrays must be aligned for jax's CPU to use them in place
_ALIGNMENT = 64
#: malloc's own first threshold for mappings
_MAPPED_BYTES = 128 << 10
_HUGE_PAGE_BYTES = 2 << 20


def aligned_copy(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A copy that jax's CPU need not copy again, and whose memory goes back to the system when it is dropped.

    A large one is a mapping of its own. malloc would do that only until the first one is freed: it then keeps as
    much for the next, in a heap that other allocations keep from shrinking.
    """
    nbytes = array.nbytes
    if nbytes >= _MAPPED_BYTES:
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if nbytes >= _HUGE_PAGE_BYTES:
            with suppress(OSError):  # a kernel without huge pages
                mapping.madvise(mmap.MADV_HUGEPAGE)
        raw = np.frombuffer(mapping, np.uint8)
    else:
        spare = np.empty(nbytes + _ALIGNMENT, np.uint8)
        start = -spare.ctypes.data % _ALIGNMENT
        raw = spare[start : start + nbytes]
    copy = raw.view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy
