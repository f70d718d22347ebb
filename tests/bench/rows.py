"""Measures how long single rows wait while another client sends requests of 500 rows.

    python -m tests.bench.rows

Four clients send single rows of `mlp`, one after another. Beside them one client sends 500 rows again and again, in turns: not at
all, in as many requests at once as the largest compiled size needs, and in one request, which the front divides.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import tempfile
import time
from pathlib import Path

import numpy as np
from tritonclient.grpc import InferInput, aio

import example_bundles
from examples import mlp
from tests.bench.report import table
from tests.e2e.harness import make_repository, running_triton

ROWS, CLIENTS = 500, 4
#: Rows of each request of the client with many rows, by what it does.
LARGE = {"no large requests": 0, "many requests": max(mlp.BATCH_SIZES), "one request": ROWS}
FRONTS = ("python", "native")
DISCIPLINES = ("fair", "edf")


async def load(url: str, rows: int, seconds: float) -> tuple[list[float], int]:
    """Return the latencies of the single rows in seconds, and how often all 500 rows were answered, `rows` in a request."""
    until = time.perf_counter() + seconds
    latencies, answered = list[float](), 0

    async def send(server: aio.InferenceServerClient, count: int) -> None:
        value = InferInput("x", [count, 256], "FP32")
        value.set_data_from_numpy(np.zeros((count, 256), np.float32))
        await server.infer("mlp", [value])

    async def single() -> None:
        async with aio.InferenceServerClient(url) as server:
            while (begun := time.perf_counter()) < until:
                await send(server, 1)
                latencies.append(time.perf_counter() - begun)

    async def large() -> None:
        nonlocal answered
        async with aio.InferenceServerClient(url) as server:
            while rows and time.perf_counter() < until:
                starts = range(0, ROWS, rows)
                await asyncio.gather(*(send(server, min(rows, ROWS - start)) for start in starts))
                answered += 1

    await asyncio.gather(large(), *(single() for _ in range(CLIENTS)))
    return latencies, answered


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    bundle = example_bundles.ensure(("mlp",)) / "mlp"
    lines = []
    for front, discipline in itertools.product(FRONTS, DISCIPLINES):
        settings = f"scheduler: {{discipline: {discipline}}}\nstub: {{front: {front}}}\n"
        with tempfile.TemporaryDirectory() as folder:
            repository = make_repository(Path(folder), bundle, settings=settings)
            with running_triton(repository, Path(folder, "server.log"), expected=None) as server:
                asyncio.run(load(server.server.grpc_url, ROWS, 1.0))
                for number, (name, rows) in itertools.product(range(options.rounds), LARGE.items()):
                    latencies, answered = asyncio.run(load(server.server.grpc_url, rows, options.seconds))
                    p50, p99 = (1e3 * float(np.quantile(latencies, share)) for share in (0.5, 0.99))
                    lines.append([
                        f"{front} {discipline} {number + 1}: {name}",
                        f"{len(latencies) / options.seconds:.0f}",
                        f"{p50:.1f}",
                        f"{p99:.1f}",
                        f"{answered / options.seconds:.1f}",
                    ])  # fmt: skip
    print(table(["front, discipline, round", "singles/s", "p50 ms", "p99 ms", "500 rows/s"], lines))


if __name__ == "__main__":
    main()
