"""Operators of ONNX compared with onnxruntime: the operators with the most rules, and operators outside of the standard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

from rsrv_bundle import BundleError
from rsrv_bundle.from_onnx import session_options
from rsrv_bundle.onnx_import.evaluate import Evaluator
from rsrv_bundle.onnx_import.model import read_model
from tests.onnx_files import compare, evaluated, graph, node, write

RNG = np.random.default_rng(0)

F = np.float32


def _random(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype(F)


_MS = "com.microsoft"
_ML = "ai.onnx.ml"
_U8 = np.uint8
_X = _random(2, 6, 8)
_QUANTISED = {
    "s": np.array(0.02, F), "z": np.array(120, _U8), "ys": np.array(0.05, F), "yz": np.array(100, _U8),
    "b": RNG.integers(0, 255, (2, 8)).astype(_U8),
}  # fmt: skip
_TREES: dict[str, Any] = {
    "nodes_treeids": [0, 0, 0, 0, 0, 1, 1, 1],
    "nodes_nodeids": [0, 1, 2, 3, 4, 0, 1, 2],
    "nodes_featureids": [0, 1, 0, 0, 0, 2, 0, 0],
    "nodes_modes": ["BRANCH_LEQ", "BRANCH_LT", "LEAF", "LEAF", "LEAF", "BRANCH_GT", "LEAF", "LEAF"],
    "nodes_values": [0.1, -0.3, 0.0, 0.0, 0.0, 0.5, 0.0, 0.0],
    "nodes_truenodeids": [1, 3, 0, 0, 0, 1, 0, 0],
    "nodes_falsenodeids": [2, 4, 0, 0, 0, 2, 0, 0],
}


def _leaves(what: str, ids: list[int]) -> dict[str, Any]:
    return {
        f"{what}_treeids": [0, 0, 0, 1, 1],
        f"{what}_nodeids": [2, 3, 4, 1, 2],
        f"{what}_ids": ids,
        f"{what}_weights": [0.5, -1.5, 2.0, 0.25, -0.75],
    }


#: Twenty trees with one decision each. Each tree votes with 0.05.
_STUMPS: dict[str, Any] = {
    "nodes_treeids": np.repeat(np.arange(20), 3).tolist(),
    "nodes_nodeids": [0, 1, 2] * 20,
    "nodes_featureids": np.repeat(np.arange(20), 3).tolist(),
    "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"] * 20,
    "nodes_values": [0.0] * 60,
    "nodes_truenodeids": [1, 0, 0] * 20,
    "nodes_falsenodeids": [2, 0, 0] * 20,
    "class_treeids": np.repeat(np.arange(20), 2).tolist(),
    "class_nodeids": [1, 2] * 20,
    "class_ids": [0] * 40,
    "class_weights": [0.0, 0.05] * 20,
}

#: Node, inputs and constants by the name of a case.
CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "conv_same_lower": (
        node("Conv", "x w b", "y", auto_pad="SAME_LOWER", strides=[2, 2], group=2), {"x": _random(2, 4, 7, 6)},
        {"w": _random(6, 2, 3, 2), "b": _random(6)},
    ),
    "conv_dilated": (
        node("Conv", "x w", "y", dilations=[2, 1], pads=[1, 0, 2, 1]), {"x": _random(1, 3, 9, 8)}, {"w": _random(4, 3, 3, 3)},
    ),
    "conv_transpose": (
        node("ConvTranspose", "x w b", "y", strides=[2, 3], pads=[1, 0, 0, 1], output_padding=[1, 0], group=2),
        {"x": _random(2, 4, 4, 3)}, {"w": _random(4, 3, 3, 3), "b": _random(6)},
    ),
    "conv_transpose_of_a_shape": (
        node("ConvTranspose", "x w", "y", strides=[2, 2], output_shape=[9, 8]), {"x": _random(1, 2, 4, 4)}, {"w": _random(2, 2, 3, 3)},
    ),
    "max_pool_ceil": (
        node("MaxPool", "x", "y at", kernel_shape=[3, 2], strides=[2, 2], ceil_mode=1, pads=[1, 0, 1, 0]), {"x": _random(2, 3, 8, 7)}, {},
    ),
    "average_pool_ceil": (
        node("AveragePool", "x", "y", kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1, count_include_pad=1, pads=[1, 1, 0, 0]),
        {"x": _random(2, 3, 8, 6)}, {},
    ),
    "resize_cubic": (
        node("Resize", "x - scales", "y", mode="cubic", coordinate_transformation_mode="align_corners"),
        {"x": _random(1, 2, 5, 6)}, {"scales": np.array([1, 1, 1.6, 2.5], F)},
    ),
    "resize_nearest_sizes": (
        node("Resize", "x - - sizes", "y", nearest_mode="floor", coordinate_transformation_mode="asymmetric"),
        {"x": _random(1, 2, 5, 6)}, {"sizes": np.array([1, 2, 8, 4], np.int64)},
    ),
    "resize_antialias": (
        node("Resize", "x - - sizes", "y", mode="linear", antialias=1), {"x": _random(1, 2, 12, 9)}, {"sizes": np.array([1, 2, 5, 4], np.int64)},
    ),
    "lstm_both_ways": (
        node("LSTM", "x w r b lengths - - p", "y h c", hidden_size=3, direction="bidirectional"),
        {"x": _random(5, 2, 4), "lengths": np.array([5, 3], np.int32)},
        {"w": _random(2, 12, 4), "r": _random(2, 12, 3), "b": _random(2, 24), "p": _random(2, 9)},
    ),
    "gru_reverse": (
        node("GRU", "x w r b", "y h", hidden_size=3, direction="reverse", linear_before_reset=1, clip=0.5), {"x": _random(5, 2, 4)},
        {"w": _random(1, 9, 4), "r": _random(1, 9, 3), "b": _random(1, 18)},
    ),
    "slice_backwards": (
        node("Slice", "x first last axes steps", "y"), {"x": _random(5, 6)},
        {"first": np.array([-1, 100], np.int64), "last": np.array([-100, 1], np.int64), "axes": np.array([0, 1], np.int64),
         "steps": np.array([-2, -1], np.int64)},
    ),
    "top_k_smallest": (
        node("TopK", "x k", "y at", largest=0), {"x": np.array([[3, 1, 2, 1, 0]], F)}, {"k": np.array([3], np.int64)},
    ),
    "grid_sample_cubic": (
        node("GridSample", "x grid", "y", mode="bicubic", padding_mode="reflection"),
        {"x": _random(1, 2, 5, 6), "grid": (RNG.random((1, 4, 3, 2)) * 3 - 1.5).astype(F)}, {},
    ),
    "scatter_elements_add": (
        node("ScatterElements", "x at u", "y", axis=1, reduction="add"),
        {"x": _random(2, 5), "at": np.array([[1, -1], [0, 0]], np.int64), "u": _random(2, 2)}, {},
    ),
    "q_linear_conv": (
        node("QLinearConv", "x s z w ws wz ys yz b", "y", pads=[1, 1, 1, 1]), {"x": RNG.integers(0, 255, (1, 3, 5, 5)).astype(_U8)},
        {**_QUANTISED, "w": RNG.integers(-128, 127, (4, 3, 3, 3)).astype(np.int8), "ws": (RNG.random(4) / 50).astype(F),
         "wz": np.zeros(4, np.int8), "b": RNG.integers(-500, 500, 4).astype(np.int32)},
    ),
    "softmax_of_opset_11": (node("Softmax", "x", "y", axis=1), {"x": _X}, {}),
    "group_norm": (node("GroupNormalization", "x g c", "y", num_groups=2), {"x": _random(2, 4, 3)}, {"g": _random(2), "c": _random(2)}),
    "cumulative_sum": (node("CumSum", "x axis", "y", exclusive=1, reverse=1), {"x": _X}, {"axis": np.array(1, np.int64)}),
    "integer_division": (
        node("Div", "x d", "y"), {"x": np.array([7, -7, 8, -9], np.int32)}, {"d": np.array([2, 2, -3, -3], np.int32)},
    ),
    "fused_conv": (
        node("FusedConv", "x w b", "y", domain=_MS, activation="LeakyRelu", activation_params=[0.2], pads=[1, 1, 1, 1]),
        {"x": _random(2, 3, 5, 5)}, {"w": _random(4, 3, 3, 3), "b": _random(4)},
    ),
    "fused_mat_mul": (node("FusedMatMul", "x w", "y", domain=_MS, transB=1, alpha=0.5), {"x": _random(2, 3, 4)}, {"w": _random(5, 4)}),
    "bias_gelu": (node("BiasGelu", "x b", "y", domain=_MS), {"x": _X}, {"b": _random(8)}),
    "fast_gelu": (node("FastGelu", "x b", "y", domain=_MS), {"x": _X}, {"b": _random(8)}),
    "quick_gelu": (node("QuickGelu", "x", "y", domain=_MS, alpha=1.5), {"x": _X}, {}),
    "skip_layer_norm": (
        node("SkipLayerNormalization", "x k g c b", "y - - s", domain=_MS, epsilon=1e-5), {"x": _X, "k": _random(2, 6, 8)},
        {"g": _random(8), "c": _random(8), "b": _random(8)},
    ),
    "skip_rms_norm": (
        node("SkipSimplifiedLayerNormalization", "x k g", "y", domain=_MS, epsilon=1e-5), {"x": _X, "k": _random(2, 6, 8)},
        {"g": _random(8)},
    ),
    "embed_layer_norm": (
        node("EmbedLayerNormalization", "ids seg words places kinds g c mask", "y n", domain=_MS, epsilon=1e-5),
        {"ids": np.array([[1, 2, 0]], np.int32), "seg": np.array([[0, 1, 1]], np.int32), "mask": np.array([[1, 1, 0]], np.int32)},
        {"words": _random(5, 8), "places": _random(6, 8), "kinds": _random(2, 8), "g": _random(8), "c": _random(8)},
    ),
    "attention": (
        node("Attention", "x w b mask", "y", domain=_MS, num_heads=2),
        {"x": _X, "mask": np.array([[1] * 6, [1, 1, 1, 0, 0, 0]], np.int32)}, {"w": _random(8, 24), "b": _random(24)},
    ),
    "causal_attention": (
        node("Attention", "x w b", "y", domain=_MS, num_heads=4, unidirectional=1), {"x": _X}, {"w": _random(8, 24), "b": _random(24)},
    ),
    "multi_head_attention": (
        node("MultiHeadAttention", "q k v b", "y", domain=_MS, num_heads=2),
        {"q": _random(2, 3, 8), "k": _random(2, 5, 8), "v": _random(2, 5, 8)}, {"b": _random(24)},
    ),
    "q_linear_add": (node("QLinearAdd", "a s z b s z ys yz", "y", domain=_MS), {"a": RNG.integers(0, 255, (2, 8)).astype(_U8)}, _QUANTISED),
    "q_linear_mul": (node("QLinearMul", "a s z b s z ys yz", "y", domain=_MS), {"a": RNG.integers(0, 255, (2, 8)).astype(_U8)}, _QUANTISED),
    "q_linear_sigmoid": (
        node("QLinearSigmoid", "a s z ys yz", "y", domain=_MS), {"a": RNG.integers(0, 255, (2, 8)).astype(_U8)},
        {name: _QUANTISED[name] for name in ("s", "z", "ys", "yz")},
    ),
    "q_linear_concat": (
        node("QLinearConcat", "ys yz a s z b s z", "y", domain=_MS, axis=1), {"a": RNG.integers(0, 255, (2, 3)).astype(_U8)}, _QUANTISED,
    ),
    "dynamic_quantize_mat_mul": (
        node("DynamicQuantizeMatMul", "x w ws wz", "y", domain=_MS), {"x": _random(3, 8)},
        {"w": RNG.integers(0, 255, (8, 4)).astype(_U8), "ws": np.array([0.02], F), "wz": np.array([128], _U8)},
    ),
    "scaler": (node("Scaler", "x", "y", domain=_ML, offset=[0.5, 1.0, -1.0], scale=[2.0, 0.5, 3.0]), {"x": _random(4, 3)}, {}),
    "normalizer": (node("Normalizer", "x", "y", domain=_ML, norm="L2"), {"x": _random(4, 3)}, {}),
    "linear_regressor": (
        node("LinearRegressor", "x", "y", domain=_ML, coefficients=[0.5, -1.0, 2.0, 1.0, 0.0, 3.0], intercepts=[0.1, 0.2], targets=2),
        {"x": _random(4, 3)}, {},
    ),
    "linear_classifier": (
        node("LinearClassifier", "x", "label y", domain=_ML, classlabels_ints=[3, 5, 7], coefficients=list(map(float, range(9))),
             intercepts=[0.1, 0.2, 0.3], post_transform="SOFTMAX"), {"x": _random(4, 3)}, {},
    ),
    "binary_linear_classifier": (
        node("LinearClassifier", "x", "label y", domain=_ML, classlabels_ints=[0, 1], coefficients=[-0.5, 1.0, -2.0, 0.5, -1.0, 2.0],
             intercepts=[-0.1, 0.1], multi_class=1, post_transform="LOGISTIC"), {"x": _random(4, 3)}, {},
    ),
    "tree_regressor": (
        node("TreeEnsembleRegressor", "x", "y", domain=_ML, n_targets=2, base_values=[0.5, -0.5], **_TREES,
             **_leaves("target", [0, 1, 0, 1, 0])), {"x": _random(16, 3)}, {},
    ),
    "averaged_trees": (
        node("TreeEnsembleRegressor", "x", "y", domain=_ML, n_targets=1, aggregate_function="AVERAGE", **_TREES,
             **_leaves("target", [0] * 5)), {"x": _random(16, 3)}, {},
    ),
    "tree_classifier": (
        node("TreeEnsembleClassifier", "x", "label y", domain=_ML, classlabels_int64s=[4, 5, 6], post_transform="SOFTMAX", **_TREES,
             **_leaves("class", [0, 1, 2, 1, 0])), {"x": _random(16, 3)}, {},
    ),
    "binary_tree_classifier": (
        node("TreeEnsembleClassifier", "x", "label y", domain=_ML, classlabels_int64s=[0, 1], post_transform="LOGISTIC", **_TREES,
             **_leaves("class", [0] * 5)), {"x": _random(16, 3)}, {},
    ),
    "label_encoder": (
        node("LabelEncoder", "x", "y", domain=_ML, keys_int64s=[1, 2, 3], values_int64s=[10, 20, 30], default_int64=-7),
        {"x": np.array([[3, 1], [2, 9]], np.int64)}, {},
    ),
    "quantize_near_halves": (
        node("QuantizeLinear", "x s z", "y"), {"x": (np.arange(-300, 300) * 0.05).astype(F)},
        {"s": np.array(0.1, F), "z": np.array(128, _U8)},
    ),
    "cast_to_uint32": (node("Cast", "x", "y", to=onnx.TensorProto.UINT32), {"x": np.array([1.5, -1.5, -200, 3e9], F)}, {}),
    "cast_to_uint64": (node("Cast", "x", "y", to=onnx.TensorProto.UINT64), {"x": np.array([1.5, -1.5, 1e19], F)}, {}),
    "q_gemm": (
        node("QGemm", "x s z b cs cz - ys yz", "y", domain=_MS, transB=1), {"x": RNG.integers(0, 255, (3, 4)).astype(_U8)},
        {"s": np.array(0.02, F), "z": np.array(120, _U8), "b": RNG.integers(-9, 9, (5, 4)).astype(np.int8),
         "cs": np.array(0.1, F), "cz": np.array(0, np.int8), "ys": np.array(0.05, F), "yz": np.array(100, _U8)},
    ),
    "q_gemm_to_float": (
        node("QGemm", "x s z b cs cz c", "y", domain=_MS, alpha=0.5), {"x": RNG.integers(0, 255, (3, 4)).astype(_U8)},
        {"s": np.array(0.02, F), "z": np.array(120, _U8), "b": RNG.integers(-9, 9, (4, 2)).astype(np.int8),
         "cs": np.array([0.1, 0.2], F), "cz": np.array([0, 1], np.int8), "c": np.array([7, -9], np.int32)},
    ),
    "linear_classifier_of_one_score": (
        node("LinearClassifier", "x", "label y", domain=_ML, classlabels_ints=[3, 4], coefficients=[1.0, -2.0], intercepts=[0.3]),
        {"x": _random(8, 2)}, {},
    ),
    "binary_trees_with_positive_scores": (
        node("TreeEnsembleClassifier", "x", "label y", domain=_ML, classlabels_int64s=[0, 1], post_transform="LOGISTIC", **_TREES,
             **_leaves("class", [0] * 5) | {"class_weights": [0.1, 0.2, 0.3, 0.1, 0.3]}), {"x": _random(16, 3)}, {},
    ),
    "forest_with_even_votes": (
        node("TreeEnsembleClassifier", "x", "label y", domain=_ML, classlabels_int64s=[0, 1], **_STUMPS), {"x": _random(32, 20)}, {},
    ),
}  # fmt: skip

#: Node, inputs, constants and a part of the refusal by the name of a case.
REFUSED: dict[str, tuple[Any, dict[str, Any], dict[str, Any], str]] = {
    "loop_that_a_request_may_skip": (
        node("Loop", "count go x", "after all", body=helper.make_graph(
            [node("Identity", "go_in", "on"), node("Add", "v v", "next"), node("Identity", "next", "seen")], "body",
            [helper.make_tensor_value_info(*value) for value in (("i", 7, []), ("go_in", 9, []), ("v", 1, [2]))],
            [helper.make_tensor_value_info(*value) for value in (("on", 9, []), ("next", 1, [2]), ("seen", 1, [2]))],
        )),
        {"go": np.array(False), "x": _random(2)}, {"count": np.array(1000, np.int64)}, "a request decides the number of its results",
    ),
    "softmax_of_one_score": (
        node("LinearClassifier", "x", "label y", domain=_ML, classlabels_ints=[3, 4], coefficients=[1.0, -2.0], intercepts=[0.3],
             post_transform="SOFTMAX"),
        {"x": _random(8, 2)}, {}, "one score for two classes",
    ),
    "coefficients_for_more_features_than_the_input_has": (
        node("LinearRegressor", "x", "y", domain=_ML, coefficients=[1.0, -2.0, 3.0]), {"x": _random(8, 2)}, {},
        "coefficients are for 3 features, and its input has 2",
    ),
    "two_base_values_for_one_score": (
        node("TreeEnsembleClassifier", "x", "label y", domain=_ML, classlabels_int64s=[0, 1], base_values=[0.1, 0.2], **_TREES,
             **_leaves("class", [0] * 5)), {"x": _random(4, 3)}, {}, "two base values",
    ),
    "two_classes_with_scores_for_both": (
        node("TreeEnsembleClassifier", "x", "label y", domain=_ML, classlabels_int64s=[0, 1], **_TREES,
             **_leaves("class", [0, 1, 0, 1, 0])), {"x": _random(4, 3)}, {}, "not all scores are for the first",
    ),
}  # fmt: skip


def test_a_score_far_below_zero_is_zero(tmp_path: Path) -> None:
    """The logistic score of a number far below zero is exactly zero. Other tiny scores would give other normalised scores."""
    nodes = [
        node("LinearClassifier", "x", "label scores", domain=_ML, classlabels_ints=[3, 4, 5], coefficients=[1.0, 1.1, 1.2],
             intercepts=[0.0, 0.0, 0.0], post_transform="LOGISTIC"),
        node("Normalizer", "scores", "y", domain=_ML, norm="L1"),
    ]  # fmt: skip
    path = write(tmp_path / "m.onnx", graph(nodes, {"x": (F, [4, 1])}, {"y": (F, [4, 3])}))
    x = np.array([[-40], [-20], [-5], [3]], F)
    [expected] = onnxruntime.InferenceSession(
        str(path), session_options(), providers=["CPUExecutionProvider"]
    ).run(None, {"x": x})
    with jax.enable_x64(True):
        scores = evaluated(Evaluator(read_model(path)), {"x": x})["y"]
    compare(np.asarray(scores), expected, 1e-4, 1e-5)


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_differ_from_onnxruntime_is_refused(name: str, tmp_path: Path) -> None:
    """Nodes for which onnxruntime follows its own rules are refused with the reason."""
    made, inputs, constants, reason = REFUSED[name]
    proto = graph([made], {key: (array.dtype, array.shape) for key, array in inputs.items()}, {}, constants)
    proto.output.extend(onnx.ValueInfoProto(name=output) for output in made.output)
    evaluator = Evaluator(read_model(write(tmp_path / "case.onnx", proto)))
    with jax.enable_x64(True), pytest.raises(BundleError, match=reason):
        jax.eval_shape(lambda arrays: evaluator(evaluator.weights, **arrays), inputs)


@pytest.mark.parametrize("name", CASES)
def test_the_result_is_onnxruntimes(name: str, tmp_path: Path) -> None:
    """Each output has the values, the shape and the element type of onnxruntime's output."""
    made, inputs, constants = CASES[name]
    # The outputs have no types in the graph: onnxruntime finds them out.
    proto = graph([made], {key: (array.dtype, array.shape) for key, array in inputs.items()}, {}, constants)
    proto.output.extend(onnx.ValueInfoProto(name=output) for output in made.output if output)
    path = write(tmp_path / "case.onnx", proto, opset=11 if name.endswith("opset_11") else 18)
    session = onnxruntime.InferenceSession(str(path), session_options(), providers=["CPUExecutionProvider"])
    with jax.enable_x64(True):
        results = evaluated(Evaluator(read_model(path)), inputs)
    for output, expected in zip(session.get_outputs(), session.run(None, inputs), strict=True):
        compare(np.asarray(results[output.name]), expected, 1e-4, 1e-5)
