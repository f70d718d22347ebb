"""Learned costs, checked by hand."""

from __future__ import annotations

from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsrv.scheduler.batching import VariantCosts, plan_batch, variant_costs
from rsrv.scheduler.events import CallerError


def test_worked_example_of_learning() -> None:
    """Learn samples of 15, 8 and 12 ms with alpha 0.2, from an estimate of 10 ms.

    10 + 0.2 * (15 - 10)       = 11
    11 + 0.2 * (8 - 11)        = 10.4
    10.4 + 0.2 * (12 - 10.4)   = 10.72
    """
    costs = VariantCosts({4: 0.010})
    learned = []
    for sample in (0.015, 0.008, 0.012):
        costs.learn(4, sample)
        learned.append(costs.seconds[0])

    assert learned == pytest.approx([0.011, 0.0104, 0.01072])


def test_an_outlier_counts_at_most_twice_the_estimate() -> None:
    """An outlier of 30 s raises an estimate of 10 ms only to 12 ms, because a sample has at most twice the estimate."""
    costs = VariantCosts({4: 0.010})

    costs.learn(4, 30.0)

    assert costs.seconds == pytest.approx([0.012])


def test_a_lasting_change_is_learned_all_the_same() -> None:
    """If an execution takes ten times as long from a certain time on, 25 samples bring the estimate within 10 %."""
    costs = VariantCosts({4: 0.010})
    for _ in range(25):
        costs.learn(4, 0.100)

    assert costs.seconds[0] == pytest.approx(0.100, rel=0.1)


@pytest.mark.parametrize("sample", [0.0, -1.0, nan, inf])
def test_what_is_no_duration_teaches_nothing(sample: float) -> None:
    """A duration that is zero, negative or NaN does not change the estimate."""
    costs = VariantCosts({4: 0.010})

    costs.learn(4, sample)

    assert costs.seconds == [0.010]


def test_an_estimate_that_is_not_measured_sinks_to_its_seed() -> None:
    """If samples of one size confirm its seed, the estimate of another size that is not measured falls to its own seed.

    The seeds are 1 ms and 4 ms, and the estimate of size 8 is 20 ms. One more sample of size 1 removes 1 % of the excess of 16
    ms: 19.84 ms.
    """
    costs = VariantCosts({1: 0.001, 8: 0.004})
    costs.seconds[1] = 0.020

    costs.learn(1, 0.001)

    assert costs.seconds == pytest.approx([0.001, 0.01984])
    for _ in range(1000):
        costs.learn(1, 0.001)
    assert costs.seconds[1] == pytest.approx(0.004, rel=0.01)


def test_an_estimate_below_its_seed_stays_learned() -> None:
    """An estimate that has been learned to be below its seed is not raised by samples of another size."""
    costs = VariantCosts({1: 0.001, 8: 0.004})
    costs.seconds[1] = 0.002

    costs.learn(1, 0.001)

    assert costs.seconds == [0.001, 0.002]


def test_a_device_that_slows_down_is_slow_for_all_sizes() -> None:
    """If size 1 takes twice its seed, the estimate of size 8 falls to twice its own seed, and not below."""
    costs = VariantCosts({1: 0.001, 8: 0.004})
    costs.seconds[1] = 0.020
    for _ in range(2000):
        costs.learn(1, 0.002)

    assert costs.seconds == pytest.approx([0.002, 0.008], rel=0.01)


def test_costs_of_single_executions() -> None:
    """Sizes 1, 8 and 32 cost 1, 9 and 5 ms: 8 rows are cheapest at size 32, although size 8 would hold them."""
    costs = VariantCosts({1: 0.001, 8: 0.009, 32: 0.005})

    assert [costs.cheapest_seconds(rows) for rows in (0, 1, 2, 32, 33)] == [0.001, 0.001, 0.005, 0.005, inf]
    assert [costs.smallest_fit_seconds(rows) for rows in (0, 1, 2, 32, 33)] == [
        0.001,
        0.001,
        0.009,
        0.005,
        inf,
    ]
    assert costs.request_seconds(70, coalesce=True) == pytest.approx(0.015)
    assert costs.request_seconds(8, coalesce=False) == 0.009
    with pytest.raises(CallerError, match="holds 33 rows"):
        costs.request_seconds(33, coalesce=False)


def test_worked_example_of_draining() -> None:
    """66 rows at sizes 1 and 32 (1 ms, 4 ms) are two full executions and two single rows: 2 * 4 + 2 * 1 = 10 ms.

    31 rows are one padded execution of 4 ms. 3 rows are three executions of 1 ms.
    """
    costs = VariantCosts({1: 0.001, 32: 0.004})

    assert [costs.drain_seconds(rows) for rows in (0, 3, 31, 66)] == pytest.approx([0.0, 0.003, 0.004, 0.010])


@given(
    seeds=st.dictionaries(st.integers(1, 64), st.integers(1, 100), min_size=1, max_size=6),
    rows=st.integers(0, 300),
    max_rows=st.none() | st.integers(1, 64),
)
def test_draining_is_what_planning_does_with_singles(
    seeds: dict[int, int], rows: int, max_rows: int | None
) -> None:
    """`drain_seconds` is the total cost of all planned executions for a queue of requests with one row each."""
    costs = VariantCosts({size: float(cost) for size, cost in seeds.items()}, max_rows=max_rows)
    total, remaining = 0.0, rows
    while remaining:
        plan = plan_batch([1] * remaining, costs.sizes, costs.seconds, max_rows=max_rows)
        total, remaining = total + plan.seconds, remaining - plan.rows

    assert costs.drain_seconds(rows) == pytest.approx(total)


@pytest.mark.parametrize(
    ("costs", "story"),
    [
        ({}, "no compiled size"),
        ({(0, 0): 1.0}, "sizes start at 1"),
        ({(0, 1): 0.0}, "costs are positive"),
        ({(0, 1): nan}, "costs are positive"),
    ],
)
def test_seeds_are_checked(costs: dict[tuple[int, int], float], story: str) -> None:
    """A model without sizes, or with a cost that is not a duration, is refused with a reason."""
    with pytest.raises(CallerError, match=story):
        variant_costs("m", costs, max_rows=None)
