"""The choice of the next token on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest

from rsrv_bundle.sampling import sample

LOGITS = np.log(np.array([0.4, 0.3, 0.2, 0.06, 0.04], np.float32))
choose = jax.jit(sample)


def draws(temperature: float, top_k: float, top_p: float, count: int = 4000) -> dict[int, float]:
    """Return the share of each token among draws with different seeds."""
    settings = np.tile(np.array([temperature, top_k, top_p, 0], np.float32), (count, 1))
    settings[:, 3] = np.arange(count)
    tokens = np.asarray(choose(np.tile(LOGITS, (count, 1)), settings, np.full(count, 7, np.int32)))
    values, counts = np.unique(tokens, return_counts=True)
    return dict(zip(values.tolist(), (counts / count).tolist(), strict=True))


def close(shares: dict[int, float], expected: list[float]) -> bool:
    """Return whether the shares are the expected ones, within about four standard deviations."""
    return set(shares) == set(range(len(expected))) and all(
        abs(shares[token] - share) < 0.035 for token, share in enumerate(expected)
    )


@pytest.mark.long
def test_temperature_scales_the_probabilities() -> None:
    """At temperature 1, tokens have the probabilities of their logits. At 0.5, these are squared and normalized."""
    assert close(draws(1, 0, 1), [0.4, 0.3, 0.2, 0.06, 0.04])
    squares = np.array([0.4, 0.3, 0.2, 0.06, 0.04]) ** 2
    assert close(draws(0.5, 0, 1), (squares / squares.sum()).tolist())


@pytest.mark.long
def test_a_model_of_64_bits_can_be_sampled() -> None:
    """With jax_enable_x64, tokens still have 32 bits, and the same tokens are drawn."""
    settings = np.array([[1, 0, 1, 7]], np.float32)
    with jax.enable_x64(True):
        tokens = jax.jit(sample)(LOGITS[None], settings, np.full(1, 7, np.int32))
    assert tokens.dtype == np.int32
    assert tokens == choose(LOGITS[None], settings, np.full(1, 7, np.int32))


def test_top_k_leaves_the_likeliest_tokens() -> None:
    """Only the top_k likeliest tokens are drawn. top_k=1 is greedy, and a top_k beyond the vocabulary changes nothing."""
    assert close(draws(1, 2, 1), [4 / 7, 3 / 7])
    assert draws(1, 1, 1) == {0: 1.0}
    assert draws(1, 100, 1) == draws(1, 0, 1)


def test_top_p_leaves_the_smallest_set_with_that_probability() -> None:
    """With top_p, the likeliest tokens remain until their probabilities together reach top_p. At least one token remains."""
    assert close(draws(1, 0, 0.69), [4 / 7, 3 / 7])
    assert close(draws(1, 0, 0.75), [4 / 9, 3 / 9, 2 / 9])
    assert draws(1, 0, 1e-6) == {0: 1.0}


def test_top_p_counts_what_top_k_has_left() -> None:
    """With both settings, top_p applies to the tokens that top_k leaves, whose probabilities are normalized first."""
    assert close(draws(1, 2, 0.9), [4 / 7, 3 / 7])
    assert draws(1, 2, 0.5) == {0: 1.0}


#: Logits of more tokens than a draw reads first, not ordered by probability.
MANY = np.random.default_rng(3).permutation(np.log(np.linspace(1, 4, 600))).astype(np.float32)
ROWS = 2000


def many(settings: Sequence[float], place: int = 0) -> tuple[int, ...]:
    """Return draws from `MANY` with these settings and different seeds.

    The rows before `place` have other settings, and their draws are not returned.
    """
    batch = np.tile(np.array([0.5, 3, 1, 0], np.float32), (ROWS, 1))
    batch[place:, :3] = settings
    batch[place:, 3] = np.arange(ROWS - place)
    return tuple(
        np.asarray(choose(np.tile(MANY, (ROWS, 1)), batch, np.full(ROWS, 7, np.int32)))[place:].tolist()
    )


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1), (0, 0.6), (400, 1), (400, 0.8), (100, 0.5), (0, 0.2)])
def test_draws_from_large_vocabularies_are_exact(top_k: int, top_p: float) -> None:
    """Each token has its exact probability, even if top-k and top-p leave more than the likeliest 256 tokens."""
    order = np.argsort(-MANY)[: top_k or None]
    masses = np.exp(MANY[order]) / np.exp(MANY[order]).sum()
    mask = np.cumsum(masses) - masses < top_p
    order, masses = order[mask], masses[mask] / masses[mask].sum()
    ranks = [order.tolist().index(token) for token in many([1, top_k, top_p])]
    # Compare ten groups of ranks, because a single token is drawn seldom.
    groups = [part.sum() for part in np.array_split(masses, 10)]
    bounds = np.cumsum([0, *map(len, np.array_split(masses, 10))])
    shares = np.histogram(ranks, bounds)[0] / ROWS
    assert np.abs(shares - groups).max() < 0.035


def test_draws_from_large_vocabularies_ignore_their_neighbours() -> None:
    """A row gets the same token whether or not other rows of the batch need the whole vocabulary."""
    for settings in ([1, 0, 1], [1, 400, 0.8], [1, 0, 0.2]):
        assert many(settings)[:100] == many(settings, place=ROWS - 100)


def row(logits: Any, settings: list[float], position: int, place: int = 0, rows: int = 1) -> int:
    """Return the token of one row in a batch. Logits are padded to five tokens, so that `choose` is compiled less often."""
    logits = np.pad(logits, (0, 5 - len(logits)), constant_values=-np.inf)
    batch = np.random.default_rng(rows).standard_normal((rows, 5)).astype(np.float32)
    others = np.tile(np.array([1, 0, 1, 3], np.float32), (rows, 1))
    positions = np.arange(rows, dtype=np.int32)
    batch[place], others[place], positions[place] = logits, settings, position
    return int(choose(batch, others, positions)[place])


@pytest.mark.long
def test_a_seed_gives_the_same_token_in_any_batch() -> None:
    """A token depends only on its row's logits, settings, seed and position.

    The size of the batch, the row's place in the batch, and other rows do not matter.
    """
    logits = np.random.default_rng(0).standard_normal(5).astype(np.float32)
    settings = [1.3, 4, 0.95, 12345]
    alone = [row(logits, settings, position) for position in range(20)]
    assert alone == [row(logits, settings, position, place=2, rows=3) for position in range(20)]
    assert len(set(alone)) > 2
    assert alone != [row(logits, [1.3, 4, 0.95, 12346], position) for position in range(20)]


def test_a_greedy_row_stays_greedy_beside_others() -> None:
    """Temperature 0 takes the largest logit, and the first of equal ones, whatever the settings of other rows are."""
    logits = np.array([0, 5, 5, -np.inf], np.float32)
    assert row(logits, [0, 0, 1, 9], 3) == 1
    assert row(logits, [0, 3, 0.1, 9], 3, place=1, rows=3) == 1


def test_a_forbidden_token_is_never_drawn() -> None:
    """A logit of -infinity forbids its token at any temperature."""
    logits = np.array([0, -np.inf, 0, -np.inf], np.float32)
    assert {row(logits, [100, 0, 1, seed], 0) for seed in range(50)} == {0, 2}


def test_logits_that_are_not_finite_give_no_token() -> None:
    """A row with a NaN, with +infinity, or with nothing but -infinity gives -1. Other rows are not affected."""
    for bad in (np.nan, np.inf):
        assert row(np.array([1, bad, 0], np.float32), [0, 0, 1, 0], 0) == -1
        assert row(np.array([1, bad, 0], np.float32), [1, 0, 1, 0], 0, place=1, rows=3) == -1
    assert row(np.full(3, -np.inf, np.float32), [0, 0, 1, 0], 0) == -1
