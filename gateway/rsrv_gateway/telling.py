"""What the gateway and the processes of its plane tell each other, as JSON."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, TypeVar

from rsrv_gateway.contract import Routes, Table, Worker
from rsrv_gateway.plane import Counts, Durations

K = TypeVar("K")
V = TypeVar("V", int, float)


def workers_to_json(workers: Mapping[str, Worker]) -> list[dict[str, Any]]:
    return [asdict(worker) for worker in workers.values()]


def workers_from_json(said: list[dict[str, Any]]) -> dict[str, Worker]:
    return {one["name"]: Worker(**one) for one in said}


def table_to_json(table: Table) -> dict[str, dict[str, Any]]:
    # Spelled out, for speed: asdict copies everything again.
    return {
        model: {name: getattr(routes, name) for name in Routes.__slots__} for model, routes in table.items()
    }


def table_from_json(said: dict[str, dict[str, Any]]) -> dict[str, Routes]:
    return {model: Routes(**{**routes, **_tuples(routes)}) for model, routes in said.items()}


def _tuples(routes: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) for name, value in routes.items() if isinstance(value, list)}


def counts_to_json(counts: Counts) -> dict[str, Any]:
    return {
        "requests": [[*key, value] for key, value in counts.requests.items()],
        "items": dict(counts.items),
        "load": dict(counts.load),
        "outstanding": [[*key, value] for key, value in counts.outstanding.items()],
        "failovers": dict(counts.failovers),
        "durations": {model: [one.counts, one.sum] for model, one in counts.durations.items()},
    }


def counts_from_json(said: dict[str, Any]) -> Counts:
    return Counts(
        requests={(model, worker, code): value for model, worker, code, value in said["requests"]},
        items=said["items"],
        load=said["load"],
        outstanding={(model, worker): value for model, worker, value in said["outstanding"]},
        failovers=said["failovers"],
        durations={
            model: Durations(tuple(counts), sum) for model, (counts, sum) in said["durations"].items()
        },
    )


def add(counts: Iterable[Counts]) -> Counts:
    """Of several planes together."""
    every = list(counts)
    durations: dict[str, Durations] = {}
    for one in every:
        for model, more in one.durations.items():
            had = durations.get(model)
            durations[model] = more if had is None else _longer(had, more)
    return Counts(
        requests=_sum(one.requests for one in every),
        items=_sum(one.items for one in every),
        load=_sum(one.load for one in every),
        outstanding=_sum(one.outstanding for one in every),
        failovers=_sum(one.failovers for one in every),
        durations=durations,
    )


def of_the_dead(counts: Counts) -> Counts:
    """What stays of a plane that is gone: what it has done, and nothing under way."""
    return Counts(
        requests=counts.requests, items=counts.items, failovers=counts.failovers, durations=counts.durations
    )


def _longer(one: Durations, more: Durations) -> Durations:
    return Durations(tuple(a + b for a, b in zip(one.counts, more.counts, strict=True)), one.sum + more.sum)


def _sum(mappings: Iterable[Mapping[K, V]]) -> dict[K, V]:
    sums: dict[K, V] = {}
    for mapping in mappings:
        for key, value in mapping.items():
            sums[key] = sums[key] + value if key in sums else value
    return sums
