"""Which waiting requests share the next execution, and at which compiled size: a pure question."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from rsrv.scheduler.errors import CallerError


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

    With w1, w2, ... the rows of the waiting requests, oldest first, and c(s) = min(s, max_rows):

        n(s)     = the largest n with w1 + ... + wn <= c(s), at least 1
        rows(s)  = w1 + ... + w_n(s)
        choice   = argmin over s of seconds(s) / rows(s)

    Ties go to more served rows, then to the smaller size. Requests are taken whole and in order, the
    front one always. Requests without rows ride along; if nothing else waits they get the smallest size.
    Without `coalesce` the front request runs alone, at the smallest size that holds it.

    Sizes that take longer than `limit` seconds are left out, unless all that hold the front request do.

    One pass over as many requests as the largest size holds, whatever the number that wait.

    Args:
        waiting: rows of each request, oldest first, at least one; read only as far as needed.
        sizes: compiled sizes, ascending.
        seconds: expected cost of one execution of each.
        max_rows: most useful rows in one execution; None: as many as the size.
        limit: seconds after which somebody's deadline would pass.

    Raises:
        CallerError: nothing waits, or no size holds the front request.
    """
    rest = iter(waiting)
    rows = next(rest, None)
    if rows is None:
        raise CallerError("there is no batch of no requests")
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
