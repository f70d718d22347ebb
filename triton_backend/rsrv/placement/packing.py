"""Which models' weights belong on which device: a pure function of their loads, their bytes and where they are.

docs/gateway.md says by which rules. What takes work is in board.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rsrv.placement.packing_search import Board, Piece

#: a utilisation of 1 in whole numbers, which add up alike in any order
_ONE = 10**9


@dataclass(frozen=True, slots=True)
class Load:
    """A model, or several that must be together."""

    name: str
    #: device seconds per second, of all replicas together
    utilisation: float
    #: of its weights
    bytes: int
    #: rooms that share its work; fewer if fewer are allowed
    replicas: int = 1
    #: names of the rooms where it may be; None: all
    allowed: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class Room:
    """A device."""

    name: str
    #: bytes that weights may take; None: no limit
    budget_bytes: int | None


@dataclass(frozen=True)
class Packing:
    """Who is where."""

    #: rooms of each load, by name; none if none of those allowed exists
    placed: Mapping[str, tuple[str, ...]]
    #: of each room, in device seconds per second; each of k replicas makes a k-th
    utilisation: Mapping[str, float]
    #: of each room; every replica takes all bytes of its load
    bytes: Mapping[str, int]
    #: loads that stayed where they were though a room with less work has space for them
    held: tuple[str, ...]
    #: rooms with more bytes than their budget
    oversubscribed: tuple[str, ...]


def pack(
    loads: Sequence[Load],
    rooms: Sequence[Room],
    *,
    previous: Mapping[str, Sequence[str]] | None = None,
    hysteresis: float = 0.0,
    forbid_oversubscription: bool = True,
) -> Packing:
    """Give each load its rooms, so that the busiest room is as little busy as can be and no budget is exceeded.

    Where no way is found to keep all budgets, the busiest loads have their bytes first, and the others are spread so
    that rooms are alike in work and in over-subscription. With `forbid_oversubscription` false budgets count only among
    loads without work.

    `previous`, the rooms of each load until now, are kept as long as the busiest room and the worst over-subscription
    are within the fraction `hysteresis` of what a packing from nothing reaches, and no load has a room that is busier
    by more than that fraction than another would be with it.
    """
    loads = sorted(loads, key=lambda load: load.name)
    rooms = sorted(rooms, key=lambda room: room.name)
    number = {room.name: at for at, room in enumerate(rooms)}
    everywhere = frozenset(number.values())
    pieces: list[Piece] = []
    homes: dict[int, int] = {}
    for model, load in enumerate(loads):
        may = everywhere if load.allowed is None else everywhere & {number.get(name) for name in load.allowed}
        k = min(load.replicas, len(may))
        was = sorted(may & {number.get(name) for name in (previous or {}).get(load.name, ())})
        homes |= enumerate(was[:k], start=len(pieces))
        pieces += [Piece(round(load.utilisation / k * _ONE), load.bytes, model, may) for _ in range(k)]
    everything = max(1, sum(piece.bytes for piece in pieces))
    sizes = [everything if room.budget_bytes is None else max(1, room.budget_bytes) for room in rooms]
    limits = sizes if forbid_oversubscription else [everything for _ in rooms]

    board, held = Board(pieces, sizes, limits), dict[str, None]()
    board.seat(1 + hysteresis)
    if homes:
        stay = Board(pieces, sizes, limits)
        if stay.stay(homes, 1 + hysteresis, board):
            board, held = stay, {loads[pieces[at].model].name: None for at in stay.held(homes)}
    where: dict[str, list[str]] = {load.name: [] for load in loads}
    for room, inside in zip(rooms, board.inside, strict=True):
        for model in inside:
            where[loads[model].name].append(room.name)
    return Packing(
        placed={name: tuple(found) for name, found in where.items()},
        utilisation={room.name: load / _ONE for room, load in zip(rooms, board.load, strict=True)},
        bytes={room.name: used for room, used in zip(rooms, board.used, strict=True)},
        held=tuple(held),
        oversubscribed=tuple(
            room.name
            for room, used in zip(rooms, board.used, strict=True)
            if room.budget_bytes is not None and used > room.budget_bytes
        ),
    )
