"""The stub's session with the runtime: starting it, connecting, registering the model, and reconnecting after a crash."""

import fcntl
import logging
import os
import select
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakSet

from rsrv.placement.batch_shares import ExecutionCosts, Forecast
from rsrv.stub.connection import Cold, Greeted, LaunchError, Rejected, RuntimeConnection, greet
from rsrv.stub.endpoint import WireTensor
from rsrv.wire import paths
from rsrv.wire.blackbox import BlackBoxReader
from rsrv.wire.frames import ProtocolError
from rsrv.wire.layout import Interface
from rsrv.wire.memory import SharedMemoryError
from rsrv.wire.socket import Closed, connect

log = logging.getLogger("rsrv.stub")

T = TypeVar("T")

DOWN = "the model runtime is not reachable; it is being restarted, try again"
UNLOADED = "the model is being unloaded"
_REJECTED = "the model runtime does not load this model again; the server's log says why"

#: seconds between attempts to reach a runtime, doubling; the last limit is for a runtime that rejects the model, because
#: it reads the whole bundle each time
_FIRST_BACKOFF_S, _MAX_BACKOFF_S, _MAX_REJECTED_BACKOFF_S = 0.05, 5.0, 60.0

#: seconds after a failed start of a cold model until a request may start it again, doubling
_FIRST_START_PAUSE_S, _MAX_START_PAUSE_S = 1.0, 60.0

#: attempts of a model's first load while runtimes crash
_FIRST_ATTEMPTS = 10

#: seconds for the runtime's process to listen; it loads jax later
_START_TIMEOUT_S = 60.0
#: seconds between two attempts of all stubs to start the runtime of a further device
_FAILURE_COUNTS_S = 60.0

#: errors of reaching a runtime
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
    #: tensors of clients' requests and answers
    inputs: tuple[WireTensor, ...]
    outputs: tuple[WireTensor, ...]
    #: whether all of these tensors have the batch axis first
    batched: bool
    #: measured seconds of one execution, by variant and compiled size, as in `interface`
    costs: tuple[tuple[float, ...], ...]
    #: on the runtime's board; 0: it has none
    slot: int
    #: whether its requests belong to sequences, whose state is in the runtime
    stateful: bool = False
    #: of a model that generates tokens: its section of REGISTERED
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
    """The model's registration with one runtime, and the connections to it; ends with the runtime."""

    key: str
    #: tensors of clients' requests, by name
    inputs: Mapping[str, WireTensor]
    #: the model, or the callees of a meta model
    models: tuple[Remote, ...]
    #: sections of rsrv.yaml
    settings: dict[str, dict[str, Any]]
    #: for answers inside execute(), used by one thread
    direct: RuntimeConnection
    #: for answers after execute() returned
    deferred: RuntimeConnection
    #: time.monotonic of the registration
    since: float = field(default_factory=time.monotonic)

    def device_free_in_s(self) -> float:
        """Return the seconds until the device has done its work.

        A runtime that hangs or is stopped is expected to need as long again.
        """
        direct, deferred = self.direct, self.deferred
        return max(direct.device_free_in_s(), direct.unnoticed_s(), deferred.unnoticed_s())

    def load_in_s(self, name: str = "") -> float:
        """Return the seconds that loading the weights of these models takes, or of one by name; 0: they are there."""
        slots = [model.slot for model in self.models if model.slot and name in ("", model.name)]
        return self.direct.load_in_s(slots)

    def begins_in_s(self, name: str = "") -> float:
        """Return the seconds until the device could begin with these models, or one by name, with the load of weights."""
        return self.device_free_in_s() + self.load_in_s(name)

    def forecast(self, costs: ExecutionCosts) -> Forecast:
        """Return the device's work as expected. Weights without a cell on the board count as absent."""
        load_s = self.load_in_s()
        warm = not load_s and all(model.slot for model in self.models)
        return Forecast(self.device_free_in_s() + load_s, warm, costs)


class Startable:
    """A model on one device, or on the one that it starts on: started by `start` when it is cold, and requests wait.

    `attachment` is None while no runtime serves it; then `down` is the reason for clients.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self.attachment: Attachment | None = None
        self.down = DOWN
        #: no runtime has the model, and no thread starts it
        self.cold = False
        #: a runtime has had it ready, and it has not fallen back to cold since
        self.started = False
        #: the runtime rejected it at the latest attempt
        self.rejected = False
        #: the latest rejection was for crashes: the model would crash other devices' runtimes, too
        self.dangerous = False
        #: time.monotonic of the latest death of its runtime
        self.lost_at = 0.0
        self._start_pause_s = _FIRST_START_PAUSE_S

    def start(self) -> None:
        """Start a cold model, on a thread; otherwise do nothing. Thread-safe."""
        with self._lock:
            if not self.cold or self._closed.is_set():
                return
            self.cold = self.rejected = False
        self._start_thread("start")

    def _start_thread(self, name: str) -> None:
        """Bring the model up on a thread. If the system has none left, the model is cold, and the next request tries again."""
        try:
            threading.Thread(target=self._bring_up, name=name, daemon=True).start()
        except RuntimeError:
            log.exception("there is no thread to start the model")
            self.cold = True

    def _bring_up(self) -> None:
        raise NotImplementedError

    def _start_failed(self, reason: object) -> None:
        """Refuse requests with the reason for a while; after that, the next one starts the model again."""
        pause, self._start_pause_s = self._start_pause_s, min(2 * self._start_pause_s, _MAX_START_PAUSE_S)
        log.error("the model could not be started; a request starts it again after %.0f s: %s", pause, reason)
        self.down = f"the model could not be started: {reason}"
        self._closed.wait(pause)
        self.cold, self.down = True, DOWN

    def stop(self) -> None:
        """Take no more requests."""
        with self._lock:
            self._closed.set()
            self.attachment = None


class Session(Startable):
    """Keeps a model attached to a runtime. `on_attach` is called with each new attachment, on the thread that made it."""

    def __init__(
        self,
        open_connection: Callable[[], Greeted],
        model: str,
        bundle: str,
        calls: Mapping[str, str] | None = None,
        device: int = 0,
    ) -> None:
        super().__init__()
        self._open = open_connection
        self.device = device
        self.model = model
        self._registration: dict[str, Any] = {"model": model, "bundle": bundle}
        if calls is not None:
            self._registration["calls"] = dict(calls)
        self._connections: WeakSet[RuntimeConnection] = WeakSet()
        self.on_attach: Callable[[Attachment], None] = lambda attachment: None
        #: whether the model is to start here although it is cold
        self.wanted = False
        #: the requests that wait for a runtime, in the form of REGISTER; {}: none
        self.demand: Callable[[], Mapping[str, int]] = dict
        #: the last attachment, which may have ended
        self._latest: Attachment | None = None
        #: the connection whose registration is not answered
        self._registering: RuntimeConnection | None = None
        #: called with the seconds that the model's start takes at least, if the runtime knows and minds them
        self.starting: Callable[[float], object] = lambda seconds: None
        #: called after `attachment` has changed
        self.on_change: Callable[[], object] = lambda: None

    def begin(self) -> Attachment:
        """Attach for the first time. Raises Cold, or one of UNREACHABLE.

        If the runtime crashes meanwhile, perhaps because of another model, the next one is tried. A runtime rejects a
        model that crashes it repeatedly.
        """
        return _outlive(self.attach, self._closed, "before the model was ready")

    def attach(self) -> Attachment:
        """Reach the runtime and register. Raises Cold, or one of UNREACHABLE."""
        direct = self._connect()
        # On other devices a cold model starts only if it is wanted there.
        demand = self.demand() if self.started or self.wanted else {}
        asked = self.wanted or bool(demand)
        try:
            wanted = {**self._registration, "started": self.started, **demand, "asked": asked}
            self._registering = direct
            try:
                body = direct.register(wanted, self.starting)
            finally:
                self._registering = None
            try:
                deferred = self.open_connection(body["key"])
            except Rejected as error:
                # The key was registered a moment ago: this is another runtime.
                raise Closed(f"the runtime that registered the model is gone: {error}") from None
        except BaseException:
            self.starting(0.0)
            direct.close()
            raise
        attachment = Attachment(
            body["key"],
            {wire.name: wire for wire in _wires(body["client"]["inputs"])},
            tuple(Remote.from_json(model) for model in body["models"]),
            body["settings"],
            direct,
            deferred,
        )
        with self._lock:
            if self._closed.is_set():
                direct.close()
                deferred.close()
                raise Closed(UNLOADED)
            # First: once the attachment is visible, execute() may use it.
            self.on_attach(attachment)
            self.attachment, self.started, self.wanted = attachment, True, False
            self.rejected = self.dangerous = False
            self._latest = attachment
            self._start_pause_s = _FIRST_START_PAUSE_S
        self.starting(0.0)
        self.on_change()
        return attachment

    def tell(self, demand: Mapping[str, int]) -> None:
        """Have the runtime that starts the model know which requests wait, in the form of REGISTER."""
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
        """The attachment, if its runtime reads requests."""
        attachment = self.attachment
        return attachment if attachment is not None and attachment.deferred.reads else None

    @property
    def ready(self) -> bool:
        """True if a runtime serves the registration and reads requests, or the model is cold or starts."""
        return self.reading is not None or not self.started

    def lost(self, attachment: Attachment, why: object) -> None:
        """Leave a runtime that is gone, and reconnect on a thread. Thread-safe, and may be called repeatedly.

        If its device sleeps, the model is cold: requests, also those in flight, start it again.
        """
        sleeps = attachment.deferred.device_sleeps
        with self._lock:
            if self.attachment is not attachment:
                return
            self.attachment, self.down, self.lost_at = None, DOWN, time.monotonic()
            self.cold, self.started = sleeps, not sleeps
        self.on_change()
        if not sleeps and not self._closed.is_set():
            log.error("lost the runtime: %s", why)
            self._start_thread("reconnect")

    def fall_back(self, attachment: Attachment) -> None:
        """Leave a runtime in which the model is idle; the next request starts the model again. Thread-safe."""
        with self._lock:
            if self.attachment is not attachment:
                return
            self.attachment, self.cold, self.started = None, True, False
        self.on_change()
        for connection in (attachment.direct, attachment.deferred):
            connection.leave_runtime()
        log.info("the model is cold: the runtime keeps nothing of it until the next request")

    def _bring_up(self) -> None:
        self.wanted = not self.started
        backoff = _FIRST_BACKOFF_S
        while not self._closed.is_set():
            most = _MAX_BACKOFF_S
            try:
                self.attach()
            except Cold:
                self.cold = True
                return
            except Rejected as error:
                self.dangerous = error.dangerous
                self.rejected = True  # last: it has the model start elsewhere
                if not self.started:
                    self._start_failed(error)
                    return
                log.error("the runtime rejects the model: %s", error)
                self.down = error.client or _REJECTED
                most = _MAX_REJECTED_BACKOFF_S
            except UNREACHABLE as error:
                log.error("no runtime yet: %s", error)
                self.down = DOWN
            except Exception:
                # Without a further attempt the model would have no runtime for good.
                log.exception("no runtime yet")
                self.down = DOWN
            else:
                log.info("reconnected to the runtime")
                return
            # A runtime that has rejected the model may have ended since.
            backoff = min(backoff, most)
            self._closed.wait(backoff)
            backoff *= 2

    def abandon(self) -> None:
        """Close the sockets in a process that was forked: the runtime must see the end of its parent."""
        for connection in self._connections:
            connection.abandon()

    def close(self, *, direct: bool = True) -> None:
        """Detach for good. `direct` is False if another thread uses that connection, and will close it."""
        self.stop()
        # Also after a runtime's death: execute(), which closes the old connection when it uses the next one, is over.
        if self._latest is not None:
            self._latest.deferred.close()
            if direct:
                self._latest.direct.close()


def _outlive(attempt: Callable[[], T], closed: threading.Event, when: str) -> T:
    """Return the attempt's result; repeat it if a runtime ends meanwhile. Raises any other error, and that of the last time."""
    backoff = _FIRST_BACKOFF_S
    for _ in range(_FIRST_ATTEMPTS - 1):
        try:
            return attempt()
        except (Closed, ConnectionError) as error:
            if closed.is_set():
                raise
            log.error("the runtime ended %s: %s", when, error)
        closed.wait(backoff)
        backoff = min(2 * backoff, _MAX_BACKOFF_S)
    return attempt()


# --- starting the runtime -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Launcher:
    """Connects to the runtime that belongs to `server_pid` and its device number `device`, and starts it if there is none."""

    server_pid: int
    device: str
    settings: Path
    #: the server's own, and its environment: hooks may change both in this process
    working_directory: Path
    environment: Mapping[str, str]

    def start(self) -> None:
        """Return when a runtime takes connections; if one ends meanwhile, the next one is tried. Raises one of UNREACHABLE."""
        _outlive(self.open, threading.Event(), "as it was reached").sock.close()

    def open(self) -> Greeted:
        """Return a greeted connection. Raises LaunchError, Closed, OSError, ProtocolError."""
        directory = paths.runtime_directory(self.server_pid, self.device)
        # A runtime makes its box before its first greeting.
        return replace(self._open(directory), blackbox=BlackBoxReader(directory))

    def _open(self, directory: Path) -> Greeted:
        if not paths.start_time(self.server_pid):
            # This process outlives its server by a moment: a runtime for it would never end, and leave its directory.
            raise LaunchError("tritonserver is gone")
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

        The attempts for a further device have pauses: a card that another server holds would delay every load. Those for
        device 0 have none, because it may be the only one, and its error would outlive the cause.
        """
        failure = directory / paths.FAILURE
        if self.device != "0" and failure.exists():
            age = time.time() - failure.stat().st_mtime
            if 0 <= age < _FAILURE_COUNTS_S:
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
                raise LaunchError(
                    f"the runtime cannot be started with {python}: {error}. RSRV_RUNTIME_PYTHON must name a "
                    "Python where 'rsrv[serve]' is installed"
                ) from None
            finally:
                os.close(child_end)
            message = _read_startup_message(ready, _START_TIMEOUT_S)
            status = started.wait()  # it has forked the runtime and ended
        finally:
            os.close(ready)
        if not message and status <= 0:
            raise Closed("the runtime was killed while it started; the server's log may say more")
        if not message:
            raise LaunchError(
                f"the runtime did not start with {python}: it ended without a message; the server's log may say more. "
                "RSRV_RUNTIME_PYTHON must name a Python where 'rsrv[serve]' is installed"
            )
        if message != b"ready":
            raise LaunchError(f"the runtime did not start: {message.decode(errors='replace')}")


def server_pid() -> int:
    """Return the pid of the tritonserver that started this process. Raises LaunchError if the server has ended.

    Then the parent of this process is init or a supervisor, and a runtime for that would never end.
    """
    parent = os.getppid()
    # Triton passes its pid in the stub's command line.
    arguments = Path("/proc/self/cmdline").read_bytes().split(b"\0")
    if str(parent).encode() in arguments or _comm(parent) == "tritonserver":
        return parent
    raise LaunchError("tritonserver is gone")


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
    # Inside the stub the interpreter is embedded: sys.executable may be the stub, or nothing.
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
    """Connect to a runtime that was started. If the process that started it died, it may not listen yet."""
    until = time.monotonic() + _START_TIMEOUT_S
    while True:
        try:
            return connect(path)
        except (FileNotFoundError, ConnectionError):
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def _read_startup_message(fd: int, timeout: float) -> bytes:
    """Return the starting process's one short message, or nothing if it died."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return os.read(fd, 4096) if poll.poll(timeout * 1000) else b"it was not ready in time"
