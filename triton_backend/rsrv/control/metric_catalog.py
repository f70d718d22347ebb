"""The catalog of the control process's metrics, which `python -m rsrv.control.metric_catalog` prints. No other metric is served.

Figures of a runtime have the label `device`, which is the number of the runtime's device.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """A metric. Histograms have samples NAME_bucket, NAME_sum and NAME_count."""

    name: str
    labels: tuple[str, ...]
    help: str

    @property
    def kind(self) -> str:
        """The type of the metric. The end of the metric's name determines the type."""
        kinds = {"_total": "counter", "_seconds": "histogram", "_rows": "histogram"}
        return next((kind for end, kind in kinds.items() if self.name.endswith(end)), "gauge")


FAMILIES: tuple[MetricFamily, ...] = (
    # requests
    MetricFamily(
        "rsrv_requests_total",
        ("model", "device", "outcome"),
        "Requests that ended in the runtime: answered, refused, expired (the deadline passed), shed (the deadline "
        "could no longer be met), cancelled, failed. For a meta model: its runs.",
    ),
    MetricFamily(
        "rsrv_responses_total",
        ("model", "device", "status"),
        "Answers to clients, by status, without calls of meta models. Requests that never reached the runtime (wrong "
        "shapes, hooks that raised) also count.",
    ),
    MetricFamily(
        "rsrv_alias_responses_total",
        ("alias", "model", "device", "status"),
        "Answers to requests that named an alias. `rsrv_responses_total` also counts them.",
    ),
    MetricFamily(
        "rsrv_alias_shadows_total",
        ("alias", "model", "device", "outcome"),
        "Copies of an alias's requests for a shadow model: same, different (from the client's answer), failed, or "
        "skipped (more than 64 in progress, little memory, or an error for the client).",
    ),
    MetricFamily(
        "rsrv_request_seconds",
        ("model", "device"),
        "Time from a request's arrival in its model's process to its answer.",
    ),
    MetricFamily(
        "rsrv_queue_depth",
        ("model", "device"),
        "Waiting requests. For a meta model: waiting runs.",
    ),
    MetricFamily(
        "rsrv_queue_wait_seconds",
        ("model", "device"),
        "Time from a request's arrival in the runtime to the start of its execution, loads of weights included.",
    ),
    MetricFamily(
        "rsrv_refused_total",
        ("model", "device", "reason"),
        "Refused requests, by reason: queue_full, paused, not_resident, no_memory, too_many_rows, unknown_variant, "
        "unloaded.",
    ),
    MetricFamily(
        "rsrv_deadline_missed_total",
        ("model", "device", "stage"),
        "Requests whose deadline passed or could not be met, by their stage: arrival, queue, load (they waited for "
        "weights), execute (they were answered nevertheless), gate (runs of a meta model that waited for admission).",
    ),
    MetricFamily(
        "rsrv_hook_seconds",
        ("model", "device", "stage"),
        "Time in functions of model.py: pre, post, run (calls of other models included).",
    ),
    MetricFamily("rsrv_meta_runs", ("model", "device"), "Runs of a meta model in progress."),
    MetricFamily("rsrv_meta_calls_total", ("model", "device"), "Executed calls of a meta model's runs."),
    # sequences and generations
    MetricFamily(
        "rsrv_sequences",
        ("model", "device", "state"),
        "Sequences by state: idle and stepping (both have a slot of the device), stored (in host memory), waiting (a "
        "request waits for a slot).",
    ),
    MetricFamily(
        "rsrv_generations",
        ("model", "device"),
        "Generations in progress, also those that wait for a slot. Each of their steps counts as a request.",
    ),
    MetricFamily(
        "rsrv_tokens_total",
        ("model", "device", "of"),
        "Tokens of prompts that were read, and of answers that were sent.",
    ),
    MetricFamily(
        "rsrv_first_token_seconds",
        ("model", "device"),
        "Time from a generation's arrival in the runtime to its first token.",
    ),
    MetricFamily("rsrv_token_seconds", ("model", "device"), "Time from each token of an answer to the next."),
    # the device
    MetricFamily("rsrv_executions_total", ("model", "device"), "Executions that began."),
    MetricFamily(
        "rsrv_execute_seconds",
        ("model", "device"),
        "Time that an execution used the device, failed ones included.",
    ),
    MetricFamily(
        "rsrv_device_seconds_total",
        ("model", "device"),
        "Time that the model used the device. For a meta model: the time of its calls, which also counts for the "
        "called models.",
    ),
    MetricFamily(
        "rsrv_loop_bans_total",
        ("device",),
        "Times that a model's executions moved from the runtime's loop to a thread for a minute, because some were slow.",
    ),
    MetricFamily("rsrv_batch_rows", ("model", "device"), "Rows of requests in an execution."),
    MetricFamily("rsrv_rows_total", ("model", "device"), "Rows of requests in all executions."),
    MetricFamily("rsrv_batch_padding_rows", ("model", "device"), "Rows of padding in an execution."),
    MetricFamily("rsrv_padded_rows_total", ("model", "device"), "Rows of padding in all executions."),
    # weights
    MetricFamily("rsrv_model_resident", ("model", "device"), "1 while the weights are on the device."),
    MetricFamily(
        "rsrv_model_weight_bytes",
        ("model", "device", "tier"),
        "Bytes of the model's weights in host memory, and on the device or loading. Shared tensors count for each "
        "model.",
    ),
    MetricFamily(
        "rsrv_weight_loads_total",
        ("model", "device"),
        "Successful loads of weights to the device.",
    ),
    MetricFamily(
        "rsrv_weight_load_seconds",
        ("model", "device"),
        "Duration of loads of weights to the device.",
    ),
    MetricFamily(
        "rsrv_weight_evictions_total",
        ("model", "device", "reason"),
        "Evictions of weights from the device, by reason: room (for another load), asked (on request), budget (it was"
        " reduced), compaction, idle (`idle.device`).",
    ),
    MetricFamily(
        "rsrv_weight_misses_total",
        ("model", "device"),
        "Requests whose weights were not on the device on arrival.",
    ),
    MetricFamily(
        "rsrv_weight_bytes",
        ("device", "tier", "kind"),
        "Bytes of all weights in host memory, and on the device or loading. logical: each model's tensors; physical: "
        "shared tensors count once.",
    ),
    MetricFamily(
        "rsrv_device_memory_bytes",
        ("device", "kind"),
        "limit: of the device's allocator; budget: for weights; pinned: weights that are not evicted; held: weights "
        "on the device now; scratch: reserved for executions; kept: tensors of meta models' runs. A kind without a "
        "limit has no sample.",
    ),
    # compiling
    MetricFamily(
        "rsrv_compile_seconds", ("device",), "Time of compilations of executables that were not in the cache."
    ),
    MetricFamily(
        "rsrv_executables_total",
        ("device", "source"),
        "Executables by source: compiled, read from the cache on disk, or shared with another model.",
    ),
    # the server
    MetricFamily(
        "rsrv_reload_failed",
        ("model",),
        "1 while a change of the model's bundle could not be loaded. An older version may be serving.",
    ),
    MetricFamily(
        "rsrv_models",
        ("state",),
        "Models and meta models by state: cold, starting, warm, resident, ready (meta models), leaving, failed, "
        "asleep. Cold and failed models have no other figures.",
    ),
    MetricFamily(
        "rsrv_runtime_up",
        ("device",),
        "1 while the device's runtime answers, or the device sleeps. At 0, the runtime's other metrics are missing.",
    ),
    MetricFamily(
        "rsrv_runtime_restarts_total",
        ("device",),
        "Runtimes of the device after the first one of this control process.",
    ),
    MetricFamily(
        "rsrv_findings",
        ("name", "severity"),
        "Findings of `rsrv doctor` in the last minute, by severity (note, warning, critical) and name: bad_requests, "
        "bundle_refused, certificate_ends, compiled_at_start, deadlines_arrival, deadlines_execute, deadlines_gate, deadlines_load, "
        "deadlines_queue, disk_loads, held_back, meta_waits, model_failed, no_compilation_cache, no_memory, not_resident, "
        "not_served, openai_closed, "
        "over_pinned, overloaded, padding, paused, process_ended, queue_full, renewal_failed, requests_fail, runtime_down, "
        "runtime_restarts, settings_refused, settings_waiting, shm_full, single_rows, slow_hooks, slow_import, starved, "
        "traces_lost, uneven_devices, waits_in_triton, weights_thrash, weights_too_big.",
    ),
    MetricFamily(
        "rsrv_trace_spans_total",
        ("outcome",),
        "Spans of traces: exported; failed (the collector did not take them); dropped (the buffer was full).",
    ),
    MetricFamily("rsrv_build_info", ("version",), "Always 1."),
)


def table() -> str:
    """Return the catalog as a table in Markdown. Names show the types."""
    lines = ["| metric{labels} | meaning |", "|---|---|"]
    for family in FAMILIES:
        labels = f"{{{','.join(family.labels)}}}" if family.labels else ""
        lines.append(f"| `{family.name}{labels}` | {family.help} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
