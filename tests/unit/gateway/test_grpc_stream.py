"""ModelStreamInfer through the gateway: a stream of a client is for one model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, suppress
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2

from rsrv.placement.contract import Routes, Worker
from rsrv_gateway import grpc_proxy, streaming
from rsrv_gateway.connections import StreamEnd
from tests.unit.gateway.proxies import FakeWorker, Handler, House, Infer, refusal, refusing, serving
from tests.unit.gateway.workers import Relay
from tests.waiting import LIMITS_S, looped

Code = grpc.StatusCode
TWO = {"m": Routes(ready=("a", "b")), "n": Routes(ready=("b",)), "away": Routes(ready=())}


async def ask(call: Any, *models: str) -> None:
    """Send a request for each of the models. Its id has the model and the request's number."""
    for number, model in enumerate(models):
        await call.write(Infer(model_name=model, id=f"{model}{number}"))


async def answers(call: Any) -> list[tuple[str, str, str]]:
    """Return id, worker and error of all answers until the end of the stream. Raises AioRpcError."""
    got = []
    while (each := await call.read()) is not grpc.aio.EOF:
        got.append((each.infer_response.id, each.infer_response.model_version, each.error_message))
    return got


async def ending(call: Any) -> tuple[str, str]:
    """Return the code and the message with which a stream breaks."""
    try:
        await answers(call)
    except grpc.aio.AioRpcError as error:
        return error.code().name, error.details() or ""
    raise AssertionError("the stream has ended well")


async def opened(house: House, *models: str, **options: Any) -> Any:
    call = house.stream(**options)
    await ask(call, *models)
    return call


async def counted_at_least(house: House, which: tuple[str, str, str], number: int) -> None:
    """Wait until this count is reached."""
    while house.proxy.counts().requests.get(which, 0) < number:
        await asyncio.sleep(0)


async def counted(house: House, *expected: tuple[str, str, str]) -> None:
    """Wait until all these requests are counted, and no request is outstanding."""
    while not set(expected) <= set(house.proxy.counts().requests) or house.proxy.counts().outstanding:
        await asyncio.sleep(0)


@looped
async def test_a_model_stays_at_one_worker() -> None:
    """All messages of a stream reach one worker in order. Each message is answered and counted."""
    async with serving(2, TWO) as house:
        call = await opened(house, *["m"] * 5)
        await call.done_writing()

        assert await answers(call) == [(f"m{number}", "a", "") for number in range(5)]
        assert house.proxy.counts().requests == {("m", "a", "OK"): 5}
        assert house.proxy.counts().outstanding == {}


@looped
async def test_a_stream_belongs_to_its_first_model() -> None:
    """A message for another model is refused, the error names the model, and the stream continues."""
    async with serving(2, TWO) as house:
        call = await opened(house, "m", "n", "m")
        await call.done_writing()

        assert sorted(await answers(call)) == [
            ("m0", "a", ""),
            ("m2", "a", ""),
            ("n1", "", "this stream belongs to model 'm'; open another stream for 'n'"),
        ]
        assert house.workers[1].got == {}
        assert house.proxy.counts().requests == {("m", "a", "OK"): 2, ("n", "", "INVALID_ARGUMENT"): 1}
        assert house.proxy.counts().outstanding == {}


@looped
async def test_streams_share_the_workers() -> None:
    """Two streams of one model use two workers."""
    async with serving(2, TWO) as house:
        calls = [await opened(house, "m") for _ in range(2)]
        for call in calls:
            await call.done_writing()

        assert {(await answers(call))[0][1] for call in calls} == {"a", "b"}


@looped
async def test_a_sequence_goes_on_in_a_stream() -> None:
    """A stream whose first request belongs to a sequence uses the sequence's worker."""
    async with serving(4) as house:
        for number in range(1, 9):
            request = Infer(model_name="m", id="m")
            request.parameters["sequence_id"].int64_param = number
            home = (await house.call("ModelInfer", request)).model_version
            call = house.stream()
            await call.write(request)
            await call.done_writing()
            assert await answers(call) == [("m", home, "")]


@looped
async def test_more_answers_than_requests() -> None:
    """All answers of a decoupled model arrive, even after the client has closed its side."""

    async def three(requests: Any, context: Any) -> None:
        async for request in requests:
            for number in range(3):
                await context.write(
                    service_pb2.ModelStreamInferResponse(
                        infer_response=service_pb2.ModelInferResponse(id=f"{request.id}.{number}")
                    )
                )

    async with serving(1) as house:
        house.workers[0].does["ModelStreamInfer"] = three
        call = await opened(house, "m", "m")
        await call.done_writing()

        assert [name for name, _, _ in await answers(call)] == [
            f"m{n}.{answer}" for n in (0, 1) for answer in range(3)
        ]


@pytest.mark.parametrize("decoupled", [True, False, None])
@looped
async def test_messages_without_answers(decoupled: bool | None) -> None:
    """For a decoupled model, the gateway remembers a limited number of messages without an answer.

    For other models it remembers all. A model whose config no worker returns is treated as decoupled.
    """

    async def swallow(requests: Any, context: Any) -> None:
        async for _ in requests:
            pass

    async with serving(1) as house:
        (worker,) = house.workers
        worker.does["ModelStreamInfer"] = swallow
        worker.decoupled = {"m"} if decoupled else set()
        if decoupled is None:
            worker.does["ModelConfig"] = refusing(Code.UNAVAILABLE, "restricted")
        call = await opened(house, *["m"] * 1010)
        while len(worker.got.get("ModelStreamInfer", ())) < 1010:
            await asyncio.sleep(0)
        if decoupled is not False:
            await counted_at_least(house, ("m", "a", "OK"), 10)

        assert house.proxy.counts().outstanding == {("m", "a"): 1010 if decoupled is False else 1000}
        assert len(worker.got["ModelConfig"]) == 1
        await call.done_writing()
        assert await answers(call) == []


@looped
async def test_errors_are_answers() -> None:
    """If the gateway or the worker refuses a message, the client gets an error as the answer, and the stream continues."""

    async def refuse(requests: Any, context: Any) -> None:
        async for _ in requests:
            await context.write(service_pb2.ModelStreamInferResponse(error_message="wrong shape"))

    async with serving(2, TWO) as house:
        house.workers[1].does["ModelStreamInfer"] = refuse
        call = await opened(house, "unknown", "away", "n")
        await call.done_writing()

        got = await answers(call)
        assert [name for name, _, _ in got] == ["unknown0", "away1", ""]
        unknown, away, wrong = [message for _, _, message in got]
        assert unknown == "Request for unknown model: 'unknown' is not found"
        assert "'away'" in away
        assert wrong == "wrong shape"
        assert house.proxy.counts().requests == {
            ("", "", "NOT_FOUND"): 1,
            ("away", "", "UNAVAILABLE"): 1,
            ("n", "b", "UNKNOWN"): 1,
        }


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("[rsrv:QUEUE_FULL] retry after 3 ms", "RESOURCE_EXHAUSTED"),
        ("in ensemble 'e', [rsrv:RUNTIME_DOWN] wait", "UNAVAILABLE"),
    ],
)
@looped
async def test_errors_in_answers_are_final(message: str, code: str) -> None:
    """An error that a worker sends in a stream is sent to the client. Its tag decides how it is counted."""

    async def refuse(requests: Any, context: Any) -> None:
        async for _ in requests:
            await context.write(service_pb2.ModelStreamInferResponse(error_message=message))

    async with serving(2, TWO) as house:
        house.workers[0].does["ModelStreamInfer"] = refuse
        call = await opened(house, "m")
        await call.done_writing()

        assert await answers(call) == [("", "", message)]
        assert house.proxy.counts().requests == {("m", "a", code): 1}


@looped
async def test_errors_end_the_stream_if_the_client_wants_that() -> None:
    """With the header triton_grpc_error, the first error ends the stream. Workers also get the header."""
    header = (("triton_grpc_error", "true"),)

    async with serving(1) as house:
        (worker,) = house.workers
        assert await ending(await opened(house, "unknown", metadata=header)) == (
            "NOT_FOUND",
            "Request for unknown model: 'unknown' is not found",
        )
        assert await ending(await opened(house, "m", "n", metadata=header)) == (
            "INVALID_ARGUMENT",
            "this stream belongs to model 'm'; open another stream for 'n'",
        )
        worker.does["ModelStreamInfer"] = refusing(Code.INVALID_ARGUMENT, "wrong shape", (("took", "3"),))
        call = await opened(house, "m", metadata=header)
        assert await ending(call) == ("INVALID_ARGUMENT", "wrong shape")
        assert tuple(await call.trailing_metadata()) == (("took", "3"),)
        assert worker.metadata["ModelStreamInfer"][0]["triton_grpc_error"] == "true"


@looped
async def test_the_worker_cannot_be_reached() -> None:
    """If a worker cannot be reached, its messages are sent to another worker of the model."""
    async with serving(2, TWO) as house:
        await house.workers[0].kill()
        call = await opened(house, "m", "m", "m")
        await call.done_writing()

        assert await answers(call) == [("m0", "b", ""), ("m1", "b", ""), ("m2", "b", "")]
        assert "a" in house.brain.failures
        assert house.proxy.counts().failovers["a"] >= 1
        assert house.proxy.counts().outstanding == {}


@looped
async def test_later_messages_follow() -> None:
    """If the first messages move to another worker, later messages follow them in order."""
    async with serving(2, TWO) as house:
        first, second = house.workers
        first.does["ModelStreamInfer"] = refusing(Code.UNAVAILABLE, "starting")
        call = await opened(house, "m")
        await second.called.wait()
        await ask(call, *["m"] * 4)
        await call.done_writing()

        assert [name for name, _, _ in await answers(call)] == ["m0", "m0", "m1", "m2", "m3"]


@looped
async def test_a_worker_dies_that_has_answered() -> None:
    """If a worker dies after its first answer, the stream ends, because only the client knows what it still needs."""
    async with serving(2, TWO) as house:
        first, second = house.workers
        call = await opened(house, "m")
        assert (await call.read()).infer_response.model_version == "a"
        await first.kill()

        assert (await ending(call))[0] == "UNAVAILABLE"
        assert house.brain.failures == ["a"]
        assert second.got == {}


@looped
async def test_a_message_that_kills_its_workers() -> None:
    """If a message's worker dies, the message is sent to one more worker only."""
    async with serving(4) as house, AsyncExitStack() as relays:
        where = {}
        for worker in house.workers:
            relay = await relays.enter_async_context(Relay(worker.port).running())
            where[worker.name] = Worker(worker.name, f"127.0.0.1:{relay.port}")
            worker.does["ModelStreamInfer"] = killed_by_it(relay)
        await house.proxy.apply(where, {"m": Routes(ready=tuple(where))})

        assert (await ending(await opened(house, "m")))[0] == "UNAVAILABLE"

        assert [worker.name for worker in house.workers if worker.got] == ["a", "b"]
        await counted(house, ("m", "b", "UNAVAILABLE"))


@looped
async def test_a_model_on_one_worker_fails_with_it() -> None:
    """If no other worker has the model, the stream ends with the worker's refusal."""
    async with serving(2, TWO) as house:
        house.workers[1].does["ModelStreamInfer"] = refusing(Code.UNAVAILABLE, "starting")
        call = await opened(house, "n")

        assert await ending(call) == ("UNAVAILABLE", "starting")
        await counted(house, ("n", "b", "UNAVAILABLE"))


@looped
async def test_a_worker_refuses_a_stream_while_a_message_is_sent_to_it() -> None:
    """If a worker refuses a stream while the gateway writes to it, the client gets the earlier answers and then the refusal.

    The worker is not taken for dead.
    """
    failed = asyncio.Event()

    async def refuse(requests: Any, context: Any) -> None:
        request = await anext(requests)
        for _ in range(2):
            await worker.echo_stream(only(request), context)
        await context.abort(Code.UNAVAILABLE, "[rsrv:QUEUE_FULL] full", (("took", "3"),))

    async def write(upstream: streaming._Upstream, data: bytes) -> None:
        """Write the first message once. Write the second one again and again until the stream has ended."""
        with suppress(grpc.aio.AioRpcError):
            await upstream.call.write(data)
            while b"m1" in data:
                await upstream.call.write(data)
        if b"m1" in data:
            failed.set()

    async def forward(stream: streaming._Stream, answer: bytes) -> None:
        # The second answer is not read yet, so gRPC has not reported the worker's status when the write fails.
        await failed.wait()
        await forward_now(stream, answer)

    forward_now = streaming._Stream._write
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming._Upstream, "write", write)
        patch.setattr(streaming._Stream, "_write", forward)
        async with serving(1) as house:
            (worker,) = house.workers
            worker.does["ModelStreamInfer"] = refuse
            call = house.stream()
            await ask(call, "m", "m")

            assert [(await call.read()).infer_response.id for _ in range(2)] == ["m0", "m0"]
            assert await ending(call) == ("RESOURCE_EXHAUSTED", "[rsrv:QUEUE_FULL] full")
            assert tuple(await call.trailing_metadata()) == (("took", "3"),)
            assert house.brain.failures == []


class Ending:
    """A call to a worker that ends with several statuses one after another, as grpc.aio sets them."""

    def __init__(self, *statuses: grpc.aio.AioRpcError | None) -> None:
        self._statuses = list(statuses)

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        callback(self)

    async def read(self) -> Any:
        """Raise the next status, or return EOF if it is None.

        The last status is used for all later calls.
        """
        status = self._statuses[0] if len(self._statuses) == 1 else self._statuses.pop(0)
        if status is not None:
            raise status
        return grpc.aio.EOF


def status(code: grpc.StatusCode, message: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), message)


@looped
@pytest.mark.parametrize("is_first", [False, True])
async def test_a_status_of_grpc_stands_before_or_after_that_of_the_worker(is_first: bool) -> None:
    """If a call ends with the worker's status and one of gRPC's own, in either order, the worker's is used, even if it is OK."""
    own = status(Code.INTERNAL, "Internal error from Core")
    refused = status(Code.UNAVAILABLE, "full")
    for statuses, expected in (((refused, own), "full"), ((None, own), None)):
        end = StreamEnd(Ending(*(statuses[::-1] if is_first else statuses)))
        result = await end.refusal_of(own)
        assert (result and result.message) == expected


@looped
async def test_a_worker_ends_a_stream_with_nothing_said() -> None:
    """If a worker ends its stream without an answer, the message is sent to another worker."""

    async def leave(requests: Any, context: Any) -> None:
        async for _ in requests:
            return

    async with serving(2, TWO) as house:
        house.workers[0].does["ModelStreamInfer"] = leave
        call = await opened(house, "m")

        assert (await call.read()).infer_response.model_version == "b"
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF


async def only(request: Any) -> AsyncIterator[Any]:
    yield request


class Failing:
    """A worker's stream that fails with a code when it gets a message.

    With `cancelled`, the stream fails only when the read of its answer is cancelled.
    """

    def __init__(self, code: Any, message: str, *, cancelled: bool = False) -> None:
        nothing = grpc.aio.Metadata()
        self._error = grpc.aio.AioRpcError(code, nothing, nothing, message)
        self._cancelled = cancelled
        self._callbacks: list[Callable[[Any], None]] = []
        self.asked = asyncio.Event()

    async def write(self, _: bytes) -> None:
        self.asked.set()
        for callback in () if self._cancelled else self._callbacks:
            callback(self)

    async def read(self) -> bytes:
        with suppress(asyncio.CancelledError):
            await (asyncio.Event() if self._cancelled else self.asked).wait()
        raise self._error

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield await self.read()

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._callbacks.append(callback)

    async def done_writing(self) -> None: ...

    def cancel(self) -> None: ...

    def take_place_of(self, house: House, worker: str) -> None:
        for link in house.proxy.grpc._channels[worker]._links:
            link.stream = lambda **_: self


@looped
async def test_a_worker_fails_while_a_message_is_sent_to_it() -> None:
    """If gRPC reports only its own error, and never the worker's status, another worker answers."""
    async with serving(2, TWO) as house:
        Failing(Code.INTERNAL, "Internal error from Core").take_place_of(house, "a")
        call = await opened(house, "m")
        await call.done_writing()

        assert await answers(call) == [("m0", "b", "")]
        assert house.brain.failures == ["a"]


@looped
async def test_too_much_to_keep() -> None:
    """Messages that are too large to keep are lost if their worker dies."""
    async with serving(2, TWO) as house:
        first, _ = house.workers
        go = asyncio.Event()

        async def late(requests: Any, context: Any) -> None:
            async for _ in requests:
                await go.wait()
                await context.abort(Code.UNAVAILABLE, "ending")

        first.does["ModelStreamInfer"] = late
        call = house.stream()
        await call.write(Infer(model_name="m", raw_input_contents=[b"\0" * (4 << 20)]))
        await first.called.wait()
        go.set()

        assert await ending(call) == ("UNAVAILABLE", "ending")


@looped
async def test_a_worker_is_away_for_one_probe() -> None:
    """If a worker is missing from the table for a short time, its streams continue."""
    async with serving(2, TWO, request_timeout_s=0.2) as house:
        first, second = house.workers
        call = await opened(house, "m")
        assert (await call.read()).infer_response.model_version == "a"
        await house.apply({"m": Routes(ready=("b",))}, [second])
        await house.apply(TWO)
        first.does["ModelInfer"] = second.does["ModelInfer"] = never
        with pytest.raises(grpc.aio.AioRpcError):
            await house.infer()  # This exceeds the limit.
        await ask(call, "m")

        assert (await call.read()).infer_response.model_version == "a"


@looped
async def test_a_call_is_late_beside_a_busy_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call beyond its deadline does not close its connection if a stream on this connection gets answers."""
    monkeypatch.setattr(grpc_proxy, "CHANNELS_PER_WORKER", 1)
    async with serving(1, {"m": Routes(ready=("a",))}) as house:
        (worker,) = house.workers
        passed = asyncio.Event()

        async def late(_: Any, context: Any) -> None:
            await passed.wait()
            await context.abort(Code.DEADLINE_EXCEEDED, "late")

        worker.does["ModelInfer"] = late
        call = await opened(house, "m")
        await call.read()
        refused = asyncio.ensure_future(refusal(house.infer()))
        while "ModelInfer" not in worker.got:
            await asyncio.sleep(0)
        await ask(call, "m")
        await call.read()
        passed.set()

        assert await refused == ("DEADLINE_EXCEEDED", "late")
        assert house.brain.failures == []


@looped
async def test_the_client_leaves() -> None:
    """If a client cancels its stream, the worker's stream is cancelled."""
    async with serving(1) as house:
        gone = hold(house.workers[0])
        call = await opened(house, "m", "m")
        while len(house.workers[0].got.get("ModelStreamInfer", ())) < 2:
            await asyncio.sleep(0)
        call.cancel()

        await gone.wait()
        await counted(house, ("m", "a", "CANCELLED"))


@looped
async def test_the_client_leaves_as_the_worker_fails() -> None:
    """If the client leaves while its worker fails, the stream ends as cancelled, and no other worker gets the request."""
    async with serving(2, TWO) as house:
        failing = Failing(Code.UNAVAILABLE, "ending", cancelled=True)
        failing.take_place_of(house, "a")
        call = await opened(house, "m")
        await failing.asked.wait()
        call.cancel()

        await counted(house, ("m", "a", "CANCELLED"))


@looped
async def test_a_deadline() -> None:
    """The deadline of a stream also holds for the worker. After it, the client gets DEADLINE_EXCEEDED."""
    async with serving(1) as house:
        (worker,) = house.workers
        gone = hold(worker)
        for limit in LIMITS_S:
            call = house.stream(timeout=limit)
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await ask(call, "m")
            code = await call.code()
            if worker.got:
                break

        assert code is Code.DEADLINE_EXCEEDED
        await gone.wait()


@looped
async def test_what_is_no_request() -> None:
    """Bytes that are not a request end the stream."""
    async with serving(1) as house:
        call = house.client.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer", None, None)()
        await call.write(b"\x0a\xff")

        assert (await ending(call))[0] == "INVALID_ARGUMENT"


@looped
async def test_a_stream_is_refused_while_its_first_answer_is_written() -> None:
    """If a stream is refused while its first answer is written, the client first gets this answer, however late it reads.

    After that, the client gets the reason of the refusal.
    """
    async with AsyncExitStack() as ends:
        house = await ends.enter_async_context(serving(1))
        (worker,), size, gone = house.workers, 32 << 20, asyncio.Event()

        async def large(requests: Any, context: Any) -> None:
            try:
                async for request in requests:
                    answer = await worker.echo(request, context)
                    answer.raw_output_contents.append(bytes(size))
                    await context.write(service_pb2.ModelStreamInferResponse(infer_response=answer))
            finally:
                gone.set()

        worker.does["ModelStreamInfer"] = large
        address = f"127.0.0.1:{house.proxy.grpc.port}"
        unlimited = grpc.aio.insecure_channel(address, [("grpc.max_receive_message_length", -1)])
        client = await ends.enter_async_context(unlimited)
        call = client.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer", None, None)()
        await call.write(Infer(model_name="m").SerializeToString())
        await counted_at_least(house, ("m", "a", "OK"), 1)
        await call.write(b"\x0a\xff")
        await gone.wait()

        assert len(await call.read()) > size
        assert (await ending(call))[0] == "INVALID_ARGUMENT"


@looped
async def test_nothing_is_said() -> None:
    """A stream without messages ends when its client ends it, and no worker is asked."""
    async with serving(1) as house:
        call = house.stream()
        await call.done_writing()

        assert await answers(call) == []
        assert house.workers[0].metadata == {}


def killed_by_it(relay: Relay) -> Handler:
    async def die(requests: Any, _: Any) -> None:
        async for _ in requests:
            relay.cut()

    return die


async def never(_: Any, __: Any) -> None:
    await asyncio.Event().wait()


def hold(worker: FakeWorker) -> asyncio.Event:
    """Let the worker never answer streams from now on. The returned event is set when a stream is cancelled."""
    gone = asyncio.Event()

    async def wait(requests: Any, _: Any) -> None:
        try:
            async for _ in requests:
                pass
            await asyncio.Event().wait()
        finally:
            gone.set()

    worker.does["ModelStreamInfer"] = wait
    return gone
