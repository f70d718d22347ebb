"""Sub-calls through Triton (BLS): several at a time, each with a time limit.

Triton cannot cancel such a call, and a few calls that are never answered block an instance forever. So a call here
ends when its time is over, but its thread still waits for Triton. The number of such threads is limited to what the
instance can spare.
"""

import asyncio
import logging
import re
import threading
import time
from collections import deque
from collections.abc import Awaitable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rsrv.front.rules import UNLOADED
from rsrv.logs import MAX_TEXT_LENGTH, of_request, request_name, shorten
from rsrv.stub.calls import Callee, Keep, Results, check_inputs, check_keep
from rsrv.stub.direct import DirectRun
from rsrv.stub.replies import RequestFailure, invalid, status_of, untag
from rsrv.stub.request import RUN, RUN_DEVICE
from rsrv.stub.tensors import Array, Tensors, as_array, strings_encoded
from rsrv.stub.tracing import TRACEPARENT, OpenSpan, end_call
from rsrv.triton_command_line import Options, read_command_line
from rsrv.wire.frames import Status

log = logging.getLogger(__name__)

Arrays = dict[str, Array]

#: Number of threads of an instance's pool, unless the server's command line sets another number.
_DEFAULT_POOL = 32
#: Maximum number of calls that one meta model hands to Triton at a time, if its thread pool allows as many. This is a quarter
#: of the default pool, which also sends the responses.
MAX_CALLS = 8
#: A call without an answer fails after this many seconds, so that no call waits for a model forever.
CALL_TIMEOUT_S = 60.0


# --- the limit of calls in flight ------------------------------------------------------------------------------------


def limit(pool: int) -> int:
    """Return the number of calls that an instance may have in flight with a pool of this many threads.

    Each call holds a thread until it is answered. The instance's own answers also need a thread, if `execute()` does not return
    them. Without a free thread, they wait until a call is answered, which may never happen.
    """
    return pool - 1


def pool_size(arguments: Sequence[str]) -> int:
    """Return the number of threads per instance of the Python backend that tritonserver's command line sets."""
    size = _DEFAULT_POOL
    # A shorter prefix could also mean --backend-directory.
    for value in Options(arguments).values("backend-config", shortest="backend-c"):
        backend, _, setting = value.partition(",")
        key, _, number = setting.partition("=")
        match = re.match(r"\s*(\d+)", number)  # Triton also ignores the text after the digits.
        if (backend, key) == ("python", "thread-pool-size") and match:
            size = int(match[1])
    return size


def read_pool_size(server_pid: int) -> int:
    """Return `pool_size` of a running server, or the default if its command line cannot be read."""
    arguments = read_command_line(server_pid)
    if not arguments:
        log.warning(
            "the command line of tritonserver cannot be read; assuming thread-pool-size=%d", _DEFAULT_POOL
        )
    return pool_size(arguments)


# --- calls that fail -------------------------------------------------------------------------------------------------

_NOISE = re.compile(
    r"Failed to process the request\(s\) for model '[^']*', message: |\[request id: [^\]]*\] "
)
#: Triton's error texts for a callee that is not loaded. From release 26.01 on, they can also mean that its process has ended.
_ABSENT = re.compile(
    r"(Failed for execute the inference request\. )?Model '[^']*' is not ready\.|"
    r"Request for unknown model: '[^']*' (has no available versions|is not found)\.?"
)
_PATH = re.compile(r"(?<![\w/])/[\w.-]+(?:/[\w.-]+)+")


def failure_of(model: str, message: str, status: Status = Status.INTERNAL) -> RequestFailure:
    """Return the failure of a call of `model`. `message` is Triton's error text, and `status` has Triton's code.

    Up to release 25.03, Triton turns every code into INTERNAL. So failures of rsrv's stubs are recognized by their tags, and
    Triton's own failures by their texts. Other failures keep their code. Triton adds file paths of
    the callee's code to the text of an exception. These paths are removed.
    """
    tagged = untag(message)
    if tagged is not None:
        return tagged
    before = f"Model {model} - Error when running inference: "
    text = _PATH.sub("(path)", _NOISE.sub("", message.removeprefix(before).partition("\n\nAt:")[0]))
    text = " ".join(text.split())
    if _ABSENT.fullmatch(text):
        return RequestFailure(Status.NOT_FOUND, f"model {model!r} is not loaded, or its process has ended")
    if message.startswith(before):  # Triton refused the request
        if text.endswith("Exceeds maximum queue size"):
            return RequestFailure(Status.QUEUE_FULL, f"the queue of model {model!r} is full; try again later")
        if status in (Status.INTERNAL, Status.INVALID):
            return invalid(f"model {model!r} cannot be called like this: {text}")
    if text.startswith("Stub process ") and text.endswith("is not healthy."):
        return RequestFailure(
            Status.INTERNAL, f"the process of model {model!r} has ended; the model must be loaded again"
        )
    return RequestFailure(status, text)


# --- calls ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _BlsCall:
    """A call, from `Bls.start` until its end. Times are in ns of CLOCK_MONOTONIC."""

    model: str
    inputs: Mapping[str, Array]
    dtypes: Mapping[str, str]
    outputs: Sequence[str]
    deadline_ns: int  # 0: none
    #: Token of the run.
    run: int
    #: The client's id of the request that makes the call.
    client_id: str
    traceparent: str
    #: Number of the run's device.
    device: int
    #: Time when the call has taken `timeout` seconds. All calls of a `Bls` have the same `timeout`.
    hung_ns: int
    #: Future that gets the answer, or an error.
    future: Future[Arrays] = field(default_factory=Future)
    started: bool = False

    @property
    def until_ns(self) -> int:
        return min(self.deadline_ns or self.hung_ns, self.hung_ns)


class Bls:
    """Calls other models from any thread, also while execute() runs and after it returned.

    At most `concurrency` calls are in flight in Triton at a time (see `limit`), and further calls wait. A call fails at its
    deadline, or `timeout` seconds after its start, even if it still waits then. The caller owns the arrays in answers.

    Raises ValueError if the instance has no thread for a single call.
    """

    def __init__(self, pb_utils: Any, tensors: Tensors, concurrency: int, timeout: float) -> None:
        if concurrency < 1:
            raise ValueError(
                "models can be called through Triton only if each instance has at least two threads: start "
                "tritonserver with --backend-config=python,thread-pool-size=2 or more"
            )
        if concurrency < MAX_CALLS:
            log.warning(
                "calls through Triton run %d at a time: tritonserver was started with thread-pool-size=%d for the Python "
                "backend. To allow up to %d, restart `rsrv serve`, which sees at its start that a bundle calls through "
                "Triton, or start tritonserver with --backend-config=python,thread-pool-size=%d",
                concurrency,
                concurrency + 1,
                MAX_CALLS,
                MAX_CALLS + 1,
            )
        self._pb = pb_utils
        self._tensors = tensors
        self._concurrency = concurrency
        self._timeout = timeout
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._deadlines_changed = threading.Condition(self._lock)
        self._waiting: deque[_BlsCall] = deque()
        #: Calls that Triton has received and not answered, including calls that have already failed here.
        self._under_way: set[_BlsCall] = set()
        self._threads = 0
        self._idle = 0
        self._watching = False
        #: End of the watching thread's sleep, or 0 if it does not sleep.
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
        client_id: str = "",
        traceparent: str = "",
        device: int = 0,
    ) -> Future[Arrays]:
        """Call `model`. The future gets the `outputs` in their order, or all outputs if none are named.

        The future gets RequestFailure if there is no answer by `deadline_ns` or within the timeout of this object, whichever ends
        first. Cancelling the future has an effect only before Triton has the call.

        Args:
            model: Name of the model.
            inputs: Arrays by name. Shapes are Triton's: a scalar per row is [N, 1].
            outputs: Names of the outputs.
            dtypes: Types of the inputs that numpy has no type for. A bf16 array is the bits as uint16.
            deadline_ns: Time of CLOCK_MONOTONIC; 0 for none.
            run: Token of the caller's run; 0 for none.
            client_id: Id that the client gave to the run's request, or "".
            traceparent: Trace context, or "".
            device: Number of the run's device.
        """
        now = time.monotonic_ns()
        hung_ns = now + int(self._timeout * 1e9)
        call = _BlsCall(
            model, inputs, dtypes or {}, outputs, deadline_ns, run, client_id, traceparent, device, hung_ns
        )
        with self._lock:
            refused = self._refuse(call, now)
            if refused is None:
                self._waiting.append(call)
                self._start_threads(call)
        if refused is not None:
            call.future.set_exception(refused)
        return call.future

    def close(self) -> None:
        """Fail all calls here. Calls that Triton has already received continue in Triton."""
        with self._lock:
            self._closed = True
            calls = [call for call in (*self._waiting, *self._under_way) if not call.future.done()]
            self._waiting.clear()
            self._work.notify_all()
            self._deadlines_changed.notify_all()
        for call in calls:
            _settle(call.future, _closed())

    # --- methods whose caller holds the lock --------------------------------------------------------------

    def _refuse(self, call: _BlsCall, now: int) -> RequestFailure | None:
        if self._closed:
            return _closed()
        if call.until_ns <= now:
            return self._too_late(call)
        if len(self._under_way) == self._concurrency and all(each.hung_ns <= now for each in self._under_way):
            models = ", ".join(sorted({repr(each.model) for each in self._under_way}))
            return RequestFailure(
                Status.QUEUE_FULL,
                f"model {call.model!r} cannot be called: {self._concurrency} calls, the limit, have been in flight without an "
                f"answer for more than {self._timeout:g} s (from {models}); load these models and the calling model again",
            )
        return None

    def _start_threads(self, call: _BlsCall) -> None:
        """Make sure that a thread executes the waiting call, and that the watching thread ends the call when its time is over."""
        if self._idle >= len(self._waiting):
            self._work.notify()
        elif self._threads < self._concurrency:
            self._threads += 1
            threading.Thread(target=self._execute_calls, name="bls", daemon=True).start()
        if not self._watching:
            self._watching = True
            threading.Thread(target=self._watch, name="bls-time", daemon=True).start()
        elif call.until_ns < self._asleep_ns:
            self._deadlines_changed.notify()

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
            f"model {call.model!r} could not be called for {self._timeout:g} s: {self._concurrency} other calls, the "
            "limit, were in flight; try again later",
        )

    def _next(self) -> _BlsCall | None:
        """Wait for the next call. Returns None after `close`."""
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
        """Sleep until calls are late, and dequeue them. Return them with their failures, or nothing after `close`."""
        with self._lock:
            while not self._closed:
                now = time.monotonic_ns()
                calls = [call for call in (*self._waiting, *self._under_way) if not call.future.done()]
                late = [call for call in calls if call.until_ns <= now]
                if late:
                    self._waiting = deque(call for call in self._waiting if call.until_ns > now)
                    return [(call, self._too_late(call)) for call in late]
                first = min((call.until_ns for call in calls), default=now + int(self._timeout * 1e9))
                del calls, late  # Ended calls must not stay in memory here.
                self._asleep_ns = first
                self._deadlines_changed.wait((first - now) / 1e9)
                self._asleep_ns = 0
            return []

    # --- the threads --------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while late := self._sleep():
            for call, failure in late:
                log.warning("%s: %s", request_name(call.client_id), failure.text, extra=_about(call))
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
            # Copy the failure without its traceback, which would keep the call's arrays alive.
            outcome = failure.copy()
        except Exception:
            log.exception(
                "%s: calling model %r failed", request_name(call.client_id), call.model, extra=_about(call)
            )
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
            error = response.error()
            message = error.message()
            failure = failure_of(call.model, message, status_of(self._pb, error))
            if failure.status is Status.INTERNAL:
                # The traceback also contains places in the callee's code.
                text = shorten(message, 4 * MAX_TEXT_LENGTH)
                log.error(
                    "%s: calling model %r: %s",
                    request_name(call.client_id),
                    call.model,
                    text,
                    extra=_about(call),
                )
            return failure
        # Copy the outputs. A held response prevents the reuse of Triton's shared memory, which never shrinks.
        arrays = {tensor.name(): self._tensors.take(tensor) for tensor in response.output_tensors()}
        missing = [name for name in call.outputs if name not in arrays]
        if missing:  # Triton does not check
            return RequestFailure(
                Status.INTERNAL, f"the answer of model {call.model!r} has no output {missing[0]!r}"
            )
        return {name: arrays[name] for name in call.outputs} or arrays

    def _request(self, call: _BlsCall) -> Any:
        options: dict[str, Any] = {}
        parameters = {}
        if call.run:
            parameters[RUN] = str(
                call.run
            )  # Triton's integer parameters are signed, so send this number as text.
        if call.device:
            parameters[RUN_DEVICE] = str(call.device)
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
            # Request outputs in the CPU's memory, because numpy cannot read the GPU's memory.
            preferred_memory=self._pb.PreferredMemory(self._pb.TRITONSERVER_MEMORY_CPU, 0),
            **options,
        )

    def _input(self, call: _BlsCall, name: str, array: Array) -> Any:
        try:
            return self._tensors.make(name, array, call.dtypes.get(name))
        except Exception:
            text = "%s: calling model %r failed: input %r has the type %s"
            log.exception(
                text, request_name(call.client_id), call.model, name, array.dtype, extra=_about(call)
            )
            raise invalid(
                f"input {name!r} for model {call.model!r} has the type {array.dtype}, which Triton does not have"
            ) from None


def _settle(future: Future[Arrays], outcome: Arrays | RequestFailure) -> None:
    """Resolve a future unless the answer, the time limit, a cancellation or `close` has resolved it."""
    with suppress(InvalidStateError):
        if isinstance(outcome, RequestFailure):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


def _closed() -> RequestFailure:
    return RequestFailure(Status.RUNTIME_DOWN, UNLOADED)


def _about(call: _BlsCall) -> dict[str, Any]:
    """Return `extra` for a line of the log."""
    return of_request(call.client_id, calls=call.model)


# --- a run's calls ---------------------------------------------------------------------------------------------


class ThroughTriton:
    """Makes the sub-calls of one run through Triton. All tensors are copied, and no output stays on the device."""

    def __init__(self, bls: Bls, deadline_ns: int, client_id: str, span: OpenSpan | None = None) -> None:
        """`client_id` is the id of the run's request. Spans of calls become children of `span`."""
        self._bls = bls
        self._client_id = client_id
        self._deadline_ns = deadline_ns
        self._span = span

    def external(self, name: str, inputs: Mapping[str, Any]) -> "_TritonCall":
        """Call a model of Triton that the manifest's `meta.external` names. Triton checks the inputs."""
        arrays = {key: as_array(value) for key, value in inputs.items()}
        for key, array in arrays.items():
            if array.dtype.kind in "SUO":
                arrays[key] = strings_encoded(array)
        return _TritonCall(self._start(name, arrays), {})

    def internal(
        self, callee: Callee, inputs: Mapping[str, Any], keep: Keep, run: DirectRun
    ) -> "_TritonCall":
        """Call a model of the runtime, in this run. Raises RequestFailure."""
        arrays = check_inputs(callee, inputs)
        check_keep(callee, keep)
        remote = callee.remote
        # In Triton, a tensor needs an axis after the batch axis, so [N] is sent as [N, 1].
        least = 2 if remote.batched else 1
        for name, array in arrays.items():
            if array.ndim < least:
                arrays[name] = array.reshape(*array.shape, 1)
        future = self._start(
            remote.name,
            arrays,
            run.stage,
            outputs=[wire.name for wire in remote.outputs],
            dtypes={wire.name: wire.dtype for wire in remote.inputs},
            run=run.token,
            device=run.device,
        )
        return _TritonCall(future, {wire.name: len(wire.dims) for wire in remote.outputs})

    def _start(
        self, name: str, arrays: Mapping[str, Any], stage: int | None = None, **options: Any
    ) -> Future[Results]:
        """Start a call with the run's deadline, client id and trace context; `stage` as in `end_call`."""
        options |= {"deadline_ns": self._deadline_ns, "client_id": self._client_id}
        if self._span is None:
            return self._bls.start(name, arrays, **options)
        since, span = time.perf_counter(), self._span.child()
        future = self._bls.start(name, arrays, traceparent=span.traceparent, **options)
        future.add_done_callback(partial(_end_span, span, name, since, stage))
        return future


class _TritonCall:
    """A sub-call through Triton that implements `Pending`. `Bls` ends it when its time is over."""

    def __init__(self, future: Future[Results], ranks: Mapping[str, int]) -> None:
        """`ranks` is the number of axes of each result, by name. Triton's tensor may have one more axis, of extent 1."""
        self._future = future
        self._ranks = ranks

    def wait(self, until_ns: int) -> Results:
        return self._shaped(self._future.result())

    def when_done(self, loop: asyncio.AbstractEventLoop, until_ns: int) -> Awaitable[Results]:
        async def wait() -> Results:
            return self._shaped(await asyncio.wrap_future(self._future, loop=loop))

        return wait()

    def _shaped(self, results: Results) -> Results:
        return {
            name: array.reshape(array.shape[: self._ranks.get(name, array.ndim)])
            for name, array in results.items()
        }


def _end_span(span: OpenSpan, name: str, since: float, stage: int | None, ended: Future[Results]) -> None:
    failure = None if ended.cancelled() else ended.exception()
    end_call(span, name, since, failure if isinstance(failure, RequestFailure) else None, stage)
