"""The probe for hanging servers."""

from __future__ import annotations

import asyncio
import socket
from unittest.mock import Mock

import pytest

from rsrv.address import Address
from rsrv.serve.child_probes import wait_for_hang
from tests.unit.control.virtual import run
from tests.waiting import looped


def test_a_server_that_takes_connections_and_says_nothing_hangs() -> None:
    """A server that accepts connections and sends no answer hangs. A stopped process behaves like this."""

    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as stopped:
            await wait_for_hang(Address("127.0.0.1", stopped.getsockname()[1]), 0.3)

    looped(scenario)()


def test_any_answer_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any reaction is an answer, even an error or a closed connection. An answer resets the count of missing answers."""
    requests: list[bytes] = []

    async def connect(host: str, port: int) -> tuple[asyncio.StreamReader, Mock]:
        reader = asyncio.StreamReader()
        turn = len(requests) % 4
        if turn == 0:
            reader.feed_data(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        elif turn != 1:
            reader.feed_eof()
        return reader, Mock(write=requests.append)

    async def scenario() -> None:
        monkeypatch.setattr(asyncio, "open_connection", connect)
        waiting = asyncio.ensure_future(wait_for_hang(Address("127.0.0.1", 1), 60.0))
        while len(requests) < 40:
            await asyncio.sleep(1)
        assert not waiting.done()
        waiting.cancel()

    run(scenario())
    assert all(each.startswith(b"GET /v2/health/live HTTP/1.1\r\n") for each in requests)


def test_a_server_that_takes_no_connections_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that accepts no connection does not hang: it is loading, or it has ended."""
    refused = 0

    async def refuse(host: str, port: int) -> None:
        nonlocal refused
        refused += 1
        raise ConnectionRefusedError

    async def scenario() -> None:
        monkeypatch.setattr(asyncio, "open_connection", refuse)
        waiting = asyncio.ensure_future(wait_for_hang(Address("127.0.0.1", 1), 60.0))
        while refused < 16:
            await asyncio.sleep(1)
        assert not waiting.done()
        waiting.cancel()

    run(scenario())
