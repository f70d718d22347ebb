"""Export of functions that keep state for each sequence, and of language models that generate. Needs jax."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rsrv_bundle.calling import Results
from rsrv_bundle.errors import BundleError
from rsrv_bundle.export import Original, StatefulParts, export_bundle, named_leaves
from rsrv_bundle.interface import value_of
from rsrv_bundle.sampling import sample
from rsrv_bundle.sequence_check import compare_answers, compare_sequences
from rsrv_bundle.spec import Bundle, GenerateSpec, StateSpec, StateTensor, WhenFull
from rsrv_bundle.state_sections import MAX_SLOTS

#: Initial state of one slot: a function of the weights, or a pytree of jax.ShapeDtypeStruct if sequences begin with zeros.
Init = Callable[[Any], Any] | Any
#: Name of the state tensor that counts the tokens of a sequence.
POSITION = "position"


def export_stateful(
    step: Callable[..., Any],
    init: Init,
    params: Any,
    example_inputs: Mapping[str, Any],
    *,
    slots: int,
    idle_timeout_s: float = 60.0,
    when_full: WhenFull = "wait",
    in_place: bool = False,
    **options: Any,
) -> Bundle:
    """Write a function that takes one step of many sequences as a bundle with state. Check it, and return it as read back.

    step: `step(params, state, **inputs) -> (outputs, state)`. The state is a pytree of arrays with one row for each sequence, [n,
        ...], like the inputs and outputs. The outputs have the forms that `export_bundle` accepts.
    init: `init(params) -> state`, the state of one new sequence, without the axis of rows. If sequences begin with zeros, this may
        be a pytree of jax.ShapeDtypeStruct.
    slots: maximum number of sequences on the device at the same time.
    idle_timeout_s, when_full: as in the manifest.
    in_place: for a large state of which a step writes little, such as a cache of keys and values. Then the function is
        `step(params, pools, slots, begins, **inputs) -> (outputs, pools)`. `pools` is the state of all slots, [slots, ...]. `slots`,
        i32 [n], has the slot of each row, and `begins`, bool [n], is True if the row begins a sequence. The function must read and
        write only these slots. A row is padding if its slot is the number of slots, so read with mode="fill", and write with
        mode="drop". `init` then only gives shapes: a new sequence finds the values of the slot's last sequence, which may be NaN. Mask
        them with jnp.where, not by a product with zero. Write first, and then read what was written. If a step of one row reads before
        it writes, XLA copies the pool.
    options: as for `export_bundle`, without `batch_axis` and `internal`. The axis `t` in `input_shapes` is the time. With it, the
        modules are also compared with a step over the whole sequence.

    Every module runs several steps of sequences in random slots, among slots with other content, and is compared with `step`. Raises
    BundleError and FileExistsError, as `export_bundle` does.
    """
    original: Original | None = options.pop("original", None)
    pooled = _Pooled(step, init, params, slots, in_place)
    rows: Callable[..., Any] = original.run if original else jax.jit(pooled.rows)

    def reference(state: Any, **inputs: Any) -> tuple[Mapping[str, Any], Any]:
        if original and state is None:
            state = jax.tree.map(np.asarray, pooled.first(params, len(next(iter(inputs.values())))))
        outputs, state = rows(state, **inputs) if original else rows(params, state, **inputs)
        convert = original.to_numpy if original else lambda _, value: np.asarray(value)
        names = options.get("output_names"), options.get("outputs")
        return Results.of(outputs).convert(convert).named(*names), state

    parts = StatefulParts(
        StateSpec(slots, pooled.tensors, idle_timeout_s, when_full),
        lambda run, tolerance, examples, done: compare_sequences(run, reference, tolerance, examples, done),
    )
    options = {"code": step, **options}
    return export_bundle(pooled, params, example_inputs, stateful=parts, original=original, **options)


def export_generative(
    step: Callable[..., Any],
    init: Init,
    params: Any,
    *,
    slots: int,
    context: int,
    max_tokens: int,
    stop: Sequence[int] = (),
    chunks: Sequence[int] = (1, 16, 128),
    tokenizer: Path | str | None = None,
    template: str = "{text}",
    chat: Mapping[str, str] | None = None,
    in_place: bool = False,
    **options: Any,
) -> Bundle:
    """Write a language model as a bundle that generates tokens. Check it, and return it as read back.

    step: `step(params, state, position, tokens, lengths) -> (logits, state)`. `tokens`, i32 [n, t], has a chunk of each sequence, of
        which only the first `lengths`, i32 [n], tokens are valid. `position`, i32 [n], is the number of tokens before the chunk.
        `logits`, [n, vocabulary], are the logits after the last valid token. The function must work for every `t`.
    in_place: `step(params, pools, slots, begins, position, tokens, lengths) -> (logits, pools)`, as for `export_stateful`.
    context, max_tokens, stop, template, chat: as in the manifest.
    chunks: lengths of chunks to compile. They must include 1, for the steps after the prompt.
    tokenizer: a file of the package `tokenizers` to copy. With it, clients send and get text.
    init, slots, options: as for `export_stateful`.

    This function adds the state tensor `position` and the sampling. Every module gets prompts in chunks. Its tokens must be the
    likeliest tokens by the logits of `step` for the whole prompt, up to the tolerance.
    """
    state = {key: options.pop(key) for key in ("idle_timeout_s", "when_full") if key in options}
    pooled = _Generating(_Pooled(step, init, params, slots, in_place))
    logits = jax.jit(pooled.logits)
    file = None if tokenizer is None else Path(tokenizer)
    names = {name: name for name in ("tokens", "lengths", "sampling", "token")}
    text = file is not None
    task = {
        "kind": "text-generation",
        "inputs": {"text": "text_input"} if text else {"ids": "tokens"},
        "outputs": {"text": "text_output"} if text else {"ids": "tokens"},
    }
    parts = StatefulParts(
        replace(StateSpec(slots, pooled.tensors, 60.0, "wait"), **state),
        lambda run, tolerance, _, done: compare_answers(
            run,
            lambda tokens, lengths: np.asarray(
                logits(params, np.zeros_like(lengths), tokens, lengths), np.float32
            ),
            tolerance,
            done,
        ),
        GenerateSpec(
            **names,
            context=context,
            stop=tuple(stop),
            max_tokens=max_tokens,
            tokenizer=None if file is None else file.name,
            template=template,
            chat=dict(chat or {}),
        ),
        (lambda folder: None) if file is None else (lambda folder: shutil.copy(file, folder)),
    )
    struct: Any = jax.ShapeDtypeStruct
    inputs = {
        "tokens": struct((1, 1), np.int32),
        "lengths": struct((1,), np.int32),
        "sampling": struct((1, 4), np.float32),
    }
    axes = {"tokens": "nt", "lengths": "n", "sampling": "ns"}
    fixed = {"axes": axes, "input_shapes": [{"t": chunk} for chunk in sorted(set(chunks))]}
    options = {"code": step, "task": task, **options, **fixed}
    return export_bundle(pooled, params, inputs, stateful=parts, **options)


class _Pooled:
    """A step as a function of pools: `fn(params, pools, slots, **inputs) -> (outputs, pools)`. `pools` is a flat list."""

    def __init__(self, step: Callable[..., Any], init: Init, params: Any, slots: int, in_place: bool) -> None:
        if isinstance(slots, bool) or not isinstance(slots, int) or not 0 < slots <= MAX_SLOTS:
            raise BundleError(f"slots: must be a whole number from 1 to {MAX_SLOTS}, not {slots!r}")
        self.step = step
        self.init = init
        self.slots = slots
        self.in_place = in_place
        first = jax.eval_shape(init, params) if callable(init) else init
        names, leaves, self.tree = named_leaves("state", first)
        if not leaves:
            raise BundleError("init: gives no state; export a function without state with export_bundle")
        if not callable(init) and not all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
            raise BundleError("init: give a function of the weights, or jax.ShapeDtypeStruct for zeros")
        values = (
            value_of(f"state: {name}", leaf.dtype, leaf.shape)
            for name, leaf in zip(names, leaves, strict=True)
        )
        self.tensors = tuple(StateTensor(name, *value) for name, value in zip(names, values, strict=True))
        self.dtypes = [leaf.dtype for leaf in leaves]

    def first(self, params: Any, rows: int) -> Any:
        """Return the initial state of `rows` new sequences."""
        if callable(self.init):
            return jax.tree.map(
                lambda leaf: jnp.broadcast_to(leaf, (rows, *jnp.shape(leaf))), self.init(params)
            )
        return jax.tree.map(lambda leaf: jnp.zeros((rows, *leaf.shape), leaf.dtype), self.init)

    def rows(self, params: Any, state: Any, **inputs: Any) -> tuple[Any, Any]:
        """Take a step with the state of the rows instead of pools. For new sequences, `state` is None."""
        count = len(next(iter(inputs.values())))
        begins = jnp.full(count, state is None)
        state = self.first(params, count) if state is None else state
        if self.in_place:
            return self._checked(self.step(params, state, jnp.arange(count), begins, **inputs), count)
        return self._checked(self.step(params, state, **inputs), count)

    def __call__(self, params: Any, pools: Sequence[Any], slots: Any, **inputs: Any) -> tuple[Any, list[Any]]:
        begins = slots < 0
        index = jnp.where(begins, ~slots, slots)
        whole = jax.tree.unflatten(self.tree, pools)
        if self.in_place:
            result = self.step(params, whole, index, begins, **inputs)
            outputs, after = self._checked(result, self.slots)
            return outputs, jax.tree.leaves(after)

        count = len(slots)
        # Add a row of padding to a single row. For a single row, XLA would read and write slices, and copy all slots in between, which
        # takes 0.4 s for 256 MB on a CPU.
        places = index if count > 1 else jnp.append(index, self.slots)

        def read(pool: Any, first: Any) -> Any:
            stored = pool.at[places].get(mode="fill", fill_value=0)[:count]
            return jnp.where(begins.reshape(-1, *[1] * (pool.ndim - 1)), first, stored)

        state = jax.tree.map(read, whole, self.first(params, count))
        outputs, after = self._checked(self.step(params, state, **inputs), count)
        written = [
            pool.at[places].set(jnp.broadcast_to(new, (len(places), *new.shape[1:])), mode="drop")
            for pool, new in zip(pools, jax.tree.leaves(after), strict=True)
        ]
        return outputs, written

    def _checked(self, result: Any, rows: int) -> tuple[Any, Any]:
        """Return the outputs and the state. Raises BundleError if the state differs in structure or shapes from that of `init`."""
        if not isinstance(result, tuple) or len(result) != 2:
            raise BundleError("step: must return a tuple (outputs, state)")
        outputs, state = result
        if jax.tree.structure(state) != self.tree:
            raise BundleError(
                f"step: returns the state {jax.tree.structure(state)}, but init returns {self.tree}"
            )
        for tensor, dtype, leaf in zip(self.tensors, self.dtypes, jax.tree.leaves(state), strict=True):
            if (leaf.shape, leaf.dtype) != ((rows, *tensor.dims), dtype):
                raise BundleError(
                    f"step: returns the state {tensor.name} as {leaf.dtype} {list(leaf.shape)}, expected {dtype}"
                    f" {[rows, *tensor.dims]}"
                )
        return outputs, state


class _Generating:
    """A language model's pooled step, with the position of each sequence as its first pool, and with sampling."""

    def __init__(self, model: _Pooled) -> None:
        if any(tensor.name == POSITION for tensor in model.tensors):
            raise BundleError(
                f"init: {POSITION}: the exporter adds a state tensor of this name; rename yours"
            )
        self.model = model
        self.tensors = (StateTensor(POSITION, "i32", ()), *model.tensors)

    def __call__(self, params: Any, pools: Sequence[Any], slots: Any, **inputs: Any) -> tuple[Any, list[Any]]:
        counts, *pools = pools
        tokens, lengths, sampling = (inputs[name] for name in ("tokens", "lengths", "sampling"))
        index = jnp.where(slots < 0, ~slots, slots)
        before = jnp.where(slots < 0, 0, counts.at[index].get(mode="fill", fill_value=0))
        chunk = {"position": before, "tokens": tokens, "lengths": lengths}
        logits, written = self.model(params, pools, slots, **chunk)
        after = before + lengths
        token = sample(logits, sampling, after)
        return {"token": token}, [counts.at[index].set(after, mode="drop"), *written]

    def logits(self, params: Any, position: Any, tokens: Any, lengths: Any) -> Any:
        """Return the logits after whole prompts.

        `position` is an argument although it is always 0. If it were a constant, XLA would fold constants for half a minute.
        """
        return self.model.rows(params, None, position=position, tokens=tokens, lengths=lengths)[0]
