"""Exporting Flax NNX modules, and the refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flax
import jax
import numpy as np
import pytest
from flax import nnx

from rsrv_bundle import BundleError, load_weights
from rsrv_bundle.from_nnx import eager_nnx, export_nnx

X = {"x": np.zeros((1, 3), np.float32)}


class Network(nnx.Module):
    """Batch normalisation, dropout, a list of layers, and a layer that is used twice."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(3, 3, rngs=rngs), nnx.Linear(3, 2, rngs=rngs)])
        self.again = self.layers[0]

    def __call__(self, x: jax.Array) -> dict[str, jax.Array]:
        x = self.drop(self.norm(self.again(self.layers[0](x))))
        return {"y": self.layers[1](x)}


def trained() -> Any:
    """Return a Network in evaluation mode, after one batch has changed its statistics."""
    # Flax's methods have no types.
    model: Any = Network()
    model(jax.random.normal(jax.random.key(1), (8, 3)))
    model.eval()
    return model


def test_variables_are_weights_by_their_paths(tmp_path: Path) -> None:
    """Variables become weights that are named by their paths. The weights of a layer that is used twice are stored once."""
    model = trained()
    bundle = export_nnx(model, X, batch_sizes=[1, 2], out_dir=tmp_path / "m")
    names = [weight.name for weight in bundle.weights]
    norm = [f"norm/{name}" for name in ("bias", "mean", "scale", "var")]
    layers = sorted(name for name in names if name.endswith(("bias", "kernel")) and name not in norm)
    assert sorted(names) == sorted([*norm, *layers])
    assert len(layers) == 4
    stored = dict(zip(names, load_weights(bundle), strict=True))
    np.testing.assert_array_equal(stored["norm/mean"], model.norm.mean[...])
    largest = bundle.manifest.numerics["max_rel_error"]
    assert isinstance(largest, float)
    assert largest < 1e-5
    assert bundle.manifest.provenance["flax"] == flax.__version__


def test_a_model_in_training_mode_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    """A model that draws random numbers or changes its statistics is refused and left unchanged."""
    model = Network()
    before = model.norm.mean[...]
    with pytest.raises(
        BundleError,
        match=r"model: drop/rngs/count: draws random numbers .*; call model.eval\(\) first, or make",
    ):
        export_nnx(model, X, batch_sizes=[1], out_dir=tmp_path / "m")
    model.drop.deterministic = True
    with pytest.raises(BundleError, match="model: norm/mean: changes when the model runs"):
        export_nnx(model, X, batch_sizes=[1], out_dir=tmp_path / "m")
    eager_nnx(model)(x=np.ones((2, 3), np.float32))
    assert model.norm.mean[...] is before


def test_a_sequence_takes_its_input_under_any_name(tmp_path: Path) -> None:
    """A sequence of layers takes its input under any name. Other modules require their own names."""
    layer = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    options: dict[str, Any] = {"batch_sizes": [2], "out_dir": tmp_path / "m"}
    bundle = export_nnx(nnx.Sequential(layer, nnx.relu), X, **options)
    assert bundle.manifest.inputs[0].name == "x"
    with pytest.raises(BundleError, match=r"it takes \(inputs, out_sharding\)|it takes \(inputs\)"):
        export_nnx(layer, X, **options, overwrite=True)


@pytest.mark.long
@pytest.mark.parametrize("cell", [nnx.GRUCell, nnx.OptimizedLSTMCell])
def test_a_recurrent_layer_is_exported(tmp_path: Path, cell: Any) -> None:
    """A recurrent layer is exported: its initial random state is replaced by zeros."""
    model: Any = nnx.RNN(cell(3, 4, rngs=nnx.Rngs(0)))
    model.eval()
    inputs = {"inputs": np.zeros((1, 5, 3), np.float32)}
    bundle = export_nnx(model, inputs, batch_sizes=[1, 2], out_dir=tmp_path / "m")
    assert bundle.manifest.outputs[0].dims == (-1, 5, 4)
