"""Where a bundle came from: versions and the exporting program's commit."""

from __future__ import annotations

import inspect
import subprocess
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

#: what a patch is stored as, beside the manifest
PATCH_FILE = "working_tree.patch"
MAX_PATCH_BYTES = 20 * 2**20
_TIMEOUT_SECONDS = 30


def collect(
    code: Any, *, platform: str, stablehlo: str, exported_at: str | None, packages: Sequence[str] = ()
) -> dict[str, Any]:
    """Provenance of an export of `code`, a function or class. Never raises; what can't be found out is left out.

    The same program in the same environment gives the same result: the date is there only if it is given.
    """
    facts: dict[str, Any] = {"exporter": "rsrv_bundle.export", "platform": platform, "stablehlo": stablehlo}
    for package in ("rsrv", "jax", "jaxlib", "numpy", *packages):
        try:
            facts[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if exported_at is not None:
        facts["exported_at"] = exported_at
    facts.update(_git(code))
    return facts


def working_tree_patch(code: Any) -> bytes | None:
    """How the files that git tracks around that of `code` differ from the commit that `collect` tells; empty if they do
    not. None where that can't be found out, or is larger than MAX_PATCH_BYTES. Never raises.
    """
    source = _tracked(code)
    if source is None:
        return None
    try:
        # Into a file: nobody knows how large it gets.
        with tempfile.TemporaryFile() as patch:
            command = [
                "git",
                "-C",
                str(source.parent),
                "diff",
                "--binary",
                "--no-ext-diff",
                "--no-textconv",
                "HEAD",
            ]
            subprocess.run(
                command, stdout=patch, stderr=subprocess.DEVNULL, check=True, timeout=_TIMEOUT_SECONDS
            )
            size = patch.tell()
            patch.seek(0)
            return patch.read() if size <= MAX_PATCH_BYTES else None
    except (OSError, subprocess.SubprocessError):
        return None


def _git(code: Any) -> dict[str, Any]:
    source = _tracked(code)
    if source is None:
        return {}
    try:
        commit = _run(source, "rev-parse", "HEAD")
        return {
            "git_commit": commit,
            # As working_tree_patch: what the file imports makes the model, too.
            "git_dirty": bool(_run(source, "status", "--porcelain", "--untracked-files=no")),
        }
    except (OSError, subprocess.SubprocessError):
        return {}


def _tracked(code: Any) -> Path | None:
    """The file of a function or class, if git tracks it; else a commit of the repository around it says nothing."""
    try:
        name = inspect.getsourcefile(inspect.unwrap(code))
        source = None if name is None else Path(name).resolve()
        if source is None or not source.is_file():
            return None
        _run(source, "ls-files", "--error-unmatch", str(source))
    except (TypeError, OSError, subprocess.SubprocessError):
        return None
    return source


def _run(source: Path, *arguments: str) -> str:
    command = ["git", "-C", str(source.parent), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=_TIMEOUT_SECONDS
    ).stdout.strip()
