"""Check PromQL queries against the metrics that rsrv serves."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import promql_parser
from prometheus_client.parser import text_string_to_metric_families

from rsrv.control.metric_catalog import FAMILIES
from rsrv.histogram import Histogram
from rsrv.placement.contract import WorkerView
from rsrv.placement.status import ModelStatus, PlannerStatus, Repacks, WorkerStatus
from rsrv.renewal import FileState
from rsrv.wire.frames import Status
from rsrv_gateway.metrics import expose
from rsrv_gateway.traffic import DURATION_BOUNDS, TrafficCounts

#: Labels that Prometheus adds to every sample, including the labels that it adds in Kubernetes.
TARGET = {"instance", "job", "namespace", "pod", "app_kubernetes_io_instance"}


def labels(query: str) -> set[str]:
    """Return the labels that the result of a query may have.

    Raises ValueError if the text is not a query, or uses an unknown metric or label.
    """
    return _labels(promql_parser.parse(query))


@cache
def served() -> Mapping[str, frozenset[str]]:
    """Return the labels of each sample by its name."""
    # Prometheus adds this metric to each target.
    samples: dict[str, frozenset[str]] = {"up": frozenset()}
    for family in FAMILIES:
        # A gateway adds the label `worker` to the samples of servers.
        own = {*family.labels, "worker"}
        if family.kind == "histogram":
            samples[f"{family.name}_bucket"] = frozenset(own | {"le"})
            samples[f"{family.name}_sum"] = samples[f"{family.name}_count"] = frozenset(own)
        else:
            samples[family.name] = frozenset(own)
    return {**samples, **dict(_of_a_gateway())}


def _of_a_gateway() -> Iterator[tuple[str, frozenset[str]]]:
    """Yield each sample of a gateway with its labels. The gateway has a value for each metric."""
    counts = TrafficCounts(
        requests={("m", "w", "OK"): 1},
        items={"m": 1},
        load={"w": 1.0},
        outstanding={("m", "w"): 1},
        failovers={"w": 1},
        durations={"m": Histogram(DURATION_BOUNDS, [1] * (len(DURATION_BOUNDS) + 1), 1.0)},
    )
    model = ModelStatus("m", ("w",), ("w",), (), (), 1, 1, 0.5, 1.0, 0.1, 10, "", 1, "least")
    worker = WorkerStatus("w", True, 1, 0.5, 0.5, 10, 20, False, 0.0)
    repacks = Repacks({"start": 1}, "start", 0.0, 1, 1, 0, 1.0, 2.0, 0)
    status = PlannerStatus("lpt_packing", 1, (model,), (worker,), repacks, ())
    files = [FileState("gateway.tls_certificate", 1.0, "")]
    text = expose(counts, {"w": WorkerView(True, instance="i")}, status, {"w": True}, files)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            yield sample.name, frozenset(sample.labels)


def _is_scalar(node: Any) -> bool:
    """Return whether a node of a query is a number or the time of the evaluation."""
    return isinstance(node, promql_parser.NumberLiteral) or str(node) == "time()"


def _labels(node: Any) -> set[str]:
    match node:
        case promql_parser.VectorSelector():
            return _selected(node)
        case promql_parser.MatrixSelector():
            return _selected(node.vector_selector)
        case promql_parser.ParenExpr() | promql_parser.UnaryExpr() | promql_parser.SubqueryExpr():
            return _labels(node.expr)
        case promql_parser.BinaryExpr():
            left, right = _labels(node.lhs), _labels(node.rhs)
            matching = None if node.modifier is None else node.modifier.matching
            if matching is not None:
                _require(set(matching.labels) <= left | right, f"matched by a label of neither: {node}")
            elif not _is_scalar(node.rhs) and str(node.op) != "or":
                _require(left == right, f"never match, for their labels differ: {node}")
            return left | right
        case promql_parser.AggregateExpr():
            inner = _labels(node.expr)
            if str(node.op) in ("topk", "bottomk"):
                return inner
            if node.modifier is None:
                return set()
            named = set(node.modifier.labels)
            _require(named <= inner, f"{named - inner}: a label that is not there")
            return named if node.modifier.type == promql_parser.AggModifierType.By else inner - named
        case promql_parser.Call():
            inner = set().union(*map(_labels, node.args))
            if node.func.name == "histogram_quantile":
                _require("le" in inner, "a quantile of what has no buckets")
                return inner - {"le"}
            return inner
        case promql_parser.NumberLiteral() | promql_parser.StringLiteral():
            return set()
        case _:
            raise ValueError(f"a kind of expression that this does not know: {node}")


def _selected(selector: Any) -> set[str]:
    name = selector.name
    _require(name in served(), f"no metric is called {name}")
    there = served()[name] | TARGET
    matchers = selector.matchers.matchers
    filters = {matcher.name: matcher.value for matcher in matchers}
    _require(filters.keys() <= there, f"{name} has no label {filters.keys() - there}")
    for label, value in filters.items():
        known = _values(name, label)
        if known is not None and "$" not in value:
            _require(set(value.split("|")) <= known, f"{name} has no {label} {value}")
    return set(there)


def _values(name: str, label: str) -> set[str] | None:
    """Return the values that the label may have, or None for any value."""
    if label == "status":
        return {status.name.lower() for status in Status}
    family = next(
        (
            candidate
            for candidate in FAMILIES
            if re.fullmatch(rf"{candidate.name}(_bucket|_sum|_count)?", name)
        ),
        None,
    )
    if family is None or label == "model" or label not in family.labels:
        return None
    # The help text of a metric lists all values of its label.
    return set(re.findall(r"\w+", family.help))


def _require(true: bool, else_: str) -> None:
    if not true:
        raise ValueError(else_)
