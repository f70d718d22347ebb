"""The timeline of a server, in Chrome's trace event format, which Perfetto and chrome://tracing show. Pure.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from collections.abc import Iterable
from typing import Any

from rsrv.control.grpc_service import word
from rsrv.control.v1 import control_pb2 as pb

#: Group of each kind of span. Executions and warm-ups share the device; loads and evictions share the link.
_GROUPS = {
    pb.SPAN_KIND_EXECUTE: "device",
    pb.SPAN_KIND_WARM_UP: "device",
    pb.SPAN_KIND_LOAD: "weights",
    pb.SPAN_KIND_EVICT: "weights",
}


class SpanReader:
    """Collects all spans that the runtimes keep. Each answer continues where the previous one ended."""

    def __init__(self) -> None:
        self.spans: list[pb.Span] = []
        self.question = pb.GetTimelineRequest()
        self._instances: dict[int, str] = {}

    def take(self, answer: pb.GetTimelineResponse) -> bool:
        """Collect the spans of `answer`, which is the answer to `question`, and set the next `question`.

        Return True if the runtimes have more spans.
        """
        before, self._instances = (
            self._instances,
            {position.device: position.instance for position in answer.positions},
        )
        # Drop the spans of a runtime that has ended since the previous answer.
        ended = {device for device, instance in before.items() if self._instances.get(device) != instance}
        self.spans = [*(span for span in self.spans if span.device not in ended), *answer.spans]
        self.question = pb.GetTimelineRequest(positions=answer.positions)
        return bool(answer.spans) and any(position.next < position.end for position in answer.positions)


def chrome_trace(spans: Iterable[pb.Span]) -> dict[str, Any]:
    """Return the trace as an object for json.dumps. Times are microseconds of Unix time.

    The format does not allow overlapping events in one lane. So each group of a device gets as many lanes as it has simultaneous
    events.
    """
    events: list[dict[str, Any]] = []
    known = sorted(
        (span for span in spans if span.kind in _GROUPS), key=lambda span: (span.start_unix_s, span.seconds)
    )
    devices = sorted({0, *(span.device for span in known)})
    groups = [(device, group) for device in devices for group in ("device", "weights")]
    #: For each group, the times at which its lanes become free.
    lanes: dict[tuple[int, str], list[float]] = {group: [] for group in groups}
    for span in known:
        group = span.device, _GROUPS[span.kind]
        free = lanes[group]
        lane = next((at for at, end in enumerate(free) if end <= span.start_unix_s + 1e-6), len(free))
        free[lane : lane + 1] = [span.start_unix_s + span.seconds]
        events.append(_event(span, groups.index(group) + 1, lane + 1))
    names = [
        {
            "ph": "M",
            "name": "process_name",
            "pid": pid,
            "args": {"name": _name(*group, alone=len(devices) == 1)},
        }
        for pid, group in enumerate(groups, 1)
    ]
    return {"displayTimeUnit": "ms", "traceEvents": [*names, *events]}


def _name(device: int, group: str, *, alone: bool) -> str:
    if alone:
        return group
    return f"device {device}" if group == "device" else f"{group} of device {device}"


def _event(span: pb.Span, process: int, lane: int) -> dict[str, Any]:
    label = word(pb.SpanKind, span.kind)
    args: dict[str, Any] = {"version": span.key}
    if span.kind == pb.SPAN_KIND_EXECUTE:
        args |= {"rows": span.rows, "size": span.size, "requests": span.requests}
    if span.failed:
        args["failed"] = True
    event = {
        "name": span.model if span.kind == pb.SPAN_KIND_EXECUTE else f"{label} {span.model}",
        "cat": label,
        "pid": process,
        "tid": lane,
        "ts": round(span.start_unix_s * 1e6, 1),
        "args": args,
    }
    if span.kind == pb.SPAN_KIND_EVICT:
        return event | {"ph": "i", "s": "t"}
    return event | {"ph": "X", "dur": round(span.seconds * 1e6, 1)}
