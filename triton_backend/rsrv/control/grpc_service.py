"""Helpers of the gRPC services of the control process and the gateway: status codes, health, and names in enums."""

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

log = logging.getLogger(__name__)

Request = TypeVar("Request")
Response = TypeVar("Response")
Service = TypeVar("Service")
M = TypeVar("M", bound=Message)

#: Seconds between two checks for changes of health that no event announces.
_HEALTH_POLL_S = 0.25


class StatusError(Exception):
    """Makes a call fail with a gRPC status. `code` is the name of the status."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class InvalidArgument(StatusError):
    """The request is wrong in every state of the server. The message says what is wrong."""

    def __init__(self, text: str) -> None:
        super().__init__("INVALID_ARGUMENT", text)


def answers(
    method: Callable[[Service, Request], Awaitable[Response]],
) -> Callable[[Service, Request, Any], Awaitable[Response]]:
    """Wrap a method of a service, so that any exception ends the call with a gRPC status."""

    @functools.wraps(method)
    async def answer(self: Service, request: Request, context: Any) -> Response:
        try:
            return await method(self, request)
        except StatusError as error:
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
    """Wrap a method that changes the server's state. In addition to the work of `answers`, log each request and its sender."""
    inner = answers(method)

    @functools.wraps(method)
    async def answer(self: Service, request: Request, context: Any) -> Response:
        log.info("%s from %s: %s", method.__name__, context.peer(), " ".join(str(request).split()))
        return await inner(self, request, context)

    return answer


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """The service grpc.health.v1.Health. The health is computed for each call, so that it cannot be out of date.

    gRPC's own servicer is not used. It stores the health in a table, which every change would have to update. When one watcher of
    a name disconnects, gRPC's servicer also forgets the other watchers of this name.
    """

    def serving(self, service: str) -> bool | None:
        """Return whether the service serves, or None if the service is unknown. The empty name means the server as a whole."""
        raise NotImplementedError

    def changed(self) -> Awaitable[Any]:
        """Return an awaitable that ends at the next change of the health. A watcher checks the health regularly as well."""
        return asyncio.Event().wait()

    def status(self, service: str) -> Any:
        """Return the service's health as a member of ServingStatus."""
        name = {None: "SERVICE_UNKNOWN", True: "SERVING", False: "NOT_SERVING"}[self.serving(service)]
        return health_pb2.HealthCheckResponse.ServingStatus.Value(name)

    async def Check(self, request: Any, context: Any) -> Any:
        if self.serving(request.service) is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no model {request.service!r}")
        return health_pb2.HealthCheckResponse(status=self.status(request.service))

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        last = None
        while True:
            changed = asyncio.ensure_future(self.changed())
            try:
                status = self.status(request.service)
                if status != last:
                    last = status
                    yield health_pb2.HealthCheckResponse(status=status)
                await asyncio.wait({changed}, timeout=_HEALTH_POLL_S)
            finally:
                changed.cancel()


def copied(kind: type[M], source: object, **others: Any) -> M:
    """Return a message with the fields `others`. All other fields are the attributes of `source` with the same names."""
    names = kind.DESCRIPTOR.fields_by_name.keys() - others.keys()
    message: M = kind(**{name: getattr(source, name) for name in names}, **others)
    return message


def member(enum: Any, name: str | None) -> Any:
    """Return the number of a generated enum's member, such as 'device' of Residency. `name` is its name in rsrv.yaml.

    For None and for names that this version does not know, the number is that of UNSPECIFIED, 0.
    """
    return 0 if name is None else members(enum).get(name, 0)


def member_name(enum: Any, value: int, field: str) -> str:
    """Return the name of an enum's member with this value. Raises InvalidArgument if there is none.

    `field` is the name of the request's field that has the value.
    """
    if not (name := word(enum, value)):
        raise InvalidArgument(f"{field} must be one of {', '.join(members(enum))}")
    return name


def word(enum: Any, value: int) -> str:
    """Return the name of a member. It is empty for UNSPECIFIED and for numbers that this version does not know."""
    return next((name for name, number in members(enum).items() if number == value), "")


@functools.cache
def members(enum: Any) -> dict[str, int]:
    """Return the numbers of an enum's members by name, without UNSPECIFIED. `enum` is a generated enum or its descriptor."""
    descriptor = getattr(enum, "DESCRIPTOR", enum)
    # In the protobuf, the names of members begin with the name of the enum: RESIDENCY_DEVICE.
    prefix = descriptor.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return {
        value.name.removeprefix(prefix).lower(): value.number for value in descriptor.values if value.number
    }
