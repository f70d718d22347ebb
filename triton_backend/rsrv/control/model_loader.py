"""Loads and unloads in Triton. Different models load concurrently. Each model has only one load or unload at a time."""

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

from rsrv.control.bundle_states import BundleEvent, BundleStates
from rsrv.control.triton import Triton, TritonError
from rsrv.logs import fields
from rsrv_gen.plan import LinkMode
from rsrv_gen.staging import Replaced, unfinished, version_of
from rsrv_gen.update import remove
from rsrv_gen.write import newest, touch

log = logging.getLogger(__name__)


class ModelLoader:
    """The loads and unloads of one repository. One event loop owns it, except that any thread may call `reserve`.

    The outcome of each load or unload is applied to `states` as an event. After that, `ended` is set.
    """

    def __init__(
        self, repository: Path, link: LinkMode, triton: Triton, states: BundleStates, ended: asyncio.Event
    ) -> None:
        self._repository = repository
        self._link: LinkMode = link
        self._triton = triton
        self._states = states
        self._ended = ended
        self._tasks: dict[str, asyncio.Task[None]] = {}
        #: Models that rsrv-gen is writing, and written models whose load has not begun.
        self._reserved: set[str] = set()
        #: Guards additions to `_tasks` and `_reserved`.
        self._lock = threading.Lock()
        #: Previous versions of models that were written and are not loaded yet. If the load fails, the previous version is
        #: restored.
        self._replaced: dict[str, Replaced] = {}
        #: The version of each model's directory at Triton's last load.
        self.served: dict[str, tuple[int, int] | None] = {}
        #: For each model, the time of its newest file at the latest load in Triton, in nanoseconds.
        self.stamps: dict[str, int] = {}

    async def wait(self, names: Iterable[str]) -> None:
        """Wait until none of the models is being loaded or unloaded."""
        while under_way := [self._tasks[name] for name in names if name in self._tasks]:
            await asyncio.wait(under_way)

    def cancel(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    # --- reservations for writing the repository --------------------------------------------------------------

    def reserve(self, name: str) -> bool:
        """Reserve the model for writing until `release`. Return False if it is being loaded or unloaded. Thread-safe."""
        with self._lock:
            if name in self._tasks:
                return False
            self._reserved.add(name)
            return True

    def release(self) -> None:
        """End all reservations."""
        self._reserved.clear()

    # --- starts of loads and unloads --------------------------------------------------------------------------

    def load(self, name: str, replaced: Replaced | None = None, *, unchanged: bool = False) -> None:
        """Begin to load a model that is neither loading nor unloading. If the load fails, restore the version `replaced`.

        If `unchanged` is True, Triton loads the model even if its files have not changed since the last load.
        """
        self._start(name, BundleEvent.LOAD, self._load(name, replaced, unchanged=unchanged))

    def reload(self, name: str) -> bool:
        """Begin to load a model whose stub is dead. Return False if it is reserved, or is being loaded or unloaded."""
        with self._lock:
            free = name not in self._reserved and name not in self._tasks
            if free:
                self._start(name, BundleEvent.STUB_DIED, self._load(name, unchanged=True))
        return free

    def unload(self, name: str) -> None:
        """Begin to unload a model whose bundle is gone. The model must not be loading or unloading."""
        self._start(name, BundleEvent.UNLOAD, self._unload(name))

    async def resume(self, *, load_unknown: bool) -> None:
        """Load the models that an earlier control process wrote, but whose loads it did not see end. Raises TritonError.

        If `load_unknown` is True, also load models that Triton was never told to load.
        """
        self._replaced |= await asyncio.to_thread(unfinished, self._repository)
        states = await self._triton.states() if self._replaced else {}
        for name in self._replaced:
            load = states[name] != "dismissed" if name in states else load_unknown
            if load and name not in self._tasks:
                self._start(name, BundleEvent.LOAD, self._load(name, unchanged=True, resumed=True))

    def fail(self, name: str, text: str, *, retry: bool = True) -> None:
        """Record and log why the model differs from its bundle. If `retry` is False, the operation is not retried."""
        failure = self._states.fail(name, text, self._now(), time.time(), retry=retry)
        # Log the first, second, fourth, eighth, ... attempt at the same operation.
        if failure.tries & (failure.tries - 1) == 0:
            log.error(
                "%s failed (attempt %d): %s",
                name,
                failure.tries,
                failure.text,
                extra=fields(model=name, event="failed", attempt=failure.tries),
            )

    # --- tasks ------------------------------------------------------------------------------------------------

    async def _load(
        self, name: str, replaced: Replaced | None = None, *, unchanged: bool = False, resumed: bool = False
    ) -> None:
        """Load the model. If `resumed` is True, an earlier control process wrote it, and Triton may have loaded it already."""
        folder = self._repository / name
        started = self._now()
        if replaced is not None:
            before, self._replaced[name] = self._replaced.get(name), replaced
            if before is not None:
                await asyncio.to_thread(before.forget)
        try:
            version = await asyncio.to_thread(version_of, folder)
            stamp = partial(touch, folder, self.stamps.get(name, 0)) if unchanged else partial(newest, folder)
            self.stamps[name] = max(self.stamps.get(name, 0), await asyncio.to_thread(stamp))
            await self._triton.load(name)
        except Exception as error:
            if name in self._replaced:
                await asyncio.to_thread(self._replaced[name].undo)
                del self._replaced[name]
            if not isinstance(error, TritonError | OSError):
                raise
            if resumed:
                await self._load_restored(name)
            self.fail(name, str(error))
        else:
            if name in self._replaced:
                await asyncio.to_thread(self._replaced.pop(name).forget)
                unchanged = True
            if unchanged:
                took = self._now() - started
                event_fields = fields(model=name, event="replaced", seconds=round(took, 3))
                log.info("%s was loaded in %.1f s", name, took, extra=event_fields)
            self.served[name] = version
            self._states.apply(name, BundleEvent.LOADED, self._now())

    async def _load_restored(self, name: str) -> None:
        """If no version serves, load the restored one. Triton may have been started while the failed version was on disk."""
        with contextlib.suppress(TritonError, OSError):
            if (await self._triton.states()).get(name) != "ready":
                await asyncio.to_thread(touch, self._repository / name, self.stamps[name])
                await self._triton.load(name)

    async def _unload(self, name: str) -> None:
        try:
            await self._triton.unload(name)
            await asyncio.to_thread(remove, self._repository, name, self._link)
        except (TritonError, OSError, ValueError) as error:
            self.fail(name, f"the model could not be unloaded: {error}")
        else:
            self.served.pop(name, None)
            self._states.apply(name, BundleEvent.UNLOADED, self._now())
            log.info("%s was unloaded, because its bundle was removed", name, extra=fields(model=name))

    def _start(self, name: str, event: BundleEvent, work: Coroutine[Any, Any, None]) -> None:
        try:
            self._states.conclude(name, event, self._now())
        except Exception:
            work.close()
            raise
        self._tasks[name] = asyncio.create_task(self._finish(name, work), name=f"load {name}")

    async def _finish(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:
            log.exception("%s: unexpected error", name, extra=fields(model=name))
            self.fail(name, f"unexpected error: {error!r}")
        finally:
            del self._tasks[name]
            self._ended.set()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
