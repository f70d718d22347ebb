"""States of a simulated server's models that the scheduler does not know: cold and starting models, and host copies.

The scheduler does not know a cold model. The model's first request starts it. One thread builds models one after the other, in
the order of the runtime's `StartQueue`: it reads the weights that host memory lacks, and compiles the model or loads its
executable. Requests that arrive before the end of the start wait until their deadline, but not longer than `start_timeout_s`.

Weights without a host copy are read from the disk before each load. The read leaves a host copy if there is room. If the copies
would exceed `host_memory_bytes`, the runtime's `choose_copies` chooses the copies to drop.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Any

from rsrv.runtime.host_copies import HostCopy, choose_copies
from rsrv.runtime.start_queue import BuildStep, Demand, StartQueue, Urgency
from rsrv.scheduler.disciplines import DISCIPLINES
from rsrv.scheduler.events import (
    Event,
    Finish,
    ModelAdded,
    ModelRemoved,
    Outcome,
    Program,
    Request,
    RequestsArrived,
)
from rsrv.sim.arrivals import instant
from rsrv.sim.naive import NAIVE
from rsrv.sim.record import Record, StartRecord


class TensorMemory:
    """Tensors in one memory. A tensor is stored only once, even if several models hold it."""

    def __init__(self, history: list[tuple[float, int]]) -> None:
        self._holders: Counter[Any] = Counter()
        #: Pairs of a time and the bytes from that time on.
        self._history = history
        self.nbytes = 0

    def absent_bytes(self, program: Program) -> int:
        return sum(size for key, size in _tensors(program).items() if not self._holders[key])

    def hold(self, program: Program, now: float) -> None:
        self._change(self.absent_bytes(program), now)
        self._holders.update(_tensors(program).keys())

    def release(self, program: Program, now: float) -> None:
        self._holders.subtract(_tensors(program).keys())
        self._change(-self.absent_bytes(program), now)

    def _change(self, nbytes: int, now: float) -> None:
        self.nbytes += nbytes
        if nbytes:
            self._history.append((now, self.nbytes))


def _nothing() -> None:
    """Do nothing. This stands for the work of a start, which only takes virtual time."""


def _tensors(program: Program) -> Mapping[Any, int]:
    return program.tensors or {}


class Catalogue:
    """States of all models of one server. `due` returns the time of the next change, and `step` carries the change out."""

    def __init__(self, record: Record, loading: Callable[[str], bool]) -> None:
        """Create a catalogue of cold models.

        Args:
            record: the record of the device. The catalogue adds starts and the use of host memory to it.
            loading: returns whether a model's weights are being read from the disk or loaded to the device.
        """
        scenario = record.scenario
        self._programs = scenario.programs
        self._lives = scenario.lives
        self._start_timeout_s = scenario.start_timeout_s
        self._read_rate = scenario.read_bytes_per_s or inf
        self._limit = scenario.host_memory_bytes
        self._starts = record.starts
        self._loading = loading
        #: Models that the scheduler knows.
        self.started: set[str] = set()
        self._queue = StartQueue()
        #: Models that wait for their start or are starting.
        self._asked: set[str] = set()
        #: Seconds of each model's shortest start so far. Recorded only if the discipline sheds: a request whose deadline passes
        #: before such a start could end is shed at once.
        self._start_seconds: dict[str, float] = {}
        self._sheds = {**DISCIPLINES, **NAIVE}[scenario.discipline]().sheds
        self._building: StartRecord | None = None
        #: Requests that wait for the start of their model, by model and by id.
        self._waiting: dict[str, dict[int, Request]] = {}
        self._host = TensorMemory(record.host)
        #: Models with a host copy.
        self._copies: set[str] = set()
        #: Models that got or lost a copy since the device last read them, in order. The values are not used.
        self.changed: dict[str, None] = {}
        #: Number of unended requests of each model.
        self._unended: Counter[str] = Counter()
        #: Time when a model's last request ended.
        self._used: dict[str, float] = {}
        #: Heap of future changes: (time, sequence, change). The change is either a model that may fall back, or a request that
        #: ends if it still waits.
        self._times: list[tuple[float, int, str | tuple[Request, Outcome]]] = []
        self._sequence = count()
        #: Time of each model's next check for falling back. Entries of `_times` with another time are stale.
        self._checks: dict[str, float] = {}

    # --- events of the device --------------------------------------------------------------------------

    def add(self, model: str, now: float) -> None:
        """Count a model as started. It gets a host copy if there is room without dropping another copy."""
        self.started.add(model)
        self._used[model] = now
        self._copy(model, now)
        self._watch(model, now)

    def arrive(self, requests: tuple[Request, ...], now: float) -> tuple[Request, ...]:
        """Return the requests whose models have started. The other requests wait in the catalogue."""
        for request in requests:
            self._unended[request.model] += 1
        if all(request.model in self.started for request in requests):
            return requests
        for request in requests:
            if request.model not in self.started:
                self._wait(request, now)
        self._build_next(now)
        return tuple(request for request in requests if request.model in self.started)

    def ended(self, model: str, now: float) -> None:
        """Record the end of a request."""
        self._unended[model] -= 1
        self._used[model] = now
        self._watch(model, now)

    def has_copy(self, model: str) -> bool:
        return model in self._copies

    def read_for_load(self, model: str, now: float) -> int:
        """Return the bytes that must be read from the disk for a load. Make a host copy if there is room."""
        if model in self._copies:
            return 0
        nbytes = self._host.absent_bytes(self._programs[model])
        self._make_room(model, now)
        self._copy(model, now)
        return nbytes

    def read_seconds(self, nbytes: int) -> float:
        return nbytes / self._read_rate

    # --- changes at a later time ------------------------------------------------------------------------

    def due(self) -> float:
        built = inf if self._building is None else self._building.ended
        return min(built, self._times[0][0]) if self._times else built

    def step(self, now: float) -> list[Event | Finish]:
        """Carry out the first change that is due. Return the events for the scheduler, and the requests that end."""
        if self._building is not None and self._building.ended == now:
            return self._started(self._building, now)
        at, _, event = heappop(self._times)
        if isinstance(event, str):
            if self._checks.get(event) != at:
                return []
            del self._checks[event]
            return self._fall_back(event, now)
        request, outcome = event
        if self._waiting.get(request.model, {}).pop(request.id, None) is None:
            return []
        if self._waiting[request.model]:
            self._queue.change(request.model, self._demand(request.model), now)
        else:
            self._drop_start(request.model)
        return [Finish(request.id, outcome)]

    # --- starts ----------------------------------------------------------------------------------------------

    def _wait(self, request: Request, now: float) -> None:
        model, deadline = request.model, inf if request.deadline is None else request.deadline
        self._waiting.setdefault(model, {})[request.id] = request
        if model in self._asked:
            self._queue.change(model, self._demand(model), now)
        else:
            self._asked.add(model)
            self._queue.put(BuildStep(model, model, self._demand(model), _nothing), now)
        timeout = now + self._start_timeout_s
        if now < deadline < now + self._start_seconds.get(model, 0.0):
            self._push(now, (request, Outcome.SHED))
        elif deadline <= timeout:
            self._push(max(now, deadline), (request, Outcome.EXPIRED))
        else:
            self._push(timeout, (request, Outcome.FAILED))

    def _demand(self, model: str) -> Demand:
        """Return the demand of the requests that wait for a model."""
        deadlines = (
            request.deadline for request in self._waiting[model].values() if request.deadline is not None
        )
        return Demand(Urgency.REQUESTED, min(deadlines, default=inf), self._programs[model].weight)

    def _drop_start(self, model: str) -> None:
        """Cancel a model's start, unless it has begun."""
        if self._queue.drop(model):
            self._asked.remove(model)

    def _build_next(self, now: float) -> None:
        if self._building is not None or (step := self._queue.pop(now)) is None:
            return
        model = step.name
        nbytes = self._host.absent_bytes(self._programs[model])
        self._copy(model, now)
        seconds = self._lives[model].start_s + self.read_seconds(nbytes)
        self._building = StartRecord(model, now, instant(now + seconds), nbytes)

    def _started(self, start: StartRecord, now: float) -> list[Event | Finish]:
        self._building = None
        self._asked.remove(start.model)
        self._queue.charge(start.model, now - start.began, now)
        if self._sheds:
            seconds = now - start.began
            self._start_seconds[start.model] = min(seconds, self._start_seconds.get(start.model, inf))
        self._starts.append(start)
        self.started.add(start.model)
        self._used[start.model] = now
        self._watch(start.model, now)
        requests = tuple(self._waiting.pop(start.model, {}).values())
        self._build_next(now)
        added = ModelAdded(self._programs[start.model], on_disk=not self.has_copy(start.model))
        return [added, RequestsArrived(requests)] if requests else [added]

    # --- idleness ---------------------------------------------------------------------------------------------

    def _watch(self, model: str, now: float) -> None:
        """Schedule the check of an idle model for the time of its first idle limit, or for `now` if that time has passed."""
        limit = min(self._lives[model].idle.host, self._lives[model].idle.executable)
        if limit < inf and not self._unended[model]:
            self._schedule_check(model, max(now, instant(self._used[model] + limit)))

    def _schedule_check(self, model: str, at: float) -> None:
        if at < self._checks.get(model, inf):
            self._checks[model] = at
            self._push(at, model)

    def _fall_back(self, model: str, now: float) -> list[Event | Finish]:
        """Drop the host copy or the executable of a model that was idle for longer than the limit."""
        if self._unended[model] or model not in self.started:
            return []  # The end of the model's last request, or its next start, schedules the next check.
        idle, used = self._lives[model].idle, self._used[model]
        host, cold = instant(used + idle.host), instant(used + idle.executable)
        if coming := [at for at in (host, cold) if now < at < inf]:
            self._schedule_check(model, min(coming))
        if host <= now:
            self._drop_copy(model, now)
        if cold > now or self._programs[model].pinned:
            return []
        if self._loading(model):
            self._schedule_check(model, instant(now + idle.executable))
            return []
        self._drop_copy(model, now)
        self.started.remove(model)
        return [ModelRemoved(model)]

    # --- host memory ------------------------------------------------------------------------------------------

    def _copy(self, model: str, now: float) -> None:
        """Make a host copy of a model's weights if there is room."""
        program = self._programs[model]
        if model not in self._copies and self._excess(program) <= 0:
            self._host.hold(program, now)
            self._copies.add(model)
            self.changed[model] = None

    def _make_room(self, model: str, now: float) -> None:
        """Drop copies of models that were last used earlier than `model`, if that makes room for a copy of `model`."""
        program = self._programs[model]
        if (excess := self._excess(program)) > 0:
            copies = [
                HostCopy(copied, _tensors(self._programs[copied]), self._idle_since(copied))
                for copied in self._copies
            ]
            victims, lacking = choose_copies(copies, excess, self._idle_since(model))
            for victim in () if lacking else victims:
                self._drop_copy(victim, now)

    def _excess(self, program: Program) -> int:
        return (
            0 if self._limit is None else self._host.nbytes + self._host.absent_bytes(program) - self._limit
        )

    def _idle_since(self, model: str) -> float:
        return inf if self._unended[model] else self._used.get(model, inf)

    def _drop_copy(self, model: str, now: float) -> None:
        if model in self._copies:
            self._copies.remove(model)
            self.changed[model] = None
            self._host.release(self._programs[model], now)

    def _push(self, t: float, event: str | tuple[Request, Outcome]) -> None:
        heappush(self._times, (instant(t), next(self._sequence), event))
