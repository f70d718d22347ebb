"""Free pieces of jax's allocator on a GPU.

The allocator (XLA's BFCAllocator) reports how many bytes are free, but not the pieces. If an allocation fits into no piece,
the allocator waits ten seconds, and the memory that the same execution has allocated before is never freed (jaxlib 0.10.2).
So this module derives the pieces from the addresses of the weights. It follows the allocator's rules: the best fitting piece
is used, and it is not split if it is hardly larger than needed. Only weights are known here. Inputs, outputs and
intermediates of executions in flight are not.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from threading import Lock

#: The allocator rounds sizes up to a multiple of this many bytes.
_ROUNDED_BYTES = 256
#: The allocator splits off the remainder of a piece if it has at least this many bytes, or if it is at least as large as the
#: allocation.
_SPLIT_BYTES = 128 << 20


def rounded(nbytes: int) -> int:
    """Return the least number of bytes that the allocator takes for an allocation."""
    return -(-nbytes // _ROUNDED_BYTES) * _ROUNDED_BYTES


def _rest(piece: int, nbytes: int) -> int:
    """Return the bytes of a piece that stay free if the piece is used for an allocation."""
    remainder = piece - nbytes
    return remainder if remainder >= min(nbytes, _SPLIT_BYTES) else 0


class FreePieces:
    """Pieces of one preallocated range of device memory. Every method may be called from any thread."""

    def __init__(self, start: int, nbytes: int) -> None:
        self._start = start
        self._end = start + nbytes
        self._lock = Lock()
        #: Addresses of taken memory, in ascending order.
        self._addresses: list[int] = []
        #: Addresses by the caller's key.
        self._by_key: dict[int, int] = {}
        #: End of each piece of taken memory, by its start address.
        self._ends: dict[int, int] = {}
        #: Sizes of the free pieces in ascending order.
        self._free = [nbytes]

    def add(self, key: int, address: int, nbytes: int) -> None:
        """Record an allocation, including the remainder of its piece unless the allocator splits the remainder off."""
        if not self._start <= address < self._end:
            return  # The memory is outside the range whose pieces are recorded here.
        end = address + rounded(nbytes)
        with self._lock:
            at = bisect_left(self._addresses, address)
            start, limit = self._gap(at)
            self._replace([limit - start], [])
            if start > address:
                # The previous piece is shorter than recorded: memory of an execution followed it, and has been freed since.
                self._ends[self._addresses[at - 1]] = start = address
            if not _rest(limit - address, end - address):
                end = limit
            self._replace([], [address - start, limit - end])
            self._addresses.insert(at, address)
            self._by_key[key], self._ends[address] = address, end

    def remove(self, key: int) -> None:
        """Remove an allocation that is freed. An unknown key is ignored."""
        with self._lock:
            if (address := self._by_key.pop(key, None)) is None:
                return
            at = bisect_left(self._addresses, address)
            (start, _), (end, limit) = self._gap(at), self._gap(at + 1)
            self._replace([address - start, limit - end], [limit - start])
            del self._addresses[at], self._ends[address]

    @property
    def largest(self) -> int:
        """Bytes of the largest free piece."""
        with self._lock:
            return self._free[-1] if self._free else 0

    def fits(self, sizes: Iterable[int]) -> bool:
        """Return whether the allocator finds a piece for each of these allocations if it makes all of them, the largest first.

        XLA allocates the largest result of an execution first.
        """
        needed = sorted(filter(None, map(rounded, sizes)), reverse=True)
        with self._lock:
            if self._free and self._free[-1] - sum(needed) >= _SPLIT_BYTES:
                return True  # The largest piece alone has room for all allocations.
            pieces = self._free.copy()
        for nbytes in needed:
            at = bisect_left(pieces, nbytes)
            if at == len(pieces):
                return False
            if remainder := _rest(pieces.pop(at), nbytes):
                insort(pieces, remainder)
        return True

    def _gap(self, at: int) -> tuple[int, int]:
        """Return the start and the end of the free piece before the `at`-th taken piece. It may have no bytes."""
        start = self._ends[self._addresses[at - 1]] if at else self._start
        return start, self._addresses[at] if at < len(self._addresses) else self._end

    def _replace(self, old: Iterable[int], new: Iterable[int]) -> None:
        """Replace the sizes of free pieces."""
        for nbytes in filter(None, old):
            del self._free[bisect_left(self._free, nbytes)]
        for nbytes in filter(None, new):
            insort(self._free, nbytes)
