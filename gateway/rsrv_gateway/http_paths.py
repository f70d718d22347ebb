"""What a client asks for over HTTP, by method and path. Pure.

Model names are as they stand in the path: tritonserver does not decode them either. None has a #, behind which nothing
would be sent on.
"""

import re
from dataclasses import dataclass

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


class Nowhere(Exception):
    """There is no such thing here; `status` is 404, or 405 for a wrong method."""

    def __init__(self, status: int) -> None:
        super().__init__("Method Not Allowed" if status == 405 else "Not Found")
        self.status = status


def target_of(method: str, path: str) -> Target:
    """`path` may have a query. Raises Nowhere."""
    path = path.partition("?")[0]
    target = _target(path)
    if target is None:
        raise Nowhere(404)
    if method not in _METHODS.get(target.what, _GET):
        raise Nowhere(405)
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
