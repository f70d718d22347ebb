"""Recent work of the device, recent arrivals, and spans of traced requests: waits, loads and executions."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from rsrv.scheduler import events as ev
from rsrv.wire.traces import Mark, Span

T = TypeVar("T")

#: Maximum number of device spans that are kept: half a minute at a thousand per second. They take about 5 MB.
TIMELINE_LENGTH = 32_768
#: Maximum number of device spans of one answer. Serialising more would delay requests for milliseconds.
TIMELINE_ANSWER = 2_000
#: Maximum number of stored spans of traced requests.
TRACES_LENGTH = 16_384
#: Maximum number of spans in one answer.
TRACES_ANSWER = 500
#: Maximum number of stored arrivals. They take about 10 MB.
ARRIVALS_LENGTH = 32_768
#: After a reader has asked for arrivals, new arrivals are stored for this many seconds.
ARRIVALS_S = 10.0

WorkKind = Literal["execute", "warm_up", "load", "evict"]
SpanAttributes = dict[str, str | int | float]


class RingBuffer(Generic[T]):
    """Buffer of the latest `length` elements of those that were added."""

    def __init__(self, length: int) -> None:
        self._kept: deque[T] = deque(maxlen=length)
        #: Number of the next element, which is the number of elements ever added.
        self.next = 0

    def add(self, element: T) -> None:
        self._kept.append(element)
        self.next += 1

    def since(self, number: int, most: int) -> tuple[int, list[T]]:
        """Return the number of the first returned element, and at most `most` elements from `number` on, oldest first.

        The returned number is larger than `number` if elements in between are forgotten.
        """
        oldest = self.next - len(self._kept)
        first = min(max(number, oldest), self.next)
        return first, list(islice(self._kept, first - oldest, first - oldest + most))

    def answer(self, instance: str, number: int, most: int) -> tuple[dict[str, Any], list[T]]:
        """Return the fields of an answer, and the elements that `since` returns.

        The fields describe the elements: `instance`, `first`, `next` and `end`.
        """
        first, entries = self.since(number, most)
        return {"instance": instance, "first": first, "next": first + len(entries), "end": self.next}, entries


class DeviceSpan(NamedTuple):
    """One piece of work of the device. An eviction takes no time."""

    kind: WorkKind
    model: str
    #: Seconds on the loop's clock.
    start: float
    end: float
    #: Useful rows of an execution.
    rows: int = 0
    #: Compiled size of an execution.
    size: int = 0
    #: Number of requests of an execution.
    requests: int = 0
    failed: bool = False


class RecentArrivals:
    """Recent requests, without their contents. They are stored only for `ARRIVALS_S` seconds after a reader has asked."""

    def __init__(self, length: int = ARRIVALS_LENGTH) -> None:
        self._kept: RingBuffer[tuple[float, ev.Request]] = RingBuffer(length)
        self._until = -inf

    def add(self, requests: Sequence[ev.Request], now: float) -> None:
        if now < self._until:
            for request in requests:
                self._kept.add((now, request))

    def answer(self, instance: str, since: int, now: float) -> dict[str, Any]:
        """Answer the command `arrivals`, and store the requests that arrive from now on. Times are on the loop's clock."""
        self._until = now + ARRIVALS_S
        head, entries = self._kept.answer(instance, since, TIMELINE_ANSWER)
        return {
            **head,
            "unix_s": time.time() - now,
            "requests": [
                (
                    round(at, 6),
                    arrival.model,
                    arrival.rows,
                    arrival.variant,
                    None if arrival.deadline is None else round(arrival.deadline - at, 6),
                    arrival.priority,
                    arrival.run != 0,
                )
                for at, arrival in entries
                # An accepted request arrived before a restart of the runtime, so it is not a new arrival.
                if not arrival.accepted
            ],
        }


class Timeline:
    """Recent executions, warm-ups, loads and evictions. The loop passes in all events, and the instructions that begin work."""

    def __init__(self, length: int = TIMELINE_LENGTH) -> None:
        self.arrivals = RecentArrivals()
        self.spans: RingBuffer[DeviceSpan] = RingBuffer(length)
        self._executing: dict[int, ev.Execute] = {}
        self._loading: dict[tuple[str, int], float] = {}
        self._warming: dict[str, float] = {}

    def begins(
        self, instruction: ev.Execute | ev.LoadWeights | ev.WarmUp | ev.EvictWeights, now: float
    ) -> None:
        match instruction:
            case ev.Execute():
                self._executing[instruction.number] = instruction
            case ev.LoadWeights():
                self._loading[instruction.model, instruction.epoch] = now
            case ev.WarmUp():
                self._warming[instruction.model] = now
            case ev.EvictWeights():
                self.spans.add(DeviceSpan("evict", instruction.model, now, now))

    def happened(self, event: ev.Event, now: float) -> DeviceSpan | None:
        """Handle an event. Return the span that ended with it, or None."""
        span = None
        match event:
            case ev.RequestsArrived(requests):
                self.arrivals.add(requests, now)
            case ev.ExecutionFinished():
                begun = self._executing.pop(event.number)
                span = DeviceSpan(
                    "execute",
                    begun.model,
                    now - event.seconds,
                    now,
                    begun.rows,
                    begun.size,
                    len(begun.requests),
                    event.error is not None,
                )
            case ev.WeightsLoaded() | ev.LoadFailed() | ev.LoadAbandoned():
                start = self._loading.pop((event.model, event.epoch), None)
                if start is None:
                    return None  # This is a read from the disk, which does not use the device.
                # Use the transfer's own time if it is known, because a load may have waited for evictions.
                if isinstance(event, ev.WeightsLoaded):
                    start = max(start, now - event.seconds)
                failed = not isinstance(event, ev.WeightsLoaded)
                span = DeviceSpan("load", event.model, start, now, failed=failed)
            case ev.WarmUpEnded():
                start = self._warming.pop(event.model, now)
                span = DeviceSpan("warm_up", event.model, start, now, failed=event.costs is None)
        if span is not None:
            self.spans.add(span)
        return span

    def loading(self, model: str) -> float | None:
        """Return the start of the model's current load. None: it is not loading."""
        return min((start for (name, _), start in self._loading.items() if name == model), default=None)

    def answer(self, instance: str, since: int, now: float) -> dict[str, Any]:
        """Answer the command `timeline`. A span's start is given as seconds before `now`."""
        head, spans = self.spans.answer(instance, since, TIMELINE_ANSWER)
        return {
            **head,
            "spans": [
                (
                    span.kind,
                    span.model,
                    round(now - span.start, 6),
                    round(span.end - span.start, 6),
                    span.rows,
                    span.size,
                    span.requests,
                    span.failed,
                )
                for span in spans
            ],
        }


@dataclass(slots=True, eq=False)
class _TracedRequest:
    """A traced request. Times are seconds on the loop's clock."""

    mark: Mark
    #: Key of the model.
    model: str
    arrived: float | None = None
    #: True once an execution of the request has begun.
    executed: bool = False
    #: Loads of the model's weights that ended while the request waited.
    loads: list[DeviceSpan] = field(default_factory=list)


class Traces:
    """Spans of traced requests, kept until the control process fetches them.

    Belongs to the loop. While `live` has a request, the loop passes in the same events as to the timeline. Requests that are
    not traced cost nothing here.
    """

    def __init__(self, timeline: Timeline, length: int = TRACES_LENGTH) -> None:
        self.timeline = timeline
        self._spans: RingBuffer[Span] = RingBuffer(length)
        #: Number of spans that stubs have dropped so far.
        self._dropped = 0
        #: Traced requests that have not ended, by their global ids.
        self.live: dict[int, _TracedRequest] = {}
        #: Traced requests of executions in flight, by the execution's number.
        self._executing: dict[int, list[_TracedRequest]] = {}

    # --- events and instructions --------------------------------------------------------------------------

    def begin(self, id: int, mark: Mark, model: str) -> None:
        """Trace a request that is about to arrive."""
        self.live[id] = _TracedRequest(mark, model)

    def happened(self, event: ev.Event, ended: DeviceSpan | None, now: float) -> None:
        """Handle an event. `ended`: the timeline's span that ended with it, or None."""
        match event:
            case ev.RequestsArrived(requests):
                for request in requests:
                    traced = self.live.get(request.id)
                    if traced is not None:
                        traced.arrived = now
            case ev.ExecutionFinished(number):
                begun = self._executing.pop(number, None)
                if begun is not None and ended is not None:
                    self._add_executions(number, begun, ended)
            case ev.WeightsLoaded(model) | ev.LoadFailed(model) | ev.LoadAbandoned(model):
                for traced in self.live.values():
                    if traced.model == model and not traced.executed and ended is not None:
                        traced.loads.append(ended)

    def executes(self, execute: ev.Execute, now: float) -> None:
        """Record that an execution begins, which ends the wait of its traced requests."""
        traced = list(filter(None, map(self.live.get, execute.requests)))
        if traced:
            self._executing[execute.number] = traced
        for request in traced:
            if not request.executed:  # A request that has executed before is being retried.
                request.executed = True
                self._add_waiting(request, now, "")

    def finished(self, finish: ev.Finish, now: float) -> None:
        traced = self.live.pop(finish.request, None)
        if traced is not None and not traced.executed:
            reason = finish.outcome if finish.reason is None else finish.reason
            self._add_waiting(traced, now, reason.value)

    def report(self, spans: Sequence[Span], dropped: int) -> None:
        """Add a stub's spans, and the number of spans that the stub dropped."""
        for span in spans:
            self._spans.add(span)
        self._dropped += dropped

    def answer(self, instance: str, since: int) -> dict[str, Any]:
        """Answer the command `traces`."""
        head, spans = self._spans.answer(instance, since, TRACES_ANSWER)
        return {**head, "dropped": self._dropped, "spans": spans}

    # --- spans --------------------------------------------------------------------------------------------

    def _add_waiting(self, traced: _TracedRequest, now: float, error: str) -> None:
        arrived = now if traced.arrived is None else traced.arrived
        self._add(traced.mark, "queue", arrived, now, error, _attributes(traced.model))
        for load in traced.loads:
            failed = "the load failed or was abandoned" if load.failed else ""
            start = max(load.start, arrived)
            self._add(traced.mark, "load", start, load.end, failed, _attributes(traced.model, load))
        loading = self.timeline.loading(traced.model)
        if error and loading is not None:
            start = max(loading, arrived)
            self._add(traced.mark, "load", start, now, "still under way", _attributes(traced.model))

    def _add_executions(self, number: int, requests: Sequence[_TracedRequest], done: DeviceSpan) -> None:
        attributes = _attributes(done.model) | {
            # All requests of one execution have these attributes.
            "rsrv.batch.id": number,
            "rsrv.batch.size": done.size,
            "rsrv.batch.rows": done.rows,
            "rsrv.batch.requests": done.requests,
        }
        error = "the execution failed" if done.failed else ""
        for traced in requests:
            self._add(traced.mark, "execute", done.start, done.end, error, attributes)

    def _add(
        self, mark: Mark, name: str, start: float, end: float, error: str, attributes: SpanAttributes
    ) -> None:
        times = int(start * 1e9), int(end * 1e9)
        self._spans.add(Span(mark.trace, mark.span, "", name, *times, error, attributes))


def _attributes(key: str, load: DeviceSpan | None = None) -> SpanAttributes:
    name, _, version = key.rpartition("@")
    attributes: SpanAttributes = {"rsrv.model": name, "rsrv.version": version}
    if load is not None:
        attributes["rsrv.load.seconds"] = round(load.end - load.start, 6)
    return attributes
