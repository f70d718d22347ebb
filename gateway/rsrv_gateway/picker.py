"""Endpoint picker: tells an Envoy the server for each request. Envoy itself forwards the requests and answers.

`Picker` takes the place of the `Proxy`. For each request, Envoy opens a stream in the external processing protocol, which lasts as
long as the request is in flight.
"""

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from ipaddress import ip_address
from itertools import count
from random import Random
from time import monotonic
from typing import Any

from google.protobuf.message import DecodeError
from grpc import StatusCode

from rsrv.address import Address, parse_address
from rsrv.placement.contract import Table, Worker
from rsrv.placement.routing import Choice
from rsrv.renewal import Renewals
from rsrv.settings_fleet import GatewaySection
from rsrv_gateway import ext_proc
from rsrv_gateway.connections import SERVICE, Token, listen, server_tls
from rsrv_gateway.ext_proc import Head
from rsrv_gateway.http2 import EnvoyConnection
from rsrv_gateway.http_protocol import INFERENCE, OF_JSON, Target, UnknownPath, target_of
from rsrv_gateway.inquiries import ABOUT_A_MODEL, OPERATIONS
from rsrv_gateway.members import READ_PAUSE_S, addresses_of
from rsrv_gateway.outcomes import Refusal, no_worker, not_served, unauthenticated, unsupported
from rsrv_gateway.peek import Malformed
from rsrv_gateway.picked_body import Body, GrpcBody, HttpBody, Wanted
from rsrv_gateway.traffic import Brain, Traffic, TrafficCounts
from rsrv_gateway.v1 import ext_proc_pb2 as pb

log = logging.getLogger(__name__)

_UNREAD = "a request was not read"

#: Code under which a request is counted, because the picker does not see the answer.
PICKED = "PICKED"
#: Maximum number of seconds for resolving a host's name. The first table with a new worker waits for this name.
_RESOLVE_S = 2.0
#: Maximum number of names that are resolved at a time.
_RESOLVE_MAX = 32
#: Seconds between two checks for connections that Envoy has not closed.
_CLOSED_S = 0.05
#: Maximum number of endpoints in the answer to one request: one for the request itself, and two for Envoy's retries.
_ENDPOINTS_MAX = 3
_TOKEN_HEADER = ("authorization",)
#: The picker chooses a server after at most this many bytes of an HTTP request's body. This is also Envoy's default limit.
SHOWN_BYTES = 1 << 20
#: The picker chooses a server after at most this many bytes of a gRPC call. Envoy's limit is one window of HTTP/2, which is not
#: lower. The parameters of a call come before its tensors.
SHOWN_CALL_BYTES = 32 << 10
#: Seconds for which Envoy waits for the chosen server while a client sends its body slowly.
_PATIENCE_S = 300
#: The operation of a gRPC call that may carry several inference requests.
_STREAM = "stream"
#: All operations that execute a model.
_INFERENCE = (*INFERENCE, _STREAM)
#: Operation of each method of gRPC.
_METHODS = {**OPERATIONS, "ModelInfer": "infer", "ModelStreamInfer": _STREAM}
#: Operations that only a server with the model can answer.
_ABOUT_A_MODEL = ABOUT_A_MODEL | {"stats"}
#: Operations that any server can answer. Methods and paths that no server knows also go to any server.
_OF_ANY = frozenset(["live", "server ready", "server", "index"])


class Picker:
    """Server that Envoys ask for endpoints. It chooses the endpoints by the table of the gateway's loop."""

    def __init__(
        self, address: str, settings: GatewaySection, brain: Brain, renewals: Renewals | None = None
    ) -> None:
        """Prepare the server for `address`. Raises CredentialsError, TokenError."""
        self._address = address
        renewals = Renewals() if renewals is None else renewals
        self.token = Token(settings, renewals)
        self.traffic = Traffic(settings.mode, brain)
        self.max_bytes = settings.max_message_bytes
        #: Headers that are not forwarded to servers.
        self.hidden = _TOKEN_HEADER if self.token.needed else ()
        #: Endpoints by worker, for gRPC (True) and for HTTP (False).
        self._endpoints: Mapping[bool, Mapping[str, str]] = {True: {}, False: {}}
        #: IP address of each host, or an empty text while the address is unknown.
        self._ips: dict[str, str] = {}
        self._room = asyncio.Semaphore(_RESOLVE_MAX)
        #: Task that resolves the hosts' names again and again.
        self._resolving: asyncio.Task[None] | None = None
        self._turns = count()
        self._random = Random(0)
        self._connections: set[EnvoyConnection] = set()
        self._tls = server_tls(settings, renewals, "h2")
        self._listener: asyncio.Server | None = None
        #: Port that the server listens on, or 0 if it is not started.
        self.port = 0

    async def start(self) -> None:
        """Listen from now on. Raises ListenError."""
        begin = partial(EnvoyConnection, partial(PickedRequest, self), self._connections)
        self._listener, self.port = await listen(begin, self._address, "--picker", self._tls)
        self._resolving = asyncio.create_task(self._keep_resolving())

    async def apply(self, workers: Mapping[str, Worker], table: Table) -> None:
        """Replace the workers and the table, as `Proxy.apply` does."""
        hosts = _hosts(workers)
        await asyncio.gather(*(self._resolve(host) for host in hosts - self._ips.keys()))
        self._ips = {host: ip for host, ip in self._ips.items() if host in hosts}
        self._name_endpoints(workers)
        self.traffic.apply(workers, table)

    def counts(self) -> TrafficCounts:
        return self.traffic.counts()

    async def drain(self, seconds: float) -> None:
        """Refuse new requests. Return when Envoy has closed its connections, or after `seconds`.

        Requests in flight continue without the picker, because Envoy knows their servers.
        """
        if self._listener is not None:
            self._listener.close()
        for connection in list(self._connections):
            connection.finish()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._connections:
                    await asyncio.sleep(_CLOSED_S)

    async def stop(self) -> None:
        if self._listener is not None:
            self._listener.close()
        if self._resolving is not None:
            self._resolving.cancel()
        for connection in list(self._connections):
            connection.abort()

    async def _keep_resolving(self) -> None:
        """Resolve all names repeatedly, because a name may get a new address."""
        while True:
            await asyncio.sleep(READ_PAUSE_S)
            # `apply` may add hosts to `_ips` during this wait.
            await asyncio.gather(*map(self._resolve, list(self._ips)))
            self._name_endpoints(self.traffic.workers)

    async def _resolve(self, host: str) -> None:
        """Record the address of a host. If its name cannot be resolved now, keep the last address."""
        with suppress(ValueError):
            self._ips[host] = str(ip_address(host))
            return
        try:
            async with asyncio.timeout(_RESOLVE_S), self._room:
                self._ips[host] = next(iter(await addresses_of(host)))
        except (OSError, UnicodeError) as error:
            if host not in self._ips:
                self._ips[host] = ""
                log.warning(
                    "Envoy needs an IP address of %s, but there is none (%s), so the worker gets no requests",
                    host,
                    error,
                )

    def _name_endpoints(self, workers: Mapping[str, Worker]) -> None:
        """Record each worker's endpoint as IP:PORT, because Envoy's policy override_host accepts no names."""
        named: dict[bool, dict[str, str]] = {True: {}, False: {}}
        for name, worker in workers.items():
            for is_grpc, text in ((True, worker.grpc), (False, worker.http)):
                address = _address(text)
                if address is not None and (ip := self._ips.get(address.host)):
                    named[is_grpc][name] = str(Address(ip, address.port))
        self._endpoints = named

    # --- one request ---------------------------------------------------------------------------------------

    def allowed(self, head: Head, workers: Iterable[str]) -> dict[str, str]:
        """Return endpoints by worker, for at most _ENDPOINTS_MAX of the workers.

        `workers` is in the order of preference. Workers that Envoy may not use for the request are skipped.
        """
        known, subset = self._endpoints[head.is_grpc], head.subset
        endpoints: dict[str, str] = {}
        for worker in workers:
            endpoint = known.get(worker)
            if endpoint is not None and (subset is None or endpoint in subset):
                endpoints[worker] = endpoint
                if len(endpoints) == _ENDPOINTS_MAX:
                    break
        return endpoints

    def order(self, model: str, chosen: str) -> Iterator[str]:
        """Yield the chosen worker, the model's other replicas, and then the other workers with the model.

        Both groups begin anywhere, so that the requests of a dead worker are spread over the others.
        """
        routes = self.traffic.table[model]
        yielded = {chosen}
        yield chosen
        for group in (routes.placed, routes.ready):
            others = [worker for worker in dict.fromkeys(group) if worker not in yielded]
            yielded.update(others)
            at = self._random.randrange(len(others)) if others else 0
            yield from others[at:]
            yield from others[:at]

    def in_turn(self) -> Sequence[str]:
        """Return all workers. The order rotates with each call."""
        workers = list(self.traffic.workers)
        at = next(self._turns) % max(len(workers), 1)
        return workers[at:] + workers[:at]


def _address(text: str | None) -> Address | None:
    """Return the address where a worker listens, or None if it has no address that Envoy can reach."""
    return None if text is None or text.startswith("unix:") else parse_address(text)


def _hosts(workers: Mapping[str, Worker]) -> set[str]:
    addresses = (_address(text) for worker in workers.values() for text in (worker.grpc, worker.http))
    return {address.host for address in addresses if address is not None}


def _target_of(head: Head) -> Target | None:
    """Return the operation of a request, and its model if the path names it.

    Return None if the picker does not know the path. Any server then handles or refuses the request.
    """
    if head.is_grpc:
        service, _, method = head.path.rpartition("/")
        return Target(_METHODS.get(method, method)) if service + "/" == SERVICE else None
    try:
        target = target_of(head.method, head.path)
    except UnknownPath:
        return None
    # Any server can answer a request for the statistics of all models.
    return None if target == Target("stats") else target


def _needs_body(target: Target, is_grpc: bool) -> bool:
    if not is_grpc and target.what in OF_JSON:
        return True
    return target.what in _INFERENCE or (not target.model and target.what in _ABOUT_A_MODEL)


class PickedRequest:
    """One request that Envoy forwards: the parts that have arrived, and the chosen server. It is in flight until `end`."""

    def __init__(self, picker: Picker) -> None:
        self._picker = picker
        self._arrived = monotonic()
        self._head: Head | None = None
        self._target: Target | None = None
        #: True if Envoy sends the body before the headers are answered.
        self._ahead = False
        #: True if Envoy sends only one part of a body, even if the body continues.
        self._partial = False
        #: True if Envoy expects each part of a body back.
        self._duplex = False
        #: The body while the picker reads it, or None if the picker does not read its parts.
        self._body: Body | None = None
        self._received = 0
        #: Parts that wait until a server is chosen, each with its kind and its answer.
        self._waiting: list[tuple[str, bytes]] = []
        #: The chosen endpoints, the best one first, or None before the choice.
        self._endpoints: tuple[str, ...] | None = None
        #: True once Envoy knows the endpoints.
        self._directed = False
        self._workers: tuple[str, ...] = ()
        self._wanted = Wanted("")
        self._choice: Choice | None = None
        #: Outputs that the client wants as classes, while workers have not reported their types.
        self._unchecked: tuple[str, ...] = ()
        #: A part of a compressed body that `pending_answers` must read, and whether it is the last part.
        self._unread: tuple[bytes, bool] | None = None
        #: True if `pending_answers` must read a part or ask workers.
        self.pending = False
        #: True if the request is refused, so that Envoy needs nothing more.
        self.done = False

    def take(self, data: bytes) -> Iterable[bytes]:
        """Return the answers that are due after this message. Raises ValueError if `data` is not a message of Envoy."""
        try:
            message = pb.ProcessingRequest.FromString(data)
        except DecodeError as error:
            raise ValueError(str(error)) from None
        if message.WhichOneof("request") is None:
            raise ValueError("a message of another kind")
        try:
            return self._take(message)
        except Malformed as error:
            return [self._refuse_counted(error.refusal)]
        except Exception:
            log.exception(_UNREAD)
            return [self._refuse_unread()]

    def _refuse_unread(self) -> bytes:
        """Refuse a request after an error of the picker.

        Otherwise the stream would end with the error, and Envoy would forward the request.
        """
        return self._refuse(Refusal(StatusCode.INTERNAL, "the endpoint picker could not read the request"))

    def _take(self, message: Any) -> list[bytes]:
        """Return the answers that are due after a message. Raises Malformed."""
        part = message.WhichOneof("request")
        if self._head is None:
            if part != "request_headers":
                return [self._refuse(_without("request_header_mode: SEND"))]
            self._head = Head(message)
            return self._begin(self._head, message)
        if part.startswith("response") or self._body is None:
            return [self._passed(message)]
        if part == "request_trailers" and not self._ahead:
            return [self._refuse(Refusal(StatusCode.INVALID_ARGUMENT, "the request has no body"))]
        self._waiting.append((part, self._passed(message)))
        content = message.request_body
        last = part == "request_trailers" or content.end_of_stream or not (self._ahead or self._partial)
        self._received += len(content.body)
        if self._body.is_slow:
            self._unread, self.pending = (content.body, last), True
            return []
        for _ in self._body.steps(content.body, last):
            pass
        return self._go_on(self._head, self._body, last)

    def _go_on(self, head: Head, body: Body, last: bool) -> list[bytes]:
        """Return the answers that are due after a part of the body was read. Raises Malformed."""
        if self._directed:
            self._unchecked = body.findings()
            return self._answers()
        if body.complete or last:
            return self._decide(head)
        if self._ahead:
            shown = SHOWN_CALL_BYTES if head.is_grpc else SHOWN_BYTES
            return self._decide(head) if body.is_enough() or self._received >= shown else []
        if not head.is_grpc or not body.is_enough():
            return [
                self._refuse(
                    _without("request_body_mode: STREAMED, because it shows only a part of this body")
                )
            ]
        return self._decide(head)

    async def pending_answers(self) -> Iterable[bytes]:
        """Read a part, or ask workers about an unknown model or about types of outputs. Return the delayed answers."""
        answers: Iterable[bytes] = ()
        try:
            while self.pending:  # Once the model is known, its outputs may also need a check.
                answers = await (self._ask_workers() if self._unread is None else self._read())
        except Malformed as error:
            self.pending = False
            return [self._refuse_counted(error.refusal)]
        except Exception:
            log.exception(_UNREAD)
            self.pending = False
            return [self._refuse_unread()]
        return answers

    async def _read(self) -> Iterable[bytes]:
        """Read a part of a compressed body, with pauses for other requests, and return the answers that are due."""
        assert self._head is not None
        assert self._body is not None
        assert self._unread is not None
        (data, last), self._unread, self.pending = self._unread, None, False
        for _ in self._body.steps(data, last):
            await asyncio.sleep(0)
        return self._go_on(self._head, self._body, last)

    async def _ask_workers(self) -> Iterable[bytes]:
        """Ask workers about the model or about the outputs.

        Return the answers to Envoy, or nothing if workers must be asked again.
        """
        assert self._head is not None
        traffic, parts = self._picker.traffic, self._wanted
        wrong = None
        if self._endpoints is None:
            await traffic.brain.refresh()
        else:
            refusals = {}
            for worker in self._workers:
                refusal = await traffic.refusal_of_classes(
                    worker, parts.model, parts.version, self._unchecked
                )
                if refusal is not None:
                    refusals[worker] = refusal
            self._unchecked = ()
            wrong = self._leave_out(refusals)
        self.pending = False
        if wrong is not None:
            return [self._refuse_counted(wrong)]
        return self._decide(self._head, refreshed=True) if self._endpoints is None else self._answers()

    def _leave_out(self, refusals: Mapping[str, Refusal]) -> Refusal | None:
        """Remove the workers that refuse classes of these outputs from the chosen workers.

        Return a refusal if no worker is left, if all workers would refuse the request, or if Envoy already knows the endpoints.
        """
        final = [refusal for refusal in refusals.values() if self._directed or not refusal.is_retryable()]
        usable = dict(zip(self._workers, self._endpoints or (), strict=True))
        for worker in refusals:
            del usable[worker]
        if final or not usable:
            return next(iter(final or refusals.values()))
        self._workers, self._endpoints = tuple(usable), tuple(usable.values())
        if self._choice is not None and self._choice.worker not in usable:
            self._picker.traffic.router.move(self._choice, self._workers[0])
        return None

    def end(self) -> None:
        """Stop counting the request as in flight."""
        if self._choice is not None:
            traffic = self._picker.traffic
            traffic.router.release(self._choice)
            seconds = monotonic() - self._arrived
            parts, worker = self._wanted, self._choice.worker
            traffic.count_finished(parts.model, worker, PICKED, parts.items, seconds)
            self._choice = None

    def _begin(self, head: Head, message: Any) -> list[bytes]:
        """Read the headers. Raises Malformed."""
        mode = message.protocol_config.request_body_mode
        self._duplex = mode == pb.FULL_DUPLEX_STREAMED
        self._ahead = self._duplex or (
            mode == pb.STREAMED and message.protocol_config.send_body_without_waiting_for_header_response
        )
        self._partial = mode == pb.BUFFERED_PARTIAL
        target = self._target = _target_of(head)
        if not self._picker.token.lets_in([("authorization", head.authorization)]):
            if target is not None and (target.what in _INFERENCE):
                self._picker.traffic.count_refused("", StatusCode.UNAUTHENTICATED.name)
            return [self._refuse(unauthenticated())]
        self._waiting.append(("request_headers", self._passed(message)))
        if target is None or not _needs_body(target, head.is_grpc) or not head.has_body:
            return self._decide(head)
        if not self._ahead and mode not in (pb.BUFFERED, pb.BUFFERED_PARTIAL):
            return [
                self._refuse(
                    _without("request_body_mode: STREAMED and send_body_without_waiting_for_header_response")
                )
            ]
        infers, most = target.what in _INFERENCE, self._picker.max_bytes
        if head.is_grpc:
            self._body = GrpcBody(head, infers, target.what == _STREAM, most)
        else:
            self._body = HttpBody(head, target.what, target.model, target.version, most)
        if self._ahead:
            # Make Envoy wait longer for the next answer, because the client may send its body slowly.
            return [ext_proc.patient(_PATIENCE_S)]
        self._waiting.clear()
        return [ext_proc.passed("request_headers")]

    def _decide(self, head: Head, refreshed: bool = False) -> list[bytes]:
        """Choose the endpoints. Return the answers to all waiting parts, or none if workers must be asked first.

        Raises Malformed.
        """
        choice = self._choose(head, self._target, refreshed)
        if choice is None:
            self.pending = True
            return []
        if isinstance(choice, Refusal):
            return [self._refuse(choice)]
        self._endpoints = tuple(choice)
        self._unchecked = self._wanted.classified
        if self._body is not None:
            self._unchecked += self._body.findings()
        return self._answers()

    def _answers(self) -> list[bytes]:
        """Return the answers to all waiting parts, or none if outputs must be checked first."""
        if self._unchecked:
            self.pending = True
            return []
        if self._body is not None and self._body.complete:
            self._body = None
        waiting, self._waiting = self._waiting, []
        answers = [answer for _, answer in waiting]
        if not self._directed:
            self._directed = True
            first, _ = waiting[0]
            answers[0] = ext_proc.directed(first, self._endpoints or (), self._picker.hidden)
        return answers

    def _choose(self, head: Head, target: Target | None, refreshed: bool) -> Sequence[str] | Refusal | None:
        """Return the endpoints for the request, the best one first, or None if its model is unknown. Raises Malformed.

        An inference request counts as in flight from now on.
        """
        picker, traffic = self._picker, self._picker.traffic
        workers: Iterable[str] = ()
        if target is None or target.what in _OF_ANY:
            workers = picker.in_turn()
        elif target.what not in _INFERENCE and target.what not in _ABOUT_A_MODEL:
            return unsupported()
        else:
            body = self._body
            model = target.model if body is None else body.model()
            routes = traffic.table.get(model)
            if routes is None and model and not refreshed:
                return None
            if target.what in _INFERENCE:
                measured = traffic.router.measured(model)
                self._wanted = Wanted(model) if body is None else body.wanted(measured)
                return self._infer(head, self._wanted)
            workers = routes.ready if routes is not None and routes.ready else picker.in_turn()
        return list(picker.allowed(head, workers).values()) or no_worker()

    def _infer(self, head: Head, parts: Wanted) -> Sequence[str] | Refusal:
        picker, traffic = self._picker, self._picker.traffic
        selected = traffic.router.select(parts.model, parts.items)
        if selected is None:
            refusal = traffic.reason_for(parts.model)
            traffic.count_refused(parts.model, refusal.code.name)
            return refusal
        if parts.sequence:
            traffic.pin_sequence(selected, parts.model, parts.sequence)
        # Name only one server for a sequence, because no other server has its state.
        order = [selected.worker] if parts.sequence else picker.order(parts.model, selected.worker)
        allowed = picker.allowed(head, order)
        if not allowed:
            traffic.router.release(selected)
            traffic.count_refused(parts.model, StatusCode.UNAVAILABLE.name)
            return not_served(parts.model)
        worker = next(iter(allowed))
        if worker != selected.worker:
            traffic.router.move(selected, worker)
        self._choice = selected
        self._workers = tuple(allowed)
        return list(allowed.values())

    def _passed(self, message: Any) -> bytes:
        part: str = message.WhichOneof("request")
        if self._duplex and part.endswith("_body"):
            return ext_proc.returned(part, getattr(message, part))
        return ext_proc.passed(part)

    def _refuse_counted(self, refusal: Refusal) -> bytes:
        self._picker.traffic.count_refused(self._wanted.model, refusal.code.name)
        return self._refuse(refusal)

    def _refuse(self, refusal: Refusal) -> bytes:
        self.done = True
        return ext_proc.refused(refusal, self._head is None or self._head.is_grpc)


def _without(setting: str) -> Refusal:
    return Refusal(
        StatusCode.INTERNAL,
        f"the endpoint picker cannot choose a server: Envoy's ext_proc filter needs {setting}",
    )
