"""v2_affine: a bundle of format 2.0, written byte by byte by the rules of that format.

This module does not use the package's writer, so the bundle is an independent test of the reader. Shapes in the manifest and in the
weights file are reversed. The bytes of weights are row-major for the reversed shape.
"""

from __future__ import annotations

import json
import shutil
import struct
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from rsrv_bundle.modules import strip_locations

Array = np.ndarray[Any, Any]

BATCH_SIZES = (1, 4)

# The modules take row-major tensors: x [n, 2, 3], kernel [2, 3, 4], bias [4]. They return y [n, 4].
_MANIFEST = """\
format_version: 2.0
name: v2_affine
description: An affine map in the older format.
executable_inputs:
  - name: x
    dtype: f32
    shape: whn
    dims: {w: 3, h: 2}
executable_outputs:
  - name: y
    dtype: f32
    shape: yn
    dims: {y: 4}
batching:
  compiled_batch_sizes: [1, 4]
provenance:
  written_by: hand
"""


def params() -> dict[str, Array]:
    """Return the weights as the modules take them. They are whole numbers, so that answers are exact."""
    return {
        "kernel": np.arange(24, dtype=np.float32).reshape(2, 3, 4) - 10,
        "bias": np.array([1, 2, 3, 4], np.float32),
    }


def reference(inputs: Mapping[str, Array]) -> dict[str, Array]:
    """x: f32 [n, 2, 3] -> y: f32 [n, 4]."""
    weights = params()
    return {"y": np.einsum("nhw,hwk->nk", inputs["x"], weights["kernel"]) + weights["bias"]}


def _module(size: int) -> bytes:
    def main(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
        return jnp.einsum("nhw,hwk->nk", x, kernel) + bias

    struct_of: Any = jax.ShapeDtypeStruct
    weights = params()
    arguments = [struct_of((size, 2, 3), jnp.float32)]
    arguments += [struct_of(weights[name].shape, jnp.float32) for name in ("kernel", "bias")]
    exported = jax.export.export(jax.jit(main), platforms=["cpu"])(*arguments)
    return strip_locations(bytes(exported.mlir_module_serialized)).blob


def _weights() -> bytes:
    weights = params()
    kernel, bias = weights["kernel"].T, weights["bias"].T
    header = {
        # List the order of the arguments here, because the tensors in the file are sorted by type and name.
        "__metadata__": {"argument_order": json.dumps(["kernel", "bias"])},
        "bias": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
        "kernel": {"dtype": "F32", "shape": [4, 3, 2], "data_offsets": [16, 112]},
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + bias.tobytes(order="C") + kernel.tobytes(order="C")


def make(out_dir: Path) -> None:
    """Write the bundle `out_dir`, replacing an existing one."""
    with tempfile.TemporaryDirectory(prefix=".v2-", dir=out_dir.parent) as scratch:
        work = Path(scratch, out_dir.name)
        work.mkdir()
        (work / "manifest.yaml").write_text(_MANIFEST, encoding="utf-8")
        (work / "weights.safetensors").write_bytes(_weights())
        for size in BATCH_SIZES:
            (work / f"model.b{size}.mlir").write_bytes(_module(size))
        if out_dir.exists():
            shutil.rmtree(out_dir)
        work.rename(out_dir)
