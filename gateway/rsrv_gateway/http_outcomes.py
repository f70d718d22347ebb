"""What HTTP statuses mean, in the terms of `outcomes`. Pure."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil

from grpc import StatusCode
from multidict import CIMultiDict

from rsrv_gateway.outcomes import Refusal, tagged

STATUSES: Mapping[StatusCode, int] = {
    StatusCode.INVALID_ARGUMENT: 400,
    StatusCode.UNAUTHENTICATED: 401,
    StatusCode.PERMISSION_DENIED: 403,
    StatusCode.NOT_FOUND: 404,
    StatusCode.FAILED_PRECONDITION: 412,
    StatusCode.OUT_OF_RANGE: 413,
    StatusCode.RESOURCE_EXHAUSTED: 429,
    StatusCode.CANCELLED: 499,
    StatusCode.INTERNAL: 500,
    StatusCode.UNIMPLEMENTED: 501,
    StatusCode.UNAVAILABLE: 503,
    StatusCode.DEADLINE_EXCEEDED: 504,
}
CODES = {status: code for code, status in STATUSES.items()}
#: an error in a stream of events
_EVENT = b"data: "
#: what a model with a full queue says
_RETRY = re.compile(r"retry after (\d+) ms")


@dataclass(frozen=True, slots=True)
class Told(Refusal):
    """As a worker said it, with its own status, headers and body."""

    status: int = 500
    headers: CIMultiDict[str] = field(default_factory=CIMultiDict)
    body: bytes = b""


def told(status: int, headers: CIMultiDict[str], body: bytes, generated: bool) -> Told:
    """A worker's answer with a status from 400 on. `generated`: one of those calls that say 400 for any error of a model."""
    message = _message(body)
    code = CODES.get(status, StatusCode.UNKNOWN)
    if generated and code is StatusCode.INVALID_ARGUMENT and tagged(message):
        code = StatusCode.UNAVAILABLE
    return Told(code, message, status=status, headers=headers, body=body)


def for_client(refusal: Refusal) -> tuple[int, CIMultiDict[str], bytes]:
    """Status, headers and body."""
    code = refusal.for_client()
    status = STATUSES.get(code, 500)
    if isinstance(refusal, Told):
        headers, body = CIMultiDict(refusal.headers), refusal.body
        if not tagged(refusal.message):
            status = refusal.status
    else:
        headers, body = CIMultiDict({"Content-Type": "application/json"}), error_body(refusal.message)
    if code is StatusCode.RESOURCE_EXHAUSTED:
        headers["Retry-After"] = _retry_after(refusal.message)
    if code is StatusCode.UNAUTHENTICATED:
        headers.setdefault("WWW-Authenticate", "Bearer")
    return status, headers, body


def error_body(message: str) -> bytes:
    """As Triton writes errors."""
    return json.dumps({"error": message}, ensure_ascii=False, separators=(",", ":")).encode(
        "utf-8", "replace"
    )


def _message(body: bytes) -> str:
    text = body.removeprefix(_EVENT)
    try:
        error = json.loads(text)["error"]
    except (ValueError, KeyError, TypeError, RecursionError):
        error = None
    return error if isinstance(error, str) else text.decode("utf-8", "replace")


def _retry_after(message: str) -> str:
    """Whole seconds, as HTTP wants them."""
    said = _RETRY.search(message)
    return "1" if said is None else str(max(ceil(int(said[1]) / 1000), 1))
