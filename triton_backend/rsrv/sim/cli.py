"""The command rsrv-sim: a scenario in, metrics, plots and decisions out."""

import argparse
import gc
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rsrv.sim.decisions import decision_lines
from rsrv.sim.metrics import summarize
from rsrv.sim.record import Record, SimulationError
from rsrv.sim.scenario import ScenarioError, load_scenario
from rsrv.sim.simulate import simulate
from rsrv.sim.table import table


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Returns:
        0; 2 if the scenario or the command line is wrong or nothing can be written; 3 if the simulation is.
    """
    options = _parser().parse_args(argv)
    collecting = gc.isenabled()
    # Nothing of a simulation is garbage before its end, and a million requests are much to search in vain.
    gc.disable()
    try:
        return _run(options)
    finally:
        if collecting:
            gc.enable()


def _run(options: argparse.Namespace) -> int:
    try:
        scenario = load_scenario(options.scenario)
        if options.out is not None:
            # Before the simulation, which may take minutes.
            options.out.mkdir(parents=True, exist_ok=True)
        record = simulate(scenario)
        metrics = summarize(record)
        if options.out is not None:
            _write(options.out, record, metrics, options.window)
    except ScenarioError as error:
        return _complain(str(error), 2)
    except FileExistsError:
        return _complain(f"cannot write: --out {options.out} is not a directory", 2)
    except OSError as error:
        return _complain(f"cannot write: {error}", 2)
    except SimulationError as error:
        return _complain(f"internal error, please report it with the scenario: {error}", 3)
    try:
        if options.decisions:
            sys.stdout.writelines(f"{line}\n" for line in decision_lines(record))
        print(table(metrics), file=sys.stderr if options.decisions else sys.stdout)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever reads our output has seen enough. Python would complain while it closes it.
        sys.stdout = None
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rsrv-sim",
        description="Runs rsrv's scheduler in virtual time over the models and the traffic of a scenario.",
        epilog="docs/simulator.md describes scenarios and metrics.",
    )
    parser.add_argument("scenario", metavar="SCENARIO.yaml", type=Path)
    parser.add_argument("--out", metavar="DIR", type=Path, help="write metrics.json and plots there")
    parser.add_argument(
        "--decisions",
        action="store_true",
        help="print each decision as one line to stdout, and the table to stderr",
    )
    parser.add_argument(
        "--window",
        metavar="START:END",
        type=_window,
        help="seconds that timeline.png shows (default: the first of them)",
    )
    return parser


def _window(text: str) -> tuple[float, float]:
    start, colon, end = text.partition(":")
    try:
        window = (float(start), float(end))
    except ValueError:
        window = (0.0, 0.0)
    if not (colon and 0.0 <= window[0] < window[1] < float("inf")):
        raise argparse.ArgumentTypeError(f"{text!r}: give two rising times in seconds, such as 0.5:0.75")
    return window


def _write(out: Path, record: Record, metrics: dict[str, Any], window: tuple[float, float] | None) -> None:
    (out / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
    try:
        from rsrv.sim.plots import write_plots
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        print("rsrv-sim: no plots, because matplotlib is missing: pip install 'rsrv[sim]'", file=sys.stderr)
        return
    write_plots(record, out, window)


def _complain(message: str, code: int) -> int:
    print("\n".join(f"rsrv-sim: {line}" for line in message.splitlines()), file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
