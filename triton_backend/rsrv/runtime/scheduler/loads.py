"""Which absent weights are loaded next, and which give way: the decision, made when the link is free.

The model that the discipline ranks first among those that wait for their weights is loaded, beside
whatever executes. It gets free bytes, or those of `make_room`. These never give way:

- weights on which something executes, or that a committed request waits for;
- weights with waiting work that the discipline ranks before the one that comes: evicting them would only
  bring them back sooner;
- weights with waiting work that came less than `residency_factor` times their load time ago. So at most
  1 / (1 + residency_factor) of the time goes into loads that take turns with executions, and whoever waits
  for weights waits at most that much longer for each model before it. Under `edf` a deadline that cannot
  wait so long goes first.

While the first one finds no room nobody else is loaded: a large model is not starved by small ones.
"""

from collections.abc import Iterable

from rsrv.runtime.scheduler.disciplines import Discipline
from rsrv.runtime.scheduler.model import ModelState
from rsrv.runtime.scheduler.ranking import Ranking
from rsrv.runtime.scheduler.waiting import COMMITTED_LEVEL
from rsrv.runtime.scheduler.weights import Residency, Resident, Weights, make_room


class Loads:
    """The models that have work but no weights, and the choice among them."""

    __slots__ = ("_factor", "_missed", "_stuck", "cold", "weights")

    def __init__(self, weights: Weights, residency_factor: float) -> None:
        self.weights = weights
        self._factor = residency_factor
        #: models with work whose weights are absent, by the discipline's rank.
        self.cold = Ranking()
        #: models that nobody waits for, but whose absent weights cost somebody the deadline; oldest first.
        self._missed: dict[str, None] = {}
        #: the one that found no room when it was tried last; not tried again until something changes.
        self._stuck: str | None = None

    @property
    def pending(self) -> bool:
        """Whether there may be something to load."""
        return bool(self.cold or self._missed)

    def missed(self, model: ModelState) -> None:
        """A request was shed because loading takes too long: the next one shall find the weights.

        Else a model whose deadlines are all shorter than its load would never be served.
        """
        if model.holding.residency is Residency.ABSENT:
            self._missed[model.name] = None

    def retry(self) -> None:
        """Something changed that may have made room."""
        self._stuck = None

    def change(self, residency_factor: float) -> None:
        self._factor = residency_factor
        self._stuck = None
        self.cold.clear()

    def plan(
        self, models: dict[str, ModelState], discipline: Discipline, now: float
    ) -> tuple[ModelState, list[ModelState]] | None:
        """Whose weights to load now, and whose to evict before; None: nobody's."""
        if self.weights.loading is not None:
            return None
        name = self.cold.first()
        if name is None:
            return self._plan_missed(models)
        if name == self._stuck:
            return None
        model = models[name]
        victims = make_room(
            self.weights.missing(model.holding.bytes),
            self._evictable(models.values(), model, discipline, now),
        )
        if victims is None:
            self._stuck = name
            return None
        return model, [models[victim] for victim in victims]

    def _plan_missed(self, models: dict[str, ModelState]) -> tuple[ModelState, list[ModelState]] | None:
        """As `plan`, for a model that nobody waits for; nobody with work gives way for it."""
        while self._missed:
            name = next(iter(self._missed))
            del self._missed[name]
            model = models.get(name)
            if model is not None and model.holding.residency is Residency.ABSENT:
                victims = make_room(self.weights.missing(model.holding.bytes), _idle(models))
                if victims is not None:
                    return model, [models[victim] for victim in victims]
        return None

    def overdue(self, models: dict[str, ModelState]) -> list[ModelState]:
        """Who gives way, if more is on the device than the budget allows: of those nobody waits for."""
        return [models[name] for name in make_room(self.weights.missing(0), _idle(models)) or ()]

    def _evictable(
        self, models: Iterable[ModelState], cold: ModelState, discipline: Discipline, now: float
    ) -> Iterable[Resident]:
        rank = self.cold.rank(cold.name)
        for model in models:
            if not _free(model):
                continue
            if model.place is None:
                yield _resident(model)
            elif model.place[0] != COMMITTED_LEVEL:
                own = discipline.rank(model)
                if own > rank and (not self._held(model, now) or self._urgent(cold, model, discipline)):
                    yield Resident(model.name, model.holding.bytes, model.holding.used, own)

    def _held_until(self, model: ModelState) -> float:
        return model.holding.since + self._factor * model.holding.load_seconds

    def _held(self, model: ModelState, now: float) -> bool:
        return now < self._held_until(model)

    def _urgent(self, cold: ModelState, held: ModelState, discipline: Discipline) -> bool:
        """Whether a deadline cannot wait until the other one has been there for long enough."""
        if not discipline.sheds or cold.front is None:
            return False
        deadline = cold.front.entries[0].request.deadline
        load = cold.holding.load_seconds
        return deadline is not None and deadline - cold.turn_seconds - load < self._held_until(held)


def _free(model: ModelState) -> bool:
    return model.holding.residency is Residency.RESIDENT and not model.executions


def _idle(models: dict[str, ModelState]) -> Iterable[Resident]:
    """Those that nobody waits for."""
    return (_resident(one) for one in models.values() if _free(one) and one.place is None)


def _resident(model: ModelState) -> Resident:
    return Resident(model.name, model.holding.bytes, model.holding.used)
