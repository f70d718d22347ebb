"""Figures of a server at one moment, and what its models did between two moments. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from rsrv.control.bundle_states import BundleFailure
from rsrv.control.records import RuntimeRecords
from rsrv.control.runtime_state import ModelVersion
from rsrv.control.shm_usage import ShmUsage
from rsrv.control.v1 import control_pb2 as pb
from rsrv.histogram import ROWS, SECONDS, Histogram
from rsrv.renewal import FileState
from rsrv.settings import Settings

Json = Mapping[str, Any]
#: Shortest time over which rates are computed, in seconds.
_MIN_WINDOW_S = 0.5
_NO_RECORD = pb.ModelRecord()


@dataclass(frozen=True, slots=True)
class DeviceFigures:
    """A device, with the records of its runtime."""

    #: Identifies the runtime. Empty: the device's runtime does not answer.
    instance: str = ""
    #: Time at which the counters began, by the clock of `ServerFigures.t`.
    since: float = 0.0
    records: RuntimeRecords = field(default_factory=RuntimeRecords)
    #: Number of runtimes that the device has had.
    lives: int = 1
    #: Number of times that an operator has restarted the runtime.
    restarts: int = 0
    #: Seconds for which the runtime has not answered.
    down_s: float = 0.0
    #: Process id of a runtime that accepts connections but does not answer. 0: there is none.
    silent_pid: int = 0
    #: Reason why the latest attempt to start the runtime failed.
    obstacle: str = ""
    asleep: bool = False


@dataclass(frozen=True, slots=True)
class ServerFigures:
    """All figures that the findings use, at one moment."""

    #: Seconds of a monotonic clock.
    t: float
    #: Unix time.
    unix_s: float
    devices: Mapping[int, DeviceFigures]
    #: Versions of models by key, over all devices.
    entries: Mapping[str, ModelVersion]
    #: Reasons why models differ from their bundles, by model.
    failures: Mapping[str, BundleFailure]
    settings: Settings
    #: Keys of the section `scheduler` that operators have set.
    scheduler: Json = field(default_factory=dict)
    #: Keys of the sections of models that operators have set, by model.
    policies: Mapping[str, Json] = field(default_factory=dict)
    #: Why the current rsrv.yaml is not used.
    settings_refused: str = ""
    #: Changes of rsrv.yaml that do not apply yet, each with the command that applies it.
    settings_waiting: Sequence[str] = ()
    #: Why the port of OpenAI's endpoints is closed although a model has a task. Empty if the port is open or not needed.
    openai_closed: str = ""
    #: For each model that should serve and does not, the seconds since the diagnosis first saw this.
    missing: Mapping[str, float] = field(default_factory=dict)
    #: True until Triton has loaded its first models.
    starting: bool = False
    #: Models that start with their next request.
    cold: frozenset[str] = frozenset()
    #: Models that Triton is loading or unloading now.
    loading: frozenset[str] = frozenset()
    #: Number of models that Triton loads concurrently.
    load_threads: int = 4
    #: Reason why no model can be loaded or unloaded, with the remedy. Empty if there is none.
    barred: str = ""
    #: Number of times that a model's process in Triton was found dead, by model.
    process_ends: Mapping[str, int] = field(default_factory=dict)
    #: Use of the shared memory. None: there is no /dev/shm.
    shm: ShmUsage | None = None
    #: Spans of traces by outcome.
    spans: Mapping[str, int] = field(default_factory=dict)
    #: Files with certificates and tokens.
    renewals: Sequence[FileState] = ()
    #: For each model, the number of requests that have left Triton's queue, and the seconds that they spent there. Empty if
    #: Triton does not report this.
    queues: Mapping[str, tuple[int, float]] = field(default_factory=dict)

    @property
    def importing(self) -> dict[str, tuple[float, int]]:
        """For models whose model.py is being imported: the seconds so far, and the line that executes (0: another file)."""
        imports: dict[str, tuple[float, int]] = {}
        for device in self.devices.values():
            for name, started in device.records.device.importing.items():
                imports[name] = max(imports.get(name, (0.0, 0)), (started.seconds, started.line))
        return imports

    @property
    def imports_hold_loads(self) -> bool:
        """True if loads wait, because imports of model.py occupy all of Triton's load threads."""
        return len(self.importing.keys() & self.loading) >= self.load_threads

    def waits_for_import(self, model: str) -> bool:
        """Return True if the model cannot serve until the import of its model.py ends, because the model has no other stub."""
        versions = (
            entry for entry in self.entries.values() if entry["name"] == model and entry["state"] == "ready"
        )
        return model in self.importing and len({pid for entry in versions for pid in entry["stubs"]}) < 2

    def policy(self, model: str, key: str) -> Any:
        """Return a setting of a model."""
        own = self.settings.models.get(model)
        default = None if own is None else getattr(own, key)
        return self.policies.get(model, {}).get(key, default)

    def schedule(self, key: str) -> Any:
        """Return a setting of the scheduler."""
        return self.scheduler.get(key, getattr(self.settings.scheduler, key))


class ModelActivity:
    """The activity of a model or meta model on one device between two records.

    Figures are computed on demand, because with a thousand models, rules need only a few figures of a few models.
    """

    def __init__(self, before: pb.ModelRecord, now: pb.ModelRecord) -> None:
        """`before` and `now` are the two records. `before` may be empty."""
        self.name, self._before, self.now = now.name, before, now

    def grown(self, figure: str) -> int:
        """Return by how much a counter has grown."""
        return int(getattr(self.now, figure) - getattr(self._before, figure))

    def counted(self, figure: str) -> dict[str, int]:
        """Return by how much each counter in a map of counters has grown."""
        was = getattr(self._before, figure)
        return {key: count - was.get(key, 0) for key, count in getattr(self.now, figure).items()}

    def measured(self, figure: str, bounds: Sequence[float] = SECONDS) -> Histogram:
        """Return the values that were added to a histogram."""
        before, now = (Histogram.of(bounds, getattr(record, figure)) for record in (self._before, self.now))
        return now.since(before)

    @cached_property
    def outcomes(self) -> dict[str, int]:
        return self.counted("outcomes")

    @cached_property
    def ended(self) -> int:
        """Number of requests that ended without being cancelled."""
        return sum(self.outcomes.values()) - self.outcomes.get("cancelled", 0)

    @cached_property
    def responses(self) -> dict[str, int]:
        return self.counted("responses")

    @cached_property
    def refused(self) -> dict[str, int]:
        return self.counted("refused")

    @cached_property
    def device_s(self) -> float:
        return self.now.device_seconds - self._before.device_seconds

    @property
    def dispatches(self) -> int:
        return self.grown("dispatches")

    @property
    def rows(self) -> int:
        return self.grown("useful_rows")

    @property
    def padding(self) -> int:
        return self.grown("padded_rows")

    @cached_property
    def queue_wait(self) -> Histogram:
        return self.measured("queue_wait")

    @cached_property
    def execute(self) -> Histogram:
        return self.measured("execute")

    @cached_property
    def costs(self) -> dict[int, float]:
        """Expected seconds of an execution by its batch size, for the variant that was executed most."""
        counts: dict[int, int] = {}
        for executable in self.now.executables:
            counts[executable.variant] = counts.get(executable.variant, 0) + executable.count
        most = max(counts, key=lambda variant: counts[variant], default=0)
        return {
            executable.size: executable.cost_s
            for executable in self.now.executables
            if executable.variant == most
        }

    def hook_seconds(self, *hooks: str) -> float:
        """Return the seconds that these functions of model.py took."""
        before, now = (
            sum(float(record.hooks[hook].sum) for hook in hooks if hook in record.hooks)
            for record in (self._before, self.now)
        )
        return now - before


@dataclass(frozen=True, slots=True)
class DeviceWindow:
    """Figures of one device in the time between two snapshots (the window), or since its runtime began."""

    number: int
    seconds: float
    records: RuntimeRecords
    #: Models that were active, or that have waiting requests, by name.
    models: Mapping[str, ModelActivity]
    metas: Mapping[str, ModelActivity]
    #: Share of the time in which the device executed.
    busy: float
    #: The model that executed for the longest time.
    busiest: ModelActivity | None


def windows(before: ServerFigures, now: ServerFigures) -> list[DeviceWindow]:
    """Return the windows of the devices whose runtimes answer. The window of a runtime that began after `before` is shorter."""
    windows = []
    for number, device in now.devices.items():
        old = before.devices.get(number)
        same = old is not None and old.instance == device.instance
        began = before.t if same else max(before.t, device.since)
        seconds = max(_MIN_WINDOW_S, now.t - began)
        if not device.instance:
            continue
        was = old.records.models if same and old is not None else {}
        active = _activities(was, device.records.models)
        metas = {name: activity for name, activity in active.items() if activity.now.meta}
        models = {name: activity for name, activity in active.items() if not activity.now.meta}
        # Leave out meta models, because the seconds of their calls are already in the seconds of the called models.
        busy = min(1.0, sum(activity.device_s for activity in models.values()) / seconds)
        busiest = max(models.values(), key=lambda activity: activity.device_s, default=None)
        windows.append(DeviceWindow(number, seconds, device.records, models, metas, busy, busiest))
    return windows


def _activities(
    before: Mapping[str, pb.ModelRecord], now: Mapping[str, pb.ModelRecord]
) -> dict[str, ModelActivity]:
    activities = {}
    for name, record in now.items():
        was = before.get(name, _NO_RECORD)
        # Skip idle models, whose records have not changed. With a thousand models, most models are idle.
        if record is not was or record.queued:
            activities[name] = ModelActivity(was if _grows(was, record) else _NO_RECORD, record)
    return activities


def _grows(before: pb.ModelRecord, now: pb.ModelRecord) -> bool:
    """Return False if the model was removed and added again between the records, so that its counters began again."""
    return all(now.outcomes.get(how, 0) >= n for how, n in before.outcomes.items())


# --- arithmetic -------------------------------------------------------------------------------------------


def best_size(activity: ModelActivity) -> tuple[int | None, float]:
    """Return the additional batch size that would save most device time, and the share of the device time that it would save.

    The size is a power of two, or None if no size saves enough. Without known costs, the share is 0. The histogram of rows has
    intervals. Each execution is assumed to have as many rows as the upper bound of its interval.
    """
    rows = [
        (int(bound), count)
        for bound, count in zip(ROWS, activity.measured("batch_rows", ROWS).counts, strict=False)
        if count
    ]
    costs = activity.costs
    if not costs:
        average, compiled = (
            activity.rows / activity.dispatches,
            (activity.rows + activity.padding) / activity.dispatches,
        )
        size = next((int(bound) for bound in ROWS if bound >= average), None)
        return (size if size is not None and size < compiled else None), 0.0

    def total(sizes: dict[int, float]) -> float:
        """Return the device seconds of all executions with these sizes."""
        largest = max(sizes)
        return sum(n * sizes[min((s for s in sizes if s >= least), default=largest)] for least, n in rows)

    now = total(costs)
    candidates = {int(bound) for bound in ROWS if bound < max(costs)} - costs.keys()
    with_one = {size: total({**costs, size: _interpolated(costs, size)}) for size in candidates}
    best = min(with_one, key=lambda size: (with_one[size], size), default=None)
    if best is None or not now or with_one[best] > 0.9 * now:
        return None, 0.0
    return best, 1 - with_one[best] / now


def _interpolated(costs: Mapping[int, float], size: int) -> float:
    """Return the expected seconds of a batch size that is not compiled.

    The seconds are interpolated between the next smaller and larger compiled sizes. A batch of size 0 takes no time.
    """
    above = min(known_size for known_size in costs if known_size > size)
    below = max((known_size for known_size in costs if known_size < size), default=0)
    low = costs.get(below, 0.0)
    return low + (costs[above] - low) * (size - below) / (above - below)


def budget_of(window: DeviceWindow) -> int | None:
    """Return the number of bytes of the device that weights may take. None: there is no limit."""
    memory = window.records.device.memory
    return memory.budget_bytes if memory.HasField("budget_bytes") else None


def mean(histogram: Histogram) -> float:
    count = sum(histogram.counts)
    return histogram.sum / count if count else 0.0


def merged(bounds: tuple[float, ...], several: Iterable[Histogram]) -> Histogram:
    total = Histogram(bounds)
    for histogram in several:
        total.add(histogram)
    return total
