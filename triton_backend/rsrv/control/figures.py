"""Figures of a server at one moment, and what its models did between two moments. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from rsrv.control.bundle_states import BundleFailure
from rsrv.control.protocols import ModelVersion
from rsrv.histogram import ROWS, SECONDS, Histogram
from rsrv.settings import Settings

Json = Mapping[str, Any]
#: Shortest window of rates, seconds.
_MIN_WINDOW_S = 0.5
#: A histogram without values, as the runtime answers.
_NO_VALUES = [0.0, 0]


@dataclass(frozen=True, slots=True)
class DeviceFigures:
    """A device, with its runtime's answer to the command `metrics` (docs/protocol.md)."""

    #: Different for every runtime; empty if none answers.
    instance: str = ""
    #: Time at which the counters began, by the clock of `ServerFigures.t`.
    since: float = 0.0
    counts: Json = field(default_factory=dict)
    #: Runtimes of the device so far, and those that an operator restarted.
    lives: int = 1
    restarts: int = 0
    #: Seconds since the last answer.
    down_s: float = 0.0
    #: Process id of a runtime that lives and does not answer; 0: there is none.
    silent_pid: int = 0
    #: Why the device serves nothing, by the latest attempt to start its runtime.
    obstacle: str = ""
    asleep: bool = False
    #: Bytes of tensors that several models have, and these models.
    shared: Sequence[tuple[int, frozenset[str]]] = ()


class ModelFacts(NamedTuple):
    """A model's bytes on a device, and the expected seconds of an execution by its size."""

    device_bytes: int
    costs: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class ServerFigures:
    """All that the findings are made of, at one moment."""

    #: Seconds of a clock that never jumps, and Unix time.
    t: float
    unix_s: float
    devices: Mapping[int, DeviceFigures]
    #: Versions of models by key, over all devices.
    entries: Mapping[str, ModelVersion]
    #: Models that are not as their bundles say.
    failures: Mapping[str, BundleFailure]
    settings: Settings
    #: Keys of the section `scheduler`, and of models, that operators have set.
    scheduler: Json = field(default_factory=dict)
    policies: Mapping[str, Json] = field(default_factory=dict)
    #: Why the present rsrv.yaml is not used, and what of it waits.
    settings_refused: str = ""
    settings_waiting: Sequence[str] = ()
    #: What is known of the models beside their counters.
    facts: Mapping[str, ModelFacts] = field(default_factory=dict)
    #: Seconds since each model that should serve does not; and the models that start with their next request.
    missing: Mapping[str, float] = field(default_factory=dict)
    #: True while Triton loads its first models, one after the other.
    starting: bool = False
    cold: frozenset[str] = frozenset()
    #: Models that Triton is told to load or unload now, and how many it loads at a time.
    loading: frozenset[str] = frozenset()
    load_threads: int = 4
    #: By model, how often its process in Triton was found dead.
    process_ends: Mapping[str, int] = field(default_factory=dict)
    #: Bytes of /dev/shm that are free, and all of its bytes; None: not known.
    shm: tuple[int, int] | None = None
    #: Spans of traces by outcome.
    spans: Mapping[str, int] = field(default_factory=dict)
    #: By model, requests that have left Triton's queue, and their seconds there; empty if Triton does not tell.
    queues: Mapping[str, tuple[int, float]] = field(default_factory=dict)

    @property
    def importing(self) -> dict[str, tuple[float, int]]:
        """The models whose model.py is being imported: the seconds so far, and the line where that is (0: elsewhere)."""
        found: dict[str, tuple[float, int]] = {}
        for device in self.devices.values():
            for name, (seconds, line) in device.counts.get("importing", {}).items():
                found[name] = max(found.get(name, (0.0, 0)), (seconds, line))
        return found

    @property
    def imports_hold_loads(self) -> bool:
        """True if loads wait for an import of model.py: such imports hold all of Triton's load threads."""
        return len(self.importing.keys() & self.loading) >= self.load_threads

    def waits_for_import(self, model: str) -> bool:
        """Return whether a model is served only when its model.py has been imported: no other stub has it ready."""
        versions = (one for one in self.entries.values() if one["name"] == model and one["state"] == "ready")
        return model in self.importing and len({pid for one in versions for pid in one["stubs"]}) < 2

    def policy(self, model: str, key: str) -> Any:
        """Return a setting of a model."""
        own = self.settings.models.get(model)
        found = None if own is None else getattr(own, key)
        return self.policies.get(model, {}).get(key, found)

    def schedule(self, key: str) -> Any:
        """Return a setting of the scheduler."""
        return self.scheduler.get(key, getattr(self.settings.scheduler, key))


class ModelActivity:
    """Figures of a model or meta model on one device; counters are of the window, the others of its end.

    Read from two answers on demand: with a thousand models, most rules look at few figures of few.
    """

    def __init__(self, name: str, before: Json, now: Json) -> None:
        """`before` and `now` are the model's parts of the answers; `before` may be empty."""
        self.name, self._before, self._now = name, before, now
        #: Requests that wait, and runs of a meta model in progress.
        self.queued: int = now["queued"]
        self.running: int = now.get("running", 0)

    def _counted(self, key: str) -> dict[str, int]:
        was = self._before.get(key, {})
        return {one: count - was.get(one, 0) for one, count in self._now.get(key, {}).items()}

    def _grown(self, key: str) -> int:
        return int(self._now.get(key, 0) - self._before.get(key, 0))

    def _measured(self, key: str, bounds: Sequence[float] = SECONDS) -> Histogram:
        return _difference(bounds, self._before.get(key), self._now.get(key, _NO_VALUES))

    @cached_property
    def requests(self) -> dict[str, int]:
        return self._counted("requests")

    @cached_property
    def ended(self) -> int:
        """Requests that ended without being cancelled."""
        return sum(self.requests.values()) - self.requests.get("cancelled", 0)

    @cached_property
    def responses(self) -> dict[str, int]:
        return self._counted("responses")

    @property
    def failure(self) -> str:
        """Why the latest answer that was a failure of the server failed; empty if the front does not tell."""
        return str(self._now.get("failure", ""))

    @cached_property
    def refused(self) -> dict[str, int]:
        return self._counted("refused")

    @cached_property
    def missed(self) -> dict[str, int]:
        """Missed deadlines by stage."""
        return self._counted("missed")

    @cached_property
    def evictions(self) -> dict[str, int]:
        return self._counted("evictions")

    @cached_property
    def device_s(self) -> float:
        return float(self._now["device_seconds"] - self._before.get("device_seconds", 0.0))

    @property
    def misses(self) -> int:
        return self._grown("misses")

    @property
    def executions(self) -> int:
        return self._grown("executions")

    @property
    def rows(self) -> int:
        return self._grown("rows")

    @property
    def padding(self) -> int:
        was = self._before.get("batch_padding", _NO_VALUES)
        return int(self._now.get("batch_padding", _NO_VALUES)[0] - was[0])

    @property
    def loads(self) -> int:
        now, before = (said.get("load", _NO_VALUES) for said in (self._now, self._before))
        return int(sum(now[2:]) - sum(before[2:]))

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights, as far as they are on the host or the device."""
        return int(max(self._now.get("host_bytes", 0), self._now.get("device_bytes", 0)))

    @property
    def has_host_copy(self) -> bool:
        return bool(self._now.get("host_bytes", 0))

    @cached_property
    def queue_wait(self) -> Histogram:
        return self._measured("queue_wait")

    @cached_property
    def execute(self) -> Histogram:
        return self._measured("execute")

    @cached_property
    def load(self) -> Histogram:
        return self._measured("load")

    @cached_property
    def request(self) -> Histogram:
        return self._measured("request")

    @cached_property
    def batch_rows(self) -> Histogram:
        return self._measured("batch_rows", ROWS)

    def hook_seconds(self, *hooks: str) -> float:
        """Return the seconds in these functions of model.py."""
        before, now = (said.get("hooks", {}) for said in (self._before, self._now))
        return float(sum(now.get(hook, _NO_VALUES)[0] - before.get(hook, _NO_VALUES)[0] for hook in hooks))


@dataclass(frozen=True, slots=True)
class DeviceWindow:
    """Figures of one device between two moments, as far as its runtime lived."""

    number: int
    seconds: float
    counts: Json
    #: Those that did something or have requests that wait, by name.
    models: Mapping[str, ModelActivity]
    metas: Mapping[str, ModelActivity]
    #: Share of the time in which it executed, and the model that took most of it.
    busy: float
    busiest: ModelActivity | None


def windows(before: ServerFigures, now: ServerFigures) -> list[DeviceWindow]:
    """Return the windows of the devices whose runtimes answer; a runtime that is younger than `before` has less of it."""
    found = []
    for number, device in now.devices.items():
        old = before.devices.get(number)
        same = old is not None and old.instance == device.instance
        began = before.t if same else max(before.t, device.since)
        seconds = max(_MIN_WINDOW_S, now.t - began)
        if not device.instance:
            continue
        was: Json = old.counts if same and old is not None else {}
        models, metas = (_activities(was.get(kind, {}), device.counts[kind]) for kind in ("models", "metas"))
        # A meta model's seconds are those of its calls, which count for the called models.
        busy = min(1.0, sum(one.device_s for one in models.values()) / seconds)
        busiest = max(models.values(), key=lambda one: one.device_s, default=None)
        found.append(DeviceWindow(number, seconds, device.counts, models, metas, busy, busiest))
    return found


def _activities(before: Json, now: Json) -> dict[str, ModelActivity]:
    found = {}
    for name, said in now.items():
        was = before.get(name, {})
        # With a thousand models, most did nothing, and the comparison is cheap.
        if said != was or said["queued"]:
            found[name] = ModelActivity(name, was if _grows(was, said) else {}, said)
    return found


def _grows(before: Json, now: Json) -> bool:
    """Return False if the model was removed and added again between the answers, so that its counters began again."""
    return not before or all(now["requests"].get(how, 0) >= n for how, n in before["requests"].items())


def _difference(bounds: Sequence[float], before: Any, now: Any) -> Histogram:
    found = Histogram.from_json(bounds, now)
    return found if before is None else found.since(Histogram.from_json(bounds, before))


# --- arithmetic -------------------------------------------------------------------------------------------


def best_size(one: ModelActivity, facts: ModelFacts | None) -> tuple[int | None, float]:
    """Return the power of two that saves most as a further batch size, and the share of the device time that it saves.

    Executions have the rows of their interval's upper bound. Without known costs, the share is 0.
    """
    rows = [(int(bound), count) for bound, count in zip(ROWS, one.batch_rows.counts, strict=False) if count]
    costs = {} if facts is None else facts.costs
    if not costs:
        average, compiled = one.rows / one.executions, (one.rows + one.padding) / one.executions
        size = next((int(bound) for bound in ROWS if bound >= average), None)
        return (size if size is not None and size < compiled else None), 0.0

    def total(sizes: dict[int, float]) -> float:
        """Return the device seconds of all executions with these sizes."""
        largest = max(sizes)
        return sum(n * sizes[min((s for s in sizes if s >= least), default=largest)] for least, n in rows)

    now = total(dict(costs))
    candidates = {int(bound) for bound in ROWS if bound < max(costs)} - costs.keys()
    with_one = {size: total({**costs, size: _interpolated(costs, size)}) for size in candidates}
    best = min(with_one, key=lambda size: (with_one[size], size), default=None)
    if best is None or not now or with_one[best] > 0.9 * now:
        return None, 0.0
    return best, 1 - with_one[best] / now


def _interpolated(costs: Mapping[int, float], size: int) -> float:
    """Return the expected seconds of a size that is not compiled: on the line between its neighbours, or to no cost at 0."""
    above = min(one for one in costs if one > size)
    below = max((one for one in costs if one < size), default=0)
    low = costs.get(below, 0.0)
    return low + (costs[above] - low) * (size - below) / (above - below)


def mean(histogram: Histogram) -> float:
    count = sum(histogram.counts)
    return histogram.sum / count if count else 0.0


def merged(bounds: tuple[float, ...], several: Iterable[Histogram]) -> Histogram:
    total = Histogram(bounds)
    for one in several:
        total.add(one)
    return total
