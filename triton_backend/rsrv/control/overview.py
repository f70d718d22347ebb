"""The live page's picture of a server, made of the runtime's figures and the models' states once a second. Pure."""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from rsrv.control.protocols import ModelVersion
from rsrv.histogram import SECONDS, Histogram

#: Seconds of the 99th percentile.
_WINDOW_S = 10.0
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
    request: Histogram


#: Figures of a model that is not built yet.
_NONE = _Figures(0, 0, None, 0, 0, 0.0, 0, 0.0, 0, Histogram(SECONDS))


class Overview:
    """The picture of a server; keeps the latest figures for those of the last seconds."""

    def __init__(self) -> None:
        self._latest: deque[tuple[float, dict[str, Histogram]]] = deque()

    def take(
        self,
        figures: Mapping[int, Mapping[str, Any]],
        entries: Mapping[str, ModelVersion],
        failures: Mapping[str, str],
        now: float,
    ) -> dict[str, Any]:
        """Return the picture of the models as JSON, in bytes and seconds.

        `figures`: by device, the answers to the command `overview` (docs/protocol.md); `entries`: those of all devices;
        `failures`: the reasons why models are not as their bundles say; `now`: seconds.
        """
        known = _sum(figures.values())
        requests = {name: model.request for name, model in known.items()}
        self._latest.append((now, requests))
        while now - self._latest[0][0] > _WINDOW_S and len(self._latest) > 2:
            self._latest.popleft()
        before = self._latest[0][1]
        return {
            "models": [
                {
                    **_state(entry),
                    **_shown(known.get(name, _NONE)),
                    "p99_s": _p99(requests.get(name), before.get(name)),
                    "error": failures.get(name) or entry["error"],
                }
                for name, entry in served(entries.values()).items()
            ],
        }


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


def _sum(figures: Iterable[Mapping[str, Any]]) -> dict[str, _Figures]:
    """Return the figures of each model over all devices."""
    found: dict[str, _Figures] = {}
    for one in figures:
        for name, said in one["models"].items():
            model = _Figures(*said)
            model = model._replace(request=Histogram.from_json(SECONDS, said[-1]))
            found[name] = model if name not in found else _add(found[name], model)
    return found


def _add(one: _Figures, other: _Figures) -> _Figures:
    one.request.add(other.request)
    return _Figures(
        queued=one.queued + other.queued,
        executing=one.executing + other.executing,
        bytes=None if one.bytes is None or other.bytes is None else max(one.bytes, other.bytes),
        requests=one.requests + other.requests,
        errors=one.errors + other.errors,
        device_s=one.device_s + other.device_s,
        loads=one.loads + other.loads,
        load_s=one.load_s + other.load_s,
        tokens=one.tokens + other.tokens,
        request=one.request,
    )


def served(entries: Iterable[ModelVersion]) -> dict[str, ModelVersion]:
    """Return one version of each name."""
    ranked = sorted(entries, key=lambda entry: (entry["name"], -_RANK[entry["state"]]))
    return {entry["name"]: entry for entry in ranked}


def _state(entry: ModelVersion) -> dict[str, Any]:
    kept = {key: entry[key] for key in ("name", "kind", "state", "residency", "paused")}
    return {**kept, "weights": life(entry["state"], entry["weights"] or "")}


def life(state: str, weights: str, step: str = "") -> str:
    """Return where a model is, in the words of docs/large-catalogue.md.

    Args:
        state: of its version.
        weights: their state; empty of a meta model.
        step: what its start waits for, if that is known.
    """
    if state == "loading":
        return f"starting, {step}" if step else "starting"
    if state != "ready" or not weights:
        return state
    if weights in ("resident", "reserved", "evicting"):
        return "resident"
    return "warm" if weights == "absent" else f"warm, weights {weights}"


def _shown(model: _Figures) -> dict[str, Any]:
    """Return the figures that the page shows; counters begin with the runtime."""
    shown = model._asdict()
    del shown["request"]
    return {**shown, "load_s": model.load_s / model.loads if model.loads else None}


def _p99(now: Histogram | None, before: Histogram | None) -> float | None:
    """Return the 99th percentile of the requests between two looks."""
    if now is None:
        return None
    latest = Histogram(SECONDS)
    latest.add(now)
    if before is not None and before is not now:
        latest.subtract(before)
    return latest.quantile(0.99)


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
