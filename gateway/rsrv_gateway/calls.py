"""How calls to workers end, in the terms of `outcomes`."""

import asyncio
from typing import Any, NoReturn

import grpc

from rsrv_gateway.outcomes import Refusal


def refusal_of(error: grpc.aio.AioRpcError) -> Refusal:
    return Refusal(error.code(), error.details() or "", tuple(error.trailing_metadata() or ()))


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
