"""Quantisation, and products of whole numbers, which are exact."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from rsrv_bundle.onnx_import.operators import MICROSOFT, Context, axis_of, channels, is_float, limits, op
from rsrv_bundle.onnx_import.ops_nn import biased, convolved
from rsrv_bundle.onnx_import.ops_shape import cast, dtype_of


def _along(value: Any, x: Any, axis: int, block: int) -> Any:
    """Return a scale or zero point in a shape that broadcasts to `x`.

    `value` has one number for the whole tensor, one for each slice along `axis`, or one for each block of slices.
    """
    if value.ndim == 0 or value.size == 1:
        return jnp.reshape(value, ())
    at = axis_of(axis, x.ndim)
    if value.ndim == 1:
        return jnp.reshape(value, [-1 if dim == at else 1 for dim in range(x.ndim)])
    return lax.slice_in_dim(jnp.repeat(value, block, at), 0, x.shape[at], axis=at)


def _quotient(x: Any, divisor: Any) -> Any:
    """Return the quotient, divided in 64 bits. In 32 bits, XLA multiplies by the inverse of a constant, which is too inexact."""
    return (x.astype(np.float64) / divisor.astype(np.float64)).astype(x.dtype)


def quantised(x: Any, scale: Any, zero: Any, dtype: np.dtype[Any]) -> Any:
    """Return round(x / scale) + zero, clipped to the element type's limits. Ties are rounded to even."""
    if jnp.issubdtype(dtype, jnp.floating):
        return cast(x / scale, dtype, 1)
    rounded = jnp.round(_quotient(x.astype(scale.dtype), scale))
    low, high = limits(dtype)
    offset = 0 if zero is None else zero.astype(np.int32)
    # Clip before the conversion, because numbers that do not fit into 32 bits would wrap around.
    return jnp.clip(jnp.clip(rounded, -(2.0**30), 2.0**30).astype(np.int32) + offset, low, high).astype(dtype)


def dequantised(x: Any, scale: Any, zero: Any) -> Any:
    if is_float(x):
        return x.astype(scale.dtype) * scale
    whole = x.astype(np.int32)
    return (whole if zero is None else whole - zero.astype(np.int32)).astype(scale.dtype) * scale


def _quantize_linear(
    ctx: Context, x: Any, scale: Any, zero: Any = None, *, axis: int = 1, block_size: int = 0, output_dtype: int = 0,
    precision: int = 0, saturate: int = 1,
) -> Any:  # fmt: skip
    chosen = dtype_of(output_dtype) if output_dtype else np.dtype(np.uint8)
    dtype = chosen if zero is None else zero.dtype
    offset = None if zero is None else _along(zero, x, axis, block_size)
    return quantised(x, _along(scale, x, axis, block_size), offset, dtype)


def _dequantize_linear(
    ctx: Context,
    x: Any,
    scale: Any,
    zero: Any = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
) -> Any:
    offset = None if zero is None else _along(zero, x, axis, block_size)
    y = dequantised(x, _along(scale, x, axis, block_size), offset)
    return y.astype(dtype_of(output_dtype)) if output_dtype else y


for _domain in ("", MICROSOFT):
    op("QuantizeLinear", domain=_domain)(_quantize_linear)
    op("DequantizeLinear", domain=_domain)(_dequantize_linear)


@op("DynamicQuantizeLinear")
def dynamic_quantize_linear(ctx: Context, x: Any) -> Any:
    high, low = jnp.maximum(jnp.max(x), 0), jnp.minimum(jnp.min(x), 0)
    scale = _quotient(high - low, np.float32(255))
    safe = jnp.where(scale == 0, np.float32(1), scale)
    zero = jnp.clip(jnp.round(-low / safe), 0, 255)
    return jnp.clip(jnp.round(x / safe) + zero, 0, 255).astype(np.uint8), scale, zero.astype(np.uint8)


def _per(value: Any, rows: bool) -> Any:
    """Return a matrix's scale or zero point in a shape that broadcasts to it: one per row if `rows`, or one per column."""
    if value.size == 1:
        return jnp.reshape(value, ())
    return value[:, None] if rows and value.ndim == 1 else value


def shifted(x: Any, zero: Any, rows: bool) -> Any:
    """Return a matrix of integers minus their zero points, in 32 bits.

    If `rows`, each row of the matrix may have its own zero point. Otherwise, each column may have one.
    """
    whole = x.astype(np.int32)
    return whole if zero is None else whole - _per(zero.astype(np.int32), rows)


@op("MatMulInteger")
def _mat_mul_integer(ctx: Context, a: Any, b: Any, a_zero: Any = None, b_zero: Any = None) -> Any:
    return jnp.matmul(shifted(a, a_zero, True), shifted(b, b_zero, False))


@op("QLinearMatMul")
def _q_linear_mat_mul(
    ctx: Context,
    a: Any,
    a_scale: Any,
    a_zero: Any,
    b: Any,
    b_scale: Any,
    b_zero: Any,
    y_scale: Any,
    y_zero: Any,
) -> Any:
    product = jnp.matmul(shifted(a, a_zero, True), shifted(b, b_zero, False))
    factor = _per(a_scale, True).astype(np.float32) * _per(b_scale, False).astype(np.float32)
    return quantised(
        product.astype(np.float32) * factor, _per(y_scale, True).astype(np.float32), y_zero, y_zero.dtype
    )


def _integer_convolution(x: Any, x_zero: Any, w: Any, w_zero: Any, attributes: Any) -> Any:
    """Subtract the zero points of integers, and convolve them. Padding with 0 then stands for padding with the zero point."""
    whole = x.astype(np.int32) - (0 if x_zero is None else jnp.reshape(x_zero, ()).astype(np.int32))
    kernel = jnp.asarray(w).astype(np.int32)
    if w_zero is not None:
        kernel = kernel - _along(w_zero, w, 0, 0).astype(np.int32)
    return convolved(whole, kernel, **attributes)


@op("ConvInteger")
def _conv_integer(
    ctx: Context, x: Any, w: Any, x_zero: Any = None, w_zero: Any = None, **attributes: Any
) -> Any:
    return _integer_convolution(x, x_zero, w, w_zero, attributes)


@op("QLinearConv")
def _q_linear_conv(
    ctx: Context, x: Any, x_scale: Any, x_zero: Any, w: Any, w_scale: Any, w_zero: Any, y_scale: Any, y_zero: Any, b: Any = None,
    **attributes: Any,
) -> Any:  # fmt: skip
    y = biased(_integer_convolution(x, x_zero, w, w_zero, attributes), b)
    factor = jnp.reshape(x_scale, ()) * w_scale / jnp.reshape(y_scale, ())
    scaled = y.astype(np.float32) * (channels(factor, y) if factor.ndim else factor)
    return quantised(scaled, np.ones((), np.float32), jnp.reshape(y_zero, ()), y_zero.dtype)
