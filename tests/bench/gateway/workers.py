"""Workers that stop and start again: tritonservers that keep their names and their ports."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from local_triton import TritonServer, free_ports
from tests.bench import chains
from tests.bench.crowd import Questions
from tests.bench.gateway.stage import entry
from tests.bench.places import ROOT, WORK

#: Bytes of the weights of each model.
MODEL_BYTES = 2**20
#: Number of questions for each model. Clients ask them repeatedly in random order.
_QUESTIONS = 16


class Worker:
    """A worker. The context manager starts it, and always ends it."""

    def __init__(self, name: str, repository: Path, env: Mapping[str, str] | None = None) -> None:
        self.name = name
        self._repository = repository
        cache = os.environ.get("RSRV_RUNTIME__COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "xla"))
        self._env = {"RSRV_RUNTIME__COMPILATION_CACHE_DIR": cache, **(env or {})}
        self._ports = free_ports(3)
        self._server: TritonServer | None = None

    @property
    def server(self) -> TritonServer:
        if self._server is None:
            raise RuntimeError(f"{self.name} was not started")
        return self._server

    @property
    def running(self) -> bool:
        return self._server is not None and self._server.process.poll() is None

    def start(self) -> None:
        """Start the worker, and wait until it is ready."""
        http, grpc, metrics = self._ports
        self._server = TritonServer(
            self._repository,
            http_port=http,
            grpc_port=grpc,
            metrics_port=metrics,
            env=self._env,
            log_path=WORK / f"gateway-{self.name}.log",
        )
        self._server.start().wait_ready(timeout=300)

    def terminate(self) -> None:
        """Send SIGTERM, and wait for the end."""
        self.server.terminate()

    def kill(self) -> None:
        """Send SIGKILL, and wait for the end. The child processes end by themselves."""
        self.server.kill()

    def entry(self) -> dict[str, Any]:
        """Return the worker's entry for gateway.workers. After the worker has ended, the entry is the same as before."""
        return entry(self.name, self.server)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.terminate()


def repository(models: int) -> Path:
    """Return a model repository with `models` small chains."""
    return chains.repository(models, MODEL_BYTES)


def questions(models: int) -> Path:
    """Return a file of questions and right answers."""
    rng = np.random.default_rng(1)
    layers = chains.layers_of(MODEL_BYTES)
    sent = {
        name: rng.standard_normal((_QUESTIONS, chains.WIDTH), np.float32) for name in chains.names(models)
    }
    expected = {name: chains.reference(name, layers, x) for name, x in sent.items()}
    file = WORK / "gateway-questions.npz"
    Questions(sent, expected).save(file)
    return file
