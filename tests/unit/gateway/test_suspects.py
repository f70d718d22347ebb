"""Requests that crashed two workers. For some minutes, equal requests reach no other worker."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2

from rsrv.settings_fleet import GatewaySection
from rsrv_gateway.connections import ChannelFactory
from rsrv_gateway.probes import GrpcProber
from rsrv_gateway.suspects import SUSPECT, Execution, Suspects, body_digest, call_digest
from tests.unit.gateway import http_proxies, proxies
from tests.unit.gateway.http_proxies import FakeHttpWorker
from tests.unit.gateway.proxies import refusal
from tests.waiting import looped

Infer: Any = service_pb2.ModelInferRequest


def body(text: str, **more: Any) -> dict[str, Any]:
    return {"inputs": [{"name": text}], **more}


def breaks(worker: FakeHttpWorker) -> None:
    """Let the worker break the connection of each request with the input "bad"."""
    echo = worker.does[""]

    async def handle(request: Any) -> Any:
        if b"bad" in await request.read():
            await worker.read(request)
            request.transport.abort()
            raise asyncio.CancelledError
        return await echo(request)

    worker.does[""] = handle


@looped
async def test_a_request_that_ended_two_workers_is_refused_when_it_comes_again() -> None:
    """A request that crashed two workers reaches no third worker, even with another id or other parameters.

    Other requests are served.
    """
    async with http_proxies.serving(3) as house:
        house.brain.dead = set("abc")
        for worker in house.workers:
            breaks(worker)
        first = await house.infer(body("bad", id="1"))
        assert (first.status, b"two servers ended while they executed this request" in first.body) == (
            500,
            True,
        )
        assert sum(len(worker.got) for worker in house.workers) == 2
        again = await house.infer(body("bad", id="2", parameters={"timeout": 3}))
        assert (again.status, b"an equal request" in again.body) == (500, True)
        assert sum(len(worker.got) for worker in house.workers) == 2
        assert (await house.infer(body("good"))).status == 200
        assert house.proxy.counts().outstanding == {}


@looped
async def test_lost_connections_make_no_suspect() -> None:
    """If a request lost two connections, but not both workers died, the request is UNAVAILABLE and may be sent again."""
    async with http_proxies.serving(3) as house:
        house.brain.dead = {"a"}
        for worker in house.workers:
            breaks(worker)
        for tries in (2, 4):
            assert (await house.infer(body("bad"))).status == 503
            assert sum(len(worker.got) for worker in house.workers) == tries


@looped
async def test_a_generation_is_compared_whatever_its_header_says() -> None:
    """While requests of a model are compared, a generation with an odd length in the JSON-length header is served.

    Only inference has this header, so a generation ignores it.
    """
    async with http_proxies.serving(1) as house:
        house.proxy.http._traffic.suspects.add("m", b"digest")
        headers = {"Inference-Header-Content-Length": "9" * 5000}
        assert (
            await house.infer(b'{"text_input": "x"}', "/v2/models/m/generate", headers=headers)
        ).status == 200


@looped
async def test_over_grpc_a_request_that_ended_two_workers_is_refused_when_it_comes_again() -> None:
    """If calls and stream messages differ only in the id from a request that crashed two workers, they get INTERNAL.

    No worker gets them.
    """
    async with proxies.serving(3) as house:
        house.brain.dead = set("abc")

        async def lose(request: Any, context: Any) -> None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

        for worker in house.workers:
            worker.does["ModelInfer"] = lose
        bad: dict[str, Any] = {"raw_input_contents": [b"bad"]}
        assert await refusal(house.infer(id="1", **bad)) == ("INTERNAL", SUSPECT.message)
        code, text = await refusal(house.infer(id="2", **bad))
        assert (code, "an equal request" in text) == ("INTERNAL", True)
        assert sum(len(worker.got["ModelInfer"]) for worker in house.workers if worker.got) == 2
        stream = house.stream()
        await stream.write(Infer(model_name="m", **bad))
        assert "an equal request" in (await stream.read()).error_message
        stream.cancel()


@looped
async def test_only_one_suspect_executes_at_a_time() -> None:
    """Requests of a dead worker are sent to the next worker one at a time.

    If this worker also dies, only one request is blamed.
    """
    suspects, order = Suspects(), list[str]()
    inside, go = asyncio.Event(), asyncio.Event()

    async def first() -> None:
        async with suspects.turn() as execution:
            order.append(f"first {execution.was_alone('b')}")
            inside.set()
            await go.wait()

    async def second() -> None:
        await inside.wait()
        async with suspects.turn() as execution:
            order.append(f"second {execution.was_alone('b')}")

    tasks = [asyncio.create_task(first()), asyncio.create_task(second())]
    await inside.wait()
    for _ in range(5):
        await asyncio.sleep(0)
    assert order == ["first True"]
    go.set()
    await asyncio.gather(*tasks)
    assert order == ["first True", "second True"]


@asynccontextmanager
async def late_execution(suspects: Suspects, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Execution]:
    """Yield the execution of a request that has not got its turn in time."""
    with monkeypatch.context() as patch:
        patch.setattr("rsrv_gateway.suspects._TURN_S", 0)
        turn = suspects.turn()
        execution = await turn.__aenter__()
    assert not execution.has_turn
    try:
        yield execution
    finally:
        await turn.__aexit__(None, None, None)


@looped
async def test_a_request_that_did_not_wait_any_longer_clears_one_on_the_same_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two requests of a dead worker execute on the same worker, which also dies. Either may be the cause, so neither is blamed.

    A request that executes on another worker clears nobody.
    """
    suspects = Suspects()
    async with suspects.turn() as first:
        async with late_execution(suspects, monkeypatch) as late:
            assert first.was_alone("b")
            late.workers.add("b")
            assert (first.was_alone("b"), late.was_alone("b")) == (False, False)
            assert first.was_alone("c")
        assert not first.was_alone("b")
    async with suspects.turn() as later:
        assert later.was_alone("b")


@looped
async def test_a_turn_that_begins_beside_a_late_request_is_not_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request gets the turn while a request without a turn still executes on its worker. It is not blamed."""
    suspects = Suspects()
    first = suspects.turn()
    await first.__aenter__()
    async with late_execution(suspects, monkeypatch) as late:
        late.workers.add("b")
        await first.__aexit__(None, None, None)
        async with suspects.turn() as second:
            assert second.has_turn
            assert not second.was_alone("b")


@looped
async def test_a_request_is_not_blamed_if_another_one_came_while_it_executed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request crashes two workers, and another one of a dead worker was sent to the second worker meanwhile. It may be sent again."""
    async with http_proxies.serving(2) as house:
        house.brain.dead = set("ab")
        for worker in house.workers:
            breaks(worker)
        second = house.workers[1]
        breaking = second.does[""]

        async def beside_another(request: Any) -> Any:
            async with late_execution(house.proxy.http._traffic.suspects, monkeypatch) as late:
                late.workers.add("b")
            return await breaking(request)

        second.does[""] = beside_another
        answer = await house.infer(body("bad"))
        assert answer.status == 503
        assert [len(worker.got) for worker in house.workers] == [1, 1]


def test_suspects_are_forgotten() -> None:
    """After five minutes, equal requests are tried again. The number of remembered requests is limited."""
    now = 0.0
    suspects = Suspects(lambda: now)
    suspects.add("m", b"1")
    assert (suspects.has("m"), suspects.has("n"), suspects.is_equal("m", b"1")) == (True, False, True)
    now = 301.0
    assert (suspects.has("m"), suspects.is_equal("m", b"1")) == (False, False)
    for number in range(100):
        suspects.add("m", b"%d" % number)
    assert suspects.is_equal("m", b"99")
    assert not suspects.is_equal("m", b"1")


def test_a_digest_is_of_the_inputs_and_outputs() -> None:
    """The digest of a request depends on inputs, outputs and binary data, but not on id and parameters."""
    first = Infer(model_name="m", id="1", raw_input_contents=[b"x"])
    second = Infer(model_name="m", id="2", raw_input_contents=[b"x"])
    second.parameters["timeout"].int64_param = 5
    changed = Infer(model_name="m", raw_input_contents=[b"y"])
    digests = [call_digest(message.SerializeToString()) for message in (first, second, changed)]
    assert digests[0] == digests[1] != digests[2]
    assert call_digest(b"\xff") != digests[0]

    others: list[dict[str, Any]] = [{"id": "1"}, {"parameters": {}}, {"outputs": []}]
    texts = [json.dumps(body("x", **more)).encode() for more in others]
    body_digests = [body_digest(text + b"tail", "", len(text)) for text in texts]
    assert body_digests[0] == body_digests[1] != body_digests[2]
    assert body_digest(texts[0] + b"more", "", len(texts[0])) != body_digests[0]
    assert body_digest(b"\x1f", "gzip", None) != body_digest(b"\x1f", "", None)


@looped
async def test_a_worker_has_died_if_it_served_and_nothing_listens_now() -> None:
    """A killed worker has died. A worker that announced its stop, or that still answers, has not."""
    async with proxies.serving(1) as house:
        (worker,) = house.workers

        async def ready(request: Any, context: Any) -> Any:
            return service_pb2.ServerReadyResponse(ready=True)

        async def index(request: Any, context: Any) -> Any:
            entry = service_pb2.RepositoryIndexResponse.ModelIndex(name="m", state="READY")
            return service_pb2.RepositoryIndexResponse(models=[entry])

        async def stops(request: Any, context: Any) -> None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Server exiting")

        for stopping in (False, True):
            worker.does |= {"ServerReady": ready, "RepositoryIndex": index}
            prober = GrpcProber(worker.worker, ChannelFactory(GatewaySection()), 60)
            assert (await prober.probe())[0].alive
            assert not prober.has_died("m")
            if stopping:
                worker.does["ServerReady"] = stops
                await prober.probe()
                assert not prober.has_died("m")
            await worker.kill()
            while not prober._vanished:
                await prober.probe()
            assert prober.has_died("m") is not stopping
            assert not prober.has_died("other")
            await prober.close()
            await worker.start()
