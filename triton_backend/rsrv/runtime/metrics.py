"""What is counted and measured since the start, as the JSON of the commands `metrics` and `overview` (docs/protocol.md)."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from rsrv.runtime.connection import MetaCounts, Registration
from rsrv.runtime.registry import Registry
from rsrv.runtime.reports import Reported, Reports
from rsrv.runtime.status import memory
from rsrv.scheduler.events import Outcome, Reason
from rsrv.scheduler.scheduler import Scheduler
from rsrv.scheduler.totals import Totals

#: how a run of a meta model ended -> how requests of other models do; by any other status it is refused
_OUTCOMES = {"ok": "answered", "deadline": "expired", "cancelled": "cancelled", "internal": "failed"}


_NOTHING = Reported()


def metrics(
    registry: Registry, scheduler: Scheduler, reports: Reports, kept_bytes: int, loop_bans: int
) -> dict[str, Any]:
    """Of all models by name, versions of one added up; costs O(models). `kept_bytes`: on the device, by runs of metas."""
    catalog, placement = registry.catalog, registry.placement
    load, totals, metas = scheduler.load(), scheduler.totals(), registry.metas()
    reported = reports.keep({*totals, *(group.name for group in metas)})
    counts = placement.cache_counts
    models = {name: _model(total, reported.get(name)) for name, total in totals.items()}
    for key, listed in catalog.listed.items():
        now, model = load.models.get(key), models.get(listed.name)
        if model is None or listed.model is None:
            continue  # it is not built yet
        model["resident"] |= listed.weights == "resident"
        model["host_bytes"] += listed.model.host.nbytes if listed.model.host.kept else 0
        model["device_bytes"] += listed.model.host.device_bytes if listed.weights != "absent" else 0
        model["queued"] += 0 if now is None else now.queued
    return {
        "models": models,
        "metas": _metas(metas, scheduler, reported),
        "memory": {
            **memory(load, placement.tiers, placement.device),
            "scratch_bytes": placement.scratch,
            "kept_bytes": kept_bytes,
        },
        "executables": {"compiled": counts.compiled, "cache": counts.from_cache, "shared": counts.shared},
        "compile": counts.seconds.to_json(),
        "loop_bans": loop_bans,
    }


def overview(registry: Registry, scheduler: Scheduler, reports: Reports) -> dict[str, Any]:
    """The few of them that people watch, for who asks every second: costs O(models), a third of what `metrics` does."""
    catalog, placement = registry.catalog, registry.placement
    load, totals, metas = scheduler.load(), scheduler.totals(), registry.metas()
    reported = reports.keep({*totals, *(group.name for group in metas)})
    now = {name: [0, 0, 0] for name in totals}
    for key, listed in catalog.listed.items():
        if listed.model is None or (mine := now.get(listed.name)) is None:
            continue  # it is not built yet
        if (one := load.models.get(key)) is not None:
            mine[0] += one.queued
            mine[1] += one.executing
        mine[2] = max(mine[2], listed.model.host.device_bytes)
    models = {
        name: (
            *now[name],
            total.counts.answered,
            total.counts.total() - total.counts.answered - total.counts.cancelled,
            total.device_seconds,
            sum(total.load.counts),
            total.load.sum,
            (reported.get(name) or _NOTHING).requests.to_json(),
        )
        for name, total in totals.items()
    }
    runs = {
        name: (
            meta["queued"],
            meta["running"],
            None,
            meta["requests"]["answered"],
            sum(count for how, count in meta["requests"].items() if how not in ("answered", "cancelled")),
            meta["device_seconds"],
            0,
            0.0,
            meta["request"],
        )
        for name, meta in _metas(metas, scheduler, reported).items()
    }
    return {"models": {**models, **runs}, "memory": memory(load, placement.tiers, placement.device)}


def figures(group: Registration, scheduler: Scheduler) -> dict[str, Any]:
    """The few numbers of one model that its stub shows in Triton's own metrics; of this version alone."""
    if group.counts is not None:
        meta = scheduler.meta(group.name)
        queued, seconds = 0 if meta is None else meta.waiting, group.counts.device_seconds
        outcomes: dict[str, int] = _outcomes(group.counts)
    else:
        model = scheduler.model(group.key)
        if model is None:
            return {}
        queued, seconds = model.queued, model.device_seconds
        outcomes = {outcome.value: count for outcome, count in model.outcomes.items()}
    return {"queued": queued, "requests": outcomes, "device_seconds": seconds}


def _model(totals: Totals, reported: Reported | None) -> dict[str, Any]:
    return {
        "queued": 0,
        "resident": False,
        "host_bytes": 0,
        "device_bytes": 0,
        "requests": {outcome.value: count for outcome, count in totals.counts.outcomes().items()},
        "refused": {reason.value: count for reason, count in totals.counts.refused.items()},
        "missed": {stage.value: count for stage, count in totals.missed.items()},
        "executions": totals.dispatches,
        "rows": totals.useful_rows,
        "device_seconds": totals.device_seconds,
        "misses": totals.misses,
        "evictions": {cause.value: count for cause, count in totals.evictions.items()},
        "queue_wait": totals.queue_wait.to_json(),
        "execute": totals.execute.to_json(),
        "load": totals.load.to_json(),
        "batch_rows": totals.rows.to_json(),
        "batch_padding": totals.padding.to_json(),
        **_reported(reported),
    }


def _metas(
    metas: list[Registration], scheduler: Scheduler, reported: Mapping[str, Reported]
) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    gates = scheduler.metas()
    for group in metas:
        counts, gate = group.counts or MetaCounts(), gates.get(group.name)
        meta = found.setdefault(
            group.name,
            {
                "queued": 0 if gate is None else gate.waiting,
                "running": 0 if gate is None else gate.running,
                "requests": dict.fromkeys((outcome.value for outcome in Outcome), 0),
                "refused": {} if gate is None else {Reason.QUEUE_FULL.value: gate.refused},
                "missed": {} if gate is None else {"gate": gate.expired},
                "calls": 0,
                "device_seconds": 0.0,
                **_reported(reported.get(group.name)),
            },
        )
        for outcome, count in _outcomes(counts).items():
            meta["requests"][outcome] += count
        meta["calls"] += counts.calls
        meta["device_seconds"] += counts.device_seconds
    return found


def _reported(reported: Reported | None) -> dict[str, Any]:
    told = reported or _NOTHING
    return {
        "hooks": {hook: seconds.to_json() for hook, seconds in told.hooks.items()},
        "request": told.requests.to_json(),
        "responses": told.responses,
    }


def _outcomes(counts: MetaCounts) -> Counter[str]:
    found: Counter[str] = Counter()
    for status, count in counts.outcomes.items():
        found[_OUTCOMES.get(status, "refused")] += count
    return found
