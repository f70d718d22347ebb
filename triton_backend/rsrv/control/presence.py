"""The models' stubs as the control process knows them: connected, cold, or expected to return. Pure: time is an argument.

Runtimes report the stubs that connect and the stubs that they ask to leave. `stub_health` inspects the server's processes
and reports stubs that live without a connection, and dead stubs.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from rsrv.control.protocols import ModelVersion

#: Within this many seconds, `stub_health` notices that a dismissed stub has left.
_SEEN_S = 10.0


class DevicePresence:
    """Stubs of one device's runtime, by the names of their models and meta models."""

    def __init__(self) -> None:
        #: Models that had a stub before the runtime last ended or stopped answering, and have had none since.
        self._before: set[str] = set()
        #: Models whose stubs left until the next request, or have not connected since a sleep, with the time when they left.
        self._dismissed: dict[str, float] = {}

    @property
    def dismissed(self) -> set[str]:
        """Models that this runtime, or the one before a sleep, asked to leave until a request comes."""
        return {*self._dismissed}

    @property
    def returning(self) -> set[str]:
        """Models that had a stub before the runtime's last end, and none since.

        A model stays here until its stub connects or is found dead, or the model is unloaded. The runtime may compile other
        models for minutes first.
        """
        return self._before - self._dismissed.keys()

    def follow(self, entry: Any, now: float, *, up: bool) -> None:
        """Record whether a version has stubs. If the runtime has asked them to leave, the version becomes "leaving".

        `up` is True if the runtime answers.
        """
        name = entry["name"]
        if entry["state"] == "cold":
            self._dismissed[name] = now
            entry["state"] = "leaving"
        elif entry["stubs"]:
            self._dismissed.pop(name, None)
            if up:
                self._before.discard(name)

    def come_up(self, served: Collection[str]) -> None:
        """Record that the runtime answers again, with stubs of these models."""
        self._before.difference_update(served)

    def go_down(self, served: Collection[str]) -> None:
        """Record that the runtime no longer answers. It had stubs of the models `served`."""
        self._before = {*served, *self.returning}

    def fall_asleep(self, now: float) -> None:
        """Record that the device sleeps: stubs wait for requests without a connection."""
        self._dismissed |= dict.fromkeys(self._before, now)

    def see(self, unconnected: Collection[str], now: float) -> None:
        """Forget dismissed models whose stubs are gone. The stubs of `unconnected` models were seen alive."""
        until = now - _SEEN_S
        self._dismissed = {
            name: since for name, since in self._dismissed.items() if since > until or name in unconnected
        }

    def forget(self, gone: Collection[str]) -> None:
        """Stop expecting the stubs of these models."""
        self._before.difference_update(gone)


class Presence:
    """Stubs of all devices of a server."""

    def __init__(self, devices: int) -> None:
        self.devices = tuple(DevicePresence() for _ in range(devices))
        #: Models whose stubs live without a connection.
        self._unconnected: frozenset[str] = frozenset()

    @property
    def returning(self) -> set[str]:
        """Models of an ended runtime whose stubs have not connected to the next runtime yet."""
        return set[str]().union(*(device.returning for device in self.devices))

    def cold(self, known: Iterable[Collection[str]]) -> set[str]:
        """Return the models that start with their next request. `known` are the models that runtimes serve or build."""
        dismissed = (device.dismissed for device in self.devices)
        return set(self._unconnected.union(*dismissed).difference(*known))

    def see(self, unconnected: Collection[str], live: Iterable[int], now: float) -> bool:
        """Record the models whose stubs live without a connection. Returns True if the set has changed.

        `live` are the devices whose runtimes answer.
        """
        for number in live:
            self.devices[number].see(unconnected, now)
        before, self._unconnected = self._unconnected, frozenset(unconnected) - self.returning
        return before != self._unconnected

    def forget(self, gone: Collection[str]) -> None:
        """Stop expecting the stubs of these models: the stubs are dead, or Triton has unloaded the models."""
        for device in self.devices:
            device.forget(gone)


def connected(entries: Mapping[str, ModelVersion]) -> set[str]:
    """Return the names of the models and meta models with a connected stub."""
    return {entry["name"] for entry in entries.values() if entry["stubs"]}
