"""The scheduler: one pure state machine per device.

It is told what happened and answers what to do (`events`). Time is an argument. It does no I/O, reads no
clock, takes no lock and starts no thread; the loop that owns it does all that. Equal events at equal
times give equal instructions, so a recorded run can be replayed.

Each event is handled in four steps:

1. check: an event that breaks the contract raises `CallerError` and changes nothing;
2. take it in: requests are queued or refused, executions and loads end;
3. expire: queued requests whose deadline is `now` or earlier end;
4. give work: absent weights that somebody waits for are loaded; while fewer than `depth` executions are
   in flight, the discipline chooses among the resident models with work, and `plan_batch` among its
   waiting requests.

So a request that is expired or cancelled never reaches the device, and a model whose weights are on
their way delays nobody else.
"""

from collections import Counter
from dataclasses import dataclass
from typing import assert_never

from rsrv.runtime.scheduler import invariants
from rsrv.runtime.scheduler.coalesce import plan_batch
from rsrv.runtime.scheduler.costs import variant_costs
from rsrv.runtime.scheduler.deadlines import Deadlines
from rsrv.runtime.scheduler.disciplines import DISCIPLINES
from rsrv.runtime.scheduler.errors import CallerError
from rsrv.runtime.scheduler.events import (
    Event,
    Execute,
    ExecutionFinished,
    Finish,
    Instruction,
    LoadFailed,
    ModelAdded,
    ModelRemoved,
    Outcome,
    Program,
    Reason,
    Request,
    RequestsArrived,
    RequestsCancelled,
    Tick,
    WeightsLoaded,
)
from rsrv.runtime.scheduler.model import ModelState, check_program
from rsrv.runtime.scheduler.settings import SchedulerSettings
from rsrv.runtime.scheduler.snapshot import Counts, Snapshot
from rsrv.runtime.scheduler.waiting import Entry
from rsrv.runtime.scheduler.weights import Residency, Weights

_ANSWERED = Outcome.ANSWERED


@dataclass(frozen=True, slots=True)
class _Running:
    """An execution in flight."""

    execute: Execute
    model: ModelState
    started: float
    #: expected at its start.
    seconds: float


class Scheduler:
    """Decides for one device. Not safe for threads: one loop owns it."""

    def __init__(self, settings: SchedulerSettings | None = None) -> None:
        self.settings = settings or SchedulerSettings()
        self._now = float("-inf")
        #: loaded models. A removed one moves to `_draining` until nothing of it is on the device.
        self._models: dict[str, ModelState] = {}
        self._draining: dict[str, ModelState] = {}
        #: every request that arrived and has not finished, queued or executing.
        self._live: dict[int, Entry] = {}
        #: of those, how many wait.
        self._queued = 0
        self._deadlines = Deadlines()
        self._discipline = DISCIPLINES[self.settings.discipline]()
        self._weights = Weights()
        #: dispatch -> execution in flight, in order of start; at most `depth`.
        self._running: dict[int, _Running] = {}
        self._dispatches = 0
        #: when the latest execution ended.
        self._freed = float("-inf")
        self._arrived = 0
        #: models whose queue, costs or weights changed in this event (a dictionary for its order).
        self._touched: dict[ModelState, None] = {}
        #: sums of `backlog_seconds` and of `turn_seconds` over all models.
        self._backlog = 0.0
        self._round = 0.0
        #: requests that ended without a model, or with one that is gone.
        self._departed = Counts()

    # --- the one entry -----------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Take in what happened at `now`; what to do about it, in order.

        Raises:
            CallerError: the event contradicts earlier ones, or time runs backwards. Nothing has changed.
        """
        self._check(event, now)
        out: list[Instruction] = []
        match event:
            case RequestsArrived():
                self._arrive(event.requests, now, out)
            case ExecutionFinished():
                self._finish_execution(event, now, out)
            case Tick():
                pass
            case RequestsCancelled():
                self._cancel(event.requests, now, out)
            case WeightsLoaded():
                self._weights_loaded(event, now, out)
            case LoadFailed():
                self._load_failed(event, now, out)
            case ModelAdded():
                self._add(event.program, now, out)
            case ModelRemoved():
                self._remove(event.model, now, out)
            case _:
                assert_never(event)
        self._expire(now, out)
        self._settle(now, out)
        self._dispatch(now, out)
        self._now = now
        return out

    def _check(self, event: Event, now: float) -> None:
        if not now >= self._now:
            raise CallerError(f"time runs backwards: {now} after {self._now}")
        match event:
            case RequestsArrived():
                ids = {request.id for request in event.requests}
                if len(ids) != len(event.requests) or not ids.isdisjoint(self._live):
                    raise CallerError(f"ids in flight already, or twice in one event: {self._twice(event)}")
                for request in event.requests:
                    if request.rows < 0:
                        raise CallerError(f"request {request.id} has {request.rows} rows")
            case ExecutionFinished():
                if event.dispatch not in self._running:
                    raise CallerError(
                        f"dispatch {event.dispatch} is not in flight: {list(self._running)} are"
                    )
            case ModelAdded():
                check_program(event.program)
                name = event.program.model
                if name in self._models:
                    raise CallerError(f"model {name!r} is loaded already: remove it first")
                if name in self._draining:
                    raise CallerError(f"model {name!r} is draining: add it again after its EvictWeights")
            case ModelRemoved():
                if event.model not in self._models:
                    raise CallerError(f"there is no model {event.model!r} to remove")
            case WeightsLoaded() | LoadFailed():
                self._weights.check(event.model, event.epoch)
            case _:
                pass

    def _twice(self, event: RequestsArrived) -> list[int]:
        counts = Counter(request.id for request in event.requests)
        return [request for request, count in counts.items() if count > 1 or request in self._live]

    # --- requests ----------------------------------------------------------------------------------------

    def _arrive(self, requests: tuple[Request, ...], now: float, out: list[Instruction]) -> None:
        """Queue or refuse, in this order of checks:

        (1) unknown model, (2) unknown variant, (3) too many rows, (4) deadline passed, (5) queue full.
        """
        # Requests that are due give up their places first.
        self._expire(now, out)
        models, live, deadlines, sequence = self._models, self._live, self._deadlines, self._arrived
        self._arrived += len(requests)
        queued: dict[ModelState, list[int]] = {}
        full: list[tuple[ModelState, Request]] = []
        for request in requests:
            sequence += 1
            model = models.get(request.model)
            if model is None:  # (1)
                self._departed.refuse(Reason.UNKNOWN_MODEL)
                out.append(Finish(request.id, Outcome.REFUSED, Reason.UNKNOWN_MODEL))
                continue
            lane = model.lanes.get(request.variant)
            if lane is None:  # (2)
                self._refuse(model, request.id, Reason.UNKNOWN_VARIANT, now, out)
                continue
            if request.rows > lane.costs.capacities[-1]:  # (3)
                self._refuse(model, request.id, Reason.TOO_MANY_ROWS, now, out)
                continue
            deadline = request.deadline
            if deadline is not None and not deadline > now:  # (4), and a deadline that is no number
                model.counts.expired += 1
                model.story.add(now, "expired on arrival", (request.id,))
                out.append(Finish(request.id, Outcome.EXPIRED))
                continue
            if model.queued >= model.program.max_queue_depth:  # (5)
                full.append((model, request))
                continue
            entry = Entry(request, sequence, lane)
            live[request.id] = entry
            lane.push(entry)
            model.queued += 1
            if deadline is not None:
                deadlines.push(entry, deadline)
            ids = queued.get(model)
            if ids is None:
                queued[model] = ids = []
            ids.append(request.id)
        for model, ids in queued.items():
            self._queued += len(ids)
            self._touched[model] = None
            model.story.add(now, "arrived", ids)
        deadlines.clean(self._queued)
        if full:
            # After the others of this event, so that the estimate counts them.
            self._settle(now, out)
            retry_after = self._running_seconds(now) + self._round
            for model, request in full:
                self._refuse(model, request.id, Reason.QUEUE_FULL, now, out, retry_after)

    def _refuse(
        self,
        model: ModelState,
        request: int,
        reason: Reason,
        now: float,
        out: list[Instruction],
        retry_after: float | None = None,
    ) -> None:
        model.counts.refuse(reason)
        model.story.add(now, f"refused {reason.value}", (request,))
        out.append(Finish(request, Outcome.REFUSED, reason, retry_after))

    def _cancel(self, requests: tuple[int, ...], now: float, out: list[Instruction]) -> None:
        for request in requests:
            entry = self._live.get(request)
            if entry is not None and entry.lane is not None:
                model = self._withdraw(entry)
                model.counts.cancelled += 1
                model.story.add(now, "cancelled", (request,))
                out.append(Finish(request, Outcome.CANCELLED))

    def _expire(self, now: float, out: list[Instruction]) -> None:
        for entry in self._deadlines.due(now):
            model = self._withdraw(entry)
            model.counts.expired += 1
            model.story.add(now, "expired", (entry.request.id,))
            out.append(Finish(entry.request.id, Outcome.EXPIRED))

    def _withdraw(self, entry: Entry) -> ModelState:
        """Take a queued request out of its queue; its caller ends it."""
        lane = entry.lane
        assert lane is not None
        lane.remove(entry)
        del self._live[entry.request.id]
        self._queued -= 1
        model = self._models[entry.request.model]
        model.queued -= 1
        self._touched[model] = None
        return model

    def _withdraw_all(self, model: ModelState) -> list[int]:
        """Take all of a model's requests out of its queue, oldest first; the caller ends them."""
        entries = [entry for lane in model.lanes.values() for entry in lane.entries()]
        entries.sort(key=lambda entry: entry.sequence)
        for entry in entries:
            self._withdraw(entry)
        return [entry.request.id for entry in entries]

    # --- executions --------------------------------------------------------------------------------------

    def _dispatch(self, now: float, out: list[Instruction]) -> None:
        """Give the device work until it has enough or nobody has any."""
        while len(self._running) < self.settings.depth:
            name = self._discipline.choose(now)
            if name is None:
                return
            model = self._models[name]
            lane = model.front
            assert lane is not None
            program = model.program
            batch = plan_batch(
                lane.waiting_rows(),
                lane.costs.sizes,
                lane.costs.seconds,
                max_rows=program.max_batch_rows,
                coalesce=program.coalesce,
            )
            self._dispatches += 1
            execute = Execute(
                self._dispatches, name, lane.variant, batch.size, batch.rows, lane.take(batch.count)
            )
            self._queued -= batch.count
            self._running[execute.dispatch] = _Running(execute, model, now, batch.seconds)
            model.started(execute)
            model.story.add(now, "execute", execute)
            out.append(execute)
            self._touched[model] = None
            self._settle(now, out)

    def _finish_execution(self, event: ExecutionFinished, now: float, out: list[Instruction]) -> None:
        running = self._running.pop(event.dispatch)
        self._freed = now
        model, execute, live = running.model, running.execute, self._live
        model.ended(execute, event.seconds)
        for request in execute.requests:
            del live[request]
        if event.error is None:
            model.lanes[execute.variant].costs.learn(execute.size, event.seconds)
            model.counts.answered += len(execute.requests)
            model.story.add(now, "answered", f"dispatch={execute.dispatch} seconds={event.seconds:.6f}")
            out.extend([Finish(request, _ANSWERED) for request in execute.requests])
        else:
            # How long it took to fail says nothing about the cost of success.
            model.counts.failed += len(execute.requests)
            model.story.add(now, "failed", f"dispatch={execute.dispatch} error={event.error}")
            out.extend([Finish(request, Outcome.FAILED, error=event.error) for request in execute.requests])
        if model.draining:
            self._drain(model, now, out)
        else:
            self._discipline.charge(model.name, event.seconds, now)
            self._touched[model] = None

    # --- models and weights ------------------------------------------------------------------------------

    def _add(self, program: Program, now: float, out: list[Instruction]) -> None:
        settings = self.settings
        costs = variant_costs(
            program.model,
            program.costs,
            max_rows=program.max_batch_rows,
            alpha=settings.cost_ema_alpha,
            outlier_factor=settings.cost_outlier_factor,
            relax=settings.cost_relax,
        )
        model = ModelState(program, costs, settings.story_length)
        self._models[model.name] = model
        model.story.add(now, "added", f"sizes={sorted(program.costs)}")
        self._load(model, now, out)

    def _remove(self, name: str, now: float, out: list[Instruction]) -> None:
        model = self._models[name]
        ids = self._withdraw_all(model)
        model.counts.refuse(Reason.UNLOADED, len(ids))
        out.extend([Finish(request, Outcome.REFUSED, Reason.UNLOADED) for request in ids])
        model.story.add(now, "removed", ids)
        self._settle(now, out)
        self._discipline.remove(name)
        del self._models[name]
        model.draining = True
        self._draining[name] = model
        self._drain(model, now, out)

    def _drain(self, model: ModelState, now: float, out: list[Instruction]) -> None:
        """Let a removed model go once nothing executes on its weights and no load of them is under way."""
        residency = model.holding.residency
        if model.executions or residency is Residency.LOADING:
            return
        if residency is Residency.RESIDENT:
            evict = self._weights.evict(model.holding)
            model.story.add(now, "evict weights", evict)
            out.append(evict)
        del self._draining[model.name]
        self._departed.add(model.counts)

    def _weights_loaded(self, event: WeightsLoaded, now: float, out: list[Instruction]) -> None:
        model = self._loading(event.model, event.epoch)
        if model is None:
            return
        self._weights.loaded(model.holding, event.seconds)
        model.story.add(now, "weights loaded", f"epoch={event.epoch} seconds={event.seconds:.6f}")
        if model.draining:
            self._drain(model, now, out)
        else:
            self._touched[model] = None

    def _load_failed(self, event: LoadFailed, now: float, out: list[Instruction]) -> None:
        model = self._loading(event.model, event.epoch)
        if model is None:
            return
        self._weights.failed(model.holding)
        model.story.add(now, "load failed", f"epoch={event.epoch} error={event.error}")
        if model.draining:
            self._drain(model, now, out)
            return
        ids = self._withdraw_all(model)
        model.counts.failed += len(ids)
        out.extend([Finish(request, Outcome.FAILED, error=event.error) for request in ids])
        self._touched[model] = None

    def _loading(self, name: str, epoch: int) -> ModelState | None:
        """The model whose current load has this epoch; None if that load is over."""
        model = self._models.get(name) or self._draining.get(name)
        if model is None or model.holding.epoch != epoch or model.holding.residency is not Residency.LOADING:
            return None
        return model

    def _load(self, model: ModelState, now: float, out: list[Instruction]) -> None:
        load = self._weights.load(model.holding)
        model.story.add(now, "load weights", load)
        out.append(load)

    def _settle(self, now: float, out: list[Instruction]) -> None:
        """Bring the sums, the loads and the discipline up to date with the models that changed."""
        for model in self._touched:
            self._backlog -= model.backlog_seconds
            self._round -= model.turn_seconds
            model.recount()
            self._backlog += model.backlog_seconds
            self._round += model.turn_seconds
            if model.queued and model.holding.residency is Residency.ABSENT:
                self._load(model, now, out)
            if model.ready:
                self._discipline.update(model, now)
            else:
                self._discipline.remove(model.name)
        self._touched.clear()
        if not self._queued:
            # Rounding errors of the sums do not outlive a pause.
            self._backlog = self._round = 0.0

    # --- questions: none changes what is decided later ------------------------------------------------------

    def next_wakeup(self) -> float | None:
        """When a `Tick` is due: the soonest deadline of a queued request; None without one."""
        return self._deadlines.next()

    def backlog_seconds(self, now: float) -> float:
        """Expected device time until everything that waits or runs now is done; costs O(depth).

            sum over running of expected seconds - elapsed of the oldest of them (at most its own)
            + sum over lanes of `Lane.seconds`

        Loads of weights are not in it: they run beside executions, and nobody has measured the first.
        """
        return self._running_seconds(now) + max(0.0, self._backlog)

    def cost(self, model: str, variant: int, rows: int) -> float:
        """Expected device time of one request of `rows` rows that shares its execution with nobody.

            cheapest single execution that holds them

        More rows than one execution takes (m) count as the fewest executions: rows // m full ones and one
        for the rest. A model that does not coalesce takes the smallest size that holds them.

        Raises:
            CallerError: the model or the variant is not loaded, or a model that does not coalesce has
                no size for that many rows.
        """
        state = self._models.get(model)
        lane = None if state is None else state.lanes.get(variant)
        if state is None or lane is None:
            raise CallerError(f"model {model!r} with variant {variant} is not loaded")
        return lane.costs.request(rows, coalesce=state.program.coalesce)

    def story(self, model: str) -> list[str]:
        """The latest events and instructions of a loaded or draining model, oldest first; [] for others."""
        state = self._models.get(model) or self._draining.get(model)
        return [] if state is None else state.story.lines()

    def snapshot(self) -> Snapshot:
        """Statistics of all loaded and draining models."""
        states = [*self._models.values(), *self._draining.values()]
        totals = Counts()
        for counts in (self._departed, *(state.counts for state in states)):
            totals.add(counts)
        return Snapshot(
            models={state.name: state.snapshot() for state in states},
            arrived=self._arrived,
            outcomes=totals.outcomes(),
            refused=totals.refused,
            queued=self._queued,
            executing=len(self._live) - self._queued,
            running=len(self._running),
            weight_bytes=self._weights.bytes,
        )

    def validate(self) -> None:
        """Check every invariant (listed in `invariants`). Costs O(everything): for tests.

        Raises:
            InvariantError: one is broken.
        """
        invariants.check(self)

    def _running_seconds(self, now: float) -> float:
        """Expected device time left of what runs. One execution at a time has the device, oldest first."""
        total = 0.0
        done = 0.0
        for running in self._running.values():
            if total == 0.0:
                done = min(running.seconds, max(0.0, now - max(running.started, self._freed)))
            total += running.seconds
        return total - done
