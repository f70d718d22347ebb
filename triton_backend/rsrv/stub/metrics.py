"""Measurements of a stub, their reports to the runtime, and the runtime's counts in Triton's own metrics."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from heapq import heappush, heapreplace
from math import isfinite
from typing import Any

from rsrv.histogram import SECONDS, Histogram
from rsrv.stub.connection import RuntimeConnection
from rsrv.stub.session import UNREACHABLE, Attachment, Session
from rsrv.stub.tracing import Spans
from rsrv.triton_command_line import Options, read_command_line
from rsrv.wire.frames import REASON_CHARACTERS, Status

log = logging.getLogger("rsrv.stub")

Report = dict[str, Any]
#: outcomes of requests in Triton's metrics
_OUTCOMES = ("answered", "refused", "expired", "shed", "cancelled", "failed")
#: seconds between two reports, at least; and between two queries of counts that did not change, as only other models'
#: requests can change them
_REPORT_PERIOD_S, _IDLE_PERIOD_S = 1.0, 10.0
#: requests of a report that took longest
_SLOWEST = 32
#: seconds that the runtime may take to answer
REPORT_TIMEOUT_S = 5.0
#: seconds that `close` waits for the thread
_CLOSE_TIMEOUT_S = 2.0


class Meters:
    """Measurements since the last report; `some` is set if there are any. Thread-safe."""

    def __init__(self) -> None:
        self.some = threading.Event()
        self.spans = Spans(self.some.set)
        #: by whose name the requests came; empty: the model's own
        self.alias = ""
        #: whether they are copies of requests: clients get no answers
        self.copies = False
        self._lock = threading.Lock()
        self._clear()

    def _clear(self) -> None:
        self._requests = Histogram(SECONDS)
        self._responses = [0] * len(Status)
        #: seconds, by model and function of model.py
        self._hooks: dict[tuple[str, str], Histogram] = {}
        #: answers to copies of an alias's requests, by outcome
        self._shadows: Counter[str] = Counter()
        #: seconds, number and arrival; a heap
        self._slow: list[tuple[float, int, float]] = []
        #: why the latest request failed
        self._failure = ""

    def answered(self, status: Status, since: float, number: int = -1) -> None:
        """Count a request that was answered now.

        `since`: its arrival, of time.perf_counter; `number`: of its submission, unless the runtime never had it.
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
        """Note why a request failed by a fault of the server; `answered` counts it."""
        with self._lock:
            if not self.copies:
                self._failure = why[:REASON_CHARACTERS]

    def hook(self, model: str, hook: str, seconds: float) -> None:
        """Count a call of a function of model.py that took this long, also if it raised."""
        with self._lock:
            found = self._hooks.get((model, hook))
            if found is None:
                found = self._hooks[model, hook] = Histogram(SECONDS)
            found.observe(seconds)
        if not self.some.is_set():
            self.some.set()

    def compared(self, outcome: str) -> None:
        """Count an answer to a copy of a request: same, different, failed, or skipped."""
        with self._lock:
            self._shadows[outcome] += 1
        self.some.set()

    def take(self) -> Report:
        """Return the measurements since the last call, in the form of REPORT (docs/protocol.md)."""
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


#: shows the runtime's counts, in the form of REPORTED (docs/protocol.md), elsewhere; None: there is no runtime
Show = Callable[[Mapping[str, Any] | None], object]


class Reporting:
    """A thread that reports until `close`, and shows the runtime's counts by `show` if there is one, which never raises.

    It has a connection of its own, so its failures cost counts, and no request.
    """

    def __init__(
        self,
        session: Session,
        meters: Meters,
        show: Show | None,
        *,
        period: float = _REPORT_PERIOD_S,
        idle_period: float = _IDLE_PERIOD_S,
    ) -> None:
        self._session = session
        self._meters = meters
        self._show = show
        self._period, self._idle_period = period, idle_period
        self._attachment: Attachment | None = None
        self._connection: RuntimeConnection | None = None
        self._closed = threading.Event()
        #: the counts that were shown last
        self._shown: Mapping[str, Any] | None = None
        if show is not None:
            # Before the first request: the counts up to now are not this stub's.
            self._exchange()
        session.on_change = meters.some.set
        self._thread = threading.Thread(target=self._run, name="reporting", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._meters.some.set()
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            return  # it may be showing counts
        self._drop()
        if self._show is not None:
            self._show(None)

    def _run(self) -> None:
        timeout = None if self._show is None else self._period
        while True:
            self._meters.some.wait(timeout)
            if self._closed.is_set():
                return
            changed = self._exchange()
            if self._show is not None:
                timeout = self._period if changed else self._idle_period
            if self._closed.wait(self._period):
                return

    def _exchange(self) -> bool:
        """Report, and show the counts. Returns whether they have changed."""
        try:
            figures = self._report(self._meters.take())
            if self._show is not None:
                self._show(figures)
        except Exception:
            log.exception("reporting measurements failed")
            self._drop()  # an answer that was not read must not be taken for the next one
            return False
        changed, self._shown = figures != self._shown, figures
        return changed

    def _report(self, report: Report) -> dict[str, Any] | None:
        """Send a report, and return the runtime's counts. None: the runtime does not answer, and the report is lost."""
        attachment = self._session.attachment
        if attachment is not self._attachment:
            self._drop()
        if attachment is None:
            return None
        try:
            if self._connection is None:
                self._connection, self._attachment = self._session.open_connection(attachment.key), attachment
            self._report_spans(self._connection)
            return self._connection.report({**report, "figures": self._show is not None}, REPORT_TIMEOUT_S)
        except (TimeoutError, *UNREACHABLE) as error:
            log.info("a report is lost: %s", error)
            self._drop()
            return None

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


# --- Triton's metrics ---------------------------------------------------------------------------------------
#
# A wrong call about a metric may crash the whole server (24.10): a counter that falls, a family made
# twice with another kind, two threads at once. So each call is checked before it is made, and the first one that
# fails is the last one. Triton never forgets a metric: counters go on with the model's next stub.


def make_mirror(pb_utils: Any, server_pid: int, model: str, version: str) -> "TritonMirror | None":
    """Make a mirror in Triton's metrics. Returns None if this Triton has none, or they are switched off."""
    if not hasattr(pb_utils, "MetricFamily") or not _has_metrics(server_pid):
        return None
    try:
        return TritonMirror(pb_utils, {"model": model, "version": version})
    except Exception:
        log.exception("the model has no metrics in Triton's")
        return None


def _has_metrics(server_pid: int) -> bool:
    """Tell whether tritonserver has metrics; not if that is unknown, because asking a server without metrics may end it."""
    words = read_command_line(server_pid)
    return bool(words) and Options(words).is_on("allow-metrics", default=True)


class TritonMirror:
    """Shows the counts of a model's replicas, summed, in Triton's metrics. Made on the thread of `initialize`."""

    def __init__(self, pb_utils: Any, labels: Mapping[str, str]) -> None:
        family, kinds = pb_utils.MetricFamily, pb_utils.MetricFamily

        def metric(name: str, kind: Any, text: str, **more: str) -> Any:
            made = family(name=name, description=text, kind=kind)
            self._families.append(made)
            return made.Metric(labels={**labels, **more})

        #: families must live as long as their metrics
        self._families: list[Any] = []
        counter, gauge = kinds.COUNTER, kinds.GAUGE
        requests = "Requests that are over, as rsrv's runtime saw them."
        self._requests = {
            outcome: metric("rsrv_requests_total", counter, requests, outcome=outcome)
            for outcome in _OUTCOMES
        }
        self._device_seconds = metric(
            "rsrv_device_seconds_total", counter, "Time that the model had the device."
        )
        self._queue_depth = metric("rsrv_queue_depth", gauge, "Requests that wait in rsrv's runtime.")
        self._up = metric(
            "rsrv_runtime_up", gauge, "1 while the model's process is connected to rsrv's runtime."
        )
        self._lock = threading.Lock()
        #: by replica: the counts of its runtime at the last call of `show`, and its gauges
        self._counted: dict[int, dict[str, float]] = {}
        self._queued: dict[int, float] = {}
        self._is_up: dict[int, float] = {}
        self._gauges: dict[int, float] = {}
        self._broken = False

    def show(self, replica: int, figures: Mapping[str, Any] | None) -> None:
        """Show the counts of one replica, as `Show`. Thread-safe; never raises."""
        with self._lock:
            if self._broken:
                return
            try:
                if figures is None:
                    self._counted[replica] = {}
                    self._queued[replica] = 0.0
                elif figures:
                    self._count(figures, replica)
                    self._queued[replica] = float(figures["queued"])
                self._is_up[replica] = float(figures is not None)
                self._set(self._queue_depth, sum(self._queued.values()))
                self._set(self._up, max(self._is_up.values()))
            except Exception:
                self._broken = True
                log.exception("the model's metrics in Triton's stop")

    def _count(self, figures: Mapping[str, Any], replica: int) -> None:
        now = {outcome: float(figures["requests"].get(outcome, 0)) for outcome in _OUTCOMES}
        now["seconds"] = float(figures["device_seconds"])
        before, self._counted[replica] = self._counted.get(replica), now
        if before is None:
            return  # the stub's predecessor has shown the counts up to now
        for name, metric in (*self._requests.items(), ("seconds", self._device_seconds)):
            # Less than before: another runtime counts from 0.
            more = now[name] - before.get(name, 0.0)
            more = now[name] if more < 0 else more
            if isfinite(more) and more > 0:
                metric.increment(more)

    def _set(self, gauge: Any, value: float) -> None:
        if isfinite(value) and self._gauges.get(id(gauge)) != value:
            gauge.set(value)
            self._gauges[id(gauge)] = value
