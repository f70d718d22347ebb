"""Batches: the waiting requests that share the next execution, its compiled size, and its cost.

Costs are measured by the warm-up and learned from then on, per (variant, size).

After an execution of size s took x seconds, with e(s) the estimate before it:

    e(s) <- e(s) + ALPHA * (min(x, OUTLIER_FACTOR * e(s)) - e(s))

so a single sample raises an estimate by at most ALPHA * (OUTLIER_FACTOR - 1) of itself, 20 %, and lowers it by at most
ALPHA of itself.

Only sizes that run are measured, so a size that was slow once would never be chosen or measured
again. Therefore every estimate o of the same variant that is higher than its seed suggests sinks a little whenever
another size s is measured:

    target = seed(o) * e(s) / seed(s);   if e(o) > target:  e(o) <- e(o) + RELAX * (target - e(o))

until it is tried again and the measurement decides.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite

from rsrv.scheduler.events import CallerError

#: share of a new sample in the learned cost.
ALPHA = 0.2
#: a sample counts at most this many times the estimate.
OUTLIER_FACTOR = 2.0
#: the share of their excess by which estimates that no execution measures sink back.
RELAX = 0.01


class VariantCosts:
    """The compiled sizes of one variant and the seconds that one execution of each is expected to take.

    `capacity` of a size is the number of useful rows it may carry: min(size, max_rows).
    """

    __slots__ = ("_seeds", "best_index", "capacities", "seconds", "sizes")

    def __init__(
        self,
        seeds: Mapping[int, float],
        *,
        max_rows: int | None = None,
    ) -> None:
        #: ascending, at least one, each >= 1.
        self.sizes = tuple(sorted(seeds))
        self.capacities = tuple(size if max_rows is None else min(size, max_rows) for size in self.sizes)
        self._seeds = tuple(float(seeds[size]) for size in self.sizes)
        #: estimates, parallel to `sizes`; finite and > 0.
        self.seconds = list(self._seeds)
        #: index of the size that costs least per row when it is full (ties: the larger one).
        self.best_index = self._cheapest(None)

    @property
    def max_rows(self) -> int:
        """Most useful rows that one execution takes."""
        return self.capacities[-1]

    def learn(self, size: int, sample: float) -> None:
        """Learn from one measured execution; ignore a sample that is not a positive duration."""
        if not (isfinite(sample) and sample > 0.0):
            return
        measured = self.sizes.index(size)
        old = self.seconds[measured]
        new = self.seconds[measured] = old + ALPHA * (min(sample, OUTLIER_FACTOR * old) - old)
        self._sink(new / self._seeds[measured])

    def relax(self) -> None:
        """Lower estimates above their seeds a little, after a request was shed because of them.

        If all requests are shed nothing is measured; so the estimates sink until a request is tried and measured.
        """
        self._sink(1.0)

    def _sink(self, ratio: float) -> None:
        """Lower estimates above `ratio` times their seeds a little."""
        for index, seed in enumerate(self._seeds):
            excess = self.seconds[index] - seed * ratio
            if excess > 0.0:
                self.seconds[index] -= RELAX * excess
        self.best_index = self._cheapest(None)

    def cheapest_seconds(self, rows: int) -> float:
        """Seconds of the cheapest single execution that holds `rows` rows; inf if none does."""
        return min(
            (cost for cost, room in zip(self.seconds, self.capacities, strict=True) if room >= rows),
            default=inf,
        )

    def smallest_fit_seconds(self, rows: int) -> float:
        """Seconds of the smallest size that holds `rows` rows; inf if none does."""
        for cost, room in zip(self.seconds, self.capacities, strict=True):
            if room >= rows:
                return cost
        return inf

    def request_seconds(self, rows: int, *, coalesce: bool) -> float:
        """Expected device time of one request of `rows` rows that shares its execution with no other.

        More rows than one execution takes (m) count as the fewest executions: rows // m full ones and one for the rest. A
        model that does not coalesce takes the smallest size that holds them.

        Raises:
            CallerError: without `coalesce`, no size holds that many rows.
        """
        if not coalesce:
            seconds = self.smallest_fit_seconds(rows)
            if seconds == inf:
                raise CallerError(f"no compiled size of {list(self.sizes)} holds {rows} rows")
            return seconds
        if rows == 0:
            return self.seconds[0]
        full, rest = divmod(rows, self.max_rows)
        return full * self.cheapest_seconds(self.max_rows) + (self.cheapest_seconds(rest) if rest else 0.0)

    def drain_seconds(self, rows: int) -> float:
        """Seconds until `rows` waiting rows are served, if batches can cut them anywhere.

        Takes the size that costs least per served row, as often as it can be filled, then the same for the rest, as
        `plan_batch` does with single rows. For requests of several rows it is a lower bound.
        """
        total = 0.0
        index = self.best_index
        if rows < self.capacities[index]:
            index = self._cheapest(rows)
        while rows > 0:
            room = self.capacities[index]
            if room >= rows:
                return total + self.seconds[index]
            full, rows = divmod(rows, room)
            total += full * self.seconds[index]
            if rows:
                index = self._cheapest(rows)
        return total

    def _cheapest(self, rows: int | None) -> int:
        """Index of the least cost per served row with `rows` > 0 waiting (None: any number).

        Ties go to more served rows.
        """
        best, best_cost, best_rows = 0, inf, 1
        for index, room in enumerate(self.capacities):
            served = room if rows is None or room < rows else rows
            cost = self.seconds[index]
            difference = cost * best_rows - best_cost * served if best_cost < inf else -1.0
            if difference < 0.0 or (difference == 0.0 and served > best_rows):
                best, best_cost, best_rows = index, cost, served
        return best


def variant_costs(
    model: str,
    costs: Mapping[tuple[int, int], float],
    *,
    max_rows: int | None,
) -> dict[int, VariantCosts]:
    """Split a program's costs by variant.

    Raises:
        CallerError: no compiled size at all, a size below 1, or a cost that is not a positive duration.
    """
    if not costs:
        raise CallerError(f"model {model!r} has no compiled size: give the measured cost of each")
    seeds: dict[int, dict[int, float]] = {}
    for (variant, size), seconds in costs.items():
        if size < 1 or not (isfinite(seconds) and seconds > 0.0):
            raise CallerError(
                f"model {model!r}, variant {variant}: size {size} costs {seconds} s;"
                " sizes start at 1 and costs are positive seconds"
            )
        seeds.setdefault(variant, {})[size] = seconds
    return {variant: VariantCosts(by_size, max_rows=max_rows) for variant, by_size in sorted(seeds.items())}


@dataclass(frozen=True, slots=True)
class Batch:
    """The first `count` waiting requests, `rows` rows together, in one execution of `size` rows."""

    size: int
    count: int
    rows: int
    #: expected cost of the execution.
    seconds: float


def plan_batch(
    waiting: Iterable[int],
    sizes: Sequence[int],
    seconds: Sequence[float],
    *,
    max_rows: int | None = None,
    coalesce: bool = True,
    limit: float = inf,
) -> Batch:
    """Choose the execution that costs least per served row.

    With w1, w2, ... the rows of the waiting requests in the order of service, and c(s) = min(s, max_rows):

        n(s)     = the largest n with w1 + ... + wn <= c(s), at least 1
        rows(s)  = w1 + ... + w_n(s)
        choice   = argmin over s of seconds(s) / rows(s)

    Ties go to more served rows, then to the smaller size. Requests are taken whole and in order, the
    front one always. Requests without rows join any batch; if no others wait they get the smallest size.
    Without `coalesce` the front request runs alone, at the smallest size that holds it.

    Sizes that take longer than `limit` seconds are left out, unless all that hold the front request do.

    One pass over as many requests as the largest size holds, however many wait.

    Args:
        waiting: rows of each request in the order of service, at least one; read only as far as needed.
        sizes: compiled sizes, ascending.
        seconds: expected cost of one execution of each.
        max_rows: most useful rows in one execution; None: as many as the size.
        coalesce: whether requests may share an execution.
        limit: seconds after which the front request's deadline would pass.

    Raises:
        CallerError: nothing waits, or no size holds the front request.
    """
    rest = iter(waiting)
    rows = next(rest, None)
    if rows is None:
        raise CallerError("a batch needs at least one request")
    count = 1
    following = next(rest, None) if coalesce else None
    best: Batch | None = None
    for size, cost in zip(sizes, seconds, strict=True):
        room = size if max_rows is None or size < max_rows else max_rows
        if rows > room:
            # Only before the first size that holds the front request: from then on `rows` fits the room.
            continue
        while following is not None and rows + following <= room:
            rows += following
            count += 1
            following = next(rest, None)
        if best is not None and (cost > limit) != (best.seconds > limit):
            if cost > limit:
                continue
        elif best is not None:
            # Cross-multiplied, because rows may be 0: no rows at any cost are worse than some rows.
            difference = cost * best.rows - best.seconds * rows
            if difference > 0.0 or (difference == 0.0 and rows <= best.rows):
                continue
        best = Batch(size, count, rows, cost)
        if not coalesce:
            break
    if best is None:
        raise CallerError(f"no compiled size of {list(sizes)} holds a request of {rows} rows")
    return best
