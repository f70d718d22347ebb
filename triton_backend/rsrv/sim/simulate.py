"""The simulation: the scheduler in virtual time, on one device, or on several devices behind a gateway.

The events of one instant are carried out in this order:

1. the gateway's round of probes, if one is due;
2. the arrivals of requests, as one event for each device;
3. for one device after the other: ends of reads and loads, ends of executions, changes of the catalogue (`catalogue`), and a tick
   if one is due.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from math import inf
from random import Random
from typing import TypeVar

from rsrv.scheduler.events import CallerError, Event, Finish, InvariantError, Request
from rsrv.sim.arrivals import Arrival, instant, open_arrivals
from rsrv.sim.device import SHORTEST, SimulatedDevice
from rsrv.sim.gateway import SimulatedGateway
from rsrv.sim.record import FleetRecord, Record, RequestRecord, SimulationError
from rsrv.sim.scenario import Scenario
from rsrv.sim.schema import ClosedLoop

#: If a refusal names no time, a closed-loop client retries after this many seconds.
_RETRY_S = 0.001

_T = TypeVar("_T")


def simulate(scenario: Scenario) -> Record:
    """Run a scenario of one device, without a gateway, to its end. Equal scenarios give equal records.

    Raises:
        SimulationError: the simulator or the scheduler is broken.
    """
    return simulate_devices(scenario)[0]


def simulate_fleet(scenario: Scenario) -> FleetRecord:
    """Run a scenario with a gateway to its end.

    Raises:
        SimulationError: the simulator, the scheduler or the gateway is broken.
    """
    return _checked(lambda: _Simulation(scenario).run().fleet())


def simulate_devices(scenario: Scenario) -> Sequence[Record]:
    """Run a scenario to its end, and return the records of its devices. Each record has all requests. Raises SimulationError."""
    return _checked(lambda: [device.record for device in _Simulation(scenario).run().devices])


def _checked(run: Callable[[], _T]) -> _T:
    try:
        return run()
    except (CallerError, InvariantError) as error:
        raise SimulationError(f"{type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True)
class _SimulatedClient:
    """A closed-loop client."""

    source: ClosedLoop
    model: str


class _Simulation:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.requests: list[RequestRecord] = []
        # Each model has one random stream, which does not depend on the device that executes the model.
        random = {
            name: Random(f"{scenario.seed}/cost/{name}") for name, jitter in scenario.jitter.items() if jitter
        }
        self.devices = [
            SimulatedDevice(scenario, self.requests, random, self._ended) for _ in range(scenario.devices)
        ]
        self.gateway = (
            None if scenario.gateway is None else SimulatedGateway(scenario, scenario.gateway, self.devices)
        )
        self.now = 0.0
        #: Pairs (time of the device's next event, index of the device). A pair is stale if its time is not in `due`.
        self.heap: list[tuple[float, int]] = []
        #: Time of the next event of each device.
        self.due = [inf] * len(self.devices)
        self.arrivals = open_arrivals(scenario)
        self.next_arrival = next(self.arrivals, None)
        #: Heap of the clients that will send a request: (time of the request, sequence, client).
        self.sends: list[tuple[float, int, _SimulatedClient]] = []
        self.sequence = count()
        #: The client that waits for the end of each request.
        self.clients: dict[int, _SimulatedClient] = {}
        self.events = 0

    def run(self) -> "_Simulation":
        for index, program in enumerate(self.scenario.programs.values()):
            # Pinned weights are on every device at the start, other weights on only one device.
            home = index % len(self.devices)
            for device in self.devices if program.pinned else self.devices[home : home + 1]:
                device.start(program)
        for index in range(len(self.devices)):
            self._schedule(index)
        for source in self.scenario.closed:
            for model in source.models or ():
                for _ in range(source.clients):
                    self._send_at(0.0, _SimulatedClient(source, model))
        # At one instant, each model may load, execute and tick a few times, and each client may send one request.
        patience = (10_000 + 100 * len(self.scenario.programs)) * len(self.devices)
        still = 0
        while (now := self._next_instant()) < inf:
            still = still + 1 if now == self.now else 0
            if still > patience:
                raise SimulationError(f"time stands still at t={now}: {still} events at this instant")
            self.now = now
            self._happen()
        left = sum(sent.outcome is None for sent in self.requests)
        if left:
            raise SimulationError(f"{left} requests never end: no event follows t={self.now}")
        return self

    def fleet(self) -> FleetRecord:
        gateway = self.gateway
        assert gateway is not None
        records = {name: device.record for name, device in zip(gateway.names, self.devices, strict=True)}
        return FleetRecord(
            self.scenario,
            self.requests,
            records,
            gateway.steps,
            gateway.repacks,
            gateway.moves,
            self.events,
        )

    # --- order of events -----------------------------------------------------------------------------------

    def _next_instant(self) -> float:
        heap, due = self.heap, self.due
        while heap and due[heap[0][1]] != heap[0][0]:
            heappop(heap)
        t = heap[0][0] if heap else inf
        t = min(t, self._next_sent())
        if self.gateway is not None and t < inf:
            # The gateway probes the devices only while further events follow.
            t = min(t, self.gateway.next_round)
        return t

    def _next_sent(self) -> float:
        t = inf if self.next_arrival is None else self.next_arrival.t
        return min(t, self.sends[0][0]) if self.sends else t

    def _happen(self) -> None:
        """Carry out the first event of this instant."""
        if self.gateway is not None and self.gateway.next_round == self.now:
            for index, event in self.gateway.round(self.now):
                self._tell(index, event)
        elif self._next_sent() == self.now:
            self._arrive()
        else:
            _, index = heappop(self.heap)
            self.events += 1
            self.devices[index].step(self.now)
            self._schedule(index)

    def _schedule(self, index: int) -> None:
        due = self.devices[index].due(self.now)
        self.due[index] = due
        if due < inf:
            heappush(self.heap, (due, index))

    def _tell(self, index: int, event: Event) -> None:
        self.events += 1
        self.devices[index].tell(event, self.now)
        self._schedule(index)

    # --- requests --------------------------------------------------------------------------------------------

    def _arrive(self) -> None:
        """Send all requests of this instant."""
        now = self.now
        sent: dict[int, list[Request]] = {}
        arrival = self.next_arrival
        while arrival is not None and arrival.t == now:
            self._send(arrival, sent)
            arrival = next(self.arrivals, None)
        self.next_arrival = arrival
        while self.sends and self.sends[0][0] == now:
            client = heappop(self.sends)[2]
            source = client.source
            self.clients[len(self.requests) + 1] = client
            self._send(Arrival(now, client.model, source.rows, source.deadline_s, source.priority), sent)
        for index, requests in sent.items():
            self.events += 1
            self.devices[index].arrive(tuple(requests), now)
            self._schedule(index)

    def _send(self, arrival: Arrival, sent: dict[int, list[Request]]) -> None:
        t, model, rows, deadline_s, priority, variant, committed, length = arrival
        deadline = None if deadline_s is None else instant(t + deadline_s)
        number = len(self.requests) + 1
        run = number if committed else 0
        request = Request(number, model, variant, rows, deadline, priority, run)
        index = 0 if self.gateway is None else self.gateway.choose(request, t)
        device = self.devices[index]
        if self.gateway is not None:
            device.meet(model, t)
        cold = model not in device.catalogue.started
        hit = model in device.resident
        self.requests.append(RequestRecord(request, t, hit, device=index, cold=cold, length=length))
        sent.setdefault(index, []).append(request)

    def _ended(self, finish: Finish, now: float) -> None:
        if self.gateway is not None:
            self.gateway.ended(finish.request)
        client = self.clients.pop(finish.request, None)
        if client is None:
            return
        pause = client.source.think_s
        if self.requests[finish.request - 1].arrived == now:
            pause = max(pause, finish.retry_after or _RETRY_S, SHORTEST)
        again = instant(now + pause)
        if again <= (self.scenario.duration or inf):
            self._send_at(again, client)

    def _send_at(self, t: float, client: _SimulatedClient) -> None:
        heappush(self.sends, (t, next(self.sequence), client))
