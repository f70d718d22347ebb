"""Commands to the running runtime: the desired document, actions and queries.

Each command is carried out, or refused with a reason.

The commands of a connection are answered in their order. The runtime answers a command once the scheduler has handled its
events. A command that takes time (`profile`, `restart`, `sleep`) delays only later commands on the same connection.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from types import UnionType
from typing import Any, Literal

from rsrv.control.v1 import control_pb2 as pb
from rsrv.runtime.applied_state import AppliedState
from rsrv.runtime.device import Device
from rsrv.runtime.registry import Registry
from rsrv.runtime.reports import Reports
from rsrv.runtime.request_ids import parse_number
from rsrv.runtime.requests import Requests
from rsrv.runtime.spare import Successor
from rsrv.runtime.start_queue import Demand, Urgency
from rsrv.runtime.stateful_requests import StatefulRequests
from rsrv.runtime.threads import Inbox
from rsrv.runtime.transport import PeerConnection, Transport
from rsrv.runtime.unanswered import UnansweredRequests
from rsrv.runtime.weight_manager import Outbox
from rsrv.scheduler import events as ev
from rsrv.settings import SettingsError
from rsrv.text import nearest
from rsrv.wire.frames import Kind, ProtocolError, request_tag

log = logging.getLogger(__name__)

#: Maximum length of the reason why a command is refused, in characters.
_MAX_TEXT = 4000
#: Maximum number of commands of one connection that wait for the end of an earlier command.
_MAX_WAITING = 64
Answer = dict[str, Any]


class CommandRefused(Exception):
    """A command is not carried out. `code` is the name of a gRPC status; the message has the reason and a remedy."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


# --- fields ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Field:
    """A field of a command. It accepts values of `types`, numbers from `least` on, and if there are `texts`, only these."""

    types: type | UnionType
    expected: str
    required: bool = False
    least: float | None = None
    texts: Collection[str] = ()

    def accepts(self, value: object) -> bool:
        if isinstance(value, bool):  # bool is a subclass of int
            return self.types is bool
        if not isinstance(value, self.types) or (self.texts and value not in self.texts):
            return False
        return self.least is None or (isinstance(value, int | float) and self.least <= value < inf)


_MODEL = {"model": _Field(str, "a string", required=True)}
_MODEL_OR_ALL = {"model": _Field(str | None, "a string")}
_REQUEST = {"request": _Field(str, "a string", required=True)}
_SINCE = {"since": _Field(int, "a whole number, at least 0", least=0)}
_END = {
    "drain_s": _Field(int | float, "a number of seconds, at least 0", required=True, least=0),
    "force": _Field(bool, "true or false"),
}

#: The fields of each command, except its name.
_COMMANDS: Mapping[str, Mapping[str, _Field]] = {
    "ping": {},
    "compact": {},
    # A whole desired document, or its changes since a revision. `rsrv.desired` checks the document itself.
    "follow": {
        "instance": _Field(str, "a string", required=True),
        "revision": _Field(int, "a whole number, at least 1", required=True, least=1),
        "since": _Field(int | None, "a whole number"),
        "document": _Field(dict, "a mapping", required=True),
    },
    "start": {
        "models": _Field(dict, "a mapping from names to paths of bundles", required=True),
        "poll": _Field(bool, "true or false"),
    },
    "prefetch": _MODEL,
    "evict": _MODEL_OR_ALL,
    "abort": _REQUEST,
    "history": _MODEL,
    "slowest": _MODEL,
    "find": _REQUEST,
    "restart": _END,
    "sleep": _END,
    "profile": {"directory": _Field(str | None, "a string")},
    "timeline": _SINCE,
    "arrivals": _SINCE,
    "traces": _SINCE,
}
#: Maximum number of characters of a value that a message repeats.
_MAX_VALUE = 80
#: Maximum number of problems in an answer. There is a maximum because the loop handles nothing else while it writes them.
_MAX_PROBLEMS = 10


def _check(command: Mapping[str, Any]) -> str:
    """Return the name of a command whose fields are valid. Raises CommandRefused."""
    name = command.get("command")
    fields = _COMMANDS.get(name) if isinstance(name, str) else None
    if fields is None or not isinstance(name, str):
        known = nearest(name, _COMMANDS) if isinstance(name, str) else f"; known are {', '.join(_COMMANDS)}"
        raise CommandRefused("INVALID_ARGUMENT", f"there is no command {name!r:.80}{known}")
    problems = [
        f"{key}: missing, and there is no default: give it"
        for key, field in fields.items()
        if field.required and key not in command
    ]
    for key, value in command.items():
        if len(problems) >= _MAX_PROBLEMS:
            break
        field = fields.get(key)
        if field is None and key != "command":
            problems.append(f"{key:.80}: unknown key{nearest(key, fields)}")
        elif field is not None and not field.accepts(value):
            shown = repr(value)
            shown = shown if len(shown) <= _MAX_VALUE else shown[:_MAX_VALUE] + "..."
            problems.append(f"{key}: must be {field.expected} (found {shown})")
    if problems:
        raise CommandRefused("INVALID_ARGUMENT", f"{name}: " + "; ".join(problems))
    return name


# --- profiles --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ProfileChanged:
    """A profile was started or ended for a connection. If this failed, `refused` has the reason."""

    connection: PeerConnection
    recording: bool
    refused: CommandRefused | None


class Profiler:
    """Records one profile at a time.

    A thread starts or ends the profile, which takes seconds, and then posts `ProfileChanged`.
    """

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self.state: Literal["idle", "changing", "recording"] = "idle"

    def change(self, device: Device, directory: str | None, connection: PeerConnection) -> None:
        """Start a profile in a directory. None: end the profile that is being recorded. Raises CommandRefused."""
        if self.state == "changing":
            raise CommandRefused(
                "FAILED_PRECONDITION", "a profile is being started or stopped; try again later"
            )
        if directory is None:
            if self.state == "idle":
                raise CommandRefused("FAILED_PRECONDITION", "no profile is being recorded")
            action = device.stop_profile
        else:
            if self.state == "recording":
                raise CommandRefused(
                    "FAILED_PRECONDITION", "a profile is already being recorded: stop it first"
                )
            path = Path(directory)
            if not path.is_absolute() or "\0" in directory:
                raise CommandRefused(
                    "INVALID_ARGUMENT", f"directory {directory!r:.200} is not an absolute path"
                )
            action = partial(_start_profile, device, path)
        run = partial(self._run, action, connection, starts=directory is not None)
        threading.Thread(target=run, name="profile", daemon=True).start()
        # Set this last, because the start of the thread may fail.
        self.state = "changing"

    def _run(self, action: Callable[[], None], connection: PeerConnection, *, starts: bool) -> None:
        refused = None
        try:
            action()
        except CommandRefused as error:
            refused = error
        except Exception as error:
            log.exception("profiling failed")
            refused = CommandRefused("INTERNAL", f"{type(error).__name__}: {error}")
        # If ending a profile has failed, report that no profile is being recorded: jax cannot end a profile a second time.
        self._inbox.post(ProfileChanged(connection, starts and refused is None, refused))


def _start_profile(device: Device, directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        raise CommandRefused(
            "INVALID_ARGUMENT", f"{directory} already exists; name a new directory"
        ) from None
    except OSError as error:
        raise CommandRefused("FAILED_PRECONDITION", f"{directory} cannot be made: {error.strerror}") from None
    log.info("profiling into %s", directory)
    device.start_profile(directory)


# --- commands --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NextPrepared:
    """The next runtime's process is ready and waits for its turn. If it cannot serve, `reason` is not empty."""

    reason: str


@dataclass(frozen=True, slots=True)
class _PlannedEnd:
    """A planned end of the runtime."""

    command: Literal["restart", "sleep"]
    #: Connection of the command. None: the device sleeps because no request has arrived for `runtime.idle.server`.
    connection: PeerConnection | None
    drain_s: float
    #: True to end even if something is in progress. A sleep then begins even if requests wait or models are being built.
    force: bool


class Commands:
    """Carries out commands. Belongs to the loop. The loop calls `answer` when the events of a command are handled."""

    def __init__(
        self,
        registry: Registry,
        unanswered: UnansweredRequests,
        requests: Requests,
        stateful: StatefulRequests,
        reports: Reports,
        transport: Transport,
        inbox: Inbox,
        outbox: Outbox,
    ) -> None:
        self._registry = registry
        self._catalog = registry.catalog
        self._policy = registry.catalog.policy
        self._weights = registry.weights
        self._unanswered = unanswered
        self._requests = requests
        self._stateful = stateful
        self._reports = reports
        self._transport = transport
        self._outbox = outbox
        self.applied = AppliedState(registry, stateful.sequences, outbox)
        self._profiler = Profiler(inbox)
        self._inbox = inbox
        self.successor = Successor()
        #: The planned end that is under way, or None.
        self._end: _PlannedEnd | None = None
        #: True while the next runtime is being prepared.
        self._preparing = False
        #: True once the runtime ends so that the next runtime can serve.
        self.ends = False
        #: True if the next runtime waits until a request needs the device.
        self.sleeps = False
        #: Commands that wait until an earlier command of their connection is answered.
        self._waiting: dict[PeerConnection, deque[dict[str, Any]]] = {}
        #: Answers that are sent once the scheduler has handled the events of their commands. A function is called at that time
        #: to make the answer.
        self.unanswered: list[tuple[PeerConnection, Answer | Callable[[], Answer]]] = []

    def record(self, since: int = 0) -> pb.DeviceRecord:
        """Return the record of the device with the fields that only this class knows. See `Records.device`."""
        record = self._reports.records.device(since)
        record.connections = len(self._transport.connections)
        record.follows, record.follows_revision = self.applied.instance, self.applied.revision
        return record

    def fall_asleep(self) -> None:
        """Sleep because no request has arrived for a long time, unless an end or a profile is under way."""
        if self._end is None and not self._preparing and self._profiler.state == "idle":
            self._plan(_PlannedEnd("sleep", None, 0.0, force=False))

    def take(self, connection: PeerConnection, command: dict[str, Any]) -> None:
        """Carry out a command now, or once earlier commands of its connection are answered."""
        waiting = self._waiting.get(connection)
        if waiting is None:
            self._carry_out(connection, command)
        elif len(waiting) < _MAX_WAITING:
            waiting.append(command)
        else:
            raise ProtocolError(f"{len(waiting)} commands are already waiting for answers")

    def leave(self, connection: PeerConnection) -> None:
        """Drop the waiting commands of a closed connection, and withdraw its `restart` or `sleep`."""
        self._waiting.pop(connection, None)
        if self._end is not None and self._end.connection is connection and not self.ends:
            self._go_on()

    def answer(self) -> None:
        """Answer the commands that were carried out."""
        unanswered, self.unanswered = self.unanswered, []
        for connection, answer in unanswered:
            value = answer() if callable(answer) else answer
            self._transport.guard(connection, connection.send_object, Kind.COMMANDED, value)

    def profile_changed(self, message: ProfileChanged) -> None:
        """Answer `profile`."""
        self._profiler.state = "recording" if message.recording else "idle"
        self._answer_late(message.connection, message.refused)

    def next_prepared(self, message: "NextPrepared") -> None:
        """Wind down for the next runtime, or refuse the end that was planned."""
        self._preparing = False
        end = self._end
        if end is None:
            self.successor.withdraw()  # The connection has ended.
        elif not message.reason:
            self._stateful.hold_starts(held=True)
            self._outbox.append(ev.WindDown(end.drain_s))
        else:
            self._refuse_end(end, f"the runtime continues: {message.reason}")

    def wound_down(self, wound: ev.WoundDown) -> None:
        """Answer `restart` or `sleep`: the runtime ends, or the command is refused because something is still in progress."""
        end = self._end
        if end is None:
            return  # The command is being withdrawn.
        waiting, building = len(self._unanswered.pending), len(self._catalog.building)
        if not end.force and (wound.runs or wound.executions or wound.steps):
            text = (
                f"{wound.runs} runs of meta models, {len(self._stateful.generations)} generations and {wound.executions} "
                "executions have not ended in time, so the runtime continues. Wait longer with --drain, or end the runtime with "
                "--force: they begin again in the next runtime, but generations fail if they have sent tokens"
            )
            self._refuse_end(end, text)
        elif not end.force and end.command == "sleep" and (waiting or building):
            text = (
                f"{waiting} requests wait and {building} models are being built: they would wake the device at once, so it "
                "does not sleep. Try again when they are ready, or use --force"
            )
            self._refuse_end(end, text)
        else:
            self._finish(end)

    def _plan(self, end: _PlannedEnd) -> None:
        """Begin an end with the preparation of the next runtime."""
        self._end, self._preparing = end, True
        # Only for a restart, let the next process prepare its device now. A device may sleep for a long time, and a process
        # with a prepared device would waste memory during this time.
        fresh = end.command == "restart"
        self.successor.prepare(lambda reason: self._inbox.post(NextPrepared(reason)), fresh=fresh)

    def _finish(self, end: _PlannedEnd) -> None:
        if end.command == "sleep":
            try:
                self.successor.stay_back(self.record(0).SerializeToString())
            except OSError as error:
                self._refuse_end(end, f"the file that marks the device as asleep cannot be written: {error}")
                return
            self.sleeps = True
            self._registry.dismiss()
        self.ends = True
        self._answer_late(end.connection, None)

    def _refuse_end(self, end: _PlannedEnd, text: str) -> None:
        self._go_on()
        self._answer_late(end.connection, CommandRefused("FAILED_PRECONDITION", text))

    def _go_on(self) -> None:
        """Withdraw the planned end: the runtime continues."""
        self._end = None
        self._stateful.hold_starts(held=False)
        self._outbox.append(ev.WindDown(None))
        if not self._preparing:
            self.successor.withdraw()

    def _answer_late(self, connection: PeerConnection | None, refused: CommandRefused | None) -> None:
        """Answer a command that took time, and carry out the commands that have waited for it."""
        if connection is None:
            if refused is not None:
                log.info("the idle device could not be put to sleep: %s", refused)
            return
        waiting = self._waiting.pop(connection, None)
        if waiting is None:
            return  # The connection has ended.
        answer = {} if refused is None else _refusal(refused.code, str(refused))
        self._transport.guard(connection, connection.send_object, Kind.COMMANDED, answer)
        for command in waiting:
            self._transport.guard(connection, self.take, connection, command)

    def _carry_out(self, connection: PeerConnection, command: dict[str, Any]) -> None:
        answer: Answer | Callable[[], Answer] | None
        try:
            answer = self._do(connection, _check(command), command)
        except CommandRefused as refused:
            answer = _refusal(refused.code, str(refused))
        except Exception as error:
            log.exception("a command failed")
            answer = _refusal("INTERNAL", f"{type(error).__name__}: {error}; the server's log says more")
        if answer is not None:
            self.unanswered.append((connection, answer))

    def _do(
        self, connection: PeerConnection, name: str, command: dict[str, Any]
    ) -> Answer | Callable[[], Answer] | None:
        """Carry out a command. Return its answer, or a function that makes the answer later.

        None: the command takes time, and `_answer_late` answers it.
        """
        model = command.get("model")
        match name:
            case "ping":
                return self._reports.ping()
            case "follow":
                return self._follow(command)
            case "compact":
                self._outbox.append(ev.Compact())
            case "start":
                return self._start(command["models"], poll=command.get("poll", False))
            case "prefetch":
                self._prefetch(command["model"])
            case "evict":
                return {"models": self._evict(model)}
            case "abort":
                return self._abort(command["request"])
            case "history":
                return self._reports.histories(self._names(model))
            case "slowest":
                return self._reports.slowest(self._names(model))
            case "find":
                text = command["request"]
                return self._reports.find(request_tag(text), parse_number(text))
            case "timeline":
                return self._reports.timeline(command.get("since", 0))
            case "arrivals":
                return self._reports.arrivals(command.get("since", 0))
            case "traces":
                return self._reports.traces(command.get("since", 0))
            case "restart" | "sleep":
                if self._end is not None or self._preparing:
                    raise CommandRefused(
                        "FAILED_PRECONDITION",
                        "another restart or sleep is in progress; wait until it has ended",
                    )
                self._waiting[connection] = deque()
                self._plan(_PlannedEnd(name, connection, command["drain_s"], command.get("force", False)))
                return None
            case "profile":
                self._profile(connection, command.get("directory"))
                return None
            case _:
                raise AssertionError(f"command {name} has no action")
        return {}

    def _names(self, model: Any) -> list[str]:
        """Return the name of a model, or the names of all models that a meta model calls. Raises CommandRefused."""
        if self._catalog.serves(model):
            return [model]
        called = [group.calls for group in self._registry.metas() if group.name == model]
        if not called:
            raise CommandRefused("NOT_FOUND", f"there is no model {model!r:.200}")
        return [callee for calls in called for callee in calls]

    def _follow(self, command: Mapping[str, Any]) -> Answer:
        try:
            return self.applied.take(
                command["instance"], command["revision"], command.get("since"), command["document"]
            )
        except SettingsError as error:
            raise CommandRefused("INVALID_ARGUMENT", str(error)) from None

    def _start(self, models: Mapping[str, Any], *, poll: bool) -> Answer:
        """Start models without stubs. Return the models that could not be started, with the reasons.

        `models` has the path of each bundle. If a path is None, the model is not kept any more. If `poll` is true, nothing is
        started.
        """
        for name, path in () if poll else models.items():
            if path is None:
                self._registry.let_go(name)
            else:
                weight = self._policy.settings.for_model(name).weight
                self._registry.start(name, str(path), Demand(Urgency.PREWARMED, weight=weight))
        failed = {name: why for name in models if (why := self._registry.start_failures.get(name))}
        return {"failed": failed}

    def _prefetch(self, model: str) -> None:
        names = self._names(model)
        keys = self._catalog.compiled(names)
        if names and not keys:
            raise CommandRefused(
                "FAILED_PRECONDITION", f"model {model!r:.200} is not built yet; try again later"
            )
        self._outbox.extend(ev.Prefetch(key) for key in keys)

    def _evict(self, model: str | None) -> list[str]:
        """Evict models. Return the names of the models whose weights will be freed."""
        chosen = None if model is None else self._names(model)
        keys = self._catalog.compiled(chosen)
        entries = (self._catalog.entries[key] for key in keys)
        names = {
            entry.name
            for entry in entries
            if entry.weights != "absent" and self._policy.residency(entry.name) != "device"
        }
        self._outbox.append(ev.Evict(keys))
        return sorted(names)

    def _abort(self, request: str) -> Callable[[], Answer]:
        runs, tagged, cancelled = self._requests.abort(request_tag(request))

        def answer() -> Answer:
            executing = cancelled & self._unanswered.pending.keys()
            return {"aborted": runs + len(tagged - executing), "executing": len(executing)}

        return answer

    def _profile(self, connection: PeerConnection, directory: str | None) -> None:
        device = self._weights.device
        if device is None:
            raise CommandRefused("FAILED_PRECONDITION", "the runtime has no device yet; try again later")
        self._profiler.change(device, directory, connection)
        self._waiting[connection] = deque()


def _refusal(code: str, text: str) -> Answer:
    return {"error": text[:_MAX_TEXT], "code": code}
