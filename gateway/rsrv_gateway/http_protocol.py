"""HTTPPROTO"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from grpc import StatusCode
from multidict import CIMultiDict

from rsrv_gateway.outcomes import Refusal, tagged

_MODEL = re.compile(
    r"/v2/models/([^/#]+)(?:/versions/[0-9]+)?(?:/(infer|generate|generate_stream|ready|config|stats|trace/setting))?"
)
_CONTROL = re.compile(r"/v2/repository(?:/[^/#]+)?/(?:models/([^/#]+)/(load|unload)|(index))")
_MEMORY = re.compile(
    r"/v2/(?:system|cuda)sharedmemory(?:(?:/region/[^/#]+)?/(status|unregister)|/region/[^/#]+/(register))"
)
_FIXED = {
    "/v2": "server",
    "/v2/health/live": "live",
    "/v2/health/ready": "server ready",
    "/v2/models/stats": "stats",
    "/v2/trace/setting": "trace/setting",
    "/v2/logging": "logging",
}
_GET, _POST, _BOTH = ("GET",), ("POST",), ("GET", "POST")
_METHODS = {
    "infer": _POST,
    "generate": _POST,
    "generate_stream": _POST,
    "trace/setting": _BOTH,
    "logging": _BOTH,
    "index": _POST,
    "load": _POST,
    "unload": _POST,
    "register": _POST,
    "unregister": _POST,
}


@dataclass(frozen=True, slots=True)
class Target:
    #: as in the path; "server" and "model": their metadata; "server ready"; "status": of shared memory
    what: str
    #: its name; empty: it is about none
    model: str = ""


class UnknownPath(Exception):
    """There is no such thing here; `status` is 404, or 405 for a wrong method."""

    def __init__(self, status: int) -> None:
        super().__init__("Method Not Allowed" if status == 405 else "Not Found")
        self.status = status


def target_of(method: str, path: str) -> Target:
    """`path` may have a query. Raises UnknownPath."""
    path = path.partition("?")[0]
    target = _target(path)
    if target is None:
        raise UnknownPath(404)
    if method not in _METHODS.get(target.what, _GET):
        raise UnknownPath(405)
    return target


def _target(path: str) -> Target | None:
    fixed = _FIXED.get(path)
    if fixed is not None:
        return Target(fixed)
    if found := _MODEL.fullmatch(path):
        return Target(found[2] or "model", found[1])
    if found := _CONTROL.fullmatch(path):
        return Target(found[2] or found[3], found[1] or "")
    if found := _MEMORY.fullmatch(path):
        return Target(found[1] or found[2])
    return None


#: Bytes of JSON that are read for the sake of the items: more keep the event loop busy for longer than any request may.
MOST_JSON = 1 << 18
#: bytes of JSON in which a sequence is looked for, in some milliseconds
MOST_SEARCHED = 1 << 24
#: Found without parsing, which takes forty times as long. In texts the quotes would be escaped.
_SEQUENCE = re.compile(rb'"sequence_id"\s*:\s*(-?[0-9]+|"(?:[^"\\]|\\.)*")')
#: likewise, the shape of an input
_SHAPE = re.compile(rb'"shape"\s*:\s*\[([0-9,\s]*)\]')


def peek(header: bytes, measured: tuple[str, int] | None) -> tuple[int, int | str | None]:
    """Items, and the id of the request's sequence.

    `header` is the request's JSON, without the binary data that may come after it; `measured` is the input that tells
    the items, and which axis.
    """
    items = 1
    if measured is not None and len(header) <= MOST_JSON:
        items = _items(_parsed(header), *measured)
    return items, _sequence(header)


def overstated(header: bytes, size: int) -> str:
    """Return what is wrong with a request of `size` bytes that has an input of more elements; empty if nothing is.

    Triton 24.10 takes the memory for all elements before it reads one, and ends where there is not so much; the next
    server would follow.
    """
    for found in _SHAPE.finditer(header):
        elements = 1
        for extent in found[1].split(b","):
            text = extent.strip()
            if text.isdigit():  # else this is no JSON, which is for the server to say
                # One with more digits than this is too large in any case, and takes its time to read.
                elements *= int(text) if len(text) < 20 else size + 1
            if elements > size:
                shape = found[1][:100].decode()
                return f"an input of shape [{shape}] has more elements than the request has bytes, {size}"
    return ""


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _items(request: Any, name: str, axis: int) -> int:
    inputs = request.get("inputs") if isinstance(request, dict) else None
    for each in inputs if isinstance(inputs, list) else ():
        if isinstance(each, dict) and each.get("name") == name:
            shape = each.get("shape")
            if isinstance(shape, list) and axis < len(shape) and type(shape[axis]) is int:
                return shape[axis] if 0 < shape[axis] < 2**31 else 1
    return 1


def _sequence(header: bytes) -> int | str | None:
    found = _SEQUENCE.search(header)
    sequence: int | str | None = None if found is None else _parsed(found[1])
    return sequence


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
class HttpRefusal(Refusal):
    """As a worker said it, with its own status, headers and body."""

    status: int = 500
    headers: CIMultiDict[str] = field(default_factory=CIMultiDict)
    body: bytes = b""


def http_refusal(status: int, headers: CIMultiDict[str], body: bytes, generated: bool) -> HttpRefusal:
    """A worker's answer with a status from 400 on. `generated`: one of those calls that say 400 for any error of a model."""
    message = _message(body)
    code = CODES.get(status, StatusCode.UNKNOWN)
    if generated and code is StatusCode.INVALID_ARGUMENT and tagged(message):
        code = StatusCode.UNAVAILABLE
    return HttpRefusal(code, message, status=status, headers=headers, body=body)


def for_client(refusal: Refusal) -> tuple[int, CIMultiDict[str], bytes]:
    """Status, headers and body."""
    code = refusal.for_client()
    status = STATUSES.get(code, 500)
    if isinstance(refusal, HttpRefusal):
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
