"""A tritonserver that `rsrv serve` runs, for the parts that ask through Triton."""

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

from rsrv.gpu.report import Finding, PartInput, Tell
from rsrv.runtime.device import Array
from rsrv.serve.command import find_tritonserver
from rsrv.serve.plan import REPOSITORY, ServeError
from rsrv_bundle.writer import write_manifest

#: folder of the bundles, in that of a part
BUNDLES = "bundles"
#: seconds for a server with its models, for its end, and for a command
_START_S, _END_S, _COMMAND_S = 180.0, 40.0, 60.0
_RSRV = (sys.executable, "-P", "-m", "rsrv.cli.main")


def tritonserver_for(what: str, tell: Tell) -> str | None:
    """Return the program; None: there is none, and this finding is skipped."""
    try:
        return find_tritonserver(None, lambda question: False)
    except ServeError:
        reason = "no tritonserver was found on PATH: `rsrv triton install` installs one, NVIDIA's container has one"
        tell(Finding(what, "SKIPPED", reason=reason))
        return None


@dataclass(frozen=True, slots=True)
class ServedModels:
    """A server with its models."""

    #: for gRPC
    address: str
    repository: Path
    _environment: Mapping[str, str]

    def rsrv(self, *words: str) -> str:
        """Run a command of `rsrv` for this server; return its output. Raises CalledProcessError."""
        command = [*_RSRV, *words, "--server", self.address.rpartition(":")[2]]
        done = subprocess.run(
            command, env=self._environment, check=True, capture_output=True, text=True, timeout=_COMMAND_S
        )
        return done.stdout

    def runtime_pid(self) -> int:
        status = json.loads(self.rsrv("status", "--json"))
        return int(status["devices"][0]["runtime"]["pid"])


@contextmanager
def serving(
    given: PartInput, tritonserver: str, models: Sequence[str], settings: Mapping[str, Any]
) -> Iterator[ServedModels]:
    """Run `rsrv serve` on the part's bundles until the block ends; the models are ready when it begins."""
    config, directory = given.folder / "serve.yaml", given.folder / "serve"
    write_manifest(config, {**settings, "metrics": {"listen": None}})
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(3)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        http, grpc, metrics = (one.getsockname()[1] for one in sockets)
    process = subprocess.Popen(
        [
            *(*_RSRV, "serve", str(given.folder / BUNDLES)),
            *("--config", str(config), "--directory", str(directory)),
            *("--tritonserver", tritonserver, "--devices", "cpu" if given.on_cpu else "0"),
            *("--http-port", str(http), "--grpc-port", str(grpc), "--metrics-port", str(metrics)),
        ],
        env=given.environment,
        stdin=subprocess.DEVNULL,
    )
    try:
        address = f"127.0.0.1:{grpc}"
        _wait(process, address, models)
        yield ServedModels(address, directory / REPOSITORY, given.environment)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()


def _wait(process: "subprocess.Popen[bytes]", address: str, models: Sequence[str]) -> None:
    end = time.monotonic() + _START_S
    with InferenceServerClient(address) as client:
        while process.poll() is None and time.monotonic() < end:
            with suppress(InferenceServerException):
                if all(map(client.is_model_ready, models)):
                    return
            time.sleep(0.2)
    raise TimeoutError("rsrv serve does not serve the models; its output is above")


def ask(client: InferenceServerClient, model: str, x: Array) -> Array:
    """Return the output y of a model for an f32 input x. Raises InferenceServerException."""
    tensor = InferInput("x", list(x.shape), "FP32")
    tensor.set_data_from_numpy(x)
    found: Array = client.infer(model, [tensor]).as_numpy("y")
    return np.array(found)
