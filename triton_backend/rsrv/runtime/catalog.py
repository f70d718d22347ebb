"""Models of the runtime: the state of each model, and the feed that sends watchers every change."""

import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, reduce
from math import inf
from typing import Any, Literal, NamedTuple

from rsrv.runtime.model_states import (
    BUILDING,
    ENDING,
    TRANSITIONS,
    LifecycleError,
    LifecycleEvent,
    LifecycleState,
)
from rsrv.runtime.models import CompiledModel
from rsrv.runtime.policy import Policy
from rsrv.runtime.start_queue import Demand
from rsrv.runtime.transport import PeerConnection, Registration, Transport
from rsrv.scheduler.history import HistoryRecord
from rsrv.wire.frames import Kind
from rsrv.wire.memory import BOARD_SLOTS

#: Maximum number of entries of failed models that the feed keeps.
_MAX_FAILED = 256
#: If a stub without requests disconnects within this many seconds after the runtime asked it to disconnect, the runtime takes
#: this as the reason. If the stub disconnects later, it has another reason.
_LEAVE_S = 2.0


WatchedState = Literal["loading", "ready", "leaving", "cold", "failed"]
WatchedWeights = Literal["absent", "loading", "resident"]

WATCHED_STATES: Mapping[LifecycleState, WatchedState] = {
    **dict.fromkeys(BUILDING, "loading"),
    LifecycleState.READY: "ready",
    LifecycleState.DRAINING: "leaving",
    LifecycleState.FAILED: "failed",
}


@dataclass(slots=True)
class ModelEntry:
    """A model that connections have registered, with its state."""

    key: str
    name: str
    #: Digest of the bundle.
    digest: str
    state: LifecycleState = LifecycleState.READING
    #: Changes of the model's state, oldest first.
    history: list[HistoryRecord] = field(default_factory=list)
    #: The compiled model. It is set from the state WARMING_UP on.
    model: CompiledModel | None = None
    weights: WatchedWeights = "absent"
    #: Reason of the failure.
    error: str | None = None
    #: Progress of the model's start, for clients.
    step: str = "it waits for its turn to be built"
    connections: dict[int, PeerConnection] = field(default_factory=dict)
    #: Demand of a model that is started before any stub connects for it. It keeps the model until a connection registers a
    #: model of the same name.
    held: Demand | None = None
    #: Number of the model's slot on the board. 0: no slot was free.
    slot: int = 0

    @property
    def ready(self) -> bool:
        return self.state is LifecycleState.READY

    @property
    def wanted(self) -> bool:
        return self.held is not None or bool(self.connections)

    @property
    def demand(self) -> Demand:
        """The combination (`Demand.stronger`) of `held` and of the demands of all connections. At least one of them exists."""
        demands = [connection.demand for connection in self.connections.values()]
        return reduce(Demand.stronger, demands if self.held is None else [*demands, self.held])

    @property
    def ending(self) -> bool:
        """True if the model will be removed as soon as the scheduler releases it."""
        return self.state in ENDING

    def note(self, why: str, now: float) -> None:
        """Add the new state to the history."""
        self.history.append(HistoryRecord(now, *_state_record(self.state, why)))

    def advance(self, event: LifecycleEvent, now: float) -> None:
        """Move to the state that TRANSITIONS has for the current state and this event.

        Raises:
            LifecycleError: TRANSITIONS has no such entry. Nothing has changed.
        """
        state = TRANSITIONS.get((self.state, event))
        if state is None:
            history = "".join(f"\n  {record}" for record in self.history)
            raise LifecycleError(f"model {self.key} is {self.state}, and cannot be {event} now{history}")
        self.state = state
        self.note(event.value, now)


@cache
def _state_record(state: LifecycleState, why: str) -> tuple[str, Mapping[str, str]]:
    """Return the text and the fields of a history record about a change of state. Equal records share these values."""
    return f"model {state}", {"why": why}


class FeedEntry(NamedTuple):
    """One version of a model or meta model, as watchers see it."""

    name: str
    kind: Literal["model", "meta"]
    #: Digest of the bundle.
    digest: str
    state: WatchedState
    #: Reason of the failure, if the state is `failed`.
    error: str | None = None
    #: The model's residency. None for a meta model.
    residency: str | None = None
    #: State of the model's weights. None for a meta model.
    weights: WatchedWeights | None = None
    #: Pids of the stubs that have registered the model, or are about to.
    stubs: tuple[int, ...] = ()
    #: Keys of the models that a meta model calls.
    models: tuple[str, ...] = ()
    #: Mode in which the model is paused, or None. For a meta model, the first pause among the models that it calls.
    paused: str | None = None


class StateFeed:
    """Entries by key, and the connections that watch them. Each watcher gets each change once and in order.

    Changes are sent before commands are answered and at the end of the loop's round (`flush`). They are not sent at once,
    because the failure of a watcher's connection itself changes entries. The connection of a watcher that does not read is
    closed, like any connection.

    The first STATE frame after WATCH has a memfd with `{"instance", "revision", "entries": {KEY: ENTRY…}}`. Each further frame
    is a change: `{"revision", "key", "entry"}`, with null for a removed entry. The KEY of a version is `NAME@` and 12
    hexadecimal digits. The KEY of a bundle that cannot be read is `NAME@`.
    """

    def __init__(self, transport: Transport) -> None:
        #: Random id of this runtime. Revisions of different runtimes cannot be compared.
        self.instance = secrets.token_hex(8)
        #: Number of changes so far.
        self.revision = 0
        self._transport = transport
        self._entries: dict[str, FeedEntry] = {}
        #: Keys of failed entries, oldest first.
        self._failed: dict[str, None] = {}
        self._watchers: dict[int, PeerConnection] = {}
        #: Changes that are not sent yet.
        self.unsent: list[dict[str, Any]] = []

    # --- changes ------------------------------------------------------------------------------------------

    def put(self, key: str, entry: FeedEntry) -> None:
        """Set an entry. A new entry replaces failed entries of the same name."""
        known = self._entries.get(key)
        if entry == known:
            return
        if known is None:
            self.forget_failed(entry.name)
        self._change(key, entry)
        if len(self._failed) > _MAX_FAILED:
            self._change(next(iter(self._failed)), None)

    def gone(self, key: str) -> None:
        """Remove an entry, unless it has failed: failures stay visible."""
        if key in self._entries and key not in self._failed:
            self._change(key, None)

    def forget_failed(self, name: str) -> None:
        """Remove the failed entries of a name, because another version has arrived or may start."""
        for failed in [key for key in self._failed if self._entries[key].name == name]:
            self._change(failed, None)

    def _change(self, key: str, entry: FeedEntry | None) -> None:
        self._failed.pop(key, None)
        if entry is None:
            del self._entries[key]
        else:
            self._entries[key] = entry
            if entry.state == "failed":
                self._failed[key] = None
        self.revision += 1
        if self._watchers:
            changed = None if entry is None else entry._asdict()
            self.unsent.append({"revision": self.revision, "key": key, "entry": changed})

    # --- watchers -----------------------------------------------------------------------------------------

    def watch(self, connection: PeerConnection) -> None:
        """Send a connection all entries, and every change from now on."""
        self.flush()
        connection.send_document(Kind.STATE, self.snapshot())
        self._watchers[connection.id] = connection

    def leave(self, connection: PeerConnection) -> None:
        self._watchers.pop(connection.id, None)

    def snapshot(self) -> dict[str, Any]:
        return {
            "instance": self.instance,
            "revision": self.revision,
            "entries": {key: entry._asdict() for key, entry in self._entries.items()},
        }

    def flush(self) -> None:
        """Send all watchers the changes since the last flush."""
        while self.unsent:
            changes, self.unsent = self.unsent, []
            for watcher in list(self._watchers.values()):
                for change in changes:
                    self._transport.guard(watcher, watcher.send_object, Kind.STATE, change)


class Catalog:
    """All models by key. `tell` updates the entries in the feed, which watchers see."""

    def __init__(self, policy: Policy, feed: StateFeed, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.policy = policy
        self.feed = feed
        self.entries: dict[str, ModelEntry] = {}
        #: Keys of models that are being read, compiled or warmed up.
        self.building: set[str] = set()
        #: Keys of models that wait for the scheduler to release them.
        self.ending: set[str] = set()
        #: Times when stubs were asked to disconnect until a request arrives, by the key of the model or meta model.
        self._dismissed: dict[str, float] = {}
        #: Keys of models whose weights have moved since the board was written.
        self.moves: set[str] = set()
        #: Keys of models that have changed since the last record was written.
        self.touched: set[str] = set()
        #: Version counter: rises when a model is added, removed or changes state.
        self.changes = 0
        #: Free slots of the board, the next one last.
        self._slots = list(range(BOARD_SLOTS - 1, 1, -1))

    # --- lookups ------------------------------------------------------------------------------------------

    def get(self, key: str) -> CompiledModel:
        """Return the compiled model of a key. The scheduler uses only keys of compiled models."""
        model = self.entries[key].model
        assert model is not None
        return model

    def served_by(self, connection: PeerConnection) -> CompiledModel | None:
        """Return the model that a connection has registered, if the model is ready."""
        group = connection.group
        if group is None or group.is_meta:
            return None
        entry = self.entries[group.key]
        return entry.model if entry.state is LifecycleState.READY else None

    def models(self) -> list[CompiledModel]:
        """Return all compiled models."""
        return [entry.model for entry in self.entries.values() if entry.model is not None]

    def resident(self) -> set[str]:
        """Return the keys of models whose weights are on the device."""
        return {key for key, entry in self.entries.items() if entry.weights == "resident"}

    def serves(self, name: str, but: str = "") -> bool:
        """Return whether a model of that name is not ending. `but`: key of a version to ignore."""
        return any(
            entry.name == name and not entry.ending and entry.key != but for entry in self.entries.values()
        )

    def compiled(self, names: Iterable[str] | None) -> tuple[str, ...]:
        """Return the keys of compiled models that are not ending. `names`: names of the models, or None for all models.

        The scheduler knows these models.
        """
        chosen = None if names is None else set(names)
        return tuple(
            key
            for key, entry in self.entries.items()
            if entry.model is not None and not entry.ending and (chosen is None or entry.name in chosen)
        )

    def ready(self, group: Registration) -> bool:
        """Return whether all models of a registration are ready."""
        entries = [self.entries.get(key) for key in group.models]
        return all(entry is not None and entry.ready for entry in entries)

    # --- changes ------------------------------------------------------------------------------------------

    def add(self, key: str, name: str, digest: str) -> ModelEntry:
        """Add a model in its first state."""
        self.changes += 1
        slot = self._slots.pop() if self._slots else 0
        entry = self.entries[key] = ModelEntry(key, name, digest, slot=slot)
        entry.note("registered", self._clock())
        self.building.add(key)
        self.moves.add(key)
        return entry

    def advance(self, key: str, event: LifecycleEvent) -> None:
        """Move a model to its next state.

        Raises:
            LifecycleError: its state does not allow the event.
        """
        entry = self.entries[key]
        entry.advance(event, self._clock())
        self.changes += 1
        if entry.state not in BUILDING:
            self.building.discard(key)
        if entry.ending:
            self.ending.add(key)
        if entry.state is LifecycleState.GONE:
            self.ending.discard(key)
            del self.entries[key]
            self.moves.discard(key)
            self._dismissed.pop(key, None)
            if entry.slot:
                self._slots.append(entry.slot)
            self.feed.gone(key)
        else:
            self.tell(key)

    def moved(self, key: str, weights: WatchedWeights) -> None:
        """Record where a model's weights are."""
        self.entries[key].weights = weights
        self.moves.add(key)
        self.tell(key)

    def dismiss(self, key: str) -> None:
        """Record that the stubs of a model or meta model were asked to disconnect until a request arrives."""
        self._dismissed[key] = self._clock()

    def is_dismissed(self, key: str, within: float = _LEAVE_S) -> bool:
        """Return whether the stubs of a model or meta model were asked to disconnect less than `within` seconds ago.

        If so, these stubs may be about to disconnect.
        """
        return self._clock() - self._dismissed.get(key, -inf) < within

    @property
    def is_dismissing(self) -> bool:
        """True if stubs of any model may still be about to disconnect because the runtime asked them to."""
        return any(map(self.is_dismissed, self._dismissed))

    def tell(self, key: str) -> None:
        """Update the feed's entry of a model."""
        self.touched.add(key)
        self.feed.put(key, self._feed_entry(self.entries[key]))

    def _feed_entry(self, entry: ModelEntry) -> FeedEntry:
        draining = entry.state is LifecycleState.DRAINING
        own = (c for c in entry.connections.values() if c.group is not None and c.group.key == entry.key)
        return FeedEntry(
            entry.name,
            "model",
            entry.digest,
            "cold" if draining and self.is_dismissed(entry.key) else WATCHED_STATES[entry.state],
            entry.error,
            self.policy.residency(entry.name),
            entry.weights,
            _pids(own),
            paused=_paused(self.policy, entry.name),
        )

    def tell_unreadable(self, name: str, reason: str, *, is_meta: bool) -> None:
        """Report to watchers why a model's bundle cannot be read. The model does not serve, and its entry has no digest."""
        self.feed.put(f"{name}@", FeedEntry(name, "meta" if is_meta else "model", "", "failed", reason))

    def tell_meta(self, group: Registration, error: str | None = None) -> None:
        """Update the feed's entry of a meta model. `error`: the reason why it cannot be served, or None."""
        stubs = _pids(group.connections.values())
        if error is None and not stubs:
            if self.is_dismissed(group.key):
                self.feed.put(
                    group.key, FeedEntry(group.name, "meta", group.digest, "cold", models=group.models)
                )
            self._dismissed.pop(group.key, None)
            self.feed.gone(group.key)
            return
        paused = (mode for name in group.calls if (mode := _paused(self.policy, name)))
        state: WatchedState = "ready" if self.ready(group) else "loading"
        self.feed.put(
            group.key,
            FeedEntry(
                group.name,
                "meta",
                group.digest,
                state if error is None else "failed",
                error,
                stubs=stubs if error is None else (),
                models=group.models,
                paused=next(paused, None),
            ),
        )


def _pids(connections: Iterable[PeerConnection]) -> tuple[int, ...]:
    return tuple(sorted({connection.peer for connection in connections}))


def _paused(policy: Policy, name: str) -> str | None:
    mode = policy.paused(name)
    return None if mode is None else mode.value
