"""The command line of rsrv-sim. It imports the simulator only to run it."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rsrv.command import EXIT_STATUS, CommandParser, command

if TYPE_CHECKING:
    from rsrv.sim.sweep import IdleSweep


@command("rsrv-sim", extra="sim")
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit status."""
    options = parser().parse(argv)
    from rsrv.sim import run

    return run.run(options)


def parser() -> CommandParser:
    top = CommandParser(
        prog="rsrv-sim",
        description="Run rsrv's scheduler in virtual time over the models and the traffic of a scenario.",
        epilog=f"docs/simulator.md describes scenarios and metrics.\n{EXIT_STATUS}",
    )
    top.add_argument("scenario", metavar="SCENARIO.yaml", type=Path)
    top.add_argument("--out", metavar="DIR", type=Path, help="write metrics.json and plots to DIR")
    top.add_argument("--json", action="store_true", help="print the metrics as JSON instead of the table")
    top.add_argument(
        "--decisions",
        action="store_true",
        help="print each decision as one line to stdout, and the table to stderr",
    )
    top.add_argument(
        "--modes",
        metavar="MODE,MODE",
        type=_modes,
        help="for several devices: compare these modes of the gateway (default: only the scenario's mode)",
    )
    compared = top.add_mutually_exclusive_group()
    compared.add_argument(
        "--idle",
        metavar="TIER=LIMIT,LIMIT",
        type=_sweep,
        help="compare limits of idleness of all models, such as host=10m,1h,never; with --out, idle.png",
    )
    compared.add_argument(
        "--weights",
        metavar="TYPE,TYPE",
        type=_weights,
        help="compare these types of the weights, such as f32,bf16,i8; the weights of the scenario are f32",
    )
    top.add_argument(
        "--window",
        metavar="START:END",
        type=_window,
        help="seconds that timeline.png shows (default: the beginning)",
    )
    top.add_version()
    return top


def _window(text: str) -> tuple[float, float]:
    start, colon, end = text.partition(":")
    try:
        window = (float(start), float(end))
    except ValueError:
        window = (0.0, 0.0)
    if not (colon and 0.0 <= window[0] < window[1] < float("inf")):
        raise argparse.ArgumentTypeError(f"{text!r}: give two rising times in seconds, such as 0.5:0.75")
    return window


def _sweep(text: str) -> "IdleSweep":
    from rsrv.settings import IdleSection
    from rsrv.sim.scenario import IdleLimits
    from rsrv.sim.sweep import IdleSweep

    tier, _, limits = text.partition("=")
    if tier not in IdleLimits._fields:
        raise argparse.ArgumentTypeError(
            f"{text!r}: begin with one of {', '.join(IdleLimits._fields)}, then ="
        )
    try:
        seconds = {limit: getattr(IdleSection(**{tier: limit}), tier) for limit in limits.split(",")}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: give times such as 90s, 10m, 1h, or never") from None
    return IdleSweep(tier, seconds)


def _weights(text: str) -> list[str]:
    from rsrv.sim.sweep import WEIGHTS

    kinds = text.split(",")
    if any(kind not in WEIGHTS for kind in kinds):
        raise argparse.ArgumentTypeError(f"{text!r}: give some of {','.join(WEIGHTS)}")
    return kinds


def _modes(text: str) -> list[str]:
    from rsrv.sim.fleet import MODES

    modes: list[str] = [mode for mode in MODES if mode in text.split(",")]
    if len(modes) != len(text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r}: give some of {','.join(MODES)}, each once")
    return modes


if __name__ == "__main__":
    sys.exit(main())
