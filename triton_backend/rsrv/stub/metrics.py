"""Figures of a stub: measured, reported to the runtime, and shown in Triton's own metrics."""

import logging
import threading
import time
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any, Protocol

from rsrv.histogram import SECONDS, Histogram
from rsrv.stub.connection import RuntimeConnection
from rsrv.stub.session import UNREACHABLE, Link, Session
from rsrv.stub.tracing import Spans
from rsrv.wire.frames import Status

log = logging.getLogger("rsrv.stub")

Report = dict[str, Any]
#: outcomes of requests that are shown in Triton's metrics
_OUTCOMES = ("answered", "refused", "expired", "shed", "cancelled", "failed")
#: seconds between two reports, at least; and between two looks at figures that stood still, which only others'
#: requests can change
_PAUSE, _LONG_PAUSE = 1.0, 10.0
#: seconds that the runtime may take to answer
_PATIENCE = 5.0
#: seconds that the end of the model waits for the thread
_GRACE = 2.0


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


# --- reporting to the runtime -------------------------------------------------------------------------------


class Mirror(Protocol):
    """Where figures are shown. For one thread at a time; raises nothing."""

    def show(self, figures: Mapping[str, Any] | None) -> None:
        """As REPORTED has them (docs/protocol.md); None: there is no runtime."""

    def clear(self) -> None:
        """The model ends: nothing waits, and no runtime is seen any more."""


class Reporting:
    """One thread, from its making until `close`, that reports, and shows the runtime's figures in `mirror` if there is one.

    It is on no request's way: it has a connection of its own, and whatever goes wrong costs figures and nothing else.
    """

    def __init__(
        self,
        session: Session,
        meters: Meters,
        mirror: Mirror | None,
        *,
        pause: float = _PAUSE,
        long_pause: float = _LONG_PAUSE,
    ) -> None:
        self._session = session
        self._meters = meters
        self._mirror = mirror
        self._pause, self._long_pause = pause, long_pause
        self._link: Link | None = None
        self._connection: RuntimeConnection | None = None
        self._closed = threading.Event()
        #: what was shown last
        self._shown: Mapping[str, Any] | None = None
        if mirror is not None:
            # Before the first request: what is counted by now is not this stub's.
            self._tell()
        session.on_change = meters.some.set
        self._thread = threading.Thread(target=self._run, name="reporting", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._meters.some.set()
        self._thread.join(_GRACE)
        if self._thread.is_alive():
            return  # it holds the mirror
        self._drop()
        if self._mirror is not None:
            self._mirror.clear()

    def _run(self) -> None:
        pause = None if self._mirror is None else self._pause
        while True:
            self._meters.some.wait(pause)
            if self._closed.is_set():
                return
            changed = self._tell()
            if self._mirror is not None:
                pause = self._pause if changed else self._long_pause
            if self._closed.wait(self._pause):
                return

    def _tell(self) -> bool:
        """Report, and show; whether there was something new to be shown."""
        try:
            figures = self._report(self._meters.take())
            if self._mirror is not None:
                self._mirror.show(figures)
        except Exception:
            log.exception("what was measured cannot be reported")
            self._drop()  # an answer that was not read must not be taken for the next one
            return False
        changed, self._shown = figures != self._shown, figures
        return changed

    def _report(self, report: Report) -> dict[str, Any] | None:
        """The runtime's figures. None: it does not answer, and what was to be reported is lost."""
        link = self._session.link
        if link is not self._link:
            self._drop()
        if link is None:
            return None
        try:
            if self._connection is None:
                self._connection, self._link = self._session.open_connection(link.key), link
            self._tell_spans(self._connection)
            return self._connection.report({**report, "figures": self._mirror is not None}, _PATIENCE)
        except (TimeoutError, *UNREACHABLE) as error:
            log.info("a report is lost: %s", error)
            self._drop()
            return None

    def _tell_spans(self, connection: RuntimeConnection) -> None:
        while (told := self._meters.spans.take()) != ([], 0):
            try:
                connection.tell_spans(*told, _PATIENCE)
            except Exception:
                spans, dropped = told
                self._meters.spans.lost(len(spans) + dropped)
                raise

    def _drop(self) -> None:
        connection, self._connection, self._link = self._connection, None, None
        if connection is not None:
            connection.close()


# --- Triton's metrics ---------------------------------------------------------------------------------------
#
# Whatever Triton does not like about a metric may end the whole server (24.10): a counter that falls, a family made
# twice with another kind, two threads at once. So each call is checked before it is made, and after the first one that
# fails there is none any more. Triton never forgets a metric: counters go on with the model's next stub.


def make_mirror(pb_utils: Any, server_pid: int, model: str, version: str) -> "TritonMirror | None":
    """None where this Triton has no metrics, or they are switched off."""
    if not hasattr(pb_utils, "MetricFamily") or not _has_metrics(server_pid):
        return None
    try:
        return TritonMirror(pb_utils, {"model": model, "version": version})
    except Exception:
        log.exception("the model shows nothing in Triton's metrics")
        return None


def _has_metrics(server_pid: int) -> bool:
    """By tritonserver's command line; if that cannot be read, no: whoever asks without being sure may end the server."""
    try:
        words = Path(f"/proc/{server_pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return False
    for flag, value in zip(words, [*words[1:], ""], strict=True):
        name, _, given = flag.partition("=")
        if name == "--allow-metrics" and (given or value).lower() not in ("true", "1"):
            return False
    return True


class TritonMirror:
    """`Mirror`. Made on the thread of `initialize`, before anybody else uses it."""

    def __init__(self, pb_utils: Any, labels: Mapping[str, str]) -> None:
        family, kinds = pb_utils.MetricFamily, pb_utils.MetricFamily

        def metric(name: str, kind: Any, text: str, **more: str) -> Any:
            made = family(name=name, description=text, kind=kind)
            self._families.append(made)
            return made.Metric(labels={**labels, **more})

        #: they must live as long as their metrics
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
        #: the runtime's counts that are shown; None: none yet
        self._counted: dict[str, float] | None = None
        self._gauges: dict[int, float] = {}
        self._broken = False

    def show(self, figures: Mapping[str, Any] | None) -> None:
        if self._broken:
            return
        try:
            if figures is None:
                self._counted = {}
                self._set(self._queue_depth, 0.0)
            elif figures:
                self._count(figures)
                self._set(self._queue_depth, float(figures["queued"]))
            self._set(self._up, float(figures is not None))
        except Exception:
            self._broken = True
            log.exception("the model shows nothing in Triton's metrics any more")

    def clear(self) -> None:
        self.show(None)

    def _count(self, figures: Mapping[str, Any]) -> None:
        now = {outcome: float(figures["requests"].get(outcome, 0)) for outcome in _OUTCOMES}
        now["seconds"] = float(figures["device_seconds"])
        before, self._counted = self._counted, now
        if before is None:
            return  # what was counted before this stub, its predecessor has shown
        for name, metric in (*self._requests.items(), ("seconds", self._device_seconds)):
            # Less than before: it is another runtime, which began anew.
            more = now[name] - before.get(name, 0.0)
            more = now[name] if more < 0 else more
            if isfinite(more) and more > 0:
                metric.increment(more)

    def _set(self, gauge: Any, value: float) -> None:
        if isfinite(value) and self._gauges.get(id(gauge)) != value:
            gauge.set(value)
            self._gauges[id(gauge)] = value
