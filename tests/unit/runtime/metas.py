"""Meta models for tests, and their stub's engine in this process."""

from __future__ import annotations

import gc
import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import pytest

from rsrv.hooks.loader import Hooks, load_hooks, load_run
from rsrv.stub.connection import Greeted, LaunchError
from rsrv.stub.endpoint import WireTensor
from rsrv.stub.engine import Engine
from rsrv.stub.meta_engine import MetaEngine, MetaModel
from rsrv.stub.replica import ModelReplica, StubProcess
from rsrv.stub.replicas import Replicas
from rsrv.stub.replies import RequestFailure, Responses, untag
from rsrv.stub.session import Attachment, Session
from rsrv.stub.tensors import Array, Tensors
from rsrv.wire.frames import Status
from tests.fakes import FakePbUtils, FakeRequest, FakeResponse
from tests.status import read_status
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from tests.unit.runtime.conftest import Runtime

OUTPUTS = (WireTensor("y", "f32", (-1, 3)),)
#: Seconds to wait for something that should happen at once.
SOON = PATIENCE_S

Run = Callable[[dict[str, Array], Any], Any]


@dataclass
class FakeCallees:
    """A fake of BLS.

    It calls models outside of the runtime, which are functions, and models in the runtime through their stubs.
    """

    models: Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]] = field(default_factory=dict)
    engines: dict[str, Engine] = field(default_factory=dict)
    #: The token of each sub-call.
    tokens: list[int] = field(default_factory=list)
    _threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(16))
    #: One lock per model, because Triton runs one execute() of a model at a time.
    _entries: dict[str, threading.Lock] = field(default_factory=lambda: defaultdict(threading.Lock))

    def start(
        self,
        name: str,
        inputs: dict[str, Any],
        *,
        deadline_ns: int = 0,
        run: int = 0,
        traceparent: str = "",
        **_: Any,
    ) -> Future[dict[str, Any]]:
        if name in self.engines:
            return self._threads.submit(self._infer, name, inputs, deadline_ns, run, traceparent)
        future: Future[dict[str, Any]] = Future()
        if name in self.models:
            future.set_result(self.models[name](inputs))
        else:
            future.set_exception(RequestFailure(Status.NOT_FOUND, f"there is no model {name!r}"))
        return future

    def _infer(
        self, name: str, inputs: dict[str, Any], deadline_ns: int, run: int, traceparent: str
    ) -> dict[str, Any]:
        self.tokens.append(run)
        timeout_us = max(1, (deadline_ns - time.monotonic_ns()) // 1000) if deadline_ns else 0
        answer = self.ask(name, FakeRequest(inputs, timeout_us, with_token(run, traceparent)))
        if answer.error is not None:
            raise untag(answer.error.message) or RequestFailure(Status.INTERNAL, answer.error.message)
        return answer.arrays

    def ask(self, name: str, request: FakeRequest) -> FakeResponse:
        """Return the answer of one of the stubs."""
        with self._entries[name]:
            answers = self.engines[name].execute([request])
        return answers[0] if answers is not None else answer_of(request)

    def close(self) -> None:
        self._threads.shutdown()
        for engine in self.engines.values():
            engine.close()


def with_token(run: int, traceparent: str = "") -> str:
    """Return a request's parameters, as Triton passes them."""
    return json.dumps({"rsrv_run": str(run), "traceparent": traceparent})


class Alone(ModelReplica[Any]):
    """The only replica of its model. Closing the replica closes the model, and the reverse."""

    def close(self, **options: bool) -> None:
        model = self._process.model
        if self._process.front.is_closed or model is None:
            super().close(**options)
        else:
            cast(Replicas, model).close()


class LoneEngine(Alone, Engine):
    """An `Engine` that is the only replica of its model."""


class LoneMetaEngine(Alone, MetaEngine):
    """A `MetaEngine` that is the only replica of its model."""


class Silent(Replicas):
    """A model that reports no measurements."""

    def _report(self, replica: ModelReplica[Any]) -> None: ...


R = TypeVar("R", bound=ModelReplica[Any])


def load(
    session: Session,
    make: Callable[[Session, Attachment, StubProcess], R],
) -> R:
    """Load a model with one device, and return its replica, which `make` creates."""
    process, made = StubProcess(Tensors(FakePbUtils), Responses(FakePbUtils)), list[R]()

    def keep(session: Session, attachment: Attachment) -> R:
        made.append(make(session, attachment, process))
        return made[-1]

    def open_session(device: int) -> Session:
        return session if device == session.device else Session(_no_runtime, session.model, "", device=device)

    Silent(open_session, keep, session.model, process).load()
    return made[-1]


def _no_runtime() -> Greeted:
    raise LaunchError("only one device has a runtime")


def engine_of(
    open_connection: Callable[[], Greeted],
    bundle: Path,
    name: str = "doubling",
    hooks: Hooks | None = None,
    outputs: Sequence[WireTensor] = OUTPUTS,
    *,
    internal: bool = False,
) -> Engine:
    """Start the engine of a model's own stub, which is the model's only replica."""
    return load(
        Session(open_connection, name, str(bundle)),
        lambda session, attachment, process: LoneEngine(
            session, attachment, process, hooks or Hooks(), outputs, True, internal=internal
        ),
    )


def model_engine(
    runtime: Runtime, bundle: Path, hooks: Hooks | None = None, *, internal: bool = False
) -> Engine:
    """Start the engine of a model that has the name of its bundle. The engine is closed at the end of the test.

    An internal model has an engine of its own only with `meta.transport: bls`.
    """
    engine = engine_of(runtime.open, bundle, bundle.name, hooks, internal=internal)
    runtime.users.callback(engine.close)
    return engine


@contextmanager
def meta_engine(
    runtime: Runtime,
    bundle: Path,
    calls: Mapping[str, Path],
    *,
    run: Run | None = None,
    hooks: Mapping[str, Hooks] | None = None,
    triton: FakeCallees | None = None,
    outputs: tuple[WireTensor, ...] = OUTPUTS,
    batched: bool = True,
    restartable: bool = False,
) -> Iterator[MetaEngine]:
    """Start the engine of a meta model's stub, connected to `runtime`.

    `run` and `hooks` replace the run and the hooks of the bundles.
    """
    bls: Any = triton or FakeCallees()
    model = MetaModel(
        run or load_run(bundle / "model.py"),
        {n: (hooks or {}).get(n) or load_hooks(path / "model.py") for n, path in calls.items()},
        outputs,
        batched,
        list(bls.models),
        restartable,
    )
    engine = load(
        Session(runtime.open, bundle.name, str(bundle), {name: str(path) for name, path in calls.items()}),
        lambda session, attachment, process: LoneMetaEngine(
            session, attachment, process, model, lambda settings: bls
        ),
    )
    try:
        yield engine
    finally:
        runtime.device.gate.set()
        engine.close()


def rows(count: int, value: float = 1.0) -> np.ndarray[Any, Any]:
    return np.full((count, 3), value, np.float32)


def request(count: int = 1, value: float = 1.0, timeout: float = 0, priority: int = 0) -> FakeRequest:
    """Return a request with `rows` for x; `timeout` in seconds, 0 for none."""
    parameters = json.dumps({"rsrv_priority": priority}) if priority else "{}"
    return FakeRequest({"x": rows(count, value)}, int(timeout * 1e6), parameters)


def ask(engine: MetaEngine | Engine, *requests: FakeRequest) -> list[FakeResponse]:
    """Send requests, and return their responses, whether they are answered in place or later."""
    answers = engine.execute(list(requests))
    if answers is not None:
        return answers
    return [request.answers.get(timeout=SOON) for request in requests]


def send(engine: MetaEngine | Engine, *requests: FakeRequest) -> threading.Thread:
    """Start a thread that sends requests. Each answer is put into the `answers` of its request."""

    def work() -> None:
        answers = engine.execute(list(requests))
        for request, answer in zip(requests, answers or (), strict=False):
            request.answers.put(answer)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def answer_of(request: FakeRequest) -> FakeResponse:
    """Wait for the answer of a request, and return it."""
    return request.answers.get(timeout=SOON)


def assert_y(answer: FakeResponse, expected: Array) -> None:
    assert answer.error is None, answer.error.message
    np.testing.assert_array_equal(answer.arrays["y"], expected)


def assert_fails(answer: FakeResponse, code: str, text: str) -> None:
    """Check that a request failed with this code of `FakeError`, and that its message is one line that contains `text`."""
    assert answer.error is not None, answer.arrays
    assert answer.error.code == code, answer.error.message
    assert text in answer.error.message
    assert "\n" not in answer.error.message


class Pause:
    """Stops threads of the code under test until the test calls `go`.

    It may stop any number of threads, any number of times.
    """

    def __init__(self) -> None:
        self._reached = threading.Semaphore(0)
        self._go = threading.Semaphore(0)

    def __call__(self) -> None:
        self._reached.release()
        assert self._go.acquire(timeout=SOON), "no test said go on"

    def reached(self, times: int = 1) -> None:
        """Wait until `times` more threads have stopped here."""
        for _ in range(times):
            assert self._reached.acquire(timeout=SOON), "not reached"

    @property
    def is_reached(self) -> bool:
        """Return whether another thread has stopped. Each stop is reported once, by `reached` or by this property."""
        return self._reached.acquire(blocking=False)

    def go(self, times: int = 1) -> None:
        self._go.release(times)


def status_of(meta: str = "meta") -> dict[str, Any]:
    """Return the status of a meta model."""
    status: dict[str, Any] = read_status(os.getpid())["metas"][meta]
    return status


def queued(model: str) -> int:
    """Return the number of requests for a model that wait in the runtime."""
    count: int = read_status(os.getpid())["models"][model]["queued"]
    return count


def chain(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
    return {"y": call("b", {"x": call("a", inputs)["y"]})["y"]}


async def awaiting(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
    return {"y": (await call("b", {"x": (await call("a", inputs))["y"]}))["y"]}


def stopping(pause: Pause) -> Run:
    """Return a run of two calls that pauses between the calls, except for the request of `assert_served`."""

    def run(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
        first = call("a", inputs)["y"]
        if inputs["x"][0, 0] != 100:
            pause()
        return {"y": call("b", {"x": first})["y"]}

    return run


both_kinds = pytest.mark.parametrize("run", [chain, awaiting], ids=["plain", "async"])


def assert_served(engine: MetaEngine) -> None:
    """Check that the next request, x = 100, is answered by `chain` or a meta model that computes the same."""
    (answer,) = ask(engine, request(value=100))
    assert_y(answer, rows(1, 404))


def memory_of(engine: MetaEngine) -> tuple[int, int]:
    """Return how many bytes of memory the engine's idle connections have, and how many of these bytes are in use."""
    gc.collect()
    total = taken = 0
    assert engine._idle is not None
    for lane in engine._idle.connections:
        lane.array((1,), np.dtype(np.uint8))  # This frees memory that nothing refers to any more.
        while lane._returned:
            lane._arena.give(lane._returned.popleft())
        for segment in lane._arena._segments.values():
            total += segment.nbytes
            taken += segment.nbytes - sum(length for _, length in segment.free)
    return total, taken
