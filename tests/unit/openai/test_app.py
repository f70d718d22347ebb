"""Limits of the HTTP server: for bodies in progress, for bodies that do not arrive, and for readers that stall."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import numpy as np
import pytest
from aiohttp import ClientSession
from aiohttp.test_utils import TestServer

from rsrv.address import Address
from rsrv.openai import app
from rsrv.openai.app import Api
from rsrv.openai.command import listen
from rsrv.openai.inference import InputTensor, TaskModel
from rsrv.openai.usage import Usage
from tests.waiting import looped

# The server uses texts as keys of a request, because the oldest supported aiohttp does not have RequestKey.
pytestmark = pytest.mark.filterwarnings("ignore::aiohttp.web_exceptions.NotAppKeyWarning")

MODEL = TaskModel(
    "embed", "feature-extraction", {"text": InputTensor("text", "BYTES", (1, 1))}, {"embedding": "embedding"}
)


WRITER = TaskModel(
    "writer", "text-generation", {"bytes": InputTensor("x", "INT32", (1, -1))}, {"bytes": "token"}
)


STREAM = {"model": "writer", "prompt": "a", "stream": True}


class TwoModels:
    """A catalogue and a backend with two models, which answer when `ready` is set."""

    def __init__(self, width: int = 4) -> None:
        self.models: Mapping[str, TaskModel] = {MODEL.name: MODEL, WRITER.name: WRITER}
        self.ready, self.called = asyncio.Event(), asyncio.Event()
        self._width = width

    async def get(self, name: str) -> TaskModel:
        return self.models[name]

    async def infer(self, *_: Any) -> dict[str, Any]:
        self.called.set()
        await self.ready.wait()
        return {"embedding": np.zeros(self._width, np.float32)}

    async def stream(self, *_: Any) -> AsyncIterator[dict[str, Any]]:
        await self.ready.wait()
        yield {"token": np.array([65])}
        raise ValueError("a fault of rsrv")


@asynccontextmanager
async def served(models: Any) -> AsyncIterator[tuple[TestServer, Usage]]:
    usage = Usage()
    server = TestServer(Api(models, models, usage, None).application())
    await server.start_server()
    try:
        yield server, usage
    finally:
        await server.close()


async def post(session: ClientSession, server: TestServer, text: str) -> tuple[int, Any]:
    """Send a text. Return the status and the JSON of the answer."""
    body = {"model": "embed", "input": text}
    async with session.post(server.make_url("/v1/embeddings"), json=body) as answer:
        return answer.status, json.loads(await answer.text())


@looped
async def test_the_bodies_of_all_calls_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the bodies of all calls exceed the limit, a call is refused with a time to retry. A call that has ended is not counted."""
    monkeypatch.setattr(app, "MAX_BODIES", 1500)
    models = TwoModels()
    async with served(models) as (server, _), ClientSession() as session:
        first = asyncio.ensure_future(post(session, server, "x" * 1000))
        called = asyncio.ensure_future(models.called.wait())
        await asyncio.wait({first, called}, return_when=asyncio.FIRST_COMPLETED)
        status, answer = await post(session, server, "x" * 1000)
        assert (status, answer["error"]["code"]) == (429, "QUEUE_FULL")
        models.ready.set()
        assert (await first)[0] == 200
        assert (await post(session, server, "x" * 1000))[0] == 200


@looped
async def test_a_body_beyond_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body above the limit is refused, even if it is compressed, and the error names the limit."""
    monkeypatch.setattr(app, "MAX_BODY", 1 << 16)
    async with served(TwoModels()) as (server, _), ClientSession() as session:
        status, answer = await post(session, server, "x" * (1 << 16))
        assert (status, answer["error"]["code"]) == (413, "INVALID")
        body = {"model": "embed", "input": "x" * (1 << 19)}
        async with session.post(server.make_url("/v1/embeddings"), json=body, compress="deflate") as response:
            assert response.status == 413


@looped
async def test_a_body_that_does_not_arrive_ends_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a client announces a body and sends nothing, its call ends and frees its place."""
    monkeypatch.setattr(app, "BODY_S", 0.05)
    async with served(TwoModels()) as (server, _):
        reader, writer = await asyncio.open_connection(server.host, server.port)
        head = "POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n"
        writer.write(head.encode())
        assert await reader.readline() == b"HTTP/1.1 408 Request Timeout\r\n"
        writer.close()


@looped
async def test_a_reader_that_stalls_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a client does not read a large answer, it is disconnected, and the answer does not stay in memory."""
    monkeypatch.setattr(app, "STALL_S", 0.05)
    models = TwoModels(width=2_000_000)
    models.ready.set()
    async with served(models) as (server, usage):
        reader, writer = await asyncio.open_connection(server.host, server.port, limit=1024)
        body = b'{"model": "embed", "input": "a"}'
        head = "POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        while b'status="499"' not in usage.text():
            await asyncio.sleep(0)
        writer.close()


@looped
async def test_keys_and_bodies_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Keys and bodies are not logged, even if a request is not valid HTTP."""
    models: Any = TwoModels()
    start = b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    async with AsyncExitStack() as stack:
        address = await listen(
            Api(models, models, Usage(), None).application(), Address("127.0.0.1", 0), stack
        )
        for rest in (
            b"Authorization: Bearer secret\x01\r\n\r\n",
            b"Transfer-Encoding: chunked\r\n\r\nsecret\r\n",
            b"Content-Encoding: gzip\r\nContent-Length: 6\r\n\r\nsecret",
        ):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            writer.write(start + rest)
            assert b" 400 Bad Request" in await reader.readline()
            writer.close()
    assert "secret" not in caplog.text
    assert "Traceback" not in caplog.text


@looped
async def test_a_stream_that_fails_ends_with_an_event() -> None:
    """If a stream fails, its last event has the error, because HTTP allows no second answer."""
    models = TwoModels()
    models.ready.set()
    async with (
        served(models) as (server, _),
        ClientSession() as session,
        session.post(server.make_url("/v1/completions"), json=STREAM) as answer,
    ):
        *_, piece, error = (await answer.text()).strip().split("\n\n")
    assert '"text": "A"' in piece
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "INTERNAL"


class Typist(TwoModels):
    """A model whose tokens are bytes. They arrive in several responses."""

    async def stream(self, *_: Any) -> AsyncIterator[dict[str, Any]]:
        for tokens in (b"AB", b"C", b"DE"):
            yield {"token": np.array([*tokens])}


@looped
async def test_all_tokens_before_a_stop_text_are_counted() -> None:
    """The usage has the tokens of every response that was read. The text ends before the stop text."""
    body = {"model": "writer", "prompt": "xyz", "stop": "D"}
    async with (
        served(Typist()) as (server, _),
        ClientSession() as session,
        session.post(server.make_url("/v1/completions"), json=body) as answer,
    ):
        completion = json.loads(await answer.text())
    assert (completion["choices"][0]["text"], completion["choices"][0]["finish_reason"]) == ("ABC", "stop")
    assert completion["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}


@looped
async def test_a_silent_stream_gets_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the model starts, the stream sends comments, so that proxies see a living connection. The first piece follows them."""
    monkeypatch.setattr(app, "STATUS_S", 0.01)
    monkeypatch.setattr(app, "COMMENT_S", 0.01)
    models = TwoModels()
    async with (
        served(models) as (server, _),
        ClientSession() as session,
        session.post(server.make_url("/v1/completions"), json=STREAM) as answer,
    ):
        assert answer.status == 200
        for _ in range(3):
            assert (await answer.content.readline()).startswith(b": ")
            assert await answer.content.readline() == b"\n"
        models.ready.set()
        rest = await answer.text()
    assert '"text": "A"' in rest


@looped
async def test_several_servers_share_a_port() -> None:
    """Several servers listen at one port, and each of them answers some of the connections."""
    models: Any = TwoModels()
    usages = [Usage(), Usage()]
    async with AsyncExitStack() as stack:
        address = Address("127.0.0.1", 0)
        for usage in usages:
            address = await listen(Api(models, models, usage, None).application(), address, stack)
        while not all(b'status="200"' in usage.text() for usage in usages):
            async with ClientSession() as session, session.get(f"http://{address}/v1/models") as answer:
                assert answer.status == 200
