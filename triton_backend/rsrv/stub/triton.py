"""Sub-calls of a meta model through Triton: to models outside of the runtime, and to all if the settings say so."""

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from rsrv.stub.bls import Bls
from rsrv.stub.calls import Results


class ThroughTriton:
    """The calls of one run; tensors travel by value, and stay on no device."""

    def __init__(self, bls: Bls, deadline_ns: int) -> None:
        self._bls = bls
        self._deadline_ns = deadline_ns

    def start(
        self, name: str, inputs: Mapping[str, Any], outputs: Sequence[str] = (), run: int = 0
    ) -> "_Waiting":
        """`outputs`: those that are wanted, all if none; `run`: the token that makes it a sub-call. Raises Failure."""
        arrays = {key: np.asarray(value) for key, value in inputs.items()}
        return _Waiting(
            self._bls.start(name, arrays, outputs=outputs, deadline_ns=self._deadline_ns, run=run)
        )


class _Waiting:
    """A call under way; `Pending`. It ends by itself when its time is up."""

    def __init__(self, future: Future[Results]) -> None:
        self._future = future

    def wait(self, until_ns: int) -> Results:
        return self._future.result()

    def when_done(self, loop: asyncio.AbstractEventLoop, until_ns: int) -> Awaitable[Results]:
        return asyncio.wrap_future(self._future, loop=loop)
