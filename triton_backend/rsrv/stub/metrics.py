"""Measurements of a stub, and their reports to the runtime."""

import logging
import threading
import time
from collections import Counter
from heapq import heappush, heapreplace
from typing import Any

from rsrv.front.rules import REPORT_PERIOD_S
from rsrv.histogram import SECONDS, Histogram
from rsrv.stub.connection import RuntimeConnection
from rsrv.stub.session import UNREACHABLE, Attachment, Session
from rsrv.stub.tracing import Spans
from rsrv.wire.frames import REASON_CHARACTERS, Status

log = logging.getLogger(__name__)

Report = dict[str, Any]
#: Number of slow requests in a report.
_SLOWEST = 32
#: Seconds that the runtime may take to answer.
REPORT_TIMEOUT_S = 5.0
#: Seconds that `close` waits for the thread.
_CLOSE_TIMEOUT_S = 2.0


class Meters:
    """Measurements since the last report. The event `some` is set while there is something to report. Thread-safe."""

    def __init__(self) -> None:
        self.some = threading.Event()
        #: Guards the measurements and the spans.
        self._lock = threading.Lock()
        self.spans = Spans(self.some.set, self._lock)
        #: The alias that the requests name, or "" if they name the model itself.
        self.alias = ""
        #: True if the requests are copies for a shadow, so no client gets an answer.
        self.copies = False
        self._clear()

    def _clear(self) -> None:
        self._requests = Histogram(SECONDS)
        self._responses = [0] * len(Status)
        #: Seconds by model and by function of model.py.
        self._hooks: dict[tuple[str, str], Histogram] = {}
        #: Answers to copies of an alias's requests, by outcome.
        self._shadows: Counter[str] = Counter()
        #: Duration in seconds, number and arrival of each of the slowest requests, as a heap.
        self._slow: list[tuple[float, int, float]] = []
        #: Reason of the latest failure.
        self._failure = ""

    def answered(self, status: Status, since: float, number: int = -1) -> None:
        """Count a request that was answered now.

        `since` is the request's arrival by time.perf_counter. `number` is the number of its submission; -1: it was not
        submitted.
        """
        seconds = time.perf_counter() - since
        with self._lock:
            if self.copies:
                return
            self._requests.observe(seconds)
            self._responses[status] += 1
            slow = self._slow
            if number >= 0 and (len(slow) < _SLOWEST or seconds > slow[0][0]):
                (heappush if len(slow) < _SLOWEST else heapreplace)(slow, (seconds, number, since))
        if not self.some.is_set():
            self.some.set()

    def failed(self, why: str) -> None:
        """Record why a request failed by the server's fault. This does not count the request; `answered` does."""
        with self._lock:
            if not self.copies:
                self._failure = why[:REASON_CHARACTERS]

    def hook(self, model: str, hook: str, seconds: float) -> None:
        """Count a call of a function of model.py and its duration. A call that raised also counts."""
        with self._lock:
            series = self._hooks.get((model, hook))
            if series is None:
                series = self._hooks[model, hook] = Histogram(SECONDS)
            series.observe(seconds)
        if not self.some.is_set():
            self.some.set()

    def compared(self, outcome: str) -> None:
        """Count an answer to a copy of a request: same, different, failed, or skipped."""
        with self._lock:
            self._shadows[outcome] += 1
        self.some.set()

    def take(self) -> Report:
        """Return the measurements since the last call, as the fields of REPORT.

        requests: histogram of seconds from a request's arrival to its answer.
        responses: number of answers by status, in lower case.
        hooks: histograms of seconds by model (this one, or one that the meta model calls) and by hook (pre, post, run).
        slow: for each of the slowest requests, the number of its submission, and the times of its arrival and of its answer in
            seconds of CLOCK_MONOTONIC.
        alias: the alias that the clients used. Optional.
        shadows: number of answers to copies of requests, by outcome. Present with `alias`.
        failure: why the latest answer with the status INTERNAL failed, without contents of requests. Optional.

        `rsrv.stub.hook_import` adds `importing` while it imports model.py: the seconds so far, and the line, or 0 if the line is
        in another file.
        """
        self.some.clear()
        with self._lock:
            requests, responses, hooks, slow = self._requests, self._responses, self._hooks, self._slow
            shadows, failure = dict(self._shadows), self._failure
            self._clear()
        by_model: dict[str, dict[str, list[float]]] = {}
        for (model, hook), seconds in hooks.items():
            by_model.setdefault(model, {})[hook] = seconds.to_json()
        rare: Report = {"alias": self.alias, "shadows": shadows} if self.alias else {}
        if failure:
            rare["failure"] = failure
        return rare | {
            "requests": requests.to_json(),
            "responses": {status.name.lower(): responses[status] for status in Status if responses[status]},
            "hooks": by_model,
            "slow": [[number, since, since + seconds] for seconds, number, since in slow],
        }


# --- reporting to the runtime -------------------------------------------------------------------------------


class Reporting:
    """A thread that reports until `close`.

    It has its own connection, so if reporting fails, measurements are lost, but no requests.
    """

    def __init__(self, session: Session, meters: Meters, *, period: float = REPORT_PERIOD_S) -> None:
        self._session = session
        self._meters = meters
        self._period = period
        self._attachment: Attachment | None = None
        self._connection: RuntimeConnection | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reporting", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._meters.some.set()
        self._thread.join(_CLOSE_TIMEOUT_S)
        if not self._thread.is_alive():
            self._drop()

    def _run(self) -> None:
        while True:
            self._meters.some.wait()
            if self._closed.is_set():
                return
            try:
                self._report(self._meters.take())
            except Exception:
                log.exception("reporting measurements failed")
                self._drop()  # On this connection, the next report would read this report's answer.
            if self._closed.wait(self._period):
                return

    def _report(self, report: Report) -> None:
        """Send a report. It is lost if the runtime does not answer."""
        attachment = self._session.attachment
        if attachment is not self._attachment:
            self._drop()
        if attachment is None:
            return
        try:
            if self._connection is None:
                self._connection, self._attachment = self._session.open_connection(attachment.key), attachment
            self._report_spans(self._connection)
            self._connection.report(report, REPORT_TIMEOUT_S)
        except (TimeoutError, *UNREACHABLE) as error:
            log.info("a report of measurements to the runtime was lost: %s", error)
            self._drop()

    def _report_spans(self, connection: RuntimeConnection) -> None:
        while (taken := self._meters.spans.take()) != ([], 0):
            try:
                connection.report_spans(*taken, REPORT_TIMEOUT_S)
            except Exception:
                spans, dropped = taken
                self._meters.spans.lost(len(spans) + dropped)
                raise

    def _drop(self) -> None:
        connection, self._connection, self._attachment = self._connection, None, None
        if connection is not None:
            connection.close()
