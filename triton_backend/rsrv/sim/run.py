"""The command rsrv-sim: run a scenario, and print and write its results."""

import argparse
import gc
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rsrv.extras import install_command
from rsrv.progress import steps
from rsrv.sim import plan
from rsrv.sim.decisions import decision_lines, fleet_decision_lines
from rsrv.sim.fleet import rows, summarize_fleet, with_mode
from rsrv.sim.metrics import summarize
from rsrv.sim.record import SimulationError
from rsrv.sim.scenario import Scenario, ScenarioError, load_scenario
from rsrv.sim.simulate import simulate, simulate_fleet
from rsrv.sim.sweep import run_sweep, run_weights, sweep_rows
from rsrv.sim.table import aligned, table
from rsrv.text import duration, os_error

#: Seconds between two lines about the progress of a plan if the output is not a terminal.
_LINE_S = 10.0


def run(options: argparse.Namespace) -> int:
    """Run the command. Return the exit status, as `cli.main` does."""
    collecting = gc.isenabled()
    # A simulation makes no garbage before its end, and searching a million requests for garbage takes long.
    gc.disable()
    try:
        return _run(options)
    finally:
        if collecting:
            gc.enable()


def run_plan(options: argparse.Namespace) -> int:
    """Run `rsrv plan`. Return its exit status."""
    scenario = options.trace.with_suffix(".yaml")
    answers: list[plan.Answer] = []
    status = 0
    try:
        recorded = plan.busiest(load_scenario(scenario))
        if not any(recorded.recorded):
            raise ScenarioError(f"{options.trace} has no requests: record while clients send some")
        with steps("simulations", every=_LINE_S) as progress:
            answers.extend(plan.plan(recorded, options.p99, progress.step))
    except (ScenarioError, SimulationError) as error:
        return _complain(str(error), "rsrv plan")
    except KeyboardInterrupt:
        if not answers:
            raise
        status = 130  # The answers so far are valid.
    if options.json:
        print(json.dumps(plan.to_json(answers), indent=2))
        return status
    requests = sum(map(len, recorded.recorded))
    print(
        f"{scenario}: {requests} requests in {duration(recorded.duration)}; goal: p99 of {duration(options.p99)}"
    )
    print(plan.page(answers))
    return status


def _run(options: argparse.Namespace) -> int:
    try:
        scenario = load_scenario(options.scenario)
        for model, card in scenario.estimated.items():
            _complain(
                f"the costs of {model} are estimates from the data sheet of {card}: use them only for comparisons"
            )
        if options.out is not None:
            # Find an unusable folder before the simulation, which may take minutes.
            options.out.mkdir(parents=True, exist_ok=True)
        if options.idle is not None:
            lines, text = _run_sweep(scenario, options)
        elif options.weights is not None:
            lines, text = _run_weights(scenario, options)
        elif scenario.gateway is None:
            if options.modes:
                raise ScenarioError(
                    f"{options.scenario}: --modes compares modes of a gateway, so the scenario needs `devices`"
                )
            lines, text = _run_one(scenario, options)
        else:
            lines, text = _run_fleet(scenario, options)
    except ScenarioError as error:
        return _complain(str(error))
    except FileExistsError:
        return _complain(f"cannot write: --out {options.out} is not a directory")
    except OSError as error:
        return _complain(f"cannot write: {os_error(error)}")
    except SimulationError as error:
        return _complain(f"internal error, please report it with the scenario: {error}")
    if options.decisions:
        sys.stdout.writelines(f"{line}\n" for line in lines)
    print(text, file=sys.stderr if options.decisions else sys.stdout)
    sys.stdout.flush()
    return 0


def _run_one(scenario: Scenario, options: argparse.Namespace) -> tuple[Iterator[str], str]:
    """Simulate one device. Return the lines of the decisions, and the table."""
    record = simulate(scenario)
    metrics = summarize(record)
    if options.out is not None:
        _write_metrics(options.out, metrics)
        if plots := _plots():
            plots.write_plots(record, options.out, options.window)
    return decision_lines(record), _as_json(metrics) if options.json else table(metrics)


def _run_fleet(scenario: Scenario, options: argparse.Namespace) -> tuple[Iterator[str], str]:
    """Simulate several devices. Return the lines of the last mode's decisions, and the table."""
    assert scenario.gateway is not None
    records = {
        mode: simulate_fleet(with_mode(scenario, mode)) for mode in options.modes or [scenario.gateway.mode]
    }
    runs = {mode: summarize_fleet(record) for mode, record in records.items()}
    if options.out is not None:
        _write_metrics(options.out, {"modes": runs})
        if plots := _plots():
            plots.write_fleet_plots(records, runs, options.out)
    text = _as_json({"modes": runs}) if options.json else aligned(rows(runs))
    return fleet_decision_lines(list(records.values())[-1]), text


def _run_sweep(scenario: Scenario, options: argparse.Namespace) -> tuple[Iterator[str], str]:
    """Simulate one device under several idle limits. Return an empty iterator of decisions, and the table."""
    runs = run_sweep(scenario, options.idle)
    if options.out is not None:
        _write_metrics(options.out, {"idle": runs})
        if plots := _plots():
            plots.write_sweep_plot(options.idle, runs, options.out)
    lines = sweep_rows(f"idle.{options.idle.tier}", runs)
    return iter(()), _as_json({"idle": runs}) if options.json else aligned(lines)


def _run_weights(scenario: Scenario, options: argparse.Namespace) -> tuple[Iterator[str], str]:
    """Simulate one device with several types of weights. Return an empty iterator of decisions, and the table."""
    runs = run_weights(scenario, options.weights)
    if options.out is not None:
        _write_metrics(options.out, {"weights": runs})
    return iter(()), _as_json({"weights": runs}) if options.json else aligned(sweep_rows("weights", runs))


def _write_metrics(out: Path, metrics: dict[str, Any]) -> None:
    (out / "metrics.json").write_text(f"{_as_json(metrics)}\n", encoding="utf-8")


def _as_json(metrics: dict[str, Any]) -> str:
    return json.dumps(metrics, indent=2)


def _plots() -> Any:
    """Import the module `plots`. If matplotlib is missing, print a hint and return None."""
    try:
        return importlib.import_module("rsrv.sim.plots")
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        hint = install_command("sim")
        print(f"rsrv-sim: no plots, because matplotlib is missing: {hint}", file=sys.stderr)
        return None


def _complain(message: str, program: str = "rsrv-sim") -> int:
    print("\n".join(f"{program}: {line}" for line in message.splitlines()), file=sys.stderr)
    return 1
