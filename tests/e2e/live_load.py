"""A server with more models than its device holds, under load, with its live page.

python -m tests.e2e.live_load docs/images/live-page.png      # makes the picture in docs/monitoring.md
"""

from __future__ import annotations

import asyncio
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from random import Random

import numpy as np

from local_triton import free_ports
from tests.e2e.browser import browsing, running_browser
from tests.e2e.calls import caller
from tests.e2e.harness import EXPLICIT, HURRY, RunningTriton, make_repository, running_triton
from tests.e2e.lives import COLUMNS, write_version
from tests.waiting import wait_until

MODELS = ("captions", "colours", "faces", "fraud", "intent", "ranking", "reviews", "spam", "topics", "voices")
PINNED = "ranking"
#: Bytes of weights that may be on the device. Six models fit.
BUDGET = 6 * (1 << 20) + 4096
CLIENTS = 4


@contextmanager
def live_server(folder: Path) -> Iterator[tuple[RunningTriton, str]]:
    """Start a server with MODELS. Before any request, yield the server and the URL of its live page."""
    (port,) = free_ports(1)
    for number, name in enumerate(MODELS):
        write_version(folder / "bundles" / name, number + 1)
    settings = f"runtime: {{weight_budget_bytes: {BUDGET}}}\nmodels: {{{PINNED}: {{residency: device}}}}\n"
    repository = make_repository(folder, settings=settings)
    flags = [*EXPLICIT, HURRY]
    env = {"RSRV_METRICS__LISTEN": f"127.0.0.1:{port}"}
    log, expected = folder / "server.log", ["weights_thrash"]
    with running_triton(repository, log, extra_args=flags, env=env, expected=expected) as server:
        wait_until(lambda: _listens(port), what="the live page")
        yield server, f"http://127.0.0.1:{port}/"


def _listens(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def load(server: RunningTriton, *, pause: float = 0.005) -> Iterator[None]:
    """Send requests for all models until the block ends, most of them for the first model.

    A client waits `pause` seconds between requests.
    """
    stop = threading.Event()

    def ask(seed: int) -> None:
        random = Random(seed)
        with caller(server) as call:
            while not stop.wait(pause):
                name = random.choices(MODELS, [1 / (1 + rank) for rank in range(len(MODELS))])[0]
                call(name, {"x": np.ones((random.randint(1, 4), COLUMNS), np.float32)})

    with ThreadPoolExecutor(CLIENTS) as pool:
        asking = [pool.submit(ask, seed) for seed in range(CLIENTS)]
        try:
            yield
        finally:
            stop.set()
        for future in asking:
            future.result()


async def _take(browser: str, url: str, file: Path) -> None:
    """Take a picture of the page after half a minute."""
    async with browsing(browser, 1280, 800) as page:
        await page.call("Page.navigate", url=url)
        await page.until("document.querySelectorAll('#models tr').length > 0")
        await asyncio.sleep(32)
        name = MODELS[0]
        await page.value(f"document.querySelector('tr[data-model={name}] button').click()")
        await page.until("document.querySelectorAll('#history-lines li').length > 3")
        await page.picture(file)


def main(file: Path) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="t-") as folder,
        live_server(Path(folder)) as (server, url),
        load(server),
        running_browser() as browser,
    ):
        asyncio.run(_take(browser, url, file))
    print(file)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
