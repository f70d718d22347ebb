"""Evaluation of an ONNX graph with jax, while jax traces it.

Values that are known at export (shapes, small constants, conditions) stay numpy arrays, because Reshape, Slice, Range and
If need them. All other values are traced. A small constant that a layer applies to traced values, such as a bias, is traced
as a weight. So fine-tunes that differ only in such constants and in weights have equal modules, which a runtime compiles once.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
import onnx

from rsrv_bundle.errors import BundleError
from rsrv_bundle.onnx_import import (  # noqa: F401 - these modules register their lowerings
    ops_control,
    ops_math,
    ops_microsoft,
    ops_ml,
    ops_nn,
    ops_quantised,
    ops_recurrent,
    ops_resize,
    ops_shape,
)
from rsrv_bundle.onnx_import.model import (
    STANDARD,
    Graph,
    Node,
    OnnxModel,
    Parameter,
    Unreadable,
    Weight,
    graphs_of,
    is_floating,
    proto_graph,
    unused,
)
from rsrv_bundle.onnx_import.operators import (
    MICROSOFT,
    MOST_ELEMENTS,
    OPERATORS,
    Context,
    Unsupported,
    is_known,
)

#: Operators that apply weights to values. A small floating-point constant that such an operator reads is a weight, unless the constant
#: is a scalar.
_LAYERS = frozenset({
    "Add", "BatchNormalization", "Conv", "ConvTranspose", "Div", "GRU", "Gemm", "GroupNormalization", "InstanceNormalization",
    "LSTM", "LayerNormalization", "MatMul", "Mul", "PRelu", "RNN", "Sub",
})  # fmt: skip
#: Operators whose results are known, whatever their inputs are: sizes are fixed at export.
_ALWAYS_KNOWN = frozenset({"Shape", "Size"})
#: Results with more elements are traced even if their values are known, because they cannot be shapes.
_FOLD_ELEMENTS = 2**14
#: Attributes that are sizes of windows and outputs. Values above `_LARGEST` are refused, because the compiler's
#: arithmetic with larger values may crash this process.
_SIZES = frozenset({
    "blocksize", "dilations", "group", "hidden_size", "kernel_shape", "num_groups", "output_height", "output_padding",
    "output_shape", "output_width", "pads", "pooled_shape", "sampling_ratio", "size", "strides",
})  # fmt: skip
_LARGEST = 2**24
#: Maximum number of nodes that one trace evaluates. A node in a loop or a function counts each time it is evaluated.
_STEPS = 200_000
#: Functions that call each other deeper than this are refused.
_DEPTH = 50


class Evaluator:
    """A model as a function `(weights, **inputs)` that jax can trace."""

    def __init__(self, model: OnnxModel, outputs: Sequence[str] | None = None) -> None:
        """`outputs` are values of the graph to return in place of its outputs. Raises BundleError if one does not exist."""
        self.model = model
        self.outputs = tuple(outputs or model.graph.outputs)
        made = {name for node in model.graph.nodes for name in node.outputs}
        known = made | {value.name for value in model.inputs} | model.graph.constants.keys()
        if missing := [name for name in self.outputs if name not in known]:
            raise BundleError(f"outputs: the graph has no value '{missing[0]}'")
        nodes, needed = _needed(model.graph, self.outputs)
        constants = {name: value for name, value in model.graph.constants.items() if name in needed}
        self.graph = Graph(model.graph.inputs, self.outputs, constants, nodes)
        #: The inputs that the outputs depend on.
        self.inputs = tuple(value for value in model.inputs if value.name in needed)
        used = {
            value.name
            for graph in graphs_of(self.graph)
            for values in (graph.constants, *(node.attributes for node in graph.nodes))
            for value in values.values()
            if isinstance(value, Weight)
        }
        #: The weights that the outputs depend on.
        self.weights: dict[str, Any] = {name: array for name, array in model.weights.items() if name in used}
        #: Small constants that are weights: the name of the weight by the identity of the array.
        self._small: dict[int, str] = {}
        outer = self.graph.stored()
        for graph in graphs_of(self.graph):
            self._add_small_weights(graph, outer)
        self._params: Mapping[str, Any] = {}
        self._steps = self._depth = 0

    def _add_small_weights(self, graph: Graph, outer: Mapping[str, Any]) -> None:
        """Add the small constants that the graph's layers apply to traced values. The nodes are in the order of their execution.

        `outer`: what the whole model's graph stores, by name. An inner graph can read it.
        """
        stored = {name: value for name, value in outer.items() if name not in graph.inputs} | graph.stored()
        known = {name for name, value in stored.items() if isinstance(value, np.ndarray)}
        for node in graph.nodes:
            if known.issuperset(filter(None, node.inputs)) or node.op in _ALWAYS_KNOWN:
                known.update(name for name in node.outputs if name not in stored)
                continue
            for name in node.inputs if _is_layer(node) else ():
                array = stored.get(name) if name in known else None
                if array is not None and array.ndim and is_floating(array) and id(array) not in self._small:
                    name = unused(name, self.weights.keys() | self.model.weights.keys())
                    self._small[id(array)] = name
                    self.weights[name] = array

    def __call__(self, params: Mapping[str, Any], **inputs: Any) -> dict[str, Any]:
        self._params, self._steps, self._depth = params, 0, 0
        values = self._graph(self.graph, ChainMap(dict(inputs)), self.model.opsets)
        return dict(zip(self.outputs, (jax.numpy.asarray(value) for value in values), strict=True))

    def run(
        self, graph: Graph, inputs: Sequence[Any], env: Mapping[str, Any], opsets: Mapping[str, int]
    ) -> list[Any]:
        """Evaluate a nested graph. `env` has the values of the surrounding graphs."""
        own = dict(zip(graph.inputs, inputs, strict=False))
        parents = env.maps if isinstance(env, ChainMap) else [env]
        return self._graph(graph, ChainMap(own, *parents), opsets)

    def _graph(self, graph: Graph, env: ChainMap[str, Any], opsets: Mapping[str, int]) -> list[Any]:
        for name, value in graph.constants.items():
            # If an input has the name of a constant, the constant is the input's default value. Callers cannot replace it.
            env[name] = self._value(value)
        for node in graph.nodes:
            env.update(self._node(node, env, opsets))
        try:
            return [env[name] for name in graph.outputs]
        except KeyError as e:
            raise BundleError(f"no node makes the output {e}; the file is damaged") from None

    def _node(self, node: Node, env: ChainMap[str, Any], opsets: Mapping[str, int]) -> dict[str, Any]:
        """Return the node's results by name."""
        self._steps += 1
        if self._steps > _STEPS:
            raise BundleError(
                f"has more than {_STEPS} nodes to evaluate; a node in a loop counts in each round"
            )
        try:
            inputs = [env[name] if name else None for name in node.inputs]
        except KeyError as e:
            raise BundleError(f"{node}: no node makes its input {e}; the file is damaged") from None
        attributes = {name: self._value(value) for name, value in node.attributes.items()}
        for name, value in attributes.items():
            if name in _SIZES and any(abs(number) > _LARGEST for number in np.ravel(value).tolist()):
                raise BundleError(f"{node}: its attribute '{name}' has a number above {_LARGEST}")
            if isinstance(value, Unreadable):
                raise BundleError(f"{node}: its attribute '{name}' is a {value.kind}, which is not supported")
        if _is_layer(node) and not is_known(*inputs):
            inputs = [self._params.get(self._small.get(id(value), ""), value) for value in inputs]
        context = Context(node, opsets.get(node.domain, 1), opsets, self, env)
        try:
            result = self._lower(context, inputs, attributes)
        except BundleError:
            raise
        except Unsupported as e:
            raise BundleError(f"{node}: {e}") from None
        except Exception as e:
            shapes = ", ".join(_described(value) for value in inputs)
            raise BundleError(
                f"{node}: cannot be computed with inputs {shapes} ({type(e).__name__}: {str(e).partition(chr(10))[0]})"
            ) from e
        results = result if isinstance(result, tuple) else (result,)
        for value in results:
            if getattr(value, "size", 0) > MOST_ELEMENTS:
                raise BundleError(f"{node}: its result has {value.size} elements, more than {MOST_ELEMENTS}")
        return {name: value for name, value in zip(node.outputs, results, strict=False) if name}

    def _lower(self, context: Context, inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
        node = context.node
        if (function := self.model.functions.get((node.domain, node.op))) is not None:
            bound_attributes = {**function.defaults, **attributes}
            return self._call(_bound(function.graph, bound_attributes), inputs, function.opsets)
        operator = OPERATORS.get((node.domain, node.op))
        if operator is None:
            graph, opsets = _definition(context, inputs)
            bound_attributes = {**_defaults(context), **attributes}
            return self._call(_bound(graph, bound_attributes), inputs, {**context.opsets, **opsets})
        call = partial(operator, context, inputs, attributes)
        if operator.control or not is_known(*inputs):
            return call()
        return _folded(call)

    def _call(self, graph: Graph, inputs: Sequence[Any], opsets: Mapping[str, int]) -> tuple[Any, ...]:
        self._depth += 1
        if self._depth > _DEPTH:
            raise BundleError(f"its functions call each other more than {_DEPTH} deep")
        own = {**dict.fromkeys(graph.inputs), **dict(zip(graph.inputs, inputs, strict=False))}
        env = ChainMap(own)
        try:
            for node in graph.nodes:
                env.update(self._node(node, env, opsets))
        finally:
            self._depth -= 1
        # An output is None if the graph does not compute it.
        return tuple(env.get(name) for name in graph.outputs)

    def _value(self, value: Any) -> Any:
        if isinstance(value, Weight):
            return self._params.get(value.name, self.model.weights[value.name])
        if isinstance(value, list) and any(isinstance(part, Weight) for part in value):
            return [self._value(part) for part in value]
        return value


def _is_layer(node: Node) -> bool:
    return node.domain == STANDARD and node.op in _LAYERS


def _folded(call: Any) -> Any:
    """Call a lowering whose inputs are known. Return its results as numpy arrays, unless they are large."""
    shapes = jax.tree.leaves(jax.eval_shape(call))
    if sum(shape.size for shape in shapes) > _FOLD_ELEMENTS:
        return call()
    with jax.ensure_compile_time_eval():
        return jax.tree.map(np.asarray, call())


def _needed(graph: Graph, outputs: Sequence[str]) -> tuple[tuple[Node, ...], set[str]]:
    """Return the nodes that the outputs depend on, and the names of all values that these nodes use."""
    needed = set(outputs)
    nodes = []
    for node in reversed(graph.nodes):
        if needed.intersection(node.outputs):
            nodes.append(node)
            needed.update(node.inputs)
            for value in node.attributes.values():
                if isinstance(value, Graph):
                    for nested in graphs_of(value):
                        needed.update(nested.outputs, *(inner.inputs for inner in nested.nodes))
    return tuple(reversed(nodes)), needed


def _bound(graph: Graph, given: Mapping[str, Any]) -> Graph:
    """Return a function's graph, with the caller's attributes in place of the function's parameters."""
    nodes = []
    for node in graph.nodes:
        attributes = {}
        for name, value in node.attributes.items():
            if isinstance(value, Parameter):
                value = given.get(value.name)
                if value is None:
                    continue
            elif isinstance(value, Graph):
                value = _bound(value, given)
            attributes[name] = value
        nodes.append(Node(node.name, node.domain, node.op, node.inputs, node.outputs, attributes, node.proto))
    return Graph(graph.inputs, graph.outputs, graph.constants, tuple(nodes))


def _schema(context: Context) -> Any:
    node = context.node
    try:
        return onnx.defs.get_schema(node.op, context.opset, node.domain)
    except onnx.defs.SchemaError:
        cure = (
            "use the file from before onnxruntime's optimiser, or quantise it with quant_format=QuantFormat.QDQ"
            if node.domain == MICROSOFT
            else "if the model comes from PyTorch or JAX, export it from there, or cut the model before this node with --outputs"
        )
        raise Unsupported(f"rsrv does not know it; {cure}") from None


def _definition(context: Context, inputs: Sequence[Any]) -> tuple[Graph, Mapping[str, int]]:
    """Return the graph with which the standard defines an operator by other operators."""
    schema = _schema(context)
    if schema.has_function:
        return proto_graph(schema.function_body)
    if schema.has_context_dependent_function:
        node = onnx.NodeProto()
        node.CopyFrom(context.node.proto)
        # In a function's body, some attributes have values from the function's caller.
        referenced = {
            attribute.name for attribute in node.attribute if attribute.ref_attr_name
        } & context.node.attributes.keys()
        own = [attribute for attribute in context.node.proto.attribute if not attribute.ref_attr_name]
        del node.attribute[:]
        node.attribute.extend(own)
        node.attribute.extend(
            onnx.helper.make_attribute(name, context.node.attributes[name]) for name in sorted(referenced)
        )
        types = [_type(value).SerializeToString() for value in inputs]
        made = schema.get_context_dependent_function(node.SerializeToString(), types)
        body = onnx.FunctionProto()
        body.ParseFromString(made)
        return proto_graph(body)
    raise Unsupported(
        "rsrv cannot compile it; cut the model before this node with --outputs, or compute it in hooks"
    )


def _defaults(context: Context) -> dict[str, Any]:
    """Return the default values of an operator's attributes."""
    defaults = {}
    for name, attribute in _schema(context).attributes.items():
        if attribute.default_value.type:
            value = onnx.helper.get_attribute_value(attribute.default_value)
            defaults[name] = value.decode() if isinstance(value, bytes) else value
    return defaults


def _type(value: Any) -> Any:
    if value is None or isinstance(value, list):
        return onnx.TypeProto()
    element = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(value.dtype))
    return onnx.helper.make_tensor_type_proto(element, list(value.shape))


def _described(value: Any) -> str:
    if value is None:
        return "absent"
    return f"{value.dtype}{list(value.shape)}" if hasattr(value, "shape") else type(value).__name__
