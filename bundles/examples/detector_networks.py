"""The detector's two networks: the first finds shapes, the second classifies them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

#: Number of channels of the feature map.
FEATURES = 24


def backbone(params: Any, image: jax.Array) -> dict[str, jax.Array]:
    """Find shapes: image: u8 [n, side, side, 3] -> objectness: logits [n, anchors], deltas: [n, anchors, 4], features.

    features: [n, side / 4, side / 4, channels].
    """
    x = jax.nn.relu(_convolution(params["conv1"], image.astype(jnp.float32) / 64 - 2, stride=2))
    x = _block(params["conv2"], x, stride=2)
    features = _block(params["conv3"], x)
    x = _block(params["conv4"], features, stride=2)
    x = _block(params["conv5"], x)
    x = _convolution(params["anchors"], x).reshape(x.shape[0], -1, 5)
    return {"objectness": x[..., 0], "deltas": x[..., 1:], "features": features}


def head(params: Any, crops: jax.Array) -> dict[str, jax.Array]:
    """Classify: crops: f32 [n, POOLED, POOLED, channels] -> logits: [n, 1 + classes], deltas: [n, 4].

    The first class is "no shape".
    """
    x = crops.reshape(crops.shape[0], -1)
    x = jax.nn.relu(x @ params["dense1"]["kernel"] + params["dense1"]["bias"])
    x = x @ params["dense2"]["kernel"] + params["dense2"]["bias"]
    return {"logits": x[:, :-4], "deltas": x[:, -4:]}


def _block(params: Any, x: jax.Array, stride: int = 1) -> jax.Array:
    """A convolution, followed by a normalisation over the channels at each place, which makes training much faster."""
    x = _convolution(params, x, stride)
    x = x - x.mean(-1, keepdims=True)
    return jax.nn.relu(x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 0.1))


def _convolution(params: Any, x: jax.Array, stride: int = 1) -> jax.Array:
    numbers = ("NHWC", "HWIO", "NHWC")
    kernel = params["kernel"]
    x = jax.lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=numbers)
    return jnp.add(x, params["bias"])
