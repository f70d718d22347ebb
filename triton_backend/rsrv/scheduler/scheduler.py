"""The scheduler: one pure state machine per device.

It is told what happened and answers what to do (`events`). Time is an argument. It does no I/O, reads no
clock, takes no lock and starts no thread; the loop that owns it does all that. Equal events at equal
times give equal instructions, so a recorded run can be replayed.

Each event is handled in four steps:

1. check: an event that breaks the contract raises `CallerError` and changes nothing;
2. take it in: requests are queued or refused, executions and loads end;
3. expire: queued requests and waiting runs whose deadline is `now` or earlier end; if the discipline sheds, so do those
   that could not be answered in time any more even if they were next;
4. give work: while no load is under way, `Loads` chooses among the models with work whose weights are
   absent; while fewer than `depth` executions are in flight, the discipline chooses among the resident
   ones, and `plan_batch` among the chosen one's waiting requests.

So a request that is expired or cancelled never reaches the device, and a model whose weights are on
their way delays nobody else.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import inf
from typing import assert_never

from rsrv.scheduler.batching import VariantCosts, variant_costs
from rsrv.scheduler.discipline import Discipline
from rsrv.scheduler.disciplines import DISCIPLINES
from rsrv.scheduler.events import (
    CallerError,
    Compact,
    Event,
    Evict,
    Execute,
    ExecutionFinished,
    Instruction,
    InvariantError,
    LoadAbandoned,
    LoadFailed,
    ModelAdded,
    ModelRemoved,
    Pause,
    Paused,
    Pinned,
    PolicyChanged,
    Prefetch,
    Program,
    Reason,
    RequestsArrived,
    RequestsCancelled,
    RunEnded,
    RunsAsked,
    SettingsChanged,
    Tick,
    WarmUpEnded,
    WeightsLoaded,
)
from rsrv.scheduler.inflight import InFlight
from rsrv.scheduler.memory import Memory
from rsrv.scheduler.meta_admission import MetaAdmission
from rsrv.scheduler.model import ModelState, check_program, with_policy
from rsrv.scheduler.ranking import Ranking
from rsrv.scheduler.request_queue import SLACK, RequestQueues, hopeless
from rsrv.scheduler.settings import SchedulerSettings
from rsrv.scheduler.statistics import Counts, Load, MetaSnapshot, ModelSnapshot, PastTotals, Snapshot, Totals
from rsrv.scheduler.variant_queue import VariantQueue
from rsrv.scheduler.weights import Residency


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
        self._past = PastTotals()
        self._discipline = disciplines[self.settings.discipline]()
        self._queues = RequestQueues(self._models, self._discipline)
        self._admission = MetaAdmission(self._models, self._discipline, self.settings.meta_concurrency)
        self._memory = Memory(self._models, self._draining, self._queues, self.settings)
        self._loads = self._memory.loads
        #: models that are held back for more requests, by when that ends.
        self._delayed: Ranking[str] = Ranking()
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
            case RunsAsked():
                self._admission.ask(event.runs, now, out)
            case RunEnded():
                self._admission.end(event.run)
            case WeightsLoaded() | LoadFailed() | LoadAbandoned():
                model = self._memory.ended(event, now, out)
                if model is not None and model.draining:
                    self._drain(model, now, out)
            case ModelAdded():
                self._add(event, now, out)
            case WarmUpEnded():
                self._warmed_up(event, now, out)
            case Pinned():
                self._memory.pin(self._models[event.model], event.pinned, now, out)
            case Prefetch():
                self._memory.prefetch(self._models[event.model], now)
            case Evict():
                self._memory.leave([self._models[name] for name in event.models], now, out)
            case Paused():
                for name in event.models:
                    self._pause(self._models[name], event.mode, now, out)
                self._admission.reconsider()
            case PolicyChanged():
                self._change_policy(event, now)
            case Compact():
                self._memory.compaction.ask(reload=True)
            case ModelRemoved():
                self._remove(event.model, now, out)
            case SettingsChanged():
                self._change(event.settings, now, out)
            case _:
                assert_never(event)
        self._queues.expire(now, out)
        if self._admission.waiting:
            self._admission.proceed(now, out)
        self._end_delays(now)
        self._settle(now)
        if self._discipline.sheds:
            self._shed(now, out)
        self._compact(now, out)
        self._load(now, out)
        self._dispatch(now, out)
        if self._discipline.sheds or self._queues.runs:
            # Who was first for the link may have been shed; or another is, because its run's next is committed now.
            self._load(now, out)
        self._now = now
        return out

    def _check(self, event: Event, now: float) -> None:
        """Refuse an event that breaks the contract of `events`, before it changes anything.

        Raises:
            CallerError: it does, or time runs backwards.
        """
        if not now >= self._now:
            raise CallerError(f"time runs backwards: {now} after {self._now}")
        match event:
            case RequestsArrived():
                self._queues.check(event.requests, self._admission.live.keys())
            case ExecutionFinished():
                self._running.check(event.dispatch)
            case RunsAsked():
                self._admission.check(event.runs, self._queues.live.keys())
            case ModelAdded():
                check_program(event.program)
                self._memory.weights.check(event.program)
                name = event.program.model
                if name in self._models:
                    raise CallerError(f"model {name!r} is loaded already: remove it first")
                if name in self._draining:
                    raise CallerError(f"model {name!r} is draining: add it again after its EvictWeights")
            case SettingsChanged():
                self._check_settings(event.settings)
            case ModelRemoved() | Pinned() | Prefetch():
                self._check_models(event.model)
            case Paused() | Evict():
                self._check_models(*event.models)
            case PolicyChanged():
                self._check_models(event.model)
                check_program(with_policy(self._models[event.model].program, event))
            case WarmUpEnded():
                self._memory.check_warm_up(event.model)
            case WeightsLoaded() | LoadFailed() | LoadAbandoned():
                self._memory.weights.check_epoch(event.model, event.epoch)

    def _check_settings(self, settings: SchedulerSettings) -> None:
        # What else may be wrong with them, they check themselves.
        if settings.discipline not in self._disciplines:
            known = sorted(self._disciplines)
            raise CallerError(f"discipline must be one of {known}, not {settings.discipline!r}")

    def _check_models(self, *names: str) -> None:
        for name in names:
            if name not in self._models:
                raise CallerError(f"there is no model {name!r}")

    # --- requests and executions --------------------------------------------------------------------------

    def _arrive(self, event: RequestsArrived, now: float, out: list[Instruction]) -> None:
        full = self._queues.arrive(event.requests, now, out, on_demand=self.settings.on_demand)
        if full:
            # One round of the device: what runs, then one batch of each model with work.
            self._settle(now)
            self._queues.refuse_full(full, self._running.seconds(now) + self._round, now, out)

    def _dispatch(self, now: float, out: list[Instruction]) -> None:
        """Give the device work until it has enough or nobody has any."""
        while len(self._running) < self.settings.depth and not self._memory.compaction.pauses:
            if self._running and self._running.seconds(now) > self.settings.launch_ahead_ms / 1e3 + SLACK:
                return
            name = self._discipline.choose()
            if name is None:
                return
            if self._running and self._keeps_for_room(name, now):
                return
            model = self._models[name]
            queue = model.front
            if queue is None:
                raise InvariantError(
                    "the discipline chose a model without work", name, tuple(self.story(name))
                )
            batch = model.plan(queue, self._patience(queue, now))
            execute = Execute(
                self._running.started + 1,
                name,
                queue.variant,
                batch.size,
                batch.rows,
                self._queues.take(model, queue, batch.count, now),
                batch.seconds,
            )
            self._running.start(execute, model, now)
            model.started(execute)
            self._discipline.start(execute.dispatch, name, batch.seconds)
            model.history.add(now, "execute", execute)
            out.append(execute)
            self._settle(now)
            if self._discipline.sheds:
                # What just became certain to be late ends now, not when the device is free again.
                self._shed(now, out)

    def _finish_execution(self, event: ExecutionFinished, now: float, out: list[Instruction]) -> None:
        running = self._running.end(event.dispatch, now)
        model, execute = running.model, running.execute
        model.totals.device_seconds += event.seconds
        model.totals.execute.observe(event.seconds)
        model.weights.used = now
        if execute.again:
            self._memory.compaction.retrying = False
        elif event.out_of_memory:
            model.history.add(now, "no memory", event)
            self._memory.compaction.retries.append(running)
            return
        model.ended(execute)
        self._discipline.end(running.charged, event.seconds)
        if event.error is None:
            # How long it takes to fail says nothing about the cost of success.
            model.queues[execute.variant].costs.learn(execute.size, event.seconds)
        self._queues.finish(model, execute.requests, event, now, out)
        if model.draining:
            self._drain(model, now, out)
        else:
            self._queues.dirty[model] = None

    # --- models and weights ------------------------------------------------------------------------------

    def _add(self, event: ModelAdded, now: float, out: list[Instruction]) -> None:
        program = event.program
        costs = self._variant_costs(program, program.costs)
        model = ModelState(program, costs, self._memory.weights.add(program), warm_up=event.warm_up)
        self._models[model.name] = model
        model.history.add(now, "added", f"sizes={sorted(program.costs)}")
        self._memory.admit(model, resident=event.resident, now=now, out=out)
        self._admission.reconsider()

    def _warmed_up(self, event: WarmUpEnded, now: float, out: list[Instruction]) -> None:
        model = self._models.get(event.model) or self._draining[event.model]
        compaction = self._memory.compaction
        again = compaction.warming is model
        if event.out_of_memory and not again:
            model.history.add(now, "no memory to warm up", "")
            self._memory.warm_up_again(model)
            return
        if again:
            compaction.warming = None
        self._memory.warmed_up(model)
        model.history.add(now, "warm-up failed" if event.costs is None else "warmed up", "")
        if model.draining:
            self._drain(model, now, out)
        elif event.costs is not None:
            model.learn(self._variant_costs(model.program, event.costs))

    def _pause(self, model: ModelState, mode: Pause | None, now: float, out: list[Instruction]) -> None:
        if mode is model.paused:
            return
        model.paused = mode
        model.finishing = self._admission.under_way() if mode is Pause.DRAIN else ()
        model.history.add(now, "goes on" if mode is None else f"paused: {mode.value}", "")
        if mode is Pause.REJECT:
            self._queues.refuse_all(model, Reason.PAUSED, now, out)
        elif mode is Pause.HOLD:
            self._memory.hold(model)
        self._queues.dirty[model] = None

    def _change_policy(self, event: PolicyChanged, now: float) -> None:
        model = self._models[event.model]
        model.reconfigure(with_policy(model.program, event))
        model.history.add(now, "policy changed", event)
        self._queues.dirty[model] = None

    def _variant_costs(
        self, program: Program, costs: Mapping[tuple[int, int], float]
    ) -> dict[int, VariantCosts]:
        alpha = self.settings.cost_ema_alpha
        return variant_costs(program.model, costs, max_rows=program.max_batch_rows, alpha=alpha)

    def _change(self, settings: SchedulerSettings, now: float, out: list[Instruction]) -> None:
        """Decide by other settings. A new discipline knows nothing of what models had before."""
        changed = settings.discipline != self.settings.discipline
        self.settings = settings
        self._memory.reconfigure(settings, now, out)
        for model in self._models.values():
            for queue in model.queues.values():
                queue.costs.reconfigure(settings.cost_ema_alpha)
        if changed:
            self._discipline = self._disciplines[settings.discipline]()
            self._discipline.advance(now)
            self._queues.reconfigure(self._discipline)
        self._admission.reconfigure(self._discipline, settings.meta_concurrency)
        self._queues.dirty.update(dict.fromkeys(self._models.values()))

    def _remove(self, name: str, now: float, out: list[Instruction]) -> None:
        model = self._models[name]
        model.history.add(now, "removed", "")
        self._queues.refuse_all(model, Reason.UNLOADED, now, out)
        self._settle(now)
        self._discipline.forget(name)
        del self._models[name]
        self._admission.reconsider()
        model.draining = True
        self._draining[name] = model
        self._drain(model, now, out)

    def _drain(self, model: ModelState, now: float, out: list[Instruction]) -> None:
        """Let a removed model go once nothing executes on its weights and no load of them is under way."""
        if self._memory.release(model, now, out):
            del self._draining[model.name]
            self._queues.departed.add(model.totals.counts)
            others = any(other.family == model.family for other in self._states())
            self._past.keep(model.family, model.totals, others=others)

    # --- weights -----------------------------------------------------------------------------------------

    def _load(self, now: float, out: list[Instruction]) -> None:
        """Start the load that comes next, after making room; evict what is above the budget."""
        if self._memory.leaving:
            self._memory.let_go(now, out)
        self._memory.rise(now)
        self._memory.trim(now, out)
        # Who was evicted with work is in line at once: nothing else may happen for a long time.
        self._settle(now)
        if not self._memory.compaction.pauses:
            self._memory.load(now, out)
        self._settle(now)

    def _compact(self, now: float, out: list[Instruction]) -> None:
        """Carry out a compaction that is due, once the device has nothing to do, and try again what had no memory."""
        compaction = self._memory.compaction
        if not compaction.due or self._running or not self._memory.idle:
            return
        back = self._memory.compact(now, out)
        if compaction.retries:
            first = compaction.retries.popleft()
            compaction.retrying = True
            # If it never finds memory, those who gave way would not execute before they give way again.
            turn = first.execute.seconds + (1.0 + self.settings.residency_factor) * back
            first.model.blocked_until = max(first.model.blocked_until, now + turn)
            self._queues.dirty[first.model] = None
            again = replace(first.execute, dispatch=self._running.started + 1, again=True)
            self._running.start(again, first.model, now, charged=first.charged)
            first.model.history.add(now, "execute again", again)
            out.append(again)
        self._settle(now)

    # --- what follows from changes ------------------------------------------------------------------------

    def _settle(self, now: float) -> None:
        """Bring the sums, the discipline and the loads up to date with the models that changed."""
        for model in self._queues.dirty:
            self._backlog -= model.backlog_seconds
            self._round -= model.turn_seconds
            model.recount()
            self._backlog += model.backlog_seconds
            self._round += model.turn_seconds
            self._enlist(model, now)
        self._queues.dirty.clear()
        if not self._queues.queued:
            # Rounding errors of the sums do not outlive a pause.
            self._backlog = self._round = 0.0

    def _enlist(self, model: ModelState, now: float) -> None:
        """Tell the discipline and the loads what a model waits for now."""
        name, discipline = model.name, self._discipline
        self._delayed.discard(name)
        if model.place is None:
            (discipline.hold if model.queued else discipline.remove)(name)
            self._loads.cold.discard(name)
            self._loads.changed(model)
            return
        match model.weights.residency:
            case Residency.RESIDENT:
                if model.warming:
                    discipline.wait(model, claims=False)
                elif self._memory.stops(model):
                    discipline.wait(model, claims=True)
                elif model.dispatchable_at <= now:
                    discipline.update(model)
                else:
                    discipline.wait(model, claims=False)
                    self._delayed.set(name, model.dispatchable_at)
                self._loads.changed(model)
            case Residency.LOADING:
                discipline.wait(model, claims=True)
                self._loads.cold.discard(name)
            case Residency.ABSENT:
                discipline.wait(model, claims=True)
                self._loads.wait(model, discipline.rank(model))

    def _end_delays(self, now: float) -> None:
        """Models that were held back for long enough may execute."""
        while (name := self._delayed.first()) is not None and self._delayed.rank(name) <= now:
            self._delayed.discard(name)
            self._queues.dirty[self._models[name]] = None

    # --- deadlines that cannot be met ------------------------------------------------------------------------

    def _shed(self, now: float, out: list[Instruction]) -> None:
        """End what cannot be in time any more."""
        queues = self._queues
        free = now + self._running.seconds(now)
        for lost in hopeless(queues.starts, self._models, self._memory.weights, free, now):
            queues.shed(lost.entry, lost.queue, now, out)
            if lost.cold:
                self._loads.missed(lost.model)
        self._settle(now)

    def _keeps_for_room(self, name: str, now: float) -> bool:
        """Whether a model is not launched ahead: without a pause it would never give way to who waits for room."""
        return self._loads.wants(self._models[name], self._discipline, now)

    def _patience(self, queue: VariantQueue, now: float) -> float:
        """Seconds that an execution of the front request may take, after what the device has to do before."""
        deadline = queue.entries[0].request.deadline
        if deadline is None or not self._discipline.sheds:
            return inf
        return deadline - now - self._running.seconds(now) + SLACK

    # --- questions: none changes what is decided later -----------------------------------------------------

    def next_wakeup(self) -> float | None:
        """When a `Tick` is due; None if nothing happens by time alone.

        The soonest of: a queued request's or a waiting run's deadline, or when it becomes certain to be missed; the end of
        keeping a model back for more requests, or of keeping weights that others wait to replace; the next try of a
        pinned model that found no memory; the time to give the device its next execution.
        """
        times = [self._queues.deadlines.next(), self._admission.next_deadline(), self._memory.backoff.next()]
        if self._discipline.sheds:
            start = self._queues.starts.next()
            times.append(None if start is None else start + 2 * SLACK)
        delayed = self._delayed.first()
        if delayed is not None:
            times.append(self._delayed.rank(delayed))
        if not self._memory.compaction.pauses:
            times += [self._loads.next_try(), self._next_launch()]
        return min((time for time in times if time is not None), default=None)

    def _next_launch(self) -> float | None:
        """When the device is to be given its next execution, beside those that it has."""
        if 0 < len(self._running) < self.settings.depth:
            end, name = self._running.end_after(self._now), self._discipline.choose()
            if end is not None and name is not None and not self._keeps_for_room(name, self._now):
                return max(self._now, end - self.settings.launch_ahead_ms / 1e3)
        return None

    def backlog_seconds(self, now: float) -> float:
        """Expected device time until everything that waits or runs now is done; costs O(depth).

            `InFlight.seconds`
            + sum over queues of `VariantQueue.seconds`

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
        queue = None if state is None else state.queues.get(variant)
        if state is None or queue is None:
            raise CallerError(f"model {model!r} with variant {variant} is not loaded")
        return queue.costs.request(rows, coalesce=state.program.coalesce)

    def holds(self, model: str) -> bool:
        """Whether a model is loaded or draining: only when it is neither may its key be added again."""
        return model in self._models or model in self._draining

    def queued(self, model: str) -> int:
        """Requests that wait for a loaded model; 0 for others."""
        state = self._models.get(model)
        return 0 if state is None else state.queued

    def story(self, model: str) -> list[str]:
        """The latest events and instructions of a loaded or draining model, oldest first; [] for others."""
        state = self._models.get(model) or self._draining.get(model)
        return [] if state is None else state.history.lines()

    def load(self) -> Load:
        """What `snapshot` says of loaded models, as far as it is asked for often. Costs O(models)."""
        models = {name: state.load() for name, state in self._models.items()}
        weights = self._memory.weights
        return Load(models, weights.bytes, weights.pinned_bytes, self._logical_bytes(), weights.budget)

    def totals(self) -> dict[str, Totals]:
        """By name of each loaded or draining model: what all versions have counted since there is one. To be read now."""
        return self._past.with_present((state.family, state.totals) for state in self._states())

    def model(self, key: str) -> ModelSnapshot | None:
        """Statistics of one loaded or draining model."""
        state = self._models.get(key) or self._draining.get(key)
        return None if state is None else state.snapshot()

    def meta(self, name: str) -> MetaSnapshot | None:
        """Those of the runs of a meta model; None if nobody has ever asked for one."""
        return self._admission.meta(name)

    def metas(self) -> dict[str, MetaSnapshot]:
        """Those of all of them."""
        return self._admission.snapshot()

    def _states(self) -> list[ModelState]:
        return [*self._models.values(), *self._draining.values()]

    def _logical_bytes(self) -> int:
        present = (one for one in self._states() if one.weights.residency is not Residency.ABSENT)
        return sum(one.program.weight_bytes for one in present)

    def snapshot(self) -> Snapshot:
        """Statistics of all loaded and draining models."""
        states = self._states()
        totals = Counts()
        for counts in (self._queues.departed, *(state.totals.counts for state in states)):
            totals.add(counts)
        return Snapshot(
            models={state.name: state.snapshot() for state in states},
            metas=self._admission.snapshot(),
            arrived=self._queues.arrived,
            outcomes=totals.outcomes(),
            refused=totals.refused,
            queued=self._queues.queued,
            executing=len(self._queues.live) - self._queues.queued,
            running=len(self._running),
            weight_bytes=self._memory.weights.bytes,
            pinned_bytes=self._memory.weights.pinned_bytes,
            logical_bytes=self._logical_bytes(),
            weight_budget_bytes=self._memory.weights.budget,
        )
