"""Runs the scheduler in virtual time, with a device that executes strictly one after another.

The scheduler is the very object that the runtime uses; the simulation plays everything around it. At one
instant, all arrivals come first, in one event, before the device is given work; then loads that end, then
executions that end, then a tick that is due. The link to the device carries one load at a time, beside
the executions. Evictions, and giving up a load, take no time.
"""

from collections import Counter
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count
from math import inf
from random import Random

from rsrv.runtime.scheduler.disciplines import DISCIPLINES
from rsrv.runtime.scheduler.errors import CallerError, InvariantError
from rsrv.runtime.scheduler.events import (
    AbandonLoad,
    Event,
    EvictWeights,
    Execute,
    ExecutionFinished,
    Finish,
    Instruction,
    LoadAbandoned,
    LoadWeights,
    ModelAdded,
    Outcome,
    Program,
    Request,
    RequestsArrived,
    Tick,
    WeightsLoaded,
)
from rsrv.runtime.scheduler.scheduler import Scheduler
from rsrv.sim.arrivals import Arrival, instant, open_arrivals
from rsrv.sim.naive import NAIVE
from rsrv.sim.scenario import Scenario
from rsrv.sim.schema import Closed

#: pause of a closed-loop client whose request was turned away without a time after which to retry.
_RETRY = 0.001
#: no execution and no pause is shorter: time has to go on.
_SHORTEST = 1e-9
#: a real execution takes at least this share of its cost, however its jitter falls.
_LEAST = 0.1


class SimulationError(Exception):
    """The simulation or the scheduler is broken: time stands still, or requests never end. Not the scenario's fault."""


@dataclass(slots=True)
class Sent:
    """One request; times in seconds from the start. `started` is None if it never reached the device."""

    request: Request
    arrived: float
    #: whether its model's weights were on the device when it arrived.
    hit: bool
    started: float | None = None
    ended: float = inf
    outcome: Outcome | None = None


@dataclass(frozen=True, slots=True)
class Execution:
    """One execution, from when to when it had the device."""

    execute: Execute
    started: float
    ended: float


@dataclass(frozen=True, slots=True)
class Load:
    """One load of weights, from when to when it had the link."""

    model: str
    epoch: int
    started: float
    ended: float
    #: what no other model had on the device.
    nbytes: int


@dataclass(frozen=True, slots=True)
class Record:
    """All that happened. Requests lie in order of arrival, request n at index n - 1."""

    scenario: Scenario
    requests: list[Sent]
    executions: list[Execution]
    loads: list[Load]
    #: (model, when)
    evictions: list[tuple[str, float]]
    #: (when, instruction), without the answers
    decisions: list[tuple[float, Instruction]]


def simulate(scenario: Scenario) -> Record:
    """Runs a scenario until nothing is left to do. Equal scenarios give equal records.

    Raises:
        SimulationError: the simulator or the scheduler is broken.
    """
    try:
        return _Simulation(scenario).run()
    except (CallerError, InvariantError) as error:
        raise SimulationError(f"{type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True)
class _Client:
    """A closed-loop client."""

    source: Closed
    model: str


# What happens at one instant, in order; ticks come last and are not in the heap.
_SEND, _LOADED, _FINISHED = range(3)


class _Simulation:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.record = Record(scenario, [], [], [], [], [])
        self.scheduler = Scheduler(scenario.settings, disciplines={**DISCIPLINES, **NAIVE})
        self.now = 0.0
        #: what is going to happen: (when, kind, sequence, what).
        self.heap: list[tuple[float, int, int, _Client | Event]] = []
        self.sequence = count()
        self.arrivals = open_arrivals(scenario)
        self.next_arrival = next(self.arrivals, None)
        #: models whose weights are on the device; and, of the tensors that are there or on their way, for how many.
        self.resident: set[str] = set()
        self.tensors: Counter[str] = Counter()
        #: bytes that the load which comes next has to move, if others are evicted for it.
        self.claimed: int | None = None
        #: request -> the client that waits for its end.
        self.clients: dict[int, _Client] = {}
        #: until when the device and the link are taken.
        self.device_free = 0.0
        self.link_free = 0.0
        self.random = {
            name: Random(f"{scenario.seed}/cost/{name}") for name, jitter in scenario.jitter.items() if jitter
        }

    def run(self) -> Record:
        self._add_models()
        for source in self.scenario.closed:
            for model in source.models or ():
                for _ in range(source.clients):
                    self._push(0.0, _SEND, _Client(source, model))
        # At one instant each model may load, execute and tick a few times, and clients may send once each.
        patience = 10_000 + 100 * len(self.scenario.programs)
        events = 0
        while (now := self._next_instant()) < inf:
            events = events + 1 if now == self.now else 0
            if events > patience:
                raise SimulationError(f"time stands still at t={now}: {events} events at this instant")
            self.now = now
            self._tell(self._next_event())
        left = sum(sent.outcome is None for sent in self.record.requests)
        if left:
            raise SimulationError(f"{left} requests never end: nothing happens any more after t={self.now}")
        return self.record

    def _add_models(self) -> None:
        room = inf if (budget := self.scenario.settings.weight_budget_bytes) is None else budget
        for program in self.scenario.programs.values():
            resident = self.scenario.warm and self._absent_bytes(program) <= room
            if resident:
                room -= self._absent_bytes(program)
                self._hold(program)
                self.resident.add(program.model)
            self._tell(ModelAdded(program, resident))

    # --- what happens next ---------------------------------------------------------------------------------

    def _next_instant(self) -> float:
        t = self.heap[0][0] if self.heap else inf
        if self.next_arrival is not None and self.next_arrival.t < t:
            t = self.next_arrival.t
        wakeup = self.scheduler.next_wakeup()
        if wakeup is not None and wakeup < t:
            # Never before it is due, or the tick would do nothing.
            t = min(t, max(self.now, _not_before(wakeup)))
        return t

    def _next_event(self) -> Event:
        sent = self._arrived()
        if sent:
            return RequestsArrived(sent)
        if self.heap and self.heap[0][0] == self.now:
            event = heappop(self.heap)[3]
            assert not isinstance(event, _Client)
            return event
        return Tick()

    def _arrived(self) -> tuple[Request, ...]:
        """All requests of this instant."""
        now, sent, requests = self.now, [], self.record.requests
        arrival = self.next_arrival
        while arrival is not None and arrival.t == now:
            sent.append(self._send(arrival))
            arrival = next(self.arrivals, None)
        self.next_arrival = arrival
        while self.heap and self.heap[0][0] == now and self.heap[0][1] == _SEND:
            client = heappop(self.heap)[3]
            assert isinstance(client, _Client)
            source = client.source
            self.clients[len(requests) + 1] = client
            sent.append(
                self._send(Arrival(now, client.model, source.rows, source.deadline_s, source.priority))
            )
        return tuple(sent)

    def _send(self, arrival: Arrival) -> Request:
        t, model, rows, deadline_s, priority, variant, committed = arrival
        deadline = None if deadline_s is None else instant(t + deadline_s)
        number = len(self.record.requests) + 1
        run = number if committed else 0
        request = Request(number, model, variant, rows, deadline, priority, run)
        self.record.requests.append(Sent(request, t, model in self.resident))
        return request

    def _push(self, t: float, kind: int, what: _Client | Event) -> None:
        heappush(self.heap, (t, kind, next(self.sequence), what))

    # --- what the scheduler wants --------------------------------------------------------------------------

    def _tell(self, event: Event) -> None:
        if isinstance(event, WeightsLoaded):
            self.resident.add(event.model)
        for instruction in self.scheduler.handle(event, self.now):
            if isinstance(instruction, Finish):
                self._end(instruction)
                continue
            self.record.decisions.append((self.now, instruction))
            match instruction:
                case Execute():
                    self._execute(instruction)
                case LoadWeights():
                    self._load(instruction)
                case AbandonLoad():
                    self._abandon(instruction)
                case EvictWeights():
                    self._evict(instruction)

    def _end(self, finish: Finish) -> None:
        sent = self.record.requests[finish.request - 1]
        if sent.outcome is not None:
            raise SimulationError(f"request {finish.request} ended twice: {sent.outcome}, {finish.outcome}")
        sent.outcome, sent.ended = finish.outcome, self.now
        if finish.outcome is not Outcome.ANSWERED:
            self.record.decisions.append((self.now, finish))
        client = self.clients.pop(finish.request, None)
        if client is None:
            return
        pause = client.source.think_s
        if sent.arrived == self.now:
            pause = max(pause, finish.retry_after or _RETRY, _SHORTEST)
        again = instant(self.now + pause)
        if again <= (self.scenario.duration or inf):
            self._push(again, _SEND, client)

    def _execute(self, execute: Execute) -> None:
        name = execute.model
        seconds = self.scenario.programs[name].costs[execute.variant, execute.size]
        if name in self.random:
            seconds *= max(_LEAST, self.random[name].gauss(1.0, self.scenario.jitter[name]))
        seconds = max(instant(seconds), _SHORTEST)
        start = max(self.now, self.device_free)
        self.device_free = end = instant(start + seconds)
        self.record.executions.append(Execution(execute, start, end))
        for request in execute.requests:
            self.record.requests[request - 1].started = start
        self._push(end, _FINISHED, ExecutionFinished(execute.dispatch, seconds))

    def _load(self, load: LoadWeights) -> None:
        program = self.scenario.programs[load.model]
        nbytes = self._claim(load.model)
        self.claimed = None
        share = nbytes / program.weight_bytes if program.weight_bytes else 1.0
        seconds = instant(program.load_seconds * share)
        start = max(self.now, self.link_free)
        self.link_free = end = instant(start + seconds)
        self.record.loads.append(Load(load.model, load.epoch, start, end, nbytes))
        self._push(end, _LOADED, WeightsLoaded(load.model, load.epoch, seconds))

    def _evict(self, evict: EvictWeights) -> None:
        if evict.heir is not None:
            self._claim(evict.heir)
        self.record.evictions.append((evict.model, self.now))
        self.resident.remove(evict.model)
        self._release(evict.model)

    def _abandon(self, abandon: AbandonLoad) -> None:
        """What the heap says of its end is of no use to the scheduler any more."""
        last = self.record.loads[-1]
        self.record.loads[-1] = replace(last, ended=self.now)
        self.link_free = self.now
        self._release(abandon.model)
        self._push(self.now, _LOADED, LoadAbandoned(abandon.model, abandon.epoch))

    # --- what is on the device -----------------------------------------------------------------------------

    def _absent_bytes(self, program: Program) -> int:
        return sum(size for key, size in (program.tensors or {}).items() if not self.tensors[key])

    def _claim(self, model: str) -> int:
        """Hold what a model needs, before others are evicted for it; returns the bytes that its load has to move."""
        if self.claimed is None:
            program = self.scenario.programs[model]
            self.claimed = self._absent_bytes(program)
            self._hold(program)
        return self.claimed

    def _hold(self, program: Program) -> None:
        self.tensors.update(program.tensors or ())

    def _release(self, model: str) -> None:
        self.tensors.subtract(self.scenario.programs[model].tensors or ())


def _not_before(t: float) -> float:
    """The first instant that is not before `t`."""
    rounded = instant(t)
    return rounded if rounded >= t else instant(rounded + 1e-9)
