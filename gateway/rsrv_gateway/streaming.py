"""ModelStreamInfer: one stream of a client, and one to the worker of each model that its messages are for.

All messages of a model go to one worker, that of the first one's sequence if it has one, so that sequences stay together
and answers of a model stay in order. Those of several models are put in order here (`stream_order`), which needs to know
which of them are decoupled: that is asked as soon as a stream has a second model, for the worker of a single one keeps the
order itself; or a lot of messages without answers.

Models do not share a stream, even where they have one worker: tritonserver (24.10) writes the answers of several at once,
and ends itself when that happens (triton-inference-server/server issue 7472).
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from time import monotonic
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from rsrv_gateway.calls import gone, is_cancelled, refusal_of, refuse, time_left
from rsrv_gateway.channels import Channels, Link
from rsrv_gateway.outcomes import MOST_LOSSES, Refusal, tagged
from rsrv_gateway.peek import Malformed, Peeked
from rsrv_gateway.routing import Choice
from rsrv_gateway.stream_order import Answers, Place
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
        channels: Mapping[str, Channels],
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
        if isinstance(ended, _Refused):
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


class _Refused(Exception):
    """How the client's stream ends."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class _Message:
    """A request that has no answer yet."""

    __slots__ = ("arrived", "choice", "data", "items", "losses", "model", "place")

    def __init__(self, model: str, items: int, choice: Choice) -> None:
        #: itself, while it is kept
        self.data = b""
        self.model = model
        self.items = items
        self.choice = choice
        #: connections that broke while it was there
        self.losses = 0
        #: None: its answers need not wait for others
        self.place: Place | None = None
        self.arrived = monotonic()


class _Upstream:
    """The stream to one worker, for one model."""

    def __init__(self, worker: str, model: str, link: Link, call: Any) -> None:
        self.worker = worker
        self.model = model
        self.link = link
        self.key = worker, model
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
        #: by model
        self._homes: dict[str, str] = {}
        #: by worker and model, those that can be written to
        self._upstreams: dict[tuple[str, str], _Upstream] = {}
        #: all that have not ended
        self._ending: set[_Upstream] = set()
        #: workers whose stream has failed
        self._failed: set[str] = set()
        self._client_done = False
        self._answers = Answers(context.write)
        #: whether each request gets one answer, by model; None: nobody was asked yet
        self._once: dict[str, bool | None] = {}

    async def run(self) -> None:
        """Until the client and all workers have ended. Raises an ExceptionGroup of _Refused."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            while (data := await self._context.read()) is not grpc.aio.EOF:
                await self._forward(data)
            self._client_done = True
            for upstream in list(self._upstreams.values()):
                async with upstream.writing:
                    await self._close(upstream)

    def end(self) -> None:
        """What has no answer yet gets none."""
        for upstream in self._ending:
            upstream.call.cancel()
            while upstream.waiting:
                self._over(upstream.waiting.popleft(), CANCELLED)

    # --- from the client -------------------------------------------------------------------------------

    async def _forward(self, data: bytes) -> None:
        router = self._traffic.router
        try:
            request = Peeked(data)
            model = request.model
            measured = router.measured(model)
            items = 1 if measured is None else request.items(*measured)
            name = request.id
            sequence = None if model in self._homes else request.parameter("sequence_id")
        except Malformed as error:
            self._traffic.refused("", "INVALID_ARGUMENT")
            raise _Refused(Refusal(grpc.StatusCode.INVALID_ARGUMENT, str(error))) from None
        choice = router.select(model, items) or await self._traffic.find(model, items)
        if isinstance(choice, Refusal):
            self._traffic.refused(model, choice.code.name)
            await self._refuse_message(choice, name)
            return
        if sequence:
            self._traffic.settle(choice, model, sequence)
        message = _Message(model, items, choice)
        try:
            message.place = await self._place(model)
            upstream = self._at_home(model, choice)
        except BaseException as ended:
            self._over(message, ended.refusal.code.name if isinstance(ended, _Refused) else CANCELLED)
            raise
        upstream.expect(message, data)
        async with upstream.writing:
            await upstream.write(data)
        if len(upstream.waiting) > _MOST_WAITING:
            await self._forget(upstream)

    async def _forget(self, upstream: _Upstream) -> None:
        """The oldest message, unless it will be answered."""
        await self._tell_apart()
        if upstream.waiting and self._once[upstream.model] is False:
            upstream.answered()
            self._over(upstream.waiting.popleft(), "OK")

    async def _refuse_message(self, refusal: Refusal, name: str) -> None:
        """As tritonserver refuses one message of a stream."""
        if (_ERRORS_END_IT, "true") in self._context.invocation_metadata():
            raise _Refused(refusal)
        answer = service_pb2.ModelStreamInferResponse(error_message=refusal.message)
        answer.infer_response.id = name
        await self._tell_apart()
        await self._answers.put(self._answers.expect(), answer.SerializeToString())

    async def _place(self, model: str) -> Place | None:
        """For the message that comes now."""
        if model not in self._once:
            self._once[model] = None
            if len(self._once) > 1:
                await self._tell_apart()
        return None if self._once[model] is False else self._answers.expect()

    async def _tell_apart(self) -> None:
        """Which models are to be waited for, now that there is something that waits."""
        unasked = [model for model, once in self._once.items() if once is None]
        if not unasked:
            return
        said = await asyncio.gather(*[self._answers_once(model, self._context) for model in unasked])
        self._once.update(zip(unasked, said, strict=True))
        free = [
            message
            for upstream in self._ending
            if self._once[upstream.model] is False
            for message in upstream.waiting
        ]
        await self._answers.give_up(message.place for message in free)
        for message in free:
            message.place = None

    def _at_home(self, model: str, choice: Choice) -> _Upstream:
        """Where the model's messages go. Raises _Refused."""
        home = self._homes.get(model)
        if home is None:
            hopeful = (worker for worker in (choice.worker, *choice.others) if worker not in self._failed)
            home = self._homes[model] = next(hopeful, choice.worker)
        if home != choice.worker:
            self._traffic.router.move(choice, home)
        return self._upstreams.get((home, model)) or self._open(home, model)

    # --- from the workers ------------------------------------------------------------------------------

    def _open(self, worker: str, model: str) -> _Upstream:
        channels = self._channels.get(worker)
        if channels is None:
            raise _Refused(gone(worker))
        link = channels.link()
        call = link.stream(timeout=time_left(self._context), metadata=self._metadata)
        upstream = _Upstream(worker, model, link, call)
        self._upstreams[upstream.key] = upstream
        self._ending.add(upstream)
        self._tasks.create_task(self._answer(upstream))
        return upstream

    async def _answer(self, upstream: _Upstream) -> None:
        """Hands on what the worker sends."""
        try:
            while (data := await upstream.call.read()) is not grpc.aio.EOF:
                upstream.answered()
                place = None
                upstream.link.answers += 1
                if upstream.waiting:
                    message = upstream.waiting.popleft()
                    self._over(message, _error_code(data) if data[:1] == _ERROR else "OK")
                    place = message.place
                await self._answers.put(place, data)
            # Only the client ends a stream in order.
            refusal = gone(upstream.worker) if upstream.waiting and not upstream.closed else None
        except grpc.aio.AioRpcError as error:
            refusal = refusal_of(error)
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            refusal = gone(upstream.worker)
        self._ending.discard(upstream)
        if self._upstreams.get(upstream.key) is upstream:
            del self._upstreams[upstream.key]
        if refusal is not None and refusal.broken():
            self._traffic.brain.failed(upstream.worker)
        if refusal is not None and refusal.lost:
            for message in upstream.waiting:
                message.losses += 1
        if refusal is not None and refusal.elsewhere() and upstream.kept and await self._move(upstream):
            return
        unanswered = list(upstream.waiting)
        upstream.waiting.clear()
        for message in unanswered:  # the worker has nothing to say to these
            self._over(message, "OK" if refusal is None else refusal.for_client().name)
        await self._answers.give_up(message.place for message in unanswered)
        if refusal is not None:
            raise _Refused(refusal)

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
        upstream = self._open(common[0], failed.model)
        self._homes[failed.model] = upstream.worker
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
                await self._close(upstream)
        return True

    async def _close(self, upstream: _Upstream) -> None:
        """The worker is told that no more comes."""
        self._upstreams.pop(upstream.key, None)
        await upstream.close()

    def _over(self, message: _Message, code: str) -> None:
        self._traffic.router.release(message.choice)
        self._traffic.ended(
            message.model, message.choice.worker, code, message.items, monotonic() - message.arrived
        )
