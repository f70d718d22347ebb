"""ModelStreamInfer: one stream of a client, and one stream to the worker that serves its model.

A stream belongs to the model of its first message. All its messages go to one worker, so that sequences stay together and answers
stay in order. If the first message belongs to a sequence, this is the worker of the sequence. Messages for another model are
refused, because tritonserver 24.10 writes the answers of several models at the same time, and crashes when that happens
(triton-inference-server/server issue 7472).
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from rsrv.placement.routing import Choice
from rsrv_gateway.connections import (
    StreamEnd,
    WorkerChannels,
    WorkerConnection,
    gone,
    is_cancelled,
    refuse,
    time_left,
)
from rsrv_gateway.outcomes import CONNECTION_LOSSES_MAX, Refusal, another_model, tagged
from rsrv_gateway.peek import Malformed, Peeked
from rsrv_gateway.suspects import EQUAL, call_digest
from rsrv_gateway.traffic import CANCELLED, Traffic

#: Function that returns whether each request for a model gets exactly one answer. Its second argument is the context of the
#: client's call.
AnswersOnce = Callable[[str, Any], Awaitable[bool]]

#: Maximum number of bytes of unanswered messages that are kept for a failover.
_KEPT_BYTES = 4 << 20
#: Maximum number of messages to a decoupled model that count as unanswered. Such a model does not answer some messages, and
#: nothing shows which messages these are.
_WAITING_MAX = 1000
#: If the client's metadata has this key, tritonserver ends a stream at the first error. Otherwise, tritonserver sends errors as
#: answers.
_ERRORS_END_IT = "triton_grpc_error"
#: First byte of an answer that is an error.
_ERROR = b"\x0a"


async def stream(
    traffic: Traffic,
    channels: Mapping[str, WorkerChannels],
    forwarded: Callable[[Any], Any],
    answers_once: AnswersOnce,
    _: Any,
    context: Any,
) -> None:
    """Serve a client's stream. `forwarded` selects the metadata for workers. gRPC passes the last two arguments."""
    forwarding = _Stream(traffic, channels, answers_once, context, forwarded(context))
    try:
        await forwarding.run()
    except BaseExceptionGroup as group:
        ended = group.exceptions[0]
    else:
        return
    finally:
        forwarding.end()
    await forwarding.begun()
    if isinstance(ended, _StreamRefused):
        await refuse(context, ended.refusal)
    raise ended


def _error_code(answer: bytes) -> str:
    """Return the code of an error in an answer. Find the error's tag in the bytes, because nothing else shows the code."""
    message = answer.decode(errors="replace")
    return Refusal(grpc.StatusCode.UNAVAILABLE, message).for_client().name if tagged(message) else "UNKNOWN"


class _StreamRefused(Exception):
    """Error that ends the client's stream with a refusal."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


@dataclass(slots=True, eq=False)
class _Message:
    """A request without an answer yet."""

    items: int
    choice: Choice
    #: True if the message asks for classes. Only the current worker has confirmed that it can compute them.
    classified: bool
    #: The message while it is kept for a failover, or empty.
    data: bytes = b""
    #: Number of connections that broke during the request.
    losses: int = 0
    arrived: float = field(default_factory=monotonic)


@dataclass(slots=True, eq=False)
class _Upstream:
    """The stream to one worker."""

    worker: str
    link: WorkerConnection
    call: Any
    #: Unanswered messages in sending order.
    waiting: deque[_Message] = field(default_factory=deque)
    #: True if all messages are kept, so that a failover is possible.
    kept: bool = True
    kept_bytes: int = 0
    #: Lock for writing messages one by one, in order.
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    #: True if no more messages will be written.
    closed: bool = False
    #: How the worker has ended the stream.
    end: StreamEnd = field(init=False)

    def __post_init__(self) -> None:
        self.end = StreamEnd(self.call)

    def expect(self, message: _Message, data: bytes) -> None:
        """Register the message that is written next."""
        self.waiting.append(message)
        if self.kept:
            message.data = data
            self.kept_bytes += len(data)
            if self.kept_bytes > _KEPT_BYTES:
                self.answered()

    def answered(self) -> None:
        """Record an answer. A failover is not possible any more."""
        if self.kept:
            self.kept = False
            for message in self.waiting:
                message.data = b""

    async def write(self, data: bytes) -> None:
        # Ignore errors of the write. If the stream has ended, `_answer` handles the end.
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self.call.write(data)

    async def close(self) -> None:
        """Signal to the worker that no more messages follow."""
        self.closed = True
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self.call.done_writing()


class _Stream:
    def __init__(
        self,
        traffic: Traffic,
        channels: Mapping[str, WorkerChannels],
        answers_once: AnswersOnce,
        context: Any,
        metadata: Any,
    ) -> None:
        self._traffic = traffic
        self._channels = channels
        self._answers_once = answers_once
        self._context = context
        self._metadata = metadata
        #: The stream's model, or empty before the first message for a served model.
        self._model = ""
        #: Worker of the stream's messages.
        self._home = ""
        #: The open stream to a worker, or None.
        self._upstream: _Upstream | None = None
        #: Workers whose stream has failed.
        self._failed: set[str] = set()
        self._client_done = False
        #: Lock for writing answers one by one. The first answer also sends the stream's headers.
        self._writing = asyncio.Lock()
        self._first_write: asyncio.Future[None] | None = None
        #: True if each request gets exactly one answer. None until workers are asked.
        self._once: bool | None = None

    async def run(self) -> None:
        """Forward messages and answers until client and worker have ended. Raises an ExceptionGroup of _StreamRefused."""
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
        """End the stream. Unanswered messages get no answer."""
        upstream = self._upstream
        if upstream is not None:
            upstream.call.cancel()
            while upstream.waiting:
                self._over(upstream.waiting.popleft(), CANCELLED)

    async def begun(self) -> None:
        """Wait until the first answer, with the stream's headers, is sent.

        If the stream ended earlier, gRPC would send the headers a second time with the end, and fail.
        """
        if self._first_write is not None:
            await asyncio.wait([self._first_write])

    async def _write(self, answer: bytes) -> None:
        async with self._writing:
            if self._first_write is None:
                self._first_write = asyncio.ensure_future(self._context.write(answer))
                # Read the error of the write here. If this stream is cancelled during the write, nothing else reads it.
                self._first_write.add_done_callback(lambda write: write.cancelled() or write.exception())
                await asyncio.shield(self._first_write)
            else:
                await self._context.write(answer)

    # --- from the client -------------------------------------------------------------------------------

    async def _forward(self, data: bytes) -> None:
        router = self._traffic.router
        try:
            request = Peeked(data)
            model = request.model
            items = request.items(router.measured(model))
            name = request.id
            sequence = None if self._model else request.sequence
        except Malformed as error:
            self._traffic.count_refused("", "INVALID_ARGUMENT")
            raise _StreamRefused(Refusal(grpc.StatusCode.INVALID_ARGUMENT, str(error))) from None
        if self._model and model != self._model:
            await self._refuse_message(another_model(self._model, model), model, name)
            return
        suspects = self._traffic.suspects
        if suspects.has(model) and suspects.is_equal(model, call_digest(data)):
            await self._refuse_message(EQUAL, model, name)
            return
        choice = router.select(model, items) or await self._traffic.find(model, items)
        if isinstance(choice, Refusal):
            await self._refuse_message(choice, model, name)
            return
        if sequence:
            self._traffic.pin_sequence(choice, model, sequence)
        if not self._model:
            self._model, self._home = model, choice.worker
        if request.classified:
            try:
                wrong = await self._refusal_of_classes(request)
            except BaseException:
                router.release(choice)
                raise
            if wrong is not None:
                router.release(choice)
                await self._refuse_message(wrong, model, name)
                return
        message = _Message(items, choice, bool(request.classified))
        try:
            if self._home != choice.worker:
                router.move(choice, self._home)
            upstream = self._upstream or self._open(self._home)
        except _StreamRefused as ended:
            self._over(message, ended.refusal.code.name)
            raise
        upstream.expect(message, data)
        async with upstream.writing:
            await upstream.write(data)
        if len(upstream.waiting) > _WAITING_MAX:
            await self._forget(upstream)

    async def _refusal_of_classes(self, request: Peeked) -> Refusal | None:
        """Return why the stream's worker must not get a request for classes, or None if it may get the request."""
        while True:
            home = self._home
            wrong = await self._traffic.refusal_of_classes(
                home, request.model, request.version, request.classified
            )
            # Ask again if the stream has moved to another worker during the call.
            if wrong is not None or home == self._home:
                return wrong

    async def _forget(self, upstream: _Upstream) -> None:
        """Stop waiting for an answer to the oldest message, unless each message certainly gets one answer."""
        if self._once is None:
            self._once = await self._answers_once(self._model, self._context)
        if upstream.waiting and not self._once:
            upstream.answered()
            self._over(upstream.waiting.popleft(), "OK")

    async def _refuse_message(self, refusal: Refusal, model: str, name: str) -> None:
        """Refuse one message as tritonserver does."""
        self._traffic.count_refused(model, refusal.code.name)
        if (_ERRORS_END_IT, "true") in self._context.invocation_metadata():
            raise _StreamRefused(refusal)
        answer = service_pb2.ModelStreamInferResponse(error_message=refusal.message)
        answer.infer_response.id = name
        await self._write(answer.SerializeToString())

    # --- from the worker -------------------------------------------------------------------------------

    def _open(self, worker: str) -> _Upstream:
        """Open a stream to a worker. Raises _StreamRefused."""
        channels = self._channels.get(worker)
        if channels is None:
            raise _StreamRefused(gone(worker))
        link = channels.link()
        call = link.stream(timeout=time_left(self._context), metadata=self._metadata)
        self._upstream = upstream = _Upstream(worker, link, call)
        self._tasks.create_task(self._answer(upstream))
        return upstream

    async def _answer(self, upstream: _Upstream) -> None:
        """Forward the worker's answers to the client."""
        refusal: Refusal | None = None
        try:
            # Unlike `read`, this iteration also yields answers that the worker wrote before it ended the stream during a write.
            async for data in upstream.call:
                upstream.answered()
                upstream.link.answers += 1
                if upstream.waiting:
                    message = upstream.waiting.popleft()
                    self._over(message, _error_code(data) if data[:1] == _ERROR else "OK")
                await self._write(data)
        except grpc.aio.AioRpcError as error:
            refusal = await upstream.end.refusal_of(error)
        except asyncio.CancelledError:
            refusal = gone(upstream.worker)
        # Check for a cancellation here, because the wait may have ended in another way, for example with the end of the call.
        if is_cancelled():
            return
        # Treat the worker as gone if it ends the stream before the client does, with unanswered messages, even without an error.
        if refusal is None and upstream.waiting and not upstream.closed:
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
        for message in unanswered:  # The worker will not answer these messages.
            self._over(message, "OK" if refusal is None else refusal.for_client().name)
        if refusal is not None:
            raise _StreamRefused(refusal)

    async def _move(self, failed: _Upstream) -> bool:
        """Fail over: send the unanswered messages to another worker of the model. Return False if that is impossible."""
        self._failed.add(failed.worker)
        messages = list(failed.waiting)
        if any(message.losses == CONNECTION_LOSSES_MAX or message.classified for message in messages):
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
            self._traffic.count_failover(failed.worker)
            self._traffic.router.move(message.choice, upstream.worker)
            message.data = b""
            upstream.expect(message, data)
        # There was no await since `_open` set the new stream. So later messages of the client are written after these messages.
        async with upstream.writing:
            for data in datas:
                await upstream.write(data)
            if self._client_done:
                await upstream.close()
        return True

    def _over(self, message: _Message, code: str) -> None:
        self._traffic.router.release(message.choice)
        self._traffic.count_finished(
            self._model, message.choice.worker, code, message.items, monotonic() - message.arrived
        )
