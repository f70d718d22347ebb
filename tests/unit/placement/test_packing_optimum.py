"""Packings compared with the optimum that CP-SAT of OR-tools finds, or with its bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from ortools.sat.python import cp_model

from rsrv.placement.packing import UnitLoad, WorkerBudget, pack
from tests.unit.placement.instances import MIB, Instance, instance

#: CP-SAT takes minutes, and its import takes seconds.
pytestmark = pytest.mark.long

#: CP-SAT has only integers, so this number represents a utilisation of 1.
ONE = 10**6


@dataclass(frozen=True)
class Optimum:
    """The result of CP-SAT."""

    #: Whether a placement within the budgets exists. None: unknown.
    feasible: bool | None
    #: Utilisation of the busiest device: `found` is the best value that CP-SAT found, and `bound` is CP-SAT's lower
    #: bound of the optimum.
    found: float = 0.0
    bound: float = 0.0


def optimum(problem: Instance, effort: float) -> Optimum:
    """Solve a problem with CP-SAT.

    `effort` limits CP-SAT's work in deterministic seconds, so that the answer does not depend on the machine.
    """
    model = cp_model.CpModel()
    work: list[list[cp_model.LinearExprT]] = [[] for _ in problem.workers]
    weights: list[list[cp_model.LinearExprT]] = [[] for _ in problem.workers]
    loads = []
    for load in problem.loads:
        allowed = [
            at
            for at, worker in enumerate(problem.workers)
            if load.allowed is None or worker.name in load.allowed
        ]
        replicas = min(load.replicas, len(allowed))
        loads += [round(load.utilisation / replicas * ONE)] * replicas
        here = {at: model.new_bool_var("") for at in allowed}
        model.add(sum(here.values()) == replicas)
        for at, chosen in here.items():
            work[at].append(loads[-1] * chosen)
            weights[at].append(load.bytes // MIB * chosen)
    busiest = model.new_int_var(max(-(-sum(loads) // len(problem.workers)), *loads), sum(loads), "")
    for at, worker in enumerate(problem.workers):
        assert worker.budget_bytes is not None
        model.add(sum(weights[at]) <= worker.budget_bytes // MIB)
        model.add(sum(work[at]) <= busiest)
    model.minimize(busiest)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = effort
    solver.parameters.relative_gap_limit = 0.002
    status = solver.solve(model)
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Optimum(True, solver.objective_value / ONE, solver.best_objective_bound / ONE)
    return Optimum(False if status == cp_model.INFEASIBLE else None)


def memory_binds(problem: Instance) -> bool:
    """Return whether memory, replicas or allowed devices rule out the placement that is best for the work alone."""
    if any(load.replicas > 1 or load.allowed is not None for load in problem.loads):
        return True
    free = pack(problem.loads, [WorkerBudget(worker.name, None) for worker in problem.workers])
    return any(free.bytes[worker.name] > (worker.budget_bytes or 0) for worker in problem.workers)


def compare(seeds: Sequence[int], effort: float) -> None:
    """Pack the instances with these seeds, and compare the packings with CP-SAT's results."""
    ratios, beside, unknown, missed, loose = [], [], [], [], 0
    for seed in seeds:
        problem = instance(seed)
        packing = pack(problem.loads, problem.workers)
        best = optimum(problem, effort)
        if packing.oversubscribed:
            if best.feasible:
                missed.append(seed)
            continue
        assert best.feasible is not False, seed
        if best.feasible is None:
            unknown.append(seed)
            continue
        busiest = max(packing.utilisation.values())
        ratios.append(busiest / best.bound)
        beside.append(busiest / best.found)
        if not memory_binds(problem):
            loose += 1
            devices = len(problem.workers)
            assert busiest <= (4 / 3 - 1 / (3 * devices)) * best.bound + 1e-6, seed
    print(
        f"\n{len(ratios)} instances packed by both, {len(unknown)} only here, {len(missed)} only by CP-SAT; "
        f"busiest device: {sum(ratios) / len(ratios):.4f} of CP-SAT's lower bound on average, {max(ratios):.3f} at worst; "
        f"{sum(beside) / len(beside):.4f} of what CP-SAT found, {max(beside):.3f} at worst; memory does not bind in {loose}"
    )
    assert not missed
    # If CP-SAT's best placement and its bound differ, the optimum is probably nearer to the placement.
    assert sum(beside) / len(beside) < 1.05


def test_some_instances() -> None:
    """Random instances that CP-SAT can pack are packed, and almost as evenly."""
    compare(range(16), effort=0.05)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(0, 1000, 100))
def test_a_thousand_instances(first: int) -> None:
    """A thousand instances are packed almost as evenly as CP-SAT packs them with more time."""
    compare(range(first, first + 100), effort=1.0)


def test_a_bound_is_not_exceeded() -> None:
    """Without memory limits, the load of the busiest of m devices is at most 4/3 - 1/(3m) times the optimum.

    This is LPT's bound.
    """
    for seed in range(20):
        problem = instance(seed)
        devices = len(problem.workers)
        # Few models on each device, where LPT is far from the optimum.
        loads = [UnitLoad(load.name, load.utilisation, MIB) for load in problem.loads[: 2 * devices + 1]]
        workers = [WorkerBudget(worker.name, len(loads) * MIB) for worker in problem.workers]
        best = optimum(Instance(loads, workers), effort=0.1)
        busiest = max(pack(loads, workers).utilisation.values())
        assert busiest <= (4 / 3 - 1 / (3 * devices)) * best.found + 1e-6, seed
