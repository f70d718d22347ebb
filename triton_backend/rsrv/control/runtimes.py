"""The runtimes of one server, one per device: a merged view of their state, and commands for all of them.

A device's number is its position in the server's `runtime.devices`. A runtime that is down costs its device only: the
server's state is that of the others, and a command fails if no runtime carries it out.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rsrv.control.grpc_service import InvalidArgument, StatusError
from rsrv.control.overrides import LASTING, Command, Overrides
from rsrv.control.protocols import ModelVersion
from rsrv.control.runtime_link import (
    ChangeCounter,
    LinkTiming,
    RuntimeDown,
    RuntimeLink,
    StateChange,
    StateUpdate,
)
from rsrv.wire import paths
from rsrv.wire.socket import readable

Answer = dict[str, Any]
#: Answers by the numbers of devices.
Answers = dict[int, Answer]
#: What is known already: the runtime's instance and the `next` of its last answer, by the device's number.
Positions = Mapping[int, tuple[str, int]]

#: Precedence among the states of one version on several devices.
_STATES = ("ready", "loading", "leaving", "failed")
#: The same for its weights; None is for meta models.
_WEIGHTS = ("resident", "loading", "absent", None)


#: Seconds beyond the bound of a runtime's drain for its answer: the next one imports its modules first.
_GRACE_S = 90.0
#: Seconds between two looks for models that do not return.
_RETURN_LOOK_S = 0.25
#: Seconds for a runtime whose device sleeps to answer, and for one that is to sleep to end.
_WAKE_S, _END_S = 60.0, 10.0


@dataclass(frozen=True, slots=True)
class RestartedDevice:
    """A restart of a runtime: seconds from its last answer until the first model, and all models, were ready again."""

    number: int
    first_s: float
    all_s: float
    #: Models that were ready before and are not now.
    missing: list[str]


def server_devices(directory: Path) -> list[str]:
    """Return the devices of the server whose device 0 has this directory: values of CUDA_VISIBLE_DEVICES, or cpu."""
    try:
        return paths.read_devices(directory)
    except FileNotFoundError:
        return ["cpu"]  # no runtime has found out yet


def device_directories(server_pid: int, first: Path, count: int) -> list[Path]:
    """Return the directories of a server's runtimes, by the number of their device. `first`: that of device 0."""
    return [first, *(paths.runtime_directory(server_pid, str(number)) for number in range(1, count))]


class Runtimes:
    """The links to all runtimes, and their merged state as it is known. `run` keeps the links up.

    One event loop owns it: it does not change between two awaits.
    """

    def __init__(
        self,
        directories: Sequence[Path],
        timing: LinkTiming | None = None,
        launch: Callable[[int], object] = lambda number: None,
    ) -> None:
        """`directories`: of the runtimes, by the number of their device; the first one has the operators' settings.

        `launch` returns when the runtime of a device takes connections, which it starts if none does. Raises StatusError.
        """
        self._launch = launch
        self.overrides = Overrides(directories[0] / paths.OVERRIDES)
        self._changes = ChangeCounter()
        self.links = tuple(
            RuntimeLink(
                directory / paths.SOCKET,
                self.overrides,
                self._changes,
                timing,
                number if len(directories) > 1 else None,
            )
            for number, directory in enumerate(directories)
        )
        #: Names of the models whose stubs live without a connection.
        self._unconnected: frozenset[str] = frozenset()
        #: Devices that placement allows a model, by its name; others may be on any device.
        self.placement: Mapping[str, Collection[int]] = {}
        self._merged: dict[str, ModelVersion] = {}
        #: The latest answers to `metrics`: when they came, and the instances of the runtimes.
        self._counted: Answers = {}
        self._counted_at, self._counted_lives = 0.0, dict[int, str]()
        #: Changes that are not merged yet, of each link.
        self._unmerged = [link.subscribe() for link in self.links] if len(self.links) > 1 else []

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
        """True if a runtime answers; False while all are dead, stopped, or not started."""
        return any(link.up for link in self.links)

    @property
    def asleep(self) -> bool:
        """True if no runtime answers, because devices sleep: their models serve as soon as requests come."""
        return not self.up and any(link.asleep_since is not None for link in self.links)

    @property
    def since(self) -> float:
        """The loop's time at which the first runtime was found. One that was silent for a while is the same one."""
        return min((link.since for link in self.live.values()), default=0.0)

    @property
    def entries(self) -> Mapping[str, ModelVersion]:
        """Versions by key. While no runtime is up, the last known ones; a new runtime starts without any."""
        if len(self.links) == 1:
            return self.links[0].entries
        changed: set[str] | None = set()
        for part in self._unmerged:
            while part.pending:
                match part.take():
                    case StateChange(key=key) if changed is not None:
                        changed.add(key)
                    case _:
                        changed = None
        found = [link.entries for link in (*self.live.values(),) or self.links]
        if changed is None:
            self._merged = merge(found)
        else:
            # Weights of hundreds of models may move within a second.
            for key in changed:
                self._merged |= merge([{key: entries[key]} for entries in found if key in entries])
                if not any(key in entries for entries in found):
                    self._merged.pop(key, None)
        return self._merged

    @property
    def cold(self) -> set[str]:
        """Names of the models that no runtime has, and that start with their next request."""
        if not (self.up or self.asleep):
            return set()
        known = (link.ready | link.loading for link in self.live.values())
        return set(self._unconnected.union(*(link.dismissed for link in self.links)).difference(*known))

    @property
    def awaited(self) -> set[str]:
        """Names of the models that no runtime has, but one had before it ended. Their stubs may return, or be dead."""
        left = set[str]().union(*(link.unreturned for link in self.links))
        return left.difference(entry["name"] for entry in self.entries.values()) if left else left

    @property
    def changes(self) -> int:
        """A counter that rises with each change of any other property."""
        return self._changes.count

    @property
    def other_changes(self) -> int:
        """The same without the moves of weights, which are many."""
        return self._changes.others

    def served(self) -> set[str]:
        """Return the names of the models with a connected stub; none while no runtime answers.

        A stub whose only runtime has ended counts until it has had the time to find the next one: else it would be taken
        for dead, because the other runtimes do not know it.
        """
        live = len(self.live)
        found: set[str] = set()
        for link in self.links if live or self.asleep else ():
            found |= link.served()
            # With no other runtime, no stub counts as dead before that time.
            if live - link.up:
                found |= link.returning()
        return found

    def show_cold(self, names: Collection[str]) -> None:
        """Note the models whose stubs live without a connection: they are cold, unless a runtime is about to have them."""
        if not (self.up or self.asleep):
            return
        found = frozenset(names).difference(*(link.returning() for link in self.links))
        for link in self.live.values():
            link.check_dismissed(names)
        if found != self._unconnected:
            self._unconnected = found
            self._changes.note()

    async def wait_change(self, seen: int | None = None) -> None:
        """Return at once if `changes` is not `seen` any more, else after the next change (None: as it is now)."""
        await self._changes.wait(seen)

    # --- commands -------------------------------------------------------------------------------------------

    async def query(self, question: Command) -> Answers:
        """Ask all runtimes with a command that changes nothing. Raises RuntimeDown, StatusError if none answers."""
        asked = self.live or dict(enumerate(self.links))
        answers, _ = await self._ask(asked, lambda _, link: link.command(question))
        return answers

    async def metrics(self, max_age_s: float = 0.0) -> tuple[Answers, float]:
        """Return the answers to `metrics`, and the loop's time at which they came.

        Answers may be those to an earlier question, if they are no older than `max_age_s` and of the same runtimes.
        Raises as `query`.
        """
        clock, lives = asyncio.get_running_loop().time, {n: link.instance for n, link in self.live.items()}
        if not lives or lives != self._counted_lives or clock() - self._counted_at > max_age_s:
            self._counted, self._counted_lives = await self.query({"command": "metrics"}), lives
            self._counted_at = clock()
        return self._counted, self._counted_at

    async def command(self, command: Command, devices: Collection[int] | None = None) -> Answers:
        """Send a command to all runtimes, or to those of `devices`; return the results of those that carried it out.

        The others get it later if its effect lasts; so do all if the model is cold, or its stub is about to return.
        Raises RuntimeDown, StatusError if none carried it out.
        """
        chosen = self.chosen(devices)
        try:
            answers, refusals = await self._ask(chosen, lambda _, link: link.command(command))
        except StatusError as unknown:
            name = str(command.get("model") or "")
            if unknown.code != "NOT_FOUND" or not (
                name in self.cold or any(name in link.returning() for link in chosen.values())
            ):
                raise
            # Only a runtime checks the values of a policy.
            if command["command"] not in LASTING - {"policy"}:
                raise StatusError(
                    "FAILED_PRECONDITION",
                    f"{name} is cold: start it first, with `rsrv prefetch --warm {name}`",
                ) from None
            answers, refusals = {}, dict.fromkeys(chosen, unknown)
            for number in chosen:
                self.overrides.commanded(command, number)
        for number, refusal in refusals.items():
            chosen[number].send_later(command, refusal)
        return answers

    async def slow_command(self, commands: Mapping[int, Command]) -> Answers:
        """Send each device's runtime a command that takes long. Raises RuntimeDown, StatusError if none succeeds."""
        chosen = {number: self.links[number] for number in commands}
        answers, _ = await self._ask(chosen, lambda number, link: link.slow_command(commands[number]))
        return answers

    async def configure(self, changes: dict[str, Any]) -> dict[str, Any]:
        """Change keys of the scheduler's section; return the whole section. Raises RuntimeDown, StatusError."""
        chosen = self.chosen(None)
        answers, refusals = await self._ask(chosen, lambda _, link: link.configure(changes))
        for number, refusal in refusals.items():
            if isinstance(refusal, RuntimeDown):
                self.links[number].configure_later(changes)
        return answers[min(answers)]

    async def status(self) -> Answers:
        """Return the status of docs/protocol.md of each runtime that answers.

        Raises RuntimeDown if none does, unless devices sleep.
        """
        if self.asleep:
            return {}
        if not self.up:
            raise RuntimeDown(next(filter(None, (link.obstacle for link in self.links)), ""))
        answers, _ = await self._ask(self.live, lambda _, link: link.status())
        return answers

    async def restart(self, number: int, drain_s: float, *, force: bool) -> RestartedDevice:
        """Have a runtime end for the next one; return when its models have returned, as far as they do.

        Raises RuntimeDown, StatusError; then the runtime goes on.
        """
        link, clock = self.links[number], asyncio.get_running_loop().time
        if link.asleep_since is not None:
            raise StatusError(
                "FAILED_PRECONDITION",
                f"device {number} sleeps, so nothing was restarted: rsrv.yaml is read again when it wakes",
            )
        before, instance = link.ready & link.served(), link.instance
        command = {"command": "restart", "drain_s": drain_s, "force": force}
        await link.slow_command(command, drain_s + _GRACE_S)
        link.restarts += 1
        began, first = clock(), 0.0
        while True:
            seen = self.changes
            if link.instance != instance and link.up:
                now, back = clock() - began, before & link.ready
                first = first or (now if back else 0.0)
                # A stub whose model was unloaded meanwhile does not return.
                awaited = link.loading | (link.returning() - link.served())
                if not (before - back) & awaited:
                    return RestartedDevice(number, first, now, sorted(before - back))
            elif not link.up and not link.returning():
                if before:
                    text = f"no runtime of device {number} has come back; the server's log says why"
                    raise StatusError("UNAVAILABLE", text)
                return RestartedDevice(number, 0.0, 0.0, [])  # the next model starts it
            with suppress(TimeoutError):
                async with asyncio.timeout(_RETURN_LOOK_S):
                    await self.wait_change(seen)

    async def sleep(self, number: int, drain_s: float, *, force: bool) -> None:
        """Have a runtime end so that its device sleeps; return when the runtime is gone.

        Raises RuntimeDown, StatusError; then the runtime goes on.
        """
        link = self.links[number]
        if link.asleep_since is not None:
            raise StatusError("FAILED_PRECONDITION", f"device {number} sleeps already")
        runtime = -1
        with suppress(OSError):  # it has just ended
            runtime = os.pidfd_open((await link.status())["pid"])
        try:
            command = {"command": "sleep", "drain_s": drain_s, "force": force}
            await link.slow_command(command, drain_s + _GRACE_S)
            while link.up:
                await self.wait_change(self.changes)
            if runtime >= 0:
                # The device's memory is free when the process has ended.
                await asyncio.to_thread(readable, [runtime], _END_S)
        finally:
            if runtime >= 0:
                os.close(runtime)

    async def wake(self, number: int) -> float:
        """Wake a device; return the seconds until its runtime answered, 0.0 if it did. Raises StatusError."""
        link, clock = self.links[number], asyncio.get_running_loop().time
        if number in self.live:
            return 0.0
        began = clock()
        try:
            async with asyncio.timeout(_WAKE_S):
                # The spare may have been killed meanwhile.
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
        """Return the links of these devices by number, of all if there are none. Raises InvalidArgument."""
        for number in devices or ():
            if number >= len(self.links):
                raise InvalidArgument(
                    f"there is no device {number}: the server's devices are 0 to {len(self.links) - 1}"
                )
        return {number: link for number, link in enumerate(self.links) if not devices or number in devices}

    @staticmethod
    async def _ask(
        links: Mapping[int, RuntimeLink], ask: Callable[[int, RuntimeLink], Awaitable[Answer]]
    ) -> tuple[Answers, dict[int, StatusError]]:
        """Ask all at once; return the answers and the refusals. If none answers, raise the refusal that says most."""
        said = await asyncio.gather(
            *(ask(number, link) for number, link in links.items()), return_exceptions=True
        )
        answers: Answers = {}
        refusals: dict[int, StatusError] = {}
        for number, one in zip(links, said, strict=True):
            if isinstance(one, StatusError):
                refusals[number] = one
            elif isinstance(one, BaseException):
                raise one
            else:
                answers[number] = one
        if not answers:
            # A runtime that is up says more than that none is.
            down = next(iter(refusals.values()), RuntimeDown())
            raise next((one for one in refusals.values() if not isinstance(one, RuntimeDown)), down)
        return answers, refusals

    async def read_on(self, command: str, since: Positions) -> Answers:
        """Return the answers to `load`, `timeline`, `arrivals` or `traces`: of each device what is new since a position.

        Of another runtime than the position's, and of devices without one, everything is told. Raises RuntimeDown,
        StatusError if none answers.
        """

        async def ask(number: int, link: RuntimeLink) -> Answer:
            instance, known = since.get(number, ("", 0))
            return await link.command(
                {"command": command, "since": known if instance == link.instance else 0}
            )

        answers, _ = await self._ask(self.live, ask)
        return answers

    # --- changes --------------------------------------------------------------------------------------------

    def subscribe(self) -> "DeviceStateFeed":
        """Subscribe to all changes of all runtimes from now on, after a snapshot of each. Close the feed."""
        return DeviceStateFeed(self.links)


class DeviceStateFeed:
    """Changes of the state of several runtimes, each with the number of its device."""

    def __init__(self, links: Iterable[RuntimeLink]) -> None:
        self._some = asyncio.Event()
        self._parts = {number: link.subscribe(self._some) for number, link in enumerate(links)}
        #: The device whose turn it is.
        self._next = 0

    async def next(self) -> tuple[int, StateUpdate]:
        """Wait for the next change or snapshot; return the number of its device with it."""
        while True:
            count = len(self._parts)
            for number in ((self._next + one) % count for one in range(count)):
                if self._parts[number].pending:
                    self._next = number + 1
                    return number, self._parts[number].take()
            self._some.clear()
            await self._some.wait()

    def close(self) -> None:
        for part in self._parts.values():
            part.close()


def merge(found: Sequence[Mapping[str, ModelVersion]]) -> dict[str, ModelVersion]:
    """Return the versions of several runtimes as those of one: each has the best of its states, and of its weights.

    Its stubs are those that have it in that state.
    """
    by_key: dict[str, list[ModelVersion]] = {}
    for entries in found:
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
