"""Elementwise operators, reductions, products and the choice of elements by value."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rsrv_bundle.onnx_import.operators import (
    MICROSOFT,
    Context,
    Unsupported,
    axis_of,
    highest,
    in_f32,
    is_float,
    is_integer,
    lowest,
    op,
    refuse_large,
    scalar,
    whole_numbers,
    widened,
)
from rsrv_bundle.onnx_import.ops_shape import dtype_of

# --- elementwise ------------------------------------------------------------------------------------------


def _unary(name: str, function: Callable[[Any], Any]) -> None:
    op(name)(lambda ctx, x: function(x))


for _name, _function in {
    "Abs": jnp.abs, "Neg": jnp.negative, "Floor": jnp.floor, "Ceil": jnp.ceil, "Round": jnp.round, "Sign": jnp.sign,
    "Sqrt": jnp.sqrt, "Exp": jnp.exp, "Log": jnp.log, "Sin": jnp.sin, "Cos": jnp.cos, "Tan": jnp.tan,
    "Asin": jnp.arcsin, "Acos": jnp.arccos, "Atan": jnp.arctan, "Sinh": jnp.sinh, "Cosh": jnp.cosh, "Tanh": jnp.tanh,
    "Asinh": jnp.arcsinh, "Acosh": jnp.arccosh, "Atanh": jnp.arctanh, "Not": jnp.logical_not, "IsNaN": jnp.isnan,
    "BitwiseNot": jnp.invert, "Reciprocal": lambda x: 1 / x, "Relu": lambda x: jnp.maximum(x, 0),
    "Sigmoid": in_f32(jax.nn.sigmoid), "Erf": in_f32(lambda x: lax.erf(jnp.asarray(x))),
    "Softplus": in_f32(jax.nn.softplus), "Softsign": in_f32(lambda x: x / (1 + jnp.abs(x))),
}.items():  # fmt: skip
    _unary(_name, _function)


def _binary(name: str, function: Callable[[Any, Any], Any]) -> None:
    def lowering(ctx: Context, a: Any, b: Any, *, axis: int = 0, broadcast: int = 0) -> Any:
        if broadcast and ctx.opset < 7:
            raise Unsupported(
                "its broadcasting is that of opset 6 or older; convert the file to opset 7 or newer"
            )
        return function(a, b)

    op(name)(lowering)


def _divided(a: Any, b: Any) -> Any:
    """Divide. Quotients of integers are rounded towards zero, as in C."""
    if is_float(a):
        return jnp.divide(a, b)
    a, b = jnp.broadcast_arrays(a, b)
    return lax.div(a, b)


def _power(a: Any, b: Any) -> Any:
    if is_integer(a) and is_float(b):
        return jnp.power(a.astype(b.dtype), b).astype(a.dtype)
    return jnp.power(a, b.astype(a.dtype) if is_float(a) else b).astype(a.dtype)


_TWO: dict[str, Callable[[Any, Any], Any]] = {
    "Add": jnp.add, "Sub": jnp.subtract, "Mul": jnp.multiply, "Div": _divided, "Pow": _power,
    "And": jnp.logical_and, "Or": jnp.logical_or, "Xor": jnp.logical_xor, "Equal": jnp.equal,
    "Greater": jnp.greater, "Less": jnp.less, "GreaterOrEqual": jnp.greater_equal, "LessOrEqual": jnp.less_equal,
    "BitwiseAnd": jnp.bitwise_and, "BitwiseOr": jnp.bitwise_or, "BitwiseXor": jnp.bitwise_xor,
    "PRelu": lambda x, slope: jnp.where(x < 0, x * slope, x),
}  # fmt: skip
for _name, _two in _TWO.items():
    _binary(_name, _two)


def _many(name: str, function: Callable[[Any, Any], Any]) -> None:
    op(name)(lambda ctx, *x: functools.reduce(function, x))


_many("Sum", jnp.add)
_many("Max", jnp.maximum)
_many("Min", jnp.minimum)


@op("Mean")
def _mean(ctx: Context, *x: Any) -> Any:
    return functools.reduce(jnp.add, x) / np.array(len(x), x[0].dtype)


@op("Where")
def _where(ctx: Context, condition: Any, a: Any, b: Any) -> Any:
    return jnp.where(condition, a, b)


@op("Mod")
def _mod(ctx: Context, a: Any, b: Any, *, fmod: int = 0) -> Any:
    return lax.rem(*jnp.broadcast_arrays(a, b)) if fmod else jnp.mod(a, b)


@op("BitShift")
def _bit_shift(ctx: Context, a: Any, b: Any, *, direction: str) -> Any:
    a, b = jnp.broadcast_arrays(a, b)
    bits = 8 * a.dtype.itemsize
    # If the distance is not below the number of bits, the result has only zeros or, to the right, copies of the sign bit.
    beyond = (b < 0) | (b >= bits)
    if direction == "LEFT":
        return jnp.where(beyond, 0, jnp.left_shift(a, jnp.where(beyond, 0, b)))
    return jnp.where(
        beyond, jnp.where(a < 0, -1, 0).astype(a.dtype), jnp.right_shift(a, jnp.where(beyond, 0, b))
    )


@op("IsInf")
def _is_inf(ctx: Context, x: Any, *, detect_negative: int = 1, detect_positive: int = 1) -> Any:
    infinite = jnp.isinf(x)
    return infinite & ((x > 0) & bool(detect_positive) | (x < 0) & bool(detect_negative))


@op("Clip")
def _clip(
    ctx: Context,
    x: Any,
    low: Any = None,
    high: Any = None,
    *,
    min: float | None = None,
    max: float | None = None,
) -> Any:
    low, high = min if low is None else low, max if high is None else high
    if low is not None:
        x = jnp.maximum(x, jnp.asarray(low, x.dtype))
    return x if high is None else jnp.minimum(x, jnp.asarray(high, x.dtype))


@op("LeakyRelu")
def _leaky_relu(ctx: Context, x: Any, *, alpha: float = 0.01) -> Any:
    return jnp.where(x < 0, x * np.array(alpha, x.dtype), x)


@op("Elu")
def _elu(ctx: Context, x: Any, *, alpha: float = 1.0) -> Any:
    return in_f32(lambda v: jnp.where(v < 0, np.array(alpha, v.dtype) * jnp.expm1(v), v))(x)


@op("Selu")
def _selu(
    ctx: Context,
    x: Any,
    *,
    alpha: float = 1.67326319217681884765625,
    gamma: float = 1.05070102214813232421875,
) -> Any:
    a, g = np.array(alpha, x.dtype), np.array(gamma, x.dtype)
    return g * jnp.where(x > 0, x, a * jnp.expm1(x))


@op("HardSigmoid")
def _hard_sigmoid(ctx: Context, x: Any, *, alpha: float = 0.2, beta: float = 0.5) -> Any:
    return jnp.clip(x * np.array(alpha, x.dtype) + np.array(beta, x.dtype), 0, 1)


@op("Gelu")
@op("Gelu", domain=MICROSOFT)
def gelu(ctx: Context, x: Any, *, approximate: str = "none") -> Any:
    return in_f32(lambda v: jax.nn.gelu(v, approximate=approximate == "tanh"))(x)


@op("Dropout")
def _dropout(
    ctx: Context, x: Any, ratio: Any = None, training: Any = None, *, seed: int = 0, **old: Any
) -> Any:
    if training is not None and bool(ctx.known(training, "training mode")):
        raise Unsupported("it drops values at random, as in training; export the model for inference")
    return (x, jnp.ones(x.shape, np.bool_))[: ctx.outputs]


@op("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial")
def _random(ctx: Context, *x: Any, **attributes: Any) -> Any:
    raise Unsupported(
        "it draws random numbers, but an answer may depend only on its request; make them an input of the model"
    )


# --- reductions -------------------------------------------------------------------------------------------


def _reduction(name: str, function: Callable[[Any, Any, bool], Any]) -> None:
    def lowering(
        ctx: Context,
        x: Any,
        axes_input: Any = None,
        *,
        axes: Any = None,
        keepdims: int = 1,
        noop_with_empty_axes: int = 0,
    ) -> Any:
        chosen_axes = axes if axes_input is None else whole_numbers(ctx, axes_input, "axes")
        if not chosen_axes:
            if noop_with_empty_axes:
                return function(x, (), True)
            chosen_axes = range(x.ndim)
        return function(x, tuple(axis_of(axis, x.ndim) for axis in chosen_axes), bool(keepdims)).astype(
            x.dtype
        )

    op(f"Reduce{name}")(lowering)


def _log_sum_exp(x: Any, axes: Any, keep: bool) -> Any:
    floating = widened(x) if is_float(x) else x.astype(np.float64)
    return jax.nn.logsumexp(floating, axis=axes, keepdims=keep)


for _name, _reduce in {
    "Sum": lambda x, a, k: jnp.sum(widened(x), axis=a, keepdims=k, dtype=widened(x).dtype),
    "Mean": lambda x, a, k: jnp.mean(widened(x), axis=a, keepdims=k),
    "Max": lambda x, a, k: jnp.max(x, axis=a, keepdims=k, initial=lowest(x.dtype)),
    "Min": lambda x, a, k: jnp.min(x, axis=a, keepdims=k, initial=highest(x.dtype)),
    "Prod": lambda x, a, k: jnp.prod(widened(x), axis=a, keepdims=k, dtype=widened(x).dtype),
    "L1": lambda x, a, k: jnp.sum(jnp.abs(widened(x)), axis=a, keepdims=k),
    "L2": lambda x, a, k: jnp.sqrt(jnp.sum(jnp.square(widened(x)), axis=a, keepdims=k)),
    "SumSquare": lambda x, a, k: jnp.sum(jnp.square(widened(x)), axis=a, keepdims=k),
    "LogSum": lambda x, a, k: jnp.log(jnp.sum(widened(x), axis=a, keepdims=k)),
    "LogSumExp": _log_sum_exp,
}.items():
    _reduction(_name, _reduce)


def _arg(name: str, function: Callable[..., Any]) -> None:
    def lowering(
        ctx: Context, x: Any, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0
    ) -> Any:
        axis = axis_of(axis, x.ndim)
        index = (
            x.shape[axis] - 1 - function(jnp.flip(x, axis), axis) if select_last_index else function(x, axis)
        )
        return (jnp.expand_dims(index, axis) if keepdims else index).astype(np.int64)

    op(name)(lowering)


_arg("ArgMax", jnp.argmax)
_arg("ArgMin", jnp.argmin)


def _normalised(name: str, function: Callable[..., Any]) -> None:
    def lowering(ctx: Context, x: Any, *, axis: int | None = None) -> Any:
        if ctx.opset >= 13:
            return in_f32(lambda v: function(v, axis=-1 if axis is None else axis))(x)
        # Before opset 13, the axis `at` and all later axes count as one axis.
        at = 1 if axis is None else axis % x.ndim
        flat = jnp.reshape(x, (int(np.prod(x.shape[:at])), -1))
        return jnp.reshape(in_f32(lambda v: function(v, axis=-1))(flat), x.shape)

    op(name)(lowering)


def _hardmax(x: Any, axis: int) -> Any:
    return jax.nn.one_hot(jnp.argmax(x, axis), x.shape[axis], axis=axis, dtype=x.dtype)


_normalised("Softmax", jax.nn.softmax)
_normalised("LogSoftmax", jax.nn.log_softmax)
_normalised("Hardmax", _hardmax)


def _cumulative(name: str, function: Callable[..., Any], neutral: int) -> None:
    def lowering(ctx: Context, x: Any, axis: Any, *, exclusive: int = 0, reverse: int = 0) -> Any:
        [at] = whole_numbers(ctx, axis, "axis")
        at = axis_of(at, x.ndim)
        y = jnp.flip(x, at) if reverse else jnp.asarray(x)
        if exclusive:
            first = jnp.full_like(lax.slice_in_dim(y, 0, 1, axis=at), neutral)
            y = jnp.concatenate([first, lax.slice_in_dim(y, 0, y.shape[at] - 1, axis=at)], at)
        y = function(y, at, dtype=x.dtype)
        return jnp.flip(y, at) if reverse else y

    op(name)(lowering)


_cumulative("CumSum", jnp.cumsum, 0)
_cumulative("CumProd", jnp.cumprod, 1)


@op("TopK")
def _top_k(
    ctx: Context, x: Any, count: Any = None, *, k: int = 0, axis: int = -1, largest: int = 1, sorted: int = 1
) -> Any:
    if count is not None:
        [k] = whole_numbers(ctx, count, "k")
    axis = axis_of(axis, x.ndim)
    if not 0 <= k <= x.shape[axis]:
        raise Unsupported(f"k is {k}, and the axis has {x.shape[axis]} elements")
    order = jnp.argsort(x, axis, stable=True, descending=bool(largest))
    order = lax.slice_in_dim(order, 0, k, axis=axis)
    return jnp.take_along_axis(x, order, axis), order.astype(np.int64)


@op("NonZero")
def _non_zero(ctx: Context, x: Any) -> Any:
    return np.array(np.nonzero(ctx.known(x, "number of results")), np.int64).reshape(max(x.ndim, 1), -1)


@op("Unique")
def _unique(ctx: Context, x: Any, *, axis: int | None = None, sorted: int = 1) -> Any:
    array = ctx.known(x, "number of results")
    values, first, inverse, counts = np.unique(
        array, return_index=True, return_inverse=True, return_counts=True, axis=axis
    )
    inverse = inverse.reshape(-1)
    if not sorted:
        order = np.argsort(first)
        values = values[order] if axis is None else np.take(values, order, axis)
        first, counts, inverse = first[order], counts[order], np.argsort(order)[inverse]
    return tuple([values, *(part.astype(np.int64) for part in (first, inverse, counts))][: ctx.outputs])


# --- products ---------------------------------------------------------------------------------------------


@op("MatMul")
def _mat_mul(ctx: Context, a: Any, b: Any) -> Any:
    return jnp.matmul(a, b)


@op("Gemm")
def gemm(
    ctx: Context, a: Any, b: Any, c: Any = None, *, alpha: float = 1.0, beta: float = 1.0, transA: int = 0, transB: int = 0,
    broadcast: int = 0,
) -> Any:  # fmt: skip
    y = jnp.matmul(a.T if transA else a, b.T if transB else b)
    if alpha != 1:
        y = (y * np.array(alpha, np.float32 if is_integer(y) else y.dtype)).astype(a.dtype)
    if c is None or beta == 0:
        return y
    return y + (
        c if beta == 1 else (c * np.array(beta, np.float32 if is_integer(c) else c.dtype)).astype(a.dtype)
    )


@op("Einsum")
def _einsum(ctx: Context, *x: Any, equation: str) -> Any:
    return jnp.einsum(equation.replace(" ", ""), *x)


@op("Det")
def _det(ctx: Context, x: Any) -> Any:
    return jnp.linalg.det(x)


# --- spectra ----------------------------------------------------------------------------------------------


@op("DFT")
def _dft(
    ctx: Context, x: Any, length: Any = None, axis_input: Any = None, *, axis: int | None = None, inverse: int = 0, onesided: int = 0
) -> Any:  # fmt: skip
    at = (1 if ctx.opset < 20 else -2) if axis is None else axis
    if axis_input is not None:
        [at] = whole_numbers(ctx, axis_input, "axis")
    at = axis_of(at, x.ndim)
    if at == x.ndim - 1:
        raise Unsupported("its axis is that of the complex parts; the file is damaged")
    n = x.shape[at] if length is None else whole_numbers(ctx, length, "length")[0]
    if onesided and inverse:
        values = x[..., 0] + (1j * x[..., 1] if x.shape[-1] == 2 else 0)
        return jnp.fft.irfft(values, 2 * (x.shape[at] - 1) if length is None else n, at)[..., None].astype(
            x.dtype
        )
    values = x[..., 0] + 1j * x[..., 1] if x.shape[-1] == 2 else x[..., 0]
    if onesided:
        spectrum = jnp.fft.rfft(values.real, n, at)
    else:
        spectrum = (jnp.fft.ifft if inverse else jnp.fft.fft)(values, n, at)
    return jnp.stack([spectrum.real, spectrum.imag], -1).astype(x.dtype)


@op("STFT")
def _stft(
    ctx: Context, signal: Any, step: Any, window: Any = None, length: Any = None, *, onesided: int = 1
) -> Any:
    [hop] = whole_numbers(ctx, step, "frame_step")
    if length is not None:
        [n] = whole_numbers(ctx, length, "frame_length")
    elif window is not None:
        n = window.shape[0]
    else:
        raise Unsupported("it has neither a window nor a frame length; the file is damaged")
    values = (
        signal[..., 0] + 1j * signal[..., 1]
        if signal.ndim == 3 and signal.shape[-1] == 2
        else signal.reshape(signal.shape[:2])
    )
    count = 1 + (values.shape[1] - n) // hop
    # Make jax compute the indices at run time. As a constant of the module, they could be larger than the weights.
    at = jnp.arange(count)[:, None] * hop + jnp.arange(n)
    frames = values[:, at] if window is None else values[:, at] * window
    spectra = jnp.fft.rfft(frames) if onesided and not jnp.iscomplexobj(frames) else jnp.fft.fft(frames)
    if onesided:
        spectra = spectra[..., : n // 2 + 1]
    return jnp.stack([spectra.real, spectra.imag], -1).astype(signal.dtype)


@op("MelWeightMatrix")
def _mel(
    ctx: Context, bins: Any, length: Any, rate: Any, low: Any, high: Any, *, output_datatype: int = 1
) -> Any:
    [count], [size], [hertz] = (
        whole_numbers(ctx, value, label)
        for value, label in ((bins, "bins"), (length, "length"), (rate, "rate"))
    )
    refuse_large(count, size)
    edges = [float(np.ravel(ctx.known(value, "edge"))[0]) for value in (low, high)]
    mel = [2595 * np.log10(1 + edge / 700) for edge in edges]
    points = mel[0] + np.arange(count + 2) * (mel[1] - mel[0]) / (count + 2)
    at = np.floor((size + 1) * (700 * (10 ** (points / 2595) - 1)) / hertz).astype(int)
    spectrum = np.arange(size // 2 + 1)[:, None]
    lower, centre, upper = at[:-2], at[1:-1], at[2:]
    rising = np.where(lower == centre, spectrum == centre, (spectrum - lower) / np.maximum(centre - lower, 1))
    falling = (upper - spectrum) / np.maximum(upper - centre, 1)
    inside = (spectrum >= lower) & (spectrum <= centre)
    weights = np.where(inside, rising, np.where((spectrum > centre) & (spectrum < upper), falling, 0))
    return weights.astype(dtype_of(output_datatype))


@op("NonMaxSuppression")
def _nms(ctx: Context, *x: Any, **attributes: Any) -> Any:
    raise Unsupported(
        "the number of its results depends on the values of a request, and shapes are fixed at export; cut the model"
        " before it with --outputs, and do it in postprocess (rsrv.hooks)"
    )


@op("Compress")
def _compress(ctx: Context, x: Any, condition: Any, *, axis: int | None = None) -> Any:
    where = np.nonzero(ctx.known(condition, "number of results"))[0]
    return jnp.take(jnp.ravel(x), where) if axis is None else jnp.take(x, where, axis)


@op("OneHot")
def _one_hot(ctx: Context, indices: Any, depth: Any, values: Any, *, axis: int = -1) -> Any:
    [size] = whole_numbers(ctx, depth, "depth")
    at = indices.astype(np.int64) if is_float(indices) else indices
    hot = jax.nn.one_hot(jnp.where(at < 0, at + size, at), size, axis=axis, dtype=np.bool_)
    return jnp.where(hot, scalar(values[1]), scalar(values[0])).astype(values.dtype)
