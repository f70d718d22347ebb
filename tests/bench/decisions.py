"""The cost of the scheduler's decisions. Only the pure state machine runs, without a server."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rsrv.scheduler.disciplines import DISCIPLINES
from rsrv.scheduler.events import (
    Execute,
    ExecutionFinished,
    Instruction,
    ModelAdded,
    Program,
    Request,
    RequestsArrived,
)
from rsrv.scheduler.scheduler import Scheduler
from rsrv.scheduler.settings import SchedulerSettings

#: Numbers of models, all of which have work.
MODELS = (10, 1000)
#: Numbers of rows in an execution.
ROWS = (1, 8, 32)
_STEPS = 4000
#: Number of waiting requests that each model has at all times.
_WAITING = 40


@dataclass(frozen=True)
class Decision:
    """Times of `handle(ExecutionFinished)`: it ends an execution, answers its requests, and starts the next execution."""

    discipline: str
    models: int
    rows: int
    median_us: float
    p99_us: float


def measure() -> list[Decision]:
    return [
        measure_one(discipline, models, rows)
        for discipline in DISCIPLINES
        for models in MODELS
        for rows in ROWS
    ]


def measure_one(discipline: str, models: int, rows: int) -> Decision:
    """Measure with `models` models that all have work, and `rows` rows in an execution."""
    scheduler = Scheduler(SchedulerSettings(discipline=discipline))
    sizes = [size for size in (1, 2, 4, 8, 16, 32) if size <= rows]
    costs = {(0, size): 0.0005 * (1 + size / 8) for size in sizes}
    number, now, running = 0, 0.0, list[Execute]()

    def arrive(model: str, count: int) -> list[Instruction]:
        nonlocal number
        requests = []
        for _ in range(count):
            number += 1
            # The deadlines are different, and none of them passes.
            requests.append(Request(number, model, 0, 1, 1e9 + number * 7 % 1009))
        return scheduler.handle(RequestsArrived(tuple(requests)), now)

    for index in range(models):
        program = Program(f"m{index}", costs, True, 10 * _WAITING, weight=1 + index % 3)
        scheduler.handle(ModelAdded(program, resident=True), now)
    for index in range(models):
        running += executions(arrive(f"m{index}", _WAITING))
    gc.collect()
    took = []
    for _ in range(_STEPS):
        execute = running.pop(0)
        now += execute.seconds
        event = ExecutionFinished(execute.number, execute.seconds)
        started = time.perf_counter()
        out = scheduler.handle(event, now)
        took.append(time.perf_counter() - started)
        running += executions(out)
        arrive(execute.model, execute.rows)
    took.sort()
    return Decision(discipline, models, rows, took[_STEPS // 2] * 1e6, took[_STEPS * 99 // 100] * 1e6)


def executions(instructions: Sequence[Instruction]) -> list[Execute]:
    return [instruction for instruction in instructions if isinstance(instruction, Execute)]
