"""Inference over HTTP through the gateway: the choice of the worker, and the answer to the client."""

from __future__ import annotations

import asyncio
import errno
import gzip
import json
import socket
import threading
import tracemalloc
from collections.abc import AsyncIterator
from io import BytesIO
from typing import Any
from unittest.mock import Mock, patch

import pytest
from aiohttp import ClientConnectionResetError, ClientError, web
from aiohttp.http_writer import StreamWriter
from multidict import CIMultiDict

from rsrv.address import Address
from rsrv.placement.contract import Routes, Worker
from rsrv.settings_fleet import GatewaySection
from rsrv_gateway.http_pools import HttpQuery, HttpReply, Pool, _closes_new_connections
from rsrv_gateway.upload import SMALL_BODY_BYTES
from tests.unit.gateway.http_proxies import INFER, FakeHttpWorker, House, serving
from tests.unit.gateway.spellings import SPELLINGS
from tests.unit.gateway.workers import Relay
from tests.waiting import looped

#: A body that is larger than the part that the gateway buffers before it sends it to a worker.
LARGE = b"{}" + bytes(range(256)) * (SMALL_BODY_BYTES // 64)


@looped
async def test_bytes_pass_through() -> None:
    """Requests and answers pass unchanged with their headers, except the headers of the connection."""
    async with serving(1) as house:
        (worker,) = house.workers
        headers = {
            "Content-Type": "application/octet-stream",
            "Inference-Header-Content-Length": "2",
            "Accept-Encoding": "gzip",
            "Content-Encoding": "identity",
            "Traceparent": "00-1-2-3",
            "Connection": "X-Private",
            "X-Private": "1",
        }
        answer = await house.infer(b"{}\0\1\2", f"{INFER}?q=%20", headers=headers)

        assert (answer.status, answer.body) == (200, b"{}\0\1\2")
        assert answer.headers["X-Worker"] == "a"
        (got,) = worker.got
        assert (got.method, got.path, got.body) == ("POST", f"{INFER}?q=%20", b"{}\0\1\2")
        for name in list(headers)[:5]:
            assert got.headers[name] == headers[name]
        assert "X-Private" not in got.headers
        assert got.headers["Host"] == f"127.0.0.1:{worker.port}"


@pytest.mark.parametrize("chunked", [False, True])
@looped
async def test_large_bodies_pass_through(chunked: bool) -> None:
    """Large bodies pass completely, with and without a known length."""

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(LARGE), 100_000):
            yield LARGE[start : start + 100_000]

    async with serving(1) as house:
        headers = {"Inference-Header-Content-Length": "2"}
        answer = await house.infer(pieces() if chunked else sized(LARGE), headers=headers)

        assert answer.body == LARGE
        assert ("Content-Length" in house.workers[0].got[0].headers) is not chunked


def sized(data: bytes) -> BytesIO:
    """Return a body that aiohttp sends with its length, without a warning."""
    return BytesIO(data)


@looped
async def test_a_large_body_is_sent_on_as_it_comes() -> None:
    """The beginning of a large request reaches the worker before the client sends the end."""
    async with serving(1) as house:
        (worker,) = house.workers

        async def pieces() -> AsyncIterator[bytes]:
            yield b"{}" + bytes(1000)
            await worker.called.wait()
            yield b"end"

        answer = await house.infer(pieces(), headers={"Inference-Header-Content-Length": "2"})

        assert answer.body == b"{}" + bytes(1000) + b"end"


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("binary", [False, True])
@looped
async def test_items_are_read_where_they_count(binary: bool, compressed: bool) -> None:
    """The number of items of a request is the extent of its model's batch axis, even if the request is compressed."""
    table = {"m": Routes(ready=("a",), batch_input=("X", 0))}
    request = json.dumps({"inputs": [{"name": "Y", "shape": [7]}, {"name": "X", "shape": [5, 2]}]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(request))} if binary else {}
    body = request + bytes(40) if binary else request
    if compressed:
        body, headers = gzip.compress(body), {**headers, "Content-Encoding": "gzip"}

    async with serving(1, table) as house:
        await house.infer(body, headers=headers)

        assert house.proxy.counts().items == {"m": 5}


@looped
async def test_a_body_that_inflates_without_end_is_refused() -> None:
    """A body that becomes a thousand times larger is refused. It takes no more memory than other bodies."""
    bomb = gzip.compress(b'{"id": "' + bytes(64 << 20) + b'"}', 1)

    async with serving(1) as house:
        tracemalloc.start()
        try:
            answer = await house.infer(bomb, headers={"Content-Encoding": "gzip"})
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()

        assert (answer.status, b"larger than 16 MiB, and more than 100 times" in answer.body) == (400, True)
        assert most < 8 << 20
        assert house.workers[0].got == []


@looped
async def test_another_worker_gets_a_large_request_from_its_beginning() -> None:
    """If a worker refuses a large request, another worker gets all of it."""
    async with serving(2) as house:
        first, _ = house.workers
        first.does[""] = first.says(503, {"error": "[rsrv:RUNTIME_DOWN] wait"})
        answer = await house.infer(sized(LARGE), headers={"Inference-Header-Content-Length": "2"})

        assert (answer.headers["X-Worker"], answer.body) == ("b", LARGE)
        assert first.got[0].body == LARGE
        assert house.proxy.http.keeping.bytes == 0


@looped
async def test_too_much_to_keep() -> None:
    """A body that exceeds the buffer is sent completely to one worker. If this worker refuses, no other worker gets it."""
    async with serving(2) as house:
        first, second = house.workers
        keeping, headers = house.proxy.http.keeping, {"Inference-Header-Content-Length": "2"}
        keeping.most = len(LARGE) // 2
        assert (await house.infer(sized(LARGE), headers=headers)).body == LARGE
        assert keeping.bytes == 0

        second.does[""] = second.says(503, {"error": "[rsrv:RUNTIME_DOWN] wait"})
        assert (await house.infer(sized(LARGE), headers=headers)).status == 503
        assert [len(worker.got) for worker in (first, second)] == [1, 1]
        assert second.got[0].body == LARGE
        assert keeping.bytes == 0


@pytest.mark.parametrize(
    ("status", "message", "code", "http_refusal", "retry"),
    [
        (503, "[rsrv:QUEUE_FULL] retry after 2100 ms", "RESOURCE_EXHAUSTED", 429, "3"),
        (503, "in ensemble 'e', [rsrv:QUEUE_FULL] retry later", "RESOURCE_EXHAUSTED", 429, "1"),
        (503, "[rsrv:DEADLINE] too late", "DEADLINE_EXCEEDED", 504, None),
        (400, "wrong shape", "INVALID_ARGUMENT", 400, None),
        (400, "the text says [rsrv:QUEUE_FULL]", "INVALID_ARGUMENT", 400, None),
        (403, "restricted", "PERMISSION_DENIED", 403, None),
        (500, "the model failed", "INTERNAL", 500, None),
        (501, "decoupled", "UNIMPLEMENTED", 501, None),
        (418, "teapot", "UNKNOWN", 418, None),
    ],
)
@looped
async def test_what_is_final(
    status: int, message: str, code: str, http_refusal: int, retry: str | None
) -> None:
    """If a worker's refusal is final, the client gets it with the status of its tag, and no other worker is asked."""
    async with serving(2) as house:
        first, second = house.workers
        headers = {"Content-Type": "text/plain", "X-More": "1"}
        first.does[""] = first.says(status, {"error": message}, headers)
        answer = await house.infer()

        assert answer.error == (http_refusal, message)
        assert answer.headers["X-More"] == "1"
        assert answer.headers.get("Retry-After") == retry
        assert second.got == []
        assert house.proxy.counts().requests == {("m", "a", code): 1}


@looped
async def test_errors_of_what_is_generated() -> None:
    """Triton reports all errors of models on /generate with status 400.

    So the error's tag decides whether another worker gets the request, and which status the client gets.
    """
    async with serving(2) as house:
        first, _ = house.workers
        first.does[""] = first.says(400, b'data: {"error":"[rsrv:RUNTIME_DOWN] wait"}\n\n')
        answer = await house.infer(path="/v2/models/m/generate_stream")
        assert answer.headers["X-Worker"] == "b"

        for worker in house.workers:
            worker.does[""] = worker.says(400, b'data: {"error":"[rsrv:QUEUE_FULL] wait"}\n\n')
        assert (await house.infer(path="/v2/models/m/generate")).status == 429
        assert (await house.infer(path="/v2/models/m/generate")).body.startswith(b"data: ")


@looped
@pytest.mark.parametrize(
    ("body", "received"),
    [
        (b'{"text_input": "x"}', b'{"stream":false,"text_input": "x"}'),
        (b" \n{ }", b' \n{"stream":false }'),
        (b'{"text_input": "x", "stream": true}', b'{"text_input": "x", "stream": true}'),
        (b'{"a": "' + b"x" * 400_000 + b'"}', b'{"stream":false,"a": "' + b"x" * 400_000 + b'"}'),
        (b"", b""),
    ],
)
async def test_generate_asks_for_one_response(body: bytes, received: bytes) -> None:
    """The gateway adds `"stream":false` to a request to /generate, because Triton's /generate accepts no stream.

    A request that has `stream` itself, and a request to /generate_stream, pass unchanged.
    """
    async with serving(1) as house:
        for path, expected in (("generate", received), ("generate_stream", body)):
            await house.infer(body, f"/v2/models/m/{path}")
            assert house.workers[0].got[-1].body == expected


@looped
async def test_a_worker_is_gone() -> None:
    """If a worker's port is closed, another worker gets the request, and the first one is probed."""
    async with serving(2) as house:
        first, _ = house.workers
        await first.kill()

        assert (await house.infer()).headers["X-Worker"] == "b"
        assert house.brain.failures == ["a"]
        await house.apply({"m": Routes(ready=("a",))})
        status, message = (await house.infer()).error
        assert (status, "127.0.0.1" in message) == (503, False)


@looped
async def test_a_worker_dies_with_a_request() -> None:
    """If a worker dies with a request in flight, another worker answers the request."""
    async with serving(2) as house:
        first, _ = house.workers

        async def die(request: Any) -> web.StreamResponse:
            await first.read(request)
            request.transport.abort()
            return web.Response()

        first.does[""] = die

        assert (await house.infer()).headers["X-Worker"] == "b"
        assert house.brain.failures == ["a"]


@looped
async def test_the_only_worker_closes_a_connection() -> None:
    """If a connection closes with a request on it, the request is sent once more on a new connection."""
    async with serving(1) as house:
        (worker,) = house.workers
        closes = 1

        async def close(request: Any) -> web.StreamResponse:
            nonlocal closes
            closes -= 1
            if closes >= 0:
                request.transport.abort()
            return await worker.echo(request)

        worker.does[""] = close
        assert (await house.infer()).status == 200

        closes = 2
        assert (await house.infer()).status == 503
        assert closes == 0


@looped
async def test_a_worker_dies_with_an_answer() -> None:
    """If a small answer breaks, another worker gets the request. If a large answer breaks, it also breaks for the client."""
    async with serving(2) as house:
        first, _ = house.workers
        size = 100

        async def die(request: Any) -> web.StreamResponse:
            await first.read(request)
            response = web.StreamResponse()
            response.content_length = size
            await response.prepare(request)
            await response.write(b"beginning")
            request.transport.close()
            return response

        first.does[""] = die
        assert (await house.infer()).headers["X-Worker"] == "b"

        size = SMALL_BODY_BYTES + 1
        await house.apply({"m": Routes(ready=("a",))})
        with pytest.raises(ClientError):
            await house.infer()
        assert house.proxy.counts().requests[("m", "a", "UNAVAILABLE")] == 1


@looped
async def test_a_worker_without_http() -> None:
    """Only workers that serve HTTP get requests."""
    async with serving(2) as house:
        first, second = house.workers
        bare = type(first.worker)("a", "127.0.0.1:1", None)
        await house.proxy.apply(
            {"a": bare, "b": second.worker}, {"m": Routes(ready=("a", "b")), "x": Routes(ready=("a",))}
        )

        assert (await house.infer()).headers["X-Worker"] == "b"
        assert (await house.infer(path="/v2/models/x/infer")).status == 503


@looped
async def test_a_sequence_whose_id_is_no_text() -> None:
    """A sequence id that is not valid text still chooses one worker."""
    async with serving(2) as house:
        sent = [await house.infer(b'{"parameters":{"sequence_id":"\\ud800"}}') for _ in range(3)]

        assert len({answer.headers["X-Worker"] for answer in sent}) == 1


@looped
async def test_a_client_that_stalls() -> None:
    """A request whose body stops arriving gets 504. Its worker is not taken for dead."""
    async with serving(1, request_timeout_s=0.2) as house:
        reader, writer = await asyncio.open_connection("127.0.0.1", house.proxy.http.port)
        for length in (10, SMALL_BODY_BYTES + 10):
            head = f"POST {INFER} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n"
            writer.write(f"{head}Inference-Header-Content-Length: 2\r\n\r\n{{}}".encode())
            assert (await reader.readline()).startswith(b"HTTP/1.1 504")
            writer.close()
            reader, writer = await asyncio.open_connection("127.0.0.1", house.proxy.http.port)
        writer.close()

        assert house.brain.failures == []


def test_a_dns_that_hangs_does_not_hold_back_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop can end while a name server does not answer the question for a worker's address."""
    query_started, test_ended, waited_for = threading.Event(), threading.Event(), []

    def hang(*_: Any, **__: Any) -> Any:
        query_started.set()
        waited_for.append(not test_ended.wait(60))
        raise OSError

    async def main() -> None:
        pool = Pool("worker:8000", GatewaySection(), None)
        asking = asyncio.create_task(pool.ask(HttpQuery("GET", "/v2", CIMultiDict(), whole=True)))
        await asyncio.to_thread(query_started.wait)
        asking.cancel()
        await asyncio.wait([asking])
        await pool.close()

    with monkeypatch.context() as patched:
        patched.setattr(socket, "getaddrinfo", hang)
        asyncio.run(main())
    assert waited_for == []
    test_ended.set()


@looped
async def test_a_worker_with_a_name() -> None:
    """A worker gets its requests if the settings give its host's name, and not an address."""
    async with serving(1) as house:
        where = type(house.workers[0].worker)("a", "127.0.0.1:1", f"localhost:{house.workers[0].port}")
        await house.proxy.apply({"a": where}, {"m": Routes(ready=("a",))})

        assert (await house.infer()).headers["X-Worker"] == "a"


@looped
async def test_idle_connections_to_a_worker_that_stops_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a worker closes new connections, the gateway closes its idle ones at the next check, and sends the worker no requests.

    When the worker is back, it gets requests again.
    """
    monkeypatch.setattr("rsrv_gateway.http_pools._STOP_CHECK_S", 0.01)
    async with serving(2) as house, Relay(house.workers[0].port).running() as relay:
        where = Worker("a", "127.0.0.1:1", f"127.0.0.1:{relay.port}")
        workers = {"a": where, "b": house.workers[1].worker}
        await house.proxy.apply(workers, {"m": Routes(ready=("a", "b"))})
        assert {(await house.infer()).headers["X-Worker"] for _ in range(4)} == {"a", "b"}
        assert relay.clients
        relay.stops = True
        while relay.clients:
            await asyncio.sleep(0)
        assert {(await house.infer()).headers["X-Worker"] for _ in range(4)} == {"b"}
        relay.stops = False
        while (await house.infer()).headers["X-Worker"] != "a":
            pass


@looped
async def test_an_error_of_the_network_is_no_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the check of a worker fails with a network error, the worker is not taken for stopping, and further checks follow."""

    async def open_connection(*_: Any) -> Any:
        reader = asyncio.StreamReader()
        reader.set_exception(OSError(errno.EHOSTUNREACH, "No route to host"))
        return reader, Mock()

    monkeypatch.setattr(asyncio, "open_connection", open_connection)
    assert not await _closes_new_connections(Address("127.0.0.1", 8000))


@looped
async def test_connections_that_are_half_open() -> None:
    """A half-open connection is replaced after the first timeout on it."""
    async with serving(1) as house:
        (worker,) = house.workers
        async with Relay(worker.port).running() as relay:
            where = type(worker.worker)("a", "127.0.0.1:1", f"127.0.0.1:{relay.port}")
            await house.proxy.apply({"a": where}, {"m": Routes(ready=("a",))})
            assert (await house.infer()).status == 200
            relay.stick()

            with patch.object(house.proxy.http, "_timeout_s", 0.3):
                assert (await house.infer()).status == 504
            assert house.brain.failures == ["a"]
            assert (await house.infer()).headers["X-Worker"] == "a"


@looped
async def test_connections_are_kept() -> None:
    """Requests one after another share a connection to a worker. Concurrent requests do not."""
    async with serving(1) as house:
        (worker,) = house.workers
        for _ in range(3):
            await house.infer()
        assert len(worker.peers) == 1

        go, waiting = asyncio.Event(), 0

        async def together(request: Any) -> web.StreamResponse:
            nonlocal waiting
            waiting += 1
            if waiting == 3:
                go.set()
            await go.wait()
            return await worker.echo(request)

        worker.does[""] = together
        await asyncio.gather(*[house.infer() for _ in range(3)])
        assert len(worker.peers) == 3


@looped
async def test_a_stream_of_events() -> None:
    """Each event of a generated stream reaches the client before the worker has the next event."""
    async with serving(1) as house:
        (worker,) = house.workers
        more = asyncio.Event()

        async def events(request: Any) -> web.StreamResponse:
            await worker.read(request)
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            await response.write(b"data: 1\n\n")
            await more.wait()
            await response.write(b"data: 2\n\n")
            return response

        worker.does[""] = events
        async with house.open("POST", "/v2/models/m/generate_stream", data=b"{}") as response:
            assert await response.content.readany() == b"data: 1\n\n"
            assert house.proxy.counts().outstanding == {("m", "a"): 1}
            more.set()
            assert await response.content.readany() == b"data: 2\n\n"
            assert response.headers["Content-Type"] == "text/event-stream"
        assert await counted(house) == {("m", "a", "OK"): 1}


@looped
async def test_a_client_that_does_not_read() -> None:
    """If a client stops reading a long answer, its connection and the worker's request end."""
    async with serving(1) as house:
        (worker,) = house.workers
        stream_ended = asyncio.Event()

        async def without_end(request: Any) -> web.StreamResponse:
            house.proxy.http._timeout_s = 0.2
            response = web.StreamResponse()
            try:
                await response.prepare(request)
                while True:
                    await response.write(bytes(1 << 20))
            finally:
                stream_ended.set()

        worker.does[""] = without_end
        reader, writer = await asyncio.open_connection("127.0.0.1", house.proxy.http.port, limit=1024)
        writer.write(f"POST {INFER} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n".encode())
        await reader.readline()
        await stream_ended.wait()

        assert await counted(house) == {("m", "a", "CANCELLED"): 1}
        writer.close()


@looped
async def test_a_client_that_goes_as_its_answer_begins(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If a client disconnects just before the first bytes of its answer, this is not an error of the gateway."""
    prepare = web.StreamResponse.prepare

    async def begin(response: web.StreamResponse, request: Any) -> Any:
        if response.headers.get("Server") == "rsrv-gateway":
            raise ClientConnectionResetError("Cannot write to closing transport")
        return await prepare(response, request)

    monkeypatch.setattr(web.StreamResponse, "prepare", begin)
    async with serving(1) as house:
        house.workers[0].does[""] = house.workers[0].says(200, bytes(1 << 20))
        with pytest.raises(ClientError):
            await house.infer()
        assert await counted(house) == {("m", "a", "CANCELLED"): 1}
    assert caplog.records == []


@looped
async def test_a_client_that_does_not_read_the_end() -> None:
    """If a client stops reading just before the end of a long answer, its request also ends."""
    async with serving(1) as house:
        (worker,) = house.workers

        async def until_it_waits(request: Any) -> web.StreamResponse:
            house.proxy.http._timeout_s = 0.2
            await worker.read(request)
            response = web.StreamResponse()
            await response.prepare(request)
            server: Any = house.proxy.http._server
            buffer = server.connections[0].transport
            while buffer.get_write_buffer_size() <= buffer.get_write_buffer_limits()[1]:
                await response.write(bytes(1 << 13))
                await asyncio.sleep(0)
            return response

        worker.does[""] = until_it_waits
        reader, writer = await asyncio.open_connection("127.0.0.1", house.proxy.http.port, limit=1024)
        writer.write(f"POST {INFER} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n".encode())
        await reader.readline()

        assert await counted(house) == {("m", "a", "CANCELLED"): 1}
        writer.close()


@looped
async def test_a_worker_is_away_for_one_probe() -> None:
    """If a worker leaves the table, its streams continue, and its connections close after them."""
    worker = FakeHttpWorker("a")
    await worker.start()
    more = asyncio.Event()

    async def events(request: Any) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        await more.wait()
        await response.write(b"data: 2\n\n")
        return response

    worker.does[""] = events
    pool = Pool(f"127.0.0.1:{worker.port}", GatewaySection(request_timeout_s=0.1), None)
    reply = await pool.ask(HttpQuery("POST", "/v2/models/m/generate_stream", CIMultiDict(), whole=False))
    assert isinstance(reply, HttpReply)
    assert reply.rest is not None
    assert await reply.rest.read() == b"data: 1\n\n"
    pool.retire()
    more.set()
    assert await reply.rest.read() == b"data: 2\n\n"
    reply.rest.close()
    while not pool.closed:
        await asyncio.sleep(0)
    await worker.kill()


@looped
async def test_a_client_leaves_a_stream() -> None:
    """If a client disconnects during a stream, the worker's stream ends."""
    async with serving(1) as house:
        (worker,) = house.workers
        stream_ended = asyncio.Event()

        async def events(request: Any) -> web.StreamResponse:
            await worker.read(request)
            response = web.StreamResponse()
            await response.prepare(request)
            try:
                await response.write(b"data: 1\n\n")
                await asyncio.Event().wait()
            finally:
                stream_ended.set()
            return response

        worker.does[""] = events
        async with house.open("POST", "/v2/models/m/generate_stream", data=b"{}") as response:
            await response.content.readany()
            response.close()
        await stream_ended.wait()
        assert await counted(house) == {("m", "a", "CANCELLED"): 1}


@looped
async def test_too_large() -> None:
    """A request above the size limit gets 413, even if its length is not known. An answer above the limit becomes 500."""

    async def pieces() -> AsyncIterator[bytes]:
        yield b"{}"
        for _ in range(30):
            yield bytes(100_000)

    async with serving(1, max_message_bytes=2_000_000) as house:
        (worker,) = house.workers
        headers = {"Inference-Header-Content-Length": "2"}
        assert (await house.infer(sized(bytes(2_000_001)))).status == 413
        assert (await house.infer(pieces(), headers=headers)).status == 413
        assert house.brain.failures == []

        worker.does[""] = worker.says(200, bytes(2_000_001))
        assert (await house.infer()).status == 500


@looped
async def test_a_client_that_wants_to_be_asked_on() -> None:
    """A client that waits for 100 Continue gets it, and its request is answered."""
    async with serving(1) as house:
        answer = await house.infer(b"{}", expect100=True)

        assert (answer.status, answer.body) == (200, b"{}")
        assert "Expect" not in house.workers[0].got[0].headers


@looped
async def test_a_client_that_goes_before_it_is_asked_on() -> None:
    """If a client disconnects before 100 Continue, neither the gateway nor a worker is reported as failed."""
    write = StreamWriter.write

    async def gone(self: StreamWriter, chunk: bytes, **options: bool) -> None:
        if b"100 Continue" in chunk:
            raise ClientConnectionResetError("Cannot write to closing transport")
        await write(self, chunk, **options)

    async with serving(1) as house:
        with patch.object(StreamWriter, "write", gone):
            answer = await house.infer(b"{}", expect100=True)

        assert answer.status == 499
        assert house.workers[0].got == []


@pytest.mark.parametrize("spelling", SPELLINGS)
@looped
async def test_a_request_that_claims_more_elements_than_it_has_bytes_reaches_no_worker(spelling: str) -> None:
    """A shape with more elements than the JSON has bytes gets 400, because Triton would allocate memory for them and end."""
    async with serving(2) as house:
        for shape in (
            b"[2147483648, 64]",
            b"[2000000000]",
            b"[18446744073709551615]",
            b"[0, 18446744073709551615]",
        ):
            claim = b'{"inputs": [{"name": "X", "shape": ' + shape + b', "datatype": "FP32", "data": [1]}]}'
            body, encoding = SPELLINGS[spelling](claim)
            headers = {} if encoding is None else {"Content-Encoding": encoding}
            refused = await house.infer(sized(body), headers=headers)
            assert (refused.status, shape in refused.body) == (400, True)
        assert [worker.got for worker in house.workers] == [[], []]


@pytest.mark.parametrize("spelling", SPELLINGS)
@looped
async def test_a_sequence_stays_together_however_it_is_written(spelling: str) -> None:
    """All steps of a sequence reach one worker, in any spelling of the sequence's id."""
    async with serving(5) as house:
        plain = await house.infer({"parameters": {"sequence_id": 7}})
        body, encoding = SPELLINGS[spelling](b'{"parameters": {"sequence_id": 7}}')
        headers = {} if encoding is None else {"Content-Encoding": encoding}
        for _ in range(6):
            step = await house.infer(sized(body), headers=headers)
            assert step.headers["X-Worker"] == plain.headers["X-Worker"]


@looped
async def test_sequences_stay_where_their_model_is_placed() -> None:
    """Sequences use only the workers where their model is placed. Others may lose the model, and with it the state of sequences."""
    async with serving(5) as house:
        await house.apply({"m": Routes(ready=("a", "b", "c", "d", "e"), placed=("c",))})
        for number in range(6):
            answer = await house.infer({"parameters": {"sequence_id": number}})
            assert answer.headers["X-Worker"] == "c"


@looped
async def test_a_request_that_cannot_be_read_reaches_no_worker() -> None:
    """Incomplete or deeply nested JSON, and wrong lengths or encodings, are refused."""
    async with serving(1) as house:
        deep = b'{"x": ' + b"[" * 2000 + b"]" * 2000 + b"}"
        for body in (b"tensor", b"[]", b'{"inputs": [', b'{"inputs": [}', b'{"inputs" [1]}', b"{,}", deep):
            assert (await house.infer(body)).status == 400
        for length in ("1", "-5", "2x", "", "0x2", "99999999999999"):
            refused = await house.infer(b"{}", headers={"Inference-Header-Content-Length": length})
            assert refused.status == 400
        for encoding in ("gzip", "deflate"):
            assert (await house.infer(b"{}", headers={"Content-Encoding": encoding})).status == 400
        for encoding in ("br", "GZIP", "gzip, identity"):
            refused = await house.infer(b"{}", headers={"Content-Encoding": encoding})
            assert (refused.status, b"use gzip, deflate or identity" in refused.body) == (501, True)
        assert house.workers[0].got == []


@looped
async def test_a_body_that_exceeds_the_memory_before_it_was_read_is_refused() -> None:
    """A large body whose JSON has no end yet is refused with 429 when the memory for bodies is full."""
    async with serving(1) as house:
        house.proxy.http.keeping.most = 1 << 20
        refused = await house.infer(sized(b'{"id": "' + b"i" * (2 << 20) + b'"}'))
        assert (refused.status, b"memory for request bodies" in refused.body) == (429, True)
        assert house.proxy.http.keeping.bytes == 0


async def counted(house: House) -> Any:
    """Wait until a request is counted, and return the counts. Nothing else reports the end of a cancelled request."""
    while not house.proxy.counts().requests:
        await asyncio.sleep(0)
    return house.proxy.counts().requests


@looped
async def test_a_target_may_be_a_whole_url() -> None:
    """A client that uses the gateway as a proxy sends a whole URL as the target. It gets the same answer as others."""
    async with serving(1) as house:
        for target in ("http://gateway:8000/v2/models/m/infer", "HTTP://[::1]/v2/models/m/infer"):
            reader, writer = await asyncio.open_connection("127.0.0.1", house.proxy.http.port)
            writer.write(
                f"POST {target} HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{{}}".encode()
            )
            answer = await reader.read()
            writer.close()
            assert answer.startswith(b"HTTP/1.1 200")
        assert [got.path for got in house.workers[0].got] == [INFER, INFER]


@looped
async def test_an_unknown_model_is_answered_with_the_nearest_name() -> None:
    """The error for a misspelt model names a similar model, a few times a second at most. Without a similar model, it names none."""
    table = {"classifier_v2": Routes(ready=("a",)), "detector": Routes(ready=("a",))}
    async with serving(1, table) as house:
        errors = [(await house.infer({}, "/v2/models/clasifier_v2/infer")).error for _ in range(10)]
        plain = "Request for unknown model: 'clasifier_v2' is not found"
        assert errors[0] == (404, f"{plain}; did you mean 'classifier_v2'?")
        assert errors[-1] == (404, plain)
        answer = await house.infer({}, "/v2/models/unlike/infer")
        assert answer.error == (404, "Request for unknown model: 'unlike' is not found")
