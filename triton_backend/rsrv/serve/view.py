"""The lines that `rsrv serve` prints: each model that becomes ready, the endpoints, and every later change."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NoReturn

import grpc

from rsrv.address import LOOPBACK, Address
from rsrv.control.sentences import failed_how, lives
from rsrv.control.triton import Triton, TritonError
from rsrv.control.v1 import control_pb2 as pb
from rsrv.control.v1 import control_pb2_grpc
from rsrv.logs import shorten
from rsrv.serve.child_probes import listens
from rsrv.serve.plan import ServerPlan
from rsrv.serve.repositories import model_folders
from rsrv.text import one_line, some
from rsrv.wire.paths import CONTROL_SOCKET, FAILURE, SOCKET, runtime_directory
from rsrv.wire.stub_process import living_stubs
from rsrv_gen.plan import BUNDLE_FOLDER
from rsrv_gen.write import is_alias

#: Seconds between two polls, and between attempts to reach the control service.
POLL_S = 0.25
#: If a model has left the runtimes and is neither cold nor failed for this many polls, it is shown as not loaded. For example, an
#: operator has unloaded it.
_UNCLEAR_POLLS = 40
#: Seconds that the control service has to start after the server.
CONTROL_S = 15.0
#: Seconds that the control service has to answer a request.
_STATUS_S = 2.0
#: If a starting server has shown no line for this many seconds, show what it waits for. The interval doubles each time.
QUIET_S = 10.0
#: Maximum number of characters of an error that are shown.
_MAX_ERROR = 300


_UNKNOWN = "Serving. The log shows which models are served"


@dataclass(frozen=True, slots=True)
class Line:
    """A line for the operator."""

    text: str
    #: "change": a model has changed. "waits": the reason why the server does not serve yet. "serves": the server serves from now
    #: on. "note": other information, printed without a time.
    kind: Literal["change", "waits", "serves", "note"] = "change"


class Changes:
    """Changes of the models' states, as lines for people. Pure."""

    def __init__(
        self,
        broken: Mapping[str, str],
        models: Callable[[], Collection[str]] = frozenset,
        aliases: Callable[[], Collection[str]] = frozenset,
    ) -> None:
        """`models` and `aliases` return the names of the models and of the aliases in the repository."""
        self._models, self._aliases = models, aliases
        present = models()
        #: Errors of bundles that were broken before the start, and whose earlier version still serves. The errors have already
        #: been printed.
        self._kept = {name: reason for name, reason in broken.items() if name in present}
        #: The last shown state of each model. Bundles that were broken before the start and do not serve are shown at the
        #: start.
        self._shown = {name: ("failed", text) for name, text in broken.items() if name not in present}
        #: Versions of each model by key, the latest last. Each version has its state by device.
        self._versions: dict[str, dict[str, dict[int, pb.Version]]] = {}
        self._failures: dict[str, str] = {}
        #: Models that may have changed since the last call of `lines`.
        self._touched: set[str] = set()
        #: Models that may have changed before the last call of `lines`. The next call reports them.
        self._waiting: set[str] = set()
        #: Models that have left the runtimes.
        self._gone: set[str] = set()
        #: Number of checks that found no reason why a model has left the runtimes, by model.
        self._unclear = Counter[str]()
        #: True once the models of a device are known.
        self.known = False

    def take(self, update: pb.WatchStateResponse) -> None:
        """Process an update of the control service."""
        touched = self._apply(update)
        self._touched |= touched
        if update.HasField("snapshot"):
            # The models of a new runtime arrive one after the other. Models that have not arrived yet are not gone.
            self.known, touched = True, set()
        self._gone = {name for name in self._gone | touched if name not in self._versions}

    def ready(self) -> set[str]:
        """Return the models that the next call of `lines` will report as ready."""
        names = {name for name in self._waiting if _is_ready(self._state(name))}
        return {name for name in names if not _is_ready(self._shown.get(name))}

    def left(self) -> bool:
        """Return True if a model has left the runtimes since its last line. It may be cold, failed or removed."""
        return not self._waiting.isdisjoint(self._gone)

    def lines(self, lives: Mapping[str, str] | None = None) -> Iterator[str]:
        """Yield a line for each model whose state changed before the previous call. By now, Triton has the new state as well.

        `lives` has the state of each model in the words of the control service. Starting models get their lines later.
        """
        lives = lives or {}
        due, self._waiting, self._touched = self._waiting, self._touched, set()
        models = self._models() if due & self._gone else ()
        for name in sorted(due):
            if lives.get(name, "").startswith("starting"):
                self._touched.add(name)
                continue
            state, before = self._state(name), self._shown.get(name)
            if state is None:
                # A model that is loading again needs no line: it still serves, or its failure has been shown.
                if name in self._gone:
                    yield from self._left(name, lives, models)
                continue
            self._shown[name] = state
            self._unclear.pop(name, None)
            word, detail = state
            if state == before:
                continue
            if word == "failed":
                how = failed_how(serves=self._serves(name))
                yield f"{name} {how}: {' '.join(detail.split())}"
            elif _is_ready(before):
                self._kept.pop(name, None)
                yield f"{name} serves its new bundle"
            else:
                yield f"{name} is ready"

    def _serves(self, name: str) -> bool:
        """Return True if a version of a model is ready on any device."""
        versions = self._versions.get(name, {}).values()
        return any(device.state == pb.STATE_READY for devices in versions for device in devices.values())

    def _left(self, name: str, lives: Mapping[str, str], models: Collection[str]) -> Iterator[str]:
        """Yield the line for a model that has left the runtimes, or whose failure has ended, if the reason is known."""
        word, before = lives.get(name, "").partition(",")[0], self._shown.get(name)
        if name in models and word not in ("cold", "asleep"):
            self._unclear[name] += 1
            if self._unclear[name] < _UNCLEAR_POLLS:
                # Wait: in a few seconds, the control service will report that the model is cold or has failed.
                self._touched.add(name)
                return
            word = "not loaded"
        self._unclear.pop(name, None)
        if name in models:
            self._shown[name] = word, ""
            if before != (word, ""):
                yield f"{name} is {word}"
            return
        self._shown.pop(name, None)
        alias = name.removeprefix("aliases.")
        if alias not in self._aliases():
            yield f"{name} is removed"
        elif before is not None:
            yield f"the alias {alias} is served"

    def counts(self, lives: Mapping[str, str], loaded: Collection[str] | None) -> Counter[str]:
        """Return the number of models that are ready, cold, asleep, starting and failed.

        `lives` has each model's state in the words of the control service. `loaded` has the models that Triton has loaded, or
        is None if they are unknown.
        """
        return Counter(self._word(name, lives, loaded) for name in {*self._models(), *self._shown})

    def _word(self, name: str, lives: Mapping[str, str], loaded: Collection[str] | None) -> str:
        state = self._state(name) or self._shown.get(name)
        if state is not None and state[0] in ("ready", "failed"):
            return state[0]
        if loaded is not None and name not in loaded:
            return "failed"
        word = lives.get(name, "cold").partition(",")[0]
        return word if word in ("cold", "asleep", "starting") else "ready"

    def _apply(self, update: pb.WatchStateResponse) -> set[str]:
        """Process an update. Return the names of the models that it may change."""
        match update.WhichOneof("update"):
            case "failures":
                before = self._failures
                failures = {failure.name: failure.text for failure in update.failures.failures}
                self._failures = {
                    name: text for name, text in failures.items() if self._kept.get(name) != text
                }
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
        # While a runtime does not answer, keep the last states.
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
        """Return ("ready", key) or ("failed", reason) for a model in these states, and None in other states."""
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


def endpoints(planned: ServerPlan, page: str | None, log: Path) -> str:
    """Return the block of endpoints, with the paths of the log and of the operators' key."""
    ports = planned.ports
    rows = [
        ("HTTP", f"http://{local(ports['http'])}"),
        ("gRPC", local(ports["grpc"])),
        ("metrics", f"http://{local(ports['metrics'])}/metrics"),
        ("live page", page),
        ("log", str(log)),
        (
            "key",
            f"{_shown(planned.key_file)} (opens the APIs that load models and change the server)",
        ),
    ]
    hosts = {address.host for address in ports.values()} - {LOOPBACK, "::1"}
    if hosts:
        rows.append(
            ("open", f"other machines can connect to {' and '.join(sorted(hosts))}, without TLS or a token")
        )
    return "\n".join(f"  {name:<10} {text}" for name, text in rows if text)


def _shown(path: Path) -> str:
    """Return the path. If it is inside the working directory, the result is relative to that directory."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def local(address: Address) -> str:
    """Return the address for clients on this machine."""
    host = "localhost" if address.local in ("127.0.0.1", "::1") else address.local
    return str(Address(host, address.port))


class Patience:
    """Decides when to print what a start waits for: after ten seconds without a line, and then after twice the time. Pure."""

    def __init__(self, now: float) -> None:
        self._began = self._spoke = now
        self._pause = QUIET_S

    def note(self, now: float) -> None:
        """Record that a line was shown."""
        self._spoke = now

    def waited(self, now: float) -> float | None:
        """Return the seconds since the start if a line is due, or None."""
        if now - self._spoke < self._pause:
            return None
        self._spoke = now
        self._pause *= 2
        return now - self._began


def waits_for(
    models: int, starting: Collection[str], processes: Collection[str], runtime: bool, error: str
) -> str:
    """Return the text about what a starting server waits for.

    Args:
        models: Number of models in the repository.
        starting: Models that are starting, as the control process reports. Empty without a control process.
        processes: Models that have a process.
        runtime: True if a runtime runs.
        error: The last error in the log.
    """
    if starting:
        text = f"starting {some(sorted(starting))}"
    elif runtime:
        text = f"a runtime runs, and {models} models are loading"
    elif processes:
        text = f"{len(processes)} of {models} models have a process ({some(sorted(processes))}), and no runtime runs yet"
    else:
        text = f"tritonserver has {models} models to load, and no process of a model and no runtime runs yet"
    return f"{text}. The last error in the log: {shorten(one_line(error), _MAX_ERROR)}" if error else text


async def follow(
    planned: ServerPlan, pid: int, broken: Mapping[str, str], last_error: Callable[[], str] = str
) -> AsyncGenerator[Line, None]:
    """Yield a line for each change of a tritonserver's models, and one when it begins to serve. Never ends.

    If there is no line for some time while the server starts, yield a line about what it waits for. `last_error` returns the
    last error in the log.
    """
    clock = asyncio.get_running_loop().time
    silence = Patience(clock())
    changes = Changes(broken, partial(_models, planned.repository), partial(_aliases, planned.repository))
    patience, listening, serves = CONTROL_S, False, False
    directory, shown = runtime_directory(pid, "0"), ""
    # By default, gRPC waits longer after each failed attempt, so ready models could be shown up to two minutes late.
    options = [
        (f"grpc.{which}_reconnect_backoff_ms", int(POLL_S * 1000)) for which in ("min", "initial", "max")
    ]
    # The status of thousands of models is larger than gRPC's limit of 4 MiB.
    options.append(("grpc.max_receive_message_length", -1))
    channel = grpc.aio.insecure_channel(f"unix:{directory / CONTROL_SOCKET}", options)
    control = control_pb2_grpc.ControlStub(channel)
    watching = asyncio.create_task(_watch(control, changes))
    try:
        while True:
            hooks = [planned.repository / name / BUNDLE_FOLDER / "model.py" for name in changes.ready()]
            for text in changes.lines(
                lives(await _status(control)) if changes.left() or any(map(Path.exists, hooks)) else {}
            ):
                silence.note(clock())
                yield Line(text)
            if not serves and (waited := silence.waited(clock())) is not None:
                starting = {
                    name
                    for name, life in lives(await _status(control)).items()
                    if life.startswith("starting")
                }
                processes = await asyncio.to_thread(_processes, pid)
                runtime, count = (directory / SOCKET).exists(), len(model_folders(planned.repository))
                why = waits_for(count, starting, processes, runtime, last_error())
                yield Line(f"not serving after {waited:.0f} s: {why}", "waits")
            if not changes.known and (failure := _read(directory / FAILURE)) not in ("", shown):
                shown = failure
                yield Line(failure, "waits")
            if not serves and listening:
                models = _models(planned.repository)
                # The loaded models are known only through the control service.
                known = changes.known or not models
                # Wait for the control process. It starts concurrently with the models, and may be ready later than the models.
                # A server without models has no control process.
                patience -= POLL_S
                if known or shown or patience < 0:
                    serves = True
                    # Models that were ready when the server began to listen get their lines before the line about serving.
                    for text in (*changes.lines(), *changes.lines()):
                        yield Line(text)
                    counts, devices = Counter[str](failed=len(models)), Counter[str]()
                    if not shown:
                        status = await _status(control)
                        counts, devices = changes.counts(lives(status), await _loaded(pid)), _devices(status)
                    text = _serving(counts, devices) if known or shown else _UNKNOWN
                    yield Line(text, "serves")
            elif not serves:
                listening = await listens(planned.ports["http"])
            await asyncio.sleep(POLL_S)
    finally:
        watching.cancel()
        await channel.close()


def _devices(status: pb.GetStatusResponse) -> Counter[str]:
    """Return the number of devices of each kind, GPU and CPU. Devices that no runtime has opened yet are left out."""
    names = [device.record.memory.name for device in status.devices]
    return Counter("CPU" if name.startswith("cpu") else "GPU" for name in names if name)


def _serving(counts: Counter[str], devices: Counter[str]) -> str:
    """Return the line for a serving server, with the numbers of its ready models and of its devices."""
    text = f"Serving {counts.total() - counts['failed'] - counts['starting']} of {counts.total()} models"
    cold = counts["cold"] + counts["asleep"]
    details = [f"{cold} of them cold until their first request"] if cold else []
    details += [f"{counts[word]} {word}" for word in ("starting", "failed") if counts[word]]
    kinds = " and ".join(_counted(devices[kind], kind) for kind in ("GPU", "CPU") if devices[kind])
    if kinds and details:
        details.append(f"on {kinds}")
    elif kinds:
        text += f" on {kinds}"
    return ", ".join((text, *details))


def _counted(count: int, kind: str) -> str:
    if kind == "CPU":
        return "the CPU" if count == 1 else f"the CPU as {count} devices"
    return "one GPU" if count == 1 else f"{count} GPUs"


def _models(repository: Path) -> set[str]:
    """Return the models of a repository, without aliases."""
    return {name for name in model_folders(repository) if not is_alias(repository / name)}


def _aliases(repository: Path) -> set[str]:
    return {name for name in model_folders(repository) if is_alias(repository / name)}


def _processes(pid: int) -> set[str]:
    """Return the models for which a tritonserver has started a process."""
    return {stub.code.parent.parent.name for _, stub in living_stubs(pid)}


def _read(path: Path) -> str:
    try:
        return " ".join(path.read_text().split())
    except (OSError, ValueError):
        return ""


async def _watch(control: control_pb2_grpc.ControlStub, changes: Changes) -> NoReturn:
    """Follow the control service of a server."""
    while True:
        with suppress(grpc.RpcError):
            async for update in control.WatchState(pb.WatchStateRequest()):
                changes.take(update)
        await asyncio.sleep(POLL_S)


async def _status(control: control_pb2_grpc.ControlStub) -> pb.GetStatusResponse:
    """Return the status of the server. Empty if the control service does not answer."""
    with suppress(grpc.RpcError):
        status: pb.GetStatusResponse = await control.GetStatus(pb.GetStatusRequest(), timeout=_STATUS_S)
        return status
    return pb.GetStatusResponse()


async def _loaded(pid: int) -> set[str] | None:
    """Return the models and aliases that Triton has loaded, or None if it does not answer."""
    with suppress(TritonError):
        async with Triton.of(pid) as triton:
            return {name for name, state in (await triton.states()).items() if state == "ready"}
    return None
