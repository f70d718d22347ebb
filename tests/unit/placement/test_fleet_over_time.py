"""The planner over time: work, deaths, joins and several gateways, with the real packing."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsrv.placement.contract import Table, WeightsView
from rsrv.placement.moves import MOVES_AT_ONCE
from rsrv.placement.options import PlannerOptions
from rsrv.placement.planner import Planner
from rsrv.placement.routing import Router
from tests.builders import FEW_EXAMPLES
from tests.unit.placement.fleet import ROUND_S, Fleet, Model, homes


class Gateway:
    """A gateway's planner and its router."""

    def __init__(self, fleet: Fleet, **changes: object) -> None:
        base: dict[str, object] = {
            "replicas": 1,
            "first_rebalance_device_s": 10,
            "rebalance_device_s": 30,
        }
        self.fleet = fleet
        self.options = PlannerOptions.model_validate({**base, **changes})
        self.planner = Planner(self.options)
        self.router = Router(self.options.mode)
        self.table: Table = {}
        #: By model: number of plans that changed its placement.
        self.changes: Counter[str] = Counter()

    def plan(self) -> None:
        plan = self.planner.plan(self.fleet.views(), self.fleet.now)
        for name, routes in plan.table.items():
            if name in self.table and self.table[name].placed != routes.placed:
                self.changes[name] += 1
        self.table = plan.table
        self.router.update(plan.table)
        self.fleet.do(plan.steps)


def play(fleet: Fleet, gateways: list[Gateway], seconds: float) -> None:
    for _ in range(round(seconds / ROUND_S)):
        for gateway in gateways:
            gateway.plan()
        fleet.run([gateway.router for gateway in gateways])


def loads(fleet: Fleet, table: Table) -> dict[str, float]:
    total = dict.fromkeys(fleet.servers, 0.0)
    for name, placed in homes(table).items():
        for worker in placed:
            total[worker] += fleet.models[name].rate * fleet.models[name].cost / len(placed)
    return total


def uneven(fleet: Fleet, table: Table) -> float:
    """Return the busiest worker's load as a multiple of its fair share, or of the busiest model's load if that is more."""
    total = loads(fleet, table)
    dearest = max(model.rate * model.cost for model in fleet.models.values())
    return max(total.values()) / max(sum(total.values()) / len(total), dearest)


def mixed(seed: int, count: int) -> dict[str, Model]:
    """Return models of which a few are busy."""
    random = Random(seed)
    return {
        f"m{n:02}": Model(
            bytes=random.randint(1, 10), cost=random.choice([0.002, 0.01, 0.03]), rate=round(20 / (n + 1), 1)
        )
        for n in range(count)
    }


def test_work_is_spread_once_it_is_known() -> None:
    """After repacks by work, the busiest worker has little more than its share. Then no model moves any more."""
    fleet = Fleet(["u", "v", "w", "x"], mixed(1, 24), budget=60)
    gateway = Gateway(fleet)
    play(fleet, [gateway], 60.0)
    assert uneven(fleet, gateway.table) <= 1.25

    gateway.changes.clear()
    fleet.misses.clear()
    play(fleet, [gateway], 200.0)
    status = gateway.planner.status()
    assert status is not None
    assert status.repacks.counts["work"] >= 4
    assert sum(gateway.changes.values()) == 0
    assert fleet.misses == []


def test_moves_cause_no_misses() -> None:
    """When the load shifts, models move, and no request waits for weights."""
    fleet = Fleet(["u", "v", "w"], mixed(2, 12), load_s=2.0)
    gateway = Gateway(fleet, halflife_device_s=10)
    play(fleet, [gateway], 60.0)
    fleet.misses.clear()
    gateway.changes.clear()
    names = sorted(fleet.models)
    rates = [fleet.models[name].rate for name in names]
    for name, rate in zip(names, rates[6:] + rates[:6], strict=True):
        fleet.models[name].rate = rate
    play(fleet, [gateway], 200.0)

    assert sum(gateway.changes.values()) >= 2
    assert fleet.misses == []
    assert uneven(fleet, gateway.table) <= 1.25


def test_old_homes_are_freed() -> None:
    """In the end, each model is resident where it is placed, and nowhere else."""
    fleet = Fleet(["u", "v", "w"], mixed(3, 12), budget=60)
    gateway = Gateway(fleet)
    play(fleet, [gateway], 120.0)

    for worker in fleet.servers:
        assert fleet.resident(worker) == {name for name, at in homes(gateway.table).items() if worker in at}


def test_a_worker_that_dies_and_returns() -> None:
    """When a worker dies, the next plan gives its models other homes. After its return, the work is even again."""
    fleet = Fleet(["u", "v", "w"], mixed(4, 12))
    gateway = Gateway(fleet)
    play(fleet, [gateway], 60.0)
    stayed = {name: at for name, at in homes(gateway.table).items() if at != ("u",)}
    fleet.servers["u"].alive = False
    gateway.plan()
    placed = homes(gateway.table)
    assert all(at and "u" not in at for at in placed.values())
    assert {name: placed[name] for name in stayed} == stayed

    play(fleet, [gateway], 30.0)
    fleet.restart("u")
    play(fleet, [gateway], 60.0)
    assert uneven(fleet, gateway.table) <= 1.25


@pytest.mark.parametrize(
    ("seed", "late"),
    [pytest.param(0, 0.0, marks=pytest.mark.long), (1, 47.0), pytest.param(2, 133.0, marks=pytest.mark.long)],
)
def test_gateways_agree(seed: int, late: float) -> None:
    """Two gateways that share nothing, the second started later, have the same table in the end, and keep it."""
    fleet = Fleet(["u", "v", "w"], mixed(seed, 15), budget=80)
    first = Gateway(fleet)
    play(fleet, [first], late)
    second = Gateway(fleet)
    play(fleet, [first, second], 200.0)

    for _ in range(8):
        play(fleet, [first, second], 10.0)
        assert homes(first.table) == homes(second.table)


def test_gateways_that_disagree_come_together() -> None:
    """If two gateways have placed a model differently, they agree again after their next repacks."""
    fleet = Fleet(
        ["u", "v"], {"a": Model(rate=20), "b": Model(rate=20), "c": Model(rate=20), "d": Model(rate=20)}
    )
    first, second = Gateway(fleet), Gateway(fleet)
    play(fleet, [first, second], 30.0)
    swap = {"u": "v", "v": "u"}
    for unit, at in homes(second.table).items():
        moves = second.planner._moves
        moves.targets[unit] = moves.placed[unit] = (swap[at[0]],)
    play(fleet, [first, second], 2.0)
    assert homes(first.table) != homes(second.table)
    play(fleet, [first, second], 250.0)

    assert homes(first.table) == homes(second.table)
    assert set(Counter(at for at in homes(first.table).values()).values()) == {2}


@pytest.mark.long
@FEW_EXAMPLES
@given(st.integers(0, 2**32))
def test_no_move_makes_a_warm_model_cold(seed: int) -> None:
    """In a fleet with enough memory, no request waits for weights, whatever the loads and repacks are.

    No worker loads more models at the same time than moves may be in progress.
    """
    random = Random(seed)
    models = mixed(seed, 12)
    #: More than a third of all bytes, plus the largest model, so that all models fit.
    budget = sum(model.bytes for model in models.values()) // 3 + 12
    fleet = Fleet(["u", "v", "w"], models, budget=budget, load_s=random.choice([0.5, 2.0]))
    replicas, hysteresis = random.choice([1, "auto"]), random.choice([0.0, 0.1])
    gateway = Gateway(fleet, replicas=replicas, halflife_device_s=5, hysteresis=hysteresis)
    play(fleet, [gateway], 15.0)
    fleet.misses.clear()
    for step in range(100):
        if step % 20 == 0:
            gateway.planner.repack()
        if random.random() < 0.2:
            fleet.models[random.choice(sorted(models))].rate = random.choice([0, 1, 10, 40])
        play(fleet, [gateway], ROUND_S)
        for worker, server in fleet.servers.items():
            loading = [name for name, copy in server.copies.items() if copy.weights is WeightsView.LOADING]
            assert len(loading) <= MOVES_AT_ONCE, (worker, loading)
    assert fleet.misses == []


def test_models_return_to_a_restarted_device_one_after_the_other() -> None:
    """A device crashes and returns after two seconds, and its weights are gone.

    Its models are loaded again, a few at a time, and no request waits for weights there.
    """
    fleet = Fleet(["u", "v", "w"], mixed(5, 12), load_s=0.5)
    gateway = Gateway(fleet)
    play(fleet, [gateway], 60.0)
    before = homes(gateway.table)
    fleet.servers["u"].alive = False
    play(fleet, [gateway], 2.0)
    fleet.restart("u")
    fleet.misses.clear()
    for _ in range(40):
        play(fleet, [gateway], ROUND_S)
        loading = [copy for copy in fleet.servers["u"].copies.values() if copy.weights is WeightsView.LOADING]
        assert len(loading) <= MOVES_AT_ONCE

    assert homes(gateway.table) == before
    assert [miss for miss in fleet.misses if miss[1] == "u"] == []


@FEW_EXAMPLES
@given(st.integers(0, 2**32))
def test_models_are_served_through_any_events(seed: int) -> None:
    """Workers crash, return without weights, join and leave, control services fail, models come and go, and loads shift.

    In each plan, each model that a live worker serves has a live home. A moving model keeps a home with its weights
    until they are at the new home.
    """
    random = Random(seed)
    fleet = Fleet(["u", "v", "w"], mixed(seed, 8), load_s=random.choice([0.5, 3.0]))
    gateway = Gateway(
        fleet, replicas=random.choice([1, "auto", 2, "all"]), halflife_device_s=random.choice([5, 50])
    )
    for step in range(120):
        if random.random() < 0.15:
            _disturb(fleet, random, step)
        before = homes(gateway.table)
        resident = {
            name: {w for w in fleet.servers if fleet.copy(w, name).weights is WeightsView.RESIDENT}
            for name in fleet.models
        }
        gateway.plan()
        for name in fleet.models:
            alive = {w for w, server in fleet.servers.items() if server.alive and name in server.ready}
            routes = gateway.table.get(name)
            assert set(routes.ready if routes else ()) == alive
            if routes is None or not alive or not routes.placed:
                assert not alive or not gateway.planner._started
                continue
            placed = set(routes.placed)
            assert placed <= alive
            known = {w for w in alive if fleet.servers[w].instance is not None}
            cold = (placed - set(before.get(name, ()))) & known - resident[name]
            held = set(before.get(name, ())) & known & resident[name]
            assert not (cold and held), (name, before.get(name), placed)
        fleet.run([gateway.router])


def _disturb(fleet: Fleet, random: Random, step: int) -> None:
    worker = random.choice(sorted(fleet.servers))
    server = fleet.servers[worker]
    match random.randrange(7):
        case 0:
            server.alive = not server.alive
        case 1:
            fleet.restart(worker)
        case 2:
            fleet.servers[f"x{step}"] = type(server)(ready=set(fleet.models))
        case 3 if len(fleet.servers) > 1:
            del fleet.servers[worker]
        case 4:
            server.instance = None if server.instance else f"again{step}"
        case 5:
            server.ready ^= {random.choice(sorted(fleet.models))}
        case _:
            fleet.models[random.choice(sorted(fleet.models))].rate = random.choice([0, 1, 10, 40])
