"""Simulation of one scenario with several idle limits, or with several types of weights, and a table of latency and memory."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from rsrv.sim.fleet import Column
from rsrv.sim.metrics import summarize
from rsrv.sim.plan import NARROWER, with_narrow_weights
from rsrv.sim.scenario import Scenario, ScenarioError
from rsrv.sim.simulate import simulate
from rsrv.text import amount, duration, percent


class IdleSweep(NamedTuple):
    """Idle limits of one tier (device, host or executable). `limits` maps the text of a limit, such as 10m, to its seconds."""

    tier: str
    limits: Mapping[str, float]


#: Types of weights to compare. The value is the factor by which f32 weights become smaller.
WEIGHTS: Mapping[str, int] = {"f32": 1, **NARROWER}

_COLUMNS = (
    Column("in time", lambda total: percent(total["goodput_ratio"])),
    Column("p50", lambda total: duration(total["latency_p50_s"])),
    Column("p99", lambda total: duration(total["latency_p99_s"])),
    Column("starts", lambda total: str(total["starts"])),
    Column("waited for one", lambda total: str(total["cold"])),
    Column("cold answer", lambda total: duration(total["cold_p50_s"])),
    Column("read", lambda total: amount(total["read_bytes"])),
    Column("host memory", lambda total: amount(total["host_bytes_mean"])),
    Column("its peak", lambda total: amount(total["host_bytes_peak"])),
    Column("device memory", lambda total: amount(total["device_bytes_mean"])),
)


def run_sweep(scenario: Scenario, sweep: IdleSweep) -> dict[str, dict[str, Any]]:
    """Return the metrics of a scenario for each limit. The limit replaces the models' own limits.

    Raises:
        ScenarioError: the scenario has several devices.
        SimulationError: the simulator or the scheduler is broken.
    """
    _check_one_device(scenario)
    return {text: summarize(simulate(_limited(scenario, sweep.tier, s))) for text, s in sweep.limits.items()}


def _limited(scenario: Scenario, tier: str, seconds: float) -> Scenario:
    lives = {
        name: life._replace(idle=life.idle._replace(**{tier: seconds}))
        for name, life in scenario.lives.items()
    }
    programs = {
        name: replace(program, idle_seconds=lives[name].idle.device)
        for name, program in scenario.programs.items()
    }
    return replace(scenario, lives=lives, programs=programs)


def run_weights(scenario: Scenario, kinds: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the metrics of a scenario for each type of weights. The scenario's weights count as f32.

    Raises:
        ScenarioError: the scenario has several devices.
        SimulationError: the simulator or the scheduler is broken.
    """
    _check_one_device(scenario)
    return {kind: summarize(simulate(with_narrow_weights(scenario, WEIGHTS[kind]))) for kind in kinds}


def _check_one_device(scenario: Scenario) -> None:
    if scenario.gateway is not None:
        raise ScenarioError("--idle and --weights simulate one device: leave out `devices` and `gateway`")


def sweep_rows(title: str, runs: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return a header, and a row for each run. `title` is the title of the column with the runs' names."""
    head = (title, *(column.title for column in _COLUMNS))
    return [
        head,
        *((text, *(column.cell(run["total"]) for column in _COLUMNS)) for text, run in runs.items()),
    ]
