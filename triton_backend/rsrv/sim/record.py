"""Records of a simulation: of one device, and of several behind a gateway."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from rsrv.placement.contract import WeightAction
from rsrv.scheduler.events import Execute, Instruction, Outcome, Request
from rsrv.sim.scenario import Scenario


class SimulationError(Exception):
    """A bug in the simulator or the scheduler, not in the scenario: time stands still, or requests never end."""


@dataclass(slots=True)
class RequestRecord:
    """One request. Times are seconds from the start; `started` is None if it never reached the device."""

    request: Request
    arrived: float
    #: True if its model's weights were on the device when it arrived.
    hit: bool
    started: float | None = None
    ended: float = inf
    outcome: Outcome | None = None
    #: Index of the device that executed it.
    device: int = 0
    #: True if its model had not started when it arrived.
    cold: bool = False
    #: Length along the model's padded axis. 0: the model has none.
    length: int = 0


@dataclass(frozen=True, slots=True)
class ExecutionRecord:
    """One execution, from its start on the device to its end."""

    execute: Execute
    started: float
    ended: float
    #: Rows of the requests, and the compiled size. With a padded axis, each row counts times its length.
    useful: int
    size: int


@dataclass(frozen=True, slots=True)
class LoadRecord:
    """One load of weights, from its start on the link to its end."""

    model: str
    epoch: int
    started: float
    ended: float
    #: Bytes that no other model had on the device.
    nbytes: int
    #: Bytes that were first read from the disk.
    read_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StartRecord:
    """One start of a cold model, from its turn on the build thread to its end."""

    model: str
    began: float
    ended: float
    #: bytes read from the disk.
    read_bytes: int


@dataclass(frozen=True, slots=True)
class Record:
    """One device. Requests are in order of arrival, request n at index n - 1."""

    scenario: Scenario
    #: the requests of all devices.
    requests: list[RequestRecord]
    executions: list[ExecutionRecord]
    loads: list[LoadRecord]
    #: (model, time)
    evictions: list[tuple[str, float]]
    #: (time, instruction), without the answers
    decisions: list[tuple[float, Instruction]]
    starts: list[StartRecord] = field(default_factory=list)
    #: (time, bytes of weights in host memory from then on)
    host: list[tuple[float, int]] = field(default_factory=list)
    #: (time, bytes of weights on the device from then on)
    device: list[tuple[float, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class FleetRecord:
    """Several devices, and the gateway before them."""

    scenario: Scenario
    requests: Sequence[RequestRecord]
    #: Devices by name, in order. `RequestRecord.device` is the index.
    devices: Mapping[str, Record]
    #: (time, command of the gateway to a device)
    steps: Sequence[tuple[float, WeightAction]]
    #: whole repacks by trigger.
    repacks: Mapping[str, int]
    #: changes of a packed model's home.
    moves: int
    #: Number of events: ends of executions and loads, ticks, commands, and arrivals (those of one instant at a device count
    #: once).
    events: int
