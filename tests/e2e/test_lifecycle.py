"""The models of a real server follow changes of the bundles, and clients see no gap."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import grpc
import pytest

from rsrv.control.triton import State, Triton
from tests.e2e.calls import Caller, Refused, at_once, caller, outcome
from tests.e2e.combinations import recorded
from tests.e2e.fronts import python_front
from tests.e2e.harness import (
    EXPLICIT,
    HURRY,
    RunningTriton,
    aborted_by_a_lock,
    make_repository,
    replaced_after,
    running_triton,
)
from tests.e2e.lives import Living, place, version, write_version
from tests.e2e.metas import rows, write_meta, write_scale
from tests.pages import commands
from tests.status import read_status
from tests.unit.bundle.forge import seal
from tests.waiting import wait_until

#: Flag of Triton, with its default value: the server is not ready while a model has failed.
STRICT = "--strict-readiness=true"
SETTINGS = "lifecycle: {poll_s: 0.1}\n"


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return versions of one model. `two` has other weights than `one`. `other` also has other code."""
    folder = tmp_path_factory.mktemp("versions")
    return {
        "one": write_version(folder / "one", 1),
        "two": write_version(folder / "two", 2),
        "other": write_version(folder / "other", 3, module=3),
    }


@pytest.fixture(scope="module")
def folder(versions: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write bundles into two root folders, make their repository, and return the folder of all."""
    folder = tmp_path_factory.mktemp("life")
    for name in ("steady", "prod", "idle"):
        place(versions["one"], folder / "bundles" / name)
    place(versions["one"], folder / "mount" / "mounted")
    make_repository(folder, folder / "bundles", folder / "mount", settings=SETTINGS)
    return folder


@pytest.fixture(scope="module")
def living(folder: Path) -> Iterator[Callable[[], RunningTriton]]:
    """Yield a function that returns the server that all tests share.

    If the server has aborted because of Triton's own fault with locks, the function starts another server.
    """

    def start(number: int) -> AbstractContextManager[RunningTriton]:
        log = folder / f"server{number}.log"
        return running_triton(folder / "gen", log, extra_args=[*EXPLICIT, STRICT, HURRY])

    with replaced_after(aborted_by_a_lock, start) as living:
        yield living


@pytest.fixture
def server(living: Callable[[], RunningTriton]) -> RunningTriton:
    return living()


@pytest.fixture
def life(server: RunningTriton) -> Iterator[Living]:
    life = Living(server)
    with recorded(server):
        yield life
    life.close()


@pytest.fixture
def call(server: RunningTriton, life: Living) -> Iterator[Caller]:
    with caller(server) as call:
        yield call


@pytest.fixture
def bundles(folder: Path) -> Path:
    return folder / "bundles"


def served(call: Caller, name: str) -> tuple[int, int] | None:
    """Return the version that answers, or None if none answers."""
    result = outcome(lambda: version(call, name))
    return None if isinstance(result, Refused) else result


def assert_becomes(call: Caller, name: str, expected: tuple[int, int] | None) -> None:
    """Wait until this version answers, or until no version answers. Outputs of two versions in one answer fail the test."""
    wait_until(lambda: served(call, name) == expected, what=f"{name} to be {expected}")


def place_one_that_fails(path: Path, begun: Path, gate: Path) -> None:
    """Place a new version of a bundle. Its load creates `begun`, waits until there is a `gate`, and then fails."""
    new = path.with_name(f".{path.name}.new")
    shutil.copytree(path, new)
    (new / "model.py").write_text(
        "import time\nfrom pathlib import Path\n"
        f"Path({str(begun)!r}).touch()\n"
        f"while not Path({str(gate)!r}).exists():\n    time.sleep(0.01)\n"
        "raise RuntimeError('never')\ndef preprocess(inputs): return inputs\n"
    )
    place(new, path)
    shutil.rmtree(new)


def test_a_new_bundle_is_served_and_a_removed_one_is_not(
    call: Caller, bundles: Path, folder: Path, versions: dict[str, Path]
) -> None:
    """A new bundle is served without a command. After its removal, it is not served. Other models still are."""
    place(versions["two"], bundles / "fresh")
    assert_becomes(call, "fresh", (2, 0))
    shutil.rmtree(bundles / "fresh")
    assert_becomes(call, "fresh", None)
    wait_until(lambda: not (folder / "gen" / "fresh").exists())
    assert served(call, "steady") == (1, 0)


@pytest.mark.parametrize("fault", ["fails to load", pytest.param("is broken", marks=pytest.mark.long)])
def test_a_removed_bundle_that_never_served_leaves_no_trace(
    bundles: Path, folder: Path, versions: dict[str, Path], server: RunningTriton, life: Living, fault: str
) -> None:
    """A bundle fails to load, or is broken. After its removal, its failure is not in the status, and Triton is ready again."""
    place(versions["one"], folder / "faulty")
    if fault == "is broken":
        (folder / "faulty" / "manifest.yaml").write_text("nothing: good\n")
    else:
        (folder / "faulty" / "model.py").write_text(
            "raise RuntimeError('never')\ndef preprocess(inputs): return inputs\n"
        )
    place(folder / "faulty", bundles / "faulty")
    shutil.rmtree(folder / "faulty")
    wait_until(lambda: "faulty" in life.failures, what="the failure")
    wait_until(lambda: server.server.is_ready() == (fault == "is broken"), what="Triton's own view")
    shutil.rmtree(bundles / "faulty")
    wait_until(lambda: "faulty" not in life.failures, what="the failure to go")
    wait_until(server.server.is_ready, what="Triton to be ready")
    wait_until(lambda: "faulty" not in server.server.model_states(), what="the index to forget it")
    assert not (folder / "gen" / "faulty").exists()

    def later() -> int:
        """Wait for a later scan of the bundles. Return how often the log has named the bundle by then."""
        place(versions["one"], bundles / "next")
        wait_until(lambda: server.grpc.is_model_ready("next"), what="a later round")
        shutil.rmtree(bundles / "next")
        wait_until(lambda: "next" not in read_status(server.pid)["models"], what="its end")
        return server.log_text().count("faulty")

    # Some log lines about the failed load may come a moment after its removal from the index.
    logged = later()
    assert later() == logged


def test_changed_weights_are_served_without_compiling(
    call: Caller, bundles: Path, versions: dict[str, Path], server: RunningTriton, life: Living
) -> None:
    """Changed weights are served without compilation, even if a file is overwritten in place.

    A change of a file's time alone causes no load.
    """
    place(versions["one"], bundles / "weighty")
    assert_becomes(call, "weighty", (1, 0))
    before = read_status(server.pid)
    place(versions["two"], bundles / "weighty")
    assert_becomes(call, "weighty", (2, 0))
    # Overwrite the files in place, as `cp` does.
    for file in (bundles / "weighty").iterdir():
        file.write_bytes((versions["one"] / file.name).read_bytes())
    assert_becomes(call, "weighty", (1, 0))
    after = read_status(server.pid)
    assert (after["compiled"], after["from_cache"]) == (before["compiled"], before["from_cache"])

    # The log gets this line after the new version answers.
    wait_until(lambda: has_one_version(server, "weighty"), what="the end of the earlier versions")
    loads = server.log_text().count("successfully loaded 'weighty'")
    os.utime(bundles / "weighty" / "manifest.yaml")
    place(versions["two"], bundles / "steady")
    assert_becomes(call, "steady", (2, 0))
    assert server.log_text().count("successfully loaded 'weighty'") == loads
    place(versions["one"], bundles / "steady")
    assert_becomes(call, "steady", (1, 0))


def test_a_bundle_is_rolled_back_as_the_page_says(
    call: Caller, bundles: Path, versions: dict[str, Path], server: RunningTriton, life: Living
) -> None:
    """The commands of the documentation's page replace a bundle under load, and restore it. No request fails.

    The restored version is not compiled again.
    """
    texts = [
        command.text.replace("pictures", "weighty")
        for command in commands()
        if command.program in ("cp", "mv", "rm") and command.page == "operating.md"
    ]
    assert [text.split()[0] for text in texts] == ["rm", "cp", *["mv"] * 4]
    replace, roll_back = texts[:4], texts[4:]
    shutil.copytree(versions["other"], bundles.parent / "exported" / "weighty")
    stop = threading.Event()
    answered: set[tuple[int, int]] = set()

    def ask() -> None:
        with caller(server) as mine:
            while not stop.is_set():
                answered.add(version(mine, "weighty"))

    def run(text: str) -> None:
        subprocess.run(["sh", "-c", text], cwd=bundles.parent, check=True)

    place(versions["one"], bundles / "weighty")
    assert_becomes(call, "weighty", (1, 0))
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        try:
            wait_until(lambda: (1, 0) in answered or asking.done(), what="load")
            for text in replace:
                run(text)
            wait_until(lambda: (3, 3) in answered or asking.done(), what="the other version")
            compiled = read_status(server.pid)["compiled"]
            for text in roll_back:
                run(text)
            assert_becomes(call, "weighty", (1, 0))
            for text in (*replace, *roll_back):
                # A second replacement finds the copies of the first one.
                run(text)
            assert_becomes(call, "weighty", (1, 0))
        finally:
            stop.set()
        asking.result()
    assert answered == {(1, 0), (3, 3)}
    assert read_status(server.pid)["compiled"] == compiled
    assert not life.failures
    shutil.rmtree(bundles / ".weighty.bad")


def test_what_does_not_load_leaves_the_old_version_serving(
    call: Caller, bundles: Path, folder: Path, versions: dict[str, Path], life: Living
) -> None:
    """A broken manifest, a broken module and a new broken model are reported with the reason, and the old version is served.

    A good version replaces each of them.
    """
    place(versions["one"], bundles / "fragile")
    assert_becomes(call, "fragile", (1, 0))

    manifest = bundles / "fragile" / "manifest.yaml"
    good = manifest.read_text()
    manifest.write_text(good + "surprise: 1\n")
    wait_until(lambda: "surprise" in life.failures.get("fragile", ""))
    assert served(call, "fragile") == (1, 0)
    manifest.write_text(good)
    wait_until(lambda: "fragile" not in life.failures)

    old = (folder / "gen/fragile/1/bundle/model.b1.mlir").read_bytes()
    (bundles / "fragile" / "model.b1.mlir").write_bytes(b"no module")
    seal(bundles / "fragile")
    wait_until(lambda: "model.b1.mlir" in life.failures.get("fragile", ""))
    assert served(call, "fragile") == (1, 0)
    # A server that starts now would load the version that is served.
    assert (folder / "gen/fragile/1/bundle/model.b1.mlir").read_bytes() == old

    shutil.copytree(bundles / "fragile", bundles / ".stillborn")
    (bundles / ".stillborn").rename(bundles / "stillborn")
    wait_until(lambda: "model.b1.mlir" in life.failures.get("stillborn", ""))
    assert not (folder / "gen/stillborn").exists()

    for name in ("fragile", "stillborn"):
        place(versions["two"], bundles / name)
        assert_becomes(call, name, (2, 0))
    wait_until(lambda: not life.failures)
    for name in ("fragile", "stillborn"):
        shutil.rmtree(bundles / name)
        assert_becomes(call, name, None)


@pytest.mark.long
def test_a_control_process_that_is_killed_while_a_model_loads_leaves_the_way_back(
    call: Caller, bundles: Path, folder: Path, versions: dict[str, Path], life: Living, tmp_path: Path
) -> None:
    """The control process is killed during a load that fails. The next control process restores the old version."""
    place(versions["one"], bundles / "orphan")
    assert_becomes(call, "orphan", (1, 0))
    begun, gate = tmp_path / "begun", tmp_path / "gate"
    place_one_that_fails(bundles / "orphan", begun, gate)
    wait_until(begun.exists, what="the new version to load")
    first = life.pid
    os.kill(first, signal.SIGKILL)
    make_repository(folder, bundles, folder / "mount", settings=SETTINGS)
    assert (folder / "gen/orphan/1/bundle/model.py").exists()
    gate.touch()

    def reported() -> bool:
        with suppress(grpc.RpcError):
            return life.pid != first and "never" in life.failures.get("orphan", "")
        return False

    wait_until(reported, what="the next control process to say why")
    # In its first round, the control process may try the version once more.
    wait_until(lambda: not (folder / "gen/orphan/1/bundle/model.py").exists())
    assert served(call, "orphan") == (1, 0)
    shutil.rmtree(bundles / "orphan")
    assert_becomes(call, "orphan", None)
    wait_until(lambda: not list(folder.glob(".gen.*")))


@pytest.mark.long
def test_a_server_that_is_killed_while_a_bad_version_loads_starts_again(
    versions: dict[str, Path], tmp_path: Path
) -> None:
    """All processes are killed during the load of a bad version. The next server serves the old version."""
    bundles, begun, gate = tmp_path / "bundles", tmp_path / "begun", tmp_path / "gate"
    for name in ("crashed", "steady"):
        place(versions["one"], bundles / name)
    make_repository(tmp_path, settings=SETTINGS)

    flags = [*EXPLICIT, HURRY]
    with running_triton(tmp_path / "gen", tmp_path / "first.log", extra_args=flags) as first:
        life = Living(first)
        place_one_that_fails(bundles / "crashed", begun, gate)
        wait_until(begun.exists, what="the new version to load")
        for pid in (life.pid, first.pid, read_status(first.pid)["pid"]):
            os.kill(pid, signal.SIGKILL)
        first.server.process.wait()
        life.close()
    gate.touch()

    log = tmp_path / "second.log"
    gen, expected = tmp_path / "gen", ["bundle_refused"]
    with running_triton(gen, log, extra_args=flags, exit_on_error=False, expected=expected) as second:
        with caller(second) as call:
            for name in ("crashed", "steady"):
                assert_becomes(call, name, (1, 0))
        life = Living(second)
        wait_until(lambda: "never" in life.failures.get("crashed", ""))
        life.close()


@pytest.mark.long
def test_a_chain_of_renames_compiles_nothing(
    call: Caller, bundles: Path, versions: dict[str, Path], server: RunningTriton
) -> None:
    """Bundles are renamed from prod to old, and from staging to prod. The models follow without compilation."""
    place(versions["other"], bundles / "staging")
    assert_becomes(call, "staging", (3, 3))
    before = read_status(server.pid)
    (bundles / "prod").rename(bundles / "old")
    (bundles / "staging").rename(bundles / "prod")
    assert_becomes(call, "prod", (3, 3))
    assert_becomes(call, "old", (1, 0))
    assert_becomes(call, "staging", None)
    after = read_status(server.pid)
    assert (after["compiled"], after["from_cache"]) == (before["compiled"], before["from_cache"])


@pytest.mark.long
def test_a_missing_mount_unloads_nothing(call: Caller, folder: Path, versions: dict[str, Path]) -> None:
    """If a root folder is missing or replaced by an empty one, no model is unloaded. When it is back, its changes are applied."""
    mount = folder / "mount"
    mount.rename(folder / "elsewhere")
    place(versions["two"], folder / "bundles" / "meanwhile")
    assert_becomes(call, "meanwhile", (2, 0))
    mount.mkdir()
    place(versions["one"], folder / "bundles" / "meanwhile")
    assert_becomes(call, "meanwhile", (1, 0))
    assert served(call, "mounted") == (1, 0)
    mount.rmdir()
    place(versions["two"], folder / "elsewhere" / "mounted")
    (folder / "elsewhere").rename(mount)
    assert_becomes(call, "mounted", (2, 0))
    shutil.rmtree(mount / "mounted")
    assert_becomes(call, "mounted", None)


def test_a_meta_model_follows_its_callees(call: Caller, bundles: Path, folder: Path) -> None:
    """When a callee changes, its meta model uses the new version. If the new manifest makes the callee internal, clients cannot call it."""
    place(write_scale(folder / "first" / "double", 2), bundles / "double")
    wait_until(lambda: not isinstance(outcome(lambda: call("double", rows(1))), Refused))
    body = 'def run(inputs, call):\n    return call("double", inputs)\n'
    place(write_meta(folder / "first" / "chain", body, ["double"]), bundles / "chain")

    def chain() -> float | None:
        result = outcome(lambda: call("chain", rows(1, 5.0)))
        return None if isinstance(result, Refused) else float(result["y"][0, 0])

    wait_until(lambda: chain() == 10)
    assert not isinstance(outcome(lambda: call("double", rows(1))), Refused)
    place(write_scale(folder / "new" / "double", 3, internal=True), bundles / "double")
    wait_until(lambda: chain() == 15)
    wait_until(lambda: isinstance(outcome(lambda: call("double", rows(1))), Refused))
    shutil.rmtree(bundles / "chain")
    place(write_scale(folder / "last" / "double", 4), bundles / "double")
    wait_until(lambda: not isinstance(outcome(lambda: call("double", rows(1))), Refused))
    wait_until(lambda: chain() is None)


def test_a_model_is_reloaded_on_request(call: Caller, server: RunningTriton, life: Living) -> None:
    """A reload on request loads an unchanged model again. An unknown name is refused."""
    loads = server.log_text().count("successfully loaded 'steady'")
    life.reload("steady")
    assert served(call, "steady") == (1, 0)
    wait_until(lambda: server.log_text().count("successfully loaded 'steady'") == loads + 1)
    with pytest.raises(grpc.RpcError, match="there is no model 'nobody'"):
        life.reload("nobody")


@python_front("a model with the native front has no stub")
def test_reloads_leave_one_process_whatever_model_py_left_in_it(
    call: Caller,
    server: RunningTriton,
    life: Living,
    bundles: Path,
    versions: dict[str, Path],
    tmp_path: Path,
) -> None:
    """model.py leaves a busy executor, whose threads Python joins before it exits. Reloads still end each earlier process."""
    left = shutil.copytree(versions["one"], tmp_path / "left")
    (left / "model.py").write_text(
        "import concurrent.futures, threading\n"
        "concurrent.futures.ThreadPoolExecutor(1).submit(threading.Event().wait)\n"
        "def preprocess(inputs): return inputs\n"
    )
    place(left, bundles / "left")
    assert_becomes(call, "left", (1, 0))
    for _ in range(2):
        life.reload("left")
    wait_until(lambda: len(server.stub_pids("left")) == 1, what="the end of the earlier processes")
    assert served(call, "left") == (1, 0)
    shutil.rmtree(bundles / "left")


def test_what_was_unloaded_by_hand_stays_so(server: RunningTriton, life: Living) -> None:
    """A model that a client unloaded stays unloaded, and the server is healthy without it."""
    wait_until(lambda: life.serves, what="the server to be healthy")
    server.grpc.unload_model("idle")

    async def states() -> Mapping[str, State]:
        async with Triton.of(server.pid) as triton:
            return await triton.states()

    wait_until(lambda: asyncio.run(states())["idle"] == "dismissed")
    life.reload("steady")
    assert asyncio.run(states())["idle"] == "dismissed"
    wait_until(lambda: life.serves, what="the server not to miss it")


# --- under load -----------------------------------------------------------------------------------------------------

#: Requests per second of all clients, and number of clients.
RATE, CLIENTS = 500, 16
RELOADS = 50


def has_one_version(server: RunningTriton, model: str) -> bool:
    """Return True if Triton has unloaded all earlier versions of a model. Until then, they may answer earlier requests."""
    log = server.log_text()
    return log.count(f"successfully loaded '{model}'") == log.count(f"successfully unloaded '{model}'") + 1


@pytest.mark.long
@pytest.mark.timeout(600)
def test_fifty_reloads_under_load_fail_no_request(
    call: Caller, bundles: Path, versions: dict[str, Path], server: RunningTriton, life: Living
) -> None:
    """500 requests/s arrive while the bundle changes 50 times: only its weights, or also its code.

    Each answer is from one version, which was served between the request and the answer.
    """
    place(versions["one"], bundles / "busy")
    assert_becomes(call, "busy", (1, 0))
    kinds = [(1, 0), (2, 0), (3, 3)]
    names = ["one", "two", "other"]
    stop = threading.Event()
    #: Versions that may answer: the version before the current change, and the version after it.
    current: list[frozenset[tuple[int, int]]] = [frozenset({kinds[0]})]

    def work(call: Caller, number: int) -> tuple[int, float]:
        count, slowest, due = 0, 0.0, time.monotonic() + number / RATE
        while not stop.wait(max(0.0, due - time.monotonic())):
            before, started = current[0], time.monotonic()
            rows = 1 + count % 4
            answered = version(call, "busy", x=float(count % 100), rows=rows)
            assert answered in before | current[0], f"{answered} is neither of {before | current[0]}"
            slowest = max(slowest, time.monotonic() - started)
            count += 1
            due += CLIENTS / RATE
        return count, slowest

    started = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        clients = pool.submit(at_once, server, CLIENTS, work)
        try:
            at = 0
            for reload_ in range(RELOADS):
                next_ = (at + 1 + reload_ % 2) % 3
                current[0] = frozenset({kinds[at], kinds[next_]})
                place(versions[names[next_]], bundles / "busy")
                assert_becomes(call, "busy", kinds[next_])
                wait_until(lambda: has_one_version(server, "busy"), what="the end of the old version")
                current[0] = frozenset({kinds[next_]})
                at = next_
        finally:
            stop.set()
        counts = clients.result()
    took = time.monotonic() - started
    total, slowest = sum(count for count, _ in counts), max(slow for _, slow in counts)
    print(
        f"{RELOADS} reloads, {total} requests in {took:.0f} s ({total / took:.0f}/s), slowest {1e3 * slowest:.0f} ms"
    )
    assert total / took > 0.5 * RATE
    assert not life.failures
