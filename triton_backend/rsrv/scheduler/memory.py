"""The device's memory: carries out what `Loads` decides, and takes in how loads end.

Nothing else changes what is on the device. Models are the scheduler's; whatever changes of one is marked in
`RequestQueues.dirty`, so that the scheduler settles it.
"""

from collections import deque
from collections.abc import Iterable, Mapping

from rsrv.scheduler.discipline import COMMITTED_LEVEL
from rsrv.scheduler.events import (
    CallerError,
    GiveUp,
    Instruction,
    LoadAbandoned,
    LoadFailed,
    Reason,
    WarmUp,
    WeightsLoaded,
)
from rsrv.scheduler.inflight import Running
from rsrv.scheduler.loads import LoadBackoff, Loads, evictable
from rsrv.scheduler.model import ModelState
from rsrv.scheduler.request_queue import RequestQueues
from rsrv.scheduler.settings import SchedulerSettings
from rsrv.scheduler.statistics import Cause
from rsrv.scheduler.weights import Residency, Weights


class Compaction:
    """Freeing all evictable weights at once, so that the device's allocator finds its memory contiguous again.

    While a compaction is due nothing new starts on the device. Once nothing executes, loads or warms up, all
    weights that are not pinned are evicted; then everything goes on. There are two reasons for one:

    - somebody asked for it, or `compaction_interval` loads have passed since the last: what was there comes back;
    - an execution, a load or a warm-up found no memory: it gets a second try, with the device to itself.
    """

    __slots__ = ("_mark", "asked", "reload", "retries", "retrying", "warm_ups", "warming")

    def __init__(self) -> None:
        #: `Weights.loads` from which the interval is counted.
        self._mark = 0
        self.asked = False
        #: whether what it evicts comes back.
        self.reload = False
        #: executions that found no memory, in their order. Their requests are in flight still.
        self.retries: deque[Running] = deque()
        #: models whose warm-up found none. They count as warming up still.
        self.warm_ups: deque[ModelState] = deque()
        #: whether one of the executions is being tried again; and whose warm-up is.
        self.retrying = False
        self.warming: ModelState | None = None

    @property
    def due(self) -> bool:
        return self.asked or bool(self.retries) or bool(self.warm_ups)

    @property
    def pauses(self) -> bool:
        """Whether nothing else may start on the device."""
        return self.due or self.retrying or self.warming is not None

    def ask(self, *, reload: bool) -> None:
        self.asked = True
        self.reload = self.reload or reload

    def count(self, loads: int, interval: int) -> None:
        """A load ended, the `loads`-th; ask for a compaction at regular numbers of them."""
        if interval and loads - self._mark >= interval:
            self.ask(reload=True)

    def done(self, loads: int, evicted: int) -> bool:
        """It is carried out, and evicted so many models; returns whether they come back."""
        # Loads that bring them back do not lead to the next one: that would go on for ever.
        self._mark = loads + evicted
        reload = self.reload
        self.asked = self.reload = False
        return reload


class Memory:
    """Whose weights are on the device, come next, and leave."""

    __slots__ = (
        "_draining",
        "_interval",
        "_models",
        "_queues",
        "backoff",
        "compaction",
        "leaving",
        "loads",
        "warming",
        "weights",
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
        self.weights = Weights(settings.weight_budget_bytes)
        self.loads = Loads(models, self.weights, settings)
        self.compaction = Compaction()
        self._interval = settings.compaction_interval
        #: models that are being warmed up.
        self.warming = 0
        #: models whose weights are to go as soon as they may (a dictionary for its order), and whether an operator said so.
        self.leaving: dict[ModelState, bool] = {}
        self.backoff = LoadBackoff()

    @property
    def idle(self) -> bool:
        """Whether nothing comes to the device, or warms up there."""
        return self.weights.loading is None and not self.warming

    # --- models ------------------------------------------------------------------------------------------

    def admit(self, model: ModelState, *, resident: bool, now: float, out: list[Instruction]) -> None:
        """An added model's weights are there already, or are to come if they must."""
        if resident:
            self.weights.adopt(model.weights, now)
            model.weights.asked = model.weights.pinned or not model.warm_up
            # If it is pinned, what it shares with others takes no room of theirs any more.
            self.loads.retry()
            self._warm(model, out)
        elif model.weights.pinned or model.warm_up:
            self.loads.want(model)

    def release(self, model: ModelState, now: float, out: list[Instruction]) -> bool:
        """Let a removed model go, once nothing uses its weights or loads them; whether it is gone."""
        self.loads.forget(model.name)
        self.leaving.pop(model, None)
        self.backoff.forget(model)
        if model.busy or model.weights.residency is Residency.LOADING:
            return False
        if model.weights.residency is Residency.RESIDENT:
            self.backoff.relieve()
            evict = self.weights.evict(model.weights)
            model.history.add(now, "evict weights", evict)
            out.append(evict)
        self.weights.groups.leave(model.weights)
        self.loads.retry()
        return True

    def pin(self, model: ModelState, pinned: bool, now: float, out: list[Instruction]) -> None:
        """Keep a model's weights on the device from now on, or no longer."""
        changed = pinned != model.weights.pinned
        if changed:
            self.weights.pin(model.weights, pinned)
            model.history.add(now, "pinned" if pinned else "unpinned", "")
        if pinned:
            model.weights.asked = True
            model.weights.end_backoff()
            self.leaving.pop(model, None)
            if model.weights.residency is Residency.ABSENT:
                self.loads.want(model)
        elif changed:
            if model.weights.residency is not Residency.ABSENT:
                # Others have its room now if they need it.
                self.backoff.relieve()
            model.weights.asked = False
            if not model.warm_up:
                self._unwant(model)
            if not self.loads.on_demand:
                self.leave([model], now, out)
        self._queues.dirty[model] = None
        self.loads.retry()

    def prefetch(self, model: ModelState, now: float) -> None:
        """Bring a model's weights to the device, if they are not there or will not stay."""
        model.history.add(now, "prefetch", "")
        model.weights.end_backoff()
        self.leaving.pop(model, None)
        self._ask(model)
        self._queues.dirty[model] = None

    def _ask(self, model: ModelState) -> None:
        """Somebody wants it to be there."""
        model.weights.asked = True
        gone = model.weights.residency is Residency.LOADING and self.weights.abandoning
        if model.weights.residency is Residency.ABSENT or gone:
            self.loads.hope(model)

    def leave(self, models: Iterable[ModelState], now: float, out: list[Instruction]) -> None:
        """Free weights as soon as they may go; pinned ones stay."""
        for model in models:
            weights = model.weights
            if weights.pinned:
                continue
            model.history.add(now, "to be evicted", "")
            weights.asked = False
            if not model.warm_up:
                self._unwant(model)
            self.loads.withdraw(model.name)
            if weights.residency is not Residency.ABSENT:
                self.leaving[model] = True
            # A load that requests wait for goes on, and a model that warms up does so first.
            needed = model.warm_up or (self.loads.on_demand and model.place is not None)
            if weights.residency is Residency.LOADING and not (needed or self.weights.abandoning):
                self._abandon(model, now, out)
            if weights.residency is not Residency.RESIDENT:
                self._turn_away(model, now, out)
            self._queues.dirty[model] = None

    def _turn_away(self, model: ModelState, now: float, out: list[Instruction]) -> None:
        """Refuse what waits for weights that do not come by themselves."""
        if not self.loads.on_demand:
            self._queues.refuse_all(model, Reason.NOT_RESIDENT, now, out)

    def hold(self, model: ModelState) -> None:
        """Nobody waits for a model's weights any more, whoever waits: they need not be tried again."""
        if not (model.weights.pinned or model.weights.asked or model.warm_up):
            self._unwant(model)

    def _unwant(self, model: ModelState) -> None:
        """It need not come before others any more; nor because the last time there was no memory."""
        if model.name in self.loads.wanted:
            model.weights.starved = False
            self.loads.unwant(model.name)

    def warmed_up(self, model: ModelState) -> None:
        """A model's warm-up is over, well or not."""
        model.warming = False
        self.warming -= 1
        if not (self.loads.on_demand or model.weights.asked):
            self.leaving[model] = False
        self._queues.dirty[model] = None

    def check_warm_up(self, name: str) -> None:
        """Refuse the end of a warm-up that is not under way.

        Raises:
            CallerError: the model is unknown, or is not being warmed up.
        """
        model = self._models.get(name) or self._draining.get(name)
        if model is None or not model.warming or model in self.compaction.warm_ups:
            raise CallerError(f"model {name!r} is not being warmed up")

    def warm_up_again(self, model: ModelState) -> None:
        """A model's warm-up found no memory; it keeps its weights until the second try."""
        self.warming -= 1
        self.compaction.warm_ups.append(model)

    def reconfigure(self, settings: SchedulerSettings, now: float, out: list[Instruction]) -> None:
        """Decide by other settings, or by another discipline."""
        self.weights.budget = settings.weight_budget_bytes
        self._interval = settings.compaction_interval
        handed_over = self.loads.on_demand and not settings.on_demand
        self.loads.reconfigure(settings)
        if handed_over:
            self._hand_over(now, out)

    def _hand_over(self, now: float, out: list[Instruction]) -> None:
        """Nothing comes or goes by itself any more: what is there stays, and what is on its way comes."""
        loads = self.loads
        for model in self._models.values():
            here = model.weights.residency is not Residency.ABSENT
            added = model.warm_up or model.warming or model in self.leaving
            if (here or model.name in loads.wanted or model.name in loads.later) and not added:
                self._ask(model)
            if not model.weights.asked:
                loads.hoped.pop(model.name, None)
                if model.weights.residency is not Residency.RESIDENT:
                    self._turn_away(model, now, out)

    # --- loads end ---------------------------------------------------------------------------------------

    def ended(
        self, event: WeightsLoaded | LoadFailed | LoadAbandoned, now: float, out: list[Instruction]
    ) -> ModelState | None:
        """Take in how a load ended; the model that was loaded, or None if that load is over already."""
        model = self._models.get(event.model) or self._draining.get(event.model)
        if model is None or model.weights.epoch != event.epoch:
            return None
        if model.weights.residency is not Residency.LOADING:
            return None
        self._queues.discipline.link(False)
        self._queues.dirty[model] = None
        match event:
            case WeightsLoaded():
                self.loads.forget(model.name)
                self.weights.loaded(model.weights, event.seconds, now)
                model.totals.load.observe(event.seconds)
                model.weights.fresh = model.place is not None
                self.compaction.count(self.weights.loads, self._interval)
                model.history.add(now, "weights loaded", event)
                if not model.draining:
                    self._warm(model, out)
            case LoadAbandoned():
                self.leaving.pop(model, None)
                if model.weights.pinned and not model.draining:
                    self.loads.want(model)
                self.weights.failed(model.weights, abandoned=True)
                model.history.add(now, "load abandoned", "")
                self.loads.retry()
            case LoadFailed():
                model.history.add(now, "load failed", event)
                self._failed(model, event, now, out)
        return model

    def _failed(self, model: ModelState, event: LoadFailed, now: float, out: list[Instruction]) -> None:
        weights = model.weights
        self.weights.failed(weights)
        self.leaving.pop(model, None)
        self.loads.retry()
        if model.draining:
            return
        if event.out_of_memory and not weights.starved:
            if model.place is None and not (weights.pinned or weights.asked or model.warm_up):
                # Those who wait for it while it is held cause its next load when the model goes on.
                return
            weights.starved = True
            self.compaction.ask(reload=False)
            self.loads.want(model)
            return
        if event.out_of_memory or weights.pinned:
            self.backoff.begin(model, now, shut=event.out_of_memory)
        weights.starved = False
        self.loads.forget(model.name)
        if weights.pinned or weights.asked or model.warm_up:
            weights.asked = False
            out.append(GiveUp(model.name, event.error))
            model.warm_up = False
        self._queues.fail(model, event.error, out)

    def rise(self, now: float) -> None:
        """Try pinned models again that have rested; others come for requests."""
        for model in self.backoff.over(now):
            if model.weights.pinned:
                model.weights.asked = True
                if model.weights.residency is Residency.ABSENT:
                    self.loads.want(model)

    def _warm(self, model: ModelState, out: list[Instruction]) -> None:
        if model.warm_up:
            model.warm_up, model.warming = False, True
            self.warming += 1
            out.append(WarmUp(model.name))

    # --- loads begin, weights go -------------------------------------------------------------------------

    def load(self, now: float, out: list[Instruction]) -> None:
        """Start the load that comes next, if the link is free and room can be made; end one that is in vain."""
        loading = self.weights.loading
        if loading is not None:
            model = self._models.get(loading.model) or self._draining[loading.model]
            if not self.weights.abandoning and (model.draining or self.loads.in_vain(model)):
                self._abandon(model, now, out)
            return
        planned = self.loads.plan(self._queues.discipline, now)
        # What leaves soon makes room.
        while planned is None and not (self.leaving or self.warming or self._draining):
            lost = self.loads.without_room()
            if lost is None:
                break
            self._turn_down(lost, now, out)
            planned = self.loads.plan(self._queues.discipline, now)
        if planned is None:
            return
        model, victims = planned
        # Before the evictions: what it shares with those that leave stays.
        load = self.weights.load(model.weights, now)
        # Where all residency was asked for, who makes room for a warm-up comes back after it.
        returns = not self.loads.on_demand and model.warm_up
        for victim in victims:
            self.evict(victim, Cause.ROOM, now, out, loading_for=model.name, returns=returns)
        self.loads.started(model)
        self._queues.discipline.link(not victims)
        model.history.add(now, "load weights", load)
        out.append(load)
        self._queues.dirty[model] = None

    def _turn_down(self, model: ModelState, now: float, out: list[Instruction]) -> None:
        """It was asked for and does not fit, and nobody gives way by himself."""
        weights = self.weights
        error = (
            f"{model.weights.absent_bytes} bytes do not fit beside the {weights.bytes} that are there: all may take "
            f"{weights.budget}; evict or unpin other models first"
        )
        model.history.add(now, "no room", "")
        model.weights.asked = False
        self.loads.forget(model.name)
        self.loads.cold.discard(model.name)
        out.append(GiveUp(model.name, error))
        self._turn_away(model, now, out)

    def _abandon(self, model: ModelState, now: float, out: list[Instruction]) -> None:
        abandon = self.weights.abandon(model.weights)
        model.history.add(now, "abandon load", abandon)
        out.append(abandon)

    def let_go(self, now: float, out: list[Instruction]) -> None:
        """Evict those that are to go and may: nothing executes on them, or must before."""
        for model in [model for model in self.leaving if evictable(model) and not self._must_execute(model)]:
            if self.leaving[model]:
                self.backoff.relieve()
            self.evict(model, Cause.ASKED, now, out)
            self.loads.retry()

    def stops(self, model: ModelState) -> bool:
        """Whether nothing of a model with work may start: else it would always execute, and never go."""
        return model in self.leaving and not self._must_execute(model)

    def _must_execute(self, model: ModelState) -> bool:
        """Whether a model with work executes before it goes: for a running meta model, or lest its load was in vain.

        Else it would never execute if it were evicted again and again.
        """
        if model.place is None:
            return False
        return model.place[0] == COMMITTED_LEVEL or (model.weights.fresh and self.loads.on_demand)

    def trim(self, now: float, out: list[Instruction]) -> None:
        """Evict what is beyond the budget, as far as it is free: the budget fell, or models were pinned."""
        if self.weights.missing() <= 0:
            return
        overdue = self.loads.overdue(self._queues.discipline, now)
        for model in overdue:
            self.evict(model, Cause.BUDGET, now, out)
        if overdue:
            self.loads.retry()

    def compact(self, now: float, out: list[Instruction]) -> float:
        """Evict all that is neither pinned nor in use; nothing loads or executes.

        Returns:
            How long loads take, in seconds, that bring back those with waiting work.
        """
        self.let_go(now, out)
        evicted = [model for model in self._models.values() if evictable(model)]
        evicted.sort(key=lambda model: model.weights.used, reverse=True)
        working = [model for model in evicted if model.place is not None]
        for model in evicted:
            self.evict(model, Cause.COMPACTION, now, out, returns=not self.loads.on_demand)
        self.loads.retry()
        if self.compaction.done(self.weights.loads, len(evicted)):
            self.loads.come_back(evicted)
        if self.compaction.warm_ups and not self.compaction.retries:
            self.compaction.warming = self.compaction.warm_ups.popleft()
            self.warming += 1
            out.append(WarmUp(self.compaction.warming.name, again=True))
        return self.weights.bring_back(model.weights for model in working)

    def evict(
        self,
        model: ModelState,
        cause: Cause,
        now: float,
        out: list[Instruction],
        *,
        loading_for: str | None = None,
        returns: bool = False,
    ) -> None:
        """Free a model's resident weights, but for what `loading_for`, whose load comes next, has too.

        `returns`: they come back as soon as there is room, and what waits for them waits on.
        """
        evict = self.weights.evict(model.weights, loading_for)
        model.history.add(now, "evict weights", evict)
        model.totals.evict(cause)
        self.leaving.pop(model, None)
        out.append(evict)
        self._queues.dirty[model] = None
        if returns:
            self._ask(model)
        else:
            model.weights.asked = False
            self._turn_away(model, now, out)
