"""Cold models: their stubs wait without a model in the runtime, the first request starts it, and it may fall back to cold."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from unittest.mock import Mock

import numpy as np
import pytest

from rsrv.front.events import WentCold
from rsrv.front.rules import DOWN
from rsrv.front.states import ServingState
from rsrv.hooks.loader import Arrays, HookError, Hooks
from rsrv.limits import total_memory
from rsrv.runtime import host_copies, host_weights, idle_models, weight_mover
from rsrv.runtime.host_copies import Shortage
from rsrv.runtime.start_queue import Urgency
from rsrv.settings import Settings, load_settings
from rsrv.stub import engine
from rsrv.stub.endpoint import WireTensor
from rsrv.stub.engine import Engine
from rsrv.stub.meta_engine import MetaEngine, MetaModel
from rsrv.stub.replica import StubProcess
from rsrv.stub.replicas import Replicas
from rsrv.stub.replies import Responses
from rsrv.stub.session import Attachment, Session
from rsrv.stub.tensors import Tensors
from rsrv.wire.socket import Closed
from tests.builders import broken_bundle, write_meta
from tests.fakes import FakePbUtils, FakeRequest, FakeResponse, NewResponse
from tests.status import read_status
from tests.unit.runtime.conftest import Runtime, StartMeta, StartRuntime
from tests.unit.runtime.metas import FakeCallees, answer_of
from tests.unit.runtime.watchers import Operator, Watcher
from tests.waiting import PATIENCE_S, wait_until

OUTPUTS = (WireTensor("y", "f32", (-1, 3)),)
LAZY = "runtime: {start: lazy}"


class Stub:
    """The stub process of a model, set up as `rsrv.stub.model` does it."""

    def __init__(
        self,
        runtime: Runtime,
        bundle: Path,
        hooks: Callable[[], Hooks] = Hooks,
        calls: dict[str, Path] | None = None,
    ) -> None:
        self.runtime, self._bundle, self._hooks, self._calls = runtime, bundle, hooks, calls
        self.process = StubProcess(Tensors(FakePbUtils), Responses(FakePbUtils))
        self._engines: list[Engine | MetaEngine] = []
        self.model = Replicas(self._open_session, self._make, bundle.name, self.process)
        self.model.load()

    def _open_session(self, device: int) -> Session:
        calls = None if self._calls is None else {name: str(path) for name, path in self._calls.items()}
        return Session(lambda: self.runtime.open(), self._bundle.name, str(self._bundle), calls)

    def _make(self, session: Session, attachment: Attachment) -> Engine | MetaEngine:
        engine: Engine | MetaEngine
        if self._calls is None:
            engine = Engine(session, attachment, self.process, self._hooks(), OUTPUTS, True)
        else:
            hooks = dict.fromkeys(self._calls, Hooks())
            model = MetaModel(lambda inputs, call: call("a", inputs), hooks, OUTPUTS)
            engine = MetaEngine(
                session,
                attachment,
                self.process,
                model,
                lambda settings: pytest.fail("there are no calls through Triton"),
            )
        self._engines.append(engine)
        return engine

    @property
    def attachment(self) -> Attachment:
        (session,) = self.process.sessions
        wait_until(lambda: session.attachment is not None)
        assert session.attachment is not None
        return session.attachment

    @property
    def engine(self) -> Engine | MetaEngine:
        """Return the engine of the model's replica, as soon as it has started."""
        wait_until(lambda: self._engines)
        return self._engines[0]

    @property
    def state(self) -> ServingState:
        """The model's state on its device."""
        return self.process.front.snapshot.devices[0].state

    @property
    def is_cold(self) -> bool:
        """Whether the model is cold: it is not connected to the runtime, and it does not start."""
        return self.state is ServingState.COLD

    def send(self, start: float = 0.0) -> FakeRequest:
        """Send a request of one row, and return it. It may have its answer already."""
        request = FakeRequest({"x": np.full((1, 3), start, np.float32)})
        for answer in self.model.execute([request]) or ():
            request.answers.put(answer)
        return request

    def ask(self, start: float = 0.0) -> FakeResponse:
        return answer_of(self.send(start))


StartStub = Callable[..., Stub]


@pytest.fixture
def start_stub() -> Iterator[StartStub]:
    started: list[Stub] = []

    def start(*args: object, **options: object) -> Stub:
        started.append(Stub(*args, **options))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for stub in started:
        stub.runtime.device.compiles.set()
        stub.model.close()


@pytest.fixture
def lazy(start_runtime: StartRuntime) -> Runtime:
    """Return a runtime whose models start when the first request comes."""
    return start_runtime(load_settings(LAZY))


def is_answered(answer: FakeResponse, start: float = 0.0) -> bool:
    """Return whether the answer is right for `doubling` or `a`, which both compute y = 2 x + 1."""
    return answer.error is None and bool((answer.arrays["y"] == 2 * start + 1).all())


def error_of(answer: FakeResponse) -> str:
    assert answer.error is not None
    return answer.error.message


def models() -> dict[str, str]:
    """Return the states of the runtime's models."""
    return {name: model["state"] for name, model in read_status(os.getpid())["models"].items()}


def dismiss(runtime: Runtime, key: str) -> None:
    """Let the runtime dismiss a model, as it does with idle models."""
    runtime.loop._inbox.post(partial(runtime.loop._registry.dismiss, key))


def test_a_lazy_model_is_loaded_without_its_bundle(
    lazy: Runtime, start_stub: StartStub, tmp_path: Path
) -> None:
    """The runtime answers the stub of a lazy model without reading its bundle.

    After that, the runtime has neither the model nor a connection of the stub.
    """
    stub = start_stub(lazy, tmp_path / "not there yet", lambda: pytest.fail("hooks were imported"))

    assert stub.is_cold
    assert models() == {}
    wait_until(lambda: read_status(os.getpid())["connections"] == 1)  # The status request has one.


@pytest.mark.parametrize("slow", [True, False])
def test_a_slow_answer_carries_its_number(
    lazy: Runtime, start_stub: StartStub, doubling: Path, monkeypatch: pytest.MonkeyPatch, *, slow: bool
) -> None:
    """From Triton 25.02 on, a slow answer carries a number, by which clients without ids can use `rsrv why`.

    A quick answer has none.
    """
    monkeypatch.setattr(FakePbUtils, "InferenceResponse", NewResponse)
    monkeypatch.setattr(engine, "_SLOW_S", 0.0 if slow else inf)

    answer = start_stub(lazy, doubling).ask()

    assert isinstance(answer, NewResponse)
    assert (answer.given is not None and answer.given["rsrv_request"] >= 0) is slow


def test_the_first_requests_of_a_model_share_its_start(
    lazy: Runtime, start_stub: StartStub, doubling: Path
) -> None:
    """Twenty requests for a cold model wait for one start, and each gets its answer when the model is ready."""
    stub = start_stub(lazy, doubling)
    lazy.device.compiles.clear()
    requests = [stub.send(float(number)) for number in range(20)]
    lazy.device.compiles.wait_until_held()
    with Watcher(lazy) as watcher:
        assert watcher.is_("doubling", state="loading")

        lazy.device.compiles.set()
        watcher.until(lambda: watcher.is_("doubling", state="ready"))

    assert all(is_answered(answer_of(request), number) for number, request in enumerate(requests))


def test_a_start_that_fails_is_a_reason_and_a_pause(
    lazy: Runtime, start_stub: StartStub, doubling: Path, tmp_path: Path
) -> None:
    """If a start fails, waiting requests get the reason, and so do new requests during the pause that follows.

    A request after the pause starts the model again.
    """
    path = broken_bundle(tmp_path / "doubling", doubling)
    stub = start_stub(lazy, path)

    assert "could not be started: model.b1.mlir" in error_of(stub.ask())
    assert "could not be started: model.b1.mlir" in error_of(stub.ask())
    good = start_stub(lazy, doubling)
    assert is_answered(good.ask())

    wait_until(lambda: stub.is_cold)
    for file in doubling.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    # A request with a deadline starts the model as well: the reason of the failed start does not apply to it any more.
    request = FakeRequest({"x": np.zeros((1, 3), np.float32)}, timeout_us=100_000_000)
    assert stub.model.execute([request]) is None
    assert is_answered(answer_of(request))


def test_a_failed_start_is_forgotten_when_the_model_is_loaded_again(
    lazy: Runtime, start_stub: StartStub, doubling: Path, tmp_path: Path
) -> None:
    """An operator who repairs a bundle and reloads its model sees it cold at once, and not failed until a request comes."""
    stub = start_stub(lazy, broken_bundle(tmp_path / "doubling", doubling))
    with Watcher(lazy) as watcher:
        assert "could not be started" in error_of(stub.ask())
        watcher.until(lambda: watcher.is_("doubling", state="failed"))

        start_stub(lazy, doubling)

        watcher.until(lambda: not watcher.entries)


def test_hooks_that_cannot_be_imported_fail_the_start(
    lazy: Runtime, start_stub: StartStub, doubling: Path
) -> None:
    """Hooks are imported during the start.

    If this fails, clients get the error, and the runtime keeps no model without a stub.
    """
    errors: list[BaseException] = [HookError("model.py: defines neither"), SystemExit(3)]

    def hooks() -> Hooks:
        raise errors.pop(0)

    first, second = (start_stub(lazy, doubling, hooks) for _ in range(2))

    assert "could not be started: model.py: defines neither" in error_of(first.ask())
    assert "could not be started: SystemExit: 3" in error_of(second.ask())
    wait_until(lambda: models() == {})


def test_a_runtime_that_is_killed_during_a_start_costs_time(
    start_runtime: StartRuntime, start_stub: StartStub, doubling: Path
) -> None:
    """A runtime is killed during a start.

    The next runtime starts the model, and answers the request that waits since then.
    """
    first = start_runtime(load_settings(LAZY))
    stub = start_stub(first, doubling)
    first.device.compiles.clear()
    request = stub.send(1.0)
    first.device.compiles.wait_until_held()

    first.stop()
    stub.runtime = start_runtime(load_settings(LAZY))

    assert is_answered(answer_of(request), 1.0)
    first.device.compiles.set()


def test_starts_follow_the_requests_that_come_and_go_meanwhile(
    start_runtime: StartRuntime, start_stub: StartStub, doublings: dict[str, Path]
) -> None:
    """After a runtime's death, stubs register before requests come. A model with a waiting request then starts before the others.

    A request that is cancelled has no effect on the order.
    """
    settings = load_settings(LAZY)
    first = start_runtime(settings)
    stubs = {name: start_stub(first, doublings[name]) for name in "abcd"}
    assert all(stub.ask().error is None for stub in stubs.values())
    for stub in stubs.values():
        stub.runtime = cast(Runtime, SimpleNamespace(open=Mock(side_effect=Closed("there is none"))))
    first.stop()
    runtime = start_runtime(settings)
    queue = runtime.loop._builder._queue
    runtime.device.compiles.clear()
    stubs["a"].runtime = runtime
    runtime.device.compiles.wait_until_held()
    for name in "bcd":
        stubs[name].runtime = runtime
    wait_until(lambda: queue.names() == {"b", "c", "d"})

    given_up, waiting = stubs["c"].send(), stubs["d"].send()
    wait_until(lambda: sum(step.demand.urgency is Urgency.REQUESTED for step in queue._steps.values()) == 2)
    given_up.cancelled = True
    assert "cancelled" in error_of(answer_of(given_up))
    wait_until(lambda: sum(step.demand.urgency is Urgency.REQUESTED for step in queue._steps.values()) == 1)
    runtime.device.compiles.set()

    assert answer_of(waiting).error is None
    wait_until(lambda: set(models().values()) == {"ready"} and len(models()) == 4)
    assert [key[0] for key in runtime.device.costs][:2] == ["a", "d"]


def test_clients_that_give_up_do_not_stop_a_start(
    lazy: Runtime, start_stub: StartStub, doubling: Path
) -> None:
    """A cancelled request ends at once, but the start that it caused completes for later requests."""
    stub = start_stub(lazy, doubling)
    lazy.device.compiles.clear()
    request = stub.send()
    lazy.device.compiles.wait_until_held()

    request.cancelled = True

    assert "cancelled" in error_of(answer_of(request))
    lazy.device.compiles.set()
    wait_until(lambda: models() == {"doubling": "ready"})


def test_an_unload_during_a_start_answers_those_who_wait(
    lazy: Runtime, start_stub: StartStub, doubling: Path
) -> None:
    """A model is unloaded during its start.

    The waiting request fails with this reason, and the runtime keeps nothing of the model.
    """
    stub = start_stub(lazy, doubling)
    lazy.device.compiles.clear()
    request = stub.send()
    lazy.device.compiles.wait_until_held()

    stub.model.close()

    assert "unloaded" in error_of(answer_of(request))
    lazy.device.compiles.set()
    wait_until(lambda: models() == {})


# --- falling back


def test_an_idle_model_falls_back_and_starts_again(
    lazy: Runtime, start_stub: StartStub, doubling: Path
) -> None:
    """When the runtime dismisses an idle model, the stub closes all its connections.

    The next request starts the model again.
    """
    stub = start_stub(lazy, doubling)
    for number in range(3):
        assert is_answered(stub.ask(float(number)), number)

        key = stub.attachment.key
        wait_until(lambda: stub.engine.idle)
        dismiss(lazy, key)

        wait_until(lambda: models() == {})
        wait_until(lambda: stub.is_cold)


def check_idle(runtime: Runtime, after: float) -> float:
    """Make the runtime check for idle models as if `after` seconds had passed. Return the seconds until its next check."""
    next_checks: list[float] = []
    now = time.monotonic() + after

    def check() -> None:
        registry = runtime.loop._registry
        next_checks.append(registry.dismiss_idle(now))

    runtime.loop._inbox.post(check)
    wait_until(lambda: bool(next_checks))
    return next_checks[0] - now


def test_models_fall_back_when_no_request_has_used_them_for_long(
    start_runtime: StartRuntime, start_stub: StartStub, doublings: dict[str, Path]
) -> None:
    """A model falls back after `idle.executable` without a request.

    Pinned models, busy models, and models without this limit stay.
    """
    runtime = start_runtime(
        load_settings(
            "runtime: {start: lazy, idle: {executable: 10m}}\n"
            "models: {b: {residency: device}, d: {idle: {executable: never}}}"
        )
    )
    stubs = {name: start_stub(runtime, doublings[name]) for name in "abcd"}
    for stub in stubs.values():
        stub.ask()
    wait_until(lambda: all(stub.engine.idle for stub in stubs.values()))

    assert 0 < check_idle(runtime, 300.0) <= 300
    assert models() == dict.fromkeys("abcd", "ready")
    runtime.device.gate.clear()
    request = stubs["c"].send(1.0)
    runtime.device.gate.wait_until_held()
    check_idle(runtime, 700.0)

    wait_until(lambda: models() == dict.fromkeys("bcd", "ready"))
    runtime.device.gate.set()
    assert answer_of(request).error is None
    assert stubs["a"].is_cold
    assert stubs["a"].ask(2.0).error is None


@pytest.mark.parametrize(
    ("settings", "change"),
    [
        (
            "runtime: {start: lazy, idle: {executable: 4m}}",
            lambda operator: operator.follow({"runtime": {"idle": {"executable": 1}}}),
        ),
        (
            "runtime: {start: lazy, idle: {executable: 1s}}\nmodels: {a: {residency: device}}",
            lambda operator: operator.keep("a", "system"),
        ),
    ],
    ids=["shorter limit", "unpinned"],
)
def test_a_change_of_what_may_fall_back_applies_at_once(
    start_runtime: StartRuntime,
    start_stub: StartStub,
    doublings: dict[str, Path],
    settings: str,
    change: Callable[[Operator], object],
) -> None:
    """An idle model falls back within seconds of the change, not a minute after the last check."""
    runtime = start_runtime(load_settings(settings))
    stub = start_stub(runtime, doublings["a"])
    stub.ask()
    wait_until(lambda: stub.engine.idle)
    before = check_idle(runtime, 0.0)
    assert before > 30

    with Operator(runtime) as operator:
        change(operator)

    wait_until(lambda: models() == {}, timeout=before - 10)


def test_a_model_that_starts_between_two_checks_for_idle_models_falls_back_in_time(
    start_runtime: StartRuntime, start_stub: StartStub, doublings: dict[str, Path]
) -> None:
    """A model that becomes idle between two checks falls back in time, because its start makes the next check earlier.

    The check before the start found no model, so the next one was planned a minute later.
    """
    runtime = start_runtime(load_settings("runtime: {start: lazy, idle: {executable: 20s}}"))
    before = check_idle(runtime, 0.0)
    assert before > 30
    stub = start_stub(runtime, doublings["a"])
    stub.ask()
    wait_until(lambda: stub.engine.idle)

    runtime.pass_time(21.0)

    wait_until(lambda: models() == {}, timeout=before - 35)


def test_of_many_idle_models_some_fall_back_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
    start_runtime: StartRuntime,
    start_stub: StartStub,
    doublings: dict[str, Path],
) -> None:
    """Only a few idle models fall back at each check, so that the loop serves others meanwhile.

    The next check is soon, until all are cold.
    """
    monkeypatch.setattr("rsrv.runtime.idle_models._FALLS", 3)
    runtime = start_runtime(load_settings("runtime: {start: lazy, idle: {executable: 10m}}"))
    stubs = [start_stub(runtime, doublings[name]) for name in "abcd"]
    for stub in stubs:
        stub.ask()
    wait_until(lambda: all(stub.engine.idle for stub in stubs))

    assert check_idle(runtime, 700.0) < 1
    wait_until(lambda: len(models()) == 1)
    assert check_idle(runtime, 700.0) >= 1
    wait_until(lambda: models() == {})


def test_a_meta_model_without_calls_stays(
    start_runtime: StartRuntime, start_stub: StartStub, tmp_path: Path
) -> None:
    """A meta model without callees has nothing in the runtime, so it does not fall back, and the checks for idle models continue."""
    runtime = start_runtime(load_settings("runtime: {idle: {executable: 10m}}"))
    start_stub(runtime, write_meta(tmp_path / "meta", "def run(inputs): ...", "", "other"), calls={})

    assert check_idle(runtime, 700.0) > 1
    assert not relieve(runtime)


def relieve(runtime: Runtime) -> bool:
    """Let the runtime free memory as if memory were short. Return whether a model falls back."""
    answers: list[bool] = []
    registry = runtime.loop._registry
    shortage = Shortage("memory is short", outdated=False)
    runtime.loop._inbox.post(lambda: answers.append(registry.relieve(shortage, time.monotonic())))
    wait_until(lambda: bool(answers))
    return answers[0]


def test_models_fall_back_one_after_another_while_memory_is_short(
    start_runtime: StartRuntime, start_stub: StartStub, doublings: dict[str, Path]
) -> None:
    """If memory is short, the least recently used model falls back first. Pinned, busy and eager models stay."""
    settings = "runtime: {start: lazy}\nmodels: {a: {residency: device}, b: {start: eager}}"
    runtime = start_runtime(load_settings(settings))
    stubs = {name: start_stub(runtime, doublings[name]) for name in "abcd"}
    for name in "abdc":
        assert stubs[name].ask().error is None
    wait_until(lambda: all(stubs[name].engine.idle for name in "cd"))
    runtime.device.gate.clear()
    request = stubs["d"].send(1.0)
    runtime.device.gate.wait_until_held()

    wait_until(lambda: relieve(runtime))
    wait_until(lambda: models() == dict.fromkeys("abd", "ready"))
    wait_until(lambda: not relieve(runtime))
    runtime.device.gate.set()
    assert answer_of(request).error is None

    wait_until(lambda: relieve(runtime))
    wait_until(lambda: models() == dict.fromkeys("ab", "ready"))
    assert stubs["d"].ask(2.0).error is None


def test_a_model_that_stays_keeps_no_other_one_warm(
    lazy: Runtime,
    start_stub: StartStub,
    doublings: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stub that imports its model.py ignores a dismissal. Then a model that was used later falls back instead."""
    imported = threading.Event()

    def hooks() -> Hooks:
        imported.wait(300)
        return Hooks()

    request = start_stub(lazy, doublings["a"], hooks).send()
    wait_until(lambda: models() == {"a": "ready"})
    other = start_stub(lazy, doublings["b"])
    assert other.ask().error is None
    wait_until(lambda: other.engine.idle)

    assert relieve(lazy)
    monkeypatch.setattr(lazy.loop._catalog, "_clock", lambda: time.monotonic() + 3.0)
    wait_until(lambda: relieve(lazy))
    wait_until(lambda: models() == {"a": "ready"})
    wait_until(lambda: not relieve(lazy))
    imported.set()
    assert answer_of(request).error is None


def test_a_scarcity_of_memory_ends_when_models_have_fallen_back(
    start_runtime: StartRuntime,
    start_stub: StartStub,
    doublings: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If memory is short, the runtime drops host copies, then idle models, until twice as much memory is free."""
    runtime = start_runtime(load_settings(LAZY))
    begun = threading.Event()

    def spare() -> int:
        free = {3: 0.05, 2: 0.1}.get(len(runtime.loop._catalog.entries), 0.15)
        return int(total_memory() * (free if begun.is_set() else 1))

    for module in (weight_mover, host_weights):
        monkeypatch.setattr(module, "spare_memory", spare)
    monkeypatch.setattr(host_copies, "REVIEW_S", 0.01)
    stubs = [start_stub(runtime, doublings[name]) for name in "abc"]
    for stub in stubs:
        assert stub.ask().error is None
    assert read_status(os.getpid())["host"]["tensors"] == 3
    wait_until(lambda: all(stub.engine.idle for stub in stubs))

    begun.set()
    wait_until(lambda: models() == {"c": "ready"})
    wait_until(lambda: not runtime.loop._weights.copies.is_short)

    assert read_status(os.getpid())["host"]["tensors"] == 0
    assert models() == {"c": "ready"}
    assert stubs[0].ask(2.0).error is None


def test_no_further_model_falls_back_until_the_memory_of_the_last_one_is_free(
    start_runtime: StartRuntime,
    start_stub: StartStub,
    doublings: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a model has fallen back, the runtime waits until the model's memory is free.

    Older measurements of memory make no further model fall back.
    """
    runtime = start_runtime(load_settings(LAZY))
    begun, may_free, freed, measurements = threading.Event(), threading.Event(), threading.Event(), 0

    def spare() -> int:
        nonlocal measurements
        measurements += 1
        return total_memory() // 20 if begun.is_set() and not freed.is_set() else total_memory()

    def give_back() -> None:
        if begun.is_set() and threading.current_thread().name == "host copies":
            may_free.wait(300)
            freed.set()

    for module in (weight_mover, host_weights):
        monkeypatch.setattr(module, "spare_memory", spare)
    monkeypatch.setattr(weight_mover, "give_back", give_back)
    monkeypatch.setattr(idle_models, "_FREED_S", inf)
    monkeypatch.setattr(host_copies, "REVIEW_S", 0.01)
    stubs = [start_stub(runtime, doublings[name]) for name in "abc"]
    for stub in stubs:
        assert stub.ask().error is None
    wait_until(lambda: all(stub.engine.idle for stub in stubs))

    begun.set()
    wait_until(lambda: models() == {"b": "ready", "c": "ready"})
    before = measurements
    wait_until(lambda: measurements > before + 50)
    may_free.set()
    wait_until(lambda: freed.is_set() and runtime.loop._weights.copies.shortage is None)

    assert models() == {"b": "ready", "c": "ready"}


def test_models_fall_back_before_the_process_has_no_mapping_left(
    start_runtime: StartRuntime,
    start_stub: StartStub,
    doublings: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """If few mappings are left, the least recently used models fall back, and the log names the limit.

    Executables take mappings, and XLA ends a process that cannot get one.
    """
    runtime = start_runtime(load_settings(LAZY))
    spare = {3: 99, 2: 80, 1: 125}
    monkeypatch.setattr(
        weight_mover, "spare_mappings", lambda: (spare.get(len(runtime.loop._catalog.entries), 1000), 1000)
    )
    monkeypatch.setattr(weight_mover, "_COUNT_S", 0.0)
    monkeypatch.setattr(host_copies, "REVIEW_S", 0.01)
    stubs = [start_stub(runtime, doublings[name]) for name in "abc"]
    for stub in stubs:
        assert stub.ask().error is None

    wait_until(lambda: models() == {"c": "ready"})
    wait_until(lambda: runtime.loop._weights.copies.shortage is None)
    assert "vm.max_map_count: 1000" in caplog.text


def test_a_model_with_a_request_in_flight_does_not_fall_back(
    lazy: Runtime, start_stub: StartStub, doubling: Path
) -> None:
    """A dismissal arrives while a request is in flight: the stub stays, the request is answered once, and the model remains ready."""
    stub = start_stub(lazy, doubling)
    stub.ask()
    key = stub.attachment.key
    lazy.device.gate.clear()
    request = stub.send(1.0)
    lazy.device.gate.wait_until_held()

    dismiss(lazy, key)
    wait_until(lambda: stub.process.front.snapshot.start_timeout_s == 60.0)
    assert not stub.is_cold

    lazy.device.gate.set()
    assert is_answered(answer_of(request), 1.0)
    assert models() == {"doubling": "ready"}
    assert is_answered(stub.ask(2.0), 2.0)


@pytest.mark.parametrize("gone", [False, True], ids=["changes", "disappears"])
def test_a_bundle_that_changes_or_disappears_while_its_model_falls_back(
    lazy: Runtime,
    start_stub: StartStub,
    doublings: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gone: bool,
) -> None:
    """A bundle is replaced or deleted while its model falls back.

    The next request starts the new bundle, or fails if there is none.
    """
    path = tmp_path / "bundle"
    shutil.copytree(doublings["a"], path)
    stub = start_stub(lazy, path)
    assert is_answered(stub.ask(3.0), 3.0)
    wait_until(lambda: stub.engine.idle)
    fall_back = stub.engine.dismissed

    def fall_back_meanwhile(attachment: Attachment, start_timeout_s: float) -> None:
        shutil.rmtree(path)
        if not gone:
            shutil.copytree(doublings["b"], path)
        fall_back(attachment, start_timeout_s)

    monkeypatch.setattr(stub.engine, "dismissed", fall_back_meanwhile)
    dismiss(lazy, stub.attachment.key)
    wait_until(lambda: models() == {})

    if gone:
        assert "could not be started: " in error_of(stub.ask(3.0))
        shutil.copytree(doublings["b"], path)
    # After a failed start, the stub waits before the next one.
    answers = [stub.ask(3.0)]
    while answers[-1].error is not None and wait_until(lambda: stub.is_cold):
        answers.append(stub.ask(3.0))
    assert answers[-1].arrays["y"].tolist() == [[8.0, 8.0, 8.0]]


def test_a_request_that_crosses_the_fall_back_starts_the_model_again(
    lazy: Runtime, start_stub: StartStub, doubling: Path
) -> None:
    """A model falls back while a hook still processes a request.

    The request then waits for the next start, and is answered.
    """
    inside, go_on = threading.Event(), threading.Event()

    def preprocess(arrays: Arrays) -> Arrays:
        inside.set()
        go_on.wait(PATIENCE_S)
        return arrays

    stub = start_stub(lazy, doubling, lambda: Hooks(preprocess))
    go_on.set()
    assert is_answered(stub.ask())
    engine = stub.engine
    assert isinstance(engine, Engine)
    engine._endpoint.preprocess.seconds = 1.0  # The hook is too slow to be called inside execute().
    go_on.clear()
    inside.clear()
    request = stub.send(1.0)
    inside.wait(PATIENCE_S)

    def leave() -> None:
        attachment, engine.session.attachment = stub.attachment, None
        engine._deferred.leave(attachment)
        stub.process.front.handle(WentCold(0))

    stub.process.front.post(leave)
    wait_until(lambda: models() == {})
    go_on.set()

    assert is_answered(answer_of(request), 1.0)
    assert models() == {"doubling": "ready"}


# --- meta models


def test_a_lazy_meta_model_starts_with_its_callees(
    lazy: Runtime, start_stub: StartStub, doublings: dict[str, Path], tmp_path: Path
) -> None:
    """The first run of a lazy meta model starts its callees and waits for them.

    When the meta model falls back, its callees do so as well.
    """
    meta = write_meta(tmp_path / "meta", "def run(inputs, call): ...", "ab")
    stub = start_stub(lazy, meta, calls={name: doublings[name] for name in "ab"})
    assert models() == {}

    assert is_answered(stub.ask(3.0), 3.0)
    assert models() == {"a": "ready", "b": "ready"}

    key = stub.attachment.key
    wait_until(lambda: stub.engine.idle)
    dismiss(lazy, key)
    wait_until(lambda: models() == {})
    assert is_answered(stub.ask(4.0), 4.0)


def test_an_eager_meta_model_starts_lazy_callees(
    start_runtime: StartRuntime, start_stub: StartStub, doublings: dict[str, Path], tmp_path: Path
) -> None:
    """An eager meta model has its callees ready from the start.

    The callee's own stub then is ready without another start.
    """
    settings: Settings = load_settings(LAZY + "\nmodels: {meta: {start: eager}}")
    runtime = start_runtime(settings)
    meta = write_meta(tmp_path / "meta", "def run(inputs, call): ...", "a")

    start_stub(runtime, meta, calls={"a": doublings["a"]})

    assert models() == {"a": "ready"}
    callee = start_stub(runtime, doublings["a"])
    assert callee.state is ServingState.READY
    assert is_answered(callee.ask())


def test_a_callee_that_its_meta_model_keeps_leaves_after_a_model_that_frees_memory(
    start_runtime: StartRuntime, start_stub: StartStub, doublings: dict[str, Path], tmp_path: Path
) -> None:
    """While memory is short, the own stub of a meta model's callee stays, even if it was unused for longer than another model.

    Its dismissal would free nothing, because the meta model keeps the callee.
    """
    runtime = start_runtime(load_settings(LAZY + "\nmodels: {meta: {start: eager}}"))
    meta = write_meta(tmp_path / "meta", "def run(inputs, call): ...", "a")
    start_stub(runtime, meta, calls={"a": doublings["a"]})
    other = start_stub(runtime, doublings["c"])
    for stub in (start_stub(runtime, doublings["a"]), other):
        assert stub.ask().error is None
    wait_until(lambda: other.engine.idle)

    assert relieve(runtime)
    wait_until(lambda: models() == {"a": "ready"})


def test_a_sub_call_of_another_devices_run_is_to_be_repeated(
    lazy: Runtime, start_stub: StartStub, doubling: Path
) -> None:
    """A sub-call whose run is on another device fails with RUNTIME_DOWN, so that the caller repeats the sub-call.

    The called model starts on its own device. The runtime of this device does not know the run, neither at the start
    nor later.
    """
    stub = start_stub(lazy, doubling)
    parameters = '{"rsrv_run": "7", "rsrv_device": "1"}'
    for _ in range(2):
        request = FakeRequest({"x": np.zeros((1, 3), np.float32)}, parameters=parameters)
        for answer in stub.model.execute([request]) or ():
            request.answers.put(answer)
        assert error_of(answer_of(request)) == f"[rsrv:RUNTIME_DOWN] {DOWN}"


def test_a_call_through_triton_starts_a_cold_callee(
    start_runtime: StartRuntime, start_stub: StartStub, start_meta: StartMeta, doublings: dict[str, Path]
) -> None:
    """A run calls a cold stub through Triton.

    The stub joins the model that the meta model keeps in the runtime, and the call is answered.
    """
    settings = load_settings(LAZY + "\nmeta: {transport: bls}\nmodels: {meta: {start: eager}}")
    runtime = start_runtime(settings)
    callee = start_stub(runtime, doublings["a"])
    assert callee.is_cold
    triton = FakeCallees(engines={"a": cast(Engine, callee.model)})

    engine = start_meta(runtime, lambda inputs, call: call("a", inputs), "a", triton=triton)

    request = FakeRequest({"x": np.full((1, 3), 3, np.float32)})
    (answer,) = engine.execute([request]) or (answer_of(request),)
    assert is_answered(answer, 3.0)
    assert callee.state is ServingState.READY
