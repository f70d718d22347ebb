"""tagger: a GRU that tags each character of Python text as code, string or comment. It reads the text chunk by chunk.

The state records whether a string or a comment is open. It may have begun many characters before the chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from examples import adam, gru
from rsrv_bundle.stateful import export_stateful

Array = np.ndarray[Any, Any]
Params = dict[str, Any]

#: Numbers of characters in a chunk. The bundle has a variant for each.
CHUNKS = (8, 64)
BATCH_SIZES = (1, 16)
#: Maximum number of texts on the device at once.
SLOTS = 64
#: Share of the held-out characters that a trained tagger must get right.
REQUIRED_ACCURACY = 0.999
CODE, STRING, COMMENT = range(3)
WIDTH = 32

_EMBEDDING = 8
_LENGTH = 64
_BATCH = 64
_STEPS = 400
_RATE = 2e-2


def truth(text: bytes) -> list[int]:
    """Return each character's tag. Quotation marks belong to the string. The end of a line ends every string and comment."""
    tags, inside = [], 0
    for character in text:
        if character == ord("\n"):
            inside = 0
        opens = inside == 0 and character in b"'\"#"
        if opens:
            inside = character
        tags.append(CODE if not inside else COMMENT if inside == ord("#") else STRING)
        if not opens and character == inside and inside != ord("#"):
            inside = 0
    return tags


def texts(count: int, length: int, seed: int) -> Array:
    """Return random texts, u8 [count, length], with far more quotation marks, # and ends of lines than programs have."""
    alphabet = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz (=+,:).09_", np.uint8)
    rng = np.random.default_rng(seed)
    plain = rng.choice(alphabet, (count, length))
    marks = rng.choice(np.frombuffer(b"'''\"\"\"#\n\n", np.uint8), (count, length))
    return np.where(rng.random((count, length)) < 0.15, marks, plain)


def step(
    params: Params, state: dict[str, jax.Array], text: jax.Array
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Read the next chunk of n texts. Return the tags, u8 [n, t], and the new state.

    text: u8 [n, t], with zeros after the last character of a text.
    """
    states = gru.states(params, state["hidden"], text.astype(jnp.int32), text != 0)
    tags = jnp.argmax(gru.logits(params, states), axis=-1).astype(jnp.uint8)
    return {"tags": tags}, {"hidden": states[:, -1]}


@functools.cache
def trained() -> Params:
    """Return the parameters after training. Training takes some seconds, once per process."""
    read = texts(_STEPS * _BATCH, _LENGTH, seed=1)
    tags = np.array([truth(row.tobytes()) for row in read], np.int32)
    batches = [array.reshape(_STEPS, _BATCH, _LENGTH) for array in (read.astype(np.int32), tags)]

    def loss(params: Params, batch: Any) -> jax.Array:
        text, tags = batch
        states = gru.states(params, jnp.zeros((_BATCH, WIDTH)), text, text != 0)
        likelihoods = jax.nn.log_softmax(gru.logits(params, states))
        return -jnp.take_along_axis(likelihoods, tags[:, :, None], axis=2).mean()

    final: Params = adam.trained(loss, gru.initial(128, _EMBEDDING, WIDTH, 3), batches, _RATE)
    return final


def reference(inputs: Mapping[str, Array], params: Params | None = None) -> dict[str, Array]:
    """text: u8 [n, t], whole texts -> tags: u8 [n, t]. Trains first, unless it is given parameters."""
    text = jnp.asarray(inputs["text"])
    state = {"hidden": jnp.zeros((len(text), WIDTH))}
    tags, _ = step(trained() if params is None else params, state, text)
    return {"tags": np.asarray(tags["tags"])}


def make(out_dir: Path) -> None:
    """Train, and write the bundle `out_dir`, replacing an existing one. RuntimeError if training went badly."""
    unseen = texts(50, 1000, seed=0)
    tags = np.array([truth(row.tobytes()) for row in unseen])
    accuracy = float((reference({"text": unseen})["tags"] == tags).mean())
    print(f"tagger: {accuracy:.2%} of {tags.size} held-out characters are right", flush=True)
    if accuracy < REQUIRED_ACCURACY:
        raise RuntimeError(f"accuracy {accuracy:.2%} is below {REQUIRED_ACCURACY:.1%}")
    export_stateful(
        step,
        {"hidden": jax.ShapeDtypeStruct((WIDTH,), np.float32)},
        trained(),
        {"text": unseen[:1, : CHUNKS[0]]},
        slots=SLOTS,
        batch_sizes=BATCH_SIZES,
        axes={"text": "nt", "tags": "nt"},
        input_shapes=[{"t": chunk} for chunk in CHUNKS],
        out_dir=out_dir,
        description="Characters of Python text: code 0, string 1, comment 2.",
        overwrite=True,
    )
