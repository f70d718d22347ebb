"""More models than the weight budget holds: what the scheduler asks for is done, beside everything else."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rsrv.settings import load_settings
from rsrv.stub.engine import Engine
from rsrv.stub.lane import Lane, Rejected
from tests.fakes import FakeRequest
from tests.unit.runtime.conftest import Runtime, StartRuntime
from tests.unit.runtime.test_pipelining import correct
from tests.unit.runtime.test_stub_and_runtime import make_engine, rows

#: of the bundle `doubling`: three f32
_BYTES = 12


@pytest.fixture
def runtime(start_runtime: StartRuntime) -> Runtime:
    """Room for two models."""
    return start_runtime(
        load_settings(f"stub: {{in_place_ms: 0}}\nruntime: {{weight_budget_bytes: {2 * _BYTES}}}")
    )


@pytest.fixture
def engines(runtime: Runtime, doubling: Path) -> Iterator[list[Engine]]:
    """Of models `a`, `b` and `c`, built in this order."""
    made = [make_engine(runtime, doubling, name=name) for name in "abc"]
    yield made
    for gate in (runtime.device.gate, runtime.device.uploads, runtime.device.compiles):
        gate.set()
    for engine in made:
        engine.close()


def test_models_that_fit_are_uploaded_once(runtime: Runtime, doubling: Path) -> None:
    """Building leaves the weights on the device: adding the models loads nothing."""
    engines = [make_engine(runtime, doubling, name=name) for name in "ab"]

    assert all(correct(ask(engine)) for engine in engines)
    assert (runtime.device.uploaded, runtime.device.resident) == (2, 2)
    for engine in engines:
        engine.close()


def test_the_least_recently_used_gives_way_and_comes_back(runtime: Runtime, engines: list[Engine]) -> None:
    """Building `c` evicted `a`; a request brings `a` back and evicts `b`, and so on; all answers are right."""
    for engine in engines:
        assert correct(ask(engine))

    assert (runtime.device.uploaded, runtime.device.resident) == (6, 2)


def test_a_model_executes_while_anothers_weights_upload(runtime: Runtime, engines: list[Engine]) -> None:
    """The upload of `a` is held, and `c` answers."""
    a, _, c = engines
    runtime.device.uploads.clear()

    late = ask(a)

    assert runtime.device.uploads.waiting.wait(10)
    assert correct(ask(c))
    assert runtime.device.uploads.waiting.is_set()
    runtime.device.uploads.set()
    assert correct(late)


def test_weights_upload_while_a_model_is_compiled(
    runtime: Runtime, engines: list[Engine], doubling: Path
) -> None:
    """A compilation takes seconds; a load waits for none."""
    a, *_ = engines
    runtime.device.compiles.clear()
    lane = Lane(runtime.open())
    registering = threading.Thread(target=lane.register, args=({"model": "d", "bundle": str(doubling)},))
    registering.start()
    assert runtime.device.compiles.waiting.wait(10)

    assert correct(ask(a))

    runtime.device.compiles.set()
    registering.join(10)
    lane.close()


def test_a_model_larger_than_the_budget_is_not_loaded(start_runtime: StartRuntime, doubling: Path) -> None:
    """The load fails and says what to change."""
    runtime = start_runtime(load_settings(f"runtime: {{weight_budget_bytes: {_BYTES - 1}}}"))

    with pytest.raises(Rejected, match="12 bytes of weights are more than"):
        make_engine(runtime, doubling)


def ask(engine: Engine) -> FakeRequest:
    request = FakeRequest({"x": rows(1)})
    assert engine.execute([request]) is None
    return request
