"""Workers that join and leave under load, as in `make bench-gateway.soak`, for two minutes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.bench.gateway import soak
from tests.bench.places import WORK

pytestmark = pytest.mark.long


def test_workers_come_and_go_under_load() -> None:
    """Workers join, leave, stop and die while models move. No answer is wrong, and the gateway does not collect open files."""
    WORK.mkdir(parents=True, exist_ok=True)
    result = soak.soak(replace(soak.QUICK, seconds=120.0))
    report = "\n".join(soak.report(result))
    assert result.requests.wrong == 0, report
    # These are the first two events. On a busy machine, a worker needs half a minute to join, so later events may be missing.
    assert {what for _, what, _ in result.course.events} >= {soak.JOIN, soak.LEAVE}, report
    blamed = soak.blame(result.requests, result.course)
    assert {what for what, _ in blamed} <= {soak.KILL, soak.STOP}, report
    endings = sum(what in (soak.KILL, soak.STOP) for _, what, _ in result.course.events)
    assert blamed.total() <= endings * result.plan.clients, report
    assert result.course.held[-1].files <= result.course.held[0].files + 20, report
