"""The ONNX operators LSTM, GRU and RNN, as loops over the time steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rsrv_bundle.onnx_import.operators import MICROSOFT, Context, Unsupported, is_known, op

_ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "sigmoid": jax.nn.sigmoid, "tanh": jnp.tanh, "relu": jax.nn.relu, "softplus": jax.nn.softplus,
    "softsign": jax.nn.soft_sign,
}  # fmt: skip
_DEFAULTS = {"LSTM": ("sigmoid", "tanh", "tanh"), "GRU": ("sigmoid", "tanh"), "RNN": ("tanh",)}
_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}

#: Function of one time step. It takes h, c and the input of the step, and returns the new h and c.
Step = Callable[[Any, Any, Any], tuple[Any, Any]]


def _lstm(w: Any, r: Any, wb: Any, rb: Any, peepholes: Any, act: Any, clip: Any, **_: Any) -> Step:
    def step(h: Any, c: Any, x: Any) -> tuple[Any, Any]:
        i, o, f, z = jnp.split(x @ w.T + h @ r.T + wb + rb, 4, -1)
        if peepholes is not None:
            pi, po, pf = jnp.split(peepholes, 3)
            i, f = i + pi * c, f + pf * c
        c = act[0](clip(f)) * c + act[0](clip(i)) * act[1](clip(z))
        if peepholes is not None:
            o = o + po * c
        return act[0](clip(o)) * act[2](c), c

    return step


def _gru(w: Any, r: Any, wb: Any, rb: Any, act: Any, clip: Any, before: int, **_: Any) -> Step:
    rz, rr, rh = jnp.split(jnp.asarray(r), 3)
    bz, br, bh = jnp.split(jnp.asarray(rb), 3)

    def step(h: Any, c: Any, x: Any) -> tuple[Any, Any]:
        xz, xr, xh = jnp.split(x @ w.T + wb, 3, -1)
        z = act[0](clip(xz + h @ rz.T + bz))
        reset = act[0](clip(xr + h @ rr.T + br))
        new = act[1](clip(xh + (reset * (h @ rh.T + bh) if before else (reset * h) @ rh.T + bh)))
        return (1 - z) * new + z * h, c

    return step


def _rnn(w: Any, r: Any, wb: Any, rb: Any, act: Any, clip: Any, **_: Any) -> Step:
    return lambda h, c, x: (act[0](clip(x @ w.T + h @ r.T + wb + rb)), c)


_STEPS: dict[str, Callable[..., Step]] = {"LSTM": _lstm, "GRU": _gru, "RNN": _rnn}


def _recurrent(kind: str) -> Callable[..., Any]:
    def lowering(
        ctx: Context, x: Any, w: Any, r: Any, b: Any = None, lengths: Any = None, h0: Any = None, c0: Any = None,
        peepholes: Any = None, *, activation_alpha: Any = None, activation_beta: Any = None, activations: Any = None,
        clip: float | None = None, direction: str = "forward", hidden_size: int = 0, input_forget: int = 0, layout: int = 0,
        linear_before_reset: int = 0,
    ) -> Any:  # fmt: skip
        if input_forget:
            raise Unsupported("its coupled gates (input_forget) are not supported")
        names = [name.lower() for name in activations or _DEFAULTS[kind] * w.shape[0]]
        if unknown := [name for name in names if name not in _ACTIVATIONS]:
            raise Unsupported(f"its activation '{unknown[0]}' is not supported")
        if layout:
            x = jnp.swapaxes(x, 0, 1)
            h0, c0 = (None if value is None else jnp.swapaxes(value, 0, 1) for value in (h0, c0))
        if lengths is not None and is_known(lengths) and (np.ravel(lengths) == x.shape[0]).all():
            lengths = None
        x = jnp.asarray(x)
        directions, hidden, rows = w.shape[0], r.shape[2], x.shape[1]
        ys, hs, cs = [], [], []
        for index in range(directions):
            count = len(names) // directions
            own = [_ACTIVATIONS[name] for name in names[index * count : (index + 1) * count]]
            both = np.zeros(2 * _GATES[kind] * hidden, x.dtype) if b is None else b[index]
            step = _STEPS[kind](
                w=w[index], r=r[index], wb=both[: _GATES[kind] * hidden], rb=both[_GATES[kind] * hidden :],
                peepholes=None if peepholes is None else peepholes[index], act=own, before=linear_before_reset,
                clip=(lambda v: v) if clip is None else (lambda v: jnp.clip(v, -clip, clip)),
            )  # fmt: skip
            zero = jnp.zeros((rows, hidden), x.dtype)
            h, c = (zero if value is None else jnp.asarray(value[index], x.dtype) for value in (h0, c0))
            backward = direction == "reverse" or index == 1
            y, (h, c) = _run(step, x, (h, c), lengths, backward)
            ys.append(y)
            hs.append(h)
            cs.append(c)
        y, h, c = jnp.stack(ys, 1), jnp.stack(hs), jnp.stack(cs)
        if layout:
            y, h, c = jnp.transpose(y, (2, 0, 1, 3)), jnp.swapaxes(h, 0, 1), jnp.swapaxes(c, 0, 1)
        return (y, h, c)[: max(ctx.outputs, 1)] if kind == "LSTM" else (y, h)[: max(ctx.outputs, 1)]

    return lowering


def _run(
    step: Step, x: Any, first: tuple[Any, Any], lengths: Any, backward: bool
) -> tuple[Any, tuple[Any, Any]]:
    """Return the outputs [time, n, hidden] and the last states.

    `lengths` has the number of valid steps of each row, or is None. At other steps, the row's state does not change and its
    output is 0.
    """
    time = jnp.arange(x.shape[0])

    def one(state: tuple[Any, Any], at: tuple[Any, Any]) -> tuple[tuple[Any, Any], Any]:
        now, value = at
        h, c = step(*state, value)
        if lengths is None:
            return (h, c), h
        inside = (now < lengths)[:, None]
        return (jnp.where(inside, h, state[0]), jnp.where(inside, c, state[1])), jnp.where(inside, h, 0)

    last, ys = lax.scan(one, first, (time, x), reverse=backward)
    return ys, last


for _kind in _STEPS:
    op(_kind)(_recurrent(_kind))


@op("DynamicQuantizeLSTM", domain=MICROSOFT)
def _dynamic_quantize_lstm(
    ctx: Context, x: Any, w: Any, r: Any, b: Any, lengths: Any, h0: Any, c0: Any, peepholes: Any, w_scale: Any, w_zero: Any,
    r_scale: Any, r_zero: Any, **attributes: Any,
) -> Any:  # fmt: skip
    def widened(value: Any, scale: Any, zero: Any) -> Any:
        per = [(-1, 1, 1) if part.ndim == 1 else (part.shape[0], 1, -1) for part in (scale, zero)]
        offset = jnp.reshape(zero, per[1]).astype(np.float32)
        return jnp.swapaxes((value.astype(np.float32) - offset) * jnp.reshape(scale, per[0]), 1, 2)

    return _recurrent("LSTM")(
        ctx,
        x,
        widened(w, w_scale, w_zero),
        widened(r, r_scale, r_zero),
        b,
        lengths,
        h0,
        c0,
        peepholes,
        **attributes,
    )
