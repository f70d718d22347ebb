"""Sub-calls of a meta model through Triton: to models outside of the runtime, and to all if the settings say so."""

import asyncio
import time
from collections.abc import Awaitable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np

from rsrv.stub.bls import Bls
from rsrv.stub.calls import Keep, Results
from rsrv.stub.replies import Failure
from rsrv.stub.stages import Stage, check_inputs, check_keep
from rsrv.stub.tracing import Trace, end_call


class ThroughTriton:
    """The calls of one run, for the request `who`; tensors travel by value, and stay on no device."""

    def __init__(self, bls: Bls, deadline_ns: int, who: str, trace: Trace | None = None) -> None:
        """`trace`: what the calls are parts of."""
        self._bls = bls
        self._who = who
        self._deadline_ns = deadline_ns
        self._trace = trace

    def external(self, name: str, inputs: Mapping[str, Any]) -> "_Waiting":
        """Call a model outside of the runtime. What it may be sent is Triton's to check."""
        arrays = {key: np.asarray(value) for key, value in inputs.items()}
        return _Waiting(self._start(name, arrays), {})

    def stage(self, stage: Stage, inputs: Mapping[str, Any], keep: Keep, token: int) -> "_Waiting":
        """Call a model of the runtime, as a part of the run that has this token. Raises Failure."""
        arrays = check_inputs(stage, inputs)
        check_keep(stage, keep)
        remote = stage.remote
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
        return _Waiting(future, {wire.name: len(wire.dims) for wire in remote.outputs})

    def _start(self, name: str, arrays: Mapping[str, Any], **options: Any) -> Future[Results]:
        """As `Bls.start`, by the run's deadline, for its request, and as a part of its trace."""
        options |= {"deadline_ns": self._deadline_ns, "who": self._who}
        if self._trace is None:
            return self._bls.start(name, arrays, **options)
        since, trace = time.perf_counter(), self._trace.child()
        future = self._bls.start(name, arrays, traceparent=trace.traceparent, **options)
        future.add_done_callback(partial(_traced, trace, name, since))
        return future


class _Waiting:
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
    end_call(trace, name, since, failure if isinstance(failure, Failure) else None)
