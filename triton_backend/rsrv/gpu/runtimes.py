"""Runtime processes, models of any size for them, and clients that check the answers."""

import os
import random
import select
import shutil
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rsrv.control.v1 import control_pb2 as pb
from rsrv.gpu.report import PartInput
from rsrv.runtime.device import Array
from rsrv.stub.connection import Greeted, RuntimeConnection
from rsrv.stub.session import Launcher
from rsrv.wire import paths
from rsrv.wire.frames import Status, Submission
from rsrv.wire.layout import NUMPY, Interface
from rsrv.wire.socket import connect, read_record
from rsrv_bundle.export import export_bundle
from rsrv_bundle.reader import read_bundle, sha256_of
from rsrv_bundle.writer import document_of, write_manifest, write_weights

#: Maximum number of seconds until an answer.
_ANSWER_S = 120.0
#: Number of elements of the input of the models of `make_models`.
WIDTH = 4
#: Number of models that `make_models` writes at a time.
_WRITERS = 4
_TENSORS = 8
_WEIGHTS = "weights.safetensors"


class Unanswered(Exception):
    """A request was not answered. The message has the runtime's reason."""


@dataclass(frozen=True, slots=True)
class Model:
    """A bundle whose answer is its input plus a constant."""

    name: str
    path: Path
    nbytes: int
    constant: float


def make_models(part_input: PartInput, nbytes: int, names: Sequence[str]) -> list[Model]:
    """Export a model with `nbytes` bytes of weights, and write the other models as copies of it with their own weights.

    The first and the last element of each tensor are small integers, and all other elements are zero. So the answers are exact, and a
    missing, exchanged or truncated tensor changes them.
    """
    params = _params(names[0], nbytes)
    # The exporter runs a module only on its own platform, which is the CPU here.
    export_bundle(
        lambda params, x: {"y": x + sum(_factor(tensor) * params[tensor].sum() for tensor in params)},
        params,
        {"x": np.zeros((1, WIDTH), np.float32)},
        batch_sizes=[1],
        out_dir=part_input.folder / names[0],
        platform="cpu" if part_input.on_cpu else "cuda",
    )
    first = read_bundle(part_input.folder / names[0], verify=False)

    def copy(name: str) -> Model:
        path, params = part_input.folder / name, _params(name, nbytes)
        shutil.copytree(first.path, path, ignore=shutil.ignore_patterns(_WEIGHTS))
        write_weights(path / _WEIGHTS, list(params.items()))
        sums = {**first.manifest.sha256, **sha256_of([path / _WEIGHTS])}
        write_manifest(path / "manifest.yaml", document_of(first.manifest, sums))
        return Model(name, path, nbytes, _constant(params))

    with ThreadPoolExecutor(_WRITERS) as pool:
        return [Model(names[0], first.path, nbytes, _constant(params)), *pool.map(copy, names[1:])]


def _constant(params: Mapping[str, Array]) -> float:
    return sum(_factor(tensor) * float(array[[0, -1]].sum()) for tensor, array in params.items())


def _params(name: str, nbytes: int) -> dict[str, Array]:
    draw = random.Random(name)
    params = {}
    for tensor in range(_TENSORS):
        params[str(tensor)] = array = np.zeros(max(2, nbytes // 4 // _TENSORS), np.float32)
        array[[0, -1]] = draw.randrange(1, 1000), draw.randrange(1, 1000)
    return params


def _factor(tensor: str) -> int:
    return int(tensor) % 7 + 1


@dataclass(frozen=True, slots=True)
class RuntimeProcess:
    """A runtime process, started as a tritonserver starts its runtimes."""

    launcher: Launcher

    def record(self) -> pb.DeviceRecord:
        """Return the record that `rsrv status` shows."""
        record: pb.DeviceRecord = pb.DeviceRecord.FromString(read_record(self.launcher.server_pid))
        return record

    def loads(self) -> int:
        """Return how often weights were loaded so far."""
        return sum(model.loads for model in self.record().models)


@contextmanager
def runtime(part_input: PartInput, name: str, platform: str, **settings: object) -> Iterator[RuntimeProcess]:
    """Run a runtime process on a platform until the block ends. `settings` are keys of the section `runtime`."""
    file = part_input.folder / f"{name}.yaml"
    section = {
        "platform": platform,
        "compilation_cache_dir": str(part_input.folder.parent / "compiled"),
        **settings,
    }
    write_manifest(file, {"control": {"enabled": False}, "runtime": section})
    # A process that sleeps takes the place of tritonserver. Start one for each runtime, because a server has only one runtime
    # for a device.
    server = subprocess.Popen(["sleep", "infinity"])
    launcher = Launcher(server.pid, "0", file, part_input.folder, part_input.environment)
    directory = paths.runtime_directory(server.pid, "0")
    try:
        launcher.open().sock.close()
        yield RuntimeProcess(launcher)
    finally:
        with suppress(OSError), connect(directory / paths.SOCKET) as sock:
            pid, _, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            ended = os.pidfd_open(pid)
            os.kill(pid, signal.SIGKILL)
            # Wait for the runtime's end, because the next runtime needs the device's memory.
            select.select([ended], [], [])
            os.close(ended)
        paths.remove(directory)
        server.kill()
        server.wait()


class ModelClient:
    """One model over a separate connection. Only one thread at a time may use it."""

    def __init__(self, open_connection: Callable[[], Greeted], name: str, path: Path) -> None:
        """Open a connection, register the model, and wait until the model is ready. Raises Rejected."""
        self._connection = RuntimeConnection(open_connection())
        try:
            body = self._connection.register({"model": name, "bundle": str(path)})
        except BaseException:
            self.close()
            raise
        self.name = name
        self.busy = threading.Lock()
        #: Seconds from the latest request to its answer in shared memory.
        self.answered_s = 0.0
        self.interface = Interface.from_json(body["models"][0]["interface"])

    def ask(self, inputs: Sequence[Array], variant: int = 0, rows: int = 1) -> list[Array]:
        """Return copies of the executable's outputs. Types that numpy lacks are returned as their bits. Raises Unanswered."""
        shapes = self.interface.variants[variant]
        places, outputs = shapes.inputs.places[rows], shapes.outputs.places[rows]
        size = places.nbytes
        slab = self._connection.take(size + outputs.nbytes, 1)
        try:
            at, segment = slab.place.offset, slab.place.segment
            for tensor, place, value in zip(shapes.inputs.tensors, places.offsets, inputs, strict=True):
                dtype = NUMPY[tensor.dtype]
                np.ndarray(tensor.shape(rows), dtype, slab.segment, at + place)[...] = value.view(dtype)
            started = time.perf_counter()
            (id,) = self._connection.next_ids(1)
            self._connection.submit(
                [Submission(id, 0, rows, variant, 0, segment, 0, at, at + size, length=shapes.length)]
            )
            (done,) = self._connection.receive(_ANSWER_S)
            self.answered_s = time.perf_counter() - started
            if done.status is not Status.OK:
                raise Unanswered(f"{self.name}: {done.status.name}: {done.text}")
            return [
                np.ndarray(tensor.shape(rows), NUMPY[tensor.dtype], slab.segment, at + size + place).copy()
                for tensor, place in zip(shapes.outputs.tensors, outputs.offsets, strict=True)
            ]
        finally:
            self._connection.release(slab)

    def close(self) -> None:
        self._connection.close()


class Answers:
    """Statistics of the answers of the models of `make_models`: durations, and the number of wrong answers."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.wrong = 0

    def ask(self, client: ModelClient, model: Model) -> float:
        """Send one request. Return the seconds until its answer. Raises Unanswered."""
        x = np.random.default_rng(len(self.seconds)).integers(-100, 100, (1, WIDTH)).astype(np.float32)
        started = time.perf_counter()
        (y,) = client.ask([x])
        took = time.perf_counter() - started
        self.seconds.append(took)
        self.wrong += not np.array_equal(y, x + np.float32(model.constant))
        return took


@contextmanager
def clients(process: RuntimeProcess, models: Sequence[Model]) -> Iterator[list[ModelClient]]:
    """Register these models one after the other, and unload them at the end."""
    with ExitStack() as stack:
        registered = []
        for model in models:
            registered.append(ModelClient(process.launcher.open, model.name, model.path))
            stack.callback(registered[-1].close)
        yield registered


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run `work(number)` on this many threads. Raise the first of their errors."""
    failures: list[Exception] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except Exception as error:  # noqa: BLE001 - raised again below
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def private_bytes(pid: int) -> int:
    """Return the bytes of memory that a process shares with no other process."""
    fields: Mapping[str, str] = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    )
    return 1024 * sum(int(fields[key].split()[0]) for key in ("Private_Clean", "Private_Dirty"))
