"""Traced requests in a stub: their trace contexts, and ended spans until they are reported.

Times are in seconds of time.perf_counter. On Linux, this is CLOCK_MONOTONIC, the clock of all times in frames.
"""

import json
import logging
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rsrv.stub.replies import RequestFailure
from rsrv.wire.frames import Status
from rsrv.wire.traces import MAX_SPANS, MAX_TEXT, Attributes, Mark, Span

log = logging.getLogger(__name__)

#: Parameter with the trace context. Sub-calls through Triton have this parameter. If Triton forwards the header of a client's
#: request, the name may be in upper or lower case.
TRACEPARENT = "traceparent"
#: Maximum number of ended spans that wait to be reported.
_MAX_WAITING = 4096

_TRACEPARENT = re.compile(
    r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?"
)
_SAMPLED = 1


def read_traceparent(text: object) -> tuple[str, str] | None:
    """Return the ids of the trace and of the parent span. None: there is no context, or it is not sampled.

    The format is W3C's Trace Context. Its first version has no further fields; later versions may append some.
    """
    match = _TRACEPARENT.fullmatch(text) if isinstance(text, str) else None
    if match is None or not int(match[4], 16) & _SAMPLED or (match[1] == "00" and match[5] is not None):
        return None
    return match[2], match[3]


class Spans:
    """Ended spans that wait to be reported. Above a limit, further spans are dropped and counted. Thread-safe."""

    def __init__(
        self, added: Callable[[], object], lock: threading.Lock, max_waiting: int = _MAX_WAITING
    ) -> None:
        """`added` is called when there are spans to take. `lock` guards the spans, and may also guard other data."""
        self._added = added
        self._max_waiting = max_waiting
        self._lock = lock
        self._spans: deque[Span] = deque()
        self._dropped = 0
        #: True if the log already has the warning that Triton's context cannot be read.
        self._warned = False

    def begin(self, request: Any, parameters: Mapping[str, Any]) -> "OpenSpan | None":
        """Open the span of a Triton request with these parameters if it must be traced. Never raises.

        If both Triton and the client have a context, Triton's is used, because Triton's span is a child of the client's.
        """
        parent = read_traceparent(self._ask_triton(request) or _forwarded(parameters))
        return None if parent is None else OpenSpan(self, *parent)

    def _ask_triton(self, request: Any) -> object:
        """Return the traceparent of Triton's own span. None: there is no span, or this Triton does not report it."""
        try:
            context = request.trace().get_context()
            return json.loads(context).get(TRACEPARENT) if context else None
        except Exception:  # Another version of Triton may fail in any way.
            if not self._warned:
                self._warned = True
                log.warning(
                    "Triton's trace context cannot be read: its spans have no children", exc_info=True
                )
            return None

    def add(self, span: Span) -> None:
        with self._lock:
            if len(self._spans) < self._max_waiting:
                self._spans.append(span)
            else:
                self._dropped += 1
        self._added()

    def take(self) -> tuple[list[Span], int]:
        """Remove and return the oldest spans that fit in a frame, and the number of spans dropped since the last call."""
        with self._lock:
            spans = [self._spans.popleft() for _ in range(min(MAX_SPANS, len(self._spans)))]
            dropped, self._dropped = self._dropped, 0
        return spans, dropped

    def lost(self, count: int) -> None:
        """Count spans as dropped if they were taken but could not be reported."""
        with self._lock:
            self._dropped += count


def _forwarded(parameters: Mapping[str, Any]) -> object:
    """Return the traceparent among a request's parameters. Ignore the case of its name, as Triton does not change headers."""
    return next((value for name, value in parameters.items() if name.lower() == TRACEPARENT), None)


@dataclass(slots=True, eq=False)
class OpenSpan:
    """A span that has not ended: a request, or one call of a model. It may have children."""

    spans: Spans
    trace: str
    parent: str
    id: str = field(default_factory=partial(secrets.token_hex, 8))

    def child(self) -> "OpenSpan":
        return OpenSpan(self.spans, self.trace, self.id)

    def mark(self, request: int) -> Mark:
        """Return the mark that makes this span the parent of the runtime's spans of the request with the number `request`."""
        return Mark(request, self.trace, self.id)

    @property
    def traceparent(self) -> str:
        """The context that makes other spans children of this one."""
        return f"00-{self.trace}-{self.id}-{_SAMPLED:02x}"

    def add_child(self, name: str, started: float, error: str = "") -> None:
        """Add a child that ends now and has no children."""
        self._add(self.id, "", name, started, error, {})

    def end(self, name: str, started: float, error: str, attributes: Attributes) -> None:
        self._add(self.parent, self.id, name, started, error, attributes)

    def _add(
        self, parent: str, id: str, name: str, started: float, error: str, attributes: Attributes
    ) -> None:
        short = {
            key: value[:MAX_TEXT] if isinstance(value, str) else value for key, value in attributes.items()
        }
        start_ns, end_ns = int(started * 1e9), time.perf_counter_ns()
        self.spans.add(
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
    span: OpenSpan, key: str, started: float, status: Status, text: str, client_id: str, rows: int | None
) -> None:
    """End the span of a request of the model `key` (NAME@VERSION). `client_id` may be ""."""
    model, _, version = key.rpartition("@")
    attributes: dict[str, str | int | float] = {"rsrv.model": model, "rsrv.version": version}
    if rows is not None:
        attributes["rsrv.rows"] = rows
    if client_id:
        attributes["rsrv.request_id"] = client_id
    error = ""
    if status is not Status.OK:
        attributes["rsrv.status"], error = status.name, text or status.name
    span.end(f"infer {model}", started, error, attributes)


def end_call(
    span: OpenSpan | None,
    model: str,
    started: float,
    failure: RequestFailure | None,
    device: int | None = None,
) -> None:
    """End the span of a meta model's call of another model. `span` is None if the call is not traced.

    `device` is the device of the call if the run's callees are on several devices, otherwise None.
    """
    if span is not None:
        error = "" if failure is None else failure.text or failure.status.name
        attributes: dict[str, str | int | float] = {"rsrv.model": model}
        if device is not None:
            attributes["rsrv.stage.device"] = device
        span.end(f"call {model}", started, error, attributes)
