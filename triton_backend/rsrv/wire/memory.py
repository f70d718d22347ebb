"""Shared memory between a stub and the runtime.

The stub owns this memory: it makes segments (memfd, sealed against resizing), sends their descriptors to the runtime, and
places both the inputs and the outputs of its requests. The runtime maps these segments and checks every offset against the
segment's size. Segments have no names, so the kernel frees a segment when no process uses it any more.
"""

import errno
import fcntl
import json
import mmap
import os
import sys
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rsrv.wire.layout import aligned

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

Bytes = npt.NDArray[np.uint8]

#: Bytes of an arena's first segment.
FIRST_BYTES = 1 << 20
#: Bytes that an idle arena keeps.
KEEP_BYTES = 64 << 20

#: Bytes of the largest document. The status of thousands of models is smaller.
_MAX_DOCUMENT = 64 << 20


class SharedMemoryError(Exception):
    """The peer's segment cannot be used: close the connection."""


def create_sealed(nbytes: int, name: str) -> int:
    """Return a memfd of this size. The kernel allocates its pages when they are touched. Raises OSError."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _map_foreign(fd: int, access: int, most: int) -> mmap.mmap:
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        size = os.fstat(fd).st_size
        if not seals & fcntl.F_SEAL_SHRINK or size == 0:
            raise SharedMemoryError("a segment must be a non-empty memfd that is sealed against shrinking")
        if size > most:
            raise SharedMemoryError(f"a segment of {size} bytes is more than {most}")
        return mmap.mmap(fd, size, mmap.MAP_SHARED, access)
    except OSError as error:
        raise SharedMemoryError(f"a segment cannot be mapped: {error}") from None


def map_segment(fd: int, most: int) -> Bytes:
    """Map a stub's segment. Raises SharedMemoryError if the stub could still shrink it, or if it has more than `most` bytes."""
    return np.frombuffer(_map_foreign(fd, mmap.PROT_READ | mmap.PROT_WRITE, most), np.uint8)


@dataclass(frozen=True, slots=True)
class Place:
    """A range of an arena. `offset` and `nbytes` are in bytes."""

    segment: int
    offset: int
    nbytes: int


class _Segment:
    """One mapped memfd, and its free ranges in ascending order. Free ranges are never adjacent."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self.memory = mmap.mmap(fd, nbytes)
        self.bytes: Bytes = np.frombuffer(self.memory, np.uint8)
        self.address = self.bytes.ctypes.data
        self.free: list[tuple[int, int]] = [(0, nbytes)]

    def take(self, nbytes: int) -> int | None:
        for i, (offset, length) in enumerate(self.free):
            if length >= nbytes:
                if length == nbytes:
                    del self.free[i]
                else:
                    self.free[i] = (offset + nbytes, length - nbytes)
                return offset
        return None

    def give(self, offset: int, nbytes: int) -> None:
        free = self.free
        insort(free, (offset, nbytes))
        i = free.index((offset, nbytes))
        if i + 1 < len(free) and offset + nbytes == free[i + 1][0]:
            nbytes += free.pop(i + 1)[1]
            free[i] = (offset, nbytes)
        if i and sum(free[i - 1]) == offset:
            free[i - 1] = (free[i - 1][0], free[i - 1][1] + nbytes)
            del free[i]

    @property
    def idle(self) -> bool:
        return len(self.free) == 1 and self.free[0][1] == self.nbytes


class Arena:
    """Allocator of a stub's shared memory. It uses the first range that fits, and frees idle segments beyond `keep` bytes.

    The arena is not thread-safe: the connection that owns it guards it. That connection also announces `fresh` and `dropped`
    segments to the runtime. `spare` returns the number of bytes of memory that the machine has left. The arena calls `spare`
    before it makes a segment that is larger than `first`, because the kernel allocates pages only when they are touched. If no
    page is left then, the kernel kills this process or another one.
    """

    def __init__(
        self, first: int = FIRST_BYTES, keep: int = KEEP_BYTES, spare: Callable[[], int] = lambda: sys.maxsize
    ) -> None:
        self._spare = spare
        self._first = first
        self._keep = keep
        self._segments: dict[int, _Segment] = {}
        self._next = 0
        self._closed = False
        #: Pairs (segment id, descriptor) of segments that the runtime does not know yet. See `announced`.
        self.fresh: list[tuple[int, int]] = []
        #: Ids of freed segments that the runtime still maps.
        self.dropped: list[int] = []

    def take(self, nbytes: int) -> Place:
        """Return a range of at least `nbytes`. Raises OSError if memory is short, or the arena is closed."""
        if self._closed:
            raise OSError("the arena is closed")
        nbytes = max(aligned(nbytes), aligned(1))
        for id, segment in self._segments.items():
            offset = segment.take(nbytes)
            if offset is not None:
                return Place(id, offset, nbytes)
        size = self._first
        while size < nbytes or size < self.nbytes < self._keep:  # Sizes double, so that few segments suffice.
            size *= 2
        size = size if size <= self._keep else -(-nbytes // 4096) * 4096
        if size > self._first and size > self._spare():
            raise OSError(errno.ENOMEM, f"the machine has no {size} bytes left")
        fd = create_sealed(size, "rsrv-tensors")
        try:
            segment = _Segment(fd, size)
        except BaseException:
            os.close(fd)
            raise
        id, self._next = self._next, self._next + 1
        self._segments[id] = segment
        self.fresh.append((id, fd))
        offset = segment.take(nbytes)
        assert offset == 0
        return Place(id, offset, nbytes)

    def announced(self) -> None:
        """Close the first descriptor of `fresh`, because the runtime has it now. The mapping stays."""
        _, fd = self.fresh.pop(0)
        os.close(fd)

    def give(self, place: Place) -> None:
        segment = self._segments.get(place.segment)
        if segment is None:
            return  # The arena was closed before the request ended.
        segment.give(place.offset, place.nbytes)
        if segment.idle and self.nbytes > self._keep:
            self._drop(place.segment)

    def segment(self, place: Place) -> Bytes:
        """Return the whole segment that holds a place."""
        return self._segments[place.segment].bytes

    def memory(self, place: Place) -> mmap.mmap:
        """Return the mapping that holds a place. The place's offset counts from the mapping's start."""
        return self._segments[place.segment].memory

    def locate(self, address: int, nbytes: int) -> tuple[int, int] | None:
        """Return the segment and the offset in it for a range of this process's memory, or None if no segment contains it."""
        for id, segment in self._segments.items():
            offset = address - segment.address
            if 0 <= offset <= segment.nbytes - nbytes:
                return id, offset
        return None

    @property
    def nbytes(self) -> int:
        return sum(segment.nbytes for segment in self._segments.values())

    @property
    def idle(self) -> bool:
        return all(segment.idle for segment in self._segments.values())

    def _drop(self, id: int) -> None:
        # The mapping stays until its last view is freed.
        del self._segments[id]
        for fresh in self.fresh:
            if fresh[0] == id:
                os.close(fresh[1])
                self.fresh.remove(fresh)
                return
        self.dropped.append(id)

    def close(self) -> None:
        self._closed = True
        self._segments.clear()
        while self.fresh:
            self.announced()


def create_document(value: dict[str, Any] | bytes) -> int:
    """Return a memfd with a JSON object or a document in flat form, of any size. The caller owns the memfd."""
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    fd = create_sealed(len(text), "rsrv-document")
    os.pwrite(fd, text, 0)
    return fd


def read_flat(fd: int) -> bytes:
    """Return the bytes of the document in a memfd. Raises SharedMemoryError."""
    try:
        size = os.fstat(fd).st_size
        if size > _MAX_DOCUMENT:
            raise SharedMemoryError(f"a document of {size} bytes exceeds {_MAX_DOCUMENT}")
        return os.pread(fd, size, 0)
    except OSError as error:
        raise SharedMemoryError(f"a document cannot be read: {error}") from None


def read_document(fd: int) -> dict[str, Any]:
    """Return the JSON object in a memfd. Raises SharedMemoryError."""
    try:
        value = json.loads(read_flat(fd))
    except (ValueError, RecursionError) as error:
        raise SharedMemoryError(f"a document cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise SharedMemoryError("a document is not an object")
    return value


#: Maximum number of seconds between two rounds of an idle runtime whose server has several devices.
BEAT_S = 0.1
#: If an idle runtime's loop has had no round for this many seconds, the runtime seems to be stopped. The limit is long because
#: on a busy machine, a runtime may wait for a core.
SILENT_S = 0.5
#: Bytes of a board.
BOARD_BYTES = 64 << 10
#: Number of cells of a board. The first two cells have other uses. Each further cell belongs to one model. If there are more
#: models than cells, some models have no cell.
BOARD_SLOTS = BOARD_BYTES // 8


class Board:
    """Board on which the runtime shows every stub how busy the device is and which weights it has.

    The board is a memfd of aligned u64 cells, so that writes are atomic. The first cell has the expected time at which the
    device becomes idle, in nanoseconds of CLOCK_MONOTONIC. Its lowest bit is set while the device has work. A time in the past
    means that the device is idle, or that its work is overdue. Each round of the runtime's loop writes the cell. While the
    device is idle, the first cell therefore has the time of the last round, which is at most BEAT_S ago if the server has
    several devices. The second cell has the nanoseconds until another run of a meta model would be admitted. It is 0 if the
    run would be admitted at once, or if the server has only one device. The other cells are the slots of models. Each has the
    nanoseconds that loading the model's weights would take, or 0 if the weights are on the device.
    """

    def __init__(self) -> None:
        self.fd = create_sealed(BOARD_BYTES, "rsrv-board")
        self._cells = memoryview(mmap.mmap(self.fd, BOARD_BYTES)).cast("Q")

    def publish(self, idle_at_ns: int, *, busy: bool) -> None:
        self._cells[0] = idle_at_ns | 1 if busy else idle_at_ns & ~1

    def publish_admission(self, wait_ns: int) -> None:
        self._cells[1] = wait_ns

    def publish_load(self, slot: int, load_ns: int) -> None:
        """Publish a model's cell. A model with slot 0 has no cell."""
        if slot:
            self._cells[slot] = load_ns


def read_board(fd: int) -> memoryview:
    """Return the stub's read-only view of a Board. Raises SharedMemoryError."""
    board = _map_foreign(fd, mmap.PROT_READ, BOARD_BYTES)
    if len(board) != BOARD_BYTES:
        raise SharedMemoryError(f"a board has {len(board)} bytes; it must have {BOARD_BYTES}")
    return memoryview(board).cast("Q")
