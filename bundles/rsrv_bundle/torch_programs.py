"""A PyTorch module as a JAX function of weights and inputs: torch.export at static shapes, then torchax.

The one file that knows torchax.
"""

from __future__ import annotations

import operator
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import torch
from torch._higher_order_ops.effects import with_effects
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from rsrv_bundle.calling import Results, caller
from rsrv_bundle.errors import BundleError
from rsrv_bundle.torch_arrays import Array, to_numpy


@contextmanager
def _quiet() -> Iterator[None]:
    """Leaves PyTorch's settings, and its users' screens, as they are."""
    fast = torch.backends.mha.get_fastpath_enabled()
    # Fused attention is one operation, which torchax does not take apart.
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            # About their own insides; what is wrong with a module is an error.
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


with _quiet():
    from torchax import decompositions
    from torchax.export import JaxInterpreter
    from torchax.ops import jaten, ops_registry  # noqa: F401 - jaten fills the registry

#: Whose lines say nothing to somebody with a model.
_TORCH, _HERE = (Path(file).resolve().parent for file in (torch.__file__, __file__))
#: They have no result. The first PyTorch keeps in order by tokens.
_ASSERTIONS = (torch.ops.aten._linalg_check_errors.default, torch.ops.aten._assert_async.msg)
#: Before the names of all that belongs to the module, which is traced inside another.
_PREFIX = "module."
#: A tensor by what it is: memory, and how it is looked at. Those equal in all share their weight.
Identity = tuple[Any, ...]
#: What an argument of a graph gets: a weight, by its name; an array that is none; an input, by its position; None: unused.
Argument = str | Array | int | None


@dataclass(frozen=True, slots=True)
class TracedModule:
    """The module at one set of input shapes."""

    graph: Any
    arguments: tuple[Argument, ...]
    #: The structure of the results; its values are not used.
    results: Results

    def __call__(self, weights: Mapping[str, Any], inputs: Sequence[Any]) -> Results:
        values = [_value(each, weights, inputs) for each in self.arguments]
        # Tokens come first.
        found = _Interpreter(self.graph).run(*values, enable_io_processing=False)[-len(self.results.values) :]
        arrays = iter(found)
        return self.results.convert(lambda *_: next(arrays))


def _value(argument: Argument, weights: Mapping[str, Any], inputs: Sequence[Any]) -> Any:
    match argument:
        case str():
            return weights[argument]
        case int():
            return inputs[argument]
        case None:
            return None
        case _:
            return jnp.asarray(argument)


class TracedModules:
    """`module(**inputs)` as `fn(weights, **inputs)`, traced anew for each set of shapes, and once."""

    def __init__(self, module: torch.nn.Module, inputs: Mapping[str, torch.dtype]) -> None:
        """inputs: their names and element types. Raises BundleError for names that the module does not take."""
        self._module = module
        self._inputs = dict(inputs)
        #: Of several names for one tensor the first.
        self._names: dict[Identity, str] = {}
        for name, tensor in chain(
            module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
        ):
            self._names.setdefault(_identity(name, tensor), name)
        self._tensors: dict[str, torch.Tensor] = {}
        self._programs: dict[tuple[tuple[int, ...], ...], TracedModule] = {}

    def at(self, shapes: Sequence[tuple[int, ...]]) -> TracedModule:
        """The module at these input shapes. Raises BundleError."""
        key = tuple(shapes)
        if key not in self._programs:
            self._programs[key] = self._trace(key)
        return self._programs[key]

    def weights(self) -> dict[str, Any]:
        """All that the programs up to now use, by name."""
        return {name: to_numpy(name, tensor) for name, tensor in sorted(self._tensors.items())}

    def __call__(self, weights: Mapping[str, Any], **inputs: Any) -> Results:
        arrays = [inputs[name] for name in self._inputs]
        return self.at([array.shape for array in arrays])(weights, arrays)

    def _trace(self, shapes: tuple[tuple[int, ...], ...]) -> TracedModule:
        noted: list[Results] = []
        served = _Served(self._module, tuple(self._inputs), noted.append)
        zeros = tuple(
            torch.zeros(shape, dtype=dtype)
            for shape, dtype in zip(shapes, self._inputs.values(), strict=True)
        )
        with _quiet():
            try:
                exported = torch.export.export(served, zeros)
                exported = exported.run_decompositions(_decompositions())
            except BundleError:
                raise
            except Exception as e:
                raise BundleError(_untraceable(e, list(zip(self._inputs, shapes, strict=True)))) from e
        _check(exported, tuple(self._inputs))
        return TracedModule(exported.graph_module, tuple(self._arguments(exported)), noted[0])

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
                raise BundleError(f"module: {spec.target}: is no tensor; only tensors can be weights")

    def _weight(self, spec: Any, tensor: torch.Tensor) -> Argument:
        name = spec.target.removeprefix(_PREFIX)
        if spec.kind is InputKind.CONSTANT_TENSOR:
            try:
                tensor = operator.attrgetter(name)(self._module)
            except AttributeError:
                # Written down in forward.
                return to_numpy(name, tensor)
        known = self._names.setdefault(_identity(name, tensor), name)
        self._tensors.setdefault(known, tensor)
        return known


def _decompositions() -> Any:
    """PyTorch's own, and torchax's for what is left then, as torchax.export does in two passes."""
    table = torch.export.default_decompositions()
    for target, way in decompositions.DECOMPOSITIONS.items():
        if target not in table:
            table[target] = way
    return table


def _identity(name: str, tensor: torch.Tensor) -> Identity:
    if not tensor.numel():
        return (name,)
    return (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


class _Served(torch.nn.Module):
    """The module with positional inputs and a flat tuple of results, so that nothing is left to be matched up later."""

    def __init__(
        self, module: torch.nn.Module, names: tuple[str, ...], note: Callable[[Results], None]
    ) -> None:
        """note: is told the structure of the results; what a traced forward sets as an attribute is undone."""
        super().__init__()
        self.module = module
        self.names = names
        self.call = caller(module, names, like=module.forward)
        self.note = note
        self.training = False

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = Results.of(self.call(dict(zip(self.names, tensors, strict=True))))
        for at, value in enumerate(found.values):
            if not isinstance(value, torch.Tensor):
                name = found.names[at] if found.names else at
                raise BundleError(f"outputs: {name}: is a {type(value).__name__}; return tensors")
        self.note(found.convert(lambda *_: None))
        return found.values


class _Interpreter(JaxInterpreter):  # type: ignore[misc]
    """torchax's, which gives each value the element type that PyTorch gives it."""

    def __init__(self, graph: Any) -> None:
        super().__init__(graph)
        # It would put its own text behind that of an error.
        self.extra_traceback = False

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # What a served model gives where PyTorch raises is not a number, or means nothing.
        if target is with_effects:
            return None, None
        return None if target in _ASSERTIONS else super().call_function(target, args, kwargs)

    def run_node(self, node: Any) -> Any:
        try:
            value = super().run_node(node)
        except Exception as e:
            raise BundleError(f"module: {_where(node)}: torchax fails at {node.target}: {_said(e)}") from e
        meta = node.meta.get("val")
        if isinstance(meta, torch.Tensor) and hasattr(value, "dtype"):
            # jax's constants may be wider than PyTorch's.
            wanted = jnp.dtype(str(meta.dtype).removeprefix("torch."))
            return value if value.dtype == wanted else jnp.asarray(value).astype(wanted)
        return value


def _check(exported: Any, inputs: Sequence[str]) -> None:
    """Refuse what a served model cannot do. Raises BundleError with a line for each."""
    problems = []
    names = dict(zip(exported.graph_signature.user_inputs, inputs, strict=True))
    for spec in exported.graph_signature.output_specs:
        if spec.kind not in (OutputKind.USER_OUTPUT, OutputKind.TOKEN):
            target = names.get(spec.target) or str(spec.target).removeprefix(_PREFIX)
            problems.append(f"module: {target}: forward changes it, and requests may not touch each other")
    for node in exported.graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem or _is_assertion(node):
            continue
        tags = getattr(node.target, "tags", ())
        if torch.Tag.nondeterministic_seeded in tags:
            problems.append(
                f"module: {_where(node)}: {node.target} draws random numbers, and a served model must not; if it is"
                " dropout, let it follow self.training"
            )
        elif _is_ruled_by_values(node):
            problems.append(
                f"module: {_where(node)}: {node.target} makes what is computed depend on a tensor's values; a module's"
                " shapes and decisions are fixed when it is exported, so keep the tensor, e.g. with torch.where"
            )
        elif not _known(node.target):
            problems.append(
                f"module: {_where(node)}: torchax has no {node.target} for jax; write this line with other operations"
            )
    if problems:
        raise BundleError(list(dict.fromkeys(problems)))


def _is_ruled_by_values(node: Any) -> bool:
    """Whether a result's shape, or a number taken out of a tensor, is known only when it runs."""
    results = pytree.tree_leaves(node.meta.get("val"))
    numbers = [each for each in results if isinstance(each, torch.SymInt | torch.SymFloat | torch.SymBool)]
    extents = [size for each in results if isinstance(each, torch.Tensor) for size in each.shape]
    # What is then reckoned with such sizes needs no line of its own.
    counts = isinstance(node.target, torch._ops.OpOverload) and "sym_" not in str(node.target)
    return counts and (bool(numbers) or not all(isinstance(size, int) for size in extents))


def _is_assertion(node: Any) -> bool:
    """Whether it asks if a matrix could be inverted, indices are within bounds or the like."""
    return (node.args[1] if node.target is with_effects else node.target) in _ASSERTIONS


def _known(target: Any) -> bool:
    if not isinstance(target, torch._ops.OpOverload):
        # Python's own arithmetic is fine; what else there is takes functions, and jax has its own of these.
        return not isinstance(target, torch._ops.HigherOrderOperator)
    registry = ops_registry.all_aten_ops
    found = registry.get(target) or registry.get(target.overloadpacket)
    return found is not None and found.is_jax_function


def _where(node: Any) -> str:
    """The line of the user's program that a node came from, and the part of the module."""
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


def _said(error: Exception) -> str:
    """The kind of an error and its first line; others follow in the traceback."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _untraceable(error: Exception, inputs: Sequence[tuple[str, tuple[int, ...]]]) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}: " if frames else ""
    shapes = ", ".join(f"{name} {list(shape)}" for name, shape in inputs)
    return (
        f"module: {where}torch.export cannot trace it with {shapes} ({_said(error)}); what forward does"
        " may depend on its inputs' shapes, and not on their values"
    )
