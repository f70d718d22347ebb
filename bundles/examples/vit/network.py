"""ViT-Ti (H. Touvron et al., arXiv:2012.12877; A. Dosovitskiy et al., arXiv:2010.11929) in Flax NNX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

CLASSES = 1000
#: Width and height in pixels, of an image and of a patch.
SIDE, PATCH = 64, 8
WIDTH, HEADS, LAYERS = 192, 3, 12


class Block(nnx.Module):
    """Attention and two dense layers, each with a shortcut."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm1 = nnx.LayerNorm(WIDTH, epsilon=1e-6, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(WIDTH, epsilon=1e-6, rngs=rngs)
        self.wide = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.narrow = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x))
        return x + self.narrow(nnx.gelu(self.wide(self.norm2(x)), approximate=False))


class ViT(nnx.Module):
    """image: f32 [n, SIDE, SIDE, 3], normalised -> logits: f32 [n, CLASSES]."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        patches = (SIDE // PATCH) ** 2
        normal = nnx.initializers.normal(0.02)
        self.patches = nnx.Conv(3, WIDTH, (PATCH, PATCH), strides=PATCH, padding="VALID", rngs=rngs)
        self.mark = nnx.Param(normal(rngs.params(), (1, 1, WIDTH)))
        self.places = nnx.Param(normal(rngs.params(), (1, 1 + patches, WIDTH)))
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, epsilon=1e-6, rngs=rngs)
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, image: jax.Array) -> jax.Array:
        x = self.patches(image).reshape(image.shape[0], -1, WIDTH)
        mark = jnp.broadcast_to(self.mark[...], (image.shape[0], 1, WIDTH))
        x = jnp.concatenate([mark, x], axis=1) + self.places[...]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


def network() -> ViT:
    """Return the network with random weights, which are the same in every process."""
    return ViT(nnx.Rngs(0))
