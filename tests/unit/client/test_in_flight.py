"""The limit of requests in flight adapts to the server."""

from __future__ import annotations

from collections.abc import Callable

from rsrv.client.in_flight import FIRST, MOST, InFlightLimit


def drive(
    machine: InFlightLimit, throughput: Callable[[int], float], seconds: float, start: float = 0.0
) -> float:
    """Report answers of 10 rows each from a server whose rows per second depend on the limit. Return the time at the end."""
    now = start
    while now < start + seconds:
        now += 10 / throughput(machine.limit)
        machine.answered(10, now)
    return now


def test_the_limit_grows_to_where_throughput_ends_to_grow() -> None:
    """If a server's throughput grows up to 32 requests in flight, the limit becomes 32."""
    machine = InFlightLimit(0.0)
    drive(machine, lambda limit: 100.0 * min(limit, 32), 20.0)
    assert machine.limit == 32


def test_a_server_that_works_on_one_request_at_a_time_gets_few() -> None:
    """If throughput does not depend on the limit, the limit stays at its first value."""
    machine = InFlightLimit(0.0)
    drive(machine, lambda limit: 500.0, 20.0)
    assert machine.limit == FIRST


def test_the_limit_has_an_end() -> None:
    """The limit has a maximum, even if the server's throughput always grows with it."""
    machine = InFlightLimit(0.0)
    drive(machine, lambda limit: 100.0 * limit, 60.0)
    assert machine.limit == MOST


def test_full_queues_halve_the_limit() -> None:
    """Refusals at the same moment halve the limit once. The minimum is one request."""
    machine = InFlightLimit(0.0)
    now = drive(machine, lambda limit: 100.0 * min(limit, 32), 20.0)
    for _ in range(5):
        machine.refused(now)
    assert machine.limit == 16
    for step in range(1, 9):
        machine.refused(now + step)
    assert machine.limit == 1


def test_a_server_with_more_room_is_noticed() -> None:
    """After the limit is found, a larger limit is tried again from time to time, and kept if throughput grows."""
    machine = InFlightLimit(0.0)
    now = drive(machine, lambda limit: 100.0 * min(limit, 8), 20.0)
    assert machine.limit == 8
    drive(machine, lambda limit: 100.0 * min(limit, 64), 60.0, now)
    assert machine.limit == 64


def test_a_fixed_limit_stays_unless_the_queue_is_full() -> None:
    """A limit that the caller sets is the maximum. A full queue halves it, and later it grows back."""
    machine = InFlightLimit(0.0, fixed=12)
    now = drive(machine, lambda limit: 100.0 * limit, 20.0)
    assert machine.limit == 12
    machine.refused(now)
    assert machine.limit == 6
    drive(machine, lambda limit: 100.0 * limit, 60.0, now)
    assert machine.limit == 12
