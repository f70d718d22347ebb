"""Searches for an assignment of replicas to workers that keeps all limits and makes the busiest worker least busy.

It begins with LPT, longest processing time first (R. L. Graham, Bounds on Multiprocessing Timing Anomalies, SIAM J. Appl. Math.
17, 1969): the busiest replica is placed first, and each replica on the least busy worker where it fits. Then exchanges between
two workers place replicas that did not fit, and relieve the busiest worker: a tabu search (F. Glover, Tabu Search, Part I, ORSA
J. Computing 1, 1989) with a price on excess bytes that rises and falls (M. Gendreau, A. Hertz, G. Laporte, A Tabu Search
Heuristic for the Vehicle Routing Problem, Management Science 40, 1994). If the exchanges find no assignment within the limits,
bin completion searches for one (R. E. Korf, An Improved Algorithm for Optimal Bin Packing, IJCAI 2003).

Searches end after a number of steps, not after a time, and loads are whole numbers: gateways with the same
views make the same decision.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from itertools import accumulate
from math import inf, lcm

#: Maximum number of exchanges that a search evaluates by default.
_EXCHANGES = 400_000
#: Maximum number of workers that are considered as partners of one worker.
_NEIGHBOURS = 32
#: Number of exchanges until a replica may return to a worker.
_TENURE = 10
#: Maximum number of placements of a replica on a worker that bin completion tries.
_COMPLETIONS = 300_000
#: Maximum depth of the recursion of bin completion: one level per replica, and two per worker. Larger problems use only
#: exchanges.
_COMPLETABLE = 500

_Figures = Callable[[int], tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class Replica:
    """A replica of a model, to be placed on one worker."""

    load: int
    bytes: int
    #: Index of the model. Two replicas of one model never share a worker.
    model: int
    #: Workers where the replica may be placed.
    workers: frozenset[int]


class Assignment:
    """Replicas on workers. Replicas and workers are identified by their indices."""

    def __init__(
        self, replicas: Sequence[Replica], sizes: Sequence[int], limits: Sequence[int], devices: Sequence[int]
    ) -> None:
        """Start without placed replicas.

        Args:
            replicas: the replicas to place.
            sizes: bytes of each worker. The fullness of a worker is the share of these bytes that its replicas take.
            limits: maximum bytes of the replicas on each worker.
            devices: number of devices of each worker, which share the worker's load.
        """
        self.replicas, self.sizes, self.limits = replicas, sizes, list(limits)
        self.workers = range(len(sizes))
        #: Weight of each worker, a whole number that is inversely proportional to the worker's number of devices.
        self.weight = [lcm(*devices) // count for count in devices]
        #: Load by worker, multiplied by the worker's weight.
        self.load = [0 for _ in sizes]
        self.used = [0 for _ in sizes]
        #: Replicas by worker, then by model.
        self.inside: list[dict[int, int]] = [{} for _ in sizes]
        #: Bytes of the fullest worker relative to its size, if limits had to be exceeded. 0: all limits are kept.
        self.stretch = 0.0

    @property
    def peak(self) -> int:
        """Weighted load of the busiest worker."""
        return max(self.load, default=0)

    @property
    def even(self) -> float:
        """Weighted load of every worker if all were equally busy."""
        return sum(replica.load for replica in self.replicas) / (
            sum(1 / weight for weight in self.weight) or 1.0
        )

    # ---- adding and removing replicas

    def may(self, index: int, worker: int) -> bool:
        replica = self.replicas[index]
        return worker in replica.workers and replica.model not in self.inside[worker]

    def fits(self, index: int, worker: int) -> bool:
        return self.used[worker] + self.replicas[index].bytes <= self.limits[worker] and self.may(
            index, worker
        )

    def put(self, index: int, worker: int) -> None:
        replica = self.replicas[index]
        self.load[worker] += replica.load * self.weight[worker]
        self.used[worker] += replica.bytes
        self.inside[worker][replica.model] = index

    def take(self, index: int, worker: int) -> None:
        replica = self.replicas[index]
        self.load[worker] -= replica.load * self.weight[worker]
        self.used[worker] -= replica.bytes
        del self.inside[worker][replica.model]

    def copy(self) -> list[tuple[int, ...]]:
        return [tuple(inside.values()) for inside in self.inside]

    def arrange(self, arrangement: Sequence[Iterable[int]]) -> None:
        for worker, replicas in enumerate(arrangement):
            self.load[worker], self.used[worker], self.inside[worker] = 0, 0, {}
            for index in replicas:
                self.put(index, worker)

    # ---- figures that rank workers; the last figure is the worker's index

    def busy(self, worker: int) -> tuple[float, ...]:
        return self.load[worker], self.used[worker] / self.sizes[worker], worker

    def full(self, worker: int) -> tuple[float, ...]:
        return self.used[worker] / self.sizes[worker], len(self.inside[worker]), worker

    def excess(self, worker: int) -> tuple[float, ...]:
        return self.used[worker] - self.limits[worker], worker

    def cost(self) -> tuple[int, int]:
        """Return the excess bytes and the load of the busiest worker. Smaller tuples are better."""
        return sum(u - x for u, x in zip(self.used, self.limits, strict=True) if u > x), self.peak

    # ---- assignment

    def assign_all(self, slack: float) -> None:
        """Place every replica.

        Afterwards, no replica's worker is more than `slack` times as busy as another worker with space would be with
        that replica.
        """
        sizes = [replica.bytes for replica in self.replicas]
        busiest = max((replica.load for replica in self.replicas), default=0)
        # A thousandth more than a lower bound of the peak. An assignment with at most this peak is good enough.
        target = 1.001 * max(busiest * min(self.weight, default=1), self.even)
        unplaced = self.place({})
        largest = {
            workers: max(self.limits[worker] for worker in workers)
            for workers in {replica.workers for replica in self.replicas}
        }
        possible = sum(sizes) <= sum(self.limits) and all(
            replica.bytes <= largest[replica.workers] for replica in self.replicas
        )
        if unplaced and possible and self.repair(unplaced):
            unplaced = []
        self.exchange(target)
        self.relieve(slack)
        self.place_over_limits(unplaced, {}, 0.0)

    def keep_homes(self, homes: Mapping[int, int], slack: float, fresh: Assignment) -> bool:
        """Place every replica, and as many replicas as possible at home.

        `fresh` is an assignment without homes. Returns true if the peak load and the stretch of this assignment are at most
        `slack` times as large as in `fresh`.
        """
        unplaced = self.place(homes)
        target, stretch = slack * fresh.peak, slack * fresh.stretch
        if unplaced and not fresh.stretch and self.repair(unplaced):
            unplaced = []
        self.relieve(slack)
        self.place_over_limits(unplaced, homes, stretch)
        self.exchange(target)
        return self.peak <= target and self.stretch <= stretch

    def place(self, homes: Mapping[int, int]) -> list[int]:
        """Place replicas by LPT, each at home or on the least busy worker. Return the replicas that fit nowhere."""
        replicas = self.replicas
        unplaced = []
        for index in sorted(
            range(len(replicas)), key=lambda index: (-replicas[index].load, -replicas[index].bytes, index)
        ):
            if index in homes and self.fits(index, homes[index]):
                self.put(index, homes[index])
            else:
                unplaced.append(index)
        loaded, idle = (
            [index for index in unplaced if replicas[index].load],
            [index for index in unplaced if not replicas[index].load],
        )
        # For replicas without load, workers are ranked by their bytes. If workers were ranked by load, the least busy one would
        # get all these replicas, because they do not make it busier.
        return self.assign_in_order(loaded, self.busy, self.fits) + self.assign_in_order(
            idle, self.full, self.fits
        )

    def assign_in_order(
        self, order: Iterable[int], figures: _Figures, fits: Callable[[int, int], bool]
    ) -> list[int]:
        """Place each replica on the first worker of the ranking where it `fits`. Return the replicas that fit nowhere."""
        ranked = sorted(map(figures, self.workers))
        left = []
        # An upper bound of the free bytes on any worker. Free bytes only decrease.
        roomiest: float = inf
        for index in order:
            if self.replicas[index].bytes > roomiest:
                left.append(index)
                continue
            for place, candidate in enumerate(ranked):
                worker = int(candidate[-1])
                if fits(index, worker):
                    del ranked[place]
                    self.put(index, worker)
                    insort(ranked, figures(worker))
                    break
            else:
                left.append(index)
                roomiest = max(limit - used for limit, used in zip(self.limits, self.used, strict=True))
        return left

    def repair(self, unplaced: Sequence[int]) -> bool:
        """Find an assignment within all limits that includes these replicas.

        If none is found, return False and change nothing.
        """
        before = self.copy()
        self.assign_in_order(unplaced, self.excess, self.may)
        self.exchange(inf, max(_EXCHANGES, 200 * len(self.replicas)))
        if self.cost()[0] and not self.complete():
            self.arrange(before)
            return False
        return True

    def place_over_limits(self, unplaced: Sequence[int], homes: Mapping[int, int], stretch: float) -> None:
        """Place replicas beyond the limits, and raise the limits accordingly.

        A replica is placed at home if the bytes at its home are then at most `stretch` times the home's size. Otherwise, it is
        placed on the worker with the smallest maximum of two figures: load and bytes, each relative to the fleet's average.
        """
        if not unplaced:
            return
        remaining = []
        for index in unplaced:
            home = homes.get(index)
            size = self.replicas[index].bytes
            if (
                home is not None
                and self.may(index, home)
                and self.used[home] + size <= stretch * self.sizes[home]
            ):
                self.put(index, home)
            else:
                remaining.append(index)
        work = self.even or 1.0
        fill = sum(replica.bytes for replica in self.replicas) / sum(self.sizes)

        def either(worker: int) -> tuple[float, ...]:
            return max(self.load[worker] / work, self.used[worker] / self.sizes[worker] / fill), worker

        self.assign_in_order(remaining, either, self.may)
        self.stretch = max(used / size for used, size in zip(self.used, self.sizes, strict=True))
        for worker in self.workers:
            if self.used[worker] > self.limits[worker]:
                self.limits[worker] = int(self.stretch * self.sizes[worker]) + 1

    def relieve(self, slack: float) -> None:
        """Move replicas while a worker is more than `slack` times as busy as another worker would be with one of its replicas.

        The move with the largest gain per byte comes first. Of equal gains, the replica with the least load moves, so that the
        fewest requests change their worker.
        """
        steps = _EXCHANGES
        while steps > 0:
            ranked = sorted(self.workers, key=self.busy)
            best, move = (0.0, 0), None
            for worker in reversed(ranked):
                if move or self.load[worker] <= slack * self.load[ranked[0]]:
                    break
                for neighbour in ranked[:_NEIGHBOURS]:
                    steps -= len(self.inside[worker])
                    for index in self.inside[worker].values():
                        load, size = self.replicas[index].load, self.replicas[index].bytes
                        after = self.load[neighbour] + load * self.weight[neighbour]
                        if load and self.load[worker] > slack * after and self.fits(index, neighbour):
                            relief = min(load * self.weight[worker], self.load[worker] - after)
                            gain = relief / (1 + size), -load
                            if gain > best:
                                best, move = gain, (index, worker, neighbour)
            if not move:
                return
            index, worker, neighbour = move
            self.take(index, worker)
            self.put(index, neighbour)

    def held(self, homes: Mapping[int, int]) -> list[int]:
        """Return the replicas that are at home although a worker with space would be less busy with them than their home is."""
        ranked = nsmallest(_NEIGHBOURS, self.workers, key=self.busy)
        return [
            index
            for index, home in homes.items()
            if self.inside[home].get(self.replicas[index].model) == index
            and any(
                self.load[worker] + self.replicas[index].load * self.weight[worker] < self.load[home]
                and self.fits(index, worker)
                for worker in ranked
            )
        ]

    # ---- searches

    def exchange(self, target: float, steps: int = _EXCHANGES) -> None:
        """Move replicas out of the worst worker, or swap them with replicas of another worker.

        The search ends when all limits are kept and the busiest worker has a load of at most `target`, or when the steps are
        used up. The result is the best assignment that the search has found.

        Each turn makes the best exchange, even if it is a change for the worse. Moved replicas may not return for some turns.
        Among equally good exchanges, the turn prefers the exchange that moves the fewest bytes, and then the least load. The
        price of excess bytes decides which worker is worst and which exchange is best. It doubles while there is an excess and
        halves while there is none, because the way to a better assignment may lead through assignments that break limits.
        """
        replicas, tabu_until, turn = self.replicas, dict[tuple[int, int], int](), 0
        unit = (sum(self.load) or 1) / (sum(self.used) or 1)
        best, best_copy, price = self.cost(), self.copy(), 8.0
        while best > (0, target) and steps > 0:
            turn += 1
            worth = price * unit
            worst = max(
                self.workers,
                key=lambda worker: (
                    self.load[worker] + worth * max(0, self.used[worker] - self.limits[worker])
                ),
            )
            load, excess = self.load[worst], self.used[worst] - self.limits[worst]
            own = [
                (index, replicas[index].load, replicas[index].bytes) for index in self.inside[worst].values()
            ]
            lowest, moved, swap = inf, (0, 0), None
            figures = self.excess if excess > 0 else self.busy
            for neighbour in nsmallest(
                _NEIGHBOURS, (worker for worker in self.workers if worker != worst), key=figures
            ):
                beside, space = self.load[neighbour], self.limits[neighbour] - self.used[neighbour]
                out, back_in = self.weight[worst], self.weight[neighbour]
                # Negative number of bytes by which the other worker already exceeds its limit, or 0.
                before = min(0, space)
                candidates: list[tuple[int | None, int, int]] = [(None, 0, 0)]
                candidates += [
                    (index, replicas[index].load, replicas[index].bytes)
                    for index in self.inside[neighbour].values()
                    if tabu_until.get((index, worst), 0) < turn and self.may(index, worst)
                ]
                steps -= 24 + len(own) * len(candidates)
                for index, own_load, own_bytes in own:
                    if tabu_until.get((index, neighbour), 0) >= turn or not self.may(index, neighbour):
                        continue
                    for back, back_load, back_bytes in candidates:
                        work, size = own_load - back_load, own_bytes - back_bytes
                        if work <= 0 and (size <= 0 or excess <= 0):
                            continue
                        over = (
                            before
                            + (excess - size if excess > size else 0)
                            + (size - space if size > space else 0)
                        )
                        score = worth * over + max(load - work * out, beside + work * back_in)
                        if score <= lowest:
                            moving = own_bytes + back_bytes, own_load + back_load
                            if score < lowest or moving < moved:
                                lowest, moved, swap = score, moving, (index, neighbour, back)
            if swap is None:
                break
            index, neighbour, back = swap
            self.take(index, worst)
            tabu_until[index, worst] = turn + _TENURE
            if back is not None:
                self.take(back, neighbour)
                self.put(back, worst)
                tabu_until[back, neighbour] = turn + _TENURE
            self.put(index, neighbour)
            cost = self.cost()
            price = min(2 * price, 2.0**20) if cost[0] else max(price / 2, 2.0**-10)
            if cost < best:
                best, best_copy = cost, self.copy()
        self.arrange(best_copy)

    def complete(self) -> bool:
        """Search with bin completion: fill one worker after the other, considering bytes only.

        The unused space of all filled workers together may not exceed the total spare space. Returns false, and changes
        nothing, if no solution is found.
        """
        replicas, limits = self.replicas, self.limits
        if len(replicas) + 2 * len(limits) > _COMPLETABLE:
            return False
        largest_first = sorted(range(len(replicas)), key=lambda index: (-replicas[index].bytes, index))
        workers = sorted(self.workers, key=lambda worker: (limits[worker], worker))
        anywhere = all(len(replica.workers) == len(limits) for replica in replicas)
        where: dict[int, int] = {}
        steps = _COMPLETIONS

        def fill(number: int, spare: int) -> bool:
            if number == len(workers):
                return len(where) == len(replicas)
            worker, later = workers[number], frozenset(workers[number:])
            unplaced = [index for index in largest_first if index not in where]
            if any(later.isdisjoint(replicas[index].workers) for index in unplaced):
                return False
            unplaced = [index for index in unplaced if worker in replicas[index].workers]
            # For each position, the bytes of the replicas from there to the end.
            following = [*accumulate((replicas[index].bytes for index in reversed(unplaced)), initial=0)][
                ::-1
            ]
            # If all remaining workers are equal, it does not matter which of them gets the largest replica: try only this one.
            alike = anywhere and limits[workers[-1]] == limits[worker]
            models: set[int] = set()

            def choose(start: int, free: int) -> bool:
                nonlocal steps
                failed = -1
                for place in range(start, len(unplaced)):
                    if free - following[place] > spare or steps <= 0:
                        return False
                    replica = replicas[unplaced[place]]
                    if replica.bytes > free or replica.bytes == failed or replica.model in models:
                        continue
                    steps -= 1
                    where[unplaced[place]] = worker
                    models.add(replica.model)
                    if choose(place + 1, free - replica.bytes):
                        return True
                    del where[unplaced[place]]
                    models.remove(replica.model)
                    if alike and place == 0:
                        return False
                    failed = replica.bytes
                return free <= spare and fill(number + 1, spare - free)

            return choose(0, limits[worker])

        if not fill(0, sum(limits) - sum(replica.bytes for replica in replicas)):
            return False
        self.arrange(
            [[index for index, worker in where.items() if worker == number] for number in self.workers]
        )
        return True
