"""If, Loop, Scan and SequenceMap: nested graphs."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rsrv_bundle.onnx_import.model import Graph
from rsrv_bundle.onnx_import.operators import Context, Unsupported, is_known, op, scalar

#: A loop that evaluates at most this many nodes is unrolled, so that its values may be shapes.
_UNROLLED = 1000
#: A loop with more rounds is compiled as a loop if possible, because unrolling makes the compile time grow with each round.
_ROUNDS = 16


@op("If", control=True)
def _if(ctx: Context, condition: Any, *, then_branch: Graph, else_branch: Graph) -> Any:
    if is_known(condition):
        return tuple(ctx.run(then_branch if np.ravel(condition)[0] else else_branch, ()))
    # Compute both branches and choose the result of one. This is correct, because nodes have no side effects.
    yes, no = ctx.run(then_branch, ()), ctx.run(else_branch, ())
    chosen = []
    for a, b in zip(yes, no, strict=True):
        if isinstance(a, list) or isinstance(b, list) or a is None or b is None or a.shape != b.shape:
            raise Unsupported(
                "its branches return different shapes, and its condition depends on a request; shapes are fixed at export"
            )
        chosen.append(jnp.where(scalar(condition), a, b))
    return tuple(chosen)


@op("Loop", control=True)
def _loop(ctx: Context, count: Any, condition: Any, *carried: Any, body: Graph) -> Any:
    state = list(carried)
    scans = len(body.outputs) - 1 - len(state)
    limit = int(np.ravel(count)[0]) if count is not None and is_known(count) else None
    first: Any = np.array(True) if condition is None else condition
    goes_on = first
    if (limit is not None and limit * len(body.nodes) <= _UNROLLED) or (
        limit is None and count is None and is_known(goes_on)
    ):
        results: list[list[Any]] = [[] for _ in range(scans)]
        done = 0
        while (limit is None or done < limit) and is_known(goes_on) and bool(np.ravel(goes_on)[0]):
            made = (*state, *(parts[-1] for parts in results if parts))
            if done == _ROUNDS and not (is_known(*made) or any(isinstance(value, list) for value in carried)):
                # The loop has many rounds, and its values are not known, so unrolling would take long to compile. Try to compile
                # it as a loop. This fails if a value of the loop is used as a shape, or changes its shape. Then go on unrolling.
                with suppress(Exception):
                    arrays = [jnp.asarray(value) for value in carried]
                    rounds = _count(ctx, first, list(carried), limit, body) if scans else limit
                    return _traced_loop(ctx, count, rounds, first, arrays, scans, body, counted=True)
            if done > _UNROLLED:
                raise Unsupported(
                    f"it does not end after {_UNROLLED} rounds, and has no largest number of rounds"
                )
            goes_on, *values = ctx.run(body, [np.array(done, np.int64), np.array(True), *state])
            state, rows = values[: len(state)], values[len(state) :]
            for parts, value in zip(results, rows, strict=True):
                parts.append(value)
            done += 1
        if is_known(goes_on):
            if not all(results):
                raise Unsupported("it has no rounds, so the shapes of its results are not known")
            return (*state, *(jnp.stack(parts) for parts in results))
    if any(isinstance(value, list) for value in carried):
        raise Unsupported(
            "its number of rounds depends on a request, which is not supported for a loop that carries a sequence"
        )
    return _traced_loop(ctx, count, limit, first, [jnp.asarray(value) for value in carried], scans, body)


def _count(ctx: Context, goes_on: Any, state: list[Any], limit: int | None, body: Graph) -> int:
    """Return the number of rounds of a loop whose condition is known in each round. Nothing of the rounds is compiled."""
    done = 0

    def rounds() -> None:
        nonlocal done, goes_on, state
        while done != limit and np.ravel(goes_on)[0]:
            if done > _UNROLLED:
                raise Unsupported("has too many rounds to count")
            goes_on, *values = ctx.run(body, [np.array(done, np.int64), np.array(True), *state])
            state = values[: len(state)]
            done += 1

    jax.eval_shape(rounds)
    return done


def _traced_loop(
    ctx: Context,
    count: Any,
    limit: int | None,
    first: Any,
    state: list[Any],
    scans: int,
    body: Graph,
    *,
    counted: bool = False,
) -> Any:
    """Evaluate a loop as a loop of jax, without unrolling. With `counted`, it has `limit` rounds, whatever its condition is."""
    always = counted

    def run_round(index: Any, values: Any) -> tuple[Any, list[Any], list[Any]]:
        nonlocal always
        goes_on, *outputs = ctx.run(body, [jnp.asarray(index, np.int64), np.array(True), *values])
        always = counted or (is_known(goes_on) and bool(np.ravel(goes_on)[0]))
        return goes_on, outputs[: len(values)], outputs[len(values) :]

    if scans:
        undecided = Unsupported("a request decides the number of its results, and shapes are fixed at export")
        if limit is None or not (is_known(first) and np.ravel(first)[0]):
            raise undecided

        def step(values: Any, index: Any) -> tuple[Any, Any]:
            _, after, row = run_round(index, values)
            if not always:
                raise undecided
            return [jnp.asarray(value) for value in after], [jnp.asarray(value) for value in row]

        state, rows = lax.scan(step, state, jnp.arange(limit))
        return (*state, *rows)
    bound = np.int64(2**62) if count is None else scalar(count).astype(np.int64)

    def more(values: Any) -> Any:
        return (values[0] < bound) & values[1]

    def again(values: Any) -> Any:
        goes_on, after, _ = run_round(values[0], values[2])
        return values[0] + 1, scalar(goes_on).astype(np.bool_), [jnp.asarray(value) for value in after]

    start = (jnp.asarray(0, np.int64), scalar(first).astype(np.bool_), state)
    return tuple(lax.while_loop(more, again, start)[2])


@op("Scan", control=True)
def _scan(
    ctx: Context, *x: Any, body: Graph, num_scan_inputs: int, scan_input_axes: Any = None, scan_input_directions: Any = None,
    scan_output_axes: Any = None, scan_output_directions: Any = None,
) -> Any:  # fmt: skip
    if ctx.opset < 9:
        raise Unsupported("Scan of opset 8 is not supported; convert the file to opset 9 or newer")
    state = [jnp.asarray(value) for value in x[: len(x) - num_scan_inputs]]
    given = x[len(x) - num_scan_inputs :]
    axes, turns = scan_input_axes or [0] * len(given), scan_input_directions or [0] * len(given)
    rows = [
        jnp.flip(jnp.moveaxis(value, axis, 0), 0) if turn else jnp.moveaxis(value, axis, 0)
        for value, axis, turn in zip(given, axes, turns, strict=True)
    ]

    def step(values: Any, now: Any) -> tuple[Any, Any]:
        outputs = [jnp.asarray(value) for value in ctx.run(body, [*values, *now])]
        return outputs[: len(values)], outputs[len(values) :]

    state, scanned = lax.scan(step, state, rows)
    axes, turns = scan_output_axes or [0] * len(scanned), scan_output_directions or [0] * len(scanned)
    results = [
        jnp.moveaxis(jnp.flip(value, 0) if turn else value, 0, axis)
        for value, axis, turn in zip(scanned, axes, turns, strict=True)
    ]
    return (*state, *results)


@op("SequenceMap", control=True)
def _sequence_map(ctx: Context, sequence: Any, *others: Any, body: Graph) -> Any:
    rounds = [
        ctx.run(body, [part, *(other[index] if isinstance(other, list) else other for other in others)])
        for index, part in enumerate(sequence)
    ]
    return tuple([outputs[index] for outputs in rounds] for index in range(len(body.outputs)))
