"""The spare runtime: it waits, takes over the socket when the runtime ends, ends with the server, and is replaced."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import Queue
from typing import NamedTuple
from unittest.mock import Mock

import psutil
import pytest

from rsrv.runtime.spare import SpareKeeper, has_room, wait_for_call
from rsrv.stub.session import Launcher
from rsrv.wire.frames import PROTOCOL_VERSION
from rsrv.wire.paths import LAST_RECORD, SOCKET, asleep_since
from rsrv.wire.socket import connect, listen, readable
from tests.status import read_status
from tests.waiting import PATIENCE_S, wait_until

#: Script whose arguments are the pids of a fake tritonserver and a fake runtime, a named pipe, and the modules to import.
_WAITS = """
import os, sys
from rsrv.runtime.spare import wait_for_turn
server, runtime = (os.pidfd_open(int(pid)) for pid in sys.argv[1:3])
turn = wait_for_turn(server, runtime, sys.argv[4:], lambda: open(sys.argv[3], "w").close())
print(turn, "colorsys" in sys.modules, flush=True)
os._exit(0)
"""


@pytest.fixture
def server() -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process that represents tritonserver."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


@pytest.mark.parametrize(
    ("ends", "output"),
    [("runtime", b"True True\n"), ("server", b"False True\n"), ("server early", b"False ")],
)
def test_a_spare_imports_and_waits_for_an_end(
    server: subprocess.Popen[bytes], tmp_path: Path, ends: str, output: bytes
) -> None:
    """A spare takes over after the runtime's end. After the server's end it does not, even if it is still importing.

    A module that cannot be imported does not stop the spare.
    """
    checked = tmp_path / "checked"
    os.mkfifo(checked)
    with subprocess.Popen(["sleep", "600"]) as runtime:
        pids = [str(server.pid), str(runtime.pid)]
        command = [sys.executable, "-c", _WAITS, *pids, str(checked), "rsrv.no_such_module", "colorsys"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as spare:
            if ends != "server early":
                checked.read_text()
            (runtime if ends == "runtime" else server).kill()
            assert spare.stdout is not None
            assert spare.stdout.read().startswith(output)
        runtime.kill()


def test_a_spare_needs_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A spare is started only if a sixteenth of the memory stays free while it runs."""
    monkeypatch.setattr("rsrv.runtime.host_memory.total_memory", lambda: 1600 << 20)
    for free, expected in ((189, False), (191, True)):
        monkeypatch.setattr("rsrv.runtime.spare.spare_memory", lambda free=free: free << 20)
        assert has_room() is expected


def test_a_spare_that_ends_is_replaced_while_no_model_is_built(tmp_path: Path) -> None:
    """A spare starts after a quiet time without a build. If it ends, another one starts, unless the server has ended.

    Each spare has the socket and the runtime's pidfd.
    """
    marks = tmp_path / "marks"
    script = (
        "import os, sys; count = open(sys.argv[1], 'a+'); count.write('x'); "
        "assert count.tell() == 2; [os.fstat(int(fd)) for fd in sys.argv[3::2]]"
    )
    building = iter([True] * 5)
    pauses: list[float] = []
    started_at: list[int] = []

    def rest(seconds: float) -> None:
        count = len(marks.read_text()) if marks.exists() else 0
        if len(started_at) < count:
            started_at.append(len(pauses))
        pauses.append(seconds)

    with socket.socket() as listener:
        command = [sys.executable, "-c", script, str(marks)]
        keeper = SpareKeeper(
            command, os.environ, listener.fileno(), tmp_path, lambda: next(building, False), rest
        )
        keeper.keep()

    assert marks.read_text() == "xx"
    (first,) = started_at
    assert first > 5
    assert pauses[first] > 10 * pauses[0]


def renewed(keeper: SpareKeeper, *, fresh: bool = True) -> str:
    messages: Queue[str] = Queue()
    keeper.prepare(messages.put, fresh=fresh)
    return messages.get(timeout=PATIENCE_S)


def test_a_system_without_a_thread_left_is_the_reason_of_a_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If no thread can be started for a restart, the restart is refused with the reason, and the runtime continues.

    An exception would end the runtime, or would let later restarts wait for this one.
    """
    with socket.socket() as listener:
        keeper = SpareKeeper(["true"], os.environ, listener.fileno(), tmp_path, lambda: False)
        monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("no thread")))
        assert renewed(keeper) == "the next runtime cannot be started: no thread"


READY = f"speaks version {PROTOCOL_VERSION}"
#: A spare that reports its argument, and ends when its socket is closed.
_READY_UNTIL_CLOSED = "import os, sys; os.write(0, sys.argv[1].encode()); sys.stdin.read()"

MakeKeeper = Callable[..., SpareKeeper]
Children = Callable[[], set[psutil.Process]]


@pytest.fixture
def make_keeper(tmp_path: Path) -> Iterator[MakeKeeper]:
    """Return a function that makes a keeper whose spares are ready, in a runtime that builds no model."""
    command = [sys.executable, "-c", _READY_UNTIL_CLOSED, READY]
    with socket.socket() as listener:
        yield partial(SpareKeeper, command, os.environ, listener.fileno(), tmp_path, lambda: False)


@pytest.fixture
def children() -> Children:
    """Return a function that returns the child processes that this process has started since the beginning of the test."""
    mine = psutil.Process()
    before = set(mine.children())
    return lambda: set(mine.children()) - before


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (READY, ""),
        ("no module named jax", "the next runtime could not serve: no module named jax"),
        (
            "speaks version 1",
            "the next runtime could not serve: it speaks version 1 of the protocol, but the stubs use version",
        ),
    ],
)
def test_a_fresh_spare_replaces_the_one_before_if_it_can_serve(
    make_keeper: MakeKeeper, children: Children, line: str, message: str
) -> None:
    """After a renewal, there is one spare: the fresh one, or the old one if the fresh one cannot serve.

    In the second case, the answer has the reason.
    """
    first = make_keeper()
    assert renewed(first) == ""
    (old,) = children()
    first._command = [sys.executable, "-c", _READY_UNTIL_CLOSED, line]

    answer = renewed(first)

    assert answer.startswith(message)
    assert bool(answer) is bool(message)

    (now,) = children()
    assert (now == old) is bool(message)
    assert first._spare is not None
    first._spare.end()


def test_a_spare_that_replaced_another_one_is_the_only_one(
    make_keeper: MakeKeeper, children: Children
) -> None:
    """If a renewal replaces a spare while the keeper waits for the old spare's end, the keeper goes on with the new spare."""
    pauses: list[float] = []
    keeper = make_keeper(rest=pauses.append)
    keeping = threading.Thread(target=keeper.keep, daemon=True)
    keeping.start()
    wait_until(children)
    first = [*pauses]

    assert renewed(keeper) == ""

    wait_until(lambda: len(pauses) >= 2 * len(first))
    assert pauses == 2 * first
    (fresh,) = children()
    assert keeper._spare is not None
    assert keeper._spare.process.pid == fresh.pid
    keeper._spare.sock.shutdown(socket.SHUT_RDWR)
    keeping.join(PATIENCE_S)
    assert not keeping.is_alive()


def test_a_spare_whose_turn_does_not_come_is_replaced(make_keeper: MakeKeeper, children: Children) -> None:
    """A prepared spare is replaced when it is withdrawn, because it holds a context and host memory on a GPU.

    A spare that is not prepared stays.
    """
    keeper = make_keeper(rest=lambda _: None)
    keeping = threading.Thread(target=keeper.keep, daemon=True)
    keeping.start()
    wait_until(children)
    assert renewed(keeper) == ""
    (prepared,) = children()

    keeper.withdraw()

    wait_until(lambda: not prepared.is_running())
    (other,) = wait_until(children)
    keeper.withdraw()
    assert other.is_running()
    assert keeper._spare is not None
    assert keeper._spare.problem() == ""
    keeper._spare.sock.shutdown(socket.SHUT_RDWR)
    keeping.join(20)
    assert not keeping.is_alive()


def test_a_withdrawal_does_not_wait_for_the_end_of_the_spare(
    make_keeper: MakeKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop does not wait for the end of a withdrawn spare, because the driver needs long to end the spare's context."""
    waiting = Queue[threading.Thread]()
    keeper = make_keeper()
    assert renewed(keeper) == ""
    assert keeper._spare is not None
    process = keeper._spare.process
    wait = process.wait
    monkeypatch.setattr(process, "wait", lambda: waiting.put(threading.current_thread()))

    keeper.withdraw()

    assert waiting.get(timeout=PATIENCE_S) is not threading.current_thread()
    assert wait(PATIENCE_S) == -signal.SIGKILL


@pytest.fixture
def launcher(
    server: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], Launcher]]:
    settings = tmp_path / "rsrv.yaml"
    settings.write_text("runtime: {platform: cpu, compilation_cache_dir: null}\ncontrol: {enabled: false}")
    # The path is not below tmp_path, because a socket's path may have at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="rsrv-test-", ignore_cleanup_errors=True) as home:
        monkeypatch.setenv("RSRV_RUNTIME_DIR", home)
        yield lambda: Launcher(server.pid, "0", settings, tmp_path, dict(os.environ))
        server.kill()
        server.wait()
        wait_until(lambda: not list(Path(home).iterdir()), what="the runtime to end with the server")


class Machine(NamedTuple):
    """A process that represents tritonserver, and the socket at which a spare waits for a connection."""

    server: subprocess.Popen[bytes]
    listener: socket.socket

    def waits(self) -> Future[bool]:
        pool = ThreadPoolExecutor(1)
        server = os.pidfd_open(self.server.pid)
        answer = pool.submit(wait_for_call, server, self.listener.fileno())
        answer.add_done_callback(lambda _: os.close(server))
        pool.shutdown(wait=False)
        return answer


@pytest.fixture
def sleeping(server: subprocess.Popen[bytes]) -> Iterator[Machine]:
    with tempfile.TemporaryDirectory(prefix="rsrv-test-") as home, listen(Path(home) / SOCKET) as listener:
        yield Machine(server, listener)


def test_the_spare_of_a_device_that_sleeps_waits_for_a_connection(sleeping: Machine) -> None:
    """While its device sleeps, a spare waits for a connection. A connection that was opened before also ends the wait."""
    answer = sleeping.waits()
    assert not answer.done()
    with connect(Path(sleeping.listener.getsockname())):
        assert answer.result(PATIENCE_S)
        assert sleeping.waits().result(PATIENCE_S)


def test_the_spare_of_a_device_that_sleeps_ends_with_the_server(sleeping: Machine) -> None:
    """While its device sleeps, a spare ends with the server, because nothing would wake it."""
    answer = sleeping.waits()
    sleeping.server.kill()
    assert not answer.result(PATIENCE_S)


def test_ends_are_seen_beside_more_than_a_thousand_open_files(server: subprocess.Popen[bytes]) -> None:
    """A process with more than a thousand open files can wait for the ends of other processes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    low = os.pidfd_open(server.pid)
    high = fcntl.fcntl(low, fcntl.F_DUPFD, 2000)
    try:
        assert readable([low, high], 0) == set()
        server.kill()
        assert readable([low, high]) == {low, high}
    finally:
        os.close(low)
        os.close(high)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_spare_for_a_planned_end_is_withdrawn_with_it(
    make_keeper: MakeKeeper, children: Children, tmp_path: Path
) -> None:
    """With `runtime.spare: false`, a spare exists only for a planned end. If the end is withdrawn, the spare ends.

    When a device goes to sleep, its last record and the time are noted.
    """
    keeper = make_keeper()
    for fresh in (False, True, False):
        assert renewed(keeper, fresh=fresh) == ""
        assert len(children()) == 1
        keeper.withdraw()
        wait_until(lambda: not children())
    keeper.stay_back(b"record")
    assert (tmp_path / LAST_RECORD).read_bytes() == b"record"
    assert asleep_since(tmp_path) == pytest.approx(time.time(), abs=60)


def spares(server: int) -> list[psutil.Process]:
    arguments = {"rsrv.runtime", "--listener-fd", str(server)}
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if arguments <= set(process.info["cmdline"] or [])
    ]


def test_connections_after_a_death_reach_the_spare(
    server: subprocess.Popen[bytes], launcher: Callable[[], Launcher]
) -> None:
    """After a runtime's death, a stub connects to the socket and waits until the spare greets it.

    The stub starts no runtime.
    """
    launcher().open().sock.close()
    old = int(read_status(server.pid)["pid"])
    (spare,) = wait_until(lambda: spares(server.pid), what="a spare")
    spare.suspend()

    os.kill(old, signal.SIGKILL)
    wait_until(lambda: not psutil.pid_exists(old) or psutil.Process(old).status() == psutil.STATUS_ZOMBIE)
    with (
        ThreadPoolExecutor(1) as pool,
        connect(next(Path(os.environ["RSRV_RUNTIME_DIR"]).glob("*-gpu0")) / SOCKET),
    ):
        greeted = pool.submit(launcher().open)
        spare.resume()
        greeted.result(PATIENCE_S).sock.close()

    assert int(read_status(server.pid)["pid"]) == spare.pid
