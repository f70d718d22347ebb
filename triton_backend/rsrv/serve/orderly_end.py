"""The orderly end of a tritonserver, whatever connections its clients keep.

Triton counts connections, not requests. When it stops, it first waits for all HTTP connections to close, and then unloads its
models. So one idle connection takes the whole drain time, and leaves no time for the models. For an open gRPC stream, Triton
waits without a limit. This module therefore unloads the models as soon as no client sends requests any more. After that, a
server that still waits can be killed without a loss.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from typing import Protocol

from rsrv.address import parse_address
from rsrv.control.triton import TritonError

log = logging.getLogger(__name__)

#: If no request comes for this many seconds, clients with open connections count as idle.
_QUIET_S = 1.0
#: Seconds between two checks of the models that are being unloaded.
_POLL_S = 0.1
#: Seconds that the server has to answer on the connection that is kept open.
_ANSWER_S = 2.0


class RunningServer(Protocol):
    """The part of `rsrv.control.triton.Triton` that is used here. All calls raise TritonError."""

    @property
    def http(self) -> str:
        """HOST:PORT of the server's HTTP front end, or empty if it has none."""

    async def request_count(self) -> int:
        """Return the number of requests that have left Triton's queues."""

    async def remaining(self) -> dict[str, bool]:
        """Return the models that are not unloaded yet. The value is True if the model is ready."""

    async def dismiss(self, name: str) -> None:
        """Make Triton refuse new requests for a model, and unload it once its requests in flight are answered."""


async def end_in_order(
    server: RunningServer, terminate: Callable[[], None], callers: Collection[str], linger_s: float
) -> bool:
    """Make the server end with `terminate`, and unload its models. Return False if they cannot be unloaded.

    Clients with open connections are served until they are idle, for `linger_s` seconds at most. `callers` are the models
    that call other models. They are unloaded first.
    """
    try:
        # Keep an HTTP connection open while the models are unloaded. Triton waits for the end of this connection, and every
        # release of Triton still answers gRPC in the meantime.
        connection = await _connect(server.http) if server.http else None
    except TimeoutError:
        terminate()  # The server hangs.
        return False
    if connection is not None:
        terminate()
    try:
        await _wait_until_quiet(server, linger_s)
        await _unload(server, callers)
    except TritonError as error:
        log.info(
            "the models could not be unloaded in advance, so tritonserver unloads them itself: %s", error
        )
        return False
    finally:
        if connection is None:
            terminate()
        else:
            connection.close()
    return True


async def _connect(address: str) -> asyncio.StreamWriter | None:
    """Return an HTTP connection on which the server has answered, or None if it does not listen.

    Raises TimeoutError if the server accepts the connection, but does not answer.
    """
    http = parse_address(address)
    try:
        reader, writer = await asyncio.open_connection(http.host, http.port)
    except OSError:
        return None
    try:
        async with asyncio.timeout(_ANSWER_S):
            writer.write(f"GET /v2/health/live HTTP/1.1\r\nHost: {address}\r\n\r\n".encode())
            await reader.readline()
    except OSError as error:
        writer.close()
        if isinstance(error, TimeoutError):
            raise
        return None
    return writer


async def _wait_until_quiet(server: RunningServer, linger_s: float) -> None:
    """Wait until no request has come for _QUIET_S, and at most `linger_s` seconds."""
    until = asyncio.get_running_loop().time() + linger_s
    before, quiet = await server.request_count(), False
    while not quiet and asyncio.get_running_loop().time() < until:
        await asyncio.sleep(_QUIET_S)
        count = await server.request_count()
        before, quiet = count, count == before


async def _unload(server: RunningServer, callers: Collection[str]) -> None:
    """Unload all models, the callers first. Wait until all requests in flight are answered."""
    for first in (True, False):
        while models := {
            name: ready for name, ready in (await server.remaining()).items() if name in callers or not first
        }:
            await asyncio.gather(*(server.dismiss(name) for name, ready in models.items() if ready))
            await asyncio.sleep(_POLL_S)
