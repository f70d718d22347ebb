"""The paths by which requests reach the workers: directly, or through proxies in separate processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.field_mask_pb2 import FieldMask

from local_triton import EXEC_BOUND, LOOPBACK, TritonServer, free_ports
from rsrv.wire.paths import CONTROL_SOCKET, base_directory, runtime_directory
from rsrv_bundle import yaml12
from rsrv_gateway.v1 import gateway_pb2 as pb
from rsrv_gateway.v1 import gateway_pb2_grpc
from tests.bench.load import BenchFailed
from tests.bench.places import ROOT, WORK
from tests.envoys import running_envoy

DIRECT, BARE, GATEWAY, ENVOY = "direct", "bare", "gateway", "envoy"
#: Roles of processes: processes that pass requests on, the process that names servers to Envoy, and the workers' processes.
PASSING, PICKER, WORKERS = "passing", "picker", "workers"
#: Time limit in seconds for a gateway to become ready, and for a gateway to notice a change of its workers.
_PATIENCE = 30.0


@dataclass(frozen=True)
class Way:
    """A path to the workers: the address HOST:PORT for clients, and the roles of the processes in between, by pid."""

    name: str
    url: str
    processes: Mapping[int, str]


class Gateway:
    """A running rsrv-gateway. A file names its workers."""

    def __init__(self, process: subprocess.Popen[bytes], ports: Sequence[int], log: Path) -> None:
        self.process = process
        self.url = f"{LOOPBACK}:{ports[0]}"
        self._admin = f"http://{LOOPBACK}:{ports[2]}"
        self.log = log

    def way(self) -> Way:
        return Way(GATEWAY, self.url, {self.process.pid: PASSING})

    def status(self) -> pb.GetStatusResponse:
        status: pb.GetStatusResponse = self._ask("GetStatus", pb.GetStatusRequest())
        return status

    def set_policy(self, **policy: Any) -> None:
        """Change keys of the packing's policy."""
        mask = FieldMask(paths=policy)
        self._ask("SetPolicy", pb.SetPolicyRequest(policy=pb.Policy(**policy), update_mask=mask))

    def _ask(self, call: str, request: Any) -> Any:
        (socket,) = base_directory().glob(f"{self.process.pid}-*-gateway/{CONTROL_SOCKET}")
        with grpc.insecure_channel(f"unix:{socket}") as channel:
            return getattr(gateway_pb2_grpc.GatewayStub(channel), call)(request, timeout=_PATIENCE)

    def alive(self) -> set[str]:
        """Return the workers to which the gateway can send requests."""
        return {worker.name for worker in self.status().workers if worker.alive}

    def wait_alive(self, workers: set[str]) -> None:
        """Wait until exactly these workers are alive for the gateway. Raises BenchFailed."""
        until = time.monotonic() + _PATIENCE
        while (alive := self.alive()) != workers:
            if time.monotonic() > until:
                raise BenchFailed(f"the gateway finds {sorted(alive)} alive, not {sorted(workers)}")
            time.sleep(0.05)

    def wait_ready(self) -> None:
        """Wait until the gateway is ready. Raises BenchFailed."""
        until = time.monotonic() + _PATIENCE
        while not self._ready():
            if self.process.poll() is not None or time.monotonic() > until:
                raise BenchFailed(f"the gateway does not get ready:\n{self.log.read_text()[-2000:]}")
            time.sleep(0.05)

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._admin}/readyz", timeout=10) as answer:
                return bool(answer.status == 200)
        except (urllib.error.HTTPError, OSError):
            return False


@contextmanager
def gateway(workers_file: Path, **settings: Any) -> Iterator[Gateway]:
    """Yield a ready gateway in front of the workers of a file. `settings` are keys of the section `gateway`."""
    with _gateway(workers_file, "gateway", [], settings) as running:
        yield running


@contextmanager
def _gateway(
    workers_file: Path,
    name: str,
    arguments: Sequence[str],
    settings: Mapping[str, Any],
) -> Iterator[Gateway]:
    ports = free_ports(3)
    config, log = WORK / f"{name}.yaml", WORK / f"{name}.log"
    section = dict(
        zip(("grpc", "http", "admin"), (f"{LOOPBACK}:{port}" for port in ports), strict=True),
        workers_file=str(workers_file),
        **settings,
    )
    config.write_text(yaml12.dump({"gateway": section}))
    command = [sys.executable, "-m", "rsrv_gateway", "--config", str(config), *arguments]
    with _process(command, log) as process:
        running = Gateway(process, ports, log)
        running.wait_ready()
        yield running


@contextmanager
def envoy(workers_file: Path, servers: Sequence[TritonServer]) -> Iterator[Way]:
    """Run an Envoy with deploy/envoy.yaml on one core, and a picker."""
    (port,) = free_ports(1)
    grpc_ports, http_ports = (
        [server.grpc_port for server in servers],
        [server.http_port for server in servers],
    )
    with (
        _gateway(workers_file, "gateway-picker", ["--picker", f"{LOOPBACK}:{port}"], {}) as picker,
        running_envoy(WORK, port, grpc_ports, http_ports) as running,
    ):
        picker.wait_alive({f"worker-{number}" for number in range(len(servers))})
        yield Way(ENVOY, running.url, {running.process.pid: PASSING, picker.process.pid: PICKER})


@contextmanager
def bare(servers: Sequence[TritonServer]) -> Iterator[Way]:
    """Run the minimal proxy in Python."""
    (port,) = free_ports(1)
    url = f"{LOOPBACK}:{port}"
    command = [sys.executable, "-m", "tests.bench.gateway.bare", url]
    command += [server.grpc_url for server in servers]
    with _process(command, WORK / "gateway-bare.log") as process:
        with grpc.insecure_channel(url) as channel:
            grpc.channel_ready_future(channel).result(_PATIENCE)
        yield Way(BARE, url, {process.pid: PASSING})


@contextmanager
def _process(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process until the block ends. It also ends when this process ends."""
    bound = [sys.executable, "-I", "-S", str(EXEC_BOUND), str(os.getpid())]
    with log.open("wb") as output:
        process = subprocess.Popen([*bound, *command], cwd=ROOT, stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def entry(name: str, server: TritonServer) -> dict[str, Any]:
    """Return the entry of a server in gateway.workers, with its control service."""
    return {
        "name": name,
        "host": LOOPBACK,
        "grpc_port": server.grpc_port,
        "http_port": server.http_port,
        "metrics_port": server.metrics_port,
        "control": f"unix:{runtime_directory(server.pid, '0') / CONTROL_SOCKET}",
    }


def write_workers(file: Path, entries: Sequence[Mapping[str, Any]]) -> None:
    """Write the file atomically, because a gateway may read it at any time."""
    aside = file.with_suffix(".new")
    aside.write_text(yaml12.dump([dict(worker) for worker in entries]))
    aside.rename(file)
