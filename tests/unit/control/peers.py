"""A fake runtime on a real socket and on the test's own event loop, with answers that a test sets."""

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc

from rsrv.control.bundle_states import BundleFailure
from rsrv.control.card_memory import Cards
from rsrv.control.diagnosis import Diagnosis
from rsrv.control.grpc_server import listen_locally
from rsrv.control.health import Health
from rsrv.control.live import Live
from rsrv.control.metrics import Metrics
from rsrv.control.placing import Placing
from rsrv.control.prewarming import Prewarming
from rsrv.control.reconciler import ReloadError
from rsrv.control.records import RuntimeRecords
from rsrv.control.runtime_link import LinkTiming, RuntimeLink
from rsrv.control.runtime_state import ModelVersion
from rsrv.control.runtimes import Runtimes
from rsrv.control.service import ControlledServer, ControlService, Monitoring
from rsrv.control.settings_file import SettingsFile
from rsrv.control.v1 import control_pb2 as pb
from rsrv.control.v1 import control_pb2_grpc
from rsrv.desired import changed, document_of
from rsrv.histogram import Histogram
from rsrv.settings import Shares, load_settings
from rsrv.wire.frames import MAGIC, PROTOCOL_VERSION, Kind, pack_json, read_header, unpack_json
from rsrv.wire.memory import Board, create_document, read_document
from rsrv.wire.socket import Closed, Receiver, listen, send


async def until(view: Runtimes, condition: Callable[[], bool]) -> None:
    """Wait until the condition is true. It is checked at the start and after each change of the view."""
    while True:
        seen = view.changes
        if condition():
            return
        await view.wait_change(seen)


def slow_request(at: float, seconds: float) -> dict[str, Any]:
    """Return a request that ended, as a runtime reports it."""
    return {
        "number": "3.17",
        "key": "a@1",
        "rows": 3,
        "call": False,
        "deadline_s": None,
        "at": at,
        "seconds": seconds,
        "paused_s": 0.0,
        "weights_s": 0.2,
        "peers_s": 0.0,
        "others_s": seconds - 0.202,
        "executing_s": 0.002,
        "outcome": "answered",
        "behind": ["b"],
        "evicted": {"at": 0.5, "what": "weights absent", "why": "room", "model": "b", "bytes": 10},
        "batch": (2, 5, 8),
    }


@contextmanager
def impatient(link: RuntimeLink) -> Iterator[None]:
    """In the block, the link counts its runtime as down after 50 ms without an answer. For tests that stop the runtime."""
    patient = link._timing
    link._timing = replace(patient, silence_s=0.05)
    yield
    link._timing = patient


async def no_queues() -> Mapping[str, tuple[int, float]]:
    """Answer as a Triton with no waiting requests."""
    return {}


def entry(name: str, **differs: Any) -> ModelVersion:
    """Return the entry of a ready model."""
    common: dict[str, Any] = {
        "name": name,
        "kind": "model",
        "digest": "0123456789abcdef" * 4,
        "state": "ready",
        "error": None,
        "residency": "system",
        "weights": "resident",
        "stubs": [100],
        "models": [],
        "paused": None,
    }
    return ModelVersion(**{**common, **differs})  # type: ignore[typeddict-item]


#: Sums over all generations of a model.
GENERATED = {"answers": 2, "tokens_in": 22, "tokens_out": 80, "first_token_s": 0.006, "token_s": 0.156}


def model_record(name: str = "a", **differs: Any) -> pb.ModelRecord:
    """Return the record of a model."""
    common: dict[str, Any] = {
        "residency": pb.RESIDENCY_SYSTEM,
        "weights": pb.WEIGHTS_RESIDENT,
        "weights_state": "evicting",
        "queued": 1,
        "executing": 2,
        "outcomes": {"answered": 7, "refused": 1, "expired": 0, "shed": 0, "cancelled": 0, "failed": 0},
        "answered": 7,
        "errors": 1,
        "dispatches": 4,
        "useful_rows": 30,
        "padded_rows": 2,
        "device_seconds": 0.25,
        "weight_bytes": 2000,
        "device_bytes": 1000,
        "misses": 3,
        "loads": 2,
        "evictions": {"room": 1},
        "load_seconds": 0.125,
        "sequences": {"waiting": 0, "idle": 3, "stepping": 1, "stored": 0},
        "generations": 1,
        "generated": GENERATED,
        "task": "text-classification",
        "executables": [
            {"size": 1, "cost_s": 0.001},
            {
                "size": 8,
                "count": 4,
                "cost_s": 0.002,
                "precision": {"f32": 5, "pinned": 4, "ungovernable": {"cholesky": 1}},
            },
            {"size": 16, "cost_s": 0.003},
        ],
    }
    return pb.ModelRecord(name=name, **{**common, **differs})


def records(*models: pb.ModelRecord, **device: Any) -> RuntimeRecords:
    """Return the records of a runtime with these models."""
    shared = device.pop("shared", ())
    return RuntimeRecords(pb.DeviceRecord(**device), {model.name: model for model in models}, shared)


def trimmed(histogram: Histogram) -> pb.Histogram:
    """Convert a histogram to the form that records use."""
    first, counts = histogram.trimmed()
    return pb.Histogram(sum=histogram.sum, first=first, counts=counts)


class FakeRuntime:
    """A fake runtime that listens at `path` until `die` is called.

    `commands` has the received commands, except pings and commands with a whole desired document. Changes of the document are
    included. `document` is the desired document after all commands. `answers` returns the reply to a command, or None
    for no reply.
    """

    def __init__(self, path: Path, instance: str = "11" * 8) -> None:
        self._loop = asyncio.get_running_loop()
        self._path = path
        self.instance = instance
        self.pid = 4711
        self.revision = 5
        self.entries: dict[str, ModelVersion] = {}
        #: Records of models and meta models, by name.
        self.models: dict[str, pb.ModelRecord] = {}
        #: The other parts of the device's record.
        self.record = pb.DeviceRecord(
            memory={
                "name": "cpu",
                "budget_bytes": 5000,
                "logical_bytes": 1000,
                "physical_bytes": 1000,
                "held_bytes": 1000,
            },
            host={"logical_bytes": 2000, "physical_bytes": 2000, "tensors": 3},
            numerics=pb.NUMERICS_AUTO,
            compiled=3,
            from_cache=4,
            uptime_s=12.5,
        )
        #: Positions from which the control process asked for records.
        self.asked: list[int] = []
        self.commands: list[dict[str, Any]] = []
        self.document: Any = document_of(load_settings())
        #: Refusal of the next document, or None. The runtime does not follow a document that it refuses.
        self.refuses_next: dict[str, Any] | None = None
        #: The control process and the revision that the runtime follows.
        self.follows: tuple[str, int] = ("", 0)
        self.answers: Callable[[dict[str, Any]], dict[str, Any] | None] = lambda command: {}
        self._came = asyncio.Event()
        self._silent = False
        self._kept: list[tuple[socket.socket, bytes]] = []
        self._watchers: list[socket.socket] = []
        self._sockets: list[socket.socket] = []
        self._board = Board()
        self._listener = listen(path)
        self._alive = True
        self._loop.add_reader(self._listener, self._accept)

    def die(self) -> None:
        """Close all connections and the listener. A second call does nothing."""
        if not self._alive:
            return
        self._alive = False
        for sock in (self._listener, *self._sockets):
            self._loop.remove_reader(sock)
            sock.close()
        self._sockets.clear()
        self._path.unlink(missing_ok=True)
        os.close(self._board.fd)

    def stop(self) -> None:
        """Stop reading, as a process does after SIGSTOP."""
        self._silent = True

    def go_on(self) -> None:
        """Read again, as a process does after SIGCONT."""
        self._silent = False
        frames, self._kept = self._kept, []
        for sock, frame in frames:
            self._take(sock, frame)

    def change(self, key: str, entry: ModelVersion | None) -> None:
        self.revision += 1
        if entry is None:
            del self.entries[key]
        else:
            self.entries[key] = entry
        for watcher in self._watchers:
            send(watcher, pack_json(Kind.STATE, {"revision": self.revision, "key": key, "entry": entry}))

    def say(self, kind: Kind, value: dict[str, Any]) -> None:
        """Send any frame to all watchers."""
        for watcher in self._watchers:
            send(watcher, pack_json(kind, value))

    async def came(self, condition: Callable[[], bool]) -> None:
        """Wait until the received commands make the condition true."""
        while not condition():
            self._came.clear()
            await self._came.wait()

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        sock.setblocking(False)
        self._sockets.append(sock)
        receiver = Receiver(sock)
        self._loop.add_reader(sock, lambda: self._readable(sock, receiver))

    def _readable(self, sock: socket.socket, receiver: Receiver) -> None:
        try:
            frame, fds = receiver.receive()
        except Closed:
            self._loop.remove_reader(sock)
            self._sockets.remove(sock)
            if sock in self._watchers:
                self._watchers.remove(sock)
            sock.close()
            return
        whole = bytes(frame)
        for fd in fds:
            whole = whole[:8] + json.dumps(read_document(fd)).encode()
            os.close(fd)
        if self._silent:
            self._kept.append((sock, whole))
        else:
            self._take(sock, whole)

    def _take(self, sock: socket.socket, frame: bytes) -> None:
        kind, _ = read_header(frame)
        body = unpack_json(frame)
        match kind:
            case Kind.HELLO:
                greeting = {"magic": MAGIC, "version": PROTOCOL_VERSION, "pid": self.pid, "devices": 1}
                send(sock, pack_json(Kind.WELCOME, greeting), (self._board.fd,))
            case Kind.WATCH:
                self._watchers.append(sock)
                self._document(
                    sock,
                    Kind.STATE,
                    {
                        "instance": self.instance,
                        "revision": self.revision,
                        "entries": self.entries,
                    },
                )
            case Kind.STATUS:
                self.asked.append(body["since"])
                self._document(sock, Kind.STATUS_REPLY, self.status(body["since"]).SerializeToString())
            case Kind.COMMAND if body["command"] == "ping":
                reply = {"instance": self.instance, "revision": self.revision}
                send(sock, pack_json(Kind.COMMANDED, reply))
            case Kind.COMMAND if body["command"] == "follow":
                refusal, self.refuses_next = self.refuses_next, None
                send(sock, pack_json(Kind.COMMANDED, refusal or self._follow(body)))
            case Kind.COMMAND:
                self.commands.append(body)
                answer = self.answers(body)
                if answer is not None:
                    send(sock, pack_json(Kind.COMMANDED, answer))
        self._came.set()

    def _follow(self, body: dict[str, Any]) -> dict[str, Any]:
        if body["since"] is None:
            self.document = body["document"]
            self.follows = body["instance"], body["revision"]
        elif self.follows == (body["instance"], body["since"]):
            self.document = changed(self.document, body["document"])
            self.commands.append({"command": "follow", **body["document"]})
            self.follows = body["instance"], body["revision"]
        return {"instance": self.follows[0], "revision": self.follows[1]}

    def wants(self, model: str) -> dict[str, Any]:
        """Return the fields of a model in the desired document. They are empty if the document does not name the model."""
        fields: dict[str, Any] = self.document["models"].get(model, {})
        return fields

    def status(self, since: int = 0) -> pb.DeviceRecord:
        """Return the record. It always has all models, whatever `since` is."""
        record = pb.DeviceRecord(
            instance=self.instance,
            pid=self.pid,
            next=1,
            connections=len(self._sockets),
            depth=self.document["scheduler"]["depth"] or 2,
            models=self.models.values(),
        )
        record.MergeFrom(self.record)
        return record

    def _document(self, sock: socket.socket, kind: Kind, value: dict[str, Any] | bytes) -> None:
        fd = create_document(value)
        try:
            send(sock, pack_json(kind, {}), (fd,))
        finally:
            os.close(fd)


@asynccontextmanager
async def linked(*directories: Path, settings: str = "", **more: Any) -> AsyncIterator[Runtimes]:
    """Run links that ping often. They wait long for an answer, unless a test makes a link `impatient`."""
    timing = LinkTiming(ping_s=0.01, silence_s=10.0, pause_s=0.01)
    runtimes = Runtimes(directories, load_settings(settings), timing, **more)
    running = asyncio.create_task(runtimes.run())
    try:
        yield runtimes
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


class FakeLifecycle:
    """Records reloads. If `refusals` has an error for the model, a reload raises this error."""

    def __init__(self) -> None:
        self.failures: dict[str, BundleFailure] = {}
        self.process_ends: dict[str, int] = {}
        self.load_threads = 4
        self.barred = ""
        self.reached = True
        self.loading: set[str] = set()
        self.unwanted: set[str] = set()
        self.reloaded: list[str] = []
        self.refusals: dict[str, ReloadError] = {}
        self.asked = asyncio.Event()
        self.aliases: Mapping[str, Shares] = {}

    @property
    def reasons(self) -> dict[str, str]:
        return {name: failure.text for name, failure in self.failures.items()}

    def bundle_state(self, name: str) -> str:
        return "served"

    def follow_aliases(self, aliases: Mapping[str, Shares]) -> None:
        self.aliases = aliases

    async def change_alias(self, name: str, shares: Shares | None) -> None:
        if name in self.refusals:
            raise self.refusals[name]
        self.aliases = {
            alias: targets for alias, targets in {**self.aliases, name: shares}.items() if targets
        }

    async def reload(self, name: str) -> None:
        self.asked.set()
        if name in self.refusals:
            raise self.refusals[name]
        self.reloaded.append(name)


@dataclass
class Served:
    """The services of a server with fake runtimes, with the interfaces that clients and the control process use."""

    runtime: FakeRuntime
    #: The runtimes of all devices. The first one is `runtime`.
    all: list[FakeRuntime]
    runtimes: Runtimes
    link: RuntimeLink
    lifecycle: FakeLifecycle
    repository: Path
    service: ControlService
    live: Live
    placing: Placing
    health: Health
    socket: Path
    control: Any
    health_stub: Any


@asynccontextmanager
async def served(
    tmp_path: Path,
    *,
    models: Iterable[str] = (),
    settings: str = "",
    decides: bool = True,
    devices: int = 1,
) -> AsyncIterator[Served]:
    """Serve on a Unix socket with a repository of these models. The runtimes of all devices are up, and have the models ready."""
    repository = tmp_path / "repository"
    repository.mkdir()
    folders = [tmp_path, *(tmp_path / f"device{number}" for number in range(1, devices))]
    fakes = []
    for number, folder in enumerate(folders, 1):
        folder.mkdir(exist_ok=True)
        fakes.append(FakeRuntime(folder / "runtime.sock", instance=f"{number}{number}" * 8))
    for name in models:
        add_model(repository, name)
        for fake in fakes:
            fake.entries[f"{name}@1"] = entry(name)
            fake.models[name] = model_record(name)
    lifecycle: Any = FakeLifecycle()
    async with linked(*folders, settings=settings) as runtimes:
        link = runtimes.links[0]
        cards = Cards(["cpu"] * len(runtimes.links))
        health = Health(runtimes, repository, lifecycle, decides=decides)
        parsed = load_settings(settings or "")
        placing = Placing(runtimes, parsed, tmp_path / "placement")
        file = SettingsFile(repository / "rsrv.yaml", parsed, len(runtimes.links))
        diagnosis = Diagnosis(runtimes, file, lifecycle, health, {}, no_queues)
        live = Live(runtimes, cards, {}, lifecycle, diagnosis, every=0.1)
        service = ControlService(
            ControlledServer(os.getpid(), file, Prewarming(file, runtimes)),
            runtimes,
            lifecycle,
            placing,
            Monitoring(Metrics(runtimes, lifecycle, diagnosis, {}), live, cards, diagnosis),
            clock=lambda: 0.0,
        )
        noticing = asyncio.create_task(health.run())
        living = asyncio.create_task(live.run())
        server = await listen_locally(tmp_path / "control.sock", service, health)
        try:
            async with grpc.aio.insecure_channel(f"unix:{tmp_path}/control.sock") as channel:
                await until(runtimes, lambda: len(runtimes.live) == devices)
                yield Served(
                    fakes[0],
                    fakes,
                    runtimes,
                    link,
                    lifecycle,
                    repository,
                    service,
                    live,
                    placing,
                    health,
                    tmp_path / "control.sock",
                    control_pb2_grpc.ControlStub(channel),
                    health_pb2_grpc.HealthStub(channel),
                )
        finally:
            noticing.cancel()
            living.cancel()
            await server.stop(0)
            for fake in fakes:
                fake.die()


def add_model(repository: Path, name: str) -> None:
    """Add a model to the repository, with all that the control process reads of it."""
    (repository / name / "1" / "bundle").mkdir(parents=True)
