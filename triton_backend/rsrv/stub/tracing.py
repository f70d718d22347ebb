"""What a stub knows of traced requests: who wants them traced, and spans that are over, until they are reported.

Times are those of time.perf_counter, in seconds: on Linux that is CLOCK_MONOTONIC, as everywhere in a frame.
"""

import json
import logging
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from rsrv.stub.replies import RequestFailure
from rsrv.wire.frames import Status
from rsrv.wire.traces import MAX_SPANS, MAX_TEXT, Attributes, Mark, Span

log = logging.getLogger("rsrv.stub")

#: parameter that has the trace context: of sub-calls through Triton, and, in any case of letters, of requests whose
#: header Triton forwards
TRACEPARENT = "traceparent"
#: spans that wait to be reported
_LENGTH = 4096

_TRACEPARENT = re.compile(
    r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?"
)
_SAMPLED = 1


def read_traceparent(text: object) -> tuple[str, str] | None:
    """The trace's id and that of its span which asks; None: there is no context, or it is not sampled.

    As W3C's Trace Context has it, where later versions may append fields, but the first one must not.
    """
    found = _TRACEPARENT.fullmatch(text) if isinstance(text, str) else None
    if found is None or not int(found[4], 16) & _SAMPLED or (found[1] == "00" and found[5] is not None):
        return None
    return found[2], found[3]


class Spans:
    """For any thread. Beyond some thousands they are counted and forgotten."""

    def __init__(self, added: Callable[[], object], length: int = _LENGTH) -> None:
        """`added` is called when there is something to take."""
        self._added = added
        self._length = length
        self._lock = threading.Lock()
        self._spans: deque[Span] = deque()
        self._dropped = 0
        #: whether it was said that Triton's context cannot be read
        self._said = False

    def begin(self, request: Any, parameters: Mapping[str, Any]) -> "Trace | None":
        """If a Triton request, which has these parameters, is to be traced. Raises nothing: that would cost the request.

        Triton's own span comes first: it is the client's child, if there is both.
        """
        found = read_traceparent(self._ask_triton(request) or _forwarded(parameters))
        return None if found is None else Trace(self, *found)

    def _ask_triton(self, request: Any) -> object:
        """The traceparent of its own span; nothing if there is none, or it is not as Triton 24.10 has it."""
        try:
            context = request.trace().get_context()
            return json.loads(context).get(TRACEPARENT) if context else None
        except Exception:  # whatever another Triton does
            if not self._said:
                self._said = True
                log.warning("Triton's trace context cannot be read: its spans have no parts", exc_info=True)
            return None

    def add(self, span: Span) -> None:
        with self._lock:
            if len(self._spans) < self._length:
                self._spans.append(span)
            else:
                self._dropped += 1
        self._added()

    def take(self) -> tuple[list[Span], int]:
        """The oldest, as many as a frame has, and how many were dropped since the last time."""
        with self._lock:
            spans = [self._spans.popleft() for _ in range(min(MAX_SPANS, len(self._spans)))]
            dropped, self._dropped = self._dropped, 0
        return spans, dropped

    def lost(self, count: int) -> None:
        """As many that were taken, or were dropped, could not be told."""
        with self._lock:
            self._dropped += count


def _forwarded(parameters: Mapping[str, Any]) -> object:
    """The traceparent among them. Triton leaves headers as they were spelled."""
    return next((value for name, value in parameters.items() if name.lower() == TRACEPARENT), None)


class Trace:
    """Something that is traced and has parts: a request, or one call of a model."""

    __slots__ = ("_spans", "id", "parent", "trace")

    def __init__(self, spans: Spans, trace: str, parent: str) -> None:
        self._spans = spans
        self.trace = trace
        self.parent = parent
        self.id = secrets.token_hex(8)

    def child(self) -> "Trace":
        return Trace(self._spans, self.trace, self.id)

    def mark(self, request: int) -> Mark:
        """What tells the runtime that its request of this number is this."""
        return Mark(request, self.trace, self.id)

    @property
    def traceparent(self) -> str:
        """What has others be parts of this."""
        return f"00-{self.trace}-{self.id}-{_SAMPLED:02x}"

    def part(self, name: str, started: float, error: str = "") -> None:
        """A part that has no parts of its own, and is over now."""
        self._add(self.id, "", name, started, error, {})

    def end(self, name: str, started: float, error: str, attributes: Attributes) -> None:
        """It is over itself."""
        self._add(self.parent, self.id, name, started, error, attributes)

    def _add(
        self, parent: str, id: str, name: str, started: float, error: str, attributes: Attributes
    ) -> None:
        short = {
            key: value[:MAX_TEXT] if isinstance(value, str) else value for key, value in attributes.items()
        }
        start_ns, end_ns = int(started * 1e9), time.perf_counter_ns()
        self._spans.add(
            Span(
                self.trace,
                parent,
                id,
                name[:MAX_TEXT],
                min(start_ns, end_ns),
                end_ns,
                error[:MAX_TEXT],
                short,
            )
        )


def end_request(
    trace: Trace,
    key: str,
    started: float,
    status: Status,
    text: str,
    who: str,
    attributes: Attributes,
) -> None:
    """A request of the model `key` (NAME@VERSION) has its answer. `who`: its client's id for it, or ""."""
    model, _, version = key.rpartition("@")
    told: dict[str, str | int | float] = {"rsrv.model": model, "rsrv.version": version, **attributes}
    if who:
        told["rsrv.request_id"] = who
    error = ""
    if status is not Status.OK:
        told["rsrv.status"], error = status.name, text or status.name
    trace.end(f"infer {model}", started, error, told)


def end_call(trace: Trace | None, model: str, started: float, failure: RequestFailure | None) -> None:
    """A meta model's call of another model is over; nothing if it is not traced."""
    if trace is not None:
        error = "" if failure is None else failure.text or failure.status.name
        trace.end(f"call {model}", started, error, {"rsrv.model": model})
