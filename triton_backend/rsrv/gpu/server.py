"""Tritonservers for the parts that send requests through Triton: one that `rsrv serve` runs, and one without rsrv."""

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

from rsrv.gpu.report import PartInput
from rsrv.runtime.device import Array
from rsrv.serve.command import find_tritonserver
from rsrv.serve.plan import REPOSITORY, ServeError
from rsrv.text import duration
from rsrv.triton_command_line import ask_flags
from rsrv_bundle.writer import write_manifest

#: Name of the folder with bundles in the folder of a part.
BUNDLES = "bundles"
#: Limits in seconds for the start of a server with its models, for its end, and for a command.
_START_S, _END_S, _COMMAND_S = 120.0, 40.0, 60.0
#: With these flags, the server without rsrv listens only on loopback, as the server of `rsrv serve` does.
_PRIVATE = ("--http-address=127.0.0.1", "--grpc-address=127.0.0.1", "--allow-metrics=false")
_RSRV = (sys.executable, "-P", "-m", "rsrv.cli.main")


class NoTriton(Exception):
    """There is no tritonserver, or it does not start. The message says why."""


def _tritonserver() -> str:
    """Return the path of the tritonserver program. Raises NoTriton."""
    try:
        program = find_tritonserver(None, lambda question: False)
    except ServeError:
        raise NoTriton(
            "there is no tritonserver on PATH: run `rsrv triton install`, or use NVIDIA's container"
        ) from None
    try:
        ask_flags(program)  # `rsrv serve` would start a broken tritonserver again and again.
    except OSError as error:
        raise NoTriton(str(error)) from None
    return program


@dataclass(frozen=True, slots=True)
class ServedModels:
    """A server with its models."""

    #: Address for gRPC.
    address: str
    repository: Path
    _environment: Mapping[str, str]

    def rsrv(self, *words: str) -> str:
        """Run a command of `rsrv` for this server, and return its output. Raises CalledProcessError."""
        command = [*_RSRV, *words, "--server", self.address.rpartition(":")[2]]
        done = subprocess.run(
            command, env=self._environment, check=True, capture_output=True, text=True, timeout=_COMMAND_S
        )
        return done.stdout

    def runtime_pid(self) -> int:
        status = json.loads(self.rsrv("status", "--json"))
        return int(status["devices"][0]["record"]["pid"])


@contextmanager
def serving(
    part_input: PartInput,
    models: Sequence[str],
    settings: Mapping[str, Any],
    *,
    tritonserver: str = "",
    arguments: Sequence[str] = (),
) -> Iterator[ServedModels]:
    """Run `rsrv serve` on the part's bundles until the block ends. The models are ready when it begins.

    `arguments` are more flags for tritonserver. Raises NoTriton.
    """
    config, directory = part_input.folder / "serve.yaml", part_input.folder / "serve"
    write_manifest(config, {**settings, "metrics": {"listen": None}})
    command = [
        *(*_RSRV, "serve", str(part_input.folder / BUNDLES)),
        *("--config", str(config), "--directory", str(directory)),
        *("--tritonserver", tritonserver or _tritonserver()),
        *("--devices", "cpu" if part_input.on_cpu else "0"),
    ]
    with _server(part_input, command, models, arguments) as address:
        yield ServedModels(address, directory / REPOSITORY, part_input.environment)


@contextmanager
def plain_server(part_input: PartInput) -> Iterator[ServedModels]:
    """Run tritonserver without rsrv, and without models, until the block ends. Raises NoTriton."""
    (repository := part_input.folder / "plain").mkdir()
    options = (f"--model-repository={repository}", "--model-control-mode=explicit", *_PRIVATE)
    command = [_tritonserver(), *options]
    with _server(part_input, command, []) as address:
        yield ServedModels(address, repository, part_input.environment)


@contextmanager
def _server(
    part_input: PartInput, command: Sequence[str], models: Sequence[str], arguments: Sequence[str] = ()
) -> Iterator[str]:
    """Run a server on free ports until the block ends. Yield its address for gRPC when the models are ready."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(3)]
        for listener in sockets:
            listener.bind(("127.0.0.1", 0))
        http, grpc, metrics = (listener.getsockname()[1] for listener in sockets)
    ports = (f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}")
    more = ("--", *arguments) if arguments else ()
    process = subprocess.Popen(
        [*command, *ports, *more], env=part_input.environment, stdin=subprocess.DEVNULL
    )
    try:
        address = f"127.0.0.1:{grpc}"
        _wait(process, address, models, part_input.window(_START_S, 0.5))
        yield address
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()


def _wait(process: "subprocess.Popen[bytes]", address: str, models: Sequence[str], seconds: float) -> None:
    end = time.monotonic() + seconds
    with InferenceServerClient(address) as client:
        while process.poll() is None and time.monotonic() < end:
            with suppress(InferenceServerException):
                if client.is_server_ready() and all(map(client.is_model_ready, models)):
                    return
            time.sleep(0.2)
    ended = f"ended with status {process.returncode}" if process.returncode is not None else "is not ready"
    raise NoTriton(f"the server {ended} within {duration(seconds)}")


def ask(client: InferenceServerClient, model: str, x: Array) -> Array:
    """Return the output y of a model for an f32 input x. Raises InferenceServerException."""
    tensor = InferInput("x", list(x.shape), "FP32")
    tensor.set_data_from_numpy(x)
    answer: Array = client.infer(model, [tensor]).as_numpy("y")
    return np.array(answer)
