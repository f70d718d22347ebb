"""The answers to a data set on disk. After an interruption, the written answers stay, and the job can go on.

Answers are written to the file OUT.partial in the order in which they arrive. OUT is written once all answers are there.
"""

import fcntl
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import numpy as np
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor

from rsrv.client.client import Answered
from rsrv.client.errors import InputError
from rsrv.client.rows import pyarrow
from rsrv.client.signature import Array, ModelSignature

#: Rows of a row group of a .parquet file.
GROUP_ROWS: Final = 1 << 16


class _StoredAnswer(NamedTuple):
    """Place of an answer in the file."""

    start: int
    stop: int
    #: Byte at which the arrays begin.
    at: int
    #: Name, type, shape and size of each array.
    arrays: Sequence[tuple[str, str, Sequence[int], int]]


class PartialFile:
    """The file with the answers so far. As a context manager, it closes the file."""

    def __init__(self, path: Path, job: Mapping[str, Any], *, resume: bool) -> None:
        """Open the file for a new job, or to continue this job.

        Raises OSError, and InputError if the file belongs to another job or is in use.
        """
        self.path = path
        self._records: list[_StoredAnswer] = []
        if path.exists() and not resume:
            raise InputError(
                f"{path} has the answers of a run that was interrupted: go on with --resume, or remove the file"
            )
        self._file = path.open("r+b" if path.exists() else "x+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read(job)
        except BlockingIOError:
            self._file.close()
            raise InputError(f"{path}: another process is writing it") from None
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _read(self, job: Mapping[str, Any]) -> None:
        """Find the rows that have answers. Remove an incomplete last record."""
        end = self._file.seek(0, 2)
        self._file.seek(0)
        first, begin = self._file.readline(), json.dumps(job).encode() + b"\n"
        if first != begin and begin.startswith(first):
            self._file.seek(0)
            self._file.truncate()
            self._file.write(begin)
            self._file.flush()
            return
        try:
            stored = dict(json.loads(first))
        except (ValueError, TypeError):
            raise InputError(
                f"{self.path} is no file of rsrv map: move it, or write to another file"
            ) from None
        if stored != job:
            changed_key = next(key for key in job if stored.get(key) != job[key])
            raise InputError(
                f"{self.path} is of another run: its {changed_key} differs; remove it to start from the first row"
            )
        whole = self._file.tell()
        while (line := self._file.readline()).endswith(b"\n"):
            try:
                start, stop, arrays = json.loads(line)
                next_at = self._file.tell() + sum(size for *_, size in arrays)
            except (ValueError, TypeError):
                # The machine died before it wrote this record completely.
                break
            record = _StoredAnswer(start, stop, self._file.tell(), arrays)
            if next_at > end:
                break
            self._records.append(record)
            whole = self._file.seek(next_at)
        self._file.seek(whole)
        self._file.truncate()

    def append(self, answered: Answered, outputs: Sequence[str]) -> None:
        """Write an answer."""
        arrays, contents = [], []
        for name in outputs:
            array = answered.outputs[name] if answered.has_rows else answered.outputs[name][None]
            kind, content = _encoded(array)
            arrays.append((name, kind, array.shape, len(content)))
            contents.append(content)
        line = json.dumps([answered.start, answered.stop, arrays]).encode() + b"\n"
        self._records.append(
            _StoredAnswer(answered.start, answered.stop, self._file.tell() + len(line), arrays)
        )
        self._file.write(b"".join((line, *contents)))
        self._file.flush()

    def missing(self, rows: int) -> list[tuple[int, int]]:
        """Return the ranges of rows without an answer."""
        gaps, at = [], 0
        for record in sorted(self._records):
            if record.start > at:
                gaps.append((at, record.start))
            at = record.stop
        return [*gaps, (at, rows)] if at < rows else gaps

    def answers(self) -> Iterator[dict[str, Array]]:
        """Yield the answers in the order of their rows."""
        for record in sorted(self._records):
            self._file.seek(record.at)
            yield {
                name: _decoded(kind, shape, self._file.read(size))
                for name, kind, shape, size in record.arrays
            }


def _encoded(array: Array) -> tuple[str, bytes]:
    """Return an array's type and bytes. Types that numpy's files cannot hold become float32."""
    if array.dtype == object:
        return "BYTES", bytes(serialize_byte_tensor(array).item()) if array.size else b""
    if array.dtype.kind == "V":
        array = array.astype(np.float32)
    return array.dtype.str, array.tobytes()


def _decoded(kind: str, shape: Sequence[int], content: bytes) -> Array:
    array = deserialize_bytes_tensor(content) if kind == "BYTES" else np.frombuffer(content, kind)
    return array.reshape(shape)


def outputs_of(signature: ModelSignature, out: Path, names: Sequence[str]) -> list[str]:
    """Return the outputs to write to the file. Raises InputError if the format cannot hold them."""
    for name in names:
        if name not in signature.outputs:
            raise InputError(
                f"{signature.model} has no output {name!r}; its outputs: {', '.join(signature.outputs)}"
            )
    chosen = list(names or signature.outputs)
    match out.suffix:
        case ".npy" if len(chosen) > 1:
            raise InputError(
                f"{out} holds one output; choose one with --output: {', '.join(chosen)}; or write .parquet"
            )
        case ".npy" if signature.outputs[chosen[0]].datatype == "BYTES":
            raise InputError(
                f"{out}: the output {chosen[0]} has strings, which a file .npy cannot hold; write .parquet"
            )
        case ".parquet":
            pyarrow()
        case ".npy":
            pass
        case _:
            raise InputError(f"{out}: expected a file .npy or .parquet")
    return chosen


def write(partial: PartialFile, out: Path, rows: int) -> None:
    """Write all answers to the file `out`, and remove the partial file. Raises InputError, OSError."""
    unfinished = out.with_name(f"{out.name}.unfinished")
    (_write_parquet if out.suffix == ".parquet" else _write_npy)(partial, unfinished, rows)
    unfinished.replace(out)
    partial.path.unlink()


def _write_npy(partial: PartialFile, path: Path, rows: int) -> None:
    target: Any = None
    at = 0
    for answer in partial.answers():
        (array,) = answer.values()
        if target is None:
            shape = (rows, *array.shape[1:])
            target = np.lib.format.open_memmap(path, mode="w+", dtype=array.dtype, shape=shape)
        if target.shape[1:] != array.shape[1:]:
            raise InputError(
                "rows have several shapes, which a file .npy cannot hold; write .parquet, with --resume"
            )
        target[at : at + len(array)] = array
        at += len(array)
    if target is None:
        with path.open("wb") as file:
            np.save(file, np.empty(0))
    else:
        target.flush()


def _write_parquet(partial: PartialFile, path: Path, rows: int) -> None:
    arrow, parquet = pyarrow()
    writer: Any = None
    group: list[Any] = []
    try:
        for answer in partial.answers():
            group.append(arrow.table({name: _column(arrow, array) for name, array in answer.items()}))
            if writer is None:
                writer = parquet.ParquetWriter(path, group[0].schema)
            if sum(map(len, group)) >= GROUP_ROWS:
                writer.write_table(arrow.concat_tables(group))
                group.clear()
        if writer is None:
            writer = parquet.ParquetWriter(path, arrow.schema([]))
        if group:
            writer.write_table(arrow.concat_tables(group))
    finally:
        if writer is not None:
            writer.close()


def _column(arrow: Any, array: Array) -> Any:
    """Return a column of numbers or strings if each row has one value, else a column of lists."""
    flat = array.reshape(-1)
    if array.dtype == object:
        try:
            column = arrow.array([value.decode() for value in flat], arrow.string())
        except UnicodeDecodeError:
            column = arrow.array(list(flat), arrow.binary())
    else:
        column = arrow.array(flat)
    sizes = () if array.shape[1:] == (1,) else array.shape[1:]
    for axis in range(len(sizes) - 1, -1, -1):
        lists = int(np.prod(array.shape[: axis + 1]))
        offsets = np.arange(lists + 1, dtype=np.int32) * sizes[axis]
        column = arrow.ListArray.from_arrays(arrow.array(offsets), column)
    return column
