"""Provenance of a bundle: versions of packages, and the exporting program's commit."""

from __future__ import annotations

import inspect
import subprocess
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

#: File with the patch, next to the manifest.
PATCH_FILE = "working_tree.patch"
MAX_PATCH_BYTES = 20 * 2**20
_TIMEOUT_SECONDS = 30


def collect(
    code: Any, *, platform: str, stablehlo: str, exported_at: str | None, packages: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the provenance of an export of `code`, a function or class. Never raises. Unknown facts are left out.

    The same program in the same environment gets the same result, because the date is included only if it is given.
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
    """Return the uncommitted changes of tracked files in the git repository of `code`, relative to the commit of `collect`.

    Return b"" without changes, and None if the changes are unknown or larger than MAX_PATCH_BYTES. Never raises.
    """
    source = _tracked(code)
    if source is None:
        return None
    try:
        # Write the patch to a file, because it may be too large for the memory.
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
            # Use the whole repository, as in working_tree_patch, because the file's imports are also part of the model.
            "git_dirty": bool(_run(source, "status", "--porcelain", "--untracked-files=no")),
        }
    except (OSError, subprocess.SubprocessError):
        return {}


def _tracked(code: Any) -> Path | None:
    """Return the file of a function or class if git tracks the file. For other files, a commit would mean nothing."""
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
