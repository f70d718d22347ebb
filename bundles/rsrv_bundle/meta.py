"""Writer of a meta model's bundle, which has no modules and no weights, and needs no jax."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rsrv_bundle import manifest, writer
from rsrv_bundle.hooks import check_hooks, source_of
from rsrv_bundle.reader import HOOKS_FILE, read_bundle
from rsrv_bundle.spec import Bundle


def write_meta_bundle(
    run: Path | str,
    *,
    calls: Sequence[str],
    client_inputs: Sequence[Mapping[str, Any]],
    client_outputs: Sequence[Mapping[str, Any]],
    out_dir: str | os.PathLike[str],
    files: Mapping[str, str] | None = None,
    task: Mapping[str, Any] | None = None,
    description: str = "",
    overwrite: bool = False,
) -> Bundle:
    """Write the bundle `out_dir` of a meta model, check it, and return it as read back.

    run: the path of the file to store as model.py, or its text. The file is not executed.
    calls: names of the models that the meta model may call.
    client_inputs, client_outputs: the clients' tensors, as entries of a manifest.
    out_dir: the bundle's directory. Its last part is the model's name.
    files: texts of further files in the bundle, by name.
    task: the task of the model, as the section of a manifest.
    overwrite: True to replace an existing bundle. Otherwise, an existing bundle is an error.

    Nothing appears at `out_dir` unless all checks pass. Raises BundleError, FileExistsError.
    """
    target = writer.free_target(out_dir, overwrite)
    document: dict[str, Any] = {"format_version": manifest.CURRENT}
    if description:
        document["description"] = description
    document["kind"] = "meta"
    document["client_inputs"] = [dict(entry) for entry in client_inputs]
    document["client_outputs"] = [dict(entry) for entry in client_outputs]
    document["meta"] = {"calls": list(calls)}
    if task is not None:
        document["task"] = dict(task)
    with writer.scratch_beside(target) as scratch:
        work = Path(scratch, target.name)
        work.mkdir()
        for name, content in {**(files or {}), HOOKS_FILE: source_of(run)}.items():
            (work / name).write_text(content, encoding="utf-8")
        writer.write_manifest(work / manifest.FILE, document)
        check_hooks(work / HOOKS_FILE, "meta")
        read_bundle(work, digest=False)
        writer.put_in_place(work, target, Path(scratch, ".replaced"))
    return read_bundle(target)
