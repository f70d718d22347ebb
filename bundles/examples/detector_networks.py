"""The detector's two networks: where something is, and what it is."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from examples.detector_run import ANCHOR_SIDES, POOLED
from examples.detector_scenes import CLASSES

Array = np.ndarray[Any, Any]
Params = dict[str, Any]

#: channels of the feature map
FEATURES = 24


def backbone(params: Any, image: jax.Array) -> dict[str, jax.Array]:
    """image: u8 [n, side, side, 3] -> objectness: logits [n, anchors], deltas: [n, anchors, 4], and
    features: [n, side / 4, side / 4, channels]."""
    x = jax.nn.relu(_convolution(params["conv1"], image.astype(jnp.float32) / 64 - 2, stride=2))
    x = _block(params["conv2"], x, stride=2)
    features = _block(params["conv3"], x)
    x = _block(params["conv4"], features, stride=2)
    x = _block(params["conv5"], x)
    x = _convolution(params["anchors"], x).reshape(x.shape[0], -1, 5)
    return {"objectness": x[..., 0], "deltas": x[..., 1:], "features": features}


def head(params: Any, crops: jax.Array) -> dict[str, jax.Array]:
    """crops: f32 [n, POOLED, POOLED, channels] -> logits: [n, 1 + classes], the first for no shape, and
    deltas: [n, 4]."""
    x = crops.reshape(crops.shape[0], -1)
    x = jax.nn.relu(x @ params["dense1"]["kernel"] + params["dense1"]["bias"])
    x = x @ params["dense2"]["kernel"] + params["dense2"]["bias"]
    return {"logits": x[:, :-4], "deltas": x[:, -4:]}


def initial() -> dict[str, Params]:
    """Parameters to start training from, `backbone` and `head`; the same in every process."""
    rng = np.random.default_rng(0)

    def layer(*shape: int, scale: float = 1.0) -> dict[str, Array]:
        kernel = scale * rng.standard_normal(shape) * np.sqrt(2 / np.prod(shape[:-1]))
        return {"kernel": kernel.astype(np.float32), "bias": np.zeros(shape[-1], np.float32)}

    return {
        "backbone": {
            "conv1": layer(5, 5, 3, 12),
            "conv2": layer(3, 3, 12, 24),
            "conv3": layer(3, 3, 24, FEATURES),
            "conv4": layer(3, 3, FEATURES, 48),
            "conv5": layer(3, 3, 48, 48),
            "anchors": layer(1, 1, 48, 5 * len(ANCHOR_SIDES), scale=0.1),
        },
        "head": {
            "dense1": layer(POOLED * POOLED * FEATURES, 64),
            "dense2": layer(64, 1 + len(CLASSES) + 4, scale=0.1),
        },
    }


def _block(params: Any, x: jax.Array, stride: int = 1) -> jax.Array:
    """A convolution whose channels are brought to one scale in each place, which is learnt much faster."""
    x = _convolution(params, x, stride)
    x = x - x.mean(-1, keepdims=True)
    return jax.nn.relu(x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 0.1))


def _convolution(params: Any, x: jax.Array, stride: int = 1) -> jax.Array:
    numbers = ("NHWC", "HWIO", "NHWC")
    kernel = params["kernel"]
    x = jax.lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=numbers)
    return jnp.add(x, params["bias"])
