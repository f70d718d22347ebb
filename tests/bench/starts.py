"""Cold starts on a real server: the time to the first answer, and the effect on requests to a warm model.

    python -m tests.bench.starts                       # 20 models of 25 MB with the Python front
    python -m tests.bench.starts --front native --rounds 5

In each round, all models but one are cold. One cold model is asked alone, and then all others at the same time, while requests to
the warm model are timed. The executables are in the compilation cache, and this server has started each model before. The warm
model is also timed while two busy loops run with the priority of starts. This shows the effect of any program with two threads.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tritonclient.grpc

import native_front
from rsrv_bundle.export import export_bundle
from tests.bench.phases import say
from tests.bench.places import WORK
from tests.bench.report import table
from tests.e2e.harness import RunningTriton, make_repository, running_triton
from tests.status import read_status

#: Seconds between two requests to the warm model.
_PERIOD_S = 0.004
#: Time limit in seconds for all models to answer, or to become cold again.
_PATIENCE_S = 120.0
#: Seconds for which the warm model is timed without starts.
_WINDOW_S = 5.0


def ensure_bundles(count: int, width: int) -> list[Path]:
    """Return `count` bundles with three compiled sizes each. Export missing ones."""
    paths = []
    for number in range(count):
        path = WORK / "starts" / str(width) / f"model{number:03}"
        paths.append(path)
        if path.exists():
            continue
        kernel = np.random.default_rng(number).standard_normal((width, width), np.float32)

        def forward(params: Any, x: jax.Array, number: int = number) -> Any:
            return {"y": jax.numpy.tanh(x @ params["w"]) + number}

        example = {"x": jax.ShapeDtypeStruct((1, width), np.float32)}
        export_bundle(
            forward, {"w": kernel / np.float32(width**0.5)}, example, batch_sizes=(1, 4, 16), out_dir=path
        )
    return paths


class Client:
    """Asks models that have one input of this width."""

    def __init__(self, server: RunningTriton, width: int) -> None:
        self._server = server
        x = np.ones((1, width), np.float32)
        self._sent = tritonclient.grpc.InferInput("x", x.shape, "FP32")
        self._sent.set_data_from_numpy(x)

    def ask(self, model: str) -> float:
        """Ask a model, and return the seconds until the answer."""
        started = time.perf_counter()
        self._server.grpc.infer(model, [self._sent])
        return time.perf_counter() - started

    def ask_all(self, models: list[str]) -> float:
        """Ask all models at the same time, and return the seconds until the last answer."""
        started, errors, answered = time.perf_counter(), list[object](), threading.Semaphore(0)

        def note(result: object, error: object) -> None:
            if error is not None:
                errors.append(error)
            answered.release()

        for model in models:
            self._server.grpc.async_infer(model, [self._sent], note)
        for _ in models:
            assert answered.acquire(timeout=_PATIENCE_S), "a model does not answer"
        assert not errors, errors
        return time.perf_counter() - started

    def time_until(self, model: str, is_over: Callable[[], bool]) -> list[float]:
        """Ask a model at regular times until `is_over` returns true.

        Return the seconds until each answer, from the time when the request was due.
        """
        seconds, due = [], time.perf_counter()
        while not is_over():
            due = max(due + _PERIOD_S, time.perf_counter())
            time.sleep(max(0.0, due - time.perf_counter()))
            self.ask(model)
            seconds.append(time.perf_counter() - due)
        return seconds


def wait_until_cold(server: RunningTriton) -> None:
    until = time.monotonic() + _PATIENCE_S
    while len(read_status(server.pid)["models"]) > 1:
        assert time.monotonic() < until, "the models do not fall back"
        time.sleep(0.5)


@contextmanager
def two_busy_loops() -> Iterator[None]:
    """Run two busy loops at the priority of starts."""
    command = ["nice", "-n", "10", sys.executable, "-c", "while True: pass"]
    loops = [subprocess.Popen(command) for _ in range(2)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def one_round(server: RunningTriton, names: list[str], width: int) -> tuple[float, ...]:
    """Return the seconds of the first model's start, and of all other starts together.

    Also return three p99 of the warm model: alone, during busy loops, and during starts.
    """
    warm, alone, *others = names
    cold, client = Client(server, width), Client(server, width)
    wait_until_cold(server)
    first = cold.ask(alone)
    until = time.perf_counter() + _WINDOW_S
    without = client.time_until(warm, lambda: time.perf_counter() > until)
    with two_busy_loops():
        until = time.perf_counter() + _WINDOW_S
        beside_loops = client.time_until(warm, lambda: time.perf_counter() > until)
    durations: list[float] = []
    thread = threading.Thread(target=lambda: durations.append(cold.ask_all(others)))
    thread.start()
    beside = client.time_until(warm, lambda: not thread.is_alive())
    thread.join()
    times = (without, beside_loops, beside)
    p50s = [f"{statistics.median(seconds) * 1e3:.1f}" for seconds in times]
    p99s = [float(np.percentile(seconds, 99)) for seconds in times]
    say(
        f"first answer {first:.3f} s; {len(others)} at once {durations[0]:.2f} s; warm model alone, beside loops, beside "
        f"starts: p50 {', '.join(p50s)} ms, p99 {', '.join(f'{p99 * 1e3:.1f}' for p99 in p99s)} ms"
    )
    return first, durations[0], *p99s


def main() -> None:
    """Measure some rounds, and print the figures."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.starts", description=__doc__)
    parser.add_argument("--models", type=int, default=20)
    parser.add_argument("--front", choices=("native", "python"), default="python")
    parser.add_argument("--width", type=int, default=2504, help="weights take 4 * width ** 2 bytes")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.front == "native":
        native_front.ensure()
    paths = ensure_bundles(options.models + 2, options.width)
    names = [path.name for path in paths]
    settings = (
        f"stub: {{front: {options.front}}}\n"
        "runtime: {start: lazy, idle: {executable: 8s}}\n"
        f"models: {{{names[0]}: {{start: eager, idle: {{executable: never}}}}}}\n"
    )
    with tempfile.TemporaryDirectory(prefix="rsrv-starts-") as home:
        repository = make_repository(Path(home), *paths, settings=settings)
        with running_triton(repository, WORK / "starts.log", timeout=300, expected=None) as server:
            say(
                f"{len(os.sched_getaffinity(0))} processors; the first starts take {Client(server, options.width).ask_all(names):.1f} s"
            )
            rounds = [one_round(server, names, options.width) for _ in range(options.rounds)]
    middle = [statistics.median(figures[at] for figures in rounds) for at in range(5)]
    heads = ["first answer s", "all s", "p99 alone ms", "beside two busy loops", "beside starts"]
    print(
        table(heads, [[f"{middle[0]:.3f}", f"{middle[1]:.2f}", *(f"{p99 * 1e3:.1f}" for p99 in middle[2:])]])
    )


if __name__ == "__main__":
    main()
