"""The server that clients speak gRPC with, which outlives its own death."""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic
from typing import Any

import grpc

from rsrv.settings_fleet import GatewaySection
from rsrv_gateway.listening import bind, server_options
from rsrv_gateway.plane import ListenError

log = logging.getLogger("rsrv.gateway")

#: seconds between two looks whether it has died, and between two tries to listen again
_LOOK = 0.1
#: At the end: seconds between two looks whether calls come, how many in a row must see none, and seconds for them all.
_PAUSE, _PAUSES, _SETTLE = 0.01, 5, 0.5


class GrpcServer:
    """Of grpc.aio. That one ends for good when a client calls a method whose name is not UTF-8: then another takes over,
    and calls that are under way end where they are."""

    def __init__(self, handlers: Sequence[Any], settings: GatewaySection) -> None:
        self._door = _Door()
        self._handlers = [self._door, *handlers]
        self._settings = settings
        self._server: Any = None
        #: those that have died, while calls of theirs are under way
        self._dead: set[Any] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, address: str) -> int:
        """The port that it listens on. Raises ListenError."""
        port = await self._listen(address)
        if not address.startswith("unix:"):
            address = f"{address.rpartition(':')[0]}:{port}"
        self._spawn(self._keep(address))
        return port

    async def drain(self, seconds: float) -> None:
        """New calls are refused; those under way may take `seconds`."""
        if self._server is None:
            return
        end = monotonic() + seconds
        self._door.closed = True
        with suppress(TimeoutError):
            async with asyncio.timeout(min(seconds, _SETTLE)):
                await self._door.quiet()
        stopping = asyncio.ensure_future(self.stop(max(0.0, end - monotonic())))
        # In its first step it tells the clients that this connection takes no more calls.
        await asyncio.sleep(0)
        self._door.told.set()
        await stopping

    async def stop(self, seconds: float | None) -> None:
        """No new calls; those under way may take `seconds`. May be called again, to shorten that."""
        for task in self._tasks:
            task.cancel()
        dead = [asyncio.ensure_future(server.stop(seconds)) for server in self._dead]
        if self._server is not None:
            await self._server.stop(seconds)
        await asyncio.gather(*dead)

    async def _listen(self, address: str) -> int:
        server = grpc.aio.server(handlers=self._handlers, options=server_options(self._settings))
        port = bind(server, address, self._settings)
        await server.start()
        self._server = server
        return port

    async def _keep(self, address: str) -> None:
        while True:
            try:
                while await self._server.wait_for_termination(_LOOK):
                    pass
            except Exception as error:  # noqa: BLE001  whatever it died of
                log.error("gRPC's server has died, and another takes over: %s", error)
            self._dead.add(self._server)
            self._spawn(self._bury(self._server))
            while True:
                try:
                    await self._listen(address)
                    break
                except ListenError:  # the dead one may still have the port
                    await asyncio.sleep(_LOOK)

    async def _bury(self, server: Any) -> None:
        """When its last call has ended."""
        try:
            await server.wait_for_termination()
        except Exception:  # noqa: BLE001  what it died of was said
            await server.stop(None)
        self._dead.discard(server)

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Door(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Whatever is called comes by here first. Once it is closed, calls wait, and are refused when the clients are told.

    A server that stops cancels what it has received and not begun, also what comes before the client has heard of it;
    and who is refused at once calls again at once. So they are kept waiting until no more come, for a moment.
    """

    def __init__(self) -> None:
        self.closed = False
        self.told = asyncio.Event()
        self._calls = 0
        # Of streams, whatever was called: any other would wait for a request first.
        self._refusing = grpc.stream_stream_rpc_method_handler(self._refuse)

    def service(self, _: Any) -> Any:
        self._calls += 1
        return self._refusing if self.closed else None

    async def quiet(self) -> None:
        """Returns when no calls come any more."""
        looks = 0
        while looks < _PAUSES:
            calls = self._calls
            await asyncio.sleep(_PAUSE)
            looks = looks + 1 if calls == self._calls else 0

    async def _refuse(self, _: Any, context: Any) -> None:
        await self.told.wait()
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the gateway ends")
