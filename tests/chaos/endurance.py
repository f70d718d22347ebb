"""Many deaths of the runtime, one after another for minutes, while 64 clients ask 20 models.

No request may fail, because each waits for the next runtime. No process may grow from one death to the next.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import inf
from statistics import median
from typing import ClassVar, NamedTuple, Self

from rsrv.wire.paths import DEATHS
from tests.bench.processes import memory, server_processes
from tests.chaos.faults import Fault
from tests.chaos.figures import RIGHT, Expected, Record
from tests.chaos.house import CROWD, House
from tests.chaos.load import Load, clients
from tests.waiting import wait_until

#: Time limits in seconds: for all models to answer again, and for a spare runtime to start. On a quiet server, a spare runtime
#: starts 30 s after the end of the previous one.
_PATIENCE, _SPARE_PATIENCE = 60.0, 90.0
#: Longest pause in seconds before the next kill, after all models have answered. A spare runtime starts in some of the pauses.
_LONGEST_PAUSE = 6.0
#: Growth of a process that may be chance: a share of its earlier use, plus megabytes or descriptors.
_PART, _MARGIN_MB, _MARGIN_DESCRIPTORS = 0.1, 32, 8


class Death(NamedTuple):
    """How the runtime dies, and when."""

    way: str
    at: float


class Return(NamedTuple):
    """Seconds from a death to the first right answer to a later request, and to right answers of all models.

    `longest` is the longest time of a request that ended between this death and the next one.
    """

    first: float
    all: float
    longest: float


def returns(records: Iterable[Record], deaths: Sequence[Death], end: float) -> list[Return]:
    """Return what followed each death. A time is inf if the next death came earlier."""
    ordered = sorted(records, key=lambda record: record.ended)
    times = [record.ended for record in ordered]
    models = {record.model for record in ordered}
    result = []
    for death, until in zip(deaths, [*(death.at for death in deaths[1:]), end], strict=True):
        later = ordered[bisect_right(times, death.at) : bisect_right(times, until)]
        firsts: dict[str, float] = {}
        for record in later:
            if record.sent > death.at and record.outcome == RIGHT:
                firsts.setdefault(record.model, record.ended - death.at)
        first = min(firsts.values(), default=inf)
        last = max(firsts.values()) if firsts.keys() == models else inf
        longest = max((record.ended - record.sent for record in later), default=0.0)
        result.append(Return(first, last, longest))
    return result


def summary(records: Iterable[Record], deaths: Sequence[Death], end: float) -> Iterator[str]:
    """Yield a line for each way to die."""
    pairs = list(zip(deaths, returns(records, deaths, end), strict=True))
    for way in sorted({death.way for death in deaths}):
        mine = [recovery for death, recovery in pairs if death.way == way]
        figures = ", ".join(
            f"{what} {median(values):.2f} s, {max(values):.2f} s"
            for what, some in (
                ("first right answer", [recovery.first for recovery in mine]),
                ("all models", [recovery.all for recovery in mine]),
                ("longest request", [recovery.longest for recovery in mine]),
            )
            if (values := [seconds for seconds in some if seconds < inf])
        )
        yield f"{way}, {len(mine)} times; median and longest: {figures}"


class Usage(NamedTuple):
    """Memory in MB that is not shared, and number of descriptors by kind, of one or several processes."""

    megabytes: float
    descriptors: Counter[str]

    def grew(self, before: Usage) -> bool:
        return (
            self.megabytes > before.megabytes * (1 + _PART) + _MARGIN_MB
            or self.descriptors.total() > before.descriptors.total() * (1 + _PART) + _MARGIN_DESCRIPTORS
        )

    def __str__(self) -> str:
        return f"{self.megabytes:.0f} MB, {self.descriptors.total()} descriptors"


def _descriptors(pid: int) -> Counter[str]:
    """Return the number of a process's descriptors by kind: the path of a file, or socket, pipe, memfd and others."""
    kinds: Counter[str] = Counter()
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # The descriptor was closed during the loop.
            kinds[os.readlink(entry.path).partition(":[")[0]] += 1
    return kinds


def usage(house: House) -> dict[str, Usage]:
    """Return the usage of tritonserver, of all stubs together, of the runtime, and of the control process."""
    roles = server_processes(house.server.pid, has_runtime=True)
    if (control := house.control_pid()) is not None:
        roles[control] = "control"
    by_role: dict[str, Usage] = {}
    for pid, role in roles.items():
        before = by_role.get(role, Usage(0.0, Counter()))
        by_role[role] = Usage(
            before.megabytes + memory(pid).anonymous, before.descriptors + _descriptors(pid)
        )
    return by_role


# --- ways to die --------------------------------------------------------------------------------------------------


def _kill(house: House) -> None:
    os.kill(house.runtime_pid(), signal.SIGKILL)


def _crash(house: House) -> None:
    os.kill(house.runtime_pid(), signal.SIGSEGV)


def _kill_spare(house: House) -> None:
    pid = wait_until(house.spare_pid, _SPARE_PATIENCE, what="a spare")
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def _restart(house: House) -> None:
    house.runtime_pid()  # This waits for a runtime, because only a runtime can be restarted.
    house.rsrv("restart")


_WAYS: Mapping[str, Callable[[House], None]] = {
    "kill -9": _kill,
    "SIGSEGV": _crash,
    "kill -9 of the spare": _kill_spare,
    "rsrv restart": _restart,
}


# --- the faults ---------------------------------------------------------------------------------------------------


class _Deaths(Fault):
    """Several deaths one after another."""

    load = tuple(
        client
        for number, model in enumerate(CROWD)
        for client in clients(model, grpc=2, http=2 if number < 4 else 1, pause=0.3)
    )
    expected = Expected(())
    patience = _PATIENCE
    house = "crowded"

    def __init__(self, minutes: float = 0.0, seed: int = 0) -> None:
        self._minutes = minutes
        self._random = random.Random(seed)
        self._deaths: list[Death] = []
        self._before: dict[str, Usage] = {}
        self._after: dict[str, Usage] = {}
        self._problems: list[str] = []

    @classmethod
    def planned(cls, minutes: float, seed: int) -> Self:
        return cls(minutes, seed)

    def ways(self, load: Load) -> Iterator[str]:
        """Wait until each death is due, and then yield its kind, which is a key of _WAYS."""
        raise NotImplementedError

    def strike(self, house: House, load: Load) -> float:
        began = time.monotonic()
        for way in self.ways(load):
            if len(self._deaths) == 1:
                # The first runtime may have compiled models. Later ones do not compile.
                self.wait_back(load)
                self._before = usage(house)
            # Models do not cause these deaths. Delete the record of deaths, so that no model is refused because of them.
            (house.runtime_folder() / DEATHS).unlink(missing_ok=True)
            self._deaths.append(Death(way, time.monotonic()))
            print(f"{self._deaths[-1].at - began:8.1f} s: {way}, death {len(self._deaths)}", flush=True)
            try:
                _WAYS[way](house)
            except AssertionError as error:
                self._problems.append(f"death {len(self._deaths)}: {error}")
        self.wait_back(load)
        self._after = usage(house)
        self._records, self._end = load.records, time.monotonic()
        return began

    def wait_back(self, load: Load) -> None:
        """Wait until each model has answered a request that was sent after the last death."""
        last = self._deaths[-1].at

        def back() -> bool:
            missing = set(load.models)
            for record in reversed(load.records):
                if not missing or record.ended < last:
                    break
                if record.sent > last and record.outcome == RIGHT:
                    missing.discard(record.model)
            return not missing

        wait_until(back, _PATIENCE, what=f"right answers of all models after death {len(self._deaths)}")

    def check(self, house: House) -> Iterable[str]:
        yield from self._problems
        for role, after in self._after.items():
            if after.grew(self._before[role]):
                more = after.descriptors - self._before[role].descriptors
                kinds = ", ".join(f"{count} more of {kind}" for kind, count in more.most_common())
                yield f"{role} grew: {self._before[role]}, then {after} ({kinds or 'no more descriptors'})"

    def notes(self) -> Iterable[str]:
        yield from summary(self._records, self._deaths, self._end)
        for role, after in self._after.items():
            yield f"{role}: {self._before[role]} after the first death, {after} after the last"


class KillsInARow(_Deaths):
    """Ten kills for each minute of `--minutes`, and at least ten kills."""

    name: ClassVar[str] = "deaths in a row: kill -9 the runtime"

    def ways(self, load: Load) -> Iterator[str]:
        for _ in range(max(10, round(10 * self._minutes))):
            yield "kill -9"
            self.wait_back(load)
            time.sleep(self._random.uniform(0, _LONGEST_PAUSE))


class RandomDeaths(_Deaths):
    """A death every 5 to 60 s, for at least one minute."""

    name: ClassVar[str] = "deaths in a row: at random"

    def ways(self, load: Load) -> Iterator[str]:
        until = time.monotonic() + 60 * max(1.0, self._minutes)
        while time.monotonic() < until:
            began = time.monotonic()
            yield self._random.choice(list(_WAYS))
            pause = self._random.uniform(5, 60)
            time.sleep(max(0.0, began + pause - time.monotonic()))


#: Faults that take minutes. They run only if the command line names them.
ENDURANCE: Sequence[type[Fault]] = (KillsInARow, RandomDeaths)
