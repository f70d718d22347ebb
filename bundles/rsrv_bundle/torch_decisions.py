"""Values that a PyTorch module reads from tensors which depend on no input, so that a trace can repeat its decisions.

Python reads a value of a tensor for `if`, `int()`, `.item()` and sizes. In a trace, tensors have no values. If a tensor depends only on
weights and shapes, it has the same value in every request, and an eager run finds this value.

The statement `assert` may read values of inputs: a trace repeats a run in which the assertions hold, so a served model does not check
them.
"""

from __future__ import annotations

import ast
import functools
import linecache
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch._export.utils import _compiling_state_context
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
#: Operations that return a value of a tensor to Python.
READS = (aten._local_scalar_dense.default, aten.equal.default)
#: Operations that take only the shape of a tensor.
_SHAPED_LIKE = {
    aten.empty_like, aten.full_like, aten.ones_like, aten.zeros_like, aten.new_empty, aten.new_full, aten.new_ones, aten.new_zeros,
}  # fmt: skip
#: Operations with these tags may return a value of a tensor to Python, or a size that depends on values.
_EXPOSING_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
#: Functions that return the memory of a tensor to Python.
_EXPOSING = {torch.Tensor.__array__, torch.Tensor.data_ptr, torch.Tensor.numpy}
#: Folder of PyTorch. A `Place` does not contain lines of its files.
_TORCH = f"{Path(torch.__file__).parent}/"
_HERE = Path(__file__).parent

#: Lines of the module that lead to a read, and the read's number (from 1) among all reads from these lines.
Place = tuple[Any, ...]


def constant_reads(call: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> Mapping[Place, Any]:
    """Run `call(*inputs)` eagerly, and return the values that it reads from tensors which depend on no input, by place.

    The result also has the values that the statement `assert` reads, even if they depend on inputs. If Python reads another value
    that depends on inputs, its later decisions may depend on that value, so this read and all later reads are left out. The
    result is empty if the call fails. It may fail because a trace has zeros as inputs, which a module may refuse.
    """
    recorder = _Recorder(inputs)
    try:
        # Make the module believe that it is traced, because some modules then skip checks of inputs.
        with _compiling_state_context(), recorder, _Functions(recorder):
            call(*inputs)
    except Exception:  # noqa: BLE001 - the module may raise anything
        return {}
    return recorder.values


class _Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Base of the modes that handle the reads of a run. It computes the place of each read."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counts: Counter[Place] = Counter()

    def _place(self) -> Place:
        place = tuple((frame.f_code.co_filename, line) for frame, line in _module_frames(sys._getframe(2)))
        self._counts[place] += 1
        return (*place, self._counts[place])


def _module_frames(first: FrameType) -> Iterator[tuple[FrameType, int]]:
    """Yield the module's frames with their lines, innermost first. Frames of PyTorch and of this file are left out."""
    for frame, line in traceback.walk_stack(first):
        file = frame.f_code.co_filename
        if Path(file).parent == _HERE and file != __file__:
            return
        if not file.startswith(_TORCH) and file != __file__:
            yield frame, line


def _asserts(first: FrameType) -> bool:
    """Return whether the module's innermost frame executes a statement `assert`."""
    frame = next((frame for frame, _ in _module_frames(first)), None)
    if frame is None:
        return False
    line, _, column, _ = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    begin = (line or 0, column or 0)
    return any(start <= begin < end for start, end in _assertions(frame.f_code.co_filename))


@functools.cache
def _assertions(file: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return line and column of the start and end of each statement `assert` in a source file.

    The list is empty if there is no source.
    """
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return []
    return [
        ((node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0))
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert)
    ]


class _Recorder(_Reads):  # type: ignore[no-untyped-call]
    """Tracks the memory that depends on inputs or on random numbers, and records the values that are read from other memory."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        #: Memory that depends on inputs or random numbers. A weak reference keeps the identity of freed memory from being reused.
        self._dependent: set[StorageWeakRef] = set()
        self._add(inputs)
        #: True once Python may know a value that depends on inputs or random numbers.
        self.exposed = False
        self.values: dict[Place, Any] = {}

    def depends(self, values: Any) -> bool:
        """Return whether one of these tensors depends on inputs or random numbers."""
        return any(storage in self._dependent for storage in _storages(values))

    def _add(self, values: Any) -> None:
        self._dependent.update(_storages(values))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        random = torch.Tag.nondeterministic_seeded in func.tags
        if random or (func.overloadpacket not in _SHAPED_LIKE and self.depends((args, kwargs))):
            self._add(result)
            if func._schema.is_mutable:
                self._add((args, kwargs))
            self.exposed |= self._exposes(func, args) and not (func in READS and _asserts(sys._getframe(1)))
        if func in READS:
            place = self._place()
            if not self.exposed:
                self.values[place] = result
        return result

    def _exposes(self, func: Any, args: Any) -> bool:
        """Return whether Python may learn a value, or a size that depends on values, from the result."""
        if func is aten.index.Tensor:
            masks = [
                index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)
            ]
            return self.depends(masks)
        return not _EXPOSING_TAGS.isdisjoint(func.tags)


def _storages(values: Any) -> list[StorageWeakRef]:
    return [
        StorageWeakRef(value.untyped_storage())  # type: ignore[no-untyped-call]
        for value in pytree.tree_leaves(values)
        if isinstance(value, torch.Tensor)
    ]


class _Functions(TorchFunctionMode):
    """Handles functions that return values of a tensor to Python without an operation that the recorder sees."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.tolist:
            return _listed(args[0])
        if func in _EXPOSING and self._recorder.depends(args):
            self._recorder.exposed = True
        return func(*args, **(kwargs or {}))


def _listed(tensor: torch.Tensor) -> Any:
    """Return a tensor as a list. Like a trace, read each element separately."""
    return [_listed(part) for part in tensor] if tensor.ndim else tensor.item()


class Repeated(_Reads):  # type: ignore[no-untyped-call]
    """Answers reads with the values that an eager run read at the same places."""

    def __init__(self, values: Mapping[Place, Any]) -> None:
        super().__init__()
        self._values = values

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in READS and (place := self._place()) in self._values:
            return self._values[place]
        return func(*args, **(kwargs or {}))
