"""How the requests of a batch are divided among several devices."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rsrv.placement.batch_shares import ExecutionCosts, Forecast, divide

#: A row costs 2 ms, whatever the number of rows is.
PER_ROW = ExecutionCosts((1, 8, 64), (0.002, 0.016, 0.128))
#: Each execution costs the same.
FLAT = ExecutionCosts((1, 8, 64), (0.02, 0.02, 0.02))


def device(free_s: float = 0.0, costs: ExecutionCosts = PER_ROW, *, warm: bool = True) -> Forecast:
    return Forecast(free_s, warm, costs)


def counts(parts: list[int], devices: int) -> list[int]:
    return [parts.count(number) for number in range(devices)]


def test_idle_devices_share_a_batch() -> None:
    """Two idle devices get half of a batch each, and three get a third."""
    assert counts(divide([1] * 32, device(), [device()]), 2) == [16, 16]
    assert counts(divide([1] * 33, device(), [device()] * 2), 3) == [11, 11, 11]


def test_a_batch_stays_whole_where_a_larger_execution_costs_no_more() -> None:
    """A batch is not divided if half of the rows take as long as all of them, or if the gain is too small.

    A small gain is not enough, because it takes more time to send the answers of a divided batch.
    """
    assert divide([1] * 32, device(costs=FLAT), [device(costs=FLAT)]) == [0] * 32
    assert divide([1], device(), [device()]) == [0]
    brief = ExecutionCosts((1, 8), (0.0001, 0.0008))
    assert divide([1] * 8, device(costs=brief), [device(costs=brief)]) == [0] * 8


def test_a_busier_device_gets_less_or_nothing() -> None:
    """A busy device gets fewer rows, so that all devices end together. A device that would begin too late gets none."""
    assert counts(divide([1] * 20, device(), [device(0.02)]), 2) == [15, 5]
    assert divide([1] * 20, device(), [device(0.04)]) == [0] * 20


def test_a_device_without_the_weights_gets_nothing() -> None:
    """A device without the weights gets no rows, except if it is the device that would answer the whole batch first."""
    assert divide([1] * 20, device(), [device(warm=False)]) == [0] * 20
    assert counts(divide([1] * 20, device(warm=False), [device()]), 2) == [10, 10]


def test_requests_are_not_cut() -> None:
    """Requests are not divided: a large request gets a device of its own, wherever it is in the batch."""
    assert divide([2, 2, 20, 2], device(), [device()]) in ([1, 1, 0, 1], [0, 0, 1, 0])
    assert divide([20, 1], device(), [device()]) == [0, 0]


def test_rows_cost_what_their_cheapest_executions_cost() -> None:
    """Rows cost what the cheapest mix of executions costs. A size whose measured cost is too high is not used."""
    costs = ExecutionCosts((1, 8, 32), (1.0, 4.0, 100.0))
    assert [costs(rows) for rows in (0, 1, 3, 5, 8, 9, 32)] == [0.0, 1.0, 3.0, 4.0, 4.0, 5.0, 16.0]


costs_of = st.builds(
    ExecutionCosts,
    st.just((1, 4, 16)),
    st.tuples(*[st.floats(1e-5, 1.0)] * 3),
)
forecasts = st.builds(Forecast, st.floats(0, 2), st.booleans(), costs_of)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=40), forecasts, st.lists(forecasts, max_size=7))
def test_the_expected_end_is_never_later_than_that_of_the_whole_batch(
    rows: list[int], whole: Forecast, others: list[Forecast]
) -> None:
    """A divided batch is expected to end no later than the whole one.

    A device without the weights gets rows only if it is the first device.
    """
    parts = divide(rows, whole, others)

    devices = [whole, *others]
    used = {number: sum(r for r, n in zip(rows, parts, strict=True) if n == number) for number in parts}
    assert len(parts) == len(rows)
    assert all(number == 0 or devices[number].warm for number in used)
    assert max(devices[number].ends_in_s(sum_) for number, sum_ in used.items()) <= whole.ends_in_s(sum(rows))
