"""Clients of many models with uneven popularity; every answer is checked.

`python -m tests.bench.crowd` runs them in another process, so that their cost is not counted as the server's. It prints
`measuring` when its warm-up is over, and at the end one line of JSON: the latency of every request answered after that,
in microseconds. It fails with the first answer that is wrong or missing.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tritonclient.grpc as triton

from tests.bench.load import BenchFailed
from tests.bench.places import ROOT
from tests.bench.verify import check

Array = npt.NDArray[Any]


def popularity(models: int, exponent: float) -> Array:
    """Return each model's share of the requests, most popular first: Zipf's law, 1 / rank ** exponent."""
    shares = np.arange(1, models + 1, dtype=np.float64) ** -exponent
    return np.asarray(shares / shares.sum())


@dataclass(frozen=True)
class Questions:
    """For each model, most popular first: rows to send, and the answers to them; both [questions, width]."""

    sent: Mapping[str, Array]
    wanted: Mapping[str, Array]

    def save(self, file: Path) -> None:
        arrays: Mapping[str, Any] = {
            f"{kind} {name}": array
            for kind, arrays in (("sent", self.sent), ("wanted", self.wanted))
            for name, array in arrays.items()
        }
        np.savez(file, **arrays)

    @classmethod
    def load(cls, file: Path) -> Questions:
        with np.load(file) as stored:
            kinds = {
                kind: {key.partition(" ")[2]: stored[key] for key in stored.files if key.startswith(kind)}
                for kind in ("sent", "wanted")
            }
        return cls(kinds["sent"], kinds["wanted"])


@dataclass
class Crowd:
    """A running crowd, and after `crowd` ended, the latencies in microseconds."""

    pid: int
    latencies_us: Sequence[float] = field(default_factory=list)


@contextmanager
def crowd(
    grpc_url: str,
    questions: Path,
    *,
    clients: int,
    exponent: float,
    warm_s: float,
    window_s: float,
    seed: int,
) -> Iterator[Crowd]:
    """Run clients beside the block, which starts when they are warm. Raises BenchFailed with their error."""
    command = [sys.executable, "-m", "tests.bench.crowd", grpc_url, str(questions), str(clients)]
    command += [str(exponent), str(warm_s), str(window_s), str(seed)]
    process = subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    try:
        running = Crowd(process.pid)
        warm = process.stdout.readline() == "measuring\n"
        if warm:
            yield running
        said, complaint = process.communicate(timeout=window_s + 60)
    finally:
        process.kill()
        process.wait()
    if not warm or process.returncode != 0:
        raise BenchFailed(f"the clients left with {process.returncode}:\n{complaint[-2000:]}")
    running.latencies_us = json.loads(said)


def main(arguments: Sequence[str]) -> None:
    """Run the process of the clients."""
    url, file, clients, exponent, warm_s, window_s, seed = arguments
    questions = Questions.load(Path(file))
    begin = time.perf_counter() + float(warm_s)
    end = begin + float(window_s)

    def one(number: int) -> list[float]:
        rng = np.random.default_rng([int(seed), number])
        return list(_latencies(url, questions, rng, float(exponent), begin, end))

    with ThreadPoolExecutor(int(clients)) as pool:
        running = [pool.submit(one, number) for number in range(int(clients))]
        time.sleep(max(0.0, begin - time.perf_counter()))
        print("measuring", flush=True)
        found = [latency for client in running for latency in client.result()]
    print(json.dumps(found))


def _latencies(
    url: str, questions: Questions, rng: np.random.Generator, exponent: float, begin: float, end: float
) -> Iterator[float]:
    """Run one client until `end`; return the microseconds of each request answered after `begin`."""
    client = triton.InferenceServerClient(url)
    models = list(questions.sent)
    shares = popularity(len(models), exponent)
    while True:
        model = models[rng.choice(len(models), p=shares)]
        number = int(rng.integers(len(questions.sent[model])))
        tensor = triton.InferInput("x", [1, questions.sent[model].shape[1]], "FP32")
        tensor.set_data_from_numpy(questions.sent[model][number : number + 1])
        started = time.perf_counter()
        answer = client.infer(model, [tensor]).as_numpy("y")
        answered = time.perf_counter()
        if answered > end:
            return
        check(model, answer, questions.wanted[model][number : number + 1])
        if answered >= begin:
            yield (answered - started) * 1e6


if __name__ == "__main__":
    main(sys.argv[1:])
