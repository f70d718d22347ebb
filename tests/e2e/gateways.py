"""Gateway processes in front of tritonservers, and plain models for the tests."""

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
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import tritonclient.grpc
import tritonclient.http

from local_triton import free_ports
from rsrv.cli import main as cli
from rsrv.wire.paths import CONTROL_SOCKET, base_directory, runtime_directory
from rsrv_bundle import yaml12
from rsrv_gateway.v1 import gateway_pb2 as pb
from rsrv_gateway.v1 import gateway_pb2_grpc
from tests.e2e.harness import EXPLICIT, RunningTriton, running_triton
from tests.waiting import wait_until

_CONFIG = """
name: "{name}"
backend: "python"
max_batch_size: 0
input [{{ name: "X" data_type: TYPE_INT32 dims: [ -1 ] }}]
output [{{ name: "Y" data_type: TYPE_INT32 dims: [ -1 ] }}{outputs}]
instance_group [{{ kind: KIND_CPU count: 1 }}]
{more}
"""

_MODEL = """
import os
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils


def answer(request):
    return pb_utils.InferenceResponse([pb_utils.Tensor("Y", pb_utils.get_input_tensor_by_name(request, "X").as_numpy())])


class TritonPythonModel:
    def execute(self, requests):
{body}
"""

#: A model that returns the sum of a sequence, and the sequence's id and the input's shape as Triton passes them.
_SUM = """
        sums = self.__dict__.setdefault("sums", {})
        answers = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            id = request.correlation_id()
            start = request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
            sums[id] = int(x.sum()) + (0 if start else sums.get(id, 0))
            seen = np.array([repr(id).encode(), repr(x.shape).encode()], np.object_)
            outputs = [pb_utils.Tensor("Y", np.array([sums[id]], np.int32)), pb_utils.Tensor("text", seen)]
            answers.append(pb_utils.InferenceResponse(outputs))
        return answers
"""
_ECHO = """
        return [answer(request) for request in requests]
"""
#: The `execute` method of each model.
_BODIES = {
    "echo": _ECHO,
    # This model is only for tests that count requests. Triton counts a request after its answer, perhaps during the next test.
    "counted": _ECHO,
    # The first number decides how the request is refused.
    "refusing": """
        error = pb_utils.TritonError
        codes = [error.UNAVAILABLE] * 3 + [error.INVALID_ARG, error.INTERNAL]
        texts = ["[rsrv:QUEUE_FULL] full", "[rsrv:DEADLINE] late", "[rsrv:NOT_RESIDENT] load it", "no", "oh"]
        numbers = [pb_utils.get_input_tensor_by_name(request, "X").as_numpy()[0] for request in requests]
        return [pb_utils.InferenceResponse(error=error(texts[n], codes[n])) for n in numbers]
""",
    # The model creates a file, waits until the request is cancelled, and then creates another file.
    "waiting": """
        for request in requests:
            threading.Thread(target=self.wait, args=(request, request.get_response_sender())).start()
        return None

    def wait(self, request, sender):
        marks = os.environ["MARKS"]
        name = request.request_id()
        open(f"{marks}/{name}.started", "w").close()
        while not request.is_cancelled():
            time.sleep(0.01)
        sender.send(
            pb_utils.InferenceResponse(error=pb_utils.TritonError("cancelled", pb_utils.TritonError.CANCELLED)),
            flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
        )
        open(f"{marks}/{name}.cancelled", "w").close()
""",
    # The first number is the number of answers.
    "several": """
        for request in requests:
            sender = request.get_response_sender()
            for _ in range(pb_utils.get_input_tensor_by_name(request, "X").as_numpy()[0]):
                sender.send(answer(request))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        return None
""",
    # The two models have the same code. Only `sums` takes sequences.
    "plain": _SUM,
    "sums": _SUM,
    # A negative number kills the server.
    "killer": """
        if any(pb_utils.get_input_tensor_by_name(request, "X").as_numpy()[0] < 0 for request in requests):
            os.kill(os.getppid(), 9)
        return [answer(request) for request in requests]
""",
}
_MORE = {
    "several": "model_transaction_policy { decoupled: true }",
    "sums": "sequence_batching { oldest { max_candidate_sequences: 64 } max_sequence_idle_microseconds: 60000000 }",
}
#: Additional outputs of models.
_OUTPUTS = dict.fromkeys(("plain", "sums"), ', { name: "text" data_type: TYPE_STRING dims: [ -1 ] }')
#: Models of the fleet.
_SERVED = tuple(name for name in _BODIES if name != "killer")


def write_repository(folder: Path, models: Sequence[str] = _SERVED) -> Path:
    """Write a model repository with these plain models."""
    for name in models:
        (folder / name / "1").mkdir(parents=True)
        config = _CONFIG.format(name=name, outputs=_OUTPUTS.get(name, ""), more=_MORE.get(name, ""))
        (folder / name / "config.pbtxt").write_text(config)
        (folder / name / "1" / "model.py").write_text(_MODEL.format(body=_BODIES[name].strip("\n")))
    return folder


@dataclass(frozen=True)
class Fleet:
    """Two servers with all plain models, and a gateway in front of them."""

    workers: list[RunningTriton]
    gateway: RunningGateway
    #: Folder of the files that models create.
    marks: Path


def entry(server: RunningTriton, name: str, *, control: bool = True) -> dict[str, Any]:
    """Return the entry of a server for the setting gateway.workers. Without `control`, the entry has no control service."""
    ports = {
        "grpc_port": server.grpc_port,
        "http_port": server.http_port,
        "metrics_port": server.metrics_port,
    }
    socket = runtime_directory(server.pid, "0") / CONTROL_SOCKET
    return {"name": name, "host": "127.0.0.1", **ports, **({"control": f"unix:{socket}"} if control else {})}


class RunningGateway:
    """A gateway process, with a client for each protocol."""

    def __init__(self, process: subprocess.Popen[bytes], ports: Mapping[str, int], log: Path) -> None:
        self.process = process
        self.grpc_port, self.http_port, self.admin_port = ports["grpc"], ports["http"], ports["admin"]
        self.url = f"127.0.0.1:{self.grpc_port}"
        self.http_url = f"127.0.0.1:{self.http_port}"
        self.grpc = tritonclient.grpc.InferenceServerClient(self.url)
        self.http = tritonclient.http.InferenceServerClient(self.http_url)
        self._log = log

    @property
    def pid(self) -> int:
        return self.process.pid

    def log_text(self) -> str:
        return self._log.read_text()

    def get(self, path: str) -> tuple[int, str]:
        """Return the status and the text of a page of the admin port. The status is 0 if nothing listens there."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.admin_port}{path}", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    @property
    def control(self) -> str:
        (socket,) = base_directory().glob(f"{self.pid}-*-gateway/{CONTROL_SOCKET}")
        return f"unix:{socket}"

    def status(self) -> pb.GetStatusResponse:
        with grpc.insecure_channel(self.control) as channel:
            stub: Any = gateway_pb2_grpc.GatewayStub(channel)
            status: pb.GetStatusResponse = stub.GetStatus(pb.GetStatusRequest(), timeout=20)
        return status

    def rsrv(self, *arguments: str) -> str:
        """Run a command of `rsrv gateway`, and return its output."""
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            assert cli.main(["gateway", *arguments, "--server", self.control]) == 0
        return out.getvalue()

    @contextmanager
    def client(self) -> Iterator[Any]:
        """Yield a new gRPC client, which a thread can use."""
        client = tritonclient.grpc.InferenceServerClient(self.url)
        try:
            yield client
        finally:
            client.close()


def running_gateway(
    folder: Path, workers: Sequence[Mapping[str, Any] | RunningTriton] = (), **settings: Any
) -> AbstractContextManager[RunningGateway]:
    """Run a gateway in front of the workers until the block ends. Yield it when it is ready.

    Servers get the names a, b and so on, and have no control service. `settings` are keys of the section `gateway`.
    """
    return _running(folder, workers, settings, picker=False)


def lonely_gateway(folder: Path, **settings: Any) -> AbstractContextManager[RunningGateway]:
    """Run a gateway whose only worker does not answer, until the block ends."""
    nobody = {"host": "127.0.0.1", "grpc_port": 1, "http_port": None}
    return _running(folder, [nobody], settings, picker=False, ready=503)


def running_picker(
    folder: Path, workers: Sequence[Mapping[str, Any] | RunningTriton], **settings: Any
) -> AbstractContextManager[RunningGateway]:
    """Run an endpoint picker in front of the workers until the block ends. It answers Envoy on the port for gRPC."""
    return _running(folder, workers, settings, picker=True)


@contextmanager
def _running(
    folder: Path,
    workers: Sequence[Mapping[str, Any] | RunningTriton],
    settings: Mapping[str, Any],
    *,
    picker: bool,
    ready: int = 200,
) -> Iterator[RunningGateway]:
    ports = dict(zip(("grpc", "http", "admin"), free_ports(3), strict=True))
    entries = [
        entry(worker, name, control=False) if isinstance(worker, RunningTriton) else dict(worker)
        for name, worker in zip("abcdefgh", workers, strict=False)
    ]
    section = {**{name: f"127.0.0.1:{port}" for name, port in ports.items()}, "workers": entries, **settings}
    config, log = folder / "gateway.yaml", folder / "gateway.log"
    config.write_text(yaml12.dump({"gateway": section}))
    command = [sys.executable, "-m", "rsrv_gateway", "--config", str(config)]
    if picker:
        command += ["--picker", section["grpc"]]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ,
        )
    running = RunningGateway(process, ports, log)
    try:
        wait_until(
            lambda: process.poll() is not None or running.get("/readyz")[0] == ready, what="the gateway"
        )
        assert process.poll() is None, running.log_text()
        yield running
    finally:
        running.grpc.close()
        running.http.close()
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait()


@contextmanager
def running_fleet(folder: Path) -> Iterator[Fleet]:
    """Run two servers whose models can be unloaded, and a gateway in front of them, until the block ends."""
    with ExitStack() as stack:
        workers = [
            stack.enter_context(
                running_triton(
                    write_repository(folder / name),
                    folder / f"{name}.log",
                    extra_args=EXPLICIT,
                    env={"MARKS": str(folder)},
                )
            )
            for name in "ab"
        ]
        gateway = stack.enter_context(running_gateway(folder, workers))
        wait_until(lambda: gateway.grpc.is_model_ready("echo"), what="echo is ready")
        yield Fleet(workers, gateway, folder)
