"""How long models are away after their runtime's death, on a real server.

    python -m tests.bench.deaths                       # 1, 20 and 50 models with the Python front
    python -m tests.bench.deaths --models 50 --front native --rounds 5
    python -m tests.bench.deaths --models 20 --width 2560        # weights of 25 MB each

The runtime is killed while no request is under way. Each model gets one request right after the kill, which waits for the
next runtime, and every answer is checked. The models are different modules, whose executables the compilation cache has.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tritonclient.grpc

import native_front
from rsrv_bundle.export import export_bundle
from tests.bench.phases import say
from tests.bench.places import WORK
from tests.bench.processes import cpu_seconds
from tests.bench.report import table
from tests.e2e.harness import RunningTriton, make_repository, running_triton
from tests.status import read_status

#: seconds for all models to answer again
_PATIENCE_S = 60.0


def _kernel(number: int, width: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    kernel = np.random.default_rng(number).standard_normal((width, width), np.float32)
    return kernel / np.float32(width**0.5)


def ensure_bundles(count: int, width: int) -> list[Path]:
    """Export `count` models, of three compiled sizes each, unless they are there."""
    paths = []
    for number in range(count):
        path = WORK / "deaths" / str(width) / f"model{number:03}"
        paths.append(path)
        if path.exists():
            continue

        def forward(params: Any, x: jax.Array, number: int = number) -> Any:
            return {"y": jax.numpy.tanh(x @ params["w"]) + number}

        example = {"x": jax.ShapeDtypeStruct((1, width), np.float32)}
        export_bundle(forward, {"w": _kernel(number, width)}, example, batch_sizes=(1, 4, 16), out_dir=path)
    return paths


def after_a_kill(server: RunningTriton, names: list[str], width: int) -> list[float]:
    """Kill the runtime, ask every model once, and return the seconds to each right answer, in order."""
    x = np.ones((1, width), np.float32)
    right = [np.tanh(x @ _kernel(number, width)) + number for number in range(len(names))]
    sent = tritonclient.grpc.InferInput("x", x.shape, "FP32")
    sent.set_data_from_numpy(x)
    seconds: list[float] = []
    wrong: list[str] = []
    every = threading.Semaphore(0)
    os.kill(int(read_status(server.pid)["pid"]), signal.SIGKILL)
    killed = time.monotonic()
    for number, name in enumerate(names):

        def answered(result: Any, error: Any, number: int = number, name: str = name) -> None:
            seconds.append(time.monotonic() - killed)
            if error is not None or not np.allclose(result.as_numpy("y"), right[number], atol=1e-4):
                wrong.append(f"{name}: {error}")
            every.release()

        server.grpc.async_infer(name, [sent], answered)
    for _ in names:
        assert every.acquire(timeout=_PATIENCE_S), f"{len(names) - len(seconds)} models do not answer"
    assert not wrong, wrong
    return sorted(seconds)


def main() -> None:
    """Measure each number of models."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.deaths", description=__doc__)
    parser.add_argument("--models", type=int, nargs="+", default=[1, 20, 50])
    parser.add_argument("--front", choices=("native", "python"), default="python")
    parser.add_argument("--width", type=int, default=256, help="weights take 4 * width ** 2 bytes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pause", type=float, default=12.0, help="seconds before each kill")
    options = parser.parse_args()
    if options.front == "native":
        native_front.ensure()
    paths = ensure_bundles(max(options.models), options.width)
    rows = []
    for count in options.models:
        with tempfile.TemporaryDirectory(prefix="rsrv-deaths-") as home:
            folder = Path(home)
            repository = make_repository(
                folder, *paths[:count], settings=f"stub: {{front: {options.front}, retry_s: 60}}"
            )
            log = WORK / "deaths.log"
            with running_triton(repository, log, timeout=300, spare=True, expected=None) as server:
                rounds = []
                for _ in range(options.rounds):
                    time.sleep(options.pause)
                    others = [server.pid, *server.stub_pids()]
                    before = sum(map(cpu_seconds, others))
                    rounds.append(after_a_kill(server, [path.name for path in paths[:count]], options.width))
                    runtime = int(read_status(server.pid)["pid"])
                    say(
                        f"{count} models: first {rounds[-1][0]:.2f} s, last {rounds[-1][-1]:.2f} s; CPU: "
                        f"tritonserver and stubs {sum(map(cpu_seconds, others)) - before:.2f} s, "
                        f"runtime {cpu_seconds(runtime):.2f} s, with its imports"
                    )
        first, last = (statistics.median(one[at] for one in rounds) for at in (0, -1))
        rows.append([str(count), f"{first:.2f}", f"{last:.2f}"])
    print(table(["models", "first answer s", "all models s"], rows))


if __name__ == "__main__":
    main()
