"""PyTorch's recurrent networks as scans. Without them, a trace would repeat a network's operations for each time step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

#: Function of the state of a step, the product of its input, and the product of its hidden state. It returns the next state.
#: A state is a tuple of arrays [n, hidden], of which the first is the output. A product is [n, gates * hidden].
Cell = Callable[[tuple[Any, ...], Any, Any], tuple[Any, ...]]

#: Number of time steps in one iteration of a compiled loop. An iteration costs more than the operations of a small network.
_UNROLLED = 8


def lstm(state: tuple[Any, ...], x: Any, h: Any) -> tuple[Any, ...]:
    """Formulas of torch.nn.LSTM. The state is (hidden, cell)."""
    add, forget, new, out = jnp.split(x + h, 4, axis=-1)
    cell = jax.nn.sigmoid(forget) * state[1] + jax.nn.sigmoid(add) * jnp.tanh(new)
    return jax.nn.sigmoid(out) * jnp.tanh(cell), cell


def gru(state: tuple[Any, ...], x: Any, h: Any) -> tuple[Any, ...]:
    """Formulas of torch.nn.GRU."""
    (reset_x, update_x, new_x), (reset_h, update_h, new_h) = (
        jnp.split(value, 3, axis=-1) for value in (x, h)
    )
    new = jnp.tanh(new_x + jax.nn.sigmoid(reset_x + reset_h) * new_h)
    return (new + jax.nn.sigmoid(update_x + update_h) * (state[0] - new),)


def rnn_tanh(state: tuple[Any, ...], x: Any, h: Any) -> tuple[Any, ...]:
    """Formula of torch.nn.RNN."""
    return (jnp.tanh(x + h),)


def rnn_relu(state: tuple[Any, ...], x: Any, h: Any) -> tuple[Any, ...]:
    """Formula of torch.nn.RNN with `nonlinearity="relu"`."""
    return (jax.nn.relu(x + h),)


def scanned(cell: Cell) -> Callable[..., tuple[Any, ...]]:
    """Return the lowering of an operation such as aten.gru.input. It returns the outputs and the last states."""

    def lowering(
        x: Any, first: Any, weights: Sequence[Any], has_biases: bool, layers: int, dropout: float, train: bool, bidirectional: bool,
        batch_first: bool,
    ) -> tuple[Any, ...]:  # fmt: skip
        if train and dropout:
            raise NotImplementedError("dropout draws random numbers, and a served model must not")
        states = first if isinstance(first, list | tuple) else [first]
        directions = 2 if bidirectional else 1
        each = len(weights) // (layers * directions)
        x = jnp.swapaxes(x, 0, 1) if batch_first else x
        lasts = []
        for layer in range(layers):
            outputs = []
            for direction in range(directions):
                at = layer * directions + direction
                own = weights[at * each : (at + 1) * each]
                last, output = _direction(
                    cell, x, tuple(state[at] for state in states), own, has_biases, direction == 1
                )
                outputs.append(output)
                lasts.append(last)
            x = jnp.concatenate(outputs, axis=-1)
        return (
            jnp.swapaxes(x, 0, 1) if batch_first else x,
            *(jnp.stack(state) for state in zip(*lasts, strict=True)),
        )

    return lowering


def _direction(
    cell: Cell, x: Any, first: tuple[Any, ...], weights: Sequence[Any], has_biases: bool, reverse: bool
) -> tuple[tuple[Any, ...], Any]:
    """Run one direction of a layer over x [time, n, features]. Return the last state, and the outputs [time, n, hidden]."""
    of_input, of_hidden, *rest = weights
    input_bias, hidden_bias = rest[:2] if has_biases else (0, 0)
    # With the option `proj_size`, an LSTM has one weight more.
    projection = rest[-1] if len(rest) in (1, 3) else None

    def step(state: tuple[Any, ...], product: Any) -> tuple[tuple[Any, ...], Any]:
        hidden, *cells = cell(state, product, state[0] @ of_hidden.T + hidden_bias)
        hidden = hidden if projection is None else hidden @ projection.T
        return (hidden, *cells), hidden

    last, outputs = jax.lax.scan(step, first, x @ of_input.T + input_bias, reverse=reverse, unroll=_UNROLLED)
    return last, outputs
