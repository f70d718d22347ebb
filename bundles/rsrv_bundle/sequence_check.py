"""Checks of modules with state: sequences in random slots, sequences in chunks, and generated answers. Needs jax."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rsrv_bundle.errors import Problems
from rsrv_bundle.inputs import Array, random_inputs
from rsrv_bundle.numerics import Judge, Key, ModuleRunner, compare, label
from rsrv_bundle.spec import Bundle

#: Takes the state of the rows (None for new sequences) and inputs by name. Returns outputs by name, and the new state.
Reference = Callable[..., tuple[Mapping[str, Any], Any]]
#: Letter of the time axis.
TIME = "t"
#: Value in slots that a module must not read. Some slots contain NaN instead, which a mask by multiplication does not remove.
_STALE = 3
_STEPS = 3
#: Number of sequences of a generation.
_PROMPTS = 2


class Sequences:
    """Sequences that a module continues in random slots.

    At first, all slots have stale values. The floats in the sequences' slots, and in every second free slot, are NaN. The remaining
    slots are finite, so that a change by a step can be detected.
    """

    def __init__(self, run: ModuleRunner, count: int, seed: int) -> None:
        state = run.bundle.manifest.state
        assert state is not None
        self.run = run
        places = np.random.default_rng(seed).permutation(state.slots).astype(np.int32)
        self.slots, self.others = places[:count], places[count:]
        self.padding = state.slots
        self.pools = run.pools(_STALE, nan=[*self.slots.tolist(), *self.others[1::2].tolist()])
        self.begun = False

    def step(self, key: Key, inputs: Sequence[Array]) -> list[Array]:
        """Run a module with at least as many rows as there are sequences. Return the outputs of the sequences' rows."""
        count = len(self.slots)
        slots = np.full(key[1], self.padding, np.int32)
        slots[:count] = self.slots if self.begun else ~self.slots
        self.begun = True
        filled = [np.concatenate([array, array[:1].repeat(key[1] - count, 0)]) for array in inputs]
        outputs, self.pools = self.run.step(key, filled, slots, self.pools)
        return [output[:count] for output in outputs]

    def strayed(self) -> list[str]:
        """Return the names of the state tensors in which a step changed a slot that belongs to none of these sequences."""
        import jax
        import jax.numpy as jnp

        state = self.run.bundle.manifest.state
        assert state is not None
        with jax.enable_x64(True):
            before = self.run.pools(_STALE, nan=self.others[1::2].tolist())
            return [
                tensor.name
                for tensor, pool, stale in zip(state.tensors, self.pools, before, strict=True)
                if not jnp.array_equal(pool[self.others], stale[self.others], equal_nan=True)
            ]


def compare_sequences(
    run: ModuleRunner,
    reference: Reference,
    tolerance: Mapping[str, float],
    examples: Mapping[str, Array],
    done: Callable[[str], None],
) -> dict[str, Any]:
    """Compare every module with the reference: first single steps, as `numerics.compare` does, then sequences of several steps.

    Returns the manifest's `numerics`. Raises BundleError for a difference, and for a module that writes the state of
    other sequences.
    """
    names = [spec.name for spec in run.bundle.manifest.inputs]
    results = [spec.name for spec in run.bundle.manifest.outputs]

    def ask(state: Any, inputs: Sequence[Array]) -> tuple[list[Any], Any]:
        outputs, state = reference(state, **dict(zip(names, inputs, strict=True)))
        # Restore the order of the outputs, because jax.jit sorts a mapping.
        return [outputs[name] for name in results], state

    def further(judge: Judge) -> None:
        for key in run.keys():  # noqa: SIM118 - not a mapping
            # Leave one row of the batch empty, so that padding is also tested.
            count = max(1, key[1] - 1)
            sequences = Sequences(run, count, seed=key[1])
            state = None
            for step in range(_STEPS):
                inputs = _inputs(run.bundle, key, count, step, examples)
                expected, state = ask(state, inputs)
                judge.source(key, sequences.step(key, inputs), expected)
            _report(sequences, key, judge.problems)
        for size in _sizes_of_time(run):
            _compare_whole(run, size, lambda inputs: ask(None, inputs)[0], judge, examples)

    return compare(run, lambda *inputs: ask(None, inputs)[0], tolerance, examples, done, further)


def _inputs(bundle: Bundle, key: Key, count: int, step: int, examples: Mapping[str, Array]) -> list[Array]:
    """Return inputs of `count` rows for a step. Each step gets different inputs."""
    many = random_inputs(bundle, key[0], key[1] + 10 * (step + 1), examples)
    return [array[-count:] for array in many]


def _report(sequences: Sequences, key: Key, problems: Problems) -> None:
    for name in sequences.strayed():
        file = f"{label(sequences.run.bundle, key)}.mlir"
        problems.add(
            file, f"state '{name}'", "a step changes the state of sequences that are not in its batch"
        )


def _sizes_of_time(run: ModuleRunner) -> list[int]:
    """Return a list of the one batch size at which chunks are compared. It is empty unless time is the only variable axis."""
    manifest = run.bundle.manifest
    letters = {manifest.inputs[index].letters[axis] for index, axis in manifest.variable_axes}
    return run.sizes(0)[-1:] if letters == {TIME} else []


def _compare_whole(
    run: ModuleRunner,
    size: int,
    whole: Callable[[Sequence[Array]], list[Any]],
    judge: Judge,
    examples: Mapping[str, Array],
) -> None:
    """Compare sequences that a module gets in chunks, the longest chunk first, with `whole` for the whole sequences."""
    manifest = run.bundle.manifest
    chunks = sorted(
        range(run.bundle.variants), key=lambda variant: manifest.input_shapes[variant], reverse=True
    )
    chunks = [variant for variant in (*chunks, chunks[-1]) if size in run.sizes(variant)]
    parts = [
        _inputs(run.bundle, (variant, size), size, step, examples) for step, variant in enumerate(chunks)
    ]
    joined = [
        np.concatenate(arrays, spec.variable_axes[0]) if spec.variable_axes else arrays[0]
        for spec, arrays in zip(manifest.inputs, zip(*parts, strict=True), strict=True)
    ]
    # Inputs without a time axis are the same in all chunks.
    for part in parts:
        part[:] = [
            array if spec.variable_axes else first
            for spec, array, first in zip(manifest.inputs, part, joined, strict=True)
        ]
    sequences = Sequences(run, size, seed=0)
    results = [sequences.step((variant, size), part) for variant, part in zip(chunks, parts, strict=True)]
    together = [
        np.concatenate(outputs, spec.variable_axes[0]) if spec.variable_axes else outputs[-1]
        for spec, outputs in zip(manifest.outputs, zip(*results, strict=True), strict=True)
    ]
    judge.whole((chunks[0], size), together, whole(joined))


def compare_answers(
    run: ModuleRunner,
    logits: Callable[[Array, Array], Array],
    tolerance: Mapping[str, float],
    done: Callable[[str], None],
) -> dict[str, Any]:
    """Generate greedy tokens after prompts in chunks, and compare the tokens with the logits for the whole prompts.

    logits: a function from tokens and lengths to the logits after the last token. A token may differ from the likeliest one if the
    gap between their logits is within the tolerance for f32, relative to the largest magnitude.

    Return the manifest's `numerics`, which contain the largest gaps. Raises BundleError if a gap is too large, or if a step
    changes the state of other sequences.
    """
    manifest = run.bundle.manifest
    generate = manifest.generate
    assert generate is not None
    problems = Problems()
    gaps: dict[str, float] = {}
    vocabulary = logits(np.zeros((1, 1), np.int32), np.ones(1, np.int32)).shape[-1]
    output = [spec.name for spec in manifest.outputs].index(generate.token)
    for key in run.keys():  # noqa: SIM118 - not a mapping
        name = label(run.bundle, key)
        rng = np.random.default_rng(key)
        count = min(max(1, key[1] - 1), _PROMPTS)
        sequences = Sequences(run, count, seed=key[1])
        chunks = _chunks(run, key)
        prompt = np.zeros((count, sum(manifest.chunks[variant] for variant in chunks)), np.int32)
        lengths = np.zeros(count, np.int32)
        gaps[name] = 0.0
        for variant in chunks:
            longest = manifest.chunks[variant]
            fresh = rng.integers(1, longest + 1, count).astype(np.int32)
            counts = np.arange(longest) < fresh[:, None]
            tokens = np.where(counts, rng.integers(0, vocabulary, counts.shape), 0).astype(np.int32)
            for row, start in enumerate(lengths):
                prompt[row, start : start + fresh[row]] = tokens[row, : fresh[row]]
            lengths = lengths + fresh
            by_name = {
                generate.tokens: tokens,
                generate.lengths: fresh,
                generate.sampling: np.zeros((count, 4), np.float32),
            }
            inputs = [by_name[spec.name] for spec in manifest.inputs]
            chosen = sequences.step((variant, key[1]), inputs)[output]
            gaps[name] = max(gaps[name], _gap(chosen, logits(prompt, lengths)))
        if gaps[name] == float("inf"):
            rule = (
                "its logits are not finite. A slot holds what its last sequence left, which may be NaN: mask such values with"
                " jnp.where, not by a product"
            )
            problems.add(f"{name}.mlir", f"output '{generate.token}'", rule)
        elif not gaps[name] <= tolerance["f32"]:
            rule = (
                f"its logit by fn, for the whole prompt, is {gaps[name]:.3g} of the largest magnitude below the best one;"
                f" the tolerance for f32 is {tolerance['f32']:g}"
            )
            problems.add(f"{name}.mlir", f"output '{generate.token}'", rule)
        _report(sequences, key, problems)
        done(name)
    problems.raise_if_any()
    return {"max_rel_error": max(gaps.values()), "source": gaps}


def _chunks(run: ModuleRunner, key: Key) -> list[int]:
    """Return the variants of a prompt's chunks: two chunks of the key's variant, and then a single step if it is compiled.

    The first chunks are left out while all chunks together exceed the context.
    """
    manifest = run.bundle.manifest
    assert manifest.generate is not None
    step = manifest.chunks.index(1)
    chunks = [key[0], key[0], *([step] if key[1] in run.sizes(step) else [])]
    while sum(manifest.chunks[variant] for variant in chunks) > manifest.generate.context:
        del chunks[0]
    return chunks


def _gap(tokens: Array, logits: Array) -> float:
    """Return the largest gap between the logit of a chosen token and the largest logit of its row.

    The gap is relative to the largest magnitude.
    """
    if not np.isfinite(logits).any() or tokens.min() < 0:
        return float("inf")
    chosen = np.take_along_axis(logits, tokens[:, None], 1)[:, 0]
    scale = float(np.abs(logits[np.isfinite(logits)]).max()) or 1.0
    return float((logits.max(1) - chosen).max()) / scale
