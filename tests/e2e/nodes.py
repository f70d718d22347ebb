"""Whole nodes for tests: `rsrv-node` as a process with all its children, which is always ended."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from local_triton import EXEC_BOUND, INSTALLATION, LOOPBACK
from rsrv.explain import read_yaml
from rsrv.settings_fleet import WorkerEntry
from tests.e2e.harness import compilation_cache
from tests.e2e.lives import COLUMNS
from tests.waiting import wait_until


class RunningNode:
    """An `rsrv-node` and the processes that it has started."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self.process = process
        self.folder = folder

    @property
    def log_text(self) -> str:
        """Return the log of the node and its children."""
        return (self.folder / "node.log").read_text(errors="replace")

    def workers(self) -> list[WorkerEntry]:
        """Return the workers as the gateway would read them; none before they have started."""
        file = self.folder / "node" / "workers.yaml"
        text = file.read_text() if file.exists() else ""
        entries = [WorkerEntry(**entry) for entry in read_yaml(f"workers:\n{text}", of="")["workers"] or []]
        return entries if all(entry.control for entry in entries) else []

    def pids(self) -> list[int]:
        """Return all processes with this node's directory: servers, stubs, runtimes, control processes."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            if any(f"{self.folder}/node/" in word for word in process.info["cmdline"] or ()):
                found.append(process.pid)
        return found

    def wait_answer(self, port: int, model: str) -> int:
        """Return the version of the model that answers there, as soon as it does."""
        return wait_until(lambda: answer(port, model), 60, what=f"{model} on port {port}:\n{self.tail()}")

    def tail(self) -> str:
        return "\n".join(self.log_text.splitlines()[-40:])


def answer(port: int, model: str) -> int:
    """Return the version of a `write_version` model that answers on this gRPC port; 0 for none."""
    try:
        return int(first_value(port, model))
    except InferenceServerException:
        return 0


def first_value(port: int, model: str) -> float:
    """Return the first value that a `write_version` model answers on this gRPC port. Raises InferenceServerException."""
    client = tritonclient.grpc.InferenceServerClient(f"{LOOPBACK}:{port}")
    tensor = tritonclient.grpc.InferInput("x", [1, COLUMNS], "FP32")
    tensor.set_data_from_numpy(np.zeros((1, COLUMNS), np.float32))
    try:
        return float(client.infer(model, [tensor], client_timeout=20).as_numpy("first")[0, 0])
    finally:
        client.close()


def server_pid(worker: WorkerEntry) -> int:
    """Return the pid with which its control socket's directory begins."""
    assert worker.control is not None
    return int(Path(worker.control).parent.name.split("-")[0])


def free_block(size: int) -> int:
    """Return the first of so many free loopback ports in a row."""
    for start in range(20000 + os.getpid() % 1000 * 10, 32000, size):
        with ExitStack() as held:
            try:
                for port in range(start, start + size):
                    held.enter_context(socket.socket()).bind((LOOPBACK, port))
            except OSError:
                continue
            return start
    raise AssertionError("no free ports")


@contextmanager
def running_node(bundles: Path, folder: Path, settings: str, *arguments: Any) -> Iterator[RunningNode]:
    """Run a node over these bundles, with rsrv.yaml's text, and end it with all its processes."""
    config = folder / "rsrv.yaml"
    config.write_text(settings)
    environment = {
        **os.environ,
        "RSRV_RUNTIME__COMPILATION_CACHE_DIR": str(compilation_cache()),
        "RSRV_METRICS__LISTEN": "null",
    }
    with (folder / "node.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(EXEC_BOUND), str(os.getpid()), ""]
            + [sys.executable, "-m", "rsrv.serve", str(bundles), "--config", str(config)]
            + ["--directory", str(folder / "node"), "--tritonserver", str(INSTALLATION.launcher)]
            + [str(argument) for argument in arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    node = RunningNode(process, folder)
    try:
        yield node
    except AssertionError as error:
        error.add_note(node.tail())
        raise
    finally:
        process.kill()
        process.wait()
        # The kernel ends the servers, and their descendants follow.
        wait_until(lambda: not node.pids(), 20, what="the end of the node's processes")
