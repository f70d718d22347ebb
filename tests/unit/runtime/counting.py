"""A generative model for tests: its next token is the sum of all tokens so far, modulo 13, plus 1."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.export
import numpy as np

from rsrv.runtime.device import Array
from rsrv_bundle.modules import strip_locations
from rsrv_bundle.writer import write_weights
from tests.unit.bundle.forge import seal

#: A prompt with this token has logits that are not finite.
BROKEN = 1000
CONTEXT, MAX_TOKENS, CHUNKS = 40, 6, (1, 8)


def export_counting(path: Path, *, slots: int = 4, when_full: str = "wait") -> Path:
    """Write the bundle, for batch sizes 1 and 4."""
    struct: Any = jax.ShapeDtypeStruct  # has no types
    path.mkdir(parents=True)
    for variant, chunk in enumerate(CHUNKS):
        for n in (1, 4):
            shapes = [((n, chunk), np.int32), ((n,), np.int32), ((n, 4), np.float32), ((n,), np.int32)]
            arguments = [struct(*spec) for spec in (*shapes, ((1,), np.float32), ((slots,), np.int32))]
            function = jax.jit(_traced, keep_unused=True)
            exported = jax.export.export(function, platforms=["cpu"])(*arguments)
            blob = strip_locations(exported.mlir_module_serialized).blob
            (path / f"model.v{variant}.b{n}.mlir").write_bytes(blob)
    write_weights(path / "weights.safetensors", [("w", np.ones(1, np.float32))])
    manifest = {
        "format_version": 3,
        "executable_inputs": [
            {"name": "tokens", "dtype": "i32", "shape": "nt", "dims": {"t": -1}},
            {"name": "lengths", "dtype": "i32", "shape": "n", "dims": {}},
            {"name": "sampling", "dtype": "f32", "shape": "ns", "dims": {"s": 4}},
        ],
        "executable_outputs": [{"name": "token", "dtype": "i32", "shape": "n", "dims": {}}],
        "input_shapes": [{"t": chunk} for chunk in CHUNKS],
        "batching": {"compiled_batch_sizes": [1, 4]},
        "state": {
            "slots": slots,
            "tensors": [{"name": "total", "dtype": "i32", "dims": []}],
            "when_full": when_full,
        },
        "generate": {"context": CONTEXT, "max_tokens": MAX_TOKENS, "stop": [13]},
    }
    (path / "manifest.yaml").write_text(json.dumps(manifest))
    return seal(path)


def _traced(tokens: Any, lengths: Any, sampling: Any, slots: Any, w: Any, totals: Any) -> tuple[Any, Any]:
    """Take and return tensors of the right types, so that the modules can be exported.

    A `FakeDevice` computes `count` instead.
    """
    return lengths + slots + tokens[:, 0] + (sampling[:, 0] * w).astype(np.int32), totals + 1


def count(inputs: Sequence[Array], weights: Sequence[Array]) -> list[Array]:
    """Compute what a module of the generative model computes."""
    (tokens, lengths, _, slots), (_, totals) = inputs, weights
    totals, out = totals.copy(), np.zeros(len(slots), np.int32)
    for row, (slot, length) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
        if slot == len(totals):
            continue  # padding
        at, read = slot if slot >= 0 else ~slot, tokens[row, :length]
        totals[at] = int(read.sum()) + (totals[at] if slot >= 0 else 0)
        assert not tokens[row, length:].any(), "0 behind the last token"
        out[row] = -1 if BROKEN in read else totals[at] % 13 + 1
    return [out, totals]


def expected(prompt: Sequence[int], limit: int = MAX_TOKENS) -> list[int]:
    """Return the answer to a prompt, without the stop token."""
    total, answer = sum(prompt), list[int]()
    while len(answer) < min(limit, CONTEXT - len(prompt)) and (token := total % 13 + 1) != 13:
        answer.append(token)
        total += token
    return answer
