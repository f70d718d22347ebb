"""Metrics of the gateway for Prometheus, and the merging of all workers' metrics into one text. Pure.

In the merged text, each family has one HELP and one TYPE, and its samples follow each other. Every line that is not exactly in
the text format is left out, so that no worker can spoil the scrape of all workers. A regular expression checks a sample in about
3 us; prometheus_client's parser would take 22 us.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from rsrv.placement.contract import WorkerView
from rsrv.placement.status import PlannerStatus, Repacks
from rsrv.renewal import FileState
from rsrv_gateway.traffic import DURATION_BOUNDS, TrafficCounts

#: Seconds for which the metrics show a departed worker, so that several scrapes get its last counters.
_DEPARTED_SHOWN_S = 600.0


class DepartedWorkers:
    """Hides the counters of workers that departed a while ago. If a worker returns, its old counters appear again."""

    def __init__(self) -> None:
        #: Time at which each worker was last present.
        self._there: dict[str, float] = {}

    def without(self, counts: TrafficCounts, there: Iterable[str], now: float) -> TrafficCounts:
        """Return `counts` without the workers that left more than `_DEPARTED_SHOWN_S` before `now`, in seconds.

        `there` are the current workers.
        """
        self._there.update(dict.fromkeys(there, now))

        def shown(worker: str) -> bool:
            return not worker or now - self._there.setdefault(worker, now) <= _DEPARTED_SHOWN_S

        return replace(
            counts,
            requests={key: count for key, count in counts.requests.items() if shown(key[1])},
            load={name: load for name, load in counts.load.items() if shown(name)},
            outstanding={key: count for key, count in counts.outstanding.items() if shown(key[1])},
            failovers={name: count for name, count in counts.failovers.items() if shown(name)},
        )


def expose(
    counts: TrafficCounts,
    views: Mapping[str, WorkerView],
    status: PlannerStatus | None,
    scraped: Mapping[str, bool],
    files: Iterable[FileState] = (),
) -> str:
    """Return the gateway's metrics.

    `scraped` has for each worker whether its scrape succeeded. `files` are the states of the files with certificates and tokens.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(
        _Families([*_traffic(counts), *_workers(views, scraped), *_files(files), *_plan(status)])
    )
    return generate_latest(registry).decode()


def table() -> str:
    """Return the gateway's own metrics as a table in Markdown. The end of a name shows its type."""
    plan = PlannerStatus("lpt_packing", 0, (), (), Repacks({}, None, None, 0, 0, 0, 0.0, 1.0, 0), ())
    lines = ["| metric{labels} | meaning |", "|---|---|"]
    for family in (*_traffic(TrafficCounts()), *_workers({}, {}), *_files(()), *_plan(plan)):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        # The library has no public name for a family's labels.
        labels = ",".join(vars(family)["_labelnames"])
        lines.append(f"| `{name}{f'{{{labels}}}' if labels else ''}` | {family.documentation} |")
    return "\n".join(lines)


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _traffic(counts: TrafficCounts) -> Iterator[Metric]:
    yield _counter(
        "rsrv_gateway_requests",
        "Ended inference requests. model is empty if the client named an unknown model or was not authorized; worker "
        "is empty if no worker got the request.",
        ("model", "worker", "code"),
        counts.requests,
    )
    yield _counter("rsrv_gateway_items", "Rows of requests that were forwarded.", ("model",), counts.items)
    yield _counter(
        "rsrv_gateway_failovers",
        "Requests that were sent to another worker because this worker had failed.",
        ("worker",),
        counts.failovers,
    )
    yield _gauge(
        "rsrv_gateway_worker_load",
        "Outstanding work, in the unit of work_basis.",
        ("worker",),
        counts.load,
    )
    yield _gauge(
        "rsrv_gateway_outstanding_requests",
        "Forwarded requests without an answer yet.",
        ("model", "worker"),
        counts.outstanding,
    )
    durations = HistogramMetricFamily(
        "rsrv_gateway_request_duration_seconds",
        "Time from a request's arrival to the end of its answer.",
        labels=("model",),
    )
    bounds = [*map(str, DURATION_BOUNDS), "+Inf"]
    for model, histogram in sorted(counts.durations.items()):
        durations.add_metric(
            (model,), list(zip(bounds, accumulate(histogram.counts), strict=True)), histogram.sum
        )
    yield durations


def _workers(views: Mapping[str, WorkerView], scraped: Mapping[str, bool]) -> Iterator[Metric]:
    up = sum(view.alive for view in views.values())
    # Yield this metric even without workers, because alerts need it.
    yield _gauge(
        "rsrv_gateway_workers",
        "Known workers: up answered their last probe, down did not.",
        ("state",),
        {"up": up, "down": len(views) - up},
    )
    yield _gauge(
        "rsrv_gateway_worker_up",
        "1 if the worker answered its last probe.",
        ("worker",),
        {name: float(view.alive) for name, view in views.items()},
    )
    yield _gauge(
        "rsrv_gateway_worker_backlog_seconds",
        "Device time of all requests that the worker has.",
        ("worker",),
        {name: view.backlog_s for name, view in views.items() if view.instance is not None},
    )
    yield _gauge(
        "rsrv_gateway_worker_metrics_up",
        "1 if this text has the worker's own metrics.",
        ("worker",),
        {name: float(there) for name, there in scraped.items()},
    )


def _files(states: Iterable[FileState]) -> Iterator[Metric]:
    files = list(states)
    yield _gauge(
        "rsrv_gateway_certificate_end_timestamp_seconds",
        "Unix time at which the certificate in use ends.",
        ("setting",),
        {file.setting: file.ends_at for file in files if file.ends_at is not None},
    )
    yield _gauge(
        "rsrv_gateway_renewal_failed",
        "1 if the current files cannot be used. The last good files stay in use.",
        ("setting",),
        {file.setting: float(bool(file.problem)) for file in files},
    )


def _plan(status: PlannerStatus | None) -> Iterator[Metric]:
    if status is None or status.mode != "lpt_packing":
        return
    models, repacks = status.models, status.repacks
    yield _gauge(
        "rsrv_gateway_model_placed",
        "1 if requests of the model go to the worker.",
        ("model", "worker"),
        {(model.name, worker): 1.0 for model in models for worker in model.placed},
    )
    yield _gauge(
        "rsrv_gateway_model_utilisation",
        "Device seconds of the model per second, all workers together.",
        ("model",),
        {model.name: model.utilisation for model in models},
    )
    yield _gauge(
        "rsrv_gateway_worker_utilisation",
        "Device seconds per second of all models on the worker.",
        ("worker",),
        {worker.name: worker.utilisation for worker in status.workers},
    )
    yield _gauge(
        "rsrv_gateway_worker_oversubscribed",
        "1 if the weights of all models on the worker do not fit at once.",
        ("worker",),
        {worker.name: float(worker.oversubscribed) for worker in status.workers},
    )
    yield _counter(
        "rsrv_gateway_repacks",
        "Repacks of models, by trigger.",
        ("trigger",),
        repacks.counts,
    )
    yield _gauge(
        "rsrv_gateway_repack_progress_ratio",
        "Progress towards the next repack, measured in device seconds: 1 if the repack is due.",
        (),
        {(): repacks.device_s / repacks.threshold_device_s},
    )


def _filled(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
    name: str,
    help: str,
    labels: tuple[str, ...],
    values: Mapping[Any, float],
) -> Metric:
    """Return a family with samples. A key of `values` is the value of the only label, or a tuple with a value for each label."""
    family = kind(name, help, labels=labels)
    for key, value in sorted(values.items()):
        family.add_metric(key if isinstance(key, tuple) else (key,), value)
    return family


_counter, _gauge = partial(_filled, CounterMetricFamily), partial(_filled, GaugeMetricFamily)

#: Suffixes of samples whose family has the name without the suffix.
_SUFFIXES = ("_bucket", "_count", "_sum", "_total", "_created")
# Possessive quantifiers (`*+`) avoid quadratic time on long lines.
_NAME: Final = r"[a-zA-Z_:][a-zA-Z0-9_:]*+"
# Labels that begin with two underscores are reserved by Prometheus.
_LABEL: Final = r'((?!__)[a-zA-Z_][a-zA-Z0-9_]*+)="[^"\\\n\0]*+(?:\\[\\"n][^"\\\n\0]*+)*+"'
_LABELS: Final = rf"{_LABEL}(?:[ \t]*+,[ \t]*+{_LABEL})*+"
_VALUE: Final = r"[+-]?(?:[0-9]++\.?[0-9]*+|\.[0-9]++)(?:[eE][+-]?[0-9]++)?|[+-]?[Ii]nf|NaN|nan"
_TYPE: Final = r"(?:counter|gauge|histogram|summary|untyped)"
_HEAD = re.compile(rf"#[ \t]++(?:HELP[ \t]++({_NAME})(?:[ \t][^\0]*+)?|TYPE[ \t]++({_NAME})[ \t]++{_TYPE})")
_SAMPLE = re.compile(
    rf"(?P<name>{_NAME})(?:[ \t]*+\{{[ \t]*+(?P<labels>{_LABELS})?[ \t]*+(?:,[ \t]*+)?\}}|[ \t])"
    rf"[ \t]*+(?P<value>{_VALUE})(?:[ \t]++(?P<at>-?[0-9]{{1,18}}))?"
)
_SINGLE_LABEL = re.compile(_LABEL)


class _MergedFamily:
    def __init__(self) -> None:
        self.head: dict[str, str] = {}
        self.samples: list[str] = []


def merge(own: str, workers: Iterable[tuple[str, str]]) -> str:
    """Merge the gateway's metrics with those of the workers, whose samples get a label `worker`.

    Lines that are not in Prometheus' text format are left out. If a family has several HELPs or TYPEs, the first one is used.
    """
    families: dict[str, _MergedFamily] = {}
    _take(families, own, "")
    for name, text in workers:
        _take(families, text, f'worker="{_escaped(name)}"')
    lines: list[str] = []
    for family in families.values():
        if family.samples:
            lines += family.head.values()
            lines += family.samples
    return "\n".join(lines) + "\n" if lines else ""


def _take(families: dict[str, _MergedFamily], text: str, label: str) -> None:
    # Split only at "\n", because other line breaks may occur in a label's value.
    for line in map(str.strip, text.split("\n")):
        if line.startswith("#"):
            if head := _HEAD.fullmatch(line):
                family = families.setdefault(head[1] or head[2], _MergedFamily())
                family.head.setdefault("TYPE" if head[1] is None else "HELP", line)
        elif match := _SAMPLE.fullmatch(line):
            labels = match["labels"] or ""
            names = _SINGLE_LABEL.findall(labels)
            if label:
                if "worker" in names:
                    # Rename the worker's own label. Prometheus renames labels in the same way when it adds a label of this name.
                    names.append("exported_worker")
                    labels = _SINGLE_LABEL.sub(
                        lambda label: f"exported_{label[0]}" if label[1] == "worker" else label[0], labels
                    )
                labels = f"{label},{labels}" if labels else label
            if len({*names}) < len(names):
                continue
            name, value, at = match["name"], match["value"], match["at"]
            sample = f"{name}{{{labels}}} {value}" if labels else f"{name} {value}"
            family = families.setdefault(_family(families, name), _MergedFamily())
            family.samples.append(sample if at is None else f"{sample} {at}")


def _family(families: dict[str, _MergedFamily], sample: str) -> str:
    if sample not in families:
        for suffix in _SUFFIXES:
            if sample.endswith(suffix) and sample.removesuffix(suffix) in families:
                return sample.removesuffix(suffix)
    return sample


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


if __name__ == "__main__":
    print(table())
