"""A model on all devices of its server. It has a replica on each device, and chooses the replica that answers a batch."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from math import inf
from operator import methodcaller, or_
from typing import Any

from rsrv.front.events import (
    Connect,
    DevicesKnown,
    LoadAsked,
    ModelRejected,
    PlacementChanged,
    Registered,
    StartAsked,
    StartTimeoutKnown,
    StepAnnounced,
    Unreached,
    WentCold,
)
from rsrv.front.front import DeviceView, Front
from rsrv.front.rules import FIRST_ATTEMPTS, JOIN_S
from rsrv.front.states import ATTEMPTING, STARTABLE, ServingState
from rsrv.hooks.loader import HookError
from rsrv.placement.batch_shares import divide
from rsrv.placement.device_choice import PINNED, allowed, by_preference, soonest
from rsrv.stub.connection import Cold, Rejected
from rsrv.stub.hook_guard import FREE_DESCRIPTORS
from rsrv.stub.metrics import Meters, Reporting
from rsrv.stub.replica import ModelReplica, StubProcess
from rsrv.stub.request import RUN, RUN_DEVICE, ClientRequest, EntryPoint, Outcomes, parse_parameters
from rsrv.stub.sequences import read_step
from rsrv.stub.session import UNREACHABLE, Attachment, Session
from rsrv.stub.tensors import BrokenPairing
from rsrv.wire.frames import ProtocolError, StartProgress
from rsrv.wire.memory import SharedMemoryError
from rsrv.wire.placement_table import PlacementReader
from rsrv.wire.socket import Closed, lacks_descriptors, may_open

log = logging.getLogger(__name__)

_ANSWERS_IN_S = methodcaller("answers_in_s")


@dataclass(frozen=True, slots=True)
class _Candidates:
    """The replicas that may answer by the placement table. When the replicas or the table change, a new object is made."""

    #: Replicas by device, in the model's order of preference.
    replicas: Mapping[int, ModelReplica[Any]]
    #: Bit mask of the model's devices in the placement table, with the bit PINNED.
    mask: int
    #: For a meta model: bit mask of the devices of each callee, by name.
    callees: Mapping[str, int]
    #: Replicas on devices of the table.
    allowed: Sequence[ModelReplica[Any]]
    #: Replicas on other devices.
    others: Sequence[ModelReplica[Any]]
    #: True if no device outside the table may answer.
    pinned: bool
    #: Equal to `callees` if no device has all callees, so that a run uses several devices. Otherwise empty.
    apart: Mapping[str, int]

    @classmethod
    def make(
        cls, replicas: Mapping[int, ModelReplica[Any]], mask: int, callees: Mapping[str, int]
    ) -> "_Candidates":
        devices, masks = list(replicas), callees.values()
        together = [
            device
            for device in devices
            if all(not mask_of_callee or mask_of_callee >> device & 1 for mask_of_callee in masks)
        ]
        chosen = allowed(together or devices, mask)
        remaining = [replicas[device] for device in devices if device not in chosen]
        # A meta model stays on its devices: another device would need the weights of all models that it calls.
        pinned = bool(mask & PINNED or callees)
        apart = {} if together else callees
        return cls(replicas, mask, callees, [replicas[device] for device in chosen], remaining, pinned, apart)


class Replicas:
    """Answers Triton's requests for one model on all devices of the server, and carries out its front's instructions.

    The placement table names the devices on which the model should run. A batch is sent to the one of these devices that is
    expected to answer first. Another device gets the batch if it would answer far sooner and the model is not pinned. Without a
    table, the model's name determines its home device, so that the models of a quiet server are spread over the devices. Another
    device gets a batch if it would answer sooner.

    Until its first request, a cold model has no replica, no hooks and no connection here.
    """

    def __init__(
        self,
        open_session: Callable[[int], Session],
        make: Callable[[Session, Attachment], ModelReplica[Any]],
        name: str,
        process: StubProcess,
        placement: PlacementReader | None = None,
        devices: Callable[[], int] = lambda: 1,
    ) -> None:
        """Make a model that no device serves yet. Call `load` afterwards.

        Args:
            open_session: Makes the session of a device, by its number.
            make: Makes the replica of a device after its first registration. May raise HookError, and any error of model.py.
            name: Name of the model.
            process: Parts that the replicas share.
            placement: The placement table.
            devices: Returns the number of the server's devices without asking a runtime.
        """
        self._open_session = open_session
        self._make = make
        self._name = name
        self._process = process
        #: Guards the homes of sequences: execute() and the front's thread choose them.
        self._homes_lock = threading.Lock()
        self._responses = process.responses
        self._placement = placement
        self._devices = devices
        self._front = process.front
        self._sessions: dict[int, Session] = {}
        #: Latest error of each device's attempts.
        self._errors: dict[int, BaseException] = {}
        #: Replicas by device, in the model's order of preference. The front's thread replaces the mapping. No mapping is changed
        #: after that.
        self._replicas: Mapping[int, ModelReplica[Any]] = {}
        self._first: ModelReplica[Any] | None = None
        self._reporting: list[Reporting] = []
        self._outcomes = Outcomes(Meters(), process.responses)
        self._is_loading = True
        #: Answers Triton's requests, as `EntryPoint.execute`. Until a device serves the model, the requests wait.
        self.execute: Callable[[Sequence[Any]], list[Any] | None] = EntryPoint(
            self._wait, self._outcomes, self._reply, process.end
        ).execute
        process.model = self
        mask = 0 if placement is None else placement.mask(time.monotonic())
        self._choice = _Candidates.make({}, mask, {})
        self._front.begin(Front(name, devices(), mask), self)

    # --- the load -----------------------------------------------------------------------------------------

    def load(self) -> None:
        """Wait until a device serves the model, or until the model is known to be cold.

        The first device compiles the model alone. The other devices start after it and find the compiled modules in the
        cache. If a device fails to serve the model, the other devices serve it, and the front retries that device.
        Raises one of UNREACHABLE, HookError, or an error of model.py. After an error, the model is closed.
        """
        try:
            if self._load_first():
                deadline = time.monotonic() + JOIN_S
                while self._joining and (left := deadline - time.monotonic()) > 0:
                    self._front.changed.wait(left)
        except BaseException:
            self.close()
            raise
        self._is_loading = False

    def _load_first(self) -> bool:
        """Try the devices in turn until one serves the model. Returns False if the model is cold."""
        failures: dict[int, BaseException] = {}
        device = 0
        while device == 0 or device < self._devices():
            self._front.post(LoadAsked(device))
            view = self._await_attempt(device)
            if view.state is ServingState.READY:
                return True
            if view.state is ServingState.COLD:
                # Report devices that the first runtime has found, because a request may start the model on any device.
                self._front.post(DevicesKnown(self._devices()))
                return False
            failures[device] = self._errors[device]
            if view.barred:  # The model has ended a runtime and would also end the others.
                break
            device += 1
        # While the last devices were tried, the front has retried the first devices. One of these may serve the model now.
        if any(view.state is ServingState.READY for view in self._front.snapshot.devices.values()):
            return True
        if len({str(failure) for failure in failures.values()}) == 1:
            raise next(iter(failures.values()))
        raise Rejected("; ".join(f"device {number}: {failure}" for number, failure in failures.items()))

    def _await_attempt(self, device: int) -> DeviceView:
        """Wait for the end of a device's first attempt, and return its view. If a runtime ends, wait for further attempts."""
        ended = {ServingState.READY, ServingState.COLD, ServingState.REJECTED}
        while True:
            self._front.changed.clear()
            view = self._front.snapshot.devices.get(device)
            if view is not None and (
                view.state in ended or view.is_unreachable or view.failures >= FIRST_ATTEMPTS
            ):
                return view
            self._front.changed.wait()

    @property
    def _joining(self) -> bool:
        """True while a further device makes its first attempt."""
        self._front.changed.clear()
        views = self._front.snapshot.devices.values()
        return any(view.state in ATTEMPTING and not view.failures for view in views)

    # --- the front's instructions, on its thread ------------------------------------------------------------

    def connect(self, attempt: Connect) -> None:
        """Begin an attempt on its own thread, because the runtime may have to start and to compile the model."""
        device = attempt.device
        session = self._sessions.get(device)
        if session is None:
            # Add the session before the attempt: if a hook forks during the attempt, the child process must close its sockets.
            session = self._sessions[device] = self._open_session(device)
            self._process.sessions.append(session)
        try:
            threading.Thread(
                target=self._attempt, args=(session, attempt), name="connect", daemon=True
            ).start()
        except Exception as error:  # noqa: BLE001 - without this attempt there would be no further one
            self._fail(device, Closed(f"no thread could be started to connect: {error!r}"))

    def submit(self, request: ClientRequest) -> bool:
        """Submit a waiting request in the same way as a new one."""
        chosen = self.live() if self._process.homes is None else self._home(request.triton)
        return chosen is not None and chosen.answers_in_s() < inf and chosen.take_over(request)

    def leave(self, device: int) -> bool:
        """Leave the runtime of a device where the model is idle. Returns False if requests are in flight."""
        replica = self._replicas[device]
        has_left = replica.leave()
        if has_left:
            replica.meters.some.set()
            log.info("the model is cold: the runtime holds no part of it until the next request")
        return has_left

    def tell(self, demand: Mapping[str, int]) -> None:
        """Report the waiting requests to the runtimes that start the model."""
        for session in self._sessions.values():
            session.tell(demand)

    def replace_process(self, text: str) -> None:
        """End this process, because it reaches no runtime. During the load, do nothing: the load fails with the reason."""
        if not self._is_loading:
            self._process.end(text)

    def refresh(self) -> None:
        """Read the placement table, and report a change to the front."""
        self._choose_among()

    # --- attempts, each on a thread -------------------------------------------------------------------------

    def _attempt(self, session: Session, attempt: Connect) -> None:
        device, post = attempt.device, self._front.post
        try:
            attachment = session.attach(
                partial(self._announce, device), started=attempt.started, asked=attempt.asked
            )
        except Cold as cold:
            post(StartTimeoutKnown(cold.start_timeout_s))
            post(WentCold(device))
        except BaseException as error:  # noqa: BLE001 - without a further attempt the model would never have a runtime
            self._fail(device, error)
        else:
            try:
                replica = None if device in self._replicas else self._make(session, attachment)
            except BaseException as error:  # noqa: BLE001 - the user's model.py may raise any error, also SystemExit
                attachment.close()
                self._fail(device, error, is_made=True)
            else:
                post(partial(self._register, session, attachment, replica))

    def _announce(self, device: int, step: StartProgress) -> None:
        self._front.post(StepAnnounced(device, step))

    def _fail(self, device: int, error: BaseException, *, is_made: bool = False) -> None:
        """Report a failed attempt to the front. `is_made` is True if the runtime had registered the model."""
        self._errors[device] = error
        event: ModelRejected | Unreached
        match error:
            case Rejected():
                event = ModelRejected(device, str(error), error.client, error.dangerous)
            case Closed() | ConnectionError():
                event = Unreached(device, str(error), ended=True)
            case _ if isinstance(error, UNREACHABLE):
                misunderstood = isinstance(error, ProtocolError | SharedMemoryError)
                final = lacks_descriptors(error) and not may_open(FREE_DESCRIPTORS)
                event = Unreached(device, str(error), misunderstood=misunderstood, final=final)
            case _ if is_made:
                if not isinstance(error, HookError | BrokenPairing):
                    log.error("the model did not start", exc_info=error)
                text = str(error) if isinstance(error, HookError) else f"{type(error).__name__}: {error}"
                # If the model's code has worked on no device yet, the code is to blame, and not this device.
                event = ModelRejected(device, text, barred=not self._replicas)
            case _:
                log.error("connecting to the runtime failed", exc_info=error)
                event = Unreached(device, str(error))
        self._front.post(event)

    def _register(self, session: Session, attachment: Attachment, made: ModelReplica[Any] | None) -> None:
        """Publish a new registration, so that requests use it. Called on the front's thread."""
        device = session.device
        if self._front.is_closed:
            attachment.close()
            if made is not None:
                made.close()
            return
        try:
            if made is not None:
                self._add(device, attachment, made)
            else:
                self._replicas[device].use(attachment)
            # Watch first: after `publish`, requests are submitted, and a thread must read their answers.
            self._replicas[device].watch(attachment)
            session.publish(attachment)
        except Exception as error:
            log.exception("the model's registration cannot be used")
            attachment.close()
            self._fail(device, Closed(str(error)))
            return
        self._replicas[device].meters.some.set()
        retry_s = attachment.settings["stub"]["retry_s"]
        self._front.handle(Registered(device, attachment.direct.devices, retry_s))

    def _add(self, device: int, attachment: Attachment, replica: ModelReplica[Any]) -> None:
        """Add a replica. For the first replica, choose how requests are answered, and set the limits of hooks."""
        count = attachment.direct.devices
        all_replicas = {**self._replicas, device: replica}
        self._replicas = {
            number: all_replicas[number]
            for number in by_preference(self._name, max(count, *all_replicas, 1))
            if number in all_replicas
        }
        self._choose_among()
        self._report(replica)
        if self._first is not None:
            return
        self._first, self._process.devices = replica, count
        replica.guard_hooks()
        if self._process.homes is not None:
            self.execute = self._follow_sequences
        elif count > 1:
            through_triton = attachment.settings["meta"]["transport"] == "bls"
            self.execute = self._follow_runs if through_triton else self._spread
        else:
            self.execute = replica.execute

    def _report(self, replica: ModelReplica[Any]) -> None:
        """Start to report a replica's measurements to its runtime."""
        self._reporting.append(Reporting(replica.session, replica.meters))

    # --- requests -----------------------------------------------------------------------------------------

    def _wait(self, requests: list[ClientRequest]) -> None:
        """Let requests wait until the model has a replica."""
        self._front.add_batch(requests, self._reply, self._outcomes)

    def _reply(self, request: ClientRequest) -> None:
        request.open_reply(self._responses)

    def _choose_among(self) -> _Candidates:
        """Return the replicas that may answer by the current placement table. If the table has changed, inform the front."""
        choice, placement = self._choice, self._placement
        mask, callees = choice.mask, choice.callees
        if placement is not None:
            mask, callees = placement.mask(time.monotonic()), placement.callees
        if mask != choice.mask or callees is not choice.callees or self._replicas is not choice.replicas:
            if mask != choice.mask:
                self._front.post(PlacementChanged(mask))
            choice = self._choice = _Candidates.make(self._replicas, mask, callees)
        return choice

    def _choose(self) -> ModelReplica[Any]:
        """Return the replica that gets a batch. There is at least one replica."""
        return self._choose_by(self._choose_among())

    def _choose_by(self, choice: _Candidates) -> ModelReplica[Any]:
        if choice.apart:
            return self._begin_stages(choice)
        return soonest(choice.allowed, choice.others, _ANSWERS_IN_S, pinned=choice.pinned)

    def execute_later(self, requests: Sequence[Any]) -> None:
        """Answer Triton's requests after execute() returned. This does not serve models with state."""
        if self._replicas:
            self._hand_out([(self._choose(), list(requests))])
        else:
            self.execute(requests)

    def compared(self, outcome: str) -> None:
        """Count an answer to a copy, as `Meters.compared`. Do nothing before the model has started."""
        if self._first is not None:
            self._first.meters.compared(outcome)

    def _spread(self, requests: Sequence[Any]) -> list[Any] | None:
        choice = self._choose_among()
        chosen = self._choose_by(choice)
        if len(requests) > 1 and len(choice.allowed) > 1 and not choice.apart:
            shares = _cut(requests, chosen, [replica for replica in choice.allowed if replica is not chosen])
            if len(shares) > 1:
                return self._answer(shares)
        return chosen.execute(requests)

    def _answer(self, shares: Sequence[tuple[ModelReplica[Any], list[Any]]]) -> list[Any] | None:
        """Answer a batch. `shares` has pairs of a replica and its part of the batch.

        If there are several parts, all of them are answered later, because execute() must return all answers or none.
        """
        if len(shares) == 1:
            return shares[0][0].execute(shares[0][1])
        self._hand_out(shares)
        return None

    def _begin_stages(self, choice: _Candidates) -> ModelReplica[Any]:
        """Return where a run begins if its callees are on several devices: the live replica on the lowest device of a callee."""
        live = {
            number: replica for number, replica in choice.replicas.items() if replica.answers_in_s() < inf
        }
        union = reduce(or_, choice.apart.values())
        return live[min(allowed(list(live), union))] if live else choice.allowed[0]

    def stages(self, device: int) -> dict[str, ModelReplica[Any]]:
        """Return the replicas for the calls of a run that begins on `device`, as `Placed.stages`.

        For each callee, this is the replica that would begin the call first. Devices before `device` are left out, because runs
        enter devices in ascending order.
        """
        stages: dict[str, ModelReplica[Any]] = {}
        for name, mask in self._choice.apart.items():
            begins = {
                number: attachment.begins_in_s(name)
                for number, replica in self._replicas.items()
                if number >= device and (attachment := replica.session.attachment) is not None
            }
            if not begins:
                return {}
            stages[name] = self._replicas[min(allowed(list(begins), mask), key=begins.__getitem__)]
        return {} if all(replica.session.device == device for replica in stages.values()) else stages

    def _follow_runs(self, requests: Sequence[Any]) -> list[Any] | None:
        """Answer each sub-call on the device of its run, because only that runtime knows the run. Spread other requests."""
        parts: dict[int | None, list[Any]] = {}
        for request in requests:
            parts.setdefault(_device_of_run(request), []).append(request)
        if parts.keys() == {None}:
            return self._spread(requests)
        views, replicas, remaining = self._front.snapshot.devices, self._replicas, self._choice.allowed
        for device in parts:
            if device is not None and device in views and views[device].state in STARTABLE:
                self._front.post(StartAsked(device))
        # If the run's device has no replica, use any other replica: it refuses the call, and the meta model repeats it.
        return self._answer(
            [
                (replicas.get(-1 if device is None else device, remaining[0]), part)
                for device, part in parts.items()
            ]
        )

    def _follow_sequences(self, requests: Sequence[Any]) -> list[Any] | None:
        """Answer each request on the device that has its sequence's state."""
        parts: dict[int, list[Any]] = {}
        for request in requests:
            parts.setdefault(self._home(request).session.device, []).append(request)
        return self._answer([(self._replicas[device], part) for device, part in parts.items()])

    def _home(self, request: Any) -> ModelReplica[Any]:
        """Return the replica that has the state of a request's sequence.

        A new sequence gets the device with the fewest sequences, because all devices have equally many slots. If the
        sequence's runtime has ended, return any replica, which refuses the request.
        """
        homes, choice = self._process.homes, self._choose_among()
        assert homes is not None
        try:
            step = read_step(request)
        except Exception:  # noqa: BLE001 - the replica refuses it
            return choice.allowed[0]
        chosen = self._choose_by(choice)
        with self._homes_lock:
            if step.start:
                live = [replica for replica in choice.allowed if replica.answers_in_s() < inf]
                chosen = min(live, key=lambda replica: homes.count(replica.session.device), default=chosen)
            else:
                home = self._replicas.get(homes.find(step.sequence, -1))
                if home is None or (attachment := home.session.attachment) is None:
                    return chosen
                if homes.is_lost(step.sequence, attachment.since):
                    return home
                chosen = home
            homes.keep(step, chosen.session.device, time.monotonic())
        return chosen

    def _hand_out(self, shares: Sequence[tuple[ModelReplica[Any], list[Any]]]) -> None:
        """Answer the parts of a batch after execute() returned."""
        for replica, part in shares:
            failures = replica.execute_later(part)
            for request, failure in zip(part, failures or (), strict=False):
                self._responses.send(request, failure)

    def live(self) -> ModelReplica[Any] | None:
        """Return the replica that would get a new request now. None: that replica has no runtime that reads."""
        chosen = self._choose() if self._replicas else None
        return chosen if chosen is not None and chosen.answers_in_s() < inf else None

    # --- the end ------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Fail the waiting requests, and disconnect from all runtimes."""
        self._front.close()
        if self._first is not None:  # A model without a replica has never used the guard.
            self._process.guard.close()
        for reporting in self._reporting:
            reporting.close()
        for replica in self._replicas.values():
            replica.close()
        if self._placement is not None:
            self._placement.close()


def _cut(
    requests: Sequence[Any], chosen: ModelReplica[Any], further: Sequence[ModelReplica[Any]]
) -> list[tuple[ModelReplica[Any], list[Any]]]:
    """Divide a batch among the chosen replica and the warm replicas of `further`. Return each share with its replica.

    If the chosen replica alone would answer just as soon, there is only one share.
    """
    whole = chosen.forecast()
    forecasts = [
        (replica, forecast)
        for replica in further
        if (forecast := replica.forecast()) is not None and forecast.warm
    ]
    parts: dict[int, list[Any]] = {}
    if whole is not None and forecasts:
        devices = divide(chosen.rows(requests), whole, [forecast for _, forecast in forecasts])
        for request, device in zip(requests, devices, strict=True):
            parts.setdefault(device, []).append(request)
    return [(forecasts[device - 1][0] if device else chosen, part) for device, part in parts.items()]


def _device_of_run(request: Any) -> int | None:
    """Return the device of the run of a sub-call, or None for any other request."""
    try:
        parameters = parse_parameters(request.parameters() or "{}")
        return int(parameters.get(RUN_DEVICE, 0)) if RUN in parameters else None
    except Exception:  # noqa: BLE001 - the replica refuses it
        return None
