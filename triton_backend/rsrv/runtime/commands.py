"""What operators want while the runtime runs: COMMAND and CONFIGURE, done or refused with a reason.

Answers to a connection's commands come in the order of the commands: one that takes time (`profile`) holds back those
that follow it on its connection, and nobody else.
"""

import logging
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rsrv.explain import explain, nearest
from rsrv.runtime.executor import LoopBans
from rsrv.runtime.metrics import StubMetrics, metrics, overview
from rsrv.runtime.profiling import Profiler, Refused
from rsrv.runtime.registry import Registry
from rsrv.runtime.requests import Requests
from rsrv.runtime.state_feed import StateFeed
from rsrv.runtime.status import load
from rsrv.runtime.threads import Inbox
from rsrv.runtime.timeline import Timeline, Traces
from rsrv.runtime.transport import Connection, Transport
from rsrv.scheduler import events as ev
from rsrv.scheduler.scheduler import Scheduler
from rsrv.settings import SettingsError
from rsrv.wire.frames import Kind, ProtocolError, request_tag

log = logging.getLogger("rsrv.commands")

#: characters of what is said about a command that is refused
_MAX_TEXT = 4000
#: commands of one connection that may wait for the end of an earlier one
_MAX_WAITING = 64

Answer = dict[str, Any]


class _Command(BaseModel):
    """The fields of a command, by its name; those without a default must be given."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    command: str


class _Ping(_Command):
    pass


class _SetResidency(_Command):
    model: str
    residency: str


class _Compact(_Command):
    pass


class _SetPolicy(_Command):
    model: str
    # Absent ones stay as they are; what they may be, the settings say.
    weight: float | None = None
    max_delay_us: int | None = None
    max_queue_depth: int | None = None


class _Prefetch(_Command):
    model: str


class _Evict(_Command):
    model: str | None = None


class _Pause(_Command):
    model: str | None = None
    mode: Literal["drain", "hold", "reject"]


class _Continue(_Command):
    model: str | None = None


class _Abort(_Command):
    request: str


class _Story(_Command):
    model: str


class _Load(_Command):
    pass


class _Timeline(_Command):
    since: int = Field(0, ge=0)


class _Traces(_Command):
    since: int = Field(0, ge=0)


class _Metrics(_Command):
    pass


class _Overview(_Command):
    pass


class _Profile(_Command):
    directory: str | None = None


_KINDS: dict[str, type[_Command]] = {
    "ping": _Ping,
    "residency": _SetResidency,
    "compact": _Compact,
    "policy": _SetPolicy,
    "prefetch": _Prefetch,
    "evict": _Evict,
    "pause": _Pause,
    "continue": _Continue,
    "abort": _Abort,
    "story": _Story,
    "load": _Load,
    "metrics": _Metrics,
    "overview": _Overview,
    "profile": _Profile,
    "timeline": _Timeline,
    "traces": _Traces,
}


class Commands:
    """Belongs to the loop. `feed` takes the scheduler's events; `clock` is the loop's."""

    def __init__(
        self,
        registry: Registry,
        scheduler: Scheduler,
        requests: Requests,
        stub_metrics: StubMetrics,
        state_feed: StateFeed,
        transport: Transport,
        inbox: Inbox,
        timeline: Timeline,
        traces: Traces,
        bans: LoopBans,
        feed: Callable[[ev.Event], None],
        clock: Callable[[], float],
    ) -> None:
        self._registry = registry
        self._catalog = registry.catalog
        self._policy = registry.catalog.policy
        self._placement = registry.placement
        self._scheduler = scheduler
        self._requests = requests
        self._stub_metrics = stub_metrics
        self._state_feed = state_feed
        self._transport = transport
        self._timeline = timeline
        self._traces = traces
        self._bans = bans
        self._feed = feed
        self._clock = clock
        self._profiler = Profiler(inbox)
        #: commands that wait until an earlier one of their connection is answered
        self._waiting: dict[Connection, deque[dict[str, Any]]] = {}

    def configure(self, changes: dict[str, Any]) -> Answer:
        """Change the scheduler's section; returns what holds now, or what is wrong with it."""
        try:
            self._policy.change_scheduler(changes)
        except SettingsError as error:
            return {"error": str(error)[:_MAX_TEXT]}
        self._placement.decide()
        section = self._policy.settings.scheduler.model_dump(mode="json")
        return {**section, "depth": self._scheduler.settings.depth}

    def take(self, connection: Connection, command: dict[str, Any]) -> None:
        """Do it and answer, now or when earlier ones of that connection are answered."""
        waiting = self._waiting.get(connection)
        if waiting is None:
            self._serve(connection, command)
        elif len(waiting) < _MAX_WAITING:
            waiting.append(command)
        else:
            raise ProtocolError(f"{len(waiting)} commands wait for their answers already")

    def leave(self, connection: Connection) -> None:
        """A connection ended: what it still wanted is not done."""
        self._waiting.pop(connection, None)

    def _serve(self, connection: Connection, command: dict[str, Any]) -> None:
        try:
            wanted = _read(command)
            if isinstance(wanted, _Profile):
                self._profile(connection, wanted)
                return
            answer = self._do(wanted)
        except Refused as refused:
            answer = _refusal(refused.code, str(refused))
        except Exception as error:
            log.exception("a command failed")
            answer = _refusal("INTERNAL", f"{type(error).__name__}: {error}; the server's log says more")
        connection.send_object(Kind.COMMANDED, answer)

    def _profile(self, connection: Connection, wanted: _Profile) -> None:
        device = self._placement.device
        if device is None:
            raise Refused("FAILED_PRECONDITION", "the runtime has no device yet; try again later")
        self._profiler.begin(device, wanted.directory, partial(self._answer_late, connection))
        self._waiting[connection] = deque()

    def _answer_late(self, connection: Connection, refused: Refused | None) -> None:
        """A command that took time is done; now those that have waited for it."""
        waiting = self._waiting.pop(connection, None)
        if waiting is None:
            return  # the connection has ended
        answer = {} if refused is None else _refusal(refused.code, str(refused))
        self._transport.guard(connection, connection.send_object, Kind.COMMANDED, answer)
        for command in waiting:
            self._transport.guard(connection, self.take, connection, command)

    # --- the commands -------------------------------------------------------------------------------------

    def _do(self, command: _Command) -> Answer:
        match command:
            case _Ping():
                return {"instance": self._state_feed.instance, "revision": self._state_feed.revision}
            case _SetResidency(model=model, residency=residency):
                names = self._names(model)
                _checked(lambda: self._placement.set_residency(names, residency))
                self._registry.tell_all()
            case _Compact():
                self._feed(ev.Compact())
            case _SetPolicy(model=model):
                self._set_policy(model, command.model_dump(exclude_unset=True, exclude={"command", "model"}))
            case _Prefetch(model=model):
                self._prefetch(model)
            case _Evict(model=model):
                return {"models": self._evict(model)}
            case _Pause(model=model, mode=mode):
                self._pause(model, ev.Pause(mode))
            case _Continue(model=model):
                self._pause(model, None)
            case _Abort(request=request):
                aborted, executing = self._requests.abort(request_tag(request))
                return {"aborted": aborted, "executing": executing}
            case _Story(model=model):
                names = self._names(model)
                keys = [key for key, listed in self._catalog.listed.items() if listed.name in names]
                return {"stories": {key: self._scheduler.story(key) for key in keys}}
            case _Load():
                backlog = self._scheduler.backlog_seconds(self._clock())
                return load(self._registry, self._state_feed.instance, self._scheduler.load(), backlog)
            case _Timeline(since=since):
                return self._timeline.answer(self._state_feed.instance, since, self._clock())
            case _Traces(since=since):
                return self._traces.answer(self._state_feed.instance, since)
            case _Metrics():
                kept = self._requests.runs.kept_bytes
                return metrics(self._registry, self._scheduler, self._stub_metrics, kept, self._bans.count)
            case _Overview():
                return overview(self._registry, self._scheduler, self._stub_metrics)
            case _:
                raise AssertionError(f"nobody does {type(command).__name__}")
        return {}

    def _names(self, model: str) -> list[str]:
        """The model by that name, or those that a meta model by that name calls."""
        try:
            return self._registry.names_of(model)
        except LookupError as error:
            raise Refused("NOT_FOUND", str(error)) from None

    def _set_policy(self, model: str, changes: Mapping[str, Any]) -> None:
        names = self._names(model)
        # Of a meta model its own, too: so many of its runs may wait.
        _checked(lambda: self._policy.change_models([model, *names], changes))
        for key in self._catalog.built(names):
            program = self._policy.program(self._catalog.get(key).program, self._catalog.listed[key].name)
            self._feed(ev.PolicyChanged(key, program.weight, program.max_delay, program.max_queue_depth))

    def _prefetch(self, model: str) -> None:
        names = self._names(model)
        keys = self._catalog.built(names)
        if names and not keys:
            raise Refused("FAILED_PRECONDITION", f"model {model!r:.200} is not built yet; try again later")
        self._policy.prefetch(names)
        for key in keys:
            self._feed(ev.Prefetch(key))

    def _evict(self, model: str | None) -> list[str]:
        """Returns the names of those that have something to free."""
        wanted = None if model is None else self._names(model)
        keys = self._catalog.built(wanted)
        found = (self._catalog.listed[key] for key in keys)
        names = {
            listed.name
            for listed in found
            if listed.weights != "absent" and self._policy.residency(listed.name) != "device"
        }
        self._policy.evict(wanted)
        self._feed(ev.Evict(keys))
        return sorted(names)

    def _pause(self, model: str | None, mode: ev.Pause | None) -> None:
        names = None if model is None else self._names(model)
        self._policy.pause(names, mode)
        self._feed(ev.Paused(self._catalog.built(names), mode))
        self._registry.tell_all()


T = TypeVar("T")


def _checked(action: Callable[[], T]) -> T:
    try:
        return action()
    except SettingsError as error:
        raise Refused("INVALID_ARGUMENT", str(error)) from None


def _read(command: dict[str, Any]) -> _Command:
    """Raises Refused."""
    name = command.get("command")
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        known = nearest(name, _KINDS) if isinstance(name, str) else f"; known are {', '.join(_KINDS)}"
        raise Refused("INVALID_ARGUMENT", f"there is no command {name!r:.80}{known}")
    try:
        return kind.model_validate(command)
    except ValidationError as error:
        # A few will do: explaining takes time, and whoever asks holds up a runtime.
        lines = (explain(one, kind, command) for one in error.errors()[:10])
        raise Refused("INVALID_ARGUMENT", f"{name}: " + "; ".join(lines)) from None


def _refusal(code: str, text: str) -> Answer:
    return {"error": text[:_MAX_TEXT], "code": code}
