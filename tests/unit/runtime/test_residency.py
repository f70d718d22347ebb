"""More models than the weight budget holds: the runtime carries out the scheduler's loads and evictions."""

import os
from pathlib import Path

import pytest

from rsrv.runtime.host_memory import HostMemory, HostMemoryError
from rsrv.settings import load_settings
from rsrv.stub.connection import Rejected
from rsrv.stub.engine import Engine
from tests.runtime_commands import compact
from tests.unit.runtime.conftest import Runtime, StartRuntime
from tests.unit.runtime.engines import answered, make_engine, register, send_one

#: Bytes of the bundle `doubling`: three f32.
_BYTES = 12


@pytest.fixture
def runtime(start_runtime: StartRuntime) -> Runtime:
    """Start a runtime with room for two models."""
    return start_runtime(
        load_settings(f"stub: {{in_place_ms: 0}}\nruntime: {{weight_budget_bytes: {2 * _BYTES}}}")
    )


@pytest.fixture
def engines(runtime: Runtime, doublings: dict[str, Path]) -> list[Engine]:
    """Return engines of models `a`, `b` and `c`, built in this order."""
    return [make_engine(runtime, doublings[name], name=name) for name in "abc"]


def test_the_least_recently_used_model_is_evicted_and_comes_back(
    runtime: Runtime, engines: list[Engine]
) -> None:
    """With room for two models, each request for the third one loads it and evicts the least recently used one."""
    for w, engine in enumerate(engines, 1):
        assert answered(send_one(engine)) == w

    assert (runtime.device.uploaded, runtime.device.resident) == (6, 2)


def test_a_model_with_known_costs_is_served_without_a_warm_up(
    start_runtime: StartRuntime, doublings: dict[str, Path]
) -> None:
    """After a runtime's death, a model with known costs is ready before its weights are loaded, and needs no warm-up."""
    first = start_runtime()
    make_engine(first, doublings["a"], name="a").close()
    first.stop()
    second = start_runtime()
    second.device.costs = first.device.costs
    second.device.uploads.clear()

    engine = make_engine(second, doublings["a"], name="a")

    second.device.uploads.wait_until_held()  # The weights are loaded without a request.
    late = send_one(engine)
    assert not second.device.executed
    second.device.uploads.set()
    assert answered(late) == 1
    assert len(second.device.executed) == 1


def test_a_new_version_is_warmed_up_although_its_costs_are_known(
    start_runtime: StartRuntime, doublings: dict[str, Path]
) -> None:
    """Even if its costs are known, a new version is warmed up before it replaces the old one.

    So its weights are on the device when it takes over.
    """
    first = start_runtime()
    make_engine(first, doublings["a"], name="model").close()
    first.stop()
    second = start_runtime()
    second.device.costs = first.device.costs
    make_engine(second, doublings["b"], name="model")
    executed = len(second.device.executed)

    make_engine(second, doublings["a"], name="model")

    assert len(second.device.executed) > executed
    assert second.device.resident == 2


def test_a_model_executes_while_anothers_weights_upload(runtime: Runtime, engines: list[Engine]) -> None:
    """One model executes while the upload of another one is held."""
    a, _, c = engines
    runtime.device.uploads.clear()

    late = send_one(a)

    runtime.device.uploads.wait_until_held()
    assert answered(send_one(c)) == 3
    assert runtime.device.uploads.waiting.is_set()
    runtime.device.uploads.set()
    assert answered(late) == 1


def test_weights_upload_while_a_model_is_compiled(
    runtime: Runtime, engines: list[Engine], doublings: dict[str, Path]
) -> None:
    """Weights are uploaded while a model is compiled."""
    a, *_ = engines
    runtime.device.compiles.clear()
    registering = register(runtime, "d", doublings["d"])
    runtime.device.compiles.wait_until_held()

    assert answered(send_one(a)) == 1

    runtime.device.compiles.set()
    registering.join()


def test_a_model_warms_up_while_another_is_compiled(
    start_runtime: StartRuntime, doublings: dict[str, Path]
) -> None:
    """A new model is warmed up while another one is still compiled, even if only one model's weights fit on the device.

    The new model keeps its weights until it is warmed up. The served model is then loaded again.
    """
    runtime = start_runtime(
        load_settings(f"stub: {{in_place_ms: 0}}\nruntime: {{weight_budget_bytes: {_BYTES}}}")
    )
    served = make_engine(runtime, doublings["c"], name="c")
    runtime.device.uploads.clear()
    warming = register(runtime, "a", doublings["a"])
    runtime.device.uploads.wait_until_held()
    runtime.device.compiles.clear()
    compiled = register(runtime, "b", doublings["b"])
    runtime.device.compiles.wait_until_held()

    runtime.device.uploads.set()

    assert answered(send_one(served)) == 3
    warming.join()
    assert runtime.device.compiles.waiting.is_set()
    runtime.device.compiles.set()
    compiled.join()


def test_a_compaction_does_not_wait_for_a_compilation(
    runtime: Runtime, engines: list[Engine], doublings: dict[str, Path]
) -> None:
    """A compaction waits for a warm-up, but not for a compilation."""
    runtime.device.uploads.clear()
    warming = register(runtime, "d", doublings["d"])
    runtime.device.uploads.wait_until_held()
    runtime.device.compiles.clear()
    compiled = register(runtime, "another", doublings["d"])
    runtime.device.compiles.wait_until_held()

    compact(os.getpid())
    runtime.device.uploads.set()

    assert [answered(send_one(engine)) for engine in engines] == [1, 2, 3]
    assert runtime.device.compiles.waiting.is_set()
    runtime.device.compiles.set()
    for registering in (warming, compiled):
        registering.join()


def test_a_model_larger_than_the_budget_is_served_alone(
    start_runtime: StartRuntime, doublings: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """A model larger than the budget is served alone. The log has its bytes, and the setting to raise."""
    runtime = start_runtime(
        load_settings(f"stub: {{in_place_ms: 0}}\nruntime: {{weight_budget_bytes: {_BYTES - 1}}}")
    )
    engines = [make_engine(runtime, doublings[name], name=name) for name in "ab"]

    assert [answered(send_one(engine)) for engine in (*engines, *engines)] == [1, 2, 1, 2]
    assert runtime.device.resident == 1
    assert "takes 12 bytes of the device" in caplog.text
    assert "raise runtime.weight_budget_bytes" in caplog.text


def test_what_fails_at_the_start_is_tried_again_with_the_next_model(
    start_runtime: StartRuntime, doublings: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If shared memory cannot be used, models are rejected with the reason. After a repair, the next model is loaded."""
    failures = iter([True, True, False])

    def shared(setting: bool | None, owner: str) -> HostMemory:
        assert setting
        if next(failures):
            raise HostMemoryError("/dev/shm/ours must be closed to others")
        return HostMemory()

    monkeypatch.setattr("rsrv.runtime.model_builder.open_host_memory", shared)
    runtime = start_runtime(load_settings("stub: {in_place_ms: 0}\nruntime: {shared_host_weights: true}"))
    with pytest.raises(Rejected, match="must be closed to others"):
        make_engine(runtime, doublings["a"], name="a")

    engine = make_engine(runtime, doublings["a"], name="a")

    assert answered(send_one(engine)) == 1
