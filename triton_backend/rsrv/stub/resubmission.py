"""Requests whose runtime has died, and those that come while there is none: the next runtime gets them.

Requests for a cold model wait here, too, while it starts.

Inference has no side effects, and Triton keeps a request's inputs until its answer. So a death costs time, not answers.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b

from rsrv.logs import of_request
from rsrv.stub.deferred import CHECK_PERIOD_S, LATE, MAX_CHECKS
from rsrv.stub.replies import RequestFailure
from rsrv.stub.request import ClientRequest, Outcomes
from rsrv.stub.session import DOWN, UNLOADED, Startable
from rsrv.stub.tensors import Array, size_of
from rsrv.wire.frames import Status

log = logging.getLogger("rsrv.stub")

#: requests of a model that wait at most, and the bytes of their inputs
MAX_REQUESTS, MAX_BYTES = 1000, 256 << 20
#: deaths of runtimes that executed a request, after which it is not tried again: it may be their cause
MAX_DEATHS = 2
#: seconds between two looks for a runtime, while a suspect is under way, and otherwise
_SUSPECT_TICK_S, TICK_S = 0.005, 0.02
#: digests of inputs that are kept at most, and for how many seconds: as long as a crash counts against a model
_MAX_DIGESTS, _DIGEST_COUNTS_S = 64, 3600.0

_CRASH = "inputs; the server's log has the stacks of the crash, or says that the execution hung"
SUSPECT = (
    f"two runtimes ended while they executed this request, so it is not tried again. Send other {_CRASH}"
)
EQUAL = f"two runtimes ended while they executed a request with equal inputs, so this one is not tried. Send other {_CRASH}"
CROWDED = (
    "the model is starting, and no more requests may wait for it. Send it again later, or start the model ahead with "
    "`rsrv prefetch --warm`"
)
TOO_SOON = (
    "the model is starting, which takes {:.1f} s more, and this request's deadline is before that. The start goes on: send it "
    "again later, with a later deadline, or start the model ahead with `rsrv prefetch --warm`"
)


@dataclass(slots=True, eq=False)
class WaitingRequest:
    """A request without a runtime."""

    request: ClientRequest
    outcomes: Outcomes
    nbytes: int
    checked: float  # time, by the clock of its `Resubmission`, of the latest check for cancellation


class Resubmission:
    """The requests of one model that wait for a runtime, bounded in number, bytes and time.

    Requests that a runtime executed when it died are suspects: they are resubmitted one after another, so that the one
    that ends the next runtime has no company of the same model. A thread looks for a runtime while requests wait.
    Requests with equal inputs count as one.
    """

    def __init__(self, sessions: Sequence[Startable], clock: Callable[[], float] = time.monotonic) -> None:
        #: the model on its devices, or as a whole until it has started once
        self.sessions = sessions
        self._clock = clock
        #: submits a request to a runtime; False: there is none
        self.place: Callable[[ClientRequest], bool] = lambda request: False
        #: starts a cold model; True: another device starts it, so requests wait
        self.wake: Callable[[], object] = lambda: None
        #: gets the demand of those that wait, as `demand` returns it, whenever it may have changed
        self.tell: Callable[[Mapping[str, int]], object] = lambda demand: None
        #: seconds that a request waits at most: over all deaths, and if the model is cold or its device sleeps
        self.retry_s = self.start_timeout_s = 0.0
        #: a model that starts does not serve before
        self._ready_at = 0.0
        self._lock = threading.Lock()
        self._waiting: list[WaitingRequest] = []
        #: the suspect that is under way
        self._suspect: ClientRequest | None = None
        #: digest of the inputs of requests that executed when runtimes died -> how many died, and when it is forgotten
        self._hostile: dict[bytes, tuple[int, float]] = {}
        #: when all are
        self._hostile_until = 0.0
        self._running = False
        self._closed = False

    def add_batch(
        self,
        requests: Sequence[ClientRequest],
        reply: Callable[[ClientRequest], object],
        outcomes: Outcomes,
    ) -> None:
        """Have requests that come while there is no runtime wait for one; `reply` gives each its reply."""
        for request in requests:
            reply(request)
        for request in requests:
            self.add(request, outcomes)

    def add(self, request: ClientRequest, outcomes: Outcomes) -> None:
        """Have a request, which has a reply, wait for a runtime; or end it with the reason why it cannot. Thread-safe."""
        now = self._clock()
        one = WaitingRequest(request, outcomes, _input_bytes(request), now)
        with self._lock:
            if request is self._suspect:
                self._suspect = None  # its runtime died before it was executed
            failure = self._why_not(one, now)
            if failure is None:
                self._waiting.append(one)
                if not self._running:
                    failure = self._start()
        if failure is not None:
            _end(one, failure)

    def may_go_on(self, request: ClientRequest) -> bool:
        """Tell whether a run whose runtime has died may look for another one now, or has to ask again. Thread-safe.

        Raises RequestFailure if it cannot wait longer. The run keeps its thread, so it does not count among the waiting.
        """
        now = self._clock()
        with self._lock:
            failure = self._why_over(request, now)
            if failure is not None:
                raise failure
            if self._is_down:
                self.wake()
            is_turn = not request.deaths or request is self._suspect or not self._has_suspect()
            if request.deaths and is_turn:
                self._suspect = request
            return is_turn

    def demand(self) -> dict[str, int]:
        """From any thread: the requests that wait for a runtime, in the form of REGISTER; {}: none."""
        with self._lock:
            deadlines = [one.request.params.deadline_ns for one in self._waiting]
        if not deadlines:
            return {}
        earliest = min(filter(None, deadlines), default=0)
        return {"asked": True, **({"deadline_ns": earliest} if earliest else {})}

    def starting(self, seconds: float) -> None:
        """From any thread: refuse requests with deadlines in this time, as long as no runtime serves the model."""
        self._ready_at = self._clock() + seconds

    @property
    def _is_down(self) -> bool:
        """True if no runtime serves the model."""
        return all(session.attachment is None for session in self.sessions)

    @property
    def _is_starting(self) -> bool:
        """True if the model is cold or starts, so that no runtime has died."""
        return not any(session.started for session in self.sessions)

    @property
    def _start_limit_s(self) -> float:
        """Seconds that requests wait for a start; no runtime has said so if it ended before its last frame was read."""
        return self.start_timeout_s or self.retry_s

    def remember(self, deaths: int, arrays: Mapping[str, Array]) -> None:
        """Count the deaths of runtimes that executed a request against all with its inputs; 0: it was answered. Thread-safe.

        Its client may send it again after a deadline that ended it before its second try.
        """
        digest = _digest(arrays)
        with self._lock:
            self._hostile.pop(digest, None)
            if not deaths:
                return
            if len(self._hostile) == _MAX_DIGESTS:
                once = (one for one, (count, _) in self._hostile.items() if count < MAX_DEATHS)
                del self._hostile[next(once, next(iter(self._hostile)))]
            self._hostile_until = self._clock() + _DIGEST_COUNTS_S
            self._hostile[digest] = deaths, self._hostile_until

    def check(self, arrays: Mapping[str, Array]) -> int:
        """Return how many runtimes died while they executed a request with these inputs. Without any, nothing is hashed.

        Raises RequestFailure if a further try would be one too many.
        """
        if not self._hostile or (now := self._clock()) >= self._hostile_until:
            return 0
        deaths, until = self._hostile.get(_digest(arrays), (0, 0.0))
        if now < until and deaths >= MAX_DEATHS:
            raise RequestFailure(Status.INTERNAL, EQUAL)
        return deaths if now < until else 0

    def look(self) -> None:
        """Resubmit the requests if there is a runtime, and end those that cannot wait longer."""
        now = self._clock()
        with self._lock:
            waiting = list(self._waiting)
        # Requests are taken out only where one may be submitted: `demand` counts those that wait.
        is_down, checks = self._is_down, MAX_CHECKS
        if waiting and is_down:
            self.wake()
        for one in waiting:
            request = one.request
            failure = self._why_over(request, now)
            if failure is None and checks and now - one.checked > CHECK_PERIOD_S:
                one.checked, checks = now, checks - 1
                if request.reply is not None and request.reply.cancelled():
                    failure = RequestFailure(Status.CANCELLED, "the request was cancelled")
            if failure is not None:
                if self._take(one):
                    _end(one, failure)
            elif not is_down and not (request.deaths and self._has_suspect()) and self._take(one):
                if request.deaths:
                    self._suspect = request  # before it is submitted: it may come back before `place` returns
                is_down = not self._submit(one)
                if is_down:
                    self._give_back(one)
        self.tell(self.demand())

    def close(self) -> None:
        """End all waiting requests, and take no more."""
        with self._lock:
            self._closed = True
            waiting, self._waiting = self._waiting, []
        for one in waiting:
            _end(one, RequestFailure(Status.RUNTIME_DOWN, UNLOADED))

    def _take(self, one: WaitingRequest) -> bool:
        """Take a request out, to submit or to end it; False: `close` has ended it."""
        with self._lock:
            if self._closed:
                return False
            self._waiting.remove(one)
            return True

    def _give_back(self, one: WaitingRequest) -> None:
        """Have a request wait on that could not be submitted, as the next one."""
        with self._lock:
            if one.request is self._suspect:
                self._suspect = None
            if not self._closed:
                self._waiting.insert(0, one)
                return
        _end(one, RequestFailure(Status.RUNTIME_DOWN, UNLOADED))

    def _why_not(self, one: WaitingRequest, now: float) -> RequestFailure | None:
        """Return the reason why a request cannot begin to wait."""
        if one.request.failure is not None:
            return one.request.failure
        # Only the runtime that is gone knows the run of a sub-call, which its meta model repeats in the next one.
        if one.request.params.run and not self._is_starting:
            return RequestFailure(Status.RUNTIME_DOWN, DOWN)
        failure = self._why_over(one.request, now)
        nbytes = one.nbytes + sum(other.nbytes for other in self._waiting)
        if failure is None and (len(self._waiting) >= MAX_REQUESTS or nbytes > MAX_BYTES):
            if self._is_starting:
                return RequestFailure(Status.QUEUE_FULL, CROWDED)
            return RequestFailure(Status.RUNTIME_DOWN, DOWN)
        return failure

    def _why_over(self, request: ClientRequest, now: float) -> RequestFailure | None:
        """Return the reason why a request cannot wait any longer."""
        if request.deaths >= MAX_DEATHS:
            return RequestFailure(Status.INTERNAL, SUSPECT)
        if request.reply is not None and request.reply.sent:
            return RequestFailure(Status.DEADLINE, LATE)
        if self._closed:
            return RequestFailure(Status.RUNTIME_DOWN, UNLOADED)
        is_down, is_starting = self._is_down, self._is_starting
        request.waiting_since = request.waiting_since or now
        # A death may be followed by a sleep, and a start by a death.
        limit_s = self._start_limit_s if is_starting else self.retry_s
        request.retry_until = max(request.retry_until, request.waiting_since + limit_s)
        if is_starting and 0 < request.params.deadline_ns <= 1e9 * now:
            return RequestFailure(Status.DEADLINE, self._still_starting(request, now))
        if is_down and now < request.params.deadline_ns / 1e9 < self._ready_at:
            return RequestFailure(Status.DEADLINE, TOO_SOON.format(self._ready_at - now))
        # A suspect, for which there is a runtime, only waits for its turn.
        if now >= request.retry_until and (is_down or not request.deaths):
            return RequestFailure(
                Status.RUNTIME_DOWN, self._still_starting(request, now) if is_starting else DOWN
            )
        if is_down:
            reasons = [session.down for session in self.sessions if not session.cold]
            if reasons and DOWN not in reasons and not self.wake():  # no device will take the model soon
                return RequestFailure(Status.RUNTIME_DOWN, reasons[0])
        return None

    def _still_starting(self, request: ClientRequest, now: float) -> str:
        """Return the client's text for a request that cannot wait until a cold model has started."""
        return (
            f"the model is starting; this request has waited {now - request.waiting_since:.1f} s for it, and requests wait "
            f"{self._start_limit_s:g} s at most. Send it again later, with a later deadline, or start the model ahead "
            "with `rsrv prefetch --warm`"
        )

    def _has_suspect(self) -> bool:
        suspect = self._suspect
        return suspect is not None and suspect.reply is not None and not suspect.reply.sent

    def _submit(self, one: WaitingRequest) -> bool:
        try:
            return self.place(one.request)
        except Exception:
            log.exception("request %r: resubmitting failed", one.request.id, extra=of_request(one.request.id))
            why = "the request could not be submitted again; the server's log says why"
            _end(one, RequestFailure(Status.INTERNAL, why))
            return True

    def _start(self) -> RequestFailure | None:
        """Start the thread, under the lock. If the system has no thread left, requests cannot wait."""
        try:
            threading.Thread(target=self._run, name="resubmission", daemon=True).start()
        except RuntimeError:
            self._waiting.pop()
            return RequestFailure(Status.RUNTIME_DOWN, DOWN)
        self._running = True
        return None

    def _run(self) -> None:
        while True:
            try:
                self.look()
            except Exception:
                log.exception("looking for a runtime failed")
            with self._lock:
                if not self._waiting:
                    self._running = False
                    return
            time.sleep(_SUSPECT_TICK_S if self._has_suspect() else TICK_S)


def _digest(arrays: Mapping[str, Array]) -> bytes:
    """Return a digest of a request's inputs: names, types, shapes and bytes."""
    digest = blake2b(digest_size=16)
    for name, array in sorted(arrays.items()):
        digest.update(repr((name, array.dtype.str, array.shape)).encode(errors="surrogatepass"))
        if array.dtype == object:  # strings
            for value in array.flat:
                digest.update(len(value).to_bytes(8))
                digest.update(value)
        else:
            digest.update(array.tobytes())
    return digest.digest()


def _input_bytes(request: ClientRequest) -> int:
    """Return the bytes of a request's inputs, as far as they can be read."""
    with suppress(Exception):  # the request is refused when it is read
        return sum(size_of(tensor.as_numpy()) for tensor in request.triton.inputs())
    return 0


def _end(one: WaitingRequest, failure: RequestFailure) -> None:
    """Answer a request with a failure; never raises."""
    request = one.request
    try:
        assert request.reply is not None
        request.reply.send(one.outcomes.failed(request, failure))
    except Exception:
        log.exception("request %r could not be answered", request.id, extra=of_request(request.id))
