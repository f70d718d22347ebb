"""HTTP proxy for tritonserver's form of KServe v2. It forwards requests and answers as bytes between clients and workers.

Inference requests are in `inference`, all other calls in `http_inquiries`.
"""

import asyncio
from collections.abc import Awaitable, Mapping
from contextlib import aclosing, suppress
from time import monotonic
from typing import TypeVar

from aiohttp import ClientError, web
from grpc import StatusCode
from multidict import CIMultiDict

from rsrv.placement.contract import Worker
from rsrv.renewal import Renewals
from rsrv.settings_fleet import GatewaySection
from rsrv_gateway.connections import Token, listen, server_tls, worker_tls
from rsrv_gateway.http_head import HttpHead, InferenceHead
from rsrv_gateway.http_inquiries import HttpInquiries
from rsrv_gateway.http_pools import HttpQuery, HttpReply, Pool, UnreadBody, end_to_end
from rsrv_gateway.http_protocol import (
    INFERENCE,
    OF_JSON,
    Target,
    UnknownPath,
    error_body,
    for_client,
    origin_form,
    target_of,
)
from rsrv_gateway.inference import Inference, infer
from rsrv_gateway.outcomes import Refusal, unauthenticated
from rsrv_gateway.peek import Malformed
from rsrv_gateway.suspects import body_digest
from rsrv_gateway.traffic import CANCELLED, Traffic
from rsrv_gateway.upload import Upload, UploadBudget, UploadError

_TOKEN = frozenset(["authorization"])
_ENCODING = frozenset(["accept-encoding"])
_TEXT = {"Content-Type": "text/plain"}
_NAME = "rsrv-gateway"
#: Code under which a request is counted if its answer is incomplete.
_BROKEN = "UNAVAILABLE"
_ENDING = Refusal(StatusCode.UNAVAILABLE, "the gateway is stopping")
#: Seconds for sending the last answers when the gateway ends.
_FLUSH_S = 0.1

T = TypeVar("T")


class HttpProxy:
    """HTTP side of the `Proxy`."""

    def __init__(self, settings: GatewaySection, traffic: Traffic, renewals: Renewals) -> None:
        """Read the credentials. Raises CredentialsError, TokenError."""
        self._settings = settings
        self._timeout_s = settings.request_timeout_s
        self._traffic = traffic
        self._token = Token(settings, renewals)
        listens = settings.http is not None
        self._server_tls = server_tls(settings, renewals) if listens else None
        self._worker_tls = worker_tls(settings, renewals) if listens else None
        self._pools: dict[str, Pool] = {}
        self._retired: list[Pool] = []
        self._inquiries = HttpInquiries(self._timeout_s, traffic, self._pools, self._ask)
        self._hop = _TOKEN if self._token.needed else frozenset()
        self._server: web.Server | None = None
        self._listener: asyncio.Server | None = None
        #: Memory budget for the bodies of inference requests.
        self.keeping = UploadBudget()
        self._draining = False
        self._under_way = 0
        self._idle = asyncio.Event()
        #: Port that the server listens on, or 0 if it is not started or there is no HTTP.
        self.port = 0

    async def start(self) -> None:
        """Listen on the configured address. Raises ListenError."""
        address = self._settings.http
        if address is not None:
            self._server = web.Server(
                self._handle, handler_cancellation=True, auto_decompress=False, access_log=None
            )
            self._listener, self.port = await listen(self._server, address, "gateway.http", self._server_tls)

    def apply(self, workers: Mapping[str, Worker]) -> None:
        """Connect to these workers from now on. Call it before `Traffic.apply`, which may choose any of them."""
        if self._settings.http is None:
            return
        known = self._traffic.workers
        addresses = {name: worker.http for name, worker in workers.items() if worker.http is not None}
        for name in [name for name in self._pools if addresses.get(name) != known[name].http]:
            pool = self._pools.pop(name)
            pool.retire()
            self._retired = [*(old for old in self._retired if not old.closed), pool]
        for name, address in addresses.items():
            if name not in self._pools:
                self._pools[name] = Pool(address, self._settings, self._worker_tls)

    async def drain(self, seconds: float) -> None:
        if self._listener is None:
            return
        self._draining = True
        for sock in self._listener.sockets:
            asyncio.get_running_loop().remove_reader(sock.fileno())
        # Let the loop register a connection that was just accepted. The connection would hang if the listener closed first.
        await asyncio.sleep(0)
        self._listener.close()
        if self._under_way:
            self._idle.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._idle.wait()

    async def stop(self) -> None:
        if self._listener is not None and self._server is not None:
            self._listener.close()
            await self._server.shutdown(_FLUSH_S)
        for pool in (*self._pools.values(), *self._retired):
            await pool.close()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self._under_way += 1
        try:
            response = _refused(_ENDING) if self._draining else await self._answer(request)
            if self._draining:
                response.force_close()
            return response
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._idle.set()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        sent = request.headers.get("Authorization", "")
        if not self._token.lets_in([("authorization", sent)]):
            if request.path.endswith(INFERENCE):
                self._traffic.count_refused("", StatusCode.UNAUTHENTICATED.name)
            return _refused(unauthenticated())
        try:
            target = target_of(request.method, origin_form(request.raw_path))
        except UnknownPath as error:
            return _response(HttpReply(error.status, CIMultiDict(_TEXT), error_body(str(error))))
        if target.what in INFERENCE:
            return await self._infer(request, target)
        try:
            upload = await self._upload(request, None)
            await self._in_time(upload.settle())
            if target.what in OF_JSON:
                await self._in_time(self._head(request, upload, target))
        except UploadError as error:
            return _refused(error.refusal)
        query = self._query(request, upload, target)
        answer = await self._inquiries.answer(target, query)
        return _refused(answer) if isinstance(answer, Refusal) else _response(answer)

    async def _infer(self, request: web.BaseRequest, target: Target) -> web.StreamResponse:
        try:
            upload = await self._upload(request, self.keeping)
            try:
                return await self._pass(request, upload, target)
            finally:
                upload.forget()
        except UploadError as error:
            self._traffic.count_refused(target.model, error.refusal.code.name)
            return _refused(error.refusal)

    async def _pass(self, request: web.BaseRequest, upload: Upload, target: Target) -> web.StreamResponse:
        """Forward an inference request. If this raises UploadError, no worker has received the request."""
        arrived = monotonic()
        deadline = arrived + self._timeout_s
        traffic, model = self._traffic, target.model
        head = await self._in_time(self._head(request, upload, target))
        items, sequence = head.items(traffic.router.measured(model)), head.sequence
        if target.what == "generate" and not head.has_stream:
            # Ask for one response. By default, a generation answers with a stream, which Triton's `generate` does not accept.
            upload.add_member(b'"stream":false')

        def digest() -> bytes:
            # A generation ignores the header with the length.
            length = (
                request.headers.get("Inference-Header-Content-Length") if target.what == "infer" else None
            )
            encoding = request.headers.get("Content-Encoding", "")
            return body_digest(upload.whole(), encoding, None if length is None else int(length))

        if traffic.suspects.has(model):
            await self._in_time(upload.wait())
        query = self._query(request, upload, target)

        async def deliver(answer: HttpReply) -> tuple[web.StreamResponse, str]:
            if answer.rest is None:
                return _response(answer), "OK"
            return await _stream(request, answer, answer.rest, self._timeout_s)

        answer = await infer(
            traffic,
            Inference(
                model,
                target.version,
                items,
                sequence,
                head.classified,
                arrived,
                deadline,
                lambda worker, left: self._ask(worker, query, left),
                digest,
                lambda: not upload.cut,
                # A worker may close an idle connection at any time, even at the moment when the request is sent on it.
                repeats_lost=True,
            ),
            deliver,
        )
        return _refused(answer) if isinstance(answer, Refusal) else answer

    async def _ask(self, worker: str, query: HttpQuery, timeout: float | None) -> HttpReply | Refusal:
        pool = self._pools.get(worker)
        if pool is None:
            return Refusal(StatusCode.UNAVAILABLE, f"worker {worker} was removed, or serves no HTTP")
        if query.upload is not None and query.upload.cut:
            return Refusal(
                StatusCode.RESOURCE_EXHAUSTED,
                "the gateway's memory for request bodies is used up, so the request cannot be sent to another worker",
            )
        answers = pool.answers
        try:
            async with asyncio.timeout(timeout):
                answer = await pool.ask(query)
        except TimeoutError:
            waited_for_us = query.upload is None or query.upload.ended
            if waited_for_us and pool.unanswered(answers, monotonic()):
                self._traffic.brain.failed(worker)
            return Refusal(StatusCode.DEADLINE_EXCEEDED, f"worker {worker} did not answer in time")
        if isinstance(answer, Refusal) and answer.suspects_worker():
            self._traffic.brain.failed(worker)
        return answer

    async def _upload(self, request: web.BaseRequest, keeping: UploadBudget | None) -> Upload:
        """Start reading the client's body. Raises UploadError."""
        size = request.content_length if request.body_exists else 0
        upload = Upload(request.content, size, self._settings.max_message_bytes, keeping)
        if request.headers.get("Expect", "").lower() == "100-continue":
            try:
                await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            except ConnectionResetError:
                raise UploadError(StatusCode.CANCELLED, "the client has disconnected") from None
            request.writer.output_size = 0
        return upload

    async def _head(self, request: web.BaseRequest, upload: Upload, target: Target) -> InferenceHead:
        """Return the parts of a request that decide its route. Raises UploadError."""
        headers, most = request.headers, self._settings.max_message_bytes
        small = await upload.settle()
        try:
            encoding, length = headers.get("Content-Encoding"), headers.get("Inference-Header-Content-Length")
            body = HttpHead(target.what, encoding, length, most)
            if small is not None and encoding is None:
                body.feed(small, last=True)
                assert body.head is not None
                return body.head
            async with aclosing(upload.read_ahead()) as pieces:
                async for piece, last in pieces:
                    for _ in body.steps(piece, last):
                        await asyncio.sleep(0)
                    if body.head is not None:
                        break
        except Malformed as error:
            raise UploadError(error.refusal.code, error.refusal.message) from None
        assert body.head is not None
        return body.head

    async def _in_time(self, coming: Awaitable[T]) -> T:
        """Wait for the client's data for up to request_timeout_s. Raises UploadError."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await coming
        except TimeoutError:
            message = f"the request did not arrive within {self._timeout_s:g} s"
            raise UploadError(StatusCode.DEADLINE_EXCEEDED, message) from None

    def _query(self, request: web.BaseRequest, upload: Upload, target: Target) -> HttpQuery:
        infers = target.what in INFERENCE
        return HttpQuery(
            request.method,
            origin_form(request.raw_path),
            # Do not forward Accept-Encoding if answers may be merged, because they must not be compressed.
            end_to_end(request.headers, self._hop if infers else self._hop | _ENCODING),
            upload if request.method == "POST" else None,
            whole=not infers,
            generated=infers and target.what != "infer",
        )


def _refused(refusal: Refusal) -> web.Response:
    return _response(HttpReply(*for_client(refusal)))


def _response(reply: HttpReply) -> web.Response:
    reply.headers["Server"] = _NAME
    return web.Response(status=reply.status, headers=reply.headers, body=reply.body)


async def _stream(
    request: web.BaseRequest, reply: HttpReply, unread: UnreadBody, patience: float
) -> tuple[web.StreamResponse, str]:
    """Forward the rest of an answer. Return the response and the code of its end.

    The answer is aborted if the worker sends nothing, or the client takes nothing, for `patience` seconds.
    """
    reply.headers["Server"] = _NAME
    response = web.StreamResponse(status=reply.status, headers=reply.headers)
    response.content_length = reply.size
    try:
        await response.prepare(request)
        while True:
            try:
                async with asyncio.timeout(patience):
                    piece = await unread.read()
            except (ClientError, TimeoutError, OSError):
                return _broken_off(request, response), _BROKEN
            async with asyncio.timeout(patience):
                await (response.write(piece) if piece else response.write_eof())
            if not piece:
                return response, "OK"
    except (TimeoutError, ConnectionResetError):
        return _broken_off(request, response), CANCELLED
    finally:
        unread.close()


def _broken_off(request: web.BaseRequest, response: web.StreamResponse) -> web.StreamResponse:
    """Abort the connection. After the status was sent, this is the only way to show the client that the answer is incomplete."""
    if request.transport is not None:
        request.transport.abort()
    return response
