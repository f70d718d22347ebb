"""Meta models for tests, and their stub's engine in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np

from rsrv.stub.endpoint import WireTensor
from rsrv.stub.hooks import load_hooks, load_run
from rsrv.stub.meta import MetaEngine
from rsrv.stub.replies import Failure, Responses
from rsrv.stub.session import Session
from rsrv.stub.tensors import Tensors
from rsrv.wire.frames import Status
from tests.fakes import FakePbUtils, FakeRequest
from tests.unit.runtime.conftest import Runtime

OUTPUTS = (WireTensor("y", "f32", (-1, 3)),)


def write_meta(path: Path, body: str, calls: list[str], external: list[str] | None = None) -> Path:
    """A bundle of kind meta, x and y of 3 columns, whose model.py is `body`."""
    path.mkdir(parents=True)
    (path / "manifest.yaml").write_text(
        dedent(f"""
        format_version: "3.0"
        kind: meta
        meta: {{calls: [{", ".join(calls)}], external: [{", ".join(external or [])}]}}
        client_inputs: [{{name: x, dtype: f32, shape: na, dims: {{a: 3}}}}]
        client_outputs: [{{name: y, dtype: f32, shape: na, dims: {{a: 3}}}}]
        """)
    )
    (path / "model.py").write_text(dedent(body))
    return path


@dataclass
class FakeTriton:
    """Stands for BLS: models outside of the runtime, as functions of their inputs."""

    models: Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]] = field(default_factory=dict)

    def start(self, name: str, inputs: dict[str, Any], **_: Any) -> Future[dict[str, Any]]:
        future: Future[dict[str, Any]] = Future()
        if name in self.models:
            future.set_result(self.models[name](inputs))
        else:
            future.set_exception(Failure(Status.NOT_FOUND, f"there is no model {name!r}"))
        return future

    def close(self) -> None:
        pass


@contextmanager
def meta_engine(
    runtime: Runtime,
    bundle: Path,
    calls: Mapping[str, Path],
    *,
    external: Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]] | None = None,
    outputs: tuple[WireTensor, ...] = OUTPUTS,
) -> Iterator[MetaEngine]:
    """The engine of a meta model's stub, connected to `runtime`."""
    triton: Any = FakeTriton(external or {})
    engine = MetaEngine(
        Tensors(FakePbUtils),
        Responses(FakePbUtils),
        load_run(bundle / "model.py"),
        {name: load_hooks(path / "model.py") for name, path in calls.items()},
        list(external or ()),
        outputs,
        True,
        Session(runtime.open, bundle.name, str(bundle), {name: str(path) for name, path in calls.items()}),
        lambda settings: triton,
    )
    try:
        yield engine
    finally:
        runtime.device.gate.set()
        engine.close()


def rows(count: int, value: float = 1.0) -> np.ndarray[Any, Any]:
    return np.full((count, 3), value, np.float32)


def ask(engine: MetaEngine, *requests: FakeRequest) -> list[Any]:
    """The responses of some requests, answered in place or later."""
    answers = engine.execute(list(requests))
    if answers is not None:
        return answers
    return [request.answers.get(timeout=20) for request in requests]


def send(engine: MetaEngine, *requests: FakeRequest) -> threading.Thread:
    """Have a thread wait for the answers, which are then with the requests."""

    def work() -> None:
        answers = engine.execute(list(requests))
        for request, answer in zip(requests, answers or (), strict=False):
            request.answers.put(answer)

    thread = threading.Thread(target=work)
    thread.start()
    return thread
