"""A supervised server is restarted, logged, and ended in order. The servers of these tests are small real processes."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rsrv.serve import supervise as supervision
from rsrv.serve.plan import ServerPlan
from rsrv.serve.supervise import RestartReason, Restarts, StopSignals, SupervisorHooks, supervise
from rsrv.wire.paths import start_time
from tests.unit.serve.test_plan import planned
from tests.waiting import looped

#: A script that prints a line, waits for SIGTERM, and prints another line. Nobody writes to the fifo.
POLITE = "trap 'echo bye; exit 0' TERM; exec 3<>{fifo}; echo up $$; while :; do read -r _ <&3; done"
#: A script that ignores SIGTERM, so it must be killed.
STUBBORN = "trap '' TERM; exec 3<>{fifo}; echo up $$; while :; do read -r _ <&3; done"


def shell(script: str, **changes: Any) -> ServerPlan:
    """Return the plan of a server that is a shell script."""
    return replace(planned(), **{"argv": ("/bin/sh", "-c", script), **changes})


class Scene:
    """A supervised server, the lines that it prints, and the pauses and restarts of its supervisor."""

    def __init__(self, folder: Path) -> None:
        self.fifo = folder / "fifo"
        os.mkfifo(self.fifo)
        self.orders = StopSignals()
        self.lines: list[str] = []
        self.pids: list[int] = []
        self.pauses: list[float] = []
        #: A test sets this when the server must be restarted.
        self.restart_due: asyncio.Future[RestartReason] = asyncio.get_running_loop().create_future()
        self._more = asyncio.Event()
        #: Seconds in which the server must end by itself after its models are unloaded.
        self.idle_s = 60.0
        #: Result of unloading the models: True if they are unloaded. False, or an error to raise, if they cannot be unloaded.
        self.unloaded: bool | Exception = False

    def run(
        self, script: str, rest: Callable[[float], Awaitable[None]] | None = None, **changes: Any
    ) -> asyncio.Task[int]:
        hooks = SupervisorHooks(
            self._write, self._started, self._watch, rest or self._rest, 0.2, self._unload, idle_s=self.idle_s
        )
        server = shell(script.format(fifo=self.fifo), **changes)
        return asyncio.create_task(supervise(server, hooks, self.orders))

    async def pid(self, count: int = 1) -> int:
        """Wait until servers have printed `count` process ids, and return the last of these ids."""
        while len(starts := [line for line in self.lines if line.startswith("up ")]) < count:
            self._more.clear()
            await self._more.wait()
        return int(starts[count - 1].split()[-1])

    def _write(self, data: bytes) -> None:
        assert data.endswith(b"\n")
        self.lines += data.decode().splitlines()
        self._more.set()

    def _started(self, pid: int) -> None:
        self.pids.append(pid)
        self.restart_due = asyncio.get_running_loop().create_future()
        # This raises an error if there is no such process. On a busy machine, the process may be a zombie already.
        os.kill(pid, 0)

    async def _rest(self, seconds: float) -> None:
        self.pauses.append(seconds)

    async def _unload(self, terminate: Callable[[], None]) -> bool:
        if isinstance(self.unloaded, Exception):
            raise self.unloaded
        terminate()
        return self.unloaded

    async def _watch(self) -> RestartReason:
        return await self.restart_due


def is_alive(pid: int) -> bool:
    """Return whether the process runs. A zombie does not run."""
    return start_time(pid) != 0


Play = Callable[[Scene], Coroutine[Any, Any, None]]


@pytest.fixture
def play(tmp_path: Path) -> Callable[[Play], None]:
    """Return a function that runs a scenario with a scene. The scenario must end."""

    async def whole(scenario: Play) -> None:
        await scenario(Scene(tmp_path))

    return looped(whole)


def test_pauses_double_up_to_half_a_minute_and_ten_restarts_in_a_row_are_all() -> None:
    """Pauses between restarts double up to half a minute. After ten restarts in a row, the supervisor gives up.

    If a server has run for a minute, both the pauses and the count begin again.
    """
    restarts = Restarts()
    assert [restarts.ended(0.1) for _ in range(11)] == [1, 2, 4, 8, 16, *[30] * 5, None]
    assert [restarts.ended(lived) for lived in (60, 59, 1)] == [1, 2, 4]


def test_a_server_that_is_killed_is_started_again(play: Callable[[Play], None]) -> None:
    """A server that was killed is restarted after a pause. A signal to the supervisor then ends the new server."""

    async def scenario(scene: Scene) -> None:
        serving = scene.run(POLITE)
        first = await scene.pid()
        os.kill(first, signal.SIGKILL)
        second = await scene.pid(2)
        assert second != first
        assert scene.pauses == [1]

        scene.orders.once_more()

        assert await serving == 0
        assert scene.lines[-1] == "bye"
        assert not is_alive(second)

    play(scenario)


def test_a_server_that_hangs_is_killed_and_started_again(play: Callable[[Play], None]) -> None:
    """A hanging server that ignores signals is killed and restarted. This is counted as a failure."""

    async def scenario(scene: Scene) -> None:
        serving = scene.run(STUBBORN, drain_s=60)
        first = await scene.pid()

        scene.restart_due.set_result(RestartReason("has not answered for 60 s"))

        assert await scene.pid(2) != first
        assert not is_alive(first)
        assert scene.pauses == [1]
        scene.orders.once_more()
        scene.orders.once_more()
        assert await serving == 0

    play(scenario)


def test_a_server_is_started_again_though_it_works(play: Callable[[Play], None]) -> None:
    """A requested restart is not counted as a failure, and has no pause."""

    async def scenario(scene: Scene) -> None:
        serving = scene.run(POLITE, drain_s=60)
        first = await scene.pid()

        for count in (2, 3):
            scene.restart_due.set_result(RestartReason("has got models", works=True))
            assert await scene.pid(count) != first

        assert scene.pauses == []
        scene.orders.once_more()
        assert await serving == 0

    play(scenario)


@pytest.mark.parametrize(
    ("script", "line"), [("echo up $$; exit 0", "up "), ("printf 'one\\nno mem'; kill -9 $$", "no mem")]
)
def test_a_server_that_always_ends_is_given_up(
    play: Callable[[Play], None], monkeypatch: pytest.MonkeyPatch, script: str, line: str
) -> None:
    """A server that ends again and again is given up, even if it ends with status 0. A last line without a newline is logged."""
    monkeypatch.setattr(supervision, "MAX_RESTARTS", 3)

    async def scenario(scene: Scene) -> None:
        assert await scene.run(script) == 1
        assert scene.pauses == [1, 2, 4]
        assert len([logged for logged in scene.lines if logged.startswith(line)]) == 4

    play(scenario)


def test_a_program_that_is_not_there_is_given_up(
    play: Callable[[Play], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the server's program does not exist, each start fails with the reason in the log, until the supervisor gives up."""
    monkeypatch.setattr(supervision, "MAX_RESTARTS", 1)

    async def scenario(scene: Scene) -> None:
        assert await scene.run("", argv=("/no/such/program",)) == 1
        assert scene.lines == ["exec_bound: /no/such/program: No such file or directory"] * 2

    play(scenario)


def test_a_second_signal_ends_what_takes_its_time(play: Callable[[Play], None]) -> None:
    """A second signal kills a server that would take a minute to end."""

    async def scenario(scene: Scene) -> None:
        serving = scene.run(STUBBORN, drain_s=60)
        pid = await scene.pid()
        scene.orders.once_more()
        await asyncio.sleep(0)
        assert is_alive(pid)

        scene.orders.once_more()

        assert await serving == 0
        assert not is_alive(pid)

    play(scenario)


@pytest.mark.parametrize(("script", "expected"), [(STUBBORN, ["so it is killed"]), (POLITE, [])])
def test_a_server_that_does_not_end_is_killed_with_a_line(
    play: Callable[[Play], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    script: str,
    expected: list[str],
) -> None:
    """If a server ignores the signal, it is killed some seconds after its drain time, and a warning says so."""
    monkeypatch.setattr(supervision, "_GRACE", 0.1 if expected else 60)

    async def scenario(scene: Scene) -> None:
        serving = scene.run(script, drain_s=0)
        pid = await scene.pid()

        scene.orders.once_more()

        assert await serving == 0
        assert not is_alive(pid)

    play(scenario)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [line.rpartition(", ")[2] for line in warnings] == expected


def test_what_a_server_leaves_is_cleared_away(play: Callable[[Play], None], tmp_path: Path) -> None:
    """Before a restart, all processes that the old server has started are killed, even those in other sessions."""

    async def scenario(scene: Scene) -> None:
        (tmp_path / "stays").write_text(STUBBORN.format(fifo=scene.fifo))
        serving = scene.run(f"setsid /bin/sh {tmp_path}/stays & {POLITE}")
        pids = [await scene.pid(), await scene.pid(2)]
        os.kill(scene.pids[0], signal.SIGKILL)
        await scene.pid(4)
        assert not any(map(is_alive, pids))

        scene.orders.once_more()

        assert await serving == 0

    play(scenario)


def test_a_supervisor_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    """If `rsrv serve` is killed, the kernel ends the server, even if it ignores signals."""
    script = f"""
import asyncio
from rsrv.serve.supervise import SupervisorHooks, StopSignals, supervise
from tests.unit.serve.test_supervise import STUBBORN, shell

def started(pid):
    print(pid, flush=True)

hooks = SupervisorHooks(lambda lines: print(lines.decode(), end="", flush=True), started, asyncio.Event().wait)
server = shell(STUBBORN.format(fifo={str(tmp_path / "fifo")!r}))
asyncio.run(supervise(server, hooks, StopSignals()))
"""
    os.mkfifo(tmp_path / "fifo")
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as serving:
        assert serving.stdout is not None
        pid = int(serving.stdout.readline())
        assert serving.stdout.readline() == f"up {pid}\n"

        child = os.pidfd_open(pid)

        serving.kill()

        end = select.poll()
        end.register(child)
        assert end.poll(60_000)
        os.close(child)


def test_a_server_has_its_environment(play: Callable[[Play], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The server has the supervisor's environment and, in addition, the variables of the plan."""
    monkeypatch.setattr(supervision, "MAX_RESTARTS", 0)

    async def scenario(scene: Scene) -> None:
        await scene.run("echo $COLOUR; test $HOME; echo $?", environment={"COLOUR": "green"})
        assert scene.lines == ["green", "0"]

    play(scenario)


def test_a_pause_ends_with_a_signal(play: Callable[[Play], None]) -> None:
    """If a signal arrives during the pause before a restart, the supervisor ends at once."""

    async def scenario(scene: Scene) -> None:
        resting = asyncio.Event()

        async def rest(seconds: float) -> None:
            resting.set()
            await asyncio.Event().wait()

        serving = scene.run("exit 1", rest)
        await resting.wait()
        scene.orders.once_more()

        assert await serving == 0
        assert len(scene.pids) == 1

    play(scenario)


def test_shared_memory_of_stubs_that_a_server_leaves_is_removed(
    play: Callable[[Play], None],
) -> None:
    """The supervisor removes shared memory regions of stubs before it starts a server, and after the server has ended.

    A server leaves such regions if it is stopped during loads, or if it is killed together with its supervisor.
    """
    prefix = f"rsrv_test_{os.getpid()}_"
    earlier, region, other = (
        Path(f"/dev/shm/{name}") for name in (f"{prefix}1", f"{prefix}2", "rsrv_test_other")
    )
    earlier.touch()
    other.touch()

    async def scenario(scene: Scene) -> None:
        serving = scene.run(f"touch {region}; {POLITE}", regions=prefix)
        await scene.pid()
        assert (earlier.exists(), region.exists()) == (False, True)
        scene.orders.once_more()
        assert await serving == 0
        assert not region.exists()

    try:
        play(scenario)
        assert other.exists()
    finally:
        for path in (earlier, region, other):
            path.unlink(missing_ok=True)


def test_a_server_without_models_is_not_waited_for(
    play: Callable[[Play], None], caplog: pytest.LogCaptureFixture
) -> None:
    """When all models are unloaded, a server that only open connections keep alive is soon killed, whatever its drain time is."""

    async def scenario(scene: Scene) -> None:
        scene.unloaded, scene.idle_s = True, 0.05
        serving = scene.run(STUBBORN, drain_s=3600.0)
        await scene.pid()
        scene.orders.once_more()
        assert await serving == 0

    with caplog.at_level("INFO", logger="rsrv.serve"):
        play(scenario)
    assert "all models are unloaded, but tritonserver would wait" in caplog.text


@pytest.mark.parametrize("unloaded", [True, False, RuntimeError("no models")])
def test_a_server_that_ends_in_time_is_not_killed(
    play: Callable[[Play], None], unloaded: bool | Exception
) -> None:
    """A server that ends in time is not killed, even if unloading its models fails. It can write its last log lines."""

    async def scenario(scene: Scene) -> None:
        scene.unloaded = unloaded
        serving = scene.run(POLITE, drain_s=3600.0)
        await scene.pid()
        scene.orders.once_more()
        assert await serving == 0
        assert scene.lines[-1] == "bye"

    play(scenario)
