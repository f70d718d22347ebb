"""Weights on the device and on the host of a serving runtime: shared, moved by commands, short of memory, and freed."""

import logging
import math
import os
import re
import shutil
import threading
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest

from rsrv.runtime.allocation import Bytes
from rsrv.runtime.crash_history import BlackBox, Death
from rsrv.runtime.device import DeviceError
from rsrv.runtime.host_weights import HostStore
from rsrv.runtime.weight_manager import SLACK_FRACTION
from rsrv.settings import load_settings
from rsrv.stub.connection import Rejected
from rsrv.stub.engine import Engine
from rsrv_bundle import read_bundle
from rsrv_bundle.weights import WeightsFile
from tests.fakes import FakeError
from tests.runtime_commands import compact
from tests.status import read_status
from tests.unit.runtime.conftest import Runtime, StartRuntime, export_doubling
from tests.unit.runtime.engines import answered, make_engine, refused, register, send_one
from tests.unit.runtime.metas import answer_of
from tests.unit.runtime.watchers import configure, set_residency
from tests.waiting import PATIENCE_S, wait_until

ROOT = Path(__file__).resolve().parents[3]
#: Bytes of one weight of `export_doubling`: three f32.
_BYTES = 12
_RESIDENCIES = ("unpinned", "system", "device")


@pytest.fixture(scope="session")
def relatives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return models `a`, `b` and `c`, which compute 2 x + 1, 2 x + 2 and 2 x + 3.

    Each has one tensor of its own and one tensor that all three share.
    """
    folder = tmp_path_factory.mktemp("bundles")
    return {
        name: export_doubling(folder / name, a=[w, w, w], base=[9, 9, 9]) for w, name in enumerate("abc", 1)
    }


@dataclass
class House:
    """A runtime, and what its status shows."""

    start_runtime: StartRuntime
    runtime: Runtime = field(init=False)

    def start(self, more: str = "", *, limit: int | None = None, asynchronous: bool = False) -> "House":
        """Start the runtime.

        `more`: keys of the section `runtime`. `limit`: bytes of the device's memory without the slack.
        """
        self.runtime = self.start_runtime(
            load_settings(f"stub: {{in_place_ms: 0}}\nruntime: {{{more}}}"), asynchronous=asynchronous
        )
        if limit is not None:
            self.runtime.device.memory_limit = math.ceil(limit / (1 - SLACK_FRACTION))
        return self

    def engine(self, path: Path, name: str = "") -> Engine:
        return make_engine(self.runtime, path, name=name or path.name)

    def model(self, name: str) -> dict[str, Any]:
        model: dict[str, Any] = read_status(os.getpid())["models"][name]
        return model

    def device_bytes(self) -> dict[str, Any]:
        figures: dict[str, Any] = read_status(os.getpid())["memory"]
        return figures

    def host(self) -> tuple[int, int, int]:
        """Return the host copies' logical bytes, physical bytes, and number of tensors."""
        host = read_status(os.getpid())["host"]
        return host["logical_bytes"], host["physical_bytes"], host["tensors"]


@pytest.fixture
def house(start_runtime: StartRuntime) -> House:
    return House(start_runtime)


def test_each_load_has_a_line_with_its_numbers(
    house: House, relatives: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """The log has a line for each load, with its bytes, its evictions, and the number of waiting requests."""
    with caplog.at_level(logging.INFO, "rsrv.runtime.weight_manager"):
        house.start(f"weight_budget_bytes: {3 * _BYTES}")
        engines = {name: house.engine(relatives[name]) for name in "abc"}
        assert answered(send_one(engines["a"])) == 1

    lines = [
        record for record in caplog.records if record.__dict__.get("fields", {}).get("event") == "loaded"
    ]
    loads = [record.__dict__["fields"] for record in lines]
    assert [
        (entry["model"], entry["bytes"], [key[0] for key in entry["evicted"]], entry["waiting"])
        for entry in loads
    ] == [
        ("a", 2 * _BYTES, [], 0),
        ("b", _BYTES, [], 0),
        ("c", _BYTES, ["a"], 0),
        ("a", _BYTES, ["b"], 1),
    ]
    for load in loads:
        assert load["version"].startswith(f"{load['model']}@")
        assert load["bytes_per_second"] > 0 < load["seconds"]
    (example,) = re.findall(
        r"I rsrv.runtime.weight_manager: (.*)", (ROOT / "docs" / "monitoring.md").read_text("utf-8")
    )
    assert template(lines[-1].getMessage()) == template(example)


def template(line: str) -> str:
    """Return a line of the log with placeholders for keys and numbers."""
    return re.sub(r"[\d.]+", "N", re.sub(r"\w+@\w+", "K", line))


# --- sharing -----------------------------------------------------------------------------------------------


def test_equal_tensors_are_stored_once_on_both_tiers(house: House, relatives: dict[str, Path]) -> None:
    """A model that shares one of its two tensors takes memory only for the other one, on both tiers.

    Each model's answers are right.
    """
    house.start()
    engines = []
    for count, name in enumerate("abc", 1):
        engines.append(house.engine(relatives[name]))
        assert house.runtime.device.uploaded == count + 1
        assert house.runtime.device.device_bytes == (count + 1) * _BYTES
        assert house.host() == (2 * count * _BYTES, (count + 1) * _BYTES, count + 1)

    assert [answered(send_one(engine)) for engine in engines] == [1, 2, 3]
    figures = house.device_bytes()
    assert figures["logical_bytes"] == 6 * _BYTES
    assert figures["physical_bytes"] == figures["held_bytes"] == 4 * _BYTES


def test_a_shared_tensor_leaves_with_the_last_model_that_has_it(
    house: House, relatives: dict[str, Path]
) -> None:
    """When one of two models with a shared tensor is unloaded, only its unshared tensor is freed, on both tiers."""
    house.start()
    first, second = (house.engine(relatives[name]) for name in "ab")

    first.close()
    wait_until(lambda: house.runtime.device.device_bytes == 2 * _BYTES)
    wait_until(lambda: house.host() == (2 * _BYTES, 2 * _BYTES, 2))
    assert answered(send_one(second)) == 2
    second.close()
    wait_until(lambda: house.runtime.device.device_bytes == 0)
    wait_until(lambda: house.host() == (0, 0, 0))


def test_relatives_take_turns_in_room_for_one(house: House, relatives: dict[str, Path]) -> None:
    """If the device has memory for one model, models that share a tensor replace each other.

    The shared tensor stays on the device.
    """
    house.start(f"weight_budget_bytes: {2 * _BYTES}", limit=2 * _BYTES)
    engines = [house.engine(relatives[name]) for name in "abc"]
    before = house.runtime.device.uploaded

    assert [answered(send_one(engine)) for engine in engines * 2] == [1, 2, 3] * 2
    assert house.runtime.device.device_bytes == 2 * _BYTES
    assert house.runtime.device.uploaded == before + 6, "what they share was moved again"


# --- residency by command ----------------------------------------------------------------------------------


def test_a_pinned_model_comes_from_the_host_before_its_copy_goes(
    house: House, doublings: dict[str, Path], tmp_path: Path
) -> None:
    """A model is pinned: its weights are loaded from the host copy, which is then dropped."""
    path = tmp_path / "a"
    shutil.copytree(doublings["a"], path)
    house.start(f"weight_budget_bytes: {_BYTES}")
    a, b = house.engine(path), house.engine(doublings["b"])
    assert answered(send_one(a)) == 1
    os.utime(path / "weights.safetensors", (0, 0))
    house.runtime.device.uploads.clear()
    late = send_one(b)
    house.runtime.device.uploads.wait_until_held()

    set_residency(house.runtime, "a", "device")
    with pytest.raises(Rejected):
        # When this registration is rejected, the build thread has carried out the earlier command.
        house.engine(tmp_path / "nothing")
    house.runtime.device.uploads.set()

    assert answered(late) == 2
    wait_until(lambda: house.model("a")["weights"] == "resident")
    wait_until(lambda: house.host()[2] == 1)
    assert [answered(send_one(engine)) for engine in (a, b, a)] == [1, 2, 1]


@pytest.mark.parametrize("before", _RESIDENCIES)
@pytest.mark.parametrize("after", _RESIDENCIES)
def test_every_residency_follows_every_other(
    house: House, doublings: dict[str, Path], before: str, after: str
) -> None:
    """After any change of residency, the weights are where they should be, and answers are right."""
    house.start(f"weight_budget_bytes: {_BYTES}")
    a, b = (house.engine(doublings[name]) for name in "ab")
    for residency in (before, after):
        set_residency(house.runtime, "a", residency)
        if residency == "device":
            wait_until(lambda: house.model("a")["weights"] == "resident")
        copies = 2 if residency == "system" else 1
        wait_until(lambda copies=copies: house.host()[2] == copies)  # type: ignore[misc]
        assert house.model("a")["residency"] == residency
        assert house.device_bytes()["pinned_bytes"] == (_BYTES if residency == "device" else 0)
        assert [answered(send_one(engine)) for engine in (a, b, a, b)] == [1, 2, 1, 2]
        assert house.model("a")["weights"] == ("resident" if residency == "device" else "absent")


@pytest.mark.parametrize("residency", _RESIDENCIES)
def test_the_residency_changes_while_the_weights_are_on_their_way(
    house: House, doublings: dict[str, Path], residency: str
) -> None:
    """If the residency changes during a load, the change applies after the load. The waiting request is answered."""
    house.start(f"weight_budget_bytes: {_BYTES}")
    a, _ = (house.engine(doublings[name]) for name in "ab")
    house.runtime.device.uploads.clear()
    request = send_one(a)
    house.runtime.device.uploads.wait_until_held()

    set_residency(house.runtime, "a", residency)

    assert house.model("a")["weights"] == "loading"
    house.runtime.device.uploads.set()
    assert answered(request) == 1
    wait_until(lambda: house.host()[2] == (2 if residency == "system" else 1))
    assert house.device_bytes()["pinned_bytes"] == (_BYTES if residency == "device" else 0)


@pytest.mark.parametrize("residency", _RESIDENCIES)
def test_the_residency_changes_while_the_model_executes(
    house: House, doublings: dict[str, Path], residency: str
) -> None:
    """A residency that changes during an execution applies after it."""
    house.start(f"weight_budget_bytes: {_BYTES}")
    house.engine(doublings["a"])
    b = house.engine(doublings["b"])
    house.runtime.device.gate.clear()
    request = send_one(b)
    house.runtime.device.gate.wait_until_held()

    set_residency(house.runtime, "b", residency)
    set_residency(house.runtime, "a", "device")

    house.runtime.device.gate.set()
    assert answered(request) == 2
    wait_until(lambda: house.model("a")["weights"] == "resident")
    assert answered(send_one(b)) == 2
    pinned = house.device_bytes()["pinned_bytes"]
    assert pinned == (2 * _BYTES if residency == "device" else _BYTES)


def test_a_host_without_memory_for_a_copy_ends_nothing(
    house: House, doublings: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the host has no memory for a copy, the model serves from its file."""
    house.start("weight_budget_bytes: 0")
    a = house.engine(doublings["a"])
    set_residency(house.runtime, "a", "unpinned")
    wait_until(lambda: house.host()[2] == 0)
    statuses: list[int] = []
    real = WeightsFile.read_into
    errors = iter([MemoryError()])

    def read(file: WeightsFile, index: int, out: Bytes, *, digest: str | None = None) -> None:
        for error in errors:
            raise error
        real(file, index, out, digest=digest)

    monkeypatch.setattr(WeightsFile, "read_into", read)
    monkeypatch.setattr(os, "_exit", statuses.append)
    set_residency(house.runtime, "a", "system")

    b = house.engine(doublings["b"])
    assert not statuses
    assert [answered(send_one(engine)) for engine in (a, b)] == [1, 2]


def test_the_residency_changes_while_the_model_is_compiled(house: House, doublings: dict[str, Path]) -> None:
    """A residency that changes during a compilation applies right after the build."""
    house.start()
    house.runtime.device.compiles.clear()
    registering = register(house.runtime, "a", doublings["a"])
    house.runtime.device.compiles.wait_until_held()

    set_residency(house.runtime, "a", "device")
    house.runtime.device.compiles.set()
    registering.join()

    assert house.model("a")["residency"] == "device"
    assert house.device_bytes()["pinned_bytes"] == _BYTES
    wait_until(lambda: house.host() == (0, 0, 0))


def test_pinned_models_beyond_the_budget_are_named_in_the_log(
    house: House, doublings: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Pinned models beyond the budget are logged with numbers and settings, and stay resident."""
    house.start(f"weight_budget_bytes: {_BYTES}")
    engines = [house.engine(doublings[name]) for name in "ab"]
    for name in "ab":
        set_residency(house.runtime, name, "device")
    wait_until(lambda: house.device_bytes()["held_bytes"] == 2 * _BYTES)

    assert (
        f"pinned models take {2 * _BYTES} bytes of the device, more than the {_BYTES} bytes for weights"
        in caplog.text
    )
    assert "models.NAME.residency" in caplog.text
    assert [answered(send_one(engine)) for engine in engines] == [1, 2]


# --- the device's memory -----------------------------------------------------------------------------------


def test_no_mix_of_models_ever_exceeds_the_budget(
    house: House,
    doublings: dict[str, Path],
    relatives: dict[str, Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """For any mix of requests and models, the bytes on the device never exceed the budget."""
    house.start(f"weight_budget_bytes: {3 * _BYTES}", limit=3 * _BYTES)
    chance = Random(7)
    paths = {f"own-{name}": path for name, path in doublings.items()}
    paths |= {f"base-{name}": path for name, path in relatives.items()}
    here: dict[str, Engine] = {}
    for _ in range(60):
        name = chance.choice(sorted(paths))
        if name not in here:
            here[name] = house.engine(paths[name], name)
        elif chance.random() < 0.1:
            here.pop(name).close()
        requests = (
            [(choice, send_one(here[choice])) for choice in chance.choices(sorted(here), k=5)] if here else []
        )
        for model, request in requests:
            assert answered(request) == "abcd".index(model[-1]) + 1

    assert "no memory" not in caplog.text
    assert house.runtime.device.device_bytes <= 3 * _BYTES


def test_the_depth_counts_for_what_executions_take(house: House, doublings: dict[str, Path]) -> None:
    """The scratch of each execution in flight reduces the budget, so a greater depth reduces it more."""
    house.start(limit=1000)
    house.runtime.device.scratch = 100
    house.engine(doublings["a"])
    assert house.device_bytes()["budget_bytes"] == 900

    configure(house.runtime, {"depth": 3})

    assert house.device_bytes()["budget_bytes"] == 700


def test_the_budget_follows_the_models(house: House, doublings: dict[str, Path]) -> None:
    """A model's scratch reduces the budget while the model is loaded."""
    house.start(limit=1000)
    house.engine(doublings["a"])
    house.runtime.device.scratch = 300
    b = house.engine(doublings["b"])
    assert house.device_bytes()["budget_bytes"] == 700

    b.close()

    wait_until(lambda: house.device_bytes()["budget_bytes"] == 1000)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("where", ["launch", "read"])
def test_an_execution_without_memory_is_tried_once_more(
    house: House, doublings: dict[str, Path], where: Any, asynchronous: bool
) -> None:
    """If an execution finds no memory, all other models are evicted and the execution is retried."""
    house.start(asynchronous=asynchronous)
    a, b = (house.engine(doublings[name]) for name in "ab")
    house.runtime.device.fail_next(where)

    assert answered(send_one(a)) == 1
    wait_until(lambda: house.model("b")["evictions"] == 1)
    assert house.model("a")["evictions"] == 0
    assert answered(send_one(b)) == 2


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("where", ["launch", "read"])
def test_an_execution_that_finds_no_memory_twice_fails_alone(
    house: House, doublings: dict[str, Path], where: Any, asynchronous: bool
) -> None:
    """An execution that finds no memory a second time fails only its own request."""
    house.start(asynchronous=asynchronous)
    a, b = (house.engine(doublings[name]) for name in "ab")
    house.runtime.device.fail_next(where, times=2)

    assert refused(answer_of(send_one(a)), FakeError.INTERNAL, "failed to execute")
    assert answered(send_one(a)) == 1
    assert answered(send_one(b)) == 2
    assert house.model("a")["outcomes"]["failed"] == 1


def test_a_load_without_memory_is_tried_once_more(
    house: House,
    doublings: dict[str, Path],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If a load finds no memory, all other models are evicted and the load is retried.

    If the retry also finds no memory, only the requests for this model fail.
    """
    house.start(f"weight_budget_bytes: {2 * _BYTES}")
    a, b, c = (house.engine(doublings[name]) for name in "abc")
    house.runtime.device.fail_next("upload")
    assert answered(send_one(a)) == 1
    wait_until(lambda: house.model("c")["evictions"] > 0)

    assert answered(send_one(b)) == 2
    assert answered(send_one(c)) == 3
    house.runtime.device.fail_next("upload", times=2)
    monkeypatch.setattr("rsrv.scheduler.weights._FIRST_BACKOFF_S", 60.0)
    caplog.set_level(logging.INFO, "rsrv.runtime.weight_manager")
    assert refused(answer_of(send_one(a)), FakeError.INTERNAL, "could not be loaded")
    # The failed load has no line that could name the evicted models, so each eviction has its own line.
    gone = [
        fields
        for record in caplog.records
        if (fields := record.__dict__.get("fields", {})).get("event") == "evicted"
    ]
    assert {eviction["version"][0] for eviction in gone} == {"b", "c"}
    why = "[rsrv:QUEUE_FULL] the device has no memory for this model's weights; loading is retried in "
    assert refused(answer_of(send_one(a)), FakeError.UNAVAILABLE, why)
    assert [answered(send_one(engine)) for engine in (c, b)] == [3, 2]
    house.runtime.pass_time(60.0)
    assert answered(send_one(a)) == 1


def test_a_load_that_stops_halfway_leaves_nothing_behind(house: House, relatives: dict[str, Path]) -> None:
    """A load that fails halfway frees its first tensor."""
    house.start()
    house.runtime.device.fail_next("upload", after=1, times=1)
    a = house.engine(relatives["a"])
    assert answered(send_one(a)) == 1
    house.runtime.device._failures.put("upload", [None, MemoryError("no OutOfMemory")])

    with pytest.raises(Exception, match="its weights cannot be loaded: MemoryError"):
        house.engine(export_of_two(relatives["a"].parent / "other"))

    assert house.runtime.device.device_bytes == 2 * _BYTES
    assert answered(send_one(a)) == 1


def export_of_two(path: Path) -> Path:
    return export_doubling(path, x=[5, 5, 5], y=[6, 6, 6])


def test_a_warm_up_that_finds_no_memory_is_tried_once_more(house: House, doublings: dict[str, Path]) -> None:
    """A warm-up without memory is retried after others were evicted."""
    house.start()
    a = house.engine(doublings["a"])
    house.runtime.device.fail_next("launch")

    b = house.engine(doublings["b"])

    assert [answered(send_one(engine)) for engine in (a, b)] == [1, 2]


def test_a_model_whose_warm_up_fails_is_refused_and_leaves_nothing(
    house: House, doublings: dict[str, Path]
) -> None:
    """A model whose warm-up fails is rejected with the reason and leaves nothing."""
    house.start()
    a = house.engine(doublings["a"])
    house.runtime.device.fail_next("read", times=50)
    with pytest.raises(Exception, match="OutOfMemory"):
        house.engine(doublings["b"])
    house.runtime.device.fail_next("read", times=0)

    # The other model was evicted for the retry.
    wait_until(lambda: house.runtime.device.device_bytes == 0)
    wait_until(lambda: house.host()[2] == 1)
    assert answered(send_one(a)) == 1
    assert answered(send_one(house.engine(doublings["b"]))) == 2


def test_a_model_that_cannot_be_built_leaves_no_weights_on_the_host(
    house: House, doublings: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that cannot be built leaves no host copy."""
    house.start()

    def silent(*_: object) -> int:
        raise DeviceError("the compiler says nothing")

    monkeypatch.setattr(house.runtime.device, "scratch_bytes", silent)
    with pytest.raises(Exception, match="the compiler says nothing"):
        house.engine(doublings["a"])

    assert house.host() == (0, 0, 0)


def test_a_compaction_waits_for_what_executes(house: House, doublings: dict[str, Path]) -> None:
    """A compaction waits for the execution in progress, and new requests wait for the compaction.

    All weights are loaded again.
    """
    house.start()
    a, b = (house.engine(doublings[name]) for name in "ab")
    house.runtime.device.gate.clear()
    first = send_one(a)
    house.runtime.device.gate.wait_until_held()

    compact(os.getpid())
    second = send_one(b)

    assert house.runtime.device.uploaded == 2
    house.runtime.device.gate.set()
    assert (answered(first), answered(second)) == (1, 2)
    wait_until(
        lambda: house.runtime.device.uploaded == 4 and house.device_bytes()["held_bytes"] == 2 * _BYTES
    )
    assert [house.model(name)["evictions"] for name in "ab"] == [1, 1]


# --- loads that end otherwise ------------------------------------------------------------------------------


def test_a_load_whose_client_has_gone_makes_way_for_another(
    house: House, relatives: dict[str, Path], doublings: dict[str, Path]
) -> None:
    """A load that no request needs any more is abandoned if another model must be loaded."""
    house.start(f"weight_budget_bytes: {2 * _BYTES}")
    double, single, other = (
        house.engine(path)
        for path in (relatives["a"], doublings["b"], export_of_two(relatives["a"].parent / "two"))
    )
    assert answered(send_one(single)) == 2
    house.runtime.device.uploads.clear(after=1)
    before = house.runtime.device.uploaded
    gone = send_one(other)
    house.runtime.device.uploads.wait_until_held()
    gone.cancelled = True
    assert refused(answer_of(gone), FakeError.CANCELLED, "cancelled")
    waiting = send_one(double)
    wait_until(lambda: house.model("a")["queued"] == 1)
    house.runtime.device.uploads.set()

    assert answered(waiting) == 1
    assert house.runtime.device.uploaded == before + 3
    assert house.model("two")["loads"] == 1


def test_a_stub_that_leaves_while_its_model_is_compiled_leaves_nothing(
    house: House, doublings: dict[str, Path]
) -> None:
    """If a stub leaves while its model is compiled, the host copy is freed and nothing is loaded."""
    house.start()
    house.runtime.device.compiles.clear()
    registering = register(house.runtime, "a", doublings["a"])
    house.runtime.device.compiles.wait_until_held()
    registering.lane.sock.shutdown(2)
    registering.join()
    wait_until(lambda: read_status(os.getpid())["connections"] == 1)
    house.runtime.device.compiles.set()
    b = house.engine(doublings["b"])

    wait_until(lambda: house.host() == (_BYTES, _BYTES, 1))
    assert house.runtime.device.uploaded == 1
    assert answered(send_one(b)) == 2


@pytest.mark.parametrize("step", ["uploads", "gate"])
def test_a_stub_that_leaves_during_a_load_or_a_warm_up_leaves_nothing(
    house: House, doublings: dict[str, Path], step: str
) -> None:
    """If a stub leaves during its model's load or warm-up, the weights are freed afterwards.

    Another stub of the bundle is served.
    """
    house.start()
    gate = getattr(house.runtime.device, step)
    gate.clear()
    registering = register(house.runtime, "a", doublings["a"])
    gate.wait_until_held()

    registering.lane.sock.shutdown(2)
    registering.join()
    wait_until(lambda: read_status(os.getpid())["connections"] == 1)
    if step == "gate":
        assert house.runtime.device.device_bytes == _BYTES
    again = register(house.runtime, "a", doublings["a"])
    wait_until(lambda: read_status(os.getpid())["connections"] == 2)
    gate.set()
    again.join()

    assert again.rejected == []
    wait_until(lambda: house.model("a")["weights"] == "resident")
    assert house.host() == (_BYTES, _BYTES, 1)
    again.lane.close()
    wait_until(lambda: house.runtime.device.device_bytes == 0)
    wait_until(lambda: house.host() == (0, 0, 0))


def test_unused_tensors_are_swept_when_the_last_model_fails(
    house: House, doublings: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors that killed runtimes left are swept after the last build, even if it fails."""
    swept = threading.Event()
    monkeypatch.setattr(HostStore, "sweep", lambda _: swept.set())
    house.start()
    house.runtime.device.uploads.clear(after=1)
    house.runtime.device.gate.clear()
    well = register(house.runtime, "a", doublings["a"])
    house.runtime.device.gate.wait_until_held()
    ill = register(house.runtime, "b", doublings["b"])
    house.runtime.device.uploads.wait_until_held()
    house.runtime.device.gate.set()
    well.join()
    assert not swept.is_set()

    house.runtime.device.fail_next("upload", error=DeviceError("no luck"))
    house.runtime.device.uploads.set()
    ill.join()

    assert ill.rejected == ["its weights cannot be loaded: DeviceError: no luck"]
    assert swept.wait(PATIENCE_S)


def test_a_model_that_is_not_tried_sweeps_nothing(
    start_runtime: StartRuntime, doublings: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that is refused because of earlier deaths causes no sweep before other models have their weights."""
    swept: list[HostStore] = []
    monkeypatch.setattr(HostStore, "sweep", lambda store: swept.append(store))
    box = BlackBox(tmp_path)
    box.history.add(f"a@{read_bundle(doublings['a']).digest[:12]}", Death("LOADING", "hung", 0.0))
    runtime = start_runtime(blackbox=box)

    to_blame = register(runtime, "a", doublings["a"])
    to_blame.join()
    runtime.device.compiles.clear()
    next_one = register(runtime, "b", doublings["b"])
    runtime.device.compiles.wait_until_held()

    assert to_blame.rejected
    assert swept == []
    runtime.device.compiles.set()
    next_one.join()
    wait_until(lambda: len(swept) == 1)


def test_the_last_loaded_model_is_freed_when_it_is_unloaded(house: House, doublings: dict[str, Path]) -> None:
    """A model that is unloaded is freed with its executables, even if it was the last one that was loaded."""
    house.start()
    engine = house.engine(doublings["a"])
    (model,) = house.runtime.loop._catalog.models()
    host = weakref.ref(model.host)
    del model

    engine.close()

    wait_until(lambda: host() is None)
