"""The environment of the plain models: a numpy that Triton 24.10's stub can use, the newest jax for this numpy, and onnxruntime."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests.bench.places import PLAIN_ENVIRONMENT

#: With numpy 2, the stub of Triton 24.10 passes wrong inputs, so this is numpy 1.26. jax 0.6 is the last version that accepts it.
REQUIREMENTS = ("jax==0.6.2", "jaxlib==0.6.2", "numpy==1.26.4", "onnxruntime==1.31.1")


def ensure() -> Path:
    """Return the folder of the environment. Install it if it is missing. Raises RuntimeError with what to do."""
    if sys.version_info >= (3, 13):
        raise RuntimeError("the benchmark needs Python 3.11 or 3.12: numpy 1.26 is not made for newer ones")
    stamp = PLAIN_ENVIRONMENT / "stamp"
    key = f"Python {sys.version.split()[0]} in {sys.base_prefix}, {', '.join(REQUIREMENTS)}"
    if stamp.is_file() and stamp.read_text() == key:
        return PLAIN_ENVIRONMENT
    started = time.monotonic()
    print(f"installing the plain model's environment ({', '.join(REQUIREMENTS)}) ...", flush=True)
    shutil.rmtree(PLAIN_ENVIRONMENT, ignore_errors=True)
    python = str(PLAIN_ENVIRONMENT / "bin" / "python")
    quiet = ["--quiet", "--disable-pip-version-check", "--no-input", "--only-binary=:all:"]
    for command in (
        [sys.executable, "-m", "venv", str(PLAIN_ENVIRONMENT)],
        [python, "-m", "pip", "install", *quiet, *REQUIREMENTS],
    ):
        done = subprocess.run(command, text=True, capture_output=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    stamp.write_text(key)
    print(f"installed in {time.monotonic() - started:.0f} s", flush=True)
    return PLAIN_ENVIRONMENT
