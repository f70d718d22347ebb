"""A gateway as a process, in front of tritonservers with plain models that do what the tests need."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tritonclient.grpc
import tritonclient.http

from local_triton import free_ports
from tests.e2e.harness import RunningTriton, wait_until

_CONFIG = """
name: "{name}"
backend: "python"
max_batch_size: 0
input [{{ name: "X" data_type: TYPE_INT32 dims: [ -1 ] }}]
output [{{ name: "Y" data_type: TYPE_INT32 dims: [ -1 ] }}]
instance_group [{{ kind: KIND_CPU count: 1 }}]
{more}
"""

_MODEL = """
import os
import threading
import time

import triton_python_backend_utils as pb_utils


def answer(request):
    return pb_utils.InferenceResponse([pb_utils.Tensor("Y", pb_utils.get_input_tensor_by_name(request, "X").as_numpy())])


class TritonPythonModel:
    def execute(self, requests):
{body}
"""

#: what `execute` does
_BODIES = {
    "echo": """
        return [answer(request) for request in requests]
""",
    # The first number says how an answer is refused.
    "refusing": """
        error = pb_utils.TritonError
        codes = [error.UNAVAILABLE] * 3 + [error.INVALID_ARG, error.INTERNAL]
        texts = ["[rsrv:QUEUE_FULL] full", "[rsrv:DEADLINE] late", "[rsrv:NOT_RESIDENT] load it", "no", "oh"]
        numbers = [pb_utils.get_input_tensor_by_name(request, "X").as_numpy()[0] for request in requests]
        return [pb_utils.InferenceResponse(error=error(texts[n], codes[n])) for n in numbers]
""",
    # Until the client is gone, which a file then says.
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
    # As many answers as the first number says.
    "several": """
        for request in requests:
            sender = request.get_response_sender()
            for _ in range(pb_utils.get_input_tensor_by_name(request, "X").as_numpy()[0]):
                sender.send(answer(request))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        return None
""",
}
_MORE = {"several": "model_transaction_policy { decoupled: true }"}


def write_repository(folder: Path, models: Sequence[str] = tuple(_BODIES)) -> Path:
    """A model repository with these of the plain models."""
    for name in models:
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(_CONFIG.format(name=name, more=_MORE.get(name, "")))
        (folder / name / "1" / "model.py").write_text(_MODEL.format(body=_BODIES[name].strip("\n")))
    return folder


class RunningGateway:
    def __init__(self, process: subprocess.Popen[bytes], port: int, http_port: int, log_path: Path) -> None:
        self.process = process
        self.url = f"127.0.0.1:{port}"
        self.http_port = http_port
        self.log_path = log_path
        self.grpc = tritonclient.grpc.InferenceServerClient(self.url)
        self.http = tritonclient.http.InferenceServerClient(f"127.0.0.1:{http_port}")

    def is_ready(self) -> bool:
        if self.process.poll() is not None:
            raise AssertionError(
                f"the gateway has left with {self.process.returncode}: {self.log_path.read_text()}"
            )
        try:
            return bool(self.grpc.is_server_ready())
        except tritonclient.grpc.InferenceServerException:
            return False


@contextmanager
def running_gateway(
    folder: Path, workers: Sequence[RunningTriton], **settings: Any
) -> Iterator[RunningGateway]:
    """Its workers are called a, b ..., and it is ready."""
    port, http_port = free_ports(2)
    lines = [
        "gateway:",
        f"  grpc: 127.0.0.1:{port}",
        f"  http: 127.0.0.1:{http_port}",
        "  admin: null",
        "  workers:",
    ]
    for name, worker in zip("abcdefgh", workers, strict=False):
        ports = f"grpc_port: {worker.grpc_port}, http_port: {worker.http_port}, metrics_port: {worker.metrics_port}"
        lines.append(f"  - {{name: {name}, host: 127.0.0.1, {ports}}}")
    lines += [f"  {key}: {value}" for key, value in settings.items()]
    config, log_path = folder / "gateway.yaml", folder / "gateway.log"
    config.write_text("\n".join(lines))
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "rsrv_gateway", "--config", str(config)],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "XDG_RUNTIME_DIR": str(folder)},
        )
    gateway = RunningGateway(process, port, http_port, log_path)
    try:
        wait_until(gateway.is_ready, what="the gateway is ready")
        yield gateway
    finally:
        gateway.grpc.close()
        gateway.http.close()
        process.send_signal(signal.SIGKILL)
        process.wait()
