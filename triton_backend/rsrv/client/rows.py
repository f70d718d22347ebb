"""Divide a data set into requests of several rows. The rows are read one after another."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import numpy as np

from rsrv.client.errors import InputError
from rsrv.client.signature import Array, ModelSignature, as_array
from rsrv.extras import install_command

#: If the caller does not set the number of rows per request, a request has at most this many bytes. Larger requests are no
#: faster, and delay other clients.
REQUEST_BYTES: Final = 4 << 20


@dataclass(frozen=True)
class RowBatch:
    """The rows of a data set from `start` up to, but not including, `stop`. They become one request with the inputs `values`."""

    start: int
    stop: int
    values: Mapping[str, Any]


def batches(
    signature: ModelSignature, rows: Any, rows_per_request: int | None, first_row: int
) -> Iterator[RowBatch]:
    """Yield the requests of a data set. `AsyncClient.map` describes the arguments. Raises InputError if the rows do not fit the model."""
    grouping = RowGrouping(signature, rows_per_request)
    columns = columns_of(signature, rows)
    if columns is not None:
        return _column_batches(signature, columns, rows_per_request, first_row)
    if first_row:
        raise InputError("`first_row` needs rows in columns: arrays, a data frame or a file")
    return _row_batches(grouping, rows)


def columns_of(signature: ModelSignature, rows: Any) -> dict[str, Any] | None:
    """Return the columns of the data set by the names of the model's inputs, or None if `rows` is an iterable of rows.

    Raises InputError if a column is missing, or if the lengths of columns differ.
    """
    if isinstance(rows, (str, os.PathLike)):
        rows = read_columns(Path(rows))
    if isinstance(rows, np.ndarray):
        rows = {_only_input(signature): rows}
    if hasattr(rows, "columns") and hasattr(rows, "to_dict"):
        # A data frame of pandas or of a library like it.
        rows = {str(name): rows[name].to_numpy() for name in rows.columns}
    if not isinstance(rows, Mapping):
        return None
    named = signature.named(rows)
    if len({len(column) for column in named.values()}) > 1:
        counts = ", ".join(f"{name} has {len(column)}" for name, column in named.items())
        raise InputError(f"{signature.model}: the columns disagree on the number of rows: {counts}")
    return named


def _column_batches(
    signature: ModelSignature, columns: Mapping[str, Any], rows_per_request: int | None, first_row: int
) -> Iterator[RowBatch]:
    count = len(next(iter(columns.values())))
    if count and rows_per_request is None:
        rows_per_request = _fitting(
            signature, {name: _contents(column[:1]) for name, column in columns.items()}
        )
    for start in range(first_row, count, rows_per_request or 1):
        stop = min(start + (rows_per_request or 1), count)
        part = {name: _contents(column[start:stop]) for name, column in columns.items()}
        if not signature.max_rows:
            part = {name: value[0] for name, value in part.items()}
        yield RowBatch(start, stop, part)


class RowGrouping:
    """Groups single rows into requests. Consecutive rows with the same shapes share a request."""

    def __init__(self, signature: ModelSignature, rows_per_request: int | None) -> None:
        """Raises InputError if the model keeps state or streams, or if it does not take `rows_per_request` rows."""
        if signature.stateful or signature.streams:
            raise InputError(
                f"{signature.model} keeps state or streams its answers, so its rows are not independent requests"
            )
        most = max(1, signature.max_rows)
        if rows_per_request is not None and not 1 <= rows_per_request <= most:
            raise InputError(
                f"{signature.model}: rows_per_request is {rows_per_request}, but must be from 1 to {most}"
            )
        self._signature = signature
        self._most = rows_per_request
        #: Number of rows so far.
        self._count = 0
        #: Latest rows, which are not in a request yet.
        self._pending: list[dict[str, Array]] = []

    def add(self, row: Any) -> RowBatch | None:
        """Add a row. Return a request if this completes one, and otherwise None. Raises InputError."""
        arrays = _row(self._signature, row, self._count)
        if self._most is None:
            self._most = _fitting(self._signature, {name: array[None] for name, array in arrays.items()})
        batch = None
        if self._pending and _shapes(self._pending[0]) != _shapes(arrays):
            batch = self.flush()
        self._pending.append(arrays)
        self._count += 1
        return self.flush() if len(self._pending) == self._most else batch

    def flush(self) -> RowBatch | None:
        """Return a request with the rows that are not in a request yet, or None if there are no such rows."""
        rows, self._pending = self._pending, []
        if not rows:
            return None
        values = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        return RowBatch(self._count - len(rows), self._count, values if self._signature.max_rows else rows[0])


def _row_batches(grouping: RowGrouping, rows: Iterable[Any]) -> Iterator[RowBatch]:
    for row in rows:
        if batch := grouping.add(row):
            yield batch
    if batch := grouping.flush():
        yield batch


def _row(signature: ModelSignature, row: Any, number: int) -> dict[str, Array]:
    values = row if isinstance(row, Mapping) else {_only_input(signature): row}
    try:
        return {
            name: as_array(signature.inputs[name], _content(value), has_rows=False)
            for name, value in signature.named(values).items()
        }
    except InputError as error:
        raise InputError(f"row {number}: {error}") from None


def _contents(part: Any) -> Any:
    """Return a part of a column with the contents of files and pictures."""
    if len(part) and (isinstance(part[0], os.PathLike) or _is_picture(part[0])):
        return _objects([_content(value) for value in part])
    return part


def _content(value: Any) -> Any:
    """Return a value as the model takes it: the bytes of a file, or a picture as PNG."""
    if isinstance(value, os.PathLike):
        return Path(value).read_bytes()
    if _is_picture(value):
        buffer = BytesIO()
        value.save(buffer, "PNG")
        return buffer.getvalue()
    return value


def _is_picture(value: Any) -> bool:
    """Return whether a value is a picture of Pillow."""
    return hasattr(value, "save") and hasattr(value, "getbands")


def _only_input(signature: ModelSignature) -> str:
    needed = [name for name, spec in signature.inputs.items() if not spec.optional] or list(signature.inputs)
    if len(needed) != 1:
        raise InputError(
            f"{signature.model} has the inputs {', '.join(needed)}: name the columns after them, such as {{{needed[0]!r}: ...}}"
        )
    return needed[0]


def _fitting(signature: ModelSignature, row: Mapping[str, Any]) -> int:
    """Return how many rows like this one fit into a request."""
    return max(1, min(signature.max_rows, REQUEST_BYTES // max(1, size_of(row))))


def size_of(values: Mapping[str, Any]) -> int:
    """Return about how many bytes the inputs or outputs of a request take."""
    size = 0
    for array in map(np.asarray, values.values()):
        if array.dtype != object:
            size += array.nbytes
        else:
            size += sum(
                getattr(item, "nbytes", None) or len(item) if hasattr(item, "__len__") else 8
                for item in array.flat
            )
    return size


def _shapes(arrays: Mapping[str, Array]) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in arrays.items()}


def read_columns(path: Path) -> Any:
    """Return the columns of a file, or an array for the only input. Raises InputError, OSError.

    `path` is a .npy, .npz, .parquet or .txt file (a text per line), or a folder (a row per file, in the order of names).
    """
    if path.is_dir():
        return _objects(sorted(entry for entry in path.iterdir() if entry.is_file()))
    match path.suffix:
        case ".npy":
            # Map the file, so that a data set larger than the memory is read while it is sent.
            return np.load(path, mmap_mode="r", allow_pickle=False)
        case ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                return dict(arrays)
        case ".txt":
            # `splitlines` would also divide a line at form feeds and some other characters.
            *lines, last = path.read_text("utf-8").split("\n")
            return _objects([*lines, last] if last else lines)
        case ".parquet":
            return _parquet(path)
    raise InputError(f"{path}: expected a file .npy, .npz, .txt or .parquet, or a folder")


def _objects(values: Sequence[Any]) -> Array:
    array = np.empty(len(values), object)
    array[:] = values
    return array


def _parquet(path: Path) -> dict[str, Array]:
    table = pyarrow()[1].read_table(path)
    return {name: table[name].to_numpy(zero_copy_only=False) for name in table.column_names}


def pyarrow() -> tuple[Any, Any]:
    """Return pyarrow and its module parquet. Raises InputError if they are not installed."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise InputError(f"files .parquet need pyarrow; run {install_command('parquet')}") from None
    return pyarrow, parquet
