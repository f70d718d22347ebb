"""The state of one runtime's models, as the runtime reports it in STATE frames, and subscriptions to its changes."""

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from rsrv.wire.frames import ProtocolError

#: Maximum number of changes that a subscription holds. If more are pending, its reader gets a snapshot instead.
_MAX_PENDING_CHANGES = 4096


class ModelVersion(TypedDict):
    """One version of a model, or of a meta model, as the runtime's STATE frames have it (`rsrv.runtime.catalog`)."""

    name: str
    kind: Literal["model", "meta"]
    digest: str
    #: In a frame, "cold" means that the runtime has asked the version's stubs to leave. `DevicePresence` changes it to
    #: "leaving".
    state: Literal["loading", "ready", "leaving", "failed", "cold"]
    error: str | None
    residency: Literal["unpinned", "system", "device"] | None
    weights: Literal["absent", "loading", "resident"] | None
    #: Pids of the connected stubs that have registered the version, or are registering it.
    stubs: list[int]
    #: Keys of the models that a meta model calls.
    models: list[str]
    paused: Literal["drain", "hold", "reject"] | None


class ChangeCounter:
    """Counts the state changes of several links. Belongs to one event loop."""

    def __init__(self) -> None:
        self.count = 0
        #: Changes other than loads and evictions, which are frequent.
        self.others = 0
        self._next = asyncio.get_running_loop().create_future()

    def note(self, *, moves: bool = False) -> None:
        """Count a change. `moves` is True if only weights have moved."""
        self.count += 1
        self.others += not moves
        changed, self._next = self._next, asyncio.get_running_loop().create_future()
        changed.set_result(None)

    async def wait(self, seen: int | None = None) -> None:
        """Wait for the next change. Return at once if `seen` is given and differs from `count`."""
        if seen is None or seen == self.count:
            await asyncio.shield(self._next)


@dataclass(frozen=True, slots=True)
class StateChange:
    """A change of one version. If the version was removed, `entry` is None."""

    instance: str
    revision: int
    key: str
    entry: ModelVersion | None
    #: The version before the change. None: the version is new.
    before: ModelVersion | None

    @property
    def moves(self) -> bool:
        """True if only the state of the version's weights changed."""
        if self.before is None or self.entry is None:
            return False
        return {**self.before, "weights": None} == {**self.entry, "weights": None}


@dataclass(frozen=True, slots=True)
class StateSnapshot:
    """The whole state. The first change after it has the next revision."""

    instance: str
    revision: int
    entries: Mapping[str, ModelVersion]


#: None means that the runtime does not answer.
StateUpdate = StateSnapshot | StateChange | None


class RuntimeState:
    """Versions of a runtime's models. While the runtime does not answer, these are the last known versions."""

    def __init__(self) -> None:
        #: Identifies the runtime. Empty before the first runtime.
        self.instance = ""
        self.revision = 0
        #: Number of runtimes so far. Runtimes that started because their device woke are not counted.
        self.lives = 0
        self.entries: dict[str, ModelVersion] = {}
        self._up = False
        self._subscriptions: set[Subscription] = set()

    def take_snapshot(self, frame: Mapping[str, Any]) -> bool:
        """Apply the first STATE frame of a connection. Return True if this is a new runtime. Raises ProtocolError."""
        try:
            revision, instance, entries = (
                int(frame["revision"]),
                str(frame["instance"]),
                dict(frame["entries"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"a STATE frame lacks its {error}") from None
        new = instance != self.instance
        self.instance, self.revision, self.entries = instance, revision, entries
        return new

    def take_change(self, frame: Mapping[str, Any]) -> StateChange:
        """Apply a later STATE frame, and return its change. Raises ProtocolError."""
        try:
            revision, key, entry = int(frame["revision"]), str(frame["key"]), frame["entry"]
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"a STATE frame lacks its {error}") from None
        if revision != self.revision + 1:
            raise ProtocolError(f"the runtime's state jumps from revision {self.revision} to {revision}")
        self.revision = revision
        before = self.entries.pop(key, None) if entry is None else self.entries.get(key)
        if entry is not None:
            self.entries[key] = entry
        return StateChange(self.instance, revision, key, entry, before)

    def free_weights(self) -> None:
        """Record that no weights are left on the device."""
        for entry in self.entries.values():
            entry["weights"] = "absent" if entry["weights"] else None

    def snapshot(self) -> StateSnapshot | None:
        """Return the whole state, or None if the runtime does not answer."""
        return StateSnapshot(self.instance, self.revision, dict(self.entries)) if self._up else None

    # --- subscriptions ------------------------------------------------------------------------------------

    def subscribe(self, some: asyncio.Event | None = None) -> "Subscription":
        """Subscribe to a snapshot and all later changes. Each of them sets `some`. The caller must close the subscription."""
        subscription = Subscription(self, some or asyncio.Event())
        self._subscriptions.add(subscription)
        return subscription

    def unsubscribe(self, subscription: "Subscription") -> None:
        self._subscriptions.discard(subscription)

    def publish(self, change: StateChange | None, *, up: bool = True) -> None:
        """Send a change to the subscribers. None means that the runtime came up or went down."""
        self._up = up
        for subscription in self._subscriptions:
            subscription.tell(change)


class Subscription:
    """A snapshot of the runtime's state, and then its changes. A slow reader gets another snapshot instead of many changes."""

    def __init__(self, state: RuntimeState, some: asyncio.Event) -> None:
        self._state = state
        self._some = some
        self._changes: deque[StateChange] = deque()
        #: True if the next item must be a snapshot.
        self._stale = True
        some.set()

    def tell(self, change: StateChange | None) -> None:
        """Add a change. None means that several versions changed, or that the runtime came up or went down."""
        if change is None or len(self._changes) >= _MAX_PENDING_CHANGES:
            self._stale = True
            self._changes.clear()
        if change is not None and not self._stale:
            self._changes.append(change)
        if self.pending:
            self._some.set()

    @property
    def pending(self) -> bool:
        """True if `take` has a change or a snapshot to return."""
        return self._stale or bool(self._changes)

    def take(self) -> StateUpdate:
        """Return the next change or snapshot. One must be pending."""
        if self._stale:
            self._stale = False
            return self._state.snapshot()
        return self._changes.popleft()

    async def next(self) -> StateUpdate:
        """Wait for the next change or snapshot, and return it. The subscription's event must belong to it alone."""
        while not self.pending:
            self._some.clear()
            await self._some.wait()
        return self.take()

    def close(self) -> None:
        self._state.unsubscribe(self)
