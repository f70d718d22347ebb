"""What stubs measure, by the model's name: they say it now and then, and it is added up here."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from rsrv.histogram import SECONDS, Histogram
from rsrv.wire.frames import ProtocolError, Status

#: functions of model.py, by what they are called in metrics
HOOKS = ("pre", "post", "run")
_STATUSES = frozenset(status.name.lower() for status in Status)


@dataclass(slots=True)
class Reported:
    """Of one model, by the stubs that answer for it; hooks of a model that metas call run in theirs."""

    #: seconds, by hook; those that ever ran
    hooks: dict[str, Histogram] = field(default_factory=dict)
    #: seconds from a request's arrival to its answer
    requests: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    #: answers to clients, by status in lower case
    responses: dict[str, int] = field(default_factory=dict)


class Reports:
    def __init__(self) -> None:
        self._models: dict[str, Reported] = {}

    def take(self, name: str, calls: Collection[str], report: Mapping[str, Any]) -> None:
        """Of a model, or of a meta model and those that it calls, since the stub's report before. Raises ProtocolError."""
        try:
            requests = Histogram.from_json(SECONDS, report["requests"])
            responses = {str(status): int(count) for status, count in report["responses"].items()}
            hooks = {
                (model, hook): Histogram.from_json(SECONDS, seconds)
                for model, by_hook in report["hooks"].items()
                for hook, seconds in by_hook.items()
            }
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"a REPORT that cannot be read: {type(error).__name__}: {error}") from None
        if not (responses.keys() <= _STATUSES and all(count >= 0 for count in responses.values())):
            raise ProtocolError("a REPORT of answers with a status that there is not, or less than none")
        if not all((model == name or model in calls) and hook in HOOKS for model, hook in hooks):
            raise ProtocolError("a REPORT of hooks that the model does not have")
        mine = self._models.setdefault(name, Reported())
        mine.requests.add(requests)
        for status, count in responses.items():
            mine.responses[status] = mine.responses.get(status, 0) + count
        for (model, hook), seconds in hooks.items():
            self._models.setdefault(model, Reported()).hooks.setdefault(hook, Histogram(SECONDS)).add(seconds)

    def keep(self, names: Collection[str]) -> Mapping[str, Reported]:
        """Forget all others; what is left."""
        self._models = {name: told for name, told in self._models.items() if name in names}
        return self._models
