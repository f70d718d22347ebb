"""Finds the models whose stub process is dead.

Triton calls a model ready whose stub is dead. A stub that is connected to the runtime is alive. One that is not may be
cold, and then its process lives. A model behind an alias needs its process, too: the alias's stub connects by the model's
name. Models with the native front have no process. A runtime that has just started has no connections, and a dead one
says nothing; both get the time that stubs need to find it again, or to start another.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncGenerator, Callable, Collection
from pathlib import Path

from rsrv.control.bundle_states import BundleStates
from rsrv.control.runtime_link import CONNECT_S, RESTART_S
from rsrv.control.runtimes import Runtimes
from rsrv.control.triton import Triton, TritonError
from rsrv_gen.known import SETTLED_NS
from rsrv_gen.plan import NATIVE_MARK, VERSION
from rsrv_gen.write import carried, is_alias, our_models

#: Seconds between the two looks that must agree on a dead stub.
AGREE_S = 0.5
#: Seconds after which Triton is asked again for models that were unloaded by hand, though all stubs are alive.
_DISMISSED_S = 60.0
#: Seconds at least between two looks.
_LOOK_MIN_S = 0.2
#: Seconds after a reload during which the stub does not count as dead, by Triton's mode. A Triton that polls has yet to
#: see what to load.
_START_S = {"explicit": 10.0, "poll": 60.0, "none": 3600.0}


class StubHealth:
    """The conclusions of successive looks at Triton and the runtime. Pure: time is an argument."""

    def __init__(self) -> None:
        #: Ready models without a stub -> time at which that was first seen.
        self._suspects: dict[str, float] = {}
        #: Models whose stub is starting -> time until which it may.
        self._starting: dict[str, float] = {}
        self._down_since: float | None = None

    @property
    def suspicious(self) -> bool:
        """True if another look may soon find a dead stub."""
        return bool(self._suspects)

    def look(
        self, ready: Collection[str], alive: Collection[str], up_since: float | None, now: float
    ) -> frozenset[str]:
        """Return the models that Triton calls ready and whose stub is dead; the runtime knows a stub of the `alive`.

        `up_since`: when the runtime came up, None while it is down.
        """
        if up_since is not None:
            self._down_since = None
        elif self._down_since is None:
            self._down_since = now
        self._starting = {name: until for name, until in self._starting.items() if until > now}
        without = set(ready) - set(alive) - self._starting.keys()
        self._suspects = {name: self._suspects.get(name, now) for name in without}
        if up_since is not None:
            waited = now - up_since >= CONNECT_S
        else:
            waited = self._down_since is not None and now - self._down_since >= RESTART_S
        return frozenset(name for name, since in self._suspects.items() if waited and now - since >= AGREE_S)

    def expect_start(self, name: str, until: float) -> None:
        """Do not count the model's stub as dead before that time."""
        self._suspects.pop(name, None)
        self._starting[name] = until


def stub_processes(server_pid: int, repository: Path) -> set[str]:
    """Return the models of which a process of this tritonserver runs the code."""
    start, end, found = os.fsencode(repository) + b"/", f"/{VERSION}/model.py".encode(), set()
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            with contextlib.suppress(OSError):
                for word in (process / "cmdline").read_bytes().split(b"\0"):
                    if word.startswith(start) and word.endswith(end) and parent_pid(process) == server_pid:
                        found.add(os.fsdecode(word[len(start) : -len(end)]))
    return found


def parent_pid(process: Path) -> int:
    """Return the parent of a process, a folder of /proc. Raises OSError."""
    # The name before it may hold any character.
    return int((process / "stat").read_bytes().rpartition(b")")[2].split()[1])


class _Listing:
    """The models of a repository that rsrv-gen made, listed again if a directory came, went or was replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._listed: tuple[int, int] = (0, 0)
        self.models: set[str] = set()
        #: Those with the native front.
        self.native: set[str] = set()
        #: Those that are aliases: the runtime knows only the models behind them.
        self.aliases: set[str] = set()
        #: Those behind aliases, whose stubs connect by their names: the models' own stubs may be dead.
        self.aliased: set[str] = set()

    def look(self) -> None:
        """List the models, if necessary. On any thread."""
        with contextlib.suppress(OSError):
            changed = self._path.stat().st_mtime_ns
            # A change of the same moment as the last listing may have come after it.
            if changed == self._listed[0] < self._listed[1] - SETTLED_NS:
                return
            self._listed = changed, time.time_ns()
        self.models = our_models(self._path)
        self.aliases = {name for name in self.models if is_alias(self._path / name)}
        self.aliased = {name for alias in self.aliases for name in carried(self._path / alias)}
        self.native = {name for name in self.models if (self._path / name / NATIVE_MARK).exists()}


class StubMonitor:
    """The looks at the stubs of one repository's models."""

    def __init__(
        self,
        repository: Path,
        view: Runtimes,
        triton: Triton,
        states: BundleStates,
        poll_s: float,
        processes: Callable[[], Collection[str]],
    ) -> None:
        """`processes`: returns the models that have a live stub process; called on a thread."""
        self._processes = processes
        self._listing = _Listing(repository)
        self._view = view
        self._triton = triton
        self._states = states
        self._poll_s = poll_s
        self._health = StubHealth()
        #: Models that an operator has unloaded in Triton, as of the last look.
        self.dismissed: set[str] = set()

    def expect_start(self, name: str) -> None:
        """Give the model's stub time to start."""
        self._health.expect_start(name, self._now() + _START_S[self._triton.mode])

    async def dead(self) -> AsyncGenerator[str]:
        """Yield models whose stub is dead, as they are found."""
        #: Models without a connected stub that are no suspects, so that Triton need not be asked at every change; and
        #: all of them when it was asked.
        idle: set[str] = set()
        asked: set[str] = set()
        #: Those that Triton called ready then.
        loaded: set[str] = set()
        renewed = asked_at = -_DISMISSED_S
        while True:
            seen = self._view.changes
            if self._now() - renewed >= self._poll_s:
                renewed, idle = self._now(), set()
                await asyncio.to_thread(self._listing.look)
            served = self._view.served()
            alive = served - self._listing.aliased
            without = self._listing.models - alive - self._states.busy
            idle &= without
            asked &= without
            self.dismissed &= without
            suspects = without - idle - self._listing.native
            if suspects:
                living = set(await asyncio.to_thread(self._processes))
                suspects -= living
                idle |= living & self._listing.aliased & without
            ready: set[str] = set()
            # Of thousands of cold models, Triton's answer is a megabyte.
            due = without - asked or (without and self._now() - asked_at >= _DISMISSED_S)
            if (suspects or due) and not self._triton.trouble:
                with contextlib.suppress(TritonError):
                    states = await self._triton.states()
                    asked, asked_at = without, self._now()
                    loaded = {name for name in without if states.get(name) == "ready"}
                    ready = suspects & loaded - self._states.busy
                    idle = without - ready
                    self.dismissed = {name for name in without if states.get(name) == "dismissed"}
            self._view.show_cold(loaded & without - suspects - self._listing.aliases - served)
            up_since = self._view.since if self._view.up else None
            if up_since is None:
                # Stubs without a connection are no cold ones, and one that connects and dies before the next look is dead.
                idle = set()
            for name in self._health.look(ready, alive, up_since, self._now()) - self._states.busy:
                yield name
            await asyncio.sleep(_LOOK_MIN_S)
            with contextlib.suppress(TimeoutError):
                wait = AGREE_S - _LOOK_MIN_S if self._health.suspicious else self._poll_s
                async with asyncio.timeout(wait):
                    await self._view.wait_change(seen)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
