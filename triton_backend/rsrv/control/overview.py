"""The live page's picture of a server, made of the runtime's figures and the models' states once a second. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

from rsrv.control.protocols import ModelVersion
from rsrv.control.sentences import life
from rsrv.histogram import SECONDS, Histogram

#: Seconds of the 99th percentile.
_WINDOW_S = 10.0
#: Figures that are summed over the devices.
_SUMS = ("queued", "executing", "requests", "errors", "device_s", "loads", "load_s", "tokens", "misses")
_counters = attrgetter(*_SUMS)
#: Precedence among the versions of one name: the one that is served, else the one to be served next.
_RANK = {"ready": 0, "loading": 1, "failed": 2, "leaving": 3}


class _Figures(NamedTuple):
    """Figures of a model or meta model, in the order of the runtime's answer."""

    queued: int
    executing: int
    bytes: int | None
    requests: int
    errors: int
    device_s: float
    loads: int
    load_s: float
    #: of answers
    tokens: int
    #: Requests that had to wait for weights.
    misses: int
    request: Histogram


#: Figures of a model that is not built yet.
_NONE = _Figures(0, 0, None, 0, 0, 0.0, 0, 0.0, 0, 0, Histogram(SECONDS))


@dataclass(slots=True)
class Work:
    """Work of all models of a server between two looks."""

    requests: int = 0
    errors: int = 0
    misses: int = 0
    device_s: float = 0.0
    request: Histogram = field(default_factory=lambda: Histogram(SECONDS))

    def add(self, other: Work) -> None:
        self.requests += other.requests
        self.errors += other.errors
        self.misses += other.misses
        self.device_s += other.device_s
        self.request.add(other.request)

    def count(self, before: _Figures | None, now: _Figures) -> None:
        """Add a model's work since `before`; counters that began again count from 0."""
        if before is None or now.requests < before.requests or now.device_s < before.device_s:
            before = _NONE
        self.requests += now.requests - before.requests
        self.errors += max(0, now.errors - before.errors)
        self.misses += max(0, now.misses - before.misses)
        if now.bytes is not None:  # a meta model's seconds are those of its calls
            self.device_s += now.device_s - before.device_s
            self.request.add(now.request.since(before.request))


class _Shown:
    """A model as it was shown last, and the histograms of its requests within the window."""

    __slots__ = ("figures", "json", "looks", "said", "source")

    def __init__(self) -> None:
        #: By device, the runtime's answer, and its figures.
        self.said: dict[int, Any] = {}
        self.figures: dict[int, _Figures] = {}
        #: When the histogram changed, and to what; the first one is that of the window's begin.
        self.looks: deque[tuple[float, Histogram]] = deque()
        self.source: Any = None
        self.json: dict[str, Any] = {}


class Overview:
    """The picture of a server, made again only of models that changed; `work`: what they did since the look before."""

    def __init__(self) -> None:
        self._shown: dict[str, _Shown] = {}
        self._began = False
        self.work = Work()

    def take(
        self,
        figures: Mapping[int, Mapping[str, Any]],
        entries: Mapping[str, ModelVersion],
        failures: Mapping[str, str],
        on: Mapping[str, Sequence[int]],
        now: float,
    ) -> dict[str, dict[str, Any]]:
        """Return the picture of each model as JSON, in bytes and seconds; that of an unchanged one is the same object.

        Args:
            figures: by device, the answers to the command `overview` (docs/protocol.md).
            entries: those of all devices.
            failures: the reasons why models are not as their bundles say.
            on: the devices that hold the weights, by model.
            now: seconds.
        """
        self.work, found = Work(), {}
        known = [(number, said["models"]) for number, said in figures.items()]
        starting = {name: step for said in figures.values() for name, step in said["starting"].items()}
        for name, entry in served(entries.values()).items():
            one = self._shown.get(name) or _Shown()
            said = {number: models[name] for number, models in known if name in models}
            changed = self._read(one, said, now)
            while len(one.looks) > 1 and one.looks[1][0] <= now - _WINDOW_S:
                one.looks.popleft()
            # The percentile of an idle model leaves with the window.
            changed |= len(one.looks) == 1 and one.json.get("p99_s") is not None
            source = (entry, failures.get(name), on.get(name), starting.get(name), list(said))
            if changed or source != one.source:
                one.source = source
                one.json = {
                    **_state(entry, starting.get(name, "")),
                    **_picture([one.figures[number] for number in said]),
                    "p99_s": _p99(one.looks, now),
                    "error": failures.get(name) or entry["error"],
                    "on": on.get(name, []),
                }
            found[name] = one
        self._shown, self._began = found, True
        return {name: one.json for name, one in found.items()}

    def latency(self, model: str) -> list[tuple[float | None, int]]:
        """Return the requests of a model by the upper bound of their seconds, from the first interval that has any on."""
        one = self._shown.get(model)
        counts = one.looks[-1][1].counts if one is not None and one.looks else []
        there = [at for at, count in enumerate(counts) if count]
        pairs = list(zip((*SECONDS, None), counts, strict=bool(counts)))
        return pairs[there[0] : there[-1] + 1] if there else []

    def _read(self, one: _Shown, said: Mapping[int, Any], now: float) -> bool:
        """Take over a model's figures on all devices; return True if any changed."""
        if one.looks and one.looks[-1][0] > now:
            one.looks.clear()  # the clock was set back
        changed = [number for number, there in said.items() if there != one.said.get(number)]
        for number in changed:
            figures = _Figures(*said[number])
            figures = figures._replace(request=Histogram.from_json(SECONDS, said[number][-1]))
            if self._began:
                self.work.count(one.figures.get(number), figures)
            one.said[number], one.figures[number] = said[number], figures
        if changed or not one.looks:
            several = [figures.request for figures in one.figures.values()]
            total = several[0] if len(several) == 1 else Histogram(SECONDS)
            for other in several if len(several) > 1 else ():
                total.add(other)
            one.looks.append((now, total))
        return bool(changed)


def device_picture(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return the picture of a device as JSON; `device_s`: seconds that its executions took so far."""
    memory = figures["memory"]
    return {
        **{
            kind: memory["device"][f"{kind}_bytes"]
            for kind in ("limit", "budget", "pinned", "logical", "physical", "held")
        },
        "host": memory["host"]["physical_bytes"],
        # A meta model's seconds are those of its calls, which count for the called models.
        "device_s": sum(
            model.device_s
            for model in (_Figures(*said) for said in figures["models"].values())
            if model.bytes is not None
        ),
    }


def memory_picture(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return, as JSON, bytes on a device that each model has alone, by name, and those of shared tensors with their models."""
    return {
        "scratch": said["memory"]["scratch_bytes"],
        "models": {name: one["own_bytes"] + one["state_bytes"] for name, one in said["models"].items()},
        "groups": [[group["bytes"], group["models"]] for group in said["groups"]],
    }


def served(entries: Iterable[ModelVersion]) -> dict[str, ModelVersion]:
    """Return one version of each name."""
    found: dict[str, ModelVersion] = {}
    for entry in entries:
        other = found.get(entry["name"])
        if other is None or _RANK[entry["state"]] <= _RANK[other["state"]]:
            found[entry["name"]] = entry
    return found


def _state(entry: ModelVersion, step: str) -> dict[str, Any]:
    kept = {key: entry[key] for key in ("name", "kind", "state", "residency", "paused")}
    return {**kept, "weights": life(entry["state"], entry["weights"] or "", step)}


def _picture(devices: Collection[_Figures]) -> dict[str, Any]:
    """Return the figures that the page shows, over all devices; counters begin with the runtime."""
    total = dict(zip(_SUMS, map(sum, zip(*map(_counters, devices or (_NONE,)), strict=True)), strict=True))
    load_s = total["load_s"] / total["loads"] if total["loads"] else None
    sizes = [one.bytes for one in devices if one.bytes is not None]
    return {**total, "load_s": load_s, "bytes": max(sizes, default=None)}


def _p99(looks: Sequence[tuple[float, Histogram]], now: float) -> float | None:
    """Return the 99th percentile of the requests of the window; at the first look, of all so far."""
    latest = looks[-1][1]
    if len(looks) == 1:
        return latest.quantile(0.99) if looks[0][0] == now else None
    return latest.since(looks[0][1]).quantile(0.99)


def describe(before: ModelVersion | None, after: ModelVersion | None) -> str | None:
    """Return the change of a version as a line of the event log; None if it is of no interest."""
    if after is None:
        return None if before is None else f"{before['name']}: gone"
    said = []
    old: Mapping[str, Any] = before or {}
    now = life(after["state"], after["weights"] or "")
    if before is None or now != life(before["state"], before["weights"] or ""):
        said.append(f"failed: {after['error']}" if after["state"] == "failed" else now)
    if before is not None and after["residency"] != before["residency"]:
        said.append(f"residency {after['residency']}")
    if after["paused"] != old.get("paused"):
        said.append(f"paused ({after['paused']})" if after["paused"] else "not paused")
    return f"{after['name']}: {', '.join(said)}" if said else None
