"""What the device did of late: executions, warm-ups, loads of weights and evictions, one after the other."""

from collections import deque
from itertools import islice
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from rsrv.scheduler import events as ev

T = TypeVar("T")


class RingBuffer(Generic[T]):
    """The latest `length` of all that were ever added."""

    def __init__(self, length: int) -> None:
        self._kept: deque[T] = deque(maxlen=length)
        #: how many there ever were: the number of the next one
        self.next = 0

    def add(self, one: T) -> None:
        self._kept.append(one)
        self.next += 1

    def since(self, number: int, most: int) -> tuple[int, list[T]]:
        """Those from this number on, oldest first and at most so many, and the number of the first of them.

        That is more than `number` where older ones are forgotten.
        """
        oldest = self.next - len(self._kept)
        first = min(max(number, oldest), self.next)
        return first, list(islice(self._kept, first - oldest, first - oldest + most))


#: spans that are kept: half a minute of a thousand a second. About 5 MB.
LENGTH = 32_768
#: spans of one answer: putting more into words would hold up requests for milliseconds
MOST = 2_000

Kind = Literal["execute", "warm_up", "load", "evict"]


class Span(NamedTuple):
    """Something that the device did; an eviction takes no time."""

    kind: Kind
    model: str
    #: on the loop's clock, seconds
    start: float
    end: float
    #: useful rows, the compiled size, and how many requests: of executions
    rows: int = 0
    size: int = 0
    requests: int = 0
    failed: bool = False


class Timeline:
    """Belongs to the loop, which tells it all events, and those instructions that begin something."""

    def __init__(self, length: int = LENGTH) -> None:
        self._spans: RingBuffer[Span] = RingBuffer(length)
        self._executing: dict[int, ev.Execute] = {}
        self._loading: dict[tuple[str, int], float] = {}
        self._warming: dict[str, float] = {}

    def begins(
        self, instruction: ev.Execute | ev.LoadWeights | ev.WarmUp | ev.EvictWeights, now: float
    ) -> None:
        match instruction:
            case ev.Execute():
                self._executing[instruction.dispatch] = instruction
            case ev.LoadWeights():
                self._loading[instruction.model, instruction.epoch] = now
            case ev.WarmUp():
                self._warming[instruction.model] = now
            case ev.EvictWeights():
                self._add(Span("evict", instruction.model, now, now))

    def happened(self, event: ev.Event, now: float) -> Span | None:
        """What ended with it; events that end nothing of what is shown are nothing here."""
        match event:
            case ev.ExecutionFinished():
                begun = self._executing.pop(event.dispatch)
                return self._add(
                    Span(
                        "execute",
                        begun.model,
                        now - event.seconds,
                        now,
                        begun.rows,
                        begun.size,
                        len(begun.requests),
                        event.error is not None,
                    )
                )
            case ev.WeightsLoaded() | ev.LoadFailed() | ev.LoadAbandoned():
                start = self._loading.pop((event.model, event.epoch))
                # The link's own time where it is known: a load may have waited for evictions.
                if isinstance(event, ev.WeightsLoaded):
                    start = max(start, now - event.seconds)
                return self._add(
                    Span("load", event.model, start, now, failed=not isinstance(event, ev.WeightsLoaded))
                )
            case ev.WarmUpEnded():
                start = self._warming.pop(event.model, now)
                return self._add(Span("warm_up", event.model, start, now, failed=event.costs is None))
        return None

    @property
    def next(self) -> int:
        """The number of the next span."""
        return self._spans.next

    def loading(self, model: str) -> float | None:
        """When the load of a model's weights that is under way began."""
        return min((start for (name, _), start in self._loading.items() if name == model), default=None)

    def since(self, number: int, most: int = MOST) -> tuple[int, list[Span]]:
        """As `RingBuffer.since`."""
        return self._spans.since(number, most)

    def _add(self, span: Span) -> Span:
        self._spans.add(span)
        return span


def answer(timeline: Timeline, instance: str, since: int, now: float) -> dict[str, Any]:
    """As the command `timeline` is answered: when spans began is seconds before now."""
    first, spans = timeline.since(since)
    return {
        "instance": instance,
        "first": first,
        "next": first + len(spans),
        "end": timeline.next,
        "spans": [
            (
                s.kind,
                s.model,
                round(now - s.start, 6),
                round(s.end - s.start, 6),
                s.rows,
                s.size,
                s.requests,
                s.failed,
            )
            for s in spans
        ],
    }
