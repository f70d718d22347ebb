"""All gRPC calls except inference: about the gateway, about one model, or to all workers."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from rsrv_gateway import fanout
from rsrv_gateway.connections import (
    SERVICE,
    WorkerChannels,
    gone,
    is_cancelled,
    refusal_of,
    refuse,
    time_left,
)
from rsrv_gateway.fanout import Answer, Merge, ask_all, first
from rsrv_gateway.outcomes import Refusal, unsupported
from rsrv_gateway.traffic import Traffic

Call = Callable[[bytes, Any], Awaitable[bytes]]
_TRUE = b"\x08\x01"

#: calls to all workers, and the functions that merge the answers
_MERGED: Mapping[str, Merge] = {
    "ModelStatistics": fanout.merge_statistics,
    "RepositoryIndex": fanout.merge_index,
}
_ABOUT_A_MODEL = ("ModelMetadata", "ModelConfig")
#: these take as long as loading a model, so the default timeout does not apply
_CHANGES = ("RepositoryModelLoad", "RepositoryModelUnload")
#: seconds for a call that a stream waits for
_CONFIG_TIMEOUT_S = 2.0
#: settings and shared memory of one server
_OF_ONE_SERVER = (
    "TraceSetting",
    "LogSettings",
    "SystemSharedMemoryStatus",
    "SystemSharedMemoryRegister",
    "SystemSharedMemoryUnregister",
    "CudaSharedMemoryStatus",
    "CudaSharedMemoryRegister",
    "CudaSharedMemoryUnregister",
)


class GrpcInquiries:
    def __init__(
        self,
        timeout_s: float,
        traffic: Traffic,
        channels: Mapping[str, WorkerChannels],
        forwarded: Callable[[Any], Any],
    ) -> None:
        """`timeout_s` applies to calls without a deadline; `forwarded` selects the client's metadata for workers."""
        self._timeout_s = timeout_s
        self._traffic = traffic
        self._channels = channels
        self._forwarded = forwarded

    def calls(self) -> dict[str, Call]:
        """Return the handlers by the method's name."""
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
        for method in _OF_ONE_SERVER:
            made[method] = _refused
        return made

    # --- of the gateway --------------------------------------------------------------------------------

    async def _live(self, _: bytes, __: Any) -> bytes:
        return _TRUE

    async def _ready(self, data: bytes, context: Any) -> bytes:
        """Answer true if a worker is ready, which is certain if a model is."""
        if self._traffic.serves:
            return _TRUE
        answers = await self._ask_all("ServerReady", data, context, self._timeout(context))
        return next((answer for answer in answers.values() if answer == _TRUE), b"")

    async def _metadata(self, data: bytes, context: Any) -> bytes:
        return await self._first("ServerMetadata", data, context, self._channels)

    # --- of a model ------------------------------------------------------------------------------------

    async def _model_ready(self, data: bytes, context: Any) -> bytes:
        model = (await _request("ModelReady", data, context)).name
        return await self._first(
            "ModelReady", data, context, await self._traffic.workers_for(model), wanted=_TRUE
        )

    def _about_a_model(self, method: str) -> Call:
        async def call(data: bytes, context: Any) -> bytes:
            model = (await _request(method, data, context)).name
            return await self._first(method, data, context, await self._traffic.workers_for(model))

        return call

    async def _first(
        self, method: str, data: bytes, context: Any, workers: Iterable[str], *, wanted: bytes | None = None
    ) -> bytes:
        timeout = self._timeout(context)
        answer = await first(
            workers,
            lambda worker: self._ask(worker, method, data, context, timeout),
            None if wanted is None else wanted.__eq__,
        )
        if isinstance(answer, Refusal):
            await refuse(context, answer)
        return answer

    async def answers_once(self, model: str, context: Any) -> bool:
        """Return true if each request gets exactly one answer by the model's config; false if no worker tells it soon."""
        request = service_pb2.ModelConfigRequest(name=model).SerializeToString()
        timeout = min(self._timeout(context), _CONFIG_TIMEOUT_S)
        answer = await first(
            await self._traffic.workers_for(model),
            lambda worker: self._ask(worker, "ModelConfig", request, context, timeout),
        )
        if isinstance(answer, Refusal):
            return False
        config = service_pb2.ModelConfigResponse.FromString(answer).config
        return not config.model_transaction_policy.decoupled

    # --- of all workers --------------------------------------------------------------------------------

    def _merged(self, method: str, merge: Merge) -> Call:
        async def call(data: bytes, context: Any) -> bytes:
            answers = await self._ask_all(method, data, context, self._timeout(context))
            return await _answered(method, merge, answers, context)

        return call

    def _change(self, method: str) -> Call:
        async def call(data: bytes, context: Any) -> bytes:
            answers = await self._ask_all(method, data, context, time_left(context))
            # A client that knows the model as loaded or unloaded may rely on that.
            await self._traffic.brain.refresh(sure=True)
            return await _answered(method, fanout.all_succeeded, answers, context)

        return call

    async def _ask_all(
        self, method: str, data: bytes, context: Any, timeout: float | None
    ) -> dict[str, bytes | Refusal]:
        return await ask_all(self._channels, lambda worker: self._ask(worker, method, data, context, timeout))

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


async def _refused(_: bytes, context: Any) -> bytes:
    await refuse(context, unsupported())


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
    """Return the method's request and response types."""
    return getattr(service_pb2, method + "Request"), getattr(service_pb2, method + "Response")


async def _request(method: str, data: bytes, context: Any) -> Any:
    try:
        return _types(method)[0].FromString(data)
    except DecodeError:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the request is not a {method}Request")
