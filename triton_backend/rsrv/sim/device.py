"""One simulated device with its scheduler, its link and its disk.

The scheduler is the runtime's own. The device executes one batch at a time. Concurrently, the link carries one load at a time,
and the disk reads the weights of one model without a host copy. Evicting weights and abandoning a load or a read take no time.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count
from math import inf
from random import Random

from rsrv.scheduler.disciplines import DISCIPLINES
from rsrv.scheduler.events import (
    AbandonLoad,
    CopyChanged,
    Event,
    EvictWeights,
    Execute,
    ExecutionFinished,
    Finish,
    LoadAbandoned,
    LoadWeights,
    ModelAdded,
    Outcome,
    Program,
    ReadWeights,
    Request,
    RequestsArrived,
    Tick,
    WeightsLoaded,
    WeightsRead,
)
from rsrv.scheduler.scheduler import Scheduler
from rsrv.sim.arrivals import instant
from rsrv.sim.catalogue import Catalogue, TensorMemory
from rsrv.sim.naive import NAIVE
from rsrv.sim.record import ExecutionRecord, LoadRecord, Record, RequestRecord, SimulationError
from rsrv.sim.scenario import Scenario

#: Shortest execution or pause in seconds, so that time always advances.
SHORTEST = 1e-9
#: Jitter shortens an execution at most to this share of its cost.
_MIN_COST_SHARE = 0.1

# Kinds of events, in their order at one instant. Ticks come last, and are not in the heap.
_LOADED, _FINISHED = range(2)


class SimulatedDevice:
    """A device in virtual time. `due` returns the time of its next event, and `step` carries the event out."""

    def __init__(
        self,
        scenario: Scenario,
        requests: list[RequestRecord],
        random: Mapping[str, Random],
        ended: Callable[[Finish, float], None],
    ) -> None:
        """Create an idle device.

        Args:
            scenario: the whole scenario.
            requests: the requests of all devices.
            random: the source of the jitter of executions, by model.
            ended: called at the end of each request.
        """
        self.scenario = scenario
        self.record = Record(scenario, requests, [], [], [], [])
        self.scheduler = Scheduler(scenario.settings, disciplines={**DISCIPLINES, **NAIVE})
        self._random = random
        self._ended = ended
        #: Models whose weights are on the device.
        self.resident: set[str] = set()
        #: The current load to the device, or None.
        self.loading: LoadWeights | None = None
        #: The current read from the disk, or None.
        self.reading: ReadWeights | None = None
        self.catalogue = Catalogue(
            self.record,
            lambda model: any(load and load.model == model for load in (self.loading, self.reading)),
        )
        #: Heap of future events: (time, kind, sequence, event).
        self._heap: list[tuple[float, int, int, Event]] = []
        self._sequence = count()
        #: Tensors that are on the device or loading.
        self._tensors = TensorMemory(self.record.device)
        #: Bytes that the next load must move. Set when weights are evicted for this load, and None before.
        self._claimed: int | None = None
        #: Bytes that were read from the disk for the next load of each model.
        self._read_bytes: dict[str, int] = {}
        #: Time until which the device is busy.
        self._device_free = 0.0
        #: Time until which the link is busy.
        self._link_free = 0.0
        budget = scenario.settings.weight_budget_bytes
        #: Bytes of the budget that are left while models are put onto the device at the start.
        self._room = inf if budget is None else budget

    def start(self, program: Program) -> None:
        """Add a model at the start, unless it is lazy. In a warm scenario, the model's weights are on the device if they fit."""
        if self.scenario.lives[program.model].lazy:
            return
        nbytes = self._tensors.absent_bytes(program)
        resident = self.scenario.warm and nbytes <= self._room
        if resident:
            self._room -= nbytes
            self._tensors.hold(program, 0.0)
            self.resident.add(program.model)
        self._add(program, resident, 0.0)

    def meet(self, model: str, now: float) -> None:
        """Add a model to the scheduler unless the scheduler knows it.

        This happens only at the model's first request or command on this device, so that unused models cost nothing.
        """
        if model not in self.catalogue.started:
            self._add(self.scenario.programs[model], False, now)

    def answers_in_s(self, model: str, now: float) -> float:
        """Return the seconds after which the device would answer a batch that arrives now.

        This is the estimate that a stub makes from the board of a real runtime.
        """
        program = self.scenario.programs[model]
        known = model in self.catalogue.started
        load_s = self.scheduler.load_seconds(model) if known else program.load_seconds
        return (self.scheduler.seconds_until_idle(now) or 0.0) + load_s + min(program.costs.values())

    def due(self, now: float) -> float:
        """Return the time of the next event, which is not before `now`, or inf if there is none."""
        t = min(self._heap[0][0] if self._heap else inf, self.catalogue.due())
        wakeup = self.scheduler.next_wakeup()
        if wakeup is not None and wakeup < t:
            # Do not round down: the scheduler does nothing in a tick before its wakeup.
            t = min(t, max(now, _not_before(wakeup)))
        return t

    def step(self, now: float) -> None:
        """Carry out the first event that is due."""
        if self._heap and self._heap[0][0] == now:
            self.tell(heappop(self._heap)[3], now)
        elif self.catalogue.due() == now:
            for change in self.catalogue.step(now):
                if isinstance(change, Finish):
                    self._end(change, now)
                else:
                    self.tell(change, now)
            self._tell_copies(now)
        else:
            self.tell(Tick(), now)

    def arrive(self, requests: tuple[Request, ...], now: float) -> None:
        """Give the scheduler the requests whose models have started. The other requests wait for a start."""
        if known := self.catalogue.arrive(requests, now):
            self.tell(RequestsArrived(known), now)

    def tell(self, event: Event, now: float) -> None:
        """Give the scheduler an event, and carry out its instructions."""
        if isinstance(event, WeightsLoaded) and self.loading and self.loading.epoch == event.epoch:
            self.resident.add(event.model)
            self.loading = None
            if not self.catalogue.has_copy(event.model):
                self._push(now, _LOADED, CopyChanged(event.model, False))
        if isinstance(event, WeightsRead) and self.reading and self.reading.epoch == event.epoch:
            self.reading = None
        for instruction in self.scheduler.handle(event, now):
            if isinstance(instruction, Finish):
                self._end(instruction, now)
                continue
            self.record.decisions.append((now, instruction))
            match instruction:
                case Execute():
                    self._execute(instruction, now)
                case ReadWeights():
                    self._read(instruction, now)
                case LoadWeights():
                    self._load(instruction, now)
                case AbandonLoad():
                    self._abandon(instruction, now)
                case EvictWeights():
                    self._evict(instruction, now)

    # --- instructions --------------------------------------------------------------------------

    def _add(self, program: Program, resident: bool, now: float) -> None:
        self.catalogue.add(program.model, now)
        on_disk = not self.catalogue.has_copy(program.model)
        self.tell(ModelAdded(program, resident, on_disk=on_disk), now)

    def _push(self, t: float, kind: int, event: Event) -> None:
        heappush(self._heap, (t, kind, next(self._sequence), event))

    def _end(self, finish: Finish, now: float) -> None:
        sent = self.record.requests[finish.request - 1]
        if sent.outcome is not None:
            raise SimulationError(f"request {finish.request} ended twice: {sent.outcome}, {finish.outcome}")
        answered = finish.outcome is Outcome.ANSWERED
        sent.outcome, sent.ended = finish.outcome, instant(now + self.scenario.front_s) if answered else now
        if not answered:
            self.record.decisions.append((now, finish))
        self.catalogue.ended(sent.request.model, now)
        self._ended(finish, sent.ended)

    def _execute(self, execute: Execute, now: float) -> None:
        name = execute.model
        seconds = self.scenario.programs[name].costs[execute.variant, execute.size]
        if name in self._random:
            seconds *= max(_MIN_COST_SHARE, self._random[name].gauss(1.0, self.scenario.jitter[name]))
        seconds = max(instant(seconds), SHORTEST)
        start = max(now, self._device_free)
        self._device_free = end = instant(start + seconds)
        lengths, useful, size = self.scenario.lengths.get(name), execute.rows, execute.size
        sent = [self.record.requests[request - 1] for request in execute.requests]
        for request in sent:
            request.started = start
        if lengths is not None:
            size *= lengths[execute.variant]
            useful = sum(
                request.request.rows * (request.length or lengths[request.request.variant])
                for request in sent
            )
        self.record.executions.append(ExecutionRecord(execute, start, end, useful, size))
        self._push(end, _FINISHED, ExecutionFinished(execute.number, seconds))

    def _read(self, read: ReadWeights, now: float) -> None:
        self._read_bytes[read.model] = nbytes = self.catalogue.read_for_load(read.model, now)
        seconds = instant(self.catalogue.read_seconds(nbytes))
        self.reading = read
        self._push(instant(now + seconds), _LOADED, WeightsRead(read.model, read.epoch, seconds))
        self._tell_copies(now)

    def _tell_copies(self, now: float) -> None:
        """Schedule reports to the scheduler about host copies that were made or dropped. They follow the current event."""
        changed, self.catalogue.changed = self.catalogue.changed, {}
        for model in changed:
            self._push(now, _LOADED, CopyChanged(model, self.catalogue.has_copy(model)))

    def _load(self, load: LoadWeights, now: float) -> None:
        program = self.scenario.programs[load.model]
        nbytes = self._claim(load.model, now)
        self._claimed = None
        read_bytes = self._read_bytes.pop(load.model, 0)
        share = nbytes / program.weight_bytes if program.weight_bytes else 1.0
        seconds = instant(program.load_seconds * share)
        start = max(now, self._link_free)
        self._link_free = end = instant(start + seconds)
        self.record.loads.append(LoadRecord(load.model, load.epoch, start, end, nbytes, read_bytes))
        self.loading = load
        self._push(end, _LOADED, WeightsLoaded(load.model, load.epoch, seconds))

    def _evict(self, evict: EvictWeights, now: float) -> None:
        if evict.loading_for is not None:
            self._claim(evict.loading_for, now)
        self.record.evictions.append((evict.model, now))
        self.resident.remove(evict.model)
        self._tensors.release(self.scenario.programs[evict.model], now)

    def _abandon(self, abandon: AbandonLoad, now: float) -> None:
        """End the load or the read now. The heap still has the event of its regular end, which the scheduler ignores."""
        self._push(now, _LOADED, LoadAbandoned(abandon.model, abandon.epoch))
        if self.reading is not None and self.reading.epoch == abandon.epoch:
            self.reading = None
            return
        last = self.record.loads[-1]
        self.record.loads[-1] = replace(last, ended=now)
        self._link_free = now
        self.loading = None
        self._tensors.release(self.scenario.programs[abandon.model], now)

    def _claim(self, model: str, now: float) -> int:
        """Return the bytes that the next load must move.

        From now on, the model's tensors count as held, so that evictions for this load do not drop tensors that the model shares
        with the evicted models.
        """
        if self._claimed is None:
            program = self.scenario.programs[model]
            self._claimed = self._tensors.absent_bytes(program)
            self._tensors.hold(program, now)
        return self._claimed


def _not_before(t: float) -> float:
    """Return the first instant that is not before `t`."""
    rounded = instant(t)
    return rounded if rounded >= t else instant(rounded + 1e-9)
