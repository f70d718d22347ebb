"""The thread that owns a model's front. It passes events to the front, and carries out the front's instructions.

No other thread changes the front. Other threads read `FrontLoop.snapshot` and the registration that each session publishes,
so `execute()` answers the requests of a ready model without this thread.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from math import inf
from queue import Empty, SimpleQueue
from typing import Protocol

from rsrv.front.events import (
    Connect,
    Event,
    Hold,
    InputsExecuted,
    Instruction,
    Leave,
    NotSubmitted,
    Proceed,
    Refuse,
    ReplaceProcess,
    Report,
    RequestAnswered,
    RequestArrived,
    RequestCancelled,
    RunAsks,
    Submit,
    TellDemand,
    TimePassed,
    Unloaded,
    WentCold,
)
from rsrv.front.front import Front, Snapshot
from rsrv.front.killers import deaths_of, may_have_killers
from rsrv.front.rules import CHECK_PERIOD_S, EQUAL, MAX_DEATHS, NOT_HANDLED, TICK_S
from rsrv.logs import of_request, request_name
from rsrv.stub.deferred import MAX_CHECKS
from rsrv.stub.replies import RequestFailure
from rsrv.stub.request import ClientRequest
from rsrv.stub.tensors import Array
from rsrv.wire.frames import Status

log = logging.getLogger(__name__)

#: Seconds between two ticks while a suspect executes and other requests wait for its end.
_SUSPECT_TICK_S = 0.005
#: Seconds that `close` waits for the thread.
_CLOSE_TIMEOUT_S = 5.0

_NOT_SUBMITTED = "the request could not be submitted again; the server's log says why"


class Effects(Protocol):
    """Carries out a front's instructions. Called on the front's thread."""

    def connect(self, attempt: Connect) -> None:
        """Begin an attempt to reach a runtime and to register the model."""

    def submit(self, request: ClientRequest) -> bool:
        """Submit a waiting request to the runtime that answers first. Returns False if no runtime takes it."""

    def leave(self, device: int) -> bool:
        """Leave the runtime of an idle model. Returns False if requests are in flight."""

    def tell(self, demand: Mapping[str, int]) -> None:
        """Report the waiting requests to the runtimes that start the model."""

    def replace_process(self, text: str) -> None:
        """End this process because it reaches no runtime."""

    def refresh(self) -> None:
        """Report changes of the placement table."""


class Failing(Protocol):
    """Makes the response of a request that fails."""

    def failed(self, request: ClientRequest, failure: RequestFailure) -> object: ...


@dataclass(slots=True)
class _Owed:
    """Data of the front's thread about a waiting request, or about a run that waits in `may_go_on`."""

    #: None for a run, because a run gets its answer through `answer`.
    outcomes: Failing | None
    checked: float
    #: Receives the answer to a run. True: the run continues. False: the run asks again.
    answer: "SimpleQueue[RequestFailure | bool]" = field(default_factory=SimpleQueue)


class FrontLoop:
    """A front's thread and its inbox. Every method is thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._inbox: SimpleQueue[Event | Callable[[], None]] = SimpleQueue()
        self._front = Front("", 1)
        self._effects: Effects | None = None
        self._thread: threading.Thread | None = None
        self._kept: dict[ClientRequest, _Owed] = {}
        #: Time of the latest tick.
        self._ticked_at = 0.0
        #: True if the thread handles no more events. Every request is then refused.
        self._ended = False
        self.snapshot: Snapshot = self._front.snapshot()
        #: Set at each new snapshot. Only one thread may wait for it.
        self.changed = threading.Event()

    def begin(self, front: Front, effects: Effects) -> None:
        """Start the thread, which owns `front` from now on."""
        self._front, self._effects = front, effects
        self.snapshot = front.snapshot()
        self._thread = threading.Thread(target=self._run, name="front", daemon=True)
        self._thread.start()

    def post(self, item: Event | Callable[[], None]) -> None:
        """Put an event, or a function to call, at the end of the thread's inbox."""
        self._inbox.put(item)
        if self._ended:
            self._drain()

    @property
    def is_closed(self) -> bool:
        """True once the model is unloaded."""
        return self._front.is_closed

    def stop(self) -> None:
        """Refuse the waiting requests and all later ones."""
        self.post(Unloaded())

    def close(self) -> None:
        """Refuse the waiting requests, and end the thread."""
        self.stop()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_TIMEOUT_S)

    # --- requests -----------------------------------------------------------------------------------------

    def add(self, request: ClientRequest, outcomes: Failing) -> None:
        """Let a request wait for a runtime, or end it if it cannot wait. The request must have a reply."""
        if request.failure is not None:
            _answer(request, outcomes, request.failure)
            return
        request.measure()
        self._kept[request] = _Owed(outcomes, self._clock())
        self.post(RequestArrived(request))

    def add_batch(
        self, requests: Sequence[ClientRequest], reply: Callable[[ClientRequest], object], outcomes: Failing
    ) -> None:
        """Let requests wait for a runtime. `reply` makes the reply of a request."""
        for request in requests:
            reply(request)
        for request in requests:
            self.add(request, outcomes)

    def may_go_on(self, request: ClientRequest) -> bool:
        """Return True if a run whose runtime has died may look for another runtime now, and False if it must ask again.

        Raises RequestFailure if the run cannot wait longer.
        """
        owed = self._kept[request] = _Owed(None, self._clock())
        self.post(RunAsks(request))
        answer = owed.answer.get()
        if isinstance(answer, RequestFailure):
            raise answer
        return answer

    def record(self, deaths: int, arrays: Mapping[str, Array]) -> None:
        """Record how many runtimes died while they executed these inputs. 0: a request with these inputs was answered.

        The record applies to all requests with equal inputs. So it also applies if a deadline ends a request before its second
        try, and the client sends the same inputs again.
        """
        self.post(InputsExecuted(digest_of(arrays), deaths))

    def check(self, arrays: Mapping[str, Array]) -> int:
        """Return how many runtimes died while they executed these inputs. If no deaths are recorded, nothing is hashed.

        Raises RequestFailure if so many runtimes died that the inputs are not tried again.
        """
        table = self.snapshot.killers
        if not table or not may_have_killers(table, now := self._clock()):
            return 0
        deaths = deaths_of(table, digest_of(arrays), now)
        if deaths >= MAX_DEATHS:
            raise RequestFailure(Status.INTERNAL, EQUAL)
        return deaths

    # --- the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._front.is_closed:
            try:
                pause = self._next_tick_at() - self._clock()
                with suppress(Empty):
                    self._take(self._inbox.get(timeout=None if pause == inf else max(0.0, pause)))
                if self._clock() >= self._next_tick_at():
                    self._tick()
            except Exception:
                log.exception("a fault in the model's front")
                time.sleep(TICK_S)  # The error may occur again at once.
        self._ended = True
        self._drain()

    def _drain(self) -> None:
        """Handle the items that are left in the inbox after the thread has ended."""
        with suppress(Empty):
            while True:
                self._take(self._inbox.get_nowait())

    def _next_tick_at(self) -> float:
        """Return the time of the next tick. It is infinite if no tick is needed before the next event."""
        waiting, suspect = self._front.waiting, self._front.suspect
        if not waiting and suspect is None:
            return self._front.next_at
        period = _SUSPECT_TICK_S if waiting and suspect is not None else TICK_S
        return min(self._front.next_at, self._ticked_at + period)

    def _tick(self) -> None:
        """Check the waiting requests, and report to the front that time has passed."""
        self._ticked_at = now = self._clock()
        if self._effects is not None:
            try:
                self._effects.refresh()
            except Exception:  # The front must still get TimePassed.
                log.exception("the placement table cannot be read")
        checks = MAX_CHECKS
        for request in [*self._front.waiting]:
            assert isinstance(request, ClientRequest)
            reply, owed = request.reply, self._kept.get(request)
            if owed is None:
                continue  # The request was submitted after another one ended.
            if reply is None or reply.sent:
                self.handle(RequestAnswered(request))
            elif checks and now - owed.checked > CHECK_PERIOD_S:
                owed.checked, checks = now, checks - 1
                if reply.cancelled():
                    self.handle(RequestCancelled(request))
        suspect = self._front.suspect
        if isinstance(suspect, ClientRequest) and (suspect.reply is None or suspect.reply.sent):
            self.handle(RequestAnswered(suspect))
        self.handle(TimePassed())

    def _take(self, item: Event | Callable[[], None]) -> None:
        """Handle an item of the inbox; never raises."""
        try:
            if callable(item):
                item()
            else:
                self.handle(item)
        except Exception:
            log.exception("a fault in the model's front")
            # Fail the request, because it would wait forever.
            if isinstance(item, RequestArrived | RunAsks) and item.request in self._kept:
                self._end(item.request, RequestFailure(Status.INTERNAL, NOT_HANDLED))

    def handle(self, event: Event) -> None:
        """Pass an event to the front and carry out its instructions. Called only on the front's thread."""
        events = deque([event])
        while events:
            instructions = self._front.handle(events.popleft(), self._clock())
            self.snapshot = self._front.snapshot()
            refused: list[ClientRequest] = []
            for instruction in instructions:
                try:
                    events += self._carry_out(instruction, refused)
                except Exception:  # The other instructions must still be carried out.
                    log.exception("a front's instruction failed: %s", type(instruction).__name__)
            if refused:
                events.append(NotSubmitted(tuple(refused)))
        self.changed.set()

    def _carry_out(self, instruction: Instruction, refused: list[ClientRequest]) -> Sequence[Event]:
        """Carry out an instruction and return the events that follow at once.

        A request that no runtime took is appended to `refused`.
        """
        effects = self._effects
        assert effects is not None
        match instruction:
            case Connect():
                effects.connect(instruction)
            case Submit(request):
                assert isinstance(request, ClientRequest)
                # After a refused request, refuse all later ones, so that the requests keep their order.
                if refused or not self._submit(effects, request):
                    refused.append(request)
            case Refuse(request, status, text):
                assert isinstance(request, ClientRequest)
                self._end(request, RequestFailure(status, text))
            case Proceed(request) | Hold(request):
                assert isinstance(request, ClientRequest)
                self._kept.pop(request).answer.put(isinstance(instruction, Proceed))
            case Leave(device):
                return [WentCold(device)] if effects.leave(device) else []
            case TellDemand(demand):
                effects.tell(demand)
            case ReplaceProcess(text):
                effects.replace_process(text)
            case Report(text, is_error):
                log.log(logging.ERROR if is_error else logging.INFO, "%s", text)
        return []

    def _submit(self, effects: Effects, request: ClientRequest) -> bool:
        # Remove the entry first, because the request may be added again before `submit` returns.
        owed = self._kept.pop(request)
        try:
            if effects.submit(request):
                return True
            self._kept[request] = owed
            return False
        except Exception:
            log.exception("%s: resubmitting failed", request_name(request.id), extra=of_request(request.id))
            self._kept[request] = owed
            self._end(request, RequestFailure(Status.INTERNAL, _NOT_SUBMITTED))
            return True

    def _end(self, request: ClientRequest, failure: RequestFailure) -> None:
        owed = self._kept.pop(request)
        if owed.outcomes is None:
            owed.answer.put(failure)
        else:
            _answer(request, owed.outcomes, failure)


def digest_of(arrays: Mapping[str, Array]) -> bytes:
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


def _answer(request: ClientRequest, outcomes: Failing, failure: RequestFailure) -> None:
    """Answer a request with a failure; never raises."""
    try:
        assert request.reply is not None
        request.reply.send(outcomes.failed(request, failure))
    except Exception:
        log.exception("%s could not be answered", request_name(request.id), extra=of_request(request.id))
