"""Engines of models' stubs in this process, and requests to them."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rsrv.hooks.loader import Hooks
from rsrv.stub.connection import Rejected, RuntimeConnection
from rsrv.stub.engine import Engine
from rsrv.stub.tensors import Array
from rsrv.wire.socket import Closed
from tests.fakes import FakeRequest, FakeResponse
from tests.unit.runtime.metas import answer_of, engine_of
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from tests.unit.runtime.conftest import Runtime


def ramp(count: int, start: float = 0) -> Array:
    return np.arange(start, start + 3 * count, dtype=np.float32).reshape(count, 3)


def make_engine(runtime: Runtime, bundle: Path, hooks: Hooks | None = None, name: str = "doubling") -> Engine:
    """Start the engine of a stub, which is closed at the end of the test."""
    engine = engine_of(runtime.open, bundle, name, hooks)
    runtime.users.callback(engine.close)
    return engine


def refused(response: FakeResponse, code: str, text: str) -> bool:
    return response.error is not None and response.error.code == code and text in response.error.message


def send_one(engine: Engine) -> FakeRequest:
    request = FakeRequest({"x": ramp(1)})
    assert engine.execute([request]) is None
    return request


def answered(request: FakeRequest) -> float:
    """Return w of y = 2 x + w, which shows whose weights answered the request."""
    x = request.inputs()[0].as_numpy()
    offsets = answer_of(request).arrays["y"] - 2 * x
    assert offsets.min() == offsets.max()
    return float(offsets.min())


@dataclass
class Registering:
    """A stub that registers, and a thread that waits until its model is ready."""

    lane: RuntimeConnection
    thread: threading.Thread
    rejected: list[str]

    def join(self) -> None:
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()


def register(runtime: Runtime, name: str, path: Path) -> Registering:
    """Begin to register a stub. Its connection is closed at the end of the test."""
    lane, rejected = runtime.connect(), []

    def wait() -> None:
        try:
            lane.register({"model": name, "bundle": str(path)})
        except Rejected as error:
            rejected.append(str(error))
        except Closed:
            rejected.append("closed")

    registering = Registering(lane, threading.Thread(target=wait), rejected)
    registering.thread.start()
    return registering
