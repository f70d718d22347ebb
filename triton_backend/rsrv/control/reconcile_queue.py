"""Which models want to be loaded or unloaded, and when. Pure: time is an argument, and nothing is done.

Each model goes its own way: one that compiles for minutes holds up nobody. Only who leaves waits for those that are
being loaded, because these may share its executables and weights, which would be gone between the two.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

#: Seconds until a failed load is tried again, doubling with each failure.
FIRST_PAUSE, LONGEST_PAUSE = 10.0, 600.0
#: Seconds after which a load that has not ended is not waited for any more.
PATIENCE = 600.0


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a model is not as its bundle says. An older version of it may be serving."""

    text: str
    #: Seconds since the epoch, of the first of several in a row.
    since: float
    #: How often it was tried.
    tries: int = 1


class ReconcileQueue:
    """All models with something to do."""

    def __init__(self) -> None:
        #: Names to bring up to date, now and at some time.
        self._wanted: set[str] = set()
        self._later: dict[str, float] = {}
        #: Loads and unloads under way -> when they began.
        self._busy: dict[str, float] = {}
        #: Who is to be unloaded -> the loads that it waits for.
        self._leaving: dict[str, frozenset[str]] = {}
        self._failed: dict[str, Failure] = {}
        self._retry: dict[str, float] = {}
        #: Names whose bundles can't be served; only another bundle helps.
        self._broken: dict[str, Failure] = {}

    @property
    def failures(self) -> dict[str, Failure]:
        """By model."""
        return self._failed | self._broken

    @property
    def busy(self) -> Collection[str]:
        """Models that are being loaded or unloaded."""
        return self._busy.keys()

    def changed(self, names: Iterable[str]) -> None:
        """These bundles are others than before."""
        for name in names:
            self._wanted.add(name)
            # Its failures were those of another bundle.
            if name in self._failed:
                self._failed[name] = replace(self._failed[name], tries=0)
                self._retry.pop(name, None)

    def due(self, now: float) -> frozenset[str]:
        """Names to bring up to date now: they are wanted, or failed long enough ago. They do not wait any more."""
        times = (*self._retry.items(), *self._later.items())
        due = frozenset((self._wanted | {name for name, at in times if at <= now}) - self._busy.keys())
        self._wanted -= due
        for name in due:
            self._retry.pop(name, None)
            self._later.pop(name, None)
        return due

    def later(self, name: str, at: float) -> None:
        """It could not be looked at, and wants to be at that time."""
        self._later[name] = at

    def begin(self, name: str, now: float, *, mends: bool = False) -> None:
        """A load or an unload begins. `mends`: for no other reason than a dead stub; who is to leave still is."""
        if not mends:
            self._leaving.pop(name, None)
        self._busy[name] = now

    def done(self, name: str) -> None:
        """It is as its bundle says: loaded, or unloaded, or there never was anything to do."""
        self._busy.pop(name, None)
        self._failed.pop(name, None)
        self._retry.pop(name, None)

    def failed(self, name: str, text: str, now: float, wall: float, *, again: bool = True) -> Failure:
        """What began failed, or could not even begin; it is tried `again` later. `wall`: seconds since the epoch."""
        self._busy.pop(name, None)
        before = self._failed.get(name)
        tries = before.tries + 1 if before else 1
        since = before.since if before and before.tries else wall
        self._failed[name] = Failure(text, since, tries)
        if again:
            self._retry[name] = now + min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(tries - 1, 10))
        return self._failed[name]

    def broken(self, found: Mapping[str, str], wall: float) -> dict[str, Failure]:
        """All that are broken now; returns those that were not, or for another reason."""
        before, self._broken = self._broken, {}
        for name, text in found.items():
            same = name in before and before[name].text == text
            self._broken[name] = before[name] if same else Failure(text, wall)
            self._failed.pop(name, None)
            self._retry.pop(name, None)
        return {name: failure for name, failure in self._broken.items() if failure != before.get(name)}

    def leave(self, name: str) -> None:
        """It is to be unloaded, after the loads that are under way now."""
        self._leaving[name] = frozenset(self._busy.keys() - {name})

    def stay(self, name: str) -> None:
        """It is not to be unloaded any more."""
        self._leaving.pop(name, None)

    def leavers(self, now: float) -> list[str]:
        """Who may be unloaded now."""
        loading = {name for name, since in self._busy.items() if now - since < PATIENCE}
        return [
            name
            for name, after in self._leaving.items()
            if name not in self._busy and name not in self._wanted and after.isdisjoint(loading)
        ]

    def next_time(self) -> float | None:
        """When something is due for no other reason than the time."""
        may_go = self._leaving.keys() - self._busy.keys() - self._wanted
        waited_for = frozenset[str]().union(*(self._leaving[name] for name in may_go))
        times = [since + PATIENCE for name, since in self._busy.items() if name in waited_for]
        others = (*self._retry.items(), *self._later.items())
        times += [at for name, at in others if name not in self._busy]
        return min(times, default=None)
