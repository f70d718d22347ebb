"""Supervised processes are restarted, logged by name and ended in order: here small real ones."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from rsrv.serve.plan import ChildSpec
from rsrv.serve.supervise import RestartReason, Restarts, StopSignals, SupervisorHooks, supervise
from rsrv.wire.paths import start_time

#: Prints a line, waits to be ended, and prints another. The fifo is never written to.
POLITE = "trap 'echo bye; exit 0' TERM; exec 3<>{fifo}; echo up $$; while :; do read -r _ <&3; done"
#: Has to be killed.
STUBBORN = "trap '' TERM; exec 3<>{fifo}; echo up $$; while :; do read -r _ <&3; done"


class Scene:
    """The children's lines and the node's messages, while it runs."""

    def __init__(self, folder: Path) -> None:
        self.fifo = folder / "fifo"
        os.mkfifo(self.fifo)
        self.orders = StopSignals.none()
        self.lines: list[str] = []
        self.starts: list[str] = []
        self.pids: list[int] = []
        self.pauses: list[float] = []
        #: By child: set when it is to be started again.
        self.restart_due: dict[str, asyncio.Future[RestartReason]] = {}
        #: The children that were to end, and the event on which the node waits before.
        self.left: list[str] = []
        self.may_end = asyncio.Event()
        self.may_end.set()
        self._more = asyncio.Event()

    def child(self, name: str, script: str, **more: Any) -> ChildSpec:
        """Return a child that a shell runs."""
        return ChildSpec(name, ("/bin/sh", "-c", script.format(fifo=self.fifo)), {}, **more)

    def run(
        self,
        *workers: ChildSpec,
        gateway: ChildSpec | None = None,
        most: int = 0,
        rest: Callable[[float], Awaitable[None]] | None = None,
    ) -> asyncio.Task[int]:
        hooks = SupervisorHooks(
            self._write, self._started, rest or self._rest, 0.2, self._watch, self._leaves
        )
        return asyncio.create_task(supervise(workers, gateway, hooks, self.orders, lambda: Restarts(most)))

    async def line(self, start: str, count: int = 1) -> str:
        """Wait for the line with this beginning, or for the given number of them, and return it."""
        while len(found := [line for line in self.lines if line.startswith(start)]) < count:
            self._more.clear()
            await self._more.wait()
        return found[count - 1]

    async def pid(self, name: str, count: int = 1) -> int:
        """Return the pid that a child has printed."""
        return int((await self.line(f"[{name}] up ", count)).split()[-1])

    def _write(self, data: bytes) -> None:
        assert data.endswith(b"\n")
        self.lines += data.decode().splitlines()
        self._more.set()

    def _started(self, child: ChildSpec, pid: int) -> None:
        self.starts.append(child.name)
        self.pids.append(pid)
        # On a busy machine it may have ended without being reaped.
        os.kill(pid, 0)

    async def _rest(self, seconds: float) -> None:
        self.pauses.append(seconds)

    async def _watch(self, child: ChildSpec) -> RestartReason:
        self.restart_due[child.name] = asyncio.get_running_loop().create_future()
        return await self.restart_due[child.name]

    async def _leaves(self, child: ChildSpec) -> None:
        self.left.append(child.name)
        await self.may_end.wait()


def is_alive(pid: int) -> bool:
    """Return whether the process runs; a zombie does not."""
    return start_time(pid) != 0


Play = Callable[[Scene], Coroutine[Any, Any, None]]


@pytest.fixture
def play(tmp_path: Path) -> Callable[[Play], None]:
    """Run a scene, which must end."""

    async def whole(scenario: Play) -> None:
        async with asyncio.timeout(60):
            await scenario(Scene(tmp_path))

    return lambda scenario: asyncio.run(whole(scenario))


def test_a_child_that_is_killed_is_started_again(play: Callable[[Play], None]) -> None:
    """A killed child is restarted, the other one keeps running, and both end with the node."""

    async def scenario(scene: Scene) -> None:
        node = scene.run(scene.child("a", POLITE), scene.child("b", POLITE))
        first, other = await scene.pid("a"), await scene.pid("b")
        os.kill(first, signal.SIGKILL)
        second = await scene.pid("a", 2)
        assert second != first
        assert scene.starts == ["a", "b", "a"]
        assert scene.pauses == [1]

        scene.orders.once_more()

        assert await node == 0
        assert {"[a] bye", "[b] bye"} <= set(scene.lines)
        assert not any(map(is_alive, (second, other)))

    play(scenario)


def test_a_child_that_hangs_is_killed_and_started_again(play: Callable[[Play], None]) -> None:
    """A hanging child that ignores signals is killed and restarted, which counts as a failure."""

    async def scenario(scene: Scene) -> None:
        node = scene.run(scene.child("a", STUBBORN, drain_s=60))
        first = await scene.pid("a")

        scene.restart_due["a"].set_result(RestartReason("has not answered for 60 s"))

        assert await scene.pid("a", 2) != first
        assert not is_alive(first)
        assert scene.pauses == [1]
        assert scene.left == []
        scene.orders.once_more()
        scene.orders.once_more()
        assert await node == 0

    play(scenario)


def test_a_child_is_started_again_though_it_works(play: Callable[[Play], None]) -> None:
    """A requested restart is no failure and has no pause."""

    async def scenario(scene: Scene) -> None:
        node = scene.run(scene.child("a", POLITE, drain_s=60), most=1)
        first = await scene.pid("a")

        for count in (2, 3):
            scene.restart_due["a"].set_result(RestartReason("has got models", works=True))
            assert await scene.pid("a", count) != first

        assert scene.pauses == []
        scene.orders.once_more()
        assert await node == 0

    play(scenario)


def test_a_child_ends_after_its_requests_were_redirected(play: Callable[[Play], None]) -> None:
    """A child gets its signal after the gateway was told, unless there is a second one."""

    async def scenario(scene: Scene) -> None:
        scene.may_end.clear()
        node = scene.run(scene.child("a", POLITE), scene.child("b", POLITE))
        pids = [await scene.pid("a"), await scene.pid("b")]
        scene.orders.once_more()
        while len(scene.left) < 2:
            await asyncio.sleep(0)
        assert all(map(is_alive, pids))

        scene.orders.once_more()

        assert await node == 0

    play(scenario)


def test_a_child_that_always_ends_is_given_up(play: Callable[[Play], None]) -> None:
    """A child that always ends, also orderly, is given up after its restarts, and the node ends."""

    async def scenario(scene: Scene) -> None:
        node = scene.run(scene.child("a", "exit 0"), scene.child("b", POLITE), most=3)

        assert await node == 1
        assert scene.pauses == [1, 2, 4]
        assert scene.starts.count("a") == 4
        assert "[b] bye" in scene.lines

    play(scenario)


def test_a_program_that_is_not_there_is_given_up(play: Callable[[Play], None]) -> None:
    """A missing program is given up with the reason in the log."""

    async def scenario(scene: Scene) -> None:
        node = scene.run(ChildSpec("a", ("/no/such/program",), {}), most=1)

        assert await node == 1
        assert scene.lines == ["[a] exec_bound: /no/such/program: No such file or directory"] * 2

    play(scenario)


def test_the_gateway_ends_before_the_workers(play: Callable[[Play], None]) -> None:
    """The gateway ends before the workers, because its requests are with them."""

    async def scenario(scene: Scene) -> None:
        node = scene.run(scene.child("a", POLITE), gateway=scene.child("gateway", POLITE, drain_s=60))
        await scene.pid("a")
        await scene.pid("gateway")
        assert scene.starts == ["a", "gateway"]

        scene.orders.once_more()

        assert await node == 0
        assert [line for line in scene.lines if "bye" in line] == ["[gateway] bye", "[a] bye"]

    play(scenario)


def test_a_second_signal_ends_what_takes_its_time(play: Callable[[Play], None]) -> None:
    """A second signal kills a child that would take a minute."""

    async def scenario(scene: Scene) -> None:
        node = scene.run(scene.child("a", STUBBORN, drain_s=60))
        pid = await scene.pid("a")
        scene.orders.once_more()
        await asyncio.sleep(0)
        assert is_alive(pid)

        scene.orders.once_more()

        assert await node == 0
        assert not is_alive(pid)

    play(scenario)


def test_what_a_child_leaves_is_cleared_away(play: Callable[[Play], None], tmp_path: Path) -> None:
    """Descendants of a child, in other sessions, too, are killed before its restart."""

    async def scenario(scene: Scene) -> None:
        (tmp_path / "stays").write_text(STUBBORN.format(fifo=scene.fifo))
        node = scene.run(scene.child("a", f"setsid /bin/sh {tmp_path}/stays & {POLITE}"))
        pids = [await scene.pid("a"), await scene.pid("a", 2)]
        os.kill(scene.pids[0], signal.SIGKILL)
        await scene.pid("a", 4)
        assert not any(map(is_alive, pids))

        scene.orders.once_more()

        assert await node == 0

    play(scenario)


def test_a_node_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    """When the node is killed, the kernel ends its children, also those that ignore signals."""
    script = f"""
import asyncio
from rsrv.serve.plan import ChildSpec
from rsrv.serve.supervise import Restarts
from rsrv.serve.supervise import SupervisorHooks, StopSignals, supervise

def started(child, pid):
    print(pid, flush=True)

child = ChildSpec("a", ("/bin/sh", "-c", {STUBBORN.format(fifo=tmp_path / "fifo")!r}), {{}})
hooks = SupervisorHooks(lambda lines: print(lines.decode(), end="", flush=True), started)
asyncio.run(supervise([child], None, hooks, StopSignals.none(), lambda: Restarts(0)))
"""
    os.mkfifo(tmp_path / "fifo")
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as node:
        assert node.stdout is not None
        pid = int(node.stdout.readline())
        assert node.stdout.readline() == f"[a] up {pid}\n"

        child = os.pidfd_open(pid)

        node.kill()

        end = select.poll()
        end.register(child)
        assert end.poll(30_000)
        os.close(child)


def test_a_child_runs_on_its_cores_and_with_its_environment(play: Callable[[Play], None]) -> None:
    """A child has its cores and environment from its first instruction on."""
    core = max(os.sched_getaffinity(0))

    async def scenario(scene: Scene) -> None:
        script = "grep Cpus_allowed_list /proc/self/status; echo $COLOUR; exit"
        child = ChildSpec("a", ("/bin/sh", "-c", script), {"COLOUR": "green"}, cores=(core,))
        node = scene.run(child, most=1)
        await node
        assert scene.lines[:2] == [f"[a] Cpus_allowed_list:\t{core}", "[a] green"]

    play(scenario)


def test_a_last_line_without_an_end_is_in_the_log(play: Callable[[Play], None]) -> None:
    """A last line without a newline, often the reason, is logged."""

    async def scenario(scene: Scene) -> None:
        assert await scene.run(scene.child("a", "printf 'one\\nno mem'; kill -9 $$"), most=1) == 1
        assert scene.lines == ["[a] one", "[a] no mem"] * 2

    play(scenario)


def test_a_pause_ends_with_the_node(play: Callable[[Play], None]) -> None:
    """The node does not wait for a child's restart pause when it ends."""

    async def scenario(scene: Scene) -> None:
        resting = asyncio.Event()

        async def rest(seconds: float) -> None:
            resting.set()
            await asyncio.Event().wait()

        node = scene.run(scene.child("a", "exit 1"), rest=rest)
        await resting.wait()
        scene.orders.once_more()

        assert await node == 0
        assert scene.starts == ["a"]

    play(scenario)
