"""Random packing problems, from loose to impossible."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from rsrv.placement.packing import UnitLoad, WorkerBudget

GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True)
class Instance:
    """Models and devices of a packing problem."""

    loads: list[UnitLoad]
    workers: list[WorkerBudget]
    #: Whether a placement within all budgets exists.
    feasible: bool = False


def spread(total: int, parts: int, random: Random) -> list[int]:
    """Return `parts` whole numbers of at least 1 with the sum `total`."""
    cuts = sorted(random.sample(range(1, total), parts - 1))
    return [end - start for start, end in zip([0, *cuts], [*cuts, total], strict=True)]


def utilisations(count: int, random: Random) -> list[float]:
    kinds: list[Callable[[int], float]] = [
        lambda at: random.random(),
        lambda at: random.expovariate(1.0),
        lambda at: (1 + at) ** -0.8,
        lambda at: 1.0,
        lambda at: random.choice([0.01, 0.1, 0.5, 1.0]),
    ]
    kind = random.choice(kinds)
    return [kind(at) for at in range(count)]


def instance(seed: int) -> Instance:
    """Return up to 200 models on up to 16 devices. The weights fill 30 % to 100 % of the devices.

    A fifth of the instances has replicas, and a fifth has models that are allowed only on some devices.
    """
    random = Random(seed)
    devices = random.randint(2, 16)
    models = random.randint(devices, 200 if random.random() < 0.7 else 5 * devices)
    sizes = [16, 24, 40, 80]
    same = random.choice(sizes)
    equal = random.random() < 0.5
    budgets = [(same if equal else random.choice(sizes)) * GIB for _ in range(devices)]
    full = random.choice([0.3, 0.6, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 1.0])
    work = utilisations(models, random)
    kinds: dict[str, Callable[[int], float]] = {
        "uniform": lambda at: random.uniform(0.05, 1),
        "skewed": lambda at: random.lognormvariate(0, 1),
        "few sizes": lambda at: random.choice([0.1, 0.3, 0.5, 1.0]),
        "all the same": lambda at: 1.0,
        "like the work": lambda at: work[at] * random.uniform(0.5, 1.5) + 0.02,
    }
    kind = random.choice([*kinds, "cut from devices"])
    if kind in kinds:
        raw = [kinds[kind](at) for at in range(models)]
        weights = [max(1, int(full * sum(budgets) * x / sum(raw) / MIB)) * MIB for x in raw]
    else:
        shares = spread(models, devices, random) if models > devices else [1 for _ in budgets]
        weights = [
            MIB * part
            for budget, share in zip(budgets, shares, strict=True)
            for part in spread(int(full * budget) // MIB, share, random)
        ]
        random.shuffle(weights)
    with_replicas, restricted = random.random() < 0.2, random.random() < 0.2
    names = [f"device{at:02d}" for at in range(devices)]
    loads = [
        UnitLoad(
            f"model{at:03d}",
            work[at] / sum(work) * devices / 2,
            weights[at],
            random.randint(2, 4) if with_replicas and random.random() < 0.05 else 1,
            frozenset(random.sample(names, random.randint(1, devices)))
            if restricted and random.random() < 0.3
            else None,
        )
        for at in range(models)
    ]
    return Instance(
        loads,
        [WorkerBudget(name, budget) for name, budget in zip(names, budgets, strict=True)],
        kind not in kinds and not with_replicas and not restricted,
    )


def jigsaw(seed: int) -> Instance:
    """Return models whose weights fill the devices almost completely, with few models per device."""
    random = Random(seed)
    devices = random.randint(2, 10)
    sizes = [16, 24, 40, 80]
    equal = random.random() < 0.5
    budgets = [(16 if equal else random.choice(sizes)) * GIB for _ in range(devices)]
    full, pieces = random.choice([0.95, 0.98, 0.99, 0.995, 1.0]), random.choice([2, 3, 5, 8])
    unit = random.choice([1, 64, 512]) * MIB
    weights = [
        unit * part
        for budget in budgets
        for part in spread(int(full * budget) // unit, random.randint(1, 2 * pieces - 1), random)
    ]
    random.shuffle(weights)
    return Instance(
        [UnitLoad(f"model{at:03d}", random.random(), weight) for at, weight in enumerate(weights)],
        [WorkerBudget(f"device{at:02d}", budget) for at, budget in enumerate(budgets)],
        feasible=True,
    )


def catalogue(models: int, devices: int, full: float, seed: int = 0) -> Instance:
    """Return many models of decreasing popularity on equal devices. Their weights fill the part `full` of the devices."""
    random = Random(seed)
    work = [random.uniform(0.5, 1.5) * (1 + at) ** -0.8 for at in range(models)]
    weights = [int(GIB * random.lognormvariate(0, 0.6)) for _ in range(models)]
    budget = max(int(sum(weights) / full / devices), *weights)
    return Instance(
        [UnitLoad(f"model{at:05d}", work[at] / sum(work) * devices / 2, weights[at]) for at in range(models)],
        [WorkerBudget(f"device{at:04d}", budget) for at in range(devices)],
    )
