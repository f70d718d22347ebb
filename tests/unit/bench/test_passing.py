"""What of the figures of a gateway is arithmetic."""

from __future__ import annotations

import pytest

from tests.bench.figures import Rounds, Sample
from tests.bench.gateway.passing import added, passing_us
from tests.bench.gateway.stage import DIRECT, GATEWAY, PASSING, WORKERS


def sample(side: str, number: int, p50_us: float, **cpu_us: float) -> Sample:
    return Sample(
        side=side,
        clients=1,
        round=number,
        infer_per_s=1000.0,
        p50_us=p50_us,
        p99_us=2 * p50_us,
        requests=100,
        cpu_us=cpu_us,
        triton_batch=1.0,
        device_batch=None,
        sizes={},
        busy=None,
        steal_cpus=0.0,
        other_cpus=0.0,
        server_us={},
    )


def test_what_a_way_adds_is_compared_within_its_round() -> None:
    """A round in which the whole machine was slow does not look like a slow gateway."""
    samples = [sample(DIRECT, 0, 700), sample(DIRECT, 1, 2000), sample(DIRECT, 2, 800)]
    samples += [sample(GATEWAY, 0, 800), sample(GATEWAY, 1, 2150), sample(GATEWAY, 2, 1000)]
    found = added(Rounds.of(samples), GATEWAY, 1, lambda one: one.p50_us)
    assert (found.low, found.median, found.high) == (100, 150, 200)


def test_passing_on_is_what_neither_clients_nor_workers_do() -> None:
    """It is nothing where requests go directly to a worker."""
    one = sample(GATEWAY, 0, 800, **{PASSING: 40.0, WORKERS: 500.0})
    assert passing_us(one) == pytest.approx(40.0)
    assert passing_us(sample(DIRECT, 0, 700, **{WORKERS: 500.0})) == 0
