"""What is counted and measured since the start, as the JSON of the commands `metrics` and `overview` (docs/protocol.md)."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from rsrv.histogram import SECONDS, Histogram
from rsrv.runtime.registry import Registry
from rsrv.runtime.status import memory
from rsrv.runtime.transport import MetaCounts, Registration
from rsrv.scheduler.events import Outcome, Reason
from rsrv.scheduler.scheduler import Scheduler
from rsrv.scheduler.statistics import Totals
from rsrv.wire.frames import ProtocolError, Status

#: functions of model.py, by what they are called in metrics
HOOKS = ("pre", "post", "run")
_STATUSES = frozenset(status.name.lower() for status in Status)


@dataclass(slots=True)
class Reported:
    """Of one model, by the stubs that answer for it; hooks of a model that metas call run in theirs."""

    #: seconds, by hook; those that ever ran
    hooks: dict[str, Histogram] = field(default_factory=dict)
    #: seconds from a request's arrival to its answer
    requests: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    #: answers to clients, by status in lower case
    responses: dict[str, int] = field(default_factory=dict)


class StubMetrics:
    """Sums of what stubs measure and report now and then, by the model's name."""

    def __init__(self) -> None:
        self._models: dict[str, Reported] = {}

    def take(self, name: str, calls: Collection[str], report: Mapping[str, Any]) -> None:
        """Of a model, or of a meta model and those that it calls, since the stub's report before. Raises ProtocolError."""
        try:
            requests = Histogram.from_json(SECONDS, report["requests"])
            responses = {str(status): int(count) for status, count in report["responses"].items()}
            hooks = {
                (model, hook): Histogram.from_json(SECONDS, seconds)
                for model, by_hook in report["hooks"].items()
                for hook, seconds in by_hook.items()
            }
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"a REPORT that cannot be read: {type(error).__name__}: {error}") from None
        if not (responses.keys() <= _STATUSES and all(count >= 0 for count in responses.values())):
            raise ProtocolError("a REPORT of answers with a status that there is not, or less than none")
        if not all((model == name or model in calls) and hook in HOOKS for model, hook in hooks):
            raise ProtocolError("a REPORT of hooks that the model does not have")
        mine = self._models.setdefault(name, Reported())
        mine.requests.add(requests)
        for status, count in responses.items():
            mine.responses[status] = mine.responses.get(status, 0) + count
        for (model, hook), seconds in hooks.items():
            self._models.setdefault(model, Reported()).hooks.setdefault(hook, Histogram(SECONDS)).add(seconds)

    def keep(self, names: Collection[str]) -> Mapping[str, Reported]:
        """Forget all others; what is left."""
        self._models = {name: told for name, told in self._models.items() if name in names}
        return self._models


#: how a run of a meta model ended -> how requests of other models do; by any other status it is refused
_OUTCOMES = {"ok": "answered", "deadline": "expired", "cancelled": "cancelled", "internal": "failed"}


_NOTHING = Reported()


def metrics(
    registry: Registry, scheduler: Scheduler, stub_metrics: StubMetrics, kept_bytes: int, loop_bans: int
) -> dict[str, Any]:
    """Of all models by name, versions of one added up; costs O(models). `kept_bytes`: on the device, by runs of metas."""
    catalog, placement = registry.catalog, registry.placement
    load, totals, metas = scheduler.load(), scheduler.totals(), registry.metas()
    reported = stub_metrics.keep({*totals, *(group.name for group in metas)})
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
            **memory(load, placement.weight_mover, placement.device),
            "scratch_bytes": placement.scratch,
            "kept_bytes": kept_bytes,
        },
        "executables": {"compiled": counts.compiled, "cache": counts.from_cache, "shared": counts.shared},
        "compile": counts.seconds.to_json(),
        "loop_bans": loop_bans,
    }


def overview(registry: Registry, scheduler: Scheduler, stub_metrics: StubMetrics) -> dict[str, Any]:
    """The few of them that people watch, for who asks every second: costs O(models), a third of what `metrics` does."""
    catalog, placement = registry.catalog, registry.placement
    load, totals, metas = scheduler.load(), scheduler.totals(), registry.metas()
    reported = stub_metrics.keep({*totals, *(group.name for group in metas)})
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
    return {"models": {**models, **runs}, "memory": memory(load, placement.weight_mover, placement.device)}


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
