"""The runtimes of one server, one per device: a merged view of their state, and commands for all of them.

A device's number is its position in the server's `runtime.devices`. If a runtime is down, the server's state is the state of
the others. A command fails only if no runtime carries it out.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rsrv.control.desired_state import DesiredState
from rsrv.control.grpc_service import InvalidArgument, StatusError
from rsrv.control.presence import Presence, StubPoll
from rsrv.control.records import RuntimeRecords
from rsrv.control.runtime_link import Command, LinkTiming, RuntimeDown, RuntimeLink
from rsrv.control.runtime_state import ChangeCounter, ModelVersion, StateChange, StateUpdate
from rsrv.control.v1 import control_pb2 as pb
from rsrv.settings import Settings, SettingsError
from rsrv.wire import paths
from rsrv.wire.socket import readable

T = TypeVar("T")
Answer = dict[str, Any]
#: Answers by the numbers of devices.
Answers = dict[int, Answer]
#: Positions by the number of the device. A position is the runtime's instance, and `next` of the runtime's latest answer.
Positions = Mapping[int, tuple[str, int]]

#: A command applies to models in these states.
_PRESENT = ("ready", "loading")
#: Precedence among the states of one version on several devices.
_STATES = ("ready", "loading", "leaving", "failed")
#: Precedence among the states of a version's weights. None is for meta models.
_WEIGHTS = ("resident", "loading", "absent", None)


#: Wait this many seconds longer than the time limit of a drain for the answer, because the runtime first prepares the next
#: runtime process, which imports its modules.
_GRACE_S = 90.0
#: Seconds between two checks whether all models have returned after a restart.
_RETURN_POLL_S = 0.25
#: Seconds that stubs may take to start the next runtime after a restart has ended a runtime.
_RESTART_S = 15.0
#: Seconds that the runtime of a woken device has to answer.
_WAKE_S = 60.0
#: Seconds that a runtime has to end when its device is sent to sleep.
_END_S = 10.0


@dataclass(frozen=True, slots=True)
class RestartedDevice:
    """The result of a restart."""

    #: Seconds from the old runtime's last answer until the first model was ready.
    first_s: float
    #: Seconds from the old runtime's last answer until all models were ready, except the `missing` ones.
    all_s: float
    #: Models that were ready before the restart and are not ready now.
    missing: list[str]


def server_devices(directory: Path) -> list[str]:
    """Return the server's devices: values of CUDA_VISIBLE_DEVICES, or cpu. `directory` is the directory of device 0."""
    try:
        return paths.read_devices(directory)
    except FileNotFoundError:
        return ["cpu"]  # No runtime has found the devices yet.


def device_directories(server_pid: int, first: Path, count: int) -> list[Path]:
    """Return the directories of a server's runtimes, by the number of their device. `first` is the directory of device 0."""
    return [first, *(paths.runtime_directory(server_pid, str(number)) for number in range(1, count))]


class Runtimes:
    """The links to all runtimes, and their merged state as far as it is known. `run` connects the links.

    One event loop owns this object, so it does not change between two awaits.
    """

    def __init__(
        self,
        directories: Sequence[Path],
        settings: Settings,
        timing: LinkTiming | None = None,
        launch: Callable[[int], object] = lambda number: None,
        callees: Callable[[str], Sequence[str]] = lambda name: (),
    ) -> None:
        """Make the links to the runtimes.

        Args:
            directories: Directories of the runtimes, by the number of their device. The first one has the file of overrides.
            settings: Contents of rsrv.yaml.
            timing: Intervals of the links.
            launch: Waits until the runtime of a device takes connections, and starts the runtime if there is none. Raises
                StatusError.
            callees: Returns the models that a meta model calls, whether they serve or not. Called on a thread.
        """
        self._launch, self._callees = launch, callees
        self.desired = DesiredState(settings, directories[0] / paths.OVERRIDES)
        self.presence = Presence(len(directories))
        self._changes = ChangeCounter()
        self.links = tuple(
            RuntimeLink(
                directory / paths.SOCKET,
                self.desired,
                self.presence.devices[number],
                self._changes,
                timing,
                number if len(directories) > 1 else None,
            )
            for number, directory in enumerate(directories)
        )
        #: Devices that placement allows for each model, by its name. Other models may run on any device.
        self.placement: Mapping[str, Collection[int]] = {}
        self._merged: dict[str, ModelVersion] = {}
        #: A subscription to each link, with the changes that are not merged yet. Empty if there is only one link.
        self._unmerged = [link.state.subscribe() for link in self.links] if len(self.links) > 1 else []

    async def run(self) -> None:
        """Keep the links up until cancelled."""
        async with asyncio.TaskGroup() as group:
            for link in self.links:
                group.create_task(link.run())

    # --- the view -------------------------------------------------------------------------------------------

    @property
    def live(self) -> dict[int, RuntimeLink]:
        """The links to runtimes that answer, by the number of their device."""
        return {number: link for number, link in enumerate(self.links) if link.up}

    @property
    def up(self) -> bool:
        """True if a runtime answers. False if all runtimes are dead, stopped, or not started."""
        return self.presence.up

    @property
    def asleep(self) -> bool:
        """True if no runtime answers and a device sleeps. Its models serve as soon as a request wakes the device."""
        return self.presence.asleep

    @property
    def entries(self) -> Mapping[str, ModelVersion]:
        """Versions by key. While no runtime is up, these are the last known versions. A new runtime begins without versions."""
        if len(self.links) == 1:
            return self.links[0].state.entries
        changed: set[str] | None = set()
        for part in self._unmerged:
            while part.pending:
                match part.take():
                    case StateChange(key=key) if changed is not None:
                        changed.add(key)
                    case _:
                        changed = None
        tables = [link.state.entries for link in (*self.live.values(),) or self.links]
        if changed is None:
            self._merged = merge(tables)
        else:
            # Merge only the changed versions, because weights of hundreds of models may move within a second.
            for key in changed:
                self._merged |= merge([{key: entries[key]} for entries in tables if key in entries])
                if not any(key in entries for entries in tables):
                    self._merged.pop(key, None)
        return self._merged

    @property
    def cold(self) -> set[str]:
        """Names of the models that no runtime has, and that start with their next request."""
        return self.presence.cold

    @property
    def awaited(self) -> set[str]:
        """Names of models that only an ended runtime had. Their stubs may connect to the next runtime, or may be dead."""
        left = self.presence.returning
        return left.difference(entry["name"] for entry in self.entries.values()) if left else left

    @property
    def changes(self) -> int:
        """A counter that rises whenever any other property of this class changes."""
        return self._changes.count

    @property
    def other_changes(self) -> int:
        """A counter like `changes`, but without loads and evictions, which are frequent."""
        return self._changes.others

    def see_stubs(self, poll: StubPoll) -> frozenset[str]:
        """Record the result of a poll of Triton and of the server's processes. Return the models whose stub is dead."""
        changed, dead = self.presence.see(poll, asyncio.get_running_loop().time())
        if changed:
            self._changes.note()
        return dead

    async def wait_change(self, seen: int | None = None) -> None:
        """Wait for the next change. Return at once if `seen` is given and differs from `changes`."""
        await self._changes.wait(seen)

    # --- commands -------------------------------------------------------------------------------------------

    async def query(self, question: Command) -> Answers:
        """Ask all runtimes with a command that changes nothing. Raises RuntimeDown, StatusError if none answers."""
        links = self.live or dict(enumerate(self.links))
        return await self._ask(links, lambda _, link: link.command(question))

    async def records(self, *, whole: bool = False) -> dict[int, RuntimeRecords]:
        """Return the records of the runtimes that answer, by the numbers of their devices.

        If `whole` is True, the shared tensors in the records are also up to date. Raises RuntimeDown if no runtime answers,
        unless devices sleep.
        """
        if self.asleep:
            return {}
        if not self.up:
            raise RuntimeDown(next(filter(None, (link.obstacle for link in self.links)), ""))
        return await self._ask(self.live, lambda _, link: link.refresh(whole=whole))

    async def read_records(self, since: Positions) -> dict[int, pb.DeviceRecord]:
        """Return the changes of the runtimes' records since these positions, by the numbers of the devices."""

        async def ask(number: int, link: RuntimeLink) -> pb.DeviceRecord:
            instance, known = since.get(number, ("", 0))
            return await link.record(known if instance == link.state.instance else 0)

        return await self._ask(self.live, ask)

    async def command(self, command: Command, devices: Collection[int] | None = None) -> Answers:
        """Send a command to the runtimes of `devices` (default: all). Return the results of the runtimes that carried it out.

        Raises RuntimeDown or StatusError if none of them did.
        """
        return await self._ask(self.chosen(devices), lambda _, link: link.command(command))

    async def named(self, model: str) -> list[str]:
        """Return the models that a command for this name applies to: the callees of a meta model, or the model itself.

        Raises StatusError if there is no such model.
        """
        versions = [
            entry for entry in self.entries.values() if entry["name"] == model and entry["state"] in _PRESENT
        ]
        called = {key.rpartition("@")[0] for version in versions for key in version["models"]}
        if called:
            return sorted(called)
        if not versions:
            if model not in self.cold | self.presence.returning:
                raise StatusError("NOT_FOUND", f"there is no model {model!r:.200}")
            if callees := await asyncio.to_thread(self._callees, model):
                return list(callees)
        return [model]

    async def change(self, change: Callable[[], None], devices: Collection[int] | None = None) -> list[int]:
        """Change the desired documents of all runtimes, or of the runtimes of `devices`. Return the devices that follow now.

        The other runtimes follow as soon as they answer. Raises RuntimeDown if no runtime answers, and InvalidArgument if
        the values are wrong. After an error, nothing has changed.
        """
        chosen = self.chosen(devices)
        live = {number: link for number, link in chosen.items() if link.up}
        if not live:
            next(iter(chosen.values())).check_up()
        try:
            change()
        except SettingsError as error:
            raise InvalidArgument(str(error)) from None
        # `change` has already sent the documents, so the change remains even if the caller is cancelled here.
        followed = await asyncio.gather(*(link.followed() for link in live.values()))
        return [number for number, follows in zip(live, followed, strict=True) if follows]

    async def slow_command(self, commands: Mapping[int, Command]) -> Answers:
        """Send each device's runtime a command that takes long. Raises RuntimeDown, StatusError if none succeeds."""
        chosen = {number: self.links[number] for number in commands}
        return await self._ask(chosen, lambda number, link: link.slow_command(commands[number]))

    async def last_records(self) -> dict[int, RuntimeRecords]:
        """Return the last records of the sleeping devices' runtimes. They have the counters and sizes of models."""
        links = {number: link for number, link in enumerate(self.links) if link.asleep_since is not None}
        return {number: await asyncio.to_thread(link.last_records) for number, link in links.items()}

    async def restart(self, number: int, drain_s: float, *, force: bool) -> RestartedDevice:
        """Replace a runtime by a new one. Return when all models whose stubs connect to the new one are ready.

        Raises RuntimeDown or StatusError if the old runtime continues.
        """
        link, clock = self.links[number], asyncio.get_running_loop().time
        presence = link.presence
        if link.asleep_since is not None:
            raise StatusError(
                "FAILED_PRECONDITION",
                f"device {number} sleeps, so nothing was restarted: rsrv.yaml is read again when the device wakes",
            )
        before, instance = presence.ready & presence.attached, link.state.instance
        command = {"command": "restart", "drain_s": drain_s, "force": force}
        await link.slow_command(command, drain_s + _GRACE_S)
        link.restarts += 1
        began, first = clock(), 0.0
        while True:
            seen = self.changes
            if link.state.instance != instance and link.up:
                now, back = clock() - began, before & presence.ready
                first = first or (now if back else 0.0)
                # Do not wait for the stub of a model that was unloaded in the meantime.
                awaited = presence.loading | presence.returning
                if not (before - back) & awaited:
                    return RestartedDevice(first, now, sorted(before - back))
            elif not link.up and (not presence.returning or link.down_s >= _RESTART_S):
                if before:
                    text = f"no new runtime of device {number} has started; the server's log says why"
                    raise StatusError("UNAVAILABLE", text)
                return RestartedDevice(0.0, 0.0, [])  # The next stub starts the runtime.
            with suppress(TimeoutError):
                async with asyncio.timeout(_RETURN_POLL_S):
                    await self.wait_change(seen)

    async def sleep(self, number: int, drain_s: float, *, force: bool) -> None:
        """End a runtime so that its device sleeps. Return when the runtime is gone.

        Raises RuntimeDown or StatusError if the runtime continues.
        """
        link = self.links[number]
        if link.asleep_since is not None:
            raise StatusError("FAILED_PRECONDITION", f"device {number} is already asleep")
        runtime = -1
        with suppress(OSError):  # The runtime has just ended.
            runtime = os.pidfd_open((await link.record()).pid)
        try:
            command = {"command": "sleep", "drain_s": drain_s, "force": force}
            await link.slow_command(command, drain_s + _GRACE_S)
            while link.up:
                await self.wait_change(self.changes)
            if runtime >= 0:
                # Only the end of the process frees the device's memory.
                await asyncio.to_thread(readable, [runtime], _END_S)
        finally:
            if runtime >= 0:
                os.close(runtime)

    async def wake(self, number: int) -> float:
        """Wake a device. Return the seconds until its runtime answered, or 0.0 if it was awake. Raises StatusError."""
        link, clock = self.links[number], asyncio.get_running_loop().time
        if number in self.live:
            return 0.0
        began = clock()
        try:
            async with asyncio.timeout(_WAKE_S):
                # Start a runtime if the spare process, which waits during the sleep, has been killed.
                await asyncio.to_thread(self._launch, number)
                while not link.up:
                    seen = self.changes
                    link.wake()
                    await self.wait_change(seen)
        except TimeoutError:
            text = f"the runtime of device {number} has not answered for {_WAKE_S:g} s; " + (
                link.obstacle or "the server's log says why"
            )
            raise StatusError("UNAVAILABLE", text) from None
        return clock() - began

    def chosen(self, devices: Collection[int] | None) -> dict[int, RuntimeLink]:
        """Return the links of these devices by number, or all links if `devices` is empty. Raises InvalidArgument."""
        for number in devices or ():
            if number >= len(self.links):
                raise InvalidArgument(
                    f"there is no device {number}: the server's devices are 0 to {len(self.links) - 1}"
                )
        return {number: link for number, link in enumerate(self.links) if not devices or number in devices}

    @staticmethod
    async def _ask(
        links: Mapping[int, RuntimeLink], ask: Callable[[int, RuntimeLink], Awaitable[T]]
    ) -> dict[int, T]:
        """Ask all runtimes concurrently, and return the answers. If none answers, raise the most specific error."""
        replies = await asyncio.gather(
            *(ask(number, link) for number, link in links.items()), return_exceptions=True
        )
        answers: dict[int, T] = {}
        refusals: list[StatusError] = []
        for number, reply in zip(links, replies, strict=True):
            if isinstance(reply, StatusError):
                refusals.append(reply)
            elif isinstance(reply, BaseException):
                raise reply
            else:
                answers[number] = reply
        if not answers:
            # The error of a runtime that answered is more specific than RuntimeDown.
            refusals.sort(key=lambda refusal: isinstance(refusal, RuntimeDown))
            raise refusals[0] if refusals else RuntimeDown()
        return answers

    async def read_on(self, command: str, since: Positions) -> Answers:
        """Return the answers to the command `timeline`, `arrivals` or `traces`.

        Each device returns its elements since its position. It returns all elements if it has no position, or if its runtime
        was replaced. Raises RuntimeDown or StatusError if none answers.
        """

        async def ask(number: int, link: RuntimeLink) -> Answer:
            instance, known = since.get(number, ("", 0))
            return await link.command(
                {"command": command, "since": known if instance == link.state.instance else 0}
            )

        return await self._ask(self.live, ask)

    # --- changes --------------------------------------------------------------------------------------------

    def subscribe(self) -> "DeviceStateFeed":
        """Subscribe to a snapshot of each runtime and all later changes. The caller must close the feed."""
        return DeviceStateFeed(self.links)


class DeviceStateFeed:
    """Changes of the state of several runtimes, each with the number of its device."""

    def __init__(self, links: Iterable[RuntimeLink]) -> None:
        self._some = asyncio.Event()
        self._parts = {number: link.state.subscribe(self._some) for number, link in enumerate(links)}
        #: `next` looks for changes at this device first, so that many changes of one device do not hold up other devices.
        self._next = 0

    async def next(self) -> tuple[int, StateUpdate]:
        """Wait for the next change or snapshot. Return it with the number of its device."""
        while True:
            count = len(self._parts)
            for number in ((self._next + offset) % count for offset in range(count)):
                if self._parts[number].pending:
                    self._next = number + 1
                    return number, self._parts[number].take()
            self._some.clear()
            await self._some.wait()

    def close(self) -> None:
        for part in self._parts.values():
            part.close()


def merge(tables: Sequence[Mapping[str, ModelVersion]]) -> dict[str, ModelVersion]:
    """Return the versions of several runtimes in one table, as if one runtime had all of them.

    Each version has the best of its states on the devices, the best state of its weights, and the stubs of the devices where
    it has that best state.
    """
    by_key: dict[str, list[ModelVersion]] = {}
    for entries in tables:
        for key, entry in entries.items():
            by_key.setdefault(key, []).append(entry)
    return {key: same[0] if len(same) == 1 else _merge_one(same) for key, same in by_key.items()}


def _merge_one(same: Sequence[ModelVersion]) -> ModelVersion:
    best = min(same, key=lambda entry: _STATES.index(entry["state"]))
    weights = min((entry["weights"] for entry in same), key=_WEIGHTS.index)
    stubs = {pid for entry in same if entry["state"] == best["state"] for pid in entry["stubs"]}
    merged = best.copy()
    merged["weights"], merged["stubs"] = weights, sorted(stubs)
    return merged
