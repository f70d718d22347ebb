"""What `make bench` measures: the models of a repository with perf_analyzer, gRPC, random data, one by one.

    python tools/bench.py --model-repository=gen --concurrency 1 8 64 --models digits mlp

The numbers are only good on a machine that does nothing else; perf_analyzer itself takes 45 to 140 us of CPU a request.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import tempfile
from pathlib import Path

import example_bundles
from local_triton import ServerFailed, TritonServer
from rsrv_gen import cli as rsrv_gen
from triton_install import ROOT, Installation, InstallError


def main() -> int:
    """Prints a table; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model-repository", type=Path, help="default: made of the example bundles")
    parser.add_argument("--models", nargs="*", help="default: all")
    parser.add_argument("--concurrency", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument(
        "--window", type=int, default=2000, help="milliseconds of one measurement (%(default)s)"
    )
    options = parser.parse_args()
    repository = options.model_repository
    if repository is None:
        repository = ROOT / "build" / "bench"
        if rsrv_gen.main([str(example_bundles.ensure()), "-o", str(repository), "--prune"]) != 0:
            return 1
    failed = False
    try:
        with TritonServer(repository, log_path=ROOT / "build" / "bench.log") as server:
            server.wait_ready(timeout=600)
            print(f"{'model':<24}{'clients':>8}{'infer/s':>10}{'p50 us':>9}{'p99 us':>9}")
            for model in options.models or sorted(server.model_states()):
                for clients in options.concurrency:
                    line = measure(server, model, clients, options.window)
                    failed |= line is None
                    print(f"{model:<24}{clients:>8}{line or '  perf_analyzer failed, see above'}", flush=True)
    except (ServerFailed, InstallError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return int(failed)


def measure(server: TritonServer, model: str, clients: int, window_ms: int) -> str | None:
    """Throughput and latencies as columns of the table, None if perf_analyzer could not measure."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.csv"
        command = [str(Installation().perf_analyzer), "-m", model, "-u", server.grpc_url, "-i", "grpc"]
        command += ["--concurrency-range", str(clients), "-p", str(window_ms), "-s", "30", "-r", "6"]
        done = subprocess.run([*command, "-f", str(report)], text=True, capture_output=True, check=False)
        # It leaves with an error also when the numbers were merely not steady, and then still reports them.
        rows = list(csv.DictReader(report.read_text().splitlines())) if report.is_file() else []
        if not rows:
            print(f"{done.stdout}{done.stderr}".strip(), file=sys.stderr)
            return None
    row = rows[0]
    throughput = float(row["Inferences/Second"])
    return f"{throughput:>10.0f}{row['p50 latency']:>9}{row['p99 latency']:>9}"


if __name__ == "__main__":
    sys.exit(main())
