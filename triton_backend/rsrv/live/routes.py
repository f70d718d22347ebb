"""The live page over HTTP: three files, a stream of events, stories, and steering for those who have the token."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from importlib import resources
from typing import Protocol

from aiohttp import web

from rsrv.tokens import bears

log = logging.getLogger("rsrv.live")

#: what may be asked for by whoever has the token
ACTIONS = ("pin", "unpin", "prefetch", "evict")
#: what two of them mean for where weights are for sure
RESIDENCIES = {"pin": "device", "unpin": "system"}
_FILES = {"": "index.html", "page.css": "page.css", "page.js": "page.js"}
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
#: the page loads nothing from elsewhere, and is shown in nobody else's
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
#: watchers at a time
_MOST = 64
#: seconds that one may take for an event
_PATIENCE = 30.0
#: bytes of what is asked for
_BODY = 4096
#: HTTP's word for a refusal of gRPC's
_STATUSES = {
    "NOT_FOUND": 404,
    "INVALID_ARGUMENT": 400,
    "FAILED_PRECONDITION": 409,
    "UNAUTHENTICATED": 502,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}


class PageError(Exception):
    """What was asked for is not there, or cannot be done; with the HTTP status to say so."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status

    @classmethod
    def of(cls, code: str, text: str) -> "PageError":
        """`code`: the name of a gRPC status."""
        return cls(_STATUSES.get(code, 500), text)


def story_lines(stories: Mapping[str, Sequence[str]]) -> list[str]:
    """What there is of each version, by key, in one list; of several, with the key."""
    alone = len(stories) == 1
    return [line if alone else f"{key}: {line}" for key, lines in stories.items() for line in lines]


class PageSource(Protocol):
    """One server or several, by name; who has one only calls it by any name."""

    def events(self) -> AsyncGenerator[tuple[str, str, str], None]:
        """Server, name of the event, and JSON: what there is, then what happens."""

    async def story(self, server: str, model: str) -> list[str]:
        """Raises PageError."""

    async def steer(self, server: str, model: str, what: str) -> None:
        """One of ACTIONS. Raises PageError."""


class LivePage:
    """`token`: who sends it may steer; None: nobody may."""

    def __init__(self, source: PageSource, token: bytes | None) -> None:
        self._source, self._token = source, token
        self._watchers = 0
        folder = resources.files("rsrv.live") / "page"
        self._files = {name: (folder / file).read_bytes() for name, file in _FILES.items()}

    def routes(self) -> list[web.RouteDef]:
        return [
            *(web.get(f"/{name}", self._file) for name in _FILES),
            web.get("/live/stream", self._stream),
            web.get("/live/story", self._story),
            web.post("/live/steer", self._steer),
        ]

    async def _file(self, request: web.Request) -> web.Response:
        name = request.path[1:]
        kind = _TYPES[_FILES[name].rpartition(".")[2]]
        return web.Response(body=self._files[name], content_type=kind, charset="utf-8", headers=_HEADERS)

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        if self._watchers >= _MOST:
            raise web.HTTPServiceUnavailable(text=f"{_MOST} others watch already\n")
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
                    async with asyncio.timeout(_PATIENCE):
                        await answer.write(event.encode())
            return answer
        except (ConnectionError, TimeoutError):
            return answer  # the watcher has gone, or takes nothing
        finally:
            self._watchers -= 1

    async def _story(self, request: web.Request) -> web.Response:
        query = request.query
        try:
            lines = await self._source.story(query.get("server", ""), query.get("model", ""))
        except PageError as wrong:
            return web.Response(status=wrong.status, text=f"{wrong}\n", headers=_HEADERS)
        return web.json_response(lines, headers=_HEADERS)

    async def _steer(self, request: web.Request) -> web.Response:
        if self._token is None:
            return web.Response(status=403, text="metrics.token_file is not set: this page only shows\n")
        if not bears(request.headers.get("Authorization", ""), self._token):
            return web.Response(
                status=401, text="that is not the token\n", headers={"WWW-Authenticate": "Bearer"}
            )
        try:
            wanted = json.loads(await _body(request))
            server, model, what = (str(wanted[key]) for key in ("server", "model", "what"))
        except (ValueError, LookupError, TypeError):
            return web.Response(status=400, text="wanted: an object with server, model and what\n")
        if what not in ACTIONS:
            return web.Response(status=400, text=f"what must be one of {', '.join(ACTIONS)}\n")
        log.info("live page at %s: %s %s at %s", request.remote, what, model, server)
        try:
            await self._source.steer(server, model, what)
        except PageError as wrong:
            return web.Response(status=wrong.status, text=f"{wrong}\n")
        return web.Response(text="done\n")


async def _body(request: web.Request) -> bytes:
    """Raises ValueError: it is too large."""
    body = b""
    while some := await request.content.readany():
        body += some
        if len(body) > _BODY:
            raise ValueError
    return body
