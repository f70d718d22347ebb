"""The stub's tie to the runtime: its connections, the model's registration, and coming back after the runtime died."""

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from rsrv.stub.connection import Rejected, RuntimeConnection
from rsrv.stub.endpoint import WireTensor
from rsrv.stub.launch import Greeted, LaunchError
from rsrv.wire.frames import ProtocolError
from rsrv.wire.layout import Interface
from rsrv.wire.memory import SharedMemoryError
from rsrv.wire.paths import RuntimeDirectoryError
from rsrv.wire.socket import Closed

log = logging.getLogger("rsrv.stub")

DOWN = "the model runtime is not reachable; it is being restarted, try again"
UNLOADED = "the model is being unloaded"
_REFUSED = "the model runtime does not load this model again; the server's log says why"

#: seconds between attempts to reach a runtime, doubling; the last one if it answers, and refuses the model: each
#: attempt has it read the whole bundle
_FIRST_PAUSE, _LONGEST_PAUSE, _LONGEST_REFUSED = 0.05, 5.0, 60.0

#: deaths of runtimes that a model's first load goes through
_FIRST_ATTEMPTS = 10

#: what reaching a runtime may raise
UNREACHABLE = (
    LaunchError,
    RuntimeDirectoryError,
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
    #: what clients send and get
    inputs: tuple[WireTensor, ...]
    outputs: tuple[WireTensor, ...]
    #: whether all of these have their rows first
    batched: bool
    #: the shortest execution, as measured
    cost_ns: int

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Remote":
        interface = Interface.from_json(value["interface"])
        client = value["client"]
        inputs, outputs = _wires(client["inputs"]), _wires(client["outputs"])
        return cls(value["name"], interface, inputs, outputs, value["batched"], value["cost_ns"])


def _wires(value: list[Any]) -> tuple[WireTensor, ...]:
    return tuple(WireTensor(name, dtype, tuple(dims)) for name, dtype, dims in value)


@dataclass(frozen=True, slots=True)
class Link:
    """One life of the runtime, as this stub sees it."""

    key: str
    #: what clients send, by name
    inputs: Mapping[str, WireTensor]
    #: the model, or those that a meta model calls
    models: tuple[Remote, ...]
    #: sections of rsrv.yaml
    settings: dict[str, dict[str, Any]]
    #: for what is done inside execute(), used by one thread
    direct: RuntimeConnection
    #: for answers after execute() returned
    deferred: RuntimeConnection


class Session:
    """`link` is None while there is no runtime, and `down` says why, for clients. `on_link` is called with each new one, on the thread that made it."""

    def __init__(
        self,
        open_connection: Callable[[], Greeted],
        model: str,
        bundle: str,
        calls: Mapping[str, str] | None = None,
    ) -> None:
        self._open = open_connection
        self.model = model
        self._wanted: dict[str, Any] = {"model": model, "bundle": bundle}
        if calls is not None:
            self._wanted["calls"] = dict(calls)
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._connections: WeakSet[RuntimeConnection] = WeakSet()
        self.link: Link | None = None
        self.down = DOWN
        self.on_link: Callable[[Link], None] = lambda link: None
        #: called after `link` has become another, or None
        self.on_change: Callable[[], object] = lambda: None

    def begin(self) -> Link:
        """`establish` for the first time. Raises one of UNREACHABLE.

        That the runtime dies meanwhile, be it of another model, is no reason to give up: the next one says no to a
        model that does that every time.
        """
        pause = _FIRST_PAUSE
        for _ in range(_FIRST_ATTEMPTS - 1):
            try:
                return self.establish()
            except (Closed, ConnectionError) as error:
                if self._closed.is_set():
                    raise
                log.error("the runtime ended before the model was there: %s", error)
            self._closed.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return self.establish()

    def establish(self) -> Link:
        """Reach the runtime and register. Raises one of UNREACHABLE."""
        direct = self._connect()
        try:
            body = direct.register(self._wanted)
            try:
                deferred = self.open_connection(body["key"])
            except Rejected as error:
                # It was there a moment ago: this is another runtime.
                raise Closed(f"the runtime that had it is gone: {error}") from None
        except BaseException:
            direct.close()
            raise
        link = Link(
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
            # First: whoever sees the link may already use it.
            self.on_link(link)
            self.link = link
        self.on_change()
        return link

    def open_connection(self, key: str) -> RuntimeConnection:
        """A further connection for what is registered by that key. Raises one of UNREACHABLE."""
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
    def ready(self) -> bool:
        """Whether there is a runtime that serves what was registered, and takes requests."""
        link = self.link
        return link is not None and link.deferred.reads

    def lost(self, link: Link) -> None:
        """The runtime behind `link` is gone: find or start another, on a thread. Any thread may say so, repeatedly."""
        with self._lock:
            if self.link is not link:
                return
            self.link, self.down = None, DOWN
        self.on_change()
        if not self._closed.is_set():
            log.error("the runtime is gone; reconnecting")
            threading.Thread(target=self._reconnect, name="reconnect", daemon=True).start()

    def _reconnect(self) -> None:
        pause = _FIRST_PAUSE
        while not self._closed.is_set():
            longest = _LONGEST_PAUSE
            try:
                self.establish()
            except Rejected as error:
                log.error("the runtime refuses the model: %s", error)
                self.down = error.client or _REFUSED
                longest = _LONGEST_REFUSED
            except UNREACHABLE as error:
                log.error("no runtime yet: %s", error)
                self.down = DOWN
            except Exception:
                # Whatever it is, giving up would leave the model without a runtime for ever.
                log.exception("no runtime yet")
                self.down = DOWN
            else:
                log.info("reconnected to the runtime")
                return
            self._closed.wait(pause)
            pause = min(2 * pause, longest)

    def stop(self) -> Link | None:
        """Take no more requests; returns the link that there was."""
        with self._lock:
            self._closed.set()
            link, self.link = self.link, None
        return link

    def abandon(self) -> None:
        """In a process that was forked: let go of the connections, as the runtime must see the end of its parent."""
        for connection in self._connections:
            connection.abandon()

    def close(self, *, direct: bool = True) -> None:
        """`direct`: that connection, too; whoever has lent it to a thread closes it when that is done with it."""
        link = self.stop()
        if link is not None:
            link.deferred.close()
            if direct:
                link.direct.close()
