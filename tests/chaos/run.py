"""Cause one fault on a real server under load, and judge its effect on the load."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import NamedTuple

from tests.chaos.faults import BYSTANDERS, Fault
from tests.chaos.figures import Row, Stretch, judge
from tests.chaos.health import watched
from tests.chaos.house import House
from tests.chaos.load import Load, load
from tests.e2e.harness import crashed_by_a_cancellation, last_words


class Pace(NamedTuple):
    """How long the stages of a fault last, in seconds."""

    #: Seconds of load before the fault.
    before: float
    #: Least seconds of load after the fault.
    during: float
    #: Seconds for which all models must have answered right at the end.
    settled: float
    #: True if a server that has just started gets time to become quiet before the bystanders are timed.
    calm: bool


FULL = Pace(5.0, 4.0, 1.5, calm=True)
QUICK = Pace(1.5, 1.5, 0.5, calm=False)


def run_fault(fault: Fault, house: House, pace: Pace, seed: int) -> Row:
    """Cause a fault under load, and judge it. Raises NotPossible."""
    fault.prepare(house)
    if pace.calm and fault.expected.victims is not None:
        house.wait_settled()
    victims = {client.model for client in fault.load}
    others = [client for client in BYSTANDERS if client.model not in victims]
    server = house.server.server
    expected = fault.expected
    problems: list[str] = []
    notes: list[str] = []
    with (
        load(server.grpc_url, server.http_url, [*others, *fault.load], seed) as clients,
        watched(house.control_socket(), fault.unhealthy or "") as health,
    ):
        clients.wait_warm()
        begin = time.monotonic()
        time.sleep(pace.before)
        strike = time.monotonic()
        try:
            strike = fault.strike(house, clients)
            fault.relieve(house, clients)
            relief = time.monotonic()
            _settle(clients, house, fault, relief, max(relief, strike + pace.during), pace)
        except Exception:
            if house.alive:
                raise
        died = not house.alive
        if died:
            # The death of tritonserver harms all models. In production, its supervisor starts it again.
            expected = replace(expected, victims=None)
            if crashed_by_a_cancellation(house.server):
                notes.append(
                    "tritonserver crashed by its own cancellation race (24.10), and was started again"
                )
            else:
                problems.append(f"tritonserver died: {last_words(house.server)}")
            house.revive()
            relief = time.monotonic()
            _settle(clients, house, fault, relief, relief, pace)
        end = time.monotonic()
        clients.stop()
    if not died:
        problems += fault.check(house)
        notes += fault.notes()
    fault.tidy(house)
    unhealthy_s = (
        None if fault.unhealthy is None or died else health.seconds_until(serving=False, since=strike)
    )
    stretch = Stretch(begin, strike, relief, end)
    return judge(
        fault.name,
        clients.records,
        stretch,
        expected,
        unhealthy_s=unhealthy_s,
        problems=problems,
        notes=notes,
    )


def _settle(clients: Load, house: House, fault: Fault, relief: float, earliest: float, pace: Pace) -> None:
    """Wait until all models have answered right for a while, the time is over, or the server is dead."""
    well_since: float | None = None
    while house.alive and (now := time.monotonic()) < relief + fault.patience:
        # `right_since` also lacks a model that has not answered in the last `pace.settled` seconds.
        if not clients.right_since(max(relief, now - pace.settled)) >= clients.models:
            well_since = None
        elif well_since is None:
            well_since = now
        elif now >= max(well_since + pace.settled, earliest):
            return
        time.sleep(0.05)
