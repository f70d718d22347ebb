"""What Triton is told to load and to unload, and what came of it: models go side by side, each one step at a time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Coroutine, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from rsrv.control.reconcile_queue import ReconcileQueue
from rsrv.control.triton import Triton, TritonError
from rsrv.logs import fields
from rsrv_gen.aside import Replaced, unfinished, version_of
from rsrv_gen.plan import LinkMode
from rsrv_gen.update import remove
from rsrv_gen.write import newest, touch

log = logging.getLogger("rsrv.control")


class Loads:
    """Of one repository. One event loop owns it; only `take` is for other threads.

    What a load comes to is told to `queue`, and `stir` set.
    """

    def __init__(
        self, repository: Path, link: LinkMode, triton: Triton, queue: ReconcileQueue, stir: asyncio.Event
    ) -> None:
        self._repository = repository
        self._link: LinkMode = link
        self._triton = triton
        self._queue = queue
        self._stir = stir
        self._tasks: dict[str, asyncio.Task[None]] = {}
        #: Models that are written to, or were and have not been told of yet.
        self._taken: set[str] = set()
        #: Guards who is added to these two.
        self._lock = threading.Lock()
        #: Models that were put and not loaded yet: if that fails, they are taken back.
        self._put: dict[str, Replaced] = {}
        #: Models whose bundles are gone and that are being taken out of the server, and then of the repository.
        self.unloading: set[str] = set()
        #: Models whose last load was for no other reason than a dead stub.
        self.mended: set[str] = set()
        #: Model -> its directory when Triton loaded it last.
        self.served: dict[str, tuple[int, int] | None] = {}
        #: Model -> the time of the newest file that Triton has seen of it, in nanoseconds.
        self.stamps: dict[str, int] = {}

    def __contains__(self, name: str) -> bool:
        """Whether it is being loaded or unloaded."""
        return name in self._tasks

    async def wait(self, names: Iterable[str]) -> None:
        """Until none of them is being loaded or unloaded."""
        while under_way := [self._tasks[name] for name in names if name in self._tasks]:
            await asyncio.wait(under_way)

    def cancel(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    # --- who writes the repository ----------------------------------------------------------------------------

    def take(self, name: str) -> bool:
        """Whether the model may be written to, on any thread; `mend` leaves it alone then, until `release`."""
        with self._lock:
            if name in self._tasks:
                return False
            self._taken.add(name)
            return True

    def release(self) -> None:
        """Nothing is written to any more."""
        self._taken.clear()

    # --- what is begun ----------------------------------------------------------------------------------------

    def load(self, name: str, put: Replaced | None = None, *, anew: bool = False) -> None:
        """Begins to load what is in the repository; nothing of this model is under way. `anew`: though unchanged.

        If that fails, `put` is taken back.
        """
        self._start(name, self._load(name, put, anew=anew))

    def mend(self, name: str) -> bool:
        """Begins to load it anew, unless somebody is about to do something with it."""
        with self._lock:
            free = name not in self._taken and name not in self._tasks
            if free:
                self._start(name, self._load(name, anew=True), mends=True)
        return free

    def unload(self, name: str) -> None:
        """Begins to unload a model whose bundle is gone; nothing of it is under way."""
        self._start(name, self._unload(name))

    async def take_over(self, *, decides: bool) -> None:
        """Ends what a control process before this one had put into the repository, and did not see loaded.

        `decides`: the repository says what is served; else, what Triton has not been told to load is decided when it
        is. Raises TritonError.
        """
        self._put |= await asyncio.to_thread(unfinished, self._repository)
        states = await self._triton.states() if self._put else {}
        for name in self._put:
            wanted = states[name] != "dismissed" if name in states else decides
            if wanted and name not in self._tasks:
                self._start(name, self._settle(name))

    def fail(self, name: str, text: str, *, again: bool = True) -> None:
        """It is not as it should be, and is tried `again` later."""
        failure = self._queue.failed(name, text, self._now(), time.time(), again=again)
        # The same again and again is worth a line now and then.
        if failure.tries & (failure.tries - 1) == 0:
            log.error(
                "%s (attempt %d): %s",
                name,
                failure.tries,
                failure.text,
                extra=fields(model=name, event="failed", attempt=failure.tries),
            )

    # --- what is done -----------------------------------------------------------------------------------------

    async def _load(self, name: str, put: Replaced | None = None, *, anew: bool = False) -> None:
        folder = self._repository / name
        started = self._now()
        if put is not None:
            before, self._put[name] = self._put.get(name), put
            if before is not None:
                await asyncio.to_thread(before.forget)
        try:
            version = await asyncio.to_thread(version_of, folder)
            stamp = partial(touch, folder, self.stamps.get(name, 0)) if anew else partial(newest, folder)
            self.stamps[name] = max(self.stamps.get(name, 0), await asyncio.to_thread(stamp))
            await self._triton.load(name)
        except Exception as error:
            if name in self._put:
                await asyncio.to_thread(self._put[name].undo)
                del self._put[name]
            if not isinstance(error, TritonError | OSError):
                raise
            self.fail(name, f"could not be loaded: {error}")
        else:
            if name in self._put:
                await asyncio.to_thread(self._put.pop(name).forget)
                anew = True
            if anew:
                took = self._now() - started
                said = fields(model=name, event="replaced", seconds=round(took, 3))
                log.info("%s is loaded, after %.1f s", name, took, extra=said)
            self.served[name] = version
            self._queue.done(name)

    async def _settle(self, name: str) -> None:
        """Loads what may or may not have been loaded; if that fails, what is in its place then has to serve."""
        await self._load(name, anew=True)
        with contextlib.suppress(TritonError, OSError):
            if name in self._queue.failures and (await self._triton.states()).get(name) != "ready":
                # The server was started with the version that fails, and has never seen the one before.
                await asyncio.to_thread(touch, self._repository / name, self.stamps[name])
                await self._triton.load(name)

    async def _unload(self, name: str) -> None:
        self.unloading.add(name)
        try:
            await self._triton.unload(name)
            await asyncio.to_thread(remove, self._repository, name, self._link)
        except (TritonError, OSError, ValueError) as error:
            self.fail(name, f"could not be unloaded: {error}")
        else:
            self.served.pop(name, None)
            self._queue.done(name)
            log.info("%s is unloaded: its bundle is gone", name, extra=fields(model=name))
        finally:
            self.unloading.discard(name)

    def _start(self, name: str, work: Coroutine[Any, Any, None], *, mends: bool = False) -> None:
        self._queue.begin(name, self._now(), mends=mends)
        if mends:
            self.mended.add(name)
        else:
            self.mended.discard(name)
        task = self._tasks[name] = asyncio.create_task(self._guarded(name, work), name=f"load {name}")
        task.add_done_callback(lambda _: self._ended(name))

    async def _guarded(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:
            log.exception("%s: unexpected", name, extra=fields(model=name))
            self.fail(name, f"unexpected: {error!r}")

    def _ended(self, name: str) -> None:
        del self._tasks[name]
        self._stir.set()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
