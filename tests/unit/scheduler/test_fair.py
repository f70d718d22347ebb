"""Fair shares of device time: their definition, their exactness, and the bound of the wait.

Saturated models always have waiting requests. By default, an execution takes exactly its estimated cost.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsrv.scheduler.events import (
    Event,
    Execute,
    ExecutionFinished,
    ModelAdded,
    Program,
    Request,
    RequestsArrived,
)
from rsrv.scheduler.fair import Fair
from rsrv.scheduler.scheduler import Scheduler
from tests.builders import FEW_EXAMPLES

CHEAP, DEAR = 0.0005, 0.080


@dataclass
class Fleet:
    """A scheduler and a device with models of one size each. Time passes only with executions."""

    costs: list[float]
    weights: list[float]
    now: float = 0.0
    #: Device time by model.
    got: dict[str, float] = field(default_factory=dict)
    #: By model with work: the time when its wait for the next execution began.
    waiting: dict[str, float] = field(default_factory=dict)
    #: For each execution: its model, and how long the model had waited.
    waits: list[tuple[str, float]] = field(default_factory=list)
    saturated: set[str] = field(default_factory=set)
    _queued: set[str] = field(default_factory=set)
    _ids: int = 0

    def __post_init__(self) -> None:
        self.scheduler = Scheduler()
        self._running: Execute | None = None
        self.cost: dict[str, float] = {}
        self.weight: dict[str, float] = {}
        for number, (cost, weight) in enumerate(zip(self.costs, self.weights, strict=True)):
            name = f"m{number}"
            self.cost[name], self.weight[name], self.got[name] = cost, weight, 0.0
            program = Program(name, {(0, 1): cost}, coalesce=True, max_queue_depth=1000, weight=weight)
            self._send(ModelAdded(program, resident=True))

    def saturate(self, *names: str) -> None:
        """Keep requests of these models waiting at all times."""
        self.saturated |= set(names)
        self.request(*names)

    def request(self, *names: str) -> None:
        requests = []
        for name in names:
            self._ids += 1
            requests.append(Request(self._ids, name, 0, 1))
            self.waiting.setdefault(name, self.now)
            self._queued.add(name)
        self._send(RequestsArrived(tuple(requests)))

    def step(self, slower: float = 1.0, late: float = 0.0) -> str | None:
        """End the running execution, and return its model. The scheduler gets the event `late` seconds later."""
        running = self._running
        if running is None:
            return None
        self._running = None
        seconds = self.cost[running.model] * slower
        self.now += seconds
        self.got[running.model] += seconds
        self.now += late
        self._send(ExecutionFinished(running.number, seconds))
        return running.model

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until and self.step() is not None:
            pass

    def _send(self, event: Event) -> None:
        for instruction in self.scheduler.handle(event, self.now):
            if isinstance(instruction, Execute):
                self._running = instruction
                name = instruction.model
                self._queued.discard(name)
                self.waits.append((name, self.now - self.waiting.pop(name)))
                if name in self.saturated:
                    self.waiting[name] = self.now
        if self._running is not None and self._running.model in self.saturated:
            name = self._running.model
            if name not in self._queued:
                self.request(name)


def jain(values: list[float]) -> float:
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))


def test_cheap_and_dear_models_get_equal_time() -> None:
    """Models with executions of 0.5 ms and 80 ms and equal weights get half of the device each."""
    fleet = Fleet([CHEAP, DEAR], [1.0, 1.0])
    fleet.saturate("m0", "m1")
    fleet.run(16.0)

    assert fleet.got["m0"] == pytest.approx(fleet.got["m1"], rel=0.01)


def test_shares_follow_weights() -> None:
    """Models with weights 1, 2 and 5 get one, two and five eighths of the device, whatever their executions cost."""
    fleet = Fleet([DEAR, 0.006, 0.004], [1.0, 2.0, 5.0])
    fleet.saturate("m0", "m1", "m2")
    fleet.run(30.0)

    assert [fleet.got[f"m{n}"] / fleet.now for n in range(3)] == pytest.approx([0.125, 0.25, 0.625], rel=0.01)


@pytest.mark.parametrize("active", [2, pytest.param(20, marks=pytest.mark.long)])
def test_idle_models_take_no_share(active: int) -> None:
    """Of 500 loaded models a few have work. They share all of the device equally, whatever their executions cost."""
    fleet = Fleet([(CHEAP, 0.004, DEAR)[n % 3] for n in range(500)], [1.0] * 500)
    names = [f"m{n}" for n in range(0, active * 7, 7)]
    fleet.saturate(*names)
    fleet.run(active * DEAR * 40)
    got = [fleet.got[name] for name in names]

    assert sum(got) == pytest.approx(fleet.now)
    assert jain(got) >= 0.999
    assert max(got) / min(got) <= 1.05


def test_idle_models_save_no_credit() -> None:
    """A model that was idle for long gets an equal share from its return on, and no credit."""
    fleet = Fleet([0.01, 0.01], [1.0, 1.0])
    fleet.saturate("m0")
    fleet.run(10.0)
    before = dict(fleet.got)
    fleet.saturate("m1")
    fleet.run(1.0)

    assert fleet.got["m0"] - before["m0"] == pytest.approx(0.5, abs=0.011)


def test_time_taken_while_alone_is_not_held_against_a_model() -> None:
    """A model that had the device alone does not wait longer when another model gets work."""
    fleet = Fleet([0.01, 0.01], [1.0, 1.0])
    fleet.saturate("m0")
    fleet.run(10.0)
    fleet.saturate("m1")
    fleet.waits.clear()
    fleet.run(1.0)

    assert max(waited for _, waited in fleet.waits) <= 0.021


def test_pausing_does_not_wipe_out_a_debt() -> None:
    """A model whose next request always arrives just after its last execution gets its share, and not more."""
    fleet = Fleet([DEAR, CHEAP], [1.0, 1.0])
    fleet.saturate("m1")
    fleet.request("m0")
    while fleet.now < 20.0:
        if fleet.step() == "m0":
            fleet.request("m0")

    assert fleet.got["m0"] / fleet.now == pytest.approx(0.5, abs=0.01)


def test_models_over_their_share_are_not_ordered_by_cost() -> None:
    """Two of 42 models have work, and get equal shares, although their costs are very different."""
    fleet = Fleet([0.0009, 0.09] + [0.01] * 40, [1.0] * 42)
    fleet.saturate("m0", "m1")
    fleet.run(10.0)

    assert fleet.got["m0"] / fleet.now == pytest.approx(0.5, abs=0.01)


def test_wrong_estimates_do_not_bend_shares() -> None:
    """Shares follow measured times: a model that takes three times its estimated cost gets no more time."""
    fleet = Fleet([0.01, 0.01], [1.0, 1.0])
    fleet.saturate("m0", "m1")
    name = fleet._running.model if fleet._running else None
    while fleet.now < 20.0:
        fleet.step(3.0 if name == "m0" else 1.0)
        name = fleet._running.model if fleet._running else None

    assert fleet.got["m0"] / fleet.now == pytest.approx(0.5, abs=0.01)


def test_a_cheap_model_waits_for_one_execution_not_for_a_round() -> None:
    """While 50 models with executions of 80 ms are saturated, a request of 0.5 ms waits for about one of them, not for 50."""
    fleet = Fleet([CHEAP] + [DEAR] * 50, [1.0] * 51)
    fleet.saturate(*(f"m{n}" for n in range(1, 51)))
    for _ in range(200):
        fleet.step()
    fleet.request("m0")
    fleet.waits.clear()
    fleet.run(5.0)

    # The module's bound on the wait, c / s + C, with the cost c, the share s, and the largest cost C.
    assert dict(fleet.waits)["m0"] <= CHEAP * 51 + DEAR


costs = st.sampled_from([CHEAP, 0.002, 0.01, 0.03, DEAR])
weights = st.sampled_from([0.2, 1.0, 1.0, 3.0])


@FEW_EXAMPLES
@given(models=st.lists(st.tuples(costs, weights), min_size=2, max_size=8))
def test_wait_is_bounded(models: list[tuple[float, float]]) -> None:
    """No model with work waits longer than 2 c / s + C, where c is its cost, s its share, and C the largest cost."""
    fleet = Fleet([cost for cost, _ in models], [weight for _, weight in models])
    fleet.saturate(*fleet.cost)
    for _ in range(400):
        fleet.step()
    total, largest = sum(fleet.weight.values()), max(fleet.costs)

    for name, waited in (*fleet.waits, *((name, fleet.now - since) for name, since in fleet.waiting.items())):
        share = fleet.weight[name] / total
        assert waited <= 2 * fleet.cost[name] / share + largest + 1e-9


@given(
    models=st.lists(st.tuples(costs, weights), min_size=2, max_size=8),
    arrivals=st.lists(st.tuples(st.integers(0, 7), st.integers(1, 5)), min_size=40, max_size=200),
)
def test_wait_is_bounded_when_models_come_and_go(
    models: list[tuple[float, float]], arrivals: list[tuple[int, int]]
) -> None:
    """The bound on the wait also holds if models have work only at times. Then s is the share among all models."""
    fleet = Fleet([cost for cost, _ in models], [weight for _, weight in models])
    for number, count in arrivals:
        name = f"m{number % len(models)}"
        fleet.request(name)
        for _ in range(count):
            fleet.step()
    total, largest = sum(fleet.weight.values()), max(fleet.costs)

    for name, waited in fleet.waits:
        assert waited <= 2 * fleet.cost[name] * total / fleet.weight[name] + largest + 1e-9


@FEW_EXAMPLES
@given(models=st.lists(st.tuples(costs, weights), min_size=2, max_size=8))
def test_two_models_with_work_never_drift_apart(models: list[tuple[float, float]]) -> None:
    """For two saturated models, device time divided by weight differs by a bounded amount in any period.

    The bound is the sum over both models of the model's cost plus the largest cost, divided by the model's weight.
    """
    fleet = Fleet([cost for cost, _ in models], [weight for _, weight in models])
    fleet.saturate(*fleet.cost)
    least: dict[tuple[str, str], float] = {}
    most: dict[tuple[str, str], float] = {}
    for _ in range(400):
        fleet.step()
        for a, b in combinations(fleet.cost, 2):
            gap = fleet.got[a] / fleet.weight[a] - fleet.got[b] / fleet.weight[b]
            least[a, b] = min(least.get((a, b), 0.0), gap)
            most[a, b] = max(most.get((a, b), 0.0), gap)

    largest = max(fleet.costs)
    for (a, b), high in most.items():
        bound = sum((fleet.cost[name] + largest) / fleet.weight[name] for name in (a, b))
        assert high - least[a, b] <= bound + 1e-9


def test_a_model_is_not_charged_for_the_time_that_a_process_was_stopped() -> None:
    """If the end of an execution is reported 10 s late, the models still get equal times afterwards."""
    fleet = Fleet([0.01, 0.01], [1.0, 1.0])
    fleet.saturate("m0", "m1")
    fleet.step(late=10.0)
    fleet.run(1.0)

    assert fleet.got["m0"] == pytest.approx(fleet.got["m1"], abs=0.02)


@pytest.mark.parametrize("host", [0.0, 0.001])
def test_a_model_beside_generations_waits_little_longer_than_its_share_implies(host: float) -> None:
    """Four generations share the device with a model whose requests take 5 ms.

    Half of the requests are answered within 10.1 ms, and 99 % within 12 ms.

    `host` is the time between two steps of the generations in which the device waits for the runtime. The generations are
    charged for it.
    """
    scheduler, now, ids, took = Scheduler(), 0.0, 0, list[float]()
    steps = Program("steps", {(0, 1): 0.001, (0, 4): 0.0012}, True, 1000, feeds_back=True)
    for program in (steps, Program("image", {(0, 1): 0.005}, True, 1000)):
        scheduler.handle(ModelAdded(program, resident=True), now)

    def arrive(model: str, count: int) -> list[Execute]:
        nonlocal ids
        ids += count
        requests = [Request(id, model, 0, 1, accepted=True) for id in range(ids - count + 1, ids + 1)]
        out = scheduler.handle(RequestsArrived(tuple(requests)), now)
        return [instruction for instruction in out if isinstance(instruction, Execute)]

    running, sent_at = arrive("steps", 4) + arrive("image", 1), now
    while len(took) < 500:
        (execute,) = running
        now += execute.seconds + host * (execute.model == "steps")
        # As in the runtime, the next steps arrive before the end of the execution.
        running = arrive("steps", len(execute.requests)) if execute.model == "steps" else []
        out = scheduler.handle(ExecutionFinished(execute.number, execute.seconds), now)
        running += [instruction for instruction in out if isinstance(instruction, Execute)]
        if execute.model == "image":
            took.append(now - sent_at)
            sent_at = now
            running += arrive("image", 1)

    took.sort()
    assert took[250] <= 0.0101
    assert took[495] <= 1.2 * 0.010


@dataclass(frozen=True)
class Work:
    """A model with work, with the attributes that a discipline reads."""

    name: str
    place: tuple[int, float, int]
    batch_seconds: float = 1.0
    weight: float = 1.0


def test_a_model_that_waits_for_its_weights_pays_for_an_execution_that_took_longer() -> None:
    """A model waits for its weights while its execution takes three seconds instead of the expected one.

    The model's rank moves back by all three seconds.
    """
    fair, a = Fair(), Work("a", (1, 0.0, 1))
    fair.update(a)
    _, before, _ = fair.rank(a)
    fair.start(1, "a", 1.0)
    fair.wait(a, claims=True)
    fair.advance(3.0)
    fair.end(1, 3.0)

    _, after, _ = fair.rank(a)
    assert after - before == pytest.approx(3.0)


def test_a_held_model_owes_nothing_once_others_had_the_time_that_it_owed() -> None:
    """A model is held after it had the device for one second. When another model has had ten seconds, the held model is next."""
    fair, a, b = Fair(), Work("a", (1, 0.0, 1)), Work("b", (1, 0.0, 2))
    fair.update(a)
    fair.update(b)
    for number, name, begin, seconds in [(1, "a", 0.0, 1.0), (2, "b", 1.0, 10.0)]:
        fair.start(number, name, seconds)
        if name == "b":
            fair.hold("a")
        fair.advance(begin + seconds)
        fair.end(number, seconds)
        fair.update(a if name == "a" else b)

    fair.update(a)
    assert fair.choose() == "a"
