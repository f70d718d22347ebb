"""A gRPC server that outlives its own death: the control services' and the gateway's."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from rsrv.address import parse_address

log = logging.getLogger("rsrv.control")

#: As Triton's, so that a client's keepalive that suits a tritonserver suits all that stand beside or before it.
KEEPALIVE: Final[Sequence[tuple[str, int]]] = (
    ("grpc.keepalive_time_ms", 7_200_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 2),
    ("grpc.http2.min_ping_interval_without_data_ms", 300_000),
    ("grpc.http2.max_ping_strikes", 2),
)
#: seconds between two looks whether it has died, and between two tries to listen again
_LOOK = 0.1


class ListenError(Exception):
    """A port cannot be listened on; the message names the setting and says what to do."""


class GrpcServer:
    """Of grpc.aio. That one ends for good when a client calls a method whose name is not UTF-8: then another takes over,
    and calls that are under way end where they are."""

    def __init__(self, make: Callable[[], Any], setting: str) -> None:
        """`make`: a new server of grpc.aio with all that it serves; `setting`: that has the address."""
        self._make = make
        self._setting = setting
        self._server: Any = None
        #: what looks after it
        self._keeper: asyncio.Task[None] | None = None
        #: those that have died, while calls of theirs are under way, and what waits for their end
        self._dead: dict[Any, asyncio.Task[None]] = {}

    async def start(self, address: str, credentials: Any = None) -> int:
        """`address`: HOST:PORT, or unix:PATH, which then only this user can reach; `credentials`: None: without TLS.

        The port that it listens on. Raises ListenError.
        """
        port = await self._listen(address, credentials)
        if not address.startswith("unix:"):
            address = f"{address.rpartition(':')[0]}:{port}"
        self._keeper = asyncio.create_task(self._keep(address, credentials))
        return port

    async def stop(self, seconds: float | None) -> None:
        """No new calls; those under way may take `seconds`. May be called again, to shorten that."""
        if self._keeper is not None:
            self._keeper.cancel()
        # 0 would have it wait for a moment, and it takes the process along when another stop ends within that.
        seconds = seconds or None
        dead = [asyncio.ensure_future(server.stop(seconds)) for server in self._dead]
        if self._server is not None:
            # Not beside the others, but now: calls that come with the next turn of the loop are new ones already.
            await self._server.stop(seconds)
        await asyncio.gather(*dead, *self._dead.values())

    async def _listen(self, address: str, credentials: Any) -> int:
        server = self._make()
        port = self._bind(server, address, credentials)
        self._server = server
        await server.start()
        return port

    def _bind(self, server: Any, address: str, credentials: Any) -> int:
        socket = _path(address)
        if socket is None:
            try:
                parse_address(address, any_host=True, any_port=True)  # gRPC would take another port
            except ValueError as error:
                raise ListenError(f"{self._setting}: {error}") from None
        try:
            bound: int = (
                server.add_insecure_port(address)
                if credentials is None
                else server.add_secure_port(address, credentials)
            )
        except RuntimeError:
            # gRPC says why only in a log of its own.
            or_else = "" if credentials is None else ", or the certificate and key cannot be used"
            raise ListenError(
                f"{self._setting}: cannot listen on {address}: it is taken, or not of this machine{or_else}"
            ) from None
        if socket is not None:
            socket.chmod(0o600)
        return bound

    async def _keep(self, address: str, credentials: Any) -> None:
        socket = _path(address)
        while True:
            try:
                while await self._server.wait_for_termination(_LOOK):
                    pass
            except Exception as error:  # noqa: BLE001  whatever it died of
                log.error("%s: gRPC's server has died, and another takes over: %s", self._setting, error)
            dead, self._server = self._server, None
            self._dead[dead] = asyncio.create_task(self._bury(dead))
            # The dead one removes its socket's file, whoever's that is by then.
            while socket is not None and socket.exists():
                await asyncio.sleep(_LOOK)
            while True:
                try:
                    await self._listen(address, credentials)
                    break
                except ListenError:  # the dead one may still have the port
                    await asyncio.sleep(_LOOK)

    async def _bury(self, server: Any) -> None:
        """When its last call has ended. Not to be cancelled: what it waits for is what `stop` waits for."""
        try:
            await server.wait_for_termination()
        except Exception:  # noqa: BLE001  what it died of was said
            await server.stop(None)
        del self._dead[server]


def _path(address: str) -> Path | None:
    """Of a Unix socket; None: it is none."""
    return Path(address.removeprefix("unix:")) if address.startswith("unix:") else None
