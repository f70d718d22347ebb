"""Load on a model of a tritonserver, from programs that are fast enough not to limit the rate.

    python -m rsrv.gpu.load ADDRESS MODEL SECONDS

As a program, this module is one client. It prints a line when it is connected, waits for a line, sends requests for SECONDS, and
prints the seconds of each request.
"""

import csv
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from statistics import quantiles
from typing import NamedTuple

from tritonclient.grpc import InferenceServerClient

from rsrv.gpu.plain import example
from rsrv.gpu.report import PartInput
from rsrv.gpu.server import ask
from rsrv.triton_command_line import ask_flags
from rsrv.triton_install import Installation, default_folder

#: Number of windows that perf_analyzer measures.
_WINDOWS = 3
#: Seconds that perf_analyzer gets for its start and for its last requests, in addition to the windows.
_MORE_S = 30.0


class Latency(NamedTuple):
    """Answers per second, and quantiles of the latency."""

    per_s: float
    p50_s: float
    p99_s: float


def generator() -> str | None:
    """Return the path of perf_analyzer, or None if it does not run here. `measure` then starts processes of this module."""
    path = shutil.which("perf_analyzer") or str(Installation.at(default_folder()).perf_analyzer)
    try:
        ask_flags(path, "concurrency-range")
    except OSError:
        return None
    return path


def measure(
    part_input: PartInput, perf_analyzer: str | None, address: str, model: str, clients: int, seconds: float
) -> Latency:
    """Send requests to a model of `plain.export_networks` from this many clients. Raises CalledProcessError."""
    if perf_analyzer is None:
        return _by_processes(part_input, address, model, clients, seconds)
    report = part_input.folder / "report.csv"
    command = [perf_analyzer, "-m", model, "-u", address, "-i", "grpc", "--input-data", "random"]
    command += ["--concurrency-range", str(clients), "-p", str(round(seconds / _WINDOWS * 1e3))]
    # With -s 9999, perf_analyzer averages the windows even if they differ.
    command += ["-r", str(_WINDOWS), "-s", "9999", "-f", str(report)]
    subprocess.run(command, check=True, env=part_input.environment, timeout=4 * seconds + _MORE_S)
    (row,) = csv.DictReader(report.read_text().splitlines())
    report.unlink()
    return Latency(
        float(row["Inferences/Second"]), float(row["p50 latency"]) / 1e6, float(row["p99 latency"]) / 1e6
    )


def _by_processes(part_input: PartInput, address: str, model: str, clients: int, seconds: float) -> Latency:
    """Start a process for each client, because one Python process would limit the rate."""
    command = [sys.executable, "-P", "-m", "rsrv.gpu.load", address, model, str(seconds)]
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    command,
                    env=part_input.environment,
                    text=True,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
            )
            for _ in range(clients)
        ]
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        outputs = []
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        for process in processes:
            outputs.append(process.communicate()[0])
            if process.returncode:
                raise subprocess.CalledProcessError(process.returncode, command)
    took = [float(line) for output in outputs for line in output.split()]
    cuts = quantiles(took, n=100)
    return Latency(len(took) / seconds, cuts[49], cuts[98])


def main(address: str, model: str, seconds: float) -> None:
    """Run one client."""
    x, took = example(), []
    with InferenceServerClient(address) as client:
        ask(client, model, x)
        print("connected", flush=True)
        sys.stdin.readline()
        end = time.perf_counter() + seconds
        while (started := time.perf_counter()) < end:
            ask(client, model, x)
            took.append(time.perf_counter() - started)
    print(*took, sep="\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
