"""Conversion of a PyTorch module to a JAX function of weights and inputs, by torch.export at static shapes and torchax.

Only this module of the package imports torchax.
"""

from __future__ import annotations

import io
import logging
import operator
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch._higher_order_ops.effects import with_effects
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils import _pytree as pytree

from rsrv_bundle.calling import Results, caller
from rsrv_bundle.errors import BundleError, summary
from rsrv_bundle.torch_arrays import Array, tensors_of, to_numpy
from rsrv_bundle.torch_decisions import READS, Place, Repeated, constant_reads
from rsrv_bundle.torch_lowerings import LOWERINGS
from rsrv_bundle.torch_modules import unchanged, without_idle_conversions


@contextmanager
def _quiet() -> Iterator[None]:
    """Restore PyTorch's settings afterwards, and suppress its warnings, log and dumps of graphs."""
    disabled = logging.root.manager.disable
    logging.disable()
    fast = torch.backends.mha.get_fastpath_enabled()
    # Fused attention is one operation, which torchax does not decompose.
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with warnings.catch_warnings(), torch.no_grad(), redirect_stderr(io.StringIO()):
            # Warnings of PyTorch and torchax are about their internals. Problems of the user's module are errors.
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        logging.disable(disabled)


with _quiet():
    from torchax import decompositions
    from torchax.export import JaxInterpreter
    from torchax.ops import jaten, ops_registry  # noqa: F401 - jaten fills the registry

#: Folders whose lines are left out of error messages, because they do not help the model's author.
_TORCH, _HERE = (Path(file).resolve().parent for file in (torch.__file__, __file__))
#: Assertions, which have no result. PyTorch wraps `_linalg_check_errors` in `with_effects`, which keeps the order with tokens.
_ASSERTIONS = (torch.ops.aten._linalg_check_errors.default, torch.ops.aten._assert_async.msg)
_NUMBER_ASSERTIONS = (
    torch.ops.aten._assert_scalar.default,
    torch.ops.aten.sym_constrain_range.default,
    torch.ops.aten.sym_constrain_range_for_size.default,
)
_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)
#: Prefix of all names of the module, because it is traced inside another module.
_PREFIX = "module."
#: Memory, offset, shape and strides of a tensor, and whether it is conjugate. Tensors with equal identities share one weight.
Identity = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Pairs:
    """A complex weight, which is stored as pairs of real numbers."""

    name: str


#: Value of a graph's argument: a weight's name, a complex weight, a constant array, an input's position, or None if it is unused.
Argument = str | Pairs | Array | int | None


@dataclass(frozen=True, slots=True)
class TracedModule:
    """A module that was traced at one set of input shapes."""

    graph: Any
    arguments: tuple[Argument, ...]
    #: Structure of the results. Its values are not used.
    results: Results
    lowerings: Mapping[str, Callable[..., Any]]

    def __call__(self, weights: Mapping[str, Any], inputs: Sequence[Any]) -> Results:
        values = [_value(each, weights, inputs) for each in self.arguments]
        # Skip the first results. They are the tokens of `with_effects`, not results of the module.
        results = _Interpreter(self.graph, self.lowerings).run(*values, enable_io_processing=False)[
            -len(self.results.values) :
        ]
        arrays = iter(results)
        return self.results.convert(lambda *_: next(arrays))


def _value(argument: Argument, weights: Mapping[str, Any], inputs: Sequence[Any]) -> Any:
    match argument:
        case str():
            return weights[argument]
        case Pairs(name):
            return jax.lax.complex(weights[name][..., 0], weights[name][..., 1])
        case int():
            return inputs[argument]
        case None:
            return None
        case _:
            return jnp.asarray(argument)


class TracedModules:
    """`module(**inputs)` as `fn(weights, **inputs)`, traced once for each set of shapes."""

    def __init__(
        self,
        module: torch.nn.Module,
        inputs: Mapping[str, torch.dtype],
        lowerings: Mapping[Any, Callable[..., Any]],
    ) -> None:
        """`inputs` are element types by name. `lowerings` are JAX functions by operation, or by its name."""
        self._module = module
        self._inputs = dict(inputs)
        self._lowerings = {**LOWERINGS, **{_name(op): lowering for op, lowering in lowerings.items()}}
        #: First name of each tensor, by its identity.
        self._names: dict[Identity, str] = {}
        for name, tensor in chain(
            module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
        ):
            self._names.setdefault(_identity(name, tensor), name)
        self._tensors: dict[str, torch.Tensor] = {}
        self._programs: dict[tuple[tuple[int, ...], ...], TracedModule] = {}

    def at(self, shapes: Sequence[tuple[int, ...]]) -> TracedModule:
        """Return the module at these input shapes. Raises BundleError."""
        key = tuple(shapes)
        if key not in self._programs:
            self._programs[key] = self._trace(key)
        return self._programs[key]

    def weights(self) -> dict[str, Any]:
        """Return the weights that the traced modules use, by name."""
        return {name: to_numpy(name, tensor) for name, tensor in sorted(self._tensors.items())}

    def __call__(self, weights: Mapping[str, Any], **inputs: Any) -> Results:
        arrays = [inputs[name] for name in self._inputs]
        return self.at([array.shape for array in arrays])(weights, arrays)

    def _trace(self, shapes: tuple[tuple[int, ...], ...]) -> TracedModule:
        noted: list[Results] = []
        zeros = tuple(
            torch.zeros(shape, dtype=dtype)
            for shape, dtype in zip(shapes, self._inputs.values(), strict=True)
        )
        with _quiet():
            try:
                exported = self._exported(zeros, noted.append)
            except BundleError:
                raise
            except Exception as e:
                raise BundleError(_untraceable(e, list(zip(self._inputs, shapes, strict=True)))) from e
        _check(exported, tuple(self._inputs), self._lowerings)
        arguments = tuple(self._arguments(exported))
        return TracedModule(exported.graph_module, arguments, noted[-1], self._lowerings)

    def _exported(self, zeros: tuple[Any, ...], note: Callable[[Results], None]) -> Any:
        """Trace the module with torch.export. Decompose operations for which neither torchax nor `self._lowerings` has a function."""
        served = _Served(self._module, tuple(self._inputs), note)
        exported = _traced(served, zeros)
        for node in exported.graph.nodes:
            # Replace views by reshapes, because a decomposition may return other strides than the kernel that a view expects.
            if node.target in _VIEWS:
                node.target = torch.ops.aten.reshape.default
            if node.target is torch.ops.aten.as_strided.default:
                _stride_in_memory_order(node)
        exported.graph_module.recompile()
        table = _decompositions()
        return exported.run_decompositions(
            {op: way for op, way in table.items() if _lowering(op, self._lowerings) is None}
        )

    def _arguments(self, exported: Any) -> Iterator[Argument]:
        position = 0
        nodes = [node for node in exported.graph.nodes if node.op == "placeholder"]
        for node, spec in zip(nodes, exported.graph_signature.input_specs, strict=True):
            if spec.kind is InputKind.USER_INPUT:
                yield position
                position += 1
            elif not node.users or spec.kind is InputKind.TOKEN:
                yield None
            elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
                state = exported.constants if spec.target in exported.constants else exported.state_dict
                yield self._weight(spec, state[spec.target])
            else:
                raise BundleError(f"module: {spec.target}: is not a tensor; only tensors can be weights")

    def _weight(self, spec: Any, tensor: torch.Tensor) -> Argument:
        name = spec.target.removeprefix(_PREFIX)
        if spec.kind is InputKind.CONSTANT_TENSOR:
            try:
                tensor = operator.attrgetter(name)(self._module)
            except AttributeError:
                # `forward` creates this tensor, because the module has none of this name. It becomes a constant.
                return tensor.numpy() if tensor.is_complex() else to_numpy(name, tensor)
        known = self._names.setdefault(_identity(name, tensor), name)
        if tensor.is_complex():
            self._tensors.setdefault(known, torch.view_as_real(tensor.detach().resolve_conj()))
            return Pairs(known)
        self._tensors.setdefault(known, tensor)
        return known


def _traced(served: _Served, zeros: tuple[Any, ...]) -> Any:
    """Trace a module with torch.export.

    If its Python code depends on values of tensors, trace it again, and give Python the values that depend on no input.
    """

    def trace() -> Any:
        with unchanged(served.module), without_idle_conversions():
            return _without_idle_reads(torch.export.export(served, zeros))

    def read() -> Mapping[Place, Any]:
        with unchanged(served.module), torch.compiler.set_stance("force_eager"):
            return constant_reads(served, zeros)

    try:
        exported = trace()
    except Exception:
        served.reads = read()
        if not served.reads:
            raise
        return trace()
    if any(map(_is_ruled_by_values, exported.graph.nodes)):
        served.reads = read()
        if served.reads:
            return trace()
    return exported


def _without_idle_reads(exported: Any) -> Any:
    """Remove assertions about numbers, and the numbers that nothing else uses."""
    for node in reversed(exported.graph.nodes):
        number = isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool)
        unused = not node.users and (number or node.target in (torch.ops.aten.item.default, *READS))
        if unused or node.target in _NUMBER_ASSERTIONS:
            exported.graph.erase_node(node)
    return exported


def _stride_in_memory_order(node: Any) -> None:
    """Permute the argument of as_strided to the order of its memory, because arrays of JAX have no strides.

    Raises BundleError if as_strided may read memory outside of the tensor, or if the tensor has gaps.
    """
    source, size, stride, *offset = node.args
    tensor = source.meta["val"]
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    first = offset[0] - tensor.storage_offset() if offset and offset[0] is not None else 0
    last = first + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    if not tensor.permute(order).is_contiguous() or first < 0 or last >= tensor.numel():
        raise BundleError(
            f"module: {_where(node)}: {node.target} reads memory outside of a tensor, or a tensor with gaps; call contiguous()"
            " on the tensor before"
        )
    with node.graph.inserting_before(node):
        permuted = node.graph.call_function(torch.ops.aten.permute.default, (source, order))
        ordered = node.graph.call_function(
            torch.ops.aten.clone.default, (permuted,), {"memory_format": torch.contiguous_format}
        )
    node.args = (ordered, size, stride, first)


def _decompositions() -> Any:
    """Return PyTorch's decompositions, and torchax's decompositions of other operations. torchax.export uses them in two passes."""
    table = torch.export.default_decompositions()
    for target, way in decompositions.DECOMPOSITIONS.items():
        if target not in table:
            table[target] = way
    return table


def _identity(name: str, tensor: torch.Tensor) -> Identity:
    if not tensor.numel():
        return (name,)
    return (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.is_conj())


def _name(op: Any) -> str:
    """Return the name of an operation.

    `op` is an overload, a packet of overloads, an operation of torch.library, or a name.
    """
    if not isinstance(op, str | torch._ops.OpOverload):
        op = getattr(op, "_qualified_op_name", None) or op._qualname
    return str(op).replace("::", ".")


class _Served(torch.nn.Module):
    """A module with positional inputs and a flat tuple of results, so that later steps need no names."""

    def __init__(
        self,
        module: torch.nn.Module,
        names: tuple[str, ...],
        note: Callable[[Results], None],
    ) -> None:
        """Wrap `module`. `forward` calls `note` with the structure of the results.

        `note` is a function, because tracing resets attributes that `forward` sets.
        """
        super().__init__()
        self.module = module
        self.names = names
        self.call = caller(module, names, like=module.forward)
        self.note = note
        self.training = False
        #: Values that the module reads from tensors which depend on no input.
        self.reads: Mapping[Place, Any] = {}

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with Repeated(self.reads) if self.reads else nullcontext():
            results = tensors_of(self.call(dict(zip(self.names, tensors, strict=True))))
        self.note(results.convert(lambda *_: None))
        return results.values


class _Interpreter(JaxInterpreter):  # type: ignore[misc]
    """torchax's interpreter, with PyTorch's element type for each value."""

    def __init__(self, graph: Any, lowerings: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__(graph)
        self.lowerings = lowerings
        # Prevent torchax from appending its own text to an error.
        self.extra_traceback = False

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Drop assertions. If one fails, PyTorch raises an error, but a served model returns NaN or a meaningless number.
        if target is with_effects:
            return None, None
        if target in _ASSERTIONS:
            return None
        # Convert the immutable lists of fx, because torchax changes lists.
        args, kwargs = _mutable(args), _mutable(kwargs)
        lowering = _lowering(target, self.lowerings)
        return super().call_function(target, args, kwargs) if lowering is None else lowering(*args, **kwargs)

    def run_node(self, node: Any) -> Any:
        try:
            value = super().run_node(node)
        except Exception as e:
            raise BundleError(f"module: {_where(node)}: torchax fails at {node.target}: {summary(e)}") from e
        meta = node.meta.get("val")
        if isinstance(meta, torch.Tensor) and hasattr(value, "dtype"):
            # Convert the value, because constants of jax may be wider than PyTorch's constants.
            dtype = jnp.dtype(str(meta.dtype).removeprefix("torch."))
            return value if value.dtype == dtype else jnp.asarray(value).astype(dtype)
        return value


def _mutable(value: Any) -> Any:
    """Return plain lists, tuples and mappings in place of fx's own."""
    if isinstance(value, dict):
        return {key: _mutable(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_mutable(part) for part in value]
    return tuple(map(_mutable, value)) if type(value) is tuple else value


def _lowering(target: Any, lowerings: Mapping[str, Callable[..., Any]]) -> Callable[..., Any] | None:
    """Return our lowering of an operation's overload, or else our lowering of all its overloads, or None."""
    if not isinstance(target, torch._ops.OpOverload):
        return None
    return lowerings.get(_name(target)) or lowerings.get(_name(target.overloadpacket))


def _check(exported: Any, inputs: Sequence[str], lowerings: Mapping[str, Callable[..., Any]]) -> None:
    """Raise BundleError with a line for each operation that a served model cannot do."""
    problems = []
    names = dict(zip(exported.graph_signature.user_inputs, inputs, strict=True))
    for spec in exported.graph_signature.output_specs:
        if spec.kind not in (OutputKind.USER_OUTPUT, OutputKind.TOKEN):
            target = names.get(spec.target) or str(spec.target).removeprefix(_PREFIX)
            problems.append(f"module: {target}: forward changes it, and requests may not touch each other")
    for node in exported.graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem or _is_assertion(node):
            continue
        # The operation of a recurrent network has this tag because of its dropout, but our lowering draws no random numbers.
        random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if random and _lowering(node.target, lowerings) is None:
            problems.append(
                f"module: {_where(node)}: {node.target} draws random numbers, and a served model must not; if it is"
                " dropout, let it follow self.training"
            )
        elif _is_ruled_by_values(node):
            problems.append(
                f"module: {_where(node)}: {node.target} makes what is computed depend on a tensor's values; a module's"
                " shapes and decisions are fixed when it is exported, so keep the tensor, e.g. with torch.where"
            )
        elif not _known(node.target, lowerings):
            problems.append(
                f"module: {_where(node)}: torchax has no {node.target} for jax; write this line with other operations, or"
                " give a JAX function for the operation with lowerings="
            )
    if problems:
        raise BundleError(list(dict.fromkeys(problems)))


def _is_ruled_by_values(node: Any) -> bool:
    """Return whether the operation makes a size or a number from a tensor's values, so that only a request determines it."""
    # Report only the operation that makes such a size, not arithmetic on the size or operations on tensors that have it.
    made = _symbols(node) - set().union(*map(_symbols, node.all_input_nodes))
    return isinstance(node.target, torch._ops.OpOverload) and bool(made)


def _symbols(node: Any) -> set[Any]:
    """Return the symbols in the sizes and the numbers of a node's results."""
    results = pytree.tree_leaves(node.meta.get("val"))
    sizes = [size for each in results if isinstance(each, torch.Tensor) for size in each.shape]
    numbers = [
        each for each in (*results, *sizes) if isinstance(each, torch.SymInt | torch.SymFloat | torch.SymBool)
    ]
    return {symbol for number in numbers for symbol in number.node.expr.free_symbols}


def _is_assertion(node: Any) -> bool:
    """Return whether the operation is an assertion, for example that a matrix could be inverted."""
    return (node.args[1] if node.target is with_effects else node.target) in _ASSERTIONS


def _known(target: Any, lowerings: Mapping[str, Callable[..., Any]]) -> bool:
    if _lowering(target, lowerings) is not None:
        return True
    if not isinstance(target, torch._ops.OpOverload):
        # Python's own arithmetic works. Operations that take functions do not, because jax has other versions of them.
        return not isinstance(target, torch._ops.HigherOrderOperator)
    registry = ops_registry.all_aten_ops
    operator = registry.get(target) or registry.get(target.overloadpacket)
    return operator is not None and operator.is_jax_function


def _where(node: Any) -> str:
    """Return the line of the user's program that a node came from, and the part of the module."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    frames = [(file, line) for file, line in frames if _is_users(file)]
    parts = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    part = re.sub(r"^(L\['self'\]\.)?module\.?", "", parts[-1]) if parts else ""
    words = [f"{Path(frames[-1][0]).name}:{frames[-1][1]}"] if frames else []
    words += [f"in {part}"] if part else []
    return " ".join(words) or "forward"


def _is_users(file: str) -> bool:
    path = Path(file).resolve()
    return path.is_file() and not {_TORCH, _HERE}.intersection(path.parents)


def _untraceable(error: Exception, inputs: Sequence[tuple[str, tuple[int, ...]]]) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}: " if frames else ""
    if isinstance(error, GuardOnDataDependentSymNode):
        return (
            f"module: {where}forward decides by a tensor's values (if, while, .item()), and a module's decisions are fixed"
            " when it is exported; compute both sides and choose with torch.where, or leave out an input that decides and that"
            " is the same in all requests"
        )
    if isinstance(error, DynamicOutputShapeException) or "FakeTensor" in summary(error):
        return (
            f"module: {where}forward makes a size of a tensor's values, such as lengths ({summary(error)}), and a module's"
            " sizes are fixed when it is exported; pad to fixed sizes, and mask what is padding"
        )
    shapes = ", ".join(f"{name} {list(shape)}" for name, shape in inputs)
    return (
        f"module: {where}torch.export cannot trace it with {shapes} ({summary(error)}), though the module itself runs; see"
        " docs/coming-from.md, If it does not export"
    )
