"""A model's figures in Triton's metrics: never a call that Triton might not survive."""

import math
import os
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsrv.stub.metrics import Show, TritonMirror, make_mirror

OUTCOMES = ("answered", "refused", "expired", "shed", "cancelled", "failed")


class FakeMetric:
    """Does what Triton may not survive as an assertion."""

    def __init__(self, kind: int) -> None:
        self.kind = kind
        self.value = 0.0
        self.calls = 0
        self.fails = False

    def increment(self, value: float) -> None:
        assert self.kind == FakeFamily.COUNTER
        assert value > 0
        assert math.isfinite(value)
        self._call(self.value + value)

    def set(self, value: float) -> None:
        assert self.kind == FakeFamily.GAUGE
        assert math.isfinite(value)
        self._call(value)

    def _call(self, value: float) -> None:
        self.calls += 1
        if self.fails:
            raise RuntimeError("no")
        self.value = value


class FakeFamily:
    """The metrics of one server: all models share its families and metrics."""

    COUNTER, GAUGE = 1, 2
    metrics: dict[tuple[str, frozenset[tuple[str, str]]], FakeMetric]

    def __init__(self, name: str, description: str, kind: int) -> None:
        self._name, self._kind = name, kind

    def Metric(self, labels: dict[str, str]) -> FakeMetric:
        return self.metrics.setdefault((self._name, frozenset(labels.items())), FakeMetric(self._kind))


def server() -> Any:
    """Triton's API in a new server."""

    class Family(FakeFamily):
        metrics: dict[tuple[str, frozenset[tuple[str, str]]], FakeMetric] = {}  # noqa: RUF012

    class PbUtils:
        MetricFamily = Family

    return PbUtils


def value(api: Any, name: str, **labels: str) -> float:
    found = api.MetricFamily.metrics[name, frozenset({"model": "m", "version": "1", **labels}.items())]
    return float(found.value)


def figures(answered: int, seconds: float = 0.0, queued: int = 0) -> dict[str, Any]:
    return {"queued": queued, "requests": {"answered": answered}, "device_seconds": seconds}


def shown_in(api: Any) -> Show:
    return partial(TritonMirror(api, {"model": "m", "version": "1"}).show, 0)


def test_counters_grow_by_what_is_new() -> None:
    """The stub's predecessor has shown earlier counts; another runtime counts from 0."""
    api = server()
    show = shown_in(api)
    show(figures(5, 1.0, 2))
    show(figures(7, 1.5, 3))
    assert value(api, "rsrv_requests_total", outcome="answered") == 2
    assert value(api, "rsrv_device_seconds_total") == 0.5
    assert (value(api, "rsrv_queue_depth"), value(api, "rsrv_runtime_up")) == (3, 1)

    show(None)
    assert (value(api, "rsrv_queue_depth"), value(api, "rsrv_runtime_up")) == (0, 0)
    show(figures(4))
    assert value(api, "rsrv_requests_total", outcome="answered") == 6
    show(None)
    again = shown_in(api)
    again(figures(4))
    again(figures(5))
    assert value(api, "rsrv_requests_total", outcome="answered") == 7


counts = st.integers(0, 2**53)
said = st.fixed_dictionaries(
    {
        "queued": counts,
        "requests": st.dictionaries(st.sampled_from(OUTCOMES), counts),
        "device_seconds": st.floats(),
    }
)


@given(st.lists(st.none() | said | st.just({}) | st.dictionaries(st.text(), st.text()), max_size=20))
def test_no_answer_of_the_runtime_leads_to_a_wrong_call(told: list[Any]) -> None:
    """The fake fails on what Triton might not survive."""
    api = server()
    show = shown_in(api)
    for each in told:
        show(each)
    show(None)
    assert not any(math.isnan(metric.value) for metric in api.MetricFamily.metrics.values())


def test_after_one_failure_there_is_no_further_call() -> None:
    """Any metric may be refused."""
    api = server()
    show = shown_in(api)
    show(figures(0))
    api.MetricFamily.metrics[
        "rsrv_queue_depth", frozenset({"model": "m", "version": "1"}.items())
    ].fails = True
    before = sum(metric.calls for metric in api.MetricFamily.metrics.values())

    for answered in range(3):
        show(figures(answered, queued=1 + answered))
    show(None)

    # One counter may have grown before.
    assert sum(metric.calls for metric in api.MetricFamily.metrics.values()) <= before + 2


def test_equal_figures_cost_no_call() -> None:
    """Each call takes Triton tens of microseconds."""
    api = server()
    show = shown_in(api)
    show(figures(3, queued=1))
    before = sum(metric.calls for metric in api.MetricFamily.metrics.values())
    show(figures(3, queued=1))
    assert sum(metric.calls for metric in api.MetricFamily.metrics.values()) == before


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ([], True),
        (["--allow-metrics=true"], True),
        (["--allow-metrics", "1"], True),
        (["--allow-metrics=false"], False),
        (["--allow-metrics", "0"], False),
    ],
)
def test_a_server_without_metrics_gets_none(
    arguments: list[str], shown: bool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's command line switches them off."""
    proc = tmp_path / "cmdline"
    proc.write_bytes(b"\0".join(word.encode() for word in ["tritonserver", *arguments, ""]))
    monkeypatch.setattr("rsrv.triton_command_line.Path", lambda _: proc)

    assert (make_mirror(server(), os.getpid(), "m", "1") is not None) is shown


def test_a_triton_that_knows_no_metrics_gets_none() -> None:
    """Releases before MetricFamily."""
    assert make_mirror(object(), os.getpid(), "m", "1") is None
