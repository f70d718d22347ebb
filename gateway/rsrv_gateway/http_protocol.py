"""KServe v2 over HTTP: paths and statuses. Pure.

Model names are used as they are written in the path, because tritonserver does not decode them either. Names cannot contain a #,
because the part after it would not be forwarded.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil

from grpc import StatusCode
from multidict import CIMultiDict

from rsrv_gateway.outcomes import Refusal, tagged

_MODEL = re.compile(
    r"/v2/models/([^/#]+)(?:/versions/([0-9]+))?(?:/(infer|generate|generate_stream|ready|config|stats|trace/setting))?"
)
_CONTROL = re.compile(r"/v2/repository(?:/[^/#]+)?/(?:models/([^/#]+)/(load|unload)|(index))")
_MEMORY = re.compile(
    r"/v2/(?:system|cuda)sharedmemory(?:(?:/region/[^/#]+)?/(status|unregister)|/region/[^/#]+/(register))"
)
#: Scheme and authority of a target in absolute form.
_ABSOLUTE = re.compile(r"https?://[^/?#]*", re.IGNORECASE)
_FIXED = {
    "/v2": "server",
    "/v2/health/live": "live",
    "/v2/health/ready": "server ready",
    "/v2/models/stats": "stats",
    "/v2/trace/setting": "trace/setting",
    "/v2/logging": "logging",
}
#: Operations that execute a model.
INFERENCE = ("infer", "generate", "generate_stream")
#: Other operations whose body tritonserver parses as JSON. Deeply nested JSON would crash it.
OF_JSON = ("index", "load", "unload")
_GET, _POST, _BOTH = ("GET",), ("POST",), ("GET", "POST")
_METHODS = {
    **dict.fromkeys(INFERENCE, _POST),
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
    #: Operation, as in the path. "server" and "model" are requests for metadata, and "status" is about shared memory.
    what: str
    #: Name of the model, or empty if the operation concerns no model.
    model: str = ""
    #: Version of the model, or empty if the path names no version.
    version: str = field(default="", compare=False)


class UnknownPath(Exception):
    """No operation has this path or method. `status` is 404, or 405 for a wrong method."""

    def __init__(self, status: int) -> None:
        super().__init__("Method Not Allowed" if status == 405 else "Not Found")
        self.status = status


def origin_form(target: str) -> str:
    """Return the path and query of a request's target. Clients that use the gateway as a proxy send a whole URL (RFC 9112)."""
    match = _ABSOLUTE.match(target)
    if match is None:
        return target
    path = target[match.end() :]
    return path if path.startswith("/") else f"/{path}"


def target_of(method: str, path: str) -> Target:
    """Return the operation of a path, which may have a query. Raises UnknownPath."""
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
    if match := _MODEL.fullmatch(path):
        return Target(match[3] or "model", match[1], match[2] or "")
    if match := _CONTROL.fullmatch(path):
        return Target(match[2] or match[3], match[1] or "")
    if match := _MEMORY.fullmatch(path):
        return Target(match[1] or match[2])
    return None


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
#: Prefix of an error in a stream of events.
_EVENT = b"data: "
#: Retry hint of a model with a full queue.
_RETRY = re.compile(r"retry after (\d+) ms")


@dataclass(frozen=True, slots=True)
class HttpRefusal(Refusal):
    """A worker's refusal with its own status, headers and body."""

    status: int = 500
    headers: CIMultiDict[str] = field(default_factory=CIMultiDict)
    body: bytes = b""


def http_refusal(status: int, headers: CIMultiDict[str], body: bytes, generated: bool) -> HttpRefusal:
    """Return the refusal for a worker's answer with a status of 400 or more.

    `generated` is True for operations that answer every error of a model with the status 400.
    """
    message = _message(body)
    code = CODES.get(status, StatusCode.UNKNOWN)
    if generated and code is StatusCode.INVALID_ARGUMENT and tagged(message):
        code = StatusCode.UNAVAILABLE
    return HttpRefusal(code, message, status=status, headers=headers, body=body)


def for_client(refusal: Refusal) -> tuple[int, CIMultiDict[str], bytes]:
    """Return status, headers and body for the client."""
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
    """Return an error body as Triton writes it."""
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
    """Return the retry hint in whole seconds, as HTTP requires."""
    match = _RETRY.search(message)
    return "1" if match is None else str(max(ceil(int(match[1]) / 1000), 1))
