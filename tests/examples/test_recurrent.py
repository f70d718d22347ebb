"""Networks with a state that read chunks: glossary, tagger and forecast. There is no server, and nothing is trained."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer

from examples import forecast, glossary, gru, tagger

ROWS = 3
# These functions are compiled once for each shape of a chunk. They also take NumPy's arrays.
forecasts: Any = jax.jit(forecast.step)
next_logits: Any = jax.jit(glossary.step)
tags: Any = jax.jit(tagger.step)


def in_chunks(step: Any, params: Any, state: Any, whole: np.ndarray[Any, Any], lengths: list[int]) -> Any:
    """Read values [n, t] in chunks of these lengths. Return the joined outputs of the chunks, and the last state."""
    chunks = []
    for chunk in np.split(whole, np.cumsum(lengths)[:-1], axis=1):
        outputs, state = step(params, state, chunk)
        chunks.append(outputs)
    return jax.tree.map(lambda *parts: np.concatenate(parts, axis=1), *chunks), state


def assert_equal(first: Any, second: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), first, second)


@pytest.mark.parametrize("lengths", [[1] * 40, [8, 32], [1, 16, 23]], ids=str)
def test_a_text_is_tagged_in_chunks_as_it_is_at_once(lengths: list[int]) -> None:
    """Tags and states do not depend on the places at which a text is cut."""
    params = gru.initial(128, 8, tagger.WIDTH, 3)
    state = {"hidden": jnp.zeros((ROWS, tagger.WIDTH))}
    text = tagger.texts(ROWS, 40, seed=2)
    assert_equal(in_chunks(tags, params, state, text, lengths), tags(params, state, text))


def test_zeros_behind_a_text_change_no_state() -> None:
    """A short chunk that is padded with zeros leaves the same state as the chunk without padding."""
    params = gru.initial(128, 8, tagger.WIDTH, 3)
    state = {"hidden": jnp.zeros((1, tagger.WIDTH))}
    text = tagger.texts(1, 10, seed=3)
    padded = np.pad(text, [(0, 0), (0, 6)])
    assert_equal(tags(params, state, padded)[1], tags(params, state, text)[1])


def test_tags_follow_quotation_marks_comments_and_lines() -> None:
    """A quotation mark in a string or comment has no effect. The end of a line ends strings and comments."""
    labels = tagger.truth(b"a'#\"'b#'\n'c\nd\"\"")
    assert "".join("cs#"[tag] for tag in labels) == "csss" + "s" + "c##" + "c" + "ss" + "cc" + "ss"


def test_tokens_read_in_chunks_have_the_logits_of_one_chunk() -> None:
    """Rows have different lengths, and only the first `lengths` tokens of a row are used. The logits are those of each row alone."""
    params = glossary.initial()
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 256, (ROWS, 20)).astype(np.int32)
    state = {"hidden": jnp.zeros((ROWS, glossary.WIDTH))}
    position = np.zeros(ROWS, np.int32)
    lengths = np.array([20, 7, 13], np.int32)
    together = next_logits(params, state, position, tokens, lengths)[0]
    for row, length in enumerate(lengths):
        alone = {"hidden": jnp.zeros((1, glossary.WIDTH))}
        for token in tokens[row, :length]:
            logits, alone = next_logits(
                params, alone, position[:1], token.reshape(1, 1), np.ones(1, np.int32)
            )
        assert_equal(logits[0], together[row])


def test_the_glossary_has_the_licenses_terms_and_characters_of_every_length() -> None:
    """Definitions have characters of all lengths in UTF-8. The tokens of a text are its bytes, and the text can be restored from them."""
    definitions = glossary.definitions()
    assert definitions["Licensor"].startswith("shall mean the copyright owner")
    assert {len(character.encode()) for character in definitions["UTF-8"]} == {1, 2, 3, 4}
    tokenizer = Tokenizer.from_str(glossary.tokenizer())
    for text in (*definitions, *definitions.values(), "".join(map(chr, range(256)))):
        assert tokenizer.encode(text).ids == glossary.tokens(text)
        assert tokenizer.decode(glossary.tokens(text)) == text


def test_a_series_read_in_chunks_is_forecast_as_by_solving_at_once() -> None:
    """In chunks of any length, the forecasts are those of least squares over all earlier values."""
    params = forecast.params()
    state = jax.tree.map(lambda leaf: jnp.stack([leaf] * ROWS), forecast.begin(params))
    values = forecast.series(ROWS, 64)
    whole = forecasts(params, state, values)
    assert_equal(in_chunks(forecasts, params, state, values, [1, 16, 1, 46]), whole)
    predicted = whole[0]["forecast"]
    for row in range(ROWS):
        for length in (1, 20, 64):
            assert predicted[row, length - 1] == pytest.approx(
                forecast.direct(values[row, :length]), abs=0.01
            )
    assert np.abs(predicted[:, 40:-1] - values[:, 41:]).mean() < 0.1
