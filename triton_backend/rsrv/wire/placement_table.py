"""The placement table: a shared file with the devices on which each model of a server shall run.

The control process writes it, and stubs read it without a lock on the file. The file has a header and two halves; the table of
generation g is in half g % 2. So if a writer dies while it fills the other half, the current table is still valid.
"""

import mmap
import os
import struct
import zlib
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from pathlib import Path
from threading import Lock

#: Magic, capacity (entries of a half), reserved, and generation (0: no table yet).
_HEADER = struct.Struct("<8sIIQ")
MAGIC = b"rsrvpt01"
HEADER_BYTES = 64
#: Index of the generation if the file is read as u64 numbers.
_GENERATION = 2
#: Generation, number of entries, and crc32 of these two and the entries.
_HALF = struct.Struct("<QII")
_CHECKED = struct.Struct("<QI")
#: Digest of a model's name, and mask of its devices. Entries are in ascending order of digests.
_ENTRY = struct.Struct("<16sQ")
_DIGEST_BYTES = 16
#: This generation marks a file that another file has replaced.
_MOVED = 2**64 - 1

#: Minimum number of entries of a new file's half.
_LEAST_CAPACITY = 256
#: Seconds between attempts to read a table that is absent or damaged.
RETRY_S = 1.0


def _digest(name: str) -> bytes:
    return blake2b(name.encode(), digest_size=_DIGEST_BYTES).digest()


def _checksum(generation: int, count: int, entries: bytes) -> int:
    return zlib.crc32(entries, zlib.crc32(_CHECKED.pack(generation, count)))


class _MappedTable:
    """A placement table that is mapped into memory."""

    def __init__(self, fd: int, access: int) -> None:
        """Map a file, and close its descriptor. Raises OSError, and ValueError if the file is not a table."""
        try:
            size = os.fstat(fd).st_size
            if size < HEADER_BYTES:
                raise ValueError("the file is too short")
            self._memory = mmap.mmap(fd, size, mmap.MAP_SHARED, access)
        finally:
            os.close(fd)
        magic, capacity, _, _ = _HEADER.unpack_from(self._memory)
        self.capacity: int = capacity
        if magic != MAGIC or size != _size(self.capacity):
            raise ValueError("the file has another format")
        #: The file as aligned u64 numbers, because each of them is read and written atomically.
        self._cells = memoryview(self._memory).cast("Q")

    @property
    def generation(self) -> int:
        generation: int = self._cells[_GENERATION]
        return generation

    @generation.setter
    def generation(self, generation: int) -> None:
        self._cells[_GENERATION] = generation

    def _half(self, generation: int) -> int:
        return HEADER_BYTES + generation % 2 * (_HALF.size + self.capacity * _ENTRY.size)

    def newest(self) -> int:
        """Return the highest generation that a half names. The half may be incomplete."""
        first, second = (_HALF.unpack_from(self._memory, self._half(number))[0] for number in (0, 1))
        return int(max(first, second))

    def fill(self, generation: int, entries: bytes) -> None:
        """Write a table. It becomes valid when the caller sets the file's `generation`."""
        half, count = self._half(generation), len(entries) // _ENTRY.size
        at = half + _HALF.size
        self._memory[at : at + len(entries)] = entries
        _HALF.pack_into(self._memory, half, generation, count, _checksum(generation, count, entries))

    def entries(self, generation: int) -> bytes | None:
        """Return the table of a generation, or None if it is not complete."""
        half = self._half(generation)
        stored, count, checksum = _HALF.unpack_from(self._memory, half)
        if stored != generation or count > self.capacity:
            return None
        at = half + _HALF.size
        entries = self._memory[at : at + count * _ENTRY.size]
        return entries if _checksum(generation, count, entries) == checksum else None

    def close(self) -> None:
        self._cells.release()
        self._memory.close()


def _size(capacity: int) -> int:
    return HEADER_BYTES + 2 * (_HALF.size + capacity * _ENTRY.size)


class PlacementWriter:
    """Writer of the table. There must be only one writer at a time. It continues the generations of an earlier writer."""

    def __init__(self, path: Path) -> None:
        """Open the file of an earlier writer, if there is one. Raises OSError."""
        self._path = path
        self._file: _MappedTable | None = None
        self._generation = 0
        try:
            self._file = _MappedTable(
                os.open(path, os.O_RDWR | os.O_CLOEXEC), mmap.PROT_READ | mmap.PROT_WRITE
            )
        except (FileNotFoundError, ValueError):
            return
        generation = self._file.generation
        # An earlier writer may have died after it marked this file as replaced and before it renamed the larger file.
        self._generation = self._file.newest() if generation == _MOVED else generation

    def read(self, names: Iterable[str]) -> dict[str, int]:
        """Return the masks of these models. Models that are not in the table are left out."""
        entries = None if self._file is None else self._file.entries(self._generation)
        masks = dict(_ENTRY.iter_unpack(entries or b""))
        return {name: masks[digest] for name in names if (digest := _digest(name)) in masks}

    def write(self, masks: Mapping[str, int]) -> int:
        """Write the masks of all models; bit n of a mask stands for device n. Return the generation. Raises OSError."""
        pairs = sorted((_digest(name), mask) for name, mask in masks.items())
        entries = b"".join(_ENTRY.pack(digest, mask) for digest, mask in pairs)
        generation = self._generation + 1
        file = self._file
        if file is None or file.generation == _MOVED or len(pairs) > file.capacity:
            file = self._replace(len(pairs), generation, entries)
        else:
            file.fill(generation, entries)
            file.generation = generation
        self._file, self._generation = file, generation
        return generation

    def _replace(self, count: int, generation: int, entries: bytes) -> _MappedTable:
        """Make a file with room for more models, and replace the old file."""
        capacity = max(_LEAST_CAPACITY, 1 << count.bit_length())
        beside = self._path.with_name(f"{self._path.name}.new")
        fd = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            # Allocate all blocks of the file, because a write into a hole kills the process if the file system is full.
            os.posix_fallocate(fd, 0, _size(capacity))
            os.pwrite(fd, _HEADER.pack(MAGIC, capacity, 0, 0), 0)
        except BaseException:
            os.close(fd)
            raise
        file = _MappedTable(fd, mmap.PROT_READ | mmap.PROT_WRITE)
        file.fill(generation, entries)
        file.generation = generation
        # Mark the old file before the rename. If this process died after a rename, the readers of an unmarked file would use
        # that file forever.
        if self._file is not None:
            self._file.generation = _MOVED
            self._file.close()
            self._file = None
        beside.rename(self._path)
        return file

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class PlacementReader:
    """Reads the devices of one model and of its callees from the table. Thread-safe."""

    def __init__(self, path: Path, name: str, callees: Iterable[str] = ()) -> None:
        """Make the reader. It reads nothing yet, so the file need not exist."""
        self._path = path
        self._digest = _digest(name)
        self._callees = {name: _digest(name) for name in callees}
        #: Masks of the callees, as read by the last call of `mask`.
        self.callees: Mapping[str, int] = dict.fromkeys(self._callees, 0)
        self._file: _MappedTable | None = None
        self._generation = 0
        self._mask = 0
        self._retry_at = 0.0
        #: Held while the attributes above change. `mask` compares the generation without it.
        self._lock = Lock()

    def mask(self, now: float) -> int:
        """Return the mask of the model's devices: bit n stands for device n. `now` is a monotonic time in seconds.

        The mask is 0 if there is no table yet, or if the model is not in it. The model may then run on all devices. If the table
        is damaged, the last valid mask is returned.
        """
        file = self._file
        if file is not None and file.generation == self._generation:
            return self._mask
        with self._lock:
            if now >= self._retry_at and not self._read():
                self._retry_at = now + RETRY_S
            return self._mask

    def _read(self) -> bool:
        """Read the current table. Return False if there is no complete table."""
        file = self._file
        if file is None or file.generation == _MOVED:
            self.close()
            try:
                file = _MappedTable(os.open(self._path, os.O_RDONLY | os.O_CLOEXEC), mmap.PROT_READ)
            except (OSError, ValueError):
                return False
            self._file = file
        generation = file.generation
        while generation not in (0, _MOVED):
            entries = file.entries(generation)
            if entries is not None:
                self._mask = _find(entries, self._digest)
                self.callees = {name: _find(entries, digest) for name, digest in self._callees.items()}
                self._generation = generation  # Write this attribute last, because other threads compare it without the lock.
                return True
            # If the generation has changed, the writer has reused this half during the read. Otherwise the half is damaged.
            before, generation = generation, file.generation
            if generation == before:
                break
        return False

    def close(self) -> None:
        """Drop the file. It is unmapped when no thread uses it any more."""
        self._file = None


def _find(entries: bytes, digest: bytes) -> int:
    """Return a model's mask in a table, or 0 if the table does not have the model."""
    count = len(entries) // _ENTRY.size
    at = bisect_left(
        range(count), digest, key=lambda i: entries[i * _ENTRY.size : i * _ENTRY.size + _DIGEST_BYTES]
    )
    if at < count:
        stored, mask = _ENTRY.unpack_from(entries, at * _ENTRY.size)
        if stored == digest:
            return int(mask)
    return 0
