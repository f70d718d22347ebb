"""The control process as a process: only one runs, it removes its files, and it ends with its server."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from local_triton import free_ports
from rsrv.control.v1 import control_pb2 as pb
from rsrv.control.v1 import control_pb2_grpc
from rsrv.extras import install_command
from rsrv.wire.paths import make_private
from tests.unit.control.peers import FakeRuntime, entry
from tests.unit.junk import throw_junk
from tests.waiting import looped

Process = asyncio.subprocess.Process


@dataclass
class Place:
    """A fake server process, and the directory of its runtime."""

    server: Process
    directory: Path
    settings: Path

    async def control(self, path: str = "") -> Process:
        """Start the control process, with `path` as its PYTHONPATH. The caller waits for its end."""
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "rsrv.control", "--directory", str(self.directory)),
            *("--server-pid", str(self.server.pid), "--settings", str(self.settings)),
            stderr=asyncio.subprocess.PIPE,
            env=os.environ | ({"PYTHONPATH": path} if path else {}),
        )

    async def end(self) -> None:
        """End the server's process."""
        with suppress(ProcessLookupError):
            self.server.kill()
        await self.server.wait()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    make_private(tmp_path / "private")
    return tmp_path / "private"


@asynccontextmanager
async def placed(directory: Path, settings: str = "") -> AsyncIterator[Place]:
    """Make a place. At the end of the block, end the server's process."""
    repository = directory.parent / "repository"
    repository.mkdir()
    (repository / "rsrv.yaml").write_text(settings)
    place = Place(await asyncio.create_subprocess_exec("sleep", "600"), directory, repository / "rsrv.yaml")
    try:
        yield place
    finally:
        await place.end()


async def line_with(control: Process, text: str) -> str:
    """Read the log up to the first line with this text, and return this line."""
    assert control.stderr is not None
    async for line in control.stderr:
        if text in line.decode():
            return line.decode()
    raise AssertionError(f"it ended without a line with {text}")


async def listening(control: Process) -> None:
    """Wait until the log reports that the process listens."""
    await line_with(control, " listens in ")


async def said(control: Process) -> str:
    """Wait for the end of the process, and return the rest of its log."""
    _, log = await control.communicate()
    return log.decode()


@looped
async def test_it_serves_while_the_server_lives_and_clears_away(directory: Path) -> None:
    """The process serves while its server lives, and removes its files after the server's end."""
    runtime = FakeRuntime(directory / "runtime.sock")
    runtime.entries["a@1"] = entry("a")
    async with placed(directory) as place:
        control = await place.control()
        await listening(control)
        async with grpc.aio.insecure_channel(f"unix:{directory}/control.sock") as channel:
            stub: Any = control_pb2_grpc.ControlStub(channel)
            updates = stub.WatchState(pb.WatchStateRequest())
            while not (update := await updates.read()).HasField("snapshot"):
                pass
            assert update.snapshot.entries[0].name == "a"
            status = await stub.GetStatus(pb.GetStatusRequest())
            assert (status.server.pid, status.server.control_pid) == (place.server.pid, control.pid)
            health: Any = health_pb2_grpc.HealthStub(channel)
            answer = await health.Check(health_pb2.HealthCheckRequest(service="a"))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            assert os.getpriority(os.PRIO_PROCESS, control.pid) == 5 + os.getpriority(os.PRIO_PROCESS, 0)

            await place.end()

            assert "tritonserver has ended" in await said(control)
            assert control.returncode == 0
        runtime.die()
        assert not directory.exists()


@looped
async def test_a_disk_that_hangs_does_not_keep_it(directory: Path) -> None:
    """The process ends with its server, although one of its threads hangs on a file."""
    async with placed(directory) as place:
        (place.settings.parent / "a").mkdir()
        os.mkfifo(place.settings.parent / "a" / "config.pbtxt")
        control = await place.control()
        await listening(control)
        await place.end()
        try:
            assert "tritonserver has ended" in await said(control)
            assert control.returncode == 0
        finally:
            with suppress(ProcessLookupError):
                control.kill()


@looped
async def test_there_is_one_of_it(directory: Path) -> None:
    """A second control process exits at once. After the first one is killed, the next one replaces it."""
    async with placed(directory) as place:
        first = await place.control()
        await listening(first)
        second = await place.control()
        assert (await said(second), second.returncode) == ("", 0)

        first.send_signal(signal.SIGKILL)
        await first.wait()
        third = await place.control()
        await listening(third)
        await place.end()
        await third.communicate()


@looped
async def test_without_its_server_it_does_not_begin(directory: Path) -> None:
    """If the server has already ended, the process exits with 0 and leaves no file."""
    async with placed(directory) as place:
        await place.end()
        control = await place.control()

        assert (await said(control), control.returncode) == ("", 0)
        assert not list(directory.iterdir())


@looped
async def test_doors_that_anybody_could_use_are_complained_about(directory: Path) -> None:
    """A port without protection stays closed, and the Unix socket serves. Open ports of a tritonserver are logged with the remedy."""
    async with placed(directory, "control: {listen: 'localhost:0'}") as place:
        control = await place.control()
        line = await line_with(control, "control.listen needs")
        assert "control.listen needs tls_client_ca (with tls_certificate and tls_key) or token_file" in line
        await listening(control)
        line = await line_with(control, "anyone who reaches")

        assert "anyone who reaches 0.0.0.0:8000 or 0.0.0.0:8001 can choose the file" in line
        assert "--http-address=127.0.0.1" in line
        await place.end()
        await control.communicate()


@looped
async def test_without_opentelemetry_it_serves_and_says_what_is_missing(
    directory: Path, tmp_path: Path
) -> None:
    """If `traces.endpoint` is set, one line says that no spans are exported, and what to install."""
    (tmp_path / "opentelemetry.py").touch()
    async with placed(directory, "traces: {endpoint: 'http://localhost:4318/v1/traces'}") as place:
        control = await place.control(str(tmp_path))
        line = await line_with(control, "traces.endpoint")

        assert "traces.endpoint: no spans are exported: No module named 'opentelemetry." in line
        assert install_command("serve") in line
        await listening(control)
        await place.end()
        await control.communicate()


@looped
async def test_requests_that_are_no_http_do_not_fill_the_log(directory: Path) -> None:
    """Invalid HTTP requests cause at most one line of the log per second."""
    (port,) = free_ports(1)
    async with placed(directory, f"metrics: {{listen: '127.0.0.1:{port}'}}") as place:
        control = await place.control()
        await listening(control)
        most = await throw_junk(port)
        await place.end()
        assert 1 <= (await said(control)).count("Error handling request") <= most


@looped
async def test_wrong_settings_end_it_with_their_reason(directory: Path) -> None:
    """Wrong settings end the process, and the log has the reason."""
    async with placed(directory, "contrl: {}") as place:
        control = await place.control()

        assert "did you mean 'control'?" in await said(control)
        assert control.returncode == 70
