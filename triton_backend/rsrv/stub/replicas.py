"""A model's replicas in its stub, one per device of the server: which of them answers a batch."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial, reduce
from math import inf
from operator import methodcaller, or_
from typing import Any

from rsrv.placement.batch_shares import divide
from rsrv.placement.device_choice import PINNED, allowed, by_preference, soonest
from rsrv.stub.connection import Cold, Rejected
from rsrv.stub.metrics import Reporting, TritonMirror
from rsrv.stub.replica import ModelReplica, StubProcess
from rsrv.stub.request import RUN, RUN_DEVICE, ClientRequest, parse_parameters
from rsrv.stub.sequences import read_step
from rsrv.stub.session import UNREACHABLE, Session
from rsrv.wire.placement_table import PlacementReader

log = logging.getLogger("rsrv.stub")

_ANSWERS_IN_S = methodcaller("answers_in_s")
#: seconds that the model's load waits for the first attempts of further devices
_JOIN_S = 10.0
#: seconds between a further device's attempts to serve the model, doubling
_FIRST_PAUSE_S, _MAX_PAUSE_S = 1.0, 60.0
#: seconds that a runtime is down before a model starts on another device; the next runtime takes less as a rule
_ELSEWHERE_S = 3.0


class Replicas:
    """Answers Triton's requests for one model on all devices of the server.

    The placement table says on which devices the model shall run; of these, a batch goes to the one that is expected to
    answer first. Another device gets the batch if that is far sooner and the model is not pinned. Without a table each
    model has a home among the devices, by its name, so that the models of a quiet server are spread over them, and goes
    elsewhere if a batch would be answered sooner there.
    """

    def __init__(
        self,
        make: Callable[[int], ModelReplica[Any]],
        name: str,
        process: StubProcess,
        placement: PlacementReader | None = None,
        devices: Callable[[], int] = lambda: 1,
        start: bool = False,
    ) -> None:
        """Make the replicas: the first one alone, because the others then find its compiled modules in the cache.

        `make` makes that of a device, by its number, and raises Cold, or one of UNREACHABLE. If a device does not serve the
        model, the others do, and it is tried again. `devices` counts those of the server without a runtime's help. `start`:
        the model is cold, and starts on the device that it prefers. Raises Cold, or one of UNREACHABLE.
        """
        self._make = make
        self._responses = process.responses
        self._placement = placement
        self._process = process
        self._lock = threading.Lock()
        self._closed = threading.Event()
        #: devices on which the model is cold and has no replica
        self._cold: set[int] = set()
        #: further devices whose latest attempt failed, until the next one
        self._refused: set[int] = set()
        #: further devices that rejected the model for crashes
        self._crashed: set[int] = set()
        #: devices of the table, and whether live ones elsewhere are out of the question
        self._mask = 0
        self._pinned = False
        if start:
            self._mask = 0 if placement is None else placement.mask(time.monotonic())
            preferred = by_preference(name, devices())
            order: Iterable[int] = dict.fromkeys((*allowed(preferred, self._mask), *preferred))
        else:
            order = _one_after_another(devices)
        number, first = self._make_first(order, start=start)
        self._first = first
        attachment = first.session.attachment
        count = devices() if attachment is None else attachment.direct.devices
        self._preference = by_preference(name, count)
        #: by device, the home first
        self._replicas: dict[int, ModelReplica[Any]] = {number: first}
        #: the replicas on devices of the table, and elsewhere
        self._allowed: Sequence[ModelReplica[Any]] = (first,)
        self._others: Sequence[ModelReplica[Any]] = ()
        #: masks of the models that a meta model calls, by name; and the same if no device is in all of them
        self._callees: Mapping[str, int] = {}
        self._apart: Mapping[str, int] = {}
        self._reporting: list[Reporting] = []
        #: replicas report, and show their counts in the mirror
        self._started = False
        self._mirror: TritonMirror | None = None
        #: answers Triton's requests, as `EntryPoint.execute`
        self.execute = first.execute
        if process.homes is not None:
            self.execute = self._follow_sequences
            process.resubmission.place = self._place_step
        elif count > 1:
            through_triton = attachment is None or attachment.settings["meta"]["transport"] == "bls"
            self.execute = self._follow_runs if through_triton else self._spread
        # Last: requests that wait for the start of a cold model are submitted from here on.
        process.devices, process.live, process.stages = count, self._live, self._stages
        process.resubmission.wake = self._wake
        attempts = [self._start_joining(device) for device in range(count) if device != number]
        deadline = time.monotonic() + _JOIN_S
        for attempted in attempts:
            attempted.wait(max(0.0, deadline - time.monotonic()))

    # --- the devices --------------------------------------------------------------------------------------

    def _make_first(self, order: Iterable[int], *, start: bool) -> tuple[int, ModelReplica[Any]]:
        """Return the first device of `order` that serves the model, and its replica. Raises Cold, or one of UNREACHABLE."""
        failures: dict[int, Exception] = {}
        for device in order:
            if start:
                self._process.wanted.add(device)
            try:
                replica = self._make(device)
            except UNREACHABLE as error:
                failures[device] = error
                if isinstance(error, Rejected) and error.dangerous:
                    break  # a model that has ended a runtime would end the others, too
            else:
                for number, failure in failures.items():
                    log.error("device %d does not serve the model yet: %s", number, failure)
                return device, replica
            finally:
                self._process.wanted.discard(device)
        if len({str(failure) for failure in failures.values()}) == 1:
            raise next(iter(failures.values()))
        raise Rejected("; ".join(f"device {number}: {failure}" for number, failure in failures.items()))

    def _start_joining(self, device: int) -> threading.Event:
        """Join a further device on a thread. Returns an event that is set after the first attempt."""
        attempted = threading.Event()
        threading.Thread(target=self._join, args=(device, attempted), name="replica", daemon=True).start()
        return attempted

    def _join(self, device: int, attempted: threading.Event) -> None:
        """Add the replica of a further device as soon as its runtime serves the model."""
        pause = _FIRST_PAUSE_S
        while not self._closed.is_set():
            self._refused.discard(device)
            try:
                replica = self._make(device)
            except Cold:
                with self._lock:
                    self._process.wanted.discard(device)
                    self._cold.add(device)
                attempted.set()
                return
            except UNREACHABLE as error:
                if isinstance(error, Rejected):
                    (self._crashed.add if error.dangerous else self._crashed.discard)(device)
                log.error("device %d does not serve the model yet: %s", device, error)
            except Exception:
                log.exception("device %d does not serve the model yet", device)
            else:
                self._process.wanted.discard(device)
                self._crashed.discard(device)
                self._add(device, replica)
                attempted.set()
                return
            # Requests that wait for the start get the reason until the next attempt.
            self._refused.add(device)
            attempted.set()
            self._closed.wait(pause)
            pause = min(2 * pause, _MAX_PAUSE_S)

    def _add(self, device: int, replica: ModelReplica[Any]) -> None:
        with self._lock:
            if not self._closed.is_set():
                found = {**self._replicas, device: replica}
                self._replicas = {one: found[one] for one in self._preference if one in found}
                self._allow()
                if self._started:
                    self._report(device, replica)
                return
        replica.close()

    def _wake(self) -> bool:
        """Start a cold model where its requests go, or elsewhere if the runtime there stays down or rejects it.

        A model that has crashed runtimes of a device starts on no further one. Returns whether a device starts the model
        elsewhere, so that requests wait for it; `Resubmission.wake`.
        """
        session = self._choose().session
        session.start()
        with self._lock:
            if self._process.wanted - self._refused:
                return True
            stays_down = session.started and time.monotonic() - session.lost_at >= _ELSEWHERE_S
            if not (stays_down or session.rejected):
                return False
            sessions = {device: one.session for device, one in self._replicas.items()}
            if any(not (one.cold or one.started or one.rejected) for one in sessions.values()):
                return True
            cold = self._cold | {device for device, one in sessions.items() if one.cold}
            if crashed := self._crashed | {device for device, one in sessions.items() if one.dangerous}:
                cold &= crashed
            for device in allowed([one for one in self._preference if one in cold], self._mask)[:1]:
                log.warning(
                    "the runtime of device %d %s: the model starts on device %d",
                    session.device,
                    "rejects the model" if session.rejected else "stays down",
                    device,
                )
                self._start_on(device)
                return True
        return False

    def _spread_warm(self) -> None:
        """Start a model that serves on the devices of a new table where it is cold, under the lock."""
        if not self._mask or all(one.session.attachment is None for one in self._replicas.values()):
            return
        for device in [one for one in self._preference if self._mask >> one & 1]:
            self._start_on(device)

    def _start_on(self, device: int) -> None:
        """Start the model on a device where it is cold, under the lock."""
        if device in self._replicas:
            self._replicas[device].session.start()
        elif device in self._cold:
            self._process.wanted.add(device)
            try:
                self._start_joining(device)
                self._cold.discard(device)
            except RuntimeError:  # execute() must not raise
                self._process.wanted.discard(device)
                log.exception("there is no thread to start the model on device %d", device)

    def _allow(self) -> None:
        """Follow the table and the replicas."""
        devices = list(self._replicas)
        masks = self._callees.values()
        together = [one for one in devices if all(not mask or mask >> one & 1 for mask in masks)]
        self._apart = {} if together else self._callees
        chosen = allowed(together or devices, self._mask)
        self._allowed = [self._replicas[one] for one in chosen]
        self._others = [self._replicas[one] for one in devices if one not in chosen]
        # Elsewhere a meta model would need the weights of all models that it calls.
        self._pinned = bool(self._mask & PINNED or self._callees)

    # --- requests -----------------------------------------------------------------------------------------

    def _choose(self) -> ModelReplica[Any]:
        """Return the replica that gets a batch, by the table as it is now."""
        if self._placement is not None:
            mask = self._placement.mask(time.monotonic())
            if mask != self._mask or self._placement.callees is not self._callees:
                with self._lock:
                    self._mask, self._callees = mask, self._placement.callees
                    self._allow()
                    self._spread_warm()
        if apart := self._apart:  # a device that joins may replace it at any time
            return self._begin_stages(apart)
        return soonest(self._allowed, self._others, _ANSWERS_IN_S, pinned=self._pinned)

    def execute_later(self, requests: Sequence[Any]) -> None:
        """Answer Triton's requests after execute() returned. Not for models with state."""
        self._hand_out([(self._choose(), list(requests))])

    def compared(self, outcome: str) -> None:
        """Count an answer to a copy, as `Meters.compared`."""
        self._first.meters.compared(outcome)

    def _spread(self, requests: Sequence[Any]) -> list[Any] | None:
        chosen = self._choose()
        if len(requests) > 1 and len(self._allowed) > 1 and not self._apart:
            shares = _cut(requests, chosen, [one for one in self._allowed if one is not chosen])
            if len(shares) > 1:
                return self._answer(shares)
        return chosen.execute(requests)

    def _answer(self, shares: Sequence[tuple[ModelReplica[Any], list[Any]]]) -> list[Any] | None:
        """Answer the parts of a batch: later, if there are several, as a list that execute() returns has to be whole."""
        if len(shares) == 1:
            return shares[0][0].execute(shares[0][1])
        self._hand_out(shares)
        return None

    def _begin_stages(self, apart: Mapping[str, int]) -> ModelReplica[Any]:
        """Return the live replica of the lowest device on which a run by stage may call a model."""
        live = {one: replica for one, replica in self._replicas.items() if replica.answers_in_s() < inf}
        union = reduce(or_, apart.values())
        return live[min(allowed(list(live), union))] if live else self._first

    def _stages(self, device: int) -> dict[str, ModelReplica[Any]]:
        """Return the soonest replica for each call of a run that begins on a device; `StubProcess.stages`.

        Only from that device on: runs enter devices in ascending order.
        """
        found: dict[str, ModelReplica[Any]] = {}
        for name, mask in self._apart.items():
            begins = {
                one: attachment.begins_in_s(name)
                for one, replica in self._replicas.items()
                if one >= device and (attachment := replica.session.attachment) is not None
            }
            if not begins:
                return {}
            found[name] = self._replicas[min(allowed(list(begins), mask), key=begins.__getitem__)]
        return {} if all(one.session.device == device for one in found.values()) else found

    def _follow_runs(self, requests: Sequence[Any]) -> list[Any] | None:
        """Answer each sub-call on the device of its run, whose runtime alone knows the run, and spread other requests."""
        parts: dict[int | None, list[Any]] = {}
        for request in requests:
            parts.setdefault(_device_of_run(request), []).append(request)
        if parts.keys() == {None}:
            return self._spread(requests)
        with self._lock:
            for device in parts:
                if device is not None:
                    self._start_on(device)
        # Without a replica on the run's device, any other one has the meta model repeat the call.
        return self._answer(
            [
                (self._replicas.get(-1 if device is None else device, self._allowed[0]), part)
                for device, part in parts.items()
            ]
        )

    def _follow_sequences(self, requests: Sequence[Any]) -> list[Any] | None:
        """Answer each request on the device that has its sequence's state."""
        parts: dict[int, list[Any]] = {}
        for request in requests:
            parts.setdefault(self._home(request).session.device, []).append(request)
        with self._lock:
            shares = [(self._replicas[device], part) for device, part in parts.items()]
        return self._answer(shares)

    def _place_step(self, request: ClientRequest) -> bool:
        """Give a request of a sequence that waits for a runtime to a replica; `Resubmission.place`."""
        chosen = self._home(request.triton)
        return chosen.answers_in_s() < inf and chosen.take_over(request)

    def _home(self, request: Any) -> ModelReplica[Any]:
        """Return the replica that has the state of a request's sequence.

        A sequence begins where the fewest are, because each device has as many slots. If its runtime has ended, it goes
        anywhere, to be refused.
        """
        try:
            step = read_step(request)
        except Exception:  # noqa: BLE001 - the replica refuses it
            return self._first
        homes = self._process.homes
        assert homes is not None
        chosen = self._choose()
        with self._lock:
            if step.start:
                live = [one for one in self._allowed if one.answers_in_s() < inf]
                chosen = min(live, key=lambda one: homes.count(one.session.device), default=chosen)
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

    def _live(self) -> ModelReplica[Any] | None:
        """Return the replica that gets a request that waited, if it has a runtime: as if the request came now."""
        chosen = self._choose()
        return chosen if chosen.answers_in_s() < inf else None

    # --- the process --------------------------------------------------------------------------------------

    def start(self, mirror: TritonMirror | None) -> None:
        """Report measurements to the runtimes, mirror their counts, and guard hooks."""
        with self._lock:
            self._started, self._mirror = True, mirror
            for device, one in self._replicas.items():
                self._report(device, one)
        # The settings of the process are those of all replicas.
        self._first.guard_hooks()

    def _report(self, device: int, replica: ModelReplica[Any]) -> None:
        show = None if self._mirror is None else partial(self._mirror.show, device)
        self._reporting.append(Reporting(replica.session, replica.meters, show))

    @property
    def ready(self) -> bool:
        """True if the model takes requests: a runtime serves it, or it is cold."""
        return any(one.ready for one in self._replicas.values())

    @property
    def session(self) -> Session:
        """One with an attachment, if there is one."""
        found = (one.session for one in self._replicas.values() if one.session.attachment is not None)
        return next(found, self._first.session)

    def close(self) -> None:
        with self._lock:
            self._closed.set()
        for reporting in self._reporting:
            reporting.close()
        for one in self._replicas.values():
            one.close()
        if self._placement is not None:
            self._placement.close()


def _one_after_another(devices: Callable[[], int]) -> Iterator[int]:
    """Yield the numbers of the server's devices, whose count is known after an attempt at the first one."""
    yield 0
    yield from range(1, devices())


def _cut(
    requests: Sequence[Any], chosen: ModelReplica[Any], others: Sequence[ModelReplica[Any]]
) -> list[tuple[ModelReplica[Any], list[Any]]]:
    """Return the shares of a batch by replica; at most one if the chosen replica alone answers as soon."""
    whole = chosen.forecast()
    found = [(one, forecast) for one in others if (forecast := one.forecast()) is not None and forecast.warm]
    parts: dict[int, list[Any]] = {}
    if whole is not None and found:
        devices = divide(chosen.rows(requests), whole, [forecast for _, forecast in found])
        for request, device in zip(requests, devices, strict=True):
            parts.setdefault(device, []).append(request)
    return [(found[device - 1][0] if device else chosen, part) for device, part in parts.items()]


def _device_of_run(request: Any) -> int | None:
    """Return the device of the run that a request says it is a sub-call of; None: it does not say so."""
    try:
        parameters = parse_parameters(request.parameters() or "{}")
        return int(parameters.get(RUN_DEVICE, 0)) if RUN in parameters else None
    except Exception:  # noqa: BLE001 - the replica refuses it
        return None
