"""Drive a scheduler in virtual time, and check its rules after each event.

After each event, the driver checks the scheduler's own invariants. It also checks from outside what these cannot see: that each
request ends once, that executions consist of waiting requests and use resident weights, and that runs are admitted in order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from rsrv.scheduler import invariants
from rsrv.scheduler.discipline import COMMITTED_LEVEL, Place
from rsrv.scheduler.disciplines import DISCIPLINES
from rsrv.scheduler.events import (
    DEFAULT_PRIORITY,
    AbandonLoad,
    Admit,
    CopyChanged,
    Event,
    Evict,
    EvictWeights,
    Execute,
    ExecutionFinished,
    Finish,
    GiveUp,
    Instruction,
    LoadAbandoned,
    LoadFailed,
    LoadWeights,
    ModelAdded,
    ModelRemoved,
    Outcome,
    Pause,
    Paused,
    Pinned,
    PolicyChanged,
    Prefetch,
    Program,
    ReadWeights,
    Reason,
    Request,
    RequestsArrived,
    RequestsCancelled,
    Run,
    RunEnded,
    RunsAsked,
    SettingsChanged,
    Tick,
    WarmUp,
    WarmUpEnded,
    WeightsLoaded,
    WeightsRead,
    WindDown,
    WoundDown,
)
from rsrv.scheduler.scheduler import Scheduler
from rsrv.scheduler.settings import SchedulerSettings
from rsrv.scheduler.statistics import Cause

#: Parametrizes a test by the name of each discipline.
every_discipline = pytest.mark.parametrize("discipline", sorted(DISCIPLINES))
#: Disciplines that always execute the first one of all requests that can execute.
FIRST_OF_ALL = ("fifo", "edf")

#: Default costs: seconds of one execution by variant and size.
COSTS = {(0, 1): 0.001, (0, 32): 0.004}


def program(
    model: str = "a",
    costs: dict[tuple[int, int], float] | None = None,
    *,
    coalesce: bool = True,
    max_queue_depth: int = 1000,
    max_batch_rows: int | None = None,
    weight_bytes: int = 100,
    tensors: dict[str, int] | None = None,
    pinned: bool = False,
    weight: float = 1.0,
    max_delay: float = 0.0,
    paused: Pause | None = None,
    idle_seconds: float = inf,
    padded: bool = False,
) -> Program:
    return Program(
        model=model,
        costs=COSTS if costs is None else costs,
        coalesce=coalesce,
        max_queue_depth=max_queue_depth,
        max_batch_rows=max_batch_rows,
        weight_bytes=weight_bytes if tensors is None else sum(tensors.values()),
        tensors=tensors,
        pinned=pinned,
        weight=weight,
        max_delay=max_delay,
        paused=paused,
        idle_seconds=idle_seconds,
        padded=padded,
    )


class Driver:
    """A scheduler, all its events and instructions, and a clock that the test moves."""

    def __init__(self, settings: SchedulerSettings | None = None, *, validate_every: int = 1) -> None:
        self._validate_every = validate_every
        self.first_settings = self.settings = settings or SchedulerSettings()
        self.scheduler = Scheduler(self.settings)
        self.now = 0.0
        self.events: list[tuple[Event, float]] = []
        self.instructions: list[list[Instruction]] = []
        self.requests: dict[int, Request] = {}
        #: Ends of requests by request id. Each request that arrived must get an entry.
        self.ended: dict[int, Finish] = {}
        #: Waiting requests by id.
        self.waiting: dict[int, Request] = {}
        #: The highest number that a request had before this event, plus the number of requests that arrive with it. Requests that
        #: move up in their runs during the event get higher numbers.
        self._numbered = 0
        #: All requested runs by id.
        self.asked: dict[int, Run] = {}
        #: Waiting runs by id.
        self.waiting_runs: dict[int, Run] = {}
        #: Runs in progress by id.
        self.under_way: dict[int, Run] = {}
        #: How each run stopped waiting, by the run's id.
        self.left_waiting: dict[int, Admit | Finish | RunEnded] = {}
        self.executing: dict[int, Execute] = {}
        self.resident: set[str] = set()
        #: Models whose requests may be delayed.
        self.patient: set[str] = set()
        #: The pause of each model.
        self.paused: dict[str, Pause | None] = {}
        #: How many requests of each model may wait.
        self.limits: dict[str, int] = {}
        #: Models whose requests are steps of generations.
        self.generative: set[str] = set()
        #: Models whose requests may execute at a later variant than their own.
        self.padded: set[str] = set()
        #: By model: ids of the runs that were in progress when the model's pause last changed.
        self.finishing: dict[str, set[int]] = {}
        #: Whether the scheduler winds down, or has come to rest.
        self.winding_down = False
        #: Models that are to be evicted. They may still be resident.
        self.leaving: set[str] = set()
        #: Epoch of each model's current load.
        self.loading: dict[str, int] = {}
        #: Epoch of each model's current read.
        self.reading: dict[str, int] = {}
        #: Models whose weights are only on disk.
        self.on_disk: set[str] = set()
        #: Models whose load or read shall be abandoned.
        self.abandoning: set[str] = set()
        #: Models that warm up.
        self.warming: set[str] = set()
        #: Models whose load the scheduler gave up.
        self.given_up: list[str] = []
        #: True if a model has, or once had, a limit for idle weights.
        self.idling = False
        #: The latest model whose warm-up is repeated.
        self.warming_again = ""
        #: Requests of executions that found no memory and wait for their retry.
        self.again: set[int] = set()
        #: Number of executions that wait for their retry.
        self.second_tries = 0
        self._next_id = 0

    # --- events --------------------------------------------------------------------------------------

    def send(self, event: Event, after: float = 0.0) -> list[Instruction]:
        """Let `after` seconds pass, send an event to the scheduler, and check its instructions."""
        self.now += after
        if isinstance(event, RequestsArrived):
            arrived = {request.id: request for request in event.requests}
            self.requests |= arrived
            self.waiting |= arrived
        if isinstance(event, RunsAsked):
            runs = {run.id: run for run in event.runs}
            self.asked |= runs
            self.waiting_runs |= runs
        if isinstance(event, RunEnded) and self.waiting_runs.pop(event.run, None) is not None:
            self.left_waiting[event.run] = event
        if isinstance(event, RunEnded):
            self.under_way.pop(event.run, None)
        if isinstance(event, ExecutionFinished):
            execute = self.executing.pop(event.number)
            if event.out_of_memory and not execute.again:
                self.again.update(execute.requests)
                self.second_tries += 1
                self.patient.add(execute.model)
        if isinstance(event, WarmUpEnded):
            self.warming.remove(event.model)
        if isinstance(event, WeightsLoaded) and self.loading.get(event.model) == event.epoch:
            self.resident.add(event.model)
        if isinstance(event, ModelAdded):
            (self.patient.add if event.program.max_delay else self.patient.discard)(event.program.model)
            self.idling = self.idling or event.program.idle_seconds < inf
            self.leaving.discard(event.program.model)
            self.paused[event.program.model] = event.program.paused
            self.finishing[event.program.model] = set()
            self.limits[event.program.model] = event.program.max_queue_depth
            (self.padded.add if event.program.padded else self.padded.discard)(event.program.model)
            (self.generative.add if event.program.feeds_back else self.generative.discard)(
                event.program.model
            )
        if isinstance(event, ModelAdded | CopyChanged):
            name = event.program.model if isinstance(event, ModelAdded) else event.model
            absent = event.on_disk if isinstance(event, ModelAdded) else not event.present
            if name not in self.reading:  # Otherwise the end of the read updates the set.
                (self.on_disk.add if absent else self.on_disk.discard)(name)
        if isinstance(event, ModelAdded) and event.resident:
            self.resident.add(event.program.model)
        if isinstance(event, Paused):
            for model in event.models:
                if self.paused[model] is not event.mode:
                    self.finishing[model] = set(self.under_way)
                self.paused[model] = event.mode
        if isinstance(event, ModelRemoved):
            self.paused[event.model] = None
        if isinstance(event, PolicyChanged):
            self.limits[event.model] = event.max_queue_depth or self.limits[event.model]
            if event.max_delay:
                self.patient.add(event.model)
            self.idling = self.idling or event.idle_seconds is not None
        if isinstance(event, Evict):
            self.leaving.update(event.models)
        if not self.settings.on_demand and isinstance(event, WarmUpEnded | Pinned):
            self.leaving.add(event.model)
        if isinstance(event, Prefetch) or (isinstance(event, Pinned) and event.pinned):
            self.leaving.discard(event.model)
        if isinstance(event, SettingsChanged):
            self.settings = event.settings
        if isinstance(event, WindDown):
            self.winding_down = event.within is not None
        if (
            isinstance(event, WeightsLoaded | LoadFailed | LoadAbandoned)
            and self.loading.get(event.model) == event.epoch
        ):
            del self.loading[event.model]
            self.abandoning.discard(event.model)
        if (
            isinstance(event, WeightsRead | LoadFailed | LoadAbandoned)
            and self.reading.get(event.model) == event.epoch
        ):
            del self.reading[event.model]
            self.abandoning.discard(event.model)
            if isinstance(event, WeightsRead):
                self.on_disk.discard(event.model)
        idle = self._idle_evictions()
        arriving = len(event.requests) if isinstance(event, RequestsArrived) else 0
        self._numbered = self.scheduler._queues._number + arriving
        out = self.scheduler.handle(event, self.now)
        if isinstance(event, RequestsArrived):
            self._watch_arrivals(event.requests, out)
        self.events.append((event, self.now))
        self.instructions.append(out)
        if len(self.events) % self._validate_every == 0:
            invariants.check(self.scheduler)
        for instruction in out:
            self._watch(instruction)
        for model, count in self._idle_evictions().items():
            if count > idle.get(model, count):
                assert all(request.model != model for request in self.waiting.values())
        # No run waits while a place is free, or after its deadline.
        able = not self.winding_down and any(not self._stalled(run) for run in self.waiting_runs.values())
        assert not able or self._places_taken() >= self.settings.meta_concurrency
        assert all(run.deadline is None or run.deadline > self.now for run in self.waiting_runs.values())
        return out

    def add(
        self, *programs: Program, resident: bool = True, warm_up: bool = False, on_disk: bool = False
    ) -> None:
        for model in programs:
            self.send(ModelAdded(model, resident, warm_up, on_disk=on_disk))

    def read(self, model: str, seconds: float = 0.0) -> list[Instruction]:
        return self.send(WeightsRead(model, self.reading[model], seconds), after=seconds)

    def load(self, model: str, seconds: float = 0.0) -> list[Instruction]:
        return self.send(WeightsLoaded(model, self.loading[model], seconds), after=seconds)

    def fail_load(
        self, model: str, error: str = "no such file", *, out_of_memory: bool = False
    ) -> list[Instruction]:
        return self.send(LoadFailed(model, (self.loading | self.reading)[model], error, out_of_memory))

    def warm_up_ends(
        self, model: str, cost: float | None = 0.001, *, out_of_memory: bool = False
    ) -> list[Instruction]:
        """End a warm-up in which each size costs `cost`. With None, the warm-up fails."""
        costs = self.scheduler.snapshot().models[model].costs
        new = None if cost is None or out_of_memory else dict.fromkeys(costs, cost)
        return self.send(WarmUpEnded(model, new, out_of_memory))

    def abandon_load(self, model: str) -> list[Instruction]:
        return self.send(LoadAbandoned(model, (self.loading | self.reading)[model]))

    def pause(self, mode: Pause | None, *models: str) -> list[Instruction]:
        """Pause models; None resumes them."""
        return self.send(Paused(models, mode))

    def change(self, **settings: Any) -> list[Instruction]:
        """Change some settings of the scheduler."""
        return self.send(SettingsChanged(replace(self.settings, **settings)))

    def evict(self, *models: str) -> list[Instruction]:
        return self.send(Evict(models))

    def remove(self, model: str) -> list[Instruction]:
        return self.send(ModelRemoved(model))

    def request(
        self,
        model: str = "a",
        rows: int = 1,
        *,
        variant: int = 0,
        deadline: float | None = None,
        run: int = 0,
        priority: int = 0,
        exclusive: bool = False,
        accepted: bool = False,
        due: float | None = None,
    ) -> Request:
        """Return a request with a new id, which is not sent. `deadline` is an absolute time."""
        self._next_id += 1
        return Request(
            self._next_id, model, variant, rows, deadline, priority, run, exclusive, accepted, due=due
        )

    def run_of(
        self,
        meta: str = "m",
        *,
        deadline: float | None = None,
        priority: int = 0,
        max_waiting: int = 1000,
        models: tuple[str, ...] = (),
    ) -> Run:
        """Return a run with a new id. `deadline` is an absolute time."""
        self._next_id += 1
        return Run(self._next_id, meta, deadline, priority, max_waiting, models)

    def wind_down(self, within: float | None) -> list[Instruction]:
        return self.send(WindDown(within))

    def ask(self, *runs: Run) -> list[Instruction]:
        return self.send(RunsAsked(runs))

    def end(self, run: Run) -> list[Instruction]:
        return self.send(RunEnded(run.id))

    def requests_of(self, count: int, model: str = "a", rows: int = 1) -> list[Request]:
        return [self.request(model, rows) for _ in range(count)]

    def arrive(self, *requests: Request) -> list[Instruction]:
        return self.send(RequestsArrived(requests))

    def cancel(self, *requests: Request) -> list[Instruction]:
        return self.send(RequestsCancelled(tuple(request.id for request in requests)))

    def tick(self, at: float) -> list[Instruction]:
        return self.send(Tick(), after=at - self.now)

    def finish(
        self,
        number: int | None = None,
        *,
        seconds: float | None = None,
        error: str | None = None,
        out_of_memory: bool = False,
    ) -> list[Instruction]:
        """End an execution, by default the oldest one, by default after exactly the time that the scheduler expects."""
        number = min(self.executing) if number is None else number
        execute = self.executing[number]
        if seconds is None:
            costs = self.scheduler.snapshot().models[execute.model].costs
            seconds = costs[execute.variant, execute.size]
        if out_of_memory:
            error = error or "no memory"
        return self.send(ExecutionFinished(number, seconds, error, out_of_memory), after=seconds)

    def finish_all(self) -> list[Execute]:
        """Finish executions until the device is idle.

        Return the executions that were in flight before the call, and the executions that started during it, the oldest first.
        """
        started = [*self.executing.values()]
        while self.executing:
            started += executions(self.finish())
        return started

    def settle(self) -> None:
        """Finish loads and executions until there are no more.

        More than a hundred would mean that one causes another without end.
        """
        for _ in range(100):
            if self.reading:
                self.read(next(iter(self.reading)))
            elif self.loading:
                self.load(next(iter(self.loading)))
            elif self.executing:
                self.finish()
            else:
                return
        raise AssertionError("loads or executions do not end")

    # --- questions -----------------------------------------------------------------------------------

    def outcome(self, request: Request) -> Outcome | Reason | None:
        """Return a request's outcome, or its reason if it was refused. Return None while it is in flight."""
        finish = self.ended.get(request.id)
        if finish is None:
            return None
        return finish.reason if finish.outcome is Outcome.REFUSED else finish.outcome

    def _watch(self, instruction: Instruction) -> None:
        match instruction:
            case Execute():
                self._watch_execute(instruction)
            case Admit(run):
                self._watch_admit(run)
            case Finish() if instruction.request in self.asked:
                self._watch_refused_run(instruction)
            case Finish():
                assert instruction.request in self.requests
                assert instruction.request not in self.ended
                self.ended[instruction.request] = instruction
                self.waiting.pop(instruction.request, None)
            case LoadWeights():
                assert instruction.model not in self.resident
                assert instruction.model not in self.loading
                assert not any(execution.exclusive for execution in self.executing.values())
                assert instruction.model not in self.on_disk
                self.loading[instruction.model] = instruction.epoch
            case ReadWeights():
                assert not self.reading
                assert instruction.model in self.on_disk - self.resident - self.loading.keys()
                self.reading[instruction.model] = instruction.epoch
            case AbandonLoad():
                assert (self.loading | self.reading)[instruction.model] == instruction.epoch
                assert instruction.model not in self.abandoning
                self.abandoning.add(instruction.model)
            case WarmUp():
                assert instruction.model in self.resident
                if instruction.again:
                    assert not self.executing
                    assert not self.loading
                    self.warming_again = instruction.model
                self.warming.add(instruction.model)
            case GiveUp():
                self.given_up.append(instruction.model)
            case WoundDown(runs, executions, steps):
                assert self.winding_down
                assert (runs, executions) == (len(self.under_way), len(self.executing) + self.second_tries)
                self.winding_down = not (runs or executions or steps)
            case EvictWeights():
                assert instruction.model not in self.warming
                assert self.held(instruction.model) or not any(
                    self._committed(request) and request.model == instruction.model
                    for request in self.waiting.values()
                )
                self.leaving.discard(instruction.model)
                assert all(execution.model != instruction.model for execution in self.executing.values())
                self.resident.remove(instruction.model)

    def _idle_evictions(self) -> dict[str, int]:
        """Return the number of evictions for idleness by model. The result is empty if no model ever had a limit."""
        if not self.idling:
            return {}
        models = self.scheduler._models
        return {name: model.totals.evictions.get(Cause.IDLE, 0) for name, model in models.items()}

    def _stalled(self, run: Run) -> bool:
        return any(self.held(model) for model in run.models)

    def _places_taken(self) -> int:
        return sum(not self._stalled(run) for run in self.under_way.values())

    def held(self, model: str) -> bool:
        return self.paused.get(model) is Pause.HOLD

    def _place(self, request: Request) -> Place | None:
        """Return the place of a waiting request in the order.

        Return None if the request has ended, or has moved up in its run during this event.
        """
        entry = self.scheduler._queues.live.get(request.id)
        return entry.place if entry is not None and entry.place[2] <= self._numbered else None

    def _committed(self, request: Request) -> bool:
        """Return whether a waiting request is committed, because it is the oldest request of its run."""
        place = self._place(request)
        return place is not None and place[0] == COMMITTED_LEVEL

    def _watch_arrivals(self, requests: Iterable[Request], out: Iterable[Instruction]) -> None:
        """Check that each request which did not end at once was accepted by the rules."""
        at_once = {instruction.request for instruction in out if isinstance(instruction, Finish)}
        for request in requests:
            if request.id in at_once:
                continue
            if self.paused[request.model] is Pause.DRAIN:
                assert request.accepted or request.run in self.finishing[request.model]
            waiting = [other.id for other in self.waiting.values() if other.model == request.model]
            ahead = [id for id in waiting[: waiting.index(request.id)] if id not in at_once]
            assert request.accepted or len(ahead) < self.limits[request.model]

    def _urgency(self, due: float | None) -> float:
        """Return the discipline's part of a place. It is compared before the number."""
        if self.settings.discipline != "edf":
            return 0.0
        return inf if due is None else due

    def _watch_admit(self, id: int) -> None:
        assert not self.winding_down
        assert self._places_taken() < self.settings.meta_concurrency
        run = self.waiting_runs[id]
        assert not self._stalled(run)
        assert run.deadline is None or run.deadline > self.now
        # The ids of runs are in the order of arrival.
        able = [waiting_run for waiting_run in self.waiting_runs.values() if not self._stalled(waiting_run)]
        assert self._run_order(run) == min(map(self._run_order, able))
        assert id not in self.left_waiting
        self.under_way[id] = self.waiting_runs.pop(id)
        self.left_waiting[id] = Admit(id)

    def _watch_refused_run(self, finish: Finish) -> None:
        run = self.waiting_runs[finish.request]
        waiting = sum(waiting_run.meta == run.meta for waiting_run in self.waiting_runs.values())
        if finish.outcome is Outcome.EXPIRED:
            assert run.deadline is not None
            assert run.deadline <= self.now
        else:
            assert (finish.outcome, finish.reason) == (Outcome.REFUSED, Reason.QUEUE_FULL)
            assert waiting > run.max_waiting
        del self.waiting_runs[run.id]
        self.left_waiting[run.id] = finish

    def _run_order(self, run: Run) -> tuple[int, float, int]:
        return run.priority or DEFAULT_PRIORITY, self._urgency(run.deadline), run.id

    def _watch_execute(self, execute: Execute) -> None:
        assert execute.model in self.resident
        assert execute.number not in self.executing
        # While the scheduler winds down, only runs in progress, generations and retries may cause executions.
        generating = any(
            waiting_request.model in self.generative for waiting_request in self.waiting.values()
        )
        assert self.under_way or generating or execute.again or not self.winding_down
        requests = [self.requests[request] for request in execute.requests]
        assert requests
        assert execute.rows == sum(request.rows for request in requests) <= execute.size
        for request in requests:
            assert request.model == execute.model
            assert request.variant == execute.variant or (
                execute.model in self.padded and request.variant < execute.variant
            )
            assert request.id in (self.again if execute.again else self.waiting)
            assert execute.again or request.deadline is None or request.deadline > self.now
        if execute.exclusive:
            assert (len(requests), self.executing, self.loading, self.warming) == (1, {}, {}, set())
        assert execute.exclusive == any(request.exclusive for request in requests)
        assert not any(execution.exclusive for execution in self.executing.values())
        # A retry is allowed, because its first execution began before the pause.
        assert execute.again or not self.held(execute.model)
        if execute.again:
            self.again.difference_update(execute.requests)
            self.second_tries -= 1
            assert not self.executing
            self.executing[execute.number] = execute
            return
        invariants.check_start(self.scheduler, execute, self._numbered)
        if self.settings.discipline in FIRST_OF_ALL:
            # Leave out models whose requests may be delayed.
            able = [
                place
                for waiting_request in self.waiting.values()
                if waiting_request.model in self.resident - self.patient - self.warming - self.leaving
                and not self.held(waiting_request.model)
                and (place := self._place(waiting_request)) is not None
            ]
            live = self.scheduler._queues.live
            first = min(live[request.id].place for request in requests)
            assert all(first <= place for place in able)
        for request in requests:
            del self.waiting[request.id]
        self.executing[execute.number] = execute
        assert len(self.executing) <= self.settings.depth


def executions(instructions: Iterable[Instruction]) -> list[Execute]:
    return [instruction for instruction in instructions if isinstance(instruction, Execute)]


def ids(requests: Iterable[Request]) -> tuple[int, ...]:
    return tuple(request.id for request in requests)
