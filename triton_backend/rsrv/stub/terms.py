"""What a request asks for beside its tensors: until when, and how urgently."""

import json
import time
from typing import Any

from rsrv.stub.replies import Failure
from rsrv.wire.frames import Status

#: the latest deadline that a frame can carry, in ns
_NEVER = (1 << 63) - 1


def read_terms(request: Any) -> tuple[int, int]:
    """(deadline in CLOCK_MONOTONIC ns or 0, priority); Failure for parameters of ours that are wrong."""
    deadline = 0
    timeout_us = request.timeout()
    if timeout_us:
        deadline = min(time.monotonic_ns() + timeout_us * 1000, _NEVER)
    text = request.parameters()
    if len(text) <= 2:
        return deadline, 0
    parameters = json.loads(text)
    priority = _integer(parameters, "rsrv_priority", 0xFFFF)
    unix_ns = _integer(parameters, "rsrv_deadline_unix_ns", 1 << 63)
    if unix_ns:
        absolute = min(max(1, unix_ns - time.time_ns() + time.monotonic_ns()), _NEVER)
        deadline = min(deadline, absolute) if deadline else absolute
    return deadline, priority


def _integer(parameters: dict[str, Any], name: str, limit: int) -> int:
    value = parameters.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < limit:
        raise Failure(
            Status.INVALID, f"parameter {name} must be an integer from 0 below {limit}, got {value!r:.50}"
        )
    return value
