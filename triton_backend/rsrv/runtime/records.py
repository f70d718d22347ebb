"""Writes the records of control.proto: everything that the control process learns about a runtime's models, by name."""

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import takewhile
from typing import Any

from rsrv.control.v1 import control_pb2 as pb
from rsrv.histogram import Histogram
from rsrv.runtime.catalog import WATCHED_STATES, ModelEntry
from rsrv.runtime.executor import LoopBans
from rsrv.runtime.models import CompiledModel
from rsrv.runtime.registry import Registry
from rsrv.runtime.runs import Runs
from rsrv.runtime.stateful_requests import StatefulRequests
from rsrv.runtime.stub_counters import StubCounters, StubMetrics
from rsrv.runtime.transport import Registration
from rsrv.scheduler.events import Outcome, Reason
from rsrv.scheduler.scheduler import Scheduler
from rsrv.scheduler.statistics import MetaSnapshot, Totals
from rsrv.scheduler.weight_states import WeightState

#: Outcome of a meta model's run, by the run's status. Requests of other models have the same outcomes. Any other status is a
#: refusal.
_OUTCOMES = {"ok": "answered", "deadline": "expired", "cancelled": "cancelled", "internal": "failed"}
_NO_COUNTERS = StubCounters()


class RecordChanges:
    """Names of models in the order of the last changes of their records. Changes are numbered from 1."""

    def __init__(self) -> None:
        #: Number of the last change.
        self.number = 0
        self._begun = 0
        self._names: Collection[str] = ()
        self._changed: dict[str, int] = {}

    def begin(self, names: Collection[str]) -> None:
        """Replace the models, and forget all earlier changes."""
        self._names = names
        self._changed.clear()
        self.number += 1
        self._begun = self.number

    def note(self, names: Iterable[str]) -> None:
        """Count a change of these models."""
        self.number += 1
        for name in names:
            if name in self._names:
                self._changed.pop(name, None)
                self._changed[name] = self.number

    def after(self, since: int) -> tuple[int, Collection[str]]:
        """Return `since` and the models that changed after the change with this number.

        Return 0 and all models if `since` is older than the last `begin`, or is not a number of a change.
        """
        if not self._begun <= since <= self.number:
            return 0, self._names
        latest = takewhile(lambda change: change[1] > since, reversed(self._changed.items()))
        return since, [name for name, _ in latest]


class Records:
    """The records of a runtime. Belongs to the loop."""

    def __init__(
        self,
        registry: Registry,
        scheduler: Scheduler,
        runs: Runs,
        stateful: StatefulRequests,
        bans: LoopBans,
        clock: Callable[[], float],
    ) -> None:
        self._registry = registry
        self._catalog = registry.catalog
        self._weights = registry.weights
        self._scheduler = scheduler
        self._runs = runs
        self._generations = stateful.generation_counts
        self._sequences = stateful.sequences
        self._bans = bans
        self._clock = clock
        self._began = clock()
        self._stubs = StubMetrics()
        self._changes = RecordChanges()
        #: The catalog's count of changes when `_versions` was made.
        self._shape = -1
        #: Compiled versions by the name of their model. The last version is served, or will be served next.
        self._versions: dict[str, list[ModelEntry]] = {}
        #: Names of models with state. Every device record has them, because sequences end without an event of the scheduler.
        self._stateful: set[str] = set()
        #: The scheduler's change count of each model at the last device record, by the model's key.
        self._counted: dict[str, int] = {}
        #: Fields of the records that never change, by the model's key.
        self._fixed: dict[str, pb.ModelRecord] = {}

    def device(self, since: int = 0) -> pb.DeviceRecord:
        """Return the record of the device. It has the models that have changed since the record whose `next` was `since`.

        It has all models if `since` is 0, or too old.
        """
        changes, weights, policy = self._changes, self._weights, self._catalog.policy
        self._note_changes()
        since, names = changes.after(since)
        totals, metas = self._scheduler.totals(), self._registry.metas()
        reported = self._stubs.keep({*totals, *(group.name for group in metas)})
        counts, host_limit = (
            weights.cache_counts,
            weights.mover.host.limit if weights.mover is not None else None,
        )
        record = pb.DeviceRecord(
            instance=self._catalog.feed.instance,
            since=since,
            next=changes.number,
            pid=os.getpid(),
            uptime_s=self._clock() - self._began,
            depth=weights.settings.depth,
            numerics=pb.Numerics.Value(f"NUMERICS_{policy.settings.runtime.numerics.upper()}"),
            computes=weights.computes or "",
            backlog_s=self._scheduler.backlog_seconds(self._clock()),
            memory=self._device_memory(),
            host=self._host_memory(),
            host_limit_bytes=None if host_limit is None else host_limit.copies,
            scratch_bytes=weights.scratch,
            kept_bytes=self._runs.kept_bytes,
            compiled=counts.compiled,
            from_cache=counts.from_cache,
            shared_executables=counts.shared,
            cache_obstacle=counts.obstacle,
            loop_bans=self._bans.count,
            starting=self._registry.starting(),
            importing={
                name: pb.Import(seconds=seconds, line=line)
                for name, (seconds, line) in self._registry.importing(self._clock()).items()
            },
            models=self._metas(metas, reported),
        )
        _fill(record.compile, counts.seconds)
        for name in names:
            if name in totals:
                self._add_model(record.models.add(), name, totals[name], reported.get(name) or _NO_COUNTERS)
        if not since:
            device = weights.device
            if device is not None and (used := device.memory_in_use()) is not None:
                record.in_use_bytes = used
            if device is not None and (free := device.largest_free()) is not None:
                record.largest_free_bytes = free
            record.shared.extend(self._shared())
        return record

    def take(self, name: str, calls: Collection[str], report: Mapping[str, Any]) -> None:
        """Add a stub's report. Raises ProtocolError."""
        self._changes.note(self._stubs.take(name, calls, report))

    def _note_changes(self) -> None:
        entries = self._catalog.entries
        if self._shape != self._catalog.changes:
            self._shape, self._versions, self._stateful = self._catalog.changes, {}, set()
            for entry in sorted(entries.values(), key=lambda entry: entry.ready):
                if entry.model is not None:
                    self._versions.setdefault(entry.name, []).append(entry)
                    if entry.model.pool is not None:
                        self._stateful.add(entry.name)
            self._fixed = {key: fixed for key, fixed in self._fixed.items() if key in entries}
            self._changes.begin(self._versions.keys())
        touched, self._catalog.touched = self._catalog.touched, set()
        counts = self._scheduler.change_counts()
        touched.update(key for key, _ in counts.items() - self._counted.items())
        self._counted = counts
        self._changes.note({*(entries[key].name for key in touched if key in entries), *self._stateful})

    # --- models -------------------------------------------------------------------------------------------

    def _add_model(self, record: pb.ModelRecord, name: str, totals: Totals, reported: StubCounters) -> None:
        versions, counts = self._versions[name], totals.counts
        entry = versions[-1]
        assert entry.model is not None
        record.CopyFrom(self._fixed.get(entry.key) or self._fix(entry))
        record.residency = pb.Residency.Value(f"RESIDENCY_{self._catalog.policy.residency(name).upper()}")
        record.weights = pb.Weights.Value(f"WEIGHTS_{entry.weights.upper()}")
        record.state = pb.State.Value(f"STATE_{WATCHED_STATES[entry.state].upper()}")
        record.host_bytes = entry.model.host.nbytes if entry.model.host.kept else 0
        snapshots = [
            snapshot for version in versions if (snapshot := self._scheduler.model(version.key)) is not None
        ]
        if snapshots:
            shown = snapshots[-1]
            on_disk = shown.weights is WeightState.ABSENT and not entry.model.host.kept
            record.weights_state = "on disk" if on_disk else shown.weights.value
            record.pinned, record.device_bytes = shown.pinned, shown.device_bytes
            record.load_seconds, record.cost_s = shown.load_seconds, shown.row_seconds
            record.max_rows = shown.max_rows
            record.queued = sum(snapshot.queued for snapshot in snapshots)
            record.executing = sum(snapshot.executing for snapshot in snapshots)
            for executable in record.executables:
                key = executable.variant, executable.size
                executable.count = shown.sizes.get(key, 0)
                executable.cost_s = shown.costs[key]
        record.dispatches, record.useful_rows = totals.dispatches, totals.useful_rows
        record.padded_rows, record.device_seconds = int(totals.padding.sum), totals.device_seconds
        record.misses, record.loads = totals.misses, sum(totals.load.counts)
        record.outcomes.update({outcome.value: count for outcome, count in counts.outcomes().items()})
        record.refused.update({reason.value: count for reason, count in counts.refused.items()})
        record.missed.update({stage.value: count for stage, count in totals.missed.items()})
        record.evictions.update({cause.value: count for cause, count in totals.evictions.items()})
        _fill(record.queue_wait, totals.queue_wait)
        _fill(record.execute, totals.execute)
        _fill(record.load, totals.load)
        _fill(record.batch_rows, totals.rows)
        _fill(record.batch_padding, totals.padding)
        self._add_state(record, versions, entry.model)
        _add_reports(record, reported)
        _add_errors(record)

    def _fix(self, entry: ModelEntry) -> pb.ModelRecord:
        """Return the part of a compiled version's record that never changes."""
        model = entry.model
        assert model is not None
        fixed = self._fixed[entry.key] = pb.ModelRecord(
            name=entry.name,
            weight_bytes=model.program.weight_bytes,
            device_bytes=sum(model.tensors.values()),
            state_bytes=0 if model.pool is None else model.pool.nbytes,
            task="" if (task := model.bundle.manifest.task) is None else task.kind,
            executables=[
                pb.Executable(variant=variant, size=size, precision=model.precisions[variant, size])
                for variant, size in sorted(model.executables)
            ],
        )
        if model.batch_input is not None:
            fixed.batch_input.name, fixed.batch_input.axis = model.batch_input
        return fixed

    def _add_state(
        self, record: pb.ModelRecord, versions: Iterable[ModelEntry], served: CompiledModel
    ) -> None:
        """Add the numbers of a model's sequences by state, and its generations. Generations are also counted as sequences."""
        sequences: Counter[str] = Counter()
        for version in versions:
            for state, count in self._sequences.count(version.key).items():
                sequences[state.value] += count
        record.sequences.update(sequences)
        # The counters may come from an earlier version of the same name, so check that this version generates.
        generates = served.bundle.manifest.generate is not None
        if generates and (generations := self._generations.get(record.name)) is not None:
            record.generations = generations.active
            record.generated.update(generations.sums())
            record.tokens.update({"prompt": generations.tokens_in, "answer": generations.tokens_out})
            _fill(record.first_token, generations.first)
            _fill(record.between_tokens, generations.between)

    def _metas(
        self, groups: Iterable[Registration], reported: Mapping[str, StubCounters]
    ) -> list[pb.ModelRecord]:
        """Return the records of the meta models that a stub serves. `device_seconds` excludes waits and Python code."""
        records: dict[str, pb.ModelRecord] = {}
        gates = self._scheduler.metas()
        for group in groups:
            record = records.get(group.name)
            if record is None:
                record = records[group.name] = pb.ModelRecord(name=group.name, meta=True)
                _add_gate(record, gates.get(group.name))
                _add_reports(record, reported.get(group.name) or _NO_COUNTERS)
                record.outcomes.update(dict.fromkeys((outcome.value for outcome in Outcome), 0))
            del record.calls_models[:]
            record.calls_models.extend(self._catalog.entries[key].name for key in group.models)
            for status, count in group.counts.outcomes.items():
                record.outcomes[_OUTCOMES.get(status, "refused")] += count
            record.calls += group.counts.calls
            record.device_seconds += group.counts.device_seconds
            record.kept_bytes += sum(run.kept_bytes for run in self._runs if run.group is group)
        for record in records.values():
            _add_errors(record)
        return list(records.values())

    # --- memory -------------------------------------------------------------------------------------------

    def _device_memory(self) -> pb.DeviceMemory:
        device, mover, weights = self._weights.device, self._weights.mover, self._scheduler.weight_bytes()
        return pb.DeviceMemory(
            name="" if device is None else device.name,
            limit_bytes=None if device is None else device.memory_limit,
            budget_bytes=weights.budget,
            pinned_bytes=weights.pinned,
            logical_bytes=weights.logical,
            physical_bytes=weights.physical,
            # Bytes that tensors really take now. `physical_bytes` includes a load from its start.
            held_bytes=0 if mover is None else mover.device.nbytes,
        )

    def _host_memory(self) -> pb.HostMemory:
        if self._weights.mover is None:
            return pb.HostMemory()
        host = self._weights.mover.host.counts
        return pb.HostMemory(logical_bytes=host.logical, physical_bytes=host.physical, tensors=host.tensors)

    def _shared(self) -> Iterable[pb.SharedTensors]:
        entries = self._catalog.entries
        for group in self._scheduler.shared_tensors():
            names = sorted({entries[key].name for key in group.models if key in entries})
            if len(names) > 1:
                yield pb.SharedTensors(bytes=group.bytes, models=names, on_device=group.on_device)


def _add_gate(record: pb.ModelRecord, gate: MetaSnapshot | None) -> None:
    """Add the waiting, running and refused runs of a meta model."""
    if gate is not None:  # None: no client has requested a run yet.
        record.queued, record.executing = gate.waiting, gate.running
        record.refused[Reason.QUEUE_FULL.value] = gate.refused
        record.missed["gate"] = gate.expired


def _add_errors(record: pb.ModelRecord) -> None:
    outcomes, answers = record.outcomes, record.responses
    record.answered = outcomes["answered"]
    late = sum(outcomes.values()) - record.answered - outcomes["cancelled"]
    early = sum(answers.values()) - answers.get("ok", 0) - answers.get("cancelled", 0)
    record.errors = max(late, early)


def _add_reports(record: pb.ModelRecord, reported: StubCounters) -> None:
    record.responses.update(reported.responses)
    _fill(record.request, reported.requests)
    record.failure = reported.failure
    for hook, seconds in reported.hooks.items():
        _fill(record.hooks[hook], seconds)
    for counts, by_alias in ((record.aliases, reported.aliases), (record.shadows, reported.shadows)):
        for alias, count in by_alias.items():
            counts[alias].counts.update(count)


def _fill(histogram: pb.Histogram, source: Histogram) -> None:
    histogram.sum = source.sum
    histogram.first, counts = source.trimmed()
    histogram.counts.extend(counts)
