"""Models from registration to removal: stubs register them, threads build them, and they serve, drain and end."""

import logging
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import replace
from math import inf
from typing import Any

from rsrv.logs import fields
from rsrv.runtime.catalog import Catalog, ModelEntry
from rsrv.runtime.handover import Handover
from rsrv.runtime.host_copies import Shortage, WarmModel
from rsrv.runtime.idle_models import IdleModels, RegisteredModels
from rsrv.runtime.model_builder import (
    BundlesRead,
    ModelBuilder,
    ModelCompiled,
    ModelWarmedUp,
    ModuleCompiled,
    ModulesRead,
    log_not_loaded,
)
from rsrv.runtime.model_states import LifecycleEvent
from rsrv.runtime.models import RequestedModels, about, to_json, wire_tensors
from rsrv.runtime.start_queue import Demand, Urgency
from rsrv.runtime.timers import Timers
from rsrv.runtime.transport import PeerConnection, Registration, Transport
from rsrv.runtime.weight_manager import Outbox, WeightManager
from rsrv.scheduler import events as ev
from rsrv.scheduler.scheduler import Scheduler
from rsrv.wire.frames import (
    Kind,
    ProtocolError,
    StartProgress,
    pack_cold,
    pack_json,
    pack_rejected,
    pack_starting,
)
from rsrv.wire.layout import pack_flat

log = logging.getLogger(__name__)

#: Maximum number of characters of a model's name. It is also the limit of file names.
_MAX_NAME = 255
#: Maximum number of characters of the reason why a model cannot be loaded.
_MAX_REASON = 4000
#: Seconds between two announcements of places in the queue of builds.
_PLACES_S = 1.0
#: Reason for rejecting a native front. The code that checks for hooks also finds meta models, because they have a model.py.
_NOT_FLAT = (
    "the native front runs no hooks, meta models or models with state; run rsrv-gen again for a Python front"
)


class Registry:
    """Registrations of connections, and the changes of state of the registered models."""

    def __init__(
        self,
        catalog: Catalog,
        weights: WeightManager,
        builder: ModelBuilder,
        scheduler: Scheduler,
        transport: Transport,
        outbox: Outbox,
        timers: Timers,
        clock: Callable[[], float],
    ) -> None:
        self.catalog = catalog
        self.weights = weights
        self._builder = builder
        self._scheduler = scheduler
        self._transport = transport
        self._outbox = outbox
        #: Registrations with a connection, by key.
        self._groups: dict[str, Registration] = {}
        #: Registrations postponed until a draining model is released, keyed by that model.
        self._deferred: dict[str, list[BundlesRead]] = {}
        #: Keys of the models that are kept without a connection, by name. A list is empty until the bundle is read.
        self._held: dict[str, list[str]] = {}
        #: Reasons why models could not be started without a connection, by name.
        self.start_failures: dict[str, str] = {}
        self._timers = timers
        self._clock = clock
        self._idle = IdleModels(catalog, scheduler)
        self.check_idle_soon()
        #: Time when waiting connections were last sent their places in the queue.
        self._places_sent = -inf
        #: Models of the previous runtime.
        self.handover = Handover()

    def starting(self) -> dict[str, str]:
        """Return the step in which each starting model is, by name."""
        building = (self.catalog.entries[key] for key in self.catalog.building)
        steps = {entry.name: entry.state.value for entry in building}
        # Models whose bundles are being read are in no queue, and have no state yet.
        reading = (name for name, keys in self._held.items() if not keys)
        return {
            **dict.fromkeys(reading, "reading"),
            **steps,
            **dict.fromkeys(self._builder.waiting(), "waits for its turn"),
            **dict.fromkeys(self._unserved(), "importing model.py"),
        }

    def _unserved(self) -> set[str]:
        """Return the registered models that no stub serves yet, because their stubs still import model.py."""
        connections = self._transport.connections
        busy = {connection.peer for connection in connections if connection.importing is not None}
        if not busy:
            return set()  # This is the usual case. With thousands of models, the rest takes the loop 25 ms.
        registered = [
            (connection, connection.group.name) for connection in connections if connection.group is not None
        ]
        served = {name for connection, name in registered if connection.peer not in busy}
        return {name for connection, name in registered if connection.importing is not None} - served

    def metas(self) -> list[Registration]:
        """Return all meta models that a stub serves."""
        return [group for group in self._groups.values() if group.is_meta]

    def importing(self, now: float) -> dict[str, tuple[float, int]]:
        """Return the models whose stubs import a slow model.py, with the seconds so far and the line that executes."""
        imports: dict[str, tuple[float, int]] = {}
        for connection in self._transport.connections:
            if connection.group is not None and connection.importing is not None:
                since, line = connection.importing
                imports[connection.group.name] = max(
                    imports.get(connection.group.name, (0.0, 0)), (now - since, line)
                )
        return imports

    # --- registration -------------------------------------------------------------------------------------

    def register(self, connection: PeerConnection, document: dict[str, Any]) -> None:
        """Register a stub for a model, or answer COLD if the model stays cold.

        `document` has the path of the model's bundle, or on a further connection of the stub, the model's key. For a meta
        model, it also has the paths of the models that it calls.
        """
        if connection.registering:
            raise ProtocolError("REGISTER twice on one connection")
        connection.registering = True
        connection.flat = document.get("flat") is True
        if "key" in document:
            if connection.flat:
                raise ProtocolError("REGISTER of a further connection in flat form")
            key = str(document["key"])
            group = self._groups.get(key)
            if group is None or not self.catalog.ready(group):
                _reject(connection, f"{key} is not loaded")
            else:
                self._join(connection, group)
            return
        name, path, calls = document.get("model"), document.get("bundle"), document.get("calls", {})
        if not isinstance(name, str) or not isinstance(path, str) or not isinstance(calls, dict):
            raise ProtocolError("REGISTER without a model's name and its bundle's path")
        if not name.isprintable() or len(name) > _MAX_NAME:
            # The name would be written to the log and sent to watchers.
            raise ProtocolError("REGISTER of a model whose name cannot be printed, or is too long")
        if (
            document.get("asked") is not True
            and document.get("started") is not True
            and self._stays_cold(name)
        ):
            # The stub's process is new, so the cause of an earlier failure may be gone.
            self.catalog.feed.forget_failed(name)
            self._send_cold(connection)
            return
        connection.demand = _read_demand(document, self.catalog.policy.settings.for_model(name).weight)
        self._builder.read(connection, name, path, calls, connection.demand)
        if self._builder.waits(connection):
            self._announce(connection, "its bundle waits to be read")

    def change_demand(self, connection: PeerConnection, document: dict[str, Any]) -> None:
        """Set the demand of the requests that wait for a registration. It has no effect after the answer."""
        connection.demand = _read_demand(document, connection.demand.weight)
        self._builder.change_demand(connection, connection.demand)
        for key in () if connection.group is None else connection.group.models:
            self._builder.change_demand(key, self.catalog.entries[key].demand)

    def _stays_cold(self, name: str) -> bool:
        """Return whether a model stays cold until a request arrives. The next version of a warm model starts at once."""
        if self.catalog.policy.settings.start_of(name) == "eager":
            return False
        return not self._serves(name)

    def _serves(self, name: str) -> bool:
        """Return whether there is a model or meta model of that name that is not ending."""
        return self.catalog.serves(name) or any(group.name == name for group in self.metas())

    def dismiss(self, key: str | None = None) -> None:
        """Send COLD to the stubs of a model or meta model that serves. None: send it to all stubs.

        A stub without requests then disconnects, and connects again at its next request. If the model is kept without a
        connection, it is not kept any more.
        """
        for connection in self._transport.connections:
            group = connection.group
            if group is not None and key in (None, group.key) and self.catalog.ready(group):
                self.catalog.dismiss(group.key)
                self._transport.guard(connection, self._send_cold, connection)
        if key in self.catalog.entries:
            self.let_go(self.catalog.entries[key].name)

    def check_idle_soon(self) -> None:
        """Check for idle models soon, because the limits or the pinned models have changed."""
        self._timers.set(self.dismiss_idle, -inf)

    def _check_after_limit(self, name: str) -> None:
        """Schedule a check for idle models at the time when a model that serves from now on may reach its idle limit."""
        self._timers.advance(self.dismiss_idle, self._idle.limit_ends(name, self._clock()))

    def dismiss_idle(self, now: float) -> float:
        """Dismiss the models that no request has used for `idle.executable`. Return the time of the next check."""
        idle, again = self._idle.find_idle(self._registered(), now)
        for model in idle:
            self._fall_back(model, "idle")
        return again

    def relieve(self, shortage: Shortage, now: float) -> bool:
        """Dismiss models because of a shortage. Return whether models are falling back to cold."""
        chosen = self._idle.choose_for_shortage(shortage, self._registered(), now)
        for model in chosen or ():
            self._fall_back(model, shortage.reason)
        return chosen is None or bool(chosen)

    def _fall_back(self, model: WarmModel, why: str) -> None:
        log.info("%s: %s, so it falls back to cold", model.name, why, extra=fields(model=model.name))
        self.dismiss(model.key)

    def _registered(self) -> RegisteredModels:
        """Return the registrations and the models that are kept without a connection. See `RegisteredModels`."""
        registered = {group.key: (group.name, group.models) for group in self._groups.values()}
        return registered | {key: (name, (key,)) for name, keys in self._held.items() for key in keys}

    def _send_cold(self, connection: PeerConnection) -> None:
        timeout_s = self.catalog.policy.settings.runtime.start_timeout_s
        connection.send(pack_cold(timeout_s, flat=connection.flat))

    def start(self, name: str, path: str, demand: Demand) -> None:
        """Build a model without a connection, and keep it until a stub registers a model of the same name.

        If the build fails, `start_failures` has the reason.
        """
        if not self.catalog.serves(name):
            self.start_failures.pop(name, None)
            self._held.setdefault(name, [])
            self._builder.read(None, name, path, {}, demand)

    def let_go(self, name: str) -> None:
        """Stop keeping the models that `start` has built for a name. Models without a connection are then unloaded."""
        for key in self._held.pop(name, ()):
            entry = self.catalog.entries.get(key)
            if entry is not None and entry.held is not None:
                entry.held = None
                self._unload_unwanted(entry)

    def bundles_read(self, message: BundlesRead) -> None:
        """Start the models that a connection has requested, and add the connection to their registration, or reject it."""
        connection, requested = message.connection, message.result
        if connection is None:
            self._read_for_none(message)
            return
        if connection.closed:
            return
        if isinstance(requested, str):
            if not self._serves(message.name):
                reason = requested[:_MAX_REASON]
                self.catalog.tell_unreadable(message.name, reason, is_meta=message.is_meta)
            self._transport.guard(connection, _reject, connection, requested)
            return
        if connection.flat and (
            requested.bundle.hooks is not None or requested.bundle.manifest.state is not None
        ):
            self._transport.guard(connection, _reject, connection, _NOT_FLAT)
            return
        group = self._registration(requested)
        if message.verdicts:
            key, why = next(iter(message.verdicts.items()))
            self._reject_crashed(connection, group, key, requested, why)
            return
        if self._is_deferred(message, requested):
            return
        start_s = self._begin(requested, connection.demand, message.seconds)
        self._transport.guard(connection, self._join, connection, group)
        entries = (self.catalog.entries[key] for key in group.models)
        building = next((entry for entry in entries if not entry.ready), None)
        if building is not None:
            least_s = start_s if connection.demand.urgency is Urgency.REQUESTED else 0.0
            self._transport.guard(connection, self._announce_step, connection, building, least_s)

    def _is_deferred(self, message: BundlesRead, requested: RequestedModels) -> bool:
        """Postpone a registration if one of its models is ending, until that model is removed.

        Return whether it is postponed.
        """
        for key in requested.models:
            entry = self.catalog.entries.get(key)
            if entry is not None and entry.ending:
                self._deferred.setdefault(key, []).append(replace(message, verdicts={}))
                return True
        return False

    def _announce(self, connection: PeerConnection, step: str, least_s: float = 0.0) -> None:
        """Send STARTING to a connection whose registration is not answered."""
        limit_s = self.catalog.policy.settings.runtime.start_timeout_s
        connection.send(pack_starting(StartProgress(step, limit_s, least_s), flat=connection.flat))

    def _announce_step(self, connection: PeerConnection, entry: ModelEntry, least_s: float = 0.0) -> None:
        is_callee = connection.group is not None and connection.group.is_meta
        step = f"its model {entry.name!r}: {entry.step}" if is_callee else entry.step
        self._announce(connection, step, least_s)

    def _step(self, entry: ModelEntry, step: str) -> None:
        """Record a step of a model's start, and announce it to the connections that wait for the model."""
        entry.step = step
        if entry.ready or entry.ending:
            return
        for connection in list(entry.connections.values()):
            self._transport.guard(connection, self._announce_step, connection, entry)

    def tell_places(self, now: float) -> None:
        """For each connection with waiting requests, announce the number of build steps that precede its own step."""
        if now < self._places_sent + _PLACES_S:
            return
        self._places_sent, waiting = now, self._builder.order()
        reading: dict[Hashable, PeerConnection] = {}
        if waiting:
            reading = {connection.id: connection for connection in self._transport.connections}
        for place, step in enumerate(waiting, 1):
            if step.demand.urgency is not Urgency.REQUESTED:
                break  # The steps after this one are not more urgent.
            text = f"it waits for its turn: {place} reads or builds of other models come first"
            if (entry := self.catalog.entries.get(str(step.id))) is not None:
                self._step(entry, text)
            elif (connection := reading.get(step.id)) is not None:
                self._transport.guard(connection, self._announce, connection, text)

    def _begin(self, requested: RequestedModels, demand: Demand, seconds: Mapping[str, float]) -> float:
        """Add the requested models that are new, and begin their builds. Return the sum of their `_start_seconds`."""
        start_s = 0.0
        for key, (name, bundle) in requested.models.items():
            if key not in self.catalog.entries:
                start_s += self._start_seconds(key)
                self.catalog.add(key, name, bundle.digest)
                self.catalog.tell(key)
                settings = self.catalog.policy.settings
                self._builder.build(key, name, bundle, settings, demand, seconds.get(key, 0.0))
        return start_s

    def _start_seconds(self, key: str) -> float:
        """Return the minimum seconds until a new model can serve.

        0.0: the time is unknown, or the discipline sheds no requests, so the time makes no difference.
        """
        device = self.weights.device
        if device is None or not self._scheduler.sheds:
            return 0.0
        return device.known_start(key) or 0.0

    def _read_for_none(self, message: BundlesRead) -> None:
        """Continue `start`: begin the build of the model, or record why it cannot be built.

        Do nothing if a stub has registered the model, or if `let_go` was called, since `start`.
        """
        requested = message.result
        if message.name not in self._held or self.catalog.serves(message.name):
            return
        if isinstance(requested, str) or message.verdicts:
            reason = requested if isinstance(requested, str) else next(iter(message.verdicts.values()))
            self.start_failures[message.name] = reason
            del self._held[message.name]
            return
        if self._is_deferred(message, requested):
            return
        self._begin(requested, message.demand, message.seconds)
        for key in requested.models:
            self.catalog.entries[key].held = message.demand
            self._held[requested.name].append(key)

    def _reject_crashed(
        self, connection: PeerConnection, group: Registration, key: str, requested: RequestedModels, why: str
    ) -> None:
        """Reject a registration because one of its models has ended too many runtimes."""
        name, bundle = requested.models[key]
        if key not in self.catalog.entries:
            self.catalog.add(key, name, bundle.digest).error = why
            # Do not use `_advance`. Its clean-up would remove tensors that a crashed runtime left for other models.
            self.catalog.advance(key, LifecycleEvent.FAILED)
            self.catalog.advance(key, LifecycleEvent.RELEASED)
        log_not_loaded(name, key, why)
        text = f"{key}: {why}"
        if group.is_meta:
            self._tell(group, text)
        self._transport.guard(connection, _reject, connection, text, text)

    def _registration(self, requested: RequestedModels) -> Registration:
        """Return the existing registration of these models, or a new one."""
        manifest = requested.bundle.manifest
        return self._groups.get(requested.key) or Registration(
            requested.key,
            requested.name,
            requested.bundle.digest,
            tuple(requested.models),
            wire_tensors(requested.bundle),
            manifest.kind == "meta",
            manifest.meta_calls,
        )

    def _join(self, connection: PeerConnection, group: Registration) -> None:
        connection.group = self._groups[group.key] = group
        group.connections[connection.id] = connection
        for key in group.models:
            entry = self.catalog.entries[key]
            entry.connections[connection.id] = connection
            self._builder.change_demand(key, entry.demand)
            self.let_go(entry.name)
        self._tell(group)
        if self.catalog.ready(group):
            self._send_registered(connection, group)

    def leave(self, connection: PeerConnection) -> None:
        """Unload the models that only the closed connection needed."""
        self._builder.forget(connection)
        group = connection.group
        if group is not None:
            self._leave(connection, group, group.models)
            self._tell(group)

    def _leave(self, connection: PeerConnection, group: Registration, models: Iterable[str]) -> None:
        connection.group = None
        del group.connections[connection.id]
        if not group.connections:
            del self._groups[group.key]
        for key in models:
            entry = self.catalog.entries[key]
            del entry.connections[connection.id]
            self._unload_unwanted(entry)

    def _unload_unwanted(self, entry: ModelEntry) -> None:
        """Unload a model that nothing needs any more. If something needs it, adapt its build to the remaining demand."""
        if entry.wanted:
            self._builder.change_demand(entry.key, entry.demand)
            return
        if entry.ending:
            return
        if entry.model is None:
            # A build that has begun runs to its end.
            if self._builder.drop(entry.key):
                self._advance(entry.key, LifecycleEvent.UNWANTED)
        else:
            log.info("%s: unloaded", entry.name, extra=about(entry.model, event="unloaded"))
            self._advance(entry.key, LifecycleEvent.UNWANTED)
            self._outbox.append(ev.ModelRemoved(entry.key))

    def tell_all(self) -> None:
        """Update the feed's entries of all models."""
        for key in self.catalog.entries:
            self.catalog.tell(key)
        for group in self.metas():
            self._tell(group)

    def _tell(self, group: Registration, error: str | None = None) -> None:
        """Update the feed's entry of a registration. `error`: the reason why a meta model cannot be served, or None."""
        if group.is_meta:
            self.catalog.tell_meta(group, error)
        elif group.key in self.catalog.entries:
            self.catalog.tell(group.key)

    # --- results of builds and warm-ups -------------------------------------------------------------------

    def modules_read(self, message: ModulesRead) -> None:
        self._advance(message.key, LifecycleEvent.MODULES_READ)
        self._step(self.catalog.entries[message.key], "its modules have been read, and none is compiled yet")

    def module_compiled(self, message: ModuleCompiled) -> None:
        text = f"{message.done} of its {message.of} modules are compiled"
        self._step(self.catalog.entries[message.key], text)

    def compiled(self, message: ModelCompiled) -> None:
        """Pass a compiled model to the scheduler, which loads its weights and then starts a warm-up.

        A model with known costs is served at once. Its weights load for its first request, or when the link is idle. But if
        another version of the model is served now, the new version warms up first, so its weights are on the device when it
        serves.
        """
        key, model = message.key, message.result
        entry = self.catalog.entries[key]
        self.weights.copies.built()
        if isinstance(model, str):
            self._fail(entry, model)
            return
        if not entry.wanted:
            self._advance(key, LifecycleEvent.UNWANTED)
            self.weights.close(model)
            return
        entry.model = model
        self._advance(key, LifecycleEvent.COMPILED)
        # Operators may have changed some settings during the build.
        model.program = self.catalog.policy.program(model.program, entry.name)
        residency = self.catalog.policy.residency(entry.name)
        if model.residency != residency:
            model.residency = residency
            self.weights.follow_residency(model)
        # Executions of this model need memory in addition to all weights. So shrink the budget first, then allow its
        # weights to load.
        self.weights.update_budget()
        served = model.measured and not self.catalog.serves(entry.name, but=key)
        place = self.handover.place(key) if served and self.handover.returns(key) else None
        on_disk = not model.host.kept
        self._outbox.append(ev.ModelAdded(model.program, warm_up=not served, restore=place, on_disk=on_disk))
        if self.catalog.policy.prefetched(entry.name):
            # The command was for an earlier version, and also applies to this version.
            self._outbox.append(ev.Prefetch(key))
        if served:
            self._serve(entry)
        else:
            self._step(entry, "it is compiled, and its weights are being loaded")

    def warm_up(self, instruction: ev.WarmUp) -> None:
        device = self.weights.device
        assert device is not None
        self._step(self.catalog.entries[instruction.model], "it is compiled, and being warmed up")
        self._builder.warm_up(self.catalog.get(instruction.model), device, again=instruction.again)

    def warmed_up(self, message: ModelWarmedUp) -> None:
        """Serve a model whose warm-up succeeded. Fail a model whose warm-up failed, unless the warm-up is retried."""
        model, key = message.model, message.model.key
        self._outbox.append(ev.WarmUpEnded(key, message.costs, message.out_of_memory))
        entry = self.catalog.entries[key]
        if message.out_of_memory or entry.ending:
            return
        if message.costs is None:
            self._fail(entry, message.error)
            return
        model.program = replace(model.program, costs=message.costs)
        self._serve(entry)

    def _serve(self, entry: ModelEntry) -> None:
        self._advance(entry.key, LifecycleEvent.WARMED_UP)
        self._check_after_limit(entry.name)
        for connection in list(entry.connections.values()):
            if connection.group is not None and self.catalog.ready(connection.group):
                self._tell(connection.group)
                self._transport.guard(connection, self._send_registered, connection, connection.group)

    def give_up(self, instruction: ev.GiveUp) -> None:
        """Handle weights that cannot be loaded. Fail a model that is starting. For a model that serves, only log the error."""
        entry = self.catalog.entries[instruction.model]
        if entry.ready:
            text = "%s: its weights should be on the device, but cannot be loaded: %s"
            log.error(text, entry.key, instruction.error, extra=fields(model=entry.name, version=entry.key))
        elif not entry.ending:
            self._fail(entry, f"its weights cannot be loaded: {instruction.error}")

    def release(self) -> list[str]:
        """Remove the models that the scheduler has released, and return their keys."""
        released = [key for key in self.catalog.ending if not self._scheduler.knows(key)]
        for key in released:
            model = self.catalog.get(key)
            self._advance(key, LifecycleEvent.RELEASED)
            self.weights.close(model)
            del model  # The executables must be free when the memory is measured.
            self.weights.update_budget()
            for message in self._deferred.pop(key, ()):
                self.bundles_read(message)
        return released

    def _fail(self, entry: ModelEntry, reason: str) -> None:
        """Fail a model, and reject all registrations that need it."""
        key = entry.key
        log_not_loaded(entry.name, key, reason)
        reason = reason[:_MAX_REASON]
        waiting = [(connection, connection.group) for connection in entry.connections.values()]
        if entry.held is not None:
            self.start_failures[entry.name] = reason
            self._held.pop(entry.name, None)
        entry.connections, entry.held = {}, None
        entry.error = reason
        self._advance(key, LifecycleEvent.FAILED)
        if entry.model is None:
            self._advance(key, LifecycleEvent.RELEASED)
        else:
            self._outbox.append(ev.ModelRemoved(key))
        for connection, group in waiting:
            assert group is not None
            # The other callees of a meta model stay if other connections need them. Otherwise, they are unloaded.
            self._leave(connection, group, [model for model in group.models if model != key])
            text = reason
            if group.is_meta:
                text = f"model '{entry.name}', which it calls: {reason}"
                self._tell(group, text)
            self._transport.guard(connection, _reject, connection, text)

    def _advance(self, key: str, event: LifecycleEvent) -> None:
        """Move a model to its next state. After the last build, free resources that only builds need."""
        building = bool(self.catalog.building)
        self.catalog.advance(key, event)
        weight_mover = self.weights.mover
        if building and not self.catalog.building and weight_mover is not None:
            self._builder.clean_up(weight_mover.host)
            self.weights.update_budget()

    def _send_registered(self, connection: PeerConnection, group: Registration) -> None:
        """Send REGISTERED to a stub: its models are ready."""
        self._check_after_limit(group.name)
        if connection.flat:
            self._send_flat(connection, group)
            return
        models = [
            {**to_json(self.catalog.get(key)), "slot": self.catalog.entries[key].slot} for key in group.models
        ]
        concurrency = self._scheduler.settings.meta_concurrency
        settings = self.catalog.policy.settings
        connection.send_document(
            Kind.REGISTERED,
            {
                "key": group.key,
                "client": group.client,
                "models": models,
                "settings": {
                    "stub": settings.stub.model_dump(mode="json"),
                    "logs": settings.logs.model_dump(mode="json"),
                    "meta": {**settings.meta.model_dump(mode="json"), "concurrency": concurrency},
                    "traces": {"enabled": settings.traced},
                },
            },
        )

    def _send_flat(self, connection: PeerConnection, group: Registration) -> None:
        """Send REGISTERED in flat form to a front without a JSON parser."""
        (key,) = group.models
        model, settings = self.catalog.get(key), self.catalog.policy.settings
        try:
            described = pack_flat(
                group.client,
                model.interface,
                batched=model.bundle.manifest.rows_first,
                traced=settings.traced,
                key=key,
                slot=self.catalog.entries[key].slot,
                cost_ns=model.shortest_ns,
                retry_ns=int(min(1e9 * settings.stub.retry_s, 2**63 - 1)),
            )
        except ValueError:
            raise ProtocolError(
                "REGISTER in flat form of a model with types that no client can send"
            ) from None
        connection.send_document(Kind.REGISTERED, described)


def _read_demand(document: dict[str, Any], weight: float) -> Demand:
    """Return the demand in a REGISTER or DEMAND."""
    if document.get("asked") is not True:
        return Demand(weight=weight)
    deadline = document.get("deadline_ns")
    return Demand(Urgency.REQUESTED, deadline / 1e9 if isinstance(deadline, int) else inf, weight)


def _reject(connection: PeerConnection, reason: str, client: str = "") -> None:
    """Send REJECTED. `client`: the text for clients that request the model nevertheless."""
    reason, client = reason[:_MAX_REASON], client[:_MAX_REASON]
    if connection.flat:
        connection.send(pack_rejected(reason, client))
    else:
        connection.send(pack_json(Kind.REJECTED, {"reason": reason, "client": client}))
