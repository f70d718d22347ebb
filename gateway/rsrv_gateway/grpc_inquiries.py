"""All gRPC calls except inference, routed by `inquiries`."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from rsrv_gateway.connections import SERVICE, WorkerChannels, answer_of, gone, refuse, time_left
from rsrv_gateway.fanout import Answer
from rsrv_gateway.inquiries import ABOUT_A_MODEL, CHANGES, OPERATIONS, Inquiries
from rsrv_gateway.outcomes import Refusal
from rsrv_gateway.traffic import Traffic

Call = Callable[[bytes, Any], Awaitable[bytes]]
#: Timeout in seconds of a request for a model's configuration, because a client's stream waits for the answer.
_CONFIG_TIMEOUT_S = 2.0
_METHODS = {operation: method for method, operation in OPERATIONS.items()}
_TRUE, _FALSE = b"\x08\x01", b""


class _GrpcForm:
    """Form of answers over gRPC: encoded messages, as bytes."""

    def yes(self) -> bytes:
        return _TRUE

    def is_yes(self, answer: bytes) -> bool:
        return answer == _TRUE

    def parse(self, operation: str, answer: bytes) -> Answer:
        return getattr(service_pb2, f"{_METHODS[operation]}Response").FromString(answer)

    def render(self, _: str, message: Any) -> bytes:
        return bytes(message.SerializeToString())


class GrpcInquiries:
    def __init__(
        self,
        timeout_s: float,
        traffic: Traffic,
        channels: Mapping[str, WorkerChannels],
        forwarded: Callable[[Any], Any],
    ) -> None:
        """`timeout_s` applies to calls without a deadline. `forwarded` selects the client's metadata for workers."""
        self._timeout_s = timeout_s
        self._channels = channels
        self._forwarded = forwarded
        self._inquiries = Inquiries(traffic, channels.keys(), _GrpcForm())

    def calls(self) -> dict[str, Call]:
        """Return the handlers by the method's name."""
        return {method: self._call(method, operation) for method, operation in OPERATIONS.items()}

    def _call(self, method: str, operation: str) -> Call:
        async def call(data: bytes, context: Any) -> bytes:
            model = await _model(method, data, context) if operation in ABOUT_A_MODEL else ""
            timeout = time_left(context)
            if timeout is None and operation not in CHANGES:
                timeout = self._timeout_s
            answer = await self._ask(method, model, data, context, timeout)
            if isinstance(answer, Refusal):
                if operation == "server ready":
                    return _FALSE
                await refuse(context, answer)
            return answer

        return call

    async def answers_once(self, model: str, context: Any) -> bool:
        """Return True if each request gets exactly one answer, according to the model's configuration.

        Return False if no worker returns the configuration soon.
        """
        left = time_left(context)
        timeout = _CONFIG_TIMEOUT_S if left is None else min(left, _CONFIG_TIMEOUT_S)
        request = service_pb2.ModelConfigRequest(name=model).SerializeToString()
        answer = await self._ask("ModelConfig", model, request, context, timeout)
        if isinstance(answer, Refusal):
            return False
        config = service_pb2.ModelConfigResponse.FromString(answer).config
        return not config.model_transaction_policy.decoupled

    async def _ask(
        self, method: str, model: str, data: bytes, context: Any, timeout: float | None
    ) -> bytes | Refusal:
        async def ask(worker: str) -> bytes | Refusal:
            channels = self._channels.get(worker)
            if channels is None:
                return gone(worker)
            call = channels.link().channel.unary_unary(SERVICE + method)
            return await answer_of(call(data, timeout=timeout, metadata=self._forwarded(context)), worker)

        return await self._inquiries.answer(OPERATIONS[method], model, ask)


async def _model(method: str, data: bytes, context: Any) -> str:
    try:
        return str(getattr(service_pb2, f"{method}Request").FromString(data).name)
    except DecodeError:
        await refuse(
            context, Refusal(grpc.StatusCode.INVALID_ARGUMENT, f"the request is not a {method}Request")
        )
