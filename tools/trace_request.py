"""Trace one warm request through the stub's engine, the runtime's loop and the scheduler.

    python tools/trace_request.py [--summary | -v]

The engine, the loop and the scheduler are the real ones, in one process and over real sockets and shared memory. The tests'
fake device computes, so the work of jax is not counted. The tool counts calls of functions in `rsrv`, in order for each thread.
A call counts as a change of module if the previous call was in another module. Several requests are traced, and the shortest
trace is printed: a thread that wakes late adds a round of the loop. `-v` also prints the tree of calls.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np

import rsrv
from rsrv.hooks.loader import Hooks
from rsrv.runtime.loop import Loop, ServerProcess
from rsrv.scheduler.slowest import MAX_SLOWEST
from rsrv.settings import load_settings
from rsrv.stub.connection import greet
from rsrv.stub.endpoint import WireTensor
from rsrv.stub.engine import Engine
from rsrv.stub.replica import StubProcess
from rsrv.stub.replicas import Replicas
from rsrv.stub.replies import Responses
from rsrv.stub.session import Attachment, Session
from rsrv.stub.tensors import Tensors
from rsrv.wire.socket import connect, listen
from tests.fakes import FakeDevice, FakePbUtils, FakeRequest
from tests.unit.runtime.conftest import double, export_doubling

#: Number of requests before the traced requests, so that all caches and learned values exist. The scheduler also keeps records of
#: the slowest requests of a model. After so many requests, few traced requests are slow enough to be recorded.
WARM_REQUESTS = 2 * MAX_SLOWEST
TRACED_REQUESTS = 9
#: After this many seconds without a call, a request's work counts as finished.
IDLE_S = 0.03
#: Function with which the scheduler's part of a trace begins.
HANDLE = "Scheduler.handle"

_PACKAGE = f"{Path(rsrv.__file__).parent}{os.sep}"


class Call(NamedTuple):
    depth: int
    module: str
    function: str


#: Calls by the name of their thread.
Trace = dict[str, tuple[Call, ...]]


class Tracer:
    """Records the calls of functions in `rsrv` on the current thread, and on all threads that start later."""

    def __init__(self) -> None:
        self._on = False
        self._calls: dict[str, list[Call]] = {}
        self._depths: Counter[str] = Counter()
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if not self._on or event not in ("call", "return") or not code.co_filename.startswith(_PACKAGE):
            return
        thread = threading.current_thread().name
        if event == "return":
            self._depths[thread] -= 1
            return
        self._depths[thread] += 1
        module = code.co_filename[len(_PACKAGE) : -len(".py")].replace(os.sep, ".")
        calls = self._calls.setdefault(thread, [])
        calls.append(Call(max(1, self._depths[thread]), module, code.co_qualname))

    def execute(self, engine: Engine) -> None:
        """Execute one request, and record its calls."""
        request = FakeRequest({"x": np.ones((1, 3), np.float32)})
        self._on = True
        if engine.execute([request]) is None:
            request.answers.get(timeout=10)

    def trace(self, engine: Engine) -> Trace:
        """Execute one request, and return the calls until no more calls happen."""
        self._calls, self._depths = {}, Counter()
        try:
            self.execute(engine)
            seen = -1
            while seen != (seen := sum(map(len, self._calls.values()))):
                time.sleep(IDLE_S)
        finally:
            self._on = False
        return {thread: tuple(calls) for thread, calls in sorted(self._calls.items())}


@contextmanager
def running_engine(folder: Path) -> Iterator[Engine]:
    """Start a runtime with one model on a fake device, and the engine of that model's stub."""
    bundle = export_doubling(folder / "doubling", w=[1, 1, 1])
    settings = load_settings()
    device = FakeDevice(double)
    path = folder / "socket"
    with listen(path) as listener:
        loop = Loop(listener, ServerProcess(os.getpid()), settings, lambda: device)
        thread = threading.Thread(target=loop.run, name="loop")
        thread.start()
        try:
            process, engines = StubProcess(Tensors(FakePbUtils), Responses(FakePbUtils)), list[Engine]()

            def make(session: Session, attachment: Attachment) -> Engine:
                outputs = (WireTensor("y", "f32", (-1, 3)),)
                engines.append(Engine(session, attachment, process, Hooks(), outputs, True))
                return engines[0]

            session = Session(lambda: greet(connect(path)), "doubling", str(bundle))
            model = Replicas(lambda device: session, make, "doubling", process)
            model.load()
            yield engines[0]
            model.close()
        finally:
            loop.stop()
            thread.join(10)


def trace_requests() -> Trace:
    """Return the shortest trace of some warm requests."""
    tracer = Tracer()
    with tempfile.TemporaryDirectory() as folder, running_engine(Path(folder)) as engine:
        # Execute these requests with the profiler and with pauses, like the traced requests. Otherwise, they would be faster, and
        # the scheduler would record all traced requests as slow.
        for _ in range(WARM_REQUESTS):
            tracer.execute(engine)
            time.sleep(IDLE_S)
        traces = [tracer.trace(engine) for _ in range(TRACED_REQUESTS)]
    sys.setprofile(None)
    threading.setprofile(None)
    return min(traces, key=lambda trace: sum(map(len, trace.values())))


def inside(calls: Iterable[Call], function: str) -> Iterator[tuple[Call, ...]]:
    """Yield each call of `function` together with all calls that are made inside it."""
    part: list[Call] = []
    for call in calls:
        if part and call.depth <= part[0].depth:
            yield tuple(part)
            part = []
        if part or call.function == function:
            part.append(call)
    if part:
        yield tuple(part)


def changes(sequences: Iterable[Iterable[Call]]) -> int:
    """Count the calls that enter another module than the previous call."""
    return sum(earlier.module != later.module for calls in sequences for earlier, later in pairwise(calls))


def summary(title: str, sequences: Iterable[tuple[Call, ...]]) -> str:
    parts = list(sequences)
    calls = [call for part in parts for call in part]
    modules = {call.module for call in calls}
    return f"{title}: {len(calls)} calls, {len(modules)} modules, {changes(parts)} changes of module"


def summaries(trace: Trace) -> list[str]:
    """Return a line for the whole request, and one for its part inside the scheduler."""
    parts = [part for calls in trace.values() for part in inside(calls, HANDLE)]
    return [
        summary("one warm request", trace.values()),
        summary(f"of these in {len(parts)} x {HANDLE}", parts),
    ]


def main() -> int:
    """Print the figures, and with -v the calls."""
    parser = argparse.ArgumentParser(description="Trace one warm request through stub, loop and scheduler.")
    parser.add_argument("--summary", action="store_true", help="print the two lines of figures only")
    parser.add_argument("-v", "--verbose", action="store_true", help="also print the tree of calls")
    arguments = parser.parse_args()
    trace = trace_requests()
    print(*summaries(trace), sep="\n")
    if arguments.summary:
        return 0
    for thread, calls in trace.items():
        print(summary(f"thread {thread}", [calls]))
        for module, count in Counter(call.module for call in calls).most_common():
            print(f"    {count:4} {module}")
    if arguments.verbose:
        for thread, calls in trace.items():
            print(f"\n{thread}")
            for call in calls:
                print(f"{'  ' * call.depth}{call.module}: {call.function}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
