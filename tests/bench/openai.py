"""The cost of `rsrv openai` for a request, in comparison with the same request over gRPC.

    python -m tests.bench.openai                                # a model that does almost nothing
    python -m tests.bench.openai --bundles build/bundles/minilm* --model minilm

First, one client sends requests over gRPC and over HTTP in turns. Then, sixteen clients send requests over HTTP. A request has
one text. Only the CPU time of the process `rsrv openai` is counted. Its reciprocal is the number of requests that a core answers
if it does nothing else.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import tritonclient.grpc

import native_front
from tests.bench.processes import cpu_seconds
from tests.bench.report import table
from tests.e2e.harness import RunningTriton, make_repository, running_triton
from tests.e2e.openais import RunningOpenai, running_openai, write_bundles

Ask = Callable[[], None]
TEXT = "a sentence of some length, as people search for them"


@contextmanager
def over_grpc(server: RunningTriton, model: str) -> Iterator[Ask]:
    client = tritonclient.grpc.InferenceServerClient(server.server.grpc_url)
    text = tritonclient.grpc.InferInput("text", [1, 1], "BYTES")
    text.set_data_from_numpy(np.array([[TEXT.encode()]], object))
    try:
        yield lambda: client.infer(model, [text]).as_numpy("embedding")
    finally:
        client.close()


@contextmanager
def over_http(api: RunningOpenai, model: str) -> Iterator[Ask]:
    connection = http.client.HTTPConnection("127.0.0.1", api.port)
    body = json.dumps({"model": model, "input": [TEXT], "encoding_format": "base64"})
    headers = {"Content-Type": "application/json"}

    def ask() -> None:
        connection.request("POST", "/v1/embeddings", body, headers)
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 200

    try:
        yield ask
    finally:
        connection.close()


def median_ms(ask: Ask, requests: int) -> float:
    times = []
    for _ in range(requests):
        began = time.perf_counter()
        ask()
        times.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times)


def measure(server: RunningTriton, api: RunningOpenai, model: str, rounds: int, requests: int) -> None:
    """Print the added latency of one client, and the CPU time of a request with one and with sixteen clients."""
    pid = api.process.pid
    direct, through, alone, together = [], [], [], []
    with over_grpc(server, model) as grpc, over_http(api, model) as web:
        median_ms(web, 50)
        for _ in range(rounds):
            direct.append(median_ms(grpc, requests))
            before = cpu_seconds(pid)
            through.append(median_ms(web, requests))
            alone.append(1e6 * (cpu_seconds(pid) - before) / requests)

    def work(_: int) -> None:
        with over_http(api, model) as ask:
            for _ in range(requests // 16):
                ask()

    for _ in range(rounds):
        before = cpu_seconds(pid)
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(work, range(16)))
        together.append(1e6 * (cpu_seconds(pid) - before) / (requests // 16 * 16))
    added = [proxied - plain for proxied, plain in zip(through, direct, strict=True)]
    rows = [
        ["p50 over gRPC, 1 client", f"{statistics.median(direct):.2f} ms"],
        ["p50 through rsrv openai", f"{statistics.median(through):.2f} ms"],
        ["added", f"{statistics.median(added):.2f} ms ({min(added):.2f} to {max(added):.2f})"],
        ["CPU of a request, 1 client", f"{statistics.median(alone):.0f} us"],
        ["CPU of a request, 16 clients", f"{statistics.median(together):.0f} us"],
        ["requests/s a core, 16 clients", f"{1e6 / statistics.median(together):.0f}"],
    ]
    print(table([model, ""], rows))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bundles", nargs="*", type=Path, default=[])
    parser.add_argument("--model", default="embed")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=1000, help="in a round")
    options = parser.parse_args()
    native_front.ensure()
    with tempfile.TemporaryDirectory() as made:
        home = Path(made)
        if not options.bundles:
            write_bundles(home / "bundles")
        repository = make_repository(home, *(options.bundles or [home / "bundles"]))
        with (
            running_triton(repository, home / "server.log", expected=None) as server,
            running_openai(server.grpc_port, models=[options.model]) as api,
        ):
            measure(server, api, options.model, options.rounds, options.requests)


if __name__ == "__main__":
    main()
