"""Supervision of the server: restarts with pauses, and an orderly end."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from rsrv.serve.child_process import Process
from rsrv.serve.plan import ServerPlan

log = logging.getLogger("rsrv.serve")

#: restarts in a row after which the server is given up
MAX_RESTARTS = 10
#: seconds of life after which earlier restarts no longer count
STABLE_S = 60.0
#: longest pause, seconds
_LONGEST = 30.0
#: seconds after the drain time until the server is killed
_GRACE = 5.0


class Restarts:
    """Restarts of the server."""

    def __init__(self) -> None:
        #: in a row
        self.count = 0

    def ended(self, lived_s: float) -> float | None:
        """Return the seconds until the restart: 1, 2, 4, and so on, at most 30; None: its restarts are used up."""
        if lived_s >= STABLE_S:
            self.count = 0
        self.count += 1
        if self.count > MAX_RESTARTS:
            return None
        return float(min(2.0 ** (self.count - 1), _LONGEST))


@dataclass(frozen=True, slots=True)
class StopSignals:
    """Events that stop `rsrv serve`, set by signals."""

    #: stop; requests in flight have the configured time
    end: asyncio.Event = field(default_factory=asyncio.Event)
    #: stop at once
    hurry: asyncio.Event = field(default_factory=asyncio.Event)

    def once_more(self) -> None:
        """Handle a signal: the first one stops the server, the second one stops it at once."""
        (self.hurry if self.end.is_set() else self.end).set()


@dataclass(frozen=True, slots=True)
class RestartReason:
    """Reason to kill the running server and start it again."""

    reason: str
    #: the server did not fail, so this is not a failed life
    works: bool = False


@dataclass(frozen=True, slots=True)
class SupervisorHooks:
    """Effects of supervising: the log, the clock and callbacks."""

    #: writes the server's lines
    write: Callable[[bytes], None]
    #: called at each start, with the pid
    started: Callable[[int], None]
    #: returns a reason to restart the running server
    watch: Callable[[], Awaitable[RestartReason]]
    #: waits for a number of seconds
    rest: Callable[[float], Awaitable[None]] = asyncio.sleep
    #: seconds for the server's own children to end after it
    follow_s: float = 5.0


async def supervise(server: ServerPlan, hooks: SupervisorHooks, orders: StopSignals) -> int:
    """Run the server until a signal, or until its restarts are used up. Return the exit status of `rsrv serve`.

    At the end the server and all of its children have ended.
    """
    restarts = Restarts()
    while True:
        lived, said, failed = await _live(server, hooks, orders)
        if orders.end.is_set():
            log.info("tritonserver %s", said)
            return 0
        if not failed:
            continue
        pause = restarts.ended(lived)
        if pause is None:
            log.error("tritonserver %s, and its %d restarts are used up", said, MAX_RESTARTS)
            return 1
        log.error("tritonserver %s after %.1f s; starting it again in %g s", said, lived, pause)
        await _first(hooks.rest(pause), orders.end.wait())
        if orders.end.is_set():
            return 0


async def _live(server: ServerPlan, hooks: SupervisorHooks, orders: StopSignals) -> tuple[float, str, bool]:
    """Run the server once; return its life in seconds, the words for its end, and true for a failure."""
    clock = asyncio.get_running_loop().time
    born = clock()
    try:
        process = Process.start(server, hooks.write)
    except OSError as error:
        return 0.0, f"cannot be started: {error}", True
    hooks.started(process.pid)
    watch = asyncio.ensure_future(hooks.watch())
    await _first(process.over(), asyncio.shield(watch), orders.end.wait())
    restart = None
    if orders.end.is_set():
        process.send(signal.SIGTERM)
        try:
            async with asyncio.timeout(server.drain_s + _GRACE):
                await _first(process.over(), orders.hurry.wait())
        except TimeoutError:
            # As 24.10 where the machine is starved: it waits for ever for stubs that it takes for dead.
            log.warning("tritonserver has not ended %g s after its drain time: it is killed", _GRACE)
        process.send(signal.SIGKILL)
    elif watch.done():
        restart = watch.result()
        if restart.works:
            log.info("tritonserver %s: it is started again", restart.reason)
        process.send(signal.SIGKILL)
    watch.cancel()
    await process.over()
    lived = clock() - born
    status, killed = await process.bury(hooks.follow_s)
    if killed:
        log.warning("tritonserver left processes, which were killed: %s", ", ".join(map(str, killed)))
    said = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
    if restart is None:
        return lived, said, True
    return lived, f"{restart.reason} and {said}", not restart.works


async def _first(*waits: Awaitable[object]) -> None:
    """Return when one of these is done."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
