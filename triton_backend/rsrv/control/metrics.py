"""The text for Prometheus. It has the figures of the runtimes and of the control process."""

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import rsrv
from rsrv.control.diagnosis import Diagnosis
from rsrv.control.findings import ServerFinding
from rsrv.control.grpc_service import StatusError
from rsrv.control.metric_catalog import FAMILIES
from rsrv.control.overview import states_of_models
from rsrv.control.reconciler import Reconciler
from rsrv.control.records import RuntimeRecords, starting
from rsrv.control.runtimes import Runtimes
from rsrv.control.v1 import control_pb2 as pb
from rsrv.histogram import LONG_SECONDS, PADDING, ROWS, SECONDS, Histogram

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """The figures that come from the control process and not from a runtime."""

    #: Number of times that the runtime of each device was replaced, by the number of the device.
    restarts: Mapping[int, int]
    #: Names of models with a version that has not failed.
    models: Collection[str]
    #: Names of models that differ from their bundles.
    failed: Collection[str]
    version: str
    #: Number of spans of traces by outcome. Empty if traces are off.
    spans: Mapping[str, int]
    #: Numbers of the devices that sleep.
    asleep: Collection[int] = ()
    #: Number of models by their state, in the words of docs/operating.md.
    states: Mapping[str, int] = field(default_factory=dict)
    findings: Collection[ServerFinding] = ()


class Metrics:
    """Makes the text for Prometheus. Concurrent requests get the same text."""

    def __init__(
        self,
        runtimes: Runtimes,
        lifecycle: Reconciler,
        diagnosis: Diagnosis,
        spans: Mapping[str, int],
    ) -> None:
        """Make the metrics of a server. `spans` is as in `ServerFacts`. The exporter of traces updates this mapping."""
        self._runtimes = runtimes
        self._lifecycle = lifecycle
        self._diagnosis = diagnosis
        self._spans = spans
        self._running: asyncio.Task[str] | None = None

    async def text(self) -> str:
        """Return the text in Prometheus' format. Without a runtime, it has only the figures of the control process."""
        if self._running is None:
            self._running = asyncio.create_task(self._make())
            self._running.add_done_callback(self._made)
        # Shield the task, so that a cancelled request does not cancel it for the other requests.
        return await asyncio.shield(self._running)

    def _made(self, _: asyncio.Task[str]) -> None:
        self._running = None

    async def _make(self) -> str:
        runtimes = self._runtimes
        records: dict[int, RuntimeRecords] = {}
        try:
            records = await runtimes.records()
        except StatusError as error:
            log.error("no runtime returns its figures: %s", error)
        entries = runtimes.entries.values() if runtimes.up or runtimes.asleep else ()
        failed = frozenset(self._lifecycle.failures)
        states = states_of_models(
            *(entries, failed, runtimes.cold, starting(records.values())),
            aliases=self._lifecycle.aliases.keys(),
            asleep=runtimes.asleep,
        )
        server = ServerFacts(
            restarts={number: max(0, link.state.lives - 1) for number, link in enumerate(runtimes.links)},
            models=frozenset(entry["name"] for entry in entries if entry["state"] != "failed"),
            failed=failed,
            version=rsrv.__version__,
            spans=dict(self._spans),
            asleep=frozenset(n for n, link in enumerate(runtimes.links) if link.asleep_since is not None),
            states=Counter(state.partition(",")[0] for state in states.values()),
            findings=self._diagnosis.findings,
        )
        # Use a thread, because with hundreds of models this takes longer than a health probe should wait.
        return await asyncio.to_thread(expose, records, server)


def expose(records: Mapping[int, RuntimeRecords], server: ServerFacts) -> str:
    """Return the page of metrics. `records` has the records of the runtimes that answer, by device."""
    # With several devices, leave out empty histograms, because most models are in use on only some of the devices.
    page = _Exposition(sparse=len(records) > 1)
    for number, record in records.items():
        _put_device(page, str(number), record.device)
        for name, model in record.models.items():
            _put_common(page, (name, str(number)), model)
            (_put_meta if model.meta else _put_model)(page, (name, str(number)), model)
    for name in {*server.models, *server.failed}:
        page.put("rsrv_reload_failed", (name,), float(name in server.failed))
    page.put_each("rsrv_models", (), server.states)
    for number, restarts in server.restarts.items():
        page.put("rsrv_runtime_up", (str(number),), float(number in records or number in server.asleep))
        page.put("rsrv_runtime_restarts_total", (str(number),), restarts)
    for (name, severity), count in Counter(
        (finding.name, finding.severity) for finding in server.findings
    ).items():
        page.put("rsrv_findings", (name, severity), count)
    page.put_each("rsrv_trace_spans_total", (), server.spans)
    page.put("rsrv_build_info", (server.version,), 1.0)
    return page.text()


def _put_device(page: "_Exposition", number: str, device: pb.DeviceRecord) -> None:
    memory = device.memory
    for tier, weights in (("host", device.host), ("device", memory)):
        page.put("rsrv_weight_bytes", (number, tier, "logical"), weights.logical_bytes)
        page.put("rsrv_weight_bytes", (number, tier, "physical"), weights.physical_bytes)
    kinds = {
        kind: getattr(memory, f"{kind}_bytes")
        for kind in ("limit", "budget")
        if memory.HasField(f"{kind}_bytes")
    }
    kinds |= {"pinned": memory.pinned_bytes, "held": memory.held_bytes}
    kinds |= {"scratch": device.scratch_bytes, "kept": device.kept_bytes}
    page.put_each("rsrv_device_memory_bytes", (number,), kinds)
    page.measure("rsrv_compile_seconds", (number,), LONG_SECONDS, device.compile)
    sources = {"compiled": device.compiled, "cache": device.from_cache, "shared": device.shared_executables}
    page.put_each("rsrv_executables_total", (number,), sources)
    page.put("rsrv_loop_bans_total", (number,), device.loop_bans)


def _put_common(page: "_Exposition", where: tuple[str, str], model: pb.ModelRecord) -> None:
    """Add the metrics that models and meta models have in common. `where` has the labels model and device."""
    page.put_each("rsrv_requests_total", where, model.outcomes)
    page.put_each("rsrv_responses_total", where, model.responses)
    page.put_each("rsrv_refused_total", where, model.refused)
    page.put_each("rsrv_deadline_missed_total", where, model.missed)
    page.measure("rsrv_request_seconds", where, SECONDS, model.request)
    page.put("rsrv_queue_depth", where, model.queued)
    page.put("rsrv_device_seconds_total", where, model.device_seconds)
    for hook, seconds in model.hooks.items():
        page.measure("rsrv_hook_seconds", (*where, hook), SECONDS, seconds)


def _put_meta(page: "_Exposition", where: tuple[str, str], meta: pb.ModelRecord) -> None:
    page.put("rsrv_meta_runs", where, meta.executing)
    page.put("rsrv_meta_calls_total", where, meta.calls)


def _put_model(page: "_Exposition", where: tuple[str, str], model: pb.ModelRecord) -> None:
    page.measure("rsrv_queue_wait_seconds", where, SECONDS, model.queue_wait)
    page.put("rsrv_executions_total", where, model.dispatches)
    page.measure("rsrv_execute_seconds", where, SECONDS, model.execute)
    page.measure("rsrv_batch_rows", where, ROWS, model.batch_rows)
    page.put("rsrv_rows_total", where, model.useful_rows)
    page.measure("rsrv_batch_padding_rows", where, PADDING, model.batch_padding)
    page.put("rsrv_padded_rows_total", where, model.padded_rows)
    page.put("rsrv_model_resident", where, float(model.weights == pb.WEIGHTS_RESIDENT))
    page.put("rsrv_model_weight_bytes", (*where, "host"), model.host_bytes)
    on_device = 0 if model.weights == pb.WEIGHTS_ABSENT else model.device_bytes
    page.put("rsrv_model_weight_bytes", (*where, "device"), on_device)
    page.measure("rsrv_weight_load_seconds", where, SECONDS, model.load)
    page.put("rsrv_weight_loads_total", where, model.loads)
    page.put_each("rsrv_weight_evictions_total", where, model.evictions)
    page.put("rsrv_weight_misses_total", where, model.misses)
    for alias, responses in model.aliases.items():
        page.put_each("rsrv_alias_responses_total", (alias, *where), responses.counts)
    for alias, outcomes in model.shadows.items():
        page.put_each("rsrv_alias_shadows_total", (alias, *where), outcomes.counts)
    page.put_each("rsrv_sequences", where, model.sequences)
    if model.tokens:
        page.put("rsrv_generations", where, model.generations)
        page.put_each("rsrv_tokens_total", where, model.tokens)
        page.measure("rsrv_first_token_seconds", where, SECONDS, model.first_token)
        page.measure("rsrv_token_seconds", where, SECONDS, model.between_tokens)


class _Exposition:
    """Writer of Prometheus' text format. With hundreds of models, Prometheus' own library takes six times as long."""

    def __init__(self, *, sparse: bool) -> None:
        """If `sparse` is True, leave out histograms without values."""
        self._sparse = sparse
        self._lines: dict[str, list[str]] = {family.name: [] for family in FAMILIES}

    def put(self, family: str, labels: Sequence[str], value: float) -> None:
        self._lines[family].append(f"{family}{_braced(family, labels)} {value!r}\n")

    def put_each(self, family: str, labels: Sequence[str], values: Mapping[str, float]) -> None:
        """Add a sample for each key of `values`. The key is the last label."""
        for key, value in values.items():
            self.put(family, (*labels, key), value)

    def measure(
        self, family: str, labels: Sequence[str], bounds: Sequence[float], message: pb.Histogram
    ) -> None:
        """Add a histogram."""
        histogram, lines = Histogram.of(bounds, message), self._lines[family]
        if self._sparse and not any(histogram.counts):
            return
        inside = _labelled(family, labels)
        start = f'{family}_bucket{{{inside}{"," if inside else ""}le="'
        count = 0
        for bound, more in zip((*map(repr, bounds), "+Inf"), histogram.counts, strict=True):
            count += more
            lines.append(f'{start}{bound}"}} {count}\n')
        braced = f"{{{inside}}}" if inside else ""
        lines.append(f"{family}_sum{braced} {histogram.sum!r}\n{family}_count{braced} {count}\n")

    def text(self) -> str:
        """Return the text, without families that have no samples."""
        parts: list[str] = []
        for family in FAMILIES:
            if lines := self._lines[family.name]:
                parts += f"# HELP {family.name} {family.help}\n# TYPE {family.name} {family.kind}\n", *lines
        return "".join(parts)


_LABELS = {family.name: family.labels for family in FAMILIES}
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def _labelled(family: str, values: Sequence[str]) -> str:
    return ",".join(
        [f'{key}="{value.translate(_ESCAPES)}"' for key, value in zip(_LABELS[family], values, strict=True)]
    )


def _braced(family: str, values: Sequence[str]) -> str:
    return f"{{{_labelled(family, values)}}}" if values else ""
