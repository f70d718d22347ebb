"""Metrics of a simulation, as plain numbers.

Times are seconds. A percentile is the nearest rank: the smallest of the values for which at least this share of all values is not
greater. So it is always one of the values. None means that there is no value. Floats are rounded to 9 decimals, so that equal
simulations give equal files.

All requests are counted, including requests that end after the window. The figures of the device, the link and the goodput cover
only the *window*: the scenario's duration, or the time until the last request ended if there is no duration. After an overload,
the simulation continues until all waiting requests are served, and that time says nothing about the scheduler.

**Jain's index** of n numbers x(1), ..., x(n) is

    (sum x) ** 2 / (n * sum x ** 2)

It is 1 if all numbers are equal, and 1 / n if all but one are 0 (R. Jain, D. Chiu, W. Hawe: A Quantitative Measure of Fairness
and Discrimination, DEC-TR-301, 1984). The numbers here are the device seconds / weight of each counted model.

Device time measures fairness only while all models want more of it. So the index covers only *contending* models. A model is
contending if it had a waiting or executing request for at least a tenth of the window. The index covers the device time while all
contending models had a request. If there are fewer than two contending models, or if that time is less than a twentieth of the
window, the device is not contended. The index then covers all models with requests over the whole window, and describes the
traffic instead of the scheduler. `jain_models` and `jain_seconds` are the number of counted models and the seconds that the index
covers.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Any

from rsrv.sim.record import Record
from rsrv.sim.tally import Span, Tally, in_time, mean, ratio, rounded

#: A model is contending if it had requests in the system for at least this share of the window.
_CONTENDING = 0.1
#: The device is contended if all contending models had requests at the same time for at least this share of the window.
_CONTENDED = 0.05


def summarize(record: Record) -> dict[str, Any]:
    """Return the metrics of a record: discipline, seed, duration, `total`, and `models` with the metrics by model."""
    scenario = record.scenario
    models = {name: Tally() for name in scenario.programs}
    total = Tally()
    for sent in record.requests:
        models[sent.request.model].add(sent)
        total.add(sent)
    makespan = max((sent.ended for sent in record.requests), default=0.0)
    window = makespan if scenario.duration is None else scenario.duration
    for execution in record.executions:
        if execution.started > window:
            break
        for tally in (models[execution.execute.model], total):
            tally.execute(execution, window)
    load_seconds = 0.0
    for load in record.loads:
        if load.started <= window:
            load_seconds += min(load.ended, window) - load.started
            for tally in (models[load.model], total):
                tally.load(load)
    for start in record.starts:
        if start.began <= window:
            for tally in (models[start.model], total):
                tally.start(start)
    for model, at in record.evictions:
        if at <= window:
            for tally in (models[model], total):
                tally.evictions += 1
    index, counted, seconds = _fairness(record, models, window)
    by_model = {
        name: {**tally.figures(), "share": ratio(tally.device_seconds, total.device_seconds)}
        for name, tally in models.items()
    }
    totals = {
        **total.figures(),
        "window_s": window,
        "makespan_s": makespan,
        "utilisation": ratio(total.device_seconds, window),
        "goodput": ratio(sum(in_time(sent, window) for sent in record.requests), window),
        "goodput_ratio": ratio(sum(in_time(sent, inf) for sent in record.requests), total.arrived),
        "jain": index,
        "jain_models": counted,
        "jain_seconds": seconds,
        "padding_ratio": ratio(total.size - total.useful, total.size),
        "host_bytes_mean": mean(record.host, window),
        "host_bytes_peak": max((nbytes for at, nbytes in record.host if at <= window), default=0),
        "device_bytes_mean": mean(record.device, window),
        "load_seconds": load_seconds,
        "link_utilisation": ratio(load_seconds, window),
    }
    echo = {"discipline": scenario.discipline, "seed": scenario.seed, "duration": scenario.duration}
    result: dict[str, Any] = rounded({**echo, "total": totals, "models": by_model})
    return result


def jain(values: Sequence[float]) -> float | None:
    """Return Jain's index of the values, or None if there are no values or all of them are 0."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else None


def _fairness(record: Record, models: Mapping[str, Tally], window: float) -> tuple[float | None, int, float]:
    """Return Jain's index, the number of models counted, and the seconds that it covers."""
    busy = {
        name: [(start, min(end, window)) for start, end in tally.busy if start < window]
        for name, tally in models.items()
    }
    seconds = {name: 0.0 for name, spans in busy.items() if _length(spans) >= _CONTENDING * window > 0.0}
    spans = _common([busy[name] for name in seconds])
    if len(seconds) < 2 or _length(spans) < _CONTENDED * window:
        seconds = {name: 0.0 for name, tally in models.items() if tally.arrived}
        spans = [(0.0, window)]
    at = 0
    for execution in record.executions:
        # Both executions and spans are disjoint and ascending.
        while at < len(spans) and spans[at][1] <= execution.started:
            at += 1
        if execution.execute.model in seconds:
            here = at
            while here < len(spans) and spans[here][0] < execution.ended:
                overlap = min(execution.ended, spans[here][1]) - max(execution.started, spans[here][0])
                seconds[execution.execute.model] += overlap
                here += 1
    values = [value / record.scenario.programs[name].weight for name, value in seconds.items()]
    return jain(values), len(values), _length(spans)


def _length(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)


def _common(sets: Sequence[Sequence[Span]]) -> list[Span]:
    """Return the intersection of these sets of disjoint spans, as disjoint spans."""
    edges = [edge for spans in sets for start, end in spans for edge in ((start, 1), (end, -1))]
    edges.sort()
    common: list[Span] = []
    inside = 0
    since = 0.0
    for t, step in edges:
        if inside == len(sets) and t > since:
            common.append((since, t))
        inside += step
        since = t
    return common
