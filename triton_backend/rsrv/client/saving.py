"""The answers to a data set on disk. After an interruption, the written answers are kept, and the job can be continued.

Answers are written to the file OUT.partial in the order of their rows. OUT is written once all answers are there.
"""

import fcntl
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

import numpy as np

from rsrv.client.client import Answered
from rsrv.client.errors import InputError
from rsrv.client.rows import pyarrow
from rsrv.client.signature import Array, ModelSignature, ModelTensor, from_bytes, to_bytes

#: Number of rows of a row group in a .parquet file.
GROUP_ROWS: Final = 1 << 16


class PartialFile:
    """The file with the answers so far. As a context manager, it closes the file."""

    def __init__(
        self, path: Path, job: Mapping[str, Any], outputs: Sequence[ModelTensor], *, resume: bool
    ) -> None:
        """Open the file for a new job, or to continue this job.

        Raises OSError, and InputError if the file belongs to another job or is in use.
        """
        self.path = path
        #: Number of rows that have answers.
        self.rows = 0
        self._outputs = outputs
        if path.exists() and not resume:
            raise InputError(
                f"{path} has the answers of an interrupted run: continue it with --resume, or remove the file"
            )
        self._file = path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._begin(job)
        except BlockingIOError:
            self._file.close()
            raise InputError(f"{path}: another process is writing this file") from None
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _begin(self, job: Mapping[str, Any]) -> None:
        """Check that the file belongs to this job. Remove an incomplete last record."""
        self._file.seek(0)
        first, begin = self._file.readline(), json.dumps(job).encode() + b"\n"
        if first == begin:
            end = len(begin)
            for stop, _ in self.answers():
                self.rows, end = stop, self._file.tell()
            self._file.truncate(end)
        elif begin.startswith(first):
            self._file.truncate(0)
            self._file.write(begin)
            self._file.flush()
        else:
            try:
                stored = dict(json.loads(first))
            except (ValueError, TypeError):
                raise InputError(
                    f"{self.path} was not written by rsrv map: move this file, or write to another file"
                ) from None
            changed_key = next((key for key in job if stored.get(key) != job[key]), "version of rsrv")
            raise InputError(
                f"{self.path} belongs to another run, whose {changed_key} differs; remove the file to start from the first row"
            )

    def append(self, answered: Answered) -> None:
        """Write the answer to the next rows."""
        arrays, contents = [], []
        for spec in self._outputs:
            array = answered.outputs[spec.name]
            contents.append(to_bytes(spec, array))
            arrays.append((array.shape, len(contents[-1])))
        line = json.dumps([answered.stop, arrays]).encode() + b"\n"
        self._file.write(b"".join((line, *contents)))
        self._file.flush()
        self.rows = answered.stop

    def answers(self) -> Iterator[tuple[int, dict[str, Array]]]:
        """Yield the answers in the order of their rows, each with the number of the next row. End at an incomplete record."""
        self._file.seek(0)
        self._file.readline()
        while (line := self._file.readline()).endswith(b"\n"):
            try:
                stop, arrays = json.loads(line)
                contents = [self._file.read(size) for _, size in arrays]
            except (ValueError, TypeError):
                # The machine died before it wrote this record completely.
                return
            if any(len(content) < size for content, (_, size) in zip(contents, arrays, strict=True)):
                return
            yield (
                stop,
                {
                    spec.name: from_bytes(spec.datatype, shape, content)
                    for spec, (shape, _), content in zip(self._outputs, arrays, contents, strict=True)
                },
            )


def outputs_of(signature: ModelSignature, out: Path, names: Sequence[str]) -> list[ModelTensor]:
    """Return the outputs to write to the file. Raises InputError if the format cannot hold them."""
    for name in names:
        if name not in signature.outputs:
            raise InputError(
                f"{signature.model} has no output {name!r}; its outputs: {', '.join(signature.outputs)}"
            )
    chosen = [signature.outputs[name] for name in names or signature.outputs]
    match out.suffix:
        case ".npy":
            if len(chosen) > 1:
                known = ", ".join(spec.name for spec in chosen)
                raise InputError(
                    f"{out} holds one output; choose one with --output: {known}; or write .parquet"
                )
            if chosen[0].datatype == "BYTES":
                raise InputError(
                    f"{out}: the output {chosen[0].name} has strings, which a file .npy cannot hold; write .parquet"
                )
        case ".parquet":
            pyarrow()
        case _:
            raise InputError(f"{out}: expected a file .npy or .parquet")
    return chosen


def write(partial: PartialFile, out: Path) -> None:
    """Write all answers to the file `out`, and remove the partial file. Raises InputError, OSError."""
    unfinished = out.with_name(f"{out.name}.unfinished")
    (_write_parquet if out.suffix == ".parquet" else _write_npy)(partial, unfinished)
    unfinished.replace(out)
    partial.path.unlink()


def _write_npy(partial: PartialFile, path: Path) -> None:
    target: Any = np.empty(0)
    start = 0
    for stop, answer in partial.answers():
        (array,) = map(_plain, answer.values())
        if start == 0:
            shape = (partial.rows, *array.shape[1:])
            target = np.lib.format.open_memmap(path, mode="w+", dtype=array.dtype, shape=shape)
        if target.shape[1:] != array.shape[1:]:
            raise InputError(
                "rows have several shapes, which a file .npy cannot hold; write .parquet, with --resume"
            )
        target[start:stop] = array
        start = stop
    if start == 0:
        with path.open("wb") as file:
            np.save(file, target)
    else:
        target.flush()


def _write_parquet(partial: PartialFile, path: Path) -> None:
    arrow, parquet = pyarrow()
    writer: Any = None
    group: list[Any] = []
    try:
        for _, answer in partial.answers():
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


def _plain(array: Array) -> Array:
    """Convert bfloat16 to float32, because none of the file formats has bfloat16."""
    return array.astype(np.float32) if array.dtype.kind == "V" else array


def _column(arrow: Any, array: Array) -> Any:
    """Return a column of numbers or strings if each row has one value, else a column of lists."""
    flat = array.reshape(-1)
    if array.dtype == object:
        try:
            column = arrow.array([value.decode() for value in flat], arrow.string())
        except UnicodeDecodeError:
            column = arrow.array(list(flat), arrow.binary())
    else:
        column = arrow.array(_plain(flat))
    sizes = () if array.shape[1:] == (1,) else array.shape[1:]
    for axis in range(len(sizes) - 1, -1, -1):
        lists = math.prod(array.shape[: axis + 1])
        offsets = np.arange(lists + 1, dtype=np.int32) * sizes[axis]
        column = arrow.ListArray.from_arrays(arrow.array(offsets), column)
    return column
