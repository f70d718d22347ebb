"""Residency of weights on the device: loads, evictions, pins, warm-ups and compactions.

`LoadQueue` moves absent weights between ABSENT, QUEUED and BACKOFF. `DeviceResidency` makes every other change of state: it
carries out the decisions of `LoadQueue`, and handles the ends of reads, loads and warm-ups. Both use `WeightAccounts.move`.
`DeviceResidency` puts each model that it changes into `RequestQueues.dirty`, so that the scheduler settles it.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from enum import Enum
from math import inf

from rsrv.scheduler.events import (
    CallerError,
    GiveUp,
    Instruction,
    LoadAbandoned,
    LoadFailed,
    LoadOutcome,
    ModelAdded,
    Reason,
    WarmUp,
    WeightsLoaded,
    WeightsRead,
)
from rsrv.scheduler.inflight import StartedExecution
from rsrv.scheduler.load_queue import LoadQueue, PlannedLoad, evictable
from rsrv.scheduler.model import ModelState
from rsrv.scheduler.request_queue import RequestQueues
from rsrv.scheduler.settings import SchedulerSettings
from rsrv.scheduler.statistics import Cause
from rsrv.scheduler.weight_states import ON_DEVICE, RUNNABLE, TAKING_BYTES, WeightEvent, WeightState
from rsrv.scheduler.weights import WeightAccounts

#: Seconds until the next check of weights that reached their idle limit but cannot be evicted.
IDLE_CHECK_S = 0.1


class CompactionState(Enum):
    """State of a compaction of the device's memory."""

    #: No compaction is due.
    NONE = "none"
    #: Nothing starts on the device until nothing executes, loads or warms up. Then the compaction is carried out.
    DUE = "due"
    #: An execution or a warm-up is retried, and has the device to itself. Other executions and warm-ups may wait for their
    #: retry.
    RETRYING = "retrying"


class Compaction:
    """Eviction of all evictable weights at once, so that the device's allocator finds contiguous memory again.

    There are two causes:

    - A command asked for it. The evicted weights are then restored.
    - An execution, a load or a warm-up found no memory. It is then retried once. A retried execution or warm-up has the
      device to itself.
    """

    __slots__ = ("_asked", "_restores", "active", "retried", "retries", "state", "warm_ups")

    def __init__(self) -> None:
        self.state = CompactionState.NONE
        #: True if the state is not NONE. While it is true, nothing else starts on the device.
        self.active = False
        #: True if a command or a load asked for a compaction.
        self._asked = False
        #: True if evicted weights are restored.
        self._restores = False
        #: Executions that found no memory, in order. Their requests are not answered yet.
        self.retries: deque[StartedExecution] = deque()
        #: Models whose warm-up found no memory. Their weights stay reserved.
        self.warm_ups: deque[ModelState] = deque()
        #: Model whose execution or warm-up is being retried.
        self.retried: ModelState | None = None

    def ask(self, *, restores: bool) -> None:
        """Request a compaction. It is carried out as soon as the device is idle."""
        self._asked = True
        self._restores = self._restores or restores
        self._derive()

    def retry(self, execution: StartedExecution) -> None:
        """Request a compaction, and after it the retry of an execution."""
        self.retries.append(execution)
        self._derive()

    def retry_warm_up(self, model: ModelState) -> None:
        """Request a compaction, and after it the retry of a model's warm-up. The model's weights stay."""
        self.warm_ups.append(model)
        self._derive()

    def finish(self) -> bool:
        """End a compaction. Return True if the evicted weights must be restored."""
        restores = self._restores
        self._asked = self._restores = False
        self._derive()
        return restores

    def next_execution(self) -> StartedExecution | None:
        """Remove and return the execution that is retried now."""
        if not self.retries:
            return None
        execution = self.retries.popleft()
        self.retried = execution.model
        self._derive()
        return execution

    def next_warm_up(self) -> ModelState | None:
        """Remove and return the model whose warm-up is retried now. Executions are retried before warm-ups."""
        if self.retries or not self.warm_ups:
            return None
        self.retried = self.warm_ups.popleft()
        self._derive()
        return self.retried

    def end_retry(self) -> None:
        """End the retry of an execution or a warm-up."""
        self.retried = None
        self._derive()

    def _derive(self) -> None:
        if self.retried is not None:
            self.state = CompactionState.RETRYING
        elif self._asked or self.retries or self.warm_ups:
            self.state = CompactionState.DUE
        else:
            self.state = CompactionState.NONE
        self.active = self.state is not CompactionState.NONE


class DeviceResidency:
    """Loads and evictions of all models."""

    __slots__ = (
        "_draining",
        "_models",
        "_queues",
        "accounts",
        "compaction",
        "evictions",
        "idle_at",
        "loads",
    )

    def __init__(
        self,
        models: Mapping[str, ModelState],
        draining: Mapping[str, ModelState],
        queues: RequestQueues,
        settings: SchedulerSettings,
    ) -> None:
        self._models = models
        self._draining = draining
        self._queues = queues
        self.accounts = WeightAccounts(settings.weight_budget_bytes)
        self.loads = LoadQueue(models, self.accounts, settings, queues.discipline)
        self.compaction = Compaction()
        #: Models to evict as soon as possible, in order. The value is True if an operator requested the eviction. Resident
        #: weights of these models are EVICTING. Weights that load or warm up become EVICTING at the end of the load or warm-up.
        self.evictions: dict[ModelState, bool] = {}
        #: Earliest time when weights may have reached their model's limit of idleness. inf: no model has a limit. The time may
        #: be too early.
        self.idle_at = inf

    @property
    def warming_up(self) -> int:
        """Number of warm-ups that run."""
        return self.accounts.reserved - len(self.compaction.warm_ups)

    @property
    def quiet(self) -> bool:
        """True if nothing loads or warms up."""
        return self.accounts.loading is None and not self.warming_up

    # --- models ------------------------------------------------------------------------------------------

    def admit(self, model: ModelState, event: ModelAdded, now: float, out: list[Instruction]) -> None:
        """Adopt an added model's weights if they are on the device. Otherwise queue their load if a load is needed."""
        model.weights.on_disk = event.on_disk
        if event.resident:
            self.accounts.adopt(model.weights)
            self.limit_idleness(model, now)
            model.weights.desired = model.weights.pinned or not model.needs_warm_up
            # If the model is pinned, the tensors that it shares count as pinned bytes now, so other models may fit.
            self.loads.unblock()
            self._start_warm_up(model, out)
        elif model.weights.pinned or model.needs_warm_up:
            self.loads.require(model)
        elif event.restore is not None and self.loads.on_demand:
            self.loads.restore_at(event.restore, model)

    def remove(self, model: ModelState, now: float, out: list[Instruction]) -> bool:
        """Evict a removed model's weights once nothing uses, reads or loads them.

        Return True if the device does not have them any more.
        """
        weights = model.weights
        self.loads.leave_lines(model)
        self.loads.forget_backoff(model)
        self.evictions.pop(model, None)
        if model.busy or weights.state in (WeightState.READING, WeightState.LOADING):
            if weights.state is WeightState.RESIDENT:
                self.accounts.move(weights, WeightEvent.RELEASE)
            return False
        if weights.state in RUNNABLE:
            self.loads.end_backoffs()
            out.append(self.accounts.evict(weights, why="removed"))
        self.accounts.groups.leave(weights)
        self.loads.unblock()
        return True

    def pin(self, model: ModelState, pinned: bool, now: float, out: list[Instruction]) -> None:
        """Pin a model's weights, and load them if they are absent. If `pinned` is false, unpin them."""
        weights = model.weights
        changed = pinned != weights.pinned
        if changed:
            self.accounts.pin(weights, pinned)
            model.history.add(now, "pinned" if pinned else "unpinned")
        if pinned:
            weights.desired = True
            weights.end_backoff()
            self._keep(model)
            if weights.state not in TAKING_BYTES:
                self.loads.require(model)
        elif changed:
            if weights.state in TAKING_BYTES:
                # Other weights may use this room now.
                self.loads.end_backoffs()
            weights.desired = False
            if not model.needs_warm_up:
                self._end_requirement(model)
            if not self.loads.on_demand:
                self.request_eviction([model], now, out)
        self.limit_idleness(model, now)
        self._queues.dirty[model] = None
        self.loads.unblock()

    def prefetch(self, model: ModelState, now: float) -> None:
        """Put a model in the line of prefetches if its weights are absent. Withdraw an eviction of its weights that is due."""
        model.history.add(now, "prefetch")
        model.weights.end_backoff()
        self._keep(model)
        self._desire(model)
        self._queues.dirty[model] = None

    def _desire(self, model: ModelState) -> None:
        """Mark a model's weights as desired on the device, even without requests."""
        weights = model.weights
        weights.desired = True
        abandoned = weights.state is WeightState.LOADING and self.accounts.abandoning
        if abandoned or weights.state not in TAKING_BYTES:
            self.loads.prefetch(model)

    def _keep(self, model: ModelState) -> None:
        """Withdraw the eviction of a model's weights, if one is due."""
        self.evictions.pop(model, None)
        if model.weights.state is WeightState.EVICTING:
            self.accounts.move(model.weights, WeightEvent.KEEP)

    def request_eviction(self, models: Iterable[ModelState], now: float, out: list[Instruction]) -> None:
        """Evict weights once nothing executes on them. Pinned weights stay."""
        for model in models:
            weights = model.weights
            if weights.pinned:
                continue
            model.history.add(now, "to be evicted")
            weights.desired = False
            if not model.needs_warm_up:
                self._end_requirement(model)
            self.loads.end_prefetch_and_restore(model)
            if weights.state in TAKING_BYTES:
                self.evictions[model] = True
                self._mark_evicting(model)
            # A load continues if requests or a warm-up wait for it.
            needed = model.needs_warm_up or (self.loads.on_demand and model.has_work)
            if weights.state is WeightState.LOADING and not (needed or self.accounts.abandoning):
                self._abandon(model, now, out)
            if weights.state not in ON_DEVICE:
                self._refuse_waiting(model, now, out)
            self._queues.dirty[model] = None

    def _mark_evicting(self, model: ModelState) -> None:
        """Move resident weights whose eviction was requested to EVICTING."""
        if model in self.evictions and model.weights.state is WeightState.RESIDENT:
            self.accounts.move(model.weights, WeightEvent.RELEASE)

    def _refuse_waiting(self, model: ModelState, now: float, out: list[Instruction]) -> None:
        """Refuse the model's waiting requests if weights do not load on demand."""
        if not self.loads.on_demand:
            self._queues.refuse_all(model, Reason.NOT_RESIDENT, now, out)

    def hold(self, model: ModelState) -> None:
        """Stop requiring the load of a held model if only its requests need the load."""
        if not (model.weights.pinned or model.weights.desired or model.needs_warm_up):
            self._end_requirement(model)

    def _end_requirement(self, model: ModelState) -> None:
        """Stop requiring a model's load. Also forget that an earlier load found no memory."""
        if model.name in self.loads.required:
            model.weights.retry_due = False
            self.loads.end_requirement(model)

    def reconfigure(self, settings: SchedulerSettings, now: float, out: list[Instruction]) -> None:
        """Use other settings from now on."""
        self.accounts.budget = settings.weight_budget_bytes
        ends_on_demand = self.loads.on_demand and not settings.on_demand
        self.loads.reconfigure(settings)
        if ends_on_demand:
            self._end_on_demand(now, out)
        # Check for idle weights in this event, because they are evicted only if weights load on demand.
        self.idle_at = now

    def _end_on_demand(self, now: float, out: list[Instruction]) -> None:
        """Mark present, loading and required weights as desired, because requests cause no loads from now on."""
        loads = self.loads
        for model in self._models.values():
            weights = model.weights
            reserved = weights.state is WeightState.RESERVED
            excluded = model.needs_warm_up or reserved or model in self.evictions
            in_line = model.name in loads.required or model.name in loads.restored
            if (weights.state in TAKING_BYTES or in_line) and not excluded:
                self._desire(model)
            if not weights.desired:
                loads.prefetched.pop(model.name, None)
                loads.requeue(model)
                if weights.state not in ON_DEVICE:
                    self._refuse_waiting(model, now, out)

    # --- warm-ups ----------------------------------------------------------------------------------------

    def _start_warm_up(self, model: ModelState, out: list[Instruction]) -> None:
        """Reserve weights that were just loaded for the model's warm-up, if one is due."""
        if model.needs_warm_up:
            model.needs_warm_up = False
            self.accounts.move(model.weights, WeightEvent.WARM_UP)
            out.append(WarmUp(model.name))

    def check_warm_up(self, name: str) -> None:
        """Check that a warm-up runs before it ends.

        Raises:
            CallerError: the model is unknown, or is not being warmed up.
        """
        model = self._models.get(name) or self._draining.get(name)
        running = model is not None and model.weights.state is WeightState.RESERVED
        if not running or model in self.compaction.warm_ups:
            raise CallerError(f"model {name!r} is not being warmed up")

    def warmed_up(self, model: ModelState) -> None:
        """End a model's warm-up, successful or not."""
        self.accounts.move(model.weights, WeightEvent.WARMED_UP)
        if not (self.loads.on_demand or model.weights.desired):
            self.evictions[model] = False
        self._mark_evicting(model)
        self._queues.dirty[model] = None

    # --- ends of loads -----------------------------------------------------------------------------------

    def load_ended(self, event: LoadOutcome, now: float, out: list[Instruction]) -> ModelState | None:
        """Handle the end of a load or a read. Return its model, or None if that load or read had ended before."""
        model = self._models.get(event.model) or self._draining.get(event.model)
        if model is None or model.weights.epoch != event.epoch:
            return None
        weights = model.weights
        if weights.state is WeightState.LOADING:
            self._queues.discipline.set_filling(False)
        elif weights.state is not WeightState.READING:
            return None
        self._queues.dirty[model] = None
        match event:
            case WeightsRead():
                self.accounts.read_ended(weights, event.seconds)
                self.loads.copy_changed(model, present=True)
            case WeightsLoaded():
                self.loads.leave_lines(model)
                self.accounts.loaded(weights, event.seconds)
                model.totals.load.observe(event.seconds)
                weights.unserved = model.has_work
                self.limit_idleness(model, now)
                if not model.draining:
                    self._start_warm_up(model, out)
                self._mark_evicting(model)
            case LoadAbandoned():
                self.evictions.pop(model, None)
                self.accounts.not_loaded(weights, abandoned=True)
                self.loads.requeue(model)
                if weights.pinned and not model.draining:
                    self.loads.require(model)
                self.loads.unblock()
            case LoadFailed():
                model.history.add(now, "load failed", event)
                self.accounts.not_loaded(weights)
                self.evictions.pop(model, None)
                self.loads.requeue(model)
                self.loads.unblock()
                if not model.draining:
                    self._retry_or_give_up(model, event, now, out)
        return model

    def _retry_or_give_up(
        self, model: ModelState, event: LoadFailed, now: float, out: list[Instruction]
    ) -> None:
        """Handle a failed load: retry it once after a compaction if it found no memory. Otherwise, give it up."""
        weights = model.weights
        desired = weights.pinned or weights.desired or model.needs_warm_up
        if event.out_of_memory and not weights.retry_due:
            if not model.has_work and not desired:
                # Nothing needs the weights now, because the requests are gone or an operator holds the model.
                return
            weights.retry_due = True
            self.compaction.ask(restores=False)
            self.loads.require(model)
            return
        self.loads.back_off(model, now, "" if event.out_of_memory else event.error)
        weights.retry_due = False
        self.loads.leave_lines(model)
        if desired:
            weights.desired = False
            out.append(GiveUp(model.name, event.error))
            model.needs_warm_up = False
        self._queues.fail_all(model, event.error, now, out)

    # --- starts of loads, and evictions --------------------------------------------------------------------

    def read(self, now: float, out: list[Instruction]) -> None:
        """Start the next read from disk if none runs. Abandon the running one if it is useless. Reads do not use the device."""
        reading = self.accounts.reading
        if reading is not None:
            model = self._models.get(reading.model) or self._draining[reading.model]
            if not self.accounts.abandoning_read and (model.draining or self.loads.is_useless_read(model)):
                self._abandon(model, now, out)
        elif (first := self.loads.next_read()) is not None:
            out.append(self.accounts.read(first.weights, str(self.loads.reason(first.name))))
            self._queues.dirty[first] = None

    def load(self, now: float, out: list[Instruction]) -> None:
        """Start the next load if the link is free and there is room. Abandon the running one if it is useless."""
        loading = self.accounts.loading
        if loading is not None:
            model = self._models.get(loading.model) or self._draining[loading.model]
            if not self.accounts.abandoning and (model.draining or self.loads.is_useless(model)):
                self._abandon(model, now, out)
            return
        planned = self.loads.plan(now)
        if planned is None and not self.loads.on_demand:
            planned = self._plan_without(now, out)
        if planned is None:
            return
        model, victims = planned
        # Account for the load before the evictions, so that tensors that it shares with the victims stay.
        reason = self.loads.reason(model.name)
        load = self.accounts.load(model.weights, "" if reason is None else reason.value)
        # If weights do not load on demand, a command loaded all victims. So the victims return after the warm-up.
        returns = not self.loads.on_demand and model.needs_warm_up
        for victim in victims:
            self.evict(victim, Cause.ROOM, now, out, loading_for=model, returns=returns)
        self.loads.started(model)
        self._queues.discipline.set_filling(not victims)
        out.append(load)
        self._queues.dirty[model] = None

    def _plan_without(self, now: float, out: list[Instruction]) -> PlannedLoad | None:
        """Plan a load if weights do not load on demand: give up loads that find no room until one fits.

        Nothing is given up while weights are about to leave the device, because they may make room.
        """
        while not (self.evictions or self.warming_up or self._draining):
            lost = self.loads.find_misfit()
            if lost is None:
                return None
            self._give_up_for_room(lost, now, out)
            planned = self.loads.plan(now)
            if planned is not None:
                return planned
        return None

    def _give_up_for_room(self, model: ModelState, now: float, out: list[Instruction]) -> None:
        """Give up the load of weights that do not fit and may not evict others."""
        accounts = self.accounts
        error = (
            f"{model.weights.absent_bytes} bytes do not fit in addition to the {accounts.bytes} on the device: weights may "
            f"take {accounts.budget}; evict or unpin other models first"
        )
        model.history.add(now, "no room")
        model.weights.desired = False
        self.loads.leave_lines(model)
        self.loads.end_demand(model)
        out.append(GiveUp(model.name, error))
        self._refuse_waiting(model, now, out)

    def _abandon(self, model: ModelState, now: float, out: list[Instruction]) -> None:
        model.history.add(now, "abandon load")
        out.append(self.accounts.abandon(model.weights))

    def evict_excess(self, now: float, out: list[Instruction]) -> None:
        """Evict weights until the others are within the budget, as far as weights are evictable."""
        overdue = self.loads.victims_over_budget(now)
        for model in overdue:
            self.evict(model, Cause.BUDGET, now, out)
        if overdue:
            self.loads.unblock()

    def limit_idleness(self, model: ModelState, now: float) -> None:
        """Schedule the check whether a model's weights have reached their idle limit."""
        self.idle_at = min(self.idle_at, now + model.program.idle_seconds)

    def evict_idle(self, now: float, out: list[Instruction]) -> None:
        """Evict weights that were unused for their model's limit, unless requests wait for them or they are pinned.

        A call costs O(models). `idle_at` is the time of the next call.
        """
        self.idle_at = inf
        if not self.loads.on_demand:
            return
        for model in self._models.values():
            weights, limit = model.weights, model.program.idle_seconds
            if limit == inf or weights.state not in ON_DEVICE:
                continue
            due = weights.last_used + limit
            if due > now:
                self.idle_at = min(self.idle_at, due)
            elif evictable(model) and not model.queued:
                self.evict(model, Cause.IDLE, now, out)
                self.loads.unblock()
            else:
                self.idle_at = min(self.idle_at, now + max(limit, IDLE_CHECK_S))

    def evict_requested(self, now: float, out: list[Instruction]) -> None:
        """Carry out requested evictions of models that execute nothing and need not execute first."""
        for model in [model for model in self.evictions if evictable(model) and not self.must_execute(model)]:
            if self.evictions[model]:
                self.loads.end_backoffs()
            self.evict(model, Cause.ASKED, now, out)
            self.loads.unblock()

    def must_execute(self, model: ModelState) -> bool:
        """True if a model with work must execute before its eviction.

        A model must execute if a run of a meta model waits for it, or if it has not executed since its load. Otherwise, a model
        that is evicted again and again would never execute.
        """
        return model.committed or (model.has_work and model.weights.unserved and self.loads.on_demand)

    def compact(self, now: float, out: list[Instruction]) -> float:
        """Evict all evictable weights, while nothing loads or executes.

        Returns:
            Expected seconds of the loads that return weights with waiting requests to the device.
        """
        self.evict_requested(now, out)
        evicted = [model for model in self._models.values() if evictable(model)]
        evicted.sort(key=lambda model: model.weights.last_used, reverse=True)
        working = [model for model in evicted if model.has_work]
        for model in evicted:
            self.evict(model, Cause.COMPACTION, now, out, returns=not self.loads.on_demand)
        self.loads.unblock()
        compaction = self.compaction
        if compaction.finish():
            self.loads.restore(evicted)
        retried = compaction.next_warm_up()
        if retried is not None:
            self.accounts.move(retried.weights, WeightEvent.WARM_UP)
            out.append(WarmUp(retried.name, again=True))
        return self.accounts.reload_seconds(model.weights for model in working)

    def evict(
        self,
        model: ModelState,
        cause: Cause,
        now: float,
        out: list[Instruction],
        *,
        loading_for: ModelState | None = None,
        returns: bool = False,
    ) -> None:
        """Evict a model's weights, except tensors shared with `loading_for`, which loads next.

        `returns`: the weights load again as soon as there is room, and their requests wait for that load.
        """
        name, family = (None, "") if loading_for is None else (loading_for.name, loading_for.family)
        evict = self.accounts.evict(model.weights, name, why=cause.value, family=family)
        model.totals.evict(cause)
        self.evictions.pop(model, None)
        out.append(evict)
        self._queues.dirty[model] = None
        if returns:
            self._desire(model)
        else:
            model.weights.desired = False
            self._refuse_waiting(model, now, out)
