"""How the methods of a control service answer: each ends with a gRPC status, and the log says who steered."""

import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc

log = logging.getLogger("rsrv.control")

Request = TypeVar("Request")
Response = TypeVar("Response")
Service = TypeVar("Service")


class Refused(Exception):
    """It was not done. `code` is the name of a gRPC status."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class Wrong(Refused):
    """A request that is wrong whatever the state; the message says what about it."""

    def __init__(self, text: str) -> None:
        super().__init__("INVALID_ARGUMENT", text)


def answers(
    method: Callable[[Service, Request], Awaitable[Response]],
) -> Callable[[Service, Request, Any], Awaitable[Response]]:
    """A method of a service that ends with a gRPC status, whatever it raises."""

    @functools.wraps(method)
    async def answer(self: Service, request: Request, context: Any) -> Response:
        try:
            return await method(self, request)
        except Refused as error:
            status, text = grpc.StatusCode.__members__.get(error.code, grpc.StatusCode.INTERNAL), str(error)
        except Exception:
            log.exception("%s failed", method.__name__)
            status, text = grpc.StatusCode.INTERNAL, "internal error; the server's log says more"
        await context.abort(status, text)
        raise AssertionError("abort raises")

    return answer


def steers(
    method: Callable[[Service, Request], Awaitable[Response]],
) -> Callable[[Service, Request, Any], Awaitable[Response]]:
    """Likewise, and the log says who asked for what."""
    inner = answers(method)

    @functools.wraps(method)
    async def answer(self: Service, request: Request, context: Any) -> Response:
        log.info("%s from %s: %s", method.__name__, context.peer(), " ".join(str(request).split()))
        return await inner(self, request, context)

    return answer
