"""Errors in OpenAI's form. `code` is rsrv's tag."""

import math
import re
from collections.abc import Collection, Mapping
from reprlib import Repr
from typing import Any, Final

import grpc
from pydantic import ValidationError

#: HTTP status of rsrv's tags. Other errors have the status of their gRPC code.
_TAGS: Final[Mapping[str, int]] = {
    "QUEUE_FULL": 429,
    "DEADLINE": 504,
    "CANCELLED": 499,
    "RUNTIME_DOWN": 503,
    "NOT_RESIDENT": 503,
    "PAUSED": 503,
    "STARTING": 503,
    "SEQUENCE_LOST": 404,
}
#: HTTP status and tag of gRPC's codes, as servers and gateways use them.
_CODES: Final[Mapping[str, tuple[int, str]]] = {
    "INVALID_ARGUMENT": (400, "INVALID"),
    "NOT_FOUND": (404, "NOT_FOUND"),
    "RESOURCE_EXHAUSTED": (429, "QUEUE_FULL"),
    "DEADLINE_EXCEEDED": (504, "DEADLINE"),
    "CANCELLED": (499, "CANCELLED"),
    "UNAVAILABLE": (503, "UNAVAILABLE"),
    "FAILED_PRECONDITION": (503, "NOT_RESIDENT"),
}
_TAG = re.compile(r"\[rsrv:([A-Z_]+)\] ?")
_RETRY = re.compile(r"retry after ([0-9.]+) (ms|s)")
#: Maximum number of characters of a client's value that a message repeats.
_MAX_VALUE = 60
#: Shortens the text of a value of any size.
_SHORT = Repr()
_SHORT.maxstring = _MAX_VALUE


class ApiError(Exception):
    """A call failed. The message says why, and what to do."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        """`param` is the field at fault."""
        super().__init__(message)
        self.status, self.code, self.param = status, code, param
        self.retry_after_s = retry_after_s

    def at(self, param: str) -> "ApiError":
        """Return the same error about an element of the request."""
        return ApiError(self.status, self.code, f"{param}: {self}", param, self.retry_after_s)

    @property
    def body(self) -> dict[str, Any]:
        """The answer's body."""
        usual = "invalid_request_error" if self.status < 500 else "server_error"
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status, usual)
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """The answer's headers for this error."""
        if self.retry_after_s is None:
            return {}
        return {"Retry-After": str(max(1, math.ceil(self.retry_after_s)))}


def invalid(message: str, param: str | None = None) -> ApiError:
    """Return the error for a request that can never succeed."""
    return ApiError(400, "INVALID", message, param)


def unknown_model(name: str) -> ApiError:
    """Return the error for a model that does not exist, or that the caller may not call. The caller cannot tell which."""
    text = f"there is no model {name!r:.100} with a task, or this key may not call it; GET /v1/models lists the models"
    return ApiError(404, "NOT_FOUND", text, "model")


def starting_model(name: str) -> ApiError:
    """Return the error for a model that the server is loading. Its task is not known yet."""
    return ApiError(503, "STARTING", f"the model {name!r:.100} is starting; try again later", "model", 1.0)


def from_grpc(error: grpc.RpcError) -> ApiError:
    """Return the error for a failed call of the server or of a gateway."""
    return from_status(error.code().name, error.details() or "")


def from_status(name: str, text: str) -> ApiError:
    """Return the error for the gRPC status of this name, with this text."""
    status, code = _CODES.get(name, (500, "INTERNAL"))
    if tag := _TAG.search(text):
        text = text[: tag.start()] + text[tag.end() :]
        code, status = tag[1], _TAGS.get(tag[1], status)
    elif code == "UNAVAILABLE" and ("failed to connect" in text or "errors resolving" in text):
        text = "the server is not reachable; try again later"
    seconds = None
    if status in (429, 503):
        wait = _RETRY.search(text)
        seconds = float(wait[1]) * (1e-3 if wait[2] == "ms" else 1.0) if wait else 1.0
    return ApiError(status, code, text or "the server gave no reason", None, seconds)


def from_validation(error: ValidationError, unsupported: Collection[str] = ()) -> ApiError:
    """Return the error for a body that the endpoint refuses. `unsupported` are known fields that rsrv does not support."""
    first = error.errors(include_url=False, include_context=False)[0]
    # For a union, the path also has the type that pydantic tried. Leave this type out, because it means nothing to a client.
    path = [
        str(part)
        for part in first["loc"]
        if isinstance(part, int) or (part.isidentifier() and part not in _TYPES)
    ]
    param = ".".join(path) or None
    kind, message = first["type"], first["msg"].removeprefix("Value error, ")
    if kind == "json_invalid":
        reason = message.removeprefix("Invalid JSON: ").partition(" at line ")[0]
        return invalid(f"the body is not JSON: {reason}")
    if kind in ("model_type", "model_attributes_type") and not path:
        return invalid("the body must be a JSON object")
    if kind == "extra_forbidden":
        # Cut the name, because it is the client's and may have any length.
        field = str(first["loc"][-1])[:_MAX_VALUE]
        problem = "not supported" if field in unsupported else "an unknown field"
        return invalid(f"`{field}` is {problem}; leave it out", param or field)
    if kind == "missing":
        return invalid(f"`{param}` is missing", param)
    message = message.replace("Input should be", "must be")
    shown = "" if kind == "value_error" else f" (found {_SHORT.repr(first['input']):.{_MAX_VALUE}})"
    return invalid(f"`{param}` {message}{shown}" if param else message, param)


_TYPES = ("str", "int", "float", "bool")
