"""`python -m tests.bench.history`: the CPU cost of each model's history and slowest requests, which `rsrv why` reads.

Two servers side by side are loaded in turns, so that disturbances of the machine affect both. The runtime of one keeps
neither: this file takes the place of its Python (RSRV_RUNTIME_PYTHON). Batches differ from run to run, and with them the
CPU of a request at many clients, so the scheduler alone is measured, too.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

from rsrv.scheduler.history import History
from rsrv.scheduler.request_times import RequestTimes
from tests.bench import decisions, models
from tests.bench.load import Side, measure
from tests.bench.phases import say, served
from tests.bench.places import ROOT, WORK
from tests.bench.processes import RUNTIME, SERVER

_CLIENTS = (1, 64)
#: rows in one execution of the scheduler alone
_ROWS = (1, 32)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.history", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="rounds, each with both in turns (%(default)s)")
    parser.add_argument(
        "--window", type=float, default=0.5, help="seconds; a sample takes three windows (%(default)s)"
    )
    options = parser.parse_args(argv)
    for rows in _ROWS:
        with_it, without = _decisions(rows, options.rounds)
        say(
            f"the scheduler alone: {(with_it - without) / rows:.2f} us per request in executions of {rows}; a decision and "
            f"its answers take {with_it:.0f} us"
        )
    WORK.mkdir(parents=True, exist_ok=True)
    repository = models.native_repository(1)
    with tempfile.TemporaryDirectory() as folder:
        python = Path(folder, "python")
        python.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m tests.bench.history "$@"\n')
        python.chmod(0o755)
        with (
            served(
                "without-history", repository, has_runtime=True, env={"RSRV_RUNTIME_PYTHON": str(python)}
            ) as off,
            served("with-history", repository, has_runtime=True) as on,
        ):
            for clients in _CLIENTS:
                ratios: list[float] = []
                for number in range(options.rounds):
                    turn = (off, on) if number % 2 == 0 else (on, off)
                    used = {side.name: _cpu(side, clients, number, options.window) for side in turn}
                    ratios.append(used[on.name] / used[off.name])
                    say(f"{clients} clients: {used[off.name]:.0f} us without, {used[on.name]:.0f} us with")
                say(
                    f"CPU per request of server and runtime at {clients} clients, with / without: "
                    f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}, {len(ratios)} rounds)"
                )
    return 0


def _cpu(side: Side, clients: int, number: int, window: float) -> float:
    """Return the microseconds per request of tritonserver and the runtime."""
    sample = measure(side, models.MLP, clients, number, window)
    return sample.cpu_us[SERVER] + sample.cpu_us[RUNTIME]


def _decisions(rows: int, rounds: int) -> tuple[float, float]:
    """Return the microseconds of the end of an execution and the next decision: with histories, and without."""
    # Of one model, or too few requests of each would end for the slowest to be as rare as on a server.
    found: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        found[0].append(decisions.measure_one("fair", 1, rows).median_us)
        with patch.object(History, "add", _nothing), patch.object(RequestTimes, "keep", _nothing):
            found[1].append(decisions.measure_one("fair", 1, rows).median_us)
    return statistics.median(found[0]), statistics.median(found[1])


def _run_without() -> int:
    """Be the runtime, without records of what happened to a model and without its slowest requests."""
    from rsrv.runtime.__main__ import main as run

    with patch.object(History, "add", _nothing), patch.object(RequestTimes, "keep", _nothing):
        return run(sys.argv[4:])


def _nothing(*_: object, **__: object) -> None:
    """Keep nothing."""


if __name__ == "__main__":
    sys.exit(_run_without() if sys.argv[1:4] == ["-P", "-m", "rsrv.runtime"] else main())
