"""Workers that come and go under load: `make bench-gateway.soak`, for seconds."""

from __future__ import annotations

import pytest

from tests.bench.gateway import soak
from tests.bench.places import WORK


@pytest.mark.long
def test_workers_come_and_go_under_load() -> None:
    """Workers join, leave, stop and die while models move: no answer is wrong, and the gateway keeps no files open."""
    WORK.mkdir(parents=True, exist_ok=True)
    found = soak.soak(soak.QUICK)
    told = "\n".join(soak.report(found))
    assert found.requests.wrong == 0, told
    assert {what for _, what, _ in found.course.events} >= {soak.JOIN, soak.LEAVE, soak.STOP}, told
    blamed = soak.blame(found.requests, found.course)
    assert {what for what, _ in blamed} <= {soak.KILL, soak.STOP}, told
    endings = sum(what in (soak.KILL, soak.STOP) for _, what, _ in found.course.events)
    assert blamed.total() <= endings * found.plan.clients, told
    assert found.course.held[-1].files <= found.course.held[0].files + 20, told
