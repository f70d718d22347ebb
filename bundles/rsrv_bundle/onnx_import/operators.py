"""The table of operators, and functions that lowerings use.

A lowering is a function `(context, *inputs, **attributes)` that returns an array or a tuple of arrays. An absent input
is None. An input is a numpy array if its value is known at export, and a jax array if its value depends on a request.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np

from rsrv_bundle.onnx_import.model import STANDARD, Graph, Node

MICROSOFT = "com.microsoft"
ML = "ai.onnx.ml"


class Unsupported(Exception):
    """A node cannot be lowered. The message says why, and what to do."""


#: Tensors with more elements are refused, because a file of a few bytes can request any number.
MOST_ELEMENTS = 2**31


def refuse_large(*sizes: int) -> None:
    """Raise Unsupported if a tensor of these sizes would be too large. Call this before the tensor is made."""
    if math.prod(sizes) > MOST_ELEMENTS:
        raise Unsupported(f"it asks for {math.prod(sizes)} elements, more than {MOST_ELEMENTS}")


class Evaluates(Protocol):
    """An evaluator of nested graphs."""

    def run(
        self, graph: Graph, inputs: Sequence[Any], env: Mapping[str, Any], opsets: Mapping[str, int]
    ) -> list[Any]: ...


@dataclass(frozen=True, slots=True)
class Context:
    """The node that is being lowered, and its surroundings."""

    node: Node
    #: Version of the operators of the node's domain.
    opset: int
    opsets: Mapping[str, int]
    evaluator: Evaluates
    #: Values of the surrounding graphs, which nested graphs may use.
    env: Mapping[str, Any]

    @property
    def outputs(self) -> int:
        """The number of outputs that the node has."""
        return len(self.node.outputs)

    def wants(self, index: int) -> bool:
        """Return whether an optional output is used."""
        return index < len(self.node.outputs) and bool(self.node.outputs[index])

    def known(self, value: Any, what: str) -> Any:
        """Return a value as a numpy array. Raises Unsupported if it depends on a request."""
        if is_known(value):
            return np.asarray(value)
        raise Unsupported(
            f"its {what} depends on the values of a request, and shapes are fixed at export; fix it in the model, or cut"
            " the model before this node with --outputs"
        )

    def run(self, graph: Graph, inputs: Sequence[Any]) -> list[Any]:
        """Evaluate a nested graph."""
        return self.evaluator.run(graph, inputs, self.env, self.opsets)


Lowering = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Operator:
    lowering: Lowering
    attributes: frozenset[str]
    #: True if the lowering takes any attribute.
    any_attribute: bool
    #: True if the lowering evaluates nested graphs or returns an input unchanged. Such a node is not computed at export as a
    #: whole, even if its inputs are known.
    control: bool

    def __call__(self, context: Context, inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
        if not self.any_attribute and (unknown := sorted(attributes.keys() - self.attributes)):
            raise Unsupported(f"its attribute '{unknown[0]}' is not supported")
        return self.lowering(context, *inputs, **attributes)


#: Operators by domain and name.
OPERATORS: dict[tuple[str, str], Operator] = {}


def op(*names: str, domain: str = STANDARD, control: bool = False) -> Callable[[Lowering], Lowering]:
    """Register a lowering for the operators with these names in a domain. control: see `Operator.control`."""

    def register(lowering: Lowering) -> Lowering:
        parameters = inspect.signature(lowering).parameters.values()
        own = frozenset(
            parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY
        )
        anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        for name in names:
            assert (domain, name) not in OPERATORS, name
            OPERATORS[domain, name] = Operator(lowering, own, anything, control)
        return lowering

    return register


def is_known(*values: Any) -> bool:
    """Return whether all values are known at export. Absent values and sequences of known values count as known."""
    return all(
        value is None
        or isinstance(value, np.ndarray | np.generic)
        or (isinstance(value, list) and is_known(*value))
        for value in values
    )


def whole_numbers(context: Context, value: Any, what: str) -> list[int]:
    """Return a known tensor as a flat list of whole numbers."""
    return [int(number) for number in np.ravel(context.known(value, what))]


def scalar(value: Any) -> Any:
    """Return a tensor of one element as a scalar."""
    return jnp.reshape(jnp.asarray(value), ())


def is_float(value: Any) -> bool:
    return bool(jnp.issubdtype(value.dtype, jnp.floating))


def is_integer(value: Any) -> bool:
    return bool(jnp.issubdtype(value.dtype, jnp.integer))


def limits(dtype: Any) -> tuple[float, float]:
    """Return the smallest and the largest finite value of an element type."""
    floating = jnp.issubdtype(dtype, jnp.floating)
    info: Any = (jnp.finfo if floating else jnp.iinfo)(dtype)
    return (float(info.min), float(info.max)) if floating else (int(info.min), int(info.max))


def lowest(dtype: Any) -> Any:
    """Return the smallest value of an element type, as an array."""
    if jnp.issubdtype(dtype, jnp.floating):
        return np.array(-np.inf, dtype)
    return np.array(False if dtype == np.bool_ else limits(dtype)[0], dtype)


def highest(dtype: Any) -> Any:
    """Return the largest value of an element type, as an array."""
    if jnp.issubdtype(dtype, jnp.floating):
        return np.array(np.inf, dtype)
    return np.array(True if dtype == np.bool_ else limits(dtype)[1], dtype)


def widened(x: Any) -> Any:
    """Return floats of fewer than 32 bits as f32, and any other tensor unchanged."""
    return x.astype(np.float32) if is_float(x) and x.dtype.itemsize < 4 else x


def in_f32(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compute narrower floats in f32, as onnxruntime does. The result has the first argument's element type."""

    def compute(x: Any, *rest: Any) -> Any:
        wide = widened(x)
        return function(x, *rest) if wide is x else function(wide, *rest).astype(x.dtype)

    return compute


def channels(vector: Any, like: Any) -> Any:
    """Return a vector with one value per channel, in a shape that broadcasts to [n, c, ...]."""
    return jnp.reshape(vector, (1, -1, *[1] * (like.ndim - 2)))


def axis_of(axis: int, rank: int) -> int:
    """Return an axis, counted from the front. Raises Unsupported if the axis does not exist."""
    if not -rank <= axis < rank:
        raise Unsupported(f"axis {axis} does not exist in a tensor of {rank} axes; the file is damaged")
    return axis % rank
