"""The live page in a real browser: the page of a server under load, and pages of a fake server with up to a thousand models."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rsrv.control.http import HttpServer
from rsrv.live import routes
from rsrv.live.routes import LivePage as Served
from tests.e2e.browser import Page, browsing, running_browser
from tests.e2e.live_load import MODELS, PINNED, live_server, load
from tests.waiting import PATIENCE_S

ROWS = "document.querySelectorAll('#models tr').length"
#: Shares of pixels that are painted in the first two lanes of a timeline.
PAINTED = """(() => {
  const canvas = document.querySelector('.device canvas');
  const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext('2d', { willReadFrequently: true });
  copy.drawImage(canvas, 0, 0);
  const share = (top, bottom) => {
    const data = copy.getImageData(130, top, canvas.width - 130, bottom - top).data;
    let painted = 0;
    for (let at = 3; at < data.length; at += 4) painted += data[at] > 0;
    return painted / (data.length / 4);
  };
  return [share(0, 13), share(15, 28)];
})()"""

#: Point at a random place in the first lane. Return the text about the execution there, or an empty text if there is none.
POINTED = """(() => {
  const canvas = document.querySelector('.device canvas'), box = canvas.getBoundingClientRect();
  const clientX = box.left + 130 + Math.random() * (box.width - 130);
  canvas.dispatchEvent(new PointerEvent('pointermove', { clientX, clientY: box.top + 6 }));
  const told = document.querySelector('.timeline output').textContent;
  return told.includes(' executed in ') ? told : '';
})()"""

#: Upper bounds of CPU time, in multiples of TABLES: of the first display of a thousand models, and of an update.
FIRST, EACH = 2.0, 0.6
#: Work that is similar to the page's work, for a comparison that does not depend on the machine's speed: two tables of a thousand rows.
TABLES = """(() => {
  const table = document.body.appendChild(document.createElement('table'));
  for (let round = 0; round < 2; round++) {
    table.replaceChildren(...Array.from({ length: 1000 }, (_, number) => {
      const row = document.createElement('tr');
      for (let column = 0; column < 10; column++) row.insertCell().textContent = `${number * column + round}`;
      return row;
    }));
    table.getBoundingClientRect();
  }
  table.remove();
})()"""

#: The luminance of the page's background, from 0 (black) to 1, and the texts with less contrast than WCAG requires (4.5).
SEEN = """(() => {
  const channels = (text) => text.match(/[\\d.]+/g).map(Number);
  const luminance = (rgb) => {
    const [r, g, b] = rgb.map((one) => one / 255).map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    const found = channels(getComputedStyle(element).backgroundColor);
    return (found[3] ?? 1) > 0 ? luminance(found) : ground(element.parentElement);
  };
  const texts = ['#headline', '#findings span', '#facts', 'dt', 'figcaption', '.device h3 span', 'td.name button', 'td.number', '.facts dd', '#curl', 'a'];
  const faint = texts.filter((text) => {
    const element = document.querySelector(text);
    const [low, high] = [luminance(channels(getComputedStyle(element).color)), ground(element)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05) < 4.5;
  });
  return [ground(document.body), faint];
})()"""


@pytest.fixture(scope="module")
def browser() -> Iterator[str]:
    """Yield the URL of a browser for the pages of all tests."""
    with running_browser() as running:
        yield running


def shell(command: str) -> str:
    """Return the output of a command."""
    return subprocess.run(
        ["sh", "-c", command], check=True, capture_output=True, text=True, timeout=PATIENCE_S
    ).stdout


async def stop_time(page: Page) -> None:
    """Stop the clock of the next document, so that the page's figures do not become old on a slow machine."""
    await page.call("Page.addScriptToEvaluateOnNewDocument", source="performance.now = () => 1000;")


async def show(page: Page, url: str, *, still: bool = True) -> None:
    if still:
        await stop_time(page)
    await page.call("Page.navigate", url=url)
    await page.until("document.querySelector('#connection')?.dataset.state === 'live'")


def test_a_server_under_load_is_shown(browser: str, tmp_path: Path) -> None:
    """The page shows ten models on a device with room for six: bars, rows, changing figures, the timeline, events and a history."""

    async def visit(url: str) -> None:
        async with browsing(browser) as page:
            await show(page, url, still=False)
            await page.until(f"{ROWS} === {len(MODELS)}")
            assert await page.until("document.querySelectorAll('.device').length") == 1
            assert "for weights" in await page.until("document.querySelector('.device h3 span').textContent")
            shares = "[...document.querySelectorAll('.bar i')].map((part) => [part.title, part.className, +part.style.flexGrow])"
            await page.until(
                f"{shares}.filter(([_, kind, size]) => kind.startsWith('model') && size > 1e6).length > 3"
            )
            pinned = (
                f"{shares}.filter(([title]) => title.includes('{PINNED}')).map(([_, kind]) => kind).join()"
            )
            await page.until(f"{pinned} === 'model pinned'")
            assert "HTTP 127.0.0.1:" in await page.value("document.querySelector('#facts').textContent")
            expression = f"document.querySelector('tr[data-model={PINNED}] .weights').textContent"
            await page.until(f"{expression} === 'pinned, resident'")
            await page.until("+document.querySelector('#total-rate').textContent > 10")
            await page.until("+document.querySelector('#total-loads').textContent > 0")
            figure = f"document.querySelector('tr[data-model={MODELS[0]}]').textContent"
            before = json.dumps(await page.value(figure))
            await page.until(f"{figure} !== {before}")
            await page.until(f"{PAINTED}.every((share) => share > 0.005)")
            text = await page.until(POINTED)
            assert re.search(r"executed in \S+ .s: \d rows? of \d+ requests?", text), text
            await page.until(
                "[...document.querySelectorAll('#log li')].some((line) => /: warm/.test(line.textContent))"
            )
            # The charts continue after a reload of the page.
            paths = "[...document.querySelectorAll('#charts path')].map((path) => path.getAttribute('d')?.match(/[ML]/g)?.length ?? 0)"
            await page.until(f"{paths}[0] > 0 && {paths}[3] > 0 && {paths}[4] > 0")
            await page.call("Page.reload")
            await page.until(f"{ROWS} === {len(MODELS)} && {paths}[0] > 0")
            await page.value(f"document.querySelector('tr[data-model={MODELS[0]}] button').click()")
            await page.until("document.querySelectorAll('#history-lines li').length > 0")
            assert await page.value("document.querySelectorAll('#actions button').length") == 0
            curl = await page.value("document.querySelector('#curl').textContent")
            assert {output["name"] for output in json.loads(shell(curl))["outputs"]} >= {"first", "second"}
            trace = "fetch(document.querySelector('.timeline a').href).then((answer) => answer.json())"
            assert await page.value(f"{trace}.then((said) => said.traceEvents.length > 10)")
            assert page.errors == []

    with live_server(tmp_path) as (server, url), load(server):
        asyncio.run(visit(url))


#: Longest line in the panel of a model that generates text.
ANSWERS = "1.23 k; on average 23.4 tokens in, 123 tokens out, 12.3 ms to the first, 1.23 ms to each next"
#: What the table shows about tokens: whether their column is hidden, the cell of a model without tokens, and the cell of a model with
#: tokens.
TOKENS = """(() => {
  const titles = [...document.querySelectorAll('#columns th')];
  const at = titles.findIndex((one) => one.textContent === 'tokens/s');
  const cell = (name) => document.querySelector(`tr[data-model=${name}]`).children[at].textContent;
  return [titles[at].hidden, cell('model-000'), cell('model-019')];
})()"""


class FakeEvents:
    """Sends the events in `told`, and records commands from the page."""

    def __init__(self) -> None:
        self.told: asyncio.Queue[tuple[str, str, Any]] = asyncio.Queue()
        self.steered: list[tuple[str, str, str]] = []
        self.tried: Any = None

    async def events(self) -> AsyncGenerator[tuple[str, str, str], None]:
        while True:
            server, name, content = await self.told.get()
            yield server, name, json.dumps(content)

    async def panel(self, server: str, model: str) -> dict[str, Any]:
        inputs = [{"name": "it's", "datatype": "FP32", "shape": [-1, 2]}]
        return {
            "history": [f"{model} at {server}", "<img src=x onerror=alert(1)>"],
            "slowest": ["<b>slow"],
            "facts": [["requests", "3 answered"], ["answers", ANSWERS]],
            "executables": [["0", "8", "4", "2 ms"]],
            "inputs": inputs,
            "latency": [[0.005, 3], [None, 1]],
        }

    async def trace(self, server: str) -> str:
        return "{}"

    async def infer(self, server: str, model: str, inputs: Any) -> tuple[int, str]:
        self.tried = inputs
        if inputs[0]["data"] == [1, 2]:
            return 200, json.dumps(
                {"outputs": [{"name": "y", "datatype": "FP32", "shape": [1], "data": [3.5]}]}
            )
        return 400, json.dumps({"error": "<b>unexpected shape"})

    async def steer(self, server: str, model: str, what: str) -> None:
        self.steered.append((server, model, what))

    def tell(self, name: str, content: Any, server: str = "w0") -> None:
        self.told.put_nowait((server, name, content))


def device(number: int, second: int) -> dict[str, Any]:
    return {
        "number": number,
        "name": "L4",
        "card": {"used_bytes": 5e10, "total_bytes": 85e9},
        "limit": 80e9,
        "budget": 60e9,
        "pinned": 5e9,
        "logical": 5e10,
        "physical": 4e10,
        "held": 3.9e10,
        "host": 9e10,
        "device_s": 0.9 * second,
    }


FINDINGS = [
    {"name": "padding", "severity": "warning", "evidence": "86% of", "cause": "sizes", "cure": "export 4"},
    {"name": "slow_hooks", "severity": "note", "evidence": "a spends", "cause": "hooks", "cure": "mend"},
]


def state(second: int, models: int, *devices: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a server with `models` models that are all busy. Without `devices`, it has one device."""
    return {
        "t": 1000.0 + second,
        "up": True,
        "instance": "1",
        "devices": devices or [device(0, second)],
        "models": [
            {
                "name": f"model-{number:03d}",
                "kind": "model",
                "state": "ready",
                "residency": "device" if number == 0 else "system",
                "weights": ("resident", "absent", "loading")[(number + second) % 3],
                "paused": None,
                "queued": (number + second) % 7,
                "executing": 1,
                "requests": second * (number + 1),
                "errors": 0,
                "device_s": second * 0.9 / models,
                "tokens": 400 * second if number == models - 1 else 0,
                "bytes": 1e8 * (1 + number % 9),
                "loads": second,
                "load_s": 0.02,
                "p99_s": 0.001 * (1 + (number + second) % 50),
                "error": None,
                "on": [number % 2],
            }
            for number in range(models)
        ],
    }


def spans(second: int, models: int, devices: int = 1) -> dict[str, Any]:
    """Return a thousand spans in this second, on all devices in turns."""
    return {
        "spans": [
            (
                ("execute", "load")[at % 10 == 0],
                f"model-{at % models:03d}",
                999.0 + second + at / 1000,
                0.001,
                3,
                4,
                2,
                False,
                at // 20 % devices,
            )
            for at in range(1000)
        ]
    }


@asynccontextmanager
async def fake(token: bytes | None = None) -> AsyncIterator[tuple[FakeEvents, str]]:
    async def nothing() -> str:
        return ""

    source = FakeEvents()
    server = HttpServer(nothing, Served(source, None if token is None else lambda: token))
    port = await server.start("127.0.0.1:0")
    try:
        yield source, f"http://127.0.0.1:{port}/"
    finally:
        await server.stop()


def test_a_thousand_models_cost_little(browser: str, record_property: Callable[[str, object], None]) -> None:
    """The first display of a thousand models takes little CPU time of the main thread. So does each update with a thousand spans.

    The unit is the time of a piece of work in the same browser, so the bounds hold for machines of any speed.
    """

    async def visit() -> tuple[float, float, float]:
        async with browsing(browser) as page, fake() as (source, url):
            source.tell("state", state(0, 1000))
            await show(page, url)
            await page.until(f"{ROWS} === 100")  # A page of the table has 100 rows.
            first = before = await page.busy()
            updates = 10
            for second in range(1, updates + 1):
                source.tell("spans", spans(second, 1000))
                source.tell("state", state(second, 1000))
                await page.until("document.querySelector('#total-rate').textContent === '501 k'")
                waiting = sum((number + second) % 7 for number in range(1000))
                await page.until(f"document.querySelector('#total-queued').textContent === '{waiting}'")
            await page.until(f"{PAINTED}.every((share) => share > 0.005)")
            each = (await page.busy() - before) / updates
            before = await page.busy()
            await page.value(TABLES)
            tables = await page.busy() - before
            assert page.errors == []
            return first, each, tables

    first, each, tables = asyncio.run(visit())
    record_property("first_s", first)
    record_property("each_s", each)
    record_property("tables_s", tables)
    assert first < FIRST * tables, f"{first:.3f} s, tables {tables:.3f} s"
    assert each < EACH * tables, f"{each:.3f} s, tables {tables:.3f} s"


def test_each_device_of_a_server_has_a_lane(browser: str) -> None:
    """Each device has a bar and a timeline. Models name the devices of their weights. A runtime that does not answer is shown."""

    async def visit() -> None:
        async with browsing(browser) as page, fake() as (source, url):
            source.tell("state", state(0, 4, device(0, 0), device(1, 0)))
            source.tell("spans", spans(1, 4, 2))
            last = state(1, 4, device(0, 1), {**device(1, 1), "device_s": 0.25})
            source.tell("state", {**last, "findings": FINDINGS})
            await show(page, url)
            titles = "[...document.querySelectorAll('.device h3')].map((one) => one.textContent)"
            await page.until(f"{titles}.some((text) => text.includes('busy 25%'))")
            first, second = await page.value(titles)
            assert await page.value("document.querySelector('#headline').textContent") == "warning: 86% of"
            assert await page.value("document.querySelector('#diagnosis').dataset.severity") == "warning"
            texts = await page.value(
                "[...document.querySelectorAll('#findings li')].map((one) => one.textContent)"
            )
            assert texts == [
                "warning: 86% ofwhy: sizesdo: export 4",
                "note: a spendswhy: hooksdo: mend",
            ]
            assert (
                first
                == "device 0 · L439 GB (50 GB without sharing, 20% saved) of 60 GB for weights · GPU 50 GB of 85 GB in use · busy 90% · host 90 GB"
            )
            assert second.startswith("device 1 · L439 GB")
            for number in (0, 1):
                painted = PAINTED.replace(".device canvas", f".device:nth-child({number + 1}) canvas")
                await page.until(f"{painted}.every((share) => share > 0.005)")
            cell = "document.querySelector('tr[data-model=model-001] .places')"
            assert await page.value(f"[{cell}.hidden, {cell}.textContent]") == [False, "1"]

            source.tell(
                "memory",
                {0: {"scratch": 1, "models": {"model-000": 3e9}, "groups": [[2e9, ["model-000", "x"]]]}},
            )
            source.tell("state", state(1, 4, device(0, 1), device(1, 1)))
            blocks = (
                "[...document.querySelector('.bar').children].map((one) => `${one.className} ${one.title}`)"
            )
            assert await page.until(f"{blocks}.some((one) => one.startsWith('shared')) && {blocks}") == [
                "model pinned model-000, pinned: 3 GB",
                "model model-002: 300 MB",
                "shared shared by model-000, x: 2 GB",
                "moving loading or leaving: 34.7 GB",
                "free free: 20 GB",
                "scratch kept for executions (1 B) and a reserve: 20 GB",
            ]
            colours = "[...document.querySelectorAll('tr[data-model] i')].map((one) => one.dataset.colour + one.dataset.pattern)"
            assert await page.value(f"new Set({colours}).size") == 4

            keys = "document.querySelector('.timeline canvas').dispatchEvent(new KeyboardEvent('keydown', {key: '%s'}))"
            live = "document.querySelector('.timeline [aria-pressed]').ariaPressed"
            await page.value(keys % "+")
            assert await page.value(live) == "false"
            await page.value(keys % "Escape")
            assert await page.value(live) == "true"

            down = {"number": 1, "card": None, "down_since": 1001.5}
            source.tell("state", state(2, 4, device(0, 2), down))
            await page.until(f"{titles}[1].includes('has not answered since')")
            assert await page.value("document.querySelectorAll('.device')[0].dataset.up") == "true"
            assert page.errors == []

    asyncio.run(visit())


def test_a_page_without_figures_says_so_and_tries_again(
    browser: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page without new figures shows a critical finding. It connects again after an HTTP error, and then forgets earlier servers."""

    async def visit() -> None:
        headline = "document.querySelector('#headline').textContent"
        connection = "document.querySelector('#connection')?.dataset.state"
        async with browsing(browser) as page, fake() as (source, url):
            monkeypatch.setattr(routes, "_MAX_WATCHERS", 0)
            await stop_time(page)
            await page.call("Page.navigate", url=url)
            await page.until(f"{connection} === 'lost'")
            monkeypatch.undo()
            await page.until(f"{connection} === 'live'")
            source.tell("state", state(0, 4))
            await page.until(f"{headline} === 'all is well'")
            await page.value("performance.now = () => 7000")
            await page.until(f"{headline}.startsWith('critical: the server sends no figures')")
            assert "no figures" in await page.value("document.querySelector('#spoken').textContent")
            source.tell("state", {**state(1, 4), "findings": FINDINGS})
            await page.until(f"{headline} === 'warning: 86% of'")
            source.tell("state", {**state(2, 4), "findings": FINDINGS[1:]})
            await page.until(f"{headline} === 'note: a spends'")
            source.tell("state", state(0, 2), "w1")
            source.tell("state", state(1, 2), "w1")
            rate = "document.querySelector('#total-rate').textContent"
            await page.until(f"{rate} === '13'")
            source.tell("state", {"t": 1002.0, "up": False, "instance": "", "why": "refused"})
            await page.until(f"{headline} === 'critical: 1 of 2 servers does not answer' && {rate} === '3'")
            source.tell("hello", None)
            source.tell("state", state(0, 2), "w1")
            await page.until(f"{ROWS} === 2 && {headline} === 'all is well'")

    asyncio.run(visit())


def test_the_page_is_used_with_keys_and_heard(browser: str) -> None:
    """Keys are enough to use the page, and a model keeps the focus while the page changes.

    A screen reader announces other findings, but not changed numbers.
    """

    async def visit() -> None:
        async with browsing(browser) as page, fake() as (source, url):
            doors = {"HTTP": "10.0.0.1:8000"}
            source.tell("server", {"name": "n", "version": "1", "started": 990.0, "endpoints": doors})
            source.tell("cold", ["cold-a", "cold-b"])
            source.tell("state", {**state(0, 4), "findings": FINDINGS})
            await show(page, url)
            await page.until(f"{ROWS} === 4")
            await page.value(
                "{ const one = document.querySelector('#filter'); one.value = 'cold'; one.dispatchEvent(new Event('input')); }"
            )
            await page.value("document.querySelector('#models button').focus()")
            source.tell("cold", ["cold-a", "cold-c"])
            source.tell("state", {**state(1, 4), "findings": [{**FINDINGS[0], "evidence": "87% of"}]})
            await page.until("document.querySelector('#headline').textContent === 'warning: 87% of'")
            assert await page.value("document.activeElement.textContent") == "cold-a"
            assert await page.value("document.querySelector('#spoken').textContent") == "warning: 86% of"
            await page.value("document.activeElement.click()")
            await page.until("document.querySelector('#curl') !== null")
            await page.value("document.querySelector('#panel-parts button').click()")
            assert "/v2/models/cold-a/infer" in await page.value("getSelection().toString()")
            escape = "new KeyboardEvent('keydown', {key: 'Escape', bubbles: true})"
            await page.value(f"document.querySelector('#panel').dispatchEvent({escape})")
            assert await page.value("document.activeElement.textContent") == "cold-a"
            assert page.errors == []

    asyncio.run(visit())


@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (390, "dark"), (1280, "dark")])
def test_a_phone_and_a_dark_screen_show_the_whole_page(browser: str, width: int, scheme: str) -> None:
    """The page is not wider than a phone's screen, even with the panel of a model.

    Texts have enough contrast on a light and a dark background.
    """

    async def visit() -> None:
        async with browsing(browser, width, 844, scheme) as page, fake() as (source, url):
            doors = {"HTTP": "10.0.0.1:8000", "gRPC": "10.0.0.1:8001"}
            source.tell("server", {"name": "n", "version": "1", "started": 990.0, "endpoints": doors})
            source.tell("cold", ["cold_" * 20])
            for second in range(2):
                devices = device(0, second), device(1, second)
                source.tell("spans", spans(second, 20, 2))
                source.tell("state", {**state(second, 20, *devices), "findings": FINDINGS})
            await show(page, url)
            await page.until(f"{ROWS} === 20 && {PAINTED}.every((share) => share > 0)")
            await page.value("document.querySelector('#headline').click()")
            assert await page.value(TOKENS) == [False, "", "400"]
            await page.value("document.querySelector('#models button').click()")
            await page.until("document.querySelector('#curl') !== null")
            root, table = "document.documentElement", "document.querySelector('#models').closest('.scroll')"
            for wide in (root, table) if width == 390 else (root,):
                assert await page.value(f"{wide}.scrollWidth - {wide}.clientWidth") == 0
            expression = "getComputedStyle(document.querySelector('#models td'), '::after').content"
            assert (await page.value(expression)).startswith('"pinned, ') == (width == 390)
            heads = await page.value(
                "[...document.querySelectorAll('#columns th')].filter((one) => one.offsetWidth).map((one) => one.textContent)"
            )
            assert {"model", "requests/s", "p99", "errors"} <= set(heads)
            ground, faint = await page.value(SEEN)
            assert (ground < 0.1) == (scheme == "dark")
            assert faint == []
            assert page.errors == []

    asyncio.run(visit())


def test_the_page_sends_commands_with_the_token(browser: str) -> None:
    """Rows are found and sorted, and text from servers is never markup. The page asks for the token only once."""

    async def visit() -> list[tuple[str, str, str]]:
        async with browsing(browser) as page, fake(b"s3cret") as (source, url):
            page.prompted = "s3cret"
            source.tell("state", state(1, 20))
            source.tell("log", {"t": 1001.0, "text": "<b>model-001</b>: ready"})
            await show(page, url)
            await page.until(f"{ROWS} === 20")
            await page.until("document.querySelector('#log li').textContent.includes('<b>model-001</b>')")
            first = "document.querySelector('#models tr').dataset.model"
            source.tell("cold", ["<i>cold", "colder"])
            doors = {"HTTP": "10.0.0.1:8000"}
            source.tell("server", {"name": "n", "version": "1", "started": 990.0, "endpoints": doors})
            show_only = "{ const one = document.querySelector('#filter'); one.value = '%s'; one.dispatchEvent(new Event('input')); }"
            await page.until(f"{{ {show_only % 'cold'} }} {ROWS} === 2")
            assert await page.value(f"{{ {show_only % 'resident'} }} {ROWS}") == 6
            assert await page.value(f"{{ {show_only % 'all'} }} {ROWS}") == 20
            await page.value("document.querySelector('#columns button').click()")
            assert await page.value(first) == "model-000"
            await page.value("document.querySelector('#columns button').click()")
            assert await page.value(first) == "model-019"
            find = "document.querySelector('#find')"
            await page.value(f"{find}.value = '-007'; {find}.dispatchEvent(new Event('input'))")
            assert await page.value(ROWS) == 1
            await page.value("document.querySelector('#models button').click()")
            await page.until("document.querySelector('#history-lines').textContent.includes('<img src=x')")
            text = await page.value("document.querySelector('#panel-parts').textContent")
            assert "requests3 answered" in text
            assert f"answers{ANSWERS}" in text
            assert "<b>slow" in text
            curl = await page.value("document.querySelector('#curl').textContent")
            echoed = shell(curl.partition(" | curl")[0])
            sent = {"name": "it's", "datatype": "FP32", "shape": [1, 2], "data": [0, 0]}
            assert json.loads(echoed) == {"inputs": [sent]}
            assert "10.0.0.1:8000/v2/models/model-007/infer" in curl
            rows = "[...document.querySelectorAll('#latency tr')].map((one) => one.textContent)"
            assert await page.value(rows) == ["to 5 ms3", "more1"]
            values, answer = "document.querySelector('#try textarea')", "document.querySelector('#answer')"
            send = "document.querySelector('#try button').click()"
            await page.value(f"{{ {values}.value = '1, '; {send} }}")
            await page.until(f'{answer}.textContent.startsWith("it\'s: write shape and values as numbers")')
            await page.value(f"{{ {values}.value = '1, 2'; {send} }}")
            await page.until(f"{answer}.textContent.endsWith('\\ny: FP32 [1]\\n3.5')")
            assert source.tried == [{**sent, "data": [1, 2]}]
            await page.value(f"{{ {values}.value = '9007199254740993, 0'; {send} }}")
            await page.until(f"{answer}.textContent === '<b>unexpected shape'")
            assert source.tried[0]["data"] == [9007199254740993, 0]
            for what in ("pin", "evict"):
                await page.value(
                    f"[...document.querySelectorAll('#actions button')].find((one) => one.textContent === '{what}').click()"
                )
                await page.until(
                    f"document.querySelector('#log').textContent.includes('{what} model-007: done')"
                )
            source.tell("state", state(1, 3), "w1")
            await page.until("document.querySelectorAll('.device').length === 2")
            source.tell("gone", None, "w0")
            await page.until("document.querySelectorAll('.device').length === 1")
            assert [error for error in page.errors if "live/try" not in error] == []
            return source.steered

    assert asyncio.run(visit()) == [("w0", "model-007", "pin"), ("w0", "model-007", "evict")]
