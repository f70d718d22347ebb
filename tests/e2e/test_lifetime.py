"""Starts, ends and returns of servers, runtimes, stubs and models. Nothing is left of ended ones."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from rsrv.stub.deferred import SENDER_THREADS
from rsrv.wire import paths
from rsrv.wire.socket import Closed
from rsrv.wire.stub_process import StubCommand, living_stubs
from tests.e2e import bundles
from tests.e2e.calls import (
    Caller,
    Refused,
    assert_same,
    at_once,
    caller,
    check_exact,
    outcome,
    random_u32,
    refusal,
)
from tests.e2e.fronts import NATIVE, python_front
from tests.e2e.harness import (
    EXPLICIT,
    RunningTriton,
    StartTriton,
    is_alive,
    make_repository,
    running_triton,
)
from tests.e2e.lives import Living
from tests.status import read_status
from tests.unit.bundle.forge import seal
from tests.waiting import wait_until

X = np.arange(8, dtype=np.float32).reshape(2, 4) + 1000
ONES = np.ones((1, 64), np.float32)


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a directory that only this test's runtimes use, so that leftovers in it are found."""
    folder = Path(tempfile.mkdtemp(prefix="rsrv-test-"))
    monkeypatch.setenv("RSRV_RUNTIME_DIR", str(folder))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def some_bundles(example_bundles: Path) -> Mapping[str, Path]:
    """Return the bundles by name."""
    return {path.name: path for folder in (example_bundles, bundles.ensure()) for path in folder.iterdir()}


@pytest.fixture
def start(
    start_triton: StartTriton, some_bundles: Mapping[str, Path], home: Path, tmp_path: Path
) -> Callable[..., RunningTriton]:
    """Return a function that starts a server for this test with the named bundles."""

    def make(*names: str, **options: Any) -> RunningTriton:
        repository = make_repository(tmp_path, *(some_bundles[name] for name in names))
        return start_triton(repository, **options)

    return make


def runtime_pid(server: RunningTriton) -> int:
    return int(read_status(server.pid)["pid"])


def new_runtime(server: RunningTriton, old: int) -> int | None:
    """Return the pid of the runtime after `old` if it answers, or None."""
    try:
        pid = runtime_pid(server)
    except (OSError, Closed):
        return None
    return pid if pid != old else None


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def connections(pid: int) -> int:
    """Return how many connections to the living runtime a stub has. The stub has the black box open once for each of them."""
    count = 0
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            count += link.readlink().name == paths.BLACKBOX
    return count


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


# --- the server's end ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "way",
    [
        pytest.param("SIGKILL", marks=pytest.mark.long),
        pytest.param("SIGTERM", marks=pytest.mark.long),
        "SIGKILL under load",
    ],
)
def test_nothing_is_left_of_a_server_that_ended(
    start: Callable[..., RunningTriton], home: Path, way: str
) -> None:
    """After the end of a server, no process, socket, lock, directory or shared memory of it remains."""
    shm = shared_memory()
    server = start("exact", "elastic", "digits", spare=True)
    stubs = server.stub_pids()
    runtime = runtime_pid(server)
    assert NATIVE or len(stubs) == 3
    assert list(home.iterdir())
    life = Living(server)
    pids = [*stubs, runtime, life.pid]
    life.close()
    mine = {name for name in shared_memory() - shm if used_by(name, [server.pid, *stubs, runtime])}
    assert mine or NATIVE, "where is the Python backend's shared memory?"
    with caller(server) as call:
        check_exact(call)
    clients: list[threading.Thread] = []
    if way == "SIGKILL under load":
        clients = [threading.Thread(target=until_refused, args=(server, number)) for number in range(8)]
        for client in clients:
            client.start()
        wait_until(lambda: read_status(server.pid)["models"]["elastic"]["dispatches"] > 2)
    if way == "SIGTERM":
        assert server.server.terminate() == 0
    else:
        server.server.kill()

    def leftovers() -> list[object]:
        processes = [pid for pid in pids if is_alive(pid)]
        return [*processes, *below(home), *(mine & shared_memory())]

    wait_until(lambda: not leftovers(), what="nothing to be left")
    for client in clients:
        client.join()


def below(folder: Path) -> list[Path]:
    """Return all paths in the folder. If some vanish during the call, return at least one path."""
    try:
        return list(folder.rglob("*"))
    except FileNotFoundError:
        return [folder]


def used_by(name: str, pids: list[int]) -> bool:
    """Return True if one of these processes has mapped this file of /dev/shm."""
    for pid in pids:
        try:
            if f"/dev/shm/{name}" in Path(f"/proc/{pid}/maps").read_text():
                return True
        except (FileNotFoundError, ProcessLookupError):
            continue
    return False


def until_refused(server: RunningTriton, number: int) -> None:
    rng = np.random.default_rng(number)
    with caller(server) as call:
        while True:
            inputs = {"x": random_u32(rng, 1), "steps": np.full((1, 1), 200, np.int32)}
            if isinstance(outcome(lambda inputs=inputs: call("elastic", inputs)), Refused):  # type: ignore[misc]
                return


def test_a_server_killed_while_its_models_compile_leaves_nothing(
    start: Callable[..., RunningTriton], home: Path
) -> None:
    """If a server is killed while its runtime starts or compiles, the runtime ends and removes its directory."""
    server = start("large", "digits", wait_ready=False)
    (runtime,) = wait_until(
        lambda: [
            p for p in psutil.process_iter(["cmdline"]) if str(home) in " ".join(p.info["cmdline"] or [])
        ]
    )[:1]
    server.server.kill()
    wait_until(lambda: not is_alive(runtime.pid), what="end of the runtime")
    wait_until(lambda: not any(home.iterdir()), what="end of the directory")


#: A model.py whose import waits until it is killed.
_IMPORTING = """
import os, threading
open({begun!r}, "w").close()
threading.Event().wait()
def preprocess(inputs): return inputs
"""


@python_front("a model with the native front has no stub")
@pytest.mark.parametrize(
    "stage",
    [
        pytest.param("a stub starts", marks=pytest.mark.long),
        pytest.param("a runtime starts", marks=pytest.mark.long),
        "model.py is imported",
    ],
)
def test_a_server_killed_at_a_stage_of_its_start_leaves_no_shared_memory(
    some_bundles: Mapping[str, Path], start_triton: StartTriton, home: Path, tmp_path: Path, stage: str
) -> None:
    """A server is killed while its models load. Its stubs leave their shared memory, and rsrv removes it.

    Without this, the memory of a pod would stay in use until the pod's end.
    """
    begun = tmp_path / "begun"
    for name in ("exact", "digits"):
        bundle = shutil.copytree(some_bundles[name], tmp_path / "bundles" / name)
        (bundle / "model.py").write_text(_IMPORTING.format(begun=str(begun)))
    repository = make_repository(tmp_path)
    server = start_triton(repository, wait_ready=False)
    stubs: dict[int, StubCommand] = {}

    def reached() -> bool:
        stubs.update(living_stubs(server.pid))
        match stage:
            case "a stub starts":
                return bool(stubs)
            case "a runtime starts":
                lines = (" ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"]))
                return any(str(home) in line for line in lines)
        return begun.exists()

    wait_until(reached, what=stage)
    server.server.kill()
    stubs.update(living_stubs(server.pid))
    regions = {stub.region for stub in stubs.values()}
    assert regions

    wait_until(lambda: not any(map(is_alive, stubs)), what="the end of the stubs")
    wait_until(lambda: not regions & shared_memory(), what="the end of their shared memory")
    wait_until(lambda: not any(home.iterdir()), what="the end of the runtime's directory")


# --- the runtime's end --------------------------------------------------------------------------------------------


@python_front("its files and threads are those of stubs")
@pytest.mark.long
def test_a_runtime_killed_again_and_again_leaks_nothing(start: Callable[..., RunningTriton]) -> None:
    """After each death of the runtime, the stubs have as many open files and threads as before."""
    # With this setting, sender threads send all answers. A stub starts these threads when it needs them.
    server = start("exact", "elastic", env={"RSRV_STUB__IN_PLACE_MS": "0"}, spare=True)
    stubs = {name: server.stub_pids(name)[0] for name in ("exact", "elastic")}

    def use_both(call: Caller) -> None:
        check_exact(call)
        u = random_u32(np.random.default_rng(0), 1)
        inputs = {"x": u, "steps": np.full((1, 1), 100, np.int32)}
        assert_same(call("elastic", inputs), {"y": bundles.stepped(u, 100 + bundles.LEAST_STEPS)})

    def connected() -> bool:
        # A stub has connections for answers inside execute(), for answers after it, and for reports, which it sends every second.
        return all(connections(pid) == 3 for pid in stubs.values())

    def resources() -> tuple[int, ...]:
        # The stub that starts the runtime has more open files than the other stub.
        files = sum(descriptors(pid) for pid in stubs.values())
        return files, *(int(psutil.Process(pid).num_threads()) for pid in stubs.values())

    with caller(server) as call:
        for _ in range(SENDER_THREADS):
            use_both(call)
        first: tuple[int, ...] = ()
        for round_ in range(4):
            old = runtime_pid(server)
            os.kill(old, signal.SIGKILL)
            wait_until(lambda old=old: new_runtime(server, old), what="another runtime")  # type: ignore[misc]
            wait_until(lambda: not isinstance(outcome(lambda: use_both(call)), Refused))
            if round_ == 0:
                wait_until(connected, what="three connections of each stub")
                first = resources()
        wait_until(lambda: resources() == first, what=f"{resources()} to be {first}")
    assert server.stub_pids("exact") == [stubs["exact"]]


def test_a_frozen_runtime_does_not_hang_the_server(triton: RunningTriton) -> None:
    """While the runtime is stopped, requests wait and the server is ready. When the runtime continues, all requests are answered right."""
    runtime = runtime_pid(triton)

    def work(call: Caller, number: int) -> None:
        x = ONES * number
        assert_same(call("exact", {"x": x}), {"y": x @ bundles.exact_kernel()})

    os.kill(runtime, signal.SIGSTOP)
    threads = threading.Thread(target=at_once, args=(triton, 8, work))
    threads.start()
    try:
        with pytest.raises(AssertionError):
            wait_until(lambda: not threads.is_alive(), 1)
        wait_until(triton.server.is_ready, what="Triton to be ready")
    finally:
        os.kill(runtime, signal.SIGCONT)
    threads.join()
    with caller(triton) as call:
        check_exact(call)
    assert runtime_pid(triton) == runtime


# --- models that come and go --------------------------------------------------------------------------------------


def broken_module(model: Path) -> None:
    _replace(model / "model.b1.mlir", b"ML\xefR no module at all")
    seal(model)


def broken_manifest(model: Path) -> None:
    _replace(model / "manifest.yaml", b"format_version: 3\nexecutable_inputs: 7\n")


def broken_hooks(model: Path) -> None:
    _replace(model / "model.py", b"raise RuntimeError('these hooks are broken')\n")


def swapped_module(model: Path) -> None:
    _replace(model / "model.b1.mlir", (model / "model.b4.mlir").read_bytes())
    seal(model)


def two_instances(model: Path) -> None:
    config = model.parents[1] / "config.pbtxt"
    _replace(config, config.read_bytes().replace(b"count: 1", b"count: 2"))


def two_groups(model: Path) -> None:
    config = model.parents[1] / "config.pbtxt"
    _replace(config, config.read_bytes() + b"instance_group { count: 1 kind: KIND_CPU }")


def _replace(file: Path, content: bytes) -> None:
    file.unlink()
    file.write_bytes(content)


#: Functions that damage a model, each with a text that the index then contains.
DAMAGES: Mapping[Callable[[Path], None], str] = {
    broken_module: "model.b1.mlir",
    swapped_module: "model.b1.mlir",
    broken_manifest: "executable_inputs",
    broken_hooks: "these hooks are broken",
    two_instances: "config.pbtxt makes 2 instances",
    two_groups: "config.pbtxt makes 2 instances",
}


@pytest.fixture(scope="module")
def broken(
    some_bundles: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningTriton]:
    """A server with `exact`, and with a copy of `hooked` for each damage. A copy has the name of its damage."""
    folder = tmp_path_factory.mktemp("broken")
    shutil.copytree(some_bundles["exact"], folder / "bundles" / "exact")
    for damage in DAMAGES:
        shutil.copytree(some_bundles["hooked"], folder / "bundles" / damage.__name__)
    gen = make_repository(folder, options=["--link", "copy"])
    for damage in DAMAGES:
        damage(gen / damage.__name__ / "1" / "bundle")
    expected = ["model_failed"]
    with running_triton(gen, folder / "server.log", exit_on_error=False, expected=expected) as running:
        yield running


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_broken_model_says_why_and_the_others_serve(
    broken: RunningTriton, damage: Callable[[Path], None]
) -> None:
    """A model was damaged after the repository was made. Its load fails, the index has the reason, and `exact` answers."""
    model = damage.__name__
    state, message = broken.server.model_states()[model]
    assert state == "UNAVAILABLE"
    assert DAMAGES[damage] in message, message
    with caller(broken) as call:
        check_exact(call)
        refusal(lambda: call(model, {"x": X}))
        check_exact(call)


def test_a_runtime_that_cannot_start_says_why(start: Callable[..., RunningTriton]) -> None:
    """The runtime's Python does not exist. The load fails, and the reason names the path and the variable."""
    server = start("exact", exit_on_error=False, env={"RSRV_RUNTIME_PYTHON": "/nonexistent/python"})
    state, message = server.server.model_states()["exact"]
    assert state == "UNAVAILABLE"
    assert "/nonexistent/python" in message
    assert "RSRV_RUNTIME_PYTHON" in message


@pytest.mark.parametrize(
    ("setting", "value", "reason"),
    [
        ("PLATFORM", "rocm", "platform"),
        pytest.param("NUMERICS", "tf32", "a CPU, which has no TF32", marks=pytest.mark.long),
    ],
)
def test_a_device_that_is_not_there_is_named(
    start: Callable[..., RunningTriton], setting: str, value: str, reason: str
) -> None:
    """Settings need a device that this machine does not have. The load fails with the reason."""
    server = start("exact", exit_on_error=False, env={f"RSRV_RUNTIME__{setting}": value})
    state, message = server.server.model_states()["exact"]
    assert state == "UNAVAILABLE"
    assert reason in message, message


@pytest.mark.long
def test_models_are_unloaded_and_loaded_again_and_again(start: Callable[..., RunningTriton]) -> None:
    """A model is unloaded and loaded several times under load. The runtime frees it each time, and its answers are right."""
    server = start("exact", "elastic", extra_args=EXPLICIT)
    runtime = runtime_pid(server)
    stop = threading.Event()

    def others() -> None:
        with caller(server) as call:
            while not stop.is_set():
                u = random_u32(np.random.default_rng(1), 1)
                inputs = {"x": u, "steps": np.full((1, 1), 10, np.int32)}
                assert_same(call("elastic", inputs), {"y": bundles.stepped(u, 10 + bundles.LEAST_STEPS)})

    thread = threading.Thread(target=others)
    thread.start()
    try:
        with caller(server) as call:
            check_exact(call)
            for _ in range(4):
                server.grpc.unload_model("exact")
                wait_until(
                    lambda: "exact" not in read_status(server.pid)["models"], what="exact to be let go"
                )
                refusal(lambda: check_exact(call)).assert_is("NOT_FOUND", "grpc")
                server.grpc.load_model("exact")
                check_exact(call)
                assert "exact" in read_status(server.pid)["models"]
    finally:
        stop.set()
        thread.join()
    assert runtime_pid(server) == runtime
    assert read_status(server.pid)["models"]["elastic"]["outcomes"]["answered"] > 10


# --- one process, one jax -----------------------------------------------------------------------------------------


def test_all_models_share_one_runtime_and_one_jax(triton: RunningTriton) -> None:
    """However many models a server has, only one of its processes has jax in its memory."""
    models = triton.server.model_states()
    stubs = triton.stub_pids()
    assert NATIVE or len(stubs) == len(models) > 10
    runtime = runtime_pid(triton)
    assert not has_jax(triton.pid)
    assert [pid for pid in stubs if has_jax(pid)] == []
    assert has_jax(runtime)
    lines = {process.pid: process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])}
    others = [pid for pid, line in lines.items() if {"rsrv.runtime", str(triton.pid)} <= set(line)]
    assert others == [runtime]


def has_jax(pid: int) -> bool:
    return "jaxlib" in Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.long
def test_a_second_start_compiles_nothing(start: Callable[..., RunningTriton], tmp_path: Path) -> None:
    """A second server on the same bundles finds all executables in the cache, and compiles nothing."""
    cache = {"RSRV_RUNTIME__COMPILATION_CACHE_DIR": str(tmp_path / "cache")}
    first = start("exact", "hooked", env=cache)
    status = read_status(first.pid)
    assert status["compiled"] > 0
    first.server.terminate()
    second = start("exact", "hooked", env=cache)
    again = read_status(second.pid)
    assert again["compiled"] == 0
    assert again["from_cache"] == status["compiled"] + status["from_cache"]
    with caller(second) as call:
        check_exact(call)
