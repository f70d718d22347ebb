"""The checker of queries, on which the other tests rely."""

from __future__ import annotations

import pytest

from panels import MIRRORED
from tests.unit.dashboards.promql import labels, mirrored, served


def test_what_triton_shows_as_well_is_known() -> None:
    """Exactly the metrics that a stub mirrors on Triton's page, with a version, are known as mirrored."""
    assert mirrored().keys() == MIRRORED
    assert all("version" in there for there in mirrored().values())
    assert mirrored().keys() <= served().keys()


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ('rsrv_queue_depth{version=""}', {"model", "worker", "instance"}),
        ("sum by (worker) (rate(rsrv_rows_total[5m]))", {"worker"}),
        ("topk(3, sum by (model) (rsrv_meta_runs))", {"model"}),
        (
            "histogram_quantile(0.5, sum by (le, model) (rate(rsrv_execute_seconds_bucket[5m]))) or vector(0)",
            {"model"},
        ),
        ("absent(rsrv_build_info)", set()),
        ("rsrv_gateway_worker_up == 0 and on (worker) rsrv_gateway_worker_metrics_up == 1", {"worker"}),
    ],
)
def test_what_a_query_answers_has_these_labels(query: str, found: set[str]) -> None:
    """The labels of a query's result include the expected ones."""
    assert found <= labels(query)
    assert "le" not in labels(query)


@pytest.mark.parametrize(
    "query",
    [
        "rsrv_queue_deep",
        "rate(rsrv_rows_total[5m]",
        "rate(rsrv_rows_total)",
        'rsrv_rows_total{modell="m"}',
        "rsrv_execute_seconds",
        "sum by (reason) (rsrv_rows_total)",
        "rsrv_rows_total / on (stage) rsrv_executions_total",
        "histogram_quantile(0.5, sum by (model) (rate(rsrv_execute_seconds_bucket[5m])))",
        "sum(rsrv_queue_depth)",
        'sum(rsrv_queue_depth{version!=""})',
        "sum by (model) (rsrv_rows_total) / sum by (worker) (rsrv_executions_total)",
        'rsrv_requests_total{version="",outcome="done"}',
        'rsrv_responses_total{status=~"ok|fine"}',
        "nv_inference_count",
    ],
)
def test_queries_for_unknown_metrics_are_refused(query: str) -> None:
    """A query with an unknown name, label, value or bucket, a doubled metric or wrong syntax is refused."""
    with pytest.raises(ValueError):  # noqa: PT011
        labels(query)
