"""Order of the build thread's work: if requests wait for a model, it starts before other models.

A start has two steps: the bundle is read, and then the model is built. Each step waits in the queue.
"""

import heapq
import itertools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from enum import IntEnum
from math import inf


class Urgency(IntEnum):
    """Reason of a start, the most urgent first."""

    #: Requests wait for the model.
    REQUESTED = 0
    #: An operator, a schedule or a policy wants the model warm before requests arrive.
    PREWARMED = 1
    #: The model starts with the server.
    EAGER = 2
    #: Nothing starts. Resources that only starts need are freed.
    CLEAN_UP = 3


@dataclass(frozen=True, slots=True)
class Demand:
    """Need for the start of a model."""

    urgency: Urgency = Urgency.EAGER
    #: Earliest deadline of the waiting requests, on the loop's clock. inf if no request has a deadline.
    deadline: float = inf
    #: Share of the model among models with equal demand.
    weight: float = 1.0

    def stronger(self, other: "Demand") -> "Demand":
        """Return the combination of both demands: the higher urgency and the earlier deadline."""
        urgency, deadline = min(self.urgency, other.urgency), min(self.deadline, other.deadline)
        return Demand(urgency, deadline, self.weight)


@dataclass(slots=True, eq=False)
class BuildStep:
    """Work of the build thread that has not begun."""

    #: Id of the step, unique among the waiting steps.
    id: Hashable
    #: Name of the model, or "" if the step is for no model.
    name: str
    demand: Demand
    action: Callable[[], object]
    #: True if the step reads a bundle.
    reads: bool = False
    #: Expected seconds of the step.
    seconds: float = 0.0
    #: Time of the step's arrival on the loop's clock. The queue sets it.
    arrival: float = field(default=0.0, init=False)


#: Position of a step in the order, smallest first. The last element is unique.
_Rank = tuple[int, float, int, float, int]

#: After this many seconds, only half of a model's recent building time still counts.
_HALF_LIFE_S = 60.0
#: A build is long if it is expected to take at least this many seconds. With equal urgency and deadline, reads of bundles come
#: before long builds, because the builds of these bundles may be shorter.
_LONG_S = 1.0


class StartQueue:
    """Waiting steps, and the recent building time of each model.

    Steps are ordered by urgency, then by deadline (past deadlines are ignored), then by kind (short builds, reads of bundles,
    long builds), then by arrival. So the first of many models serves before all bundles are read, and no short build waits for
    a long one. To the arrival, the queue adds the expected seconds of the step, and the model's recent building time divided by
    its weight. So a step is overtaken only by steps that arrive within this additional time.
    """

    def __init__(self) -> None:
        self._steps: dict[Hashable, BuildStep] = {}
        #: Steps with their ranks at the time of entry. If a step's rank is worse when it is popped, the step is entered again.
        self._heap: list[tuple[_Rank, BuildStep]] = []
        self._numbers = itertools.count()
        #: For each name, the building time at the latest charge, and the time of that charge.
        self._charged: dict[str, tuple[float, float]] = {}

    def __len__(self) -> int:
        return len(self._steps)

    def __contains__(self, id: Hashable) -> bool:
        return id in self._steps

    def order(self, now: float) -> list[BuildStep]:
        """Return all steps in their order."""
        return sorted(self._steps.values(), key=lambda step: self._rank(step, now, 0))

    def names(self) -> set[str]:
        """Return the names of the models that have a waiting step."""
        return {step.name for step in self._steps.values() if step.name}

    def put(self, step: BuildStep, now: float) -> None:
        """Add a step. It replaces a step with the same id."""
        self._steps[step.id] = step
        step.arrival = now
        self._enter(step, now, next(self._numbers))

    def change(self, id: Hashable, demand: Demand, now: float) -> None:
        """Set the demand of a step if it still waits."""
        step = self._steps.get(id)
        if step is not None and step.demand != demand:
            step.demand = demand
            self._enter(step, now, next(self._numbers))

    def drop(self, id: Hashable) -> bool:
        """Remove a step. Return False if it does not wait any more."""
        return self._steps.pop(id, None) is not None

    def pop(self, now: float) -> BuildStep | None:
        """Remove and return the next step."""
        while self._heap:
            rank, step = heapq.heappop(self._heap)
            if self._steps.get(step.id) is not step:
                continue  # The step was dropped, replaced or done.
            if self._rank(step, now, rank[-1]) > rank:
                self._enter(step, now, rank[-1])
                continue
            del self._steps[step.id]
            return step
        return None

    def charge(self, name: str, seconds: float, now: float) -> None:
        """Add to the building time of a model."""
        self._charged[name] = (self._used(name, now) + seconds, now)

    def _used(self, name: str, at: float) -> float:
        seconds, since = self._charged.get(name, (0.0, at))
        return seconds * 2 ** (min(0.0, since - at) / _HALF_LIFE_S)

    def _enter(self, step: BuildStep, now: float, number: int) -> None:
        heapq.heappush(self._heap, (self._rank(step, now, number), step))

    def _rank(self, step: BuildStep, now: float, number: int) -> _Rank:
        urgency, deadline = step.demand.urgency, step.demand.deadline
        turn = step.arrival + step.seconds + self._used(step.name, step.arrival) / step.demand.weight
        stage = 1 if step.reads else 2 if step.seconds >= _LONG_S else 0
        return urgency, deadline if deadline > now else inf, stage, turn, number
