"""A client and a server that send data which gRPC's own would not send: one call per connection, frame by frame."""

from __future__ import annotations

import asyncio
import re
import struct
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

#: Types and flags of frames.
_DATA, _HEADERS, _SETTINGS = 0, 1, 4
_END_STREAM, _END_HEADERS = 1, 4


async def status(
    where: int | Path, method: bytes, message: bytes = b"", headers: Iterable[tuple[bytes, bytes]] = ()
) -> int | None:
    """Return the gRPC status of a call, or None if the connection ended without a status.

    `where` is a port of 127.0.0.1, or the path of a Unix socket. The headers must be smaller than 16 kB.
    """
    reader, writer = await _connect(where)
    every = [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", method),
        (b":authority", b"gateway"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
        *headers,
    ]
    body = b"\0" + struct.pack(">I", len(message)) + message
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(_SETTINGS, 0, 0, b""))
    writer.write(_frame(_HEADERS, _END_HEADERS, 1, _block(every)) + _frame(_DATA, _END_STREAM, 1, body))
    got = b""
    try:
        # gRPC's server does not compress the value, nor the name in its first use on a connection.
        while not (match := re.search(rb"grpc-status[\x01\x02](\d+)", got)):
            data = await reader.read(65536)
            if not data:
                return None
            got += data
        return int(match[1])
    finally:
        writer.close()


async def _connect(where: int | Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect with retries, as clients do, because a port is closed for a moment while its server is replaced."""
    while True:
        try:
            if isinstance(where, Path):
                return await asyncio.open_unix_connection(where)
            return await asyncio.open_connection("127.0.0.1", where)
        except (ConnectionRefusedError, FileNotFoundError):
            await asyncio.sleep(0.01)


@asynccontextmanager
async def refusing(code: int, message: bytes, trailers: Iterable[tuple[bytes, bytes]]) -> AsyncIterator[int]:
    """Yield the port of a server that refuses the first call on each connection."""
    every = [
        (b":status", b"200"),
        (b"content-type", b"application/grpc"),
        (b"grpc-status", b"%d" % code),
        (b"grpc-message", message),
        *trailers,
    ]

    connections: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        got = b""
        writer.write(_frame(_SETTINGS, 0, 0, b""))
        while b"/inference." not in got and (data := await reader.read(65536)):
            got += data
        writer.write(_frame(_HEADERS, _END_HEADERS | _END_STREAM, 1, _block(every)))
        await reader.read()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        # A connection that is open at the end of the loop would cause a warning in a later test.
        server.close()
        for writer in connections:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


def _block(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    return b"".join(b"\0" + _text(name) + _text(value) for name, value in headers)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def _text(text: bytes) -> bytes:
    """Return a string in HPACK, without Huffman coding."""
    size = len(text)
    if size < 127:
        return bytes([size]) + text
    size -= 127
    length = [127]
    while size >= 128:
        length.append(size % 128 + 128)
        size //= 128
    return bytes([*length, size]) + text
