"""Counters of the models' stubs: requests, answers and hooks, which only the stubs can count."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from rsrv.histogram import SECONDS, Histogram
from rsrv.wire.frames import REASON_CHARACTERS, ProtocolError, Status

#: Functions of model.py, by their names in metrics.
HOOKS = ("pre", "post", "run")
_STATUSES = frozenset(status.name.lower() for status in Status)


@dataclass(slots=True)
class StubCounters:
    """Counters of one model, as stubs report them. The hooks of a called model run in the stubs of its meta models."""

    #: Histograms of seconds, by hook. Only hooks that have run are present.
    hooks: dict[str, Histogram] = field(default_factory=dict)
    #: Seconds from a request's arrival to its answer.
    requests: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    #: Number of answers to clients, by status in lower case.
    responses: Counter[str] = field(default_factory=Counter)
    #: Reason of the latest answer with the status INTERNAL.
    failure: str = ""
    #: Number of answers to requests that named an alias, by alias and status.
    aliases: dict[str, Counter[str]] = field(default_factory=dict)
    #: Number of answers to copies of an alias's requests, by alias and outcome.
    shadows: dict[str, Counter[str]] = field(default_factory=dict)


class StubMetrics:
    """Sums of the stubs' reports, by the model's name."""

    def __init__(self) -> None:
        self._models: dict[str, StubCounters] = {}

    def take(self, name: str, calls: Collection[str], report: Mapping[str, Any]) -> set[str]:
        """Add a stub's report about its model, or about its meta model and the called models. Return the names of these models.

        Raises ProtocolError.
        """
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
        return {name, *(model for model, _ in hooks)}

    def keep(self, names: Collection[str]) -> Mapping[str, StubCounters]:
        """Drop the counters of models with other names. Return the remaining counters by name."""
        self._models = {name: counters for name, counters in self._models.items() if name in names}
        return self._models
