"""An ONNX file as plain Python. Nothing in the file is executed, and external data stays inside the file's folder."""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import numpy_helper

from rsrv_bundle.errors import BundleError

Array = np.ndarray[Any, Any]

#: A floating-point constant of at least this many bytes is a weight, which is stored once for all batch sizes. Whether a smaller one
#: is a weight depends on the operators that read it (evaluate.py).
_WEIGHT_BYTES = 1024
#: A constant of another type is a weight if it has at least this many bytes. A smaller one may be a shape, which must be known at
#: export.
_TABLE_BYTES = 65536
#: Graphs nested deeper than this are refused. Real files have at most five levels.
_DEPTH = 20
#: Domain of ONNX's standard operators. Files use either of two names for it.
STANDARD = ""
_STANDARD_NAMES = ("", "ai.onnx")


@dataclass(frozen=True, slots=True)
class Weight:
    """A constant that is stored among the bundle's weights, under this name."""

    name: str


@dataclass(frozen=True, slots=True)
class Parameter:
    """An attribute in a function's body whose value comes from the function's caller."""

    name: str


@dataclass(frozen=True, slots=True)
class Node:
    name: str
    domain: str
    op: str
    #: Names of values. The name is empty if an optional input or output is absent.
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    #: Attributes by name: numbers, strings, lists of these, arrays, `Weight`, `Graph` or `Parameter`.
    attributes: Mapping[str, Any]
    #: The node as a protobuf message. From it, the onnx library builds the standard's definition of an operator by other
    #: operators.
    proto: Any = field(repr=False, compare=False)

    def __str__(self) -> str:
        operator = f"{self.domain}.{self.op}" if self.domain else self.op
        place = self.name or next(filter(None, self.outputs), "")
        return f"operator {operator} at node '{place}'"


@dataclass(frozen=True, slots=True)
class Graph:
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    #: Arrays that are known at export, and weights, by the names of the values.
    constants: Mapping[str, Array | Weight]
    nodes: tuple[Node, ...]

    def stored(self) -> dict[str, Any]:
        """Return `constants`, and the values of the graph's `Constant` nodes."""
        made = {
            node.outputs[0]: node.attributes["value"]
            for node in self.nodes
            if node.op == "Constant" and node.outputs and "value" in node.attributes
        }
        return {**made, **self.constants}


@dataclass(frozen=True, slots=True)
class Function:
    """A function that the file defines: a graph with attributes as parameters."""

    graph: Graph
    #: Default values of attributes. A required attribute has no default.
    defaults: Mapping[str, Any]
    opsets: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Input:
    name: str
    dtype: np.dtype[Any]
    #: For each axis, a size, the name of a symbolic dimension, or None. This is None if the file does not state the number of axes.
    dims: tuple[int | str | None, ...] | None


@dataclass(frozen=True, slots=True)
class OnnxModel:
    path: Path
    graph: Graph
    inputs: tuple[Input, ...]
    #: Axes of each output, in the form of `Input.dims`. The tuple is empty for an output without a shape in the file.
    output_dims: Mapping[str, tuple[int | str | None, ...]]
    weights: Mapping[str, Array]
    #: Version of the operators by domain.
    opsets: Mapping[str, int]
    #: Functions by domain and name.
    functions: Mapping[tuple[str, str], Function]
    #: Producer, version and metadata, for the provenance.
    description: Mapping[str, str]


def read_model(path: Path) -> OnnxModel:
    """Read an ONNX file, with its external data.

    Raises:
        BundleError: The file is not an ONNX model, is damaged, or points outside of its folder. The message says which
            tensor or node.
        OSError: The file cannot be read.
    """
    try:
        proto = onnx.load_model(path, load_external_data=False)
    except (DecodeError, ValueError) as e:
        raise BundleError(f"{path.name}: is not an ONNX model, or is damaged: {e}") from e
    if not proto.graph.output:
        raise BundleError(f"{path.name}: has no outputs, so it is not an ONNX model, or is damaged")
    reader = _Reader(path.resolve().parent)
    try:
        graph = reader.graph(proto.graph, "")
        functions = {
            (standard(function.domain), function.name): reader.function(function)
            for function in proto.functions
        }
        opsets = _opsets(proto.opset_import)
        if STANDARD not in opsets and any(
            node.domain == STANDARD for inner in graphs_of(graph) for node in inner.nodes
        ):
            raise BundleError(f"{path.name}: names no opset of the standard's operators; it is damaged")
        inputs = [value for value in proto.graph.input if value.name not in graph.constants]
        return OnnxModel(
            path,
            graph,
            tuple(_input(value) for value in inputs),
            {
                value.name: tuple(_dim(dim) for dim in value.type.tensor_type.shape.dim)
                for value in proto.graph.output
            },
            reader.weights,
            opsets,
            functions,
            _description(proto),
        )
    except (ValueError, TypeError, KeyError, RecursionError) as e:
        raise BundleError(f"{path.name}: is damaged: {type(e).__name__}: {e}") from e


def is_floating(array: Array) -> bool:
    """Return whether the elements are floating-point or complex numbers. numpy calls bfloat16 and float8 a kind of their own."""
    return array.dtype.kind not in "biuOSU"


def unused(name: str, names: Container[str]) -> str:
    """Return the name, with as many underscores as are needed to differ from these names."""
    while name in names:
        name += "_"
    return name


def standard(domain: str) -> str:
    """Return the domain, or STANDARD for either name of the standard operators' domain."""
    return STANDARD if domain in _STANDARD_NAMES else domain


def proto_graph(function: Any) -> tuple[Graph, Mapping[str, int]]:
    """Return the graph and the opsets of the standard's definition of an operator. Such definitions have no large constants."""
    return _Reader(None).body(function), _opsets(function.opset_import)


def _names(values: Iterable[Any]) -> tuple[str, ...]:
    names = tuple(values)
    # protobuf returns bytes if a text is not UTF-8.
    if damaged := [name for name in names if not isinstance(name, str)]:
        raise BundleError(f"the name {damaged[0]!r} is not UTF-8; the file is damaged")
    return names


class _Reader:
    """Converts protobuf messages to plain Python, and collects the weights."""

    def __init__(self, folder: Path | None) -> None:
        """`folder` has the external data. If it is None, external data is not allowed."""
        self.folder = folder
        self.weights: dict[str, Array] = {}

    def function(self, proto: Any) -> Function:
        defaults: dict[str, Any] = dict.fromkeys(proto.attribute)
        defaults |= {
            attribute.name: self._attribute(attribute, proto.name, 0) for attribute in proto.attribute_proto
        }
        return Function(self.body(proto), defaults, _opsets(proto.opset_import))

    def body(self, proto: Any) -> Graph:
        nodes = tuple(self._node(node, proto.name, 0) for node in proto.node)
        return Graph(_names(proto.input), _names(proto.output), {}, nodes)

    def graph(self, proto: Any, path: str, depth: int = 0) -> Graph:
        if depth > _DEPTH:
            raise BundleError(f"graphs are nested more than {_DEPTH} deep")
        if proto.sparse_initializer:
            raise BundleError(
                "has sparse initializers, which rsrv does not read; store them as plain tensors"
            )
        constants = {
            tensor.name: self._constant(tensor, f"{path}{tensor.name}") for tensor in proto.initializer
        }
        nodes = tuple(self._node(node, path, depth) for node in proto.node)
        return Graph(
            _names(value.name for value in proto.input),
            _names(value.name for value in proto.output),
            constants,
            nodes,
        )

    def _node(self, proto: Any, path: str, depth: int) -> Node:
        place = f"{path}{proto.name or next(iter(proto.output), '')}"
        attributes = {
            attribute.name: self._attribute(attribute, place, depth) for attribute in proto.attribute
        }
        domain = standard(proto.domain)
        return Node(
            proto.name, domain, proto.op_type, _names(proto.input), _names(proto.output), attributes, proto
        )

    def _attribute(self, proto: Any, place: str, depth: int) -> Any:
        kind = onnx.AttributeProto
        if proto.ref_attr_name:
            return Parameter(proto.ref_attr_name)
        if proto.type == kind.GRAPH:
            return self.graph(proto.g, f"{place}/{proto.name}/", depth + 1)
        if proto.type == kind.TENSOR:
            return self._constant(proto.t, place)
        if proto.type == kind.TENSORS:
            return [self._constant(tensor, f"{place}/{index}") for index, tensor in enumerate(proto.tensors)]
        if proto.type in (kind.FLOAT, kind.INT, kind.STRING, kind.FLOATS, kind.INTS, kind.STRINGS):
            return _text(onnx.helper.get_attribute_value(proto))
        return Unreadable(onnx.AttributeProto.AttributeType.Name(proto.type).lower())

    def _constant(self, tensor: Any, name: str) -> Array | Weight:
        array = self._array(tensor, name)
        if (
            array.nbytes < (_WEIGHT_BYTES if is_floating(array) else _TABLE_BYTES)
            or array.dtype.kind in "OSU"
        ):
            return array
        unique = unused(name, self.weights)
        self.weights[unique] = array
        return Weight(unique)

    def _array(self, tensor: Any, name: str) -> Array:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            return self._external(tensor, name)
        try:
            return np.asarray(numpy_helper.to_array(tensor))
        except (ValueError, TypeError, KeyError) as e:
            raise BundleError(f"tensor '{name}': is damaged: {e}") from e

    def _external(self, tensor: Any, name: str) -> Array:
        """Read a tensor from another file. The file must be a regular file in the model's folder."""
        where = {entry.key: entry.value for entry in tensor.external_data}
        location = where.get("location", "")
        relative = PurePosixPath(location)
        if self.folder is None or not location or relative.is_absolute() or ".." in relative.parts:
            raise BundleError(
                f"tensor '{name}': its data is at '{location}', which is outside of the model's folder; rsrv reads data"
                " only from there"
            )
        file = self.folder / relative
        if not file.resolve().is_relative_to(self.folder):
            raise BundleError(
                f"tensor '{name}': its data file '{location}' is a link that leads out of the model's folder; copy the"
                " file into the folder"
            )
        if not file.is_file():
            raise BundleError(
                f"tensor '{name}': its data file '{location}' is missing; put it beside the model"
            )
        dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type))
        bits = 4 if tensor.data_type in _PACKED else 8 * dtype.itemsize
        count = int(np.prod([int(size) for size in tensor.dims], dtype=object)) if tensor.dims else 1
        size = -(-count * bits // 8)
        offset, length = int(where.get("offset", 0)), int(where.get("length", size))
        if min(tensor.dims, default=0) < 0 or length != size or offset < 0:
            raise BundleError(
                f"tensor '{name}': has {length} bytes in the file, but its shape takes {size}; the file is damaged"
            )
        if offset + size > os.path.getsize(file):
            raise BundleError(
                f"tensor '{name}': its data ends at byte {offset + size} of '{location}', which has only"
                f" {os.path.getsize(file)}; the file is cut off"
            )
        filled = onnx.TensorProto(data_type=tensor.data_type, dims=tensor.dims)
        with file.open("rb") as data:
            data.seek(offset)
            raw = data.read(size)
        if bits == 4:
            filled.raw_data = raw
            return np.asarray(numpy_helper.to_array(filled))
        # Do not use protobuf here, because weights may be larger than a protobuf message may be.
        return np.frombuffer(raw, dtype.newbyteorder("<")).astype(dtype, copy=False).reshape(tensor.dims)


#: Element types that store two values in each byte.
_PACKED = (onnx.TensorProto.INT4, onnx.TensorProto.UINT4)


@dataclass(frozen=True, slots=True)
class Unreadable:
    """An attribute of a kind that no lowering takes."""

    kind: str


def _text(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, list):
        return [_text(part) for part in value]
    return value


def _opsets(imports: Sequence[Any]) -> dict[str, int]:
    return {standard(entry.domain): int(entry.version) for entry in imports}


def _input(value: Any) -> Input:
    if value.type.WhichOneof("value") != "tensor_type":
        kind = (value.type.WhichOneof("value") or "unknown type").removesuffix("_type")
        raise BundleError(f"input '{value.name}': is a {kind}; only tensors can be inputs")
    tensor = value.type.tensor_type
    if tensor.elem_type == onnx.TensorProto.STRING:
        raise BundleError(
            f"input '{value.name}': has strings, which a compiled model cannot take; cut the model behind its"
            " tokenizer, and write the tokenizer as hooks"
        )
    try:
        dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    except KeyError as e:
        raise BundleError(f"input '{value.name}': has no element type; the file is damaged") from e
    known = tensor.HasField("shape")
    return Input(value.name, dtype, tuple(_dim(dim) for dim in tensor.shape.dim) if known else None)


def _dim(dim: Any) -> int | str | None:
    kind = dim.WhichOneof("value")
    if kind == "dim_value":
        # Exporters write 0 or -1 for an open size.
        return int(dim.dim_value) if dim.dim_value > 0 else None
    # Paddle writes "?" for any size.
    named = kind == "dim_param" and any(map(str.isalnum, dim.dim_param))
    return str(dim.dim_param) if named else None


def _description(proto: Any) -> dict[str, str]:
    facts = {"producer": f"{proto.producer_name} {proto.producer_version}".strip(), "name": proto.graph.name}
    facts |= {prop.key: prop.value for prop in proto.metadata_props}
    return {key: value for key, value in facts.items() if value}


def graphs_of(graph: Graph) -> Iterator[Graph]:
    """Yield the graph and all graphs that are nested in it."""
    yield graph
    for node in graph.nodes:
        for value in node.attributes.values():
            if isinstance(value, Graph):
                yield from graphs_of(value)
