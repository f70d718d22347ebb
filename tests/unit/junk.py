"""Requests that are not HTTP, sent to a port for clients."""

import asyncio
import time

_JUNK = b"GET http://[::1 HTTP/1.1\r\nHost: a\r\n\r\n"


async def throw_junk(port: int, count: int = 50) -> int:
    """Send this many bad requests. Return the most lines of a log that they may cause, at one line per second."""
    began = time.monotonic()
    for _ in range(count):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(_JUNK)
        assert (await reader.read()).startswith(b"HTTP/1.0 400")
        writer.close()
        await writer.wait_closed()
    return int(time.monotonic() - began) + 1
