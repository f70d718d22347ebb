"""The models of a runtime: read, built, joined, left. Its state belongs to the loop; the work is done on a thread."""

import gc
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rsrv.runtime.connection import Connection
from rsrv.runtime.device import CacheCounts, Device, Weights
from rsrv.runtime.heap import give_back
from rsrv.runtime.models import Model, build, identify, model_key, wire_ranks
from rsrv.runtime.scheduler import events as ev
from rsrv.runtime.scheduler.scheduler import Scheduler
from rsrv.runtime.transport import Transport
from rsrv.runtime.workers import Inbox, Worker
from rsrv.settings import Settings
from rsrv.wire.frames import Kind, ProtocolError, pack_json
from rsrv_bundle import Bundle, BundleError

log = logging.getLogger("rsrv.registry")


@dataclass(slots=True)
class _Entry:
    """A model by its key: being built (no `model` yet) or loaded; with the connections that want it."""

    name: str
    model: Model | None = None
    connections: dict[int, Connection] = field(default_factory=dict)
    #: nobody wants it any more, but it still executes or loads
    leaving: bool = False
    #: what to do once it has left: those who wanted the same bundle again meanwhile
    afterwards: list[Callable[[], None]] = field(default_factory=list)


class Registry:
    """`feed` gives the scheduler an event and carries out what it says; `forget` drops what is kept per model's key.

    `make_device` runs on the build thread: importing jax takes seconds in which stubs may already connect.
    `ready` is called when there is a device.
    """

    def __init__(
        self,
        settings: Settings,
        scheduler: Scheduler,
        inbox: Inbox,
        transport: Transport,
        feed: Callable[[ev.Event], None],
        forget: Callable[[str], None],
        make_device: Callable[[], Device],
        ready: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._scheduler = scheduler
        self._inbox = inbox
        self._transport = transport
        self._feed = feed
        self._forget = forget
        self._ready = ready
        self._builder = Worker("build")
        # Their own thread: a compilation would hold back a load for seconds. And one for both ways, so that
        # memory is given back before the load that needs it starts.
        self._mover = Worker("weights")
        self._entries: dict[str, _Entry] = {}
        self._device_error = ""
        #: models being built now
        self.builds = 0
        #: None until it is made
        self.device: Device | None = None
        self._builder.put(lambda: self._make_device(make_device))

    def find(self, key: str | None) -> Model | None:
        """The model, if it is built."""
        entry = self._entries.get(key or "")
        return None if entry is None else entry.model

    def get(self, key: str) -> Model:
        """The model that the scheduler speaks of: it knows built ones only."""
        model = self._entries[key].model
        assert model is not None
        return model

    def names(self) -> dict[str, str]:
        """Key -> name."""
        return {key: entry.name for key, entry in self._entries.items()}

    @property
    def cache_counts(self) -> CacheCounts:
        return getattr(self.device, "cache_counts", CacheCounts(0, 0))

    # --- connections come and go --------------------------------------------------------------------------

    def register(self, connection: Connection, wanted: dict[str, Any]) -> None:
        """A stub wants a model: by its bundle's path, or, for a further connection, by its key."""
        if connection.registering:
            raise ProtocolError("REGISTER twice on one connection")
        connection.registering = True
        if "key" in wanted:
            entry = self._entries.get(str(wanted["key"]))
            if entry is None or entry.model is None or entry.leaving:
                connection.send(_rejected(f"{wanted['key']} is not loaded"))
            else:
                self._join(connection, str(wanted["key"]), entry)
            return
        name, path = wanted.get("model"), wanted.get("bundle")
        if not isinstance(name, str) or not isinstance(path, str):
            raise ProtocolError("REGISTER without a model's name and its bundle's path")

        def read() -> None:
            result: Bundle | str
            try:
                result = identify(path)
            except BundleError as error:
                result = str(error)
            except Exception as error:
                log.exception("%s: cannot read the bundle", name)
                result = f"{type(error).__name__}: {error}"
            self._inbox.post(lambda: self._identified(connection, name, result))

        self._builder.put(read)

    def leave(self, connection: Connection) -> None:
        """A connection ended; a model that nobody wants any more is unloaded."""
        key = connection.model
        if key is None:
            return
        entry = self._entries[key]
        del entry.connections[connection.id]
        if not entry.connections and entry.model is not None:
            log.info("%s: unloaded", entry.name)
            entry.leaving = True
            self._feed(ev.ModelRemoved(key))
            self.let_go(key)

    def let_go(self, key: str) -> None:
        """A leaving model is gone when the scheduler has let go of it, with or without weights to evict."""
        entry = self._entries.get(key)
        if entry is None or not entry.leaving or self._scheduler.holds(key):
            return
        del self._entries[key]
        self._forget(key)
        # Not before those who called this have let go of the model, too.
        self._inbox.post(lambda: self._mover.put(give_back))
        for action in entry.afterwards:
            action()

    def _identified(self, connection: Connection, name: str, result: Bundle | str) -> None:
        if connection.closed:
            return
        if isinstance(result, str):
            self._transport.guard(connection, connection.send, _rejected(result))
            return
        bundle, key = result, model_key(name, result)
        entry = self._entries.get(key)
        if entry is not None and entry.leaving:
            entry.afterwards.append(lambda: self._identified(connection, name, bundle))
            return
        if entry is None:
            entry = self._entries[key] = _Entry(name)
            self.builds += 1
            self._builder.put(lambda: self._build(key, name, bundle))
        self._transport.guard(connection, self._join, connection, key, entry)

    def _join(self, connection: Connection, key: str, entry: _Entry) -> None:
        entry.connections[connection.id] = connection
        connection.model = key
        if entry.model is not None:
            self._welcome(connection, entry.model)

    # --- building -----------------------------------------------------------------------------------------

    def _make_device(self, make: Callable[[], Device]) -> None:
        """On the build thread, before anything else."""
        device, error = None, ""
        try:
            device = make()
        except Exception as caught:
            log.exception("no device")
            error = f"{type(caught).__name__}: {caught}"

        def ready() -> None:
            self.device, self._device_error = device, error
            if device is not None:
                self._ready()

        self._inbox.post(ready)

    def _build(self, key: str, name: str, bundle: Bundle) -> None:
        """On the build thread."""
        result: Model | str
        try:
            if self.device is None:  # this thread made it, or failed to, before any bundle was read
                result = f"the runtime has no device: {self._device_error}"
            else:
                result = build(bundle, self.device, self._settings, name)
                # What a model is made of lives long: keep the collector from walking over it ever again.
                gc.collect()
                gc.freeze()
        except BundleError as error:
            result = str(error)
        except Exception as error:
            log.exception("%s: cannot be loaded", name)
            result = f"{type(error).__name__}: {error}"
        self._inbox.post(lambda: self._built(key, result))

    def _built(self, key: str, result: Model | str) -> None:
        self.builds -= 1
        entry = self._entries[key]
        waiting = list(entry.connections.values())
        if isinstance(result, str):
            log.error("%s: not loaded: %s", entry.name, result)
            del self._entries[key]
            for connection in waiting:
                connection.model = None
                self._transport.guard(connection, connection.send, _rejected(result))
            return
        if not waiting:
            del self._entries[key]
            self._free(result)
            return
        entry.model = result
        self._feed(ev.ModelAdded(result.program, resident=True))
        for connection in waiting:
            self._transport.guard(connection, self._welcome, connection, result)

    def _welcome(self, connection: Connection, model: Model) -> None:
        connection.send_document(
            Kind.REGISTERED,
            {
                "key": model.key,
                "interface": model.interface.to_json(),
                "ranks": wire_ranks(model.bundle),
                "stub": self._settings.stub.model_dump(mode="json"),
                "cost_ns": int(min(model.program.costs.values()) * 1e9),
            },
        )

    # --- weights ------------------------------------------------------------------------------------------

    def load(self, key: str, epoch: int) -> None:
        """Bring a model's weights to the device again, from where they are kept on the host."""
        model = self.get(key)
        device = self.device
        assert device is not None
        assert model.weights is None, "the scheduler loads absent weights only"

        def load() -> None:
            started = time.monotonic()
            try:
                weights = device.upload(model.host_weights)
            except Exception as error:
                log.exception("%s: loading weights failed", key)
                failed = ev.LoadFailed(key, epoch, f"{type(error).__name__}: {error}")
                self._inbox.post(lambda: self._loaded(failed, model, None))
                return
            done = ev.WeightsLoaded(key, epoch, time.monotonic() - started)
            self._inbox.post(lambda: self._loaded(done, model, weights))

        self._mover.put(load)

    def evict(self, key: str) -> None:
        """Give the memory of a model's weights back; nothing executes on them any more."""
        self._free(self.get(key))

    def _free(self, model: Model) -> None:
        weights, model.weights = model.weights, None
        device = self.device
        if weights is not None and device is not None:
            self._mover.put(lambda: device.free(weights))

    def _loaded(self, event: ev.WeightsLoaded | ev.LoadFailed, model: Model, weights: Weights | None) -> None:
        model.weights = weights
        self._feed(event)
        self.let_go(model.key)


def _rejected(reason: str) -> bytes:
    return pack_json(Kind.REJECTED, {"reason": reason[:4000]})
