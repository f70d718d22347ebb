"""The C library's heap, in which host arrays lie, and on a CPU weights: it keeps what is freed unless it is told not to."""

import ctypes
import gc

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
