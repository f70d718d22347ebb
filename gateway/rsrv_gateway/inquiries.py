"""All calls but inference: some are about the gateway, some about one model, and some go to all workers."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from rsrv_gateway import fanout
from rsrv_gateway.calls import gone, is_cancelled, refusal_of, refuse, time_left
from rsrv_gateway.channels import SERVICE, Channels
from rsrv_gateway.fanout import Answer, Merge
from rsrv_gateway.outcomes import Refusal, no_worker
from rsrv_gateway.traffic import Traffic

Call = Callable[[bytes, Any], Awaitable[bytes]]
_TRUE = b"\x08\x01"
#: workers that are asked about a model that none serves, for what they say of it
_ASKED = 3

#: asked of all workers: how their answers become one
_MERGED: Mapping[str, Merge] = {
    "ModelStatistics": fanout.merge_statistics,
    "RepositoryIndex": fanout.merge_index,
    "SystemSharedMemoryStatus": fanout.merge_regions,
    "CudaSharedMemoryStatus": fanout.merge_regions,
    "SystemSharedMemoryUnregister": fanout.any_succeeded,
    "CudaSharedMemoryUnregister": fanout.any_succeeded,
    "TraceSetting": fanout.all_agree,
    "LogSettings": fanout.all_agree,
}
_ABOUT_A_MODEL = ("ModelMetadata", "ModelConfig")
#: these take as long as a model takes to load, which no default may cut short
_CHANGES = ("RepositoryModelLoad", "RepositoryModelUnload")
_UNDONE_BY = {
    "SystemSharedMemoryRegister": "SystemSharedMemoryUnregister",
    "CudaSharedMemoryRegister": "CudaSharedMemoryUnregister",
}


class Inquiries:
    def __init__(
        self,
        timeout_s: float,
        traffic: Traffic,
        channels: Mapping[str, Channels],
        forwarded: Callable[[Any], Any],
    ) -> None:
        """`timeout_s` is for calls whose client set no deadline; `forwarded` is what of its metadata is for workers."""
        self._timeout_s = timeout_s
        self._traffic = traffic
        self._channels = channels
        self._forwarded = forwarded

    def calls(self) -> dict[str, Call]:
        """By the method's name."""
        made: dict[str, Call] = {
            "ServerLive": self._live,
            "ServerReady": self._ready,
            "ServerMetadata": self._metadata,
            "ModelReady": self._model_ready,
        }
        for method in _ABOUT_A_MODEL:
            made[method] = self._about_a_model(method)
        for method, merge in _MERGED.items():
            made[method] = self._merged(method, merge)
        for method in _CHANGES:
            made[method] = self._change(method)
        for method, undo in _UNDONE_BY.items():
            made[method] = self._registration(method, undo)
        return made

    # --- of the gateway --------------------------------------------------------------------------------

    async def _live(self, _: bytes, __: Any) -> bytes:
        return _TRUE

    async def _ready(self, data: bytes, context: Any) -> bytes:
        """A worker is ready: certainly if a model is."""
        if any(routes.ready for routes in self._traffic.table.values()):
            return _TRUE
        answers = await self._ask_all("ServerReady", data, context, self._timeout(context))
        return next((answer for answer in answers.values() if answer == _TRUE), b"")

    async def _metadata(self, data: bytes, context: Any) -> bytes:
        return await self._first("ServerMetadata", data, context, self._channels)

    # --- of a model ------------------------------------------------------------------------------------

    async def _model_ready(self, data: bytes, context: Any) -> bytes:
        model = (await _request("ModelReady", data, context)).name
        return await self._first("ModelReady", data, context, await self._who_knows(model), wanted=_TRUE)

    def _about_a_model(self, method: str) -> Call:
        async def call(data: bytes, context: Any) -> bytes:
            model = (await _request(method, data, context)).name
            return await self._first(method, data, context, await self._who_knows(model))

        return call

    async def _who_knows(self, model: str) -> Iterable[str]:
        """Those that serve it; if none does, some that can say what is wrong."""
        if model not in self._traffic.table:
            await self._traffic.brain.refresh()
        routes = self._traffic.table.get(model)
        return routes.ready if routes is not None and routes.ready else list(self._channels)[:_ASKED]

    async def _first(
        self, method: str, data: bytes, context: Any, workers: Iterable[str], *, wanted: bytes | None = None
    ) -> bytes:
        """The first answer, or the first that is `wanted`; else the last."""
        answer: bytes | Refusal | None = None
        timeout = self._timeout(context)
        for worker in list(workers):
            last = await self._ask(worker, method, data, context, timeout)
            if isinstance(last, Refusal):
                if not isinstance(answer, bytes):
                    answer = last.or_rather(answer)
                if not last.elsewhere():
                    break
            else:
                answer = last
                if wanted is None or last == wanted:
                    break
        if not isinstance(answer, bytes):
            await refuse(context, answer or no_worker())
        return answer

    # --- of all workers --------------------------------------------------------------------------------

    def _merged(self, method: str, merge: Merge) -> Call:
        async def call(data: bytes, context: Any) -> bytes:
            answers = await self._ask_all(method, data, context, self._timeout(context))
            return await _answered(method, merge, answers, context)

        return call

    def _change(self, method: str) -> Call:
        async def call(data: bytes, context: Any) -> bytes:
            answers = await self._ask_all(method, data, context, time_left(context))
            # Who was told that the model is there, or not there, may rely on it.
            await self._traffic.brain.refresh(sure=True)
            return await _answered(method, fanout.all_succeeded, answers, context)

        return call

    def _registration(self, method: str, undo: str) -> Call:
        async def call(data: bytes, context: Any) -> bytes:
            request = await _request(method, data, context)
            asking = asyncio.ensure_future(self._ask_all(method, data, context, self._timeout(context)))
            try:
                # To the end also without the client: what is done can be undone only when that is known.
                answers = await asyncio.shield(asking)
            except asyncio.CancelledError:
                await self._undo(undo, request.name, await asking, context)
                raise
            if any(isinstance(answer, Refusal) for answer in answers.values()):
                await self._undo(undo, request.name, answers, context)
            return await _answered(method, fanout.all_succeeded, answers, context)

        return call

    async def _undo(
        self, method: str, region: str, answers: Mapping[str, bytes | Refusal], context: Any
    ) -> None:
        data = _types(method)[0](name=region).SerializeToString()
        done = [worker for worker, answer in answers.items() if not isinstance(answer, Refusal)]
        await asyncio.gather(*[self._ask(worker, method, data, context, self._timeout_s) for worker in done])

    async def _ask_all(
        self, method: str, data: bytes, context: Any, timeout: float | None
    ) -> dict[str, bytes | Refusal]:
        """At the same time; by worker, in the order of their names."""
        workers = sorted(self._channels)
        answers = await asyncio.gather(
            *[self._ask(worker, method, data, context, timeout) for worker in workers]
        )
        return dict(zip(workers, answers, strict=True))

    async def _ask(
        self, worker: str, method: str, data: bytes, context: Any, timeout: float | None
    ) -> bytes | Refusal:
        channels = self._channels.get(worker)
        if channels is None:
            return gone(worker)
        call = channels.link().channel.unary_unary(SERVICE + method)
        try:
            answer: bytes = await call(data, timeout=timeout, metadata=self._forwarded(context))
        except grpc.aio.AioRpcError as error:
            return refusal_of(error)
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            return gone(worker)
        return answer

    def _timeout(self, context: Any) -> float:
        left = time_left(context)
        return self._timeout_s if left is None else left


async def _answered(method: str, merge: Merge, answers: Mapping[str, bytes | Refusal], context: Any) -> bytes:
    _, response = _types(method)
    parsed: dict[str, Answer] = {
        worker: answer if isinstance(answer, Refusal) else response.FromString(answer)
        for worker, answer in answers.items()
    }
    merged = merge(parsed)
    if isinstance(merged, Refusal):
        await refuse(context, merged)
    answer: bytes = merged.SerializeToString()
    return answer


def _types(method: str) -> tuple[Any, Any]:
    """The method's request and response."""
    return getattr(service_pb2, method + "Request"), getattr(service_pb2, method + "Response")


async def _request(method: str, data: bytes, context: Any) -> Any:
    try:
        return _types(method)[0].FromString(data)
    except DecodeError:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"what was sent is not a {method}Request")
