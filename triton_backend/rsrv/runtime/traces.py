"""What the runtime sees of traced requests: how long each waited, for which load, and its execution.

Nothing here belongs to requests that are not traced. Spans wait until the control process takes them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rsrv.runtime.timeline import RingBuffer, Timeline
from rsrv.runtime.timeline import Span as Doing
from rsrv.scheduler import events as ev
from rsrv.wire.traces import Mark, Span

#: spans that are kept, and those of one answer: putting more into words would hold up requests
LENGTH, MOST = 16_384, 500

Attributes = dict[str, str | int | float]


@dataclass(slots=True, eq=False)
class _Traced:
    """A request; times on the loop's clock, seconds."""

    mark: Mark
    #: the model's key
    model: str
    arrived: float | None = None
    #: whether it has been given to the device
    taken: bool = False
    #: loads of its model's weights that ended while it waited
    loads: list[Doing] = field(default_factory=list)


class Traces:
    """Belongs to the loop, which tells it what it tells the timeline while `live` has something."""

    def __init__(self, timeline: Timeline, length: int = LENGTH) -> None:
        self._timeline = timeline
        self._spans: RingBuffer[Span] = RingBuffer(length)
        #: spans that stubs have dropped, so far
        self._dropped = 0
        #: traced requests that are not over, by their global ids
        self.live: dict[int, _Traced] = {}
        #: executions with traced requests in them
        self._executing: dict[int, tuple[ev.Execute, list[_Traced]]] = {}

    # --- what the loop tells ------------------------------------------------------------------------------

    def begin(self, id: int, mark: Mark, model: str) -> None:
        """A request is about to arrive that is traced."""
        self.live[id] = _Traced(mark, model)

    def happened(self, event: ev.Event, ended: Doing | None, now: float) -> None:
        """`ended`: what the timeline says that ended with this event."""
        match event:
            case ev.RequestsArrived(requests):
                for request in requests:
                    traced = self.live.get(request.id)
                    if traced is not None:
                        traced.arrived = now
            case ev.ExecutionFinished(dispatch):
                begun = self._executing.pop(dispatch, None)
                if begun is not None and ended is not None:
                    self._executed(*begun, ended)
            case ev.WeightsLoaded(model) | ev.LoadFailed(model) | ev.LoadAbandoned(model):
                for traced in self.live.values():
                    if traced.model == model and not traced.taken and ended is not None:
                        traced.loads.append(ended)

    def executes(self, execute: ev.Execute, now: float) -> None:
        """Requests are given to the device."""
        traced = [one for id in execute.requests if (one := self.live.get(id)) is not None]
        if not traced:
            return
        self._executing[execute.dispatch] = execute, traced
        for one in traced:
            if not one.taken:  # else this is the second try
                one.taken = True
                self._waited(one, now, "")

    def finished(self, finish: ev.Finish, now: float) -> None:
        """A request is over."""
        traced = self.live.pop(finish.request, None)
        if traced is not None and not traced.taken:
            reason = finish.outcome if finish.reason is None else finish.reason
            self._waited(traced, now, reason.value)

    def told(self, spans: Sequence[Span], dropped: int) -> None:
        """By a stub."""
        for span in spans:
            self._spans.add(span)
        self._dropped += dropped

    # --- spans --------------------------------------------------------------------------------------------

    def _waited(self, traced: _Traced, now: float, error: str) -> None:
        arrived = now if traced.arrived is None else traced.arrived
        self._add(traced.mark, "queue", arrived, now, error, _of(traced.model))
        for load in traced.loads:
            failed = "the weights did not come" if load.failed else ""
            self._add(
                traced.mark, "load", max(load.start, arrived), load.end, failed, _of(traced.model, load)
            )
        loading = self._timeline.loading(traced.model)
        if error and loading is not None:
            self._add(traced.mark, "load", max(loading, arrived), now, "still under way", _of(traced.model))

    def _executed(self, execute: ev.Execute, requests: Sequence[_Traced], done: Doing) -> None:
        attributes = _of(execute.model) | {
            # Requests of one execution have this in common.
            "rsrv.batch.id": execute.dispatch,
            "rsrv.batch.size": done.size,
            "rsrv.batch.rows": done.rows,
            "rsrv.batch.requests": done.requests,
        }
        error = "the execution failed" if done.failed else ""
        for traced in requests:
            self._add(traced.mark, "execute", done.start, done.end, error, attributes)

    def _add(
        self, mark: Mark, name: str, start: float, end: float, error: str, attributes: Attributes
    ) -> None:
        times = int(start * 1e9), int(end * 1e9)
        self._spans.add(Span(mark.trace, mark.span, "", name, *times, error, attributes))

    # --- who wants them -----------------------------------------------------------------------------------

    def answer(self, instance: str, since: int) -> dict[str, Any]:
        """As the command `traces` is answered."""
        first, spans = self._spans.since(since, MOST)
        return {
            "instance": instance,
            "first": first,
            "next": first + len(spans),
            "end": self._spans.next,
            "dropped": self._dropped,
            "spans": spans,
        }


def _of(key: str, load: Doing | None = None) -> Attributes:
    name, _, version = key.rpartition("@")
    attributes: Attributes = {"rsrv.model": name, "rsrv.version": version}
    if load is not None:
        attributes["rsrv.load.seconds"] = round(load.end - load.start, 6)
    return attributes
