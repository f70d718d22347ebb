"""Gateways in front of real servers, each a process of its own."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import tritonclient.grpc
from ruamel.yaml import YAML

from local_triton import free_ports
from rsrv.cli import main as cli
from rsrv.wire.paths import CONTROL_SOCKET, base_directory, runtime_directory
from rsrv_gateway.v1 import gateway_pb2 as pb
from rsrv_gateway.v1 import gateway_pb2_grpc
from tests.e2e.harness import RunningTriton, wait_until


def entry(server: RunningTriton, name: str) -> dict[str, Any]:
    """A worker as gateway.workers has it, with its control service."""
    return {
        "name": name,
        "host": "127.0.0.1",
        "grpc_port": server.grpc_port,
        "http_port": server.http_port,
        "metrics_port": server.metrics_port,
        "control": f"unix:{runtime_directory(server.pid, '0') / CONTROL_SOCKET}",
    }


class RunningGateway:
    def __init__(self, process: subprocess.Popen[bytes], ports: Mapping[str, int], log: Path) -> None:
        self.process = process
        self.grpc_port, self.http_port, self.admin_port = ports["grpc"], ports["http"], ports["admin"]
        self._log = log

    @property
    def pid(self) -> int:
        return self.process.pid

    def log_text(self) -> str:
        return self._log.read_text()

    def get(self, path: str) -> tuple[int, str]:
        """Of its admin port; 0: nobody listens."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.admin_port}{path}", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    @property
    def control(self) -> str:
        (socket,) = base_directory().glob(f"gateway-{self.pid}-*/{CONTROL_SOCKET}")
        return f"unix:{socket}"

    def status(self) -> pb.GetStatusResponse:
        with grpc.insecure_channel(self.control) as channel:
            stub: Any = gateway_pb2_grpc.GatewayStub(channel)
            found: pb.GetStatusResponse = stub.GetStatus(pb.GetStatusRequest(), timeout=20)
        return found

    def rsrv(self, *arguments: str) -> str:
        """What `rsrv gateway` prints."""
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            assert cli.main(["gateway", *arguments, "--address", self.control]) == 0
        return out.getvalue()

    @contextmanager
    def client(self) -> Iterator[Any]:
        client = tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{self.grpc_port}")
        try:
            yield client
        finally:
            client.close()


@contextmanager
def running_gateway(
    folder: Path, workers: Sequence[Mapping[str, Any]] = (), **settings: Any
) -> Iterator[RunningGateway]:
    """Ready in front of the workers, for the length of the block. `settings` are of the section gateway."""
    ports = dict(zip(("grpc", "http", "admin"), free_ports(3), strict=True))
    config, log = folder / "gateway.yaml", folder / "gateway.log"
    section = {name: f"127.0.0.1:{port}" for name, port in ports.items()}
    with config.open("w") as file:
        YAML(typ="safe").dump(
            {"gateway": {**section, "workers": [dict(one) for one in workers], **settings}}, file
        )
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "rsrv_gateway", "--config", str(config)], stderr=output, env=os.environ
        )
    running = RunningGateway(process, ports, log)
    try:
        wait_until(
            lambda: process.poll() is not None or running.get("/readyz")[0] == 200, 30, what="the gateway"
        )
        assert process.poll() is None, running.log_text()
        yield running
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait()
