"""A U-Net (O. Ronneberger et al., arXiv:1505.04597) of three levels, in Equinox, and its training."""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from examples.detector_scenes import SIDE, scenes

#: Number of channels of each level, the finest first.
CHANNELS = (8, 16, 32)

_IMAGES = 400
#: Training uses parts of images. This is their width and height in pixels.
_CROP = 48
_BATCH = 8
_STEPS = 120


class Pair(eqx.Module):
    """Two convolutions, each normalised in groups of channels."""

    convolutions: list[eqx.nn.Conv2d]
    norms: list[eqx.nn.GroupNorm]

    def __init__(self, channels: int, out: int, key: jax.Array) -> None:
        keys = jax.random.split(key)
        sizes = (channels, out)
        self.convolutions = [
            eqx.nn.Conv2d(size, out, 3, padding=1, key=key) for size, key in zip(sizes, keys, strict=True)
        ]
        self.norms = [eqx.nn.GroupNorm(4, out) for _ in sizes]

    def __call__(self, x: jax.Array) -> jax.Array:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = jax.nn.relu(norm(convolution(x)))
        return x


class UNet(eqx.Module):
    """One image: u8 [h, w, 3], h and w divisible by 4 -> logits: f32 [h, w], above 0 where a shape is."""

    down: list[Pair]
    ups: list[eqx.nn.ConvTranspose2d]
    up: list[Pair]
    last: eqx.nn.Conv2d

    def __init__(self, key: jax.Array) -> None:
        keys = iter(jax.random.split(key, 3 * len(CHANNELS)))
        wider = list(pairwise(CHANNELS))
        self.down = [Pair(*sizes, next(keys)) for sizes in [(3, CHANNELS[0]), *wider]]
        self.ups = [eqx.nn.ConvTranspose2d(wide, thin, 2, stride=2, key=next(keys)) for thin, wide in wider]
        self.up = [Pair(2 * thin, thin, next(keys)) for thin, _ in wider]
        self.last = eqx.nn.Conv2d(CHANNELS[0], 1, 1, key=next(keys))

    def __call__(self, image: jax.Array) -> jax.Array:
        x = self.down[0](image.astype(jnp.float32).transpose(2, 0, 1) / 64 - 2)
        levels = []
        for pair in self.down[1:]:
            levels.append(x)
            c, h, w = x.shape
            x = pair(x.reshape(c, h // 2, 2, w // 2, 2).max((2, 4)))
        for level, rise, pair in reversed(list(zip(levels, self.ups, self.up, strict=True))):
            x = pair(jnp.concatenate([level, rise(x)]))
        return self.last(x)[0]


@functools.cache
def trained() -> UNet:
    """Return the network after training with Adam on drawn scenes. Training takes some seconds, once per process."""
    known = scenes(_IMAGES, seed=3)
    rng = np.random.default_rng(4)
    optimiser = optax.adam(optax.cosine_decay_schedule(8e-3, _STEPS))

    def loss(network: UNet, images: jax.Array, pixels: jax.Array) -> Any:
        return optax.sigmoid_binary_cross_entropy(jax.vmap(network)(images), pixels != 0).mean()

    gradient: Any = eqx.filter_grad(loss)

    @eqx.filter_jit
    def step(network: UNet, state: Any, images: Any, pixels: Any) -> Any:
        updates, state = optimiser.update(gradient(network, images, pixels), state)
        return eqx.apply_updates(network, updates), state

    network = UNet(jax.random.key(0))
    state = optimiser.init(eqx.filter(network, eqx.is_array))
    for _ in range(_STEPS):
        rows = rng.integers(0, _IMAGES, _BATCH)
        top, left = rng.integers(0, SIDE - _CROP, 2, endpoint=True)
        part = rows, slice(top, top + _CROP), slice(left, left + _CROP)
        network, state = step(network, state, known.images[part], known.pixels[part])
    return network
