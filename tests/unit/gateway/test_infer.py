"""Inference through the gateway, the same over gRPC and HTTP: the choice of the worker, failover and counts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import grpc
import pytest
from aiohttp import web

from rsrv.placement.contract import Routes
from tests.unit.gateway import http_proxies, proxies
from tests.waiting import LIMITS_S, looped

Code = grpc.StatusCode
#: HTTP status of a gRPC code, in answers of a worker and of the gateway.
STATUS = {Code.NOT_FOUND: 404, Code.UNAVAILABLE: 503}
ANSWERED = {404: "NOT_FOUND", 412: "FAILED_PRECONDITION", 503: "UNAVAILABLE", 504: "DEADLINE_EXCEEDED"}


class Plane(Protocol):
    """One protocol: how its clients send requests, and how its workers answer."""

    serving: Callable[..., AbstractAsyncContextManager[Any]]

    async def ask(self, house: Any, model: str = "m", sequence: int = 0) -> tuple[str, str]:
        """Return the name of the worker that answered, or the code and the message of a refusal."""

    def refuse(self, worker: Any, code: grpc.StatusCode, message: str) -> None:
        """Let a worker refuse all requests from now on."""

    def answer_late(self, worker: Any, go: asyncio.Event) -> None:
        """Let a worker answer when the event is set."""

    def hold(self, worker: Any) -> asyncio.Event:
        """Let a worker never answer. The returned event is set when its request is cancelled."""

    def got(self, worker: Any) -> int:
        """Return the number of the worker's requests."""

    async def is_closed(self, house: Any) -> bool:
        """Return whether the gateway refuses a new call."""


class Grpc:
    serving = staticmethod(proxies.serving)

    async def ask(self, house: Any, model: str = "m", sequence: int = 0) -> tuple[str, str]:
        request = proxies.Infer(model_name=model)
        if sequence:
            request.parameters["sequence_id"].int64_param = sequence
        try:
            return (await house.call("ModelInfer", request)).model_version, ""
        except grpc.aio.AioRpcError as error:
            return error.code().name, error.details() or ""

    def refuse(self, worker: Any, code: grpc.StatusCode, message: str) -> None:
        worker.does["ModelInfer"] = proxies.refusing(code, message)

    def answer_late(self, worker: Any, go: asyncio.Event) -> None:
        async def late(request: Any, context: Any) -> Any:
            await go.wait()
            return await worker.echo(request, context)

        worker.does["ModelInfer"] = late

    def hold(self, worker: Any) -> asyncio.Event:
        cancelled = asyncio.Event()

        async def wait(_: Any, __: Any) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        worker.does["ModelInfer"] = wait
        return cancelled

    def got(self, worker: Any) -> int:
        return len(worker.got.get("ModelInfer", ()))

    async def is_closed(self, house: Any) -> bool:
        return (await proxies.refusal(house.call("ServerLive", wait_for_ready=False)))[0] == "UNAVAILABLE"


class Http:
    serving = staticmethod(http_proxies.serving)

    async def ask(self, house: Any, model: str = "m", sequence: int = 0) -> tuple[str, str]:
        body = {"parameters": {"sequence_id": sequence}} if sequence else {}
        answer = await house.infer(body, f"/v2/models/{model}/infer")
        if answer.status == 200:
            return answer.headers["X-Worker"], ""
        status, message = answer.error
        return ANSWERED[status], message

    def refuse(self, worker: Any, code: grpc.StatusCode, message: str) -> None:
        worker.does[""] = worker.says(STATUS[code], {"error": message})

    def answer_late(self, worker: Any, go: asyncio.Event) -> None:
        async def late(request: Any) -> web.StreamResponse:
            await go.wait()
            answer: web.StreamResponse = await worker.echo(request)
            return answer

        worker.does[""] = late

    def hold(self, worker: Any) -> asyncio.Event:
        cancelled: asyncio.Event = worker.holds()
        return cancelled

    def got(self, worker: Any) -> int:
        return len(worker.got)

    async def is_closed(self, house: Any) -> bool:
        return bool((await house.ask("GET", "/v2/health/live")).status == 503)


both = pytest.mark.parametrize("plane", [Grpc(), Http()], ids=["grpc", "http"])


@both
@looped
async def test_each_in_turn(plane: Plane) -> None:
    """Workers get requests in turn. Requests are counted by model, worker and code."""
    async with plane.serving(2) as house:
        assert [(await plane.ask(house))[0] for _ in range(4)] == ["a", "b", "a", "b"]
        counts = house.proxy.counts()
        assert counts.requests == {("m", "a", "OK"): 2, ("m", "b", "OK"): 2}
        assert counts.items == {"m": 4}
        assert sum(counts.durations["m"].counts) == 4
        assert counts.outstanding == {}


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (Code.UNAVAILABLE, "[rsrv:RUNTIME_DOWN] wait"),
        (Code.UNAVAILABLE, "[rsrv:PAUSED] by an operator"),
        (Code.NOT_FOUND, "no such model"),
    ],
)
@both
@looped
async def test_another_worker_answers(plane: Plane, code: grpc.StatusCode, message: str) -> None:
    """If a worker does not have the model or is unavailable, another worker answers."""
    async with plane.serving(3) as house:
        for worker in house.workers[:2]:
            plane.refuse(worker, code, message)

        assert await plane.ask(house) == ("c", "")
        counts = house.proxy.counts()
        assert counts.requests == {("m", "c", "OK"): 1}
        assert counts.failovers == {"a": 1, "b": 1}
        assert counts.load == {"a": 0, "b": 0, "c": 0}
        assert house.brain.failures == []


@both
@looped
async def test_all_refuse(plane: Plane) -> None:
    """If all workers refuse, the client gets the last refusal that is not NOT_FOUND, or else NOT_FOUND."""
    async with plane.serving(3) as house:
        for worker, (code, message) in zip(
            house.workers,
            [
                (Code.NOT_FOUND, "missing"),
                (Code.UNAVAILABLE, "[rsrv:NOT_RESIDENT] load it"),
                (Code.NOT_FOUND, "missing"),
            ],
            strict=True,
        ):
            plane.refuse(worker, code, message)

        assert await plane.ask(house) == ("FAILED_PRECONDITION", "[rsrv:NOT_RESIDENT] load it")
        assert house.proxy.counts().requests == {("m", "c", "FAILED_PRECONDITION"): 1}


@both
@looped
async def test_an_unknown_model(plane: Plane) -> None:
    """All workers are probed before the gateway answers NOT_FOUND. The unknown name appears in no metric."""
    async with plane.serving(1) as house:
        unknown = "Request for unknown model: 'x' is not found"
        assert await plane.ask(house, "x") == ("NOT_FOUND", unknown)
        assert house.brain.refreshes == 1
        assert house.proxy.counts().requests == {("", "", "NOT_FOUND"): 1}


@both
@looped
async def test_a_model_that_has_just_come(plane: Plane) -> None:
    """If the probe for an unknown model finds the model, the request is served at once."""
    async with plane.serving(1) as house:

        async def find() -> None:
            await house.apply({"new": Routes(ready=("a",))})

        house.brain.on_refresh = find
        assert await plane.ask(house, "new") == ("a", "")


@both
@looped
async def test_a_model_without_workers(plane: Plane) -> None:
    """Requests for a known model that is ready nowhere get UNAVAILABLE. If the gateway has no workers, all requests do."""
    async with plane.serving(1, {"m": Routes(ready=())}) as house:
        code, message = await plane.ask(house)
        assert (code, "'m'" in message) == ("UNAVAILABLE", True)
        assert house.brain.refreshes == 0
        assert house.proxy.counts().requests == {("m", "", "UNAVAILABLE"): 1}

        await house.apply({}, [])
        assert (await plane.ask(house))[0] == "UNAVAILABLE"


@both
@looped
async def test_a_sequence_stays_where_it_is(plane: Plane) -> None:
    """All requests of a sequence use one worker, even if it refuses. The sequences are spread over all workers."""
    async with plane.serving(4) as house:
        homes = {}
        for sequence in range(1, 30):
            (homes[sequence],) = {(await plane.ask(house, sequence=sequence))[0] for _ in range(3)}
        assert {*homes.values()} == {"a", "b", "c", "d"}

        lost = next(worker for worker in house.workers if worker.name == homes[1])
        plane.refuse(lost, Code.UNAVAILABLE, "[rsrv:RUNTIME_DOWN] wait")
        assert await plane.ask(house, sequence=1) == ("UNAVAILABLE", "[rsrv:RUNTIME_DOWN] wait")


@both
@looped
async def test_a_client_leaves(plane: Plane) -> None:
    """If a client disconnects, its request is cancelled at the worker and counted. The worker is not reported as failed."""
    async with plane.serving(1) as house:
        (worker,) = house.workers
        cancelled = plane.hold(worker)
        asking = asyncio.ensure_future(plane.ask(house))
        await worker.called.wait()
        assert house.proxy.counts().outstanding == {("m", "a"): 1}

        asking.cancel()
        await cancelled.wait()

        # The count is the only sign that a cancelled request has ended, so poll the count.
        while not house.proxy.counts().requests:
            await asyncio.sleep(0)
        assert house.proxy.counts().requests == {("m", "a", "CANCELLED"): 1}
        assert house.proxy.counts().outstanding == {}
        assert house.brain.failures == []


@both
@looped
async def test_no_answer_in_time(plane: Plane) -> None:
    """A request that exceeds the gateway's limit is cancelled at its worker. No other worker gets it."""
    for limit in LIMITS_S:
        async with plane.serving(2, request_timeout_s=limit) as house:
            first, second = house.workers
            cancelled = plane.hold(first)

            assert (await plane.ask(house))[0] == "DEADLINE_EXCEEDED"
            assert plane.got(second) == 0
            if first.called.is_set():
                await cancelled.wait()
                return
    raise AssertionError("no request has reached the worker within its limit")


@both
@looped
async def test_a_worker_is_taken_out_of_the_table(plane: Plane) -> None:
    """If a worker is removed from the table, a request in flight at this worker is still answered."""
    async with plane.serving(2) as house:
        first, _ = house.workers
        go = asyncio.Event()
        plane.answer_late(first, go)
        asking = asyncio.ensure_future(plane.ask(house))
        await first.called.wait()
        await house.apply({"m": Routes(ready=("b",))}, house.workers[1:])
        assert await plane.ask(house) == ("b", "")
        go.set()

        assert await asking == ("a", "")


@both
@looped
async def test_the_end(plane: Plane) -> None:
    """When the gateway stops, requests in flight are answered within the drain time, and new requests are refused."""
    async with plane.serving(1) as house:
        (worker,) = house.workers
        # Let the HTTP client open two connections now, because a draining gateway accepts no further connection.
        await asyncio.gather(plane.ask(house), plane.ask(house))
        worker.called.clear()
        go = asyncio.Event()
        plane.answer_late(worker, go)
        asking = asyncio.ensure_future(plane.ask(house))
        await worker.called.wait()
        draining = asyncio.ensure_future(house.proxy.drain(30))
        while not await plane.is_closed(house):
            pass
        go.set()

        assert await asking == ("a", "")
        await draining
        await house.proxy.stop()
        await house.proxy.stop()
