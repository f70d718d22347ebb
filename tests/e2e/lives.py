"""The lifecycle of a real tritonserver's models, run in the test's own process; and bundles that say their version."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np

from rsrv.control.lifecycle import Lifecycle
from rsrv.control.triton import Triton
from rsrv.control.view import Entry
from rsrv.settings import load_settings
from rsrv.wire.socket import Closed
from rsrv.wire.status import read_status
from rsrv_bundle.export import export_bundle
from tests.e2e.calls import Caller
from tests.e2e.harness import RunningTriton

T = TypeVar("T")

#: columns of every tensor here
COLUMNS = 4


def write_version(path: Path, version: int, *, module: int = 0) -> Path:
    """A model whose three outputs say which version answered; `module` is in its code, `version` in its weights."""
    export_bundle(
        lambda params, x: {
            "first": x + params["first"],
            "second": x + params["second"],
            "code": x * 0 + module,
        },
        # Large enough to be shared with the repository by a hard link.
        {
            "first": jnp.float32(version),
            "second": jnp.full(COLUMNS, version, jnp.float32),
            "ballast": np.full(2**18, version, np.float32),
        },
        {"x": np.zeros((1, COLUMNS), np.float32)},
        batch_sizes=(1, 4),
        out_dir=path,
    )
    return path


def version(call: Caller, name: str, x: float = 7.0, rows: int = 1) -> tuple[int, int]:
    """The version and the module of the model that answers, which must be one in all that it answers."""
    answer = call(name, {"x": np.full((rows, COLUMNS), x, np.float32)})
    found = {
        (float(a - x), float(b - x), float(c))
        for a, b, c in zip(*(answer[k].ravel() for k in OUTPUTS), strict=True)
    }
    ((first, second, module),) = found
    assert first == second, "the answer is of two versions"
    return int(first), int(module)


OUTPUTS = ("first", "second", "code")


def place(source: Path, target: Path) -> None:
    """A copy of a bundle, as a careful user makes it: under a hidden name, and then renamed."""
    aside = target.with_name(f".{target.name}")
    shutil.copytree(source, aside)
    if target.exists():
        old = target.with_name(f".{target.name}.old")
        target.rename(old)
        aside.rename(target)
        shutil.rmtree(old)
    else:
        aside.rename(target)


class StatusView:
    """What the runtime says, asked for again and again."""

    def __init__(self, server: RunningTriton) -> None:
        self._server = server
        self.up = False
        self.since = 0.0
        self.entries: Mapping[str, Entry] = {}
        self.changes = 0
        self._names: frozenset[str] = frozenset()
        self._changed = asyncio.Condition()

    def stubs(self) -> Mapping[str, frozenset[int]]:
        return {name: frozenset({1}) for name in self._names}

    async def wait_change(self, seen: int | None = None) -> None:
        seen = self.changes if seen is None else seen
        async with self._changed:
            await self._changed.wait_for(lambda: self.changes != seen)

    async def run(self) -> None:
        while True:
            try:
                status: dict[str, Any] = await asyncio.to_thread(read_status, self._server.pid)
                up, names = True, frozenset({*status["models"], *status["metas"]})
            except (OSError, Closed):
                up, names = False, frozenset()
            if (up, names) != (self.up, self._names):
                if up and not self.up:
                    self.since = asyncio.get_running_loop().time()
                self.up, self._names = up, names
                self.changes += 1
                async with self._changed:
                    self._changed.notify_all()
            await asyncio.sleep(0.05)


class Living:
    """A lifecycle at work, for a test in another thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, lifecycle: Lifecycle) -> None:
        self._loop = loop
        self.lifecycle = lifecycle

    def reload(self, name: str) -> None:
        self._do(self.lifecycle.reload(name))

    @property
    def failures(self) -> dict[str, str]:
        return {name: failure.text for name, failure in dict(self.lifecycle.failures).items()}

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)


@contextmanager
def living(server: RunningTriton, repository: Path) -> Iterator[Living]:
    """Runs the lifecycle that the repository's settings say."""
    settings = load_settings((repository / "rsrv.yaml").read_text())
    ready = threading.Event()
    made: list[tuple[asyncio.Task[None], Living]] = []

    async def run() -> None:
        view = StatusView(server)
        async with Triton.of(server.pid) as triton:
            lifecycle = Lifecycle(settings, repository, view, triton)
            task = asyncio.create_task(_both(view, lifecycle))
            made.append((task, Living(asyncio.get_running_loop(), lifecycle)))
            ready.set()
            await asyncio.wait([task])
        if not task.cancelled():
            task.result()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    ready.wait()
    task, life = made[0]
    try:
        yield life
    finally:
        life._loop.call_soon_threadsafe(task.cancel)
        thread.join()


async def _both(view: StatusView, lifecycle: Lifecycle) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(view.run())
        group.create_task(lifecycle.run())
