"""The scheduler: one pure state machine per device.

It is told what happened and answers what to do (`events`). Time is an argument. It does no I/O, reads no
clock, takes no lock and starts no thread; the loop that owns it does all that. Equal events at equal
times give equal instructions, so a recorded run can be replayed.

Each event is handled in four steps:

1. check: an event that breaks the contract raises `CallerError` and changes nothing;
2. take it in: requests are queued or refused, executions and loads end;
3. expire: queued requests whose deadline is `now` or earlier end; if the discipline sheds, so do those
   that could not be answered in time any more even if they were next;
4. give work: while no load is under way, `Loads` chooses among the models with work whose weights are
   absent; while fewer than `depth` executions are in flight, the discipline chooses among the resident
   ones, and `plan_batch` among the chosen one's waiting requests.

So a request that is expired or cancelled never reaches the device, and a model whose weights are on
their way delays nobody else.
"""

from collections.abc import Callable, Mapping
from math import inf
from typing import assert_never

from rsrv.runtime.scheduler import invariants
from rsrv.runtime.scheduler.costs import variant_costs
from rsrv.runtime.scheduler.disciplines import DISCIPLINES, Discipline
from rsrv.runtime.scheduler.errors import CallerError, InvariantError
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
    RequestsArrived,
    RequestsCancelled,
    SettingsChanged,
    Tick,
    WeightsLoaded,
)
from rsrv.runtime.scheduler.inflight import InFlight
from rsrv.runtime.scheduler.loads import Loads
from rsrv.runtime.scheduler.model import ModelState, check_program
from rsrv.runtime.scheduler.queues import Queues
from rsrv.runtime.scheduler.ranking import Ranking
from rsrv.runtime.scheduler.settings import SchedulerSettings
from rsrv.runtime.scheduler.shedding import SLACK, hopeless
from rsrv.runtime.scheduler.snapshot import Counts, Snapshot
from rsrv.runtime.scheduler.waiting import Lane
from rsrv.runtime.scheduler.weights import Residency, Weights

_ANSWERED = Outcome.ANSWERED


class Scheduler:
    """Decides for one device. Not safe for threads: one loop owns it."""

    def __init__(
        self,
        settings: SchedulerSettings | None = None,
        *,
        disciplines: Mapping[str, Callable[[], Discipline]] = DISCIPLINES,
    ) -> None:
        self.settings = settings or SchedulerSettings()
        self._disciplines = disciplines
        self._now = -inf
        self._check_settings(self.settings)
        #: loaded models. A removed one moves to `_draining` until nothing of it is on the device.
        self._models: dict[str, ModelState] = {}
        self._draining: dict[str, ModelState] = {}
        self._discipline = disciplines[self.settings.discipline]()
        self._queues = Queues(self._models, self._discipline)
        self._weights = Weights(self.settings.weight_budget_bytes)
        self._loads = Loads(
            self._models, self._weights, self.settings.residency_factor, self.settings.eviction
        )
        #: models that are held back for more requests, by when that ends.
        self._unripe = Ranking()
        #: at most `depth` executions.
        self._running = InFlight()
        #: sums of `backlog_seconds` and of `turn_seconds` over all models.
        self._backlog = 0.0
        self._round = 0.0

    # --- the one entry -----------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Take in what happened at `now`; what to do about it, in order.

        Raises:
            CallerError: the event contradicts earlier ones, or time runs backwards. Nothing has changed.
        """
        self._check(event, now)
        self._discipline.advance(now)
        out: list[Instruction] = []
        match event:
            case RequestsArrived():
                self._arrive(event, now, out)
            case ExecutionFinished():
                self._finish_execution(event, now, out)
            case Tick():
                pass
            case RequestsCancelled():
                self._queues.cancel(event.requests, now, out)
            case WeightsLoaded():
                self._weights_loaded(event, now, out)
            case LoadFailed():
                self._load_failed(event, now, out)
            case ModelAdded():
                self._add(event, now, out)
            case ModelRemoved():
                self._remove(event.model, now, out)
            case SettingsChanged():
                self._change(event.settings, now)
            case _:
                assert_never(event)
        self._queues.expire(now, out)
        self._ripen(now)
        self._settle(now)
        if self._discipline.sheds:
            self._shed(now, out)
        self._load(now, out)
        self._dispatch(now, out)
        if self._discipline.sheds:
            # Who was first for the link may have been shed.
            self._load(now, out)
        self._now = now
        return out

    def _check(self, event: Event, now: float) -> None:
        if not now >= self._now:
            raise CallerError(f"time runs backwards: {now} after {self._now}")
        match event:
            case RequestsArrived():
                self._queues.check(event.requests)
            case ExecutionFinished():
                if event.dispatch not in self._running:
                    raise CallerError(
                        f"dispatch {event.dispatch} is not in flight:"
                        f" {[running.execute.dispatch for running in self._running]} are"
                    )
            case ModelAdded():
                check_program(event.program)
                name = event.program.model
                if name in self._models:
                    raise CallerError(f"model {name!r} is loaded already: remove it first")
                if name in self._draining:
                    raise CallerError(f"model {name!r} is draining: add it again after its EvictWeights")
            case SettingsChanged():
                self._check_settings(event.settings)
            case ModelRemoved():
                if event.model not in self._models:
                    raise CallerError(f"there is no model {event.model!r} to remove")
            case WeightsLoaded() | LoadFailed():
                self._weights.check(event.model, event.epoch)
            case _:
                pass

    # --- requests and executions --------------------------------------------------------------------------

    def _arrive(self, event: RequestsArrived, now: float, out: list[Instruction]) -> None:
        full = self._queues.arrive(event.requests, now, out)
        if full:
            # One round of the device: what runs, then one batch of each model with work.
            self._settle(now)
            self._queues.refuse_full(full, self._running.seconds(now) + self._round, now, out)

    def _dispatch(self, now: float, out: list[Instruction]) -> None:
        """Give the device work until it has enough or nobody has any."""
        while len(self._running) < self.settings.depth:
            if self._running and self._running.seconds(now) > self.settings.launch_ahead_ms / 1e3 + SLACK:
                return
            name = self._discipline.choose()
            if name is None:
                return
            if self._running and self._keeps_for_room(name, now):
                return
            model = self._models[name]
            lane = model.front
            if lane is None:
                raise InvariantError(
                    "the discipline chose a model without work", name, tuple(self.story(name))
                )
            batch = model.plan(lane, self._patience(lane, now))
            execute = Execute(
                self._running.started + 1,
                name,
                lane.variant,
                batch.size,
                batch.rows,
                self._queues.take(model, lane, batch.count),
                batch.seconds,
            )
            self._running.start(execute, model, now)
            model.started(execute)
            self._discipline.start(execute.dispatch, name, batch.seconds)
            model.story.add(now, "execute", execute)
            out.append(execute)
            self._settle(now)
            if self._discipline.sheds:
                # What just became certain to be late ends now, not when the device is free again.
                self._shed(now, out)

    def _finish_execution(self, event: ExecutionFinished, now: float, out: list[Instruction]) -> None:
        running = self._running.end(event.dispatch, now)
        model, execute = running.model, running.execute
        model.ended(execute, event.seconds)
        model.holding.used = now
        self._queues.forget(execute.requests)
        if event.error is None:
            model.lanes[execute.variant].costs.learn(execute.size, event.seconds)
            model.counts.answered += len(execute.requests)
            model.story.add(now, "answered", event)
            out.extend([Finish(request, _ANSWERED) for request in execute.requests])
        else:
            # How long it took to fail says nothing about the cost of success.
            model.counts.failed += len(execute.requests)
            model.story.add(now, "failed", event)
            out.extend([Finish(request, Outcome.FAILED, error=event.error) for request in execute.requests])
        self._discipline.end(event.dispatch, event.seconds)
        if model.draining:
            self._drain(model, now, out)
        else:
            self._queues.touched[model] = None

    # --- models and weights ------------------------------------------------------------------------------

    def _add(self, event: ModelAdded, now: float, out: list[Instruction]) -> None:
        settings, program = self.settings, event.program
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
        budget = self._weights.budget
        model.too_large = budget is not None and program.weight_bytes > budget
        if event.resident:
            self._weights.adopt(model.holding, now)
            for victim in self._loads.overdue(now):
                self._evict(victim, now, out)

    def _change(self, settings: SchedulerSettings, now: float) -> None:
        """Decide by other settings. A new discipline knows nothing of what models had before."""
        changed = settings.discipline != self.settings.discipline
        self.settings = settings
        self._loads.obey(settings.residency_factor, settings.eviction)
        for model in self._models.values():
            for lane in model.lanes.values():
                lane.costs.obey(settings)
        if changed:
            self._discipline = self._disciplines[settings.discipline]()
            self._discipline.advance(now)
            self._queues.obey(self._discipline)
        self._queues.touched.update(dict.fromkeys(self._models.values()))

    def _check_settings(self, settings: SchedulerSettings) -> None:
        if settings.discipline not in self._disciplines:
            raise CallerError(
                f"discipline must be one of {sorted(self._disciplines)}, not {settings.discipline!r}"
            )
        if self._now > -inf and settings.weight_budget_bytes != self.settings.weight_budget_bytes:
            raise CallerError("weight_budget_bytes cannot change while the scheduler runs")

    def _remove(self, name: str, now: float, out: list[Instruction]) -> None:
        model = self._models[name]
        model.story.add(now, "removed", "")
        self._queues.unload(model, now, out)
        self._settle(now)
        self._discipline.forget(name)
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
        self._loads.retry()
        del self._draining[model.name]
        self._queues.departed.add(model.counts)

    def _weights_loaded(self, event: WeightsLoaded, now: float, out: list[Instruction]) -> None:
        model = self._loading(event.model, event.epoch)
        if model is None:
            return
        self._weights.loaded(model.holding, event.seconds, now)
        self._discipline.link(False)
        model.story.add(now, "weights loaded", event)
        if model.draining:
            self._drain(model, now, out)
        else:
            self._queues.touched[model] = None

    def _load_failed(self, event: LoadFailed, now: float, out: list[Instruction]) -> None:
        model = self._loading(event.model, event.epoch)
        if model is None:
            return
        self._weights.failed(model.holding)
        self._discipline.link(False)
        model.story.add(now, "load failed", event)
        if model.draining:
            self._drain(model, now, out)
            return
        self._queues.fail(model, event.error, out)
        self._queues.touched[model] = None
        self._loads.retry()

    def _loading(self, name: str, epoch: int) -> ModelState | None:
        """The model whose current load has this epoch; None if that load is over."""
        model = self._models.get(name) or self._draining.get(name)
        if model is None or model.holding.epoch != epoch or model.holding.residency is not Residency.LOADING:
            return None
        return model

    def _load(self, now: float, out: list[Instruction]) -> None:
        """Start the load that the discipline wants next, if the link is free and room can be made."""
        planned = self._loads.plan(self._discipline, now)
        if planned is None:
            return
        model, victims = planned
        for victim in victims:
            self._evict(victim, now, out)
        load = self._weights.load(model.holding, now)
        self._discipline.link(not victims)
        model.story.add(now, "load weights", load)
        out.append(load)
        self._queues.touched[model] = None
        self._settle(now)

    def _evict(self, model: ModelState, now: float, out: list[Instruction]) -> None:
        evict = self._weights.evict(model.holding)
        model.story.add(now, "evict weights", evict)
        model.holding.evictions += 1
        out.append(evict)
        self._queues.touched[model] = None

    # --- what follows from changes ------------------------------------------------------------------------

    def _settle(self, now: float) -> None:
        """Bring the sums, the discipline and the loads up to date with the models that changed."""
        for model in self._queues.touched:
            self._backlog -= model.backlog_seconds
            self._round -= model.turn_seconds
            model.recount()
            self._backlog += model.backlog_seconds
            self._round += model.turn_seconds
            self._enlist(model, now)
        self._queues.touched.clear()
        if not self._queues.queued:
            # Rounding errors of the sums do not outlive a pause.
            self._backlog = self._round = 0.0

    def _enlist(self, model: ModelState, now: float) -> None:
        """Tell the discipline and the loads what a model waits for now."""
        name, discipline = model.name, self._discipline
        self._unripe.discard(name)
        if model.place is None:
            discipline.remove(name)
            self._loads.cold.discard(name)
            self._loads.changed(model)
            return
        match model.holding.residency:
            case Residency.RESIDENT:
                if model.ripe <= now:
                    discipline.update(model)
                else:
                    discipline.wait(model, claims=False)
                    self._unripe.set(name, model.ripe)
                self._loads.changed(model)
            case Residency.LOADING:
                discipline.wait(model, claims=True)
                self._loads.cold.discard(name)
            case Residency.ABSENT:
                discipline.wait(model, claims=True)
                self._loads.wait(model, discipline.rank(model))

    def _ripen(self, now: float) -> None:
        """Models that were held back for long enough may execute."""
        while (name := self._unripe.first()) is not None and self._unripe.rank(name) <= now:
            self._unripe.discard(name)
            self._queues.touched[self._models[name]] = None

    # --- deadlines that cannot be met ------------------------------------------------------------------------

    def _shed(self, now: float, out: list[Instruction]) -> None:
        """End what cannot be in time any more."""
        queues = self._queues
        free = now + self._running.seconds(now)
        for lost in hopeless(queues.starts, self._models, self._weights, free, now):
            queues.shed(lost.entry, lost.lane, now, out)
            if lost.cold:
                self._loads.missed(lost.model)
        self._settle(now)

    def _keeps_for_room(self, name: str, now: float) -> bool:
        """Whether a model is not launched ahead: without a pause it would never give way to who waits for room."""
        return self._loads.wants(self._models[name], self._discipline, now)

    def _patience(self, lane: Lane, now: float) -> float:
        """Seconds that an execution of the front request may take, after what the device has to do before."""
        deadline = lane.entries[0].request.deadline
        if deadline is None or not self._discipline.sheds:
            return inf
        return deadline - now - self._running.seconds(now) + SLACK

    # --- questions: none changes what is decided later -----------------------------------------------------

    def next_wakeup(self) -> float | None:
        """When a `Tick` is due; None if nothing happens by time alone.

        The soonest of: a queued request's deadline, or when it becomes certain to be missed; the end of
        holding a model back for more requests, or of keeping weights that others wait to replace; the time to
        give the device its next execution.
        """
        times = [self._queues.deadlines.next()]
        if self._discipline.sheds:
            start = self._queues.starts.next()
            times.append(None if start is None else start + 2 * SLACK)
        unripe = self._unripe.first()
        if unripe is not None:
            times.append(self._unripe.rank(unripe))
        times.append(self._loads.next_try())
        if 0 < len(self._running) < self.settings.depth:
            end, name = self._running.end_after(self._now), self._discipline.choose()
            if end is not None and name is not None and not self._keeps_for_room(name, self._now):
                times.append(max(self._now, end - self.settings.launch_ahead_ms / 1e3))
        return min((time for time in times if time is not None), default=None)

    def backlog_seconds(self, now: float) -> float:
        """Expected device time until everything that waits or runs now is done; costs O(depth).

            `InFlight.seconds`
            + sum over lanes of `Lane.seconds`

        Loads of weights are not in it: they run beside executions, and nobody has measured the first.
        """
        return self._running.seconds(now) + max(0.0, self._backlog)

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

    def holds(self, model: str) -> bool:
        """Whether a model is loaded or draining: only when it is neither may its key be added again."""
        return model in self._models or model in self._draining

    def story(self, model: str) -> list[str]:
        """The latest events and instructions of a loaded or draining model, oldest first; [] for others."""
        state = self._models.get(model) or self._draining.get(model)
        return [] if state is None else state.story.lines()

    def snapshot(self) -> Snapshot:
        """Statistics of all loaded and draining models."""
        states = [*self._models.values(), *self._draining.values()]
        totals = Counts()
        for counts in (self._queues.departed, *(state.counts for state in states)):
            totals.add(counts)
        return Snapshot(
            models={state.name: state.snapshot() for state in states},
            arrived=self._queues.arrived,
            outcomes=totals.outcomes(),
            refused=totals.refused,
            queued=self._queues.queued,
            executing=len(self._queues.live) - self._queues.queued,
            running=len(self._running),
            weight_bytes=self._weights.bytes,
        )

    def validate(self) -> None:
        """Check every invariant (listed in `invariants`). Costs O(everything): for tests.

        Raises:
            InvariantError: one is broken.
        """
        invariants.check(self)
