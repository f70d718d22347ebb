"""The live page over HTTP: files, a stream of events, panels of models, traces, and actions for clients with the token."""

import asyncio
import json
import logging
from collections.abc import Callable
from contextlib import aclosing
from importlib import resources
from pathlib import Path
from typing import Any

from aiohttp import web

from rsrv.live.source import ACTIONS, PageError, PageSource
from rsrv.renewal import Renewals
from rsrv.tokens import bears, read_token

log = logging.getLogger(__name__)

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
#: With these headers, the page can load nothing from other sites, and no other page can embed this page.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
#: Maximum number of watchers at a time.
_MAX_WATCHERS = 64
#: Seconds that a watcher may take to read an event.
_WATCHER_TIMEOUT_S = 30.0
#: Maximum number of bytes of a body with an action.
_MAX_BODY = 4096
#: Maximum number of bytes of a body with inputs for a model.
_MAX_TRIAL = 1 << 16


#: Returns the latest token.
PageToken = Callable[[], bytes]


def page_token(file: Path | None, renewals: Renewals) -> PageToken | None:
    """Return a function that returns the token in metrics.token_file, or None if the setting names no file. Raises TokenError."""
    if file is None:
        return None
    setting = "metrics.token_file"
    renewed = renewals.of(setting, [file], lambda: read_token(file, setting))
    return lambda: renewed.value


class LivePage:
    """The page's routes. `token` returns the token that actions need. None: no client may act."""

    def __init__(self, source: PageSource, token: PageToken | None) -> None:
        self._source, self._token = source, token
        self._watchers = 0
        #: Held while a trace is made. A trace has megabytes, so only one may be in memory at a time.
        self._tracing = asyncio.Lock()
        folder = resources.files("rsrv.live") / "page"
        self._files = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}

    def routes(self) -> list[web.RouteDef]:
        return [
            *(web.get(f"/{name}", self._file) for name in ("", *self._files)),
            web.get("/live/stream", self._stream),
            web.get("/live/model", self._panel),
            web.get("/live/trace", self._trace),
            web.post("/live/steer", self._steer),
            web.post("/live/try", self._try),
        ]

    async def _file(self, request: web.Request) -> web.Response:
        name = request.path[1:] or "index.html"
        kind = _TYPES[name.rpartition(".")[2]]
        return web.Response(body=self._files[name], content_type=kind, charset="utf-8", headers=_HEADERS)

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        if self._watchers >= _MAX_WATCHERS:
            raise web.HTTPServiceUnavailable(
                text=f"the page already has {_MAX_WATCHERS} watchers; close one of them\n"
            )
        self._watchers += 1
        try:
            answer = web.StreamResponse(
                headers={**_HEADERS, "Content-Type": "text/event-stream", "Cache-Control": "no-store"}
            )
            await answer.prepare(request)
            hello = json.dumps({"writable": self._token is not None})
            await answer.write(f"retry: 1000\nevent: hello\ndata: {hello}\n\n".encode())
            async with aclosing(self._source.events()) as events:
                async for server, name, text in events:
                    event = f'event: {name}\ndata: {{"server": {json.dumps(server)}, "is": {text}}}\n\n'
                    async with asyncio.timeout(_WATCHER_TIMEOUT_S):
                        await answer.write(event.encode())
            return answer
        except (ConnectionError, TimeoutError):
            return answer  # the watcher has disconnected, or does not read
        finally:
            self._watchers -= 1

    async def _panel(self, request: web.Request) -> web.Response:
        query = request.query
        try:
            panel = await self._source.panel(query.get("server", ""), query.get("model", ""))
        except PageError as wrong:
            return web.Response(status=wrong.status, text=f"{wrong}\n", headers=_HEADERS)
        return web.json_response(panel, headers=_HEADERS)

    async def _trace(self, request: web.Request) -> web.Response:
        try:
            async with self._tracing:
                text = await self._source.trace(request.query.get("server", ""))
        except PageError as wrong:
            return web.Response(status=wrong.status, text=f"{wrong}\n", headers=_HEADERS)
        return web.Response(text=text, content_type="application/json", headers=_HEADERS)

    async def _steer(self, request: web.Request) -> web.Response:
        values = await self._order(request, _MAX_BODY, "server", "model", "what")
        server, model, action = map(str, values)
        if action not in ACTIONS:
            return web.Response(status=400, text=f"`what` must be one of {', '.join(ACTIONS)}\n")
        log.info("live page at %s: %s %s at %s", request.remote, action, model, server)
        try:
            await self._source.steer(server, model, action)
        except PageError as wrong:
            return web.Response(status=wrong.status, text=f"{wrong}\n")
        return web.Response(text="done\n")

    async def _try(self, request: web.Request) -> web.Response:
        server, model, inputs = await self._order(request, _MAX_TRIAL, "server", "model", "inputs")
        log.info("live page at %s: a request for %.80r at %.80r", request.remote, model, server)
        try:
            status, text = await self._source.infer(str(server), str(model), inputs)
        except PageError as wrong:
            return web.Response(status=wrong.status, text=f"{wrong}\n", headers=_HEADERS)
        return web.Response(status=status, text=text, headers=_HEADERS)

    async def _order(self, request: web.Request, most: int, *keys: str) -> list[Any]:
        """Check the token of a request, and return the values of these keys from its JSON body. Raises web.HTTPException."""
        if self._token is None:
            raise web.HTTPForbidden(text="this page is read-only: metrics.token_file is not set\n")
        if not bears(request.headers.get("Authorization", ""), self._token()):
            raise web.HTTPUnauthorized(text="the token is wrong\n", headers={"WWW-Authenticate": "Bearer"})
        body = b""
        while len(body) <= most and (some := await request.content.readany()):
            body += some
        try:
            body_values: Any = json.loads(body) if len(body) <= most else None
            return [body_values[key] for key in keys]
        except (ValueError, LookupError, TypeError, RecursionError):
            needed = f"{', '.join(keys[:-1])} and {keys[-1]}"
            raise web.HTTPBadRequest(
                text=f"send a JSON object with {needed}, of at most {most} bytes\n"
            ) from None
