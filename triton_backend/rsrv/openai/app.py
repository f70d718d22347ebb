"""The HTTP server: paths, keys, limits, and errors."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Final
from uuid import uuid4

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from pydantic_core import to_json

from rsrv.openai.bodies import (
    ApiBody,
    ChatBody,
    ClassifyBody,
    CompletionsBody,
    DetokenizeBody,
    EmbeddingsBody,
    RerankBody,
    ScoreBody,
    TokenizeBody,
)
from rsrv.openai.catalog import TaskCatalog
from rsrv.openai.chat import ChatTemplates
from rsrv.openai.errors import ApiError, invalid, unknown_model
from rsrv.openai.generation import data, detokenize, events, tokenize, whole
from rsrv.openai.inference import Backend, TaskModel, Terms
from rsrv.openai.keys import Caller, Keys, find_caller
from rsrv.openai.texts import ModelCall, classify, embeddings, rerank, score
from rsrv.openai.usage import Usage

log = logging.getLogger(__name__)

#: Maximum number of bytes of a body.
MAX_BODY: Final = 16 << 20
#: Maximum number of bytes of the bodies of all calls in progress.
MAX_BODIES: Final = 256 << 20
#: Maximum number of calls in progress. Further calls are refused.
MAX_CALLS: Final = 1024
#: Seconds within which a body must arrive.
BODY_S: Final = 60.0
#: Disconnect a client that reads no byte of its answer for this many seconds.
STALL_S: Final = 60.0
#: Maximum number of bytes of an answer that are written at a time.
_PIECE = 1 << 18
#: Seconds for which the HTTP status of a stream is held back. An error after its status was sent becomes an event.
STATUS_S: Final = 1.0
#: Write a comment to a stream that was silent for this many seconds, so that no proxy closes it.
COMMENT_S: Final = 5.0
_COMMENT = b": the model has not answered yet\n\n"
#: Header with the seconds that an answer may take.
TIMEOUT_HEADER: Final = "X-Timeout-S"
_MAX_TIMEOUT_S = 86400.0
#: Maximum number of characters of a client's X-Request-Id.
_MAX_ID = 128

#: Keys of the values that this module stores in a request: its id, its caller, its model's name (once known), its `ModelCall`.
_ID: Final = "id"
_CALLER: Final = "caller"
_MODEL: Final = "model"
_CALL: Final = "call"
#: Key of the number of bytes of the request's body that have arrived.
_BODY: Final = "body"

Answer = Callable[[ModelCall[Any]], Awaitable[dict[str, Any]]]
Endpoint = tuple[tuple[str, ...], type[ApiBody], str, Answer]
#: For each endpoint: its paths, its body, the kind of task that its models need, and the function that answers.
ENDPOINTS: Final[Sequence[Endpoint]] = (
    (("/v1/embeddings",), EmbeddingsBody, "feature-extraction", embeddings),
    (("/v1/rerank", "/v2/rerank", "/rerank"), RerankBody, "text-ranking", rerank),
    (("/v1/score", "/score"), ScoreBody, "text-ranking", score),
    (("/v1/classify", "/classify"), ClassifyBody, "text-classification", classify),
    (("/v1/completions",), CompletionsBody, "text-generation", whole),
    (("/v1/chat/completions",), ChatBody, "text-generation", whole),
    (("/tokenize",), TokenizeBody, "text-generation", tokenize),
    (("/detokenize",), DetokenizeBody, "text-generation", detokenize),
)


class Api:
    """The endpoints."""

    def __init__(
        self, backend: Backend, catalog: TaskCatalog, usage: Usage, keys: Callable[[], Keys] | None
    ) -> None:
        """`keys` returns the current keys. If it is None, everybody may call every model."""
        self._backend, self._catalog, self._usage, self._keys = backend, catalog, usage, keys
        self._templates = ChatTemplates()
        self._calls = 0
        self._bodies = 0

    def application(self, *middlewares: Middleware) -> web.Application:
        """Return the application. `middlewares` check requests first."""
        app = web.Application(middlewares=[self._answer, *middlewares])
        app.on_cleanup.append(self._close)
        app.add_routes([web.get("/v1/models", self._list), web.get("/v1/models/{model:.+}", self._show)])
        for paths, body, kind, answer in ENDPOINTS:
            app.add_routes(web.post(path, partial(self._infer, body, kind, answer)) for path in paths)
        return app

    async def _close(self, _: web.Application) -> None:
        await self._templates.close()

    @web.middleware
    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Admit a request, turn errors into answers, and count the request."""
        request[_ID] = _request_id(request.headers.get("X-Request-Id", ""))
        status = 499
        self._calls += 1
        try:
            if self._calls > MAX_CALLS:
                text = f"{MAX_CALLS} calls are in progress; retry after 1 s"
                raise ApiError(429, "QUEUE_FULL", text, retry_after_s=1.0)
            request[_CALLER] = self._caller(request)
            response = await handler(request)
            status = response.status
        except Exception as error:  # noqa: BLE001  every fault has an answer
            failure = _failure(error)
            status = failure.status
            response = web.json_response(failure.body, status=status, headers=failure.headers)
            response.headers["X-Request-Id"] = request[_ID]
        finally:
            self._calls -= 1
            self._bodies -= request.get(_BODY, 0)
            self._count(request, status)
        return response

    def _caller(self, request: web.Request) -> Caller:
        if self._keys is None:
            return Caller()
        caller = find_caller(self._keys(), request.headers.get("Authorization", ""))
        if caller is None:
            text = "the API key is missing or wrong; send it as `Authorization: Bearer KEY`"
            raise ApiError(401, "UNAUTHENTICATED", text)
        return caller

    def _count(self, request: web.Request, status: int) -> None:
        caller = request.get(_CALLER)
        key = caller.name if caller else ""
        # The label has only names of existing models, because a client may send any name.
        self._usage.answers.labels(key, request.get(_MODEL, ""), str(status)).inc()
        if (call := request.get(_CALL)) is not None:
            for kind, count in (("prompt", call.prompt_tokens), ("completion", call.completion_tokens)):
                if count:
                    self._usage.tokens.labels(key, call.model.name, kind).inc(count)

    async def _model(self, request: web.Request, name: str) -> TaskModel:
        """Return a model that the caller may call. Raises ApiError."""
        if not request[_CALLER].may_call(name):
            raise unknown_model(name)
        model = await self._catalog.get(name)
        request[_MODEL] = name
        return model

    async def _list(self, request: web.Request) -> web.StreamResponse:
        models = self._catalog.models
        shown = [_described(models[name]) for name in sorted(models) if request[_CALLER].may_call(name)]
        return await _send(request, {"object": "list", "data": shown})

    async def _show(self, request: web.Request) -> web.StreamResponse:
        return await _send(request, _described(await self._model(request, request.match_info["model"])))

    async def _infer(
        self, form: type[ApiBody], kind: str, answer: Answer, request: web.Request
    ) -> web.StreamResponse:
        terms = Terms(request[_ID], _deadline(request.headers.get(TIMEOUT_HEADER)), request[_CALLER].priority)
        if request.content_type != "application/json":
            # Some other types are not safe: a browser lets pages of other sites send them without asking the server (CORS).
            raise ApiError(415, "INVALID", "send the body with `Content-Type: application/json`")
        body = form.read(await self._read(request))
        model = await self._model(request, body.model)
        if model.kind != kind:
            raise invalid(f"the task of {model.name} is {model.kind}; this path needs {kind}", "model")
        call = request[_CALL] = ModelCall(
            self._backend, model, body, terms, int(time.time()), self._templates
        )
        if getattr(body, "stream", False):
            return await self._stream(request, call)
        return await _send(request, await answer(call))

    async def _read(self, request: web.Request) -> bytes:
        """Return the body. Its bytes count towards `MAX_BODIES` until the call ends. Raises ApiError."""
        parts = bytearray()
        try:
            async with asyncio.timeout(BODY_S):
                async for part in request.content.iter_any():
                    parts += part
                    request[_BODY] = len(parts)
                    self._bodies += len(part)
                    if len(parts) > MAX_BODY:
                        text = f"the body has more than {MAX_BODY >> 20} MiB; send fewer texts in a call"
                        raise ApiError(413, "INVALID", text)
                    if self._bodies > MAX_BODIES:
                        text = f"the bodies of the calls in progress have reached {MAX_BODIES >> 20} MiB, the limit; retry after 1 s"
                        raise ApiError(429, "QUEUE_FULL", text, retry_after_s=1.0)
        except TimeoutError:
            raise ApiError(408, "DEADLINE", f"the body has not arrived within {BODY_S:g} s") from None
        return bytes(parts)

    async def _stream(self, request: web.Request, call: ModelCall[Any]) -> web.StreamResponse:
        """Stream an answer. An error before the first write becomes an HTTP status, and a later error an event."""
        headers = {
            "Content-Type": "text/event-stream",
            "Cache-Control": "no-cache",
            "X-Request-Id": request[_ID],
        }
        response = web.StreamResponse(headers=headers)
        async with aclosing(events(call)) as stream:
            waiting = asyncio.ensure_future(anext(stream, None))
            try:
                while True:
                    await asyncio.wait({waiting}, timeout=COMMENT_S if response.prepared else STATUS_S)
                    event = waiting.result() if waiting.done() else _COMMENT
                    if not response.prepared:
                        await response.prepare(request)
                    if event is None:
                        return response
                    if waiting.done():
                        waiting = asyncio.ensure_future(anext(stream, None))
                    await _write(request, response, event)
            except Exception as error:
                if not response.prepared or isinstance(error, ConnectionError):
                    raise
                await _write(request, response, data(_failure(error).body))
                return response
            finally:
                waiting.cancel()
                # Wait for the cancelled step: a running generator cannot be closed.
                await asyncio.gather(waiting, return_exceptions=True)


def _request_id(id: str) -> str:
    """Return the client's id of a request, or a new id if the client's is missing or invalid."""
    usable = 0 < len(id) <= _MAX_ID and id.isascii() and id.isprintable()
    return id if usable else uuid4().hex


def _deadline(header: str | None) -> float | None:
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= _MAX_TIMEOUT_S:
        raise invalid(
            f"the header {TIMEOUT_HEADER} must be a number of seconds above 0, at most {_MAX_TIMEOUT_S:.0f}"
        )
    return time.monotonic() + seconds


def _described(model: TaskModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "rsrv",
        "task": model.kind,
    }


async def _send(request: web.Request, value: Any) -> web.StreamResponse:
    """Send an answer as JSON, and return when the client has taken it. Raises ConnectionError."""
    # `to_json` is eight times as fast as the module json. Speed matters here, because all other calls wait meanwhile.
    text = to_json(value)
    headers = {"X-Request-Id": request[_ID], "Content-Type": "application/json; charset=utf-8"}
    if len(text) <= _PIECE:
        return web.Response(body=text, headers=headers)
    response = web.StreamResponse(headers=headers)
    response.content_length = len(text)
    await response.prepare(request)
    for start in range(0, len(text), _PIECE):
        await _write(request, response, text[start : start + _PIECE])
    return response


async def _write(request: web.Request, response: web.StreamResponse, piece: bytes) -> None:
    """Write a piece of an answer. Disconnect a client that reads nothing, because its answer stays in memory."""
    try:
        async with asyncio.timeout(STALL_S):
            await response.write(piece)
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError from None


def _failure(error: Exception) -> ApiError:
    """Return the error that the client gets."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, web.HTTPNotFound):
        return ApiError(404, "NOT_FOUND", "there is no such path; the documentation lists the paths")
    if isinstance(error, web.HTTPException):
        return ApiError(error.status, "INVALID", (error.text or error.reason).strip())
    if isinstance(error, web.RequestPayloadError):
        return invalid("the body cannot be read: it does not have the announced encoding or length")
    if isinstance(error, ConnectionError):
        return ApiError(499, "CANCELLED", "the client has closed the connection")
    log.error("a call failed", exc_info=error)
    return ApiError(500, "INTERNAL", "rsrv openai has failed; its log has the reason")
