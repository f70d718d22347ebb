"""The control service and its command on a real server: actions of operators, and what clients see of them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from queue import Queue
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
import tritonclient.grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rsrv.cli import main as cli
from rsrv.control.v1 import control_pb2 as pb
from rsrv.control.v1 import control_pb2_grpc
from rsrv.wire.paths import CONTROL_SOCKET, runtime_directory
from tests.e2e import bundles
from tests.e2e.calls import Caller, Refused, at_once, caller, outcome, refusal
from tests.e2e.combinations import recorded
from tests.e2e.fronts import python_front
from tests.e2e.harness import EXPLICIT, HURRY, RunningTriton, is_alive, make_repository, running_triton
from tests.e2e.lives import place, version, write_version
from tests.waiting import PATIENCE_S, wait_until

SETTINGS = """
lifecycle: {poll_s: 0.1}
models:
  exact: {max_queue_depth: 4096}
  steady: {max_batch_size: 1}
"""
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
ROW = np.ones((1, 64), np.float32)


class Control:
    """The control service of a server, and the `rsrv` command for it."""

    def __init__(self, server: RunningTriton) -> None:
        self.server = server
        self.directory = runtime_directory(server.pid, "0")
        self.address = f"unix:{self.directory / CONTROL_SOCKET}"
        wait_until((self.directory / CONTROL_SOCKET).exists, what="the control process")
        self.channel = grpc.insecure_channel(self.address)
        self.stub: Any = control_pb2_grpc.ControlStub(self.channel)
        self._health: Any = health_pb2_grpc.HealthStub(self.channel)
        wait_until(lambda: self.health() == SERVING, what="all models")

    def status(self, model: str = "") -> pb.GetStatusResponse:
        status: pb.GetStatusResponse = self.stub.GetStatus(pb.GetStatusRequest(model=model), timeout=20)
        return status

    def model(self, name: str) -> pb.ModelStatus:
        model: pb.ModelStatus = self.status(name).models[0]
        return model

    def pid(self) -> int:
        """Return the process id of the control process that answers, or 0."""
        with contextlib.suppress(grpc.RpcError):
            return int(self.status().server.control_pid)
        return 0

    def health(self, service: str = "") -> int | None:
        """Return the health status, or None if the service does not answer."""
        try:
            answer = self._health.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
        except grpc.RpcError:
            return None
        return int(answer.status)

    def unhealthy(self, service: str = "") -> Iterator[None]:
        """Return an iterator. Its `next` waits until the service is unhealthy. A watch sees even a short time, which polling may miss."""
        request = health_pb2.HealthCheckRequest(service=service)
        answers = self._health.Watch(request, timeout=PATIENCE_S)
        assert next(answers).status == SERVING
        return (None for answer in answers if answer.status == NOT_SERVING)

    def succeeds(self, *arguments: str) -> bool:
        """Run a command, and return True if it succeeds."""
        with contextlib.redirect_stdout(io.StringIO()):
            return cli.main([*arguments, "--server", self.address]) == 0

    def rsrv(self, *arguments: str, status: int = 0) -> str:
        """Run a command, check its exit status, and return its output."""
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            code = cli.main([*arguments, "--server", self.address])
        assert code == status
        return out.getvalue()

    @contextmanager
    def watch(self) -> Iterator[Queue[pb.WatchStateResponse]]:
        """Yield a queue of all updates in their order. The first update is a snapshot."""
        updates: Queue[pb.WatchStateResponse] = Queue()
        call = self.stub.WatchState(pb.WatchStateRequest())

        def read() -> None:
            with contextlib.suppress(grpc.RpcError):
                for update in call:
                    updates.put(update)

        reader = threading.Thread(target=read)
        reader.start()
        try:
            yield updates
        finally:
            call.cancel()
            reader.join()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningTriton]:
    folder = tmp_path_factory.mktemp("control")
    (folder / "bundles").mkdir()
    for name in ("exact", "steady"):
        place(bundles.ensure() / name, folder / "bundles" / name)
    place(write_version(folder / "one", 1), folder / "bundles" / "changing")
    repository = make_repository(folder, settings=SETTINGS)
    with (
        running_triton(
            repository, folder / "server.log", extra_args=[*EXPLICIT, HURRY], spare=True
        ) as running,
        recorded(running),
    ):
        yield running


@pytest.fixture(scope="module")
def shared(server: RunningTriton) -> Iterator[Control]:
    control = Control(server)
    with control.channel:
        yield control


@pytest.fixture
def control(shared: Control) -> Iterator[Control]:
    """Yield the control service. After the test, no model is paused, and `exact` is not pinned."""
    yield shared
    wait_until(lambda: shared.health() == SERVING, what="all models after the test")
    # For a moment after a request has woken a device, the control process still treats the device as asleep.
    wait_until(lambda: shared.succeeds("continue", "--all"), what="the device after the test")
    shared.rsrv("unpin", "exact")


class Requests:
    """Requests of one client to one model. `ended` has their numbers and errors, in the order in which they end."""

    def __init__(self, server: RunningTriton, model: str, inputs: dict[str, Any]) -> None:
        self._client = tritonclient.grpc.InferenceServerClient(server.server.grpc_url)
        self._model = model
        ((name, array),) = inputs.items()
        tensor = tritonclient.grpc.InferInput(
            name, list(array.shape), "FP32" if array.dtype == np.float32 else "UINT32"
        )
        tensor.set_data_from_numpy(array)
        self._inputs = [tensor]
        self.ended: list[tuple[int, str | None]] = []
        self.answers: dict[int, Any] = {}

    def send(self, number: int, id: str = "") -> None:
        def note(result: Any, error: Any) -> None:
            if error is None:
                self.answers[number] = result.as_numpy("y")
            self.ended.append((number, None if error is None else str(error)))

        self._client.async_infer(self._model, self._inputs, note, request_id=id)

    def wait(self, count: int) -> list[tuple[int, str | None]]:
        wait_until(lambda: len(self.ended) == count, what=f"{count} answers")
        return self.ended

    def close(self) -> None:
        self._client.close()


@pytest.fixture
def requests(server: RunningTriton) -> Iterator[Callable[[str], Requests]]:
    made: list[Requests] = []

    def make(model: str) -> Requests:
        inputs = {"x": ROW} if model == "exact" else {"x": np.ones((1, 4), np.uint32)}
        made.append(Requests(server, model, inputs))
        return made[-1]

    yield make
    for client in made:
        client.close()


def queued(control: Control, model: str) -> int:
    load: pb.GetLoadResponse = control.stub.GetLoad(pb.GetLoadRequest(), timeout=20)
    (entry,) = (candidate for candidate in load.devices[0].models if candidate.name == model)
    return int(entry.queued)


def test_the_status_is_that_of_the_repository(control: Control) -> None:
    """The status has every model with its version, its stub, its executables and its policy from rsrv.yaml."""
    status = control.status()

    assert [model.name for model in status.models] == ["changing", "exact", "steady"]
    assert not status.failures
    assert status.server.pid == control.server.pid
    assert is_alive(status.devices[0].record.pid)
    for model in status.models:
        (only,) = model.versions
        assert only.state == pb.STATE_READY
        # With a native front, the server's own process has the role of the stub.
        assert list(only.stubs) == (control.server.stub_pids(model.name) or [control.server.pid])
        assert only.key.startswith(f"{model.name}@")
    exact = status.models[1]
    assert [(executable.size, executable.HasField("cost_s")) for executable in exact.record.executables] == [
        (size, True) for size in (1, 2, 4, 8, 16)
    ]
    assert exact.policy.max_queue_depth == 4096
    assert "exact" in control.rsrv("status")
    assert json.loads(control.rsrv("status", "exact", "--json"))["models"][0]["name"] == "exact"


def test_weights_go_where_they_are_told(control: Control) -> None:
    """Commands evict and pin weights. Pinned weights are not evicted, and a request loads evicted weights again."""
    control.rsrv("evict", "exact")
    wait_until(lambda: control.model("exact").record.weights == pb.WEIGHTS_ABSENT, what="the eviction")

    control.rsrv("pin", "exact", "--wait")
    wait_until(lambda: control.model("exact").record.weights == pb.WEIGHTS_RESIDENT, what="the load")
    before = control.model("exact")
    assert before.record.residency == pb.RESIDENCY_DEVICE
    assert "exact" not in control.rsrv("evict", "--all")

    control.rsrv("unpin", "exact")
    assert control.rsrv("evict", "exact") == "freed: exact\n"
    with caller(control.server) as call:
        call("exact", {"x": ROW})
    assert control.model("exact").record.misses == before.record.misses + 1


def test_a_prefetch_spares_the_next_request_its_wait(control: Control) -> None:
    """Prefetched weights are on the device before the next request."""
    control.rsrv("evict", "exact")
    wait_until(lambda: control.model("exact").record.weights == pb.WEIGHTS_ABSENT, what="the eviction")
    before = control.model("exact").record.misses

    control.rsrv("prefetch", "exact", "--wait")
    with caller(control.server) as call:
        call("exact", {"x": ROW})

    assert control.model("exact").record.misses == before


def test_requests_that_are_held_are_all_answered(
    control: Control, requests: Callable[[str], Requests]
) -> None:
    """200 requests wait while their model is paused. After `continue`, all of them are answered."""
    control.rsrv("pause", "exact", "--mode", "hold")
    before = control.model("exact").record.dispatches
    sent = requests("exact")
    for number in range(200):
        sent.send(number)
    wait_until(lambda: queued(control, "exact") == 200, what="200 requests to wait")
    assert (control.model("exact").record.dispatches, sent.ended) == (before, [])

    control.rsrv("continue", "exact")

    assert {error for _, error in sent.wait(200)} == {None}
    want = ROW @ bundles.exact_kernel()
    assert all((answer == want).all() for answer in sent.answers.values())


def test_requests_that_are_held_keep_their_order(
    control: Control, requests: Callable[[str], Requests]
) -> None:
    """All models are paused while requests arrive. Afterwards, the requests execute in the order of their arrival."""
    control.rsrv("pause", "--all")
    sent = requests("steady")
    for number in range(8):
        sent.send(number)
        wait_until(lambda: queued(control, "steady") == number + 1, what="it to arrive")  # noqa: B023

    control.rsrv("continue", "--all")

    assert sent.wait(8) == [(number, None) for number in range(8)]


def test_drained_models_answer_what_waits_and_refuse_the_rest(
    control: Control, requests: Callable[[str], Requests]
) -> None:
    """A drained model answers its waiting requests and refuses new requests. Other models are not affected."""
    control.rsrv("pause", "steady", "--mode", "hold")
    sent = requests("steady")
    for number in range(4):
        sent.send(number)
    wait_until(lambda: queued(control, "steady") == 4, what="4 requests to wait")

    control.rsrv("pause", "steady", "--mode", "drain")
    with caller(control.server) as call:
        late = refusal(lambda: call("steady", {"x": np.ones((1, 4), np.uint32)}))
        call("exact", {"x": ROW})

    late.assert_is("UNAVAILABLE", "grpc")
    assert "[rsrv:PAUSED]" in late.message
    assert {error for _, error in sent.wait(4)} == {None}
    assert control.model("steady").paused == pb.PAUSE_DRAIN


def test_rejected_requests_end_at_once(control: Control, requests: Callable[[str], Requests]) -> None:
    """Requests wait for a model that is paused in mode `hold`. When its mode becomes `reject`, they are refused at once."""
    control.rsrv("pause", "exact", "--mode", "hold")
    sent = requests("exact")
    for number in range(20):
        sent.send(number)
    wait_until(lambda: queued(control, "exact") == 20, what="20 requests to wait")

    control.rsrv("pause", "exact", "--mode", "reject")

    assert all("[rsrv:PAUSED]" in (error or "") for _, error in sent.wait(20))


def test_waiting_requests_are_aborted_by_their_id(
    control: Control, requests: Callable[[str], Requests]
) -> None:
    """A hundred waiting requests with one id are aborted, and never execute. A request with another id is answered."""
    control.rsrv("pause", "exact")
    before = control.model("exact").record.dispatches
    sent = requests("exact")
    for number in range(100):
        sent.send(number, id="many")
    sent.send(100, id="one")
    wait_until(lambda: queued(control, "exact") == 101, what="101 requests to wait")

    assert control.rsrv("abort", "many") == "100 aborted, 0 already executing\n"
    aborted = sent.wait(100)
    assert all("StatusCode.CANCELLED" in (error or "") for _, error in aborted)
    assert control.rsrv("abort", "nobody") == "0 aborted, 0 already executing\n"

    control.rsrv("continue", "exact")
    assert sent.wait(101)[-1] == (100, None)
    assert control.model("exact").record.dispatches == before + 1


def test_a_history_has_what_happened(control: Control) -> None:
    """The history has the eviction of weights with its reason, and the status has the state of the weights."""
    control.rsrv("evict", "exact")

    wait_until(lambda: "evicted: an operator asked for it" in control.rsrv("history", "exact"))

    def weights() -> str:
        return str(
            json.loads(control.rsrv("status", "exact", "--json"))["models"][0]["record"]["weightsState"]
        )

    wait_until(lambda: weights() == "absent", what="the state of the weights")
    control.rsrv("history", "nobody", status=1)


def test_a_slow_request_is_explained(control: Control, requests: Callable[[str], Requests]) -> None:
    """`rsrv why` explains two requests with the same id by the load for which they waited. It also finds a request by its number."""
    control.rsrv("evict", "steady")
    control.rsrv("pause", "steady")
    sent = requests("steady")
    for number in range(2):
        sent.send(number, id="slow")
    wait_until(lambda: queued(control, "steady") == 2, what="2 requests to wait")
    control.rsrv("continue", "steady")
    sent.wait(2)

    output = control.rsrv("why", "slow")
    assert "steady was evicted: an operator asked for it" in output
    assert (
        output.count("for its weights")
        == output.count("for the end of a pause")
        == output.count("; answered after")
        == 2
    )
    slowest = json.loads(control.rsrv("why", "--slowest", "steady", "--json"))["requests"]
    named = output.split(" request ")[1].split()[0]
    assert named in {request["number"] for request in slowest}
    assert "for its weights" in control.rsrv("why", named)
    control.rsrv("why", "nobody", status=1)


def test_a_timeline_of_what_the_device_did(
    control: Control, requests: Callable[[str], Requests], tmp_path: Path
) -> None:
    """The timeline's trace has the load of the weights, and after it the executions of the waiting requests."""
    control.rsrv("evict", "exact")
    control.rsrv("pause", "exact")
    sent = requests("exact")
    for number in range(3):
        sent.send(number)
    wait_until(lambda: queued(control, "exact") == 3, what="3 requests to wait")
    control.rsrv("continue", "exact")
    sent.wait(3)

    control.rsrv("timeline", "-o", str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]

    load = next(event for event in reversed(events) if event["name"] == "load exact")
    executed = [event for event in events if event["name"] == "exact" and event["ts"] >= load["ts"]]
    assert sum(event["args"]["requests"] for event in executed) == 3
    assert load["ts"] + load["dur"] <= min(event["ts"] for event in executed) + 1000
    assert all(event["dur"] > 0 for event in executed)
    assert "evict exact" in {event["name"] for event in events}


def test_recorded_requests_are_replayed_and_planned_for(
    control: Control, requests: Callable[[str], Requests], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Requests of clients are recorded, sent again to the same server, and simulated with the server's measured costs."""
    trace, sent = tmp_path / "trace.csv", requests("exact")
    command = [sys.executable, "-m", "rsrv.cli.main", "record", str(trace), "--server", control.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as recording:
        wait_until(lambda: trace.exists() and trace.read_text(), what="the record to begin")
        for number in range(5):
            sent.send(number)
        wait_until(lambda: trace.read_text().count("\n") == 1 + 5, what="the requests in the record")
        sent.wait(5)
        recording.send_signal(signal.SIGINT)
        assert "5 requests in" in recording.communicate()[0]

    assert cli.main(["replay", str(trace), "--url", control.server.server.grpc_url]) == 0
    assert capsys.readouterr().out.startswith("5 requests: 5 served;")
    assert cli.main(["plan", str(trace), "--p99", "10s"]) == 0
    assert "1 model on 1 card" in capsys.readouterr().out


def test_a_watcher_sees_each_change_once_and_in_order(control: Control) -> None:
    """A watcher gets each change once and in order. At the end, its copy of the state equals the server's state."""
    control.rsrv("pin", "exact", "--wait")
    control.rsrv("unpin", "exact")
    with control.watch() as updates:
        snapshot = updates.get(timeout=PATIENCE_S).snapshot
        entries = {entry.version.key: entry for entry in snapshot.entries}
        assert sorted(entry.name for entry in snapshot.entries) == ["changing", "exact", "steady"]
        (key,) = (entry.version.key for entry in snapshot.entries if entry.name == "exact")

        control.rsrv("evict", "exact")
        control.rsrv("prefetch", "exact", "--wait")
        control.rsrv("pause", "exact")

        seen: list[pb.Version] = []
        revision = snapshot.revision
        while not seen or seen[-1].paused != pb.PAUSE_HOLD:
            change = updates.get(timeout=PATIENCE_S).change
            assert (change.key, change.revision) == (key, revision + 1)
            revision = change.revision
            seen.append(change.entry.version)
            entries[change.key] = change.entry
    weights = [entry.weights for entry in seen]
    if weights[0] == pb.WEIGHTS_RESIDENT:
        # This change is the end of the pin. `unpin` returns at this change, and watchers get it a moment later.
        del weights[0]
    assert weights == [
        pb.WEIGHTS_ABSENT,
        pb.WEIGHTS_LOADING,
        pb.WEIGHTS_RESIDENT,
        pb.WEIGHTS_RESIDENT,
    ]
    with control.watch() as updates:
        again = updates.get(timeout=PATIENCE_S).snapshot
    assert ({entry.version.key: entry for entry in again.entries}, again.revision) == (entries, revision)


def test_a_profile_is_recorded(control: Control) -> None:
    """The profile has a trace of the requests between its start and its stop."""
    folder = Path(control.rsrv("profile", "start").removeprefix("recording into ").strip())
    with caller(control.server) as call:
        call("exact", {"x": ROW})
    assert control.rsrv("profile", "stop") == f"{folder}\n"

    assert [file for file in folder.rglob("*") if file.suffix == ".pb"]
    control.rsrv("profile", "stop", status=1)


def test_a_changed_bundle_is_served_when_its_reload_returns(
    control: Control, tmp_path: Path, server: RunningTriton
) -> None:
    """When ReloadWeights returns, the server serves the changed bundle."""
    sources = Path(control.status().server.repository).parent / "bundles"
    with caller(server) as call:
        assert version(call, "changing") == (1, 0)
        place(write_version(tmp_path / "two", 2), sources / "changing")

        control.rsrv("reload", "changing")

        assert version(call, "changing") == (2, 0)
    control.rsrv("reload", "nobody", status=1)


def test_a_stopped_runtime_is_seen(control: Control) -> None:
    """The control service is unhealthy while the runtime is stopped, and calls fail. When the runtime continues, the service is healthy."""
    runtime = control.status().devices[0].record
    os.kill(runtime.pid, signal.SIGSTOP)
    try:
        wait_until(lambda: control.health() == NOT_SERVING, what="the silence")
        control.rsrv("status", status=1)
    finally:
        os.kill(runtime.pid, signal.SIGCONT)

    wait_until(lambda: control.health() == SERVING, what="the runtime")
    assert control.status().devices[0].record.instance == runtime.instance


@python_front("a model with the native front has no stub")
def test_a_dead_stub_is_seen_and_replaced(control: Control) -> None:
    """A stub is killed. Its model and the server are unhealthy until the stub is replaced, and other models stay healthy."""
    # The stub of the version before the last reload ends a moment after the reload.
    wait_until(lambda: len(control.server.stub_pids("changing")) == 1, what="one stub")
    (stub,) = control.server.stub_pids("changing")
    unhealthy = [control.unhealthy(service) for service in ("changing", "")]
    os.kill(stub, signal.SIGKILL)

    for watcher in unhealthy:
        next(watcher)
    assert control.health("exact") == SERVING
    wait_until(lambda: control.health() == SERVING, what="the model that lost its stub")
    with caller(control.server) as call:
        version(call, "changing")


def test_what_was_set_survives_the_runtime(control: Control) -> None:
    """After the runtime was killed, the next one has the same pin, policy, pause and scheduler settings."""
    control.rsrv("pin", "exact", "--wait")
    control.rsrv("policy", "steady", "--weight", "3")
    control.rsrv("pause", "steady")
    control.rsrv("scheduler", "meta_concurrency=3")
    runtime = control.status().devices[0].record
    with control.watch() as updates:
        assert updates.get(timeout=PATIENCE_S).HasField("snapshot")
        unhealthy = control.unhealthy()
        os.kill(runtime.pid, signal.SIGKILL)
        next(unhealthy)
        while not updates.get(timeout=PATIENCE_S).HasField("down"):
            pass
        while not (update := updates.get(timeout=PATIENCE_S)).HasField("snapshot"):
            pass
        assert update.snapshot.instance != runtime.instance

    wait_until(lambda: control.health() == SERVING, what="the next runtime")
    exact, steady = control.model("exact"), control.status("steady")
    assert exact.record.residency == pb.RESIDENCY_DEVICE
    assert (steady.models[0].policy.weight, steady.models[0].paused) == (3.0, pb.PAUSE_HOLD)
    assert steady.scheduler.meta_concurrency == 3
    control.rsrv("policy", "steady", "--weight", "1")


def test_a_changed_file_holds_at_once_and_a_broken_one_does_no_harm(control: Control) -> None:
    """A changed limit in rsrv.yaml applies within seconds.

    If the runtime is killed while rsrv.yaml is broken, the server still starts another runtime.
    """
    file = control.server.server.model_repository / "rsrv.yaml"
    text = file.read_text()

    def notes() -> list[str]:
        return list(control.status().server.settings_notes)

    try:
        file.write_text(text.replace("max_queue_depth: 1024", "max_queue_depth: 512"))
        wait_until(lambda: control.model("steady").policy.max_queue_depth == 512, what="the changed limit")
        assert notes() == []

        file.write_text("scheduler: {depth: many}")
        wait_until(lambda: len(notes()) == 1, what="the note about the broken file")
        assert "scheduler.depth: must be a valid integer" in notes()[0]
        unhealthy = control.unhealthy()
        os.kill(control.status().devices[0].record.pid, signal.SIGKILL)
        next(unhealthy)
        wait_until(lambda: control.health() == SERVING, what="the next runtime")
    finally:
        file.write_text(text)
    wait_until(lambda: notes() == [], what="the file as it was")


def test_a_restart_under_load_fails_no_request(control: Control) -> None:
    """During a restart, no request of 16 clients fails, and all answers are right. The next runtime has the changed rsrv.yaml."""
    server, stop = control.server, threading.Event()
    answered_at: list[float] = []

    def work(call: Caller, number: int) -> None:
        rng = np.random.default_rng(number)
        # The pauses leave enough of two cores for two runtimes that start.
        while not stop.wait(0.01):
            x = rng.integers(-50, 51, (int(rng.integers(1, 9)), 64)).astype(np.float32)
            np.testing.assert_array_equal(call("exact", {"x": x})["y"], x @ bundles.exact_kernel())
            answered_at.append(time.monotonic())

    file = server.server.model_repository / "rsrv.yaml"
    file.write_text(file.read_text().replace("meta_concurrency: 2", "meta_concurrency: 3"))
    before = control.status().devices[0].record.instance
    with ThreadPoolExecutor(1) as pool:
        clients = pool.submit(at_once, server, 16, work)
        try:
            wait_until(lambda: len(answered_at) > 200 or clients.done())
            output = control.rsrv("restart")
            count = len(answered_at)
            wait_until(lambda: len(answered_at) > count + 200 or clients.done())
        finally:
            stop.set()
        clients.result()
    gap = max(after - before for before, after in pairwise(sorted(answered_at)))
    print(f"{output.strip()}; the clients' longest gap: {gap:.2f} s")

    status = control.status()
    assert status.devices[0].record.instance != before
    assert status.scheduler.meta_concurrency == 3


def ready(control: Control) -> bool:
    """Return True if all models are ready. A sleeping device is healthy without ready models."""
    versions = ((model.name, entry.state) for model in control.status().models for entry in model.versions)
    return {name for name, state in versions if state == pb.STATE_READY} >= {"exact", "steady", "changing"}


def sleep(control: Control) -> str:
    """Wait until all models are built, and put the device to sleep. An earlier end of the runtime may have left models to build."""
    wait_until(lambda: ready(control), what="all models to be built")
    return control.rsrv("sleep")


def test_a_device_sleeps_until_a_request(control: Control) -> None:
    """While the device sleeps, no runtime exists. Calls for the server's state do not wake it, and models are shown as ready.

    A request wakes the device, and all models return.
    """
    server = control.server
    runtime = control.status().devices[0].record.pid
    assert sleep(control) == "device 0: asleep\n"
    assert not is_alive(runtime)
    assert control.status().devices[0].HasField("asleep_since_unix_s")
    assert control.health() == SERVING
    assert server.grpc.is_server_ready()
    assert server.grpc.is_model_ready("exact")
    assert "rsrv_runtime_up" in control.stub.GetMetrics(pb.GetMetricsRequest()).text
    assert not control.status().devices[0].HasField("record")
    with caller(server) as call:
        np.testing.assert_array_equal(call("exact", {"x": ROW})["y"], ROW @ bundles.exact_kernel())
    wait_until(lambda: ready(control), what="the other models")


@pytest.mark.long
def test_sleeps_under_load_fail_no_request(control: Control) -> None:
    """The device is put to sleep under load, and each next request wakes it. No request of four clients fails."""
    server, stop = control.server, threading.Event()
    answered: list[int] = []

    def work(call: Caller, number: int) -> None:
        rng = np.random.default_rng(number)
        while not stop.is_set():
            x = rng.integers(-50, 51, (int(rng.integers(1, 9)), 64)).astype(np.float32)
            np.testing.assert_array_equal(call("exact", {"x": x})["y"], x @ bundles.exact_kernel())
            answered.append(number)

    with ThreadPoolExecutor(1) as pool:
        clients = pool.submit(at_once, server, 4, work)
        try:
            for _ in range(2):
                control.rsrv("wake")
                count = len(answered)
                wait_until(lambda count=count: len(answered) > count + 20 or clients.done())  # type: ignore[misc]
                control.rsrv("sleep", "--force")
            count = len(answered)
            wait_until(lambda: len(answered) > count + 20 or clients.done())
        finally:
            stop.set()
        clients.result()


def test_the_control_process_is_replaced_when_it_dies(control: Control) -> None:
    """Requests are answered after the control process dies. The next control process has the operators' settings."""
    control.rsrv("policy", "steady", "--weight", "5")
    first = control.status().server.control_pid
    os.kill(first, signal.SIGKILL)
    with caller(control.server) as call:
        assert not isinstance(outcome(lambda: call("exact", {"x": ROW})), Refused)

    wait_until(lambda: control.pid() not in (0, first), what="another control process")
    wait_until(lambda: control.health() == SERVING, what="all models")
    assert control.model("steady").policy.weight == 5.0
    control.rsrv("policy", "steady", "--weight", "1")


def test_the_control_process_is_replaced_while_the_device_sleeps(control: Control) -> None:
    """After the control process dies, the spare process starts another one. The device sleeps until a command wakes it."""
    sleep(control)
    first = control.status().server.control_pid
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: control.pid() not in (0, first), what="another control process")
    wait_until(lambda: control.health() == SERVING, what="its health")
    assert control.status().devices[0].HasField("asleep_since_unix_s")
    assert control.rsrv("wake").startswith("device 0: awake after")
    wait_until(lambda: ready(control), what="the models of before")


@pytest.mark.long
def test_a_kill_between_any_two_commands_changes_nothing(control: Control) -> None:
    """Of 200 random commands, every tenth is followed by a kill of the runtime or of the control process.

    All settings stay the same.
    """
    rng, names = random.Random(46), ["exact", "steady", "changing"]

    def settings() -> tuple[Any, ...]:
        """Return the settings that the control process and the runtime show."""
        status = control.status()
        models = sorted(status.models, key=lambda entry: entry.name)
        rows = [(entry.name, entry.record.residency, entry.paused, str(entry.policy)) for entry in models]
        return str(status.scheduler), [row[0] for row in rows], rows

    def known() -> bool:
        with contextlib.suppress(grpc.RpcError):
            return settings()[1] == sorted(names) and all(
                entry.record.residency for entry in control.status().models
            )
        return False

    # Earlier tests may have left models cold, and a kill leaves cold models cold.
    with caller(control.server) as call:
        call("exact", {"x": ROW})
        call("steady", {"x": np.zeros((1, 4), np.uint32)})
        version(call, "changing")
    for number in range(200):
        model = rng.choice(names)
        target = rng.choice([model, "--all"])
        control.rsrv(
            *rng.choice(
                [
                    ("residency", model, rng.choice(["unpinned", "system", "device"])),
                    ("policy", model, "--weight", str(rng.randint(1, 9))),
                    ("policy", model, "--max-queue-depth", str(rng.randint(1, 99))),
                    ("scheduler", f"discipline={rng.choice(['fair', 'fifo', 'edf'])}"),
                    ("scheduler", f"meta_concurrency={rng.randint(1, 4)}"),
                    ("pause", target, "--mode", rng.choice(["hold", "drain", "reject"])),
                    ("continue", target),
                    ("prefetch", model),
                    ("evict", target),
                ]
            )
        )
        if number % 10 != 9:
            continue
        before, control_pid = settings(), control.status().server.control_pid
        if rng.random() < 0.5:
            runtime = control.status().devices[0].record
            os.kill(runtime.pid, signal.SIGKILL)
            wait_until(partial(_is_next, control, runtime.instance), what="the next runtime")
        else:
            os.kill(control_pid, signal.SIGKILL)
            wait_until(lambda: control.pid() not in (0, control_pid), what="another control process")  # noqa: B023
        wait_until(known, timeout=60, what="all models")
        assert settings() == before
    for arguments in (("scheduler", "discipline=fair", "meta_concurrency=2"), ("continue", "--all")):
        control.rsrv(*arguments)
    for name in names:
        control.rsrv("residency", name, "system")
        control.rsrv("policy", name, "--weight", "1", "--max-queue-depth", "1024")


def _is_next(control: Control, instance: str) -> bool:
    """Return True if a runtime other than `instance` answers."""
    with contextlib.suppress(grpc.RpcError):
        return control.status().devices[0].record.instance not in ("", instance)
    return False


@pytest.mark.long
def test_wake_starts_a_runtime_after_the_spare_was_killed(control: Control) -> None:
    """The spare process is killed while the device sleeps and only the spare listens. `rsrv wake` still starts a runtime."""
    sleep(control)
    arguments = {"--listener-fd", str(control.server.pid)}
    (spare,) = (
        process
        for process in psutil.process_iter(["cmdline"])
        if arguments <= set(process.info["cmdline"] or ())
    )
    spare.kill()
    assert control.rsrv("wake").startswith("device 0: awake after")
    wait_until(lambda: ready(control), what="the models of before")
