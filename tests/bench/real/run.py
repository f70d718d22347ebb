"""Export the real models, serve them, and write the tables of docs/benchmark.md.

Every model is exported in its own process, and one tritonserver serves all of them. The compared programs also run in their own
processes. All take turns several times, so that disturbances of the machine affect all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from importlib import metadata
from typing import Self

import tritonclient.grpc

from local_triton import ServerFailed
from rsrv.triton_install import InstallError
from rsrv_bundle import read_bundle
from scheduler_page import DOCS, rewrite, table
from tests.bench.load import BenchFailed
from tests.bench.models import generate
from tests.bench.phases import say, served
from tests.bench.places import ROOT, WORK
from tests.bench.real.cases import CASES, Arrays, Case
from tests.bench.real.page import Line, Rates, exported
from tests.bench.real.page import served as served_table
from tests.e2e.calls import tensors

PAGE = DOCS / "benchmark.md"
RESULT = WORK / "models.json"
FOLDER = WORK / "models"
#: Number of concurrent requests, for requests with one row (False) and with many rows (True).
IN_FLIGHT = {False: 8, True: 2}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark. Return the exit status, which is 0 if everything could be measured."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.real", description=__doc__)
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="seconds of each measurement (%(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="two short rounds, without a change of the page")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), help="default: all")
    options = parser.parse_args(argv)
    WORK.mkdir(parents=True, exist_ok=True)
    cases = [CASES[name] for name in options.only]
    before = machine()
    try:
        lines = measure(cases, *(2, 0.5) if options.quick else (options.rounds, options.seconds))
    except (BenchFailed, ServerFailed, InstallError, RuntimeError) as error:
        print(f"models: {error}", file=sys.stderr)
        return 1
    made = {"exported": table(iter([*exported(lines)])), "served": table(iter([*served_table(lines)]))}
    made["machine"] = before
    print("\n\n".join(made.values()))
    RESULT.write_text(json.dumps([asdict(line) for line in lines], indent=1) + "\n")
    if not options.quick and len(cases) == len(CASES):
        PAGE.write_text(rewrite(PAGE.read_text(encoding="utf-8"), made), encoding="utf-8")
        print(f"\nwritten to {PAGE.relative_to(ROOT)}")
    return 0


def measure(cases: Sequence[Case], rounds: int, seconds: float) -> list[Line]:
    """Measure all figures of these models. Each rate is measured `rounds` times, for `seconds` each."""
    exports = {}
    for case in cases:
        exports[case.model] = float(_ask("tests.bench.real.exporting", case.model, str(FOLDER)))
        say(f"{case.title}: exported in {exports[case.model]:.1f} s")
    bundles = [FOLDER / name for case in cases for name in case.bundles]
    lines = []
    with served("models", generate("models-gen", bundles), has_runtime=True) as side:
        for case in cases:
            served_rates, eager, compiled = rates(side.server.grpc_url, case, rounds, seconds)
            say(f"{case.title}: served {served_rates}, eager {eager}, compiled {compiled}")
            lines.append(
                Line(
                    case.title,
                    case.source,
                    case.unit,
                    exports[case.model],
                    sum(file.stat().st_size for name in case.bundles for file in (FOLDER / name).iterdir()),
                    errors(case),
                    served_rates,
                    eager,
                    compiled,
                )
            )
    return lines


def errors(case: Case) -> dict[int, float]:
    """Return the largest errors that the exports found, by compiled size. Bundles without networks have no such errors."""
    largest: dict[int, float] = {}
    for name in case.bundles:
        numerics = read_bundle(FOLDER / name, digest=False).manifest.numerics or {}
        by_module = numerics.get("source")
        assert not isinstance(by_module, float), "one number for each module"
        for module, error in (by_module or {}).items():
            size = int(module.rpartition(".b")[2])
            largest[size] = max(largest.get(size, 0.0), error)
    return largest


def rates(url: str, case: Case, rounds: int, seconds: float) -> tuple[Rates, Rates, Rates]:
    """Return the rates through Triton, in eager PyTorch, and compiled without a server."""
    sizes = (1, case.most)
    with Direct("eager", case.model, sizes) as eager, Direct("compiled", case.model, sizes) as compiled:
        results: list[dict[int, list[float]]] = [{}, {}, {}]
        for _ in range(rounds):
            for rows in sizes:
                took = (
                    throughput(url, case, rows, seconds),
                    eager.rate(rows, seconds),
                    compiled.rate(rows, seconds),
                )
                for each, rate in zip(results, took, strict=True):
                    if rate is not None:
                        each.setdefault(rows, []).append(rate)
    return results[0], results[1], results[2]


def throughput(url: str, case: Case, rows: int, seconds: float) -> float:
    """Return rows per second through Triton over gRPC. A few clients send their next request after each answer."""
    request, clients = case.inputs(rows), IN_FLIGHT[rows > 1]
    start = threading.Barrier(clients + 1)

    def client() -> list[float]:
        with tritonclient.grpc.InferenceServerClient(url) as asking:
            ends = []
            _infer(asking, case.model, request)
            start.wait()
            deadline = time.perf_counter() + seconds
            while time.perf_counter() < deadline:
                _infer(asking, case.model, request)
                ends.append(time.perf_counter())
            return ends

    with ThreadPoolExecutor(clients) as pool:
        running = [pool.submit(client) for _ in range(clients)]
        start.wait()
        started = time.perf_counter()
        ends = [end for future in running for end in future.result()]
    return rows * len(ends) / (max(ends) - started)


def _infer(client: tritonclient.grpc.InferenceServerClient, model: str, request: Arrays) -> None:
    client.infer(model, tensors(tritonclient.grpc, request))


class Direct:
    """A process of `tests.bench.real.direct`, which runs during a block."""

    def __init__(self, how: str, model: str, sizes: Sequence[int]) -> None:
        self._name = f"{how} {model}"
        self._log = WORK / f"models-{how}.log"
        command = [sys.executable, "-m", "tests.bench.real.direct", how, model, str(FOLDER), *map(str, sizes)]
        with self._log.open("w") as log:
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(
                command, cwd=ROOT, text=True, stdin=pipe, stdout=pipe, stderr=log
            )

    def __enter__(self) -> Self:
        self._there = set(map(int, self._line().split()))
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()  # The process ends at the end of its input.

    def rate(self, rows: int, seconds: float) -> float | None:
        """Return rows per second, or None if this number of rows is impossible. Raises BenchFailed."""
        if rows not in self._there:
            return None
        assert self._process.stdin is not None
        self._process.stdin.write(f"{rows} {seconds}\n")
        self._process.stdin.flush()
        return float(self._line())

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise BenchFailed(f"{self._name} ended:\n{self._log.read_text()}")
        return line


def _ask(module: str, *arguments: str) -> str:
    """Run a module, and return its output. Raises BenchFailed with its error."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], cwd=ROOT, text=True, capture_output=True, check=False
    )
    if done.returncode:
        raise BenchFailed(
            f"{module} {' '.join(arguments)} exited with status {done.returncode}:\n{done.stderr}"
        )
    return done.stdout.strip()


def machine() -> str:
    """Return the conditions of the figures. Call this before the measurement: then the load average is that of other programs."""
    versions = ", ".join(
        f"{name} {metadata.version(name)}" for name in ("jax", "torch", "torchax", "flax", "equinox")
    )
    return (
        f"{os.cpu_count()} CPU cores ({platform.machine()}), a load average of {os.getloadavg()[1]:.1f} when the run"
        f" began; Python {platform.python_version()}, {versions}."
    )
