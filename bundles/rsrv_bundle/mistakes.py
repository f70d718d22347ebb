"""Paths that are given by mistake in place of bundles, with the kind of path and the remedy."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

from rsrv.text import nearest
from rsrv_bundle import manifest, reader

_EXPORT = "export the model to a bundle first, as docs/coming-from.md shows"
#: Kind of file and remedy for each suffix.
_KINDS = {
    **dict.fromkeys(
        (".pt", ".pth", ".ckpt"),
        "a PyTorch checkpoint; export it first: rsrv-bundle export --torch package.module:factory -o bundles/NAME",
    ),
    ".onnx": "an ONNX model; export it first: rsrv-bundle export --onnx FILE -o bundles/NAME",
    **dict.fromkeys((".plan", ".engine", ".trt"), f"a TensorRT engine; {_EXPORT}"),
    **dict.fromkeys((".h5", ".keras", ".pb"), f"a TensorFlow or Keras model; {_EXPORT}"),
    ".safetensors": f"weights without a model; {_EXPORT}",
    ".mlir": "a single module; name the bundle's directory, which has manifest.yaml",
}


def mistaken(path: Path, *, single: bool = False) -> str:
    """Return why a path will never be a bundle or a directory of bundles, with the remedy.

    The text is empty if the path is or may become a bundle or a directory of bundles. A directory without a bundle may get one
    later, unless it contains files of another known kind. With `single`, a directory of bundles is also a mistake. Raises OSError
    if the directory cannot be listed.
    """
    if not path.exists():
        siblings = [sibling.name for sibling in path.parent.iterdir()] if path.parent.is_dir() else []
        hint = nearest(path.name, siblings)
        return f"there is no such file or directory{hint if 'did you mean' in hint else ''}"
    if path.name == manifest.FILE:
        return "this is a bundle's manifest; name its directory"
    if path.is_file():
        return f"this is {_KINDS.get(path.suffix.lower(), 'a file; name a bundle, which is a directory with manifest.yaml')}"
    if single and (bundles := reader.find_bundles(path)):
        return f"this is a directory of bundles; name one of them, such as {path / bundles[0].name}"
    entries = sorted(path.iterdir())
    if (path / "rsrv.yaml").is_file() or _any_is_file(entries, "config.pbtxt"):
        return (
            "this is a Triton model repository; name the directory of the bundles that it was generated from"
        )
    if below := [entry.name for entry in entries if entry.is_dir() and _has_bundles(entry)]:
        return f"the bundles are in its directory {below[0]}; name that"
    for folder in (path, *entries):
        if _is_from_hugging_face(folder):
            where = "this" if folder is path else f"{folder.name} in it"
            return f"{where} is {_hugging_face(folder)}"
    return _first_model(entries)


def other_models(folder: Path, served: Collection[str] = ()) -> list[str]:
    """Return a line, with the remedy, for each entry of a directory of bundles that is another kind of model. Raises OSError.

    A model whose name is in `served` is left out, because it is probably the source of the served bundle.
    """
    lines = []
    for entry in sorted(folder.iterdir()):
        if not reader.may_be_bundle(entry.name) or not {entry.name, entry.stem}.isdisjoint(served):
            continue
        # A folder of another user may not be readable.
        with suppress(OSError):
            if kind := _other_kind(entry):
                lines.append(f"{entry} is not served, because it is {kind}")
    return lines


def _other_kind(entry: Path) -> str:
    """Return the kind of a model that is not a bundle, with the remedy, or an empty text. Raises OSError."""
    if (entry / manifest.FILE).exists():
        return ""
    if not entry.is_dir():
        return _KINDS.get(entry.suffix.lower(), "")
    if _is_from_hugging_face(entry):
        return _hugging_face(entry)
    entries = sorted(entry.iterdir())
    if any(file.suffix == ".mlir" for file in entries):
        return f"a bundle without {manifest.FILE}; copy the whole bundle"
    model = _first_model(entries)
    return f"not a bundle: {model}" if model else ""


def _hugging_face(folder: Path) -> str:
    """Return the kind of a directory of Hugging Face, and the remedy."""
    return f"a Hugging Face directory; serve it with `rsrv serve --hf {folder}`"


def _first_model(entries: Iterable[Path]) -> str:
    """Return the first file of a known kind with its kind and the remedy, or an empty text."""
    known = ((entry.name, _KINDS.get(entry.suffix.lower())) for entry in entries)
    return next((f"{name} in it is {kind}" for name, kind in known if kind), "")


def _any_is_file(entries: Iterable[Path], name: str) -> bool:
    return any((entry / name).is_file() for entry in entries)


def _is_from_hugging_face(folder: Path) -> bool:
    return os.path.isfile(folder / "config.json") and any(
        os.path.isfile(folder / name)
        for name in ("tokenizer_config.json", "preprocessor_config.json", "model.safetensors")
    )


def _has_bundles(folder: Path) -> bool:
    try:
        return bool(reader.find_bundles(folder))
    except OSError:
        return False
