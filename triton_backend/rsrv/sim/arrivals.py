"""Arrivals of requests.

Each source draws from a separate random stream, so that a new or changed source does not move the requests of other sources.
"""

from bisect import bisect
from collections.abc import Iterator, Sequence
from heapq import merge
from itertools import accumulate
from math import cos, inf, pi
from random import Random
from typing import NamedTuple

from rsrv.sim.scenario import Scenario
from rsrv.sim.schema import Bursts, Poisson, RequestKeys, Zipf


class Arrival(NamedTuple):
    """A request that arrives at `t`. Times are in seconds. `deadline_s` counts from `t`."""

    t: float
    model: str
    rows: int
    deadline_s: float | None
    priority: int
    variant: int = 0
    committed: bool = False
    length: int = 0


def instant(seconds: float) -> float:
    """Round a time to whole nanoseconds, so that rounding errors of different computations do not separate equal instants."""
    return round(seconds, 9)


def open_arrivals(scenario: Scenario) -> Iterator[Arrival]:
    """Return all requests of open-loop sources in the order of time. At equal times, they are in the order of the sources."""
    end = inf if scenario.duration is None else scenario.duration
    sources: list[Iterator[Arrival]] = [_listed(scenario.requests, end)]
    sources += [_listed(trace, end) for trace in scenario.recorded]
    for index, poisson in enumerate(scenario.poisson):
        random = _stream(scenario, "poisson", index)
        shares = poisson.models or {}
        sources.append(_poisson(poisson, list(shares), list(shares.values()), random, end))
    for index, zipf in enumerate(scenario.zipf):
        random = _stream(scenario, "zipf", index)
        models = list(zipf.models or ())
        if zipf.shuffle:
            random.shuffle(models)
        weights = [rank**-zipf.exponent for rank in range(1, len(models) + 1)]
        if zipf.night is None:
            sources.append(_poisson(zipf, models, weights, random, end))
        else:
            sources.append(_daily(zipf, zipf.night, models, weights, random, end))
    for index, bursts in enumerate(scenario.bursts):
        sources.append(_bursts(bursts, _stream(scenario, "bursts", index), end))
    return merge(*sources, key=lambda arrival: arrival.t)


def _stream(scenario: Scenario, kind: str, index: int) -> Random:
    return Random(f"{scenario.seed}/{kind}/{index}")


def _listed(requests: Sequence[RequestKeys], end: float) -> Iterator[Arrival]:
    for listed in sorted(requests, key=lambda request: request.t):
        t = instant(listed.t)
        if t <= end:
            yield Arrival(
                t,
                listed.model,
                listed.rows,
                listed.deadline_s,
                listed.priority,
                listed.variant,
                listed.committed,
                listed.length,
            )


def _daily(
    source: Zipf, night: float, models: Sequence[str], weights: Sequence[float], random: Random, end: float
) -> Iterator[Arrival]:
    """Yield arrivals whose rates change during a day.

    Arrivals are drawn at each model's highest rate. Then a random part is dropped, so that the rate at each hour is right.
    """
    amplitude = (1.0 - night) / (1.0 + night)
    late = {model: source.spread * random.random() for model in models}
    highest = source.model_copy(update={"rate": source.rate * (1.0 + amplitude)})
    for arrival in _poisson(highest, models, weights, random, end):
        day = arrival.t / source.day_s - late[arrival.model]
        if random.random() * (1.0 + amplitude) < 1.0 - amplitude * cos(2.0 * pi * day):
            yield arrival


def _poisson(
    source: Poisson | Zipf, models: Sequence[str], weights: Sequence[float], random: Random, end: float
) -> Iterator[Arrival]:
    end = end if source.stop is None else min(end, source.stop)
    cumulative = list(accumulate(weights))
    last = len(models) - 1
    t = source.start
    while True:
        t += random.expovariate(source.rate)
        if t > end:
            return
        model = models[min(bisect(cumulative, random.random() * cumulative[-1]), last)]
        yield Arrival(instant(t), model, source.rows, source.deadline_s, source.priority)


def _bursts(source: Bursts, random: Random, end: float) -> Iterator[Arrival]:
    end = end if source.stop is None else min(end, source.stop)
    times: list[tuple[float, str]] = []
    turn = 0
    while (base := source.start + turn * source.every_s) <= end:
        for model in source.models or ():
            times.append((instant(base + source.jitter_s * random.random()), model))
        turn += 1
    # Jitter may change the order of bursts. The sort is stable, so simultaneous bursts stay in the order of the models.
    times.sort(key=lambda burst: burst[0])
    for t, model in times:
        if t <= end:
            yield from [Arrival(t, model, source.rows, source.deadline_s, source.priority)] * source.size
