"""Make Grafana's dashboards.

    python tools/dashboards.py     # rewrites deploy/helm/rsrv/files/dashboards/*.json

A test holds them to what this makes.
"""

from __future__ import annotations

from pathlib import Path

from panels import (
    DEVICE,
    DEVICE_LEGEND,
    MODEL_LEGEND,
    SERVER,
    SERVER_LEGEND,
    Board,
    Panel,
    gateway,
    gateway_rate,
    grafana,
    increase,
    or_zero,
    quantile,
    rate,
    series,
    top,
    total,
)

#: inside the chart, since Helm reads no files outside of it; docker/compose.yaml mounts them from there
BOARDS = Path(__file__).resolve().parents[1] / "deploy" / "helm" / "rsrv" / "files" / "dashboards"

#: seconds of executions per second; a meta model's device seconds are its callees', so only models are counted
_EXECUTING = rate("rsrv_execute_seconds_sum")


def _on_host(kind: str) -> str:
    """Return the bytes of weights in host memory by server: its runtimes share them, and each of them counts all."""
    found = series("rsrv_weight_bytes", 'tier="host"', f'kind="{kind}"')
    return f"max by ({SERVER}) ({found})"


def fleet() -> Board:
    return Board(
        uid="rsrv-fleet",
        title="rsrv: fleet",
        about="All servers: problems, load, and the models that cause it.",
        faults={
            "servers without a runtime": or_zero(
                f"count(max without (device) ({series('rsrv_runtime_up')}) == 0)"
            ),
            "devices without a runtime": or_zero(f"count({series('rsrv_runtime_up')} == 0)"),
            "restarts within an hour": or_zero(total(increase("rsrv_runtime_restarts_total", "1h"))),
            "models not as their bundles say": or_zero(total(series("rsrv_reload_failed"))),
            "servers silent to their gateway": or_zero(f"count({gateway('rsrv_gateway_worker_up')} == 0)"),
            "servers given more than fits": or_zero(
                f"count({gateway('rsrv_gateway_worker_oversubscribed')} == 1)"
            ),
        },
        rows={"Servers": _servers(), "Gateway": _gateway()},
    )


def _servers() -> list[Panel]:
    return [
        Panel(
            "Requests",
            "Requests that are over, by how they ended; calls of meta models count, too. If it is not answered, see what was "
            "refused and missed.",
            "reqps",
            {"{{outcome}}": total(rate("rsrv_requests_total"), "outcome")},
            stacked=True,
        ),
        Panel(
            "Devices: share of time executing",
            "At 100 % more requests only wait longer: add devices, or look which models take the time.",
            "percentunit",
            {DEVICE_LEGEND: total(_EXECUTING, DEVICE)},
            limit=0.95,
        ),
        Panel(
            "Requests that wait",
            "A queue that grows while its device is not busy waits for weights: see scheduler and weights.",
            "short",
            {DEVICE_LEGEND: total(series("rsrv_queue_depth"), DEVICE)},
        ),
        Panel(
            "Who has the devices",
            "The ten models that take most; 1 is a whole device. One takes too much: lower its weight (rsrv policy).",
            "short",
            {MODEL_LEGEND: top(total(_EXECUTING, "model"))},
            stacked=True,
        ),
        Panel(
            "Who waits longest",
            "99th percentile of the time until a request is executed, the ten models with the longest. The model's dashboard "
            "says of what.",
            "s",
            {MODEL_LEGEND: top(quantile("0.99", "rsrv_queue_wait_seconds", by="model"))},
        ),
        Panel(
            "Refused",
            "queue_full: more comes than can be done. no_memory: see the log. paused: an operator did it. Others: requests "
            "that do not fit their model.",
            "reqps",
            {"{{reason}}": total(rate("rsrv_refused_total"), "reason")},
            stacked=True,
        ),
        Panel(
            "Deadlines missed",
            "By where the request was. load: give weights more room, or pin. queue: add devices, or raise the weight of who "
            "has deadlines.",
            "reqps",
            {"{{stage}}": total(rate("rsrv_deadline_missed_total"), "stage")},
            stacked=True,
        ),
        Panel(
            "Memory of the devices",
            "limit: all there is. budget: what weights may take; pinned and held are weights. scratch and kept: what executions "
            "and runs of meta models take beside. pinned above budget: unpin some, or move them.",
            "bytes",
            {"{{kind}}": total(series("rsrv_device_memory_bytes"), "kind")},
        ),
        Panel(
            "Weights",
            "In host memory and on devices. logical above physical: models share the difference, and it costs nothing.",
            "bytes",
            {
                "device, {{kind}}": total(series("rsrv_weight_bytes", 'tier="device"'), "kind"),
                **{f"host, {kind}": total(_on_host(kind)) for kind in ("logical", "physical")},
            },
        ),
    ]


def _gateway() -> list[Panel]:
    requests = "rsrv_gateway_requests_total"
    # Without a server: a request may have gone to several.
    buckets = "rate(rsrv_gateway_request_duration_seconds_bucket[$__rate_interval])"
    return [
        Panel(
            "Requests by server",
            "Where they went; without a name: no server was asked. One that gets none has no model that is asked for, or is down.",
            "reqps",
            {"{{worker}}": total(gateway_rate(requests), "worker")},
            stacked=True,
        ),
        Panel(
            "Errors",
            "Answers other than OK, by gRPC's names, also of HTTP. UNAVAILABLE: servers that are full or away. INTERNAL: see "
            "their logs.",
            "reqps",
            {"{{code}}": total(gateway_rate(requests, 'code!="OK"'), "code")},
            stacked=True,
        ),
        Panel(
            "Time to answer",
            "From a request's arrival at the gateway to the end of its answer. Far more than the servers' own times: the "
            "gateway is short of CPU.",
            "s",
            {
                f"p{share[2:]}": f"histogram_quantile({share}, {total(buckets, 'le')})"
                for share in ("0.50", "0.95", "0.99")
            },
        ),
        Panel(
            "Outstanding work",
            "Outstanding work of each server, in the unit of work_basis. Far more than the others have: the server is "
            "slow, or is the only one with the requested model; give that model replicas.",
            "short",
            {"{{worker}}": total(gateway("rsrv_gateway_worker_load"), "worker")},
        ),
        Panel(
            "Failures of servers",
            "Requests that went elsewhere because this server had failed. Its log says why.",
            "reqps",
            {"{{worker}}": total(gateway_rate("rsrv_gateway_failovers_total"), "worker")},
        ),
        Panel(
            "Placed work",
            "With lpt_packing: seconds of device per second that the models that are placed there ask for. Above 100 %: add "
            "devices.",
            "percentunit",
            {"{{worker}}": f"max by (worker) ({gateway('rsrv_gateway_worker_utilisation')})"},
            limit=1.0,
        ),
    ]


def one_model() -> Board:
    mine = 'model="$model"'
    executions, rows, padding = (
        total(rate(f"rsrv_{name}_total", mine)) for name in ("executions", "rows", "padded_rows")
    )

    def share(name: str, *matchers: str) -> str:
        return quantile("$quantile", name, mine, *matchers)

    panels = [
        Panel(
            "Requests",
            "That are over, by how they ended. Of a meta model: its runs.",
            "reqps",
            {"{{outcome}}": total(rate("rsrv_requests_total", mine), "outcome")},
            stacked=True,
        ),
        Panel(
            "Errors",
            "Answers to clients other than ok. invalid: the client's fault. internal: the model's or the server's, see the log.",
            "reqps",
            {"{{status}}": total(rate("rsrv_responses_total", mine, 'status!="ok"'), "status")},
            stacked=True,
        ),
        Panel(
            "Where the time goes",
            "The chosen quantile of each part by itself. wait: see the queue and the weights below. execute: the model, or its "
            "batches. pre, post, run: functions of its model.py.",
            "s",
            {
                "all": share("rsrv_request_seconds"),
                "wait": share("rsrv_queue_wait_seconds"),
                "execute": share("rsrv_execute_seconds"),
                **{hook: share("rsrv_hook_seconds", f'stage="{hook}"') for hook in ("pre", "post", "run")},
            },
        ),
        Panel(
            "Queue",
            "Requests that wait, and runs of a meta model in progress. If it stays at max_queue_depth, further requests are "
            "refused: raise the model's weight, or add devices.",
            "short",
            {
                "waiting": total(series("rsrv_queue_depth", mine)),
                "runs": total(series("rsrv_meta_runs", mine)),
            },
        ),
        Panel(
            "Deadlines missed",
            "arrival: too late when they came. queue: raise the model's weight. load: pin it. execute: answered, too late.",
            "reqps",
            {"{{stage}}": total(rate("rsrv_deadline_missed_total", mine), "stage")},
            stacked=True,
        ),
        Panel(
            "Refused",
            "queue_full: more comes than its share of the devices can do. no_memory, not_resident: its weights are not there.",
            "reqps",
            {"{{reason}}": total(rate("rsrv_refused_total", mine), "reason")},
            stacked=True,
        ),
        Panel(
            "Rows of an execution",
            "The mean. Near 1 under load: let requests wait for company (max_delay_us), or compile larger sizes.",
            "short",
            {"asked for": f"{rows} / {executions}", "with padding": f"({rows} + {padding}) / {executions}"},
        ),
        Panel(
            "Padding",
            "Share of the executed rows that are padding. High: compile a batch size nearer to the real ones.",
            "percentunit",
            {"padding": f"{padding} / ({rows} + {padding})"},
        ),
        Panel(
            "Share of the devices",
            "100 % is a whole device. A meta model's is that of its calls. Too much for others: lower its weight.",
            "percentunit",
            {DEVICE_LEGEND: total(rate("rsrv_device_seconds_total", mine), DEVICE)},
            stacked=True,
        ),
        Panel(
            "Devices that have its weights",
            "Fewer than serve it: requests elsewhere wait for a load. Pin it where it must be fast.",
            "short",
            {
                "have them": total(series("rsrv_model_resident", mine)),
                "serve it": f"count({series('rsrv_model_resident', mine)})",
            },
        ),
        Panel(
            "Weights that come and go",
            "Many loads, and evictions for room: too much else is in use. Pin the model, or give weights more room.",
            "cps",
            {
                "requests that found them elsewhere": total(rate("rsrv_weight_misses_total", mine)),
                "loads": total(rate("rsrv_weight_loads_total", mine)),
                "evictions: {{reason}}": total(rate("rsrv_weight_evictions_total", mine), "reason"),
            },
        ),
        Panel(
            "Time of a load",
            "What a request waits at least that finds the weights elsewhere. Longer than usual: weights come from the disk, or "
            "others use the link.",
            "s",
            {"load": share("rsrv_weight_load_seconds")},
        ),
    ]
    return Board(
        uid="rsrv-model",
        title="rsrv: model",
        about="One model, on all servers that are chosen.",
        rows={"$model": panels},
        choices={
            "model": 'label_values(rsrv_queue_depth{version=""}, model)',
            "quantile": ("0.99", "0.5", "0.9", "0.999"),
        },
    )


def weights() -> Board:
    loads, requests = rate("rsrv_weight_loads_total"), rate("rsrv_requests_total")
    answered = rate("rsrv_requests_total", 'outcome="answered"')
    panels = [
        Panel(
            "Loads for each answered request",
            "Near 0: weights in use stay on the device. From 0.5 on models take turns: make room, pin what must be fast, or "
            "spread the models.",
            "short",
            {DEVICE_LEGEND: f"{total(loads, DEVICE)} / {total(answered, DEVICE)}"},
            limit=0.5,
        ),
        Panel(
            "Share of time with a load in progress",
            "Loads run one at a time, beside executions. Near 100 %: each load also waits for those of other models.",
            "percentunit",
            {DEVICE_LEGEND: total(rate("rsrv_weight_load_seconds_sum"), DEVICE)},
            limit=0.8,
        ),
        Panel(
            "Requests that found their weights elsewhere",
            "Their share of all; each waits for a load. Pin the requested models (see which are loaded most).",
            "percentunit",
            {DEVICE_LEGEND: f"{total(rate('rsrv_weight_misses_total'), DEVICE)} / {total(requests, DEVICE)}"},
        ),
        Panel(
            "Evictions",
            "room: another one's load needed it. budget: that fell, for what came is pinned or needs scratch. asked, compaction: "
            "an operator did it. idle: unused for idle.device.",
            "cps",
            {"{{reason}}": total(rate("rsrv_weight_evictions_total"), "reason")},
            stacked=True,
        ),
        Panel(
            "Who is loaded most",
            "The ten models with the most loads. One that is asked for all the time is worth pinning (rsrv pin).",
            "cps",
            {MODEL_LEGEND: top(total(loads, "model"))},
            stacked=True,
        ),
        Panel(
            "Time of a load",
            "Of all models. Longer than usual: weights come from the disk, or others use the link.",
            "s",
            {f"p{share[2:]}": quantile(share, "rsrv_weight_load_seconds") for share in ("0.50", "0.99")},
        ),
        Panel(
            "Room",
            "All weights that the host has, and what devices may hold of them. Far above budget: models take turns. pinned above "
            "budget: unpin some.",
            "bytes",
            {
                "all": total(_on_host("physical")),
                "{{kind}}": total(series("rsrv_device_memory_bytes", 'kind=~"budget|pinned|held"'), "kind"),
            },
        ),
    ]
    compiling = [
        Panel(
            "Executables by source",
            "compiled at every start: the cache is not kept (runtime.compilation_cache_dir).",
            "short",
            {"{{source}}": total(increase("rsrv_executables_total"), "source")},
            stacked=True,
        ),
        Panel(
            "Time spent on compiling",
            "The models are not ready meanwhile. Often, and without new models: see the executables.",
            "s",
            {SERVER_LEGEND: total(increase("rsrv_compile_seconds_sum"), SERVER)},
        ),
    ]
    return Board(
        uid="rsrv-weights",
        title="rsrv: scheduler and weights",
        about="Whether the models fit, and what it costs that they do not.",
        rows={"Weights": panels, "Compiling": compiling},
    )


def boards() -> dict[str, str]:
    """Return name of a file -> Grafana's JSON."""
    return {f"{board.uid}.json": grafana(board) for board in (fleet(), one_model(), weights())}


def main() -> None:
    for name, text in boards().items():
        (BOARDS / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
