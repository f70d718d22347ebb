"""Exporting ONNX files, and what is refused."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import GraphProto, TensorProto, helper, numpy_helper

from rsrv_bundle import Bundle, BundleError, from_onnx
from rsrv_bundle.cli import main
from rsrv_bundle.from_onnx import eager_onnx, export_onnx
from rsrv_bundle.onnx_import.model import read_model
from tests.onnx_files import KERNEL, TABLE, encoder, graph, node, write


def export(folder: Path, made: Any, **options: Any) -> Bundle:
    """Write a file with this graph, and export it."""
    return export_onnx(write(folder / "m.onnx", made), out_dir=folder / "m", **options)


def test_a_padded_axis_is_called_by_its_name_in_the_file(tmp_path: Path) -> None:
    """The user names the padded axis as the file does. A product with the mask is exported, because padding changes no row.

    A mean over the padded axis is refused.
    """
    dims = ["rows", "sequence"]
    masked = graph(
        [node("Mul", "x mask", "y")],
        dict.fromkeys(("x", "mask"), (np.float32, dims)),
        {"y": (np.float32, dims)},
    )
    options: dict[str, Any] = {"batch_sizes": (1, 2), "input_shapes": [{"sequence": 3}, {"sequence": 8}]}

    bundle = export_onnx(
        write(tmp_path / "m.onnx", masked), out_dir=tmp_path / "m", pad="sequence=1,mask=mask", **options
    )

    assert bundle.manifest.pad is not None
    assert bundle.manifest.pad.values == {"x": 1, "mask": 0}
    assert bundle.manifest.padded_axis(bundle.manifest.outputs[0]) == 1
    with pytest.raises(BundleError, match=r"a row of .* changes with padding behind it"):
        export_onnx(encoder(tmp_path / "e.onnx"), out_dir=tmp_path / "e", pad="sequence=0", **options)


def test_symbolic_dimensions_become_the_batch_and_the_variants(tmp_path: Path) -> None:
    """The first axis of the first input is the batch. --input-shape gives sizes to the other named axes."""
    file = encoder(tmp_path / "m.onnx")
    bundle = export_onnx(
        file, out_dir=tmp_path / "m", batch_sizes=(1, 4), input_shapes=[{"sequence": 3}, {"sequence": 8}]
    )
    manifest = bundle.manifest
    assert [(spec.name, spec.dtype, spec.dims) for spec in manifest.inputs] == [("ids", "i64", (-1, -1))]
    assert [(spec.name, spec.dtype, spec.dims) for spec in manifest.outputs] == [("y", "f32", (-1, 30))]
    assert len(bundle.modules) == 4
    # The example's indices are within the table. Indices beyond the table would give a large error.
    error = manifest.numerics["max_rel_error"]
    assert isinstance(error, float)
    assert error < 1e-5
    assert {weight.name for weight in bundle.weights} == {"table", "kernel"}
    assert manifest.provenance["onnx_producer"] == "tests"
    ids = np.array([[1, 39, 2]])
    expected = TABLE[ids].mean(1) @ KERNEL
    np.testing.assert_allclose(eager_onnx(file)(ids=ids).values[0], expected, rtol=1e-5)


def test_one_variant_fixes_the_axes(tmp_path: Path) -> None:
    bundle = export_onnx(
        encoder(tmp_path / "m.onnx"), out_dir=tmp_path / "m", input_shapes=[{"rows": 2, "sequence": 3}]
    )
    assert [spec.dims for spec in bundle.manifest.inputs] == [(2, 3)]
    assert not bundle.manifest.batched


def test_a_batch_of_one_row_in_the_file_grows(tmp_path: Path) -> None:
    """Most models for pictures have a batch of 1 in the file. The bundle takes more rows if the operators allow it."""
    made = graph([node("Relu", "x", "y")], {"x": (np.float32, [1, 3])}, {"y": (np.float32, [1, 3])})
    bundle = export(tmp_path, made, batch_sizes=(1, 4))
    assert bundle.manifest.inputs[0].dims == (-1, 3)


def test_a_batch_of_one_row_that_the_graph_writes_down_grows(tmp_path: Path) -> None:
    """Detectors contain a reshape to [1, -1, 3], which would join the rows of a larger batch. So each row is computed alone."""
    nodes = [node("Reshape", "x shape", "boxes"), node("Softmax", "boxes", "y", axis=1)]
    made = graph(
        nodes,
        {"x": (np.float32, [1, 3, 4])},
        {"y": (np.float32, [1, 4, 3])},
        {"shape": np.array([1, -1, 3], np.int64)},
    )
    file, bundle = write(tmp_path / "m.onnx", made), tmp_path / "m"
    manifest = export_onnx(file, out_dir=bundle, batch_sizes=(1, 4)).manifest
    assert [(spec.dims, spec.batch_axis) for spec in manifest.outputs] == [((-1, 4, 3), 0)]
    assert main(["check", "--numerics", "--onnx", str(file), str(bundle)]) == 0


def test_an_output_without_an_axis_of_one_row_gets_one(tmp_path: Path) -> None:
    """An output without axes, such as one probability, becomes one value for each row of a batch."""
    nodes = [node("ReduceMax", "x", "y", keepdims=0)]
    made = graph(nodes, {"x": (np.float32, [1, 3])}, {"y": (np.float32, [])})
    bundle = export(tmp_path, made, batch_sizes=(1, 4))
    assert bundle.manifest.outputs[0].dims == (-1,)


def test_rows_of_a_dynamically_quantised_model_do_not_share_a_scale(tmp_path: Path) -> None:
    """onnxruntime scales by the largest value in the batch. In the bundle, each row has the scale that it would have alone."""
    nodes = [
        node("DynamicQuantizeLinear", "x", "q scale zero"),
        node("DequantizeLinear", "q scale zero", "y"),
    ]
    dims: Any = (np.float32, ["rows", 3])
    made = graph(nodes, {"x": dims}, {"y": dims})
    bundle = export(tmp_path, made, batch_sizes=(1, 4))
    numerics: Any = bundle.manifest.numerics
    assert set(numerics["rows"]) == {"model.b4"}
    assert numerics["max_rel_error"] < 1e-6


def test_rows_that_are_computed_alone_stay_on_the_axis_that_the_file_names(tmp_path: Path) -> None:
    """Rows that are computed alone are joined along the output's axis named rows. In this test, the output is [1, rows, 3]."""
    nodes = [
        node("DynamicQuantizeLinear", "x", "q scale zero"),
        node("DequantizeLinear", "q scale zero", "wide"),
        node("Unsqueeze", "wide front", "y"),
    ]
    made = graph(
        nodes,
        {"x": (np.float32, ["rows", 3])},
        {"y": (np.float32, [1, "rows", 3])},
        {"front": np.array([0], np.int64)},
    )
    file, bundle = write(tmp_path / "m.onnx", made), tmp_path / "m"
    [output] = export_onnx(file, out_dir=bundle, batch_sizes=(1, 4)).manifest.outputs
    assert (output.dims, output.batch_axis) == ((1, -1, 3), 1)
    assert main(["check", "--numerics", "--onnx", str(file), str(bundle)]) == 0


QUANTISED = [
    node("DynamicQuantizeLinear", "x", "q scale zero"),
    node("DequantizeLinear", "q scale zero", "wide"),
    node("CumSum", "wide time", "total"),
]


@pytest.mark.parametrize("nodes", [[node("CumSum", "x time", "total")], QUANTISED])
def test_time_steps_do_not_become_rows_unless_the_user_says_so(tmp_path: Path, nodes: list[Any]) -> None:
    """An axis of time steps is not taken for the batch, although a state of one row or a quantisation lets rows be computed alone.

    A row that is computed alone would not see the other time steps. The error names the options that help.
    """
    made = graph(
        [*nodes, node("Add", "total state", "y")],
        {"x": (np.float32, ["steps", 3]), "state": (np.float32, [1, 3])},
        {"y": (np.float32, ["steps", 3])},
        {"time": np.array(0)},
    )
    file = write(tmp_path / "m.onnx", made)
    cure = r"so it is not the batch; .*--input-shape steps=SIZE; .*--batch-axis x=0"
    with pytest.raises(BundleError, match=cure):
        export_onnx(file, out_dir=tmp_path / "m", batch_sizes=(1, 4))
    whole = export_onnx(file, out_dir=tmp_path / "whole", input_shapes=[{"steps": 5}])
    assert not whole.manifest.batched
    single = export_onnx(file, out_dir=tmp_path / "single", batch_sizes=(1, 4), batch_axis={"x": 0})
    assert [spec.dims for spec in single.manifest.inputs] == [(-1, 3), (-1, 3)]


def test_rows_beside_an_input_of_one_row_are_the_batch(tmp_path: Path) -> None:
    """In the file, x has a batch axis, and the input `scale` has one row. In the bundle, `scale` has a row for each row of x."""
    made = graph(
        [node("Mul", "x scale", "y")],
        {"x": (np.float32, ["rows", 3]), "scale": (np.float32, [1, 3])},
        {"y": (np.float32, ["rows", 3])},
    )
    bundle = export(tmp_path, made, batch_sizes=(1, 4))
    assert [spec.dims for spec in bundle.manifest.inputs] == [(-1, 3), (-1, 3)]


def test_axes_that_the_file_calls_by_a_question_mark_have_sizes_of_their_own(tmp_path: Path) -> None:
    """Paddle writes "?" for each open axis. Two such axes may have different sizes."""
    dims: Any = (np.float32, [-1, "?", "?"])
    made = graph([node("Exp", "x", "y")], {"x": dims}, {"y": dims})
    bundle = export(
        tmp_path,
        made,
        batch_sizes=(1,),
        input_shapes=[{"x_1": 4, "x_2": 6}],
    )
    assert bundle.manifest.inputs[0].dims == (-1, 4, 6)


@pytest.mark.parametrize("rows", [1, None])
def test_the_batch_of_a_state_is_its_axis_without_a_size(tmp_path: Path, rows: int | None) -> None:
    """The first axis of a state [2, rows, 3] counts layers. The file gives its size, so the batch is the second axis."""
    made = graph(
        [node("Add", "x state", "after")],
        {"x": (np.float32, [rows, 3]), "state": (np.float32, [2, rows, 3])},
        {"after": (np.float32, [2, rows, 3])},
    )
    bundle = export(tmp_path, made, batch_sizes=(1, 4))
    assert [spec.batch_axis for spec in bundle.manifest.inputs] == [0, 1]
    assert bundle.manifest.outputs[0].batch_axis == 1


@pytest.mark.parametrize("op", ["OneHot", "Equal"])
def test_an_index_that_is_written_as_a_mask_has_all_its_values(tmp_path: Path, op: str) -> None:
    """A model turns each index into a row of 0 and 1. Examples may still have all indices of the table, and not only 0 and 1."""
    if op == "OneHot":
        nodes = [node("OneHot", "ids depth values", "hot")]
    else:
        nodes = [node("Unsqueeze", "ids last", "column"), node("Equal", "column classes", "same")]
        nodes.append(node("Cast", "same", "hot", to=onnx.TensorProto.FLOAT))
    nodes.append(node("MatMul", "hot table", "y"))
    constants = {
        "depth": np.array([40], np.int64),
        "values": np.array([0, 1], np.float32),
        "last": np.array([-1], np.int64),
        "classes": np.arange(40),
        "table": TABLE,
    }
    used = {name: value for name, value in constants.items() if any(name in n.input for n in nodes)}
    dims = {"ids": (np.int64, ["rows", 6])}
    made = graph(nodes, dims, {"y": (np.float32, ["rows", 6, TABLE.shape[1]])}, used)
    model = read_model(write(tmp_path / "m.onnx", made))
    assert from_onnx._table_size(model, "ids") == 40


@pytest.mark.parametrize(
    ("nodes", "depth"),
    [
        (node("OneHot", "ids", "y"), 3.0),
        (node("OneHot", "ids depth values", "y"), np.nan),
        (node("OneHot", "ids depth values", "y"), np.inf),
        (node("Gather", "ids", "y"), 3.0),
        (node("EmbedLayerNormalization", "ids", "y", domain="com.microsoft"), 3.0),
    ],
)
def test_a_damaged_node_with_an_index_is_named(tmp_path: Path, nodes: Any, depth: float) -> None:
    """A node that reads indices, but lacks its inputs or a valid number of values, is named with its operator."""
    constants = {"depth": np.array([depth], np.float32), "values": np.array([0, 1], np.float32)}
    constants = {name: value for name, value in constants.items() if name in nodes.input}
    made = graph([nodes], {"ids": (np.int64, ["rows", 6])}, {"y": (np.float32, ["rows", 6, 3])}, constants)
    with pytest.raises(BundleError, match=f"operator .*{nodes.op_type} at node 'y': "):
        export(tmp_path, made, batch_sizes=(1, 2))


def test_samples_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --samples, a model that fails on random numbers is exported. The first axis of each array counts the samples."""
    made = graph(
        [node("Gather", "table spot", "row"), node("Mul", "row x", "y")],
        {"x": (np.float32, ["rows", 4]), "spot": (np.int32, ["rows", 4])},
        {"y": (np.float32, ["rows", 4])},
        {"table": np.array([np.inf, 1.0], np.float32)},
    )
    file, samples = write(tmp_path / "m.onnx", made), tmp_path / "samples.npz"
    command = ["export", "--onnx", str(file), "-o", str(tmp_path / "m"), "--batch-sizes", "1,2"]
    np.savez(samples, x=np.ones((3, 4), np.float32), spot=np.ones((3, 4), np.int64))
    assert main([*command, "--samples", str(samples)]) == 1
    assert "samples: spot: is int64[3, 4]; the model takes int32[samples, 4]" in capsys.readouterr().err
    np.savez(samples, x=np.ones((3, 4), np.float32), spot=np.ones((2, 4), np.int32))
    assert main([*command, "--samples", str(samples)]) == 1
    assert "samples: their first axes differ: [2, 3]" in capsys.readouterr().err
    np.savez(samples, x=np.full((3, 4), 2, np.float32), spot=np.ones((3, 4), np.int32))
    assert main([*command, "--samples", str(samples)]) == 0
    assert main([*command, "--samples", str(samples), str(samples)]) == 2


def recurrent(path: Path) -> Path:
    """Write a cell with a state [2, rows, 3], whose batch is on the second axis, and a rate that is a scalar input."""
    nodes = [
        node("Cast", "rate", "scale", to=onnx.TensorProto.FLOAT),
        node("Mul", "x scale", "scaled"),
        node("Add", "scaled state", "after"),
        node("ReduceSum", "after axes", "y", keepdims=0),
    ]
    inputs = {"x": (np.float32, ["rows", 3]), "state": (np.float32, [2, "rows", 3]), "rate": (np.int64, [])}
    outputs = {"y": (np.float32, ["rows", 3]), "after": (np.float32, [2, "rows", 3])}
    return write(path, graph(nodes, inputs, outputs, {"axes": np.array([0], np.int64)}))


def test_a_batch_of_one_row_may_grow_along_another_axis_of_the_output(tmp_path: Path) -> None:
    """Text recognisers return [time, batch, classes], so the answers of onnxruntime for single rows are joined along the second axis."""
    nodes = [node("Transpose", "x", "turned", perm=[1, 0, 2]), node("Exp", "turned", "y")]
    made = graph(nodes, {"x": (np.float32, [1, 5, 4])}, {"y": (np.float32, [5, 1, 4])})
    bundle = export(tmp_path, made, batch_sizes=(1, 3))
    assert bundle.manifest.outputs[0].batch_axis == 1


def test_state_has_its_batch_where_the_file_names_it(tmp_path: Path) -> None:
    """The state's batch axis has the name of the first input's first axis. An input that the user binds is not an input of the bundle."""
    bundle = export_onnx(
        recurrent(tmp_path / "m.onnx"), out_dir=tmp_path / "m", batch_sizes=(1, 4), bind={"rate": 2}
    )
    assert [(spec.name, spec.dims, spec.batch_axis) for spec in bundle.manifest.inputs] == [
        ("x", (-1, 3), 0),
        ("state", (2, -1, 3), 1),
    ]


def test_models_with_the_same_layers_have_the_same_modules(tmp_path: Path) -> None:
    """Small biases, scales and kernels are weights, so that two fine-tunes have equal modules, which are compiled once."""

    def export_with(seed: int) -> Bundle:
        rng = np.random.default_rng(seed)
        values = {
            "kernel": (2, 1, 3),
            **dict.fromkeys(("bias", "scale", "shift", "mean"), (2,)),
            "head": (6, 3),
            "last": (1,),
        }
        constants = {name: rng.standard_normal(shape, np.float32) for name, shape in values.items()}
        constants |= {"var": rng.uniform(1, 2, 2).astype(np.float32), "flat": np.array([0, -1])}
        made = graph(
            [
                node("Conv", "x kernel bias", "a", pads=[1, 1]),
                node("BatchNormalization", "a scale shift mean var", "b"),
                node("Reshape", "b flat", "c"),
                node(
                    "Constant", "", "own", value=numpy_helper.from_array(rng.standard_normal(3, np.float32))
                ),
                node("Gemm", "c head last", "d"),
                node("Add", "d own", "y"),
            ],
            {"x": (np.float32, ["rows", 1, 3])},
            {"y": (np.float32, ["rows", 3])},
            constants,
        )
        folder = tmp_path / str(seed)
        folder.mkdir()
        return export(folder, made, batch_sizes=(1, 2))

    one, other = export_with(1), export_with(2)
    modules, others = ([file.read_bytes() for file in bundle.modules.values()] for bundle in (one, other))
    assert modules == others
    assert {weight.name for weight in one.weights} == {
        *("kernel", "bias", "scale", "shift", "mean", "var", "head", "last", "own"),
    }


def test_the_values_of_constant_nodes_are_weights_of_any_size(tmp_path: Path) -> None:
    """A layer reads a large and a small value of `Constant` nodes. Both are weights."""
    large, small = np.ones((3, 300), np.float32), np.arange(300, dtype=np.float32)[:2]
    made = graph(
        [
            node("Constant", "", "large", value=numpy_helper.from_array(large)),
            node("Constant", "", "small", value=numpy_helper.from_array(small)),
            node("MatMul", "x large", "a"),
            node("Slice", "a begin end axis", "b"),
            node("Mul", "b small", "y"),
        ],
        {"x": (np.float32, ["rows", 3])},
        {"y": (np.float32, ["rows", 2])},
        {"begin": np.array([0]), "end": np.array([2]), "axis": np.array([1])},
    )
    bundle = export(tmp_path, made, batch_sizes=(1, 2))
    assert sorted(weight.shape for weight in bundle.weights) == [(2,), (3, 300)]


def test_small_numbers_that_determine_a_shape_stay_known(tmp_path: Path) -> None:
    """A small constant that scales a shape is no weight, even if it is computed from others, because shapes are fixed at export."""
    made = graph(
        [
            node("Shape", "x", "shape"),
            node("Cast", "shape", "sizes", to=TensorProto.FLOAT),
            node("Mul", "half four", "factors"),
            node("Mul", "sizes factors", "scaled"),
            node("Cast", "scaled", "goal", to=TensorProto.INT64),
            node("Reshape", "x goal", "r"),
            node("Mul", "r scale", "y"),
        ],
        {"x": (np.float32, [1, 4])},
        {"y": (np.float32, [2, 2])},
        {
            "half": np.array([0.5, 0.5], np.float32),
            "four": np.array([4, 1], np.float32),
            "scale": np.array([3, 4], np.float32),
        },
    )
    bundle = export(tmp_path, made, batch_sizes=())
    assert [spec.dims for spec in bundle.manifest.outputs] == [(2, 2)]
    assert {weight.name for weight in bundle.weights} == {"scale"}


def test_a_small_constant_of_an_inner_graph_is_a_weight(tmp_path: Path) -> None:
    """A loop's body reads a constant of its own, and one of the whole graph with the same name as a weight has. Both are weights."""
    outer, own = np.array([1, 2, 3], np.float32), np.array([2, 1, 0.5], np.float32)
    body = graph(
        [node("Add", "v outer", "sum"), node("Mul", "sum own", "next"), node("Identity", "on", "on_after")],
        {"i": (np.int64, []), "on": (np.bool_, []), "v": (np.float32, ["rows", 3])},
        {"on_after": (np.bool_, []), "next": (np.float32, ["rows", 3])},
        {"own": own},
    )
    made = graph(
        [node("Loop", "count on x", "y", body=body)],
        {"x": (np.float32, ["rows", 3])},
        {"y": (np.float32, ["rows", 3])},
        {"count": np.array(2), "on": np.array(True), "outer": outer},
    )
    bundle = export(tmp_path, made, batch_sizes=(1, 2))
    assert {weight.name for weight in bundle.weights} == {"own", "outer"}


def test_an_inner_value_can_be_the_output(tmp_path: Path) -> None:
    """If the output is an inner value, the rest of the graph and its weights are left out of the bundle."""
    bundle = export_onnx(
        encoder(tmp_path / "m.onnx"),
        out_dir=tmp_path / "m",
        batch_sizes=(1,),
        input_shapes=[{"sequence": 3}],
        outputs=["mean"],
    )
    assert [spec.name for spec in bundle.manifest.outputs] == ["mean"]
    assert {weight.name for weight in bundle.weights} == {"table"}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "axis 0 has no fixed size.*--input-shape rows=SIZE"),
        ({"batch_sizes": (1,)}, "axis 1 has no fixed size.*--input-shape sequence=SIZE"),
        (
            {"batch_sizes": (1,), "input_shapes": [{"sequence": 3, "width": 4}]},
            "no open axis is called 'width'.*sequence",
        ),
        ({"batch_sizes": (1,), "batch_axis": {"id": 0}}, "no input 'id'"),
        ({"batch_sizes": (1,), "batch_axis": {"ids": 2}}, "has axes 0 to 1, not 2"),
        ({"bind": {"rate": 1}}, "no input 'rate'; it has ids"),
        ({"bind": {"ids": 1.5}}, "must be a whole number"),
        ({"outputs": ["z"]}, "no value 'z'"),
    ],
)
def test_wrong_options_are_named(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    with pytest.raises(BundleError, match=text):
        export_onnx(encoder(tmp_path / "m.onnx"), out_dir=tmp_path / "m", **options)


def test_one_whole_number_per_row_is_a_length(tmp_path: Path) -> None:
    """An input of one integer per row is probably a length. So examples have lengths up to the longest axis.

    With smaller integers, only the first elements would affect the answer.
    """
    nodes = [
        node("Unsqueeze", "lengths one", "column"),
        node("Less", "places column", "inside"),
        node("Cast", "inside", "kept", to=onnx.TensorProto.FLOAT),
        node("Mul", "x kept", "y"),
    ]
    inputs: dict[str, Any] = {"x": (np.float32, ["rows", 8]), "lengths": (np.int64, ["rows"])}
    constants = {"one": np.array([1], np.int64), "places": np.arange(8)[None]}
    file = write(tmp_path / "m.onnx", graph(nodes, inputs, {"y": (np.float32, ["rows", 8])}, constants))
    seen = []
    evaluate = from_onnx._original

    def watched(*arguments: Any) -> Any:
        original = evaluate(*arguments)

        def run(**tensors: Any) -> Any:
            seen.append(tensors["lengths"])
            return original.run(**tensors)

        return dataclasses.replace(original, run=run)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(from_onnx, "_original", watched)
        export_onnx(file, out_dir=tmp_path / "m", batch_sizes=(1, 8))
    lengths = np.concatenate(seen)
    assert lengths.min() >= 1
    assert 4 < lengths.max() <= 8


def test_a_scalar_cannot_have_rows(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"input 'rate': has no axes.*--bind rate=VALUE"):
        export_onnx(recurrent(tmp_path / "m.onnx"), out_dir=tmp_path / "m", batch_sizes=(1,))


# --- what cannot be compiled ------------------------------------------------------------------------------


def test_a_bundle_with_a_fixed_input_and_a_chosen_output_can_be_compared_again(tmp_path: Path) -> None:
    """`rsrv-bundle check --numerics --onnx` reads the bound input, the chosen output and the batch of one row from the provenance."""
    nodes = [node("Mul", "x scale", "scaled"), node("Exp", "scaled", "y")]
    inputs = {"x": (np.float32, [1, 3]), "scale": (np.float32, [])}
    file = write(tmp_path / "m.onnx", graph(nodes, inputs, {"y": (np.float32, [1, 3])}))
    bundle = tmp_path / "m"
    export_onnx(file, out_dir=bundle, batch_sizes=(1, 2), bind={"scale": 3}, outputs=["scaled"])
    assert main(["check", "--numerics", "--onnx", str(file), str(bundle)]) == 0


def test_an_unknown_operator_is_named_with_its_node(tmp_path: Path) -> None:
    made = graph(
        [helper.make_node("Magic", ["x"], ["y"], name="here", domain="my.own")],
        {"x": (np.float32, [3])},
        {"y": (np.float32, [3])},
    )
    with pytest.raises(
        BundleError, match=r"operator my\.own\.Magic at node 'here': rsrv does not know it.*--outputs"
    ):
        export(tmp_path, made)


def test_an_unknown_operator_of_the_optimiser_is_refused_with_its_cure(tmp_path: Path) -> None:
    """An unknown operator of onnxruntime's optimiser is refused. The error names the remedy: the file as it was before the optimiser."""
    made = graph(
        [helper.make_node("NewFusion", ["x"], ["y"], name="here", domain="com.microsoft")],
        {"x": (np.float32, [3])},
        {"y": (np.float32, [3])},
    )
    with pytest.raises(BundleError, match="use the file from before onnxruntime's optimiser"):
        export(tmp_path, made)


def test_results_of_a_size_that_a_request_decides_are_refused(tmp_path: Path) -> None:
    made = graph([node("NonZero", "x", "y")], {"x": (np.float32, [3])}, {"y": (np.int64, [1, None])})
    with pytest.raises(
        BundleError, match=r"operator NonZero at node 'y': its number of results depends on the values"
    ):
        export(tmp_path, made)


def test_a_request_may_choose_between_branches_of_one_shape(tmp_path: Path) -> None:
    """Both branches are computed, and the request's values choose one. Branches of different shapes are refused."""

    def file(shape: list[int]) -> Path:
        yes = helper.make_graph(
            [node("Add", "x x", "a")], "yes", [], [helper.make_tensor_value_info("a", 1, [3])]
        )
        no = helper.make_graph(
            [node("Slice", "x start end", "b")], "no", [], [helper.make_tensor_value_info("b", 1, shape)]
        )
        nodes = [
            node("ReduceSum", "x", "sum", keepdims=0),
            node("Greater", "sum zero", "positive"),
            node("If", "positive", "y", then_branch=yes, else_branch=no),
        ]
        constants = {
            "zero": np.zeros((), np.float32), "start": np.zeros(1, np.int64), "end": np.array(shape, np.int64),
        }  # fmt: skip
        made = graph(nodes, {"x": (np.float32, [3])}, {"y": (np.float32, [None])}, constants)
        return write(tmp_path / f"m{shape[0]}.onnx", made)

    export_onnx(file([3]), out_dir=tmp_path / "same")
    with pytest.raises(BundleError, match="different shapes, and its condition depends on a request"):
        export_onnx(file([2]), out_dir=tmp_path / "other")


# --- hostile files ----------------------------------------------------------------------------------------


def with_external(folder: Path, location: str, **entries: int) -> Path:
    """Write a model with a weight of 16 bytes in another file."""
    folder.mkdir(exist_ok=True)
    made = graph(
        [node("Add", "x w", "y")],
        {"x": (np.float32, [4])},
        {"y": (np.float32, [4])},
        {"w": np.ones(4, np.float32)},
    )
    tensor = made.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in {"location": location, **entries}.items():
        tensor.external_data.add(key=key, value=str(value))
    return write(folder / "m.onnx", made)


def test_external_data_in_the_folder_is_read(tmp_path: Path) -> None:
    values = np.arange(8, dtype=np.float32)
    file = with_external(tmp_path / "in", "weights.bin", offset=16, length=16)
    (tmp_path / "in" / "weights.bin").write_bytes(values.tobytes())
    export_onnx(file, out_dir=tmp_path / "m")
    assert np.array_equal(eager_onnx(file)(x=np.zeros(4, np.float32)).values[0], values[4:])


@pytest.mark.parametrize(
    "location", ["../weights.bin", "/etc/passwd", "a/../../weights.bin", "", "link.bin", "inside/weights.bin"]
)
def test_external_data_outside_of_the_folder_is_refused(tmp_path: Path, location: str) -> None:
    """A path or a link that leads out of the model's folder is refused, also through a linked folder."""
    (tmp_path / "weights.bin").write_bytes(bytes(16))
    file = with_external(tmp_path / "in", location)
    os.symlink(tmp_path / "weights.bin", tmp_path / "in" / "link.bin")
    os.symlink(tmp_path, tmp_path / "in" / "inside")
    with pytest.raises(BundleError, match=r"tensor 'w': its data.*folder"):
        export_onnx(file, out_dir=tmp_path / "m")


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        ({"offset": 4}, "ends at byte 20 .* has only 16"),
        ({"length": 15}, "has 15 bytes in the file, but its shape takes 16"),
        ({"offset": -4}, "its shape takes 16"),
    ],
)
def test_external_data_of_a_wrong_length_is_refused(
    tmp_path: Path, entries: dict[str, int], text: str
) -> None:
    file = with_external(tmp_path / "in", "weights.bin", **entries)
    (tmp_path / "in" / "weights.bin").write_bytes(bytes(16))
    with pytest.raises(BundleError, match=text):
        export_onnx(file, out_dir=tmp_path / "m")


def test_missing_external_data_is_named(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"'weights\.bin' is missing; put it beside the model"):
        export_onnx(with_external(tmp_path / "in", "weights.bin"), out_dir=tmp_path / "m")


def test_a_file_of_trees_alone_needs_no_opset_of_the_standard(tmp_path: Path) -> None:
    """A file that names only the opset of ai.onnx.ml, as the converter of XGBoost writes it, is exported."""
    made = graph(
        [node("Scaler", "x", "y", domain="ai.onnx.ml", scale=[2.0], offset=[0.0])],
        {"x": (np.float32, ["n", 2])},
        {"y": (np.float32, ["n", 2])},
    )
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("ai.onnx.ml", 3)], ir_version=10)
    onnx.save(model, tmp_path / "m.onnx")
    assert export_onnx(tmp_path / "m.onnx", out_dir=tmp_path / "m", batch_sizes=(1, 2)).manifest.batched


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    for name, content in (
        ("text.onnx", b"hello, world"),
        ("empty.onnx", b""),
        ("cut.onnx", encoder(tmp_path / "m").read_bytes()[:-900]),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(BundleError, match="is not an ONNX model, or is damaged"):
            export_onnx(tmp_path / name, out_dir=tmp_path / "out")


def test_a_tensor_of_too_many_elements_is_refused_before_it_is_made(tmp_path: Path) -> None:
    """A tensor of too many elements is refused before it is made, because a file of some bytes can ask for any number of elements."""
    nodes = [node("ConstantOfShape", "shape", "large"), node("ReduceMax", "large", "y", keepdims=0)]
    made = graph(
        nodes, {"x": (np.float32, [1])}, {"y": (np.float32, [])}, {"shape": np.array([10**6] * 3, np.int64)}
    )
    with pytest.raises(BundleError, match=r"ConstantOfShape.*has 10{18} elements, more than"):
        export(tmp_path, made)


def test_a_function_that_calls_itself_is_refused(tmp_path: Path) -> None:
    body = helper.make_node("Again", ["x"], ["y"], domain="my.own")
    function = helper.make_function(
        "my.own", "Again", ["x"], ["y"], [body], [helper.make_opsetid("my.own", 1)]
    )
    made = graph([body], {"x": (np.float32, [1])}, {"y": (np.float32, [1])})
    with pytest.raises(BundleError, match="call each other more than 50 deep"):
        export_onnx(write(tmp_path / "m.onnx", made, functions=[function]), out_dir=tmp_path / "m")


@pytest.mark.parametrize("scans", [False, True])
def test_a_loop_that_ends_by_its_own_count_does_not_hold_the_export(tmp_path: Path, scans: bool) -> None:
    """TensorFlow's loops have no maximum number of rounds: their condition compares a counter. Such a loop is exported in bounded time."""
    body = helper.make_graph(
        [
            node("Add", "count step", "counted"),
            node("Less", "counted end", "on"),
            node("Mul", "value half", "next"),
        ],
        "body",
        [
            helper.make_tensor_value_info(name, kind, shape)
            for name, kind, shape in (("i", 7, []), ("go", 9, []), ("count", 7, []), ("value", 1, [1]))
        ],
        [
            helper.make_tensor_value_info(name, kind, shape)
            for name, kind, shape in (
                ("on", 9, []),
                ("counted", 7, []),
                ("next", 1, [1]),
                *([("value", 1, [1])] if scans else []),
            )
        ],
    )
    constants = {
        "start": np.array(True),
        "zero": np.array(0),
        "step": np.array(1),
        "end": np.array(100),
        "half": np.full(1, 0.98, np.float32),
    }
    nodes = [node("Loop", "- start zero x", "rounds y all" if scans else "rounds y", body=body)]
    outputs: dict[str, Any] = {"y": (np.float32, [1]), **({"all": (np.float32, [100, 1])} if scans else {})}
    made = graph(nodes, {"x": (np.float32, [1])}, outputs, constants)
    bundle = export(tmp_path, made)
    assert b"while" in (bundle.path / "model.mlir").read_bytes()


def adding_one(kind: int) -> GraphProto:
    """Return the body of a loop that adds the constant `one` to its value, a tensor of one element."""
    values = {"i": (TensorProto.INT64, []), "go": (TensorProto.BOOL, []), "value": (kind, [1])}
    results = {"on": (TensorProto.BOOL, []), "next": (kind, [1])}
    return helper.make_graph(
        [node("Add", "value one", "next"), node("Identity", "go", "on")],
        "body",
        [helper.make_tensor_value_info(name, *described) for name, described in values.items()],
        [helper.make_tensor_value_info(name, *described) for name, described in results.items()],
    )


def test_a_long_loop_of_known_numbers_may_make_a_shape(tmp_path: Path) -> None:
    """A long loop that depends on no request is computed at the export, so its result may be a shape."""
    nodes = [
        node("Loop", "count - zero", "sizes", body=adding_one(TensorProto.INT64)),
        node("Expand", "x sizes", "y"),
    ]
    constants = {"count": np.array(20), "zero": np.array([0]), "one": np.array([1])}
    made = graph(nodes, {"x": (np.float32, [1])}, {"y": (np.float32, [20])}, constants)
    bundle = export(tmp_path, made)
    assert bundle.manifest.outputs[0].dims == (20,)


@pytest.mark.parametrize("rounds", [64, 100_000])
def test_a_loop_of_any_length_does_not_hold_the_export(tmp_path: Path, rounds: int) -> None:
    """A long loop, such as Keras's recurrent layers, stays a loop in the module. Only short loops are unrolled."""
    nodes = [node("Loop", "count - x", "y", body=adding_one(TensorProto.FLOAT))]
    made = graph(
        nodes, {"x": (np.float32, [1])}, {"y": (np.float32, [1])},
        {"count": np.array(rounds, np.int64), "one": np.ones(1, np.float32)},
    )  # fmt: skip
    bundle = export(tmp_path, made)
    module = (bundle.path / "model.mlir").read_bytes()
    assert b"while" in module
    assert len(module) < 20_000
