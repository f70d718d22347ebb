"""digits: a small convolutional network, trained in seconds on scikit-learn's 8 x 8 handwritten digits."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from examples import adam, digits_hooks
from rsrv_bundle import load_weights, read_bundle
from rsrv_bundle.export import export_bundle

Array = np.ndarray[Any, Any]
Params = dict[str, Any]

BATCH_SIZES = (1, 4, 16, 32)
#: Share of the held-out images that a trained network must get right.
REQUIRED_ACCURACY = 0.97
#: Outputs that digits_hooks makes from the network's answers.
CLIENT_OUTPUTS = (
    {"name": "class", "dtype": "i64", "shape": "nk", "dims": {"k": 1}},
    {"name": "score", "dtype": "f32", "shape": "nk", "dims": {"k": 1}},
)

_EPOCHS = 30
_BATCH = 64


@functools.cache
def data() -> tuple[Array, Array, Array, Array]:
    """Return training images and labels, and held-out images and labels. The split is 80/20, and the same in every process."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    order = np.random.default_rng(0).permutation(len(images))
    train, test = np.split(order, [len(images) * 4 // 5])
    labels = labels.astype(np.int64)
    return images[train], labels[train], images[test], labels[test]


def held_out() -> tuple[Array, Array]:
    """Return held-out images, f32 [n, 8, 8, 1], from 0 to 1, and labels, i64 [n]."""
    _, _, images, labels = data()
    return images, labels


def features(params: Any, image: jax.Array) -> jax.Array:
    """image: [n, 8, 8, 1] -> [n, 64], by all layers except the last one."""
    x = image
    for layer in ("conv1", "conv2"):
        x = jax.lax.conv_general_dilated(
            x, params[layer]["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.relu(x + params[layer]["bias"])
        # Take the maxima of 2 x 2 elements. This needs no window operation, because the extents are even.
        n, h, w, c = x.shape
        x = x.reshape(n, h // 2, 2, w // 2, 2, c).max((2, 4))
    x = x.reshape(x.shape[0], -1)
    return jax.nn.relu(x @ params["dense1"]["kernel"] + params["dense1"]["bias"])


def apply(params: Any, image: jax.Array) -> dict[str, jax.Array]:
    """image: [n, 8, 8, 1] -> logits: [n, 10]."""
    hidden = features(params, image)
    return {"logits": hidden @ params["dense2"]["kernel"] + params["dense2"]["bias"]}


def _initial() -> Params:
    rng = np.random.default_rng(0)

    def layer(*shape: int) -> dict[str, Array]:
        kernel = rng.standard_normal(shape) * np.sqrt(2 / np.prod(shape[:-1]))
        return {"kernel": kernel.astype(np.float32), "bias": np.zeros(shape[-1], np.float32)}

    return {
        "conv1": layer(3, 3, 1, 16),
        "conv2": layer(3, 3, 16, 32),
        "dense1": layer(128, 64),
        "dense2": layer(64, 10),
    }


@functools.cache
def trained() -> Params:
    """Return the parameters after training with Adam. Training takes a few seconds, once per process."""
    images, labels, _, _ = data()
    steps = len(images) // _BATCH
    rng = np.random.default_rng(1)
    order = np.stack([rng.permutation(len(images))[: steps * _BATCH] for _ in range(_EPOCHS)]).reshape(
        -1, _BATCH
    )

    def loss(params: Params, batch: Array) -> jax.Array:
        logits = jax.nn.log_softmax(apply(params, jnp.asarray(images)[batch])["logits"])
        return -jnp.take_along_axis(logits, jnp.asarray(labels)[batch][:, None], axis=1).mean()

    final: Params = adam.trained(loss, _initial(), order, 2e-3)
    return final


def params_of(bundle_dir: Path) -> Params:
    """Return the parameters of a built bundle."""
    bundle = read_bundle(bundle_dir, digest=False)
    params: Params = {}
    for weight, array in zip(bundle.weights, load_weights(bundle), strict=True):
        layer, _, part = weight.name.partition("/")
        params.setdefault(layer, {})[part] = array
    return params


def reference(inputs: Mapping[str, Array], params: Params | None = None) -> dict[str, Array]:
    """image: f32 [n, 8, 8, 1] -> class: i64 [n, 1], score: f32 [n, 1].

    Trains the network first, unless `params` has the parameters of a built bundle (see `params_of`). Training on another
    machine may give slightly different parameters.
    """
    weights = trained() if params is None else params
    logits = np.asarray(apply(weights, jnp.asarray(inputs["image"]))["logits"])
    return digits_hooks.postprocess({"logits": logits})


def make(out_dir: Path) -> None:
    """Train, and write the bundle `out_dir`, replacing an existing one. RuntimeError if training went badly."""
    images, labels = held_out()
    accuracy = float((reference({"image": images})["class"][:, 0] == labels).mean())
    print(f"digits: {accuracy:.1%} of {len(labels)} held-out images are right", flush=True)
    if accuracy < REQUIRED_ACCURACY:
        raise RuntimeError(f"accuracy {accuracy:.1%} is below {REQUIRED_ACCURACY:.0%}")
    export_bundle(
        apply,
        trained(),
        {"image": images[:1]},
        batch_sizes=BATCH_SIZES,
        axes={"image": "nhwc"},
        out_dir=out_dir,
        hooks=Path(digits_hooks.__file__),
        client_outputs=CLIENT_OUTPUTS,
        description="Handwritten digits, 8 x 8 pixels from 0 to 1.",
        overwrite=True,
    )
