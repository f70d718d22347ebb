"""Supervision of a node's processes: restarts with pauses, and an orderly end."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from rsrv.serve.child_process import Process
from rsrv.serve.plan import ChildSpec

#: seconds of life after which earlier restarts no longer count
STABLE_S = 60.0
#: longest pause, seconds
_LONGEST = 30.0


class Restarts:
    """Restarts of one process.

    Args:
        most: restarts in a row after which the process is given up; 0: no limit.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        #: in a row
        self.count = 0

    def ended(self, lived_s: float) -> float | None:
        """Return the seconds until the restart: 1, 2, 4, and so on, at most 30; None: its restarts are used up."""
        if lived_s >= STABLE_S:
            self.count = 0
        self.count += 1
        if self._most and self.count > self._most:
            return None
        return float(min(2.0 ** min(self.count - 1, 10), _LONGEST))


log = logging.getLogger("rsrv.node")

#: seconds after a child's drain time until it is killed
_GRACE = 5.0


class RestartsExhausted(Exception):
    """A process has used up its restarts; the message names it."""


@dataclass(frozen=True, slots=True)
class StopSignals:
    """Events that stop the node, set by signals."""

    #: stop; requests in flight have the configured time
    end: asyncio.Event
    #: stop at once
    hurry: asyncio.Event

    @classmethod
    def none(cls) -> StopSignals:
        return cls(asyncio.Event(), asyncio.Event())

    def once_more(self) -> None:
        """Handle a signal: the first one stops the node, the second one stops it at once."""
        (self.hurry if self.end.is_set() else self.end).set()


@dataclass(frozen=True, slots=True)
class RestartReason:
    """Reason to kill a running child and start it again."""

    reason: str
    #: the child did not fail, so this is not a failed life
    works: bool = False


async def _content(_: ChildSpec) -> RestartReason:
    await asyncio.Event().wait()
    raise AssertionError


async def _at_once(_: ChildSpec) -> None:
    return


@dataclass(frozen=True, slots=True)
class SupervisorHooks:
    """Effects of supervising: the log, the clock and callbacks."""

    #: writes the children's lines
    write: Callable[[bytes], None]
    #: called at each start, with the pid
    started: Callable[[ChildSpec, int], None]
    #: waits for a number of seconds
    rest: Callable[[float], Awaitable[None]] = asyncio.sleep
    #: seconds for a child's own children to end after it
    follow_s: float = 5.0
    #: returns a reason to restart a running child
    watch: Callable[[ChildSpec], Awaitable[RestartReason]] = _content
    #: called before a child is stopped; returns when that may happen
    leaves: Callable[[ChildSpec], Awaitable[None]] = _at_once


async def supervise(
    workers: Sequence[ChildSpec],
    gateway: ChildSpec | None,
    hooks: SupervisorHooks,
    orders: StopSignals,
    restarts: Callable[[], Restarts],
) -> int:
    """Run all children until a signal, or until one has used up its restarts. Return the node's exit status.

    The gateway starts after the workers and ends before them, so that it can deliver its requests. At the end
    no child and none of their children is left.
    """
    servers = [ChildSupervisor(child, hooks, restarts()) for child in workers]
    front = None if gateway is None else ChildSupervisor(gateway, hooks, restarts())
    running = [asyncio.ensure_future(one.run()) for one in (*servers, front) if one is not None]
    ending = asyncio.ensure_future(orders.end.wait())
    status = 0
    try:
        await asyncio.wait([ending, *running], return_when=asyncio.FIRST_COMPLETED)
        if not ending.done():
            status = 1
        if front is not None:
            await front.end(orders.hurry)
        await asyncio.gather(*(server.end(orders.hurry) for server in servers))
        for end in await asyncio.gather(*running, return_exceptions=True):
            if isinstance(end, RestartsExhausted):
                log.error("%s; the node ends", end)
            elif isinstance(end, BaseException):
                raise end
    finally:
        ending.cancel()
    return status


class ChildSupervisor:
    """Starts one child repeatedly."""

    def __init__(self, child: ChildSpec, hooks: SupervisorHooks, restarts: Restarts) -> None:
        self._child = child
        self._hooks = hooks
        self._restarts = restarts
        self._process: Process | None = None
        self._enough = asyncio.Event()
        self._done = asyncio.Event()

    async def run(self) -> None:
        """Run until `end`. Raises RestartsExhausted."""
        try:
            while not self._enough.is_set():
                lived, said, failed = await self._live()
                if self._enough.is_set():
                    return
                if not failed:
                    continue
                pause = self._restarts.ended(lived)
                if pause is None:
                    raise RestartsExhausted(
                        f"{self._child.name} {said}, and its {self._restarts.count - 1} restarts are used up"
                    )
                log.error(
                    "%s %s after %.1f s; starting it again in %g s", self._child.name, said, lived, pause
                )
                await _first(self._hooks.rest(pause), self._enough.wait())
        finally:
            self._done.set()

    async def end(self, hurry: asyncio.Event) -> None:
        """End the child, within its own time unless `hurry` is set, and wait until none of its processes is left."""
        self._enough.set()
        process = self._process
        if process is not None:
            await _first(self._hooks.leaves(self._child), process.over(), hurry.wait())
            process.send(signal.SIGTERM)
            patience = self._child.drain_s + _GRACE
            await _first(process.over(), hurry.wait(), asyncio.sleep(patience))
            if self._process is process and not self._done.is_set():
                process.send(signal.SIGKILL)
        await self._done.wait()

    async def _live(self) -> tuple[float, str, bool]:
        """Run the child once; return its life in seconds, the words for its end, and true for a failure."""
        clock = asyncio.get_running_loop().time
        born = clock()
        try:
            process = self._process = Process.start(self._child, self._hooks.write)
        except OSError as error:
            return 0.0, f"cannot be started: {error}", True
        self._hooks.started(self._child, process.pid)
        restart = await self._watched(process)
        await process.over()
        lived = clock() - born
        status, killed = await process.bury(self._hooks.follow_s)
        self._process = None
        if killed:
            log.warning(
                "%s left processes, which were killed: %s", self._child.name, ", ".join(map(str, killed))
            )
        said = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        if restart is not None:
            said = f"{restart.reason} and {said}"
        if self._enough.is_set():
            log.info("%s %s", self._child.name, said)
        return lived, said, restart is None or not restart.works

    async def _watched(self, process: Process) -> RestartReason | None:
        """Wait for the end of the child; return the reason if it was restarted on purpose."""
        watch = asyncio.ensure_future(self._hooks.watch(self._child))
        await _first(process.over(), asyncio.shield(watch))
        if not watch.done():
            watch.cancel()
            return None
        restart = watch.result()
        if restart.works:
            log.info("%s %s: it is started again", self._child.name, restart.reason)
        process.send(signal.SIGKILL)
        return restart


async def _first(*waits: Awaitable[object]) -> None:
    """Return when one of these is done."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
