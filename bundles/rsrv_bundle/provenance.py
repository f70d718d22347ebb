"""Where a bundle came from: versions and the exporting program's commit."""

from __future__ import annotations

import inspect
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any


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


def _git(code: Any) -> dict[str, Any]:
    try:
        source = inspect.getsourcefile(inspect.unwrap(code))
    except TypeError:
        return {}
    if source is None or not Path(source).is_file():
        return {}
    folder = str(Path(source).resolve().parent)

    def git(*arguments: str) -> str:
        command = ["git", "-C", folder, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        # A file that git does not track says nothing by the commit of the repository around it.
        git("ls-files", "--error-unmatch", source)
        commit = git("rev-parse", "HEAD")
        return {"git_commit": commit, "git_dirty": bool(git("status", "--porcelain", "--", source))}
    except (OSError, subprocess.SubprocessError):
        return {}
