"""ModelInfer through the gateway: the choice of the worker, and the answer to the client."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2

from rsrv.placement.contract import Routes, Worker
from rsrv.settings_fleet import GatewaySection
from rsrv_gateway import grpc_proxy
from rsrv_gateway.connections import ChannelFactory, WorkerChannels, answer_of
from tests.unit.gateway.proxies import SERVICE, FakeWorker, Handler, Infer, refusal, refusing, serving
from tests.unit.gateway.workers import Relay
from tests.waiting import LIMITS_S, looped

Code = grpc.StatusCode


@looped
async def test_bytes_pass_through() -> None:
    """Requests and answers pass byte for byte, including unknown fields."""
    sent = (
        Infer(model_name="m", id="7", raw_input_contents=[b"\0" * 100_000]).SerializeToString()
        + b"\xf8\x06\x01"
    )

    async with serving(1) as house:
        (worker,) = house.workers
        infer = house.client.unary_unary(SERVICE + "ModelInfer", None, None)
        answer = await infer(sent)

        assert worker.got["ModelInfer"][0].SerializeToString() == sent
        assert service_pb2.ModelInferResponse.FromString(answer).id == "7"


@looped
async def test_items_are_read_where_they_count() -> None:
    """The number of items of a request is the extent of its model's batch axis, or one if the request lacks this input."""
    table = {"m": Routes(ready=("a",), batch_input=("X", 0))}

    async with serving(1, table) as house:
        await house.infer(inputs=[Infer.InferInputTensor(name="X", shape=[5, 2])])
        await house.infer(inputs=[Infer.InferInputTensor(name="Y", shape=[5, 2])])

        assert house.proxy.counts().items == {"m": 6}


@pytest.mark.parametrize(
    ("code", "message", "got"),
    [
        (Code.INVALID_ARGUMENT, "wrong shape", "INVALID_ARGUMENT"),
        (Code.INTERNAL, "a hook raised", "INTERNAL"),
        (Code.UNIMPLEMENTED, "decoupled", "UNIMPLEMENTED"),
        (Code.INTERNAL, "[rsrv:QUEUE_FULL] says a hook", "INTERNAL"),
        (Code.CANCELLED, "given up", "CANCELLED"),
        (Code.DEADLINE_EXCEEDED, "late", "DEADLINE_EXCEEDED"),
        (Code.UNAVAILABLE, "[rsrv:QUEUE_FULL] full, retry after 3 ms", "RESOURCE_EXHAUSTED"),
        (Code.UNAVAILABLE, "in ensemble 'e', [rsrv:DEADLINE] too late", "DEADLINE_EXCEEDED"),
    ],
)
@looped
async def test_what_is_not_tried_again(code: grpc.StatusCode, message: str, got: str) -> None:
    """If a worker's refusal is final, the client gets it, and no other worker is asked."""
    async with serving(2) as house:
        house.workers[0].does["ModelInfer"] = refusing(code, message)

        assert await refusal(house.infer()) == (got, message)
        assert "ModelInfer" not in house.workers[1].got
        assert house.proxy.counts().requests == {("m", "a", got): 1}


@looped
async def test_metadata() -> None:
    """Metadata of the client is sent to the worker. Trailing metadata is sent to the client, after success and failure."""

    async def with_trailer(request: Any, context: Any) -> Any:
        context.set_trailing_metadata((("took", "3"),))
        return service_pb2.ModelInferResponse()

    async with serving(1) as house:
        (worker,) = house.workers
        worker.does["ModelInfer"] = with_trailer
        call = house.call("ModelInfer", Infer(model_name="m"), metadata=(("traceparent", "00-1"),))
        await call
        assert tuple(await call.trailing_metadata()) == (("took", "3"),)
        assert worker.metadata["ModelInfer"][0]["traceparent"] == "00-1"

        worker.does["ModelInfer"] = refusing(Code.INTERNAL, "oh", (("took", "4"),))
        call = house.infer()
        assert await refusal(call) == ("INTERNAL", "oh")
        assert tuple(await call.trailing_metadata()) == (("took", "4"),)


@looped
async def test_what_is_no_request() -> None:
    """Bytes that are not a request are refused, and no worker gets them."""
    async with serving(1) as house:
        infer = house.client.unary_unary(SERVICE + "ModelInfer", None, None)

        assert (await refusal(infer(b"\x0a\xff")))[0] == "INVALID_ARGUMENT"
        assert house.workers[0].got == {}
        assert house.proxy.counts().requests == {("", "", "INVALID_ARGUMENT"): 1}


@looped
async def test_the_client_leaves_as_the_worker_fails() -> None:
    """If the client leaves while its worker fails, the request ends as cancelled, and no other worker gets it."""
    nothing, started = grpc.aio.Metadata(), asyncio.Event()

    async def fail() -> bytes:
        try:
            started.set()
            return await asyncio.Event().wait() and b""
        except asyncio.CancelledError:
            raise grpc.aio.AioRpcError(Code.UNAVAILABLE, nothing, nothing, "ending") from None

    waiting = asyncio.create_task(answer_of(fail(), "a"))
    await started.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


@looped
async def test_deadlines() -> None:
    """The worker gets the rest of the client's deadline, or of the gateway's limit. After this time, the call is cancelled."""
    remaining: list[float] = []

    async def note(request: Any, context: Any) -> Any:
        remaining.append(context.time_remaining())
        return service_pb2.ModelInferResponse()

    async with serving(1, request_timeout_s=1000) as house:
        (worker,) = house.workers
        worker.does["ModelInfer"] = note
        await house.infer()
        await house.call("ModelInfer", Infer(model_name="m"), timeout=200)
        assert 500 < remaining[0] < 1020
        assert 0 < remaining[1] < 210  # gRPC rounds the time up.

        cancelled = hold(worker)
        for limit in LIMITS_S:
            late = await refusal(house.call("ModelInfer", Infer(model_name="m"), timeout=limit))
            assert late[0] == "DEADLINE_EXCEEDED"
            if len(worker.got["ModelInfer"]) > 2:
                break
        await cancelled.wait()


@looped
async def test_a_deadline_is_told_to_models() -> None:
    """For a worker with a control service, the client's deadline becomes the request's timeout, unless the request has one."""
    async with serving(1) as house:
        (worker,) = house.workers
        where = worker.worker
        await house.proxy.apply(
            {"a": type(where)("a", where.grpc, control="unix:/control")}, {"m": Routes(ready=("a",))}
        )
        request = Infer(model_name="m")
        await house.call("ModelInfer", request, timeout=200)
        await house.call("ModelInfer", request)
        request.parameters["timeout"].int64_param = 5
        await house.call("ModelInfer", request, timeout=200)

        http_refusal, untold, own = worker.got["ModelInfer"]
        assert 50_000_000 < http_refusal.parameters["timeout"].int64_param < 210_000_000
        assert "timeout" not in untold.parameters
        assert own.parameters["timeout"].int64_param == 5


@looped
async def test_a_worker_dies() -> None:
    """If a worker dies, another worker answers the requests in flight, and the dead worker is probed."""
    async with serving(2) as house:
        first, _ = house.workers
        hold(first)
        calls = [house.infer() for _ in range(6)]
        while len(first.got.get("ModelInfer", ())) < 3:
            first.called.clear()
            await first.called.wait()
        await first.kill()

        assert {(await call).model_version for call in calls} == {"b"}
        assert set(house.brain.failures) == {"a"}
        assert house.proxy.counts().failovers == {"a": 3}
        assert (await house.infer()).model_version == "b"


@looped
async def test_a_request_that_kills_its_workers() -> None:
    """A request that broke the connection to a worker is sent to other workers until it breaks a second connection.

    Refusals of other workers do not end the attempts.
    """
    async with serving(5) as house, AsyncExitStack() as relays:
        where = {}
        for worker in house.workers:
            relay = await relays.enter_async_context(Relay(worker.port).running())
            where[worker.name] = Worker(worker.name, f"127.0.0.1:{relay.port}")
            worker.does["ModelInfer"] = killed_by_it(relay)
        house.workers[1].does["ModelInfer"] = refusing(Code.UNAVAILABLE, "not ready")
        await house.proxy.apply(where, {"m": Routes(ready=tuple(where))})

        assert (await refusal(house.infer()))[0] == "UNAVAILABLE"

        assert [worker.name for worker in house.workers if worker.got] == ["a", "b", "c"]
        assert house.proxy.counts().requests == {("m", "c", "UNAVAILABLE"): 1}
        assert house.proxy.counts().outstanding == {}


@looped
async def test_a_worker_comes_back() -> None:
    """A worker that returns is used as soon as the table has it."""
    async with serving(1) as house:
        (worker,) = house.workers
        await worker.kill()
        assert (await refusal(house.infer()))[0] == "UNAVAILABLE"

        await house.apply({"m": Routes(ready=())}, [])
        await worker.start()
        await house.apply({"m": Routes(ready=("a",))})
        assert (await house.infer()).model_version == "a"


@looped
async def test_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls use the connections to a worker in turn."""
    monkeypatch.setattr(grpc_proxy, "CHANNELS_PER_WORKER", 3)
    async with serving(1) as house:
        for _ in range(6):
            await house.infer()

        assert len(house.workers[0].peers) == 3


@looped
async def test_a_connection_that_is_half_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """A half-open connection is replaced after the first call that exceeds its deadline on this connection."""
    monkeypatch.setattr(grpc_proxy, "CHANNELS_PER_WORKER", 1)
    async with serving(1, request_timeout_s=0.3) as house:
        (worker,) = house.workers
        async with Relay(worker.port).running() as relay:
            where = type(worker.worker)("a", f"127.0.0.1:{relay.port}")
            await house.proxy.apply({"a": where}, {"m": Routes(ready=("a",))})
            await house.call("ModelInfer", Infer(model_name="m"), timeout=60)
            relay.stick()

            assert (await refusal(house.infer()))[0] == "DEADLINE_EXCEEDED"
            assert house.brain.failures == ["a"]
            assert (await house.call("ModelInfer", Infer(model_name="m"), timeout=60)).model_version == "a"


@looped
async def test_a_worker_is_away_for_one_probe() -> None:
    """If a worker is missing from the table for a short time, a call in progress with a long deadline still ends well."""
    async with serving(2, request_timeout_s=0.2) as house:
        first, second = house.workers
        go = asyncio.Event()

        async def late(request: Any, context: Any) -> Any:
            await go.wait()
            return await first.echo(request, context)

        first.does["ModelInfer"] = late
        call = house.call("ModelInfer", Infer(model_name="m"), timeout=60)
        await first.called.wait()
        await house.apply({"m": Routes(ready=("b",))}, house.workers[1:])
        await house.apply({"m": Routes(ready=("b",))})
        hold(second)
        assert (await refusal(house.infer()))[0] == "DEADLINE_EXCEEDED"  # This exceeds the limit.
        go.set()

        assert (await call).model_version == "a"
        assert len(first.got["ModelInfer"]) == 1


@looped
async def test_a_connection_ends_with_its_last_call() -> None:
    """A connection that is no longer needed is closed when its last call ends."""
    worker = FakeWorker("a")
    await worker.start()
    channels = WorkerChannels(f"127.0.0.1:{worker.port}", ChannelFactory(GatewaySection()), 1)
    link = channels.link()
    call = link.infer(Infer(model_name="m").SerializeToString())
    channels.retire()
    await call
    while link.channel.get_state() is not grpc.ChannelConnectivity.SHUTDOWN:
        await asyncio.sleep(0)
    await channels.close()
    await worker.kill()


@looped
async def test_calls_that_come_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that arrive while the gateway ends get answers or UNAVAILABLE. No call is cancelled."""
    # On a busy machine, gRPC's threads may deliver no call for a while, although more calls will arrive.
    monkeypatch.setattr(grpc_proxy, "_QUIET_POLL_S", 0.1)
    monkeypatch.setattr(grpc_proxy, "_QUIET_LIMIT_S", 60.0)
    async with serving(1) as house, AsyncExitStack() as ends:
        address = f"127.0.0.1:{house.proxy.grpc.port}"
        own = [("grpc.use_local_subchannel_pool", 1)]
        clients = [
            await ends.enter_async_context(grpc.aio.insecure_channel(address, options=own)) for _ in range(4)
        ]

        async def call_on(client: Any) -> tuple[str, str]:
            call = client.unary_unary(SERVICE + "ModelInfer", Infer.SerializeToString, None)
            while True:
                try:
                    await call(Infer(model_name="m"))
                except grpc.aio.AioRpcError as error:
                    return error.code().name, error.details() or ""

        calling = [asyncio.create_task(call_on(client)) for client in clients * 4]
        while house.proxy.counts().requests.get(("m", "a", "OK"), 0) < len(calling):
            await asyncio.sleep(0)
        await house.proxy.drain(60)

        assert set(await asyncio.gather(*calling)) == {("UNAVAILABLE", "the gateway is stopping")}


def killed_by_it(relay: Relay) -> Handler:
    async def die(_: Any, __: Any) -> None:
        relay.cut()
        await asyncio.Event().wait()

    return die


def hold(worker: Any) -> asyncio.Event:
    """Let the worker never answer from now on. The returned event is set when a call is cancelled."""
    cancelled = asyncio.Event()

    async def wait(_: Any, __: Any) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    worker.does["ModelInfer"] = wait
    return cancelled
