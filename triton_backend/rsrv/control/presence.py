"""The models of a server and their stubs, as its runtimes and Triton report them. Pure: time is an argument.

In the control process, only `Presence` knows which models serve, which are cold or expected to return, and which have a dead
stub. Runtimes report versions and connected stubs. `stub_monitor` reports which models Triton has loaded and which processes
live.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from rsrv.control.runtime_state import ModelVersion

#: A stub counts as dead if two polls at least this many seconds apart have found it dead.
AGREE_S = 0.5
#: `stub_monitor` needs at most this many seconds to see a dismissed stub alive without a connection.
_SEEN_S = 10.0


@dataclass(frozen=True, slots=True)
class StubPoll:
    """The result of one poll of Triton and of the server's processes."""

    #: Models whose stubs live without a connection.
    unconnected: Collection[str] = ()
    #: Models whose stubs will not connect again, because the stubs are dead or Triton has unloaded the models.
    gone: Collection[str] = ()
    #: Models that Triton calls ready and that have no process.
    without_process: Collection[str] = ()


class DevicePresence:
    """Models and meta models of one device's runtime, by name."""

    def __init__(self, server: "Presence") -> None:
        self._server = server
        #: True while the runtime answers.
        self.up = False
        #: Unix time since which the device sleeps. None: it is awake.
        self.asleep_since: float | None = None
        #: Versions of each model by key. While the runtime does not answer, these are the last known versions.
        self._versions: dict[str, dict[str, ModelVersion]] = {}
        #: Models with a ready version.
        self.ready: set[str] = set()
        #: Models with a loading version and no ready one.
        self.loading: set[str] = set()
        #: Models with a connected stub.
        self._connected: set[str] = set()
        #: Models that had a stub before the runtime last ended or stopped answering, and have had none since.
        self._before: set[str] = set()
        #: Models whose stubs wait for the next request without a connection, with the time when the runtime dismissed the stubs
        #: or the device fell asleep.
        self._dismissed: dict[str, float] = {}

    @property
    def dismissed(self) -> set[str]:
        """Models whose stubs wait without a connection, because this runtime or the one before a sleep dismissed them."""
        return {*self._dismissed}

    @property
    def returning(self) -> set[str]:
        """Models that had a stub before the runtime last ended, and have had none since.

        They remain in this set until the stub connects or is found dead, or the model is unloaded. This may take minutes,
        because the runtime may compile other models first.
        """
        return self._before - self._dismissed.keys()

    @property
    def attached(self) -> set[str]:
        """Models with a connected stub, or while the device sleeps, models with a waiting stub.

        Empty while the runtime is down for another reason.
        """
        if self.asleep_since is not None:
            return self.dismissed
        return set(self._connected) if self.up else set()

    def versions(self, name: str) -> Iterable[ModelVersion]:
        """Return the versions of a model. While the runtime does not answer, these are the last known versions."""
        return self._versions.get(name, {}).values()

    def begin(self, entries: Mapping[str, ModelVersion], now: float) -> None:
        """Replace all versions by the versions of a new connection to the runtime. The caller then calls `come_up`."""
        for names in (self._versions, self.ready, self.loading, self._connected):
            names.clear()
        for key, entry in entries.items():
            self.follow(key, entry, now)
        self._server.end_starts()

    def follow(self, key: str, entry: ModelVersion | None, now: float) -> None:
        """Record a version. If `entry` is None, the version is gone.

        If the runtime has asked the stubs of the version to leave, the version's state becomes "leaving".
        """
        name = key.rpartition("@")[0]
        served, waited = self._server.serves(name), self._server.waits(name)
        versions = self._versions.setdefault(name, {})
        if entry is None:
            versions.pop(key, None)
        else:
            versions[key] = entry
            if entry["state"] == "cold":
                self._dismissed[name] = now
                entry["state"] = "leaving"
            elif entry["stubs"]:
                self._dismissed.pop(name, None)
                if self.up:
                    self._before.discard(name)
        states = {version["state"] for version in versions.values()}
        _put(self.ready, name, "ready" in states)
        _put(self.loading, name, "loading" in states and "ready" not in states)
        _put(self._connected, name, any(version["stubs"] for version in versions.values()))
        if not versions:
            del self._versions[name]
        self._server.note(name, served=served, waited=waited)

    def come_up(self) -> None:
        """Record that the runtime answers again."""
        self.up, self.asleep_since = True, None
        self._before -= self._connected

    def go_down(self) -> None:
        """Record that the runtime no longer answers."""
        self._before = self.attached | self.returning
        self.up = False

    def fall_asleep(self, since: float, now: float) -> None:
        """Record that the device sleeps: stubs wait for requests without a connection. `since` is a Unix time."""
        self.asleep_since = since
        self._dismissed |= dict.fromkeys(self._before, now)

    def see(self, unconnected: Collection[str], now: float) -> None:
        """Forget dismissed models whose stubs are gone. The stubs of `unconnected` models were seen alive."""
        until = now - _SEEN_S
        self._dismissed = {
            name: since for name, since in self._dismissed.items() if since > until or name in unconnected
        }

    def forget(self, names: Collection[str]) -> None:
        """Stop expecting the stubs of these models."""
        self._before.difference_update(names)


def _put(names: set[str], name: str, belongs: bool) -> None:
    if belongs:
        names.add(name)
    else:
        names.discard(name)


class Presence:
    """Models and meta models of a server, by name."""

    def __init__(self, devices: int) -> None:
        self.devices = tuple(DevicePresence(self) for _ in range(devices))
        #: Models whose stubs live without a connection.
        self._unconnected: frozenset[str] = frozenset()
        #: Cold models that a runtime starts.
        self._started: set[str] = set()
        #: Models that stopped serving while a runtime answered. They may serve again.
        self.lost: set[str] = set()
        #: Models that Triton calls ready and that have no process, with the time of the first poll that found this.
        self._suspects: dict[str, float] = {}
        #: Models whose stub starts, with the time until which it may have no process.
        self._new_stubs: dict[str, float] = {}

    @property
    def up(self) -> bool:
        """True if a runtime answers."""
        return any(device.up for device in self.devices)

    @property
    def asleep(self) -> bool:
        """True if no runtime answers and a device sleeps. Its models serve as soon as a request wakes the device."""
        return not self.up and any(device.asleep_since is not None for device in self.devices)

    @property
    def attached(self) -> set[str]:
        """Models with a connected stub, or on a sleeping device, models with a waiting stub.

        Empty while no runtime answers, unless a device sleeps.
        """
        return set[str]().union(*(device.attached for device in self.devices if self.up or self.asleep))

    @property
    def returning(self) -> set[str]:
        """Models of an ended runtime whose stubs have not connected to the next runtime yet."""
        return set[str]().union(*(device.returning for device in self.devices))

    @property
    def cold(self) -> set[str]:
        """Models that no runtime serves or builds, and that start with their next request."""
        if not (self.up or self.asleep):
            return set()
        live = [device for device in self.devices if device.up]
        return self._waiting.difference(
            *(names for device in live for names in (device.ready, device.loading))
        )

    @property
    def serving(self) -> set[str]:
        """Models that accept requests, as defined by `serves`."""
        names = self.cold
        for device in self._known:
            names |= device.ready
            names |= device.loading & self._started
        return names

    def serves(self, name: str) -> bool:
        """Return True if the model accepts requests.

        It does if a runtime has a ready version of it, even without a stub, if it is cold, or if it was cold and starts.
        """
        known = self._known
        if any(name in device.ready for device in known):
            return True
        if self.waits(name):
            return self.up or self.asleep
        return name in self._started and any(name in device.loading for device in known)

    def waits(self, name: str) -> bool:
        """Return True if the stubs of a model wait for a request without a connection, and no runtime builds the model."""
        if any(device.up and (name in device.ready or name in device.loading) for device in self.devices):
            return False
        return name in self._unconnected or any(name in device._dismissed for device in self.devices)

    @property
    def _known(self) -> list[DevicePresence]:
        """The devices whose runtimes answer. If none does, the devices that sleep."""
        up = [device for device in self.devices if device.up]
        return up or [device for device in self.devices if device.asleep_since is not None]

    @property
    def _waiting(self) -> set[str]:
        return set(self._unconnected).union(*(device._dismissed for device in self.devices))

    # --- reports of runtimes --------------------------------------------------------------------------------

    def note(self, name: str, *, served: bool, waited: bool) -> None:
        """Update the started and the lost models after a change of a version.

        `served` and `waited` are the values of `serves` and `waits` before the change.
        """
        if not any(name in device.loading for device in self.devices):
            self._started.discard(name)
        elif waited:
            self._started.add(name)
        if served and self.up and not self.serves(name):
            self.lost.add(name)

    def end_starts(self) -> None:
        """Forget the started models that no runtime builds any more."""
        self._started &= set[str]().union(*(device.loading for device in self.devices))

    # --- reports of `stub_monitor` --------------------------------------------------------------------------

    def see(self, poll: StubPoll, now: float) -> tuple[bool, frozenset[str]]:
        """Record the result of a poll.

        Returns two values: True if properties of this object have changed, and the models whose stub is dead. Two polls have
        found that Triton calls such a model ready and that it has no process.
        """
        for device in self.devices:
            device.forget(poll.gone)
        changed = bool(poll.gone)
        if self.up or self.asleep:
            before, known = self._waiting, self._unconnected
            for device in self.devices:
                if device.up:
                    device.see(poll.unconnected, now)
            self._unconnected = frozenset(poll.unconnected) - self.returning
            changed |= known != self._unconnected or before != self._waiting
            if self.up:
                self.lost |= {name for name in before - self._waiting if not self.serves(name)}
        self._new_stubs = {name: until for name, until in self._new_stubs.items() if until > now}
        suspects = set(poll.without_process) - self._new_stubs.keys()
        self._suspects = {name: self._suspects.get(name, now) for name in suspects}
        dead = frozenset(name for name, since in self._suspects.items() if now - since >= AGREE_S)
        return changed, dead

    @property
    def suspicious(self) -> bool:
        """True if another poll may soon find a dead stub."""
        return bool(self._suspects)

    def expect_start(self, name: str, until: float) -> None:
        """Do not count the model's stub as dead before the time `until`."""
        self._suspects.pop(name, None)
        self._new_stubs[name] = until

    def forget_lost(self, busy: Collection[str]) -> None:
        """Forget the lost models that serve again, except those that Triton loads or unloads."""
        self.lost = {name for name in self.lost if name in busy or not self.serves(name)}
