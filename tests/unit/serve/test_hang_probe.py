"""The probe for hanging processes, with real sockets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest

from rsrv.address import Address
from rsrv.serve.child_probes import wait_for_hang

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

#: Seconds that no answer takes.
SHORT = 0.3


async def serving(answer: Answer) -> tuple[asyncio.Server, Address]:
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    return server, Address("0.0.0.0", server.sockets[0].getsockname()[1])


def test_a_server_that_takes_connections_and_says_nothing_hangs() -> None:
    """A server that accepts connections without answering, as a stopped one, hangs."""

    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as stopped:
            await wait_for_hang(Address("127.0.0.1", stopped.getsockname()[1]), SHORT)

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_any_answer_is_one() -> None:
    """Any answer counts, also a refusal or a closed connection, and resets the count of missing ones."""

    async def scenario() -> None:
        asked: list[bytes] = []
        enough = asyncio.Event()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked.append(await reader.readline())
            turn = len(asked) % 4
            if turn == 1:
                writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            elif turn == 2:
                await reader.read()
            writer.close()
            if len(asked) == 16:
                enough.set()

        server, address = await serving(answer)
        async with server:
            waiting = asyncio.ensure_future(wait_for_hang(address, SHORT))
            await enough.wait()
            assert not waiting.done()
            waiting.cancel()
        # A probe that the machine delays for its whole time ends before it asks.
        assert set(asked) - {b""} == {b"GET /v2/health/live HTTP/1.1\r\n"}

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_a_server_that_takes_no_connections_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that accepts no connection is loading or has ended, and does not hang."""

    async def scenario() -> None:
        refused = 0
        enough = asyncio.Event()

        # A real refusal takes longer than any patience where the machine is busy.
        async def refuse(host: str, port: int) -> None:
            nonlocal refused
            refused += 1
            if refused == 16:
                enough.set()
            raise ConnectionRefusedError

        monkeypatch.setattr(asyncio, "open_connection", refuse)
        waiting = asyncio.ensure_future(wait_for_hang(Address("127.0.0.1", 1), 0.006))
        await enough.wait()
        assert not waiting.done()
        waiting.cancel()

    asyncio.run(asyncio.wait_for(scenario(), 30))
