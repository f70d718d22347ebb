"""The meta model minilm, copied into its bundle as `model.py`. It needs the package tokenizers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rsrv.hooks.text import Tokeniser

Arrays = dict[str, np.ndarray]

_HERE = Path(__file__).parent
#: Tokeniser that makes rows of the encoder's compiled lengths. Longer texts are cut.
_TOKENISE = Tokeniser(_HERE / "tokenizer.json", json.loads((_HERE / "lengths.json").read_text()))


def run(inputs: Arrays, call: Callable[..., Any]) -> Arrays:
    """text: strings [n, 1] -> embedding: f32 [n, 384], each of length 1."""
    tokens = _TOKENISE(inputs["text"])
    encoded = call(
        "minilm_encoder",
        {"input_ids": tokens.ids, "attention_mask": tokens.mask},
        keep_on_device=["hidden"],
    )
    pooled: Arrays = call("minilm_pool", {"hidden": encoded["hidden"], "attention_mask": tokens.mask})
    return pooled
