"""Which absent weights are loaded next, and which give way: the decision, made when the link is free.

The model that the discipline ranks first among those that wait for their weights is loaded, beside
whatever executes. It gets free bytes, or those of `make_room`. These do not give way:

- pinned weights, those on which something executes, and those that a committed request waits for;
- weights with waiting work, while those that nobody waits for take enough bytes, even if they stay for now;
- weights with waiting work that the discipline ranks before the one that comes: evicting them would only
  bring them back sooner;
- weights that came less than `residency_factor` times as long ago as their load took, if work waits for them, or will
  soon: its pauses are usually less than half a load time, and this one has not lasted for twice as long.
  So clients that think for a moment between two requests do not lose their weights each time, at most
  1 / (1 + residency_factor) of the time goes into loads that take turns with executions, and whoever waits
  for weights waits at most that much longer for each model before it. Under `edf` a deadline that cannot
  wait so long goes first.

While the first one finds no room nobody else is loaded: a large model is not starved by small ones.
Before all of them come models that an operator pinned: for these, only the first of the exceptions holds. Models
that are added take turns with those that have work, and let them keep what came less than the said time ago. After
all of them come those that are hoped for: somebody prefetched them, or a request was shed because of their load.

If weights do not come on demand, nobody gives way but for models that are pinned or added.
"""

from collections.abc import Iterable, Mapping
from math import inf

from rsrv.scheduler.discipline import COMMITTED_LEVEL, Discipline
from rsrv.scheduler.eviction import POLICIES, Resident, freed_by_all, make_room
from rsrv.scheduler.model import ModelState
from rsrv.scheduler.ranking import Rank, Ranking
from rsrv.scheduler.settings import SchedulerSettings
from rsrv.scheduler.weights import Residency, Weights

#: a load, and the models whose weights it evicts first.
Plan = tuple[ModelState, list[ModelState]]


class Loads:
    """The models whose weights should come to the device, and the choice among them."""

    __slots__ = (
        "_blocked_head",
        "_changed",
        "_factor",
        "_hope_again",
        "_hope_at",
        "_models",
        "_policy",
        "_retry_at",
        "_yields",
        "cold",
        "hoped",
        "later",
        "on_demand",
        "wanted",
        "weights",
    )

    def __init__(
        self, models: Mapping[str, ModelState], weights: Weights, settings: SchedulerSettings
    ) -> None:
        self._models = models
        self.weights = weights
        self._factor = settings.residency_factor
        self._policy = POLICIES[settings.eviction]
        #: whether weights come for requests, and give way to others.
        self.on_demand = settings.on_demand
        #: absent models that are to come first, whoever waits for them: pinned, to be warmed up, or tried again.
        self.wanted: dict[str, None] = {}
        #: whether the latest load was for a warm-up, so that those with work have their turn.
        self._yields = False
        #: models with work whose weights are absent, by the discipline's rank.
        self.cold: Ranking[str] = Ranking()
        #: models that should come though nobody waits for them: they were prefetched, or their absence cost somebody
        #: the deadline. Oldest first.
        self.hoped: dict[str, None] = {}
        #: whether it is worth while to look for room for them, and when time alone may have made some.
        self._hope_again = False
        self._hope_at = inf
        #: models that come back after a compaction if nobody else needs the link, into room that is free.
        self.later: list[str] = []
        #: the first one, if it found no room when that was looked for. Looking costs O(models), so it is
        #: not done again before `_retry_at`, unless one of `_changed` may give way now.
        self._blocked_head: str | None = None
        self._retry_at = inf
        self._changed: dict[ModelState, None] = {}

    # --- what changes ----------------------------------------------------------------------------------------

    def wait(self, model: ModelState, rank: Rank) -> None:
        """A model has work and no weights."""
        self.cold.set(model.name, rank)
        if model.name == self._blocked_head:
            self.retry()

    def want(self, model: ModelState) -> None:
        """Load a model's absent weights before others, and keep trying until there is room."""
        self.wanted[model.name] = None
        self.retry()

    def hope(self, model: ModelState) -> None:
        """Load a model's absent weights when nobody who waits needs the link, if nobody with work has to give way."""
        self.hoped[model.name] = None
        self._hope_again = True

    def unwant(self, name: str) -> None:
        """A model's weights need not come before others any more."""
        if name in self.wanted:
            del self.wanted[name]
            self.retry()

    def forget(self, name: str) -> None:
        """A model's weights need not come for their own sake any more."""
        self.unwant(name)
        self.withdraw(name)

    def withdraw(self, name: str) -> None:
        """A model is not hoped for any more, nor comes back."""
        self.hoped.pop(name, None)
        if name in self.later:
            self.later.remove(name)

    def changed(self, model: ModelState) -> None:
        """A model changed that may have become one to evict."""
        if self._blocked_head is not None:
            self._changed[model] = None
        if model.place is None:
            self._hope_again = True

    def retry(self) -> None:
        """There may be room now."""
        self._blocked_head = None
        self._hope_again = True
        self._changed.clear()

    def reconfigure(self, settings: SchedulerSettings) -> None:
        """The settings have changed, or the discipline: all ranks will be told again."""
        self._factor = settings.residency_factor
        self._policy = POLICIES[settings.eviction]
        self.on_demand = settings.on_demand
        self.cold.clear()
        self.retry()

    def missed(self, model: ModelState) -> None:
        """A request was shed because loading takes too long: the next one shall find the weights.

        Else a model whose deadlines are all shorter than its load would never be served.
        """
        if model.weights.residency is Residency.ABSENT:
            self.hope(model)

    def come_back(self, evicted: Iterable[ModelState]) -> None:
        """These were evicted for no lack of room; the most urgent first."""
        names = [model.name for model in evicted]
        self.later = [*names, *(name for name in self.later if name not in names)]

    # --- decisions -------------------------------------------------------------------------------------------

    def plan(self, discipline: Discipline, now: float) -> Plan | None:
        """Whose weights to load now, and whose to evict before; None: nobody's."""
        if self.weights.loading is not None:
            return None
        name = self.first()
        if name is None:
            self._blocked_head = None
            return self._plan_hoped(now) or self._plan_later()
        planned = self._plan_first(name, discipline, now)
        if planned is None and self._yields and self.wanted:
            # Whoever's turn it is finds no room now: the link need not wait for that.
            self._yields = False
            planned = self._plan_first(next(iter(self.wanted)), discipline, now)
        return planned

    def _plan_first(self, name: str, discipline: Discipline, now: float) -> Plan | None:
        """As `plan`, for one that is to come next."""
        if name == self._blocked_head:
            self._reconsider(name, discipline, now)
            if name == self._blocked_head:
                return None
        planned, self._retry_at = self.search(discipline, now)
        self._blocked_head = name if planned is None else None
        self._changed.clear()
        return planned

    def first(self) -> str | None:
        """Who comes next, if there is room. Models that are added take turns with those that have work."""
        cold = self.cold.first()
        if not self.wanted:
            return cold
        wanted = next(iter(self.wanted))
        yields = self._yields and cold is not None and self._models[wanted].warm_up
        return cold if yields else wanted

    def started(self, model: ModelState) -> None:
        """A model's load has begun."""
        self.wanted.pop(model.name, None)
        self._yields = model.warm_up

    def search(self, discipline: Discipline, now: float) -> tuple[Plan | None, float]:
        """Look for room for the first one; and when time alone may make more (inf: it does not)."""
        cold = self._models[self.first() or ""]
        missing, keep = self.weights.missing(cold.weights), cold.weights.groups
        idle: list[ModelState] = []
        working: list[ModelState] = []
        for model in self._models.values():
            if evictable(model):
                (idle if model.place is None else working).append(model)
        # Work that waits loses its weights only if all that nobody waits for would not be enough.
        enough = missing <= freed_by_all(map(_resident, idle), keep)
        candidates: list[Resident] = []
        retry_at = inf
        for model in idle if enough else (*idle, *working):
            when = self._gives_way(model, cold, discipline)
            if when <= now:
                candidates.append(_resident(model, discipline))
            else:
                retry_at = min(retry_at, when)
        victims = make_room(missing, candidates, keep, now, self._policy)
        planned = None if victims is None else (cold, [self._models[victim] for victim in victims])
        return planned, retry_at

    def wants(self, model: ModelState, discipline: Discipline, now: float) -> bool:
        """Whether somebody waits for room that a model with work would make if it did not execute."""
        if (
            self._blocked_head is None
            or self._blocked_head != self.first()
            or self.weights.loading is not None
        ):
            return False
        return self._would_give_way(model, self._models[self._blocked_head], discipline) <= now

    def without_room(self) -> ModelState | None:
        """Who is next in line, if it does not fit beside what is there and nobody gives way for it."""
        # Those that come before all others get room.
        if self.on_demand or self.wanted:
            return None
        first = self.cold.first()
        in_line = (self._models[name] for name in (self.hoped if first is None else (first,)))
        return next((model for model in in_line if self.weights.missing(model.weights) > 0), None)

    def in_vain(self, model: ModelState) -> bool:
        """Whether the load under way is of no use to anybody, and holds up somebody.

        A load that follows an abandoned one is not abandoned: else impatient clients would never be served.
        """
        if self.weights.abandoning or model.place is not None:
            return False
        weights = model.weights
        needed = weights.pinned or weights.asked or weights.starved or weights.abandoned or model.warm_up
        return not needed and self.first() is not None

    def next_try(self) -> float | None:
        """When time alone may make room for somebody who waits."""
        if self.weights.loading is not None:
            return None
        at = inf
        if self._blocked_head is not None:
            at = self._retry_at
        elif self.hoped and self.first() is None:
            at = self._hope_at
        return None if at == inf else at

    def overdue(self, discipline: Discipline, now: float) -> list[ModelState]:
        """Who gives way while there is more on the device than allowed: all who free anything, if it is in use."""
        if self.weights.excess() <= 0:
            return []
        free = [_resident(one, discipline) for one in self._models.values() if evictable(one)]
        missing = min(self.weights.missing(), freed_by_all(free))
        victims = make_room(missing, free, (), now, self._policy)
        return [self._models[victim] for victim in victims or ()]

    # --- who gives way ---------------------------------------------------------------------------------------

    def _reconsider(self, name: str, discipline: Discipline, now: float) -> None:
        """Whether it is worth while to look for room again."""
        for model in self._changed:
            if self._models.get(model.name) is model:
                when = self._gives_way(model, self._models[name], discipline)
                self._retry_at = min(self._retry_at, when)
        self._changed.clear()
        if self._retry_at <= now:
            self._blocked_head = None

    def _gives_way(self, model: ModelState, cold: ModelState, discipline: Discipline) -> float:
        """From when on it gives way to another, if nothing else happens; inf: it does not."""
        if not evictable(model):
            return inf
        return self._would_give_way(model, cold, discipline)

    def _would_give_way(self, model: ModelState, cold: ModelState, discipline: Discipline) -> float:
        """As `_gives_way`, were nothing of it executing."""
        if model.weights.pinned or (model.place is not None and model.place[0] == COMMITTED_LEVEL):
            return inf
        if cold.name in self.wanted:
            # A model that is added can wait until those that came for their work have done some.
            return self._held_until(model) if cold.warm_up and model.place is not None else -inf
        if not self.on_demand:
            return inf
        if model.place is None:
            until = min(self._held_until(model), self._unused(model))
        elif discipline.rank(model) <= self.cold.rank(cold.name):
            return inf
        else:
            until = self._held_until(model)
        return -inf if self._urgent(cold, until, discipline) else until

    def _plan_hoped(self, now: float) -> Plan | None:
        """As `plan`, for one that should come though nobody waits for it; nobody with work gives way for it."""
        if not (self.hoped and (self._hope_again or self._hope_at <= now)):
            return None
        self._hope_again = False
        self._hope_at = inf
        self.hoped = {
            name: None
            for name in self.hoped
            if name in self._models and self._models[name].weights.residency is Residency.ABSENT
        }
        if not self.hoped:
            return None
        idle: list[Resident] = []
        for one in self._models.values():
            if self.on_demand and evictable(one) and one.place is None:
                # Who came because its requests were shed, too, shall be there for the next ones.
                until = max(self._held_until(one), self._unused(one))
                if until <= now:
                    idle.append(_resident(one))
                else:
                    self._hope_at = min(self._hope_at, until)
        for name in self.hoped:
            model = self._models[name]
            groups, missing = model.weights.groups, self.weights.missing(model.weights)
            victims = make_room(missing, idle, groups, now, self._policy)
            if victims is not None:
                return model, [self._models[victim] for victim in victims]
        return None

    def _plan_later(self) -> Plan | None:
        """As `plan`, for a model that was compacted away; whoever finds no free room does not come back."""
        while self.later:
            model = self._models.get(self.later.pop(0))
            if model is None or model.weights.residency is not Residency.ABSENT:
                continue
            if self.weights.missing(model.weights) <= 0:
                return model, []
        return None

    def _held_until(self, model: ModelState) -> float:
        return model.weights.since + self._factor * model.weights.took

    def _unused(self, model: ModelState) -> float:
        """From when on a model counts as unused that nobody waits for."""
        weights = model.weights
        pause = 2.0 * weights.gap
        return weights.used + pause if pause <= weights.load_seconds and pause else -inf

    def _urgent(self, cold: ModelState, until: float, discipline: Discipline) -> bool:
        """Whether a deadline cannot wait for so long."""
        if not discipline.sheds or cold.front is None:
            return False
        deadline = cold.front.entries[0].request.deadline
        return deadline is not None and deadline - cold.turn_seconds - cold.weights.remaining_seconds < until


class LoadBackoff:
    """The models whose weights are not loaded again for a while.

    These are models whose weights found no memory twice, and pinned ones whose load failed. Without memory each try costs
    all others their weights. A back-off ends by time, or when an operator makes room: then there may be memory that was not
    available before. Its length stays with the model until a load goes well (`ModelWeights`).

    Some of the models may have been loaded meanwhile.
    """

    __slots__ = ("_models",)

    def __init__(self) -> None:
        #: a dictionary for its order.
        self._models: dict[ModelState, None] = {}

    def begin(self, model: ModelState, now: float, *, shut: bool) -> None:
        """`shut`: until it is over requests are refused, too, for want of memory."""
        model.weights.give_up(now, shut=shut)
        self._models[model] = None

    def forget(self, model: ModelState) -> None:
        self._models.pop(model, None)

    def relieve(self) -> None:
        """End every back-off: memory was given back."""
        for model in self._models:
            model.weights.end_backoff()

    def over(self, now: float) -> list[ModelState]:
        """Take out the models whose back-off is over."""
        if not self._models:
            return []
        over = [model for model in self._models if model.weights.backoff_until <= now]
        for model in over:
            del self._models[model]
        return over

    def next(self) -> float | None:
        """When a pinned model's back-off is over: others are tried again for requests."""
        ends = (model.weights.backoff_until for model in self._models if model.weights.pinned)
        return min(ends, default=None)


def evictable(model: ModelState) -> bool:
    """Whether its weights could go now, if somebody else should have their room."""
    if model.place is not None and model.place[0] == COMMITTED_LEVEL:
        return False
    weights = model.weights
    return weights.residency is Residency.RESIDENT and not weights.pinned and not model.busy


def _resident(model: ModelState, discipline: Discipline | None = None) -> Resident:
    rank = None if discipline is None or model.place is None else discipline.rank(model)
    weights = model.weights
    return Resident(model.name, weights.groups, weights.used, rank, weights.load_seconds, weights.uses)
