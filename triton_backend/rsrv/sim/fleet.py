"""Metrics of a simulation of several devices, and their comparison for several modes of the gateway.

The terms, the window and the rounding are as in `metrics`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, get_args

from rsrv.settings_fleet import GatewayMode
from rsrv.sim.record import FleetRecord, Record
from rsrv.sim.scenario import Scenario
from rsrv.sim.tally import Tally, in_time, ratio, rounded
from rsrv.text import amount, duration, percent, rate

MODES: tuple[GatewayMode, ...] = get_args(GatewayMode)


def with_mode(scenario: Scenario, mode: GatewayMode) -> Scenario:
    """Return the scenario with another mode of its gateway. The scenario must have a gateway."""
    assert scenario.gateway is not None
    return replace(scenario, gateway=scenario.gateway.model_copy(update={"mode": mode}))


def summarize_fleet(record: FleetRecord) -> dict[str, Any]:
    """Return the metrics of a record: mode, discipline, seed, duration, `total`, and `devices` with the metrics by device."""
    scenario = record.scenario
    assert scenario.gateway is not None
    total = Tally()
    for sent in record.requests:
        total.add(sent)
    makespan = max((sent.ended for sent in record.requests), default=0.0)
    window = makespan if scenario.duration is None else scenario.duration
    devices = {name: _device(device_record, window) for name, device_record in record.devices.items()}
    sums = {key: sum(figures[key] for figures in devices.values()) for key in _SUMS}
    dispatches, whole = sums["dispatches"], window * len(devices)
    dated = [sent for sent in record.requests if sent.request.deadline is not None]
    good = sum(in_time(sent, inf) for sent in record.requests)
    totals = {
        **total.ended(),
        "arrived": total.arrived,
        "hit_ratio": ratio(total.hits, total.arrived),
        "window_s": window,
        "makespan_s": makespan,
        "goodput": ratio(sum(in_time(sent, window) for sent in record.requests), window),
        "goodput_ratio": ratio(good, total.arrived),
        "missed": sum(not in_time(sent, inf) for sent in dated),
        **total.times(),
        **sums,
        "utilisation": ratio(sums["device_seconds"], whole),
        "imbalance": _imbalance([figures["device_seconds"] for figures in devices.values()]),
        "rows": ratio(sums["useful_rows"], dispatches),
        "fill": ratio(
            sum(_fill(device_record, window) for device_record in record.devices.values()), dispatches
        ),
        "link_utilisation": ratio(sums["load_seconds"], whole),
        "moves": record.moves,
        "repacks": sum(times for trigger, times in record.repacks.items() if trigger != "start"),
        "events": record.events,
    }
    echo = {
        "mode": scenario.gateway.mode,
        "discipline": scenario.discipline,
        "seed": scenario.seed,
        "duration": scenario.duration,
    }
    result: dict[str, Any] = rounded({**echo, "total": totals, "devices": devices})
    return result


_SUMS = (
    "device_seconds",
    "dispatches",
    "useful_rows",
    "padded_rows",
    "loads",
    "loaded_bytes",
    "load_seconds",
    "evictions",
)


def _device(record: Record, window: float) -> dict[str, Any]:
    tally = Tally()
    for execution in record.executions:
        if execution.started > window:
            break
        tally.execute(execution, window)
    loads = [load for load in record.loads if load.started <= window]
    for load in loads:
        tally.load(load)
    sums = {
        "device_seconds": tally.device_seconds,
        "dispatches": tally.dispatches,
        "useful_rows": tally.useful_rows,
        "padded_rows": tally.padded_rows,
        "loads": tally.loads,
        "loaded_bytes": tally.loaded_bytes,
        "load_seconds": sum((min(load.ended, window) - load.started for load in loads), 0.0),
        "evictions": sum(at <= window for _, at in record.evictions),
    }
    return {**sums, "utilisation": ratio(tally.device_seconds, window)}


def _fill(record: Record, window: float) -> float:
    """Return the sum of the fills of all executions that start within the window.

    The fill of an execution is its useful rows, divided by the largest compiled size of its variant.
    """
    programs, largest = record.scenario.programs, dict[tuple[str, int], int]()
    total = 0.0
    for execution in record.executions:
        if execution.started > window:
            break
        execute = execution.execute
        key = execute.model, execute.variant
        if key not in largest:
            largest[key] = max(size for variant, size in programs[key[0]].costs if variant == key[1])
        total += execute.rows / largest[key]
    return total


def _imbalance(seconds: Sequence[float]) -> float | None:
    """Return the device time of the busiest device, divided by the mean."""
    return ratio(max(seconds) * len(seconds), sum(seconds))


@dataclass(frozen=True, slots=True)
class Column:
    """A figure of a comparison, computed from the metrics' `total`."""

    title: str
    cell: Callable[[Mapping[str, Any]], str]


COLUMNS = (
    Column("goodput", lambda total: rate(total["goodput"])),
    Column("in time", lambda total: percent(total["goodput_ratio"])),
    Column("missed", lambda total: str(total["missed"])),
    Column("p50", lambda total: duration(total["latency_p50_s"])),
    Column("p99", lambda total: duration(total["latency_p99_s"])),
    Column("loads", lambda total: str(total["loads"])),
    Column("moved", lambda total: amount(total["loaded_bytes"])),
    Column("found weights", lambda total: percent(total["hit_ratio"])),
    Column("rows", lambda total: _two(total["rows"])),
    Column("fill", lambda total: percent(total["fill"])),
    Column("busy", lambda total: percent(total["utilisation"])),
    Column("max / mean", lambda total: _two(total["imbalance"])),
    Column("moves", lambda total: str(total["moves"])),
)


def rows(runs: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return a table that compares summaries by mode: a header, and a row for each mode."""
    head = ("mode", *(column.title for column in COLUMNS))
    return [head, *((mode, *(column.cell(run["total"]) for column in COLUMNS)) for mode, run in runs.items())]


def _two(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
