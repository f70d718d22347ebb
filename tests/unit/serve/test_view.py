"""The lines that `rsrv serve` prints when a model's state changes."""

import asyncio
import os
import re
import socket
from collections import Counter
from collections.abc import AsyncIterator, Collection
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from rsrv.address import Address
from rsrv.control.v1 import control_pb2 as pb
from rsrv.control.v1 import control_pb2_grpc
from rsrv.serve import view
from rsrv.serve.view import Changes, endpoints
from rsrv.wire.paths import CONTROL_SOCKET, FAILURE
from rsrv_gen.plan import BUNDLE_FOLDER
from tests.unit.serve.test_plan import planned
from tests.waiting import PATIENCE_S


def change(key: str, state: int | None, device: int = 0) -> pb.WatchStateResponse:
    """Return the change of a version to a state. The state None means that the version is gone."""
    version = pb.Version(key=key, state=state or 0, error="no memory")  # type: ignore[arg-type]
    entry = pb.Entry(name=key.rpartition("@")[0], version=version)
    return pb.WatchStateResponse(
        change=pb.Change(device=device, key=key, entry=None if state is None else entry)
    )


def snapshot(device: int, **models: tuple[str, int]) -> pb.WatchStateResponse:
    """Return a snapshot with these models, each with the key and the state of its version."""
    versions = {name: pb.Version(key=key, state=state) for name, (key, state) in models.items()}  # type: ignore[arg-type]
    entries = [pb.Entry(name=name, version=version) for name, version in versions.items()]
    return pb.WatchStateResponse(snapshot=pb.Snapshot(device=device, entries=entries))


def failures(**failed: str) -> pb.WatchStateResponse:
    """Return an update that reports failed models by name, each with its reason."""
    records = [pb.Failure(name=name, text=text) for name, text in failed.items()]
    return pb.WatchStateResponse(failures=pb.Failures(failures=records))


def said(changes: Changes, update: pb.WatchStateResponse, **lives: str) -> list[str]:
    """Return the lines that are printed for an update. Lines appear only at the second poll after the update."""
    changes.take(update)
    assert list(changes.lines(lives)) == []
    return list(changes.lines(lives))


def counts(changes: Changes, loaded: Collection[str] | None = None, **lives: str) -> tuple[int, int, int]:
    """Return the numbers of ready, failed and cold models."""
    numbers = changes.counts(lives, loaded)
    return numbers["ready"], numbers["failed"], numbers["cold"]


def test_a_model_that_falls_back_to_cold_is_not_removed() -> None:
    """A model that has left the runtimes, but is in the repository, is cold as soon as the control service says so."""
    models = {"a", "b", "c", "d"}
    changes = Changes({}, lambda: models)
    assert said(changes, change("a@1", pb.STATE_READY)) == ["a is ready"]
    assert said(changes, change("b@1", pb.STATE_LOADING), b="starting, compiling") == []
    assert counts(changes, b="starting, compiling") == (1, 0, 2)
    assert said(changes, change("a@1", None)) == []
    assert [line for _ in range(4) for line in changes.lines({"a": "cold"})] == ["a is cold"]
    assert said(changes, change("a@1", pb.STATE_READY)) == ["a is ready"]
    models.remove("a")
    assert said(changes, change("a@1", None)) == ["a is removed"]


def test_a_model_that_cannot_be_loaded_is_never_called_cold() -> None:
    """A model that fails to load appears in the runtime and disappears again, before the reason is known.

    Meanwhile it is counted as failed, never as cold.
    """
    changes = Changes({}, lambda: {"a", "b"})
    for _ in range(3):
        assert said(changes, change("a@1", pb.STATE_LOADING), a="starting") == []
        assert said(changes, change("a@1", None), b="cold") == []
    assert counts(changes, loaded={"b"}, b="cold") == (0, 1, 1)
    assert said(changes, failures(a="no module cv2")) == ["a has failed: no module cv2"]
    assert counts(changes, loaded={"b"}, a="failed", b="cold") == (0, 1, 1)


def test_a_model_that_an_operator_unloads_is_not_loaded() -> None:
    """A model that an operator unloads is reported as not loaded. After that, the control service is not asked about it again."""
    changes = Changes({}, lambda: {"a"})
    assert said(changes, change("a@1", pb.STATE_READY)) == ["a is ready"]
    assert said(changes, change("a@1", None)) == []
    assert [line for _ in range(100) for line in changes.lines()] == ["a is not loaded"]
    assert not changes.left()


@pytest.mark.parametrize("name", ["pets", "aliases.pets"])
def test_an_alias_is_neither_cold_nor_removed_when_its_failure_ends(name: str) -> None:
    """When the failure of an alias has ended, the line says that the alias is served. An alias is never called cold."""
    changes = Changes({}, lambda: {"cats"}, lambda: {"pets"})
    assert said(changes, failures(**{name: "no such model"})) == [f"{name} has failed: no such model"]
    assert said(changes, failures()) == ["the alias pets is served"]


def test_a_model_of_a_device_that_sleeps_is_asleep() -> None:
    """A model of a sleeping device is called asleep, because its next request wakes the device."""
    changes = Changes({}, lambda: {"a"})
    assert said(changes, change("a@1", pb.STATE_READY)) == ["a is ready"]
    assert said(changes, change("a@1", None), a="asleep") == ["a is asleep"]


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ({"ready": 3}, "Serving 3 of 3 models"),
        (
            {"ready": 3, "cold": 1, "asleep": 1},
            "Serving 5 of 5 models, 2 of them cold until their first request",
        ),
        ({"ready": 3, "failed": 1, "starting": 2}, "Serving 3 of 6 models, 2 starting, 1 failed"),
        ({}, "Serving 0 of 0 models"),
    ],
)
def test_the_line_of_a_server_counts_models_that_take_requests(numbers: dict[str, int], text: str) -> None:
    """The line about served models counts only models that accept requests, and not failed or starting models."""
    assert view._serving(Counter(numbers), Counter()) == text


@pytest.mark.parametrize(
    ("devices", "numbers", "text"),
    [
        (["cpu"], {"ready": 1}, "Serving 1 of 1 models on the CPU"),
        (["cpu", "cpu"], {"ready": 1}, "Serving 1 of 1 models on the CPU as 2 devices"),
        (
            ["NVIDIA H100 (GPU-1)", "NVIDIA H100 (GPU-2)", "cpu:0 (cpu)"],
            {"ready": 1},
            "Serving 1 of 1 models on 2 GPUs and the CPU",
        ),
        (["NVIDIA H100 (MIG-1)"], {"ready": 1, "failed": 1}, "Serving 1 of 2 models, 1 failed, on one GPU"),
    ],
)
def test_the_line_of_a_server_names_its_devices(
    devices: list[str], numbers: dict[str, int], text: str
) -> None:
    """The line about served models names the devices, so a user who expects a GPU sees that only the CPU serves."""
    status = pb.GetStatusResponse()
    for name in ("", *devices):
        status.devices.add().record.memory.name = name
    assert view._serving(Counter(numbers), view._devices(status)) == text


def test_each_change_is_shown_once() -> None:
    """Lines report that a model becomes ready, gets a new bundle, or is removed. Updates without a change give no line."""
    changes = Changes({})
    assert said(changes, change("a@1", pb.STATE_LOADING)) == []
    assert said(changes, change("a@1", pb.STATE_READY)) == ["a is ready"]
    assert said(changes, change("a@1", pb.STATE_READY)) == []
    assert said(changes, change("a@2", pb.STATE_LOADING)) == []
    assert said(changes, change("a@2", pb.STATE_READY)) == ["a serves its new bundle"]
    assert said(changes, change("a@1", None)) == []
    assert counts(changes) == (1, 0, 0)
    assert said(changes, change("a@2", None)) == ["a is removed"]
    assert counts(changes) == (0, 0, 0)


def test_a_failure_is_shown_with_its_reason_and_so_is_its_end() -> None:
    """Failed versions and unreadable bundles are shown with their reasons.

    When a bundle has been repaired, its model is shown as ready.
    """
    changes = Changes({})
    assert said(changes, change("a@1", pb.STATE_FAILED)) == ["a has failed: no memory"]
    assert said(changes, change("a@2", pb.STATE_READY)) == ["a is ready"]
    assert said(changes, failures(b="no\nmanifest")) == ["b has failed: no manifest"]
    assert counts(changes) == (1, 1, 0)
    assert said(changes, failures(a="no manifest", b="no\nmanifest")) == [
        "a is served in an older version: no manifest"
    ]
    assert said(changes, failures(b="no\nmanifest")) == ["a is ready"]


def test_a_bundle_that_was_named_before_the_start_is_counted_and_not_named_again() -> None:
    """If the generator has printed a bundle's failure, the same reason from the server gives no second line."""
    changes = Changes({"b": "no manifest"})
    assert said(changes, snapshot(0)) == []
    assert said(changes, failures(b="no manifest")) == []
    assert counts(changes) == (0, 1, 0)
    assert said(changes, failures()) == ["b is removed"]


def test_an_earlier_version_of_a_broken_bundle_is_ready_and_not_failed() -> None:
    """If an earlier version of a broken bundle is served, the model is ready.

    The failure that was printed before the start gives no second line, unless the bundle was repaired meanwhile. A failure
    with another reason gives a line.
    """
    changes = Changes({"a": "no manifest", "b": "no manifest"}, lambda: {"a", "b"})
    assert said(changes, failures(a="no manifest", b="no manifest")) == []
    assert said(changes, change("a@1", pb.STATE_READY)) == ["a is ready"]
    assert counts(changes) == (1, 0, 1)
    assert said(changes, change("b@1", pb.STATE_FAILED)) == ["b has failed: no memory"]
    assert counts(changes) == (1, 1, 0)
    assert said(changes, change("a@2", pb.STATE_READY)) == ["a serves its new bundle"]
    assert said(changes, failures(a="no manifest")) == ["a is served in an older version: no manifest"]


def test_a_model_that_one_device_serves_is_ready() -> None:
    """A model is ready if one device serves it, and failed if all devices that report it have failed.

    When a new runtime serves the model again, no line is printed.
    """
    changes = Changes({})
    assert said(changes, snapshot(0, a=("a@1", pb.STATE_READY))) == ["a is ready"]
    assert said(changes, snapshot(1, a=("a@1", pb.STATE_FAILED))) == []
    assert said(changes, pb.WatchStateResponse(down=pb.RuntimeDown(device=0))) == []
    assert said(changes, snapshot(0)) == ["a has failed: "]
    assert said(changes, change("a@1", None, device=1)) == ["a is removed"]
    assert said(changes, snapshot(0, a=("a@1", pb.STATE_READY))) == ["a is ready"]
    assert said(changes, snapshot(0)) == []
    assert said(changes, change("a@1", pb.STATE_READY)) == []
    changes.take(change("a@1", None))
    assert said(changes, change("a@1", pb.STATE_READY)) == []


def test_endpoints_are_what_a_client_here_connects_to() -> None:
    """An address that listens everywhere is shown as localhost. A page that is not served is left out."""
    ports = {
        "http": Address("0.0.0.0", 9000),
        "grpc": Address("127.0.0.1", 8001),
        "metrics": Address("10.0.0.1", 9002),
    }
    lines = endpoints(replace(planned(), ports=ports), None, Path("serve.log")).split("\n")
    assert [line.split()[1] for line in lines[:4]] == [
        "http://localhost:9000",
        "localhost:8001",
        "http://10.0.0.1:9002/metrics",
        "serve.log",
    ]
    assert "operator-key" in lines[4]
    assert "other machines can connect to 0.0.0.0 and 10.0.0.1, without TLS" in lines[5]


def test_a_server_for_this_machine_is_not_called_open() -> None:
    """By default, no other machine reaches the server, so no line calls it open."""
    assert "other machines" not in endpoints(planned(), None, Path("serve.log"))


def test_without_a_control_service_no_models_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a control service, the line has no numbers of models, because they are unknown."""
    (tmp_path / "cats").mkdir()
    monkeypatch.setattr(view, "CONTROL_S", 0.0)
    monkeypatch.setattr(view, "POLL_S", 0.01)

    async def first() -> view.Line:
        with socket.create_server(("127.0.0.1", 0)) as http:
            ports = {"http": Address("127.0.0.1", http.getsockname()[1])}
            plan = replace(planned(), ports=ports, repository=tmp_path)
            async with aclosing(view.follow(plan, os.getpid(), {})) as lines:
                return await anext(lines)

    assert asyncio.run(first()) == view.Line("Serving. The log shows which models are served", "serves")


def test_the_reason_why_no_runtime_starts_is_shown_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If no runtime can start, there is no control process to report it. The reason is read from a file and shown at once.

    The models are counted as failed, not as cold.
    """
    (tmp_path / "models" / "cats").mkdir(parents=True)
    (tmp_path / FAILURE).write_text("the runtime did not start: no\nXLA\n")
    monkeypatch.setattr(view, "POLL_S", 0.01)
    monkeypatch.setattr(view, "runtime_directory", lambda pid, gpu: tmp_path)

    async def lines() -> list[str]:
        with socket.create_server(("127.0.0.1", 0)) as http:
            ports = {"http": Address("127.0.0.1", http.getsockname()[1])}
            plan = replace(planned(), ports=ports, repository=tmp_path / "models")
            async with aclosing(view.follow(plan, os.getpid(), {})) as updates:
                return [(await anext(updates)).text for _ in range(2)]

    assert asyncio.run(lines()) == ["the runtime did not start: no XLA", "Serving 0 of 1 models, 1 failed"]


class Importing(control_pb2_grpc.ControlServicer):
    """A server whose models `plain` and `hooked` have loaded weights. model.py of `hooked` is being imported until `imported`."""

    def __init__(self) -> None:
        self.imported = False
        self.asked = asyncio.Event()

    async def WatchState(self, request: Any, context: Any) -> AsyncIterator[pb.WatchStateResponse]:
        ready = pb.STATE_READY
        yield snapshot(0, plain=("plain@1", ready), hooked=("hooked@1", ready))
        await asyncio.Event().wait()

    async def GetStatus(self, request: Any, context: Any) -> pb.GetStatusResponse:
        self.asked.set()
        step = "" if self.imported else "importing model.py"
        return pb.GetStatusResponse(models=[pb.ModelStatus(name="hooked", starting=step)])


def test_a_model_is_ready_when_its_model_py_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model with loaded weights is ready only after its model.py is imported. Other models do not wait for it."""
    for name in ("plain", "hooked"):
        (tmp_path / name / BUNDLE_FOLDER).mkdir(parents=True)
    (tmp_path / "hooked" / BUNDLE_FOLDER / "model.py").touch()
    monkeypatch.setattr(view, "POLL_S", 0.01)
    monkeypatch.setattr(view, "runtime_directory", lambda pid, gpu: tmp_path)
    plan = replace(planned(), repository=tmp_path, ports={"http": Address("127.0.0.1", 1)})

    async def lines() -> list[str]:
        server, control = grpc.aio.server(), Importing()
        control_pb2_grpc.add_ControlServicer_to_server(control, server)
        server.add_insecure_port(f"unix:{tmp_path / CONTROL_SOCKET}")
        await server.start()
        async with aclosing(view.follow(plan, os.getpid(), {})) as updates:
            first = await anext(updates)
            second = asyncio.ensure_future(anext(updates))
            for _ in range(3):
                control.asked.clear()
                await control.asked.wait()
            assert not second.done()
            control.imported = True
            texts = [first.text, (await second).text]
        await server.stop(None)
        return texts

    assert asyncio.run(asyncio.wait_for(lines(), PATIENCE_S)) == ["plain is ready", "hooked is ready"]


def test_a_control_service_is_asked_often_until_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the control service accepts connections, a new attempt follows every few moments. The waits do not grow."""
    monkeypatch.setattr(view, "POLL_S", 0.05)
    monkeypatch.setattr(view, "runtime_directory", lambda pid, gpu: tmp_path)
    attempts = asyncio.Queue[None]()

    async def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        attempts.put_nowait(None)
        writer.close()

    plan = replace(planned(), repository=tmp_path)

    async def count() -> None:
        server = await asyncio.start_unix_server(refuse, tmp_path / CONTROL_SOCKET)
        async with server, aclosing(view.follow(plan, os.getpid(), {})) as lines:
            following = asyncio.ensure_future(anext(lines))
            # With gRPC's own, growing pauses, twelve attempts would take five minutes.
            async with asyncio.timeout(PATIENCE_S):
                for _ in range(12):
                    await attempts.get()
            following.cancel()
            await asyncio.wait([following])

    asyncio.run(count())


def test_a_start_is_never_silent_for_long() -> None:
    """After ten seconds without a line, a line says what the start waits for. The intervals between such lines grow."""
    silence = view.Patience(100.0)
    assert silence.waited(109.9) is None
    silence.note(109.9)
    assert silence.waited(110.0) is None
    assert silence.waited(119.9) == pytest.approx(19.9)
    assert silence.waited(130.0) is None
    assert silence.waited(139.9) == pytest.approx(39.9)


@pytest.mark.parametrize(
    ("starting", "processes", "runtime", "error", "text"),
    [
        ({"b", "a"}, {"a"}, True, "", "starting a, b"),
        ((), {"a"}, True, "", "a runtime runs, and 29 models are loading"),
        ((), {"a"}, False, "", "1 of 29 models have a process (a), and no runtime runs yet"),
        (
            (),
            (),
            False,
            "E1128 too many\topen files",
            "tritonserver has 29 models to load, and no process of a model and no runtime runs yet. "
            + "The last error in the log: E1128 too many open files",
        ),
    ],
)
def test_what_a_start_waits_for(
    starting: set[str], processes: set[str], runtime: bool, error: str, text: str
) -> None:
    """The line about a slow start says which step the server has reached, and shows the last error."""
    assert view.waits_for(29, starting, processes, runtime, error) == text


def test_a_server_that_gets_nowhere_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a server listens at no port and has neither a runtime nor a process of any model, the line says so."""
    (tmp_path / "cats").mkdir()
    monkeypatch.setattr(view, "POLL_S", 0.01)
    monkeypatch.setattr(view, "QUIET_S", 0.05)
    monkeypatch.setattr(view, "runtime_directory", lambda pid, gpu: tmp_path)
    plan = replace(planned(), repository=tmp_path, ports={"http": Address("127.0.0.1", 1)})

    async def first() -> view.Line:
        async with aclosing(view.follow(plan, os.getpid(), {}, lambda: "E1128 no")) as lines:
            return await anext(lines)

    text = asyncio.run(first()).text
    assert re.match(r"not serving after \d+ s: tritonserver has 1 models to load, and no process", text)
    assert text.endswith("The last error in the log: E1128 no")
