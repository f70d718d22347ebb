"""The models of a runtime: read, built, joined, left. Its state belongs to the loop; the work is done on a thread."""

import gc
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from rsrv.logs import fields
from rsrv.runtime.activity import Activity, Phase
from rsrv.runtime.allocation import give_back
from rsrv.runtime.catalog import Catalog, ModelEntry
from rsrv.runtime.crash_history import CrashHistory
from rsrv.runtime.device import Device, DeviceError, OutOfMemory
from rsrv.runtime.device_startup import DeviceStartup
from rsrv.runtime.host_weights import HostMemoryError
from rsrv.runtime.models import Model, Wanted, about, build, identify, to_json, warm_up, wire_tensors
from rsrv.runtime.placement import Placement
from rsrv.runtime.policy import Policy
from rsrv.runtime.state_feed import StateFeed
from rsrv.runtime.threads import Inbox, Worker
from rsrv.runtime.transport import Connection, MetaCounts, Registration, Transport
from rsrv.scheduler import events as ev
from rsrv.scheduler.scheduler import Scheduler
from rsrv.settings import Settings
from rsrv.wire.frames import Kind, ProtocolError, pack_json
from rsrv_bundle import Bundle, BundleError
from rsrv_bundle.inspection import Inspector, InspectorError
from rsrv_bundle.modules import signature_of

log = logging.getLogger("rsrv.registry")

#: characters; the name of a file has no more
_MAX_NAME = 255
#: characters of what is said about a model that cannot be loaded
_MAX_REASON = 4000


class Registry:
    """`feed` gives the scheduler an event and carries out what it says; `forget` drops what is kept per model's key.

    `make_device` runs on the build thread: importing jax takes seconds in which stubs may already connect.
    `inspector` looks into modules before they are compiled; without one they are looked into here.
    """

    def __init__(
        self,
        settings: Settings,
        scheduler: Scheduler,
        inbox: Inbox,
        transport: Transport,
        state_feed: StateFeed,
        feed: Callable[[ev.Event], None],
        forget: Callable[[str], None],
        make_device: Callable[[], Device],
        activity: Activity,
        deaths: CrashHistory,
        inspector: Inspector | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._inbox = inbox
        self._transport = transport
        self._feed = feed
        self._forget = forget
        self._activity = activity
        self._deaths = deaths
        self._inspector = inspector
        self._builder = Worker("build")
        # A thread of its own: weights stay on the device until it is done, and a compilation takes seconds to minutes.
        self._warmer = Worker("warm up")
        self.catalog = Catalog(Policy(settings), state_feed)
        self.placement = Placement(self.catalog, scheduler, self._builder, feed, self.let_go)
        self._device_startup = DeviceStartup(
            make_device, settings, inbox, self.placement.equip, activity.weights
        )
        if inspector is not None:
            self._builder.put(inspector.start)
        self._builder.put(self._device_startup.begin)

    def find(self, connection: Connection) -> Model | None:
        """The model that a connection is for, if it is ready."""
        group = connection.group
        if group is None or group.counts is not None:
            return None
        entry = self.catalog.listed[group.key]
        return entry.model if entry.ready else None

    def names_of(self, name: str) -> list[str]:
        """The model by that name, or all that a meta model by that name calls. Raises LookupError: there is none."""
        if self.catalog.serves(name):
            return [name]
        called = [group.calls for group in self.metas() if group.name == name]
        if not called:
            raise LookupError(f"there is no model {name!r:.200}")
        return [one for calls in called for one in calls]

    def metas(self) -> list[Registration]:
        """All meta models that somebody serves."""
        return [group for group in self._groups().values() if group.counts is not None]

    def _groups(self) -> dict[str, Registration]:
        """What connections are for, by key."""
        groups = (connection.group for connection in self._transport.connections)
        return {group.key: group for group in groups if group is not None}

    # --- connections come and go --------------------------------------------------------------------------

    def register(self, connection: Connection, wanted: dict[str, Any]) -> None:
        """A stub wants a model: by its bundle's path, or, for a further connection, by its key.

        A meta model comes with the paths of those that it calls.
        """
        if connection.registering:
            raise ProtocolError("REGISTER twice on one connection")
        connection.registering = True
        if "key" in wanted:
            key = str(wanted["key"])
            group = self._groups().get(key)
            if group is None or not self.catalog.ready(group):
                connection.send(_rejected(f"{key} is not loaded"))
            else:
                self._join(connection, group)
            return
        name, path, calls = wanted.get("model"), wanted.get("bundle"), wanted.get("calls", {})
        if not isinstance(name, str) or not isinstance(path, str) or not isinstance(calls, dict):
            raise ProtocolError("REGISTER without a model's name and its bundle's path")
        if not name.isprintable() or len(name) > _MAX_NAME:
            # It comes up in logs and in what watchers are told.
            raise ProtocolError("REGISTER of a model whose name cannot be printed, or is too long")

        def read() -> None:
            result: Wanted | str
            verdicts: dict[str, str] = {}
            try:
                result = identify(name, path, calls)
                verdicts = {one: why for one in result.models if (why := self._deaths.verdict(one))}
            except BundleError as error:
                result = str(error)
            except Exception as error:
                log.exception("%s: cannot read the bundle", name, extra=fields(model=name))
                result = f"{type(error).__name__}: {error}"
            if isinstance(result, str):
                _say_not_loaded(name, None, result)
            self._inbox.post(lambda: self._identified(connection, result, verdicts))

        self._builder.put(read)

    def leave(self, connection: Connection) -> None:
        """A connection ended; a model that nobody wants any more is unloaded."""
        group = connection.group
        if group is not None:
            self._leave(connection, group)
            self._tell(group)

    def _leave(self, connection: Connection, group: Registration) -> None:
        connection.group = None
        for key in group.models:
            entry = self.catalog.listed[key]
            del entry.connections[connection.id]
            if not entry.connections and entry.model is not None and not entry.leaving:
                log.info("%s: unloaded", entry.name, extra=about(entry.model, event="unloaded"))
                self._remove(key, entry)

    def _remove(self, key: str, entry: ModelEntry) -> None:
        if not entry.ready:
            self._one_build_less()
        entry.leaving = True
        self.catalog.tell(key)
        self._feed(ev.ModelRemoved(key))
        self.let_go(key)

    def let_go(self, key: str) -> None:
        """A leaving model is gone when the scheduler has let go of it, with or without weights to evict."""
        entry = self.catalog.listed.get(key)
        if entry is None or not entry.leaving or self._scheduler.holds(key):
            return
        self.catalog.drop(key)
        self._forget(key)
        assert entry.model is not None
        self._close(entry.model)
        self.placement.decide()
        for action in entry.afterwards:
            action()

    def _close(self, model: Model) -> None:
        """Give up its weights on the host, after what was asked for before: to free them, or to keep a copy."""

        def close() -> None:
            self._builder.put(model.host.close)
            # By then everybody has let go of the model.
            self._builder.put(give_back)

        self.placement.when_moved(close)

    def _identified(self, connection: Connection, result: Wanted | str, verdicts: Mapping[str, str]) -> None:
        """`verdicts`: why models are not tried any more, by key."""
        if connection.closed:
            return
        if isinstance(result, str):
            self._transport.guard(connection, connection.send, _rejected(result))
            return
        wanted = result
        group = self._group(wanted)
        for key, why in verdicts.items():
            name, bundle = wanted.models[key]
            self.catalog.refuse(key, name, bundle.digest, why)
            _say_not_loaded(name, key, why)
            text = f"{key}: {why}"
            if group.counts is not None:
                self._tell(group, text)
            self._transport.guard(connection, connection.send, _rejected(text, text))
            return
        for key in wanted.models:
            entry = self.catalog.listed.get(key)
            if entry is not None and entry.leaving:
                entry.afterwards.append(lambda: self._identified(connection, wanted, {}))
                return
        for key, (name, bundle) in wanted.models.items():
            if key not in self.catalog.listed:
                self.catalog.add(key, name, bundle.digest)
                self.placement.builds += 1
                self._builder.put(partial(self._build, key, name, bundle))
        self._transport.guard(connection, self._join, connection, group)

    def _group(self, wanted: Wanted) -> Registration:
        """The one that there is, or a new one."""
        manifest = wanted.bundle.manifest
        return self._groups().get(wanted.key) or Registration(
            wanted.key,
            wanted.name,
            wanted.bundle.digest,
            tuple(wanted.models),
            wire_tensors(wanted.bundle),
            manifest.meta_calls,
            MetaCounts() if manifest.kind == "meta" else None,
        )

    def _join(self, connection: Connection, group: Registration) -> None:
        connection.group = group
        for key in group.models:
            self.catalog.listed[key].connections[connection.id] = connection
        self._tell(group)
        if self.catalog.ready(group):
            self._welcome(connection, group)

    def tell_all(self) -> None:
        """Something that may concern all models has changed."""
        for key in self.catalog.listed:
            self.catalog.tell(key)
        for group in self.metas():
            self._tell(group)

    def _tell(self, group: Registration, error: str | None = None) -> None:
        """Who serves this has changed, or whether it can be. `error`: why a meta model never will."""
        if group.counts is not None:
            mine = [one for one in self._transport.connections if one.group and one.group.key == group.key]
            self.catalog.tell_meta(group, mine, error)
        elif group.key in self.catalog.listed:
            self.catalog.tell(group.key)

    # --- building -----------------------------------------------------------------------------------------

    def _build(self, key: str, name: str, bundle: Bundle) -> None:
        """On the build thread."""
        result: Model | str
        try:
            device, weight_mover = self._device_startup.get()
            inspect = self._inspector or signature_of
            with self._activity.build.doing(Phase.BUILDING, key):
                result = build(bundle, device, weight_mover.host, self.catalog.policy.settings, name, inspect)
            # What a model is made of lives long: keep the collector from walking over it ever again.
            gc.collect()
            gc.freeze()
        except (BundleError, InspectorError, DeviceError, HostMemoryError) as error:
            result = str(error)
        except Exception as error:
            log.exception("%s: cannot be loaded", name, extra=fields(model=name, version=key))
            result = f"{type(error).__name__}: {error}"
        self._inbox.post(lambda: self._built(key, result))

    def _built(self, key: str, result: Model | str) -> None:
        entry = self.catalog.listed[key]
        if isinstance(result, str):
            self._fail(key, entry, result)
            return
        if not entry.connections:
            self.catalog.drop(key)
            self._one_build_less()
            self._close(result)
            return
        entry.model = result
        # Some of it may have been changed meanwhile.
        result.program = self.catalog.policy.program(result.program, entry.name)
        residency = self.catalog.policy.residency(entry.name)
        if result.residency != residency:
            result.residency = residency
            self.placement.follow(result)
        # Its executions need room beside all weights: first they get it, then its weights may come.
        self.placement.decide()
        self._feed(ev.ModelAdded(result.program, warm_up=True))
        if self.catalog.policy.prefetched(entry.name):
            # It takes over from a version that is there, or that was when its stub ended.
            self._feed(ev.Prefetch(key))

    def warm_up(self, key: str, *, again: bool) -> None:
        """A model's weights are there: execute every size of it, and then serve it. `again`: it found no memory."""
        model, device = self.catalog.get(key), self.placement.device
        assert device is not None

        def run() -> None:
            costs, error = None, ""
            try:
                costs = warm_up(model, device, self._activity.warm_up)
                self._deaths.survived(key)
            except Exception as caught:
                if isinstance(caught, OutOfMemory) and not again:
                    text = "%s: no memory on the device to warm it up: %s"
                    log.warning(text, model.name, caught, extra=about(model))
                    self._inbox.post(lambda: self._feed(ev.WarmUpEnded(key, None, out_of_memory=True)))
                    return
                log.exception("%s: cannot be warmed up", model.name, extra=about(model))
                error = f"{type(caught).__name__}: {caught}"
            self._inbox.post(lambda: self._warmed_up(model, costs, error))

        self._warmer.put(run)

    def _warmed_up(self, model: Model, costs: dict[tuple[int, int], float] | None, error: str) -> None:
        key = model.key
        self._feed(ev.WarmUpEnded(key, costs))
        entry = self.catalog.listed.get(key)
        if entry is None or entry.leaving:
            self.let_go(key)
        elif costs is None:
            self._fail(key, entry, error)
        else:
            model.program = replace(model.program, costs=costs)
            entry.ready = True
            self.catalog.tell(key)
            self._one_build_less()
            for connection in list(entry.connections.values()):
                if connection.group is not None and self.catalog.ready(connection.group):
                    self._tell(connection.group)
                    self._transport.guard(connection, self._welcome, connection, connection.group)

    def _one_build_less(self) -> None:
        """A model is ready, or will never be."""
        self.placement.builds -= 1
        weight_mover = self.placement.weight_mover
        if not self.placement.builds and weight_mover is not None:
            # Whoever wants what other runtimes left in shared memory has taken it.
            self._builder.put(weight_mover.host.sweep)
            if self._inspector is not None:
                self._builder.put(self._inspector.close)
            self.placement.decide()

    def give_up(self, key: str, error: str) -> None:
        """The weights of a model that should come for their own sake do not; what follows is the next event's."""
        entry = self.catalog.listed[key]

        def give_up() -> None:
            if self.catalog.listed.get(key) is not entry or entry.leaving:
                return  # it left meanwhile, and may be there anew
            if entry.ready:
                text = "%s: its weights should be on the device, and do not get there: %s"
                log.error(text, key, error, extra=fields(model=entry.name, version=key))
            else:
                self._fail(key, entry, f"its weights cannot be loaded: {error}")

        self._inbox.post(give_up)

    def _fail(self, key: str, entry: ModelEntry, reason: str) -> None:
        """A model does not get ready: say why to all that want it, and forget it."""
        _say_not_loaded(entry.name, key, reason)
        reason = reason[:_MAX_REASON]
        waiting = [(connection, connection.group) for connection in entry.connections.values()]
        entry.connections = {}
        entry.error = reason
        self.catalog.tell(key)
        if entry.model is None:
            self._one_build_less()
            self.catalog.drop(key)
        else:
            self._remove(key, entry)
        for connection, group in waiting:
            assert group is not None
            # A meta model's other models may stay, for others, or leave with it.
            others = tuple(other for other in group.models if other != key)
            self._leave(connection, replace(group, models=others))
            text = reason
            if group.counts is not None:
                text = f"model '{entry.name}', which it calls: {reason}"
                self._tell(group, text)
            self._transport.guard(connection, connection.send, _rejected(text))

    def _welcome(self, connection: Connection, group: Registration) -> None:
        """Tell a stub that what it wants is ready."""
        models = [to_json(self.catalog.get(key)) for key in group.models]
        concurrency = self._scheduler.settings.meta_concurrency
        settings = {
            "stub": self.catalog.policy.settings.stub.model_dump(mode="json"),
            "metrics": {"triton": self.catalog.policy.settings.metrics.triton},
            "logs": self.catalog.policy.settings.logs.model_dump(mode="json"),
            "meta": {**self.catalog.policy.settings.meta.model_dump(mode="json"), "concurrency": concurrency},
            "traces": {"enabled": self.catalog.policy.settings.traced},
        }
        connection.send_document(
            Kind.REGISTERED,
            {"key": group.key, "client": group.client, "models": models, "settings": settings},
        )


def _say_not_loaded(name: str, key: str | None, reason: str) -> None:
    log.error("%s: not loaded: %s", name, reason, extra=fields(model=name, version=key, event="not_loaded"))


def _rejected(reason: str, client: str = "") -> bytes:
    """`client`: what clients may be told, should they ask for the model all the same."""
    return pack_json(Kind.REJECTED, {"reason": reason[:_MAX_REASON], "client": client[:_MAX_REASON]})
