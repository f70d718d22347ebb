"""The models of a runtime: read, built, joined, left. Its state belongs to the loop; the work is done on a thread."""

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from rsrv.runtime.blackbox import Deaths
from rsrv.runtime.budget import Budget, solve_budget
from rsrv.runtime.connection import Connection, Group, MetaCounts
from rsrv.runtime.device import CacheCounts, Device, DeviceError, OutOfMemory
from rsrv.runtime.equipment import Equipment
from rsrv.runtime.heap import give_back
from rsrv.runtime.host_memory import HostMemoryError
from rsrv.runtime.models import Model, Wanted, build, identify, warm_up, wire_tensors
from rsrv.runtime.scheduler import events as ev
from rsrv.runtime.scheduler.scheduler import Scheduler
from rsrv.runtime.tiers import Tiers
from rsrv.runtime.transport import Transport
from rsrv.runtime.underway import Phase, Underway
from rsrv.runtime.workers import Inbox, Worker
from rsrv.settings import Settings, SettingsError, with_residency
from rsrv.wire.frames import Kind, ProtocolError, pack_json
from rsrv_bundle import Bundle, BundleError

log = logging.getLogger("rsrv.registry")


@dataclass(slots=True)
class _Entry:
    """A model by its key: being built (no `model` yet), warmed up, or ready; with the connections that want it."""

    name: str
    model: Model | None = None
    ready: bool = False
    connections: dict[int, Connection] = field(default_factory=dict)
    #: nobody wants it any more, but it still executes or loads
    leaving: bool = False
    #: what to do once it has left: those who wanted the same bundle again meanwhile
    afterwards: list[Callable[[], None]] = field(default_factory=list)


class Registry:
    """`feed` gives the scheduler an event and carries out what it says; `forget` drops what is kept per model's key.

    `make_device` runs on the build thread: importing jax takes seconds in which stubs may already connect.
    `rebudget` is called when what weights may take has changed: there is a device, or there are other models.
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
        rebudget: Callable[[], None],
        underway: Underway,
        deaths: Deaths,
    ) -> None:
        self._settings = settings
        self._scheduler = scheduler
        self._inbox = inbox
        self._transport = transport
        self._feed = feed
        self._forget = forget
        self._rebudget = rebudget
        self._underway = underway
        self._deaths = deaths
        self._builder = Worker("build")
        # A thread of its own: weights stay on the device until it is done, and a compilation takes seconds to minutes.
        self._warmer = Worker("warm up")
        self._entries: dict[str, _Entry] = {}
        #: the latest complaint about the budget
        self._tight: str | None = None
        #: models being built or warmed up now
        self.builds = 0
        #: None until it is made
        self.device: Device | None = None
        self.tiers: Tiers | None = None
        self._equipment = Equipment(make_device, settings, inbox, self._equipped, underway.weights)
        self._builder.put(self._equipment.begin)

    def _equipped(self, device: Device, tiers: Tiers) -> None:
        self.device, self.tiers = device, tiers
        self._rebudget()

    def find(self, connection: Connection) -> Model | None:
        """The model that a connection is for, if it is ready."""
        group = connection.group
        if group is None or group.counts is not None:
            return None
        entry = self._entries[group.key]
        return entry.model if entry.ready else None

    def get(self, key: str) -> Model:
        """The model that the scheduler speaks of: it knows built ones only."""
        model = self._entries[key].model
        assert model is not None
        return model

    def models(self) -> list[Model]:
        """All that are built."""
        return [entry.model for entry in self._entries.values() if entry.model is not None]

    @property
    def names(self) -> dict[str, str]:
        """Of all models, built or not, by key."""
        return {key: entry.name for key, entry in self._entries.items()}

    def metas(self) -> list[Group]:
        """All meta models that somebody serves."""
        return [group for group in self._groups().values() if group.counts is not None]

    def _groups(self) -> dict[str, Group]:
        """What connections are for, by key."""
        groups = (connection.group for connection in self._transport.connections)
        return {group.key: group for group in groups if group is not None}

    @property
    def kept_limit(self) -> int | None:
        """Bytes that runs of meta models may keep on the device: half of what is neither weights nor scratch."""
        arena = None if self.device is None else self.device.memory_limit
        return None if arena is None else int(arena * self._settings.runtime.weight_slack_fraction / 2)

    @property
    def cache_counts(self) -> CacheCounts:
        return getattr(self.device, "cache_counts", CacheCounts())

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
            if group is None or not self.ready(group):
                connection.send(_rejected(f"{key} is not loaded"))
            else:
                self._join(connection, group)
            return
        name, path, calls = wanted.get("model"), wanted.get("bundle"), wanted.get("calls", {})
        if not isinstance(name, str) or not isinstance(path, str) or not isinstance(calls, dict):
            raise ProtocolError("REGISTER without a model's name and its bundle's path")

        def read() -> None:
            result: Wanted | str
            client = ""
            try:
                result = identify(name, path, calls)
                for one in result.models:
                    if verdict := self._deaths.verdict(one):
                        result = client = f"{one}: {verdict}"
                        break
            except BundleError as error:
                result = str(error)
            except Exception as error:
                log.exception("%s: cannot read the bundle", name)
                result = f"{type(error).__name__}: {error}"
            self._inbox.post(lambda: self._identified(connection, result, client))

        self._builder.put(read)

    def leave(self, connection: Connection) -> None:
        """A connection ended; a model that nobody wants any more is unloaded."""
        group, connection.group = connection.group, None
        for key in () if group is None else group.models:
            entry = self._entries[key]
            del entry.connections[connection.id]
            if not entry.connections and entry.model is not None and not entry.leaving:
                log.info("%s: unloaded", entry.name)
                self._remove(key, entry)

    def _remove(self, key: str, entry: _Entry) -> None:
        if not entry.ready:
            self._one_build_less()
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
        assert entry.model is not None
        self._close(entry.model)
        self._rebudget()
        for action in entry.afterwards:
            action()

    def _close(self, model: Model) -> None:
        """Give up its weights on the host, after what was asked for before: to free them, or to keep a copy."""

        def close() -> None:
            self._builder.put(model.host.close)
            # By then everybody has let go of the model.
            self._builder.put(give_back)

        self._tiers.when_moved(close)

    def _identified(self, connection: Connection, result: Wanted | str, client: str = "") -> None:
        if connection.closed:
            return
        if isinstance(result, str):
            self._transport.guard(connection, connection.send, _rejected(result, client))
            return
        wanted = result
        for key in wanted.models:
            entry = self._entries.get(key)
            if entry is not None and entry.leaving:
                entry.afterwards.append(lambda: self._identified(connection, wanted))
                return
        for key, (name, bundle) in wanted.models.items():
            if key not in self._entries:
                self._entries[key] = _Entry(name)
                self.builds += 1
                self._builder.put(partial(self._build, key, name, bundle))
        meta = wanted.bundle.manifest.kind == "meta"
        group = self._groups().get(wanted.key) or Group(
            wanted.key,
            wanted.name,
            tuple(wanted.models),
            wire_tensors(wanted.bundle),
            wanted.bundle.manifest.meta_calls,
            MetaCounts() if meta else None,
        )
        self._transport.guard(connection, self._join, connection, group)

    def _join(self, connection: Connection, group: Group) -> None:
        connection.group = group
        for key in group.models:
            self._entries[key].connections[connection.id] = connection
        if self.ready(group):
            self._welcome(connection, group)

    def ready(self, group: Group) -> bool:
        """Whether all its models are."""
        entries = [self._entries.get(key) for key in group.models]
        return all(entry is not None and entry.ready and not entry.leaving for entry in entries)

    # --- building -----------------------------------------------------------------------------------------

    def _build(self, key: str, name: str, bundle: Bundle) -> None:
        """On the build thread."""
        result: Model | str
        try:
            device, tiers = self._equipment.get()
            with self._underway.build.doing(Phase.BUILDING, key):
                result = build(bundle, device, tiers.host, self._settings, name)
            # What a model is made of lives long: keep the collector from walking over it ever again.
            gc.collect()
            gc.freeze()
        except (BundleError, DeviceError, HostMemoryError) as error:
            result = str(error)
        except Exception as error:
            log.exception("%s: cannot be loaded", name)
            result = f"{type(error).__name__}: {error}"
        self._inbox.post(lambda: self._built(key, result))

    def _built(self, key: str, result: Model | str) -> None:
        entry = self._entries[key]
        if isinstance(result, str):
            self._fail(key, entry, result)
            return
        entry.model = result
        residency = self._settings.for_model(entry.name).residency
        if result.residency != residency:
            # It was changed meanwhile.
            result.residency = residency
            result.program = replace(result.program, pinned=residency == "device")
            self._builder.put(partial(self._tiers.follow, result))
        if not entry.connections:
            del self._entries[key]
            self._one_build_less()
            self._close(result)
            return
        # Its executions need room beside all weights: first they get it, then its weights may come.
        self._rebudget()
        self._feed(ev.ModelAdded(result.program, warm_up=True))

    def warm_up(self, key: str, *, again: bool) -> None:
        """A model's weights are there: execute every size of it, and then serve it. `again`: it found no memory."""
        model, device = self.get(key), self.device
        assert device is not None

        def run() -> None:
            costs, error = None, ""
            try:
                costs = warm_up(model, device, self._underway.warm_up)
                self._deaths.survived(key)
            except Exception as caught:
                if isinstance(caught, OutOfMemory) and not again:
                    log.warning("%s: no memory on the device to warm it up: %s", model.name, caught)
                    self._inbox.post(lambda: self._feed(ev.WarmUpEnded(key, None, out_of_memory=True)))
                    return
                log.exception("%s: cannot be warmed up", model.name)
                error = f"{type(caught).__name__}: {caught}"
            self._inbox.post(lambda: self._warmed_up(model, costs, error))

        self._warmer.put(run)

    def _warmed_up(self, model: Model, costs: dict[tuple[int, int], float] | None, error: str) -> None:
        key = model.key
        self._feed(ev.WarmUpEnded(key, costs))
        entry = self._entries.get(key)
        if entry is None or entry.leaving:
            self.let_go(key)
        elif costs is None:
            self._fail(key, entry, error)
        else:
            model.program = replace(model.program, costs=costs)
            entry.ready = True
            self._one_build_less()
            for connection in list(entry.connections.values()):
                if connection.group is not None and self.ready(connection.group):
                    self._transport.guard(connection, self._welcome, connection, connection.group)

    def _one_build_less(self) -> None:
        """A model is ready, or will never be."""
        self.builds -= 1
        if not self.builds and self.tiers is not None:
            # Whoever wants what other runtimes left in shared memory has taken it.
            self._builder.put(self.tiers.host.sweep)
            self._rebudget()

    def give_up(self, key: str, error: str) -> None:
        """The weights of a model that should come for their own sake do not; what follows is the next event's."""
        entry = self._entries[key]

        def give_up() -> None:
            if self._entries.get(key) is not entry or entry.leaving:
                return  # it left meanwhile, and may be there anew
            if entry.ready:
                log.error("%s: its weights should be on the device, and do not get there: %s", key, error)
            else:
                self._fail(key, entry, f"its weights cannot be loaded: {error}")

        self._inbox.post(give_up)

    def _fail(self, key: str, entry: _Entry, reason: str) -> None:
        """A model does not get ready: say why to all that want it, and forget it."""
        log.error("%s: not loaded: %s", entry.name, reason)
        waiting = [(connection, connection.group) for connection in entry.connections.values()]
        entry.connections = {}
        if entry.model is None:
            self._one_build_less()
            del self._entries[key]
        else:
            self._remove(key, entry)
        for connection, group in waiting:
            assert group is not None
            # A meta model's other models may stay, for others, or leave with it.
            others = tuple(other for other in group.models if other != key)
            connection.group = replace(group, models=others)
            self.leave(connection)
            text = reason if group.counts is None else f"model '{entry.name}', which it calls: {reason}"
            self._transport.guard(connection, connection.send, _rejected(text))

    def _welcome(self, connection: Connection, group: Group) -> None:
        """Tell a stub that what it wants is ready."""
        models = [self.get(key) for key in group.models]
        described = [
            {
                "name": model.name,
                "interface": model.interface.to_json(),
                "client": wire_tensors(model.bundle),
                "batched": model.bundle.manifest.rows_first,
                "cost_ns": int(min(model.program.costs.values()) * 1e9),
            }
            for model in models
        ]
        settings = {
            "stub": self._settings.stub.model_dump(mode="json"),
            "meta": {
                **self._settings.meta.model_dump(mode="json"),
                "concurrency": self._scheduler.settings.meta_concurrency,
            },
        }
        connection.send_document(
            Kind.REGISTERED,
            {"key": group.key, "client": group.client, "models": described, "settings": settings},
        )

    # --- weights ------------------------------------------------------------------------------------------

    @property
    def _tiers(self) -> Tiers:
        assert self.tiers is not None, "models are built when there is a device"
        return self.tiers

    def load(self, key: str, epoch: int) -> None:
        """Bring a model's weights to the device."""
        model = self.get(key)
        self._tiers.load(model, epoch, lambda event: self._loaded(event, model))

    def abandon(self, epoch: int) -> None:
        """Nobody waits for this load any more."""
        self._tiers.abandon(epoch)

    def evict(self, key: str, heir: str | None) -> None:
        """Give the memory of a model's weights back, but for what the next load needs; nothing executes on them."""
        self._tiers.free(self.get(key), None if heir is None else self.get(heir))

    def when_moved(self, action: Callable[[], None]) -> None:
        """Do something on the loop when all that was asked for before has been loaded or freed."""
        self._tiers.when_moved(action)

    def _loaded(self, event: ev.WeightsLoaded | ev.LoadFailed | ev.LoadAbandoned, model: Model) -> None:
        self._feed(event)
        if model.weights is not None and model.residency == "device":
            self._builder.put(partial(self._tiers.follow, model))
        self.let_go(model.key)

    def set_residency(self, name: str, residency: str) -> None:
        """Where the weights of a model, in all its versions, are for sure from now on.

        Raises SettingsError: there is no such model, or no such residency.
        """
        entries = [entry for entry in self._entries.values() if entry.name == name and not entry.leaving]
        if not entries:
            raise SettingsError(f"there is no model {name!r}")
        self._settings = with_residency(self._settings, name, residency)
        wanted = self._settings.for_model(name).residency
        for entry in entries:
            model = entry.model
            if model is None:
                continue
            log.info("%s: residency %s, was %s", model.key, wanted, model.residency)
            # Again, if nothing changes: its load, or its copy, may have failed before.
            model.residency = wanted
            if wanted != "device" or model.weights is not None:
                self._builder.put(partial(self._tiers.follow, model))
            # else the host's copy, if there is one, is what the load reads
            self._feed(ev.Pinned(model.key, wanted == "device"))
        self._rebudget()

    def solve_budget(self, depth: int) -> Budget:
        """What weights may take of the device's memory, as the models and the device are now. Says what is tight.

        `depth`: executions that the device has at once.
        """
        runtime = self._settings.runtime
        models = self.models()
        pinned = {
            key: size for m in models if m.residency == "device" for key, size in m.host.distinct.items()
        }
        budget = solve_budget(
            arena=None if self.device is None else self.device.memory_limit,
            fraction=runtime.weight_fraction,
            slack=runtime.weight_slack_fraction,
            # As many executions have their inputs, outputs and intermediate results there at once; a warm-up's, too.
            scratch=(depth + (self.builds > 0)) * max((model.scratch for model in models), default=0),
            pinned=sum(pinned.values()),
            limit=runtime.weight_budget_bytes,
        )
        largest = max((m.host.device_bytes for m in models if m.residency != "device"), default=0)
        tight = budget.complaint(largest)
        if tight and tight != self._tight:
            log.warning("%s", tight)
        self._tight = tight
        return budget


def _rejected(reason: str, client: str = "") -> bytes:
    """`client`: what clients may be told, should they ask for the model all the same."""
    return pack_json(Kind.REJECTED, {"reason": reason[:4000], "client": client[:4000]})
