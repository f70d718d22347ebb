"""Host memory: aligned allocations that jax's CPU uses in place, and the C library's heap."""

import ctypes
import gc
import logging
import mmap
from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from typing import Any, TypeVar
from weakref import WeakValueDictionary, finalize

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
T = TypeVar("T")

log = logging.getLogger(__name__)

#: Bytes to which arrays must be aligned so that jax's CPU uses them in place.
_ALIGNMENT = 64
#: Minimum number of bytes of an allocation with a separate mapping. Rounding to whole pages then costs at most 6 %. For a
#: smaller allocation, a mapping costs more than it saves.
LARGE = 64 << 10
_HUGE_PAGE_BYTES = 2 << 20


def aligned(nbytes: int, *, huge_pages: bool = False) -> Bytes:
    """Allocate memory. The system gets a large allocation back when its last view is deleted. Raises OSError and MemoryError.

    Large allocations do not use malloc. When the first one is freed, malloc raises its threshold for mappings, and takes later
    ones from a heap. Their memory would often stay in the heap, because other allocations prevent a heap from shrinking. With
    `huge_pages`, a very large allocation is filled faster. But two neighbouring allocations may share a page, which returns to
    the system only when both are free.
    """
    if nbytes < LARGE:
        spare = np.empty(nbytes + _ALIGNMENT, np.uint8)
        start = -spare.ctypes.data % _ALIGNMENT
        return spare[start : start + nbytes]
    mapping = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge_pages and nbytes >= _HUGE_PAGE_BYTES:
        with suppress(OSError):  # The kernel has no huge pages.
            mapping.madvise(mmap.MADV_HUGEPAGE)
    # The array keeps the mapping alive.
    return np.frombuffer(mapping, np.uint8)


def aligned_copy(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Copy an array into memory that jax's CPU uses in place."""
    copy = aligned(array.nbytes, huge_pages=True).view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


#: Locks the pages of a range (address, bytes), and returns a function that unlocks them.
PageLock = Callable[[int, int], Callable[[], None]]


class PageLocks:
    """Page-locks memory, so that a GPU reads it by DMA. Every method may be called from any thread.

    A transfer of more than 64 kB from memory that is not page-locked blocks its caller until earlier executions have ended.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._warned = False
        #: Memory by its id, including memory that could not be locked.
        self._known: WeakValueDictionary[int, Bytes] = WeakValueDictionary()
        #: Ids of the locked memory.
        self._locked: set[int] = set()

    def add(self, owner: Bytes, page_lock: PageLock) -> bool:
        """Lock a mapping until the last view of `owner` is gone, unless the mapping is small or already known.

        The whole mapping is locked, because a stub may use a segment again, and because no transfer may begin in locked memory
        and end in other memory. Return whether the mapping is locked.
        """
        if owner.nbytes < LARGE:
            return False
        with self._lock:
            if id(owner) in self._known:
                return id(owner) in self._locked
            self._known[id(owner)] = owner
        try:
            unlock = page_lock(owner.ctypes.data, owner.nbytes)
        except Exception as error:  # noqa: BLE001 - a driver's binding may raise any exception; transfers only take longer
            if not self._warned:
                self._warned = True
                log.warning("host memory is not page-locked, so transfers take longer: %s", error)
            return False
        # Views keep this array alive, and the array keeps the mapping alive. So the array is finalized after its last view and
        # before the mapping. When the process exits, the driver unlocks the pages itself.
        finalize(owner, self._unlock, id(owner), unlock).atexit = False
        self._locked.add(id(owner))
        return True

    def _unlock(self, owner: int, unlock: Callable[[], None]) -> None:
        self._locked.discard(owner)
        unlock()


class Reuse:
    """Copies of weights for jax's CPU, in the memory of weights that were evicted for them.

    Memory is reused because new pages cost five times as much as the copy. Memory that is freed for another reason returns to
    the system at once. `give_back` returns the memory that the load did not use.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        #: Memory by the id of its tensor. Small copies are in the heap and not listed.
        self._taken: dict[int, Bytes] = {}
        #: Freed memory by its number of bytes.
        self._spare: dict[int, list[Bytes]] = {}

    def put(self, array: npt.NDArray[Any], make: Callable[[npt.NDArray[Any]], T]) -> T:
        """Return the result of `make` for a copy of an array. Call `free` with that result before dropping it."""
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
        """Free a tensor made by `put`. With `reuse`, keep its memory for a later tensor of the same size."""
        with self._lock:
            memory = self._taken.pop(id(made), None)
            if memory is not None and reuse:
                self._spare.setdefault(memory.nbytes, []).append(memory)

    def give_back(self) -> bool:
        """Return the memory kept for reuse to the system. Return True if there was any."""
        with self._lock:
            left = any(self._spare.values())
            self._spare.clear()
        return left


#: Options of mallopt in glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -3, -4, -8
#: Values that glibc reaches by itself: the bytes of its two thresholds, and its maximum number of mappings.
_TRIM_BYTES, _MMAP_BYTES, _MAPPINGS = 64 << 20, 32 << 20, 65536

_libc = ctypes.CDLL(None)


def use_one_arena() -> None:
    """Make all threads allocate from one arena of malloc. Call this before starting threads.

    By default, each thread that allocates gets its own arena. Memory freed at the end of an arena other than the first, up to
    64 MiB in each, cannot return to the system. With a C library other than glibc, nothing happens.
    """
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(_M_ARENA_MAX, 1)


def prepare_heap(nbytes: int) -> None:
    """Add this much free memory with existing pages to the heap, so that a large allocation is fast.

    The pages are huge where the kernel allows that: then the end of the process also takes less time. Until `restore_heap`,
    malloc returns nothing to the system. It also makes no mappings, because their pages would be new. With a C library other
    than glibc, nothing happens.
    """
    if not hasattr(_libc, "mallopt"):
        return
    _libc.mallopt(_M_MMAP_MAX, 0)
    _libc.mallopt(_M_TRIM_THRESHOLD, -1)
    _libc.malloc.restype = ctypes.c_void_p
    address = _libc.malloc(ctypes.c_size_t(nbytes))
    if address:
        first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        # A kernel without huge pages refuses this.
        _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(address + nbytes - first), mmap.MADV_HUGEPAGE)
        ctypes.memset(address, 0, nbytes)
        _libc.free(ctypes.c_void_p(address))


def restore_heap() -> None:
    """Undo `prepare_heap`: return the free memory to the system, and set malloc's limits again."""
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(_M_MMAP_MAX, _MAPPINGS)
        _libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
        _libc.mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)
        _libc.malloc_trim(0)


def give_back() -> None:
    """Return freed memory to the system. It takes milliseconds, in which other threads may allocate slowly."""
    # jax drops arrays that it used in place (weights and inputs on a CPU) at its next call or in a collection.
    gc.collect()
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)
