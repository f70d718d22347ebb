"""A runtime in this process: the real loop and scheduler, a fake device, real sockets and shared memory."""

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from rsrv.runtime.loop import Loop
from rsrv.runtime.policy import scheduler_settings
from rsrv.runtime.scheduler.scheduler import Scheduler
from rsrv.settings import Settings, load_settings
from rsrv.stub.engine import Engine, WireTensor
from rsrv.stub.hooks import Hooks
from rsrv.stub.launch import Greeted, greet
from rsrv.stub.replies import Responses
from rsrv.stub.session import Session
from rsrv.stub.tensors import Tensors
from rsrv.wire.paths import SOCKET
from rsrv.wire.socket import connect, listen
from rsrv_bundle.export import export_bundle
from tests.fakes import FakeDevice, FakePbUtils


@pytest.fixture(scope="session")
def doubling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle `doubling`: y = 2 x + w, x of 3 columns, sizes 1, 4, 8."""
    path = tmp_path_factory.mktemp("bundles") / "doubling"
    export_bundle(
        lambda params, x: {"y": 2 * x + params["w"]},
        {"w": jnp.ones(3, jnp.float32)},
        {"x": np.zeros((1, 3), np.float32)},
        batch_sizes=[1, 4, 8],
        out_dir=path,
    )
    return path


@dataclass
class Runtime:
    """One life of a runtime; `stop()` is its sudden end."""

    loop: Loop
    device: FakeDevice
    socket: Path
    _thread: threading.Thread

    def open(self) -> Greeted:
        return greet(connect(self.socket))

    def stop(self) -> None:
        self.loop.stop()
        self._thread.join(10)
        assert not self._thread.is_alive()


StartRuntime = Callable[..., Runtime]


@pytest.fixture
def start_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StartRuntime]:
    """Start a runtime at the same socket, where `rsrv.wire.status` finds it; every one is stopped at the end."""
    started: list[Runtime] = []
    monkeypatch.setattr("rsrv.wire.status.runtime_directory", lambda server_pid, gpu: tmp_path)

    def start(
        settings: Settings | None = None,
        *,
        asynchronous: bool = False,
    ) -> Runtime:
        path = tmp_path / SOCKET
        path.unlink(missing_ok=True)
        listener = listen(path)
        settings = settings or load_settings()
        device = FakeDevice(lambda inputs, weights: [2 * inputs[0] + weights[0]], asynchronous=asynchronous)
        loop = Loop(listener, os.getpid(), settings, Scheduler(scheduler_settings(settings)), lambda: device)

        def run() -> None:
            loop.run()
            listener.close()

        thread = threading.Thread(target=run)
        runtime = Runtime(loop, device, path, thread)
        thread.start()
        started.append(runtime)
        return runtime

    yield start
    for runtime in started:
        if runtime._thread.is_alive():
            for gate in (runtime.device.gate, runtime.device.uploads, runtime.device.compiles):
                gate.set()
            runtime.stop()


@pytest.fixture
def runtime(start_runtime: StartRuntime) -> Runtime:
    return start_runtime()


StartEngine = Callable[..., Engine]


@pytest.fixture
def start_engine(runtime: Runtime, doubling: Path) -> Iterator[StartEngine]:
    """An engine of a stub for `doubling`, connected to `runtime`."""
    started: list[Engine] = []

    def start(
        hooks: Hooks | None = None, outputs: tuple[WireTensor, ...] = (WireTensor("y", "f32", (-1, 3)),)
    ) -> Engine:
        engine = Engine(
            Tensors(FakePbUtils),
            Responses(FakePbUtils),
            hooks or Hooks(),
            [WireTensor("x", "f32", (-1, 3))],
            outputs,
            True,
            Session(runtime.open, "doubling", str(doubling)),
        )
        started.append(engine)
        return engine

    yield start
    runtime.device.gate.set()
    for engine in started:
        engine.close()
