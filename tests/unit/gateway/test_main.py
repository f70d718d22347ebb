"""The program: its command line, its settings, its start and its end."""

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from local_triton import free_ports
from rsrv.settings import SettingsError, load_settings
from rsrv_gateway.__main__ import main, parser
from rsrv_gateway.connections import open_ports
from rsrv_gateway.main import read
from rsrv_gateway.members import MembersError
from rsrv_gateway.v1 import gateway_pb2 as pb
from rsrv_gateway.v1 import gateway_pb2_grpc
from tests.unit.gateway.test_admin import get
from tests.unit.gateway.workers import FakeServer, serving
from tests.unit.junk import throw_junk
from tests.waiting import looped

#: Settings of ports that other machines can reach.
OPEN = "grpc: '0.0.0.0:1', http: '0.0.0.0:2'"
GATEWAY = (sys.executable, "-m", "rsrv_gateway")


class Running:
    """The gateway as a process in front of workers."""

    def __init__(self, process: Process, channel: Any, http: str, admin: str) -> None:
        self.process = process
        self.http = http
        self.stub: Any = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        self.admin = admin

    def infer(self, model: str = "m", **terms: Any) -> Any:
        return self.stub.ModelInfer(service_pb2.ModelInferRequest(model_name=model, id="1"), **terms)

    async def end(self) -> str:
        """Send SIGTERM, wait for the end, and return the log."""
        self.process.send_signal(signal.SIGTERM)
        return await self.log()

    async def log(self) -> str:
        _, text = await self.process.communicate()
        return text.decode()


@asynccontextmanager
async def gateway(tmp_path: Path, *workers: int, settings: str = "") -> AsyncIterator[Running]:
    """Yield a ready gateway in front of workers with these gRPC ports."""
    http, port, admin = free_ports(3)
    config = tmp_path / "rsrv.yaml"
    config.write_text(
        f"gateway: {{grpc: '127.0.0.1:{port}', http: '127.0.0.1:{http}', admin: '127.0.0.1:{admin}', "
        f"{settings}}}\n"
    )
    named = ",".join(f"127.0.0.1:{worker}" for worker in workers)
    process = await asyncio.create_subprocess_exec(
        *GATEWAY, "--config", str(config), "--workers", named, stderr=PIPE
    )
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            running = Running(process, channel, f"http://127.0.0.1:{http}", f"http://127.0.0.1:{admin}")
            await until_ready(running)
            yield running
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def code_of(call: Any) -> grpc.StatusCode:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def until_ready(running: Running) -> None:
    while running.process.returncode is None:
        try:
            if (await get(f"{running.admin}/readyz"))[0] == 200:
                return
        except OSError:
            pass
        await asyncio.sleep(0.05)
    raise AssertionError(await running.log())


@pytest.fixture(autouse=True)
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a directory for gateways. It has a short name, because paths of sockets are limited."""
    with tempfile.TemporaryDirectory(prefix="rsrv-") as folder:
        monkeypatch.setenv("RSRV_RUNTIME_DIR", folder)
        yield Path(folder)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--config", "missing.yaml"], 1, "missing.yaml cannot be read: No such file"),
        (["--workers", "a"], 2, "--workers: 'a' is not HOST:PORT; name gRPC ports"),
    ],
)
def test_wrong_settings_or_a_wrong_command_line_end_it(
    arguments: list[str],
    status: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With wrong settings, the gateway prints one line and ends. The exit status is 2 if the command line is wrong."""
    monkeypatch.setattr("rsrv.logs.setup", lambda *_, **__: None)
    assert main(arguments) == status
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_the_pickers_address_is_checked_with_the_command_line() -> None:
    """If the picker's address is not an address, the command line is wrong, and the exit status is 2."""
    with pytest.raises(SystemExit) as end:
        parser().parse(["--workers", "a:1", "--picker", "here"])
    assert end.value.code == 2


def test_a_token_for_the_live_page_that_cannot_be_read_ends_it(tmp_path: Path) -> None:
    """If the token file is unreadable, the gateway exits 1 and names the setting. Before that, it warns once of open client ports."""
    config = tmp_path / "rsrv.yaml"
    config.write_text(
        f"{{metrics: {{token_file: {tmp_path}/missing}}, gateway: {{workers_dns: localhost, {OPEN}}}}}"
    )
    process = subprocess.run(
        [*GATEWAY, "--config", config], check=False, capture_output=True, text=True, timeout=60
    )
    assert process.returncode == 1
    assert "rsrv-gateway: metrics.token_file: " in process.stderr
    assert "Traceback" not in process.stderr
    (warning,) = (line for line in process.stderr.splitlines() if "may send requests" in line)
    assert "gateway.grpc and gateway.http: every machine" in warning


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("", []),
        (OPEN, ["gateway.grpc", "gateway.http"]),
        ("grpc: '127.0.0.1:1', http: '[::1]:1'", []),
        ("grpc: 'localhost:1', http: null", []),
        ("grpc: '[::]:1', http: ':1'", ["gateway.grpc", "gateway.http"]),
        ("grpc: '10.0.0.7:1', http: 'somewhere:1'", ["gateway.grpc", "gateway.http"]),
        (f"{OPEN}, token_file: t", []),
        (f"{OPEN}, tls_certificate: c, tls_key: k", ["gateway.grpc", "gateway.http"]),
        (f"{OPEN}, tls_certificate: c, tls_key: k, tls_client_ca: a", []),
    ],
)
def test_a_port_is_open_unless_only_this_machine_or_known_clients_get_in(
    settings: str, expected: list[str]
) -> None:
    """A port is open, unless it is local or needs a token or a client certificate. TLS alone leaves it open."""
    section = load_settings(f"gateway: {{{settings}}}").gateway
    assert open_ports(section) == expected
    assert open_ports(section, "127.0.0.1:1") == []
    secured = section.token_file or section.tls_client_ca
    assert open_ports(section, "0.0.0.0:1") == ([] if secured else ["--picker"])


def test_wrong_settings_are_named_by_key(tmp_path: Path) -> None:
    """The error for an unknown key names it and the most similar key."""
    config = tmp_path / "rsrv.yaml"
    config.write_text("gateway: {drains: 1}")
    with pytest.raises(SettingsError, match=r"gateway\.drains: unknown key; did you mean 'drain_s'"):
        read(config, None)


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    """Workers on the command line replace all sources of workers in the file."""
    config = tmp_path / "rsrv.yaml"
    config.write_text("gateway: {workers_dns: workers, workers: [{host: a}], mode: round_robin}")
    section = read(config, "b:1234").gateway
    assert (section.workers[0].host, len(section.workers), section.workers_dns) == ("b", 1, None)
    assert section.mode == "round_robin"
    with pytest.raises(MembersError, match="HOST:PORT"):
        read(config, "b")


@pytest.fixture
def most_files() -> Iterator[int]:
    """Lower the limit of open files to half of the largest allowed limit, and return this largest limit."""
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most // 2, most))
    yield most
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, most))


@looped
async def test_it_carries_requests_and_ends_when_they_have(
    tmp_path: Path, base: Path, most_files: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After SIGTERM, the request in flight is answered, the metrics count it, and the log has its format.

    The gateway raises its limit of open files as far as allowed, because each client needs a file.
    """
    monkeypatch.setenv("RSRV_LOGS__FORMAT", "json")
    triton = FakeServer()
    async with (
        serving(triton) as port,
        gateway(tmp_path, port) as running,
    ):
        limits = resource.prlimit(running.process.pid, resource.RLIMIT_NOFILE)
        assert limits == (most_files, most_files)
        assert (await running.infer()).model_name == "m"
        assert await code_of(running.infer("unknown")) is grpc.StatusCode.NOT_FOUND
        while 'code="OK",model="m"' not in (await get(f"{running.admin}/metrics"))[1]:
            await asyncio.sleep(0.05)

        triton.gate.clear()
        waiting = asyncio.ensure_future(running.infer())
        while triton.requests < 2:
            await asyncio.sleep(0.01)
        ending = asyncio.create_task(running.end())
        while (await get(f"{running.admin}/readyz"))[0] == 200:
            await asyncio.sleep(0.01)
        triton.gate.set()
        assert (await waiting).id == "1"
        lines = [json.loads(line) for line in (await ending).splitlines()]
        assert {line["logger"] for line in lines} >= {"rsrv_gateway.main"}
        assert running.process.returncode == 0
        assert list(base.iterdir()) == []


@looped
async def test_requests_that_are_no_http_do_not_fill_the_log(tmp_path: Path) -> None:
    """Invalid HTTP and requests without a token cause at most one line of the log per second."""
    secret = tmp_path / "secret"
    secret.write_text("secret")
    secret.chmod(0o600)
    async with (
        serving(FakeServer()) as port,
        gateway(tmp_path, port, settings=f"token_file: {secret}") as running,
    ):
        ports = [int(address.rpartition(":")[2]) for address in (running.http, running.admin)]
        most = sum([await throw_junk(each) for each in ports])
        log = await running.end()
    assert 1 <= log.count("Error handling request") <= most
    assert "Traceback" not in log


@looped
async def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    """A second signal ends the gateway at once, even with requests in flight."""
    triton = FakeServer()
    async with serving(triton) as port, gateway(tmp_path, port) as running:
        triton.gate.clear()
        waiting = asyncio.ensure_future(running.infer())
        while triton.requests < 1:
            await asyncio.sleep(0.01)
        running.process.send_signal(signal.SIGTERM)
        while (await get(f"{running.admin}/readyz"))[0] == 200:
            await asyncio.sleep(0.01)
        log = await running.end()
        assert running.process.returncode == 0
        assert "the gateway ended while requests were in flight" in log
        with pytest.raises(grpc.aio.AioRpcError):
            await waiting


@looped
async def test_it_is_found_and_steered_by_its_socket(tmp_path: Path, base: Path) -> None:
    """The command finds the gateway by its socket. The directory of a dead gateway is removed."""
    leftover = base / "1-1-gateway"
    leftover.mkdir()
    async with serving(FakeServer()) as port, gateway(tmp_path, port) as running:
        assert not leftover.exists()
        (socket,) = base.glob(f"{running.process.pid}-*-gateway/control.sock")
        async with grpc.aio.insecure_channel(f"unix:{socket}") as channel:
            stub: Any = gateway_pb2_grpc.GatewayStub(channel)
            (worker,) = (await stub.GetStatus(pb.GetStatusRequest())).workers
            assert (worker.name, worker.alive) == (f"127.0.0.1:{port}", True)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "rsrv.cli.main", "gateway", "locate", "m"), stdout=PIPE
        )
        out, _ = await process.communicate()
        assert f"127.0.0.1:{port}" in out.decode()


@looped
async def test_a_port_that_is_taken_ends_it(tmp_path: Path) -> None:
    """If a port is taken, the gateway exits 1 and names the setting."""
    async with serving(FakeServer()) as port:
        http, admin = free_ports(2)
        ports = {"GRPC": port, "HTTP": http, "ADMIN": admin}
        process = await asyncio.create_subprocess_exec(
            *(*GATEWAY, "--workers", "127.0.0.1:1"),
            stderr=PIPE,
            env={
                **os.environ,
                **{f"RSRV_GATEWAY__{key}": f"127.0.0.1:{value}" for key, value in ports.items()},
            },
        )
        _, text = await process.communicate()
        assert process.returncode == 1
        assert "gateway.grpc: cannot listen" in text.decode()
