"""Writer of the parts of a bundle that need no compiler."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from rsrv.text import naming
from rsrv_bundle import dtypes, yaml12
from rsrv_bundle.errors import BundleError, TargetError
from rsrv_bundle.manifest import CURRENT
from rsrv_bundle.padding import section_of
from rsrv_bundle.reader import NAME_RULE, may_be_name
from rsrv_bundle.spec import Manifest, TensorSpec
from rsrv_bundle.state_sections import sections_of
from rsrv_bundle.task_section import task_entry


def write_manifest(path: Path, document: Mapping[str, Any]) -> None:
    """Write a manifest with its keys in the order of `document`. Equal documents give equal bytes."""
    path.write_text(yaml12.dump(dict(document)), encoding="utf-8")


def copy_files(files: Sequence[Path | str], work: Path) -> None:
    """Copy files and folders into a bundle. Raises OSError, and BundleError if the bundle already has a file of that name."""
    for file in map(Path, files):
        target = work / file.name
        if target.exists():
            raise BundleError(
                f"files: {file}: the bundle already has a file named {file.name}; rename {file}"
            )
        if file.is_dir():
            shutil.copytree(file, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(file, target)


def document_of(manifest: Manifest, sha256: Mapping[str, str]) -> dict[str, Any]:
    """Return a manifest as a document of the current format, with the checksums `sha256`."""
    document: dict[str, Any] = {"format_version": CURRENT}
    if manifest.description:
        document["description"] = manifest.description
    if manifest.kind == "meta":
        document["kind"] = "meta"
    else:
        document["executable_inputs"] = [tensor_entry(spec) for spec in manifest.inputs]
        document["executable_outputs"] = [tensor_entry(spec) for spec in manifest.outputs]
    for section, specs in (
        ("client_inputs", manifest.client_inputs),
        ("client_outputs", manifest.client_outputs),
    ):
        if specs is not None:
            document[section] = [tensor_entry(spec) for spec in specs]
    if manifest.compiled_batch_sizes:
        document["batching"] = {"compiled_batch_sizes": list(manifest.compiled_batch_sizes)}
    if manifest.input_shapes:
        letters = [manifest.inputs[index].letters[axis] for index, axis in manifest.variable_axes]
        document["input_shapes"] = [dict(zip(letters, sizes, strict=True)) for sizes in manifest.input_shapes]
    if manifest.kind == "meta":
        document["meta"] = {"calls": list(manifest.meta_calls)}
        if manifest.meta_external:
            document["meta"]["external"] = list(manifest.meta_external)
        if manifest.meta_restartable:
            document["meta"]["restartable"] = True
    if manifest.internal:
        document["internal"] = True
    document |= sections_of(manifest.state, manifest.generate) | section_of(manifest.pad)
    if manifest.task is not None:
        document["task"] = task_entry(manifest.task)
    if sha256:
        document["sha256"] = dict(sha256)
    document["provenance"] = dict(manifest.provenance)
    if manifest.numerics:
        document["numerics"] = {
            key: dict(value) if isinstance(value, Mapping) else value
            for key, value in manifest.numerics.items()
        }
    return document


def store_numerics(path: Path, numerics: Mapping[str, Any]) -> None:
    """Add measured numbers to the section `numerics` of a manifest of format 3. The text and comments of other keys stay the same.

    A manifest in another form, such as JSON, is rewritten completely. The manifest is replaced atomically, so that no reader sees a
    part of it. Raises OSError.
    """
    old = path.read_text(encoding="utf-8")
    document = yaml12.parse(old)
    document["numerics"] = {**(document.get("numerics") or {}), **numerics}
    # Remove the key's line, and the following lines that are indented.
    other_lines = re.sub(r"^numerics *:.*\n?(?: .*\n?|\n)*", "", old, flags=re.MULTILINE)
    new = f"{other_lines.rstrip()}\n{yaml12.dump({'numerics': document['numerics']})}"
    try:
        whole = yaml12.parse(new) == document
    except ValueError:
        whole = False
    new = new if whole else yaml12.dump(document)
    aside = path.with_name(f".{path.name}")
    aside.write_text(new, encoding="utf-8")
    aside.replace(path)


def tensor_entry(spec: TensorSpec) -> dict[str, Any]:
    """Return the entry of a tensor in a manifest."""
    dims = {
        letter: size
        for axis, (letter, size) in enumerate(zip(spec.letters, spec.dims, strict=True))
        if axis != spec.batch_axis
    }
    return {"name": spec.name, "dtype": spec.dtype, "shape": spec.letters, "dims": dims}


def write_weights(path: Path, weights: Sequence[tuple[str, np.ndarray[Any, Any]]]) -> None:
    """Write weights, which are given in argument order, as a safetensors file. Tensors are row-major.

    The safetensors library is not used, because its writers differ between versions, and need the bytes of all tensors in memory. Its
    reader checks the file whenever the bundle is read. Raises KeyError for an element type that the format lacks.
    """
    # Write wide elements first. The length of the header is a multiple of 8 bytes, so every element is aligned.
    stored = sorted(weights, key=lambda item: (-item[1].dtype.itemsize, item[0]))
    header: dict[str, Any] = {
        "__metadata__": {"argument_order": json.dumps([name for name, _ in weights])},
    }
    position = 0
    for name, array in stored:
        header[name] = {
            "dtype": dtypes.safetensors_tag(dtypes.token_of(array.dtype)),
            "shape": list(array.shape),
            "data_offsets": [position, position + array.nbytes],
        }
        position += array.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for _, array in stored:
            # Write a view of bytes with one axis, because numpy cannot write the types of ml_dtypes or arrays without axes directly.
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def free_target(out_dir: str | os.PathLike[str], overwrite: bool) -> Path:
    """Return the absolute path of a bundle to write, after checking it.

    Raises FileExistsError if the path exists and `overwrite` is False. Raises TargetError if the directory's name is not a valid
    model name, or if the path is a file or a link.
    """
    target = Path(os.path.abspath(out_dir))
    if not may_be_name(target.name):
        raise TargetError(f"{target.name}: {NAME_RULE}")
    if target.exists() and not overwrite:
        raise FileExistsError(f"{target} exists; pass overwrite=True to replace it")
    _refuse_file(target)
    return target


@contextmanager
def scratch_beside(target: Path) -> Iterator[str]:
    """Yield a temporary folder beside the bundle that is written, so that the last step is a rename.

    The folder is hidden, so that no server treats it as a bundle. An OSError that the block raises names the bundle if it
    names no other file, for example when the disk is full.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(prefix=".export-", dir=target.parent)
    except OSError as error:
        raise OSError(
            error.errno, f"{error.strerror}; name a folder that you can write", str(target)
        ) from None
    with folder as path, naming(target):
        yield path


def put_in_place(work: Path, target: Path, aside: Path) -> None:
    """Rename the finished directory `work` to `target`. An old bundle is first renamed to `aside`, on the same file system.

    A reader sees the old bundle, then no bundle for an instant, and then the new one. Raises TargetError if `target` is a file or
    a link.
    """
    _refuse_file(target)
    try:
        if target.exists():
            target.rename(aside)
        work.rename(target)
    except BaseException:
        # Move the old bundle back, even after an interrupt, because the caller deletes `aside` soon.
        if aside.exists() and not target.exists():
            shutil.move(aside, target)
        raise


def _refuse_file(target: Path) -> None:
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise TargetError(f"{target.name}: is not a directory; remove it first")
