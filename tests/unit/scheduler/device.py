"""A device and a link in virtual time, for tests that need more than single steps.

Executions run one after the other. Each takes its cost, times `slower`. A load takes the seconds that were set for its model.
Ticks are sent when the scheduler asks for them. Saturated models always have work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

from rsrv.scheduler.events import (
    Event,
    EvictWeights,
    Execute,
    ExecutionFinished,
    Finish,
    Instruction,
    LoadWeights,
    Outcome,
    Program,
    Request,
    RequestsArrived,
    Tick,
    WarmUp,
    WarmUpEnded,
    WeightsLoaded,
)
from rsrv.scheduler.settings import SchedulerSettings
from tests.unit.scheduler.driver import Driver

#: Maximum number of ticks that a scheduler may ask for at one moment. More ticks would be an endless loop.
_MOST_TICKS = 100


class Device(Driver):
    """A driver whose executions and loads end by themselves when their time has passed."""

    def __init__(self, settings: SchedulerSettings | None = None, *, validate_every: int = 50) -> None:
        super().__init__(settings, validate_every=validate_every)
        self.programs: dict[str, Program] = {}
        #: Seconds that a load of each model takes.
        self.load_seconds: dict[str, float] = {}
        #: Device time of each model, in seconds.
        self.got: dict[str, float] = {}
        #: Number of loads of each model.
        self.loads: Counter[str] = Counter()
        #: Number of evictions of each model.
        self.evictions: Counter[str] = Counter()
        #: The start and end of each execution on the device.
        self.executed: list[tuple[float, float, Execute]] = []
        #: The time of each request's end, by request id.
        self.ended_at: dict[int, float] = {}
        self.slower: Callable[[Execute], float] = lambda execute: 1.0
        self.ticks = 0
        self._saturated: dict[str, int] = {}
        self._clients: dict[str, float] = {}
        self._free = 0.0
        self._number = 0
        #: Events that are still to come, as (time, number, event).
        self._due: list[tuple[float, int, Event]] = []

    def model(
        self,
        program: Program,
        load: float = 0.0,
        *,
        resident: bool = True,
        warm_up: bool = False,
        expected: float | None = None,
    ) -> None:
        """Add a model whose loads take `load` seconds. The scheduler expects `expected` seconds, by default the same."""
        program = replace(program, load_seconds=load if expected is None else expected)
        self.programs[program.model] = program
        self.load_seconds[program.model] = load
        self.got[program.model] = 0.0
        self.add(program, resident=resident, warm_up=warm_up)

    def saturate(self, names: Iterable[str], *, priority: int = 0) -> None:
        """Keep two requests of each of these models waiting at any time."""
        self._saturated |= dict.fromkeys(names, priority)
        self.arrive(*(self.request(name, priority=priority) for name in names for _ in range(2)))

    def clients(self, names: Iterable[str], think: float) -> None:
        """Add a client for each model. It sends its next request `think` seconds after the last answer."""
        self._clients |= dict.fromkeys(names, think)
        self.arrive(*(self.request(name) for name in names))

    def stop(self) -> None:
        """End the saturation and the clients, so that no more requests are sent."""
        self._saturated.clear()
        self._clients.clear()

    def later(self, at: float, event: Event) -> None:
        self._number += 1
        self._due.append((at, self._number, event))

    def run(self, until: float) -> None:
        """Let time pass until this time."""
        here = 0
        while True:
            due = min(self._due, default=None, key=lambda item: item[:2])
            wakeup = self.scheduler.next_wakeup()
            if wakeup is not None and (due is None or wakeup < due[0]):
                if wakeup > until:
                    break
                here = here + 1 if wakeup <= self.now else 0
                assert here < _MOST_TICKS, "the scheduler asks for ticks without end"
                self.ticks += 1
                self.now = max(self.now, wakeup)
                self.send(Tick())
            elif due is not None and due[0] <= until:
                self._due.remove(due)
                self.now = max(self.now, due[0])
                self.send(due[2])
            else:
                break
        self.now = until

    def _watch(self, instruction: Instruction) -> None:
        super()._watch(instruction)
        match instruction:
            case Execute():
                cost = self.programs[instruction.model].costs[instruction.variant, instruction.size]
                seconds = cost * self.slower(instruction)
                start = max(self.now, self._free)
                self._free = start + seconds
                self.got[instruction.model] += seconds
                self.executed.append((start, self._free, instruction))
                self.later(self._free, ExecutionFinished(instruction.number, seconds))
                refill = self._saturated.get(instruction.model)
                if refill is not None:
                    self.later(self.now, self._more(instruction, refill))
            case WarmUp():
                # The warm-up does not wait for executions, because its duration hardly affects the order.
                costs = self.programs[instruction.model].costs
                self.later(self.now + sum(costs.values()), WarmUpEnded(instruction.model, costs))
            case LoadWeights():
                self.loads[instruction.model] += 1
                seconds = self.load_seconds[instruction.model]
                self.later(self.now + seconds, WeightsLoaded(instruction.model, instruction.epoch, seconds))
            case EvictWeights():
                self.evictions[instruction.model] += 1
            case Finish():
                self.ended_at[instruction.request] = self.now
                think = self._clients.get(self.requests[instruction.request].model)
                if think is not None and instruction.outcome is Outcome.ANSWERED:
                    again = self.request(self.requests[instruction.request].model)
                    self.later(self.now + think, RequestsArrived((again,)))

    def _more(self, execute: Execute, priority: int) -> RequestsArrived:
        return RequestsArrived(
            tuple(self.request(execute.model, priority=priority) for _ in execute.requests)
        )

    def started(self, request: Request) -> float | None:
        """Return the time at which the device started the request, or None."""
        return next((start for start, _, execute in self.executed if request.id in execute.requests), None)

    def answered(self, request: Request) -> float | None:
        """Return the time of the request's answer, or None."""
        finish = self.ended.get(request.id)
        if finish is None or finish.outcome is not Outcome.ANSWERED:
            return None
        return self.ended_at[request.id]
