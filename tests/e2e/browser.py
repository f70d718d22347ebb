"""A real browser without a screen, controlled over its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

from aiohttp import ClientSession, ClientWebSocketResponse

from browser_install import Browser
from local_triton import EXEC_BOUND
from tests.waiting import PATIENCE_S, wait_until

_FLAGS = (
    "--headless",
    # The user of the tests may be root, and containers have no user namespaces.
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--remote-debugging-port=0",
)


class Page:
    """The open page. `errors` has the errors that the browser reports. `prompted` is the answer to a question of the page."""

    def __init__(self, socket: ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.errors: list[str] = []
        self.prompted = ""

    async def read(self) -> None:
        """Read the browser's messages until it ends."""
        async for message in self._socket:
            content = json.loads(message.data)
            if "id" in content:
                answer = self._answers.pop(content["id"])
                if not answer.done():
                    answer.set_result(content)
            else:
                await self._happened(content["method"], content["params"])

    async def _happened(self, method: str, params: dict[str, Any]) -> None:
        match method:
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.errors.append(json.dumps(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.errors.append(json.dumps(params["entry"]))
            case "Page.javascriptDialogOpening":
                answer = {"accept": True, "promptText": self.prompted}
                await self._send("Page.handleJavaScriptDialog", answer)

    async def _send(self, method: str, params: dict[str, Any]) -> int:
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        return number

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        answer = self._answers[await self._send(method, params)]
        reply = await asyncio.wait_for(answer, PATIENCE_S)
        assert "error" not in reply, (method, reply)
        result: dict[str, Any] = reply["result"]
        return result

    async def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression. If the value is a promise, return its result."""
        reply = await self.call(
            "Runtime.evaluate",
            expression=expression,
            awaitPromise=True,
            returnByValue=True,
            userGesture=True,
        )
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return reply["result"].get("value")

    async def until(self, expression: str) -> Any:
        """Wait until the expression has a true value, and return it."""
        deadline = asyncio.get_running_loop().time() + PATIENCE_S
        while not (value := await self.value(expression)):
            if asyncio.get_running_loop().time() > deadline:
                text = await self.value("document.body?.innerText")
                raise AssertionError(f"never true: {expression}\n{self.errors}\n{text}")
            await asyncio.sleep(0.02)
        return value

    async def busy(self) -> float:
        """Return for how many seconds the page's main thread has worked so far."""
        metrics = (await self.call("Performance.getMetrics"))["metrics"]
        return float(next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration"))

    async def picture(self, file: Path) -> None:
        """Write a picture of the visible page to a PNG file."""
        reply = await self.call("Page.captureScreenshot", format="png")
        file.write_bytes(base64.b64decode(reply["data"]))


@contextmanager
def running_browser() -> Iterator[str]:
    """Run a browser until the block ends. Yield the URL of its DevTools, where pages are opened."""
    browser = Browser().ensure()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = _start(browser, Path(profile))
        try:
            yield f"http://127.0.0.1:{_port(process, Path(profile))}"
        finally:
            process.kill()
            process.wait()


@asynccontextmanager
async def browsing(
    browser: str, width: int = 1280, height: int = 900, scheme: str = "light"
) -> AsyncIterator[Page]:
    """Open an empty page of a running browser, with a size in pixels, and yield it."""
    async with ClientSession() as session:
        async with session.put(f"{browser}/json/new?about:blank") as answer:
            target = await answer.json()
        async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
            page = Page(socket)
            reading = asyncio.create_task(page.read())
            for domain in ("Page", "Runtime", "Log"):
                await page.call(f"{domain}.enable")
            # The measured times leave out the time that other processes use the processor.
            await page.call("Performance.enable", timeDomain="threadTicks")
            await page.call(
                "Emulation.setDeviceMetricsOverride",
                width=width,
                height=height,
                deviceScaleFactor=1,
                mobile=False,
            )
            preference = {"name": "prefers-color-scheme", "value": scheme}
            await page.call("Emulation.setEmulatedMedia", features=[preference])
            yield page
            reading.cancel()
            with suppress(asyncio.CancelledError):
                await reading
        await session.get(f"{browser}/json/close/{target['id']}")


def _start(browser: Browser, profile: Path) -> subprocess.Popen[bytes]:
    """Start the browser. It also ends when this process ends."""
    bound = [sys.executable, "-I", "-S", str(EXEC_BOUND), str(os.getpid())]
    with (profile / "log").open("wb") as output:
        return subprocess.Popen(
            [*bound, str(browser.program), *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
            env={**os.environ, **browser.environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )


def _port(process: subprocess.Popen[bytes], profile: Path) -> int:
    """Return the port of the browser's DevTools."""
    file = profile / "DevToolsActivePort"
    wait_until(
        lambda: process.poll() is not None or (file.exists() and "\n" in file.read_text()), what="the browser"
    )
    assert process.poll() is None, (profile / "log").read_text()
    return int(file.read_text().splitlines()[0])
