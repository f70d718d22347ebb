"""GET /metrics over HTTP, for Prometheus: what it takes of HTTP/1.1, and nothing more."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

log = logging.getLogger("rsrv.control")

#: bytes of a request, its headers included
_MOST = 8 << 10
#: seconds that a client may take to send it, and to take the answer
_PATIENCE = 10.0
#: connections at a time
_CONNECTIONS = 32
_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class MetricsServer:
    """`text` makes the page."""

    def __init__(self, text: Callable[[], Awaitable[str]]) -> None:
        self._text = text
        self._server: asyncio.Server | None = None
        self._open = 0

    async def start(self, address: str) -> int:
        """Listen on HOST:PORT; the port. Raises OSError, and ValueError: that is no address."""
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise ValueError(f"{address!r} is not HOST:PORT")
        self._server = await asyncio.start_server(
            self._serve, host.removeprefix("[").removesuffix("]"), int(port), limit=_MOST
        )
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self, grace: float = 0.0) -> None:
        """Connections end with the process."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            if self._open <= _CONNECTIONS:
                async with asyncio.timeout(_PATIENCE):
                    writer.write(await self._answer(reader))
                    await writer.drain()
        except (TimeoutError, OSError):
            pass
        except Exception:
            log.exception("a request for metrics failed")
        finally:
            self._open -= 1
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader) -> bytes:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return _response("400 Bad Request", "this is no HTTP request, or one that is too long\n")
        words = head.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return _response("400 Bad Request", "this is no HTTP request\n")
        method, target = words[0], words[1].partition(b"?")[0]
        if target != b"/metrics":
            return _response("404 Not Found", "there is /metrics\n")
        if method != b"GET":
            return _response("405 Method Not Allowed", "GET it\n", "Allow: GET\r\n")
        return _response("200 OK", await self._text())


def _response(status: str, text: str, more: str = "") -> bytes:
    body = text.encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: {_TYPE}\r\nContent-Length: {len(body)}\r\n{more}Connection: close\r\n\r\n"
    return head.encode() + body
