"""The decisions of a front about one model, on all devices of the server, from its load to its unload. Pure.

A front decides about each request that no runtime answers at once. `handle` takes one event, and does these steps:

1. apply: change the state of a device, or add or remove a waiting request;
2. start: while requests wait and no runtime serves the model, start it on one device;
3. expire: refuse the requests that cannot wait longer;
4. submit: resubmit the requests that have a runtime now. A request that was executing when a runtime died is a suspect:
   suspects are resubmitted one after another. So if a suspect ends the next runtime, no other suspect is blamed for that.

Inference has no side effects, and Triton keeps a request's inputs until it is answered. So a death costs time, not answers.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from rsrv.front import rules
from rsrv.front.device import FrontDevice
from rsrv.front.events import (
    Connect,
    DeviceEvent,
    DevicesKnown,
    Dismissed,
    Event,
    FrontRequest,
    Hold,
    InputsExecuted,
    Instruction,
    Leave,
    LoadAsked,
    ModelRejected,
    NotSubmitted,
    PlacementChanged,
    Proceed,
    Refuse,
    Registered,
    ReplaceProcess,
    Report,
    RequestAnswered,
    RequestArrived,
    RequestCancelled,
    RequestEvent,
    RunAsks,
    RuntimeLost,
    StartAsked,
    StartTimeoutKnown,
    StepAnnounced,
    Submit,
    TellDemand,
    TimePassed,
    Unloaded,
    Unreached,
    WentCold,
)
from rsrv.front.killers import Killers, KillerTable
from rsrv.front.outage import Outage, Refusal, refuse_arrival, refuse_waiting
from rsrv.front.states import ATTEMPTING, STARTABLE, ServingEvent, ServingState
from rsrv.placement.device_choice import PINNED, allowed, by_preference
from rsrv.wire.frames import StartProgress, Status

#: Replace this process after this many attempts that failed because the process and the runtime do not understand each other.
_MOST_MISUNDERSTOOD = 5
#: A run of a meta model waits for a runtime as long as it asks again within this many seconds. Runs ask every TICK_S.
_RUN_WAITS_S = 1.0

_GIVEN_UP = "the model's process cannot reach its runtime, and is being restarted: %s"
_START_FAILED = "the model could not be started; a request starts it again after %.0f s: %s"
_ELSEWHERE = "device %d does not serve the model (%s), so the model starts on device %d"
_UNLOADED: Refusal = Status.RUNTIME_DOWN, rules.UNLOADED


@dataclass(frozen=True, slots=True)
class DeviceView:
    """A model on one device, for readers on other threads."""

    state: ServingState
    barred: bool
    #: Number of failed attempts in a row.
    failures: int
    #: True if the latest attempt found no runtime.
    is_unreachable: bool


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A front's state for other threads. A snapshot never changes; each event makes a new one."""

    devices: Mapping[int, DeviceView]
    #: Number of waiting requests.
    waiting: int
    #: Longest wait of a request for a step of a start, in seconds. 0: not known.
    start_timeout_s: float
    killers: KillerTable


class Front:
    """One model of Triton: its devices, and its requests without a runtime.

    Only one thread may use a front.
    """

    def __init__(self, model: str, devices: int, mask: int = 0) -> None:
        """`devices` is the number of the server's devices, as far as it is known. `mask` is as in PlacementChanged."""
        self._model = model
        #: Devices by number, in the model's order of preference.
        self._devices: dict[int, FrontDevice] = {}
        self._mask = mask
        #: Longest total time that a request waits for runtimes, however many of them die, in seconds.
        self._retry_s = 0.0
        #: Longest time that a request waits for the next step of a start, in seconds; 0 until a runtime has announced it.
        self._start_timeout_s = 0.0
        #: Waiting requests in their order.
        self._waiting: list[FrontRequest] = []
        #: Runs of a meta model that wait for a runtime, with the time when each asked last.
        self._runs: dict[FrontRequest, float] = {}
        #: Bytes of the inputs of waiting requests.
        self._nbytes = 0
        #: The suspect that was submitted and has no answer yet.
        self._suspect: FrontRequest | None = None
        #: True if no runtime took the requests that were submitted last. They are submitted again after `TimePassed`.
        self._is_stuck = False
        self._killers = Killers()
        self._closed = False
        self._out: list[Instruction] = []
        self._grow(devices)

    # --- queries of the owner -------------------------------------------------------------------------------

    @property
    def waiting(self) -> Sequence[FrontRequest]:
        """The waiting requests in their order."""
        return self._waiting

    @property
    def suspect(self) -> FrontRequest | None:
        """The suspect that was submitted and has no answer yet. The front's owner must report the answer."""
        return self._suspect

    @property
    def is_closed(self) -> bool:
        return self._closed

    @property
    def next_at(self) -> float:
        """Time of the next change by itself: the end of a device's pause, or of the wait of a run that asks no more.

        The owner must report `TimePassed` then, and earlier if requests wait.
        """
        pauses = [device.due for device in self._devices.values()]
        waits = [asked_at + _RUN_WAITS_S for asked_at in self._runs.values()]
        return min(pauses + waits, default=inf)

    def demand(self) -> dict[str, int]:
        """Return a summary of the waiting requests and runs, as the frame REGISTER has it. It is empty if none waits."""
        requests = [*self._waiting, *self._runs]
        if not requests:
            return {}
        earliest = min(filter(None, (request.deadline_s for request in requests)), default=0.0)
        return {"asked": True, **({"deadline_ns": round(1e9 * earliest)} if earliest else {})}

    def snapshot(self) -> Snapshot:
        views = {
            device.number: DeviceView(device.state, device.barred, device.failures, device.is_unreachable)
            for device in self._devices.values()
        }
        return Snapshot(views, len(self._waiting), self._start_timeout_s, self._killers.table)

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Return the instructions that follow from an event. Raises FrontError if a device's state does not allow the event."""
        if self._closed:
            return _refuse_closed(event)
        self._out = []
        self._runs = {run: asked_at for run, asked_at in self._runs.items() if now - asked_at < _RUN_WAITS_S}
        self._apply(event, now)
        if self.is_closed:
            return self._out
        if self._serves:
            self._runs.clear()  # A run that still waits asks again.
        self._start(event, now)
        if not isinstance(event, RequestEvent):
            self._expire(now)
        self._submit()
        if isinstance(event, TimePassed | StepAnnounced | RunAsks) and any(self._in(ATTEMPTING)):
            self._out.append(TellDemand(self.demand()))
        return self._out

    # --- 1. apply ---------------------------------------------------------------------------------------------

    def _apply(self, event: Event, now: float) -> None:
        match event:
            case RequestArrived(request):
                self._arrive(request, now)
            case RunAsks(request):
                self._answer_run(request, now)
            case NotSubmitted(requests):
                self._take_back(requests)
            case RequestCancelled(request):
                self._end(request, (Status.CANCELLED, rules.CLIENT_CANCELLED))
            case RequestAnswered(request):
                if request is self._suspect:
                    self._suspect = None
                self._end(request, (Status.DEADLINE, rules.LATE))
            case InputsExecuted(digest, deaths):
                self._killers.record(digest, deaths, now)
            case StartTimeoutKnown(start_timeout_s):
                self._start_timeout_s = start_timeout_s
            case PlacementChanged(mask):
                self._mask = mask
                self._spread()
            case TimePassed():
                self._is_stuck = False
                self._end_pauses(now)
            case DevicesKnown(count):
                self._grow(count)
            case LoadAsked(number):
                # The load tries the devices in turn. An earlier runtime may have found devices that this front does not know.
                self._grow(number + 1)
                if self._devices[number].state is ServingState.UNTRIED:
                    self._connect(self._devices[number], asked=False)
            case Unloaded():
                self._unload()
            case _:
                self._apply_to_device(event, self._devices[event.device], now)

    def _apply_to_device(self, event: DeviceEvent, device: FrontDevice, now: float) -> None:
        match event:
            case Registered():
                self._register(device, event)
            case WentCold():
                self._cool(device)
            case Dismissed():
                if device.state is ServingState.READY and not self._waiting:
                    self._out.append(Leave(device.number))
            case StepAnnounced(_, step):
                self._advance(device, step, now)
            case ModelRejected():
                self._reject(device, event, now)
            case Unreached():
                self._fail(device, event, now)
            case RuntimeLost(_, sleeps):
                self._lose(device, now, sleeps=sleeps)
            case StartAsked():
                if device.state in STARTABLE:
                    self._connect(device, asked=True)

    # --- devices

    def _grow(self, count: int) -> None:
        """Add devices until there are at least `count`."""
        count = max(count, len(self._devices), 1)
        if count > len(self._devices):
            numbers = by_preference(self._model, count)
            self._devices = {number: self._devices.get(number) or FrontDevice(number) for number in numbers}

    def _connect(
        self, device: FrontDevice, *, asked: bool, event: ServingEvent = ServingEvent.CONNECT
    ) -> None:
        device.move(event)
        device.asked = asked
        asked = asked or (device.started and bool(self._waiting or self._runs))
        self._out.append(Connect(device.number, device.started, asked))

    def _register(self, device: FrontDevice, event: Registered) -> None:
        is_again = device.started
        device.move(ServingEvent.REGISTERED)
        device.started, device.asked, device.barred, device.is_unreachable = True, False, False, False
        device.failures, device.misunderstood, device.pause_s, device.reason = 0, 0, 0.0, ""
        self._retry_s, self._is_stuck = event.retry_s, False
        self._grow(event.devices)
        if is_again:
            self._out.append(Report(rules.RECONNECTED, is_error=False))
        # Start the model on the other devices only now, when they find its compiled modules in the cache.
        for untried in self._in({ServingState.UNTRIED}):
            self._connect(untried, asked=False)

    def _cool(self, device: FrontDevice) -> None:
        device.move(ServingEvent.COOL)
        device.started, device.asked, device.is_unreachable = False, False, False
        device.failures, device.pause_s = 0, 0.0

    def _advance(self, device: FrontDevice, step: StartProgress, now: float) -> None:
        device.move(ServingEvent.STEP)
        device.step, device.stepped_at = step, now
        device.is_unreachable = False
        if step.least_s:
            device.ready_at = now + step.least_s
        self._start_timeout_s = step.limit_s

    def _lose(self, device: FrontDevice, now: float, *, sleeps: bool) -> None:
        device.lost_at = now
        if sleeps:
            self._cool(device)
        else:
            self._connect(device, asked=False, event=ServingEvent.LOSE)

    def _fail(self, device: FrontDevice, event: Unreached, now: float) -> None:
        device.move(ServingEvent.FAIL)
        device.is_unreachable, device.reason = not event.ended, event.reason
        device.failures += 1
        device.misunderstood += event.misunderstood
        if device.started or device.asked or event.ended:
            device.pause(now, rules.FIRST_BACKOFF_S, rules.MAX_BACKOFF_S)
            self._out.append(Report(rules.NOT_REACHED % event.reason))
        else:
            device.pause(now, rules.FIRST_START_PAUSE_S, rules.MAX_START_PAUSE_S)
            self._out.append(Report(rules.NOT_SERVED % (device.number, event.reason)))
        # Further attempts of this process would also fail, so replace the process. If the new process also cannot reach the
        # runtime, the model's load fails, and the control process reports this.
        if event.final or device.misunderstood == _MOST_MISUNDERSTOOD:
            self._out.append(ReplaceProcess(_GIVEN_UP % event.reason))

    def _reject(self, device: FrontDevice, event: ModelRejected, now: float) -> None:
        device.move(ServingEvent.REJECT)
        device.barred, device.is_unreachable = event.barred, False
        device.failures += 1
        if device.started:
            device.reason = event.client or rules.NOT_AGAIN
            device.pause(now, rules.FIRST_BACKOFF_S, rules.MAX_REJECTED_BACKOFF_S)
            self._out.append(Report(rules.REJECTS % event.reason))
            return
        device.reason = rules.NOT_STARTED % event.reason
        device.pause(now, rules.FIRST_START_PAUSE_S, rules.MAX_START_PAUSE_S)
        if device.asked:
            self._out.append(Report(_START_FAILED % (device.pause_s, event.reason)))
        else:
            self._out.append(Report(rules.NOT_SERVED % (device.number, event.reason)))

    def _end_pauses(self, now: float) -> None:
        for device in self._devices.values():
            if now < device.due:
                continue
            # After a failed start, the model becomes cold again here, and the next request starts it. There is one exception:
            # if the model serves elsewhere and the placement table names this device, the front tries again by itself.
            start_failed = device.state is ServingState.REJECTED and device.asked and not device.started
            if start_failed and not (self._serves and self._is_named(device)):
                device.move(ServingEvent.FORGIVE)
                device.asked = False
            else:
                self._connect(device, asked=device.asked)

    def _spread(self) -> None:
        """If the model serves, start it on all devices of a new placement table where it is cold."""
        if self._serves:
            for device in [device for device in self._in(STARTABLE) if self._is_named(device)]:
                self._connect(device, asked=True)

    def _is_named(self, device: FrontDevice) -> bool:
        """Return True if the placement table names the device."""
        return bool((self._mask & ~PINNED) >> device.number & 1)

    def _in(self, states: frozenset[ServingState] | set[ServingState]) -> Iterator[FrontDevice]:
        return (device for device in self._devices.values() if device.state in states)

    @property
    def _serves(self) -> bool:
        return any(self._in({ServingState.READY}))

    # --- requests

    def _arrive(self, request: FrontRequest, now: float) -> None:
        if request is self._suspect:
            self._suspect = None  # The runtime died before it executed the suspect.
        count, nbytes = len(self._waiting), self._nbytes
        refusal = refuse_arrival(request, self._outage(now), now, count=count, nbytes=nbytes)
        if refusal is None:
            self._waiting.append(request)
            self._nbytes += request.nbytes
        else:
            self._out.append(Refuse(request, *refusal))

    def _answer_run(self, request: FrontRequest, now: float) -> None:
        refusal = refuse_waiting(request, self._outage(now), now)
        if refusal is not None:
            self._runs.pop(request, None)
            self._out.append(Refuse(request, *refusal))
            return
        self._runs[request] = now
        is_turn = not request.deaths or self._suspect in (None, request)
        if request.deaths and is_turn:
            self._suspect = request
        self._out.append(Proceed(request) if is_turn else Hold(request))

    def _take_back(self, requests: Sequence[FrontRequest]) -> None:
        """Put requests that could not be submitted back at the head of the queue."""
        if self._suspect in requests:
            self._suspect = None
        self._waiting[:0] = requests
        self._nbytes += sum(request.nbytes for request in requests)
        self._is_stuck = True

    def _end(self, request: FrontRequest, refusal: Refusal) -> None:
        """Refuse a request if it waits."""
        if request in self._waiting:
            self._waiting.remove(request)
            self._nbytes -= request.nbytes
            self._out.append(Refuse(request, *refusal))

    def _unload(self) -> None:
        self._closed = True
        for device in self._devices.values():
            device.move(ServingEvent.CLOSE)
        self._out += [Refuse(request, *_UNLOADED) for request in self._waiting]
        self._waiting, self._nbytes, self._suspect, self._runs = [], 0, None, {}

    # --- 2. start ---------------------------------------------------------------------------------------------

    def _start(self, event: Event, now: float) -> None:
        if (self._waiting or self._runs) and not self._serves:
            device = self._find_start(now)
            if device is not None:
                for neighbour in self._devices.values():
                    if neighbour is not device and self._is_given_up(neighbour, now) and neighbour.reason:
                        self._out.append(
                            Report(_ELSEWHERE % (neighbour.number, neighbour.reason, device.number))
                        )
                        break
                self._out.append(TellDemand(self.demand()))
                self._connect(device, asked=True)

    def _find_start(self, now: float) -> FrontDevice | None:
        """Return the device where a start should begin, or None if a start is under way or no device can start the model.

        The model starts on the first device that the placement table names, or that the model prefers, unless that device
        is given up. A model that has ended runtimes starts only on the devices of those runtimes.
        """
        barred = [device for device in self._devices.values() if device.barred]
        numbers = [device.number for device in barred or self._devices.values()]
        named = [*allowed(numbers, self._mask & ~PINNED)]
        for number in (*named, *(number for number in numbers if number not in named)):
            device = self._devices[number]
            if not self._is_given_up(device, now):
                return device if device.state in STARTABLE else None
        return None

    def _is_given_up(self, device: FrontDevice, now: float) -> bool:
        """Return True if the model should start elsewhere: this device rejects it, or has had no runtime for some time.

        After a runtime's death, the front gives up the device only after some seconds. If no runtime can be started, the front
        gives it up at once.
        """
        if device.state is ServingState.REJECTED:
            return True
        if device.state not in (ServingState.CONNECTING, ServingState.BACKING_OFF):
            return False
        return now - device.lost_at >= rules.ELSEWHERE_S if device.started else device.is_unreachable

    # --- 3. expire --------------------------------------------------------------------------------------------

    def _expire(self, now: float) -> None:
        if not self._waiting:
            return
        outage, waiting = self._outage(now), []
        for request in self._waiting:
            refusal = refuse_waiting(request, outage, now)
            if refusal is None:
                waiting.append(request)
            else:
                self._nbytes -= request.nbytes
                self._out.append(Refuse(request, *refusal))
        self._waiting = waiting

    def _outage(self, now: float) -> Outage:
        devices, steps = self._devices.values(), [*self._in({ServingState.STARTING})]
        is_down, was_ready = not self._serves, any(device.started for device in devices)
        return Outage(
            is_down=is_down,
            was_ready=was_ready,
            is_starting=is_down and (bool(steps) or not was_ready),
            retry_s=self._retry_s,
            # If no runtime's limit is known, use the general limit. A runtime may end before its announcement of the limit is
            # read.
            limit_s=self._start_timeout_s or self._retry_s,
            stepped_at=max(device.stepped_at for device in devices),
            ready_at=min((device.ready_at for device in steps if device.ready_at), default=0.0),
            step=next((device.step.text for device in steps if device.step is not None), ""),
            why=self._why(now) if is_down else "",
        )

    def _why(self, now: float) -> str:
        """Return the reason for clients if no device will serve the model soon. Otherwise, return an empty text."""
        for device in self._devices.values():
            is_expected = device.started or device.asked
            if device.state in ATTEMPTING or (device.state is ServingState.BACKING_OFF and is_expected):
                return ""
        if self._find_start(now) is not None:
            return ""
        return next((device.reason for device in self._in({ServingState.REJECTED})), "")

    # --- 4. submit --------------------------------------------------------------------------------------------

    def _submit(self) -> None:
        if not self._waiting or self._is_stuck or not self._serves:
            return
        waiting = []
        for request in self._waiting:
            if request.deaths and self._suspect is not None:
                waiting.append(request)
                continue
            if request.deaths:
                self._suspect = request
            self._nbytes -= request.nbytes
            self._out.append(Submit(request))
        self._waiting = waiting


def _refuse_closed(event: Event) -> list[Instruction]:
    """Return the instructions of an unloaded model."""
    match event:
        case RequestArrived(request) | RunAsks(request):
            return [Refuse(request, *_UNLOADED)]
        case NotSubmitted(requests):
            return [Refuse(request, *_UNLOADED) for request in requests]
    return []
