"""Batches: the waiting requests that share the next execution, its compiled size, and its cost.

Costs are measured by the warm-up and learned from then on, per (variant, size).

After an execution of size s took x seconds, with e(s) the estimate before it:

    e(s) <- e(s) + ALPHA * (min(x, OUTLIER_FACTOR * e(s)) - e(s))

so a single sample raises an estimate by at most ALPHA * (OUTLIER_FACTOR - 1) of itself, 20 %, and lowers it by at most
ALPHA of itself.

Only executed sizes are measured, so a size that was slow once would never be chosen and measured again. Therefore, when
a size s is measured, the estimate of each size o of the same variant sinks a little if it is higher than the seeds suggest:

    target = seed(o) * e(s) / seed(s);   if e(o) > target:  e(o) <- e(o) + RELAX * (target - e(o))

So the estimate of size o sinks until the size is chosen again. Its execution then measures the cost.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf, isfinite

from rsrv.scheduler.events import CallerError

#: Share of a new sample in the learned cost.
ALPHA = 0.2
#: A sample is limited to this many times the estimate.
OUTLIER_FACTOR = 2.0
#: Share of the excess by which an estimate falls when another size is measured.
RELAX = 0.01


class VariantCosts:
    """The compiled sizes of one variant, and the expected seconds of one execution of each size.

    The capacity of a size is the number of useful rows that it may carry: min(size, max_rows).
    """

    __slots__ = ("_seeds", "best_index", "capacities", "seconds", "sizes")

    def __init__(
        self,
        seeds: Mapping[int, float],
        *,
        max_rows: int | None = None,
    ) -> None:
        #: Compiled sizes, ascending. There is at least one, and each is at least 1.
        self.sizes = tuple(sorted(seeds))
        self.capacities = tuple(size if max_rows is None else min(size, max_rows) for size in self.sizes)
        self._seeds = tuple(float(seeds[size]) for size in self.sizes)
        #: Estimated costs, parallel to `sizes`. They are finite and positive.
        self.seconds = list(self._seeds)
        #: Index of the size that costs least per row when it is full. If several sizes cost the same, the largest of these.
        self.best_index = self._cheapest(None)

    @property
    def max_rows(self) -> int:
        """Maximum number of useful rows in one execution."""
        return self.capacities[-1]

    def learn(self, size: int, sample: float) -> None:
        """Learn from one measured execution. Ignore a sample that is not a positive duration."""
        if not (isfinite(sample) and sample > 0.0):
            return
        measured = self.sizes.index(size)
        old = self.seconds[measured]
        new = self.seconds[measured] = old + ALPHA * (min(sample, OUTLIER_FACTOR * old) - old)
        self._sink(new / self._seeds[measured])

    def relax(self) -> None:
        """Slightly lower each estimate that exceeds its seed, because a request was shed on the basis of the estimates.

        If all requests are shed, nothing is measured. So the estimates sink until a request is executed and measured.
        """
        self._sink(1.0)

    def _sink(self, ratio: float) -> None:
        """Slightly lower each estimate that exceeds `ratio` times its seed."""
        for index, seed in enumerate(self._seeds):
            excess = self.seconds[index] - seed * ratio
            if excess > 0.0:
                self.seconds[index] -= RELAX * excess
        self.best_index = self._cheapest(None)

    def cheapest_seconds(self, rows: int) -> float:
        """Seconds of the cheapest single execution that holds `rows` rows, or inf if no size holds them."""
        return min(
            (cost for cost, room in zip(self.seconds, self.capacities, strict=True) if room >= rows),
            default=inf,
        )

    def smallest_fit_seconds(self, rows: int) -> float:
        """Seconds of the smallest size that holds `rows` rows, or inf if no size holds them."""
        for cost, room in zip(self.seconds, self.capacities, strict=True):
            if room >= rows:
                return cost
        return inf

    def request_seconds(self, rows: int, *, coalesce: bool) -> float:
        """Expected device time of one request of `rows` rows that shares its execution with no other.

        If `rows` exceeds the capacity m of one execution, the request takes rows // m full executions and one for the remaining
        rows. Without `coalesce`, it takes one execution of the smallest size that holds it.

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
        full, remainder = divmod(rows, self.max_rows)
        return full * self.cheapest_seconds(self.max_rows) + (
            self.cheapest_seconds(remainder) if remainder else 0.0
        )

    def drain_seconds(self, rows: int) -> float:
        """Seconds until `rows` waiting rows are served, if batches can divide them anywhere.

        The size that costs least per served row is executed as often as it can be filled. The same rule then applies to the
        remaining rows. `plan_batch` does the same with requests of one row. For requests of several rows, the result is a lower
        bound.
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

    def row_seconds(self) -> float:
        """Seconds per row at the size that costs least when it is full."""
        return self.seconds[self.best_index] / self.capacities[self.best_index]

    def _cheapest(self, rows: int | None) -> int:
        """Return the index of the size with the least cost per served row. If costs are equal, prefer more served rows.

        `rows`: number of waiting rows, at least 1. None: enough rows to fill any size.
        """
        best, best_cost, best_rows = 0, inf, 1
        for index, room in enumerate(self.capacities):
            served = room if rows is None or room < rows else rows
            cost = self.seconds[index]
            difference = cost * best_rows - best_cost * served
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


@dataclass(slots=True)
class Batch:
    """One execution of `size` rows for the first `count` waiting requests, which have `rows` rows together."""

    size: int
    count: int
    rows: int
    #: Expected cost of the execution.
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

    If costs are equal, more served rows are preferred, and then the smaller size. Requests are taken whole and in order. The
    front request is always taken. Requests without rows join any batch. If no other requests wait, they get the smallest size.
    Without `coalesce`, the front request executes alone, at the smallest size that holds it.

    Sizes that take longer than `limit` seconds are left out, unless all sizes that hold the front request take longer.

    Args:
        waiting: rows of each request in the order of service. At least one request waits. Only as many requests are read as
            the largest size holds.
        sizes: compiled sizes, ascending.
        seconds: expected cost of one execution of each size.
        max_rows: maximum number of useful rows in one execution; None: as many as the size.
        coalesce: whether requests may share an execution.
        limit: seconds after which the front request's deadline would pass.

    Raises:
        CallerError: nothing waits, or no size holds the front request.
    """
    further = iter(waiting)
    rows = next(further, None)
    if rows is None:
        raise CallerError("a batch needs at least one request")
    count = 1
    following = next(further, None) if coalesce else None
    # The best size so far, its cost, its requests and their rows. A size of 0 means that no size holds the front request.
    best, best_cost, best_count, best_rows = 0, inf, 0, 0
    for size, cost in zip(sizes, seconds, strict=True):
        room = size if max_rows is None or size < max_rows else max_rows
        if rows > room:
            # This happens only before the first size that holds the front request. From then on, `rows` fits.
            continue
        while following is not None and rows + following <= room:
            rows += following
            count += 1
            following = next(further, None)
        if best and (cost > limit) != (best_cost > limit):
            if cost > limit:
                continue
        elif best:
            # Compare products, because `rows` may be 0: an execution without rows is worse than any execution with rows.
            difference = cost * best_rows - best_cost * rows
            if difference > 0.0 or (difference == 0.0 and rows <= best_rows):
                continue
        best, best_cost, best_count, best_rows = size, cost, count, rows
        if not coalesce:
            break
    if not best:
        raise CallerError(f"no compiled size of {list(sizes)} holds a request of {rows} rows")
    return Batch(best, best_count, best_rows, best_cost)


@dataclass(slots=True)
class PaddedBatch(Batch):
    """One execution for waiting requests of several lengths, at a variant that holds the longest of them."""

    variant: int
    #: Number of requests to take from the front of each variant's queue. The front request's variant comes first.
    counts: dict[int, int]


def plan_padded_batch(
    waiting: Mapping[int, Sequence[int]],
    tables: Mapping[int, VariantCosts],
    front: int,
    *,
    limit: float = inf,
) -> PaddedBatch:
    """Choose the execution that costs least for the rows that it serves, if the variants are lengths.

    A request may execute at its own variant, or padded at a longer one. For each variant w from the front request's variant
    on, an execution at w takes the front request first. Then it takes the waiting requests of w, then those of the next
    shorter variant, and so on, until one does not fit. Within a variant, it takes whole requests in the order of service.
    Long rows come first, because a short row in the place of a long row wastes most of it. With u(v) the seconds that a row
    of variant v costs at v's best size:

        choice = argmin over w, s of  seconds(w, s) / sum of u(v) * rows of variant v

    So a short row counts less than a long row, because it would cost less at its own variant.

    The front variant's own batch of `plan_batch` is always a candidate. Any other execution is a candidate only if it does
    makes the n waiting rows end earlier on average. In executions of their own, its r rows of the front request's variant would
    take `a` seconds, and its rows of other variants b seconds (by `VariantCosts.drain_seconds`). So the r rows would end after
    `a` seconds, and all other waiting rows after a + b. In the one execution, which takes c seconds, all rows count as served
    after c. So the condition is

        n * c  <  r * a + (n - r) * (a + b)

    If many rows wait, this leaves out executions that cost more than they save. If few rows wait, it also leaves out
    executions in which short rows wait for long rows and save little.

    Args:
        waiting: variant -> rows of the requests that may join, in the order of service.
        tables: costs by variant, ascending lengths.
        front: variant of the front request. That request is the first one in `waiting[front]`.
        limit: seconds after which the front request's deadline would pass. Executions over several lengths must end by then.

    Raises:
        CallerError: no size holds the front request.
    """
    own = tables[front]
    alone = plan_batch(waiting[front], own.sizes, own.seconds, max_rows=own.max_rows, limit=limit)
    best = PaddedBatch(alone.size, alone.count, alone.rows, alone.seconds, front, {front: alone.count})
    best_worth, total = alone.rows * own.row_seconds(), sum(map(sum, waiting.values()))
    for variant, table in tables.items():
        if variant < front or (variant > front and not waiting.get(variant)):
            continue
        counts, rows = {front: 1}, {front: waiting[front][0]}
        joined = waiting[front][0]
        further = _longest_first(waiting, front, variant)
        following = next(further, None)
        for size, cost, room in zip(table.sizes, table.seconds, table.capacities, strict=True):
            while following is not None and joined + following[1] <= room:
                shorter, more = following
                joined += more
                counts[shorter] = counts.get(shorter, 0) + 1
                rows[shorter] = rows.get(shorter, 0) + more
                following = next(further, None)
            if joined > room or len(counts) == 1 or cost > limit:
                continue
            worth = sum(
                tables[joined_variant].row_seconds() * count for joined_variant, count in rows.items()
            )
            if cost * best_worth >= best.seconds * worth:
                continue
            first = own.drain_seconds(rows[front])
            apart = first + sum(
                tables[joined_variant].drain_seconds(rows[joined_variant])
                for joined_variant in rows
                if joined_variant != front
            )
            if total * cost < rows[front] * first + (total - rows[front]) * apart:
                best = PaddedBatch(size, sum(counts.values()), joined, cost, variant, dict(counts))
                best_worth = worth
    return best


def _longest_first(
    waiting: Mapping[int, Sequence[int]], front: int, longest: int
) -> Iterator[tuple[int, int]]:
    """Yield the variant and the rows of each request that may join the front request at the variant `longest`."""
    for variant in range(longest, -1, -1):
        for rows in islice(waiting.get(variant, ()), int(variant == front), None):
            yield variant, rows
