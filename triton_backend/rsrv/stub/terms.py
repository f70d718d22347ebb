"""What a request asks for beside its tensors: until when, how urgently, and as a part of what."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from rsrv.logs import ID, shorten
from rsrv.stub.replies import Failure
from rsrv.wire.frames import Status

#: parameter of sub-calls that go through Triton: the token of their run, in decimal
RUN = "rsrv_run"
#: likewise their trace context, and that of requests whose header Triton forwards, in whatever case it came
TRACEPARENT = "traceparent"
#: the latest deadline that a frame can carry, in ns
_NEVER = (1 << 63) - 1


def id_of(request: Any) -> str:
    """The id that its client gave a request, "" for none: for the log and for traces, so no longer than fits there."""
    return shorten(request.request_id(), ID)


class Terms(NamedTuple):
    deadline_ns: int  # CLOCK_MONOTONIC, 0: none
    priority: int = 0
    #: token of the meta model's run that it is a sub-call of; 0: none
    run: int = 0


def read_parameters(request: Any) -> Mapping[str, Any]:
    """A Triton request's parameters, and the headers that Triton forwards."""
    text = request.parameters()
    return json.loads(text) if len(text) > 2 else {}


def read_terms(request: Any, parameters: Mapping[str, Any], now_ns: int, unix_ns: int) -> Terms:
    """`parameters` are the request's; `now_ns` and `unix_ns` are the time, by CLOCK_MONOTONIC and by the calendar; Raises Failure for wrong parameters.

    Only deadlines by the calendar depend on it, and only here, when the request arrives: whatever is done to the
    machine's calendar later neither expires nor prolongs them.
    """
    deadline = 0
    timeout_us = request.timeout()
    if timeout_us:
        deadline = min(now_ns + timeout_us * 1000, _NEVER)
    if not parameters:
        return Terms(deadline)
    priority = _integer(parameters, "rsrv_priority", 0xFFFF)
    until_unix_ns = _integer(parameters, "rsrv_deadline_unix_ns", 1 << 63)
    if until_unix_ns:
        absolute = min(max(1, until_unix_ns - unix_ns + now_ns), _NEVER)
        deadline = min(deadline, absolute) if deadline else absolute
    # As text: whoever reads JSON numbers as floating-point ones would change it.
    run = str(parameters.get(RUN, "0"))
    if not (run.isascii() and run.isdecimal() and len(run) <= 20 and int(run) < 1 << 64):
        raise Failure(Status.INVALID, f"parameter {RUN} is for sub-calls of meta models")
    return Terms(deadline, priority, int(run))


def _integer(parameters: Mapping[str, Any], name: str, limit: int) -> int:
    value = parameters.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < limit:
        raise Failure(
            Status.INVALID, f"parameter {name} must be an integer from 0 below {limit}, got {value!r:.50}"
        )
    return value
