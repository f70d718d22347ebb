"""Records of a simulation, for one device and for several devices behind a gateway."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from rsrv.placement.contract import WeightAction
from rsrv.scheduler.events import Execute, Instruction, Outcome, Request
from rsrv.sim.scenario import Scenario


class SimulationError(Exception):
    """The simulator or the scheduler is faulty, not the scenario: for example, time stands still, or requests never end."""


@dataclass(slots=True)
class RequestRecord:
    """One request. Times are seconds from the start. `started` is None if the request never reached the device."""

    request: Request
    arrived: float
    #: True if the model's weights were on the device when the request arrived.
    hit: bool
    started: float | None = None
    ended: float = inf
    outcome: Outcome | None = None
    #: Index of the device that executed the request.
    device: int = 0
    #: True if the model had not started when the request arrived.
    cold: bool = False
    #: Length along the model's padded axis, or 0 if the model has no padded axis.
    length: int = 0


@dataclass(frozen=True, slots=True)
class ExecutionRecord:
    """One execution, from its start on the device to its end."""

    execute: Execute
    started: float
    ended: float
    #: Number of rows of the requests. With a padded axis, each row counts as often as its length.
    useful: int
    #: Number of rows of the compiled size, counted in the same way.
    size: int


@dataclass(frozen=True, slots=True)
class LoadRecord:
    """One load of weights, from its start on the link to its end."""

    model: str
    epoch: int
    started: float
    ended: float
    #: Bytes of the tensors that were not yet on the device.
    nbytes: int
    #: Bytes that were first read from the disk.
    read_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StartRecord:
    """One start of a cold model, from the moment when the build thread begins with it to its end."""

    model: str
    began: float
    ended: float
    #: Bytes that were read from the disk.
    read_bytes: int


@dataclass(frozen=True, slots=True)
class Record:
    """One device. Requests are in the order of arrival; request n has the index n - 1."""

    scenario: Scenario
    #: Requests of all devices.
    requests: list[RequestRecord]
    executions: list[ExecutionRecord]
    loads: list[LoadRecord]
    #: Pairs (model, time).
    evictions: list[tuple[str, float]]
    #: Pairs (time, instruction), without the answers.
    decisions: list[tuple[float, Instruction]]
    starts: list[StartRecord] = field(default_factory=list)
    #: Pairs (time, bytes of weights in host memory from that time on).
    host: list[tuple[float, int]] = field(default_factory=list)
    #: Pairs (time, bytes of weights on the device from that time on).
    device: list[tuple[float, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class FleetRecord:
    """Several devices, and the gateway in front of them."""

    scenario: Scenario
    requests: Sequence[RequestRecord]
    #: Devices by name, in the order of `RequestRecord.device`.
    devices: Mapping[str, Record]
    #: Pairs (time, command of the gateway to a device).
    steps: Sequence[tuple[float, WeightAction]]
    #: Numbers of whole repacks by trigger.
    repacks: Mapping[str, int]
    #: Number of changes of a packed model's home.
    moves: int
    #: Number of events: ends of executions and loads, ticks, commands and arrivals. All arrivals at one device at one instant are
    #: one event.
    events: int
