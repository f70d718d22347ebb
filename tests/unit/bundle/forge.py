"""Make valid and broken bundles by hand."""

from __future__ import annotations

import copy
import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rsrv_bundle import BundleError, read_bundle, yaml12

GOOD: Mapping[str, Any] = {
    "format_version": 3,
    "executable_inputs": [{"name": "x", "dtype": "f32", "shape": "nchw", "dims": {"c": 3, "h": 4, "w": 5}}],
    "executable_outputs": [{"name": "y", "dtype": "f32", "shape": "nk", "dims": {"k": 2}}],
    "batching": {"compiled_batch_sizes": [1, 4]},
}
META: Mapping[str, Any] = {
    "format_version": 3,
    "kind": "meta",
    "meta": {"calls": ["first", "second"]},
    "client_inputs": [{"name": "text", "dtype": "u8", "shape": "nc", "dims": {"c": -1}}],
    "client_outputs": [{"name": "y", "dtype": "f32", "shape": "n", "dims": {}}],
}
VARIANTS: Mapping[str, Any] = {
    **GOOD,
    "executable_inputs": [
        {"name": "x", "dtype": "f32", "shape": "nchw", "dims": {"c": 3, "h": -1, "w": -1}},
        {"name": "mask", "dtype": "bool", "shape": "wn", "dims": {"w": -1}},
    ],
    "input_shapes": [{"h": 4, "w": 5}, {"w": 7, "h": 6}],
}


def changed(base: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """Return a deep copy of a manifest with some keys replaced. The value None removes a key."""
    document = copy.deepcopy(dict(base))
    for key, value in changes.items():
        if value is None:
            document.pop(key, None)
        else:
            document[key] = value
    return document


def tensor(name: str = "x", dtype: Any = "f32", shape: Any = "nc", **dims: Any) -> dict[str, Any]:
    """Return a tensor entry of a manifest."""
    return {"name": name, "dtype": dtype, "shape": shape, "dims": dims}


HIDDEN: Mapping[str, Any] = {"name": "hidden", "dtype": "f32", "dims": [8]}
STATE: Mapping[str, Any] = {"slots": 4, "tensors": [HIDDEN, {"name": "position", "dtype": "i32", "dims": []}]}
COUNTER: Mapping[str, Any] = {**GOOD, "state": STATE}
GENERATE: Mapping[str, Any] = {"context": 64, "max_tokens": 16, "stop": [2, 0]}
WRITER: Mapping[str, Any] = {
    **COUNTER,
    "executable_inputs": [
        tensor("tokens", "i32", "nt", t=-1),
        tensor("lengths", "i32", "n"),
        tensor("sampling", "f32", "ns", s=4),
    ],
    "executable_outputs": [tensor("token", "i32", "n")],
    "input_shapes": [{"t": 1}, {"t": 16}],
    "generate": GENERATE,
}


def safetensors_bytes(
    header: Mapping[str, Any] | str, buffer: bytes = b"", *, length: int | None = None
) -> bytes:
    """Return a safetensors file with the given header, valid or not."""
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + buffer


def one_weight(
    shape: Sequence[int] = (2, 3), dtype: str = "F32", buffer: bytes | None = None, **header: Any
) -> bytes:
    """Return a file with one weight `w`. Keyword arguments replace top-level keys of its header."""
    size = 4
    for extent in shape:
        size *= extent
    entry = {"dtype": dtype, "shape": list(shape), "data_offsets": [0, size]}
    whole = {"__metadata__": {"argument_order": '["w"]'}, "w": entry, **header}
    return safetensors_bytes(
        {k: v for k, v in whole.items() if v is not None}, b"\0" * size if buffer is None else buffer
    )


def make_bundle(
    parent: Path,
    manifest: Mapping[str, Any] | str | bytes = GOOD,
    *,
    name: str = "model_a",
    modules: Mapping[str, bytes] | Sequence[str] = ("model.b1.mlir", "model.b4.mlir"),
    weights: bytes | None = None,
    hooks: str | None = None,
    files: Mapping[str, bytes] | None = None,
) -> Path:
    """Write a bundle. Module contents are junk unless they are given.

    A mapping of format 3 without `sha256` gets the checksums of the modules and the weights.
    """
    directory = parent / name
    directory.mkdir(parents=True)
    path = directory / "manifest.yaml"
    if isinstance(manifest, bytes):
        path.write_bytes(manifest)
    elif isinstance(manifest, str):
        path.write_text(manifest)
    contents = modules if isinstance(modules, Mapping) else dict.fromkeys(modules, b"junk")
    if isinstance(manifest, Mapping):
        document = dict(manifest)
        if document.get("format_version") in (3, "3") and document.get("kind") != "meta":
            summed = contents if weights is None else {**contents, "weights.safetensors": weights}
            document.setdefault("sha256", {name: hashlib.sha256(summed[name]).hexdigest() for name in summed})
        path.write_text(yaml12.dump(document))
    for module, content in contents.items():
        (directory / module).write_bytes(content)
    if weights is not None:
        (directory / "weights.safetensors").write_bytes(weights)
    if hooks is not None:
        (directory / "model.py").write_text(hooks)
    for file_name, content in (files or {}).items():
        (directory / file_name).write_bytes(content)
    return directory


def sealed(manifest: bytes, sums: Mapping[str, str]) -> bytes:
    """Return a manifest of format 3 with these checksums."""
    return json.dumps({**yaml12.load(manifest), "format_version": 3, "sha256": dict(sums)}).encode()


def seal(directory: Path) -> Path:
    """Convert the bundle in a directory to format 3, with the checksums of its current files."""
    sums = {}
    for path in sorted(directory.iterdir()):
        if path.suffix in (".mlir", ".safetensors"):
            with path.open("rb") as file:
                sums[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    manifest = directory / "manifest.yaml"
    manifest.write_bytes(sealed(manifest.read_bytes(), sums))
    return directory


def problems_of(directory: Path) -> tuple[str, ...]:
    """Return the reader's objections to a bundle."""
    try:
        read_bundle(directory)
    except BundleError as e:
        return e.problems
    return ()
