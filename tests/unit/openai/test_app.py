"""Limits of the HTTP server: bodies in progress, bodies that do not arrive, and readers that stall."""

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

# The server has texts as keys of a request: RequestKey needs a newer aiohttp than the oldest supported one.
pytestmark = pytest.mark.filterwarnings("ignore::aiohttp.web_exceptions.NotAppKeyWarning")

MODEL = TaskModel(
    "embed", "feature-extraction", {"text": InputTensor("text", "BYTES", (1, 1))}, {"embedding": "embedding"}
)


WRITER = TaskModel(
    "writer", "text-generation", {"bytes": InputTensor("x", "INT32", (1, -1))}, {"bytes": "token"}
)


STREAM = {"model": "writer", "prompt": "a", "stream": True}


class OneModel:
    """A catalogue and a backend with one model, which answers once `ready` is set."""

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
async def served(model: Any) -> AsyncIterator[tuple[TestServer, Usage]]:
    usage = Usage()
    server = TestServer(Api(model, model, usage, None).application())
    await server.start_server()
    try:
        yield server, usage
    finally:
        await server.close()


async def post(session: ClientSession, server: TestServer, text: str) -> tuple[int, Any]:
    """Return the status and the JSON of an answer to a text."""
    body = {"model": "embed", "input": text}
    async with session.post(server.make_url("/v1/embeddings"), json=body) as answer:
        return answer.status, json.loads(await answer.text())


@looped
async def test_the_bodies_of_all_calls_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call beyond the limit is refused with a time to retry; a call that has ended counts no more."""
    monkeypatch.setattr(app, "MAX_BODIES", 1500)
    model = OneModel()
    async with served(model) as (server, _), ClientSession() as session:
        first = asyncio.ensure_future(post(session, server, "x" * 1000))
        called = asyncio.ensure_future(model.called.wait())
        await asyncio.wait({first, called}, return_when=asyncio.FIRST_COMPLETED)
        status, answer = await post(session, server, "x" * 1000)
        assert (status, answer["error"]["code"]) == (429, "QUEUE_FULL")
        model.ready.set()
        assert (await first)[0] == 200
        assert (await post(session, server, "x" * 1000))[0] == 200


@looped
async def test_a_body_beyond_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the limit, also for a body that is compressed."""
    monkeypatch.setattr(app, "MAX_BODY", 1 << 16)
    async with served(OneModel()) as (server, _), ClientSession() as session:
        status, answer = await post(session, server, "x" * (1 << 16))
        assert (status, answer["error"]["code"]) == (413, "INVALID")
        body = {"model": "embed", "input": "x" * (1 << 19)}
        async with session.post(server.make_url("/v1/embeddings"), json=body, compress="deflate") as found:
            assert found.status == 413


@looped
async def test_a_body_that_does_not_arrive_ends_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that announces a body and sends nothing holds no place."""
    monkeypatch.setattr(app, "BODY_S", 0.05)
    async with served(OneModel()) as (server, _):
        reader, writer = await asyncio.open_connection(server.host, server.port)
        head = "POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n"
        writer.write(head.encode())
        assert await reader.readline() == b"HTTP/1.1 408 Request Timeout\r\n"
        writer.close()


@looped
async def test_a_reader_that_stalls_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large answer that nobody takes does not stay in memory, and the call ends."""
    monkeypatch.setattr(app, "STALL_S", 0.05)
    model = OneModel(width=2_000_000)
    model.ready.set()
    async with served(model) as (server, usage):
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
    """Not even those of requests that are no HTTP."""
    model: Any = OneModel()
    start = b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    async with AsyncExitStack() as stack:
        address = await listen(Api(model, model, Usage(), None).application(), Address("127.0.0.1", 0), stack)
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
    """An answer of its own within the stream would be no HTTP."""
    model = OneModel()
    model.ready.set()
    async with (
        served(model) as (server, _),
        ClientSession() as session,
        session.post(server.make_url("/v1/completions"), json=STREAM) as answer,
    ):
        *_, piece, error = (await answer.text()).strip().split("\n\n")
    assert '"text": "A"' in piece
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "INTERNAL"


class Typist(OneModel):
    """A model whose tokens are bytes, and come in several responses."""

    async def stream(self, *_: Any) -> AsyncIterator[dict[str, Any]]:
        for tokens in (b"AB", b"C", b"DE"):
            yield {"token": np.array([*tokens])}


@looped
async def test_all_tokens_before_a_stop_text_are_counted() -> None:
    """The usage has the tokens of every response that was read, and the text ends before the stop text."""
    body = {"model": "writer", "prompt": "xyz", "stop": "D"}
    async with (
        served(Typist()) as (server, _),
        ClientSession() as session,
        session.post(server.make_url("/v1/completions"), json=body) as answer,
    ):
        found = json.loads(await answer.text())
    assert (found["choices"][0]["text"], found["choices"][0]["finish_reason"]) == ("ABC", "stop")
    assert found["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}


@looped
async def test_a_silent_stream_gets_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy sees that the connection lives while the model starts; the first piece comes after the comments."""
    monkeypatch.setattr(app, "STATUS_S", 0.01)
    monkeypatch.setattr(app, "COMMENT_S", 0.01)
    model = OneModel()
    async with (
        served(model) as (server, _),
        ClientSession() as session,
        session.post(server.make_url("/v1/completions"), json=STREAM) as answer,
    ):
        assert answer.status == 200
        for _ in range(3):
            assert (await answer.content.readline()).startswith(b": ")
            assert await answer.content.readline() == b"\n"
        model.ready.set()
        rest = await answer.text()
    assert '"text": "A"' in rest


@looped
async def test_several_servers_share_a_port() -> None:
    """Each of them answers some of the connections."""
    model: Any = OneModel()
    usages = [Usage(), Usage()]
    async with AsyncExitStack() as stack:
        address = Address("127.0.0.1", 0)
        for usage in usages:
            address = await listen(Api(model, model, usage, None).application(), address, stack)
        while not all(b'status="200"' in usage.text() for usage in usages):
            async with ClientSession() as session, session.get(f"http://{address}/v1/models") as answer:
                assert answer.status == 200
