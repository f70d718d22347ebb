"""Rules for findings about a model on a device. Each rule judges one model. Pure.

If a rule applies to several models, the diagnosis reports the worst one and names the others.
"""

from collections.abc import Callable

from rsrv.control.figures import DeviceWindow, ModelActivity, best_size, budget_of, mean
from rsrv.control.findings import FEW, Case, ServerFinding
from rsrv.text import amount, duration, percent


def _failing(case: Case, window: DeviceWindow, activity: ModelActivity) -> ServerFinding | None:
    failed = max(activity.outcomes.get("failed", 0), activity.responses.get("internal", 0))
    total = max(activity.ended, sum(activity.responses.values()))
    if failed < 3 or failed < 0.01 * total:
        return None
    hooks = activity.responses.get("internal", 0) > activity.outcomes.get("failed", 0)
    return ServerFinding(
        "requests_fail",
        "critical",
        f"{activity.name}: {failed} of {total} answers are failures of the server",
        activity.now.failure
        or ("a function of its model.py raises or hangs" if hooks else "its executions or loads fail"),
        "read the server's log, which has the full reason of each failure, and fix the cause",
    )


def _padding(case: Case, window: DeviceWindow, activity: ModelActivity) -> ServerFinding | None:
    total = activity.rows + activity.padding
    if activity.dispatches < FEW or activity.padding < 0.5 * total:
        return None
    share, compiled = activity.device_s / window.seconds, total / activity.dispatches
    size, saved = best_size(activity)
    if size is None:
        return None
    together = sorted({size, *activity.costs}) if activity.costs else []
    sizes = f", `rsrv-bundle export --batch-sizes {','.join(map(str, together))}`" if together else ""
    gain = f" (saves up to {percent(saved)} of its device time" if saved else " ("
    return ServerFinding(
        "padding",
        "warning" if window.busy >= 0.5 and share >= 0.1 else "note",
        f"{percent(activity.padding / total)} of the rows of {activity.name} are padding ({activity.padding} rows; {activity.rows} rows are of requests)",
        f"an execution has {activity.rows / activity.dispatches:.2g} of the {compiled:.2g} rows that it is compiled for, on average",
        f"also export batch size {size}{sizes}{gain}{'; ' if saved else ''}costs one more compilation)",
    )


def _single_rows(case: Case, window: DeviceWindow, activity: ModelActivity) -> ServerFinding | None:
    if not activity.costs or max(activity.costs) > 1 or activity.dispatches < 2 * FEW:
        return None
    if window.busy < 0.5 or activity.device_s < 0.3 * window.seconds:
        return None
    wait = mean(activity.queue_wait)
    if wait < 2 * mean(activity.execute):
        return None
    limit, limited = (
        f"models.{activity.name}.max_batch_size",
        case.now.policy(activity.name, "max_batch_size") == 1,
    )
    return ServerFinding(
        "single_rows",
        "warning",
        f"{activity.name} executes one row at a time while requests wait {duration(wait)} on average; it takes "
        f"{percent(activity.device_s / window.seconds)} of the device's time",
        f"{limit} is 1, so requests cannot share an execution"
        if limited
        else "its bundle has batch size 1 only, so requests cannot share an execution",
        f"raise {limit} and `rsrv restart`"
        if limited
        else "export batch sizes 1, 8 and 32 (`rsrv-bundle export --batch-sizes 1,8,32`); this costs two more compilations, "
        "and the memory of the largest execution",
    )


def _starved(case: Case, window: DeviceWindow, activity: ModelActivity) -> ServerFinding | None:
    most = window.busiest
    if (
        most is None
        or most is activity
        or window.busy < 0.8
        or activity.ended < 5
        or activity.grown("misses") >= 0.2 * activity.ended
    ):
        return None
    share, rival_share = (model.device_s / window.seconds for model in (activity, most))
    if rival_share < 0.4 or share > 0.5 * rival_share or case.now.schedule("discipline") != "fair":
        return None
    wait = mean(activity.queue_wait)
    if wait < max(0.01, 5 * mean(activity.execute)):
        return None
    mine, weight_of_most = (case.now.policy(model.name, "weight") or 1.0 for model in (activity, most))
    evidence = f"{activity.name} waits {duration(wait)} on average behind {most.name}, which takes {percent(rival_share)} of the device's time"
    if wait < 2 * mean(most.execute):
        # A larger weight would not help: weights decide the order of executions, but never interrupt an execution.
        return ServerFinding(
            "starved",
            "note",
            evidence,
            f"an execution of {most.name} takes {duration(mean(most.execute))}, one of {activity.name} {duration(mean(activity.execute))}",
            f"export smaller batch sizes for {most.name} (a row then costs more time, and requests of more rows are refused), "
            f"or give {activity.name} a device of its own (models.{activity.name}.devices)",
        )
    return ServerFinding(
        "starved",
        "warning",
        f"{evidence} with weight {weight_of_most:g}",
        f"{activity.name} has weight {mine:g} and executes {duration(mean(activity.execute))} at a time",
        f"`rsrv policy {activity.name} --weight {2 * max(mine, weight_of_most):g}`, which takes that time from {most.name}; "
        f"set models.{activity.name}.weight in rsrv.yaml to keep the change",
    )


def _held_back(case: Case, window: DeviceWindow, activity: ModelActivity) -> ServerFinding | None:
    delay = (case.now.policy(activity.name, "max_delay_us") or 0) / 1e6
    if not delay or activity.dispatches < FEW or mean(activity.queue_wait) < 0.5 * delay:
        return None
    if activity.ended > 1.2 * activity.dispatches or window.busy > 0.5:
        return None
    return ServerFinding(
        "held_back",
        "note",
        f"requests of {activity.name} wait {duration(mean(activity.queue_wait))} for other requests to share an execution, but "
        f"{activity.dispatches} executions had {activity.ended} requests",
        f"max_delay_us is {delay * 1e6:g}, and few requests come at the same time",
        f"`rsrv policy {activity.name} --max-delay-us 0`; in later bursts, fewer requests then share an execution",
    )


def _slow_hooks(case: Case, window: DeviceWindow, activity: ModelActivity) -> ServerFinding | None:
    seconds = activity.hook_seconds("pre", "post")
    if not seconds:
        return None
    request = activity.measured("request")
    requests = sum(request.counts)
    if requests < FEW or seconds < 0.005 * requests:
        return None
    # If hooks limit the model, a request mostly waits for the hooks of other requests. Its own hooks are then only a small
    # share of its duration.
    each, on_device = seconds / requests, mean(activity.queue_wait) + mean(activity.execute)
    if each < 0.5 * mean(request) and (not activity.dispatches or each < on_device):
        return None
    return ServerFinding(
        "slow_hooks",
        "note",
        f"{activity.name} spends {duration(each)} of a request's {duration(mean(request))} in preprocess and postprocess",
        "these functions run in one Python process per model, on the CPU",
        "make these functions faster, or move their work into the model",
    )


def _queue_full(case: Case, window: DeviceWindow, activity: ModelActivity) -> ServerFinding | None:
    refused = activity.refused.get("queue_full", 0)
    if refused < 5 or refused < 0.01 * activity.ended:
        return None
    limit = case.now.policy(activity.name, "max_queue_depth") or case.now.schedule("max_queue_depth")
    busy = window.busy >= 0.7
    return ServerFinding(
        "queue_full",
        "warning",
        f"{activity.name} refused {refused} of {activity.ended} requests (QUEUE_FULL); at most {limit} may wait",
        f"the device is busy {percent(window.busy)} of the time"
        + (
            ": the device cannot do more"
            if busy
            else " only: bursts have more requests than may wait, or requests wait for weights"
        ),
        "add devices, or send fewer requests; a longer queue only adds latency"
        if busy
        else f"`rsrv policy {activity.name} --max-queue-depth {2 * limit}`; the last requests of a burst then wait longer",
    )


def _no_memory(case: Case, window: DeviceWindow, activity: ModelActivity) -> ServerFinding | None:
    refused = activity.refused.get("no_memory", 0)
    if not refused:
        return None
    memory = window.records.device.memory
    size, budget, pinned = activity.now.device_bytes, budget_of(window), memory.pinned_bytes
    limit = "" if budget is None else f" (the budget is {amount(budget)})"
    crowded = budget is not None and pinned > 0 and pinned + size > budget
    return ServerFinding(
        "no_memory",
        "critical",
        f"{activity.name} refused {refused} of {activity.ended} requests: there was no memory for its {amount(size)} of weights in addition to "
        f"the {amount(memory.held_bytes)} on the device{limit}",
        f"pinned weights take {amount(pinned)} and are never evicted"
        if crowded
        else "another program uses the memory, or the free memory is in pieces that are too small",
        "`rsrv unpin` the models that may wait for a load"
        if crowded
        else "end other programs on the device, then `rsrv compact`: all models wait for one load, and the refusals end. "
        "If refusals occur again, set a lower runtime.weight_budget_bytes",
    )


def _not_resident(case: Case, window: DeviceWindow, activity: ModelActivity) -> ServerFinding | None:
    refused = activity.refused.get("not_resident", 0)
    if refused < 5 or refused < 0.01 * activity.ended:
        return None
    return ServerFinding(
        "not_resident",
        "warning",
        f"{activity.name} refused {refused} of {activity.ended} requests: its weights are not on the device",
        "lifecycle.mode is explicit: requests load no weights",
        f"an operator must prefetch or pin the model first (`rsrv prefetch {activity.name}`)",
    )


def _late(case: Case, window: DeviceWindow, activity: ModelActivity) -> ServerFinding | None:
    missed = activity.counted("missed")
    stage = max(missed, key=lambda stage: missed[stage], default="")
    late = missed.get(stage, 0)
    if late < 5 or late < 0.05 * activity.ended:
        return None
    edf, places = case.now.schedule("discipline") == "edf", case.now.schedule("meta_concurrency")
    cause, cure = {
        "arrival": (
            "the deadlines had passed on arrival: the network is slow, a client's clock differs, or the deadlines are too short",
            "compare the clocks (chrony, NTP), or use gRPC's timeouts, which need no clock",
        ),
        "load": (
            f"requests wait for weights; a load takes {duration(mean(activity.measured('load')) or None)}",
            f"`rsrv pin {activity.name}`, which leaves less memory for other models, or raise runtime.weight_budget_bytes",
        ),
        "execute": (
            f"an execution takes {duration(mean(activity.execute))}",
            f"limit the batch size (models.{activity.name}.max_batch_size), export smaller batch sizes, or set later deadlines",
        ),
        "gate": (
            f"runs of meta models wait: scheduler.meta_concurrency lets {places} run at a time",
            f"`rsrv scheduler meta_concurrency={2 * places}`; runs then keep more tensors on the device",
        ),
    }.get(
        stage,
        (
            f"requests wait for other executions; the device is busy {percent(window.busy)} of the time",
            "add devices, or send fewer requests"
            if edf
            else "`rsrv scheduler discipline=edf`; requests without a deadline then wait longest",
        ),
    )
    return ServerFinding(
        f"deadlines_{stage}",
        "warning",
        f"{activity.name} missed the deadlines of {late} of {activity.ended} requests",
        cause,
        cure,
    )


def _bad_requests(case: Case, window: DeviceWindow, activity: ModelActivity) -> ServerFinding | None:
    invalid, total = activity.responses.get("invalid", 0), sum(activity.responses.values())
    if invalid < 10 or invalid < 0.1 * total:
        return None
    return ServerFinding(
        "bad_requests",
        "note",
        f"{activity.name} answered {invalid} of {total} requests with INVALID",
        "clients send wrong shapes, dtypes or names, or more rows than the largest batch size",
        "correct the clients: the error message names the tensor and what is allowed",
    )


def _meta_waits(case: Case, window: DeviceWindow, activity: ModelActivity) -> ServerFinding | None:
    places = case.now.schedule("meta_concurrency")
    if activity.now.executing < places or activity.now.queued < 4 * places or window.busy > 0.5:
        return None
    return ServerFinding(
        "meta_waits",
        "note",
        f"{activity.now.queued} runs of {activity.name} wait while the device is idle {percent(1 - window.busy)} of the time",
        f"scheduler.meta_concurrency lets {places} run at a time",
        f"`rsrv scheduler meta_concurrency={2 * places}`; runs then keep more tensors on the device",
    )


ModelRule = Callable[[Case, DeviceWindow, ModelActivity], ServerFinding | None]
#: `MODEL_RULES` are for models only. `COMMON_RULES` are for models and meta models.
MODEL_RULES: tuple[ModelRule, ...] = (
    _no_memory,
    _not_resident,
    _starved,
    _single_rows,
    _padding,
    _held_back,
)
COMMON_RULES: tuple[ModelRule, ...] = (
    _failing,
    _queue_full,
    _late,
    _slow_hooks,
    _meta_waits,
    _bad_requests,
)
