"""Weights go and come back while the models live: what the scheduler asks for is done, beside everything else."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rsrv.runtime.scheduler import events as ev
from rsrv.runtime.scheduler.scheduler import Scheduler
from rsrv.runtime.scheduler.settings import SchedulerSettings
from rsrv.settings import load_settings
from rsrv.stub.engine import Engine
from rsrv.stub.lane import Lane
from tests.fakes import FakeRequest
from tests.unit.runtime.conftest import Runtime, StartRuntime
from tests.unit.runtime.test_pipelining import correct
from tests.unit.runtime.test_stub_and_runtime import make_engine, rows

#: a load that the scheduler did not ask for ends unheard
_STALE = 1


class Moving(Scheduler):
    """A scheduler that once, with its next decision, sends the weights of one model away and back."""

    def __init__(self, settings: SchedulerSettings | None = None) -> None:
        super().__init__(settings)
        self.moves: str | None = None
        self.back = threading.Event()

    def handle(self, event: ev.Event, now: float) -> list[ev.Instruction]:
        out = super().handle(event, now)
        if isinstance(event, ev.WeightsLoaded):
            self.back.set()
        name, self.moves = self.moves, None
        if name is not None:
            out += [ev.EvictWeights(name, _STALE), ev.LoadWeights(name, _STALE)]
        return out


@pytest.fixture
def runtime(start_runtime: StartRuntime) -> Runtime:
    return start_runtime(load_settings("stub: {in_place_ms: 0}"), scheduler=Moving)


def moving(runtime: Runtime) -> Moving:
    scheduler = runtime.loop._scheduler
    assert isinstance(scheduler, Moving)
    return scheduler


def move(runtime: Runtime, model: str, trigger: Engine) -> FakeRequest:
    """Move a model's weights with the next decision, which is about the request that this sends."""
    scheduler = moving(runtime)
    (scheduler.moves,) = [key for key in scheduler.snapshot().models if key.startswith(f"{model}@")]
    request = FakeRequest({"x": rows(1)})
    assert trigger.execute([request]) is None
    return request


@pytest.fixture
def engines(runtime: Runtime, doubling: Path) -> Iterator[tuple[Engine, Engine]]:
    """Of two models, `a` and `b`."""
    made = make_engine(runtime, doubling, name="a"), make_engine(runtime, doubling, name="b")
    yield made
    for gate in (runtime.device.gate, runtime.device.uploads, runtime.device.compiles):
        gate.set()
    for engine in made:
        engine.close()


def test_a_built_models_weights_are_uploaded_once(runtime: Runtime, engines: tuple[Engine, Engine]) -> None:
    """Building leaves them on the device: adding the model loads nothing."""
    assert all(correct(ask(engine)) for engine in engines)
    assert (runtime.device.uploaded, runtime.device.resident) == (2, 2)


def test_weights_that_were_evicted_are_uploaded_again(
    runtime: Runtime, engines: tuple[Engine, Engine]
) -> None:
    """From the host's copy; what was on the device before is freed."""
    a, b = engines

    request = move(runtime, "b", a)

    assert correct(request)
    assert moving(runtime).back.wait(10)
    assert (runtime.device.uploaded, runtime.device.resident) == (3, 2)
    assert correct(ask(b))


def test_a_model_executes_while_anothers_weights_upload(
    runtime: Runtime, engines: tuple[Engine, Engine]
) -> None:
    """The upload is held, and the other model answers."""
    a, _ = engines
    runtime.device.uploads.clear()

    request = move(runtime, "b", a)

    assert runtime.device.uploads.waiting.wait(10)
    assert correct(request)
    assert correct(ask(a))
    assert runtime.device.uploads.waiting.is_set()


def test_weights_upload_while_a_model_is_compiled(
    runtime: Runtime, engines: tuple[Engine, Engine], doubling: Path
) -> None:
    """A compilation takes seconds; a load waits for none."""
    a, _ = engines
    runtime.device.compiles.clear()
    lane = Lane(runtime.open())
    registering = threading.Thread(target=lane.register, args=({"model": "c", "bundle": str(doubling)},))
    registering.start()
    assert runtime.device.compiles.waiting.wait(10)

    request = move(runtime, "b", a)

    assert moving(runtime).back.wait(10)
    assert correct(request)
    runtime.device.compiles.set()
    registering.join(10)
    lane.close()


def ask(engine: Engine) -> FakeRequest:
    request = FakeRequest({"x": rows(1)})
    assert engine.execute([request]) is None
    return request
