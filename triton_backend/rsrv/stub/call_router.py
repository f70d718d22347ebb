"""The routes of a run's sub-calls: straight to the runtime, or through Triton."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Collection, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np

from rsrv.stub.bls import Bls
from rsrv.stub.calls import Callee, Keep, Pending, Results, check_inputs, check_keep, grace
from rsrv.stub.direct import DirectRun
from rsrv.stub.endpoint import Array
from rsrv.stub.hook_guard import HookGuard
from rsrv.stub.replies import RequestFailure
from rsrv.stub.tracing import Trace, end_call
from rsrv.wire.frames import Status


class ThroughTriton:
    """The calls of one run, for the request `who`; tensors travel by value, and stay on no device."""

    def __init__(self, bls: Bls, deadline_ns: int, who: str, trace: Trace | None = None) -> None:
        """`trace`: what the calls are parts of."""
        self._bls = bls
        self._who = who
        self._deadline_ns = deadline_ns
        self._trace = trace

    def external(self, name: str, inputs: Mapping[str, Any]) -> "_TritonCall":
        """Call a model outside of the runtime. What it may be sent is Triton's to check."""
        arrays = {key: np.asarray(value) for key, value in inputs.items()}
        return _TritonCall(self._start(name, arrays), {})

    def internal(self, callee: Callee, inputs: Mapping[str, Any], keep: Keep, token: int) -> "_TritonCall":
        """Call a model of the runtime, as a part of the run that has this token. Raises RequestFailure."""
        arrays = check_inputs(callee, inputs)
        check_keep(callee, keep)
        remote = callee.remote
        # Triton has no tensors without an axis of their own: [N] travels as [N, 1].
        least = 2 if remote.batched else 1
        for name, array in arrays.items():
            if array.ndim < least:
                arrays[name] = array.reshape(*array.shape, 1)
        future = self._start(
            remote.name,
            arrays,
            outputs=[wire.name for wire in remote.outputs],
            dtypes={wire.name: wire.dtype for wire in remote.inputs},
            run=token,
        )
        return _TritonCall(future, {wire.name: len(wire.dims) for wire in remote.outputs})

    def _start(self, name: str, arrays: Mapping[str, Any], **options: Any) -> Future[Results]:
        """As `Bls.start`, by the run's deadline, for its request, and as a part of its trace."""
        options |= {"deadline_ns": self._deadline_ns, "who": self._who}
        if self._trace is None:
            return self._bls.start(name, arrays, **options)
        since, trace = time.perf_counter(), self._trace.child()
        future = self._bls.start(name, arrays, traceparent=trace.traceparent, **options)
        future.add_done_callback(partial(_traced, trace, name, since))
        return future


class _TritonCall:
    """A call under way; `Pending`. It ends by itself when its time is up. `ranks`: axes that results have here."""

    def __init__(self, future: Future[Results], ranks: Mapping[str, int]) -> None:
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


def _traced(trace: Trace, name: str, since: float, ended: Future[Results]) -> None:
    failure = None if ended.cancelled() else ended.exception()
    end_call(trace, name, since, failure if isinstance(failure, RequestFailure) else None)


class CallRouter:
    """What one run may call, each by its way; `Callees`."""

    def __init__(
        self,
        run: DirectRun,
        callees: Mapping[str, Callee],
        external: Collection[str],
        triton: ThroughTriton | None,
        deadline_ns: int,
        token: int,
        guard: HookGuard,
        *,
        through_triton: bool,
    ) -> None:
        self._guard = guard
        self._run = run
        self._callees = callees
        self._external = external
        self._triton = triton
        self._deadline_ns = deadline_ns
        self._token = token
        self._through_triton = through_triton
        self._thread = threading.get_ident()
        #: the connection may be another run's now
        self.over = False

    def start(self, name: str, inputs: Mapping[str, Any], keep: Keep) -> Pending:
        if self.over or threading.get_ident() != self._thread:
            raise RequestFailure(
                Status.INTERNAL, "call is for the thread that executes `run`, until that returns"
            )
        if self._triton is not None and name in self._external:
            return self._triton.external(name, inputs)
        callee = self._callees.get(name)
        if callee is None:
            raise RequestFailure(
                Status.INTERNAL, "model.py calls it, and the manifest's meta section does not list it"
            )
        if self._triton is None or not self._through_triton:
            return self._run.start(callee, inputs, keep)
        with self.waiting():
            self._run.let_in(grace(self._deadline_ns))
        return self._triton.internal(callee, inputs, keep, self._token)

    def waiting(self) -> AbstractContextManager[None]:
        return self._guard.waiting()

    def scratch(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        if self._through_triton:
            return np.empty(shape, dtype)
        return self._run.scratch(shape, dtype)
