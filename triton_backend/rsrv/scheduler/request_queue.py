"""All live requests: how they enter the queues, and how they leave.

`take` removes requests from their queues for an execution, and `finish` ends them after it. All other requests end while they
wait: a request expires, is shed, is cancelled, is refused because its model is paused, removed or evicted, or fails because its
model's weights could not be loaded. There is one method for each of these cases, so each request is counted and ended once.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, KeysView, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from rsrv.scheduler.discipline import COMMITTED_LEVEL, Discipline
from rsrv.scheduler.events import (
    DEFAULT_PRIORITY,
    CallerError,
    ExecutionFinished,
    Finish,
    Instruction,
    Outcome,
    Reason,
    Request,
)
from rsrv.scheduler.model import ModelState
from rsrv.scheduler.statistics import OutcomeCounts, Stage
from rsrv.scheduler.variant_queue import Deadlines, LiveRequest, VariantQueue
from rsrv.scheduler.weight_states import ON_DEVICE, TAKING_BYTES
from rsrv.scheduler.weights import WeightAccounts

#: Tolerance in seconds: because sums of times are rounded, a deadline may seem to be missed by less than this.
SLACK = 1e-6

_ANSWERED = Outcome.ANSWERED


class EndedWait(NamedTuple):
    """A request that waited, and ended without an execution."""

    model: ModelState
    entry: LiveRequest
    outcome: Outcome


class RequestQueues:
    """The queues of all models, taken together."""

    __slots__ = (
        "_models",
        "_number",
        "arrived",
        "deadlines",
        "departed",
        "dirty",
        "discipline",
        "ended",
        "exclusive",
        "late_checks",
        "live",
        "queued",
        "runs",
    )

    def __init__(self, models: Mapping[str, ModelState], discipline: Discipline) -> None:
        #: Defines the order in which requests wait.
        self.discipline = discipline
        #: Known models. The scheduler adds and removes them.
        self._models = models
        #: Every request that has arrived and not finished, queued or executing.
        self.live: dict[int, LiveRequest] = {}
        #: Number of waiting requests.
        self.queued = 0
        #: Number of waiting requests that are exclusive.
        self.exclusive = 0
        #: Number of requests that arrived since the start.
        self.arrived = 0
        #: Latest sequence number that was given to a request.
        self._number = 0
        #: Deadlines of the waiting requests.
        self.deadlines = Deadlines()
        #: Times at which to check whether requests will be late (`late_requests`). Used only if the discipline sheds.
        self.late_checks = Deadlines()
        #: Waiting requests of each meta model's run, oldest first. Only the first request of each run is committed.
        self.runs: dict[int, list[LiveRequest]] = {}
        #: Models that changed since the last `Scheduler._settle`. This is a dictionary to keep the order.
        self.dirty: dict[ModelState, None] = {}
        #: Requests that ended without an execution, for `RequestTimes.keep_ended` at the end of the event.
        self.ended: list[EndedWait] = []
        #: Outcomes of requests for unknown models, and of requests whose model was removed.
        self.departed = OutcomeCounts()

    def check(self, requests: Sequence[Request], runs: KeysView[int]) -> None:
        """Check that requests may be added. `runs` are the ids of admitted and waiting runs.

        Raises:
            CallerError: an id is in use already or given twice, or a number of rows is negative.
        """
        live, ids = self.live, set[int]()
        for request in requests:
            if request.id in ids or request.id in live or request.id in runs:
                counts = Counter(request.id for request in requests)
                twice = [id for id, count in counts.items() if count > 1 or id in live or id in runs]
                raise CallerError(f"ids that are in use already, or twice in one event: {twice}")
            ids.add(request.id)
            if request.rows < 0:
                raise CallerError(f"request {request.id} has {request.rows} rows")
            if request.priority < 0:
                raise CallerError(f"request {request.id} has priority {request.priority}; 1 is the highest")

    def arrive(
        self, requests: Sequence[Request], now: float, out: list[Instruction], *, on_demand: bool
    ) -> dict[ModelState, list[int]]:
        """Queue each request, or end it for the first reason that `_reason` finds.

        Returns:
            The requests that found the queue full, by model. `refuse_full` ends them once the time of a retry is known.
        """
        deadlines = self.deadlines
        if deadlines.heap and deadlines.heap[0][0] <= now:
            # Expired requests must free their places first.
            self.expire(now, out)
        models, live, sequence = self._models, self.live, self._number
        place, sheds, runs = self.discipline.place, self.discipline.sheds, self.runs
        self.arrived += len(requests)
        self._number += len(requests)
        queued: dict[ModelState, list[int]] = {}
        full: dict[ModelState, list[int]] = {}
        for request in requests:
            sequence += 1
            model = models.get(request.model)
            if model is None:
                self.departed.refuse(Reason.UNKNOWN_MODEL)
                out.append(Finish(request.id, Outcome.REFUSED, Reason.UNKNOWN_MODEL))
                continue
            queue = model.queues.get(request.variant)
            reason = _reason(model, queue, request, now, on_demand)
            if reason is Reason.QUEUE_FULL:
                full.setdefault(model, []).append(request.id)
                continue
            if reason is not None:
                _end_arrival(model, request.id, reason, now, out)
                continue
            assert queue is not None, "a request of an unknown variant does not wait"
            deadline = request.deadline
            run = request.run
            level = COMMITTED_LEVEL if run and run not in runs else request.priority or DEFAULT_PRIORITY
            due = deadline if request.due is None else request.due
            live[request.id] = entry = LiveRequest(request, place(level, due, sequence), queue, now)
            queue.push(entry)
            model.queued += 1
            self.exclusive += request.exclusive
            if deadline is not None and deadline < inf:
                deadlines.push(entry, deadline)
                if sheds and not run:
                    self.late_checks.push(entry, -inf)
            if run:
                runs.setdefault(run, []).append(entry)
            ids = queued.get(model)
            if ids is None:
                queued[model] = ids = []
            ids.append(request.id)
        for model, ids in queued.items():
            self.queued += len(ids)
            self.dirty[model] = None
            if model.queued == len(ids) and not model.executions:
                model.weights.observe_pause(now)
            if model.weights.state not in ON_DEVICE:
                model.totals.miss_weights(len(ids))
            model.weights.last_arrival = now
            model.history.add(now, "arrived", ids)
        if deadlines.heap:
            deadlines.clean(self.queued)
            self.late_checks.clean(self.queued)
        return full

    def refuse_full(
        self,
        full: Mapping[ModelState, Sequence[int]],
        retry_after: float,
        now: float,
        out: list[Instruction],
    ) -> None:
        """End requests that found the queue full. `retry_after`: seconds until a retry is likely to succeed."""
        for model, ids in full.items():
            _refuse(model, ids, Reason.QUEUE_FULL, retry_after, now, out)

    def cancel(self, requests: Sequence[int], now: float, out: list[Instruction]) -> None:
        """End these requests if they wait. Requests that execute are answered: an execution is never interrupted."""
        for request in requests:
            entry = self.live.get(request)
            if entry is not None and entry.queue is not None:
                model = self._take_out(entry, entry.queue, Outcome.CANCELLED)
                model.totals.counts.cancelled += 1
                model.history.add(now, "cancelled", (request,))
                out.append(Finish(request, Outcome.CANCELLED))

    def expire(self, now: float, out: list[Instruction]) -> None:
        """End waiting requests whose deadline is `now` or earlier."""
        for entry, queue in self.deadlines.due(now):
            model = self._take_out(entry, queue, Outcome.EXPIRED)
            model.totals.counts.expired += 1
            model.totals.miss(model.stage)
            model.history.add(now, "expired", (entry.request.id,))
            out.append(Finish(entry.request.id, Outcome.EXPIRED))

    def shed(self, entry: LiveRequest, queue: VariantQueue, now: float, out: list[Instruction]) -> None:
        """End a waiting request whose deadline cannot be met any more."""
        model = self._take_out(entry, queue, Outcome.SHED)
        if not model.held:
            queue.costs.relax()
        model.totals.counts.shed += 1
        model.totals.miss(model.stage)
        model.history.add(now, "shed", (entry.request.id,))
        out.append(Finish(entry.request.id, Outcome.SHED))

    def reconfigure(self, discipline: Discipline) -> None:
        """Order all waiting requests by another discipline."""
        self.discipline = discipline
        self.late_checks.clear()
        for model in self._models.values():
            self.dirty[model] = None
            for queue in model.queues.values():
                for entry in queue.entries:
                    request = entry.request
                    level, _, sequence = entry.place
                    due = request.deadline if request.due is None else request.due
                    entry.place = discipline.place(level, due, sequence)
                    dated = request.deadline is not None and request.deadline < inf
                    if discipline.sheds and dated and not request.run:
                        self.late_checks.push(entry, -inf)
                queue.reorder()

    def refuse_all(self, model: ModelState, reason: Reason, now: float, out: list[Instruction]) -> None:
        """Refuse all waiting requests of a model."""
        _refuse(model, self._take_out_all(model, Outcome.REFUSED), reason, None, now, out)

    def fail_all(self, model: ModelState, error: str, now: float, out: list[Instruction]) -> None:
        """Fail all waiting requests of a model whose weights could not be loaded."""
        _fail(model, self._take_out_all(model, Outcome.FAILED), error, now, out)

    def take(
        self, model: ModelState, counts: Iterable[tuple[VariantQueue, int]], now: float
    ) -> tuple[int, ...]:
        """Remove the first `count` requests of each queue, and return them for an execution.

        They stay live, but are no longer queued.
        """
        taken: list[LiveRequest] = []
        for queue, count in counts:
            if self.exclusive:
                self.exclusive -= queue.front_exclusive
            taken += queue.take(count)
        self.queued -= len(taken)
        self.dirty[model] = None
        requests = tuple([entry.request.id for entry in taken])
        model.totals.queue_wait.observe_all([now - entry.arrived for entry in taken])
        if self.runs:
            self._promote([entry for entry in taken if entry.request.run])
        return requests

    def finish(
        self,
        model: ModelState,
        requests: Sequence[int],
        event: ExecutionFinished,
        now: float,
        out: list[Instruction],
    ) -> list[LiveRequest]:
        """End the requests of an execution. They are answered, or they fail with the execution's error.

        Returns:
            All requests if at least one of them took long enough to be kept by `ModelState.slowest`. Otherwise an empty list.
        """
        entries = list(map(self.live.pop, requests))
        latest, slow = model.slowest.latest_arrival(now), False
        for entry in entries:
            if entry.arrived < latest:
                slow = True
            deadline = entry.request.deadline
            if deadline is not None and deadline < now:
                model.totals.miss(Stage.EXECUTE)
        if event.error is None:
            model.totals.counts.answered += len(requests)
            out.extend([Finish(request, _ANSWERED) for request in requests])
        else:
            model.totals.counts.failed += len(requests)
            out.extend([Finish(request, Outcome.FAILED, error=event.error) for request in requests])
        model.history.add(now, "answered" if event.error is None else "failed", event)
        return entries if slow else []

    def model(self, entry: LiveRequest) -> ModelState:
        """Return the model of a waiting request."""
        return self._models[entry.request.model]

    def _take_out(self, entry: LiveRequest, queue: VariantQueue, outcome: Outcome) -> ModelState:
        """Remove a waiting request that ends without an execution. Return its model."""
        queue.remove(entry)
        del self.live[entry.request.id]
        self.queued -= 1
        self.exclusive -= entry.request.exclusive
        model = self._models[entry.request.model]
        model.queued -= 1
        self.dirty[model] = None
        self.ended.append(EndedWait(model, entry, outcome))
        if entry.request.run:
            self._promote((entry,))
        return model

    def _promote(self, left: Sequence[LiveRequest]) -> None:
        """Commit the next request of runs whose requests have left their queues. `left` has the requests that left.

        The oldest waiting request of each of these runs is committed. It gets a new number, as if it arrived now, so that
        committed requests of other runs precede it.
        """
        for entry in left:
            self.runs[entry.request.run].remove(entry)
        for run in {entry.request.run: None for entry in left}:
            remaining = self.runs[run]
            if not remaining:
                del self.runs[run]
                continue
            first = remaining[0]
            if first.place[0] != COMMITTED_LEVEL and first.queue is not None:
                request = first.request
                self._number += 1
                first.queue.move(
                    first, self.discipline.place(COMMITTED_LEVEL, request.deadline, self._number)
                )
                self.dirty[self._models[request.model]] = None

    def _take_out_all(self, model: ModelState, outcome: Outcome) -> list[int]:
        """Remove all requests of a model. Return their ids by sequence number."""
        waiting = [(entry, queue) for queue in model.queues.values() for entry in queue.entries]
        waiting.sort(key=lambda item: item[0].place[2])
        for entry, queue in waiting:
            self._take_out(entry, queue, outcome)
        return [entry.request.id for entry, _ in waiting]


def _reason(
    model: ModelState, queue: VariantQueue | None, request: Request, now: float, on_demand: bool
) -> Reason | Outcome | None:
    """Return the first reason, in this order, for which a request ends on arrival. None: the request waits."""
    weights = model.weights
    if queue is None:
        return Reason.UNKNOWN_VARIANT
    if request.rows > queue.costs.capacities[-1]:
        return Reason.TOO_MANY_ROWS
    if request.deadline is not None and not request.deadline > now:  # This also refuses NaN.
        return Outcome.EXPIRED
    if model.paused is not None and model.closed_to(request):
        return Reason.PAUSED
    if not on_demand and not weights.desired:
        return Reason.NOT_RESIDENT
    if weights.backoff_until > now and weights.refused_for(now):
        return Reason.NOT_LOADED if weights.load_error else Reason.NO_MEMORY
    if model.queued >= model.program.max_queue_depth and not request.accepted:
        return Reason.QUEUE_FULL
    return None


def _end_arrival(
    model: ModelState, id: int, reason: Reason | Outcome, now: float, out: list[Instruction]
) -> None:
    """End a request on arrival."""
    if isinstance(reason, Reason):
        if reason is Reason.NOT_LOADED:
            model.history.add(now, f"refused {reason.value}", (id,))
            _fail(model, (id,), model.weights.load_error, now, out)
        else:
            retry_after = model.weights.refused_for(now) if reason is Reason.NO_MEMORY else None
            _refuse(model, (id,), reason, retry_after, now, out)
        return
    model.totals.counts.expired += 1
    model.totals.miss(Stage.ARRIVAL)
    model.history.add(now, "expired on arrival", (id,))
    out.append(Finish(id, Outcome.EXPIRED))


def _refuse(
    model: ModelState,
    ids: Sequence[int],
    reason: Reason,
    retry_after: float | None,
    now: float,
    out: list[Instruction],
) -> None:
    if ids:
        model.totals.counts.refuse(reason, len(ids))
        model.history.add(now, f"refused {reason.value}", ids)
        out.extend([Finish(request, Outcome.REFUSED, reason, retry_after) for request in ids])


def _fail(model: ModelState, ids: Sequence[int], error: str, now: float, out: list[Instruction]) -> None:
    """Fail requests of a model whose weights could not be loaded."""
    retry_after = model.weights.refused_for(now)
    model.totals.counts.failed += len(ids)
    out.extend([Finish(request, Outcome.FAILED, Reason.NOT_LOADED, retry_after, error) for request in ids])


@dataclass(frozen=True, slots=True)
class LateRequest:
    """A request that would be late even if it executed next."""

    entry: LiveRequest
    queue: VariantQueue
    model: ModelState
    #: True if only the load of its weights makes it late, and the model is not held.
    absent: bool


def late_requests(
    late_checks: Deadlines,
    models: Mapping[str, ModelState],
    accounts: WeightAccounts,
    free: float,
    now: float,
) -> Iterator[LateRequest]:
    """Yield the requests that would be late even if they executed next, alone, at the cheapest size.

        max(free, end of the load) + cheapest execution  >  deadline

    `late_checks` has the time of the next check of each request: -inf for a new request, then the latest possible start of its
    execution, or of the load if its weights are absent. `free` is the time when the device will have done its current work.
    """
    later: list[tuple[LiveRequest, float]] = []
    for entry, queue in late_checks.due(free - SLACK):
        model = models[entry.request.model]
        deadline = entry.request.deadline
        assert deadline is not None, "a request without a deadline is never checked"
        latest = deadline - queue.costs.request_seconds(entry.rows, coalesce=model.program.coalesce)
        loaded = now + accounts.expected_wait(model.weights)
        if max(free, loaded) > latest + SLACK:
            yield LateRequest(entry, queue, model, free <= latest + SLACK and not model.held)
        else:
            absent = model.weights.state not in TAKING_BYTES
            later.append((entry, latest - model.weights.remaining_seconds if absent else latest))
    for entry, latest in later:
        late_checks.push(entry, latest)
