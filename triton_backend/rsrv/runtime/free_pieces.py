"""Free pieces of jax's allocator on a GPU.

The allocator (XLA's BFCAllocator) tells how many bytes are free, and not in which pieces. For an allocation that fits
into none of them it waits ten seconds, and what the same execution had allocated before is never freed (jaxlib 0.10.2).
So the pieces are derived here, from the addresses of the weights, by the allocator's own rules: best fit, and a piece
that is hardly larger than needed is handed out whole. Weights are what stays; inputs, outputs and intermediates of
executions in flight are not known.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from threading import Lock

#: bytes to a multiple of which the allocator rounds
_ROUNDED_BYTES = 256
#: bytes of a rest that the allocator splits off, unless the rest is at least as large as what was asked for
_SPLIT_BYTES = 128 << 20


def rounded(nbytes: int) -> int:
    """Return the bytes that the allocator takes for an allocation at least."""
    return -(-nbytes // _ROUNDED_BYTES) * _ROUNDED_BYTES


def _rest(piece: int, nbytes: int) -> int:
    """Return the bytes that stay free of a piece that is used for an allocation."""
    rest = piece - nbytes
    return rest if rest >= min(nbytes, _SPLIT_BYTES) else 0


class FreePieces:
    """Pieces of one preallocated range of device memory. Every method may be called from any thread."""

    def __init__(self, start: int, nbytes: int) -> None:
        self._start = start
        self._end = start + nbytes
        self._lock = Lock()
        #: addresses of what is taken, by the caller's key, in ascending order, and the address behind each
        self._keys: dict[int, int] = {}
        self._addresses: list[int] = []
        self._ends: dict[int, int] = {}
        #: sizes of the free pieces in ascending order; None: to be derived again
        self._free: list[int] | None = None

    def add(self, key: int, address: int, nbytes: int) -> None:
        """Note an allocation. A rest that the allocator did not split off belongs to it."""
        end = address + rounded(nbytes)
        with self._lock:
            following = bisect_left(self._addresses, end)
            limit = self._addresses[following] if following < len(self._addresses) else self._end
            if not _rest(limit - address, end - address):
                end = limit
            if address not in self._ends:
                insort(self._addresses, address)
            self._keys[key], self._ends[address] = address, end
            self._free = None

    def remove(self, key: int) -> None:
        """Forget an allocation that is freed; an unknown key is ignored."""
        with self._lock:
            if (address := self._keys.pop(key, None)) is not None and self._ends.pop(
                address, None
            ) is not None:
                self._addresses.pop(bisect_left(self._addresses, address))
                self._free = None

    def fits(self, sizes: Iterable[int]) -> bool:
        """Return whether the allocator finds a piece for each allocation if it makes all of them.

        XLA allocates the largest result of an execution first.
        """
        needed = sorted(filter(None, map(rounded, sizes)), reverse=True)
        with self._lock:
            if self._free is None:
                self._free = self._derive()
            pieces = self._free
        if pieces and pieces[-1] - sum(needed) >= _SPLIT_BYTES:
            return True  # the largest piece has room for whatever finds no better one
        pieces = pieces.copy()
        for nbytes in needed:
            at = bisect_left(pieces, nbytes)
            if at == len(pieces):
                return False
            if rest := _rest(pieces.pop(at), nbytes):
                insort(pieces, rest)
        return True

    def _derive(self) -> list[int]:
        pieces, at = [], self._start
        for address in self._addresses:
            if address > at:
                pieces.append(address - at)
            at = max(at, self._ends[address])
        if at < self._end:
            pieces.append(self._end - at)
        return sorted(pieces)
