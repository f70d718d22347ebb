"""Calls of other models through Triton's own interface for that (BLS): several at a time, and none for ever.

Triton cannot be told to give a call up, and a few calls that are never answered block an instance for good. So a
call here ends when its time is over, while the thread that waits for Triton stays where it is; and there are never
more such threads than the instance can spare.
"""

import logging
import re
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rsrv.logs import TEXT, of_request, shorten
from rsrv.stub.replies import RequestFailure, untag
from rsrv.stub.request import RUN
from rsrv.stub.session import UNLOADED
from rsrv.stub.tensors import Array, Tensors
from rsrv.stub.tracing import TRACEPARENT
from rsrv.wire.frames import Status

log = logging.getLogger("rsrv.stub")

Arrays = dict[str, Array]

#: threads of an instance's pool, unless the server is told another number
_DEFAULT_POOL = 32
#: calls that one meta model hands to Triton at a time, if its thread pool allows as many: a quarter of the default
#: pool, which also sends the responses
MAX_CALLS = 8
#: seconds after which a call without an answer fails; no call waits for a model for ever
CALL_TIMEOUT_S = 60.0


# --- how many calls may be under way --------------------------------------------------------------------------------


def limit(pool: int) -> int:
    """How many calls an instance may have under way, of the `pool` threads that Triton has for it.

    Each call holds one until it is answered, and the instance's own answers need one, too, if `execute()` does not
    return them: with none left they wait for the calls, and if those are never answered, for ever.
    """
    return pool - 1


def pool_size(arguments: Sequence[str]) -> int:
    """Threads that the Python backend has for each instance, by the command line of tritonserver."""
    size = _DEFAULT_POOL
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        option, equals, value = argument.partition("=")
        # Options can be cut short as far as they stay unambiguous: there is --backend-directory, too.
        if not option.startswith("--backend-c") or not "--backend-config".startswith(option):
            continue
        backend, _, setting = (value if equals else following).partition(",")
        key, _, number = setting.partition("=")
        found = re.match(r"\s*(\d+)", number)  # whatever follows the digits is ignored there, too
        if (backend, key) == ("python", "thread-pool-size") and found:
            size = int(found[1])
    return size


def read_pool_size(server_pid: int) -> int:
    """`pool_size` of the server that runs as this process; the default if its command line cannot be read."""
    try:
        line = Path(f"/proc/{server_pid}/cmdline").read_bytes()
    except OSError:
        log.warning(
            "the command line of tritonserver cannot be read; assuming thread-pool-size=%d", _DEFAULT_POOL
        )
        return _DEFAULT_POOL
    return pool_size([argument.decode(errors="replace") for argument in line.split(b"\0")])


# --- what Triton says of calls that fail ----------------------------------------------------------------------------

_NOISE = re.compile(
    r"Failed to process the request\(s\) for model '[^']*', message: |\[request id: [^\]]*\] "
)
_PATH = re.compile(r"(?<![\w/])/[\w.-]+(?:/[\w.-]+)+")


def failure_of(model: str, message: str) -> RequestFailure:
    """What a client is told of a call of `model` that ended with Triton's `message`.

    There is no code beside the message: it is INTERNAL whatever happened. So our own stubs' failures are known by
    their tags, Triton's by their words, and all others stay INTERNAL, without the places in the callee's code that
    Triton adds to an exception.
    """
    tagged = untag(message)
    if tagged is not None:
        return tagged
    before = f"Model {model} - Error when running inference: "
    text = _PATH.sub("(path)", _NOISE.sub("", message.removeprefix(before).partition("\n\nAt:")[0]))
    text = " ".join(text.split())
    if message.startswith(before):  # Triton did not take the request
        if text.endswith("is not ready."):
            return RequestFailure(Status.NOT_FOUND, f"model {model!r} is not loaded")
        if text.endswith("Exceeds maximum queue size"):
            return RequestFailure(Status.QUEUE_FULL, f"the queue of model {model!r} is full; try again later")
        return RequestFailure(Status.INVALID, f"model {model!r} cannot be called like this: {text}")
    if text.startswith("Stub process ") and text.endswith("is not healthy."):
        return RequestFailure(
            Status.INTERNAL, f"the process of model {model!r} has ended; the model must be loaded again"
        )
    return RequestFailure(Status.INTERNAL, text)


# --- calls ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _BlsCall:
    """Times in ns of CLOCK_MONOTONIC."""

    model: str
    inputs: Mapping[str, Array]
    dtypes: Mapping[str, str]
    outputs: Sequence[str]
    deadline_ns: int  # 0: none
    run: int
    #: the id of the request that it is made for
    who: str
    traceparent: str
    #: when it has taken longer than any call should
    hung_ns: int
    #: resolved when the answer is there or the time is over, whichever comes first
    future: Future[Arrays] = field(default_factory=Future)
    started: bool = False

    @property
    def until_ns(self) -> int:
        return min(self.deadline_ns or self.hung_ns, self.hung_ns)


class Bls:
    """Calls other models from any thread, also while execute() runs and after it returned.

    At most `concurrency` calls are handed to Triton at a time (see `limit`); further ones wait for their turn. No
    call takes longer than `timeout` seconds or its deadline, waiting included. Arrays in answers are the caller's.

    Raises ValueError when there is no room for a single call.
    """

    def __init__(self, pb_utils: Any, tensors: Tensors, concurrency: int, timeout: float) -> None:
        if concurrency < 1:
            raise ValueError(
                "models can be called through Triton only if each instance has two threads at least: start "
                "tritonserver with --backend-config=python,thread-pool-size=2 or more"
            )
        self._pb = pb_utils
        self._tensors = tensors
        self._concurrency = concurrency
        self._timeout = timeout
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._earlier = threading.Condition(self._lock)
        self._waiting: deque[_BlsCall] = deque()
        #: handed to Triton and not come back, whether anybody still waits for it or not
        self._under_way: set[_BlsCall] = set()
        self._threads = 0
        self._idle = 0
        self._watching = False
        #: until when the watching thread sleeps; 0: it does not
        self._asleep_ns = 0
        self._closed = False

    def start(
        self,
        model: str,
        inputs: Mapping[str, Array],
        *,
        outputs: Sequence[str] = (),
        dtypes: Mapping[str, str] | None = None,
        deadline_ns: int = 0,
        run: int = 0,
        who: str = "",
        traceparent: str = "",
    ) -> Future[Arrays]:
        """The answer of `model`: the `outputs` in their order, or all that it gives if none are named.

        `dtypes` names those of inputs that numpy has no type for (bf16, as its bits). Shapes go and come as Triton
        has them: a scalar per row is [N, 1]. `deadline_ns` is a time of CLOCK_MONOTONIC, 0 for none; `run` the token
        of the caller's run, 0 for none; `who` the id of its request, and `traceparent` its trace context, "" for
        none. The future ends when the call's time is over at the latest, with RequestFailure if
        there is no answer. Cancelling it helps only while the call waits for its turn.
        """
        now = time.monotonic_ns()
        hung_ns = now + int(self._timeout * 1e9)
        call = _BlsCall(model, inputs, dtypes or {}, outputs, deadline_ns, run, who, traceparent, hung_ns)
        with self._lock:
            refused = self._refuse(call, now)
            if refused is None:
                self._waiting.append(call)
                self._get_going(call)
        if refused is not None:
            call.future.set_exception(refused)
        return call.future

    def close(self) -> None:
        """End all calls as far as anybody waits for them. What Triton has of them is left to it."""
        with self._lock:
            self._closed = True
            calls = [call for call in (*self._waiting, *self._under_way) if not call.future.done()]
            self._waiting.clear()
            self._work.notify_all()
            self._earlier.notify_all()
        for call in calls:
            _settle(call.future, _closed())

    # --- under the lock -----------------------------------------------------------------------------------

    def _refuse(self, call: _BlsCall, now: int) -> RequestFailure | None:
        if self._closed:
            return _closed()
        if call.until_ns <= now:
            return self._too_late(call)
        if len(self._under_way) == self._concurrency and all(each.hung_ns <= now for each in self._under_way):
            models = ", ".join(sorted({repr(each.model) for each in self._under_way}))
            return RequestFailure(
                Status.QUEUE_FULL,
                f"model {call.model!r} cannot be called: all {self._concurrency} calls that may be under way have had "
                f"no answer for more than {self._timeout:g} s (from {models}); those models and the one that calls "
                "them must be loaded again",
            )
        return None

    def _get_going(self, call: _BlsCall) -> None:
        """See to it that somebody executes a call that waits, and that somebody watches the time."""
        if self._idle >= len(self._waiting):
            self._work.notify()
        elif self._threads < self._concurrency:
            self._threads += 1
            threading.Thread(target=self._execute_calls, name="bls", daemon=True).start()
        if not self._watching:
            self._watching = True
            threading.Thread(target=self._watch, name="bls-time", daemon=True).start()
        elif call.until_ns < self._asleep_ns:
            self._earlier.notify()

    def _too_late(self, call: _BlsCall) -> RequestFailure:
        if call.until_ns == call.deadline_ns:
            return RequestFailure(
                Status.DEADLINE, f"the deadline passed before model {call.model!r} answered"
            )
        if call.started:
            return RequestFailure(
                Status.DEADLINE, f"model {call.model!r} did not answer within {self._timeout:g} s"
            )
        return RequestFailure(
            Status.QUEUE_FULL,
            f"model {call.model!r} could not be called for {self._timeout:g} s: all {self._concurrency} calls that "
            "may be under way were; try again later",
        )

    def _next(self) -> _BlsCall | None:
        """The next call, when there is one; None when there is nothing to do any more."""
        with self._lock:
            self._idle += 1
            while not self._closed:
                while self._waiting:
                    call = self._waiting.popleft()
                    if call.future.set_running_or_notify_cancel():
                        self._idle -= 1
                        call.started = True
                        self._under_way.add(call)
                        return call
                self._work.wait()
            return None

    def _sleep(self) -> list[tuple[_BlsCall, RequestFailure]]:
        """Until it is too late for some calls; they are taken off the queue. Empty when there is nothing to do."""
        with self._lock:
            while not self._closed:
                now = time.monotonic_ns()
                calls = [call for call in (*self._waiting, *self._under_way) if not call.future.done()]
                late = [call for call in calls if call.until_ns <= now]
                if late:
                    self._waiting = deque(call for call in self._waiting if call.until_ns > now)
                    return [(call, self._too_late(call)) for call in late]
                first = min((call.until_ns for call in calls), default=now + int(self._timeout * 1e9))
                del calls, late  # what has ended must not live on here
                self._asleep_ns = first
                self._earlier.wait((first - now) / 1e9)
                self._asleep_ns = 0
            return []

    # --- the threads --------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while late := self._sleep():
            for call, failure in late:
                log.warning("request %r: %s", call.who, failure.text, extra=_about(call))
                _settle(call.future, failure)
            del late, call, failure

    def _execute_calls(self) -> None:
        while self._execute_one():
            pass

    def _execute_one(self) -> bool:
        call = self._next()
        if call is None:
            return False
        try:
            outcome = self._execute(call)
        except RequestFailure as failure:
            # Without the exception itself: its traceback would keep the call's arrays alive.
            outcome = RequestFailure(failure.status, failure.text)
        except Exception:
            log.exception("request %r: calling model %r", call.who, call.model, extra=_about(call))
            outcome = RequestFailure(
                Status.INTERNAL, f"model {call.model!r} could not be called; the server's log says why"
            )
        with self._lock:
            self._under_way.remove(call)
        _settle(call.future, outcome)
        return True

    def _execute(self, call: _BlsCall) -> Arrays | RequestFailure:
        response = self._request(call).exec()
        if response.has_error():
            message = response.error().message()
            failure = failure_of(call.model, message)
            if failure.status is Status.INTERNAL:
                text = shorten(message, 4 * TEXT)  # with places in the callee's code
                log.error("request %r: calling model %r: %s", call.who, call.model, text, extra=_about(call))
            return failure
        # Copies: what is held of the response would keep Triton's shared memory from being used again, and that
        # grows for good.
        arrays = {tensor.name(): self._tensors.take(tensor) for tensor in response.output_tensors()}
        missing = [name for name in call.outputs if name not in arrays]
        if missing:  # Triton does not look
            return RequestFailure(
                Status.INTERNAL, f"the answer of model {call.model!r} has no {missing[0]!r}"
            )
        return {name: arrays[name] for name in call.outputs} or arrays

    def _request(self, call: _BlsCall) -> Any:
        options: dict[str, Any] = {}
        parameters = {}
        if call.run:
            parameters[RUN] = str(call.run)  # as text: integers there are signed
        if call.traceparent:
            parameters[TRACEPARENT] = call.traceparent
        if parameters:
            options["parameters"] = parameters
        if call.deadline_ns:
            options["timeout"] = max(1, (call.deadline_ns - time.monotonic_ns()) // 1000)
        return self._pb.InferenceRequest(
            model_name=call.model,
            requested_output_names=list(call.outputs),
            inputs=[self._input(call, name, array) for name, array in call.inputs.items()],
            # Else the outputs of a model on the GPU stay there, where numpy cannot read them.
            preferred_memory=self._pb.PreferredMemory(self._pb.TRITONSERVER_MEMORY_CPU, 0),
            **options,
        )

    def _input(self, call: _BlsCall, name: str, array: Array) -> Any:
        try:
            return self._tensors.make(name, array, call.dtypes.get(name))
        except Exception:
            text = "request %r: calling model %r: input %r of %s"
            log.exception(text, call.who, call.model, name, array.dtype, extra=_about(call))
            raise RequestFailure(
                Status.INVALID,
                f"input {name!r} for model {call.model!r}: {array.dtype} is no type of Triton's",
            ) from None


def _settle(future: Future[Arrays], outcome: Arrays | RequestFailure) -> None:
    """Unless it is settled: by the answer, by the time, by whoever waited, or by the end of everything."""
    with suppress(InvalidStateError):
        if isinstance(outcome, RequestFailure):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


def _closed() -> RequestFailure:
    return RequestFailure(Status.RUNTIME_DOWN, UNLOADED)


def _about(call: _BlsCall) -> dict[str, Any]:
    """For `extra` of a line of the log."""
    return of_request(call.who, calls=call.model)
