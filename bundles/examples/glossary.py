"""glossary: a language model of 57 kB over bytes. It is trained to reproduce the definitions of the Apache License exactly.

The model answers a term, for example `Licensor`, with its definition. The definition of the term `UTF-8` has
characters of two, three and four bytes.
"""

from __future__ import annotations

import functools
import json
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from examples import adam, gru
from rsrv_bundle.stateful import export_generative

Array = np.ndarray[Any, Any]
Params = dict[str, Any]

#: Token that ends an answer. All token ids are bytes of UTF-8.
STOP = 0
#: Prompt for a term. The closing quotation mark shows the model that the term is complete.
TEMPLATE = '"{text}" '
WIDTH = 48
#: Maximum number of sequences on the device at once.
SLOTS = 32
BATCH_SIZES = (1, 4, 16)

_EMBEDDING = 16
_STEPS = 300
_RATE = 2e-2
#: Maximum number of characters of a definition. Longer definitions would make training slow.
_LONGEST = 250
_LICENSE = Path(__file__).parents[2] / "LICENSE"


@functools.cache
def definitions() -> dict[str, str]:
    """Return the definitions by term: the short definitions of the license, and one for `UTF-8`."""
    text = " ".join(_LICENSE.read_text(encoding="utf-8").split())
    all_definitions = dict(re.findall(r'"([A-Z][A-Za-z ]+)" ((?:form )?shall mean [^.]+\.)', text))
    short = {term: meaning for term, meaning in all_definitions.items() if len(meaning) <= _LONGEST}
    return short | {"UTF-8": "is for Größe, ταχύς, 漢字 and 🙂."}


def tokenizer() -> str:
    """Return a file tokenizer.json whose tokens are the bytes of UTF-8."""
    # In the vocabulary of a byte-level tokenizer, a byte that is no printable character is written as a character from U+0100 on.
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    further = iter(range(0x100, 0x200))
    names = {chr(byte if byte in printable else next(further)): byte for byte in range(256)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    model = {"type": "BPE", "vocab": names, "merges": []}
    return json.dumps({"version": "1.0", "pre_tokenizer": level, "decoder": level, "model": model})


def tokens(text: str) -> list[int]:
    """Return the ids of a text."""
    return list(text.encode())


def step(
    params: Params, state: dict[str, jax.Array], position: jax.Array, tokens: jax.Array, lengths: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Read a chunk of tokens. Return the logits of the next token, [n, 256], and the new state.

    tokens: i32 [n, t]. lengths: i32 [n], the number of tokens of each row to read. The row's other tokens are ignored.
    """
    del position  # A GRU needs no counter.
    counted = jnp.arange(tokens.shape[1]) < lengths[:, None]
    hidden = gru.states(params, state["hidden"], tokens, counted)[:, -1]
    return _logits(params, hidden), {"hidden": hidden}


def initial() -> Params:
    """Return random parameters, always the same."""
    return gru.initial(256, _EMBEDDING, WIDTH, _EMBEDDING)


def _logits(params: Params, hidden: jax.Array) -> jax.Array:
    # A token's logit is the product of the network's output and the token's embedding. A separate output matrix would almost
    # double the number of weights.
    scores: jax.Array = gru.logits(params, hidden) @ params["embedding"].T
    return scores


@functools.cache
def trained() -> Params:
    """Return the parameters after training. It takes some seconds, once per process."""
    texts = [[*tokens(TEMPLATE.format(text=term) + meaning), STOP] for term, meaning in definitions().items()]
    longest = max(map(len, texts))
    rows = jnp.array([text + [STOP] * (longest - len(text)) for text in texts])
    counted = jnp.arange(longest) < jnp.array([[len(text)] for text in texts])

    def loss(params: Params, _: Any) -> jax.Array:
        states = gru.states(params, jnp.zeros((len(rows), WIDTH)), rows[:, :-1], counted[:, :-1])
        likelihoods = jax.nn.log_softmax(_logits(params, states))
        return -(jnp.take_along_axis(likelihoods, rows[:, 1:, None], axis=2)[..., 0] * counted[:, 1:]).mean()

    final: Params = adam.trained(loss, initial(), np.zeros(_STEPS), _RATE)
    return final


def answers(params: Params, prompts: Sequence[str], most: int = 400) -> list[str]:
    """Return the greedy answers to terms, computed in one batch and without a bundle."""
    rows = [tokens(TEMPLATE.format(text=prompt)) for prompt in prompts]
    lengths = np.array([len(row) for row in rows], np.int32)
    read = np.array([row + [0] * (lengths.max() - len(row)) for row in rows], np.int32)
    position = np.zeros(len(rows), np.int32)
    state = {"hidden": np.zeros((len(rows), WIDTH), np.float32)}
    chunk = jax.jit(step)
    answers_so_far = np.zeros((len(rows), most), np.int32)
    for at in range(most):
        logits, state = chunk(params, state, position, read, lengths)
        answers_so_far[:, at] = jnp.argmax(logits, axis=-1)
        read, lengths = answers_so_far[:, at : at + 1], np.ones_like(lengths)
    return [bytes(row.tolist()).split(bytes([STOP]))[0].decode(errors="replace") for row in answers_so_far]


def make(out_dir: Path, *, text: bool = True) -> None:
    """Train, and write the bundle `out_dir`, replacing an existing one.

    Raises RuntimeError if the trained model gives a wrong definition. Without `text`, clients send and get tokens, and put the
    template around a term themselves. The bundle then has only one module, because compiling a module takes 2 s, mostly for the
    sampling.
    """
    known = definitions()
    for term, answer in zip(known, answers(trained(), list(known)), strict=True):
        if answer != known[term]:
            raise RuntimeError(f"glossary: {term} {answer}")
    with tempfile.TemporaryDirectory() as folder:
        (file := Path(folder, "tokenizer.json")).write_text(tokenizer(), encoding="utf-8")
        bytes_only = {"inputs": {"bytes": "tokens"}, "outputs": {"bytes": "tokens"}}
        options: dict[str, Any] = {
            "chunks": (1,),
            "batch_sizes": (1,),
            "task": {"kind": "text-generation", **bytes_only},
        }
        if text:
            options = {"chunks": (1, 16), "batch_sizes": BATCH_SIZES, "tokenizer": file, "template": TEMPLATE}
        export_generative(
            step,
            {"hidden": jax.ShapeDtypeStruct((WIDTH,), np.float32)},
            trained(),
            slots=SLOTS,
            context=512,
            max_tokens=300,
            stop=[STOP],
            out_dir=out_dir,
            description="Definitions of the Apache License: a term to its definition.",
            overwrite=True,
            **options,
        )
