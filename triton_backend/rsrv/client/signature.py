"""The inputs and outputs of a model, read from its configuration, and the conversion and check of a request's inputs."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor, triton_to_np_dtype

from rsrv.client.errors import InputError
from rsrv.front.rules import WRONG_SHAPE
from rsrv.text import nearest

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class ModelTensor:
    """A tensor of a model. `dims` leaves out the axis of rows; -1 stands for any length."""

    name: str
    #: Triton's name of the type, such as FP32.
    datatype: str
    dims: tuple[int, ...]
    optional: bool = False


@dataclass(frozen=True)
class ModelTask:
    """The section `task` of a model's bundle."""

    #: Names of tensors by role.
    inputs: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)
    #: Labels of the columns of the output with the role `scores`.
    labels: Sequence[str] = ()


@dataclass(frozen=True)
class ModelSignature:
    """The inputs and outputs of a model, and the requests that it takes."""

    model: str
    inputs: Mapping[str, ModelTensor]
    outputs: Mapping[str, ModelTensor]
    #: Maximum number of rows of a request, or 0 if the model's tensors have no axis of rows.
    max_rows: int
    #: True if a request is a step of a sequence.
    stateful: bool
    #: True if the model answers a request with a stream of answers.
    streams: bool
    task: ModelTask

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ModelSignature":
        """Return the signature of a model from its Triton configuration in JSON form."""
        task = json.loads(config.get("parameters", {}).get("task", {}).get("string_value", "{}"))
        return cls(
            config["name"],
            {spec.name: spec for spec in map(_tensor, config.get("input", ()))},
            {spec.name: spec for spec in map(_tensor, config.get("output", ()))},
            int(config.get("max_batch_size", 0)),
            "sequence_batching" in config,
            bool(config.get("model_transaction_policy", {}).get("decoupled", False)),
            ModelTask(task.get("inputs", {}), task.get("outputs", {}), task.get("labels", ())),
        )

    def named(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the inputs by the names of their tensors. The names in `values` may also be roles of the model's task."""
        named = {}
        for name, value in values.items():
            tensor = name if name in self.inputs else self.task.inputs.get(name, name)
            if tensor not in self.inputs:
                known = [*self.inputs, *self.task.inputs]
                raise InputError(f"{self.model} has no input {name!r}{nearest(name, known)}")
            named[tensor] = value
        missing = [name for name, spec in self.inputs.items() if name not in named and not spec.optional]
        if missing:
            raise InputError(f"{self.model} also needs the input {', '.join(map(repr, missing))}")
        return named

    def check(self, values: Mapping[str, Any]) -> dict[str, Array]:
        """Return the inputs of a request as arrays. Raises InputError if they do not fit the model."""
        arrays = {
            name: as_array(self.inputs[name], value, self.max_rows > 0)
            for name, value in self.named(values).items()
        }
        if self.max_rows > 0:
            rows = {name: len(array) for name, array in arrays.items()}
            if len(set(rows.values())) > 1:
                counts = ", ".join(f"{name} has {count}" for name, count in rows.items())
                raise InputError(f"{self.model}: the inputs disagree on the number of rows: {counts}")
            if (count := next(iter(rows.values()), 1)) > self.max_rows:
                raise InputError(
                    f"{self.model}: {count} rows, and a request has at most {self.max_rows}; "
                    "map() sends any number of rows in several requests"
                )
        return arrays


def _tensor(tensor: Mapping[str, Any]) -> ModelTensor:
    datatype = tensor["data_type"].removeprefix("TYPE_").replace("STRING", "BYTES")
    dims = tuple(map(int, tensor.get("dims", ())))
    return ModelTensor(tensor["name"], datatype, dims, bool(tensor.get("optional", False)))


def as_array(spec: ModelTensor, value: Any, has_rows: bool) -> Array:
    """Return one input as an array of the model's type. Raises InputError.

    Lists, numbers and texts are converted to the model's type. An array must already have this type, so that no conversion
    loses digits unnoticed.
    """
    expected = np.dtype(triton_to_np_dtype(spec.datatype))
    if spec.datatype == "BYTES":
        array = np.asarray(value, object)
        if any(map(_is_missing, array.flat)):
            raise InputError(f"input {spec.name}: expected texts or bytes; a value is missing")
    elif isinstance(value, np.ndarray) and value.dtype != object:
        array = value
        # Accept arrays of bfloat16 even if this release of tritonclient maps BF16 to another type.
        if array.dtype != expected and not (spec.datatype == "BF16" and array.dtype.name == "bfloat16"):
            raise InputError(
                f"input {spec.name}: expected {expected}, got {array.dtype}; convert it with .astype({expected.name!r})"
            )
    else:
        try:
            # A column of a data frame may be an array of lists or arrays.
            array = _converted(value.tolist() if isinstance(value, np.ndarray) else value, expected)
        except (ValueError, TypeError, OverflowError) as error:
            raise InputError(f"input {spec.name}: expected {expected}: {error}") from None
    dims = ((-1,) if has_rows else ()) + spec.dims
    if array.ndim < len(dims) and set(spec.dims) <= {1, -1} and array.ndim <= has_rows:
        # Each row is a single number or text. Add the model's other axes, which have the length 1.
        array = array.reshape((-1,) * has_rows + (1,) * len(spec.dims))
    if array.ndim != len(dims) or any(
        dim not in (-1, size) for dim, size in zip(dims, array.shape, strict=True)
    ):
        axis = " (axis 0 is the batch)" if has_rows else ""
        raise InputError(WRONG_SHAPE % (spec.name, list(dims), axis, list(array.shape)))
    return array


def _is_missing(value: Any) -> bool:
    """Return whether a value in a column of texts, such as None or NaN, stands for a missing text."""
    if isinstance(value, float):
        return math.isnan(value)
    return not isinstance(value, (str, bytes, int, np.generic))


def _converted(value: Any, expected: np.dtype[Any]) -> Array:
    """Convert numbers to a type. Raises ValueError if that would cut a fraction, and numpy's TypeError and OverflowError."""
    array = np.asarray(value, expected)
    if (
        expected.kind in "iu"
        and (original := np.asarray(value)).dtype.kind == "f"
        and (original != array).any()
    ):
        raise ValueError("a value has a fraction")
    return array


def to_bytes(spec: ModelTensor, array: Array) -> bytes | memoryview:
    """Return an input in the form that is sent, without a copy if the array allows that."""
    if spec.datatype == "BYTES":
        encoded = serialize_byte_tensor(array)
        return bytes(encoded.item()) if encoded.size else b""
    if spec.datatype == "BF16" and array.dtype == np.float32:
        # Round to the nearest value (ties to even), and keep the upper 16 bits.
        bits = np.ascontiguousarray(array).view(np.uint32)
        array = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    contiguous = np.ascontiguousarray(array)
    return contiguous.reshape(-1).view(np.uint8).data if contiguous.size else b""


def from_bytes(datatype: str, shape: Sequence[int], content: bytes | memoryview) -> Array:
    """Return an output as an array, which shares the memory of `content` where its type allows that."""
    if datatype == "BYTES":
        array: Array = deserialize_bytes_tensor(bytes(content))
    else:
        dtype = np.dtype(triton_to_np_dtype(datatype))
        if datatype == "BF16" and dtype == np.float32:
            array = (np.frombuffer(content, np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            array = np.frombuffer(content, dtype)
    return array.reshape(shape)
