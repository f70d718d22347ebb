"""Supervision of the server: restarts with pauses, and an orderly end."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

from rsrv.serve.child_process import Process
from rsrv.serve.plan import ServerPlan

log = logging.getLogger(__name__)

#: After this many restarts in a row, give up the server.
MAX_RESTARTS = 10
#: If a server has lived for this many seconds, its earlier restarts are forgotten.
STABLE_S = 60.0
#: Longest pause before a restart, in seconds.
_LONGEST = 30.0
#: Seconds from the end of the drain time until the server is killed.
_GRACE = 5.0
#: Seconds for the server to end by itself after its models are unloaded. It checks its connections each second.
IDLE_S = 2.5


class Restarts:
    """Counts restarts, and decides when the next one happens."""

    def __init__(self) -> None:
        #: Number of restarts in a row.
        self.count = 0

    def ended(self, lived_s: float) -> float | None:
        """Return the seconds until the restart: 1, 2, 4, and so on, at most 30. Return None if no restarts are left."""
        if lived_s >= STABLE_S:
            self.count = 0
        self.count += 1
        if self.count > MAX_RESTARTS:
            return None
        return float(min(2.0 ** (self.count - 1), _LONGEST))


@dataclass(frozen=True, slots=True)
class StopSignals:
    """Events that stop `rsrv serve`, set by signals."""

    #: Set to stop in order. Requests in flight may take the configured time.
    end: asyncio.Event = field(default_factory=asyncio.Event)
    #: Set to stop at once.
    hurry: asyncio.Event = field(default_factory=asyncio.Event)

    def once_more(self) -> None:
        """Handle a signal: the first one stops the server, the second one stops it at once."""
        (self.hurry if self.end.is_set() else self.end).set()


@dataclass(frozen=True, slots=True)
class RestartReason:
    """Reason to kill the running server and start it again."""

    reason: str
    #: True if the server did not fail, so that its end does not count as a failure.
    works: bool = False


async def _only_terminate(terminate: Callable[[], None]) -> bool:
    terminate()
    return False


@dataclass(frozen=True, slots=True)
class SupervisorHooks:
    """Effects that the supervisor needs: the log, the clock and callbacks."""

    #: Writes whole lines of the server's log.
    write: Callable[[bytes], None]
    #: Called at each start, with the pid.
    started: Callable[[int], None]
    #: Waits for a reason to restart the running server, and returns it.
    watch: Callable[[], Awaitable[RestartReason]]
    #: Waits for a number of seconds.
    rest: Callable[[float], Awaitable[None]] = asyncio.sleep
    #: Seconds for the server's own children to end after it.
    follow_s: float = 5.0
    #: Calls its argument, which sends SIGTERM to the server, and unloads the models. Returns True when the models are
    #: unloaded, False if they cannot be unloaded.
    unload: Callable[[Callable[[], None]], Awaitable[bool]] = _only_terminate
    #: Seconds for the server to end by itself after its models are unloaded.
    idle_s: float = IDLE_S


async def supervise(server: ServerPlan, hooks: SupervisorHooks, orders: StopSignals) -> int:
    """Run the server until a signal, or until its restarts are used up. Return the exit status of `rsrv serve`.

    At the end the server and all of its children have ended.
    """
    restarts = Restarts()
    while True:
        lived, outcome, failed = await _live(server, hooks, orders)
        if orders.end.is_set():
            log.info("tritonserver %s", outcome)
            return 0
        if not failed:
            continue
        pause = restarts.ended(lived)
        if pause is None:
            log.error(
                "tritonserver %s. It is not started again, because it was already restarted %d times",
                outcome,
                MAX_RESTARTS,
            )
            return 1
        log.error("tritonserver %s after %.1f s; starting it again in %g s", outcome, lived, pause)
        await _first(hooks.rest(pause), orders.end.wait())
        if orders.end.is_set():
            return 0


async def _live(server: ServerPlan, hooks: SupervisorHooks, orders: StopSignals) -> tuple[float, str, bool]:
    """Run the server once. Return the seconds that it ran, a text about its end, and True if it failed."""
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
        await _stop(process, server, hooks, orders)
    elif watch.done():
        restart = watch.result()
        if restart.works:
            log.info("tritonserver %s, so it is started again", restart.reason)
        process.send(signal.SIGKILL)
    watch.cancel()
    await process.over()
    lived = clock() - born
    status, killed = await process.bury(hooks.follow_s)
    if killed:
        log.warning("tritonserver left processes, which were killed: %s", ", ".join(map(str, killed)))
    outcome = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
    if restart is None:
        return lived, outcome, True
    return lived, f"{restart.reason} and {outcome}", not restart.works


async def _stop(process: Process, server: ServerPlan, hooks: SupervisorHooks, orders: StopSignals) -> None:
    """Make the server end.

    Kill it if it continues to run after its models are unloaded, after its drain time, or if the user asks again.
    """
    terminate = partial(process.send, signal.SIGTERM)
    unloading = asyncio.ensure_future(hooks.unload(terminate))
    try:
        async with asyncio.timeout(server.drain_s + _GRACE):
            await _first(process.over(), orders.hurry.wait(), _succeeds(unloading, terminate))
            if not (process.ended or orders.hurry.is_set()):
                await _first(process.over(), orders.hurry.wait(), asyncio.sleep(hooks.idle_s))
            if not (process.ended or orders.hurry.is_set()):
                log.info(
                    "all models are unloaded, but tritonserver would wait for clients that keep connections open, so it is killed"
                )
    except TimeoutError:
        # On an overloaded machine, release 24.10 waits forever for stubs that it considers dead.
        log.warning("tritonserver has not ended %g s after its drain time, so it is killed", _GRACE)
    finally:
        unloading.cancel()
    process.send(signal.SIGKILL)


async def _succeeds(unloading: asyncio.Future[bool], terminate: Callable[[], None]) -> None:
    """Wait until the models are unloaded. Never return if they cannot be unloaded."""
    try:
        if await asyncio.shield(unloading):
            return
    except Exception:
        log.exception("the models could not be unloaded in advance, so tritonserver unloads them itself")
        terminate()
    await asyncio.Event().wait()


async def _first(*waits: Awaitable[object]) -> None:
    """Wait until one of these is done."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
