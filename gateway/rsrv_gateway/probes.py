"""What is seen of each worker: looked at every probe_s, and at once when traffic says that it failed."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Protocol
from weakref import WeakValueDictionary

from rsrv.placement.contract import Act, Worker, WorkerView
from rsrv_gateway.contacts import Control

log = logging.getLogger("rsrv.gateway")

#: seconds between the looks at a worker that traffic says has failed, however often it says so
_LEAST_PAUSE = 0.05

DEAD = WorkerView(alive=False)


class Prober(Protocol):
    """Speaks with one worker. `look` and `act` may be under way at the same time."""

    async def look(self) -> WorkerView:
        """What it says now; DEAD when it does not answer within probe_timeout_s. Never raises."""

    async def act(self, act: Act, model: str) -> None:
        """Have its control service do this. Raises ActError."""

    async def metrics(self) -> str | None:
        """What its control service has for Prometheus; None: nothing in time. Never raises."""

    def control(self) -> Control | None:
        """Its control service as it is reached now; None: none is known."""

    async def close(self) -> None: ...


class ActError(Exception):
    """A worker did not do what it was asked for; the message says why."""


class Probes:
    """Belongs to one event loop. `seen` is called when a worker, or what it serves, comes or goes."""

    def __init__(self, make: Callable[[Worker], Prober], pause: float, seen: Callable[[], None]) -> None:
        self._make = make
        self._pause = pause
        self._seen = seen
        self._watches: dict[str, _Watch] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def watch(self, workers: Mapping[str, Worker]) -> None:
        """Look at these from now on, and at no others."""
        for name in [name for name, watch in self._watches.items() if workers.get(name) != watch.worker]:
            task = asyncio.create_task(self._watches.pop(name).stop())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        for name, worker in workers.items():
            if name not in self._watches:
                self._watches[name] = _Watch(worker, self._make(worker), self._pause, self._seen)

    def workers(self) -> Mapping[str, Worker]:
        """Those that are watched, by name."""
        return {name: watch.worker for name, watch in sorted(self._watches.items())}

    def views(self) -> Mapping[str, WorkerView]:
        """Of those that are watched, by name; one that has not been looked at yet is dead."""
        return {name: watch.view for name, watch in sorted(self._watches.items())}

    def failed(self, worker: str) -> None:
        """Traffic says so: look at it now. Without effect if there is none by that name."""
        if worker in self._watches:
            self._watches[worker].hurry()

    async def look(self, workers: Iterable[str] | None = None) -> None:
        """Returns when each of them, or all, has been looked at from now on."""
        names = self._watches.keys() if workers is None else workers
        await asyncio.gather(*(self._watches[name].looked() for name in list(names) if name in self._watches))

    async def act(self, act: Act, worker: str, model: str) -> None:
        """Raises ActError, also when there is no such worker."""
        watch = self._watches.get(worker)
        if watch is None:
            raise ActError("it is gone")
        await watch.prober.act(act, model)

    async def metrics(self, worker: str) -> str | None:
        """As `Prober`'s; None also when there is no such worker."""
        watch = self._watches.get(worker)
        return None if watch is None else await watch.prober.metrics()

    def control(self, worker: str) -> Control | None:
        """As `Prober`'s; None also when there is no such worker."""
        watch = self._watches.get(worker)
        return None if watch is None else watch.prober.control()

    async def close(self) -> None:
        self.watch({})
        await asyncio.gather(*self._closing)


class _Watch:
    """One worker, which is looked at until `stop`."""

    def __init__(self, worker: Worker, prober: Prober, pause: float, seen: Callable[[], None]) -> None:
        self.worker = worker
        self.prober = prober
        self.view = DEAD
        self._pause = pause
        self._seen = seen
        self._hurried = asyncio.Event()
        self._waiting: list[asyncio.Future[None]] = []
        self._task = asyncio.create_task(self._run(), name=f"probe {worker.name}")

    def hurry(self) -> None:
        """A look that is under way may have seen what was before: there is another after it."""
        self._hurried.set()

    async def looked(self) -> None:
        """Returns after the next look that begins from now on, or when there will be none."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self.hurry()
        await future

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        self._release(self._waiting)
        await self.prober.close()

    async def _run(self) -> None:
        while True:
            self._hurried.clear()
            waiting, self._waiting = self._waiting, []
            try:
                self._take(await self.prober.look())
            finally:
                self._release(waiting)
            await asyncio.sleep(min(_LEAST_PAUSE, self._pause))
            try:
                async with asyncio.timeout(self._pause - _LEAST_PAUSE):
                    await self._hurried.wait()
            except TimeoutError:
                pass

    def _take(self, view: WorkerView) -> None:
        before, self.view = self.view, view
        if view.alive != before.alive:
            log.log(
                logging.INFO if view.alive else logging.WARNING,
                "worker %s %s",
                self.worker.name,
                "answers" if view.alive else "does not answer",
            )
        if (view.alive, view.ready) != (before.alive, before.ready):
            self._seen()

    @staticmethod
    def _release(waiting: list[asyncio.Future[None]]) -> None:
        for future in waiting:
            if not future.done():
                future.set_result(None)
        waiting.clear()


#: does something at a worker; raises ActError
Do = Callable[[Act, str, str], Awaitable[None]]


class Errands:
    """Has steps done in the background: those of one worker in order, and none twice while it waits or is under way."""

    def __init__(self, do: Do) -> None:
        self._do = do
        self._pending: set[tuple[Act, str, str]] = set()
        #: by worker, as long as something waits or is under way
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, act: Act, worker: str, model: str) -> None:
        errand = act, worker, model
        if errand in self._pending:
            return
        self._pending.add(errand)
        task = asyncio.create_task(self._run(errand), name=f"{act.value} {model} at {worker}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, errand: tuple[Act, str, str]) -> None:
        act, worker, model = errand
        try:
            async with self._locks.setdefault(worker, asyncio.Lock()):
                await self._do(act, worker, model)
        except ActError as error:
            log.warning("worker %s did not %s %s: %s", worker, act.value, model, error)
        finally:
            self._pending.discard(errand)

    async def close(self) -> None:
        """Those that wait are not done."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
