"""A client for the lifecycle of a real server's models, and bundles whose answers identify their version."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import tritonclient.grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.utils import InferenceServerException

from local_triton import LOOPBACK
from rsrv.control.v1 import control_pb2 as pb
from rsrv.control.v1 import control_pb2_grpc
from rsrv.wire.paths import CONTROL_SOCKET, runtime_directory
from rsrv_bundle.export import export_bundle
from tests.e2e.bundles import OUTPUT, ensure_made, with_weights
from tests.e2e.calls import Caller
from tests.e2e.harness import RunningTriton
from tests.waiting import PATIENCE_S, wait_until

#: Number of columns of every tensor here.
COLUMNS = 4


@functools.cache
def _made() -> Path:
    """Return the folder with one bundle for each module. All versions are copies of these bundles."""

    def make(out_dir: Path) -> None:
        module = int(out_dir.name)
        export_bundle(
            lambda params, x: {
                "first": x + params["first"],
                "second": x + params["second"],
                "code": x * 0 + module,
            },
            _weights(0),
            {"x": np.zeros((1, COLUMNS), np.float32)},
            batch_sizes=(1, 4),
            out_dir=out_dir,
        )

    return ensure_made(OUTPUT.with_name("test_versions"), dict.fromkeys("03", make), [Path(__file__)])


def _weights(version: int) -> dict[str, np.ndarray[Any, Any]]:
    return {
        # The tensor is so large that the repository shares it by a hard link.
        "ballast": np.full(2**18, version, np.float32),
        "first": np.array(version, np.float32),
        "second": np.full(COLUMNS, version, np.float32),
    }


def answer(port: int, model: str) -> int:
    """Return the version of the `write_version` model that answers on this gRPC port, or 0 if none answers."""
    try:
        return int(first_value(port, model))
    except InferenceServerException:
        return 0


def first_value(port: int, model: str) -> float:
    """Return the first value of a `write_version` model's answer on this gRPC port. Raises InferenceServerException."""
    client = tritonclient.grpc.InferenceServerClient(f"{LOOPBACK}:{port}")
    tensor = tritonclient.grpc.InferInput("x", [1, COLUMNS], "FP32")
    tensor.set_data_from_numpy(np.zeros((1, COLUMNS), np.float32))
    try:
        return float(client.infer(model, [tensor], client_timeout=PATIENCE_S).as_numpy("first")[0, 0])
    finally:
        client.close()


def write_version(path: Path, version: int, *, module: int = 0) -> Path:
    """Write a model whose outputs identify its version. `module` (0 or 3) is in its code, and `version` is in its weights."""
    return with_weights(_made() / str(module), path, _weights(version))


def version(call: Caller, name: str, x: float = 7.0, rows: int = 1) -> tuple[int, int]:
    """Ask a model, and return its version and its module. All its outputs must agree."""
    answer = call(name, {"x": np.full((rows, COLUMNS), x, np.float32)})
    versions = {
        (float(a - x), float(b - x), float(c))
        for a, b, c in zip(*(answer[k].ravel() for k in OUTPUTS), strict=True)
    }
    ((first, second, module),) = versions
    assert first == second, "the answer is of two versions"
    return int(first), int(module)


OUTPUTS = ("first", "second", "code")


def place(source: Path, target: Path) -> None:
    """Copy a bundle as a careful user does: copy it under a hidden name, and then rename the copy."""
    aside = target.with_name(f".{target.name}")
    shutil.copytree(source, aside)
    if target.exists():
        old = target.with_name(f".{target.name}.old")
        target.rename(old)
        aside.rename(target)
        shutil.rmtree(old)
    else:
        aside.rename(target)


class Living:
    """A client of a server's control process, for the lifecycle of its models."""

    def __init__(self, server: RunningTriton) -> None:
        socket = runtime_directory(server.pid, "0") / CONTROL_SOCKET
        wait_until(socket.exists, what="the control process")
        self._channel = grpc.insecure_channel(f"unix:{socket}")
        self._stub: Any = control_pb2_grpc.ControlStub(self._channel)

    def reload(self, name: str) -> None:
        """Reload a model. Raises grpc.RpcError."""
        self._stub.ReloadWeights(pb.ReloadWeightsRequest(model=name), timeout=60)

    def set_discipline(self, discipline: pb.Discipline) -> bool:
        """Set the discipline. Return True if the runtime then has it. Raises grpc.RpcError."""
        request = pb.SetSchedulerRequest(scheduler=pb.Scheduler(discipline=discipline))
        self._stub.SetScheduler(request, timeout=20)
        current = self._stub.SetScheduler(pb.SetSchedulerRequest(), timeout=20).scheduler.discipline
        return bool(current == discipline)

    @property
    def pid(self) -> int:
        """Return the process id of the control process that answers now."""
        return int(self._stub.GetStatus(pb.GetStatusRequest(), timeout=20).server.control_pid)

    @property
    def failures(self) -> dict[str, str]:
        status = self._stub.GetStatus(pb.GetStatusRequest(), timeout=20)
        return {failure.name: failure.text for failure in status.failures}

    def broken(self, name: str) -> str:
        """Return why the runtime cannot serve a model, or an empty text."""
        (model,) = self._stub.GetStatus(pb.GetStatusRequest(model=name), timeout=20).models
        return next((entry.error for entry in model.versions if entry.state == pb.STATE_FAILED), "")

    @property
    def serves(self) -> bool:
        """Return whether the server as a whole is healthy."""
        health = health_pb2_grpc.HealthStub(self._channel)
        status = health.Check(health_pb2.HealthCheckRequest(), timeout=20).status
        return bool(status == health_pb2.HealthCheckResponse.SERVING)

    def watch_health(self) -> Iterator[bool]:
        """Yield whether the server as a whole is healthy: its state now, and each change. No change is missed."""
        health = health_pb2_grpc.HealthStub(self._channel)
        for answer in health.Watch(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S):
            yield bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    @property
    def metrics(self) -> str:
        return str(self._stub.GetMetrics(pb.GetMetricsRequest(), timeout=20).text)

    def close(self) -> None:
        self._channel.close()
