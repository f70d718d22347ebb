"""A model's figures in Triton's own metrics.

Whatever Triton does not like about a metric may end the whole server (24.10): a counter that falls, a family made twice
with another kind, two threads at once. So each call is checked before it is made, and after the first one that fails
there is none any more. Triton never forgets a metric: counters go on with the model's next stub.
"""

import logging
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any

log = logging.getLogger("rsrv.stub")

_OUTCOMES = ("answered", "refused", "expired", "shed", "cancelled", "failed")


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
