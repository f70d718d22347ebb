"""Print the events on the fake card while a restart or a death of the runtime leaves a model without answers.

    .venv/bin/python -m tests.gpu.measure_restart --event death

One client sends requests continuously. The times are seconds since the last answer of the old runtime. The first restart starts a
runtime without a preparation. During later restarts, the next runtime is prepared.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np

from rsrv.stub.engine import Engine
from rsrv.stub.session import Launcher
from tests.fakes import FakeRequest
from tests.gpu.conftest import end_runtime
from tests.gpu.fake_gpu import MIB, ROOT, Call, FakeGpu
from tests.runtime_commands import command
from tests.status import read_status
from tests.unit.runtime.conftest import export_doubling
from tests.unit.runtime.metas import engine_of
from tests.waiting import wait_until

#: Seconds that a request may wait for a runtime, and seconds after which a spare has imported its modules.
PATIENCE_S, SPARE_S = 120, 15.0


@contextmanager
def asking(engine: Engine) -> Iterator[list[float]]:
    """Send requests on a thread during the block. Yield the list of the answers' times."""
    answers: list[float] = []
    stop = threading.Event()

    def ask() -> None:
        while not stop.wait(0.005):
            request = FakeRequest({"x": np.ones((1, 3), np.float32)})
            (answer,) = engine.execute([request]) or [request.answers.get(timeout=PATIENCE_S)]
            assert answer.error is None
            answers.append(time.monotonic())

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield answers
    finally:
        stop.set()
        thread.join()


def replace_runtime(gpu: FakeGpu, event: str, answers: list[float]) -> list[tuple[float, str]]:
    """Restart or kill the runtime. Return the events with their times."""
    begun, old = time.monotonic(), read_status(os.getpid(), "0")["pid"]
    process = os.pidfd_open(old)
    if event == "restart":
        command(os.getpid(), {"command": "restart", "drain_s": 10.0}, timeout=PATIENCE_S)
    else:
        os.kill(old, signal.SIGKILL)
    select.select([process], [], [])
    end = time.monotonic()
    os.close(process)
    wait_until(lambda: answers[-1] > end, timeout=PATIENCE_S)
    last, first = max(pairwise(answers), key=lambda pair: pair[1] - pair[0])
    stamps = [(end, "the old process is gone"), (first, "the first answer of the next runtime")]
    for call in gpu.calls("context", "alloc", "h2d", "kernel"):
        if call.pid != old and begun < call.start < first:
            stamps.append((call.end, f"the driver's {_described(call)}"))
    return [(when - last, what) for when, what in sorted(stamps)]


def _described(call: Call) -> str:
    return f"{call.kind} of {call.bytes}" if call.kind != "kernel" else f"kernel {call.detail}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--event", choices=["restart", "death"], default="restart")
    parser.add_argument("--count", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory() as home:
        folder = Path(name)
        os.environ["RSRV_RUNTIME_DIR"] = home
        gpu = FakeGpu(folder)
        gpu.settings.context_bytes = 500 * MIB
        bundle = export_doubling(folder / "doubling" / "1" / "bundle", w=[1, 1, 1])
        settings = folder / "rsrv.yaml"
        runtime = f"{{platform: cuda, compilation_cache_dir: {folder / 'cache'}}}"
        settings.write_text(
            f"control: {{enabled: false}}\nruntime: {runtime}\nstub: {{retry_s: {PATIENCE_S}}}\n"
        )
        launcher = Launcher(os.getpid(), "0", settings, ROOT, {**os.environ, **gpu.environment})
        engine = engine_of(launcher.open, bundle)
        try:
            for number in range(options.count):
                with asking(engine) as answers:
                    time.sleep(SPARE_S if options.event == "death" else 1.0)
                    happened = replace_runtime(gpu, options.event, answers)
                print(f"{options.event} {number + 1}")
                for when, what in happened:
                    print(f"{when:8.3f} s  {what}", flush=True)
        finally:
            engine.close()
            end_runtime(launcher)


if __name__ == "__main__":
    main()
