"""Keeps a node's processes running, and ends them in their order."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from rsrv.serve.plan import Child
from rsrv.serve.restarts import Restarts
from rsrv.serve.spawn import Process

log = logging.getLogger("rsrv.node")

#: seconds beyond its own time for a child to end
_GRACE = 5.0


class GaveUp(Exception):
    """A process has used up its restarts; the message says which."""


@dataclass(frozen=True, slots=True)
class Orders:
    """What the operator wants, as signals say it."""

    #: to end: who is under way is given the time that the settings say
    end: asyncio.Event
    #: to end at once
    hurry: asyncio.Event

    @classmethod
    def none(cls) -> Orders:
        return cls(asyncio.Event(), asyncio.Event())

    def once_more(self) -> None:
        """A signal to end: the second one is not to be kept waiting."""
        (self.hurry if self.end.is_set() else self.end).set()


@dataclass(frozen=True, slots=True)
class Anew:
    """Why a child that runs is to be killed, and started again."""

    reason: str
    #: it did what it should; otherwise it counts as one that failed
    works: bool = False


async def _content(_: Child) -> Anew:
    await asyncio.Event().wait()
    raise AssertionError


async def _at_once(_: Child) -> None:
    return


@dataclass(frozen=True, slots=True)
class House:
    """What supervising needs of the world."""

    #: where the children's lines go
    write: Callable[[bytes], None]
    #: told of each start, with the pid
    started: Callable[[Child, int], None]
    #: waits for so many seconds
    rest: Callable[[float], Awaitable[None]] = asyncio.sleep
    #: seconds for what a child has started to follow it
    follow_s: float = 5.0
    #: looks at a child that runs, and returns when it is to be started again
    watch: Callable[[Child], Awaitable[Anew]] = _content
    #: told of a child before it is told to end; returns when it may be
    leaves: Callable[[Child], Awaitable[None]] = _at_once


async def supervise(
    workers: Sequence[Child],
    gateway: Child | None,
    house: House,
    orders: Orders,
    restarts: Callable[[], Restarts],
) -> int:
    """Runs them all until `orders.end`, or until one has used up its restarts. Returns the node's exit status.

    The gateway starts after the workers and ends before them: it has somewhere to send what it has taken. When this
    returns, nothing that was started is left.
    """
    keepers = [Keeper(child, house, restarts()) for child in workers]
    door = None if gateway is None else Keeper(gateway, house, restarts())
    everybody = [*keepers, *([] if door is None else [door])]
    running = [asyncio.ensure_future(keeper.run()) for keeper in everybody]
    ending = asyncio.ensure_future(orders.end.wait())
    status = 0
    try:
        await asyncio.wait([ending, *running], return_when=asyncio.FIRST_COMPLETED)
        if not ending.done():
            status = 1
        if door is not None:
            await door.end(orders.hurry)
        await asyncio.gather(*(keeper.end(orders.hurry) for keeper in keepers))
        for end in await asyncio.gather(*running, return_exceptions=True):
            if isinstance(end, GaveUp):
                log.error("%s; the node ends", end)
            elif isinstance(end, BaseException):
                raise end
    finally:
        ending.cancel()
    return status


class Keeper:
    """Starts one child again and again."""

    def __init__(self, child: Child, house: House, restarts: Restarts) -> None:
        self._child = child
        self._house = house
        self._restarts = restarts
        self._process: Process | None = None
        self._enough = asyncio.Event()
        self._done = asyncio.Event()

    async def run(self) -> None:
        """Until `end`. Raises GaveUp."""
        try:
            while not self._enough.is_set():
                lived, said, failed = await self._live()
                if self._enough.is_set():
                    return
                if not failed:
                    continue
                pause = self._restarts.ended(lived)
                if pause is None:
                    raise GaveUp(
                        f"{self._child.name} {said}, and its {self._restarts.count - 1} restarts are used up"
                    )
                log.error(
                    "%s %s after %.1f s; starting it again in %g s", self._child.name, said, lived, pause
                )
                await _first(self._house.rest(pause), self._enough.wait())
        finally:
            self._done.set()

    async def end(self, hurry: asyncio.Event) -> None:
        """Has the child end, in its own time unless there is hurry, and waits until nothing is left of it."""
        self._enough.set()
        process = self._process
        if process is not None:
            await _first(self._house.leaves(self._child), process.over(), hurry.wait())
            process.send(signal.SIGTERM)
            patience = self._child.drain_s + _GRACE
            await _first(process.over(), hurry.wait(), asyncio.sleep(patience))
            if self._process is process and not self._done.is_set():
                process.send(signal.SIGKILL)
        await self._done.wait()

    async def _live(self) -> tuple[float, str, bool]:
        """One life: how long it was, seconds, how it ended, and whether that was a failure."""
        clock = asyncio.get_running_loop().time
        born = clock()
        try:
            process = self._process = Process.start(self._child, self._house.write)
        except OSError as error:
            return 0.0, f"cannot be started: {error}", True
        self._house.started(self._child, process.pid)
        anew = await self._watched(process)
        await process.over()
        lived = clock() - born
        status, killed = await process.bury(self._house.follow_s)
        self._process = None
        if killed:
            log.warning(
                "%s left processes, which were killed: %s", self._child.name, ", ".join(map(str, killed))
            )
        said = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        if anew is not None:
            said = f"{anew.reason} and {said}"
        if self._enough.is_set():
            log.info("%s %s", self._child.name, said)
        return lived, said, anew is None or not anew.works

    async def _watched(self, process: Process) -> Anew | None:
        """Until it has ended by itself, or was made to: why."""
        watch = asyncio.ensure_future(self._house.watch(self._child))
        await _first(process.over(), asyncio.shield(watch))
        if not watch.done():
            watch.cancel()
            return None
        anew = watch.result()
        if anew.works:
            log.info("%s %s: it is started again", self._child.name, anew.reason)
        process.send(signal.SIGKILL)
        return anew


async def _first(*waits: Awaitable[object]) -> None:
    """Returns when one of these does."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
