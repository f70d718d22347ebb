"""Finds the models whose stub process is dead. Triton still reports such models as ready.

A stub is dead when its process is gone. A missing connection proves nothing: the stub of a cold model has none, and after a
runtime's death a stub may wait for minutes until other models are compiled. A connected stub is alive, so most checks need no
list of processes. There is an exception: the stub of an alias connects by the names of its targets, so a target needs a
process of its own to count as alive. Models with the native front have no process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncGenerator, Callable, Collection
from pathlib import Path

from rsrv.control.bundle_states import BundleStates
from rsrv.control.presence import AGREE_S, StubPoll
from rsrv.control.runtimes import Runtimes
from rsrv.control.triton import Triton, TritonError
from rsrv_gen.known import SETTLED_NS
from rsrv_gen.plan import NATIVE_MARK, VERSION
from rsrv_gen.write import carried, is_alias, our_models

#: Even if all stubs are alive, ask Triton after this many seconds which models were unloaded by hand.
_DISMISSED_S = 60.0
#: Minimum number of seconds between two polls.
_POLL_MIN_S = 0.2
#: For this many seconds after a reload, the stub does not count as dead, by Triton's mode. In the mode poll, Triton begins the
#: load only at its next poll.
_START_S = {"explicit": 10.0, "poll": 60.0, "none": 3600.0}


def stub_processes(server_pid: int, repository: Path) -> set[str]:
    """Return the models whose code runs in a process of this tritonserver.

    A stub's command line has the path of model.py. It begins with the path of the repository in tritonserver's command line,
    which may be relative to tritonserver's working directory.
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
    """Return the pid of a process's parent. `process` is a folder of /proc. Raises OSError."""
    # Search from the end, because the process name, which stands before the pid, may contain any character.
    return int((process / "stat").read_bytes().rpartition(b")")[2].split()[1])


class _Listing:
    """The list of models that rsrv-gen made in a repository. It is read again after a directory was added or removed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._listed: tuple[int, int] = (0, 0)
        self.models: set[str] = set()
        #: Models with the native front.
        self.native: set[str] = set()
        #: Names of aliases. The runtime knows only the models behind them.
        self.aliases: set[str] = set()
        #: Models behind aliases. They may seem connected although their own stubs are dead, because the stubs of aliases also
        #: connect by their names.
        self.aliased: set[str] = set()
        #: For each meta model or alias, the names of further models for which its stub connects.
        self.carried: dict[str, list[str]] = {}

    def refresh(self) -> None:
        """List the models if the repository has changed. Thread-safe."""
        with contextlib.suppress(OSError):
            changed = self._path.stat().st_mtime_ns
            # If the latest change was at about the time of the last listing, list again: the listing may have missed it.
            if changed == self._listed[0] < self._listed[1] - SETTLED_NS:
                return
            self._listed = changed, time.time_ns()
        self.models = our_models(self._path)
        self.aliases = {name for name in self.models if is_alias(self._path / name)}
        self.carried = {name: names for name in self.models if (names := carried(self._path / name))}
        self.aliased = {name for alias in self.aliases for name in self.carried.get(alias, ())}
        self.native = {name for name in self.models if (self._path / name / NATIVE_MARK).exists()}


class StubMonitor:
    """The monitor of the stubs of one repository's models."""

    def __init__(
        self,
        repository: Path,
        view: Runtimes,
        triton: Triton,
        states: BundleStates,
        poll_s: float,
        processes: Callable[[], Collection[str]],
    ) -> None:
        """`processes` returns the models that have a live stub process. It is called on a thread."""
        self._processes = processes
        self._listing = _Listing(repository)
        self._view = view
        self._triton = triton
        self._states = states
        self._poll_s = poll_s
        #: Models that an operator had unloaded in Triton when Triton was last asked.
        self.dismissed: set[str] = set()

    def expect_start(self, name: str) -> None:
        """Do not count the model's stub as dead while it may be starting."""
        self._view.presence.expect_start(name, self._now() + _START_S[self._triton.mode])

    async def dead(self) -> AsyncGenerator[str]:
        """Yield models whose stub is dead, as they are found."""
        #: Models without a connected stub that are not suspects. Triton need not be asked about them at every change.
        idle: set[str] = set()
        #: All models that had no connected stub when Triton was last asked.
        unanswered: set[str] = set()
        #: Models that Triton called ready when it was last asked.
        loaded: set[str] = set()
        renewed = asked_at = -_DISMISSED_S
        while True:
            seen = self._view.changes
            if self._now() - renewed >= self._poll_s:
                renewed, idle = self._now(), set()
                await asyncio.to_thread(self._listing.refresh)
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
            # Ask Triton rarely: for thousands of cold models, its answer has a megabyte.
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
            dead = self._view.see_stubs(StubPoll(unconnected, lost, ready))
            if not self._view.up:
                # Clear `idle`, so that a stub that connects and dies before the next poll is found dead.
                idle = set()
            for name in dead - self._states.busy:
                yield name
            await asyncio.sleep(_POLL_MIN_S)
            with contextlib.suppress(TimeoutError):
                wait = AGREE_S - _POLL_MIN_S if self._view.presence.suspicious else self._poll_s
                async with asyncio.timeout(wait):
                    await self._view.wait_change(seen)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
