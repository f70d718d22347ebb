"""Meta models whose callees have unusual shapes: no batch axis or a middle one, variants, bf16, and requests without rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from rsrv.runtime.device import Array
from rsrv.stub.endpoint import WireTensor
from rsrv_bundle.export import export_bundle
from tests.fakes import FakeError, FakeRequest
from tests.unit.runtime.conftest import Runtime, StartMeta, StartRuntime
from tests.unit.runtime.metas import ask, assert_fails, assert_y, request, rows


def linear(inputs: Sequence[Array], weights: Sequence[Array]) -> list[Array]:
    """Compute one output for each weight: twice the sum of all inputs, plus this weight."""
    total = np.asarray(sum(inputs[1:], inputs[0]))
    return [(2 * total + weight).astype(total.dtype) for weight in weights]


def export_linear(
    path: Path,
    inputs: Mapping[str, tuple[int, ...]],
    dtype: Any = jnp.float32,
    outputs: int = 1,
    **options: Any,
) -> Path:
    """Export a bundle that computes `linear`.

    The outputs are y, y1, ... with the weights 1, 2, ... By default, the sizes are 1 and 4.
    """
    names = [f"y{i or ''}" for i in range(outputs)]
    export_bundle(
        lambda params, **xs: {name: (2 * sum(xs.values()) + params[name]).astype(dtype) for name in names},
        {name: jnp.full(1, i, dtype) for i, name in enumerate(names, 1)},
        {name: np.zeros(shape, dtype) for name, shape in inputs.items()},
        out_dir=path,
        **{"batch_sizes": [1, 4], **options},
    )
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("linear")
    return {
        "one": export_linear(folder / "one", {"x": (1, 3)}),
        "two": export_linear(folder / "two", {"x": (1, 3), "z": (1, 3)}, outputs=2),
        "middle": export_linear(folder / "middle", {"x": (3, 1, 2)}, batch_axis=1),
        "mixed": export_linear(folder / "mixed", {"x": (3, 1)}, batch_axis=1, axes={"y": "an"}),
        "whole": export_linear(folder / "whole", {"x": (2, 3)}, batch_axis=None, batch_sizes=[]),
        "half": export_linear(folder / "half", {"x": (1, 3)}, jnp.bfloat16),
        "flat": export_linear(folder / "flat", {"x": (1,)}, jnp.int32),
        "varied": export_linear(
            folder / "varied", {"x": (1, 3)}, axes={"x": "na"}, input_shapes=[{"a": 3}, {"a": 5}]
        ),
    }


@pytest.fixture
def runtime(start_runtime: StartRuntime) -> Runtime:
    return start_runtime(compute=linear)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("count", [1, 3, 4])
def test_models_of_several_tensors(
    runtime: Runtime, start_meta: StartMeta, models: dict[str, Path], count: int, keep: bool
) -> None:
    """Each output stays on the device or returns.

    Inputs come from either place, and one value may be used for two inputs.
    """

    def run(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
        x = inputs["x"]
        first = call("two", {"z": x, "x": x + 1}, keep_on_device=["y1"] if keep else False)
        assert set(first) == {"y", "y1"}
        np.testing.assert_array_equal(first["y"], 2 * (2 * x + 1) + 1)
        second = call("two", {"x": first["y"], "z": first["y1"]}, keep_on_device=keep)
        third = call("two", {"x": second["y1"], "z": second["y1"]})
        np.testing.assert_array_equal(third["y1"], third["y"] + 1)
        return {"y": third["y"]}

    engine = start_meta(runtime, run, ["two"], bundles=models)
    (answer,) = ask(engine, request(count, 2))
    # For x = 2, the first call returns 11 and 12, the second one 47 and 48, and the third one 193 as y.
    assert_y(answer, rows(count, 193))


def test_inputs_of_different_numbers_of_rows_do_not_go_together(
    runtime: Runtime, start_meta: StartMeta, models: dict[str, Path]
) -> None:
    """A call with a handle of two rows and an array of three rows is refused."""

    def run(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
        y = call("one", {"x": inputs["x"][:2]}, keep_on_device=True)["y"]
        return call("two", {"x": inputs["x"], "z": y})  # type: ignore[no-any-return]

    engine = start_meta(runtime, run, ["one", "two"], bundles=models)
    (answer,) = ask(engine, request(3))
    assert_fails(answer, FakeError.INVALID_ARG, "stage 'two': ")


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("count", [0, 1, 3, 4])
def test_a_batch_axis_in_the_middle(
    runtime: Runtime, start_meta: StartMeta, models: dict[str, Path], count: int, keep: bool
) -> None:
    """Axis 1 can be the batch axis, with and without padding, for tensors on the host and on the device."""

    def run(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
        x = np.arange(6 * count, dtype=np.float32).reshape(3, count, 2)
        first = call("middle", {"x": x}, keep_on_device=keep)["y"]
        assert first.shape == x.shape
        a, b = call.many([("middle", {"x": first}), ("middle", {"x": x})])
        np.testing.assert_array_equal(a["y"], 2 * (2 * x + 1) + 1)
        np.testing.assert_array_equal(b["y"], 2 * x + 1)
        # A view with permuted axes is not contiguous, so it is copied.
        turned = np.ascontiguousarray(x.transpose(2, 1, 0)).transpose(2, 1, 0)
        np.testing.assert_array_equal(call("middle", {"x": turned})["y"], 2 * x + 1)
        return {"y": inputs["x"]}

    engine = start_meta(runtime, run, ["middle"], bundles=models)
    (answer,) = ask(engine, request(2))
    assert_y(answer, rows(2))


def test_axes_that_differ_do_not_go_together_on_the_device(
    runtime: Runtime, start_meta: StartMeta, models: dict[str, Path]
) -> None:
    """A handle with rows along another axis is refused. The same result can be passed through the host."""

    def run(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
        y = call("one", inputs, keep_on_device=True)["y"]
        if inputs["x"][0, 0] == 1:
            return call("mixed", {"x": y})  # type: ignore[no-any-return]
        return {"y": call("mixed", {"x": call("one", inputs)["y"]})["y"].copy()}

    engine = start_meta(runtime, run, ["mixed", "one"], bundles=models)
    (answer,) = ask(engine, request(3, 1))
    assert_fails(answer, FakeError.INVALID_ARG, "stage 'mixed': input 'x' is on the device")
    (answer,) = ask(engine, request(3, 2))
    assert_y(answer, rows(3, 11))


@pytest.mark.parametrize("keep", [False, True])
def test_models_without_a_batch_axis(
    runtime: Runtime, start_meta: StartMeta, models: dict[str, Path], keep: bool
) -> None:
    """If a model has no batch axis, each of its calls is one execution."""

    def run(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
        first = call("whole", inputs, keep_on_device=keep)["y"]
        assert first.shape == (2, 3)
        b, c = call.many([("whole", {"x": first}), ("whole", {"x": inputs["x"] * 10})])
        return {"y": b["y"] * 1000 + c["y"]}

    client = """
client_inputs: [{name: x, dtype: f32, shape: rc, dims: {r: 2, c: 3}}]
client_outputs: [{name: y, dtype: f32, shape: rc, dims: {r: 2, c: 3}}]
"""
    engine = start_meta(
        runtime,
        run,
        ["whole"],
        bundles=models,
        client=client,
        outputs=(WireTensor("y", "f32", (2, 3)),),
        batched=False,
    )
    for value in (1, 5):
        (answer,) = ask(engine, request(2, value))
        assert_y(answer, rows(2, (4 * value + 3) * 1000 + 20 * value + 1))


def test_a_meta_model_may_return_other_rows_if_it_has_no_batch_axis(
    runtime: Runtime, start_meta: StartMeta, models: dict[str, Path]
) -> None:
    """A meta model without a batch axis, whose axes have size -1, may return any number of rows."""
    client = """
client_inputs: [{name: x, dtype: f32, shape: rc, dims: {r: -1, c: 3}}]
client_outputs: [{name: y, dtype: f32, shape: rc, dims: {r: -1, c: 3}}]
"""

    def run(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
        chosen = inputs["x"][inputs["x"][:, 0] > 2]
        return {"y": call("one", {"x": chosen})["y"]}

    engine = start_meta(runtime, run, ["one"], bundles=models, client=client, batched=False)
    x = np.repeat(np.arange(6, dtype=np.float32), 3).reshape(6, 3)
    (answer,) = ask(engine, FakeRequest({"x": x}))
    assert_y(answer, 2 * x[3:] + 1)
    (answer,) = ask(engine, FakeRequest({"x": x[:2]}))
    assert_y(answer, x[:0])


@pytest.mark.parametrize("keep", [False, True])
def test_bf16_is_its_bits(
    runtime: Runtime, start_meta: StartMeta, models: dict[str, Path], keep: bool
) -> None:
    """In a run, the type of a bf16 tensor is u16, with the same bits."""

    def run(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
        bits = (inputs["x"].view(np.uint32) >> 16).astype(np.uint16)
        first = call("half", {"x": bits}, keep_on_device=keep)["y"]
        assert first.dtype == np.uint16
        second = call("half", {"x": first})["y"]
        return {"y": (second.astype(np.uint32) << 16).view(np.float32)}

    engine = start_meta(runtime, run, ["half"], bundles=models)
    for count in (1, 3):
        (answer,) = ask(engine, request(count, 1.5))
        assert_y(answer, rows(count, 9))


@pytest.mark.parametrize("keep", [False, True])
def test_scalars_per_row(
    runtime: Runtime, start_meta: StartMeta, models: dict[str, Path], keep: bool
) -> None:
    """A tensor of one scalar per row has the shape [n] in a run, as input and as output."""

    def run(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
        x = inputs["x"][:, 0].astype(np.int32)
        first = call("flat", {"x": x}, keep_on_device=keep)["y"]
        assert first.shape == x.shape
        second = call("flat", {"x": first})["y"]
        assert second.shape == x.shape
        return {"y": np.repeat(second.astype(np.float32), 3).reshape(-1, 3)}

    engine = start_meta(runtime, run, ["flat"], bundles=models)
    for count in (1, 3):
        (answer,) = ask(engine, request(count, 5))
        assert_y(answer, rows(count, 23))


@pytest.mark.parametrize("keep", [False, True])
def test_variants_are_chosen_by_shape(
    runtime: Runtime, start_meta: StartMeta, models: dict[str, Path], keep: bool
) -> None:
    """The shape of an input selects the variant, whether the input is an array or a handle. An unknown shape is refused."""

    def run(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
        x = inputs["x"]
        wide = np.full((len(x), 5), x[0, 0], np.float32)
        a, b = call.many([("varied", {"x": x}, keep), ("varied", {"x": wide}, keep)])
        assert b["y"].shape == wide.shape
        c, d = call.many([("varied", {"x": b["y"]}), ("varied", {"x": a["y"]})])
        assert (c["y"] == d["y"][0, 0]).all()
        if x[0, 0] == 7:
            call("varied", {"x": wide[:, :4]})
        return {"y": d["y"]}

    engine = start_meta(runtime, run, ["varied"], bundles=models)
    for count in (1, 3):
        (answer,) = ask(engine, request(count, 5))
        assert_y(answer, rows(count, 23))
    (answer,) = ask(engine, request(1, 7))
    assert_fails(answer, FakeError.INVALID_ARG, "stage 'varied': ")


@pytest.mark.parametrize("keep", [False, True])
def test_no_rows_need_no_device(
    runtime: Runtime, start_meta: StartMeta, models: dict[str, Path], keep: bool
) -> None:
    """Empty requests and calls give empty results without an execution, whether the results are kept or not."""

    def run(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
        empty = call("one", {"x": inputs["x"][:0]}, keep_on_device=keep)["y"]
        assert empty.shape == (0, 3)
        again = call("one", {"x": empty})["y"]
        assert again.shape == (0, 3)
        first = call("one", inputs, keep_on_device=keep)["y"]
        return {"y": call("one", {"x": first})["y"]}

    engine = start_meta(runtime, run, ["one"], bundles=models)
    runtime.device.executed.clear()
    (answer,) = ask(engine, request(0))
    assert_y(answer, rows(0))
    assert runtime.device.executed == []
    (answer,) = ask(engine, request(3))
    assert_y(answer, rows(3, 7))
    assert runtime.device.executed == [4, 4]
