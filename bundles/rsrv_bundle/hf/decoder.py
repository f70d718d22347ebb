"""The network of Llama and its relatives as a JAX function, which keeps keys and values of its sequences in pools.

Weights have the names of transformers' state dictionaries. `Decoder` and the weights contain the differences between the
families: Qwen2 has biases, Qwen3 has norms of queries and keys, Gemma has other norms and scaled embeddings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = np.ndarray[Any, Any]
Params = Mapping[str, Any]
Pools = Mapping[str, jax.Array]


@dataclass(frozen=True, eq=False)
class Decoder:
    """Sizes of the network, and the function that it computes."""

    layers: int
    heads: int
    #: Number of heads of keys and values. Each serves the same number of heads of queries.
    kv_heads: int
    #: Number of elements of one head.
    head: int
    #: Maximum number of tokens of a sequence.
    context: int
    epsilon: float
    #: Angles per position, [head / 2].
    frequencies: Array
    #: Factor of the cosines and sines of these angles.
    rope_scale: float = 1.0
    #: Activation function of a block's feed-forward part: silu, or gelu. gelu is approximated with tanh.
    activation: str = "silu"
    #: True if normalisations multiply by 1 + weight instead of by weight.
    one_more: bool = False
    #: Factor of the embeddings.
    embedding_scale: float = 1.0

    def state(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shapes of the state in a slot: keys and values of each token so far."""
        shape = jax.ShapeDtypeStruct((self.layers, self.kv_heads, self.context, self.head), np.float32)
        return {"keys": shape, "values": shape}

    def apply(
        self,
        params: Params,
        pools: Pools,
        slots: jax.Array,
        begins: jax.Array,
        position: jax.Array,
        tokens: jax.Array,
        lengths: jax.Array,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Read new tokens, i32 [n, t]. Return the logits of the next token, and the pools.

        In each row, only the first `lengths` [n] tokens are valid, and `position` [n] tokens were read before.

        Each block first writes the keys and values of the new tokens, and then reads the pools, because XLA would copy a pool that is
        read before it is written. A row without a slot writes nothing.
        """
        del begins  # A position of 0 already means that the sequence begins.
        n, t = tokens.shape
        at = position[:, None] + jnp.arange(t)
        counted = jnp.arange(t) < lengths[:, None]
        # Invalid tokens get a position outside of the pool, so nothing is written for them.
        where = jnp.where(counted, at, self.context)
        causal = (jnp.arange(self.context) <= at[:, :, None])[:, None, None]
        known = (jnp.arange(self.context) < (position + lengths)[:, None])[:, None, :, None]
        rotations = self._rotations(at)
        pools = dict(pools)
        x = jnp.take(params["model.embed_tokens.weight"], tokens, axis=0, mode="clip") * self.embedding_scale
        for block in range(self.layers):
            prefix = f"model.layers.{block}."

            def linear(name: str, x: jax.Array, prefix: str = prefix) -> jax.Array:
                product: jax.Array = x @ params[f"{prefix}{name}.weight"].T
                bias = params.get(f"{prefix}{name}.bias")
                return product if bias is None else product + bias

            def heads(name: str, x: jax.Array, count: int, prefix: str = prefix) -> jax.Array:
                projected = linear(f"self_attn.{name}_proj", x, prefix).reshape(n, t, count, self.head)
                norm = params.get(f"{prefix}self_attn.{name}_norm.weight")
                return (projected if norm is None else self._norm(norm, projected)).swapaxes(1, 2)

            def cached(name: str, new: jax.Array, block: int = block) -> jax.Array:
                by_token = new.swapaxes(1, 2)
                pools[name] = pools[name].at[slots[:, None], block, :, where].set(by_token, mode="drop")
                return pools[name].at[slots, block].get(mode="fill", fill_value=0)

            given = self._norm(params[f"{prefix}input_layernorm.weight"], x)
            query = _rotated(heads("q", given, self.heads), rotations).reshape(
                n, self.kv_heads, -1, self.head
            )
            keys = cached("keys", _rotated(heads("k", given, self.kv_heads), rotations))
            # After the position, the slot still has values of an earlier sequence. Infinite values times zero would not be zero.
            values = jnp.where(known, cached("values", heads("v", given, self.kv_heads)), 0)
            scores = jnp.einsum("nhad,nhbd->nhab", query, keys) / self.head**0.5
            scores = scores.reshape(n, self.kv_heads, -1, t, self.context)
            shares = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf)).reshape(
                n, self.kv_heads, -1, self.context
            )
            seen = (shares @ values).reshape(n, self.heads, t, self.head).swapaxes(1, 2).reshape(n, t, -1)
            x = x + linear("self_attn.o_proj", seen)
            given = self._norm(params[f"{prefix}post_attention_layernorm.weight"], x)
            gate = self._activated(linear("mlp.gate_proj", given))
            x = x + linear("mlp.down_proj", gate * linear("mlp.up_proj", given))
        last = jnp.take_along_axis(x, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)[:, 0]
        head = params.get("lm_head.weight", params["model.embed_tokens.weight"])
        return self._norm(params["model.norm.weight"], last) @ head.T, pools

    def _activated(self, x: jax.Array) -> jax.Array:
        return jax.nn.silu(x) if self.activation == "silu" else jax.nn.gelu(x, approximate=True)

    def _norm(self, weight: jax.Array, x: jax.Array) -> jax.Array:
        scaled = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.epsilon)
        return scaled * (1 + weight if self.one_more else weight)

    def _rotations(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return cosines and sines, [n, 1, t, head / 2], for tokens at these positions, [n, t]."""
        angles = positions[:, None, :, None] * self.frequencies
        return jnp.cos(angles) * self.rope_scale, jnp.sin(angles) * self.rope_scale


def _rotated(x: jax.Array, rotations: tuple[jax.Array, jax.Array]) -> jax.Array:
    """x: [n, heads, t, head] -> the same shape. Each value of the first half is rotated with its partner in the second half."""
    (first, second), (cosines, sines) = jnp.split(x, 2, axis=-1), rotations
    return jnp.concatenate([first * cosines - second * sines, second * cosines + first * sines], axis=-1)
