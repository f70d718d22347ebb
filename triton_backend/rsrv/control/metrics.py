"""The text for Prometheus: the runtimes' figures, and those of the control process."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import rsrv
from rsrv.control.findings import ServerFinding
from rsrv.control.grpc_service import StatusError
from rsrv.control.metric_catalog import FAMILIES
from rsrv.control.runtimes import Answers, Runtimes
from rsrv.histogram import LONG_SECONDS, PADDING, ROWS, SECONDS, Histogram

log = logging.getLogger("rsrv.control")


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """The figures that the control process has without the runtime."""

    #: Runtimes after the first one, by the number of their device.
    restarts: Mapping[int, int]
    #: Names of models, and of the models that are not as their bundles say.
    models: Collection[str]
    failed: Collection[str]
    version: str
    #: Spans of traces by outcome; empty if traces are off.
    spans: Mapping[str, int]
    #: Numbers of the devices that sleep.
    asleep: Collection[int] = ()
    #: Number of the models that no runtime has until a request comes.
    cold: int = 0
    findings: Collection[ServerFinding] = ()


class Metrics:
    """Makes the text; simultaneous requests get the same one."""

    def __init__(
        self,
        runtimes: Runtimes,
        failed: Callable[[], Collection[str]],
        spans: Mapping[str, int],
        findings: Callable[[], Collection[ServerFinding]],
    ) -> None:
        """`failed`: names of models that are not as their bundles say; `spans`: as in `ServerFacts`, read for each text."""
        self._runtimes = runtimes
        self._failed = failed
        self._findings = findings
        self._spans = spans
        self._version = rsrv.__version__
        self._running: asyncio.Task[str] | None = None

    async def text(self) -> str:
        """Return the text in Prometheus' format, also without a runtime."""
        if self._running is None:
            self._running = asyncio.create_task(self._make())
            self._running.add_done_callback(self._made)
        # A request that is cancelled does not cancel the others.
        return await asyncio.shield(self._running)

    def _made(self, _: asyncio.Task[str]) -> None:
        self._running = None

    async def _make(self) -> str:
        runtimes = self._runtimes
        said: Answers = {}
        try:
            if not runtimes.asleep:
                said, _ = await runtimes.metrics()
        except StatusError as error:
            log.error("no runtime returns its figures: %s", error)
        entries = runtimes.entries.values() if runtimes.up else ()
        server = ServerFacts(
            restarts={number: max(0, link.lives - 1) for number, link in enumerate(runtimes.links)},
            models=frozenset(entry["name"] for entry in entries if entry["state"] != "failed"),
            failed=frozenset(self._failed()),
            version=self._version,
            spans=dict(self._spans),
            asleep=frozenset(n for n, link in enumerate(runtimes.links) if link.asleep_since is not None),
            cold=len(runtimes.cold),
            findings=self._findings(),
        )
        # With hundreds of models, it takes longer than a probe should wait.
        return await asyncio.to_thread(expose, said, server)


def expose(said: Mapping[int, Mapping[str, Any]], server: ServerFacts) -> str:
    """Return the text. `said`: answers to the command `metrics` (docs/protocol.md), of the devices whose runtimes answer."""
    # Most models are in use on some of the devices only.
    page = _Exposition(sparse=len(said) > 1)
    for number, one in said.items():
        _put_device(page, str(number), one)
    for name in {*server.models, *server.failed}:
        page.put("rsrv_reload_failed", (name,), float(name in server.failed))
    page.put("rsrv_cold_models", (), server.cold)
    for number, restarts in server.restarts.items():
        page.put("rsrv_runtime_up", (str(number),), float(number in said or number in server.asleep))
        page.put("rsrv_runtime_restarts_total", (str(number),), restarts)
    for (name, severity), count in Counter((one.name, one.severity) for one in server.findings).items():
        page.put("rsrv_findings", (name, severity), count)
    page.put_each("rsrv_trace_spans_total", (), server.spans)
    page.put("rsrv_build_info", (server.version,), 1.0)
    return page.text()


def _put_device(page: "_Exposition", device: str, said: Mapping[str, Any]) -> None:
    for name, model in said["models"].items():
        _put_model(page, (name, device), model)
    for name, meta in said["metas"].items():
        _put_common(page, (name, device), meta)
        page.put("rsrv_meta_runs", (name, device), meta["running"])
        page.put("rsrv_meta_calls_total", (name, device), meta["calls"])
    _put_memory(page, device, said["memory"])
    page.measure("rsrv_compile_seconds", (device,), LONG_SECONDS, said["compile"])
    page.put_each("rsrv_executables_total", (device,), said["executables"])
    page.put("rsrv_loop_bans_total", (device,), said["loop_bans"])


def _put_common(page: "_Exposition", where: tuple[str, str], model: Mapping[str, Any]) -> None:
    """Add the metrics of both models and meta models. `where`: name and device."""
    page.put_each("rsrv_requests_total", where, model["requests"])
    page.put_each("rsrv_responses_total", where, model["responses"])
    page.put_each("rsrv_refused_total", where, model["refused"])
    page.put_each("rsrv_deadline_missed_total", where, model["missed"])
    page.measure("rsrv_request_seconds", where, SECONDS, model["request"])
    page.put("rsrv_queue_depth", where, model["queued"])
    page.put("rsrv_device_seconds_total", where, model["device_seconds"])
    for hook, seconds in model["hooks"].items():
        page.measure("rsrv_hook_seconds", (*where, hook), SECONDS, seconds)


def _put_model(page: "_Exposition", where: tuple[str, str], model: Mapping[str, Any]) -> None:
    _put_common(page, where, model)
    page.measure("rsrv_queue_wait_seconds", where, SECONDS, model["queue_wait"])
    page.put("rsrv_executions_total", where, model["executions"])
    page.measure("rsrv_execute_seconds", where, SECONDS, model["execute"])
    page.measure("rsrv_batch_rows", where, ROWS, model["batch_rows"])
    page.put("rsrv_rows_total", where, model["rows"])
    page.measure("rsrv_batch_padding_rows", where, PADDING, model["batch_padding"])
    page.put("rsrv_padded_rows_total", where, model["batch_padding"][0])
    page.put("rsrv_model_resident", where, float(model["resident"]))
    page.put("rsrv_model_weight_bytes", (*where, "host"), model["host_bytes"])
    page.put("rsrv_model_weight_bytes", (*where, "device"), model["device_bytes"])
    loads = page.measure("rsrv_weight_load_seconds", where, SECONDS, model["load"])
    page.put("rsrv_weight_loads_total", where, loads)
    page.put_each("rsrv_weight_evictions_total", where, model["evictions"])
    page.put("rsrv_weight_misses_total", where, model["misses"])
    for alias, responses in model.get("aliases", {}).items():
        page.put_each("rsrv_alias_responses_total", (alias, *where), responses)
    for alias, outcomes in model.get("shadows", {}).items():
        page.put_each("rsrv_alias_shadows_total", (alias, *where), outcomes)
    page.put_each("rsrv_sequences", where, model.get("sequences", {}))
    if generations := model.get("generations"):
        page.put("rsrv_generations", where, generations["active"])
        page.put_each("rsrv_tokens_total", where, generations["tokens"])
        page.measure("rsrv_first_token_seconds", where, SECONDS, generations["first"])
        page.measure("rsrv_token_seconds", where, SECONDS, generations["between"])


def _put_memory(page: "_Exposition", number: str, memory: Mapping[str, Any]) -> None:
    for tier in ("host", "device"):
        for kind in ("logical", "physical"):
            page.put("rsrv_weight_bytes", (number, tier, kind), memory[tier][f"{kind}_bytes"])
    device = memory["device"]
    kinds = {kind: device[f"{kind}_bytes"] for kind in ("limit", "budget", "pinned", "held")}
    kinds |= {"scratch": memory["scratch_bytes"], "kept": memory["kept_bytes"]}
    page.put_each("rsrv_device_memory_bytes", (number,), {k: v for k, v in kinds.items() if v is not None})


class _Exposition:
    """Prometheus' text format, written here: with hundreds of models, its own library takes six times as long."""

    def __init__(self, *, sparse: bool) -> None:
        """`sparse`: leave out histograms without values."""
        self._sparse = sparse
        self._lines: dict[str, list[str]] = {family.name: [] for family in FAMILIES}

    def put(self, family: str, labels: Sequence[str], value: float) -> None:
        self._lines[family].append(f"{family}{_braced(family, labels)} {value!r}\n")

    def put_each(self, family: str, labels: Sequence[str], values: Mapping[str, float]) -> None:
        """Add a sample for each key, which is the last label."""
        for key, value in values.items():
            self.put(family, (*labels, key), value)

    def measure(self, family: str, labels: Sequence[str], bounds: Sequence[float], said: Any) -> int:
        """Add a histogram; return its number of values."""
        found, lines = Histogram.from_json(bounds, said), self._lines[family]
        if self._sparse and not any(found.counts):
            return 0
        inside = _labelled(family, labels)
        start = f'{family}_bucket{{{inside}{"," if inside else ""}le="'
        count = 0
        for bound, more in zip((*map(repr, bounds), "+Inf"), found.counts, strict=True):
            count += more
            lines.append(f'{start}{bound}"}} {count}\n')
        braced = f"{{{inside}}}" if inside else ""
        lines.append(f"{family}_sum{braced} {found.sum!r}\n{family}_count{braced} {count}\n")
        return count

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
