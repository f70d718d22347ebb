"""What is written down of a simulation: of one device, and of several behind a gateway."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from rsrv.placement.contract import WeightAction
from rsrv.scheduler.events import Execute, Instruction, Outcome, Request
from rsrv.sim.scenario import Scenario


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
    #: index of the device that it went to.
    device: int = 0


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
    """All that happened on one device. Requests lie in order of arrival, request n at index n - 1."""

    scenario: Scenario
    #: of several devices, those of all.
    requests: list[Sent]
    executions: list[Execution]
    loads: list[Load]
    #: (model, when)
    evictions: list[tuple[str, float]]
    #: (when, instruction), without the answers
    decisions: list[tuple[float, Instruction]]


@dataclass(frozen=True, slots=True)
class FleetRecord:
    """All that happened on several devices, and what the gateway did."""

    scenario: Scenario
    requests: Sequence[Sent]
    #: by name, in order; `Sent.device` is the place in it.
    devices: Mapping[str, Record]
    #: (when, what the gateway asked of a device)
    steps: Sequence[tuple[float, WeightAction]]
    #: whole repacks by what asked for them.
    repacks: Mapping[str, int]
    #: times that a packed model was given another home.
    moves: int
    #: of the simulation: arrivals of an instant at a device, executions and loads that ended, ticks and steps.
    events: int
