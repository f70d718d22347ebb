"""`rsrv-bundle convert`: write a bundle in format 3, with its modules in another version of StableHLO."""

from __future__ import annotations

import os
import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

import jax  # noqa: F401 - imported before jaxlib's parts, because it keeps their log quiet

from rsrv_bundle import writer
from rsrv_bundle.errors import BundleError, Problems, TargetError
from rsrv_bundle.inputs import random_inputs
from rsrv_bundle.manifest import FILE
from rsrv_bundle.modules import SignatureReader, artifact_version, module_file, rewritten, signature_of
from rsrv_bundle.numerics import ModuleRunner
from rsrv_bundle.reader import read_bundle, sha256_of
from rsrv_bundle.spec import Bundle
from rsrv_bundle.weights import FILE as WEIGHTS_FILE
from rsrv_bundle.weights import load_weights


def convert(
    directory: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    *,
    stablehlo: str,
    overwrite: bool = False,
    read_signature: SignatureReader = signature_of,
) -> Bundle:
    """Write the bundle in `directory` to `out_dir`, in format 3 and for `stablehlo`. Read it back and return it.

    stablehlo: version of the portable artifacts, e.g. "1.9.0".
    overwrite: True to replace an existing bundle. Otherwise, an existing bundle is an error.
    read_signature: reads each module, old and new, before it is compiled.

    Every module is run on random inputs before and after the conversion, and the results must be equal bit by bit. Tensors that
    `argument_order` does not list, and keys of the manifest that this format does not know, are dropped. Nothing
    appears at `out_dir` unless all checks pass. Raises BundleError, FileExistsError, TargetError if one directory is
    inside the other.
    """
    target = writer.free_target(out_dir, overwrite)
    if Path(directory).resolve() in target.resolve().parents:
        raise TargetError(f"{out_dir}: is inside {directory}, which would be copied into itself")
    old = read_bundle(directory)
    before = ModuleRunner(old, read_signature) if old.modules else None
    with writer.scratch_beside(target) as scratch:
        work = Path(scratch, target.name)
        shutil.copytree(old.path, work, ignore=shutil.ignore_patterns("__pycache__"))
        _rewrite(old, work, stablehlo)
        new = read_bundle(work, digest=False)
        if before is not None:
            _check_equal(before, ModuleRunner(new, read_signature))
        writer.put_in_place(work, target, Path(scratch, ".replaced"))
    return read_bundle(target)


def _rewrite(old: Bundle, work: Path, stablehlo: str) -> None:
    """Rewrite the modules, the weights and the manifest of a copy of the bundle in format 3."""
    versions = set()
    for file in set(old.modules.values()):
        blob = file.read_bytes()
        try:
            versions.add(artifact_version(blob))
            (work / file.name).write_bytes(rewritten(blob, stablehlo))
        except ValueError as e:
            raise BundleError(f"{file.name}: {e}") from e
    if old.manifest.format_version == "2.0" and old.weights_file is not None:
        if old.weights:
            names = [weight.name for weight in old.weights]
            writer.write_weights(work / WEIGHTS_FILE, list(zip(names, load_weights(old), strict=True)))
        else:
            (work / WEIGHTS_FILE).unlink()
    written = [work / file.name for file in old.summed_files]
    document = writer.document_of(old.manifest, sha256_of(file for file in written if file.exists()))
    origin: dict[str, Any] = {"format": old.manifest.format_version, "rsrv": metadata.version("rsrv")}
    if old.modules:
        origin["stablehlo"] = " ".join(sorted(versions))
        document["provenance"]["stablehlo"] = stablehlo
    document["provenance"]["converted_from"] = origin
    writer.write_manifest(work / FILE, document)


def _check_equal(before: ModuleRunner, after: ModuleRunner) -> None:
    problems = Problems()
    for key in before.keys():  # noqa: SIM118 - not a mapping
        inputs = random_inputs(before.bundle, *key)
        for spec, value_before, value_after in zip(
            before.bundle.manifest.outputs, before(key, inputs), after(key, inputs), strict=True
        ):
            if (value_before.dtype, value_before.shape, value_before.tobytes()) != (
                value_after.dtype,
                value_after.shape,
                value_after.tobytes(),
            ):
                problems.add(
                    module_file(before.bundle, key).name,
                    f"output '{spec.name}'",
                    "is not the same, bit by bit, after the conversion; nothing was written",
                )
    problems.raise_if_any()
