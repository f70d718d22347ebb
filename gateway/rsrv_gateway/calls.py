"""How calls to workers end, in the terms of `outcomes`."""

import asyncio
import re
from typing import Any, NoReturn

import grpc

from rsrv_gateway.outcomes import Refusal

#: What gRPC says of a connection that broke under a call, in this version and in earlier ones; one that could not be made
#: is something else.
_LOST = re.compile(
    "Stream removed|Socket closed|Connection reset|Broken pipe|recvmsg:|sendmsg:|keepalive |ping "
)


def refusal_of(error: grpc.aio.AioRpcError) -> Refusal:
    code, message = error.code(), error.details() or ""
    lost = code is grpc.StatusCode.UNAVAILABLE and _LOST.match(message) is not None
    return Refusal(code, message, tuple(error.trailing_metadata() or ()), lost)


def gone(worker: str) -> Refusal:
    """The gateway itself has given up the worker's connections."""
    return Refusal(grpc.StatusCode.UNAVAILABLE, f"worker {worker} has gone")


def is_cancelled() -> bool:
    """After a CancelledError: whether the client has gone, not only the worker's channel been closed."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def refuse(context: Any, refusal: Refusal) -> NoReturn:
    """Ends a client's call."""
    await context.abort(refusal.for_client(), refusal.message, tuple(refusal.trailing))
    raise AssertionError("abort returned")
