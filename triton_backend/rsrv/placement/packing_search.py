"""Pieces and rooms: the search for an arrangement that keeps all limits and has the least busy busiest room.

It begins with LPT, longest processing time first (R. L. Graham, Bounds on Multiprocessing Timing Anomalies, SIAM J.
Appl. Math. 17, 1969): the busiest piece first, each to the least busy room where it fits. Then exchanges between two
rooms mend what did not fit and relieve the busiest: a tabu search (F. Glover, Tabu Search, Part I, ORSA J. Computing 1,
1989) with a price on bytes too many that rises and falls (M. Gendreau, A. Hertz, G. Laporte, A Tabu Search Heuristic
for the Vehicle Routing Problem, Management Science 40, 1994). What that cannot mend is left to bin completion (R. E.
Korf, An Improved Algorithm for Optimal Bin Packing, IJCAI 2003).

Searches end by counting, not by a clock, and loads are whole numbers: who sees the same decides the same.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from itertools import accumulate
from math import inf

#: exchanges that a search looks at
_EXCHANGES = 400_000
#: rooms that one room exchanges with
_NEIGHBOURS = 32
#: exchanges until a piece may go back where it was
_TENURE = 10
#: pieces that bin completion tries to put somewhere
_COMPLETIONS = 300_000
#: how deep it may recur: once for each piece and twice for each room; with so many, exchanges mend what can be
_COMPLETABLE = 500

_Figures = Callable[[int], tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class Piece:
    """A replica of a model: what goes into one room."""

    load: int
    bytes: int
    #: no two of one model share a room
    model: int
    #: where it may be
    rooms: frozenset[int]


class Board:
    """Which pieces are in which rooms; both are numbers."""

    def __init__(self, pieces: Sequence[Piece], sizes: Sequence[int], limits: Sequence[int]) -> None:
        """`sizes`, in bytes, are what fullness is relative to; `limits` what is not to be exceeded."""
        self.pieces, self.sizes, self.limits = pieces, sizes, list(limits)
        self.rooms = range(len(sizes))
        self.load = [0 for _ in sizes]
        self.used = [0 for _ in sizes]
        #: by room, then by model: the piece
        self.inside: list[dict[int, int]] = [{} for _ in sizes]
        #: how many times its size the fullest room has, where limits had to be exceeded; 0: they are kept
        self.stretch = 0.0

    @property
    def peak(self) -> int:
        """Load of the busiest room."""
        return max(self.load, default=0)

    # ---- pieces come and go

    def may(self, at: int, room: int) -> bool:
        piece = self.pieces[at]
        return room in piece.rooms and piece.model not in self.inside[room]

    def fits(self, at: int, room: int) -> bool:
        return self.used[room] + self.pieces[at].bytes <= self.limits[room] and self.may(at, room)

    def put(self, at: int, room: int) -> None:
        piece = self.pieces[at]
        self.load[room] += piece.load
        self.used[room] += piece.bytes
        self.inside[room][piece.model] = at

    def take(self, at: int, room: int) -> None:
        piece = self.pieces[at]
        self.load[room] -= piece.load
        self.used[room] -= piece.bytes
        del self.inside[room][piece.model]

    def copy(self) -> list[tuple[int, ...]]:
        return [tuple(inside.values()) for inside in self.inside]

    def arrange(self, arrangement: Sequence[Iterable[int]]) -> None:
        for room, pieces in enumerate(arrangement):
            self.load[room], self.used[room], self.inside[room] = 0, 0, {}
            for at in pieces:
                self.put(at, room)

    # ---- figures by which rooms form a line; the last is the room

    def busy(self, room: int) -> tuple[float, ...]:
        return self.load[room], self.used[room] / self.sizes[room], room

    def full(self, room: int) -> tuple[float, ...]:
        return self.used[room] / self.sizes[room], len(self.inside[room]), room

    def excess(self, room: int) -> tuple[float, ...]:
        return self.used[room] - self.limits[room], room

    def cost(self) -> tuple[int, int]:
        """Bytes too many, and the load of the busiest room: less is better, in this order."""
        return sum(u - x for u, x in zip(self.used, self.limits, strict=True) if u > x), self.peak

    # ---- who goes where

    def seat(self, slack: float) -> None:
        """Give every piece a room.

        None is left where one with space would be less busy with it than its own is, by more than a factor of `slack`.
        """
        sizes, loads = [piece.bytes for piece in self.pieces], [piece.load for piece in self.pieces]
        # No arrangement can do better; a thousandth more is as good.
        target = 1.001 * max([*loads, sum(loads) / max(1, len(self.rooms))])
        away = self.place({})
        largest = {
            rooms: max(self.limits[room] for room in rooms)
            for rooms in {piece.rooms for piece in self.pieces}
        }
        possible = sum(sizes) <= sum(self.limits) and all(
            piece.bytes <= largest[piece.rooms] for piece in self.pieces
        )
        if away and possible and self.mend(away):
            away = []
        self.exchange(target)
        self.relieve(slack)
        self.squeeze(away, {}, 0.0)

    def stay(self, homes: Mapping[int, int], slack: float, fresh: Board) -> bool:
        """Give every piece a room: its home to as many as can have it.

        Tells whether the busiest room, and the most over-subscribed one, are within `slack` times those of `fresh`,
        which was seated without homes.
        """
        away = self.place(homes)
        target, stretch = slack * fresh.peak, slack * fresh.stretch
        if away and not fresh.stretch and self.mend(away):
            away = []
        self.relieve(slack)
        self.squeeze(away, homes, stretch)
        self.exchange(target)
        return self.peak <= target and self.stretch <= stretch

    def place(self, homes: Mapping[int, int]) -> list[int]:
        """LPT: the busiest first, each at home or in the least busy room; return those that fit nowhere."""
        pieces = self.pieces
        away = []
        for at in sorted(range(len(pieces)), key=lambda at: (-pieces[at].load, -pieces[at].bytes, at)):
            if at in homes and self.fits(at, homes[at]):
                self.put(at, homes[at])
            else:
                away.append(at)
        work, none = [at for at in away if pieces[at].load], [at for at in away if not pieces[at].load]
        # Those without work would all go to the least busy room, and leave it so.
        return self.deal(work, self.busy, self.fits) + self.deal(none, self.full, self.fits)

    def deal(self, order: Iterable[int], figures: _Figures, fits: Callable[[int, int], bool]) -> list[int]:
        """Put each piece into the first room of the line that it `fits`; return those that fit none."""
        line = sorted(map(figures, self.rooms))
        left = []
        # Bytes free in the roomiest; at most, as it only gets less.
        roomiest: float = inf
        for at in order:
            if self.pieces[at].bytes > roomiest:
                left.append(at)
                continue
            for place, found in enumerate(line):
                room = int(found[-1])
                if fits(at, room):
                    del line[place]
                    self.put(at, room)
                    insort(line, figures(room))
                    break
            else:
                left.append(at)
                roomiest = max(limit - used for limit, used in zip(self.limits, self.used, strict=True))
        return left

    def mend(self, away: Sequence[int]) -> bool:
        """Find an arrangement within all limits that has these, too; if none is found, change nothing."""
        before = self.copy()
        self.deal(away, self.excess, self.may)
        self.exchange(inf, max(_EXCHANGES, 200 * len(self.pieces)))
        if self.cost()[0] and not self.complete():
            self.arrange(before)
            return False
        return True

    def squeeze(self, away: Sequence[int], homes: Mapping[int, int], stretch: float) -> None:
        """Put pieces where they exceed limits, and take these for limits from now on.

        They go home, if that then has at most `stretch` times its size, or where work and bytes are least.
        """
        if not away:
            return
        rest = []
        for at in away:
            home = homes.get(at)
            size = self.pieces[at].bytes
            if (
                home is not None
                and self.may(at, home)
                and self.used[home] + size <= stretch * self.sizes[home]
            ):
                self.put(at, home)
            else:
                rest.append(at)
        work = sum(piece.load for piece in self.pieces) / len(self.rooms) or 1.0
        fill = sum(piece.bytes for piece in self.pieces) / sum(self.sizes)

        def either(room: int) -> tuple[float, ...]:
            return max(self.load[room] / work, self.used[room] / self.sizes[room] / fill), room

        self.deal(rest, either, self.may)
        self.stretch = max(used / size for used, size in zip(self.used, self.sizes, strict=True))
        for room in self.rooms:
            if self.used[room] > self.limits[room]:
                self.limits[room] = int(self.stretch * self.sizes[room]) + 1

    def relieve(self, slack: float) -> None:
        """Move pieces to rooms that are less busy even with them, by more than `slack`: most gain per byte first.

        Of equal gains the piece with the least load moves: the fewest requests change their room.
        """
        steps = _EXCHANGES
        while steps > 0:
            line = sorted(self.rooms, key=self.busy)
            best, move = (0.0, 0), None
            for room in reversed(line):
                if move or self.load[room] <= slack * self.load[line[0]]:
                    break
                for other in line[:_NEIGHBOURS]:
                    steps -= len(self.inside[room])
                    for at in self.inside[room].values():
                        load, size = self.pieces[at].load, self.pieces[at].bytes
                        after = self.load[other] + load
                        if load and self.load[room] > slack * after and self.fits(at, other):
                            gain = min(load, self.load[room] - after) / (1 + size), -load
                            if gain > best:
                                best, move = gain, (at, room, other)
            if not move:
                return
            at, room, other = move
            self.take(at, room)
            self.put(at, other)

    def held(self, homes: Mapping[int, int]) -> list[int]:
        """Those at home while a room that is less busy even with them has space."""
        line = nsmallest(_NEIGHBOURS, self.rooms, key=self.busy)
        return [
            at
            for at, home in homes.items()
            if self.inside[home].get(self.pieces[at].model) == at
            and any(
                self.load[room] + self.pieces[at].load < self.load[home] and self.fits(at, room)
                for room in line
            )
        ]

    # ---- searches

    def exchange(self, target: float, steps: int = _EXCHANGES) -> None:
        """Move pieces out of the worst room, or swap them with another's: until all limits are kept and the busiest
        room has no more than `target`, or steps are used up. The best arrangement that was met stays.

        Each turn makes the best exchange, even if all of them harm, and what moved may not go back for some turns. Of
        equally good exchanges it is the one with the fewest bytes, and then the least load, that change rooms. Which
        room is worst, and which exchange best, depends on a price of bytes too many, which doubles while there are any
        and halves while there are none: better arrangements lie behind others that break limits.
        """
        pieces, barred, turn = self.pieces, dict[tuple[int, int], int](), 0
        unit = (sum(self.load) or 1) / (sum(self.used) or 1)
        best, kept, price = self.cost(), self.copy(), 8.0
        while best > (0, target) and steps > 0:
            turn += 1
            worth = price * unit
            top = max(
                self.rooms,
                key=lambda room: self.load[room] + worth * max(0, self.used[room] - self.limits[room]),
            )
            load, excess = self.load[top], self.used[top] - self.limits[top]
            mine = [(at, pieces[at].load, pieces[at].bytes) for at in self.inside[top].values()]
            lowest, moved, found = inf, (0, 0), None
            figures = self.excess if excess > 0 else self.busy
            for other in nsmallest(_NEIGHBOURS, (room for room in self.rooms if room != top), key=figures):
                beside, space = self.load[other], self.limits[other] - self.used[other]
                # Of the bytes too many after an exchange: without those that the other room has already.
                before = min(0, space)
                theirs: list[tuple[int | None, int, int]] = [(None, 0, 0)]
                theirs += [
                    (at, pieces[at].load, pieces[at].bytes)
                    for at in self.inside[other].values()
                    if barred.get((at, top), 0) < turn and self.may(at, top)
                ]
                steps -= 24 + len(mine) * len(theirs)
                for at, at_load, at_bytes in mine:
                    if barred.get((at, other), 0) >= turn or not self.may(at, other):
                        continue
                    for back, back_load, back_bytes in theirs:
                        work, size = at_load - back_load, at_bytes - back_bytes
                        if work <= 0 and (size <= 0 or excess <= 0):
                            continue
                        over = (
                            before
                            + (excess - size if excess > size else 0)
                            + (size - space if size > space else 0)
                        )
                        score = worth * over + max(load - work, beside + work)
                        if score <= lowest:
                            moving = at_bytes + back_bytes, at_load + back_load
                            if score < lowest or moving < moved:
                                lowest, moved, found = score, moving, (at, other, back)
            if found is None:
                break
            at, other, back = found
            self.take(at, top)
            barred[at, top] = turn + _TENURE
            if back is not None:
                self.take(back, other)
                self.put(back, top)
                barred[back, other] = turn + _TENURE
            self.put(at, other)
            cost = self.cost()
            price = min(2 * price, 2.0**20) if cost[0] else max(price / 2, 2.0**-10)
            if cost < best:
                best, kept = cost, self.copy()
        self.arrange(kept)

    def complete(self) -> bool:
        """Fill one room after the other, by bytes alone, losing no more space in all of them than there is to spare.

        Tells whether that went well; if not, nothing has changed.
        """
        pieces, limits = self.pieces, self.limits
        if len(pieces) + 2 * len(limits) > _COMPLETABLE:
            return False
        largest_first = sorted(range(len(pieces)), key=lambda at: (-pieces[at].bytes, at))
        rooms = sorted(self.rooms, key=lambda room: (limits[room], room))
        anywhere = all(len(piece.rooms) == len(limits) for piece in pieces)
        where: dict[int, int] = {}
        steps = _COMPLETIONS

        def fill(number: int, spare: int) -> bool:
            if number == len(rooms):
                return len(where) == len(pieces)
            room, later = rooms[number], frozenset(rooms[number:])
            rest = [at for at in largest_first if at not in where]
            if any(later.isdisjoint(pieces[at].rooms) for at in rest):
                return False
            rest = [at for at in rest if room in pieces[at].rooms]
            # Bytes of the pieces from each place on.
            following = [*accumulate((pieces[at].bytes for at in reversed(rest)), initial=0)][::-1]
            # In one of several equal rooms the largest piece must be.
            alike = anywhere and limits[rooms[-1]] == limits[room]
            models: set[int] = set()

            def choose(start: int, free: int) -> bool:
                nonlocal steps
                failed = -1
                for place in range(start, len(rest)):
                    if free - following[place] > spare or steps <= 0:
                        return False
                    piece = pieces[rest[place]]
                    if piece.bytes > free or piece.bytes == failed or piece.model in models:
                        continue
                    steps -= 1
                    where[rest[place]] = room
                    models.add(piece.model)
                    if choose(place + 1, free - piece.bytes):
                        return True
                    del where[rest[place]]
                    models.remove(piece.model)
                    if alike and place == 0:
                        return False
                    failed = piece.bytes
                return free <= spare and fill(number + 1, spare - free)

            return choose(0, limits[room])

        if not fill(0, sum(limits) - sum(piece.bytes for piece in pieces)):
            return False
        self.arrange([[at for at, room in where.items() if room == number] for number in self.rooms])
        return True
