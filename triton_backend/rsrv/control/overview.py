"""The live page's picture of a server. It is made once a second from the runtimes' records and the models' states. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rsrv.control.records import RuntimeRecords, starting, total
from rsrv.control.runtime_state import ModelVersion
from rsrv.control.sentences import failed_models, life
from rsrv.control.v1 import control_pb2 as pb
from rsrv.histogram import SECONDS, Histogram

#: Length of the window of the 99th percentile, in seconds.
_WINDOW_S = 10.0
#: Precedence among the versions of one name: first the served version, then the one to be served next.
_RANK = {"ready": 0, "loading": 1, "failed": 2, "leaving": 3}


#: Figures of a model that is not built yet.
_NONE = pb.ModelRecord()


class _CountedRecord(NamedTuple):
    """A record of a model, and the histogram of its requests."""

    record: pb.ModelRecord
    request: Histogram


@dataclass(slots=True)
class Work:
    """Work of all models of a server between two updates."""

    requests: int = 0
    errors: int = 0
    misses: int = 0
    device_s: float = 0.0
    request: Histogram = field(default_factory=lambda: Histogram(SECONDS))

    @property
    def hit_share(self) -> float | None:
        """Share of the requests that found their weights on the device, or None if there were no requests."""
        ended = self.requests + self.errors
        return 1 - min(1.0, self.misses / ended) if ended else None

    def add(self, other: Work) -> None:
        self.requests += other.requests
        self.errors += other.errors
        self.misses += other.misses
        self.device_s += other.device_s
        self.request.add(other.request)

    def count(self, before: _CountedRecord | None, now: _CountedRecord) -> None:
        """Add a model's work between two records. If the counters began again after `before`, count all work of `now`."""
        was = _NONE if before is None else before.record
        latest = now.record
        if latest.answered < was.answered or latest.device_seconds < was.device_seconds:
            before, was = None, _NONE
        self.requests += latest.answered - was.answered
        self.errors += max(0, latest.errors - was.errors)
        self.misses += max(0, latest.misses - was.misses)
        if not latest.meta:  # The models that a meta model calls already count these seconds.
            self.device_s += latest.device_seconds - was.device_seconds
            self.request.add(now.request if before is None else now.request.since(before.request))


@dataclass(slots=True)
class _Shown:
    """The latest picture of a model, and the histograms of its requests within the window."""

    #: Latest record of each device.
    seen: dict[int, _CountedRecord] = field(default_factory=dict)
    #: For each change of the histogram, the time and the new histogram. The first entry is the histogram at the beginning of
    #: the window.
    samples: deque[tuple[float, Histogram]] = field(default_factory=deque)
    source: Any = None
    json: dict[str, Any] = field(default_factory=dict)


class Overview:
    """The live page's picture of a server. Only models that changed get a new picture.

    `work` is the work of all models since the previous update.
    """

    def __init__(self) -> None:
        self._shown: dict[str, _Shown] = {}
        self._began = False
        self.work = Work()

    def take(
        self,
        records: Mapping[int, RuntimeRecords],
        entries: Mapping[str, ModelVersion],
        failures: Mapping[str, str],
        on: Mapping[str, Sequence[int]],
        now: float,
        *,
        cold: Collection[str] = (),
        aliases: Collection[str] = (),
        asleep: bool = False,
    ) -> dict[str, dict[str, Any]]:
        """Return the picture of each model as JSON, in bytes and seconds. An unchanged model keeps its object.

        Args:
            records: Records of the runtimes, by device.
            entries: Versions of all devices, by key.
            failures: Failures by model.
            on: Devices that hold the weights, by model.
            now: Present time in seconds.
            cold: Cold models. They have no picture.
            aliases: Names of the aliases. They have no picture.
            asleep: True if all devices sleep.
        """
        self.work, shown_models = Work(), {}
        steps = starting(records.values())
        for name, entry in served(entries.values()).items():
            shown = self._shown.get(name) or _Shown()
            devices = {
                number: there.models[name] for number, there in records.items() if name in there.models
            }
            changed = self._read(shown, devices, now)
            while len(shown.samples) > 1 and shown.samples[1][0] <= now - _WINDOW_S:
                shown.samples.popleft()
            # If no request has ended within the window, the picture shows no percentile any more.
            changed |= len(shown.samples) == 1 and shown.json.get("p99_s") is not None
            source = (entry, failures.get(name), on.get(name), steps.get(name), list(devices), asleep)
            if changed or source != shown.source:
                shown.source = source
                shown.json = {
                    **_state(entry, steps.get(name, ""), broken=name in failures, asleep=asleep),
                    **_picture([*devices.values()]),
                    "p99_s": _p99(shown.samples, now),
                    "error": failures.get(name) or entry["error"],
                    "on": on.get(name, []),
                }
            shown_models[name] = shown
        for name in failed_models(failures, aliases):
            if name not in shown_models and name not in cold:
                shown_models[name] = shown = self._shown.get(name) or _Shown()
                if shown.source != failures[name]:
                    shown.source, shown.json = failures[name], _failed(name, failures[name])
        self._shown, self._began = shown_models, True
        return {name: shown.json for name, shown in shown_models.items()}

    def latency(self, model: str) -> list[tuple[float | None, int]]:
        """Return the histogram of a model's request durations: pairs of upper bound in seconds (None: no bound) and count.

        Empty intervals at both ends are left out.
        """
        shown = self._shown.get(model)
        counts = shown.samples[-1][1].counts if shown is not None and shown.samples else []
        there = [at for at, count in enumerate(counts) if count]
        pairs = list(zip((*SECONDS, None), counts, strict=bool(counts)))
        return pairs[there[0] : there[-1] + 1] if there else []

    def _read(self, shown: _Shown, devices: Mapping[int, pb.ModelRecord], now: float) -> bool:
        """Read a model's records of all devices. Return True if any has changed."""
        if shown.samples and shown.samples[-1][0] > now:
            shown.samples.clear()  # The clock was set back.
        changed = False
        for number, record in devices.items():
            before = shown.seen.get(number)
            if before is None or before.record is not record:
                changed = True
                shown.seen[number] = seen = _CountedRecord(record, Histogram.of(SECONDS, record.request))
                if self._began:
                    self.work.count(before, seen)
        if changed or not shown.samples:
            several = [seen.request for seen in shown.seen.values()]
            total = several[0] if len(several) == 1 else Histogram(SECONDS)
            for histogram in several if len(several) > 1 else ():
                total.add(histogram)
            shown.samples.append((now, total))
        return changed


def device_picture(records: RuntimeRecords) -> dict[str, Any]:
    """Return the picture of a device as JSON. `device_s` is the number of seconds that its executions took so far."""
    memory = records.device.memory
    limits = {kind: f"{kind}_bytes" for kind in ("limit", "budget")}
    return {
        "name": memory.name,
        **{kind: getattr(memory, name) if memory.HasField(name) else None for kind, name in limits.items()},
        **{kind: getattr(memory, f"{kind}_bytes") for kind in ("pinned", "logical", "physical", "held")},
        "host": records.device.host.physical_bytes,
        # Leave out meta models: the models that they call already count these seconds.
        "device_s": sum(model.device_seconds for model in records.models.values() if not model.meta),
    }


def memory_picture(use: pb.MemoryUse) -> dict[str, Any]:
    """Return the picture of a device's memory as JSON.

    `models` has the bytes of each model that no other model shares. `groups` has the bytes of shared tensors, with the names of
    the models that share them.
    """
    record = use.record
    state = {model.name: model.state_bytes for model in record.models}
    return {
        "scratch": record.scratch_bytes,
        "models": {name: own + state[name] for name, own in sorted(use.own_bytes.items())},
        "groups": [[group.bytes, [*group.models]] for group in record.shared],
    }


def served(entries: Iterable[ModelVersion]) -> dict[str, ModelVersion]:
    """Return one version of each name: the served version, or otherwise the first version in the order of _RANK."""
    best: dict[str, ModelVersion] = {}
    for entry in entries:
        earlier = best.get(entry["name"])
        if earlier is None or _RANK[entry["state"]] <= _RANK[earlier["state"]]:
            best[entry["name"]] = entry
    return best


def states_of_models(
    entries: Iterable[ModelVersion],
    failures: Iterable[str],
    cold: Collection[str],
    steps: Mapping[str, str],
    *,
    aliases: Collection[str],
    asleep: bool,
) -> dict[str, str]:
    """Return the state of each model and meta model by name, in the words of docs/operating.md.

    `steps` has what each starting model waits for.
    """
    broken, states = set(failed_models(failures, aliases)), {}
    for name, entry in served(entries).items():
        weights, step = entry["weights"] or "", steps.get(name, "")
        states[name] = life(entry["state"], weights, step, broken=name in broken, asleep=asleep)
    for name in {*broken, *cold} - states.keys():
        states[name] = life("cold" if name in cold else "", "", broken=name in broken, asleep=asleep)
    return states


def _state(entry: ModelVersion, step: str, *, broken: bool, asleep: bool) -> dict[str, Any]:
    fields = {key: entry[key] for key in ("name", "kind", "state", "residency", "paused")}
    text = life(entry["state"], entry["weights"] or "", step, broken=broken, asleep=asleep)
    return {**fields, "weights": text}


def _failed(name: str, why: str) -> dict[str, Any]:
    """Return the picture of a model that has no version, because it failed."""
    state = {"name": name, "kind": "model", "state": "failed", "weights": life("", "", broken=True)}
    return {**state, **_picture([]), "residency": None, "paused": None, "p99_s": None, "error": why, "on": []}


def _picture(devices: Sequence[pb.ModelRecord]) -> dict[str, Any]:
    """Return a model's figures that the page shows, over all devices. Counters begin at 0 when a runtime starts."""
    record = total(devices)
    loads = record.loads
    return {
        "queued": record.queued,
        "executing": record.executing,
        "requests": record.answered,
        "errors": record.errors,
        "device_s": record.device_seconds,
        "loads": loads,
        "load_s": sum(record.load.sum for record in devices) / loads if loads else None,
        "tokens": record.tokens.get("answer", 0),
        "bytes": record.device_bytes if devices and not record.meta else None,
    }


def _p99(samples: Sequence[tuple[float, Histogram]], now: float) -> float | None:
    """Return the 99th percentile of the durations of requests in the window. The first update covers all requests so far."""
    latest = samples[-1][1]
    if len(samples) == 1:
        return latest.quantile(0.99) if samples[0][0] == now else None
    return latest.since(samples[0][1]).quantile(0.99)


def describe(before: ModelVersion | None, after: ModelVersion | None, serving: str = "") -> str | None:
    """Return a line of the event log for the change of a version. Returns None if the log does not show the change.

    `serving` is a text about the version that serves the model after another version has left.
    """
    either = after or before
    if either is None:
        return None
    name, version = either["name"], f"version {either['digest'][:12]}" if either["digest"] else "a version"
    now, was = (
        None if version is None else life(version["state"], version["weights"] or "")
        for version in (after, before)
    )
    if after is None:
        return f"{name}: {version} was removed; {serving}"
    lines = []
    if before is None or after["state"] != before["state"]:
        # Name the version, because after an update of a model, events of its old and its new version follow each other.
        lines.append(f"{version} has failed: {after['error']}" if now == "failed" else f"{version} is {now}")
        if now == "leaving":
            lines.append(serving)
    elif now != was and now is not None:
        lines.append(now)
    if before is not None and after["residency"] != before["residency"]:
        lines.append(f"residency {after['residency']}")
    if after["paused"] != (None if before is None else before["paused"]):
        lines.append(f"paused ({after['paused']})" if after["paused"] else "not paused")
    return f"{name}: {'; '.join(lines)}" if lines else None
