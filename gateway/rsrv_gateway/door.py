"""How a gRPC server ends without cancelling what it has received and not begun."""

import asyncio
from contextlib import suppress
from time import monotonic
from typing import Any

import grpc

from rsrv.control.grpc_server import GrpcServer

#: seconds between two looks whether calls come, how many in a row must see none, and seconds for them all
_PAUSE, _PAUSES, _SETTLE = 0.01, 5, 0.5


async def drain(server: GrpcServer, door: "Door", seconds: float) -> None:
    """New calls are refused; those under way may take `seconds`. `door` is the first handler of `server`."""
    end = monotonic() + seconds
    door.closed = True
    with suppress(TimeoutError):
        async with asyncio.timeout(min(seconds, _SETTLE)):
            await door.quiet()
    stopping = asyncio.ensure_future(server.stop(max(0.0, end - monotonic())))
    # In its first step it tells the clients that this connection takes no more calls.
    await asyncio.sleep(0)
    door.told.set()
    await stopping


class Door(grpc.GenericRpcHandler):  # type: ignore[misc]
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
