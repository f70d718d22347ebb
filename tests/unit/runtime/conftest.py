"""A runtime in this process: the real loop and scheduler, a fake device, real sockets and shared memory."""

import gc
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from rsrv.hooks.loader import Hooks
from rsrv.runtime.crash_history import BlackBox
from rsrv.runtime.device import Array, Device
from rsrv.runtime.handover import Handover
from rsrv.runtime.host_memory import HostMemory
from rsrv.runtime.host_weights import HostStore
from rsrv.runtime.loop import Loop, ServerProcess
from rsrv.runtime.models import CompiledModel, compile_model, warm_up
from rsrv.runtime.weight_mover import DeviceWeights
from rsrv.settings import Settings, load_settings
from rsrv.stub.connection import Greeted, RuntimeConnection, greet
from rsrv.stub.endpoint import WireTensor
from rsrv.stub.engine import Engine
from rsrv.stub.meta_engine import MetaEngine
from rsrv.wire.blackbox import BlackBoxReader
from rsrv.wire.frames import Kind, pack_json, read_header
from rsrv.wire.paths import SOCKET
from rsrv.wire.socket import connect, listen, send
from rsrv_bundle import Bundle, read_bundle
from rsrv_bundle.export import export_bundle
from rsrv_bundle.inspection import Inspector
from rsrv_bundle.modules import SignatureReader, check_signatures, signature_of
from tests.builders import CLIENT, compiled_before, write_meta
from tests.fakes import Compute, FakeDevice
from tests.status import read_status
from tests.unit.runtime.metas import OUTPUTS, Run, engine_of, meta_engine
from tests.waiting import PATIENCE_S, wait_until


@compiled_before()
def export_doubling(path: Path, **weights: list[float]) -> Path:
    """Export y = 2 x + w for x of 3 columns and sizes 1, 4, 8; `w` is the first weight by name."""
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
    """Return a bundle of `export_doubling` with w = 1."""
    return export_doubling(tmp_path_factory.mktemp("bundles") / "doubling", w=[1, 1, 1])


@pytest.fixture(scope="session")
def doublings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return models `a` to `d`, with w = 1 to 4, which share no tensor."""
    folder = tmp_path_factory.mktemp("bundles")
    return {name: export_doubling(folder / name, w=[w, w, w]) for w, name in enumerate("abcd", 1)}


@pytest.fixture
def shm() -> Iterator[Path]:
    """Return a directory in /dev/shm that stands for /dev/shm."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="rsrv-test-") as path:
        yield Path(path)


class Clock:
    """The machine's clock, which a test may advance."""

    def __init__(self) -> None:
        self.passed = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.passed


@dataclass
class Runtime:
    """A runtime on a thread of this process. `stop()` ends the runtime suddenly."""

    loop: Loop
    device: FakeDevice
    socket: Path
    _thread: threading.Thread
    _clock: Clock
    #: Engines and connections of this process, which are closed at the end of the test.
    users: ExitStack = field(default_factory=ExitStack)

    def open(self) -> Greeted:
        greeted = greet(connect(self.socket))
        return replace(greeted, blackbox=BlackBoxReader(self.socket.parent))

    def connect(self) -> RuntimeConnection:
        """Return a stub's connection, which is closed at the end of the test."""
        lane = RuntimeConnection(self.open())
        self.users.callback(lane.close)
        return lane

    def request_model(self, **body: object) -> Greeted:
        """Send a registration on a connection, which is closed at the end of the test. The caller reads the answer."""
        greeted = self.open()
        self.users.callback(greeted.sock.close)
        send(greeted.sock, pack_json(Kind.REGISTER, body))
        return greeted

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def pass_time(self, seconds: float) -> None:
        """Advance the runtime's clock."""
        self._clock.passed += seconds
        self.loop._inbox.post(lambda: None)  # The loop looks at its clock.

    def stop(self) -> None:
        self.loop.stop()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


def double(inputs: Sequence[Array], weights: Sequence[Array]) -> list[Array]:
    """Compute y = 2 x + w, as the models of this folder do."""
    return [2 * inputs[0] + weights[0]]


StartRuntime = Callable[..., Runtime]


@pytest.fixture
def start_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StartRuntime]:
    """Yield a function that starts a runtime at the socket that `rsrv.wire.socket` finds.

    All runtimes are stopped at the end.
    """
    started: list[Runtime] = []
    monkeypatch.setattr("rsrv.wire.socket.runtime_directory", lambda server_pid, gpu: tmp_path)
    # Shared memory that a runtime leaves behind is removed with the test's folder.
    monkeypatch.setattr("rsrv.runtime.host_memory._SHM", tmp_path)

    def start(
        settings: Settings | None = None,
        *,
        asynchronous: bool = False,
        compute: Compute = double,
        blackbox: BlackBox | None = None,
        inspector: Inspector | None = None,
        devices: int = 1,
        handover: Handover | None = None,
        slept: bool = False,
    ) -> Runtime:
        path = tmp_path / SOCKET
        path.unlink(missing_ok=True)
        listener = listen(path)
        settings = settings or load_settings()
        device, clock = FakeDevice(compute, asynchronous=asynchronous), Clock()
        loop = Loop(
            listener,
            ServerProcess(os.getpid(), devices),
            settings,
            lambda: device,
            blackbox=blackbox,
            inspector=inspector,
            clock=clock,
        )

        if handover is not None:
            loop.inherit(handover, slept=slept)

        def run() -> None:
            loop.run()
            listener.close()

        thread = threading.Thread(target=run)
        runtime = Runtime(loop, device, path, thread, clock)
        thread.start()
        started.append(runtime)
        return runtime

    yield start
    for runtime in started:
        for gate in (runtime.device.gate, runtime.device.uploads, runtime.device.compiles):
            gate.set()
    for runtime in started:
        runtime.users.close()
    for runtime in started:
        if runtime.alive:
            runtime.stop()
    # A runtime's memory and epoll are closed when the garbage collector frees its objects, which may be hundreds of
    # tests later. A process may commonly have 1,024 open files.
    if len(os.listdir("/proc/self/fd")) > 500:
        gc.collect()


@pytest.fixture
def runtime(start_runtime: StartRuntime) -> Runtime:
    return start_runtime()


def build(
    bundle: Bundle,
    device: Device,
    host: HostStore,
    settings: Settings,
    name: str,
    read_signature: SignatureReader = signature_of,
) -> CompiledModel:
    """Read and compile a bundle, as the build thread does."""
    return compile_model(bundle, device, host, settings, name, check_signatures(bundle, read_signature))


def answer_to_register(greeted: Greeted) -> tuple[memoryview, list[int]]:
    """Return the answer to a registration and its descriptors. Frames about the steps of the model's start are skipped."""
    while read_header((answer := greeted.receiver.receive())[0])[0] is Kind.STARTING:
        pass
    return answer


def build_here(path: Path | str, device: Device, settings: Settings | None = None) -> CompiledModel:
    """Return a model that is compiled, loaded and measured without a runtime."""
    bundle = read_bundle(Path(path))
    model = build(bundle, device, HostStore(HostMemory()), settings or load_settings(), bundle.name)
    model.weights = DeviceWeights(device).load(model.host, model.host.read, lambda: False, model.pool)
    model.program = replace(model.program, costs=warm_up(model, device))
    return model


StartEngine = Callable[..., Engine]


@pytest.fixture
def start_engine(runtime: Runtime, doubling: Path) -> StartEngine:
    """Return a function that starts an engine of a stub for `doubling`, connected to `runtime`."""

    def start(hooks: Hooks | None = None, outputs: Sequence[WireTensor] = OUTPUTS) -> Engine:
        engine = engine_of(runtime.open, doubling, hooks=hooks, outputs=outputs)
        runtime.users.callback(engine.close)
        return engine

    return start


@pytest.fixture
def engine(start_engine: StartEngine) -> Engine:
    """Return an engine of a stub for `doubling`."""
    return start_engine()


StartMeta = Callable[..., MetaEngine]


@pytest.fixture
def start_meta(doublings: dict[str, Path], tmp_path: Path) -> Iterator[StartMeta]:
    """Yield a function that starts engines of meta models' stubs.

    At the end, all engines are closed. Then no run, no meta model and no tensor that a run kept may be left.
    """
    with ExitStack() as started:
        runtimes: list[Runtime] = []

        def start(
            runtime: Runtime,
            run: Run,
            calls: Sequence[str] = "ab",
            *,
            name: str = "meta",
            bundles: Mapping[str, Path] | None = None,
            client: str = CLIENT,
            **options: Any,
        ) -> MetaEngine:
            """Start a meta model whose code is `run`. It calls the models `calls` of `doublings`, or of `bundles`."""
            runtimes.append(runtime)
            path = tmp_path / name
            if not path.exists():
                write_meta(path, "def run(inputs, call): ...", calls, client=client)
            called = {callee: (bundles or doublings)[callee] for callee in calls}
            return started.enter_context(meta_engine(runtime, path, called, run=run, **options))

        yield start
        for runtime in runtimes:
            runtime.device.gate.set()
        if any(runtime.alive for runtime in runtimes):
            wait_until(nothing_is_under_way)
    for runtime in runtimes:
        if runtime.alive:
            wait_until(partial(only_others_are_left, runtime))


@pytest.fixture
def long_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for calls and for late answers as long as a busy machine needs: a run gets its late answer, and no call is abandoned."""
    monkeypatch.setattr("rsrv.stub.deferred.DEADLINE_GRACE_S", 1e6)
    for module in ("calls", "direct"):
        monkeypatch.setattr(f"rsrv.stub.{module}.GRACE_NS", 10**15)


@pytest.fixture
def long_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let execute() wait for an answer in place, however long that takes on a busy machine."""
    for module in ("engine", "meta_engine"):
        monkeypatch.setattr(f"rsrv.stub.{module}.MAX_BLOCK_S", PATIENCE_S)


@pytest.fixture
def pass_stub_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return a function that advances the clock by which stubs keep deadlines."""
    real, passed_ns = time.monotonic_ns, [0]
    monkeypatch.setattr(time, "monotonic_ns", lambda: real() + passed_ns[0])

    def advance(seconds: float) -> None:
        passed_ns[0] += int(1e9 * seconds)

    return advance


def only_others_are_left(runtime: Runtime) -> bool:
    """Return whether no meta model and no kept tensor is left, and each other model has its only weight on the device."""
    status = read_status(os.getpid())
    return (
        not status["metas"] and runtime.device.resident == len(status["models"]) and not runtime.device.kept
    )


def nothing_is_under_way() -> bool:
    """Return whether no run waits or executes, and no run keeps tensors on the device."""
    metas = read_status(os.getpid())["metas"].values()
    return not any(meta["waiting"] or meta["running"] or meta["kept_bytes"] for meta in metas)
