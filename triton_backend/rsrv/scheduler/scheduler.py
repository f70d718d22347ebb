"""The scheduler: one pure state machine per device.

The scheduler takes events and returns instructions (`events`). Time is an argument. The scheduler does no I/O, reads no clock,
takes no lock and starts no thread. The loop that owns it does all that. Equal events at equal times give equal instructions,
so a recorded run can be replayed. `Scheduler.handle` states the order in which an event is handled.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from enum import Enum
from math import inf
from typing import assert_never

from rsrv.scheduler.batching import PaddedBatch, variant_costs
from rsrv.scheduler.discipline import Discipline
from rsrv.scheduler.disciplines import DISCIPLINES
from rsrv.scheduler.events import (
    CallerError,
    Compact,
    CopyChanged,
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
    Reason,
    Request,
    RequestsArrived,
    RequestsCancelled,
    RunEnded,
    RunsAsked,
    SettingsChanged,
    Tick,
    WarmUpEnded,
    WeightsLoaded,
    WeightsRead,
    WindDown,
    WoundDown,
)
from rsrv.scheduler.history import History, HistoryRecord
from rsrv.scheduler.inflight import InFlight
from rsrv.scheduler.meta_admission import MetaAdmission
from rsrv.scheduler.model import ModelState, check_program, with_policy
from rsrv.scheduler.ranking import Ranking
from rsrv.scheduler.request_queue import SLACK, RequestQueues, late_requests
from rsrv.scheduler.request_times import RequestTimes
from rsrv.scheduler.residency import CompactionState, DeviceResidency
from rsrv.scheduler.settings import SchedulerSettings
from rsrv.scheduler.slowest import SlowRequest
from rsrv.scheduler.statistics import (
    MetaSnapshot,
    ModelSnapshot,
    OutcomeCounts,
    PastTotals,
    SchedulerSnapshot,
    SharedTensors,
    Totals,
    WeightBytes,
)
from rsrv.scheduler.variant_queue import VariantQueue
from rsrv.scheduler.weight_states import ON_DEVICE, RUNNABLE, TAKING_BYTES, WeightState


class SchedulerPhase(Enum):
    """Phase of a scheduler. A scheduler serves until it winds down. It winds down when the next runtime takes over."""

    SERVING = "serving"
    #: No run is admitted. No execution starts once no run and no generation is in progress. This phase has a time limit.
    WINDING_DOWN = "winding down"
    #: Nothing executes, and no execution or run starts. Weights still load.
    AT_REST = "at rest"


#: States in which weights are not loading, not about to load, and not in use by a warm-up.
_AT_REST = RUNNABLE | {WeightState.ABSENT, WeightState.BACKOFF}
# Cache the members, because each event needs them and reading one from its class takes longer than the comparison.
_SERVING, _DUE = SchedulerPhase.SERVING, CompactionState.DUE


class Scheduler:
    """Decisions for one device. Not thread-safe: one loop owns it."""

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
        #: Known models. A removed model moves to `_draining` until the device holds no part of it.
        self._models: dict[str, ModelState] = {}
        self._draining: dict[str, ModelState] = {}
        self._past = PastTotals()
        self._discipline = disciplines[self.settings.discipline]()
        self._queues = RequestQueues(self._models, self._discipline)
        self._admission = MetaAdmission(self._models, self._discipline, self.settings.meta_concurrency)
        self._residency = DeviceResidency(self._models, self._draining, self._queues, self.settings)
        self._loads = self._residency.loads
        #: Models that may not execute yet, with the time when they may. Such a model waits for more requests. Or its retry has
        #: evicted other models, and it waits until these have executed.
        self._delayed: Ranking[str] = Ranking()
        #: Executions in flight, at most `depth`.
        self._running = InFlight()
        #: True if an exclusive request is next, or executes. No load and no other execution starts then.
        self._kept_exclusive = False
        self._times = RequestTimes(self._queues, self._running)
        #: Sum of `backlog_seconds` over all models.
        self._backlog = 0.0
        #: Sum of `turn_seconds` over all models.
        self._round = 0.0
        self._phase = SchedulerPhase.SERVING
        #: Time by which winding down must have ended.
        self._rest_until = inf
        #: Steps of `_plan`, in this order.
        self._steps = (self._compact, self._evict, self._load, self._dispatch, self._load_again)

    # --- entry point -------------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Handle an event, and return the instructions that follow, in order.

        1. Check: an event that breaks the contract of `events` raises, and changes nothing.
        2. Apply: requests are queued or refused; executions, loads and warm-ups end; models and settings change.
        3. Expire: (a) queued requests whose deadline is `now` or earlier end; (b) waiting runs also end at their deadline, and
           free slots go to other waiting runs; (c) weights that were idle for too long are evicted; (d) delays end; (e) if the
           discipline sheds, requests end that would be late even if they executed next.
        4. Plan, each step on settled accounts (`_settle`): (a) a compaction that is due, while the device is idle;
           (b) requested evictions, retries of failed loads, and evictions above the budget; (c) the next read from disk
           and the next load, while none runs; (d) executions, while fewer than `depth` are in flight; (e) the next load
           again, because a dispatch may have changed which load is first. If the next request is exclusive, (c) starts no load,
           and (d) starts no other execution. Reads from disk continue.
        5. End a wind-down if nothing is in progress any more, or if its time is over.

        So an expired or cancelled request never reaches the device, and a model whose weights are loading delays no other
        model.

        Raises:
            CallerError: the event contradicts earlier ones, or time runs backwards.
        """
        self._check(event, now)
        self._residency.accounts.now = now
        out: list[Instruction] = []
        self._discipline.advance(now)
        self._apply(event, now, out)
        self._expire(now, out)
        self._plan(now, out)
        if self._phase is not _SERVING:
            self._come_to_rest(now, out)
        if self._queues.ended:
            self._times.keep_ended(now)
        self._now = now
        return out

    def _check(self, event: Event, now: float) -> None:
        """Check an event before it changes anything.

        Raises:
            CallerError: the event breaks the contract of `events`, or time runs backwards.
        """
        if not now >= self._now:
            raise CallerError(f"time runs backwards: {now} after {self._now}")
        match event:
            case RequestsArrived():
                self._queues.check(event.requests, self._admission.live.keys())
            case ExecutionFinished():
                if event.number not in self._running:
                    raise CallerError(f"execution {event.number} is not in flight: {list(self._running)} are")
            case RunsAsked():
                self._admission.check(event.runs, self._queues.live.keys())
            case ModelAdded():
                check_program(event.program)
                self._residency.accounts.check(event.program)
                name = event.program.model
                if name in self._models:
                    raise CallerError(f"model {name!r} was added already: remove it first")
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
                self._residency.check_warm_up(event.model)
            case WeightsRead() | WeightsLoaded() | LoadFailed() | LoadAbandoned():
                self._residency.accounts.check_epoch(event.model, event.epoch)

    def _check_settings(self, settings: SchedulerSettings) -> None:
        if settings.discipline not in self._disciplines:
            known = sorted(self._disciplines)
            raise CallerError(f"discipline must be one of {known}, not {settings.discipline!r}")

    def _check_models(self, *names: str) -> None:
        for name in names:
            if name not in self._models:
                raise CallerError(f"there is no model {name!r}")

    def _apply(self, event: Event, now: float, out: list[Instruction]) -> None:
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
                self._admission.end(event.run, now)
            case CopyChanged():
                if (changed := self._models.get(event.model)) is not None:
                    self._loads.copy_changed(changed, present=event.present)
            case WeightsRead() | WeightsLoaded() | LoadFailed() | LoadAbandoned():
                model = self._residency.load_ended(event, now, out)
                if model is not None and model.draining:
                    self._drain(model, now, out)
            case ModelAdded():
                self._add(event, now, out)
            case WarmUpEnded():
                self._warmed_up(event, now, out)
            case Pinned():
                self._residency.pin(self._models[event.model], event.pinned, now, out)
            case Prefetch():
                self._residency.prefetch(self._models[event.model], now)
            case Evict():
                self._residency.request_eviction([self._models[name] for name in event.models], now, out)
            case Paused():
                for name in event.models:
                    self._pause(self._models[name], event.mode, now, out)
                self._admission.reconsider()
            case PolicyChanged():
                self._change_policy(event, now)
            case Compact():
                self._residency.compaction.ask(restores=True)
                self._residency.loads.end_backoffs()
            case ModelRemoved():
                self._remove(event.model, now, out)
            case SettingsChanged():
                self._change(event.settings, now, out)
            case WindDown():
                self._wind_down(event.within, now)
            case _:
                assert_never(event)

    def _expire(self, now: float, out: list[Instruction]) -> None:
        """End expired requests and runs, and let waiting runs and delayed models proceed."""
        deadlines = self._queues.deadlines.heap
        if deadlines and deadlines[0][0] <= now:
            self._queues.expire(now, out)
        if self._admission.waiting:
            self._admission.proceed(now, out)
        if self._residency.idle_at <= now:
            self._residency.evict_idle(now, out)
        delayed = self._delayed
        while delayed and (name := delayed.first()) is not None and delayed[name] <= now:
            del delayed[name]
            self._queues.dirty[self._models[name]] = None
        if self._discipline.sheds:
            self._shed(now, out)

    def _plan(self, now: float, out: list[Instruction]) -> None:
        """Repeat each step of planning until it changes no model. Call `_settle` before each run of a step."""
        dirty = self._queues.dirty
        self._settle(now)
        for step in self._steps:
            step(now, out)
            while dirty:
                self._settle(now)
                step(now, out)

    # --- requests and executions --------------------------------------------------------------------------

    def _arrive(self, event: RequestsArrived, now: float, out: list[Instruction]) -> None:
        full = self._queues.arrive(event.requests, now, out, on_demand=self.settings.on_demand)
        if full:
            # A retry may succeed after one round of the device: the running executions, then a batch of each model with work.
            self._settle(now)
            self._queues.refuse_full(full, self._running.seconds(now) + self._round, now, out)

    def _keep_device(self) -> None:
        """Record whether the device is kept for an exclusive request that is next or executes."""
        name = self._discipline.choose() if self._queues.exclusive else None
        front = None if name is None else self._models[name].front
        self._kept_exclusive = self._running.exclusive or (front is not None and front.front_exclusive)

    def _dispatch(self, now: float, out: list[Instruction]) -> None:
        """Start the next execution, if the device may take one and a model has work."""
        running = self._running
        if len(running) >= self.settings.depth or self._residency.compaction.active:
            return
        if self._phase is not _SERVING and self._is_closed:
            return
        if self._queues.exclusive or self._kept_exclusive:
            self._keep_device()
        if self._kept_exclusive and (running or not self._residency.quiet):
            return
        if running and running.seconds(now) > self.settings.launch_ahead_ms / 1e3 + SLACK:
            return
        name = self._discipline.choose() if self._queues.queued else None
        if name is None:
            return
        model = self._models[name]
        if running and not self._goes_ahead(model, now):
            return
        queue = model.front
        if queue is None:
            history = tuple(map(str, self.history(name)))
            raise InvariantError("the discipline chose a model without work", name, history)
        batch = model.plan(queue, self._patience(queue, now) if self._discipline.sheds else inf)
        variant, counts = queue.variant, [(queue, batch.count)]
        if type(batch) is PaddedBatch:
            variant = batch.variant
            counts = [(model.queues[own], count) for own, count in batch.counts.items()]
        execute = Execute(
            running.started + 1,
            name,
            variant,
            batch.size,
            batch.rows,
            self._queues.take(model, counts, now),
            batch.seconds,
            exclusive=self._kept_exclusive,
        )
        running.start(execute, model, now)
        model.started(execute)
        self._discipline.start(execute.number, name, batch.seconds)
        model.history.add(now, "execute", execute)
        out.append(execute)
        if self._discipline.sheds:
            # Requests that cannot meet their deadline any more, because of this execution, end now.
            self._shed(now, out)

    def _finish_execution(self, event: ExecutionFinished, now: float, out: list[Instruction]) -> None:
        running = self._running.end(event.number, event.seconds, now)
        model, execute = running.model, running.execute
        model.totals.device_seconds += event.seconds
        model.totals.execute.observe(event.seconds)
        model.weights.last_used = now
        if execute.again:
            self._residency.compaction.end_retry()
        elif event.out_of_memory:
            model.history.add(now, "no memory", event)
            self._residency.compaction.retry(running)
            return
        model.ended(execute)
        self._discipline.end(running.charged, running.occupied_seconds)
        if event.error is None:
            # Do not learn from a failed execution, because its duration is not the cost of a successful one.
            model.queues[execute.variant].costs.learn(execute.size, event.seconds)
        slow = self._queues.finish(model, execute.requests, event, now, out)
        if slow:
            self._times.keep(running, slow, event, now)
        if model.draining:
            self._drain(model, now, out)
        else:
            self._queues.dirty[model] = None

    # --- models and settings -----------------------------------------------------------------------------

    def _add(self, event: ModelAdded, now: float, out: list[Instruction]) -> None:
        program = event.program
        costs = variant_costs(program.model, program.costs, max_rows=program.max_batch_rows)
        model = ModelState(program, costs, self._residency.accounts.add(program), needs_warm_up=event.warm_up)
        self._models[model.name] = model
        model.history.add(now, "added", f"sizes {sorted(program.costs)}")
        self._residency.admit(model, event, now, out)
        self._admission.reconsider()

    def _warmed_up(self, event: WarmUpEnded, now: float, out: list[Instruction]) -> None:
        model = self._models.get(event.model) or self._draining[event.model]
        compaction = self._residency.compaction
        retried = compaction.retried is model
        if event.out_of_memory and not retried:
            model.history.add(now, "no memory to warm up")
            compaction.retry_warm_up(model)
            return
        if retried:
            compaction.end_retry()
        self._residency.warmed_up(model)
        model.history.add(now, "warm-up failed" if event.costs is None else "warmed up")
        if model.draining:
            self._drain(model, now, out)
        elif event.costs is not None:
            model.set_costs(variant_costs(model.name, event.costs, max_rows=model.program.max_batch_rows))

    def _pause(self, model: ModelState, mode: Pause | None, now: float, out: list[Instruction]) -> None:
        if mode is model.paused:
            return
        model.pause(mode, now)
        model.finishing = self._admission.admitted_ids() if mode is Pause.DRAIN else ()
        model.history.add(now, "goes on" if mode is None else f"paused: {mode.value}")
        if mode is Pause.REJECT:
            self._queues.refuse_all(model, Reason.PAUSED, now, out)
        elif mode is Pause.HOLD:
            self._residency.hold(model)
        self._queues.dirty[model] = None

    def _change_policy(self, event: PolicyChanged, now: float) -> None:
        model = self._models[event.model]
        model.reconfigure(with_policy(model.program, event))
        self._residency.limit_idleness(model, now)
        model.history.add(now, "policy changed", event)
        self._queues.dirty[model] = None

    def _change(self, settings: SchedulerSettings, now: float, out: list[Instruction]) -> None:
        """Use other settings from now on. A new discipline does not know how much device time models have had."""
        changed = settings.discipline != self.settings.discipline
        self.settings = settings
        self._residency.reconfigure(settings, now, out)
        if changed:
            self._discipline = self._disciplines[settings.discipline]()
            self._discipline.advance(now)
            self._queues.reconfigure(self._discipline)
            self._loads.discipline = self._discipline
        self._admission.reconfigure(self._discipline, settings.meta_concurrency)
        self._queues.dirty.update(dict.fromkeys(self._models.values()))

    def _remove(self, name: str, now: float, out: list[Instruction]) -> None:
        model = self._models[name]
        model.history.add(now, "removed")
        self._queues.refuse_all(model, Reason.UNLOADED, now, out)
        # The discipline and the load queue must learn that the model has no work before they forget it.
        self._settle(now)
        self._discipline.remove(name)
        del self._models[name]
        self._admission.reconsider()
        model.draining = True
        self._draining[name] = model
        self._drain(model, now, out)

    def _drain(self, model: ModelState, now: float, out: list[Instruction]) -> None:
        """Drop a removed model once nothing executes on its weights and no read or load of them runs."""
        if self._residency.remove(model, now, out):
            del self._draining[model.name]
            self._queues.departed.add(model.totals.counts)
            has_relatives = any(state.family == model.family for state in self._states())
            self._past.keep(model.family, model.totals, others=has_relatives)

    # --- weights -----------------------------------------------------------------------------------------

    def _compact(self, now: float, out: list[Instruction]) -> None:
        """Carry out a compaction that is due, once the device is idle.

        Then retry the execution or the warm-up that found no memory.
        """
        compaction = self._residency.compaction
        if compaction.state is not _DUE or self._running or not self._residency.quiet:
            return
        reload_seconds = self._residency.compact(now, out)
        first = compaction.next_execution()
        if first is not None:
            # If the execution never finds memory, it must not evict other models again and again. So its model waits until
            # those models have loaded and executed.
            turn = first.execute.seconds + (1.0 + self.settings.residency_factor) * reload_seconds
            first.model.blocked_until = max(first.model.blocked_until, now + turn)
            self._queues.dirty[first.model] = None
            again = replace(first.execute, number=self._running.started + 1, again=True)
            self._running.start(again, first.model, now, charged=first.charged)
            first.model.history.add(now, "execute again", again)
            out.append(again)

    def _evict(self, now: float, out: list[Instruction]) -> None:
        """Carry out requested evictions, end back-offs, and evict weights that exceed the budget."""
        residency, accounts = self._residency, self._residency.accounts
        if residency.evictions:
            residency.evict_requested(now, out)
        if self._loads.backing_off:
            self._loads.end_due_backoffs(now)
        # The budget may have fallen, or models may have been pinned.
        if accounts.budget is not None and accounts.bytes > accounts.budget:
            residency.evict_excess(now, out)

    def _load(self, now: float, out: list[Instruction]) -> None:
        """Start the next read, and the next load unless the device is kept for an exclusive request."""
        if self._queues.exclusive or self._kept_exclusive:
            # Evictions may have changed which request is next.
            self._keep_device()
        if self._loads.may_read:
            self._residency.read(now, out)
        if self._loads.may_load and not (self._kept_exclusive or self._residency.compaction.active):
            self._residency.load(now, out)

    def _load_again(self, now: float, out: list[Instruction]) -> None:
        """Repeat the steps `_evict` and `_load`.

        A dispatch may have shed the requests of the first model in line, or committed requests of another model.
        """
        if self._discipline.sheds or self._queues.runs:
            self._evict(now, out)
            if not self._queues.dirty:
                self._load(now, out)

    # --- consequences of changes --------------------------------------------------------------------------

    def _settle(self, now: float) -> None:
        """Bring the sums, the discipline and the load queue up to date with the models that changed."""
        for model in self._queues.dirty:
            self._backlog -= model.backlog_seconds
            self._round -= model.turn_seconds
            model.recount()
            self._backlog += model.backlog_seconds
            self._round += model.turn_seconds
            self._enlist(model, now)
        self._queues.dirty.clear()
        if not self._queues.queued:
            # Reset the sums, so that rounding errors do not accumulate.
            self._backlog = self._round = 0.0

    def _enlist(self, model: ModelState, now: float) -> None:
        """Report to the discipline and the load queue what a model waits for now."""
        name, discipline, loads, state = model.name, self._discipline, self._loads, model.weights.state
        self._delayed.pop(name, None)
        if not model.has_work:
            if model.queued:
                # Only held models have queued requests and no work.
                discipline.hold(name)
            else:
                discipline.end_work(name)
            if state in (WeightState.QUEUED, WeightState.READING):
                loads.end_demand(model)
        elif state in RUNNABLE:
            if state is WeightState.EVICTING and not self._residency.must_execute(model):
                # Do not let the model execute. With a steady stream of requests, its weights would never be evicted.
                discipline.wait(model, claims=True)
            elif model.dispatchable_at <= now:
                discipline.update(model)
            else:
                discipline.wait(model, claims=False)
                self._delayed.set(name, model.dispatchable_at)
        elif state is WeightState.RESERVED:
            discipline.wait(model, claims=False)
        else:
            discipline.wait(model, claims=True)
            if state is not WeightState.LOADING:
                loads.demand(model, discipline.rank(model))
            return
        if loads.blocked_head is not None or loads.prefetched:
            loads.note_evictable(model)

    # --- the end of the runtime ------------------------------------------------------------------------------

    @property
    def _is_closed(self) -> bool:
        """True if no new execution starts, because the runtime is about to end. Retries still start."""
        if self._phase is _SERVING:
            return False
        at_rest = self._phase is SchedulerPhase.AT_REST
        return at_rest or not (self._admission.running or self._waiting_steps())

    def _waiting_steps(self) -> int:
        """Return the number of generations whose next step waits. All other generations in progress execute a step now."""
        return sum(model.queued for model in self._models.values() if model.program.feeds_back)

    def _come_to_rest(self, now: float, out: list[Instruction]) -> None:
        """End a `WindDown` once nothing is in progress. If its time is over, continue serving."""
        if self._phase is SchedulerPhase.AT_REST:
            return
        runs, steps = self._admission.running, self._waiting_steps()
        executions = len(self._running) + len(self._residency.compaction.retries)
        if not (runs or executions or steps):
            self._phase, self._rest_until = SchedulerPhase.AT_REST, inf
            out.append(WoundDown(0, 0))
        elif now >= self._rest_until:
            self._wind_down(None, now)
            out.append(WoundDown(runs, executions, steps))
            self._admission.proceed(now, out)
            self._plan(now, out)

    def _wind_down(self, within: float | None, now: float) -> None:
        """Wind down within this many seconds. None: serve as before."""
        serves = within is None
        self._phase = SchedulerPhase.SERVING if serves else SchedulerPhase.WINDING_DOWN
        self._rest_until = inf if within is None else now + within
        self._admission.closed = not serves

    # --- deadlines that cannot be met ------------------------------------------------------------------------

    def _shed(self, now: float, out: list[Instruction]) -> None:
        """End requests that would be late even if they executed next."""
        queues = self._queues
        free = now + self._running.seconds(now)
        for late in late_requests(queues.late_checks, self._models, self._residency.accounts, free, now):
            queues.shed(late.entry, late.queue, now, out)
            if late.absent:
                self._loads.prefetch_after_shed(late.model)

    def _patience(self, queue: VariantQueue, now: float) -> float:
        """Return the seconds that an execution may take so that the front request meets its deadline.

        The execution begins when the executions in flight have ended.
        """
        deadline = queue.entries[0].request.deadline
        return inf if deadline is None else deadline - now - self._running.seconds(now) + SLACK

    # --- the next tick ---------------------------------------------------------------------------------------

    def next_wakeup(self) -> float | None:
        """Return the time when a `Tick` is due. None: only other events change something.

        It is the soonest of these times:
        - the deadline of a queued request or a waiting run, or the time when a request becomes certain to be late;
        - the end of a model's delay;
        - the end of the protection of weights whose room other weights wait for;
        - the retry of a pinned model's failed load;
        - the time when weights reach their model's limit of idleness;
        - the start of the device's next execution;
        - the end of a wind-down.
        """
        soonest = self._residency.idle_at
        if self._queues.deadlines.heap:
            soonest = min(soonest, self._queues.deadlines.next())
        if self._queues.late_checks.heap:
            soonest = min(soonest, self._queues.late_checks.next() + 2 * SLACK)
        if self._admission.waiting:
            soonest = min(soonest, self._admission.next_deadline())
        if self._loads.backing_off:
            soonest = min(soonest, self._loads.next_backoff_end())
        delayed = self._delayed.first() if self._delayed else None
        if delayed is not None:
            soonest = min(soonest, self._delayed[delayed])
        closed = self._phase is not _SERVING and self._is_closed
        if self._phase is not _SERVING:
            soonest = min(soonest, self._rest_until)
        if not (self._kept_exclusive or self._residency.compaction.active or closed):
            if self._queues.queued or self._loads.prefetched or self._loads.required:
                soonest = min(soonest, self._loads.next_search_at())
            if 0 < len(self._running) < self.settings.depth:
                soonest = min(soonest, self._next_launch())
        return None if soonest == inf else soonest

    def _next_launch(self) -> float:
        """Return the time when the device should get one more execution while others are in flight. inf: unknown, or none."""
        end, name = self._running.end_after(self._now), self._discipline.choose()
        if end is None or name is None or not self._goes_ahead(self._models[name], self._now):
            return inf
        return max(self._now, end - self.settings.launch_ahead_ms / 1e3)

    def _goes_ahead(self, model: ModelState, now: float) -> bool:
        """Return whether an execution of a model may be launched before the executions in flight have ended.

        It may not if the model feeds back and is executing. It also may not if the head of the load queue waits for the model's
        room, because the model would then never be idle long enough to be evicted.
        """
        feeds_back = model.program.feeds_back and model.executions
        return not feeds_back and not self._loads.wants_room_of(model, now)

    # --- questions (they change no later decision) -----------------------------------------------------------

    def backlog_seconds(self, now: float) -> float:
        """Expected device time until all waiting and running requests are done. A call costs O(depth).

            `InFlight.seconds`
            + sum over queues of `VariantQueue.seconds`

        Loads of weights are not included: they run concurrently with executions, and the duration of a first load is unknown.
        """
        running = self._running.seconds(now) if self._running else 0.0
        return running + max(0.0, self._backlog)

    def seconds_until_idle(self, now: float) -> float | None:
        """Expected time until the device has nothing to do. None: the device is free.

            backlog + seconds for which the running execution is overdue

        An execution that is overdue by s seconds is expected to take s more seconds. Requests that wait for their weights,
        or because their model is paused, are expected to use no device time.
        """
        if not self._running:
            return None
        return self.backlog_seconds(now) + self._running.overdue_seconds(now)

    @property
    def sheds(self) -> bool:
        """True if requests whose deadline cannot be met any more end at once."""
        return self._discipline.sheds

    def admission_seconds(self) -> float:
        """Expected time until a run of a meta model that arrived now would be admitted; 0 while a slot is free."""
        return self._admission.wait_seconds()

    def load_seconds(self, model: str) -> float:
        """Return the expected seconds of loading a model's weights now. 0: they are on the device, or the model is unknown."""
        state = self._models.get(model)
        return 0.0 if state is None or state.weights.state in ON_DEVICE else state.weights.remaining_seconds

    def on_disk(self, model: str) -> bool:
        """Return whether a model's weights are read from disk before a load. False for unknown models."""
        state = self._models.get(model)
        return state is not None and state.weights.on_disk

    def knows(self, model: str) -> bool:
        """True if a model is known or draining. Its key may not be added again while this is true."""
        return model in self._models or model in self._draining

    def last_arrival(self, model: str) -> float:
        """Return the time when the latest requests for a known model arrived.

        -inf: no request has arrived, or the model is unknown.
        """
        state = self._models.get(model)
        return -inf if state is None else state.weights.last_arrival

    def idle_since(self, model: str) -> float:
        """Return the time when a known model's weights were last used.

        inf: the model is unknown, its requests wait or execute, or its weights load, are about to load, or warm up.
        """
        state = self._models.get(model)
        if state is None or state.queued or state.executing or state.weights.state not in _AT_REST:
            return inf
        return state.weights.last_used

    def queued(self, model: str) -> int:
        """Return the number of a model's waiting requests. 0 for unknown models."""
        state = self._models.get(model)
        return 0 if state is None else state.queued

    def history(self, model: str, beside: Iterable[HistoryRecord] = ()) -> list[HistoryRecord]:
        """Return the latest events, instructions and states of a model, oldest first.

        The result is empty for a model that is neither known nor draining. `beside` has other records about the model to
        insert, oldest first.
        """
        state = self._find(model)
        return (History() if state is None else state.history).records(beside)

    def slowest(self, model: str, now: float) -> list[SlowRequest]:
        """Return the slowest requests of a known or draining model, the slowest first. Empty for other models."""
        state = self._find(model)
        return [] if state is None else state.slowest.read(now)

    def add_front(self, slow: SlowRequest, before: float, after: float) -> None:
        """Record the seconds that a request of `slowest` spent in its front, before it arrived here and after it ended here."""
        state = self._find(slow.request.model)
        if state is not None:
            state.slowest.add_front(slow, before, after)

    def find_requests(self, tag: int, id: int | None, now: float) -> list[SlowRequest]:
        """Return the slowest requests and the requests in progress that have this id, or this client's tag (0: no tag).

        If a result is a part of a larger request, all parts of the larger request are returned.
        """
        slow_requests = self._matching(
            lambda request: request.id == id or bool(tag and request.tag == tag), now
        )
        if wholes := {slow.request.whole for slow in slow_requests} - {0}:
            slow_requests = [slow for slow in slow_requests if not slow.request.whole]
            slow_requests += self._matching(lambda request: request.whole in wholes, now)
        return slow_requests

    def _matching(self, matches: Callable[[Request], bool], now: float) -> list[SlowRequest]:
        ended = [slow for state in self._states() for slow in state.slowest.find(matches, now)]
        return ended + self._times.in_progress(matches, now)

    def obstacle(self, model: str, now: float) -> str:
        """Return a text that says what the absent weights of a known model wait for, or "" if they wait for nothing."""
        state, retried = self._models.get(model), self._residency.compaction.retried
        device = ""
        if retried is not None:
            device = f"the retry of {retried.family}"
        elif self._residency.compaction.state is CompactionState.DUE:
            device = "a compaction of the device's memory"
        elif self._kept_exclusive:
            device = "a request that executes alone"
        return "" if state is None else self._loads.obstacle(state, now, device)

    def change_counts(self) -> dict[str, int]:
        """Return a number for each known and draining model. It rises whenever the model's counters or weights change."""
        return {state.name: state.history.count for state in self._states()}

    def weight_bytes(self) -> WeightBytes:
        """Return the device bytes of all weights. Costs O(models)."""
        accounts = self._residency.accounts
        present = (state for state in self._states() if state.weights.state in TAKING_BYTES)
        logical = sum(state.program.weight_bytes for state in present)
        return WeightBytes(accounts.bytes, accounts.pinned_bytes, logical, accounts.budget)

    def shared_tensors(self) -> list[SharedTensors]:
        """Return the weights of all models, grouped by the models that have them. Costs O(models and their groups)."""
        groups = {id(group): group for state in self._states() for group in state.weights.groups}
        return [
            SharedTensors(group.bytes, [owner.model for owner in group.owners], group.users > 0)
            for group in groups.values()
        ]

    def totals(self) -> dict[str, Totals]:
        """Return the counters of known and draining models by name, summed over all versions.

        Read them before the next event, because they may be the scheduler's own objects.
        """
        return self._past.with_present((state.family, state.totals) for state in self._states())

    def model(self, key: str) -> ModelSnapshot | None:
        """Return the statistics of a known or draining model, or None for others."""
        state = self._find(key)
        return None if state is None else state.snapshot()

    def meta(self, name: str) -> MetaSnapshot | None:
        """Return the statistics of the runs of a meta model. None: it has never had a run."""
        return self._admission.meta(name)

    def metas(self) -> dict[str, MetaSnapshot]:
        """Return statistics of the runs of each meta model."""
        return self._admission.snapshot()

    def _find(self, name: str) -> ModelState | None:
        """Return a known or draining model, or None."""
        return self._models.get(name) or self._draining.get(name)

    def _states(self) -> list[ModelState]:
        return [*self._models.values(), *self._draining.values()]

    def snapshot(self) -> SchedulerSnapshot:
        """Return statistics of all known and draining models."""
        states, totals = self._states(), OutcomeCounts()
        for counts in (self._queues.departed, *(state.totals.counts for state in states)):
            totals.add(counts)
        weights = self.weight_bytes()
        return SchedulerSnapshot(
            models={state.name: state.snapshot() for state in states},
            metas=self._admission.snapshot(),
            arrived=self._queues.arrived,
            outcomes=totals.outcomes(),
            refused=totals.refused,
            queued=self._queues.queued,
            executing=len(self._queues.live) - self._queues.queued,
            running=len(self._running),
            weight_bytes=weights.physical,
            pinned_bytes=weights.pinned,
            logical_bytes=weights.logical,
            weight_budget_bytes=weights.budget,
        )
