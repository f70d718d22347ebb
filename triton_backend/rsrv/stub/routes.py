"""The ways that a meta model's run reaches others by: straight to the runtime, or through Triton."""

import threading
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from rsrv.stub.calls import Keep, Pending, grace
from rsrv.stub.direct import DirectRun
from rsrv.stub.endpoint import Array
from rsrv.stub.hook_guard import HookGuard
from rsrv.stub.replies import Failure
from rsrv.stub.stages import Stage
from rsrv.stub.triton import ThroughTriton
from rsrv.wire.frames import Status


class Routes:
    """What one run may call, each by its way; `Stages`."""

    def __init__(
        self,
        run: DirectRun,
        stages: Mapping[str, Stage],
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
        self._stages = stages
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
            raise Failure(Status.INTERNAL, "call is for the thread that executes `run`, until that returns")
        if self._triton is not None and name in self._external:
            return self._triton.external(name, inputs)
        stage = self._stages.get(name)
        if stage is None:
            raise Failure(
                Status.INTERNAL, "model.py calls it, and the manifest's meta section does not list it"
            )
        if self._triton is None or not self._through_triton:
            return self._run.start(stage, inputs, keep)
        with self.waiting():
            self._run.let_in(grace(self._deadline_ns))
        return self._triton.stage(stage, inputs, keep, self._token)

    def waiting(self) -> AbstractContextManager[None]:
        return self._guard.waiting()

    def scratch(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        if self._through_triton:
            return np.empty(shape, dtype)
        return self._run.scratch(shape, dtype)
