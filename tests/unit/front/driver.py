"""A driver of a front without effects: it records the front's instructions, and the test decides how they end."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from rsrv.front.events import (
    Connect,
    Event,
    Hold,
    Instruction,
    Leave,
    ModelRejected,
    NotSubmitted,
    Proceed,
    Refuse,
    Registered,
    ReplaceProcess,
    Report,
    RequestAnswered,
    RequestArrived,
    Submit,
    TellDemand,
    TimePassed,
    Unreached,
    WentCold,
)
from rsrv.front.front import Front
from rsrv.front.rules import MAX_REQUEST_BYTES, MAX_STEPS
from rsrv.front.states import ATTEMPTING, ServingState
from rsrv.wire.frames import Status


@dataclass(eq=False)
class Request:
    """A client's request, and how it ended."""

    deadline_s: float = 0.0
    is_sub_call: bool = False
    nbytes: int = 8
    deaths: int = 0
    waiting_since: float = 0.0
    retry_until: float = 0.0
    status: Status | None = None
    text: str = ""


@dataclass
class Driver:
    """Feeds events to a front, and checks its invariants after each."""

    model: str = "m"
    devices: int = 1
    mask: int = 0
    now: float = 100.0
    #: Attempts under way, by device.
    attempts: dict[int, Connect] = field(default_factory=dict)
    #: Requests that are submitted to a runtime and have no answer yet.
    submitted: list[Request] = field(default_factory=list)
    reports: list[str] = field(default_factory=list)
    leaves: list[int] = field(default_factory=list)
    given_up: list[str] = field(default_factory=list)
    demand: dict[str, int] = field(default_factory=dict)
    runs: list[Instruction] = field(default_factory=list)
    #: True while no runtime accepts requests.
    takes_none: bool = False
    log: deque[str] = field(default_factory=lambda: deque(maxlen=60))

    def __post_init__(self) -> None:
        self.front = Front(self.model, self.devices, self.mask)

    def send(self, event: Event, after: float = 0.0) -> None:
        self.now += after
        self.log.append(f"{self.now:.3f} {event}")
        refused = []
        for instruction in self.front.handle(event, self.now):
            if isinstance(instruction, Submit) and self.takes_none:
                refused.append(instruction.request)
            else:
                self._carry_out(instruction)
        if refused:
            self.send(NotSubmitted(tuple(refused)))
        self.check()

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case Connect(device):
                assert device not in self.attempts, "two attempts at a time"
                self.attempts[device] = instruction
            case Submit(request):
                assert isinstance(request, Request)
                assert request.status is None, "it has ended"
                self.submitted.append(request)
            case Refuse(request, status, text):
                assert isinstance(request, Request)
                assert request.status is None, "it ends twice"
                assert request not in self.submitted, "a runtime has it"
                request.status, request.text = status, text
            case Report(text):
                self.reports.append(text)
            case Leave(device):
                self.leaves.append(device)
            case ReplaceProcess(text):
                self.given_up.append(text)
            case TellDemand(demand):
                self.demand = {**demand}
            case Proceed() | Hold():
                self.runs.append(instruction)

    # --- what tests do

    def state(self, device: int = 0) -> ServingState:
        return self.front.snapshot().devices[device].state

    def end_attempt(
        self, event: Registered | WentCold | ModelRejected | Unreached, after: float = 0.0
    ) -> None:
        """End the attempt of the event's device. The event is the result of the attempt."""
        del self.attempts[event.device]
        self.send(event, after)

    def register(self, device: int = 0, retry_s: float = 10.0) -> None:
        """End the attempt of a device: its runtime has the model ready."""
        self.end_attempt(Registered(device, self.devices, retry_s))

    def arrive(self, **facts: object) -> Request:
        request = Request(**facts)  # type: ignore[arg-type]
        self.send(RequestArrived(request))
        return request

    def tick(self, after: float = 0.0) -> None:
        """Let the time pass in steps, with a TimePassed event at each time that the front names."""
        until = self.now + after
        while (at := max(self.front.next_at, self.now + 1e-6)) < until:
            self.now = at
            self.send(TimePassed())
        self.now = until
        self.send(TimePassed())

    def answer(self, number: int = 0) -> Request:
        """Answer a request that is submitted to a runtime."""
        request = self.submitted.pop(number)
        assert request.status is None
        request.status = Status.OK
        if request is self.front.suspect:
            self.send(RequestAnswered(request))
        return request

    # --- invariants

    def check(self) -> None:
        """Check the invariants that hold after each event."""
        front, views = self.front, self.front.snapshot().devices
        states = {view.state for view in views.values()}
        waiting = front.waiting
        assert len(set(map(id, waiting))) == len(waiting), self.story("it waits twice")
        assert not any(isinstance(entry, Request) and entry.status is not None for entry in waiting), (
            self.story("it ended")
        )
        assert not {*map(id, waiting)} & {*map(id, self.submitted)}, self.story(
            "it waits, and a runtime has it"
        )
        assert sum(request.deaths > 0 for request in self.submitted) <= 1, self.story(
            "two suspects are under way"
        )
        assert sum(request.nbytes for request in waiting) <= MAX_REQUEST_BYTES, self.story("too many bytes")
        if waiting and ServingState.READY not in states:
            coming = {*ATTEMPTING, ServingState.BACKING_OFF}
            assert states & coming, self.story("no runtime will come")
        if ServingState.CLOSED in states:
            assert not waiting, self.story("an unloaded model has requests")
            return
        attempting = {number for number, view in views.items() if view.state in ATTEMPTING}
        assert attempting == {*self.attempts}, self.story("the attempts are others")

    def check_bounds(self, longest_s: float) -> None:
        """Check, after a tick, that no request waits longer than its limits allow."""
        serves = any(view.state is ServingState.READY for view in self.front.snapshot().devices.values())
        for request in self.front.waiting:
            if serves and (request.deaths or not self.takes_none):
                assert request.deaths or self.front.suspect is None, self.story("it has a runtime, and waits")
                continue
            assert self.now < request.retry_until, self.story("it waits too long")
            assert self.now - request.waiting_since <= MAX_STEPS * longest_s, self.story("it waits forever")

    def story(self, text: str) -> str:
        return "\n".join([text, *self.log])
