"""gRPC proxy: Triton's whole inference service, forwarded as bytes between clients and workers.

Inference requests are in `inference`, streams in `streaming`, all other calls in
`grpc_inquiries`.
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection import SERVICE_NAME, aio
from tritonclient.grpc import service_pb2

from rsrv.control.grpc_server import GrpcServer
from rsrv.placement.contract import Worker
from rsrv.renewal import Renewals
from rsrv.settings_fleet import GatewaySection
from rsrv_gateway.connections import (
    SERVICE,
    ChannelFactory,
    Token,
    WorkerChannels,
    answer_of,
    gone,
    refuse,
    sendable,
    server_credentials,
    server_options,
    time_left,
)
from rsrv_gateway.grpc_inquiries import GrpcInquiries
from rsrv_gateway.inference import Inference, infer
from rsrv_gateway.outcomes import Metadata, Refusal, unauthenticated
from rsrv_gateway.peek import Malformed, Peeked, int_parameter
from rsrv_gateway.streaming import stream
from rsrv_gateway.suspects import call_digest
from rsrv_gateway.traffic import Traffic

#: Metadata that belongs to the client's connection, so that it is not forwarded.
_CONNECTION_METADATA = frozenset(["user-agent", "te", "content-type", "host"])
_HEALTH = "/grpc.health.v1.Health/Check"
#: Services that clients without their .proto files can look up.
_REFLECTED = (
    *(
        service.full_name
        for file in (service_pb2.DESCRIPTOR, health_pb2.DESCRIPTOR)
        for service in file.services_by_name.values()
    ),
    SERVICE_NAME,
)
_REFLECTION = f"/{SERVICE_NAME}/ServerReflectionInfo"
_INFER, _STREAM_INFER = SERVICE + "ModelInfer", SERVICE + "ModelStreamInfer"
#: Number of connections to each worker.
CHANNELS_PER_WORKER = 2
_SERVING, _NOT_SERVING = b"\x08\x01", b"\x08\x02"
#: Seconds between two checks for new calls while the gateway drains.
_QUIET_POLL_S = 0.01
#: If this many consecutive checks find no new call, the gateway expects no more calls.
_QUIET_POLLS = 5
#: Maximum number of seconds for all of these checks.
_QUIET_LIMIT_S = 0.5


class GrpcProxy:
    """gRPC side of the `Proxy`."""

    def __init__(
        self, settings: GatewaySection, contacts: ChannelFactory, traffic: Traffic, renewals: Renewals
    ) -> None:
        """Prepare the handlers. Raises CredentialsError, TokenError."""
        self._settings = settings
        self._traffic = traffic
        self._token = Token(settings, renewals)
        self._credentials = None if settings.grpc is None else server_credentials(settings, renewals)
        self._contacts = contacts
        self._channels: dict[str, WorkerChannels] = {}
        #: True if any worker has a control service. The models of such workers observe the parameter `timeout`.
        self._steered = False
        self._hop = _CONNECTION_METADATA | {"authorization"} if self._token.needed else _CONNECTION_METADATA
        inquiries = GrpcInquiries(settings.request_timeout_s, traffic, self._channels, self.forwarded)
        streams = partial(stream, traffic, self._channels, self.forwarded, inquiries.answers_once)
        #: Handlers by method.
        self.methods = {
            **{
                SERVICE + name: grpc.unary_unary_rpc_method_handler(call)
                for name, call in inquiries.calls().items()
            },
            _INFER: grpc.unary_unary_rpc_method_handler(self._infer),
            _STREAM_INFER: grpc.stream_stream_rpc_method_handler(streams),
            _HEALTH: grpc.unary_unary_rpc_method_handler(self._check),
            # Add the handler here, because the library's own function would bypass the check of the token.
            _REFLECTION: grpc.stream_stream_rpc_method_handler(
                aio.ReflectionServicer(_REFLECTED).ServerReflectionInfo,
                reflection_pb2.ServerReflectionRequest.FromString,
                reflection_pb2.ServerReflectionResponse.SerializeToString,
            ),
        }
        self._drain_handler = _DrainHandler()
        self._server = GrpcServer(self._make, "gateway.grpc")
        #: Port that the server listens on, or 0 if it is not started or there is no gRPC.
        self.port = 0

    async def start(self) -> None:
        """Listen on the configured address. Raises ListenError."""
        if self._settings.grpc is not None:
            self.port = await self._server.start(self._settings.grpc, self._credentials)

    def _make(self) -> Any:
        handlers = [self._drain_handler, _Handlers(self.methods, self._token, self._traffic)]
        return grpc.aio.server(handlers=handlers, options=server_options(self._settings))

    def apply(self, workers: Mapping[str, Worker]) -> None:
        """Connect to these workers from now on. Call it before `Traffic.apply`, which may choose any of them."""
        known = self._traffic.workers
        for name, worker in workers.items():
            if name in self._channels:
                if known[name].grpc == worker.grpc:
                    continue
                self._channels[name].retire()
            self._channels[name] = WorkerChannels(worker.grpc, self._contacts, CHANNELS_PER_WORKER)
        for name in [name for name in self._channels if name not in workers]:
            self._channels.pop(name).retire()
        self._steered = any(worker.control is not None for worker in workers.values())

    async def drain(self, seconds: float) -> None:
        """Refuse new calls. Return when the calls in flight have ended, or after `seconds`."""
        end = monotonic() + seconds
        self._drain_handler.closed = True
        with suppress(TimeoutError):
            async with asyncio.timeout(min(seconds, _QUIET_LIMIT_S)):
                await self._drain_handler.quiet()
        stopping = asyncio.ensure_future(self._server.stop(max(0.0, end - monotonic())))
        # The first step of `stop` tells clients that this connection takes no more calls.
        await asyncio.sleep(0)
        self._drain_handler.clients_told.set()
        await stopping

    async def stop(self) -> None:
        await self._server.stop(None)
        await asyncio.gather(*[channels.close() for channels in self._channels.values()])

    def forwarded(self, context: Any) -> Metadata | None:
        """Return the client's metadata for workers."""
        hop = self._hop
        return sendable([pair for pair in context.invocation_metadata() if pair[0] not in hop]) or None

    async def _infer(self, data: bytes, context: Any) -> bytes:
        arrived, traffic = monotonic(), self._traffic
        try:
            request = Peeked(data)
            model = request.model
            items = request.items(traffic.router.measured(model))
            sequence, classified = request.sequence, request.classified
            left = time_left(context)
            timeout = self._settings.request_timeout_s if left is None else left
            if left is not None and self._steered and request.parameter("timeout") is None:
                data += int_parameter("timeout", int(timeout * 1e6) or 1)
        except Malformed as error:
            traffic.count_refused("", "INVALID_ARGUMENT")
            await refuse(context, error.refusal)
        answer = await infer(
            traffic,
            Inference(
                model,
                request.version,
                items,
                sequence,
                classified,
                arrived,
                arrived + timeout,
                lambda worker, left: self._ask(worker, data, left, context),
                lambda: call_digest(data),
                lambda: True,
            ),
            _unchanged,
        )
        if isinstance(answer, Refusal):
            await refuse(context, answer)
        return answer

    async def _ask(self, worker: str, data: bytes, timeout: float, context: Any) -> bytes | Refusal:
        channels = self._channels.get(worker)
        if channels is None:
            return gone(worker)
        link = channels.link()
        answers = link.answers
        call = link.infer(data, timeout=timeout, metadata=self.forwarded(context))
        answer = await answer_of(call, worker)
        if isinstance(answer, Refusal):
            if answer.code is not grpc.StatusCode.DEADLINE_EXCEEDED:
                link.answers += 1
            elif channels.unanswered(link, answers, monotonic()):
                self._traffic.brain.failed(worker)
            if answer.suspects_worker():
                self._traffic.brain.failed(worker)
            return answer
        link.answers += 1
        trailing = await call.trailing_metadata()
        if trailing:
            context.set_trailing_metadata(sendable(trailing))
        return answer

    async def _check(self, _: bytes, __: Any) -> bytes:
        """Answer grpc.health.v1 for any service, as tritonserver does."""
        return _SERVING if self._traffic.workers else _NOT_SERVING


async def _unchanged(answer: bytes) -> tuple[bytes, str]:
    return answer, "OK"


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Handlers of all methods, for clients with the token."""

    def __init__(self, handlers: Mapping[str, Any], token: Token, traffic: Traffic) -> None:
        self._handlers = handlers
        self._traffic = traffic
        self._token = token if token.needed else None

        async def refuse_client(_: Any, context: Any) -> None:
            await refuse(context, unauthenticated())

        # Refuse calls with a stream handler, which fits any method. Other kinds of handlers would wait for a request first.
        self._refuse = grpc.stream_stream_rpc_method_handler(refuse_client)

    def service(self, details: Any) -> Any:
        if self._token is not None and not self._token.lets_in(details.invocation_metadata):
            if details.method in (_INFER, _STREAM_INFER):
                self._traffic.count_refused("", grpc.StatusCode.UNAUTHENTICATED.name)
            return self._refuse
        return self._handlers.get(details.method)


class _DrainHandler(grpc.GenericRpcHandler):  # type: ignore[misc]
    """First handler of every call. While the gateway drains, it delays new calls until the clients know that the gateway stops.

    A stopping server cancels all calls that it has received but not begun, even if their clients do not know yet that it stops.
    If a call is refused at once, its client repeats the call at once. So the handler delays refusals until no more calls arrive.
    """

    def __init__(self) -> None:
        self.closed = False
        self.clients_told = asyncio.Event()
        self._calls = 0
        # Refuse calls with a stream handler, which fits any method. Other kinds of handlers would wait for a request first.
        self._refusing = grpc.stream_stream_rpc_method_handler(self._refuse)

    def service(self, _: Any) -> Any:
        self._calls += 1
        return self._refusing if self.closed else None

    async def quiet(self) -> None:
        """Return when no more calls arrive."""
        polls = 0
        while polls < _QUIET_POLLS:
            calls = self._calls
            await asyncio.sleep(_QUIET_POLL_S)
            polls = polls + 1 if calls == self._calls else 0

    async def _refuse(self, _: Any, context: Any) -> None:
        await self.clients_told.wait()
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the gateway is stopping")
