"""Several processes on one port, as one plane."""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from rsrv.control.grpc_server import ListenError
from rsrv.settings_fleet import GatewaySection
from rsrv_gateway.contract import Routes, Worker
from rsrv_gateway.plane import Counts
from rsrv_gateway.processes import Processes
from tests.unit.gateway.workers import looped

COMMAND = (sys.executable, str(Path(__file__).parent / "process.py"))
WORKERS = {"w": Worker("w", "host:1", control="unix:/run/control.sock")}
TABLE = {"m": Routes(("w",), ("w",), 4, charge=0.1, batch_input=("x", 0))}


class FakeBrain:
    def __init__(self) -> None:
        self.failures: asyncio.Queue[str] = asyncio.Queue()
        self.plane: Processes | None = None

    def failed(self, worker: str) -> None:
        self.failures.put_nowait(worker)

    async def refresh(self, sure: bool = False) -> None:
        assert self.plane is not None
        await self.plane.apply(WORKERS, {**TABLE, "new": Routes(("w",))})


class World:
    def __init__(self, processes: int = 2, patience: float = 20.0, **settings: Any) -> None:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.port = sock.getsockname()[1]
        section = GatewaySection(grpc=f"127.0.0.1:{self.port}", http=None, processes=processes, **settings)
        self.brain = FakeBrain()
        self.plane = self.brain.plane = Processes(section, self.brain, COMMAND, patience=patience)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        await self.plane.apply(WORKERS, TABLE)
        try:
            await self.plane.start()
            yield
            await self.plane.drain(1)
        finally:
            await self.plane.stop()

    async def say(self, line: str) -> Any:
        """The pid of the process that answers, its workers and its table; None: it ends instead."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(f"{line}\n".encode())
        try:
            said = await reader.readline()
        except ConnectionError:
            return None
        finally:
            writer.close()
        return json.loads(said) if said else None

    async def everybody(self) -> dict[int, Any]:
        """What each process says, by pid: whom a connection reaches is the kernel's choice."""
        found: dict[int, Any] = {}
        while len(found) < len(self.plane.pids):
            pid, *said = await self.say("hello")
            found[pid] = said
        return found

    async def counted(self, requests: int) -> Counts:
        while (counts := self.plane.counts()).requests.get(("m", "w", "OK")) != requests:
            await asyncio.sleep(0.05)
        return counts


@looped
async def test_each_process_knows_the_table_when_it_listens_and_every_change() -> None:
    """Whichever a connection reaches; and none is left afterwards."""
    world = World()
    async with world.running():
        pids = world.plane.pids
        assert len(pids) == 2
        assert world.plane.listens
        assert await world.everybody() == {pid: [["w"], {"m": [["w"], 0.1]}] for pid in pids}
        await world.plane.apply({}, {"n": Routes(())})
        assert await world.everybody() == {pid: [[], {"n": [[], 1.0]}] for pid in pids}
    assert not any(psutil.pid_exists(pid) for pid in pids)


@looped
async def test_what_processes_have_done_is_counted_together() -> None:
    """Also what one has done that has ended since: counters never go back."""
    world = World()
    async with world.running():
        for _ in range(20):
            await world.say("hello")
        counts = await world.counted(20)
        assert counts.items == {"m": 40}
        assert (counts.load, counts.outstanding) == ({"w": 1.0}, {("m", "w"): 2})
        assert counts.failovers == {"w": 6}
        assert (counts.durations["m"].counts[0], counts.durations["m"].sum) == (20, 5.0)
        before = set(world.plane.pids)
        await world.say("die")
        while len(set(world.plane.pids) - before) == 0 or len(world.plane.pids) < 2:
            await asyncio.sleep(0.05)
        assert world.plane.counts().requests["m", "w", "OK"] >= 20


@looped
async def test_a_process_that_ends_is_started_again_and_told_the_table() -> None:
    """The others serve meanwhile, and nobody else could take the port."""
    world = World(processes=1)
    async with world.running():
        (before,) = world.plane.pids
        await world.say("die")
        while world.plane.listens:
            await asyncio.sleep(0)
        while world.plane.pids in ([], [before]):
            await asyncio.sleep(0.05)
        assert await world.everybody() == {pid: [["w"], {"m": [["w"], 0.1]}] for pid in world.plane.pids}


@looped
async def test_a_process_that_hangs_is_replaced() -> None:
    """It is noticed when it is asked for what it has done."""
    world = World(processes=1, patience=1.0)
    async with world.running():
        (before,) = world.plane.pids
        assert await world.say("hang") is None
        while world.plane.pids in ([], [before]):
            await asyncio.sleep(0.05)


@looped
async def test_a_process_that_is_late_holds_nobody_up() -> None:
    """The others get one table after the other, and it gets the last one when it goes on."""
    world = World(patience=60.0)
    async with world.running():
        stopped, other = world.plane.pids
        os.kill(stopped, signal.SIGSTOP)
        try:
            async with asyncio.timeout(20):
                for number in range(5):
                    await world.plane.apply(WORKERS, {str(number): Routes(())})
        finally:
            os.kill(stopped, signal.SIGCONT)
        while (said := await world.everybody())[stopped][1].keys() != {"4"}:
            await asyncio.sleep(0)
        assert said[other][1].keys() == {"4"}


@looped
async def test_processes_ask_the_gateway() -> None:
    """For a worker that failed, and for a model that is not known: it is, when that is answered."""
    world = World()
    async with world.running():
        await world.say("failed w")
        assert await world.brain.failures.get() == "w"
        _, _, table = await world.say("refresh")
        assert table.keys() == {"m", "new"}


@looped
async def test_a_port_that_is_taken_is_named_with_its_setting() -> None:
    """Also by another gateway, with which the kernel would let it share the port."""
    world = World()
    async with world.running():
        other = World()
        other.plane = Processes(
            GatewaySection(grpc=f"127.0.0.1:{world.port}", http=None, processes=2), other.brain, COMMAND
        )
        with pytest.raises(ListenError, match=r"gateway\.grpc: cannot listen on 127\.0\.0\.1"):
            async with other.running():
                pass


@looped
async def test_what_a_process_cannot_use_ends_the_start() -> None:
    """With what it says; none is left."""
    world = World(request_timeout_s=666)
    with pytest.raises(ListenError, match=r"gateway\.tls_key"):
        async with world.running():
            pass
    assert world.plane.pids == []
