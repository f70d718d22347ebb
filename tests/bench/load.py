"""One measurement: perf_analyzer sends load to a model, and the counters of the server's processes are read at both ends of a window."""

from __future__ import annotations

import contextlib
import csv
import json
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as triton

from local_triton import TritonServer
from tests.bench.figures import Sample
from tests.bench.processes import CLIENT, Machine, cpu_seconds, server_processes
from tests.bench.status import ModelStatus, model_status
from tests.status import read_status

#: Number of windows that perf_analyzer measures. The window of this module lies within them.
WINDOWS = 3
#: Number of requests of each kind before the measured ones.
_WARM_UP = 200


class BenchFailed(Exception):
    """A measurement could not be made. The text has the reason."""


@dataclass(frozen=True)
class Side:
    """A running server that is measured, and its name in the results."""

    name: str
    server: TritonServer
    has_runtime: bool


@dataclass(frozen=True)
class Reading:
    """All counters at one moment."""

    at: float
    cpu: Mapping[int, float]
    machine: Machine
    statistics: Mapping[str, Any]
    status: ModelStatus | None


@dataclass
class Load:
    """A running perf_analyzer. After the end of `load`, it has a report."""

    process: subprocess.Popen[str]
    report: dict[str, float] = field(default_factory=dict)


def measure(
    side: Side,
    model: str,
    clients: int,
    round_number: int,
    window_s: float,
    data: str = "random",
) -> Sample:
    """Send `clients` concurrent requests to `model` for about three windows. `data`: perf_analyzer's input data."""
    processes = server_processes(side.server.pid, has_runtime=side.has_runtime)
    with load(side, model, clients, window_s, data) as running:
        everyone = {**processes, running.process.pid: CLIENT}
        first = _read(side, model, everyone)
        time.sleep((WINDOWS - 0.5) * window_s)
        second = _read(side, model, everyone)
    return _sample(side, model, clients, round_number, everyone, first, second, running.report)


@contextlib.contextmanager
def load(
    side: Side,
    model: str,
    clients: int,
    window_s: float,
    data: str = "random",
    via: str | None = None,
) -> Iterator[Load]:
    """Run perf_analyzer during the block. The block begins after its first answers. Raises BenchFailed on any error.

    `via`: HOST:PORT of a gateway in front of the server.
    """
    failed_before = _statistics(side, model)["inference_stats"]["fail"]["count"]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.csv")
        command = [str(side.server.installation.perf_analyzer), "-m", model]
        command += ["-u", via or side.server.grpc_url, "-i", "grpc"]
        command += ["--input-data", data, "--concurrency-range", str(clients)]
        # perf_analyzer averages the windows, even if they differ. The rounds show how steady the results are.
        command += ["-p", str(round(window_s * 1e3)), "-r", str(WINDOWS), "-s", "9999", "-f", str(report)]
        process = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            running = Load(process)
            _await_answers(side, model, process, clients)
            yield running
            # The time limit includes the windows, perf_analyzer's requests for statistics, and the end of the requests in flight.
            output, _ = process.communicate(timeout=4 * WINDOWS * window_s + 30)
        finally:
            process.kill()
            process.wait()
        rows = list(csv.DictReader(report.read_text().splitlines())) if report.is_file() else []
        if process.returncode != 0 or len(rows) != 1:
            raise BenchFailed(
                f"perf_analyzer on {side.name}/{model} exited with status {process.returncode}:\n{output}"
            )
    if failed := _statistics(side, model)["inference_stats"]["fail"]["count"] - failed_before:
        raise BenchFailed(f"{failed} requests to {side.name}/{model} failed")
    running.report.update({name: float(value) for name, value in rows[0].items() if value})


def _await_answers(side: Side, model: str, process: subprocess.Popen[str], clients: int) -> None:
    """Wait until some requests are answered, because the first requests are slower."""
    count = _count(side, model) + 4 * clients
    _until(lambda: _count(side, model) >= count or process.poll() is not None, "the first answers")
    if process.poll() is not None:
        output = process.stdout.read() if process.stdout else ""
        raise BenchFailed(
            f"perf_analyzer on {side.name}/{model} exited with status {process.returncode}:\n{output}"
        )


def asking(side: Side, model: str) -> Callable[[], object]:
    """Return a function that sends a request of one row to one of the mlps. Each such function has a separate connection."""
    client = triton.InferenceServerClient(side.server.grpc_url)
    tensor = triton.InferInput("x", [1, 256], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 256), np.float32))
    return lambda: client.infer(model, [tensor])


def in_turns(asks: Mapping[str, Callable[[], object]], requests: int) -> dict[str, list[float]]:
    """Call each function of `asks` `requests` times, in turns and after a warm-up. Return the seconds of all calls by name."""
    times: dict[str, list[float]] = {name: [] for name in asks}
    for number in range(-_WARM_UP, requests):
        for name, ask in list(asks.items())[:: 1 if number % 2 else -1]:
            started = time.perf_counter()
            ask()
            if number >= 0:
                times[name].append(time.perf_counter() - started)
    return times


def _until(condition: Callable[[], bool], what: str, timeout: float = 30) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise BenchFailed(f"waited {timeout:.0f} s for {what}")
        time.sleep(0.02)


def _count(side: Side, model: str) -> int:
    return int(_statistics(side, model)["inference_count"])


def _statistics(side: Side, model: str) -> dict[str, Any]:
    (statistics,) = server_statistics(side, f"/{model}")
    return statistics


def server_statistics(side: Side, model: str = "") -> list[dict[str, Any]]:
    """Return Triton's own counters of all models, or of the model in the path `/model`."""
    url = f"http://{side.server.http_url}/v2/models{model}/stats"
    with urllib.request.urlopen(url, timeout=30) as answer:
        entries: list[dict[str, Any]] = json.load(answer)["model_stats"]
    # Triton omits counters whose value is zero.
    return [{"inference_count": 0, "execution_count": 0, **statistics} for statistics in entries]


def _read(side: Side, model: str, processes: Mapping[int, str]) -> Reading:
    status = model_status(read_status(side.server.pid), model) if side.has_runtime else None
    statistics = _statistics(side, model)
    cpu = {pid: cpu_seconds(pid) for pid in processes}
    return Reading(time.monotonic(), cpu, Machine.now(), statistics, status)


def _sample(
    side: Side,
    model: str,
    clients: int,
    round_number: int,
    processes: Mapping[int, str],
    first: Reading,
    second: Reading,
    report: Mapping[str, float],
) -> Sample:
    wall = second.at - first.at

    def risen(name: str) -> int:
        return int(second.statistics[name]) - int(first.statistics[name])

    requests = risen("inference_count")
    if requests <= 0:
        raise BenchFailed(f"{side.name}/{model}: no request was completed in the window")
    cpu: dict[str, float] = {}
    for pid, role in processes.items():
        cpu[role] = cpu.get(role, 0.0) + second.cpu[pid] - first.cpu[pid]
    status = second.status.since(first.status) if second.status and first.status else None
    used = second.machine.used - first.machine.used
    return Sample(
        side=side.name,
        clients=clients,
        round=round_number,
        infer_per_s=report["Inferences/Second"],
        p50_us=report["p50 latency"],
        p99_us=report["p99 latency"],
        requests=requests,
        cpu_us={role: seconds / requests * 1e6 for role, seconds in cpu.items()},
        triton_batch=requests / max(1, risen("execution_count")),
        device_batch=status.rows / max(1, status.dispatches) if status else None,
        sizes=status.sizes if status else {},
        busy=status.device_seconds / wall if status else None,
        steal_cpus=(second.machine.stolen - first.machine.stolen) / wall,
        other_cpus=max(0.0, used - sum(cpu.values())) / wall,
    )
