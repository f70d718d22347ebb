"""Host memory: aligned allocations that jax's CPU uses in place, and the C library's heap."""

import ctypes
import gc
import mmap
from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
T = TypeVar("T")

#: bytes to which arrays must be aligned for jax's CPU to use them in place
_ALIGNMENT = 64
#: bytes from which on memory is a mapping of its own: rounding to whole pages costs 6 % at most. Below, a mapping
#: costs more than it saves.
LARGE = 64 << 10
_HUGE_PAGE_BYTES = 2 << 20


def aligned(nbytes: int, *, huge_pages: bool = False) -> Bytes:
    """Memory to fill. A large one goes back to the system with its last view. Raises OSError and MemoryError.

    malloc would give it back only until the first one is freed: it then keeps as much for the next, in a heap that
    other allocations keep from shrinking. With `huge_pages` a very large one is filled faster, but neighbours may
    share a page, and give it back together.
    """
    if nbytes < LARGE:
        spare = np.empty(nbytes + _ALIGNMENT, np.uint8)
        start = -spare.ctypes.data % _ALIGNMENT
        return spare[start : start + nbytes]
    mapping = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge_pages and nbytes >= _HUGE_PAGE_BYTES:
        with suppress(OSError):  # a kernel without huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
    # The array keeps the mapping alive.
    return np.frombuffer(mapping, np.uint8)


def aligned_copy(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A copy that jax's CPU need not copy again."""
    copy = aligned(array.nbytes, huge_pages=True).view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


class Reuse:
    """Copies for jax's CPU, in memory of freed ones that make room for them: fresh pages cost five times the copy.

    Nothing is kept for longer than that: what is freed for its own sake goes back to the system, and so does
    what those that came had no use for, at `give_back`.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        #: id of the tensor that lies there -> memory; small copies are the heap's affair
        self._taken: dict[int, Bytes] = {}
        #: bytes -> memory to use next
        self._spare: dict[int, list[Bytes]] = {}

    def put(self, array: npt.NDArray[Any], make: Callable[[npt.NDArray[Any]], T]) -> T:
        """What `make` makes of a copy: to be freed before it is dropped."""
        if array.nbytes < LARGE:
            return make(aligned_copy(array))
        with self._lock:
            spare = self._spare.get(array.nbytes)
            memory = spare.pop() if spare else None
        if memory is None:
            memory = aligned(array.nbytes, huge_pages=True)
        copy = memory.view(array.dtype).reshape(array.shape)
        copy[...] = array
        made = make(copy)
        with self._lock:
            self._taken[id(made)] = memory
        return made

    def free(self, made: object, *, reuse: bool) -> None:
        """Nobody uses it any more."""
        with self._lock:
            memory = self._taken.pop(id(made), None)
            if memory is not None and reuse:
                self._spare.setdefault(memory.nbytes, []).append(memory)

    def give_back(self) -> bool:
        """What was freed to be used again will not be; whether there was anything."""
        with self._lock:
            left = any(self._spare.values())
            self._spare.clear()
        return left


#: of mallopt, from glibc's malloc.h
_M_ARENA_MAX = -8

_libc = ctypes.CDLL(None)


def use_one_arena() -> None:
    """Call before there are threads. Does nothing with another C library than glibc.

    Otherwise each thread that allocates gets an arena of its own, and what is freed at the end of any but the
    first, up to 64 MiB each, cannot be given back.
    """
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(_M_ARENA_MAX, 1)


def give_back() -> None:
    """Return memory that was freed to the system: some milliseconds, in which others may allocate slowly."""
    # jax drops arrays that it used in place, as a CPU's weights and inputs, at its next call or in a collection.
    gc.collect()
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)
