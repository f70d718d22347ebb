"""How often the runtime reads a bundle, and that it serves what it has verified."""

from __future__ import annotations

import os
import shutil
import threading
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from rsrv.runtime.activity import Activity
from rsrv.runtime.crash_history import BlackBox
from rsrv.runtime.host_memory import HostMemory
from rsrv.runtime.host_weights import HostStore
from rsrv.runtime.model_builder import BundlesRead, ModelBuilder, StepEnded
from rsrv.runtime.models import RequestedModels, identify
from rsrv.runtime.start_queue import Demand, Urgency
from rsrv.runtime.threads import Inbox
from rsrv.runtime.transport import PeerConnection
from rsrv.settings import load_settings
from rsrv.stub.connection import Greeted, Rejected
from rsrv.wire.frames import Kind, StartProgress, read_header, unpack_starting
from rsrv_bundle.export import export_bundle
from tests.fakes import FakeDevice
from tests.unit.runtime.conftest import StartRuntime, answer_to_register, build
from tests.unit.runtime.test_hostile_peers import Client
from tests.waiting import PATIENCE_S, wait_until

EAGER, REQUESTED = Urgency.EAGER, Urgency.REQUESTED
#: Bytes of the weights of `large`. Compared with them, all other reads are small.
_BYTES = 64 << 20


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a bundle with two weights."""
    path = tmp_path_factory.mktemp("bundles") / "large"
    half = np.zeros(_BYTES // 8, np.float32)
    export_bundle(
        lambda params, x: x + params["a"][0] + params["b"][0],
        {"a": half, "b": half + 1},
        {"x": np.zeros((1, 2), np.float32)},
        batch_sizes=[1],
        out_dir=path,
    )
    return path


def bytes_read() -> int:
    """Return how many bytes this process has read, as the kernel counts them."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["rchar"])


@pytest.mark.parametrize(("version", "times"), [("3", 1), ("2.0", 2)])
@pytest.mark.parametrize("residency", ["system", "unpinned"])
def test_adding_a_model_reads_its_weights_once(
    large: Path, tmp_path: Path, version: str, times: int, residency: str
) -> None:
    """Weights are read once if the bundle has checksums, and twice if it has none."""
    path = shutil.copytree(large, tmp_path / "large", copy_function=os.link)
    if version == "2.0":
        manifest = path / "manifest.yaml"
        text = manifest.read_text().replace("format_version: 3", "format_version: '2.0'")
        manifest.unlink()
        manifest.write_text(text.replace("shape: na", "shape: an"))
    settings = load_settings(f"models: {{large: {{residency: {residency}}}}}")
    device = FakeDevice(lambda inputs, weights: [inputs[0]])
    before = bytes_read()
    requested = identify("large", str(path), {})
    assert requested.bundle.manifest.format_version == version
    with closing(build(requested.bundle, device, HostStore(HostMemory()), settings, "large").host) as host:
        read = bytes_read() - before
        assert times * _BYTES <= read < (times + 0.1) * _BYTES
        assert host.kept == (residency == "system")


def test_a_runtime_refuses_torn_weights_by_name_until_they_fit_again(
    start_runtime: StartRuntime, doubling: Path, tmp_path: Path
) -> None:
    """Weights that do not match the manifest are rejected with the file's name, until the file is complete."""
    runtime = start_runtime()
    path = shutil.copytree(doubling, tmp_path / "doubling")
    file = path / "weights.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(
        Rejected, match=r"weights\.safetensors does not match the manifest: it is being written"
    ):
        runtime.connect().register({"model": "doubling", "bundle": str(path)})

    file.write_bytes(whole)
    client = Client(runtime, path)
    assert client.works()


def test_bundles_that_requests_wait_for_are_read_first(
    doubling: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bundles that register while the device starts are read by urgency. Builds come before reads of equal urgency.

    When all models are built, tensors that a killed runtime left in shared memory are swept.
    """
    starts = threading.Event()
    inbox = Inbox()

    def make_device() -> FakeDevice:
        starts.wait(PATIENCE_S)
        return FakeDevice(lambda inputs, weights: [inputs[0]])

    settings = load_settings()
    builder = ModelBuilder(make_device, settings, inbox, Activity(bytearray(1 << 16)), BlackBox())
    monkeypatch.setattr(HostStore, "sweep", lambda store: inbox.post("swept"))
    builder.clean_up(HostStore(HostMemory()))
    for number, (name, urgency) in enumerate((("idle", EAGER), ("busy", REQUESTED), ("other", EAGER))):
        connection = cast(PeerConnection, SimpleNamespace(id=number))
        builder.read(connection, name, str(doubling), {}, Demand(urgency))
    builder.build("built@1", "built", identify("built", str(doubling), {}).bundle, settings, Demand(), 0.0)
    starts.set()

    events: list[str] = []

    def note_all() -> bool:
        for message in inbox.drain():
            if message == "swept":
                events.append(message)
            elif isinstance(message, BundlesRead):
                assert isinstance(message.result, RequestedModels)
                events.append(message.result.name)
            elif isinstance(message, StepEnded):
                builder.step_ended(message)
            else:
                events.append(type(message).__name__)
        return len(events) == 10

    wait_until(note_all)
    built = ["ModulesRead", *["ModuleCompiled"] * 3, "ModelCompiled"]
    assert events == ["DeviceReady", "busy", *built, "idle", "other", "swept"]


def wait_until_served(greeted: Greeted) -> None:
    """Wait until the model of a registration is ready."""
    frame, fds = answer_to_register(greeted)
    assert read_header(frame)[0] is Kind.REGISTERED
    for fd in fds:
        os.close(fd)


def test_stubs_hear_how_far_the_start_of_their_model_has_come(
    start_runtime: StartRuntime, doublings: dict[str, Path]
) -> None:
    """A stub gets each step of its model's start at once, with the time that requests may wait for the next step.

    It also gets a message when its model waits for the build thread.
    """
    runtime = start_runtime(load_settings("runtime: {start_timeout_s: 7}"))
    wait_until(lambda: not runtime.loop._builder._busy, what="the device")
    runtime.device.compiles.clear()
    lanes: dict[str, Greeted] = {}

    def heard(name: str) -> str:
        lanes[name].sock.settimeout(PATIENCE_S)
        step = unpack_starting(lanes[name].receiver.receive()[0])
        assert step.limit_s == 7
        return step.text

    for name in "ab":
        lanes[name] = runtime.request_model(model=name, bundle=str(doublings[name]), asked=True)
        if name == "a":
            assert heard("a") == "it waits for its turn to be built"
            assert heard("a") == "its modules have been read, and none is compiled yet"
    assert heard("b") == "its bundle waits to be read"
    runtime.device.compiles.set()
    for done in range(1, 4):
        assert heard("a") == f"{done} of its 3 modules are compiled"
    assert heard("a") == "it is compiled, and its weights are being loaded"
    assert heard("a") == "it is compiled, and being warmed up"
    for lane in lanes.values():
        wait_until_served(lane)


def test_a_model_with_stored_executables_is_built_before_one_that_must_be_compiled(
    start_runtime: StartRuntime, doublings: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a runtime's death, a model with stored executables is built before others, even if those registered earlier."""
    monkeypatch.setattr("rsrv.runtime.model_builder._BYTE_S", 1.0)
    runtime = start_runtime()
    keys = {name: identify(name, str(doublings[name]), {}).key for name in "abc"}
    runtime.device.stored = {keys["c"]}
    runtime.device.starts = {keys["b"]: 30.0}
    runtime.device.compiles.clear()
    lanes = list[Greeted]()
    for name in "dabc":
        lanes.append(runtime.request_model(model=name, bundle=str(doublings[name])))
        if name == "d":
            runtime.device.compiles.wait_until_held()
    wait_until(lambda: len(runtime.loop._builder._queue) == 3)
    runtime.device.compiles.set()

    for lane in lanes:
        wait_until_served(lane)
    names = [key.partition("@")[0] for key in runtime.device.costs]
    assert names == ["d", "c", "b", "a"]


def test_a_model_whose_stubs_have_gone_before_its_build_is_not_built(
    start_runtime: StartRuntime, doublings: dict[str, Path]
) -> None:
    """If all stubs of a model have left before its build, the model is not built, whether its bundle was read or not."""
    runtime = start_runtime()
    runtime.device.compiles.clear()
    loop, lanes = runtime.loop, dict[str, Greeted]()
    queue = loop._builder._queue
    for name in "abcd":
        lanes[name] = runtime.request_model(model=name, bundle=str(doublings[name]), asked=True)
        runtime.device.compiles.wait_until_held()
    wait_until(lambda: len(queue) == 3)
    reading = next(connection for connection in loop._transport.connections if connection.id in queue)
    read = identify("b", str(doublings["b"]), {})
    loop._inbox.post(lambda: queue.drop(reading.id))
    loop._inbox.post(lambda: loop._registry.bundles_read(BundlesRead(reading, read, {}, Demand())))
    wait_until(lambda: read.key in loop._catalog.entries)
    assert read.key in queue
    for name in "bc":
        lanes[name].sock.close()
    wait_until(lambda: len(queue) == 1)
    wait_until(lambda: [entry.name for entry in [*loop._catalog.entries.values()]] == ["a"])
    runtime.device.compiles.set()

    for name in "ad":
        wait_until_served(lanes[name])
    assert {key.partition("@")[0] for key in runtime.device.costs} == {"a", "d"}


def test_builds_have_a_lower_priority_than_the_loop(start_runtime: StartRuntime, doubling: Path) -> None:
    """The build thread has a lower priority than the loop. The device's threads have the same priority as the loop."""
    here = os.getpriority(os.PRIO_PROCESS, 0)
    runtime = start_runtime()
    Client(runtime, doubling).lane.close()
    priorities = {
        thread.name: os.getpriority(os.PRIO_PROCESS, thread.native_id or 0)
        for thread in threading.enumerate()
        if thread.name in ("build", "weights", "warm up")
    }
    assert priorities["build"] == min(19, here + 10)
    assert priorities["weights"] == priorities["warm up"] == here


@pytest.mark.parametrize(("discipline", "by_request"), [("edf", True), ("edf", False), ("fair", True)])
def test_fronts_hear_how_long_a_start_takes_where_deadlines_count(
    start_runtime: StartRuntime, doubling: Path, discipline: str, by_request: bool
) -> None:
    """With edf, a stub with waiting requests gets the duration of the model's shortest build, if the model was built before."""
    runtime = start_runtime(load_settings(f"scheduler: {{discipline: {discipline}}}"))
    heard: list[StartProgress] = []
    registration = {"model": "m", "bundle": str(doubling), "asked": by_request}
    for _ in range(2):
        lane = runtime.connect()
        lane.register(registration, heard.append)
        lane.close()
        wait_until(lambda: not runtime.loop._catalog.entries)
    least = [step.least_s for step in heard if step.least_s]
    assert least == (list(runtime.device.starts.values()) if discipline == "edf" and by_request else [])
    assert 0 < sum(runtime.device.starts.values()) < 60
