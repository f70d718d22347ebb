"""What HAProxy's maps say, made of the table, and the commands that turn one state of them into another.

`routes` has a value for each model that HAProxy sends to workers by itself:

    w3      its one worker is in slot w3
    *       any worker, that with the fewest requests
    2/16    two replicas, sixteen requests to each in turn; `turns` has their slots, under 0/MODEL and 1/MODEL

A model that is in none of them goes to the plane behind HAProxy.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rsrv_gateway.contract import Routes, Table

ANY = "*"

#: names that can be keys of a map, and words of a command, without quoting
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.~@:+-]{0,254}")


@dataclass(frozen=True, slots=True)
class Maps:
    routes: Mapping[str, str] = field(default_factory=dict)
    turns: Mapping[str, str] = field(default_factory=dict)


class Slots:
    """Which of the configuration's servers is which worker's. They are called w1, w2, ...

    One who leaves and comes back finds its slot again, unless it was needed meanwhile: who left first gives way first.
    """

    def __init__(self, count: int) -> None:
        self.names = tuple(f"w{number}" for number in range(1, count + 1))
        self._free = list(reversed(self.names))
        #: by worker; those seen last are at the end
        self._slots: dict[str, str] = {}
        self._workers: dict[str, str] = {}

    def update(self, workers: Iterable[str]) -> Mapping[str, str]:
        """The slots of these workers, by name. Those that find no slot are not in it."""
        wanted = dict.fromkeys(workers)
        for worker in wanted:
            if worker in self._slots:
                self._slots[worker] = self._slots.pop(worker)
        gone = iter([worker for worker in self._slots if worker not in wanted])
        for worker in wanted:
            if worker not in self._slots:
                if self._free:
                    self._slots[worker] = self._free.pop()
                elif (leaver := next(gone, None)) is not None:
                    self._slots[worker] = self._slots.pop(leaver)
        self._workers = {slot: worker for worker, slot in self._slots.items()}
        return {worker: self._slots[worker] for worker in wanted if worker in self._slots}

    def worker(self, slot: str) -> str:
        """Whose it is, or was last; empty: nobody's."""
        return self._workers.get(slot, "")


def maps_of(table: Table, slots: Mapping[str, str], *, in_turn: bool) -> Maps:
    """`slots` are those of all workers that requests may go to. `in_turn`: also models that were not packed go to their
    workers one after the other, instead of to the one with the fewest requests."""
    routes: dict[str, str] = {}
    turns: dict[str, str] = {}
    for model, route in table.items():
        found = [slots[worker] for worker in route.placed or route.ready if worker in slots]
        if not found or _PLAIN.fullmatch(model) is None:
            continue
        if len(found) == 1:
            routes[model] = found[0]
        elif len(found) == len(slots) and not _takes_turns(route, in_turn):
            routes[model] = ANY
        else:
            routes[model] = f"{len(found)}/{route.quantum if route.placed else 1}"
            turns.update((f"{place}/{model}", slot) for place, slot in enumerate(found))
    return Maps(routes, turns)


def _takes_turns(route: Routes, in_turn: bool) -> bool:
    if route.placed:
        return route.quantum > 1 or route.fill == "rr"
    return in_turn


def commands(old: Maps, new: Maps, routes: Path, turns: Path) -> list[str]:
    """What to say on the admin socket. After each of them every model that stays has a worker: replicas are there before
    their number says so, and go after it."""
    return [
        *_written(old.turns, new.turns, turns),
        *changes(old.routes, new.routes, routes),
        *_removed(old.turns, new.turns, turns),
    ]


def changes(old: Mapping[str, str], new: Mapping[str, str], path: Path) -> list[str]:
    """As `commands`, of one map."""
    return [*_written(old, new, path), *_removed(old, new, path)]


def _written(old: Mapping[str, str], new: Mapping[str, str], path: Path) -> list[str]:
    return [
        f"{'set' if key in old else 'add'} map {path} {key} {value}"
        for key, value in new.items()
        if old.get(key) != value
    ]


def _removed(old: Mapping[str, str], new: Mapping[str, str], path: Path) -> list[str]:
    return [f"del map {path} {key}" for key in old if key not in new]


def text(entries: Mapping[str, str]) -> str:
    """Of a map's file."""
    return "".join(f"{key} {value}\n" for key, value in entries.items())
