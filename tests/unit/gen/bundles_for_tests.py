"""Bundles for the generator's tests, as data and as directories."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rsrv_bundle import Bundle, Manifest, TensorSpec

MANIFEST = """\
format_version: 3
executable_inputs:
  - {name: x, dtype: f32, shape: nc, dims: {c: 4}}
executable_outputs:
  - {name: y, dtype: f32, shape: nc, dims: {c: 2}}
batching: {compiled_batch_sizes: [1, 8]}
"""


META_MANIFEST = """\
format_version: 3
kind: meta
client_inputs:
  - {name: text, dtype: u8, shape: nc, dims: {c: 100}}
client_outputs:
  - {name: y, dtype: f32, shape: nc, dims: {c: 2}}
"""


def spec(name: str, letters: str, dtype: str = "f32", **dims: int) -> TensorSpec:
    """Return a tensor. The letter `n` is the batch axis. Letters without a size are variable axes."""
    return TensorSpec(
        name=name,
        dtype=dtype,
        dims=tuple(dims.get(letter, -1) for letter in letters),
        batch_axis=letters.index("n") if "n" in letters else None,
        letters=letters,
    )


def bundle(
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    *,
    sizes: Sequence[int] = (1, 8),
    input_shapes: Sequence[tuple[int, ...]] = (),
    client_inputs: Sequence[TensorSpec] | None = None,
    external: Sequence[str] = (),
    restartable: bool = False,
) -> Bundle:
    """Return a bundle as the reader returns it, without a directory."""
    manifest = Manifest(
        format_version="3",
        description="",
        kind="model",
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        client_inputs=None if client_inputs is None else tuple(client_inputs),
        client_outputs=None,
        compiled_batch_sizes=tuple(sizes),
        input_shapes=tuple(input_shapes),
        meta_calls=(),
        provenance={},
        numerics={},
        meta_external=tuple(external),
        meta_restartable=restartable,
    )
    return Bundle(
        name="toy",
        path=Path("/bundles/toy"),
        manifest=manifest,
        hooks=None,
        modules={(0, size): Path(f"/bundles/toy/model.b{size}.mlir") for size in sizes},
        weights_file=None,
        weights=(),
        digest="",
    )


def meta_bundle(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> Bundle:
    """Return a meta model as the reader returns it, without a directory."""
    made = bundle([], [])
    manifest = replace(
        made.manifest,
        kind="meta",
        client_inputs=tuple(inputs),
        client_outputs=tuple(outputs),
        compiled_batch_sizes=(),
    )
    return replace(made, manifest=manifest, modules={})


def write_bundle(
    folder: Path,
    module: str = "not parsed",
    *,
    internal: bool = False,
    files: Mapping[str, str] | None = None,
    manifest: str = MANIFEST,
) -> Path:
    """Write a directory that the reader accepts as a bundle."""
    folder.mkdir(parents=True, exist_ok=True)
    manifest += "internal: true\nsha256:\n" if internal else "sha256:\n"
    for name, text in (files or {}).items():
        (folder / name).write_text(text)
    for size in (1, 8):
        content = f"{module} {size}".encode()
        (folder / f"model.b{size}.mlir").write_bytes(content)
        manifest += f"  model.b{size}.mlir: {hashlib.sha256(content).hexdigest()}\n"
    (folder / "manifest.yaml").write_text(manifest)
    return folder


def write_unsummed(folder: Path, module: str = "not parsed") -> Path:
    """Write a directory that the reader accepts as a bundle of format 2.0, which has no checksums."""
    write_bundle(folder, module)
    text = MANIFEST.replace("format_version: 3", "format_version: 2.0").replace("shape: nc", "shape: cn")
    (folder / "manifest.yaml").write_text(text)
    (folder / "weights.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    return folder


def write_meta(
    folder: Path,
    calls: Sequence[str],
    external: Sequence[str] = (),
    run: str = "async def run(inputs, call): ...\n",
) -> Path:
    """Write a directory that the reader accepts as a meta model."""
    folder.mkdir(parents=True, exist_ok=True)
    section = json.dumps({"calls": list(calls), "external": list(external)})
    (folder / "manifest.yaml").write_text(f"{META_MANIFEST}meta: {section}\n")
    (folder / "model.py").write_text(run)
    return folder
