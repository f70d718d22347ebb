"""The live page over HTTP: its public parts, and the parts that need the token."""

import asyncio
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, web

from rsrv.live import routes
from rsrv.live.routes import LivePage
from rsrv.live.source import PageError
from rsrv.tokens import read_token
from tests.waiting import looped

TOKEN = b"s3cret"


class FakeSource:
    """Sends the events in `told`. Then the stream waits until `more` is set, and ends."""

    def __init__(self) -> None:
        self.live_events = [("w", "log", '{"t": 1, "text": "</script>"}')]
        self.more = asyncio.Event()
        self.watchers = 0
        self.steered: list[tuple[str, str, str]] = []

    async def events(self) -> AsyncGenerator[tuple[str, str, str], None]:
        self.watchers += 1
        try:
            for event in self.live_events:
                yield event
            await self.more.wait()
        finally:
            self.watchers -= 1

    async def panel(self, server: str, model: str) -> dict[str, Any]:
        if model != "a":
            raise PageError.of("NOT_FOUND", f"there is no model {model!r} at {server!r}")
        return {"history": ["loaded", "<b>evicted</b>"]}

    async def trace(self, server: str) -> str:
        if server != "w":
            raise PageError(404, f"there is no worker {server!r}")
        return '{"traceEvents": []}'

    async def infer(self, server: str, model: str, inputs: Any) -> tuple[int, str]:
        if inputs == "wrong":
            raise PageError(400, "inputs must be objects")
        return 422, f"{server} {model} {inputs}"

    async def steer(self, server: str, model: str, what: str) -> None:
        if model != "a":
            raise PageError(409, "it is a meta model")
        self.steered.append((server, model, what))


@asynccontextmanager
async def page(token: bytes | None = TOKEN) -> AsyncIterator[tuple[FakeSource, ClientSession]]:
    source, app = FakeSource(), web.Application()
    app.add_routes(LivePage(source, None if token is None else lambda: token).routes())
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with ClientSession(f"http://127.0.0.1:{runner.addresses[0][1]}") as session:
        yield source, session
    source.more.set()
    await runner.cleanup()


PAGE_FILES = [
    ("/", "text/html"),
    ("/page.css", "text/css"),
    *(
        (f"/{name}.js", "text/javascript")
        for name in (
            "page",
            "base",
            "servers",
            "charts",
            "devices",
            "timeline",
            "models",
            "aliases",
            "panel",
            "request",
        )
    ),
]


@looped
async def test_the_files_load_nothing_from_elsewhere() -> None:
    """Each file has its content type and a strict policy, and refers to no other host."""
    async with page() as (_, client):
        for path, kind in PAGE_FILES:
            async with client.get(path) as answer:
                assert (answer.status, answer.content_type) == (200, kind)
                policy = answer.headers["Content-Security-Policy"]
                assert "default-src 'none'" in policy
                assert "unsafe" not in policy
                assert answer.headers["X-Content-Type-Options"] == "nosniff"
                text = (
                    (await answer.text())
                    .replace("http://www.w3.org/2000/svg", "")
                    .replace("`http://${outside(", "")
                )
                assert "//" not in text.replace("// ", "").replace('"//"', "") or "http" not in text
                assert "innerHTML" not in text
                assert not any(f" {event}=" in text for event in ("onclick", "onload", "style"))
                for name in re.findall(r'(?:from "\./|src="|href=")([a-z.]+)"', text):
                    assert f"/{name}" in dict(PAGE_FILES)
        async with client.get("/other") as answer:
            assert answer.status == 404


@pytest.mark.parametrize("token", [TOKEN, None])
@looped
async def test_the_stream_says_whether_one_may_steer_and_what_happens(token: bytes | None) -> None:
    """The stream first says whether the page may send commands, and then sends the events. A closed stream is no longer a watcher."""
    async with page(token) as (source, client):
        async with client.get("/live/stream") as answer:
            assert answer.content_type == "text/event-stream"
            lines: list[str] = []
            while len(lines) < 7:
                lines.append((await answer.content.readline()).decode().rstrip())
            assert lines[1] == "event: hello"
            assert json.loads(lines[2].removeprefix("data: ")) == {"writable": token is not None}
            assert lines[4] == "event: log"
            event = json.loads(lines[5].removeprefix("data: "))
            assert event == {"server": "w", "is": {"t": 1, "text": "</script>"}}
            assert source.watchers == 1
            source.more.set()
            assert await answer.content.read() == b""
        assert source.watchers == 0


@looped
async def test_too_many_watchers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A watcher above the limit gets 503."""
    monkeypatch.setattr(routes, "_MAX_WATCHERS", 1)
    async with page() as (_, client), client.get("/live/stream") as first:
        await first.content.readline()
        async with client.get("/live/stream") as second:
            assert (second.status, await second.text()) == (
                503,
                "the page already has 1 watchers; close one of them\n",
            )


@looped
async def test_a_panel_and_a_trace_are_json() -> None:
    """The facts about a model, and a trace, are JSON. An unknown model or server is 404 with a reason."""
    async with page() as (_, client):
        async with client.get("/live/model", params={"server": "w", "model": "a"}) as answer:
            assert await answer.json() == {"history": ["loaded", "<b>evicted</b>"]}
        async with client.get("/live/trace", params={"server": "w"}) as answer:
            assert await answer.json() == {"traceEvents": []}
        async with client.get("/live/trace", params={"server": "x"}) as answer:
            assert answer.status == 404
        async with client.get("/live/model", params={"server": "w", "model": "x"}) as answer:
            assert (answer.status, await answer.text()) == (404, "there is no model 'x' at 'w'\n")
            assert answer.content_type == "text/plain"


PIN = json.dumps({"server": "w", "model": "a", "what": "pin"})


@pytest.mark.parametrize(
    ("token", "authorization", "body", "status", "text"),
    [
        (None, b"Bearer s3cret", PIN, 403, "metrics.token_file is not set"),
        (None, b"Bearer ", PIN, 403, "metrics.token_file is not set"),
        (TOKEN, b"", PIN, 401, "the token is wrong"),
        (TOKEN, b"Bearer s3cre", PIN, 401, "the token is wrong"),
        (TOKEN, b"Bearer \xff\xfe", PIN, 401, "the token is wrong"),
        (TOKEN, b"s3cret", PIN, 401, "the token is wrong"),
        (TOKEN, b"Bearer s3cret", "", 400, "server, model and what"),
        (TOKEN, b"Bearer s3cret", "[]", 400, "server, model and what"),
        (TOKEN, b"Bearer s3cret", "3", 400, "server, model and what"),
        (TOKEN, b"Bearer s3cret", '{"server": "w", "model": "a"}', 400, "server, model and what"),
        (TOKEN, b"Bearer s3cret", PIN.replace("pin", "abort"), 400, "one of pin, unpin, prefetch, evict"),
        (TOKEN, b"Bearer s3cret", PIN + " " * 5000 + "x", 400, "server, model and what"),
        (TOKEN, b"Bearer s3cret", PIN.replace('"a"', '"m"'), 409, "it is a meta model"),
        (TOKEN, b"Bearer s3cret", PIN, 200, "done"),
        (TOKEN, b"bEARER s3cret", PIN, 200, "done"),
    ],
)
@looped
async def test_commands_need_the_token(
    token: bytes | None, authorization: bytes, body: str, status: int, text: str
) -> None:
    """Commands need the token, and only known ones are accepted."""
    async with page(token) as (source, client):
        headers = {"Authorization": authorization.decode("utf-8", "surrogateescape")}
        async with client.post("/live/steer", data=body, headers=headers) as answer:
            assert answer.status == status
            assert text in await answer.text()
        assert source.steered == ([("w", "a", "pin")] if status == 200 else [])


TRY = json.dumps({"server": "w", "model": "a", "inputs": [1]})


@pytest.mark.parametrize(
    ("token", "authorization", "body", "status", "text"),
    [
        (None, "Bearer s3cret", TRY, 403, "metrics.token_file is not set"),
        (TOKEN, "Bearer s3cre", TRY, 401, "the token is wrong"),
        (TOKEN, "Bearer s3cret", "[" * 60000, 400, "server, model and inputs"),
        (TOKEN, "Bearer s3cret", TRY + " " * 65536, 400, "at most 65536 bytes"),
        (TOKEN, "Bearer s3cret", TRY.replace("[1]", '"wrong"'), 400, "inputs must be objects"),
        (TOKEN, "Bearer s3cret", TRY + " " * 60000, 422, "w a [1]"),
    ],
)
@looped
async def test_requests_of_the_form_need_the_token(
    token: bytes | None, authorization: str, body: str, status: int, text: str
) -> None:
    """The page's form may send a request only with the token, and with a small body. It gets the model's answer."""
    headers = {"Authorization": authorization}
    async with page(token) as (_, client), client.post("/live/try", data=body, headers=headers) as answer:
        assert answer.status == status
        assert text in await answer.text()


@pytest.mark.parametrize(
    ("content", "mode", "why"),
    [
        ("s3cret\n", 0o600, ""),
        ("s3cret", 0o640, ""),
        ("s3cret", 0o604, "every user can read"),
        ("", 0o600, "holds no token"),
        ("two words", 0o600, "holds no token"),
        ("two\nlines\n", 0o600, "holds no token: one line of ASCII without spaces"),
        (None, 0, "No such file"),
    ],
)
def test_a_token_file_is_one_line_and_private(
    tmp_path: Path, content: str | None, mode: int, why: str
) -> None:
    """A token file must be one line that others cannot read; the error names the setting."""
    file = tmp_path / "token"
    if content is not None:
        file.write_text(content)
        file.chmod(mode)
    if not why:
        assert read_token(file, "metrics.token_file") == TOKEN
        return
    with pytest.raises(ValueError, match=why) as wrong:
        read_token(file, "metrics.token_file")
    assert str(wrong.value).startswith("metrics.token_file: ")
