"""ONNX files for tests, written node by node, and their evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import onnx
from onnx import helper, numpy_helper

from rsrv_bundle import BundleError
from rsrv_bundle.onnx_import.evaluate import Evaluator

Array = np.ndarray[Any, Any]
#: Element type and dimensions of a tensor. A dimension is a size or a name.
Tensor = tuple[Any, Sequence[Any]]


def node(op: str, inputs: str, outputs: str, **attributes: Any) -> Any:
    """Make a node. Blanks separate the names, and `-` stands for an absent tensor."""
    taken, made = (["" if name == "-" else name for name in text.split()] for text in (inputs, outputs))
    return helper.make_node(op, taken, made, **attributes)


def graph(
    nodes: Sequence[Any],
    inputs: Mapping[str, Tensor],
    outputs: Mapping[str, Tensor],
    constants: Mapping[str, Any] | None = None,
) -> Any:
    return helper.make_graph(
        nodes,
        "g",
        [_value(name, tensor) for name, tensor in inputs.items()],
        [_value(name, tensor) for name, tensor in outputs.items()],
        [numpy_helper.from_array(array, name) for name, array in (constants or {}).items()],
    )


def write(path: Path, graph: Any, *, opset: int = 18, functions: Sequence[Any] = ()) -> Path:
    """Write a model with this graph, and return the path."""
    domains = {node.domain for node in graph.node} | {"ai.onnx.ml"}
    imports = [helper.make_opsetid("", opset)]
    imports += [
        helper.make_opsetid(domain, 3 if domain == "ai.onnx.ml" else 1) for domain in sorted(domains - {""})
    ]
    onnx.save(
        helper.make_model(
            graph, opset_imports=imports, ir_version=10, functions=functions, producer_name="tests"
        ),
        path,
    )
    return path


def _value(name: str, tensor: Tensor) -> Any:
    dtype, dims = tensor
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), list(dims))


def _with_known(evaluator: Evaluator, known: dict[str, Any], **inputs: Any) -> Any:
    return evaluator(evaluator.weights, **inputs, **known)


def evaluated(evaluator: Evaluator, inputs: dict[str, Any]) -> dict[str, Any]:
    """Evaluate under jit with as many traced inputs as possible. Shapes may depend on the other inputs, as at export.

    Raises BundleError if the graph cannot be compiled even with all inputs known.
    """
    whole = [name for name, array in inputs.items() if array.dtype.kind not in "iub"]
    refusal = None
    for traced in (list(inputs), whole, list(inputs)[:1], []):
        known = {name: array for name, array in inputs.items() if name not in traced}
        run = jax.jit(partial(_with_known, evaluator, known))
        try:
            return dict(run(**{name: inputs[name] for name in traced}))
        except BundleError as error:
            refusal = error
    assert refusal is not None
    raise refusal


def compare(result: Any, expected: Any, rtol: float, atol: float) -> None:
    assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
    if jax.numpy.issubdtype(expected.dtype, jax.numpy.floating):
        narrow = expected.dtype.itemsize <= 2
        np.testing.assert_allclose(
            result.astype(np.float64),
            expected.astype(np.float64),
            rtol=max(rtol, 1e-2 if narrow else 1e-3),
            atol=max(atol, 1e-2 if narrow else 1e-5),
        )
    else:
        np.testing.assert_array_equal(result, expected)


_RNG = np.random.default_rng(0)
TABLE = _RNG.standard_normal((40, 16)).astype(np.float32)
KERNEL = _RNG.standard_normal((16, 30)).astype(np.float32)


def encoder(path: Path) -> Path:
    """Write a model that averages the rows of a table chosen by `ids`, and multiplies the mean by a matrix."""
    nodes = [
        node("Gather", "table ids", "rows"),
        node("ReduceMean", "rows axes", "mean", keepdims=0),
        node("MatMul", "mean kernel", "y"),
    ]
    constants = {"table": TABLE, "kernel": KERNEL, "axes": np.array([1], np.int64)}
    shapes = {"ids": (np.int64, ["rows", "sequence"])}
    return write(path, graph(nodes, shapes, {"y": (np.float32, ["rows", 30])}, constants))
