"""Reports of the runtime's counters, as the JSON of STATUS_REPLY and of commands. Keys as in docs/protocol.md."""

import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from rsrv.histogram import SECONDS, Histogram
from rsrv.runtime.catalog import WATCHED_STATES, ModelEntry
from rsrv.runtime.executor import LoopBans
from rsrv.runtime.registry import Registry
from rsrv.runtime.requests import Requests, own_number, request_number
from rsrv.runtime.timeline import Traces
from rsrv.runtime.transport import MetaCounts, Registration
from rsrv.scheduler.events import Outcome, Reason
from rsrv.scheduler.scheduler import Scheduler
from rsrv.scheduler.slowest import SlowRequest
from rsrv.scheduler.statistics import LoadReport, ModelSnapshot, SchedulerSnapshot, Totals
from rsrv.scheduler.weight_states import WeightState
from rsrv.wire.frames import REASON_CHARACTERS, ProtocolError, Status

#: functions of model.py, by their names in metrics
HOOKS = ("pre", "post", "run")
_STATUSES = frozenset(status.name.lower() for status in Status)


@dataclass(slots=True)
class StubCounters:
    """Counters of one model, as its stubs report them; the hooks of a called model run in the stubs of the metas."""

    #: seconds, by hook that ever ran
    hooks: dict[str, Histogram] = field(default_factory=dict)
    #: seconds from a request's arrival to its answer
    requests: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    #: answers to clients, by status in lower case
    responses: Counter[str] = field(default_factory=Counter)
    #: why the latest of them that was INTERNAL failed
    failure: str = ""
    #: of these, those by the name of an alias
    aliases: dict[str, Counter[str]] = field(default_factory=dict)
    #: answers to copies of an alias's requests, by alias and outcome
    shadows: dict[str, Counter[str]] = field(default_factory=dict)


class StubMetrics:
    """Sums of the stubs' reports, by the model's name."""

    def __init__(self) -> None:
        self._models: dict[str, StubCounters] = {}

    def take(self, name: str, calls: Collection[str], report: Mapping[str, Any]) -> None:
        """Add a stub's report of its model, or of its meta model and the called models. Raises ProtocolError."""
        try:
            requests = Histogram.from_json(SECONDS, report["requests"])
            responses = {str(status): int(count) for status, count in report["responses"].items()}
            shadows = {str(outcome): int(count) for outcome, count in report.get("shadows", {}).items()}
            hooks = {
                (model, hook): Histogram.from_json(SECONDS, seconds)
                for model, by_hook in report["hooks"].items()
                for hook, seconds in by_hook.items()
            }
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"a REPORT that cannot be read: {type(error).__name__}: {error}") from None
        if not (responses.keys() <= _STATUSES and all(count >= 0 for count in responses.values())):
            raise ProtocolError("a REPORT of answers with an unknown status or a negative count")
        if not all((model == name or model in calls) and hook in HOOKS for model, hook in hooks):
            raise ProtocolError("a REPORT of hooks that the model does not have")
        mine = self._models.setdefault(name, StubCounters())
        mine.requests.add(requests)
        mine.failure = str(report.get("failure") or mine.failure)[:REASON_CHARACTERS]
        if alias := report.get("alias"):
            mine.aliases.setdefault(str(alias), Counter()).update(responses)
            mine.shadows.setdefault(str(alias), Counter()).update(shadows)
        mine.responses.update(responses)
        for (model, hook), seconds in hooks.items():
            counters = self._models.setdefault(model, StubCounters())
            counters.hooks.setdefault(hook, Histogram(SECONDS)).add(seconds)

    def keep(self, names: Collection[str]) -> Mapping[str, StubCounters]:
        """Drop the models of other names; return those that are left."""
        self._models = {name: counters for name, counters in self._models.items() if name in names}
        return self._models


#: how a run of a meta model ended -> the outcome of other models' requests; any other status is a refusal
_OUTCOMES = {"ok": "answered", "deadline": "expired", "cancelled": "cancelled", "internal": "failed"}
_NO_COUNTERS = StubCounters()


class LoadChanges:
    """The models of a load report in the order of their last changes, numbered from 1."""

    def __init__(self) -> None:
        #: number of the last change
        self.number = 0
        #: the catalog's count of changes, when `begin` was called
        self.shape = -1
        self._begun = 0
        self._shown: dict[str, ModelEntry] = {}
        self._changed: dict[str, int] = {}

    def begin(self, shape: int, shown: Mapping[str, ModelEntry]) -> None:
        """Show these models from now on; no later answer builds on an earlier one."""
        self.shape = shape
        self._shown = {entry.key: entry for entry in shown.values()}
        self._changed.clear()
        self.number += 1
        self._begun = self.number

    def note(self, keys: Iterable[str]) -> None:
        """Count a change of these models."""
        self.number += 1
        for key in keys:
            if key in self._shown:
                self._changed.pop(key, None)
                self._changed[key] = self.number

    def after(self, since: int) -> tuple[int, list[ModelEntry]]:
        """Return the models that changed after a number, and the number; or 0 and all models if that is not known."""
        if not self._begun <= since <= self.number:
            return 0, [*self._shown.values()]
        latest = takewhile(lambda one: one[1] > since, reversed(self._changed.items()))
        return since, [self._shown[key] for key, _ in latest]


class Reports:
    """All views of the counters. Belongs to the loop; `stubs` sums the reports of stubs."""

    def __init__(
        self,
        registry: Registry,
        scheduler: Scheduler,
        requests: Requests,
        traces: Traces,
        bans: LoopBans,
        clock: Callable[[], float],
    ) -> None:
        self._registry = registry
        self._catalog = registry.catalog
        self._weights = registry.weights
        self._scheduler = scheduler
        self._runs = requests.runs
        self._generations = requests.generation_counts
        self._sequences = requests.sequences
        self._traces = traces
        self._bans = bans
        self._clock = clock
        self.stubs = StubMetrics()
        self._load_changes = LoadChanges()

    def take(self, group: Registration, report: Mapping[str, Any]) -> None:
        """Take a stub's report. Raises ProtocolError."""
        self.stubs.take(group.name, group.calls, report)
        fronts: dict[int, list[tuple[float, float]]] = {}
        try:
            for number, since, until in report.get("slow", ()):
                fronts.setdefault(int(number), []).append((float(since), float(until)))
        except (TypeError, ValueError) as error:
            raise ProtocolError(f"a REPORT with slow requests that cannot be read: {error}") from None
        for slow in self._scheduler.slowest(group.key, self._clock()) if fronts else ():
            # Requests of a stub's connections may have equal numbers, but hardly at the same time.
            for since, until in fronts.get(own_number(slow.request.id), ()) if slow.front is None else ():
                before, after = slow.arrived - since, until - slow.ending.at
                if before >= 0 and after >= 0:
                    self._scheduler.add_front(slow, before, after)
                    break

    # --- small views --------------------------------------------------------------------------------------

    def ping(self) -> dict[str, Any]:
        return {"instance": self._catalog.feed.instance, "revision": self._catalog.feed.revision}

    def histories(self, names: Collection[str]) -> dict[str, Any]:
        """Return the recent history of the models of these names, by key: their states, and the scheduler's decisions."""
        now, scheduler = self._clock(), self._scheduler
        return {
            "unix_s": time.time() - now,
            "histories": {
                key: {
                    "records": [
                        {"at": at, "what": what, **details}
                        for at, what, details in scheduler.history(key, entry.history)
                    ],
                    "waits_for": scheduler.obstacle(key, now),
                }
                for key, entry in self._catalog.entries.items()
                if entry.name in names
            },
        }

    def slowest(self, names: Collection[str]) -> dict[str, Any]:
        """Return the slowest requests of the models of these names, the slowest first."""
        now = self._clock()
        keys = [key for key, entry in self._catalog.entries.items() if entry.name in names]
        found = [one for key in keys for one in self._scheduler.slowest(key, now)]
        return self._slow_requests(sorted(found, reverse=True), now)

    def find(self, tag: int, id: int | None) -> dict[str, Any]:
        """Return the slowest requests, and those in progress, with the tag of a client's id or with this id."""
        now = self._clock()
        return self._slow_requests(self._scheduler.find_requests(tag, id, now), now)

    def _slow_requests(self, found: Iterable[SlowRequest], now: float) -> dict[str, Any]:
        return {"unix_s": time.time() - now, "requests": [_slow_request(one) for one in found]}

    def timeline(self, since: int) -> dict[str, Any]:
        return self._traces.timeline.answer(self._catalog.feed.instance, since, self._clock())

    def arrivals(self, since: int) -> dict[str, Any]:
        return self._traces.timeline.arrivals.answer(self._catalog.feed.instance, since, self._clock())

    def traces(self, since: int) -> dict[str, Any]:
        return self._traces.answer(self._catalog.feed.instance, since)

    def figures(self, group: Registration) -> dict[str, Any]:
        """Return the few figures of one registration that its stub shows in Triton's metrics; of this version alone."""
        if group.is_meta:
            meta = self._scheduler.meta(group.name)
            queued, seconds = 0 if meta is None else meta.waiting, group.counts.device_seconds
            outcomes: dict[str, int] = _outcomes(group.counts)
        else:
            model = self._scheduler.model(group.key)
            if model is None:
                return {}
            queued, seconds = model.queued, model.device_seconds
            outcomes = {outcome.value: count for outcome, count in model.outcomes.items()}
        return {"queued": queued, "requests": outcomes, "device_seconds": seconds}

    # --- whole views --------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        snapshot, catalog = self._scheduler.snapshot(), self._catalog
        counts = self._weights.cache_counts
        models = {
            entry.name: _model_status(entry, snapshot.models[entry.key], catalog.policy.residency(entry.name))
            | self._state_status(entry)
            for entry in self._ready_last()
            if entry.key in snapshot.models
        }
        totals, metas = self._scheduler.totals(), self._registry.metas()
        reported = self.stubs.keep({*totals, *(group.name for group in metas)})
        for name in models.keys() & reported.keys() & totals.keys():
            early = _errors(totals[name], reported[name]) - _errors(totals[name], _NO_COUNTERS)
            models[name]["outcomes"]["failed_before_runtime"] = early
        return {
            "pid": os.getpid(),
            "compiled": counts.compiled,
            "from_cache": counts.from_cache,
            "shared": counts.shared,
            "numerics": catalog.policy.settings.runtime.numerics,
            "computes": self._weights.computes,
            "memory": self._memory(snapshot),
            "models": models,
            "metas": {group.name: self._meta_status(group, snapshot) for group in metas},
            "starting": self._registry.starting(),
        }

    def _state_status(self, entry: ModelEntry) -> dict[str, Any]:
        """Return the sequences of a model by their state, its generations, which are among them, and their sums."""
        counts = {state.value: count for state, count in self._sequences.count(entry.key).items()}
        generations = self._generations.get(entry.name)
        # An earlier version of the name may have generated.
        generates = entry.model is not None and entry.model.bundle.manifest.generate is not None
        if generations is None or not generates:
            return {"sequences": counts, "generations": 0, "generated": {}}
        return {"sequences": counts, "generations": generations.active, "generated": generations.sums()}

    def load(self, since: int) -> dict[str, Any]:
        """Return the figures for placing requests on devices; polled often.

        `since`: the `next` of an earlier answer: only models that have changed after it are in this one, if it can be.
        """
        changes = self._load_changes
        if changes.shape != self._catalog.changes:
            changes.begin(self._catalog.changes, {entry.name: entry for entry in self._ready_last()})
        changes.note(self._scheduler.take_unreported())
        since, shown = changes.after(since)
        load = self._scheduler.load_report(entry.key for entry in shown)
        budget = load.weight_budget_bytes
        return {
            "since": since,
            "next": changes.number,
            "instance": self._catalog.feed.instance,
            "backlog_s": self._scheduler.backlog_seconds(self._clock()),
            "free_bytes": None if budget is None else max(0, budget - load.weight_bytes),
            "budget_bytes": budget,
            "models": {
                entry.name: {
                    "queued": model.queued,
                    "executing": model.executing,
                    "weights": entry.weights,
                    "pinned": model.pinned,
                    "bytes": model.device_bytes,
                    "cost_s": model.row_seconds,
                    "misses": model.misses,
                    "device_seconds": model.device_seconds,
                    "rows": model.useful_rows,
                    "requests": model.answered,
                    "max_rows": model.max_rows,
                    "sequences": sum(self._sequences.count(entry.key).values()),
                    "batch_input": self._catalog.get(entry.key).batch_input,
                }
                for entry in shown
                if (model := load.models.get(entry.key)) is not None
            },
            "metas": {group.name: group.calls for group in self._registry.metas()},
        }

    def metrics(self) -> dict[str, Any]:
        """Return all counters by model name, versions of one added up; costs O(models)."""
        load, totals, metas = self._scheduler.load_report(), self._scheduler.totals(), self._registry.metas()
        reported = self.stubs.keep({*totals, *(group.name for group in metas)})
        counts = self._weights.cache_counts
        models = {name: _model_metrics(total, reported.get(name)) for name, total in totals.items()}
        for key, entry in self._catalog.entries.items():
            now, model = load.models.get(key), models.get(entry.name)
            if model is None or entry.model is None:
                continue  # it is not compiled yet
            model["resident"] |= entry.weights == "resident"
            model["host_bytes"] += entry.model.host.nbytes if entry.model.host.kept else 0
            model["device_bytes"] += sum(entry.model.tensors.values()) if entry.weights != "absent" else 0
            model["queued"] += 0 if now is None else now.queued
            if entry.model.pool is not None:
                sequences = model.setdefault("sequences", Counter())
                sequences.update(self._state_status(entry)["sequences"])
        for name, generations in self._generations.items():
            if name in models:
                models[name]["generations"] = generations.to_json()
        return {
            "models": models,
            "metas": self._meta_metrics(metas, reported),
            "memory": {
                **self._memory(load),
                "scratch_bytes": self._weights.scratch,
                "kept_bytes": self._runs.kept_bytes,
            },
            "executables": {"compiled": counts.compiled, "cache": counts.from_cache, "shared": counts.shared},
            "compile": counts.seconds.to_json(),
            "loop_bans": self._bans.count,
            "importing": self._registry.importing(self._clock()),
        }

    def overview(self) -> dict[str, Any]:
        """Return the few counters for a display that polls every second: costs a third of `metrics`."""
        load, totals, metas = self._scheduler.load_report(), self._scheduler.totals(), self._registry.metas()
        reported = self.stubs.keep({*totals, *(group.name for group in metas)})
        now = {name: [0, 0, 0] for name in totals}
        for key, entry in self._catalog.entries.items():
            if entry.model is None or (mine := now.get(entry.name)) is None:
                continue  # it is not compiled yet
            if (model := load.models.get(key)) is not None:
                mine[0] += model.queued
                mine[1] += model.executing
            mine[2] = max(mine[2], sum(entry.model.tensors.values()))
        models = {
            name: (
                *now[name],
                total.counts.answered,
                _errors(total, reported.get(name) or _NO_COUNTERS),
                total.device_seconds,
                sum(total.load.counts),
                total.load.sum,
                0 if (generations := self._generations.get(name)) is None else generations.tokens_out,
                total.misses,
                (reported.get(name) or _NO_COUNTERS).requests.to_json(),
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
                0,
                0,
                meta["request"],
            )
            for name, meta in self._meta_metrics(metas, reported).items()
        }
        return {
            "models": {**models, **runs},
            "memory": self._memory(load),
            "starting": self._registry.starting(),
        }

    def memory(self) -> dict[str, Any]:
        """Return what takes memory: each model's weights and state, and the tensors that models share."""
        load, device, entries = self._scheduler.load_report(), self._weights.device, self._catalog.entries
        own: Counter[str] = Counter()
        groups = []
        for group in self._scheduler.shared_tensors():
            names = sorted({entries[key].name for key in group.models if key in entries})
            if len(names) > 1:
                groups.append({"bytes": group.bytes, "models": names, "on_device": group.on_device})
            else:  # of one model, or of its versions during a reload
                own.update(dict.fromkeys(group.models, group.bytes))
        return {
            "memory": {
                **self._memory(load),
                "scratch_bytes": self._weights.scratch,
                "kept_bytes": self._runs.kept_bytes,
                "in_use_bytes": None if device is None else device.memory_in_use(),
                "largest_free_bytes": None if device is None else device.largest_free(),
            },
            "models": {
                entry.name: {
                    "device_bytes": sum(entry.model.tensors.values()),
                    "own_bytes": own[entry.key] - state,
                    "state_bytes": state,
                    "host_bytes": entry.model.host.nbytes if entry.model.host.kept else 0,
                    "weights": entry.weights,
                    "pinned": load.models[entry.key].pinned,
                }
                for entry in self._ready_last()
                if entry.model is not None and entry.key in load.models
                for state in (0 if entry.model.pool is None else entry.model.pool.nbytes,)
            },
            "groups": groups,
        }

    # --- parts of views -----------------------------------------------------------------------------------

    def _ready_last(self) -> list[ModelEntry]:
        """Return all entries, the ready ones last: of several versions under one name, these are shown."""
        return sorted(self._catalog.entries.values(), key=lambda entry: entry.ready)

    def _memory(self, snapshot: SchedulerSnapshot | LoadReport) -> dict[str, Any]:
        """Return bytes of weights on host and device: logical (no tensor shared) and physical (each tensor once)."""
        device, mover = self._weights.device, self._weights.mover
        host = None if mover is None else mover.host.counts
        return {
            "device": {
                "name": "" if device is None else device.name,
                "limit_bytes": None if device is None else device.memory_limit,
                "budget_bytes": snapshot.weight_budget_bytes,
                "pinned_bytes": snapshot.pinned_bytes,
                "logical_bytes": snapshot.logical_bytes,
                "physical_bytes": snapshot.weight_bytes,
                # Differs from the one before during loads and evictions.
                "held_bytes": 0 if mover is None else mover.device.nbytes,
            },
            "host": {
                "logical_bytes": 0 if host is None else host.logical,
                "physical_bytes": 0 if host is None else host.physical,
                "tensors": 0 if host is None else host.tensors,
                "limit_bytes": None if mover is None or mover.host.limit is None else mover.host.limit.copies,
            },
        }

    def _meta_status(self, group: Registration, snapshot: SchedulerSnapshot) -> dict[str, Any]:
        """Return a meta model's status; `device_seconds` excludes waiting and Python."""
        counts = group.counts
        gate = snapshot.metas.get(group.name)  # None: no run was ever asked for
        return {
            "models": [self._catalog.entries[key].name for key in group.models],
            "waiting": 0 if gate is None else gate.waiting,
            "running": 0 if gate is None else gate.running,
            "outcomes": counts.outcomes,
            "calls": counts.calls,
            "device_seconds": counts.device_seconds,
            "kept_bytes": sum(run.kept_bytes for run in self._runs if run.group is group),
        }

    def _meta_metrics(
        self, metas: list[Registration], reported: Mapping[str, StubCounters]
    ) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        gates = self._scheduler.metas()
        for group in metas:
            counts, gate = group.counts, gates.get(group.name)
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
                    **_stub_metrics(reported.get(group.name)),
                },
            )
            for outcome, count in _outcomes(counts).items():
                meta["requests"][outcome] += count
            meta["calls"] += counts.calls
            meta["device_seconds"] += counts.device_seconds
        return found


def _model_status(entry: ModelEntry, model: ModelSnapshot, residency: str) -> dict[str, Any]:
    """Return a model's status; sizes and costs by `variant/size`."""
    return {
        "key": entry.key,
        "digest": entry.digest,
        "state": WATCHED_STATES[entry.state],
        "residency": residency,
        "weights": model.residency,
        "weights_state": _place(entry, model),
        "queued": model.queued,
        "executing": model.executing,
        "outcomes": {outcome.value: count for outcome, count in model.outcomes.items()},
        "dispatches": model.dispatches,
        "useful_rows": model.useful_rows,
        "padded_rows": model.padded_rows,
        "device_seconds": model.device_seconds,
        "weight_bytes": model.weight_bytes,
        "device_bytes": model.device_bytes,
        "misses": model.misses,
        "loads": model.loads,
        "evictions": model.evictions,
        "load_seconds": model.load_seconds,
        "sizes": {f"{variant}/{size}": count for (variant, size), count in model.sizes.items()},
        "costs": {f"{variant}/{size}": cost for (variant, size), cost in model.costs.items()},
        "precisions": entry.model.precisions if entry.model else {},
    }


def _slow_request(slow: SlowRequest) -> dict[str, Any]:
    request, wait, execute = slow.request, slow.wait, slow.ending.execute
    (before, after), evicted = slow.front or (None, None), wait.evicted
    state = "waiting" if execute is None else "executing"
    return {
        "number": request_number(request.id),
        "key": request.model,
        "rows": request.rows,
        "call": request.run != 0,
        "deadline_s": None if request.deadline is None else request.deadline - wait.arrived,
        "at": wait.arrived,
        "seconds": wait.seconds,
        "paused_s": wait.paused,
        "weights_s": wait.weights,
        "peers_s": wait.peers,
        "others_s": wait.others,
        "executing_s": wait.executing,
        "before_s": before,
        "after_s": after,
        "outcome": state if slow.ending.outcome is None else slow.ending.outcome.value,
        "behind": slow.ending.behind,
        "evicted": None if evicted is None else {"at": evicted.at, "what": evicted.what, **evicted.details},
        "batch": None if execute is None else (len(execute.requests), execute.rows, execute.size),
    }


def _place(entry: ModelEntry, model: ModelSnapshot) -> str:
    """Return the state of a model's weights, or `on disk` for absent ones without a host copy."""
    on_disk = model.weights is WeightState.ABSENT and entry.model is not None and not entry.model.host.kept
    return "on disk" if on_disk else model.weights.value


def _model_metrics(totals: Totals, reported: StubCounters | None) -> dict[str, Any]:
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
        **_stub_metrics(reported),
    }


def _stub_metrics(reported: StubCounters | None) -> dict[str, Any]:
    counters = reported or _NO_COUNTERS
    return {
        "hooks": {hook: seconds.to_json() for hook, seconds in counters.hooks.items()},
        "request": counters.requests.to_json(),
        "responses": counters.responses,
        "failure": counters.failure,
        "aliases": counters.aliases,
        "shadows": counters.shadows,
    }


def _errors(totals: Totals, reported: StubCounters) -> int:
    """Return how many requests were not answered: those that never reached the runtime only the fronts have counted."""
    counts, responses = totals.counts, reported.responses
    answered = responses.get("ok", 0) + responses.get("cancelled", 0)
    return max(counts.total() - counts.answered - counts.cancelled, sum(responses.values()) - answered)


def _outcomes(counts: MetaCounts) -> Counter[str]:
    found: Counter[str] = Counter()
    for status, count in counts.outcomes.items():
        found[_OUTCOMES.get(status, "refused")] += count
    return found
