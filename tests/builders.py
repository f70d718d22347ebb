"""Bundles and hypothesis settings that tests of several packages share."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from textwrap import dedent
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from hypothesis import settings

from rsrv_bundle.modules import strip_locations
from rsrv_bundle.writer import write_weights
from tests.unit.bundle.forge import seal

_default = settings.default
assert _default is not None
#: For properties whose every example is slow; `make test-long` takes ten times as many.
FEW_EXAMPLES = settings(max_examples=_default.max_examples // 3)

#: Tensors of a meta model: x and y, rows of three f32.
CLIENT = """
client_inputs: [{name: x, dtype: f32, shape: na, dims: {a: 3}}]
client_outputs: [{name: y, dtype: f32, shape: na, dims: {a: 3}}]
"""


def write_meta(
    path: Path, body: str, calls: Sequence[str], external: Sequence[str] = (), client: str = CLIENT
) -> Path:
    """Write a bundle of kind meta whose model.py is `body`, and whose tensors are `client`."""
    path.mkdir(parents=True)
    (path / "manifest.yaml").write_text(
        'format_version: "3.0"\n'
        "kind: meta\n"
        f"meta: {{calls: [{', '.join(calls)}], external: [{', '.join(external)}]}}\n" + client
    )
    (path / "model.py").write_text(dedent(body))
    return path


def broken_bundle(path: Path, good: Path) -> Path:
    """Copy a bundle so that it can be read and not compiled."""
    shutil.copytree(good, path)
    for module in path.glob("*.mlir"):
        module.write_bytes(b"nonsense")
    return seal(path)


def export_sums(
    path: Path,
    *,
    slots: int = 3,
    batch_sizes: Sequence[int] = (1, 3),
    when_full: str = "wait",
    idle_timeout_s: float = 60.0,
) -> Path:
    """Write a bundle with state: y [n, 3] is the sum of a sequence's x so far plus w = 1, and steps [n] their number."""
    struct: Any = jax.ShapeDtypeStruct  # has no types
    pools = [struct((slots, 3), np.float32), struct((slots,), np.int32)]
    path.mkdir(parents=True)
    for n in batch_sizes:
        inputs = [struct((n, 3), np.float32), struct((n,), np.int32)]
        function = jax.jit(_add_to_sums, keep_unused=True)
        exported = jax.export.export(function, platforms=["cpu"])(*inputs, struct((3,), np.float32), *pools)
        (path / f"model.b{n}.mlir").write_bytes(strip_locations(exported.mlir_module_serialized).blob)
    write_weights(path / "weights.safetensors", [("w", np.ones(3, np.float32))])
    manifest = {
        "format_version": "3.2",
        "executable_inputs": [{"name": "x", "dtype": "f32", "shape": "na", "dims": {"a": 3}}],
        "executable_outputs": [
            {"name": "y", "dtype": "f32", "shape": "na", "dims": {"a": 3}},
            {"name": "steps", "dtype": "i32", "shape": "n", "dims": {}},
        ],
        "batching": {"compiled_batch_sizes": list(batch_sizes)},
        "state": {
            "slots": slots,
            "tensors": [
                {"name": "sum", "dtype": "f32", "dims": [3]},
                {"name": "steps", "dtype": "i32", "dims": []},
            ],
            "when_full": when_full,
            "idle_timeout_s": idle_timeout_s,
        },
    }
    (path / "manifest.yaml").write_text(json.dumps(manifest))
    return seal(path, "3.2")


def _add_to_sums(x: Any, slots: Any, w: Any, sums: Any, steps: Any) -> tuple[Any, ...]:
    begins = slots < 0
    at = jnp.where(begins, ~slots, slots)
    old = jnp.where(begins[:, None], 0, sums.at[at].get(mode="fill", fill_value=0))
    taken = jnp.where(begins, 0, steps.at[at].get(mode="fill", fill_value=0)) + 1
    new = old + x
    return new + w, taken, sums.at[at].set(new, mode="drop"), steps.at[at].set(taken, mode="drop")


def add_to_sums(inputs: Sequence[Any], weights: Sequence[Any]) -> list[Any]:
    """Compute what the modules of `export_sums` do, for a `FakeDevice`."""
    return [np.array(result) for result in _add_to_sums(*map(jnp.asarray, (*inputs, *weights)))]
