"""What the live page shows of a server, once a second: made of the runtime's figures and the models' states. Pure."""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from rsrv.control.protocols import ModelVersion
from rsrv.histogram import SECONDS, Histogram

#: seconds over which the 99th percentile is taken
_WINDOW = 10.0
#: among several versions under one name the one that is shown: what is served, else what is about to be
_RANK = {"ready": 0, "loading": 1, "failed": 2, "leaving": 3}


class _Figures(NamedTuple):
    """Of a model or meta model, in the order of the runtime's answer."""

    queued: int
    executing: int
    bytes: int | None
    requests: int
    errors: int
    device_s: float
    loads: int
    load_s: float
    request: list[float]


#: of one that is not built yet
_NONE = _Figures(0, 0, None, 0, 0, 0.0, 0, 0.0, [])


class Overview:
    """Remembers the latest figures, for what is said of the last seconds."""

    def __init__(self) -> None:
        self._latest: deque[tuple[float, dict[str, Histogram]]] = deque()

    def take(
        self,
        figures: Mapping[str, Any],
        entries: Mapping[str, ModelVersion],
        failures: Mapping[str, str],
        now: float,
    ) -> dict[str, Any]:
        """`figures`: the answer to the command `overview` (docs/protocol.md); `failures`: why models are not as their
        bundles say; `now`: seconds. What comes of it is JSON, with bytes and seconds.
        """
        known = {name: _Figures(*said) for name, said in figures["models"].items()}
        requests = {name: Histogram.from_json(SECONDS, model.request) for name, model in known.items()}
        self._latest.append((now, requests))
        while now - self._latest[0][0] > _WINDOW and len(self._latest) > 2:
            self._latest.popleft()
        before = self._latest[0][1]
        memory = figures["memory"]
        return {
            "device": {
                kind: memory["device"][f"{kind}_bytes"]
                for kind in ("limit", "budget", "pinned", "logical", "physical", "held")
            },
            "host": {kind: memory["host"][f"{kind}_bytes"] for kind in ("logical", "physical")},
            "models": [
                {
                    **_state(entry),
                    **_shown(known.get(name, _NONE)),
                    "p99_s": _p99(requests.get(name), before.get(name)),
                    "error": failures.get(name) or entry["error"],
                }
                for name, entry in _served(entries.values()).items()
            ],
        }


def _served(entries: Iterable[ModelVersion]) -> dict[str, ModelVersion]:
    """By name, one version of each."""
    ranked = sorted(entries, key=lambda entry: (entry["name"], -_RANK[entry["state"]]))
    return {entry["name"]: entry for entry in ranked}


def _state(entry: ModelVersion) -> dict[str, Any]:
    return {key: entry[key] for key in ("name", "kind", "state", "residency", "weights", "paused")}


def _shown(model: _Figures) -> dict[str, Any]:
    """Counters are since the runtime's start."""
    shown = model._asdict()
    del shown["request"]
    return {**shown, "load_s": model.load_s / model.loads if model.loads else None}


def _p99(now: Histogram | None, before: Histogram | None) -> float | None:
    """Of the requests between the two."""
    if now is None:
        return None
    latest = Histogram(SECONDS)
    latest.add(now)
    if before is not None and before is not now:
        latest.subtract(before)
    return latest.quantile(0.99)


def moves_only(before: ModelVersion | None, after: ModelVersion | None) -> bool:
    """Whether nothing but the place of its weights is another."""
    return (
        before is not None and after is not None and {**before, "weights": None} == {**after, "weights": None}
    )


def describe(before: ModelVersion | None, after: ModelVersion | None) -> str | None:
    """A change of a version as a line of the event log; None: nothing that people look for."""
    if after is None:
        return None if before is None else f"{before['name']}: gone"
    said = []
    old: Mapping[str, Any] = before or {}
    if after["state"] != old.get("state"):
        said.append(f"failed: {after['error']}" if after["state"] == "failed" else after["state"])
    if before is not None and after["weights"] != before["weights"]:
        said.append(f"weights {after['weights']}")
    if before is not None and after["residency"] != before["residency"]:
        said.append(f"residency {after['residency']}")
    if after["paused"] != old.get("paused"):
        said.append(f"paused ({after['paused']})" if after["paused"] else "not paused")
    return f"{after['name']}: {', '.join(said)}" if said else None
