"""Models that start without a stub: they are built and held until a stub registers, or they fail with a reason."""

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from rsrv.runtime import model_builder
from rsrv.runtime.start_queue import Demand
from rsrv.runtime.transport import Transport
from rsrv.settings import load_settings
from rsrv.stub.engine import Engine
from tests.fakes import FakeRequest
from tests.runtime_commands import command
from tests.status import read_status
from tests.unit.runtime.conftest import Runtime, StartRuntime
from tests.unit.runtime.engines import answered, make_engine, ramp, send_one
from tests.unit.runtime.metas import ask
from tests.waiting import PATIENCE_S, wait_until


@pytest.fixture
def runtime(start_runtime: StartRuntime) -> Runtime:
    return start_runtime(load_settings("stub: {in_place_ms: 0}"))


def start(models: dict[str, Path], **more: Any) -> dict[str, str]:
    """Start models. Return the reasons of those that failed, by name."""
    answer = command(
        os.getpid(), {"command": "start", "models": {k: str(v) for k, v in models.items()}, **more}
    )
    failed: dict[str, str] = answer["failed"]
    return failed


def served() -> list[str]:
    return sorted(read_status(os.getpid())["models"])


def states(runtime: Runtime) -> dict[str, str]:
    """Return the states of all models by name."""
    entries = list(runtime.loop._catalog.entries.values())
    return {entry.name: entry.state.value for entry in entries}


def is_ready(runtime: Runtime, name: str) -> Callable[[], bool]:
    return lambda: states(runtime).get(name) == "ready"


def test_a_model_is_ready_before_its_first_stub_comes(runtime: Runtime, doublings: dict[str, Path]) -> None:
    """If a model was started without a stub, its first stub registers without a build.

    When the stub leaves, the model is unloaded.
    """
    assert start({"a": doublings["a"]}) == {}
    wait_until(is_ready(runtime, "a"))
    runtime.device.compiles.clear()
    engine = make_engine(runtime, doublings["a"], name="a")
    (answer,) = ask(engine, FakeRequest({"x": ramp(1)}))

    assert answer.error is None
    engine.close()
    wait_until(lambda: served() == [])


def test_a_model_that_is_held_stays_until_it_is_let_go(runtime: Runtime, doublings: dict[str, Path]) -> None:
    """A second start of a held model changes nothing. When the model is released, it is unloaded."""
    start({"a": doublings["a"], "b": doublings["b"]})
    wait_until(is_ready(runtime, "a"))
    wait_until(is_ready(runtime, "b"))
    start({"a": doublings["a"]})

    command(os.getpid(), {"command": "start", "models": {"a": None}})

    wait_until(lambda: served() == ["b"])


def test_a_second_start_that_fails_keeps_no_model_for_good(
    runtime: Runtime, doublings: dict[str, Path], tmp_path: Path
) -> None:
    """The second start of a model, with another bundle, fails while the first start is in progress.

    The model of the first start can still be released.
    """
    registry = runtime.loop._registry

    def start_twice() -> None:
        for path in (doublings["a"], tmp_path / "nowhere"):
            registry.start("a", str(path), Demand())

    runtime.loop._inbox.post(start_twice)
    start({"b": doublings["b"]})
    for name in "ab":
        wait_until(is_ready(runtime, name))

    command(os.getpid(), {"command": "start", "models": {"a": None}})

    wait_until(lambda: served() == ["b"])


def test_a_model_that_is_held_falls_back_when_it_is_idle(
    start_runtime: StartRuntime, doublings: dict[str, Path]
) -> None:
    """A held model without a stub falls back when it has been idle for `idle.executable`."""
    runtime = start_runtime(load_settings("runtime: {idle: {executable: 10m}}"))
    start({"a": doublings["a"]})
    wait_until(is_ready(runtime, "a"))

    for after, models in ((500.0, ["a"]), (700.0, [])):
        now = time.monotonic() + after
        runtime.loop._inbox.post(partial(runtime.loop._registry.dismiss_idle, now))
        wait_until(lambda models=models: served() == models)  # type: ignore[misc]


def test_another_version_takes_the_place_of_one_that_is_held(
    runtime: Runtime, doublings: dict[str, Path]
) -> None:
    """When a stub registers the next version of a held model, the version without a stub leaves."""
    start({"a": doublings["a"]})
    wait_until(is_ready(runtime, "a"))

    make_engine(runtime, doublings["b"], name="a")

    wait_until(lambda: len(runtime.loop._catalog.entries) == 1)
    assert served() == ["a"]


@pytest.mark.parametrize("let_go", [False, True])
def test_a_model_that_is_leaving_starts_again_when_it_is_gone(
    runtime: Runtime, doublings: dict[str, Path], let_go: bool
) -> None:
    """A model that is started while it drains starts again after it has gone, unless it is released meanwhile."""
    engine = make_engine(runtime, doublings["a"], name="a")
    runtime.device.gate.clear()
    assert engine.execute([FakeRequest({"x": ramp(1)})]) is None
    runtime.device.gate.wait_until_held()
    engine.close()
    wait_until(lambda: states(runtime) == {"a": "draining"})

    start({"a": doublings["a"]})
    wait_until(lambda: runtime.loop._registry._deferred)
    if let_go:
        command(os.getpid(), {"command": "start", "models": {"a": None}})
    runtime.device.gate.set()

    start({"b": doublings["b"]})
    wait_until(is_ready(runtime, "b"))
    wait_until(lambda: not runtime.loop._registry._deferred)
    wait_until(lambda: sorted(states(runtime)) == (["b"] if let_go else ["a", "b"]))


def test_two_stubs_are_served_by_a_model_that_was_leaving_when_they_came(
    runtime: Runtime, doublings: dict[str, Path]
) -> None:
    """Two stubs that register while their model drains are served when the model has gone and started again."""
    engine = make_engine(runtime, doublings["a"], name="a")
    runtime.device.gate.clear()
    assert engine.execute([FakeRequest({"x": ramp(1)})]) is None
    runtime.device.gate.wait_until_held()
    engine.close()
    wait_until(lambda: states(runtime) == {"a": "draining"})

    engines: Queue[Engine] = Queue()
    for _ in range(2):
        threading.Thread(
            target=lambda: engines.put(make_engine(runtime, doublings["a"], name="a")), daemon=True
        ).start()
    deferred = runtime.loop._registry._deferred
    wait_until(lambda: [len(messages) for messages in deferred.values()] == [2])
    runtime.device.gate.set()

    for _ in range(2):
        engine = engines.get(timeout=PATIENCE_S)
        assert answered(send_one(engine)) == 1
        engine.close()


def test_a_model_that_cannot_be_built_is_kept_no_longer(runtime: Runtime, doublings: dict[str, Path]) -> None:
    """If a model cannot be built, the runtime keeps only the reason of the latest start, however often the model is started."""
    runtime.device.fail = "told to"
    for _ in range(3):
        start({"a": doublings["a"]})
        wait_until(lambda: "told to" in start({"a": doublings["a"]}, poll=True).get("a", ""))
    assert runtime.loop._registry._held == {}

    runtime.device.fail = None
    start({"a": doublings["a"]})
    wait_until(is_ready(runtime, "a"))
    assert start({"a": doublings["a"]}, poll=True) == {}


def test_a_model_for_whose_executables_no_mapping_is_left_is_refused(
    runtime: Runtime, doublings: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model is refused if too few mappings are left for its executables, because XLA would end the runtime.

    For the next model, the mappings are counted again.
    """
    spare_mappings = iter([100, 30000])
    monkeypatch.setattr(model_builder, "spare_mappings", lambda: (next(spare_mappings), 65530))
    start({"a": doublings["a"]})
    wait_until(lambda: "vm.max_map_count: 65530" in start({"a": doublings["a"]}, poll=True).get("a", ""))

    for name in "abcd":
        start({name: doublings[name]})
        wait_until(is_ready(runtime, name))


def test_a_connection_registers_without_reading_the_others(
    runtime: Runtime, doublings: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A registration does not look at all connections.

    After a runtime's death, thousands of stubs register, so this would take seconds.
    """
    monkeypatch.setattr(Transport, "connections", property(lambda self: pytest.fail("all were read")))
    make_engine(runtime, doublings["a"], name="a")
    monkeypatch.undo()


def test_a_bundle_that_cannot_be_read_is_a_reason(runtime: Runtime, tmp_path: Path) -> None:
    """The reason why a bundle cannot be read is in the answer to a poll, which does not start the model again."""
    start({"a": tmp_path / "nowhere"})

    wait_until(lambda: "a" in start({"a": tmp_path / "nowhere"}, poll=True))

    assert "nowhere" in start({"a": tmp_path / "nowhere"}, poll=True)["a"]
