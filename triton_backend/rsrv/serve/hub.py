"""`rsrv serve --hf`: exports bundles from Hugging Face directories before the server starts. The next start reuses them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path

import rsrv
from rsrv.serve.plan import ServeError
from rsrv_gen.sources import find_places

#: Folder of the bundles, in the directory of `rsrv serve`.
FOLDER = "hf"
#: Folder that records what each bundle was exported from. No server treats a hidden folder as a bundle.
_STAMPS = ".exported"


def plan_exports(
    directories: Sequence[Path], folder: Path, named: Mapping[str, Sequence[Path]]
) -> dict[Path, Path]:
    """Return the directories by the bundles to export. All bundles are in `folder`.

    `named`: paths of the bundles that the command line names, by model. Raises ServeError if two models would have the same name,
    or if a directory has bundles and no model.
    """
    exports: dict[Path, Path] = {}
    for directory in directories:
        if not (directory / "config.json").is_file() and find_places([directory])[0]:
            raise ServeError(
                f"--hf: {directory} is a bundle, or a folder of bundles. All names after --hf are models to export, so write it "
                "before --hf"
            )
        bundle = folder / model_name(directory)
        further = [place for place in named.get(bundle.name, ()) if place.resolve() != bundle.resolve()]
        if bundle in exports or further:
            same = exports.get(bundle) or further[0]
            raise ServeError(
                f"--hf: {directory} and {same} would both become the model {bundle.name}; rename one of them"
            )
        exports[bundle] = directory
    return exports


def export_all(exports: Mapping[Path, Path], say: Callable[[str], None]) -> None:
    """Export the directories that have changed since their last export. `exports`: the directories by bundle.

    Each export runs in a process of its own, which imports PyTorch and transformers. This process imports neither. Raises
    ServeError if a directory is missing, or if an export fails.
    """
    for directory in exports.values():
        if not directory.is_dir():
            raise ServeError(
                f"--hf: {directory} is not a directory. Name a directory that save_pretrained wrote"
            )
    for bundle, directory in exports.items():
        _export(directory, bundle, say)


def model_name(directory: Path) -> str:
    """Return the name of a directory's model: the directory's name, or in the hub's cache, the name of the cached model."""
    path = directory.resolve()
    cached = (
        re.fullmatch(r"models--(.+)", path.parent.parent.name) if path.parent.name == "snapshots" else None
    )
    name = cached[1].split("--")[-1] if cached else path.name
    return re.sub(r"[^A-Za-z0-9_-]", "_", name).strip("_-") or "model"


def _export(directory: Path, bundle: Path, say: Callable[[str], None]) -> None:
    stamp = bundle.parent / _STAMPS / bundle.name
    state = fingerprint(directory)
    if (bundle / "manifest.yaml").is_file() and stamp.is_file() and stamp.read_text() == state:
        say(f"{directory}: already exported")
        return
    say(f"{directory}: exporting ...")
    stamp.unlink(missing_ok=True)
    command = ["export", "--hf", str(directory), "-o", str(bundle), "--overwrite"]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "rsrv_bundle.cli", *command],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.DEVNULL,
        check=False,
    )
    if done.returncode:
        raise ServeError(f"--hf {directory}: cannot be exported; see the lines above")
    stamp.parent.mkdir(parents=True, exist_ok=True)
    stamp.write_text(state)


def fingerprint(directory: Path) -> str:
    """Return a text that changes with the directory, one of its files, or the version of rsrv.

    The text also depends on the ctime of files, because files from an archive keep their old mtime.
    """
    files = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    facts = [
        [
            path.relative_to(directory).as_posix(),
            (status := path.stat()).st_size,
            status.st_mtime_ns,
            status.st_ctime_ns,
        ]
        for path in files
    ]
    return sha256(json.dumps([rsrv.__version__, str(directory.resolve()), facts]).encode()).hexdigest()
