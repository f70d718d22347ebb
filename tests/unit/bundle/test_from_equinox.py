"""Exporting Equinox modules, and the refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsrv_bundle import BundleError, load_weights
from rsrv_bundle.from_equinox import eager_equinox, export_equinox

X = {"x": np.zeros((1, 3), np.float32)}


class Served(eqx.Module):
    """Module that holds layers together with their state."""

    layer: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    state: eqx.nn.State

    def __call__(self, x: jax.Array) -> dict[str, jax.Array]:
        y, _ = self.norm(self.layer(x), self.state)
        return {"y": y}


def with_norm() -> Served:
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(2, axis_name="rows", mode="ema")
    layer = eqx.nn.Linear(3, 2, key=jax.random.key(0))
    some = jax.random.normal(jax.random.key(1), (8, 2))
    _, state = jax.vmap(norm, axis_name="rows", in_axes=(0, None), out_axes=(0, None))(some, state)
    return Served(layer, norm, state)


def test_layers_take_rows_and_the_bundle_takes_batches(tmp_path: Path) -> None:
    """Layers that take rows become a bundle that takes batches. Arrays become weights, including those of the state."""
    model = eqx.nn.inference_mode(with_norm())
    bundle = export_equinox(model, X, batch_sizes=[1, 3], out_dir=tmp_path / "m")
    names = [weight.name for weight in bundle.weights]
    assert names[:4] == ["layer/weight", "layer/bias", "norm/weight", "norm/bias"]
    assert [name.partition("/")[0] for name in names[4:]] == ["state"] * (len(names) - 4)
    np.testing.assert_array_equal(load_weights(bundle)[0], model.layer.weight)
    assert bundle.manifest.outputs[0].dims == (-1, 2)
    largest = bundle.manifest.numerics["max_rel_error"]
    assert isinstance(largest, float)
    assert largest < 1e-5
    assert bundle.manifest.provenance["equinox"] == eqx.__version__


class Whole(eqx.Module):
    """Module that takes whole batches."""

    kernel: jax.Array

    def __call__(self, a: jax.Array, b: jax.Array) -> Any:
        return a - b @ self.kernel


def test_a_model_of_whole_batches_gets_them(tmp_path: Path) -> None:
    """A model that takes whole batches gets whole batches. It can also be exported without a batch axis."""
    model = Whole(jnp.eye(3) * 2)
    inputs = {"b": X["x"], "a": X["x"]}
    bundle = export_equinox(model, inputs, rows=False, batch_sizes=[2], out_dir=tmp_path / "m")
    assert [spec.name for spec in bundle.manifest.inputs] == ["b", "a"]
    fixed = export_equinox(model, inputs, batch_sizes=[], batch_axis=None, out_dir=tmp_path / "n")
    assert fixed.manifest.outputs[0].dims == (1, 3)
    array = np.ones((1, 3), np.float32)
    for rows in (True, False):
        np.testing.assert_array_equal(eager_equinox(model, rows=rows)(a=array, b=array).values[0], -array)


def test_what_cannot_be_served_is_refused(tmp_path: Path) -> None:
    """Dropout that draws random numbers is refused, and so are layers that compare the rows of a batch."""
    options: dict[str, Any] = {"batch_sizes": [1], "out_dir": tmp_path / "m"}
    with pytest.raises(
        BundleError, match=r"compares the rows of a batch, .* use eqx.nn.inference_mode\(model\)"
    ):
        export_equinox(with_norm(), X, **options)
    with pytest.raises(BundleError, match=r"draws random numbers .* use eqx.nn.inference_mode\(model\)"):
        export_equinox(eqx.nn.Dropout(0.5), X, **options)
    for elsewhere in ({"batch_axis": 1}, {"batch_axis": {"x": 1}}, {"axes": {"x": "an"}}):
        with pytest.raises(BundleError, match="the batch is the first axis of every input"):
            export_equinox(eqx.nn.Identity(), X, **options, **elsewhere)
