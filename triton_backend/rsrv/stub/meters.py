"""What a stub measures of its own requests, until it is reported."""

import threading
import time
from typing import Any

from rsrv.histogram import SECONDS, Histogram
from rsrv.stub.tracing import Spans
from rsrv.wire.frames import Status

Report = dict[str, Any]


class Meters:
    """For any thread. `some` is set when there is something to report."""

    def __init__(self) -> None:
        self.some = threading.Event()
        self.spans = Spans(self.some.set)
        self._lock = threading.Lock()
        self._clear()

    def _clear(self) -> None:
        self._requests = Histogram(SECONDS)
        self._responses = [0] * len(Status)
        #: seconds, by model and function of model.py
        self._hooks: dict[tuple[str, str], Histogram] = {}

    def answered(self, status: Status, since: float) -> None:
        """A request that came at `since`, of time.perf_counter, has its answer."""
        seconds = time.perf_counter() - since
        with self._lock:
            self._requests.observe(seconds)
            self._responses[status] += 1
        if not self.some.is_set():
            self.some.set()

    def hook(self, model: str, hook: str, seconds: float) -> None:
        """One of these functions of a model has returned, or raised."""
        with self._lock:
            found = self._hooks.get((model, hook))
            if found is None:
                found = self._hooks[model, hook] = Histogram(SECONDS)
            found.observe(seconds)
        if not self.some.is_set():
            self.some.set()

    def take(self) -> Report:
        """All since the last time, as REPORT has it (docs/protocol.md)."""
        self.some.clear()
        with self._lock:
            requests, responses, hooks = self._requests, self._responses, self._hooks
            self._clear()
        by_model: dict[str, dict[str, list[float]]] = {}
        for (model, hook), seconds in hooks.items():
            by_model.setdefault(model, {})[hook] = seconds.to_json()
        return {
            "requests": requests.to_json(),
            "responses": {status.name.lower(): responses[status] for status in Status if responses[status]},
            "hooks": by_model,
        }
