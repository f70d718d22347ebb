"""The meta model minilm, copied into its bundle as `model.py`. It runs where numpy and tokenizers are installed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

Arrays = dict[str, np.ndarray]

_HERE = Path(__file__).parent
#: Tokens in a row that the encoder is compiled for, ascending. What does not fit into the last is cut off.
LENGTHS: list[int] = json.loads((_HERE / "lengths.json").read_text())
#: No more of a text is looked at: a megabyte would keep the tokeniser busy for most of a second.
MAX_BYTES = 64 * LENGTHS[-1]

# The file asks for rows of 128 tokens, padded; the padding is ours.
_TOKENIZER = Tokenizer.from_file(str(_HERE / "tokenizer.json"))
_TOKENIZER.no_padding()
_TOKENIZER.enable_truncation(LENGTHS[-1])


def run(inputs: Arrays, call: Callable[..., Any]) -> Arrays:
    """text: u8 [n, bytes], UTF-8, zeros behind it -> embedding: f32 [n, 384], each of length 1."""
    tokens = tokenise(inputs["text"])
    hidden = call("minilm_encoder", tokens, keep_on_device=["hidden"])["hidden"]
    pooled: Arrays = call("minilm_pool", {"hidden": hidden, "attention_mask": tokens["attention_mask"]})
    return pooled


def tokenise(text: np.ndarray) -> Arrays:
    """text: u8 [n, bytes] -> input_ids, attention_mask: i32 [n, l], l the smallest length that holds all rows.

    What is not UTF-8, as a character that was cut in two, is left out.
    """
    rows = [_pieces(row.tobytes()) for row in text[:, :MAX_BYTES]]
    longest = max(len(row) for row in rows)
    ids = np.zeros((len(rows), next(length for length in LENGTHS if length >= longest)), np.int32)
    mask = np.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = row
        mask[index, : len(row)] = 1
    return {"input_ids": ids, "attention_mask": mask}


def _pieces(text: bytes) -> list[int]:
    # One by one: `encode_batch` starts a thread for each processor, in every process that serves this model.
    pieces: list[int] = _TOKENIZER.encode(text.rstrip(b"\0").decode(errors="ignore")).ids
    return pieces
