"""How calls to workers end, in the terms of `outcomes`."""

import asyncio
import re
from collections.abc import Iterable
from typing import Any, NoReturn

import grpc

from rsrv_gateway.outcomes import Metadata, Refusal

#: seconds; gRPC tells a server of no more, and takes a lot more, which some clients send for no deadline, for none at all
_LONGEST = 27_000 * 3600.0

#: What gRPC says of a connection that broke under a call, in this version and in earlier ones; one that could not be made
#: is something else.
_LOST = re.compile(
    "Stream removed|Socket closed|Connection reset|Broken pipe|recvmsg:|sendmsg:|keepalive |ping "
)


def refusal_of(error: grpc.aio.AioRpcError) -> Refusal:
    code, message = error.code(), error.details() or ""
    lost = code is grpc.StatusCode.UNAVAILABLE and _LOST.match(message) is not None
    return Refusal(code, message, sendable(error.trailing_metadata() or ()), lost)


def sendable(metadata: Iterable[tuple[str, str | bytes]]) -> Metadata:
    """What may be passed on: gRPC receives bytes in texts that it does not send."""
    return tuple(
        [
            pair
            for pair in metadata
            if isinstance(pair[1], bytes) or (pair[1].isascii() and pair[1].isprintable())
        ]
    )


def time_left(context: Any) -> float | None:
    """Seconds until the client's deadline; None: it has set none."""
    left: float | None = context.time_remaining()
    return None if left is None else min(left, _LONGEST)


def gone(worker: str) -> Refusal:
    """The gateway itself has given up the worker's connections."""
    return Refusal(grpc.StatusCode.UNAVAILABLE, f"worker {worker} has gone")


def is_cancelled() -> bool:
    """After a CancelledError: whether this task was cancelled, as when the client has gone, and not the worker's channel closed."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def refuse(context: Any, refusal: Refusal) -> NoReturn:
    """Ends a client's call."""
    await context.abort(refusal.for_client(), refusal.message, tuple(refusal.trailing))
    raise AssertionError("abort returned")
