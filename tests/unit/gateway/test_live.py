"""The live page of a gateway, which shows all its workers."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any

import grpc
import pytest

from rsrv.control.v1 import control_pb2 as pb
from rsrv.control.v1 import control_pb2_grpc
from rsrv.live.source import PageError
from rsrv_gateway.connections import ControlClient
from rsrv_gateway.live import Event, Workers
from tests.unit.gateway.workers import FakeControl, FakeServer, serving
from tests.unit.gateway.worlds import World
from tests.waiting import looped


class PageControl(FakeControl):
    """A control service that sends `live_events` to each watcher, and then the events of `more`.

    None in `more` ends the stream.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_events: list[tuple[str, Any]] = [("begin", None)]
        self.more: asyncio.Queue[tuple[str, Any] | None] = asyncio.Queue()
        self.watchers = 0
        self.gone = asyncio.Event()

    async def WatchPage(
        self, request: pb.WatchPageRequest, context: Any
    ) -> AsyncIterator[pb.WatchPageResponse]:
        self.token = dict(context.invocation_metadata()).get("authorization")
        self.watchers += 1
        try:
            for name, content in self.live_events:
                yield pb.WatchPageResponse(event=name, json=json.dumps(content))
            while (event := await self.more.get()) is not None:
                yield pb.WatchPageResponse(event=event[0], json=json.dumps(event[1]))
        finally:
            self.watchers -= 1
            self.gone.set()

    async def GetHistory(self, request: pb.GetHistoryRequest, context: Any) -> pb.GetHistoryResponse:
        record = pb.HistoryRecord(unix_s=1e9, what="model ready")
        return pb.GetHistoryResponse(histories=[pb.History(key="m@1", records=[record])])

    async def GetRequests(self, request: pb.GetRequestsRequest, context: Any) -> pb.GetRequestsResponse:
        await context.abort(grpc.StatusCode.NOT_FOUND, "it is a meta model")
        raise AssertionError

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.GetStatusResponse:
        if request.model != "m":
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no such model")
        versions = [pb.Version(key="m@1", state=pb.STATE_READY)]
        return pb.GetStatusResponse(
            metas=[pb.ModelStatus(name="m", versions=versions, record={"calls_models": ["a"]})]
        )

    async def GetTimeline(self, request: pb.GetTimelineRequest, context: Any) -> pb.GetTimelineResponse:
        span = pb.Span(kind=pb.SPAN_KIND_EXECUTE, model="m", start_unix_s=1e9, seconds=0.5)
        return pb.GetTimelineResponse(positions=[pb.TimelinePosition(instance="1")], spans=[span])

    async def SetResidency(self, request: pb.SetResidencyRequest, context: Any) -> pb.SetResidencyResponse:
        self.steps.append((pb.Residency.Name(request.residency), request.model))
        return pb.SetResidencyResponse()


@asynccontextmanager
async def fleet(*names: str) -> AsyncIterator[tuple[World, Workers, dict[str, PageControl]]]:
    """Yield workers of these names with one control service each, and the worker `bare` without a control service."""
    controls = {name: PageControl() for name in names}
    world = World(None, **dict.fromkeys((*names, "bare"), "m"))
    async with AsyncExitStack() as stack:
        for name, control in controls.items():
            port = await stack.enter_async_context(serving(FakeServer(), control))
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{port}"))
            stub = control_pb2_grpc.ControlStub(channel)
            world.controls[f"{name}:8001"] = ControlClient(
                channel, (("authorization", f"Bearer {name}"),), stub
            )
        await stack.enter_async_context(world.running())
        yield world, Workers(world.gateway.probes, clock=lambda: 7.0, every=0.02), controls


@looped
async def test_a_closed_connection_is_reported_and_opened_again() -> None:
    """If the connection to a control service is closed, for example by a probe, the page reports it and connects again.

    In the meantime, requests about this worker get 503.
    """
    async with fleet() as (world, workers, _), serving(FakeServer(), PageControl()) as port:

        def connect() -> Any:
            channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
            world.controls["bare:8001"] = ControlClient(channel, (), control_pb2_grpc.ControlStub(channel))
            return channel

        first = connect()
        async with aclosing(workers.events()) as events:
            await find(events, "bare:8001", "begin")
            await first.close()
            assert "closed" in (await find(events, "bare:8001", "state"))["why"]
            with pytest.raises(PageError, match="closed") as wrong:
                await workers.panel("bare:8001", "m")
            assert wrong.value.status == 503
            second = connect()
            await find(events, "bare:8001", "begin")
            await second.close()


class _Burst:
    """A control service that sends three events at once."""

    async def WatchPage(self, request: Any, metadata: Any) -> AsyncIterator[Any]:
        for number in range(3):
            yield pb.WatchPageResponse(event="log", json=str(number))


@looped
async def test_events_wait_for_a_slow_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events that arrive before the next poll of the workers are sent after this poll."""
    async with fleet() as (world, workers, _):
        world.controls["bare:8001"] = ControlClient(None, (), _Burst())
        async with aclosing(workers.events()) as events:
            numbers = [await find(events, "bare:8001", "log")]
            loop = asyncio.get_running_loop()
            monkeypatch.setattr(loop, "time", lambda time=loop.time: time() + 1)
            numbers += [await find(events, "bare:8001", "log") for _ in range(2)]
    assert numbers == [0, 1, 2]


async def find(events: AsyncGenerator[Event, None], server: str, name: str) -> Any:
    async for event in events:
        if event[:2] == (server, name):
            return json.loads(event[2])
    raise AssertionError("the stream has ended")


@looped
async def test_each_worker_sends_its_events_while_a_page_is_watched() -> None:
    """While a page is watched, each worker's events arrive. A worker without a control service is shown as such."""
    async with fleet("a", "b") as (_, workers, controls):
        controls["a"].live_events.append(("state", {"up": True, "t": 1}))
        async with aclosing(workers.events()) as events:
            assert await find(events, "a:8001", "state") == {"up": True, "t": 1}
            assert "no control service" in (await find(events, "bare:8001", "state"))["why"]
            controls["b"].more.put_nowait(("log", {"t": 2, "text": "m: ready"}))
            assert (await find(events, "b:8001", "log"))["text"] == "m: ready"
            assert (controls["a"].token, controls["b"].token) == ("Bearer a", "Bearer b")
        for control in controls.values():
            await control.gone.wait()
            assert control.watchers == 0


@looped
async def test_a_stream_that_ends_is_reported_and_starts_again() -> None:
    """If a control service ends its stream, the page reports it and connects again."""
    async with fleet("a") as (_, workers, controls), aclosing(workers.events()) as events:
        await find(events, "a:8001", "begin")
        controls["a"].more.put_nowait(None)
        state = await find(events, "a:8001", "state")
        assert (state["up"], state["t"], state["why"]) == (False, 7.0, "the server's control service ended")
        await find(events, "a:8001", "begin")


@looped
async def test_workers_join_and_leave_while_a_page_is_watched() -> None:
    """A worker that joins is watched. A worker that leaves is reported as gone, and is not watched any more."""
    async with fleet("a", "b") as (world, workers, controls), aclosing(workers.events()) as events:
        await find(events, "a:8001", "begin")
        members = dict(world.gateway.probes.workers())
        world.gateway.probes.watch({name: worker for name, worker in members.items() if name != "a:8001"})
        await find(events, "a:8001", "gone")
        await controls["a"].gone.wait()
        assert controls["a"].watchers == 0
        world.gateway.probes.watch(members)
        await find(events, "a:8001", "begin")


@looped
async def test_histories_and_steering_go_to_the_worker() -> None:
    """Requests for histories, and commands, are sent to the worker. Its refusal, or an unknown worker, becomes an HTTP status."""
    async with fleet("a") as (_, workers, controls):
        panel = await workers.panel("a:8001", "m")
        assert panel["history"][0].endswith(" ready")
        assert panel["slowest"] == []
        assert panel["facts"][0] == ("calls", "a")
        assert panel["facts"][-1] == ("version", "m@1 ready")
        names = [event["name"] for event in json.loads(await workers.trace("a:8001"))["traceEvents"]]
        assert names[-1] == "m"
        for what in ("pin", "unpin", "prefetch", "evict"):
            await workers.steer("a:8001", "m", what)
        assert controls["a"].steps == [
            ("RESIDENCY_DEVICE", "m"),
            ("RESIDENCY_SYSTEM", "m"),
            ("prefetch", "m"),
            ("evict", "m"),
        ]
        for server, model, status in (("a:8001", "x", 404), ("x", "m", 404), ("bare:8001", "m", 409)):
            with pytest.raises(PageError) as wrong:
                await workers.panel(server, model)
            assert wrong.value.status == status
        with pytest.raises(PageError, match="NOT_FOUND: there is no model") as wrong:
            await workers.steer("a:8001", "unknown", "evict")
        assert wrong.value.status == 404
