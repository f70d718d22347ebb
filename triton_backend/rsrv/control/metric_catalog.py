"""Every metric that the control process serves: docs/monitoring.md is made of this, and nothing else may be served."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """Histograms have samples NAME_bucket, NAME_sum and NAME_count."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    help: str


FAMILIES: tuple[MetricFamily, ...] = (
    # requests
    MetricFamily(
        "rsrv_requests_total",
        "counter",
        ("model", "outcome"),
        "Requests that are over, as the runtime saw them, those of meta models among them: answered, refused, expired "
        "(the deadline passed), shed (it could not be met any more), cancelled, failed. Of a meta model: its runs.",
    ),
    MetricFamily(
        "rsrv_responses_total",
        "counter",
        ("model", "status"),
        "Answers to clients, by status as docs/protocol.md has them. Other than rsrv_requests_total it has what never "
        "reached the runtime (wrong shapes, hooks that raised), and has no calls of meta models.",
    ),
    MetricFamily(
        "rsrv_request_seconds",
        "histogram",
        ("model",),
        "From a request's arrival in its model's process to its answer: hooks, waiting, execution, copies.",
    ),
    MetricFamily(
        "rsrv_queue_depth", "gauge", ("model",), "Requests that wait. Of a meta model: runs that wait."
    ),
    MetricFamily(
        "rsrv_queue_wait_seconds",
        "histogram",
        ("model",),
        "From a request's arrival in the runtime until it is given to the device, a load of weights that it waited for "
        "included; no execution of its own is in it.",
    ),
    MetricFamily(
        "rsrv_refused_total",
        "counter",
        ("model", "reason"),
        "Requests that were refused: queue_full, paused, not_resident, no_memory, too_many_rows, unknown_variant, "
        "unloaded.",
    ),
    MetricFamily(
        "rsrv_deadline_missed_total",
        "counter",
        ("model", "stage"),
        "Requests whose deadline passed, or was certain to, by where they were: arrival (it had passed when they came), "
        "queue, load (they waited for weights), execute (they were answered all the same); of runs of a meta model: gate (they waited to be let in).",
    ),
    MetricFamily(
        "rsrv_hook_seconds",
        "histogram",
        ("model", "stage"),
        "Time in functions of model.py: pre, post, run. Waiting for calls of other models is in run.",
    ),
    MetricFamily("rsrv_meta_runs", "gauge", ("model",), "Runs of a meta model that are under way."),
    MetricFamily(
        "rsrv_meta_calls_total",
        "counter",
        ("model",),
        "Calls that a meta model's runs have made, executed ones.",
    ),
    # the device
    MetricFamily("rsrv_executions_total", "counter", ("model",), "Executions that were started."),
    MetricFamily(
        "rsrv_execute_seconds",
        "histogram",
        ("model",),
        "Time that an execution had the device, failed ones included.",
    ),
    MetricFamily(
        "rsrv_device_seconds_total",
        "counter",
        ("model",),
        "Time that the model had the device. Of a meta model: that of its calls, which count for the called models, too.",
    ),
    MetricFamily(
        "rsrv_loop_bans_total",
        "counter",
        (),
        "Times that a model's short executions were moved from the runtime's loop to a thread for a minute, because slow "
        "ones took a tenth of a second within ten seconds; the log names the model.",
    ),
    MetricFamily(
        "rsrv_batch_rows", "histogram", ("model",), "Rows of requests in an execution, padding excluded."
    ),
    MetricFamily("rsrv_rows_total", "counter", ("model",), "Rows of requests in all executions."),
    MetricFamily("rsrv_batch_padding_rows", "histogram", ("model",), "Rows of padding in an execution."),
    MetricFamily("rsrv_padded_rows_total", "counter", ("model",), "Rows of padding in all executions."),
    # weights
    MetricFamily("rsrv_model_resident", "gauge", ("model",), "1 while the weights are on the device."),
    MetricFamily(
        "rsrv_model_weight_bytes",
        "gauge",
        ("model", "tier"),
        "Bytes of the model's weights that are in host memory, and on the device or on their way (each tensor once); "
        "what models share counts for each of them.",
    ),
    MetricFamily(
        "rsrv_weight_loads_total", "counter", ("model",), "Loads of weights onto the device that ended well."
    ),
    MetricFamily("rsrv_weight_load_seconds", "histogram", ("model",), "How long these took."),
    MetricFamily(
        "rsrv_weight_evictions_total",
        "counter",
        ("model", "reason"),
        "Times that weights left the device: room (another's load needed it), asked, budget (that fell), compaction.",
    ),
    MetricFamily(
        "rsrv_weight_misses_total", "counter", ("model",), "Requests that found the weights elsewhere."
    ),
    MetricFamily(
        "rsrv_weight_bytes",
        "gauge",
        ("tier", "kind"),
        "Bytes of all weights in host memory, and on the device or on their way: logical, as if no model shared a "
        "tensor with another, and physical, each tensor once.",
    ),
    MetricFamily(
        "rsrv_device_memory_bytes",
        "gauge",
        ("kind",),
        "limit: what the device's allocator may take; budget: what weights may; pinned: weights that stay; held: weights "
        "that are there at this moment; scratch: what executions may need; kept: what runs of meta models keep. "
        "What has no limit has no sample.",
    ),
    # compiling
    MetricFamily(
        "rsrv_compile_seconds", "histogram", (), "Compilations of modules; what the cache had is not in it."
    ),
    MetricFamily(
        "rsrv_executables_total",
        "counter",
        ("source",),
        "Executables that were needed: compiled, from the cache on disk, or shared with another model.",
    ),
    # the server
    MetricFamily(
        "rsrv_reload_failed",
        "gauge",
        ("model",),
        "1 while the model is not as its bundle says: a change could not be loaded. An older version may be serving.",
    ),
    MetricFamily(
        "rsrv_runtime_up",
        "gauge",
        (),
        "1 while the runtime answers; without it all but this section is missing.",
    ),
    MetricFamily(
        "rsrv_runtime_restarts_total",
        "counter",
        (),
        "Runtimes that came after the first one that this control process knew. All counts above begin anew with each.",
    ),
    MetricFamily(
        "rsrv_trace_spans_total",
        "counter",
        ("outcome",),
        "Spans of traces, if there are to be any (traces.endpoint): exported; failed (the collector did not take them); "
        "dropped (there were more than are kept until they are exported).",
    ),
    MetricFamily("rsrv_build_info", "gauge", ("version",), "Always 1."),
)


def table() -> str:
    """In Markdown."""
    lines = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    for family in FAMILIES:
        labels = ", ".join(f"`{label}`" for label in family.labels)
        lines.append(f"| `{family.name}` | {family.kind} | {labels} | {family.help} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
