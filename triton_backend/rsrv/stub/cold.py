"""A model that no runtime has yet: its first request starts it, and the requests that come meanwhile wait for it.

Until then the model has no replica, no hooks and no connection in its stub's process.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rsrv.hooks.loader import HookError
from rsrv.stub.connection import Cold
from rsrv.stub.metrics import Meters
from rsrv.stub.replica import StubProcess
from rsrv.stub.replicas import Replicas
from rsrv.stub.request import ClientRequest, EntryPoint, Outcomes
from rsrv.stub.session import UNREACHABLE, Startable

log = logging.getLogger("rsrv.stub")


class ColdModel(Startable):
    """Answers Triton's requests as `Replicas`, which it makes when the first one comes.

    If that fails, all requests that wait are refused with the reason.
    """

    def __init__(self, begin: Callable[[], Replicas], process: StubProcess, start_timeout_s: float) -> None:
        """`begin` makes the replicas, which takes as long as the start."""
        super().__init__()
        self.cold = True
        self._begin = begin
        self._process = process
        self._outcomes = Outcomes(Meters(), process.responses)
        self._entry = EntryPoint(self._answer, self._outcomes, self._reply, process.end)
        self._replicas: Replicas | None = None
        process.resubmission.start_timeout_s = start_timeout_s
        process.resubmission.wake = self.start
        process.resubmission.sessions = [self]

    def execute(self, requests: Sequence[Any]) -> list[Any] | None:
        """Answer Triton's requests, as `EntryPoint.execute`."""
        return (self._replicas or self._entry).execute(requests)

    def execute_later(self, requests: Sequence[Any]) -> None:
        """Answer Triton's requests after execute() returned, as `Replicas.execute_later`."""
        if self._replicas is None:
            self._entry.execute(requests)
        else:
            self._replicas.execute_later(requests)

    def compared(self, outcome: str) -> None:
        """Count an answer to a copy, as `Meters.compared`, if the model has started."""
        if self._replicas is not None:
            self._replicas.compared(outcome)

    def _answer(self, requests: list[ClientRequest]) -> None:
        self._process.resubmission.add_batch(requests, self._reply, self._outcomes)

    def _reply(self, request: ClientRequest) -> None:
        request.open_reply(self._process.responses)

    def _bring_up(self) -> None:
        log.info("the model starts: a request waits for it")
        try:
            replicas = self._begin()
        except (*UNREACHABLE, HookError) as error:
            self._start_failed(error)
        except BaseException as error:  # also those of the user's model.py, as SystemExit
            log.exception("the model did not start")
            self._start_failed(f"{type(error).__name__}: {error}")
        else:
            with self._lock:
                if not self._closed.is_set():
                    self._replicas = replicas
                    self._process.resubmission.sessions = self._process.sessions
                    return
            replicas.close()

    @property
    def ready(self) -> bool:
        """Tell whether the model takes requests; one without a runtime does."""
        return self._replicas is None or self._replicas.ready

    def close(self) -> None:
        """Refuse the requests that wait for the start, and leave the runtime."""
        self.stop()
        self._process.resubmission.close()
        with self._lock:
            replicas = self._replicas
        if replicas is not None:
            replicas.close()


def begin_model(begin: Callable[..., Replicas], process: StubProcess) -> Replicas | ColdModel:
    """Return a model's replicas, or the model if it is cold; `begin(start=...)` makes them. Raises one of UNREACHABLE."""
    try:
        return begin(start=False)
    except Cold as cold:
        return ColdModel(partial(begin, start=True), process, cold.start_timeout_s)
