"""`plan_batch`: which waiting requests share an execution, and at which size."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate, count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsrv.scheduler.batching import Batch, PaddedBatch, VariantCosts, plan_batch, plan_padded_batch
from rsrv.scheduler.events import CallerError


def test_one_short_of_a_big_batch_pads_up() -> None:
    """31 requests of one row run as one execution of size 32, because its 4 ms are less than 1 ms for each row."""
    assert plan_batch([1] * 31, [1, 32], [0.001, 0.004]) == Batch(size=32, count=31, rows=31, seconds=0.004)


def test_few_waiting_are_not_worth_the_big_size() -> None:
    """Two requests of one row run one by one if size 32 costs more than both executions."""
    assert plan_batch([1, 1], [1, 32], [0.001, 0.004]) == Batch(size=1, count=1, rows=1, seconds=0.001)


def test_equal_cost_per_row_serves_more_rows() -> None:
    """Four executions of 1 ms cost as much as one of size 32. Of equal costs per row, the plan with more rows wins."""
    assert plan_batch([1] * 4, [1, 32], [0.001, 0.004]).size == 32


@pytest.mark.parametrize("seeds", [{1: 0.001, 4: 0.004}, {4: 0.004, 1: 0.001, 8: 0.009}])
def test_of_sizes_with_equal_cost_per_row_the_larger_is_the_best(seeds: dict[int, float]) -> None:
    """If two sizes cost the same per row when full, the larger size is the best."""
    costs = VariantCosts(seeds)

    assert costs.sizes[costs.best_index] == 4


def test_equal_cost_and_rows_take_the_smaller_size() -> None:
    """If two sizes serve the same rows at the same cost, less padding wins."""
    assert plan_batch([3], [4, 8], [0.002, 0.002]).size == 4


def test_the_size_in_the_middle_wins_by_its_cost() -> None:
    """The size with the least cost per served row wins: 20 requests of one row, sizes 1, 8, 16, 32 at 1.0, 1.6, 2.8 and 6.0 ms.

    Cost per served row: 1.0/1 = 1.0, 1.6/8 = 0.2, 2.8/16 = 0.175, 6.0/20 = 0.3.
    """
    plan = plan_batch([1] * 20, [1, 8, 16, 32], [0.0010, 0.0016, 0.0028, 0.0060])

    assert plan == Batch(size=16, count=16, rows=16, seconds=0.0028)


def test_a_request_is_never_split() -> None:
    """A request is not split: of three requests of 3 rows, size 8 takes two, which have 6 rows."""
    assert plan_batch([3, 3, 3], [8], [0.001]) == Batch(size=8, count=2, rows=6, seconds=0.001)


def test_a_large_request_is_not_overtaken() -> None:
    """Requests of 1, 30 and 1 rows at size 16: the second one does not fit, and the third one does not overtake it."""
    assert plan_batch([1, 30, 1], [16, 32], [0.001, 0.5]).count == 1


def test_front_decides_the_smallest_size() -> None:
    """A first request of 9 rows runs at size 16, however cheap size 8 is."""
    assert plan_batch([9, 1], [8, 16], [0.001, 0.9]) == Batch(size=16, count=2, rows=10, seconds=0.9)


def test_row_limit_below_the_size() -> None:
    """If an execution may have at most 10 rows, size 32 serves only 10 rows for its cost."""
    assert plan_batch([1] * 31, [1, 32], [0.001, 0.004], max_rows=10) == Batch(32, 10, 10, 0.004)
    assert plan_batch([1] * 31, [1, 32], [0.001, 0.011], max_rows=10) == Batch(1, 1, 1, 0.001)


def test_empty_requests_alone_take_the_smallest_size() -> None:
    """Requests without rows are answered together by an execution of the smallest size."""
    assert plan_batch([0, 0], [2, 4], [0.001, 0.0005]) == Batch(size=2, count=2, rows=0, seconds=0.001)


def test_empty_front_does_not_stop_others() -> None:
    """A request without rows is executed together with the next request that has rows."""
    assert plan_batch([0, 5, 0], [1, 8], [0.001, 0.1]) == Batch(size=8, count=3, rows=5, seconds=0.1)


def test_without_coalescing_the_front_runs_alone() -> None:
    """If a model does not coalesce, its first request runs alone, at the smallest size that holds the request.

    A larger size is not chosen, even if it is cheaper.
    """
    assert plan_batch([3, 1], [2, 4, 8], [9.0, 9.0, 0.1], coalesce=False) == Batch(4, 1, 3, 9.0)
    assert plan_batch([0, 1], [2, 4], [9.0, 0.1], coalesce=False) == Batch(2, 1, 0, 9.0)


def test_nothing_to_plan_is_an_error() -> None:
    """A plan without requests, or for a request that no size holds, is an error of the caller."""
    with pytest.raises(CallerError, match="at least one request"):
        plan_batch([], [1], [0.1])
    with pytest.raises(CallerError, match="holds a request of 9 rows"):
        plan_batch([9], [1, 8], [0.1, 0.1])


def test_reads_no_more_than_the_largest_size_holds() -> None:
    """If 32 is the largest size, the plan does not read the 34th waiting request or later ones."""
    numbers = count()

    plan_batch((1 for _ in numbers), [1, 32], [0.001, 0.004])

    assert next(numbers) == 33


@given(
    waiting=st.lists(st.integers(0, 12), min_size=1, max_size=30),
    costs=st.dictionaries(st.integers(1, 40), st.integers(1, 50), min_size=1, max_size=5),
    max_rows=st.none() | st.integers(1, 40),
)
def test_agrees_with_trying_everything(
    waiting: list[int], costs: dict[int, int], max_rows: int | None
) -> None:
    """The plan has the least cost per row of all prefixes of the queue and all sizes."""
    sizes = sorted(costs)
    room = {size: min(size, max_rows or size) for size in sizes}
    options = [
        (size, number, rows)
        for number, rows in enumerate(accumulate(waiting), 1)
        for size in sizes
        if rows <= room[size]
    ]
    if waiting[0] > max(room.values()):
        return

    plan = plan_batch(waiting, sizes, [costs[size] for size in sizes], max_rows=max_rows)

    assert (plan.size, plan.count, plan.rows) in options
    least = min((costs[size] / rows for size, _, rows in options if rows), default=None)
    if least is None:
        assert plan.size == sizes[0]
    else:
        assert plan.seconds / plan.rows == pytest.approx(least)


#: Two lengths. A long row costs sixteen times as much as a short one, as on a CPU.
SLOW = {0: VariantCosts({1: 1.0, 4: 4.0}), 1: VariantCosts({1: 16.0, 4: 64.0})}
#: Two lengths that cost about the same, as on a device that small executions do not use fully.
FLAT = {0: VariantCosts({1: 1.0, 4: 1.1}), 1: VariantCosts({1: 1.2, 4: 1.4})}


def test_lengths_share_an_execution_where_a_long_row_costs_as_much_as_a_short_one() -> None:
    """A short request and a long one after it run together as long rows, if these cost little more."""
    assert plan_padded_batch({0: [1], 1: [1]}, FLAT, 0) == PaddedBatch(4, 2, 2, 1.4, 1, {0: 1, 1: 1})


def test_lengths_run_apart_where_padding_costs_more_than_it_saves() -> None:
    """If long rows cost much more, a short request runs alone at its own variant."""
    assert plan_padded_batch({0: [1], 1: [1]}, SLOW, 0) == PaddedBatch(1, 1, 1, 1.0, 0, {0: 1})


def test_short_requests_take_no_place_from_long_ones() -> None:
    """If the first request is long, other long requests join it before short ones, even if the short ones came earlier."""
    plan = plan_padded_batch({0: [1] * 9, 1: [1] * 4}, SLOW, 1)
    assert (plan.size, plan.counts) == (4, {1: 4})


def test_rows_that_would_be_empty_are_filled_with_shorter_requests() -> None:
    """Three long requests leave the fourth row of the size free. A short request takes it, which costs nothing."""
    plan = plan_padded_batch({0: [1] * 9, 1: [1] * 3}, FLAT, 1)
    assert (plan.size, plan.counts) == (4, {1: 3, 0: 1})


def test_a_deadline_leaves_out_slow_executions_of_longer_variants() -> None:
    """An execution of a longer variant that costs less per row is not chosen if it ends after the first request's deadline."""
    assert plan_padded_batch({0: [1], 1: [1]}, FLAT, 0, limit=1.3).variant == 0


def test_a_short_row_does_not_wait_for_long_ones_to_save_a_little() -> None:
    """A short request runs alone if sharing with three long ones saves little, because it would wait ten times as long."""
    tables = {0: VariantCosts({1: 1.14, 4: 3.06}), 1: VariantCosts({1: 3.06, 4: 10.74})}
    assert plan_padded_batch({0: [1], 1: [1] * 3}, tables, 0) == PaddedBatch(1, 1, 1, 1.14, 0, {0: 1})


LENGTHS = st.dictionaries(st.integers(1, 12), st.integers(1, 50), min_size=1, max_size=3)


@given(
    waiting=st.lists(st.lists(st.integers(0, 9), max_size=8), min_size=3, max_size=3),
    costs=st.lists(LENGTHS, min_size=3, max_size=3),
    front=st.integers(0, 2),
    limit=st.integers(1, 60),
)
def test_a_padded_plan_agrees_with_trying_everything(
    waiting: list[list[int]], costs: list[dict[int, int]], front: int, limit: int
) -> None:
    """The plan is the best one of all variants and sizes, by the formulas of `plan_padded_batch`.

    It includes the first request.
    """
    tables = {variant: VariantCosts(table) for variant, table in enumerate(costs)}
    if not waiting[front] or waiting[front][0] > max(costs[front]):
        return
    own = tables[front]
    alone = plan_batch(waiting[front], own.sizes, own.seconds, limit=limit)
    total = sum(map(sum, waiting))
    options = [(alone.seconds, alone.rows * own.row_seconds())]
    for variant in range(front, 3):
        line = [(front, waiting[front][0])]
        for shorter in range(variant, -1, -1):
            line += [(shorter, rows) for rows in waiting[shorter][shorter == front :]]
        for size, cost in costs[variant].items():
            fitting = [sum_ for sum_ in accumulate(rows for _, rows in line) if sum_ <= size]
            taken = Counter[int]()
            for taken_variant, rows in line[: len(fitting)]:
                taken[taken_variant] += rows
            first = own.drain_seconds(taken[front])
            apart = first + sum(
                tables[index].drain_seconds(rows) for index, rows in taken.items() if index != front
            )
            sooner = total * cost < taken[front] * first + (total - taken[front]) * apart
            if (
                len({index for index, _ in line[: len(fitting)]}) > 1
                and waiting[variant]
                and cost <= limit
                and sooner
            ):
                options.append(
                    (cost, sum(tables[index].row_seconds() * rows for index, rows in taken.items()))
                )

    plan = plan_padded_batch(dict(enumerate(waiting)), tables, front, limit=limit)

    worth = sum(
        sum(waiting[index][:count]) * tables[index].row_seconds() for index, count in plan.counts.items()
    )
    least = min((cost / value for cost, value in options if value), default=None)
    if least is not None and worth:
        assert plan.seconds / worth == pytest.approx(least)
    assert next(iter(plan.counts)) == front
    assert plan.rows == sum(sum(waiting[index][:count]) for index, count in plan.counts.items()) <= plan.size
    assert plan.count == sum(plan.counts.values())
