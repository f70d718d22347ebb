"""The stub's session with the runtime: starting it, connecting, registering the model, and reconnecting after a crash."""

import fcntl
import logging
import os
import select
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakSet

from rsrv.front.rules import (
    CANNOT_START,
    DID_NOT_START,
    ENDED_SILENTLY,
    FAILURE_COUNTS_S,
    FIRST_ATTEMPTS,
    FIRST_BACKOFF_S,
    LOST,
    MAX_BACKOFF_S,
    NOT_READY,
    START_TIMEOUT_S,
    WAS_KILLED,
)
from rsrv.placement.batch_shares import ExecutionCosts, Forecast
from rsrv.stub.connection import Greeted, LaunchError, Rejected, RuntimeConnection, greet
from rsrv.stub.endpoint import WireTensor
from rsrv.wire import paths
from rsrv.wire.blackbox import BlackBoxReader
from rsrv.wire.frames import ProtocolError, StartProgress
from rsrv.wire.layout import Interface
from rsrv.wire.memory import SharedMemoryError
from rsrv.wire.socket import Closed, connect

log = logging.getLogger(__name__)

T = TypeVar("T")


#: Errors while reaching a runtime.
UNREACHABLE = (
    LaunchError,
    paths.RuntimeDirectoryError,
    ProtocolError,
    SharedMemoryError,
    Rejected,
    Closed,
    OSError,
)


@dataclass(frozen=True, slots=True)
class Remote:
    """A model in the runtime."""

    name: str
    interface: Interface
    #: Tensors of clients' requests and answers.
    inputs: tuple[WireTensor, ...]
    outputs: tuple[WireTensor, ...]
    #: True if all of these tensors have the batch axis first.
    batched: bool
    #: Measured seconds of one execution, by variant and compiled size, as in `interface`.
    costs: tuple[tuple[float, ...], ...]
    #: Slot on the runtime's board, or 0 without one.
    slot: int
    #: True if the model's requests belong to sequences, whose state is in the runtime.
    stateful: bool = False
    #: Section of REGISTERED about generation, for a model that generates tokens.
    generate: Mapping[str, Any] | None = None

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Remote":
        interface = Interface.from_json(value["interface"])
        client = value["client"]
        inputs, outputs = _wires(client["inputs"]), _wires(client["outputs"])
        costs = tuple(tuple(ns / 1e9 for ns in sizes) for sizes in value["costs_ns"])
        return cls(
            value["name"],
            interface,
            inputs,
            outputs,
            value["batched"],
            costs,
            value["slot"],
            value.get("stateful", False),
            value.get("generate"),
        )


def _wires(value: list[Any]) -> tuple[WireTensor, ...]:
    return tuple(WireTensor(name, dtype, tuple(dims)) for name, dtype, dims in value)


@dataclass(frozen=True, slots=True)
class Attachment:
    """The model's registration with one runtime, and the connections to this runtime. It ends with the runtime."""

    key: str
    #: Tensors of clients' requests, by name.
    inputs: Mapping[str, WireTensor]
    #: The model itself, or the callees of a meta model.
    models: tuple[Remote, ...]
    #: Sections of rsrv.yaml.
    settings: dict[str, dict[str, Any]]
    #: Connection for answers inside execute(), used by one thread.
    direct: RuntimeConnection
    #: Connection for answers after execute() returned.
    deferred: RuntimeConnection
    #: time.monotonic of the registration.
    since: float = field(default_factory=time.monotonic)

    def close(self) -> None:
        """Close the connections of a registration that no request used."""
        self.direct.close()
        self.deferred.close()

    def device_free_in_s(self) -> float:
        """Return the seconds until the device has done its work.

        A runtime that has not responded for some time is expected to need as long again.
        """
        direct, deferred = self.direct, self.deferred
        return max(direct.device_free_in_s(), direct.unnoticed_s(), deferred.unnoticed_s())

    def load_in_s(self, name: str = "") -> float:
        """Return the seconds for loading the weights of the model `name`, or of all `models` by default. 0: they are loaded."""
        slots = [model.slot for model in self.models if model.slot and name in ("", model.name)]
        return self.direct.load_in_s(slots)

    def begins_in_s(self, name: str = "") -> float:
        """Return the seconds until the device could execute the model `name`, or all `models` by default, including loads."""
        return self.device_free_in_s() + self.load_in_s(name)

    def forecast(self, costs: ExecutionCosts) -> Forecast:
        """Return the device's expected work. Weights without a slot on the board count as not loaded."""
        load_s = self.load_in_s()
        warm = not load_s and all(model.slot for model in self.models)
        return Forecast(self.device_free_in_s() + load_s, warm, costs)


class Session:
    """The stub's access to one device's runtime. It makes attempts to register the model, and has the current registration."""

    def __init__(
        self,
        open_connection: Callable[[], Greeted],
        model: str,
        bundle: str,
        calls: Mapping[str, str] | None = None,
        device: int = 0,
    ) -> None:
        self._open = open_connection
        self.device = device
        self.model = model
        self._registration: dict[str, Any] = {"model": model, "bundle": bundle}
        if calls is not None:
            self._registration["calls"] = dict(calls)
        self._connections: WeakSet[RuntimeConnection] = WeakSet()
        #: The registration that requests use, or None if no runtime serves the model here. The front's thread sets it. When the
        #: model or the process ends, other threads also set it to None.
        self.attachment: Attachment | None = None
        #: The requests that wait for a runtime, in the form of REGISTER.
        self._demand: Mapping[str, int] = {}
        #: The latest registration, which may have ended.
        self._latest: Attachment | None = None
        #: The connection on which the runtime has not answered the registration yet.
        self._registering: RuntimeConnection | None = None

    def attach(
        self, on_step: Callable[[StartProgress], object], *, started: bool = False, asked: bool = False
    ) -> Attachment:
        """Make one attempt to reach the runtime and to register the model, however long compiling takes.

        Args:
            on_step: Called with each step of the model's start.
            started: True if the model was ready here before.
            asked: True if the model shall start even if it may be cold.

        Raises Cold, or one of UNREACHABLE.
        """
        direct = self._connect()
        try:
            demand = self._demand if asked else {}
            self._registering = direct
            try:
                body = direct.register(
                    {**self._registration, "started": started, **demand, "asked": asked}, on_step
                )
            finally:
                self._registering = None
            try:
                deferred = self.open_connection(body["key"])
            except Rejected as error:
                # The key was registered a moment ago. So this connection is to another runtime, which does not know the key.
                raise Closed(f"the runtime that registered the model has ended: {error}") from None
        except BaseException:
            direct.close()
            raise
        return Attachment(
            body["key"],
            {wire.name: wire for wire in _wires(body["client"]["inputs"])},
            tuple(Remote.from_json(model) for model in body["models"]),
            body["settings"],
            direct,
            deferred,
        )

    def publish(self, attachment: Attachment) -> None:
        """Let requests use a registration."""
        self.attachment = self._latest = attachment

    def tell(self, demand: Mapping[str, int]) -> None:
        """Report the waiting requests to the runtime that starts the model, in the form of REGISTER."""
        self._demand = demand
        connection = self._registering
        if connection is not None:
            connection.tell_demand(demand)

    def open_connection(self, key: str) -> RuntimeConnection:
        """Open a further connection for the registration `key`. Raises one of UNREACHABLE."""
        connection = self._connect()
        try:
            connection.register({"key": key})
        except BaseException:
            connection.close()
            raise
        return connection

    def _connect(self) -> RuntimeConnection:
        connection = RuntimeConnection(self._open())
        self._connections.add(connection)
        return connection

    @property
    def reading(self) -> Attachment | None:
        """The attachment, or None if its runtime does not read requests."""
        attachment = self.attachment
        return attachment if attachment is not None and attachment.deferred.reads else None

    def abandon(self) -> None:
        """Close the sockets. A forked process calls this, so that the runtime can see the end of its parent."""
        for connection in self._connections:
            connection.abandon()

    def close(self, *, direct: bool = True) -> None:
        """Disconnect permanently. `direct` is False if another thread uses the direct connection, and will close it."""
        self.attachment = None
        # Close the connections of the latest registration even if its runtime has died. Usually, execute() closes an old
        # connection when it uses the next one, but there are no more calls of execute().
        if self._latest is not None:
            self._latest.deferred.close()
            if direct:
                self._latest.direct.close()


# --- starting the runtime -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Launcher:
    """Connects to the runtime of the server `server_pid` for its device `device`. If there is no runtime, starts one."""

    server_pid: int
    device: str
    settings: Path
    #: The server's own working directory. Hooks may change the working directory of this process.
    working_directory: Path
    #: The server's own environment variables. Hooks may change the environment of this process.
    environment: Mapping[str, str]

    def start(self) -> None:
        """Return when a runtime accepts connections. If a runtime ends before that, try another. Raises one of UNREACHABLE."""
        backoff = FIRST_BACKOFF_S
        for _ in range(FIRST_ATTEMPTS - 1):
            try:
                self.open().sock.close()
                return
            except (Closed, ConnectionError) as error:
                log.error(LOST, error)
            time.sleep(backoff)
            backoff = min(2 * backoff, MAX_BACKOFF_S)
        self.open().sock.close()

    def open(self) -> Greeted:
        """Return a greeted connection. Raises LaunchError, Closed, OSError, ProtocolError."""
        directory = paths.runtime_directory(self.server_pid, self.device)
        # The black box exists, because a runtime makes it before its first greeting.
        return replace(self._open(directory), blackbox=BlackBoxReader(directory))

    def _open(self, directory: Path) -> Greeted:
        if not paths.start_time(self.server_pid):
            # This process outlives its server for a moment. Start no runtime: it would never end by itself, and would leave its
            # directory.
            raise LaunchError("tritonserver has ended")
        path = directory / paths.SOCKET
        try:
            return greet(connect(path))
        except (FileNotFoundError, ConnectionError):
            pass
        paths.make_private(directory.parent)
        paths.make_private(directory)
        # The process that holds the lock starts the runtime; the others wait here and find it listening.
        with _locked(directory / paths.LOCK):
            try:
                return greet(connect(path))
            except (FileNotFoundError, ConnectionError):
                self._start_unless_failed(directory)
            return greet(_connect_soon(path))

    def _start_unless_failed(self, directory: Path) -> None:
        """Start the runtime, or raise the LaunchError of the latest attempt.

        After a failed attempt for another device than 0, there is no further attempt for some time. Without this pause, a card
        that another server uses would delay every load. There is no pause for device 0, because it may be the only device.
        Then the repeated error would outlive its cause.
        """
        failure = directory / paths.FAILURE
        if self.device != "0" and failure.exists():
            age = time.time() - failure.stat().st_mtime
            if 0 <= age < FAILURE_COUNTS_S:
                raise LaunchError(failure.read_text())
        try:
            self._start(directory)
        except LaunchError as error:
            paths.write_whole(failure, str(error))
            raise
        failure.unlink(missing_ok=True)

    def _start(self, directory: Path) -> None:
        python = interpreter()
        ready, child_end = os.pipe2(os.O_CLOEXEC)
        command = paths.runtime_command(
            python, directory, self.server_pid, self.settings, self.device, child_end
        )
        try:
            try:
                started = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    pass_fds=(child_end,),
                    cwd=self.working_directory,
                    env=self.environment,
                )
            except OSError as error:
                raise LaunchError(CANNOT_START % (python, error)) from None
            finally:
                os.close(child_end)
            message = _read_startup_message(ready, START_TIMEOUT_S)
            status = started.wait()  # The process has forked the runtime and ended.
        finally:
            os.close(ready)
        if not message and status <= 0:
            raise Closed(WAS_KILLED)
        if not message:
            raise LaunchError(ENDED_SILENTLY % python)
        if message != b"ready":
            raise LaunchError(DID_NOT_START % message.decode(errors="replace"))


def server_pid() -> int:
    """Return the pid of the tritonserver that started this process. Raises LaunchError if the server has ended.

    After the server's end, the parent of this process is init or a supervisor, and a runtime for that process would never end.
    """
    parent = os.getppid()
    # Triton passes its pid in the stub's command line.
    arguments = Path("/proc/self/cmdline").read_bytes().split(b"\0")
    if str(parent).encode() in arguments or _comm(parent) == "tritonserver":
        return parent
    raise LaunchError("tritonserver has ended")


def _comm(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def interpreter() -> str:
    """Return RSRV_RUNTIME_PYTHON, or the Python that this stub runs on."""
    chosen = os.environ.get("RSRV_RUNTIME_PYTHON")
    if chosen:
        return chosen
    # The stub embeds the interpreter, so sys.executable may be the stub, or nothing.
    own = Path(sys.prefix) / "bin" / "python3"
    return str(own) if own.exists() else shutil.which("python3") or "python3"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _connect_soon(path: Path) -> socket.socket:
    """Connect to a runtime that was started. Retry, because it may not listen yet if the process that started it has died."""
    until = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            return connect(path)
        except (FileNotFoundError, ConnectionError):
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def _read_startup_message(fd: int, timeout: float) -> bytes:
    """Return the one short message of the process that starts the runtime. It is empty if that process died."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return os.read(fd, 4096) if poll.poll(timeout * 1000) else NOT_READY.encode()
