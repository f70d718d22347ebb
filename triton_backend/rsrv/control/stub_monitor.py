"""Finds the models whose stub process is dead.

Triton calls a model ready whose stub is dead. A stub is dead when its process is gone, however long it has been without a
connection: a cold model has none, and after a runtime's death a model may wait for minutes until another one is compiled.
A connected stub is alive, so most checks need no list of processes. A model behind an alias needs a process of its own,
because the alias's stub also connects by the model's name. Models with the native front have no process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncGenerator, Callable, Collection
from pathlib import Path

from rsrv.control.bundle_states import BundleStates
from rsrv.control.presence import AGREE_S, StubLook
from rsrv.control.runtimes import Runtimes
from rsrv.control.triton import Triton, TritonError
from rsrv_gen.known import SETTLED_NS
from rsrv_gen.plan import NATIVE_MARK, VERSION
from rsrv_gen.write import carried, is_alias, our_models

#: Seconds after which Triton is asked again for models that were unloaded by hand, though all stubs are alive.
_DISMISSED_S = 60.0
#: Minimum number of seconds between two looks.
_LOOK_MIN_S = 0.2
#: Seconds after a reload during which the stub does not count as dead, by Triton's mode. A Triton that polls has yet to
#: see what to load.
_START_S = {"explicit": 10.0, "poll": 60.0, "none": 3600.0}


def stub_processes(server_pid: int, repository: Path) -> set[str]:
    """Return the models whose code runs in a process of this tritonserver.

    A stub's command line has the path of model.py with the repository as tritonserver's own command line spells it. It may
    be relative to the working directory of tritonserver.
    """
    names: set[str] = set()
    start, end = os.fsencode(repository) + b"/", f"/{VERSION}/model.py".encode()
    try:
        directory = os.readlink(os.fsencode(f"/proc/{server_pid}/cwd"))
    except OSError:
        return names  # the server has ended
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            with contextlib.suppress(OSError):
                for word in (process / "cmdline").read_bytes().split(b"\0"):
                    if not word.endswith(end) or parent_pid(process) != server_pid:
                        continue
                    path = os.path.normpath(os.path.join(directory, word))
                    if path.startswith(start):
                        names.add(os.fsdecode(path[len(start) : -len(end)]))
    return names


def parent_pid(process: Path) -> int:
    """Return the parent of a process, a folder of /proc. Raises OSError."""
    # The process name before it may contain any character.
    return int((process / "stat").read_bytes().rpartition(b")")[2].split()[1])


class _Listing:
    """The models of a repository that rsrv-gen made, listed again if a directory came, went or was replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._listed: tuple[int, int] = (0, 0)
        self.models: set[str] = set()
        #: Models with the native front.
        self.native: set[str] = set()
        #: Names that are aliases. The runtime knows only the models behind them.
        self.aliases: set[str] = set()
        #: Models behind aliases. The stubs of aliases connect by these names, so the models' own stubs may be dead.
        self.aliased: set[str] = set()
        #: Names by which the stub of a meta model or an alias connects in addition to its own.
        self.carried: dict[str, list[str]] = {}

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
        self.carried = {name: names for name in self.models if (names := carried(self._path / name))}
        self.aliased = {name for alias in self.aliases for name in self.carried.get(alias, ())}
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
        #: Models that an operator has unloaded in Triton, as of the last look.
        self.dismissed: set[str] = set()

    def expect_start(self, name: str) -> None:
        """Give the model's stub time to start."""
        self._view.presence.expect_start(name, self._now() + _START_S[self._triton.mode])

    async def dead(self) -> AsyncGenerator[str]:
        """Yield models whose stub is dead, as they are found."""
        #: Models without a connected stub that are not suspects, so that Triton need not be asked at every change.
        idle: set[str] = set()
        #: All models without a connected stub when Triton was last asked.
        unanswered: set[str] = set()
        #: Models that Triton called ready then.
        loaded: set[str] = set()
        renewed = asked_at = -_DISMISSED_S
        while True:
            seen = self._view.changes
            if self._now() - renewed >= self._poll_s:
                renewed, idle = self._now(), set()
                await asyncio.to_thread(self._listing.look)
            attached = self._view.presence.attached
            alive = attached - self._listing.aliased
            without = self._listing.models - alive - self._states.busy
            idle &= without
            unanswered &= without
            self.dismissed &= without
            suspects = without - idle - self._listing.native
            returning, lost = self._view.presence.returning, set[str]()
            if suspects or returning:
                living = set(await asyncio.to_thread(self._processes))
                suspects -= living
                idle |= living & self._listing.aliased & without
                may_return = living.union(*(self._listing.carried.get(name, ()) for name in living))
                lost = returning - may_return - self._listing.native - self._states.busy
            ready: set[str] = set()
            # Ask rarely: for thousands of cold models, Triton's answer is a megabyte.
            due = without - unanswered or (without and self._now() - asked_at >= _DISMISSED_S)
            if (suspects or due) and not self._triton.trouble:
                with contextlib.suppress(TritonError):
                    states = await self._triton.states()
                    unanswered, asked_at = without, self._now()
                    loaded = {name for name in without if states.get(name) == "ready"}
                    ready = suspects & loaded - self._states.busy
                    idle = without - ready
                    self.dismissed = {name for name in without if states.get(name) == "dismissed"}
                    lost |= (returning & without) - loaded - self._states.busy
            unconnected = loaded & without - suspects - self._listing.aliases - attached
            dead = self._view.see_stubs(StubLook(unconnected, lost, ready))
            if not self._view.up:
                # A stub without a connection is not cold now. If it connects and dies before the next look, it is dead.
                idle = set()
            for name in dead - self._states.busy:
                yield name
            await asyncio.sleep(_LOOK_MIN_S)
            with contextlib.suppress(TimeoutError):
                wait = AGREE_S - _LOOK_MIN_S if self._view.presence.suspicious else self._poll_s
                async with asyncio.timeout(wait):
                    await self._view.wait_change(seen)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
