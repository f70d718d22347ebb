"""The scheduler's record of one model."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import islice
from math import inf, isfinite

from rsrv.scheduler.batching import Batch, PaddedBatch, VariantCosts, plan_batch, plan_padded_batch
from rsrv.scheduler.discipline import COMMITTED_LEVEL, Place
from rsrv.scheduler.events import CallerError, Execute, Pause, PolicyChanged, Program, Request
from rsrv.scheduler.slowest import SlowestRequests
from rsrv.scheduler.statistics import ModelSnapshot, Stage, Totals
from rsrv.scheduler.variant_queue import VariantQueue
from rsrv.scheduler.weight_states import ON_DEVICE, WeightState
from rsrv.scheduler.weights import ModelWeights

#: Maximum number of periods of mode HOLD that are stored per model.
_HOLDS = 8


def check_program(program: Program) -> None:
    """Check that a program can be scheduled.

    Raises:
        CallerError: a limit or a weight is out of range. (Costs are checked by `variant_costs`.)
    """
    name = program.model
    if program.max_queue_depth < 1:
        raise CallerError(
            f"model {name!r}: max_queue_depth must be at least 1, not {program.max_queue_depth}"
        )
    if program.max_batch_rows is not None and program.max_batch_rows < 1:
        raise CallerError(f"model {name!r}: max_batch_rows must be at least 1, not {program.max_batch_rows}")
    if program.weight_bytes < 0:
        raise CallerError(f"model {name!r}: weight_bytes must not be negative, not {program.weight_bytes}")
    if any(size < 0 for size in (program.tensors or {}).values()):
        raise CallerError(f"model {name!r}: a tensor has a negative number of bytes")
    if not 0.0 <= program.load_seconds < inf:
        raise CallerError(f"model {name!r}: load_seconds must not be negative, not {program.load_seconds}")
    if not (isfinite(program.weight) and program.weight > 0.0):
        raise CallerError(f"model {name!r}: weight must be above 0, not {program.weight}")
    if not program.idle_seconds >= 0.0:
        raise CallerError(f"model {name!r}: idle_seconds must be at least 0, not {program.idle_seconds}")
    if program.padded and not program.coalesce:
        raise CallerError(f"model {name!r}: a padded axis needs requests that may share an execution")
    if not 0.0 <= program.max_delay < inf:
        raise CallerError(f"model {name!r}: max_delay must not be negative, not {program.max_delay}")


def with_policy(program: Program, changed: PolicyChanged) -> Program:
    """Return the program with the values of `changed`. The values are not checked."""
    return replace(
        program,
        weight=program.weight if changed.weight is None else changed.weight,
        max_delay=program.max_delay if changed.max_delay is None else changed.max_delay,
        max_queue_depth=(
            program.max_queue_depth if changed.max_queue_depth is None else changed.max_queue_depth
        ),
        idle_seconds=program.idle_seconds if changed.idle_seconds is None else changed.idle_seconds,
    )


class ModelState:
    """One known or draining model: its queues, weights, counters and history.

    The scheduler changes it. Disciplines see it as a `Candidate`.
    """

    __slots__ = (
        "backlog_seconds",
        "batch_seconds",
        "blocked_until",
        "dispatchable_at",
        "draining",
        "executing",
        "executions",
        "executions_by_size",
        "family",
        "finishing",
        "front",
        "has_work",
        "history",
        "holds",
        "name",
        "needs_warm_up",
        "paused",
        "place",
        "program",
        "queued",
        "queues",
        "slowest",
        "totals",
        "turn_seconds",
        "weight",
        "weights",
    )

    def __init__(
        self,
        program: Program,
        costs: Mapping[int, VariantCosts],
        weights: ModelWeights,
        *,
        needs_warm_up: bool,
    ) -> None:
        self.name = program.model
        self.reconfigure(program)
        #: Queue of waiting requests for each compiled variant, by variant.
        self.queues = {variant: VariantQueue(variant, table) for variant, table in costs.items()}
        #: Number of waiting requests in all queues.
        self.queued = 0
        #: Number of requests whose execution is in flight or about to be retried.
        self.executing = 0
        #: Number of executions that are in flight or about to be retried.
        self.executions = 0
        self.weights = weights
        self.draining = False
        #: True if a warm-up starts as soon as the model's weights are on the device.
        self.needs_warm_up = needs_warm_up
        self.paused = program.paused
        #: Periods in which the model was held, the latest last. A period that has not ended has the end inf.
        self.holds: list[tuple[float, float]] = []
        if self.held:
            self.holds.append((-inf, inf))
        #: Runs of meta models whose calls are accepted while the model drains. They were in progress when the draining began.
        self.finishing: Collection[int] = ()
        #: Time until which the model does not execute. Its retry evicted other models, and they execute first.
        self.blocked_until = -inf
        # `recount` derives the following values, up to `dispatchable_at`, from the queues and the costs.

        #: True if requests wait and the model is not held.
        self.has_work = False
        #: The queue whose front request is first in the order of service.
        self.front: VariantQueue | None = None
        #: The place of that front request.
        self.place: Place | None = None
        #: Expected device time of the waiting requests.
        self.backlog_seconds = 0.0
        #: Expected device time of the next execution.
        self.turn_seconds = 0.0
        #: Expected device time of a full execution of the front queue.
        self.batch_seconds = 0.0
        #: Time until which the model is delayed: it is blocked, or more requests may join its next execution.
        self.dispatchable_at = -inf
        self.totals = Totals()
        self.executions_by_size: dict[tuple[int, int], int] = {}
        self.history = weights.history
        self.slowest = SlowestRequests()

    def reconfigure(self, program: Program) -> None:
        """Use the values of this program from now on."""
        self.program = program
        self.weight = program.weight
        #: Name that all versions of the model share.
        self.family = program.name or program.model

    @property
    def committed(self) -> bool:
        """True if the model's first waiting request is a committed sub-call of a meta model's run.

        Committed requests precede all other requests.
        """
        return self.place is not None and self.place[0] == COMMITTED_LEVEL

    @property
    def busy(self) -> bool:
        """True if an execution or a warm-up uses the model's weights."""
        return self.executions > 0 or self.weights.state is WeightState.RESERVED

    @property
    def stage(self) -> Stage:
        """Stage in which the model's requests wait."""
        return Stage.QUEUE if self.weights.state in ON_DEVICE else Stage.LOAD

    def pause(self, mode: Pause | None, now: float) -> None:
        """Pause the model in this mode. None: resume it."""
        if self.held:
            self.holds[-1] = self.holds[-1][0], now
        self.paused = mode
        if self.held:
            self.holds.append((now, inf))
            del self.holds[:-_HOLDS]

    @property
    def held(self) -> bool:
        """True if the model is paused so that its waiting requests affect no decision."""
        return self.paused is Pause.HOLD

    def closed_to(self, request: Request) -> bool:
        """True if a request is refused because the model is paused."""
        if self.paused is Pause.DRAIN:
            return request.run not in self.finishing and not request.accepted
        return self.paused is Pause.REJECT

    def set_costs(self, costs: Mapping[int, VariantCosts]) -> None:
        """Use the costs that the warm-up measured."""
        for variant, queue in self.queues.items():
            queue.costs = costs[variant]

    def recount(self) -> None:
        """Derive the values that depend on the queues and the costs. A call costs O(variants * sizes)."""
        if not self.queued or self.paused is Pause.HOLD:
            self.has_work, self.front, self.place = False, None, None
            self.backlog_seconds = self.turn_seconds = self.batch_seconds = 0.0
            self.dispatchable_at = -inf
            return
        front: VariantQueue | None = None
        first: Place | None = None
        backlog = 0.0
        coalesce = self.program.coalesce
        for queue in self.queues.values():
            if queue.entries:
                place = queue.entries[0].place
                backlog += queue.seconds(coalesce=coalesce)
                if first is None or place < first:
                    front, first = queue, place
        assert front is not None, "a queued request is in a queue"
        self.has_work, self.front, self.place, self.backlog_seconds = True, front, first, backlog
        # The next execution has the size that is cheapest when full, unless fewer rows wait.
        self.batch_seconds = front.costs.seconds[front.costs.best_index]
        self.turn_seconds = min(backlog, self.batch_seconds)
        self.dispatchable_at = self.blocked_until
        if self.program.max_delay:
            self.dispatchable_at = max(self.dispatchable_at, self._delay_ends(front))

    def _delay_ends(self, front: VariantQueue) -> float:
        """Return the time until which the front request should wait for others. -inf: waiting gains nothing."""
        costs, entries = front.costs, front.entries
        if (
            entries[0].place[0] == COMMITTED_LEVEL
            or front.front_exclusive
            or front.rows >= costs.capacities[costs.best_index]
        ):
            return -inf
        program = self.program
        ahead = max(self.plan(front).seconds, front.seconds(coalesce=program.coalesce))
        # All deadlines are compared, because the order of service is not the order of deadlines.
        deadlines = (entry.request.deadline for entry in entries)
        soonest = min((deadline for deadline in deadlines if deadline is not None), default=inf)
        return min(entries[0].arrived + program.max_delay, soonest - ahead)

    def plan(self, queue: VariantQueue, limit: float = inf) -> Batch:
        """Plan an execution that includes the front request of this queue. See `plan_batch` and `plan_padded_batch`."""
        if self.program.padded:
            return self._plan_padded(queue, limit)
        return plan_batch(
            queue.waiting_rows(),
            queue.costs.sizes,
            queue.costs.seconds,
            max_rows=self.program.max_batch_rows,
            coalesce=self.program.coalesce,
            limit=limit,
        )

    def _plan_padded(self, queue: VariantQueue, limit: float) -> PaddedBatch:
        tables = {variant: queue.costs for variant, queue in self.queues.items()}
        most = max(table.max_rows for table in tables.values())
        joining = [queue] if queue.front_exclusive else self.queues.values()
        waiting = {
            joined.variant: [*islice(joined.waiting_rows(), most)]
            for joined in joining
            if joined.entries and (joined is queue or not joined.front_exclusive)
        }
        return plan_padded_batch(waiting, tables, queue.variant, limit=limit)

    def started(self, execute: Execute) -> None:
        """Count an execution that starts."""
        requests = len(execute.requests)
        self.weights.unserved = False
        self.queued -= requests
        self.executing += requests
        self.executions += 1
        totals = self.totals
        totals.dispatches += 1
        totals.useful_rows += execute.rows
        totals.rows.observe(execute.rows)
        totals.padding.observe(execute.size - execute.rows)
        key = (execute.variant, execute.size)
        self.executions_by_size[key] = self.executions_by_size.get(key, 0) + 1

    def ended(self, execute: Execute) -> None:
        """Count the end of an execution that is not retried."""
        self.executing -= len(execute.requests)
        self.executions -= 1

    def snapshot(self) -> ModelSnapshot:
        """Return the model's statistics."""
        tables, totals = [queue.costs for queue in self.queues.values()], self.totals
        return ModelSnapshot(
            weights=self.weights.state,
            pinned=self.weights.pinned,
            draining=self.draining,
            paused=self.paused,
            queued=self.queued,
            executing=self.executing,
            outcomes=totals.counts.outcomes(),
            refused=dict(totals.counts.refused),
            dispatches=totals.dispatches,
            useful_rows=totals.useful_rows,
            padded_rows=int(totals.padding.sum),
            device_seconds=totals.device_seconds,
            sizes=dict(self.executions_by_size),
            costs={
                (variant, size): seconds
                for variant, queue in self.queues.items()
                for size, seconds in zip(queue.costs.sizes, queue.costs.seconds, strict=True)
            },
            weight_bytes=self.program.weight_bytes,
            device_bytes=self.weights.bytes,
            loads=self.weights.loads,
            evictions=sum(totals.evictions.values()),
            load_seconds=self.weights.load_seconds,
            backlog_seconds=self.backlog_seconds,
            row_seconds=min(table.row_seconds() for table in tables),
            max_rows=max(table.max_rows for table in tables),
        )
