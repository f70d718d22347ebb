"""Live page of all workers. The gateway forwards the events of their control services while a browser watches."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import Message

from rsrv.control import page_calls
from rsrv.control.v1 import control_pb2 as pb
from rsrv.live.source import PageError
from rsrv_gateway.connections import ControlClient, cancel, is_cancelled
from rsrv_gateway.probes import Probes

#: Seconds between two checks of the list of workers, and between two attempts to connect.
_POLL_S = 1.0
#: Seconds within which a control service must return a model's history or accept a request.
_CALL_TIMEOUT_S = 10.0
#: Maximum number of events queued for a watcher. The streams of workers wait while the queue is full.
_QUEUE_MAX_EVENTS = 64

#: Text that the page shows after a probe has closed the connection because no answer arrived in time.
_CLOSED = "the connection to the server was closed, and is opened again"

Event = tuple[str, str, str]


class Workers:
    """Source of the page's events: a stream from each worker for each watcher."""

    def __init__(
        self, probes: Probes, clock: Callable[[], float] = time.time, every: float = _POLL_S
    ) -> None:
        """`clock` returns Unix time."""
        self._probes, self._clock, self._every = probes, clock, every

    async def events(self) -> AsyncGenerator[Event, None]:
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[Event](_QUEUE_MAX_EVENTS)
        following: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                for change in await self._changes(following, queue):
                    yield change
                until = loop.time() + self._every
                while loop.time() < until and (event := await _next(queue, until)) is not None:
                    yield event
        finally:
            await cancel(following.values())

    async def _changes(
        self, following: dict[str, asyncio.Task[None]], queue: asyncio.Queue[Event]
    ) -> list[Event]:
        """Follow all current workers, and stop following workers that have left.

        If a worker has left, return all queued events, and then an event for each worker that has left.
        """
        workers = self._probes.workers()
        for name in workers.keys() - following.keys():
            following[name] = asyncio.create_task(self._follow(name, queue), name=f"live page of {name}")
        left = sorted(following.keys() - workers.keys())
        if not left:
            return []
        await cancel([following.pop(name) for name in left])
        # Queued events are older, so return them first.
        waiting = [queue.get_nowait() for _ in range(queue.qsize())]
        return [*waiting, *((name, "gone", "null") for name in left)]

    async def _follow(self, name: str, queue: asyncio.Queue[Event]) -> None:
        while True:
            try:
                control = self._control(name)
                async for event in control.stub.WatchPage(pb.WatchPageRequest(), metadata=control.metadata):
                    await queue.put((name, event.event, event.json))
                why = "the server's control service ended"
            except (PageError, grpc.RpcError, grpc.aio.UsageError) as error:
                why = _reason_of(error)
            except asyncio.CancelledError:
                if is_cancelled():
                    raise
                why = _CLOSED
            state = {"t": self._clock(), "up": False, "instance": "", "why": why}
            await queue.put((name, "state", json.dumps(state)))
            await asyncio.sleep(self._every)

    async def panel(self, server: str, model: str) -> dict[str, Any]:
        return await page_calls.panel(self._asks(server), model, self._clock())

    async def trace(self, server: str) -> str:
        return await page_calls.trace(self._asks(server))

    async def steer(self, server: str, model: str, operation: str) -> None:
        await page_calls.steer(self._asks(server), model, operation)

    async def infer(self, server: str, model: str, inputs: Any) -> tuple[int, str]:
        raise PageError(
            409, "the gateway's page sends no requests; use the form on the page of the server itself"
        )

    def _asks(self, server: str) -> page_calls.Ask:
        """Return the function that calls a worker's control service. Raises PageError."""
        return partial(self._ask, self._control(server))

    def _control(self, server: str) -> ControlClient:
        """Return a worker's control service. Raises PageError."""
        if server not in self._probes.workers():
            raise PageError(404, f"there is no worker {server!r}")
        control = self._probes.control(server)
        if control is None:
            raise PageError(409, "no control service is known for this server: name one in gateway.workers")
        return control

    @staticmethod
    async def _ask(control: ControlClient, call: str, request: Message) -> Any:
        """Call a control service. Raises PageError."""
        try:
            return await control.call(call, request, _CALL_TIMEOUT_S)
        except (grpc.RpcError, grpc.aio.UsageError) as error:
            raise PageError.of(_code(error), _reason_of(error)) from None
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            raise PageError(503, _CLOSED) from None


async def _next(queue: asyncio.Queue[Event], until: float) -> Event | None:
    """Return the next event, or None if no event arrives before `until` on the loop's clock."""
    try:
        async with asyncio.timeout_at(until):
            return await queue.get()
    except TimeoutError:
        return None


def _code(error: Any) -> str:
    return str(error.code().name) if isinstance(error, grpc.RpcError) else "UNAVAILABLE"


def _reason_of(error: Any) -> str:
    if isinstance(error, grpc.RpcError):
        return f"{_code(error)}: {error.details() or 'no reason given'}"
    return _CLOSED if isinstance(error, grpc.aio.UsageError) else str(error)
