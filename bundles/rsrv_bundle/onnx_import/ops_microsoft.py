"""The operators of onnxruntime's own domain that its optimiser writes into files."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rsrv_bundle.onnx_import.operators import MICROSOFT, Context, Unsupported, in_f32, op
from rsrv_bundle.onnx_import.ops_math import gelu, gemm
from rsrv_bundle.onnx_import.ops_nn import biased, convolved, scaled_by_rms, standardised
from rsrv_bundle.onnx_import.ops_quantised import dequantised, dynamic_quantize_linear, quantised, shifted

_ACTIVATIONS: dict[str, Callable[..., Any]] = {
    "Relu": jax.nn.relu, "Sigmoid": jax.nn.sigmoid, "Tanh": jnp.tanh,
    "LeakyRelu": lambda x, alpha=0.01: jnp.where(x < 0, x * alpha, x), "Clip": jnp.clip,
    "HardSigmoid": lambda x, alpha=0.2, beta=0.5: jnp.clip(x * alpha + beta, 0, 1),
}  # fmt: skip


def _sum(*parts: Any) -> Any:
    """Return the sum of the parts that are not absent, or None if all are absent."""
    present = [part for part in parts if part is not None]
    return functools.reduce(operator.add, present) if present else None


def _activated(y: Any, activation: str, parameters: Sequence[float] = ()) -> Any:
    if not activation:
        return y
    if activation not in _ACTIVATIONS:
        raise Unsupported(f"its activation '{activation}' is not supported")
    return _ACTIVATIONS[activation](y, *parameters).astype(y.dtype)


@op("FusedConv", domain=MICROSOFT)
def _fused_conv(
    ctx: Context, x: Any, w: Any, b: Any = None, more: Any = None, *, activation: str = "", activation_params: Any = (),
    **attributes: Any,
) -> Any:  # fmt: skip
    return _activated(_sum(biased(convolved(x, w, **attributes), b), more), activation, activation_params)


@op("FusedMatMul", "TransposeMatMul", domain=MICROSOFT)
def _fused_mat_mul(
    ctx: Context, a: Any, b: Any, *, alpha: float = 1.0, transA: int = 0, transB: int = 0, transBatchA: int = 0, transBatchB: int = 0
) -> Any:  # fmt: skip
    if transBatchA or transBatchB:
        raise Unsupported("its transposed batch axes are not supported")
    y = jnp.matmul(jnp.swapaxes(a, -1, -2) if transA else a, jnp.swapaxes(b, -1, -2) if transB else b)
    return y * np.array(alpha, y.dtype)


@op("FusedGemm", domain=MICROSOFT)
def _fused_gemm(
    ctx: Context, a: Any, b: Any, c: Any = None, *, activation: str = "", alpha: float = 1.0, beta: float = 1.0, transA: int = 0,
    transB: int = 0,
) -> Any:  # fmt: skip
    return _activated(gemm(ctx, a, b, c, alpha=alpha, beta=beta, transA=transA, transB=transB), activation)


@op("BiasGelu", domain=MICROSOFT)
def _bias_gelu(ctx: Context, x: Any, b: Any) -> Any:
    return gelu(ctx, x + b)


@op("FastGelu", domain=MICROSOFT)
def _fast_gelu(ctx: Context, x: Any, b: Any = None) -> Any:
    return gelu(ctx, _sum(x, b), approximate="tanh")


@op("QuickGelu", domain=MICROSOFT)
def _quick_gelu(ctx: Context, x: Any, *, alpha: float = 1.702) -> Any:
    return in_f32(lambda v: v * jax.nn.sigmoid(np.array(alpha, v.dtype) * v))(x)


def _centred(x: Any, epsilon: float, simplified: bool) -> Any:
    """Normalise the last axis. If `simplified`, do not subtract the mean."""
    return in_f32(lambda v: scaled_by_rms(v, -1, epsilon) if simplified else standardised(v, -1, epsilon)[0])(
        x
    )


@op("SimplifiedLayerNormalization", domain="")
@op("SimplifiedLayerNormalization", domain=MICROSOFT)
def _simplified(
    ctx: Context, x: Any, scale: Any, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Any:
    if axis % x.ndim != x.ndim - 1:
        raise Unsupported("only its last axis is supported")
    return _centred(x, epsilon, True) * scale


@op("SkipLayerNormalization", domain=MICROSOFT)
def _skip_layer_normalization(
    ctx: Context, x: Any, skip: Any, scale: Any, shift: Any = None, bias: Any = None, *, epsilon: float = 1e-12
) -> Any:  # fmt: skip
    total = _sum(x, skip, bias)
    # The second and the third output are mean and variance, which only training uses.
    return (_sum(_centred(total, epsilon, False) * scale, shift), None, None, total)[: ctx.outputs]


@op("SkipSimplifiedLayerNormalization", domain=MICROSOFT)
def _skip_simplified(
    ctx: Context, x: Any, skip: Any, scale: Any, bias: Any = None, *, epsilon: float = 1e-12
) -> Any:
    total = _sum(x, skip, bias)
    return (_centred(total, epsilon, True) * scale, None, None, total)[: ctx.outputs]


@op("EmbedLayerNormalization", domain=MICROSOFT)
def _embed(
    ctx: Context, ids: Any, segments: Any, words: Any, places: Any, segment_table: Any, gamma: Any, beta: Any, mask: Any = None,
    positions: Any = None, *, epsilon: float = 1e-12, mask_index_type: int = 0,
) -> Any:  # fmt: skip
    if ctx.wants(1) and mask is not None and mask_index_type != 1:
        lengths: Any = jnp.sum(mask, 1).astype(np.int32)
    else:
        lengths = jnp.zeros(ids.shape[0], np.int32)
    total = jnp.take(words, ids, 0, mode="clip")
    total = total + (
        places[: ids.shape[1]] if positions is None else jnp.take(places, positions, 0, mode="clip")
    )
    if segment_table is not None and segments is not None:
        total = total + jnp.take(segment_table, segments, 0, mode="clip")
    return (_centred(total, epsilon, False) * gamma + beta, lengths, total)[: ctx.outputs]


def _heads(x: Any, count: int) -> Any:
    n, length, width = x.shape
    return jnp.transpose(jnp.reshape(x, (n, length, count, width // count)), (0, 2, 1, 3))


def _attended(q: Any, k: Any, v: Any, added: Any, scale: float) -> Any:
    """Return softmax(q k^T scale + added) v of [n, heads, length, size], as [n, length, heads * size]."""
    scores = jnp.einsum("nhqd,nhkd->nhqk", q, k).astype(np.float32) * np.float32(scale)
    weights = jax.nn.softmax(_sum(scores, added)).astype(q.dtype)
    y = jnp.transpose(jnp.einsum("nhqk,nhkd->nhqd", weights, v), (0, 2, 1, 3))
    return jnp.reshape(y, (*y.shape[:2], -1))


def _mask_of(mask: Any, length: int, low: float) -> Any:
    """Return the values to add to the scores [n, heads, queries, keys], so that masked keys get almost no attention."""
    if mask is None:
        return None
    if mask.ndim == 1:
        # A mask with one axis holds the number of keys of each row.
        mask = jnp.arange(length) < mask[:, None]
    visible = mask.astype(np.float32)
    shape = {
        2: (visible.shape[0], 1, 1, visible.shape[-1]),
        3: (visible.shape[0], 1, *visible.shape[1:]),
    }.get(visible.ndim, visible.shape)
    return (1 - jnp.reshape(visible, shape)) * np.float32(low)


@op("Attention", domain=MICROSOFT)
def _attention(
    ctx: Context, x: Any, w: Any, b: Any = None, mask: Any = None, past: Any = None, bias: Any = None, *rest: Any,
    do_rotary: int = 0, mask_filter_value: float = -10000.0, num_heads: int, past_present_share_buffer: int = 0,
    qkv_hidden_sizes: Any = None, rotary_embedding_dim: int = 0, scale: float | None = None, unidirectional: int = 0,
) -> Any:  # fmt: skip
    if past is not None or ctx.wants(1) or do_rotary:
        raise Unsupported("its past keys and values, and its rotary embedding, are not supported")
    if mask is not None and mask.ndim == 1 and mask.shape[0] != x.shape[0]:
        raise Unsupported("its mask of start and end places is not supported")
    sizes = qkv_hidden_sizes or [w.shape[1] // 3] * 3
    both = _sum(jnp.matmul(x, w), b)
    q, k, v = (_heads(part, num_heads) for part in jnp.split(both, np.cumsum(sizes)[:-1], -1))
    length, ahead = x.shape[1], None
    if unidirectional:
        ahead = (1 - jnp.tril(jnp.ones((length, length), np.float32))) * np.float32(mask_filter_value)
    added = _sum(_mask_of(mask, length, mask_filter_value), ahead, bias)
    return _attended(q, k, v, added, scale or q.shape[-1] ** -0.5)


@op("MultiHeadAttention", domain=MICROSOFT)
def _multi_head_attention(
    ctx: Context, q: Any, k: Any = None, v: Any = None, b: Any = None, mask: Any = None, bias: Any = None, past_k: Any = None,
    past_v: Any = None, *rest: Any, mask_filter_value: float = -10000.0, num_heads: int, scale: float | None = None,
    unidirectional: int = 0,
) -> Any:  # fmt: skip
    if (
        past_k is not None
        or ctx.wants(1)
        or k is None
        or v is None
        or q.ndim != 3
        or k.ndim != 3
        or unidirectional
    ):
        raise Unsupported("only separate queries, keys and values without a past are supported")
    if b is not None:
        first, second = q.shape[-1], q.shape[-1] + k.shape[-1]
        q, k, v = q + b[:first], k + b[first:second], v + b[second:]
    added = _sum(_mask_of(mask, k.shape[1], mask_filter_value), bias)
    size = q.shape[-1] // num_heads
    q, k, v = (_heads(part, num_heads) for part in (q, k, v))
    return _attended(q, k, v, added, scale or size**-0.5)


# --- quantised --------------------------------------------------------------------------------------------


def _elementwise(name: str, function: Callable[..., Any]) -> None:
    def lowering(
        ctx: Context,
        a: Any,
        a_scale: Any,
        a_zero: Any,
        b: Any,
        b_scale: Any,
        b_zero: Any,
        y_scale: Any,
        y_zero: Any = None,
    ) -> Any:
        y = function(dequantised(a, a_scale, a_zero), dequantised(b, b_scale, b_zero))
        return quantised(y, y_scale, y_zero, a.dtype)

    op(f"QLinear{name}", domain=MICROSOFT)(lowering)


_elementwise("Add", jnp.add)
_elementwise("Mul", jnp.multiply)


def _single(name: str, function: Callable[..., Any]) -> None:
    def lowering(
        ctx: Context,
        x: Any,
        x_scale: Any,
        x_zero: Any,
        y_scale: Any,
        y_zero: Any = None,
        *,
        alpha: float = 0.01,
    ) -> Any:
        return quantised(function(dequantised(x, x_scale, x_zero), alpha), y_scale, y_zero, x.dtype)

    op(f"QLinear{name}", domain=MICROSOFT)(lowering)


_single("Sigmoid", lambda x, alpha: jax.nn.sigmoid(x))
_single("LeakyRelu", lambda x, alpha: jnp.where(x < 0, x * np.float32(alpha), x))


@op("QLinearGlobalAveragePool", domain=MICROSOFT)
def _q_linear_global_average_pool(
    ctx: Context, x: Any, x_scale: Any, x_zero: Any, y_scale: Any, y_zero: Any, *, channels_last: int = 0
) -> Any:
    axes = tuple(range(1, x.ndim - 1)) if channels_last else tuple(range(2, x.ndim))
    return quantised(jnp.mean(dequantised(x, x_scale, x_zero), axes, keepdims=True), y_scale, y_zero, x.dtype)


@op("QLinearConcat", domain=MICROSOFT)
def _q_linear_concat(ctx: Context, y_scale: Any, y_zero: Any, *parts: Any, axis: int) -> Any:
    wide = [dequantised(*parts[index : index + 3]) for index in range(0, len(parts), 3)]
    return quantised(jnp.concatenate(wide, axis), y_scale, y_zero, y_zero.dtype)


@op("MatMulIntegerToFloat", domain=MICROSOFT)
def _mat_mul_integer_to_float(
    ctx: Context,
    a: Any,
    b: Any,
    a_scale: Any,
    b_scale: Any,
    a_zero: Any = None,
    b_zero: Any = None,
    bias: Any = None,
) -> Any:
    product = jnp.matmul(shifted(a, a_zero, False), shifted(b, b_zero, False))
    return _sum(product.astype(np.float32) * (a_scale * b_scale), bias)


@op("QGemm", domain=MICROSOFT)
def _q_gemm(
    ctx: Context, a: Any, a_scale: Any, a_zero: Any, b: Any, b_scale: Any, b_zero: Any, c: Any = None, y_scale: Any = None,
    y_zero: Any = None, *, alpha: float = 1.0, transA: int = 0, transB: int = 0,
) -> Any:  # fmt: skip
    left = a.astype(np.int32) - a_zero.astype(np.int32)
    # Subtract after the transposition: `b_zero` may have a number for each column of the product.
    right = (b.T if transB else b).astype(np.int32) - b_zero.astype(np.int32)
    y = _sum(jnp.matmul(left.T if transA else left, right), c)
    y = y.astype(np.float32) * (np.float32(alpha) * a_scale * b_scale)
    return y if y_scale is None else quantised(y, y_scale, y_zero, a.dtype)


@op("DynamicQuantizeMatMul", domain=MICROSOFT)
def _dynamic_quantize_mat_mul(
    ctx: Context, a: Any, b: Any, b_scale: Any, b_zero: Any = None, bias: Any = None
) -> Any:
    whole, scale, zero = dynamic_quantize_linear(ctx, a)
    return _mat_mul_integer_to_float(ctx, whole, b, scale, b_scale, zero, b_zero, bias)
