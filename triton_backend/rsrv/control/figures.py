"""Figures of a server at one moment, and what its models did between two moments. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from rsrv.control.bundle_states import BundleFailure
from rsrv.control.protocols import ModelVersion
from rsrv.histogram import ROWS, SECONDS, Histogram
from rsrv.settings import Settings

Json = Mapping[str, Any]
#: Shortest window of rates, seconds.
_MIN_WINDOW_S = 0.5


@dataclass(frozen=True, slots=True)
class DeviceFigures:
    """A device, with its runtime's answer to the command `metrics` (docs/protocol.md)."""

    #: Different for every runtime; empty if none answers.
    instance: str = ""
    #: Time at which the counters began, by the clock of `ServerFigures.t`.
    since: float = 0.0
    counts: Json = field(default_factory=dict)
    #: Runtimes of the device so far.
    lives: int = 1
    #: Seconds since the last answer.
    down_s: float = 0.0
    #: Why the device serves nothing, by the latest attempt to start its runtime.
    obstacle: str = ""
    asleep: bool = False


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
    #: Models that should serve and do not, by readiness.
    missing: frozenset[str] = frozenset()
    #: Bytes of /dev/shm that are free, and all of its bytes; None: not known.
    shm: tuple[int, int] | None = None
    #: Spans of traces by outcome.
    spans: Mapping[str, int] = field(default_factory=dict)

    def policy(self, model: str, key: str) -> Any:
        """Return a setting of a model."""
        own = self.settings.models.get(model)
        found = None if own is None else getattr(own, key)
        return self.policies.get(model, {}).get(key, found)

    def schedule(self, key: str) -> Any:
        """Return a setting of the scheduler."""
        return self.scheduler.get(key, getattr(self.settings.scheduler, key))


@dataclass(slots=True)
class ModelActivity:
    """Figures of a model or meta model on one device; counters are of the window, the others of its end."""

    name: str
    queued: int
    requests: dict[str, int]
    responses: dict[str, int]
    refused: dict[str, int]
    missed: dict[str, int]
    device_s: float
    request: Histogram
    hooks: dict[str, Histogram]
    #: Runs of a meta model in progress.
    running: int = 0
    resident: bool = False
    host_bytes: int = 0
    device_bytes: int = 0
    executions: int = 0
    rows: int = 0
    padding: int = 0
    misses: int = 0
    evictions: dict[str, int] = field(default_factory=dict)
    queue_wait: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    execute: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    load: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    batch_rows: Histogram = field(default_factory=lambda: Histogram(ROWS))

    @property
    def ended(self) -> int:
        """Requests that ended without being cancelled."""
        return sum(self.requests.values()) - self.requests.get("cancelled", 0)

    @property
    def loads(self) -> int:
        return sum(self.load.counts)

    @classmethod
    def between(cls, name: str, before: Json, now: Json) -> Self:
        """Return the figures of a window; `before` and `now` are a model's parts of two answers, `before` may be empty."""

        def counted(key: str) -> dict[str, int]:
            was = before.get(key, {})
            return {one: count - was.get(one, 0) for one, count in now[key].items()}

        def measured(key: str) -> Histogram:
            return _difference(SECONDS, before.get(key), now[key])

        hooks = before.get("hooks", {})
        found = cls(
            name=name,
            queued=now["queued"],
            requests=counted("requests"),
            responses=counted("responses"),
            refused=counted("refused"),
            missed=counted("missed"),
            device_s=now["device_seconds"] - before.get("device_seconds", 0.0),
            request=measured("request"),
            hooks={hook: _difference(SECONDS, hooks.get(hook), said) for hook, said in now["hooks"].items()},
            running=now.get("running", 0),
        )
        if "executions" in now:
            found.resident = now["resident"]
            found.host_bytes, found.device_bytes = now["host_bytes"], now["device_bytes"]
            found.executions = now["executions"] - before.get("executions", 0)
            found.rows = now["rows"] - before.get("rows", 0)
            found.padding = round(now["batch_padding"][0] - before.get("batch_padding", [0])[0])
            found.misses = now["misses"] - before.get("misses", 0)
            found.evictions = counted("evictions")
            found.queue_wait, found.execute = measured("queue_wait"), measured("execute")
            found.load = measured("load")
            found.batch_rows = _difference(ROWS, before.get("batch_rows"), now["batch_rows"])
        return found


@dataclass(frozen=True, slots=True)
class DeviceWindow:
    """Figures of one device between two moments, as far as its runtime lived."""

    number: int
    seconds: float
    counts: Json
    #: Those that did something or have requests that wait, by name.
    models: Mapping[str, ModelActivity]
    metas: Mapping[str, ModelActivity]
    #: Share of the time in which it executed.
    busy: float


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
        found.append(DeviceWindow(number, seconds, device.counts, models, metas, busy))
    return found


def _activities(before: Json, now: Json) -> dict[str, ModelActivity]:
    found = {}
    for name, said in now.items():
        was = before.get(name, {})
        # With a thousand models, most did nothing, and the comparison is cheap.
        if said != was or said["queued"]:
            found[name] = ModelActivity.between(name, was if _grows(was, said) else {}, said)
    return found


def _grows(before: Json, now: Json) -> bool:
    """Return False if the model was removed and added again between the answers, so that its counters began again."""
    return not before or all(now["requests"].get(how, 0) >= n for how, n in before["requests"].items())


def _difference(bounds: Sequence[float], before: Any, now: Any) -> Histogram:
    found = Histogram.from_json(bounds, now)
    if before is not None:
        found.subtract(Histogram.from_json(bounds, before))
    return found


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
