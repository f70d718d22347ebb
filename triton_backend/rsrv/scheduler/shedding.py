"""Which queued requests cannot be answered in time any more, whatever is done."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rsrv.scheduler.deadlines import Deadlines
from rsrv.scheduler.model import ModelState
from rsrv.scheduler.waiting import Entry, Lane
from rsrv.scheduler.weights import Residency, Weights

#: seconds by which a deadline may seem to be missed: sums of times are rounded.
SLACK = 1e-6


@dataclass(frozen=True, slots=True)
class Hopeless:
    """A request that would be late even if it were the next to execute."""

    entry: Entry
    lane: Lane
    model: ModelState
    #: whether it is only because its weights are elsewhere, and may not come.
    cold: bool


def hopeless(
    starts: Deadlines, models: Mapping[str, ModelState], weights: Weights, free: float, now: float
) -> Iterator[Hopeless]:
    """The requests that would be late even if they were the next to execute, alone, at the cheapest size:

        max(free, end of the load) + cheapest execution  >  deadline

    `starts` has for each the time at which this must be looked at again: -inf for new ones, and the latest
    start of the execution, or of the load while the weights are absent, for those that were looked at.
    `free` is when the device will have done what it has to do now.
    """
    later: list[tuple[Entry, float]] = []
    for entry, lane in starts.due(free - SLACK):
        model = models[entry.request.model]
        deadline = entry.request.deadline
        if deadline is None:
            continue
        latest = deadline - lane.costs.request(entry.rows, coalesce=model.program.coalesce)
        loaded = now + weights.expected_wait(model.holding, now)
        if max(free, loaded) > latest + SLACK:
            yield Hopeless(entry, lane, model, free <= latest + SLACK and not model.held)
        else:
            absent = model.holding.residency is Residency.ABSENT
            later.append((entry, latest - model.holding.remaining_seconds if absent else latest))
    for entry, latest in later:
        starts.push(entry, latest)
