"""A runtime in this process: the real loop and scheduler, a fake device, real sockets and shared memory."""

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from rsrv.runtime.device import Device
from rsrv.runtime.host import HostStore
from rsrv.runtime.host_memory import PrivateMemory
from rsrv.runtime.loop import Loop
from rsrv.runtime.models import Model, build, warm_up
from rsrv.runtime.policy import scheduler_settings
from rsrv.runtime.scheduler.scheduler import Scheduler
from rsrv.runtime.working_set import WorkingSet
from rsrv.settings import Settings, load_settings
from rsrv.stub.endpoint import WireTensor
from rsrv.stub.engine import Engine
from rsrv.stub.hooks import Hooks
from rsrv.stub.launch import Greeted, greet
from rsrv.stub.replies import Responses
from rsrv.stub.session import Session
from rsrv.stub.tensors import Tensors
from rsrv.wire.paths import SOCKET
from rsrv.wire.socket import connect, listen
from rsrv_bundle import read_bundle
from rsrv_bundle.export import export_bundle
from tests.fakes import FakeDevice, FakePbUtils


def export_doubling(path: Path, **weights: list[float]) -> Path:
    """A bundle: y = 2 x + w, x of 3 columns, sizes 1, 4, 8, `w` the first of these weights in alphabetical order."""
    first = min(weights)
    export_bundle(
        lambda params, x: {"y": 2 * x + params[first] + sum(0 * params[name].sum() for name in weights)},
        {name: jnp.asarray(values, jnp.float32) for name, values in weights.items()},
        {"x": np.zeros((1, 3), np.float32)},
        batch_sizes=[1, 4, 8],
        out_dir=path,
    )
    return path


@pytest.fixture(scope="session")
def doubling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`export_doubling` with w = 1."""
    return export_doubling(tmp_path_factory.mktemp("bundles") / "doubling", w=[1, 1, 1])


@pytest.fixture(scope="session")
def doublings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models `a` to `d`, with w = 1 to 4: they have no tensor in common."""
    folder = tmp_path_factory.mktemp("bundles")
    return {name: export_doubling(folder / name, w=[w, w, w]) for w, name in enumerate("abcd", 1)}


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


def build_here(path: Path | str, device: Device, settings: Settings | None = None) -> Model:
    """A model that is compiled, its weights on the device and its costs measured, without a runtime."""
    bundle = read_bundle(Path(path))
    model = build(bundle, device, HostStore(PrivateMemory()), settings or load_settings(), bundle.name)
    model.weights = WorkingSet(device).load(model.host, lambda: False)
    model.program = replace(model.program, costs=warm_up(model, device))
    return model


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
