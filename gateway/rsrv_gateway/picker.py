"""Endpoint picker: names the server of each request to an Envoy, which carries the bytes.

`Picker` takes the place of the `Proxy`. For each request Envoy opens a stream in the external processing
protocol, and keeps it while the request is in flight, so the stream's length is the request's.
"""

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from itertools import count
from time import monotonic
from typing import Any

from google.protobuf.message import DecodeError
from grpc import StatusCode

from rsrv.address import Address, parse_address
from rsrv.placement.contract import Table, Worker
from rsrv.placement.routing import Choice
from rsrv.settings_fleet import GatewaySection
from rsrv_gateway import ext_proc
from rsrv_gateway.connections import SERVICE, Token, listen, server_tls
from rsrv_gateway.ext_proc import Head
from rsrv_gateway.http2 import EnvoyConnection
from rsrv_gateway.http_protocol import INFERENCE, Target, UnknownPath, overstated, peek, target_of
from rsrv_gateway.inquiries import ABOUT_A_MODEL, OPERATIONS
from rsrv_gateway.members import READ_PAUSE_S, addresses_of
from rsrv_gateway.outcomes import Refusal, no_worker, not_served, unauthenticated, unsupported
from rsrv_gateway.peek import Malformed, Peeked
from rsrv_gateway.traffic import Brain, Traffic, TrafficCounts
from rsrv_gateway.v1 import ext_proc_pb2 as pb

log = logging.getLogger("rsrv.gateway")

#: code of a counted request whose answer the picker does not see
PICKED = "PICKED"
#: seconds for a host's name, for which a new worker's first table waits; names asked for at a time
_RESOLVE_S, _RESOLVE_MAX = 2.0, 32
#: seconds between two looks for connections that Envoy has not closed
_CLOSED_S = 0.05
#: endpoints named for one request: the first, and two for Envoy's retries
_ENDPOINTS_MAX = 3
_TOKEN_HEADER = ("authorization",)
#: the operation of each method of gRPC
_METHODS = {**OPERATIONS, "ModelInfer": "infer", "ModelStreamInfer": "infer"}
#: operations that are asked of a server that has the model
_ABOUT_A_MODEL = ABOUT_A_MODEL | {"stats"}
#: what a client may ask of any server, beside methods and paths that no server knows
_OF_ANY = frozenset(["live", "server ready", "server", "index"])


class Picker:
    """Answers Envoys by the table of the gateway's loop."""

    def __init__(self, address: str, settings: GatewaySection, brain: Brain) -> None:
        """Prepare the server for `address`. Raises CredentialsError, TokenError."""
        self._address = address
        self.token = Token(settings)
        self.traffic = Traffic(settings.mode, brain)
        self.max_bytes = settings.max_message_bytes
        #: headers that servers do not get
        self.hidden = _TOKEN_HEADER if self.token.needed else ()
        #: endpoints by worker, for gRPC and for HTTP
        self._endpoints: Mapping[bool, Mapping[str, str]] = {True: {}, False: {}}
        #: IP address of each host, empty while it has none, and the task that asks for them again
        self._ips: dict[str, str] = {}
        self._room = asyncio.Semaphore(_RESOLVE_MAX)
        self._resolving: asyncio.Task[None] | None = None
        self._turns = count()
        self._connections: set[EnvoyConnection] = set()
        self._tls = server_tls(settings)
        if self._tls is not None:
            self._tls.set_alpn_protocols(["h2"])
        self._listener: asyncio.Server | None = None
        #: the port that it listens on; 0: not started
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
        """Refuse new requests, and return when Envoy knows, or after `seconds`.

        Requests in flight go on without the picker: Envoy has been told their servers.
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
        """Ask again for all addresses: a name may have got one, or another one."""
        while True:
            await asyncio.sleep(READ_PAUSE_S)
            # `apply` may add hosts meanwhile.
            await asyncio.gather(*map(self._resolve, list(self._ips)))
            self._name_endpoints(self.traffic.workers)

    async def _resolve(self, host: str) -> None:
        """Note the address of a host; the last one stays if its name cannot be resolved now."""
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
                    "Envoy needs the address of %s, and it has none (%s): it gets no requests", host, error
                )

    def _name_endpoints(self, workers: Mapping[str, Worker]) -> None:
        """Name the workers by IP:PORT, because override_host knows no names."""
        named: dict[bool, dict[str, str]] = {True: {}, False: {}}
        for name, worker in workers.items():
            for is_grpc, text in ((True, worker.grpc), (False, worker.http)):
                address = _address(text)
                if address is not None and (ip := self._ips.get(address.host)):
                    named[is_grpc][name] = str(Address(ip, address.port))
        self._endpoints = named

    # --- one request ---------------------------------------------------------------------------------------

    def allowed(self, head: Head, workers: Iterable[str]) -> dict[str, str]:
        """Return the endpoints of the first of these workers, in order, that Envoy may use for the request."""
        known, subset = self._endpoints[head.is_grpc], head.subset
        found: dict[str, str] = {}
        for worker in workers:
            endpoint = known.get(worker)
            if endpoint is not None and (subset is None or endpoint in subset):
                found[worker] = endpoint
                if len(found) == _ENDPOINTS_MAX:
                    break
        return found

    def order(self, model: str, chosen: str) -> Iterator[str]:
        """Yield the chosen worker, the model's other replicas, and then the others that have it, another one first each time."""
        routes = self.traffic.table[model]
        yield chosen
        yield from (worker for worker in routes.placed if worker != chosen)
        ready = routes.ready
        at = next(self._turns)
        for number in range(at, at + len(ready)):
            worker = ready[number % len(ready)]
            if worker != chosen and worker not in routes.placed:
                yield worker

    def in_turn(self) -> Sequence[str]:
        """Return all workers, another one first each time."""
        workers = list(self.traffic.workers)
        at = next(self._turns) % max(len(workers), 1)
        return workers[at:] + workers[:at]


def _address(text: str | None) -> Address | None:
    """Return where a worker listens; None: nowhere that Envoy reaches."""
    return None if text is None or text.startswith("unix:") else parse_address(text)


def _hosts(workers: Mapping[str, Worker]) -> set[str]:
    found = (_address(text) for worker in workers.values() for text in (worker.grpc, worker.http))
    return {address.host for address in found if address is not None}


def _target_of(head: Head) -> Target | None:
    """Return the operation of a request, and the model if it is in the path; None: a server knows, or refuses it."""
    if head.is_grpc:
        service, _, method = head.path.rpartition("/")
        return Target(_METHODS.get(method, method)) if service + "/" == SERVICE else None
    try:
        target = target_of(head.method, head.path)
    except UnknownPath:
        return None
    # Statistics of all models.
    return None if target == Target("stats") else target


def _needs_body(target: Target) -> bool:
    return target.what in INFERENCE or (not target.model and target.what in _ABOUT_A_MODEL)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The parts of a body that decide its route."""

    model: str
    items: int = 1
    sequence: int | str | None = None


class PickedRequest:
    """One request on its way through Envoy: the parts that came, and the choice that is counted until `end`."""

    def __init__(self, picker: Picker) -> None:
        self._picker = picker
        self._arrived = monotonic()
        self._head: Head | None = None
        self._target: Target | None = None
        #: Envoy sends the body before the headers are answered
        self._ahead = False
        #: Envoy wants each part of a body back
        self._duplex = False
        self._body = bytearray()
        #: parts without an answer yet
        self._waiting: list[Any] = []
        self._decided = False
        self._wanted = _Wanted("")
        self._choice: Choice | None = None
        #: the model is unknown, and all workers are being probed
        self.looking = False
        #: refused: Envoy needs nothing more
        self.done = False

    def take(self, data: bytes) -> Iterable[bytes]:
        """Return the answers that are due after this message. Raises ValueError if it is none."""
        try:
            message = pb.ProcessingRequest.FromString(data)
        except DecodeError as error:
            raise ValueError(str(error)) from None
        part = message.WhichOneof("request")
        if self._decided or (self._head is not None and part.startswith("response")):
            return [self._passed(message)]
        if self._head is None:
            if part != "request_headers":
                if part is None:
                    raise ValueError("a message of another kind")
                return [self._refuse(_without("request_header_mode: SEND"))]
            self._head = Head(message)
            return self._begin(self._head, message)
        if part == "request_trailers" and not self._ahead:
            return [self._refuse(Refusal(StatusCode.INVALID_ARGUMENT, "the request has no body"))]
        self._waiting.append(message)
        if part == "request_body":
            self._body += message.request_body.body[: ext_proc.READ_MAX_BYTES]
            more = self._ahead and not message.request_body.end_of_stream
            if more and not ext_proc.is_enough(self._head, self._body):
                return []
        return self._decide(self._head)

    async def look(self) -> Iterable[bytes]:
        """Look for an unknown model, and return the answers that this delayed."""
        assert self._head is not None
        await self._picker.traffic.brain.refresh()
        self.looking = False
        return self._decide(self._head, looked=True)

    def end(self) -> None:
        """Stop counting it."""
        if self._choice is not None:
            traffic = self._picker.traffic
            traffic.router.release(self._choice)
            seconds = monotonic() - self._arrived
            wanted, worker = self._wanted, self._choice.worker
            traffic.count_finished(wanted.model, worker, PICKED, wanted.items, seconds)
            self._choice = None

    def _begin(self, head: Head, message: Any) -> list[bytes]:
        mode = message.protocol_config.request_body_mode
        self._duplex = mode == pb.FULL_DUPLEX_STREAMED
        self._ahead = self._duplex or (
            mode == pb.STREAMED and message.protocol_config.send_body_without_waiting_for_header_response
        )
        target = self._target = _target_of(head)
        if not self._picker.token.lets_in([("authorization", head.authorization)]):
            if target is not None and target.what in INFERENCE:
                self._picker.traffic.count_refused("", StatusCode.UNAUTHENTICATED.name)
            return [self._refuse(unauthenticated())]
        self._waiting.append(message)
        if target is None or not _needs_body(target) or not head.has_body:
            return self._decide(head)
        if self._ahead:
            return []
        if mode not in (pb.BUFFERED, pb.BUFFERED_PARTIAL):
            if head.is_grpc:
                return [self._refuse(_without("request_body_mode: BUFFERED_PARTIAL"))]
            return self._decide(head)
        self._waiting.clear()
        return [ext_proc.passed("request_headers")]

    def _decide(self, head: Head, looked: bool = False) -> list[bytes]:
        """Choose, and return the answers to all parts that wait; none if the model is unknown and was not looked for."""
        found = self._endpoints(head, self._target, looked)
        if found is None:
            self.looking = True
            return []
        if isinstance(found, Refusal):
            return [self._refuse(found)]
        self._decided = True
        first, *others = self._waiting
        self._waiting, self._body = [], bytearray()
        answer = ext_proc.directed(first.WhichOneof("request"), tuple(found), self._picker.hidden)
        return [answer, *(self._passed(other) for other in others)]

    def _endpoints(self, head: Head, target: Target | None, looked: bool) -> Sequence[str] | Refusal | None:
        """Return the endpoints for the request, the best first; None: its model is unknown so far.

        A request for inference is counted.
        """
        picker, traffic = self._picker, self._picker.traffic
        workers: Iterable[str] = ()
        if target is None or target.what in _OF_ANY:
            workers = picker.in_turn()
        elif target.what not in INFERENCE and target.what not in _ABOUT_A_MODEL:
            return unsupported()
        else:
            try:
                wanted = self._wanted = self._read(head, target)
            except Malformed as error:
                traffic.count_refused("", StatusCode.INVALID_ARGUMENT.name)
                return Refusal(StatusCode.INVALID_ARGUMENT, str(error))
            routes = traffic.table.get(wanted.model)
            if routes is None and wanted.model and not looked:
                return None
            if target.what in INFERENCE:
                return self._infer(head, wanted)
            workers = routes.ready if routes is not None and routes.ready else picker.in_turn()
        return list(picker.allowed(head, workers).values()) or no_worker()

    def _infer(self, head: Head, wanted: _Wanted) -> Sequence[str] | Refusal:
        picker, traffic = self._picker, self._picker.traffic
        found = traffic.router.select(wanted.model, wanted.items)
        if found is None:
            refusal = traffic.reason_for(wanted.model)
            traffic.count_refused(wanted.model, refusal.code.name)
            return refusal
        if wanted.sequence:
            traffic.pin_sequence(found, wanted.model, wanted.sequence)
        # A sequence's state is at one server.
        order = [found.worker] if wanted.sequence else picker.order(wanted.model, found.worker)
        allowed = picker.allowed(head, order)
        if not allowed:
            traffic.router.release(found)
            traffic.count_refused(wanted.model, StatusCode.UNAVAILABLE.name)
            return not_served(wanted.model)
        worker = next(iter(allowed))
        if worker != found.worker:
            traffic.router.move(found, worker)
        self._choice = found
        return list(allowed.values())

    def _read(self, head: Head, target: Target) -> _Wanted:
        """Read what decides the route. Raises Malformed."""
        router, body = self._picker.traffic.router, bytes(self._body)
        if head.is_grpc:
            message, whole = ext_proc.first_message(head, body)
            request = Peeked(message, whole)
            if not request.model and not whole:
                raise Malformed(
                    f"the first {len(message)} bytes of the request do not name its model: let that be its first field"
                )
            items = request.items(router.measured(request.model))
            return _Wanted(request.model, items, request.parameter("sequence_id"))
        length = head.number("inference-header-content-length")
        text = body if length is None else body[:length]
        size = None if head.text("content-encoding") else head.number("content-length")
        if wrong := overstated(text, self._picker.max_bytes if size is None else size):
            raise Malformed(wrong)
        measured = router.measured(target.model) if target.what == "infer" else None
        return _Wanted(target.model, *peek(text, measured))

    def _passed(self, message: Any) -> bytes:
        part: str = message.WhichOneof("request")
        if self._duplex and part.endswith("_body"):
            return ext_proc.returned(part, getattr(message, part))
        return ext_proc.passed(part)

    def _refuse(self, refusal: Refusal) -> bytes:
        self.done = True
        return ext_proc.refused(refusal, self._head is None or self._head.is_grpc)


def _without(setting: str) -> Refusal:
    return Refusal(
        StatusCode.INTERNAL,
        f"the endpoint picker cannot choose a server: Envoy's ext_proc filter needs {setting}",
    )
