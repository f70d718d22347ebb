"""The benchmark's arithmetic."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from tests.bench.figures import Rounds, Sample, Spread, Swapping, Target, per_added_model, summed_sizes


def sample(side: str, number: int, rate: float, *, clients: int = 1, steal: float = 0.0) -> Sample:
    return Sample(
        side=side,
        clients=clients,
        round=number,
        infer_per_s=rate,
        p50_us=1e6 / rate,
        p99_us=2e6 / rate,
        requests=100,
        cpu_us={"tritonserver": 100.0, "client": 50.0},
        triton_batch=1.0,
        device_batch=2.0,
        sizes={2: 10},
        busy=0.5,
        steal_cpus=steal,
        other_cpus=0.0,
        server_us={},
    )


def swapping(side: str, *, loads: int) -> Swapping:
    """100 answers in 2 seconds."""
    return Swapping(
        **asdict(sample(side, 0, 50)),
        seconds=2.0,
        answered=100,
        misses=2 * loads,
        loads=loads,
        evictions=loads,
    )


def test_a_spread_is_the_median_and_the_extremes() -> None:
    assert Spread.of([3.0, 1.0, 2.0, 10.0]) == Spread(2.5, 1.0, 10.0)


def test_a_round_with_steal_is_dropped_as_a_whole() -> None:
    samples = [sample("a", 0, 100), sample("b", 0, 50), sample("a", 1, 100, steal=0.2), sample("b", 1, 10)]
    rounds = Rounds.of(samples)
    assert [s.round for s in rounds.samples] == [0, 0]
    assert (rounds.kept, rounds.dropped, rounds.noisy) == (1, 1, False)


def test_when_all_rounds_have_steal_none_is_dropped() -> None:
    rounds = Rounds.of([sample("a", 0, 100, steal=0.2), sample("a", 1, 100, steal=0.3)])
    assert (rounds.kept, rounds.dropped, rounds.noisy) == (2, 0, True)


def test_ratios_are_taken_within_each_round() -> None:
    # The machine was ten times slower in round 1, which the ratio must not see.
    samples = [sample("a", 0, 100), sample("b", 0, 50), sample("a", 1, 10), sample("b", 1, 5)]
    ratio = Rounds.of(samples).ratio("a", "b", 1, lambda s: s.infer_per_s)
    assert ratio == Spread(2.0, 2.0, 2.0)


def test_numbers_of_clients_do_not_mix() -> None:
    rounds = Rounds.of([sample("a", 0, 100), sample("a", 0, 900, clients=64)])
    assert rounds.spread("a", 64, lambda s: s.infer_per_s) == Spread(900, 900, 900)


def test_sizes_add_up_in_ascending_order() -> None:
    assert list(summed_sizes([sample("a", 0, 1), sample("a", 1, 1)]).items()) == [(2, 20)]


@pytest.mark.parametrize(
    ("value", "limit", "at_least", "verdict"),
    [
        (0.9, 0.9, True, "pass"),
        (0.45, 0.9, True, "falls short by 50%"),
        (1.6, 1.6, False, "pass"),
        (2.0, 1.6, False, "falls short by 25%"),
    ],
)
def test_a_target_says_by_how_much_it_is_missed(
    value: float, limit: float, at_least: bool, verdict: str
) -> None:
    assert Target("t", value, limit, at_least).verdict() == verdict


def test_what_an_added_model_takes() -> None:
    assert per_added_model(100.0, 170.0, 7) == 10.0


def test_requests_that_share_a_load_are_misses_all_the_same() -> None:
    found = swapping("budget", loads=25)
    assert found.hit_rate == pytest.approx(0.5)
