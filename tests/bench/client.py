"""`rsrv.client`'s map beside a plain loop of tritonclient and beside perf_analyzer's best, on a real server.

    python -m tests.bench.client                  # 100,000 rows of 1 kB and 5,000 pictures of 150 kB, both fronts, both protocols
    python -m tests.bench.client --rows 10000 --pictures 500 --front native

All three send requests of the same number of rows, in turns. Every answer of the client is checked. The client's memory is read
after a tenth of the rows and at the end. The CPU time is that of the program that sends.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import psutil
import tritonclient.grpc
import tritonclient.http

import native_front
from local_triton import TritonServer
from rsrv.client import Client
from rsrv_bundle.export import export_bundle
from tests.bench.phases import say
from tests.bench.places import WORK
from tests.bench.report import table
from tests.e2e.calls import tensors
from tests.e2e.harness import RunningTriton, make_repository, running_triton

#: Rows of a request, by model: as many as each takes.
ROWS = {"rows": 32, "pictures": 8}
CONCURRENCIES = (4, 16, 64)
FRONTS, PROTOCOLS = ("python", "native"), ("grpc", "http")
#: Seconds for each of perf_analyzer's loads, at least.
WINDOW_S = 3


def bundles() -> list[Path]:
    """Export the two models, unless they are there."""
    made: dict[str, tuple[dict[str, Any], Callable[..., Any]]] = {
        "rows": ({"x": np.zeros((1, 256), np.float32)}, lambda _, x: {"y": x[:, ::16] * 2}),
        "pictures": (
            {"x": np.zeros((1, 224, 224, 3), np.uint8)},
            lambda _, x: {"y": x[:, ::64, ::64, 0].reshape(x.shape[0], -1).astype(jnp.float32) * 2},
        ),
    }
    for name, (example, forward) in made.items():
        if not (WORK / "client" / name).exists():
            export_bundle(forward, {}, example, batch_sizes=(1, ROWS[name]), out_dir=WORK / "client" / name)
    return [WORK / "client" / name for name in made]


def expected(model: str, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if model == "rows":
        return x[:, ::16] * np.float32(2)
    return x[:, ::64, ::64, 0].reshape(len(x), -1).astype(np.float32) * 2


def mapped(
    server: RunningTriton, protocol: str, model: str, x: Any, shared_memory: bool
) -> tuple[float, float]:
    """Return the rows per second of `map`, and by how many bytes the process grew after the first tenth."""
    url = server.server.grpc_url if protocol == "grpc" else f"http://{server.server.http_url}"
    process, early = psutil.Process(), 0
    with Client(url, shared_memory=shared_memory) as client:
        started = time.perf_counter()
        for batch in client.map(model, x, rows_per_request=ROWS[model]).batches():
            np.testing.assert_array_equal(batch.outputs["y"], expected(model, x[batch.start : batch.stop]))
            if not early and batch.stop >= len(x) // 10:
                early = _own_bytes(process)
        return len(x) / (time.perf_counter() - started), _own_bytes(process) - early


def _own_bytes(process: psutil.Process) -> int:
    """Return the memory of the process without the pages of files, such as the data set."""
    memory = process.memory_info()
    return int(memory.rss - memory.shared)


def looped(server: RunningTriton, protocol: str, model: str, x: Any) -> float:
    """Return the rows per second of a loop that sends one request after the other, over a tenth of the rows."""
    library = tritonclient.grpc if protocol == "grpc" else tritonclient.http
    client = server.grpc if protocol == "grpc" else server.http
    count = max(ROWS[model], len(x) // 10)
    started = time.perf_counter()
    for at in range(0, count, ROWS[model]):
        client.infer(model, tensors(library, {"x": np.asarray(x[at : at + ROWS[model]])})).as_numpy("y")
    return count / (time.perf_counter() - started)


def analyzed(server: RunningTriton, protocol: str, model: str) -> float:
    """Return perf_analyzer's best rows per second over several numbers of requests in flight."""
    url = server.server.grpc_url if protocol == "grpc" else server.server.http_url
    best = 0.0
    for concurrency in CONCURRENCIES:
        command = [str(server.server.installation.perf_analyzer), "-m", model, "-i", protocol, "-u", url]
        command += [
            "-b",
            str(ROWS[model]),
            "--concurrency-range",
            str(concurrency),
            "-p",
            str(WINDOW_S * 1000),
        ]
        out = subprocess.run(
            [*command, "-s", "50", "-r", "3", "--async"],
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        ).stdout
        found = re.findall(r"Throughput: ([\d.]+) infer/sec", out)
        best = max(best, float(found[-1]) if found else 0.0)
    return best


def measured(front: str, sets: dict[str, Any], rounds: int) -> Iterator[list[str]]:
    """Yield the lines of the table for one front."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        environment = {"RSRV_STUB__FRONT": front}
        os.environ["RSRV_STUB__FRONT"] = front
        repository = make_repository(folder, *bundles())
        server_kind = partial(TritonServer, client_shared_memory=True)
        with running_triton(
            repository, folder / "log", env=environment, expected=None, make=server_kind
        ) as server:
            for model, x in sets.items():
                for protocol in PROTOCOLS:
                    ways: dict[str, Callable[[], Any]] = {
                        "loop": partial(looped, server, protocol, model, x),
                        "bytes": partial(mapped, server, protocol, model, x, False),
                        "shared": partial(mapped, server, protocol, model, x, True),
                        "analyzer": partial(analyzed, server, protocol, model),
                    }
                    found: dict[str, list[Any]] = {name: [] for name in ways}
                    cpu: dict[str, float] = {}
                    for _ in range(rounds):
                        for name, way in ways.items():
                            used = time.process_time()
                            found[name].append(way())
                            sent = max(ROWS[model], len(x) // 10) if name == "loop" else len(x)
                            cpu[name] = (time.process_time() - used) / sent * 1e6
                            say(f"{front} {model} {protocol} {name}: {found[name][-1]}")
                    grown = max(one[1] for one in (*found["bytes"], *found["shared"]))
                    rates = {n: max(o[0] if isinstance(o, tuple) else o for o in v) for n, v in found.items()}
                    speeds = [f"{rates[name]:,.0f}" for name in ways]
                    costs = [f"{cpu[name]:.0f}" for name in ("loop", "bytes", "shared")]
                    yield [front, model, protocol, *speeds, *costs, f"{grown / 1e6:.0f} MB"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--pictures", type=int, default=5_000)
    parser.add_argument("--front", choices=FRONTS, action="append")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    native_front.ensure()
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pictures.npy"
        pictures = np.lib.format.open_memmap(path, "w+", np.uint8, (options.pictures, 224, 224, 3))
        for at in range(options.pictures):
            pictures[at] = rng.integers(0, 256, (224, 224, 3), np.uint8)
        sets = {
            "rows": rng.standard_normal((options.rows, 256), np.float32),
            "pictures": np.load(path, mmap_mode="r"),
        }
        lines = [line for front in options.front or FRONTS for line in measured(front, sets, options.rounds)]
    head = ["front", "model", "protocol", "loop, rows/s", "map", "map, shared", "perf_analyzer"]
    head += ["loop, us/row", "map", "map, shared", "memory"]
    print(table(head, lines))


if __name__ == "__main__":
    main()
