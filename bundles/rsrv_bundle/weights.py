"""Reader of `weights.safetensors`: check the header of an untrusted file, and load its tensors.

The file has 8 bytes with the length of the header (little endian), a JSON header, and one buffer with the bytes of all tensors.
Before a tensor is read, the header is checked: every tensor must lie inside the file, and tensors must neither overlap nor leave
holes.

Format 3 stores each tensor as the modules take it. Format 2.0 stores a tensor with reversed axes, row-major for the reversed shape.
So loading transposes the tensor. A reshape would give wrong numbers in the right shape.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import numpy.typing as npt

from rsrv_bundle import dtypes
from rsrv_bundle.errors import BundleError, Problems, mismatch
from rsrv_bundle.spec import Bundle, WeightSpec

FILE = "weights.safetensors"

Bytes = npt.NDArray[np.uint8]

#: Maximum number of bytes of a header, which suffices for a hundred thousand tensors. It is checked before the header is read. A
#: parsed header takes thirty times as much memory. The limit of the safetensors library is ten times as high.
MAX_HEADER_BYTES = 10_000_000
_MAX_NAME = 4096
_MAX_RANK = 64
#: Maximum number of bytes of one read outside of weights.
_CHUNK = 2**20
#: A file that was changed within this many nanoseconds may change again without a trace, because file systems round times.
_SETTLED_NS = 2_000_000_000


class TensorKey(NamedTuple):
    """Identity of a tensor. Tensors with equal keys are equal, and the server stores them once."""

    #: `content_digest` of the tensor.
    digest: str
    #: Token of the element type.
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Stored:
    """A checked entry of the header."""

    #: Token of the element type, or an empty text for types that weights cannot have.
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_weights(path: Path, *, reverse: bool, problems: Problems) -> tuple[WeightSpec, ...]:
    """Read the header, and return the weights in argument order. Every broken rule is added to `problems`.

    `reverse` is True if the shapes in the file are reversed (format 2.0). Tensors that `argument_order` does not list are ignored. The
    result is complete only if nothing was added to `problems`.
    """
    own = Problems()
    try:
        raw, size = _read_header(path)
        header = _parse_header(raw)
    except (OSError, ValueError) as e:
        problems.add(FILE, "", str(e))
        return ()
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        own.add(FILE, "__metadata__", "must be a mapping from text to text")
        metadata = {}
    start = len(raw)
    buffer = size - start
    order = Problems()
    names = _argument_order(metadata, header, order)
    listed, stored = frozenset(names), {}
    for name, entry in header.items():
        checked = _entry(name, entry, buffer, own, listed=name in listed)
        if checked is not None:
            stored[name] = checked
    if not own.lines:
        _check_coverage(stored, buffer, own)
    if not own.lines:
        _second_opinion(raw, size, own)
    own.lines += order.lines
    weights = []
    for name in names:
        stored_entry = stored.get(name)
        if stored_entry is not None:
            shape = stored_entry.shape[::-1] if reverse else stored_entry.shape
            weights.append(
                WeightSpec(
                    name,
                    stored_entry.dtype,
                    shape,
                    stored_entry.end - stored_entry.begin,
                    start + stored_entry.begin,
                )
            )
        elif name not in header:
            own.add(FILE, name, f"weight '{name}' missing from safetensors; argument_order lists it")
    for line in own.lines:
        problems.lines.append(line)
    return tuple(weights)


def _read_header(path: Path) -> tuple[bytes, int]:
    """Return the bytes before the buffer, and the file's size. Raises ValueError with the broken rule."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise ValueError(f"holds {size} bytes, less than the 8 of a header length")
        (length,) = struct.unpack("<Q", prefix)
        if length > min(MAX_HEADER_BYTES, size - 8):
            raise ValueError(
                f"header length {length} exceeds the file ({size} bytes) or the limit of {MAX_HEADER_BYTES}"
            )
        raw = prefix + file.read(length)
    if len(raw) != 8 + length:
        raise ValueError("shrank while it was read")
    return raw, size


def _parse_header(raw: bytes) -> dict[str, Any]:
    """Parse the header, and return its entries by name. Raises ValueError with the broken rule."""
    if not raw.startswith(b"{", 8):
        raise ValueError("header does not start with '{'")
    try:
        header: dict[str, Any] = json.loads(raw[8:].decode("utf-8"), object_pairs_hook=_unique_keys)
    except RecursionError:
        raise ValueError("header is nested too deeply") from None
    except ValueError as e:
        raise ValueError(f"header is not valid JSON: {e}") from None
    return header


def _unique_keys(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {key!r:.80} occurs twice")
        result[key] = value
    return result


def _entry(name: str, entry: Any, buffer: int, problems: Problems, *, listed: bool) -> _Stored | None:
    """Check a tensor's entry. `listed` is True for weights. Other tensors may have any type that the library accepts."""

    def bad(rule: str) -> None:
        problems.add(FILE, name, rule)

    if not name or len(name) > _MAX_NAME or not name.isprintable():
        bad(f"a tensor's name is 1 to {_MAX_NAME} printable characters")
        return None
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        bad("must have dtype, shape and data_offsets, and nothing else")
        return None
    shape, offsets, dtype = entry["shape"], entry["data_offsets"], ""
    try:
        dtype = dtypes.token_of_safetensors(str(entry["dtype"]))
    except KeyError:
        if listed:
            bad(f"unsupported dtype {entry['dtype']!r:.40}")
            return None
    if not _are_counts(shape):
        bad("shape must be a list of whole numbers from 0 on")
        return None
    if len(shape) > _MAX_RANK or max(shape, default=0) > 2**63:
        bad(f"shape has more than {_MAX_RANK} axes, or one of more than 2^63")
        return None
    if not _are_counts(offsets) or len(offsets) != 2:
        bad("data_offsets must be two whole numbers from 0 on")
        return None
    begin, end = offsets
    if not begin <= end <= buffer:
        bad(f"data_offsets [{begin}, {end}] leave the file's {buffer} bytes of tensor data")
        return None
    needed = math.prod(shape) * dtypes.itemsize(dtype) if dtype else end - begin
    if needed != end - begin:
        bad(f"data_offsets span {end - begin} bytes, but {dtype} with shape {shape} needs {needed}")
        return None
    return _Stored(dtype, tuple(shape), begin, end)


def _are_counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(
        isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in value
    )


def _check_coverage(stored: Mapping[str, _Stored], buffer: int, problems: Problems) -> None:
    """Check that the tensors fill the buffer. In an overlap, two weights would share bytes, and a hole could hide data."""
    position = 0
    for name, entry in sorted(stored.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position:
            word = "overlaps the tensor before it" if entry.begin < position else "leaves a hole before it"
            problems.add(
                FILE, name, f"{word}: starts at byte {entry.begin}, the tensor before ends at {position}"
            )
            return
        position = entry.end
    if position != buffer:
        problems.add(FILE, "", f"{buffer - position} bytes at its end belong to no tensor")


def _second_opinion(header: bytes, size: int, problems: Problems) -> None:
    """Check that the safetensors library also accepts the file, because other readers use the library.

    `header` is the beginning of the file, and `size` is the file's size in bytes. The library maps the file. If a mapped file is
    truncated, its reader is killed. So the library gets a copy with a hole in place of the tensors.
    """
    import safetensors

    copy = os.memfd_create(FILE)
    try:
        with open(copy, "wb", closefd=False) as file:
            file.write(header)
        os.ftruncate(copy, size)
        with safetensors.safe_open(f"/proc/self/fd/{copy}", framework="numpy"):
            pass
    except (safetensors.SafetensorError, OSError) as e:
        problems.add(FILE, "", f"the safetensors library refuses it: {e}")
    finally:
        os.close(copy)


def _argument_order(
    metadata: Mapping[str, str], header: Mapping[str, Any], problems: Problems
) -> tuple[str, ...]:
    key = "__metadata__.argument_order"
    text = metadata.get("argument_order")
    if text is None:
        if header:
            problems.add(FILE, key, "is missing; it must hold the weights' names in argument order")
        return ()
    try:
        names = json.loads(text)
    except (ValueError, RecursionError):
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        problems.add(FILE, key, "must be text that holds a JSON array of weight names")
        return ()
    if len(set(names)) != len(names):
        problems.add(FILE, key, "lists a weight twice; every argument needs its own")
    return tuple(dict.fromkeys(names))


def stamp(status: os.stat_result) -> tuple[int, ...]:
    """Return a value that changes if the file is written, or if another file replaces it."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _version(status: os.stat_result) -> str | None:
    if time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns) < _SETTLED_NS:
        return None
    text = "-".join(map(str, (*stamp(status), status.st_ctime_ns)))
    return hashlib.sha256(text.encode()).hexdigest()


def _new(nbytes: int) -> Bytes:
    return np.empty(nbytes, np.uint8)


class WeightsFile:
    """The weights file of a bundle. It stays open, so that renaming or removing it changes nothing.

    The file is read instead of mapped, because a process is killed if its mapped file is truncated. Several threads may read weights
    concurrently, but none may read while another thread calls `close`.
    """

    def __init__(self, bundle: Bundle) -> None:
        """Open the file. Raises BundleError if it is gone or has changed since the bundle was read."""
        self._weights = bundle.weights
        self._stamp = bundle.weights_stamp
        self._reverse = bundle.manifest.format_version == "2.0"
        self._sum = bundle.manifest.sha256.get(FILE)
        self._fd = -1
        self.path = bundle.weights_file
        #: Identifier of the file's content, from the file system's facts about the file. None if the file has just changed, because a
        #: further change could leave no trace.
        self.version: str | None = None
        if bundle.weights_file is None or not bundle.weights:
            return
        last = max(weight.offset + weight.nbytes for weight in bundle.weights)
        try:
            self._fd = os.open(bundle.weights_file, os.O_RDONLY | os.O_CLOEXEC)
            opened = os.fstat(self._fd)
        except OSError as e:
            self.close()
            raise BundleError(f"{FILE}: cannot be read: {e.strerror}") from e
        size = self._size = opened.st_size
        if size < last:
            self.close()
            raise BundleError(
                f"{FILE}: changed since the bundle was read: {size} bytes, {last} were expected"
            )
        if stamp(opened) != self._stamp:
            self.close()
            # Refuse the file, because tensors may have moved, and the new weights may belong to other modules.
            raise BundleError(f"{FILE}: changed since the bundle was read; load the model again")
        self.version = _version(opened)

    @property
    def form(self) -> str:
        """A text that determines how weights are read from the file: the manifest's checksum, and the order of axes."""
        return f"{self._sum} {'reversed' if self._reverse else 'as stored'}"

    @staticmethod
    def version_of(path: str) -> str | None:
        """Return the `version` that a file of this name would have now. Raises OSError."""
        return _version(os.stat(path))

    def read_all(self, new: Callable[[int], Bytes] = _new) -> Iterator[tuple[int, Bytes]]:
        """Yield the index and the bytes of every weight, in the file's order. The bytes are as in `read_into`, in memory from `new`.

        If the manifest has a checksum of the file, the same pass compares it. So the weights are valid only if the iteration ends
        without an error. The caller must not change the bytes before the next step. Raises BundleError if the file does not match the
        manifest, or if it was written since it was opened.
        """
        # Read an empty weight before another weight with the same offset, because the hash runs only forward.
        weights = self._weights
        order = sorted(range(len(weights)), key=lambda index: (weights[index].offset, weights[index].nbytes))
        if self._sum is None or self._fd < 0:
            for index in order:
                yield index, self._read(index, new)
            return
        whole, position = hashlib.sha256(), 0
        # Hash the file on another thread, because the caller hashes each weight at the same time, which takes as long.
        with ThreadPoolExecutor(1) as thread:
            for index in order:
                weight = self._weights[index]
                self._skip(whole.update, position, weight.offset)
                raw = self._read(index, new)
                hashed = thread.submit(whole.update, raw.data)
                yield index, raw
                hashed.result()
                position = weight.offset + weight.nbytes
        self._skip(whole.update, position, self._size)
        if whole.hexdigest() != self._sum:
            raise BundleError(mismatch(FILE))

    def _skip(self, hash_: Callable[[memoryview], object], position: int, end: int) -> None:
        """Hash bytes outside of weights: the header, and tensors that are not arguments."""
        while position < end:
            raw = np.empty(min(_CHUNK, end - position), np.uint8)
            self._fill(raw, position)
            hash_(raw.data)
            position += raw.nbytes

    def _read(self, index: int, new: Callable[[int], Bytes]) -> Bytes:
        raw = new(self._weights[index].nbytes)
        self.read_into(index, raw)
        return raw

    def read_into(self, index: int, out: Bytes, *, digest: str | None = None) -> None:
        """Fill `out` with a weight, row-major, as the modules take it. `out` must have the weight's size, and be aligned for it.

        Raises BundleError if the file was written since it was opened, unless the weight still has the `content_digest` `digest`. After
        an error, `out` may have any content.
        """
        weight = self._weights[index]
        if not self._reverse or len(weight.shape) < 2:
            unchanged = self._fill(out, weight.offset)
        else:
            raw = np.empty(weight.nbytes, np.uint8)
            unchanged = self._fill(raw, weight.offset)
            # Transpose the elements as integers of the same size, because numpy then releases the interpreter's lock.
            word = np.dtype(f"u{dtypes.itemsize(weight.dtype)}")
            out.view(word).reshape(weight.shape)[...] = raw.view(word).reshape(weight.shape[::-1]).T
        if not unchanged and content_digest(out) != digest:
            raise changed_since_loaded()

    def _fill(self, out: Bytes, offset: int) -> bool:
        """Read bytes of the file. Returns whether the file is unchanged since it was opened."""
        remaining = out.data
        try:
            while remaining and (count := os.preadv(self._fd, [remaining], offset)):
                remaining, offset = remaining[count:], offset + count
            now = os.fstat(self._fd)
        except OSError as e:
            raise BundleError(f"{FILE}: cannot be read: {e.strerror}") from e
        # The stamp was taken after the read, so it shows earlier and concurrent writes.
        if remaining:
            raise changed_since_loaded()
        return stamp(now) == self._stamp

    def close(self) -> None:
        """Close the file. Further calls do nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def changed_since_loaded() -> BundleError:
    """Return the error for weights that have changed since the file was opened."""
    return BundleError(
        f"{FILE}: was written to since the model was loaded; reload the model, "
        "and replace bundles by renaming new ones into place"
    )


def as_array(raw: Bytes, dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Return the bytes of a weight as a read-only array, without a copy."""
    array = raw.view(dtypes.numpy_dtype(dtype)).reshape(shape)
    array.flags.writeable = False
    return array


def content_digest(raw: Bytes) -> str:
    """Return the SHA-256, hexadecimal, of a weight's bytes, row-major, as the modules take it."""
    return hashlib.sha256(raw.data).hexdigest()


def tensor_keys(bundle: Bundle) -> list[TensorKey]:
    """Return the identity of each weight, in argument order. Only one weight is in memory at a time.

    Raises BundleError if the file is gone, has changed since the bundle was read, or does not match the manifest.
    """
    with closing(WeightsFile(bundle)) as file:
        digests = {index: content_digest(raw) for index, raw in file.read_all()}
    return [
        TensorKey(digests[index], weight.dtype, weight.shape) for index, weight in enumerate(bundle.weights)
    ]


def load_weights(bundle: Bundle) -> list[np.ndarray[Any, Any]]:
    """Load the weights in argument order, row-major, contiguous and read-only, as the modules take them.

    Raises BundleError if the file is gone, has changed since the bundle was read, or does not match the manifest.
    """
    with closing(WeightsFile(bundle)) as file:
        arrays = dict(file.read_all())
    return [
        as_array(arrays[index], weight.dtype, weight.shape) for index, weight in enumerate(bundle.weights)
    ]
