"""ModelStreamInfer: one stream of a client, and one to the worker that serves its model.

A stream belongs to the model of its first message, and all its messages go to one worker, that of the first one's sequence
if it has one, so that sequences stay together and answers stay in order. Messages for another model are refused:
tritonserver (24.10) writes the answers of several models at once, and ends itself when that happens
(triton-inference-server/server issue 7472).
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from time import monotonic
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from rsrv.placement.routing import Choice
from rsrv_gateway.connections import (
    WorkerChannels,
    WorkerConnection,
    gone,
    is_cancelled,
    refusal_of,
    refuse,
    time_left,
)
from rsrv_gateway.outcomes import MOST_LOSSES, Refusal, another_model, tagged
from rsrv_gateway.peek import Malformed, Peeked
from rsrv_gateway.traffic import CANCELLED, Traffic

#: Bytes of unanswered messages that are kept for another worker, in case this one cannot be reached.
_KEPT_BYTES = 4 << 20
#: Messages to a decoupled model that are believed to wait for an answer: nobody says which of them get none.
_MOST_WAITING = 1000
#: tritonserver ends a stream with its first error, if the client sends this, and else says errors in answers
_ERRORS_END_IT = "triton_grpc_error"
#: how an answer begins that says an error
_ERROR = b"\x0a"


class Streaming:
    def __init__(
        self,
        traffic: Traffic,
        channels: Mapping[str, WorkerChannels],
        forwarded: Callable[[Any], Any],
        answers_once: Callable[[str, Any], Awaitable[bool]],
    ) -> None:
        """`answers_once`: whether each request for the model gets one answer; for a client's context."""
        self.traffic = traffic
        self.channels = channels
        self.forwarded = forwarded
        self.answers_once = answers_once

    async def stream(self, _: Any, context: Any) -> None:
        stream = _Stream(self, context)
        try:
            await stream.run()
        except BaseExceptionGroup as group:
            ended = _first(group)
        else:
            return
        finally:
            stream.end()
        if isinstance(ended, _StreamRefused):
            await refuse(context, ended.refusal)
        raise ended


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _error_code(answer: bytes) -> str:
    """Of an error that is said in an answer, where only a tag can tell; that stands in the bytes as it is."""
    message = answer.decode(errors="replace")
    return Refusal(grpc.StatusCode.UNAVAILABLE, message).for_client().name if tagged(message) else "UNKNOWN"


class _StreamRefused(Exception):
    """How the client's stream ends."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class _Message:
    """A request that has no answer yet."""

    __slots__ = ("arrived", "choice", "data", "items", "losses")

    def __init__(self, items: int, choice: Choice) -> None:
        #: itself, while it is kept
        self.data = b""
        self.items = items
        self.choice = choice
        #: connections that broke while it was there
        self.losses = 0
        self.arrived = monotonic()


class _Upstream:
    """The stream to one worker."""

    def __init__(self, worker: str, link: WorkerConnection, call: Any) -> None:
        self.worker = worker
        self.link = link
        self.call = call
        #: in the order in which they were sent
        self.waiting: deque[_Message] = deque()
        #: whether everything that was sent is kept, and so may go to another worker
        self.kept = True
        self.kept_bytes = 0
        #: messages go one by one, and in order
        self.writing = asyncio.Lock()
        #: whether nothing more is written
        self.closed = False

    def expect(self, message: _Message, data: bytes) -> None:
        """To be called for what is written next."""
        self.waiting.append(message)
        if self.kept:
            message.data = data
            self.kept_bytes += len(data)
            if self.kept_bytes > _KEPT_BYTES:
                self.answered()

    def answered(self) -> None:
        """From now on no other worker can take over."""
        if self.kept:
            self.kept = False
            for message in self.waiting:
                message.data = b""

    async def write(self, data: bytes) -> None:
        # How a stream has ended is for its reader to say.
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self.call.write(data)

    async def close(self) -> None:
        """Tell the worker that no more comes."""
        self.closed = True
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self.call.done_writing()


class _Stream:
    def __init__(self, house: Streaming, context: Any) -> None:
        self._traffic = house.traffic
        self._channels = house.channels
        self._context = context
        self._metadata = house.forwarded(context)
        self._answers_once = house.answers_once
        #: the stream's model; empty: no message was for one that is served
        self._model = ""
        #: the worker that its messages go to
        self._home = ""
        #: that has not ended; None: there is none at the moment
        self._upstream: _Upstream | None = None
        #: workers whose stream has failed
        self._failed: set[str] = set()
        self._client_done = False
        #: answers are written one by one
        self._writing = asyncio.Lock()
        #: whether each request gets one answer; None: no worker was asked yet
        self._once: bool | None = None

    async def run(self) -> None:
        """Until the client and the worker have ended. Raises an ExceptionGroup of _StreamRefused."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            while (data := await self._context.read()) is not grpc.aio.EOF:
                await self._forward(data)
            self._client_done = True
            upstream = self._upstream
            if upstream is not None:
                async with upstream.writing:
                    await upstream.close()

    def end(self) -> None:
        """What has no answer yet gets none."""
        upstream = self._upstream
        if upstream is not None:
            upstream.call.cancel()
            while upstream.waiting:
                self._over(upstream.waiting.popleft(), CANCELLED)

    async def _write(self, answer: bytes) -> None:
        async with self._writing:
            await self._context.write(answer)

    # --- from the client -------------------------------------------------------------------------------

    async def _forward(self, data: bytes) -> None:
        router = self._traffic.router
        try:
            request = Peeked(data)
            model = request.model
            measured = router.measured(model)
            items = 1 if measured is None else request.items(*measured)
            name = request.id
            sequence = None if self._model else request.parameter("sequence_id")
        except Malformed as error:
            self._traffic.refused("", "INVALID_ARGUMENT")
            raise _StreamRefused(Refusal(grpc.StatusCode.INVALID_ARGUMENT, str(error))) from None
        if self._model and model != self._model:
            await self._refuse_message(another_model(self._model, model), model, name)
            return
        choice = router.select(model, items) or await self._traffic.find(model, items)
        if isinstance(choice, Refusal):
            await self._refuse_message(choice, model, name)
            return
        if sequence:
            self._traffic.settle(choice, model, sequence)
        if not self._model:
            self._model, self._home = model, choice.worker
        message = _Message(items, choice)
        try:
            upstream = self._at_home(choice)
        except _StreamRefused as ended:
            self._over(message, ended.refusal.code.name)
            raise
        upstream.expect(message, data)
        async with upstream.writing:
            await upstream.write(data)
        if len(upstream.waiting) > _MOST_WAITING:
            await self._forget(upstream)

    async def _forget(self, upstream: _Upstream) -> None:
        """The oldest message, unless it will be answered."""
        if self._once is None:
            self._once = await self._answers_once(self._model, self._context)
        if upstream.waiting and not self._once:
            upstream.answered()
            self._over(upstream.waiting.popleft(), "OK")

    async def _refuse_message(self, refusal: Refusal, model: str, name: str) -> None:
        """As tritonserver refuses one message of a stream."""
        self._traffic.refused(model, refusal.code.name)
        if (_ERRORS_END_IT, "true") in self._context.invocation_metadata():
            raise _StreamRefused(refusal)
        answer = service_pb2.ModelStreamInferResponse(error_message=refusal.message)
        answer.infer_response.id = name
        await self._write(answer.SerializeToString())

    def _at_home(self, choice: Choice) -> _Upstream:
        """Where the stream's messages go. Raises _StreamRefused."""
        if self._home != choice.worker:
            self._traffic.router.move(choice, self._home)
        return self._upstream or self._open(self._home)

    # --- from the worker -------------------------------------------------------------------------------

    def _open(self, worker: str) -> _Upstream:
        channels = self._channels.get(worker)
        if channels is None:
            raise _StreamRefused(gone(worker))
        link = channels.link()
        call = link.stream(timeout=time_left(self._context), metadata=self._metadata)
        self._upstream = upstream = _Upstream(worker, link, call)
        self._tasks.create_task(self._answer(upstream))
        return upstream

    async def _answer(self, upstream: _Upstream) -> None:
        """Hands on what the worker sends."""
        try:
            while (data := await upstream.call.read()) is not grpc.aio.EOF:
                upstream.answered()
                upstream.link.answers += 1
                if upstream.waiting:
                    message = upstream.waiting.popleft()
                    self._over(message, _error_code(data) if data[:1] == _ERROR else "OK")
                await self._write(data)
            # Only the client ends a stream in order.
            refusal = gone(upstream.worker) if upstream.waiting and not upstream.closed else None
        except grpc.aio.AioRpcError as error:
            refusal = refusal_of(error)
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            refusal = gone(upstream.worker)
        self._upstream = None
        if refusal is not None and refusal.suspects_worker():
            self._traffic.brain.failed(upstream.worker)
        if refusal is not None and refusal.lost:
            for message in upstream.waiting:
                message.losses += 1
        if refusal is not None and refusal.is_retryable() and upstream.kept and await self._move(upstream):
            return
        unanswered = list(upstream.waiting)
        upstream.waiting.clear()
        for message in unanswered:  # the worker has nothing to say to these
            self._over(message, "OK" if refusal is None else refusal.for_client().name)
        if refusal is not None:
            raise _StreamRefused(refusal)

    async def _move(self, failed: _Upstream) -> bool:
        """Sends what one worker has not answered to another one that serves the model; whether there is one, and it may
        be tried."""
        self._failed.add(failed.worker)
        messages = list(failed.waiting)
        if any(message.losses == MOST_LOSSES for message in messages):
            return False
        datas = [message.data for message in messages]
        common = [
            worker
            for worker in (messages[0].choice.others if messages else ())
            if worker in self._channels
            and worker not in self._failed
            and all(worker in message.choice.others for message in messages)
        ]
        if not common:
            return False
        failed.waiting.clear()
        upstream = self._open(common[0])
        self._home = upstream.worker
        for message, data in zip(messages, datas, strict=True):
            self._traffic.moved(failed.worker)
            self._traffic.router.move(message.choice, upstream.worker)
            message.data = b""
            upstream.expect(message, data)
        # Nothing was waited for since the new home is known, so what the client sends now comes after these.
        async with upstream.writing:
            for data in datas:
                await upstream.write(data)
            if self._client_done:
                await upstream.close()
        return True

    def _over(self, message: _Message, code: str) -> None:
        self._traffic.router.release(message.choice)
        self._traffic.ended(
            self._model, message.choice.worker, code, message.items, monotonic() - message.arrived
        )
