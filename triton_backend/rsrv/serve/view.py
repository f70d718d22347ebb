"""Lines of `rsrv serve`: models as they become ready, the endpoints, and every later change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NoReturn

import grpc

from rsrv.address import Address
from rsrv.control.v1 import control_pb2 as pb
from rsrv.control.v1 import control_pb2_grpc
from rsrv.serve.child_probes import listens
from rsrv.serve.plan import ServerPlan
from rsrv.serve.repositories import model_folders
from rsrv.wire.paths import CONTROL_SOCKET, runtime_directory
from rsrv_gen.plan import BUNDLE_FOLDER

#: seconds between two looks, and between attempts to reach the control service
LOOK_S = 0.25
#: seconds for the control service to come up after the server, and to answer
CONTROL_S, _STATUS_S = 15.0, 2.0


@dataclass(frozen=True, slots=True)
class Line:
    """A line for the operator."""

    text: str
    #: serves: the server takes requests from now on
    kind: Literal["change", "serves", "note"] = "change"


class Changes:
    """Changes of the models' states, as lines for people. Pure."""

    def __init__(self, broken: Mapping[str, str], models: Callable[[], Collection[str]] = frozenset) -> None:
        """`models`: returns those of the repository; one that no runtime has is cold."""
        self._models = models
        present = models()
        #: bundles that were broken before the start, and whose earlier version serves on: that has been shown
        self._kept = {name: reason for name, reason in broken.items() if name in present}
        #: the last shown state; the other bundles that were broken before the start are shown then
        self._shown = {name: ("failed", text) for name, text in broken.items() if name not in present}
        #: versions of each model by key, the latest last, and of each by device
        self._versions: dict[str, dict[str, dict[int, pb.Version]]] = {}
        self._failures: dict[str, str] = {}
        #: models that may have changed since the last call of `lines`, and before that; and those that went away
        self._touched: set[str] = set()
        self._waiting: set[str] = set()
        self._gone: set[str] = set()
        #: a device's models are known
        self.known = False

    def take(self, update: pb.WatchStateResponse) -> None:
        """Take an update of the control service."""
        touched = self._apply(update)
        self._touched |= touched
        if update.HasField("snapshot"):
            # The models of a new runtime come one after the other: none of the others is gone.
            self.known, touched = True, set()
        self._gone = {name for name in self._gone | touched if name not in self._versions}

    def ready(self) -> set[str]:
        """Return the models that the next call of `lines` says are ready."""
        found = {name for name in self._waiting if _is_ready(self._state(name))}
        return {name for name in found if not _is_ready(self._shown.get(name))}

    def lines(self, starting: Collection[str] = ()) -> Iterator[str]:
        """Yield a line for each model whose state changed before the last call: by now Triton has it, too.

        The lines of those in `starting` come later.
        """
        due, self._waiting, self._touched = self._waiting, self._touched, set()
        models = self._models() if due & self._gone else ()
        for name in sorted(due):
            if name in starting:
                self._touched.add(name)
                continue
            state, before = self._state(name), self._shown.get(name)
            if state is None:
                # A model that is loading again keeps its last line: it serves, or its failure was shown.
                if name in self._gone:
                    self._shown.pop(name, None)
                    yield f"{name} is {'cold' if name in models else 'removed'}"
                continue
            self._shown[name] = state
            word, detail = state
            if state == before:
                continue
            if word == "failed":
                yield f"{name} failed: {' '.join(detail.split())}"
            elif _is_ready(before):
                self._kept.pop(name, None)
                yield f"{name} serves its new bundle"
            else:
                yield f"{name} is ready"

    def counts(self) -> tuple[int, int, int]:
        """Return how many models are ready, how many failed, and how many are cold."""
        words = [word for word, _ in self._shown.values()]
        cold = set(self._models()) - self._shown.keys() - self._versions.keys()
        return words.count("ready"), words.count("failed"), len(cold)

    def _apply(self, update: pb.WatchStateResponse) -> set[str]:
        """Take an update; return the names of the models that it may change."""
        match update.WhichOneof("update"):
            case "failures":
                before = self._failures
                found = {one.name: one.text for one in update.failures.failures}
                self._failures = {name: text for name, text in found.items() if self._kept.get(name) != text}
                return {*before, *self._failures}
            case "snapshot":
                device = update.snapshot.device
                touched = {*self._versions}
                for name in touched:
                    for key in [*self._versions[name]]:
                        self._drop(name, key, device)
                for entry in update.snapshot.entries:
                    self._put(entry, device)
                return touched | {entry.name for entry in update.snapshot.entries}
            case "change" if update.change.HasField("entry"):
                self._put(update.change.entry, update.change.device)
                return {update.change.entry.name}
            case "change":
                name = update.change.key.rpartition("@")[0]
                self._drop(name, update.change.key, update.change.device)
                return {name}
        # The last states hold while a runtime is silent.
        return set()

    def _put(self, entry: pb.Entry, device: int) -> None:
        self._versions.setdefault(entry.name, {}).setdefault(entry.version.key, {})[device] = entry.version

    def _drop(self, name: str, key: str, device: int) -> None:
        versions = self._versions.get(name, {})
        versions.get(key, {}).pop(device, None)
        if not versions.get(key):
            versions.pop(key, None)
        if not versions:
            self._versions.pop(name, None)

    def _state(self, name: str) -> tuple[str, str] | None:
        """Return whether a model is ready, with its key, or failed, with the reason; None: neither, or it is gone."""
        if name in self._failures:
            return "failed", self._failures[name]
        for key, devices in reversed(self._versions.get(name, {}).items()):
            states = {version.state: version for version in devices.values()}
            if pb.STATE_READY in states:
                return "ready", key
            if states.keys() == {pb.STATE_FAILED}:
                return "failed", states[pb.STATE_FAILED].error
        return None


def _is_ready(state: tuple[str, str] | None) -> bool:
    return state is not None and state[0] == "ready"


def endpoints(ports: Mapping[str, Address], page: str | None, log: Path) -> str:
    """Return the block of endpoints, with the path of the log."""
    rows = [
        ("HTTP", f"http://{local(ports['http'])}"),
        ("gRPC", local(ports["grpc"])),
        ("metrics", f"http://{local(ports['metrics'])}/metrics"),
        ("live page", page),
        ("log", str(log)),
    ]
    return "\n".join(f"  {name:<10} {text}" for name, text in rows if text)


def local(address: Address) -> str:
    """Return the address for clients on this machine."""
    host = "localhost" if address.local in ("127.0.0.1", "::1") else address.local
    return str(Address(host, address.port))


async def follow(planned: ServerPlan, pid: int, broken: Mapping[str, str]) -> AsyncGenerator[Line, None]:
    """Yield a line for each change of a tritonserver's models, and one when it serves; never end."""
    changes = Changes(broken, partial(model_folders, planned.repository))
    patience, listening, serves = CONTROL_S, False, False
    # By default gRPC waits longer and longer between attempts: models would become ready unseen for up to two minutes.
    options = [
        (f"grpc.{which}_reconnect_backoff_ms", int(LOOK_S * 1000)) for which in ("min", "initial", "max")
    ]
    channel = grpc.aio.insecure_channel(f"unix:{runtime_directory(pid, '0') / CONTROL_SOCKET}", options)
    control = control_pb2_grpc.ControlStub(channel)
    watching = asyncio.create_task(_watch(control, changes))
    try:
        while True:
            hooks = [planned.repository / name / BUNDLE_FOLDER / "model.py" for name in changes.ready()]
            for text in changes.lines(await _starting(control) if any(map(Path.exists, hooks)) else ()):
                yield Line(text)
            if not serves and listening:
                # Without its control service, what the server has loaded is not known here.
                known = changes.known or not model_folders(planned.repository)
                # The control process starts beside the models, and may be later; without a model there is none.
                patience -= LOOK_S
                if known or patience < 0:
                    serves = True
                    # The models that were ready when it began to listen come before the line.
                    for text in (*changes.lines(), *changes.lines()):
                        yield Line(text)
                    good, failed, cold = changes.counts()
                    what = f" {good + cold} of {good + failed + cold} models"
                    if not known:
                        what = "; which models, only the log shows"
                    elif cold:
                        what += f", {cold} of them cold until their first request"
                    yield Line(f"Serving{what}", "serves")
            elif not serves:
                listening = await listens(planned.ports["http"])
            await asyncio.sleep(LOOK_S)
    finally:
        watching.cancel()
        await channel.close()


async def _watch(control: control_pb2_grpc.ControlStub, changes: Changes) -> NoReturn:
    """Follow the control service of a server."""
    while True:
        with suppress(grpc.RpcError):
            async for update in control.WatchState(pb.WatchStateRequest()):
                changes.take(update)
        await asyncio.sleep(LOOK_S)


async def _starting(control: control_pb2_grpc.ControlStub) -> set[str]:
    """Return the models that are starting, also those that are loaded and whose model.py is still being imported."""
    with suppress(grpc.RpcError):
        status = await control.GetStatus(pb.GetStatusRequest(), timeout=_STATUS_S)
        return {one.name for one in (*status.models, *status.metas) if one.starting}
    return set()
