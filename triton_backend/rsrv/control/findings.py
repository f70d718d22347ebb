"""Diagnosis: figures of a server in, findings out. Each finding has evidence, a cause, and the change that cures it. Pure."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from rsrv.control.figures import DeviceWindow, ModelActivity, ServerFigures, best_size, mean, merged, windows
from rsrv.histogram import LONG_SECONDS, SECONDS, Histogram
from rsrv.text import amount, by_number, duration, percent

Severity = Literal["note", "warning", "critical"]
SEVERITIES: tuple[Severity, ...] = ("critical", "warning", "note")

#: Requests, and executions, below which a share says nothing.
_FEW = 20
#: Seconds without an answer after which a runtime is missed, and without a stub a model: restarts take less.
_DOWN_S = 10.0
#: Models that a finding names.
_NAMED = 3


@dataclass(frozen=True, slots=True)
class ServerFinding:
    """Something that an operator can improve."""

    #: In snake_case, the label of `rsrv_findings`.
    name: str
    severity: Severity
    #: What is the case, in numbers; why; and what to do, with what that costs.
    evidence: str
    cause: str
    cure: str


@dataclass(frozen=True, slots=True)
class _Case:
    """The figures of a look, and the window that ends with it."""

    before: ServerFigures
    now: ServerFigures
    windows: list[DeviceWindow]


def find(before: ServerFigures, now: ServerFigures) -> list[ServerFinding]:
    """Return the findings of the window between two moments, the severest first."""
    case = _Case(before, now, windows(before, now))
    found = [finding for rule in _SERVER_RULES for finding in rule(case)]
    for window in case.windows:
        where = f"device {window.number}: " if len(now.devices) > 1 else ""
        on_device = [finding for rule in _DEVICE_RULES for finding in rule(case, window)]
        for rules, models in (
            (_MODEL_RULES, window.models),
            (_COMMON_RULES, {**window.models, **window.metas}),
        ):
            on_device += [finding for rule in rules for finding in _worst(case, window, rule, models)]
        found += [replace(one, evidence=where + one.evidence) for one in on_device]
    return sorted(found, key=lambda one: SEVERITIES.index(one.severity))


# --- of the server --------------------------------------------------------------------------------------------


def _runtime_down(case: _Case) -> Iterator[ServerFinding]:
    for number, device in case.now.devices.items():
        if not device.asleep and device.down_s >= _DOWN_S:
            yield ServerFinding(
                "runtime_down",
                "critical",
                f"the runtime of device {number} has not answered for {duration(device.down_s)}",
                device.obstacle or "it was stopped, cannot start, or is killed again and again",
                "read the server's log; the next runtime starts by itself when the cause is gone",
            )


def _runtime_restarts(case: _Case) -> Iterator[ServerFinding]:
    for number, device in case.now.devices.items():
        old = case.before.devices.get(number)
        times = 0 if old is None else device.lives - max(1, old.lives)  # none has come before the first
        if times > 0:
            yield ServerFinding(
                "runtime_restarts",
                "warning" if times > 1 else "note",
                f"the runtime of device {number} was replaced {_count(times, 'time')} in {_span(case)}",
                "a crash, a hang, the kernel's out-of-memory killer, or `rsrv restart`",
                "the log names the model that executed; requests of that time waited for the next runtime",
            )


def _model_failed(case: _Case) -> Iterator[ServerFinding]:
    # A cold model serves with its next request.
    ready = {one["name"] for one in case.now.entries.values() if one["state"] == "ready"} | case.now.cold
    texts = {name: one.text for name, one in case.now.failures.items()}
    for one in case.now.entries.values():
        if one["state"] == "failed" and one["name"] not in ready:
            texts.setdefault(one["name"], one["error"] or "")
    since = {name: one.since for name, one in case.now.failures.items()}
    kinds: tuple[tuple[str, Severity, str], ...] = (
        ("model_failed", "critical", "cannot be served"),
        ("bundle_refused", "warning", "is served in an older version"),
    )
    for name, severity, what in kinds:
        names = sorted((one for one in texts if (one in ready) == (name == "bundle_refused")), key=by_number)
        if names:
            ages = [case.now.unix_s - since[one] for one in names if one in since]
            age = f" for {duration(max(ages))}" if ages and max(ages) > 0 else ""
            yield ServerFinding(
                name,
                severity,
                f"{_named(names)} {what if len(names) == 1 else what.replace('is ', 'are ')}{age}",
                _short(texts[names[0]]) or "the log has the reason",
                f"mend what the reason names (`rsrv-bundle check` finds more); `rsrv reload {names[0]}` tries at once",
            )


def _not_served(case: _Case) -> Iterator[ServerFinding]:
    starting = {one["name"] for one in case.now.entries.values() if one["state"] in ("loading", "failed")}
    names = case.now.missing & case.before.missing - starting - case.now.failures.keys()
    if (
        names
        and case.now.t - case.before.t >= _DOWN_S
        and any(one.instance for one in case.now.devices.values())
    ):
        yield ServerFinding(
            "not_served",
            "critical",
            f"{_named(sorted(names, key=by_number))} should be served and {'is' if len(names) == 1 else 'are'} not",
            "its process inside Triton has ended, or Triton did not load it",
            "start tritonserver with --model-control-mode=explicit --load-model=*, so that models are loaded again",
        )


def _paused(case: _Case) -> Iterator[ServerFinding]:
    paused = {one["name"] for one in case.now.entries.values() if one["paused"]}
    waiting = {
        name: one.queued + one.refused.get("paused", 0)
        for window in case.windows
        for name, one in window.models.items()
        if name in paused
    }
    names = sorted((name for name, count in waiting.items() if count), key=by_number)
    if names:
        yield ServerFinding(
            "paused",
            "warning",
            f"{_named(names)} paused: {sum(waiting.values())} requests wait or were refused",
            "an operator's `rsrv pause`",
            f"`rsrv continue {names[0]}`, or --all",
        )


def _settings(case: _Case) -> Iterator[ServerFinding]:
    if case.now.settings_refused:
        yield ServerFinding(
            "settings_refused",
            "warning",
            f"rsrv.yaml is not used: {_short(case.now.settings_refused)}",
            "the file has an error; the settings before it hold",
            "mend the file; it is read again within two seconds",
        )
    if case.now.settings_waiting:
        yield ServerFinding(
            "settings_waiting",
            "note",
            f"changes of rsrv.yaml wait: {'; '.join(case.now.settings_waiting)}",
            "these keys are read at a start",
            "`rsrv restart`, which fails no request, or a new tritonserver where the line says so",
        )


def _shm_full(case: _Case) -> Iterator[ServerFinding]:
    free, total = case.now.shm or (0, 0)
    if total and free < 0.05 * total:
        yield ServerFinding(
            "shm_full",
            "warning",
            f"{amount(free)} of {amount(total)} of /dev/shm are free",
            "it holds the host copies of weights, and all inputs and outputs",
            "give the container more (--shm-size), or set runtime.shared_host_weights: false, which takes as "
            "much private memory for each device",
        )


def _traces_lost(case: _Case) -> Iterator[ServerFinding]:
    lost = {how: case.now.spans.get(how, 0) - case.before.spans.get(how, 0) for how in ("failed", "dropped")}
    if sum(lost.values()) > 0:
        yield ServerFinding(
            "traces_lost",
            "note",
            f"{lost['failed']} spans were not taken by the collector, {lost['dropped']} did not fit the buffer",
            "the collector of traces.endpoint is down or slow",
            "check the collector, or sample fewer requests; requests do not wait for it",
        )


def _uneven(case: _Case) -> Iterator[ServerFinding]:
    if len(case.windows) < 2:
        return
    most, least = (choose(case.windows, key=lambda one: one.busy) for choose in (max, min))
    if most.busy >= 0.9 and least.busy <= 0.3 and _waiting(most) >= _FEW:
        mode = case.now.settings.placement.mode
        yield ServerFinding(
            "uneven_devices",
            "warning",
            f"device {most.number} is busy {percent(most.busy)} of the time, device {least.number} {percent(least.busy)}",
            f"models are bound to devices (models.NAME.devices), have one replica, or placement.mode is {mode}",
            "`rsrv placement` shows why each model is where it is; placement.replicas: auto shares a busy one, "
            "which takes its weights twice",
        )


# --- of a device -----------------------------------------------------------------------------------------------


def _weights_thrash(case: _Case, window: DeviceWindow) -> Iterator[ServerFinding]:
    budget, models = window.counts["memory"]["device"]["budget_bytes"], window.models.values()
    arrived = sum(one.ended + one.queued for one in models)
    misses = sum(one.misses for one in models)
    evicted = sum(one.evictions.get("room", 0) for one in models)
    if budget is None or arrived < _FEW or misses < 0.2 * arrived or evicted < 5:
        return
    used = [one for one in models if one.ended or one.queued]
    asked = _together(case, window, used)
    load = merged(SECONDS, (one.load for one in models)).quantile(0.5)
    busiest = max(used, key=lambda one: one.misses).name
    pin = f"pin what must be fast (`rsrv pin {busiest}`; the others wait longer)"
    if case.now.settings.runtime.weight_budget_bytes is not None and asked > budget:
        cure = (
            f"raise runtime.weight_budget_bytes to {asked} ({amount(asked - budget)} more of the device's "
            f"memory), or {pin}"
        )
    else:
        cure = f"{pin}, set scheduler.eviction: cost, or serve on more devices"
    yield ServerFinding(
        "weights_thrash",
        "warning",
        f"weights thrash: {amount(asked)} are asked for, {amount(budget)} fit; {percent(min(1.0, misses / arrived))} "
        f"of {arrived} requests waited for weights, {duration(load)} a load at the median",
        f"{len(used)} models take turns on the device, and each load evicts what the next request needs",
        cure,
    )


def _over_pinned(case: _Case, window: DeviceWindow) -> Iterator[ServerFinding]:
    device = window.counts["memory"]["device"]
    if device["budget_bytes"] is not None and device["pinned_bytes"] > device["budget_bytes"]:
        yield ServerFinding(
            "over_pinned",
            "warning",
            f"{amount(device['pinned_bytes'])} of weights are pinned, {amount(device['budget_bytes'])} fit",
            "models with residency device are never evicted, so no other model finds room",
            "`rsrv unpin` the models that may wait for a load",
        )


def _too_big(case: _Case, window: DeviceWindow) -> Iterator[ServerFinding]:
    budget = window.counts["memory"]["device"]["budget_bytes"]
    if budget is None:
        return
    facts = case.now.facts
    names = [name for name in window.counts["models"] if name in facts and facts[name].device_bytes > budget]
    if names:
        size = max(facts[name].device_bytes for name in names)
        yield ServerFinding(
            "weights_too_big",
            "critical",
            f"{_named(sorted(names, key=by_number))}: weights of {amount(size)} never fit {amount(budget)}",
            "runtime.weight_budget_bytes, or the device's memory less what executions need",
            f"a budget of at least {size} bytes, a larger device, or weights of a smaller dtype",
        )


def _overloaded(case: _Case, window: DeviceWindow) -> Iterator[ServerFinding]:
    waiting, most = _waiting(window), window.busiest
    if most is None or window.busy < 0.9 or waiting < _FEW:
        return
    wait = merged(SECONDS, (one.queue_wait for one in window.models.values())).quantile(0.5)
    if wait is None or wait < 0.1:
        return
    yield ServerFinding(
        "overloaded",
        "warning",
        f"busy {percent(window.busy)} of the time, and {waiting} requests wait, {duration(wait)} at the median",
        f"more work comes than the device does; {most.name} has {percent(most.device_s / window.seconds)} of it",
        f"more devices, fewer requests, or larger batch sizes for {most.name} if its cost per row falls "
        f"(`rsrv status {most.name}`)",
    )


def _compiled(case: _Case, window: DeviceWindow) -> Iterator[ServerFinding]:
    seconds = Histogram.from_json(LONG_SECONDS, window.counts["compile"]).sum
    compiled, cached = (window.counts["executables"].get(one, 0) for one in ("compiled", "cache"))
    if seconds >= 10.0 and compiled > cached:
        folder = case.now.settings.runtime.compilation_cache_dir
        yield ServerFinding(
            "compiled_at_start",
            "note",
            f"{compiled} executables were compiled since this runtime's start: {duration(seconds)}",
            f"they were not in runtime.compilation_cache_dir ({folder or 'none'}): new models, a new jax, or a "
            "folder that does not outlive the container",
            "keep that folder on a volume, or ship executables (`rsrv-gen --compile-for`)",
        )


def _disk_loads(case: _Case, window: DeviceWindow) -> Iterator[ServerFinding]:
    host = window.counts["memory"]["host"]
    limit = host.get("limit_bytes")
    read = [
        one
        for one in window.models.values()
        if not one.has_host_copy
        and one.loads >= 3
        and (case.now.policy(one.name, "residency") or "system") != "unpinned"
    ]
    if read and limit is not None:
        yield ServerFinding(
            "disk_loads",
            "warning",
            f"weights of {_named([one.name for one in read])} were read from disk {sum(one.loads for one in read)} "
            f"times; host copies take {amount(host['physical_bytes'])} of {amount(limit)}",
            "host memory has no room for their copies",
            "raise runtime.host_memory_bytes or the container's limit",
        )


# --- of a model on a device: the model that is worst off speaks for all --------------------------------------------


def _failing(case: _Case, window: DeviceWindow, one: ModelActivity) -> ServerFinding | None:
    failed = max(one.requests.get("failed", 0), one.responses.get("internal", 0))
    total = max(one.ended, sum(one.responses.values()))
    if failed < 3 or failed < 0.01 * total:
        return None
    hooks = one.responses.get("internal", 0) > one.requests.get("failed", 0)
    return ServerFinding(
        "requests_fail",
        "critical",
        f"{one.name}: {failed} of {total} answers are failures of the server",
        "a function of its model.py raises or hangs" if hooks else "its executions or loads fail",
        "the log has a line with the reason for each; mend and export the bundle again",
    )


def _padding(case: _Case, window: DeviceWindow, one: ModelActivity) -> ServerFinding | None:
    total = one.rows + one.padding
    if one.executions < _FEW or one.padding < 0.5 * total:
        return None
    share, compiled = one.device_s / window.seconds, total / one.executions
    size, saved = best_size(one, case.now.facts.get(one.name))
    if size is None:
        return None
    gain = f" (saves up to {percent(saved)} of its device time" if saved else " ("
    return ServerFinding(
        "padding",
        "warning" if window.busy >= 0.5 and share >= 0.1 else "note",
        f"{percent(one.padding / total)} of the rows of {one.name} are padding ({one.padding} for {one.rows} of requests)",
        f"executions have {one.rows / one.executions:.2g} rows on average, and they are compiled for {compiled:.2g}",
        f"export batch size {size} as well{gain}{'; ' if saved else ''}costs one more compilation)",
    )


def _single_rows(case: _Case, window: DeviceWindow, one: ModelActivity) -> ServerFinding | None:
    facts = case.now.facts.get(one.name)
    if facts is None or not facts.costs or max(facts.costs) > 1 or one.executions < 2 * _FEW:
        return None
    if window.busy < 0.5 or one.device_s < 0.3 * window.seconds:
        return None
    wait = mean(one.queue_wait)
    if wait < 2 * mean(one.execute):
        return None
    return ServerFinding(
        "single_rows",
        "warning",
        f"{one.name} executes one row at a time while requests wait {duration(wait)} on average; it takes "
        f"{percent(one.device_s / window.seconds)} of the device",
        "its bundle has batch size 1 only, so requests cannot share an execution",
        "export batch sizes 1, 8 and 32; costs two more compilations, and memory of the largest",
    )


def _starved(case: _Case, window: DeviceWindow, one: ModelActivity) -> ServerFinding | None:
    most = window.busiest
    if most is None or most is one or window.busy < 0.8 or one.ended < 5 or one.misses >= 0.2 * one.ended:
        return None
    share, rival_share = (model.device_s / window.seconds for model in (one, most))
    if rival_share < 0.4 or share > 0.5 * rival_share or case.now.schedule("discipline") != "fair":
        return None
    wait = mean(one.queue_wait)
    if wait < max(0.01, 5 * mean(one.execute)):
        return None
    mine, other = (case.now.policy(model.name, "weight") or 1.0 for model in (one, most))
    evidence = f"{one.name} waits {duration(wait)} on average behind {most.name}, which has {percent(rival_share)} of the device"
    if wait < 2 * mean(most.execute):
        # Weights order executions, and interrupt none.
        return ServerFinding(
            "starved",
            "note",
            evidence,
            f"an execution of {most.name} takes {duration(mean(most.execute))}, one of {one.name} {duration(mean(one.execute))}",
            f"smaller batch sizes for {most.name}, which cost it device time for each row, or devices of their own "
            "(models.NAME.devices)",
        )
    return ServerFinding(
        "starved",
        "warning",
        f"{evidence} by weight {other:g}",
        f"{one.name} has weight {mine:g} and executes {duration(mean(one.execute))} at a time",
        f"`rsrv policy {one.name} --weight {2 * max(mine, other):g}`, which takes that time from {most.name}; "
        "models.NAME.weight keeps it",
    )


def _held_back(case: _Case, window: DeviceWindow, one: ModelActivity) -> ServerFinding | None:
    delay = (case.now.policy(one.name, "max_delay_us") or 0) / 1e6
    if not delay or one.executions < _FEW or mean(one.queue_wait) < 0.5 * delay:
        return None
    if one.ended > 1.2 * one.executions or window.busy > 0.5:
        return None
    return ServerFinding(
        "held_back",
        "note",
        f"requests of {one.name} wait {duration(mean(one.queue_wait))} for others, and {one.executions} executions "
        f"had {one.ended} requests",
        f"max_delay_us is {delay * 1e6:g}, and few requests come at the same time",
        f"`rsrv policy {one.name} --max-delay-us 0`; later bursts share fewer executions",
    )


def _slow_hooks(case: _Case, window: DeviceWindow, one: ModelActivity) -> ServerFinding | None:
    seconds = one.hook_seconds("pre", "post")
    if not seconds:
        return None
    requests = sum(one.request.counts)
    if requests < _FEW or seconds < 0.5 * one.request.sum or seconds < 0.005 * requests:
        return None
    return ServerFinding(
        "slow_hooks",
        "note",
        f"{one.name} spends {percent(min(1.0, seconds / one.request.sum))} of a request's "
        f"{duration(one.request.sum / requests)} in preprocess and postprocess",
        "these run in one Python process per model, on the CPU",
        "make them faster, move the work into the model, or send several requests at a time",
    )


def _queue_full(case: _Case, window: DeviceWindow, one: ModelActivity) -> ServerFinding | None:
    refused = one.refused.get("queue_full", 0)
    if refused < 5 or refused < 0.01 * one.ended:
        return None
    limit = case.now.policy(one.name, "max_queue_depth") or case.now.schedule("max_queue_depth")
    busy = window.busy >= 0.7
    return ServerFinding(
        "queue_full",
        "warning",
        f"{one.name} refused {refused} of {one.ended} requests (QUEUE_FULL); {limit} may wait",
        f"the device is busy {percent(window.busy)} of the time"
        + (": it cannot do more" if busy else ", so a short queue meets a burst, or weights load"),
        "more devices or slower clients; a longer queue only adds latency"
        if busy
        else f"`rsrv policy {one.name} --max-queue-depth {2 * limit}`; the last of a burst wait longer",
    )


def _no_memory(case: _Case, window: DeviceWindow, one: ModelActivity) -> ServerFinding | None:
    refused = one.refused.get("no_memory", 0)
    if not refused:
        return None
    device = window.counts["memory"]["device"]
    budget = device["budget_bytes"]
    free = None if budget is None else max(0, budget - device["held_bytes"])
    return ServerFinding(
        "no_memory",
        "critical",
        f"{one.name} refused {refused} of {one.ended} requests: {amount(_bytes(case, one))} of weights found no "
        f"memory, with {amount(free)} of the budget free",
        "the free memory is in pieces, pinned weights fill it, or another program has it",
        "`rsrv compact` (models wait for their loads meanwhile); if it comes again, a lower "
        "runtime.weight_budget_bytes, or fewer pinned models",
    )


def _not_resident(case: _Case, window: DeviceWindow, one: ModelActivity) -> ServerFinding | None:
    refused = one.refused.get("not_resident", 0)
    if refused < 5 or refused < 0.01 * one.ended:
        return None
    return ServerFinding(
        "not_resident",
        "warning",
        f"{one.name} refused {refused} of {one.ended} requests: its weights are not on the device",
        "lifecycle.mode is explicit: requests load no weights",
        f"the control plane must prefetch it first (`rsrv prefetch {one.name}`)",
    )


def _late(case: _Case, window: DeviceWindow, one: ModelActivity) -> ServerFinding | None:
    stage = max(one.missed, key=lambda stage: one.missed[stage], default="")
    late = one.missed.get(stage, 0)
    if late < 5 or late < 0.05 * one.ended:
        return None
    edf = case.now.schedule("discipline") == "edf"
    cause, cure = {
        "arrival": (
            "they had passed on arrival: a slow network, a client's clock that differs, or deadlines that are too short",
            "compare the clocks (chrony, NTP), or use gRPC's timeouts, which need no clock",
        ),
        "load": (
            f"requests wait for weights; a load takes {duration(mean(one.load) or None)}",
            f"`rsrv pin {one.name}` (others have less room), or a larger weight budget",
        ),
        "execute": (
            f"an execution takes {duration(mean(one.execute))}",
            "smaller batch sizes (models.NAME.max_batch_size), or later deadlines",
        ),
        "gate": (
            "runs of this meta model wait for admission",
            "raise scheduler.meta_concurrency; runs keep more tensors on the device",
        ),
    }.get(
        stage,
        (
            f"they wait for other executions; the device is busy {percent(window.busy)}",
            "more devices, or fewer requests"
            if edf
            else "`rsrv scheduler discipline=edf`; requests without a deadline then wait longest",
        ),
    )
    return ServerFinding(
        f"deadlines_{stage}",
        "warning",
        f"{one.name} missed {late} of {one.ended} deadlines",
        cause,
        cure,
    )


def _bad_requests(case: _Case, window: DeviceWindow, one: ModelActivity) -> ServerFinding | None:
    invalid, total = one.responses.get("invalid", 0), sum(one.responses.values())
    if invalid < 10 or invalid < 0.1 * total:
        return None
    return ServerFinding(
        "bad_requests",
        "note",
        f"{one.name} answered {invalid} of {total} requests with INVALID",
        "clients send wrong shapes, dtypes or names, or more rows than the largest batch size",
        "the error's message names the tensor and what is allowed",
    )


def _meta_waits(case: _Case, window: DeviceWindow, one: ModelActivity) -> ServerFinding | None:
    places = case.now.schedule("meta_concurrency")
    if one.running < places or one.queued < 4 * places or window.busy > 0.5:
        return None
    return ServerFinding(
        "meta_waits",
        "note",
        f"{one.queued} runs of {one.name} wait while the device is idle {percent(1 - window.busy)} of the time",
        f"scheduler.meta_concurrency lets {places} run at a time",
        f"`rsrv scheduler meta_concurrency={2 * places}`; runs keep more tensors on the device",
    )


_ServerRule = Callable[[_Case], Iterator[ServerFinding]]
_DeviceRule = Callable[[_Case, DeviceWindow], Iterator[ServerFinding]]
_ModelRule = Callable[[_Case, DeviceWindow, ModelActivity], ServerFinding | None]
_SERVER_RULES: tuple[_ServerRule, ...] = (
    _runtime_down,
    _model_failed,
    _not_served,
    _runtime_restarts,
    _paused,
    _settings,
    _shm_full,
    _uneven,
    _traces_lost,
)
_DEVICE_RULES: tuple[_DeviceRule, ...] = (
    _too_big,
    _weights_thrash,
    _over_pinned,
    _overloaded,
    _disk_loads,
    _compiled,
)
#: Rules for models, and for models and meta models.
_MODEL_RULES: tuple[_ModelRule, ...] = (
    _no_memory,
    _not_resident,
    _starved,
    _single_rows,
    _padding,
    _held_back,
)
_COMMON_RULES: tuple[_ModelRule, ...] = (
    _failing,
    _queue_full,
    _late,
    _slow_hooks,
    _meta_waits,
    _bad_requests,
)


def _worst(
    case: _Case, window: DeviceWindow, rule: _ModelRule, models: Mapping[str, ModelActivity]
) -> Iterator[ServerFinding]:
    """Yield one finding of each name: that of the model with most requests, naming the others."""
    several: dict[str, list[tuple[str, ServerFinding]]] = {}
    for one in models.values():
        if (finding := rule(case, window, one)) is not None:
            several.setdefault(finding.name, []).append((one.name, finding))
    for found in several.values():
        found.sort(key=lambda one: (-models[one[0]].ended, by_number(one[0])))
        worst = min((one for _, one in found), key=lambda one: SEVERITIES.index(one.severity))
        others = [name for name, one in found if one is not worst]
        yield replace(worst, evidence=worst.evidence + (f"; also {_named(others)}" if others else ""))


# --- words -----------------------------------------------------------------------------------------------


def _bytes(case: _Case, one: ModelActivity) -> int:
    facts = case.now.facts.get(one.name)
    return one.weight_bytes if facts is None else facts.device_bytes


def _together(case: _Case, window: DeviceWindow, used: list[ModelActivity]) -> int:
    """Return the bytes of these models and of the pinned ones, which have their room without requests."""
    sizes = {
        name: case.now.facts[name].device_bytes
        for name in window.counts["models"]
        if name in case.now.facts and case.now.policy(name, "residency") == "device"
    } | {one.name: _bytes(case, one) for one in used}
    shared = case.now.devices[window.number].shared
    # Tensors that models share are stored once.
    saved = sum(size * max(0, len(sizes.keys() & names) - 1) for size, names in shared)
    return sum(sizes.values()) - saved


def _waiting(window: DeviceWindow) -> int:
    return sum(one.queued for one in window.models.values())


def _named(names: list[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _span(case: _Case) -> str:
    return duration(case.now.t - case.before.t)


def _short(text: str) -> str:
    """Return the text as one line of bounded length."""
    line = " ".join(text.split())
    return line if len(line) <= 300 else line[:299] + "…"
