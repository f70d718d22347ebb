"""Rules for findings about a server and its devices. Each rule reads the figures and yields findings. Pure."""

from collections.abc import Callable, Iterator
from math import inf

from rsrv.control.figures import DeviceWindow, ModelActivity, budget_of, merged
from rsrv.control.findings import FEW, Case, ServerFinding, Severity
from rsrv.control.triton import HOW_TO_START
from rsrv.histogram import SECONDS
from rsrv.hooks.loader import import_limit_s
from rsrv.renewal import WARN_S
from rsrv.text import amount, by_number, duration, percent, some

#: After this many seconds without an answer, a runtime counts as missing. A restart takes less time.
_DOWN_S = 10.0
#: After this many seconds without a stub, a model counts as missing. Hundreds of stubs connect to a new runtime in less time.
_UNSERVED_S = 30.0
#: An import of model.py that takes longer than this many seconds is a finding. Large libraries on a slow disk take less.
_IMPORT_S = 30.0
#: If models wait longer than this many seconds for the server's start, the finding `not_served` is a warning, not a note.
_LONG_START_S = 600.0


# --- findings about the whole server --------------------------------------------------------------------------


def _runtime_down(case: Case) -> Iterator[ServerFinding]:
    for number, device in case.now.devices.items():
        if not device.asleep and device.down_s >= _DOWN_S:
            pid = device.silent_pid
            yield ServerFinding(
                "runtime_down",
                "critical",
                f"the runtime of device {number} has not answered for {duration(device.down_s)}",
                f"the runtime's process {pid} exists, but it is stopped or gets no processor time"
                if pid
                else device.obstacle or "the runtime's process ended, and no new runtime has started",
                f"if `ps {pid}` shows the state T (stopped), `kill -CONT {pid}`; otherwise `kill -9 {pid}`: the next runtime "
                "starts by itself, and gets the waiting requests"
                if pid
                else "fix the cause that the server's log reports; the next runtime then starts by itself",
            )


def _runtime_restarts(case: Case) -> Iterator[ServerFinding]:
    for number, device in case.now.devices.items():
        old = case.before.devices.get(number)
        times = 0 if old is None else device.lives - max(1, old.lives)  # `old` is None in the first snapshot.
        if times > 0:
            # `restarts` rises when the old runtime ends, and `lives` when the next one answers. So for a moment, there may be
            # more restarts than lives.
            planned = min(times, device.restarts - (0 if old is None else old.restarts))
            deaths = times - planned
            reasons = [
                *([f"the runtime of device {number} died {_count(deaths, 'time')}"] if deaths else []),
                *(
                    [f"`rsrv restart` replaced the runtime of device {number} {_count(planned, 'time')}"]
                    if planned
                    else []
                ),
            ]
            yield ServerFinding(
                "runtime_restarts",
                "warning" if deaths > 1 else "note",
                f"{', and '.join(reasons)}, in {_span(case)}",
                "the runtime crashed, hung, or was killed, for example by the kernel's out-of-memory killer"
                if deaths
                else "an operator's `rsrv restart`",
                "read the server's log, which has the reason and the model that executed; requests waited for the next runtime"
                if deaths
                else "nothing: requests waited for the next runtime",
            )


def _process_ended(case: Case) -> Iterator[ServerFinding]:
    old = case.before.process_ends
    ends = {name: times - old.get(name, 0) for name, times in case.now.process_ends.items()}
    names = sorted(
        (name for name, times in ends.items() if times > 0), key=lambda name: (-ends[name], by_number(name))
    )
    if names:
        most = names[0]
        also = f"; also {some(names[1:])}" if names[1:] else ""
        yield ServerFinding(
            "process_ended",
            "note",
            f"the process of {most} in Triton ended {_count(ends[most], 'time')} in {_span(case)}, and its requests "
            f"failed until the model was loaded again{also}",
            "the process was killed, for example by the kernel's out-of-memory killer, or model.py or one of its libraries crashed",
            "nothing, if the process ended once. If it ends again and again, read tritonserver's log, which has the reason above "
            "the line `its stub process is dead`",
        )


def _model_failed(case: Case) -> Iterator[ServerFinding]:
    entries = case.now.entries.values()
    named = {
        state: {entry["name"] for entry in entries if entry["state"] == state}
        for state in ("ready", "failed")
    }
    # Cold models count as ready, because the next request starts them. Cold models whose latest start failed do not count.
    ready = named["ready"] | case.now.cold - named["failed"]
    ready -= {name for name in ready if case.now.waits_for_import(name)}
    texts = {name: failure.text for name, failure in case.now.failures.items()}
    for entry in entries:
        if entry["state"] == "failed" and entry["name"] not in ready:
            texts.setdefault(entry["name"], entry["error"] or "")
    since = {name: failure.since for name, failure in case.now.failures.items()}
    kinds: tuple[tuple[str, Severity, str], ...] = (
        ("model_failed", "critical", "has failed"),
        ("bundle_refused", "warning", "is served in an older version"),
    )
    for name, severity, predicate in kinds:
        names = sorted(
            (model for model in texts if (model in ready) == (name == "bundle_refused")), key=by_number
        )
        if names:
            ages = [case.now.unix_s - since[model] for model in names if model in since]
            age = f", for {duration(max(ages))} now" if ages and max(ages) > 0 else ""
            reason = texts[names[0]]
            # If the reason ends with `barred`, the cause is in the server's flags and not in the bundle.
            remedy = (
                f"restart tritonserver to serve the bundles as they are now. To let it follow later changes, {HOW_TO_START}"
                if case.now.barred and reason.endswith(case.now.barred)
                else "fix the cause (`rsrv-bundle check` lists all faults of a bundle), then "
                f"`rsrv reload {names[0]}`"
            )
            yield ServerFinding(
                name,
                severity,
                f"{some(names)} {predicate if len(names) == 1 else predicate.replace('is ', 'are ').replace('has ', 'have ')}{age}",
                _short(reason) or "the log has the reason",
                remedy,
            )


def _slow_import(case: Case) -> Iterator[ServerFinding]:
    importing, threads = case.now.importing, case.now.load_threads
    slow = [name for name, (seconds, _) in importing.items() if seconds >= _IMPORT_S]
    if not slow:
        return
    longest, *further = sorted(slow, key=lambda name: (-importing[name][0], by_number(name)))
    seconds, line = importing[longest]
    where = f"line {line} of its model.py" if line else "its model.py"
    load_threads = f"imports hold {len(importing.keys() & case.now.loading)} of Triton's {_count(threads, 'load thread')}"
    blocked = case.now.starting or case.now.imports_hold_loads
    if case.now.starting:
        effect = "no model is served, because Triton opens its ports only after it has loaded all models of its start"
    elif longest in case.now.loading:
        effect = f"other models {'wait for this import' if blocked else 'load meanwhile'}: {load_threads}"
    else:
        effect = "the model's requests wait for the import"
    alone = case.now.waits_for_import(longest)
    limit = import_limit_s(case.now.settings.stub.hook_timeout_s)
    yield ServerFinding(
        "slow_import",
        "critical" if blocked or alone else "warning",
        f"{longest}'s model.py has been importing for {duration(seconds)}"
        f"{'' if alone else ', and an older version is served'}; {effect}{f'; also {some(further)}' if further else ''}",
        f"{where} loops, or waits for a download, a lock or another process",
        "end the wait, or put the files that it downloads into the bundle; "
        + (
            f"the import fails at {duration(limit)} (stub.hook_timeout_s), and the log has the stack"
            if limit is not None
            else "if stub.hook_timeout_s is a number, such an import fails at a limit"
        ),
    )


def _not_served(case: Case) -> Iterator[ServerFinding]:
    starting = {
        entry["name"] for entry in case.now.entries.values() if entry["state"] in ("loading", "failed")
    }
    explained = starting | case.now.failures.keys()
    waits = {name: s for name, s in case.now.missing.items() if s >= _UNSERVED_S and name not in explained}
    if not waits or not any(device.instance for device in case.now.devices.values()):
        return
    if case.now.imports_hold_loads:
        return  # The finding slow_import has the cause.
    names, longest = sorted(waits, key=by_number), max(waits.values())
    evidence = f"{some(names)} {'has' if len(names) == 1 else 'have'} not been served for {duration(longest)}"
    if case.now.starting:
        yield ServerFinding(
            "not_served",
            "warning" if longest >= _LONG_START_S else "note",
            evidence,
            "Triton is still starting, and loads its models one after the other",
            "wait, or read in tritonserver's log which load takes long; with --model-load-thread-count=N, tritonserver loads N "
            "models at a time",
        )
    else:
        yield ServerFinding(
            "not_served",
            "critical",
            evidence,
            "Triton could not load the model, was not asked to load it, or lost the model's process",
            f"read tritonserver's log, which has the reason, then `rsrv reload {names[0]}`. This needs tritonserver's "
            "--model-control-mode=explicit --load-model=*, with which failed loads are also retried by themselves",
        )


def _paused(case: Case) -> Iterator[ServerFinding]:
    paused = {entry["name"] for entry in case.now.entries.values() if entry["paused"]}
    waiting = {
        name: activity.now.queued + activity.refused.get("paused", 0)
        for window in case.windows
        for name, activity in window.models.items()
        if name in paused
    }
    names = sorted((name for name, count in waiting.items() if count), key=by_number)
    if names:
        yield ServerFinding(
            "paused",
            "warning",
            f"{some(names)} {'is' if len(names) == 1 else 'are'} paused: {sum(waiting.values())} requests wait or were refused",
            "an operator's `rsrv pause`",
            f"`rsrv continue {names[0]}`, or `rsrv continue --all`",
        )


def _settings(case: Case) -> Iterator[ServerFinding]:
    if case.now.settings_refused:
        yield ServerFinding(
            "settings_refused",
            "warning",
            f"the settings file is not used: {_short(case.now.settings_refused)}",
            "the file has an error, so the server keeps its earlier settings",
            "fix the file; the server reads it again when it changes",
        )
    if case.now.settings_waiting:
        yield ServerFinding(
            "settings_waiting",
            "note",
            f"changes of rsrv.yaml are not in force yet: {'; '.join(case.now.settings_waiting)}",
            "these keys are read only when a runtime or tritonserver starts",
            "`rsrv restart`: requests wait a moment, and none fails. For the keys with `restart the server`, start tritonserver again",
        )


def _openai_closed(case: Case) -> Iterator[ServerFinding]:
    if case.now.openai_closed:
        yield ServerFinding(
            "openai_closed",
            "note",
            f"OpenAI's endpoints are off: {_short(case.now.openai_closed)}",
            "there is a model with a task, and without keys every machine that reaches the port could call the model",
            "write the callers' keys into the file that openai.keys_file names: the port opens within seconds. Or set "
            "openai.listen: null",
        )


def _shm_full(case: Case) -> Iterator[ServerFinding]:
    shm = case.now.shm
    if shm is None or not shm.is_short:
        return
    largest = max(shm.requests, key=lambda name: shm.requests[name], default="")
    most = shm.requests.get(largest, 0)
    uses = [
        (f"inputs and outputs of requests for {largest}", most),
        ("requests for other models", sum(shm.requests.values()) - most),
        ("host copies of weights", shm.weights),
        ("other files", shm.others),
    ]
    used = ", ".join(f"{use} take {amount(size)}" for use, size in uses if size)
    # Give advice only about users of at least a tenth of the used bytes. Other advice would free too little.
    notable = 0.1 * (shm.total - shm.free)
    cures = ["give the container more /dev/shm (--shm-size)"]
    if most >= notable:
        cures.append(
            f"let fewer requests of {largest} wait (models.{largest}.max_queue_depth) or send smaller ones: Triton keeps the "
            "memory of their peak until the model is loaded again"
        )
    if shm.weights >= notable:
        cures.append(
            "set runtime.shared_host_weights: false, so that each device keeps its own copies in private memory"
        )
    yield ServerFinding(
        "shm_full",
        "warning",
        f"{amount(shm.free)} of {amount(shm.total)} of /dev/shm are free",
        used or "/dev/shm has no room",
        ", or ".join(cures),
    )


def _traces_lost(case: Case) -> Iterator[ServerFinding]:
    lost = {how: case.now.spans.get(how, 0) - case.before.spans.get(how, 0) for how in ("failed", "dropped")}
    if sum(lost.values()) > 0:
        yield ServerFinding(
            "traces_lost",
            "note",
            f"the collector did not accept {lost['failed']} spans of traces, and {lost['dropped']} did not fit into the buffer",
            "the collector of traces.endpoint is down or slow",
            "check the collector, or let clients trace fewer requests. Requests do not wait for the collector",
        )


def _renewals(case: Case) -> Iterator[ServerFinding]:
    for file in case.now.renewals:
        if file.problem:
            yield ServerFinding(
                "renewal_failed",
                "warning",
                f"the changed files of {file.setting} cannot be used, so the last valid ones stay in use",
                file.problem,
                "replace the files: they are read again within seconds",
            )
        left = inf if file.ends_at is None else file.ends_at - case.now.unix_s
        if left <= WARN_S:
            ends = f"ends in {duration(left)}" if left > 0 else f"ended {duration(-left)} ago"
            yield ServerFinding(
                "certificate_ends",
                "warning" if left > 0 else "critical",
                f"the certificate of {file.setting} {ends}",
                "the certificate's file has not been replaced",
                "replace the file: a renewed certificate is used within seconds, without a restart",
            )


def _waits_in_triton(case: Case) -> Iterator[ServerFinding]:
    seconds, idle = case.now.t - case.before.t, 1 - max((window.busy for window in case.windows), default=1.0)
    waits = {}
    for name, (count, total) in case.now.queues.items():
        old_count, old_total = case.before.queues.get(name, (0, 0.0))
        # By Little's law, the average number of waiting requests is the sum of all waits divided by the time. Require an
        # average of at least 1.
        if total - old_total >= seconds and count - old_count >= FEW:
            waits[name] = (total - old_total) / (count - old_count)
    worst = max(waits, key=lambda name: waits[name], default="")
    if seconds < _DOWN_S or idle < 0.5 or not worst or waits[worst] < 0.005:
        return
    yield ServerFinding(
        "waits_in_triton",
        "warning" if waits[worst] >= 0.05 else "note",
        f"the device is idle {percent(idle)} of the time while requests for {some(sorted(waits, key=by_number))} wait in "
        f"Triton, {duration(waits[worst])} on average for {worst}",
        f"the process of {worst} in Triton takes one batch at a time, and gets too little processor time",
        f"give the server more processors, or do less in model.py. If there is no model.py, set models.{worst}.front: native, "
        "which needs no Python and applies from the next start of the server",
    )


def _uneven(case: Case) -> Iterator[ServerFinding]:
    if len(case.windows) < 2:
        return
    most, least = (choose(case.windows, key=lambda window: window.busy) for choose in (max, min))
    busiest, waiting = most.busiest, _waiting(most)
    if busiest is None or most.busy < 0.9 or least.busy > 0.3 or waiting < FEW:
        return
    cause, cure = _binding(case, busiest.name, least.number)
    yield ServerFinding(
        "uneven_devices",
        "warning",
        f"device {most.number} is busy {percent(most.busy)} of the time and {waiting} requests wait for it, "
        f"while device {least.number} is busy {percent(least.busy)}",
        f"{busiest.name} has {percent(busiest.device_s / most.seconds)} of device {most.number}, and {cause}",
        cure,
    )


def _binding(case: Case, name: str, free: int) -> tuple[str, str]:
    """Return the reason why a model does not also run on the device `free`, and the cure."""
    placement, devices = case.now.settings.placement, case.now.policy(name, "devices")
    both = f"{name}'s weights then take memory on both devices"
    if placement.mode == "external":
        return (
            "a gateway places models (placement.mode: external)",
            f"`rsrv gateway status {name}` shows the gateway's reason",
        )
    if devices is not None and free not in devices:
        key = f"models.{name}.devices"
        return f"{key}: {devices} excludes device {free}", f"add {free} to {key} in rsrv.yaml; {both}"
    own = case.now.policy(name, "replicas")
    key = "placement.replicas" if own is None else f"models.{name}.replicas"
    replicas = placement.replicas if own is None else own
    if replicas != "auto":
        return f"{key} is {replicas}", f"set {key}: auto in rsrv.yaml; {both}"
    return (
        f"its weights have no room on device {free}, or it stays with a model that shares its tensors or calls it",
        f"`rsrv placement` shows the weights and the budget of each device, and why {name} is where it is",
    )


# --- findings about one device ---------------------------------------------------------------------------------


def _weights_thrash(case: Case, window: DeviceWindow) -> Iterator[ServerFinding]:
    budget, models = budget_of(window), window.models.values()
    arrived = sum(model.ended + model.now.queued for model in models)
    misses = sum(model.grown("misses") for model in models)
    evicted = sum(model.counted("evictions").get("room", 0) for model in models)
    if budget is None or arrived < FEW or misses < 0.2 * arrived or evicted < 5:
        return
    used = [model for model in models if model.ended or model.now.queued]
    needed = _together(case, window, used)
    load = merged(SECONDS, (model.measured("load") for model in models)).quantile(0.5)
    busiest = max(used, key=lambda model: model.grown("misses")).name
    pin = f"pin the models that must be fast (`rsrv pin {busiest}`; the other models wait longer)"
    if case.now.settings.runtime.weight_budget_bytes is not None and needed > budget:
        cure = (
            f"set runtime.weight_budget_bytes: {needed} in rsrv.yaml ({amount(needed - budget)} more of the device's "
            f"memory) and `rsrv restart`, or {pin}"
        )
    else:
        cure = f"{pin}, or serve on more devices"
    yield ServerFinding(
        "weights_thrash",
        "warning",
        f"weights thrash: requests need {amount(needed)}, but {amount(budget)} fit; {percent(min(1.0, misses / arrived))} "
        f"of {arrived} requests waited for weights, and a load takes {duration(load)} at the median",
        f"{len(used)} models take turns on the device, and each load evicts what the next request needs",
        cure,
    )


def _over_pinned(case: Case, window: DeviceWindow) -> Iterator[ServerFinding]:
    budget, pinned = budget_of(window), window.records.device.memory.pinned_bytes
    if budget is not None and pinned > budget:
        yield ServerFinding(
            "over_pinned",
            "warning",
            f"{amount(pinned)} of weights are pinned, but only {amount(budget)} fit",
            "pinned models (residency: device) are never evicted: executions may find no memory, and the other models are "
            "served one at a time, beyond the budget",
            "`rsrv unpin` the models that may wait for a load",
        )


def _too_big(case: Case, window: DeviceWindow) -> Iterator[ServerFinding]:
    budget = budget_of(window)
    if budget is None:
        return
    sizes = {name: model.device_bytes for name, model in window.records.models.items()}
    names = [name for name, size in sizes.items() if size > budget]
    if names:
        size = max(sizes[name] for name in names)
        yield ServerFinding(
            "weights_too_big",
            "warning",
            f"{some(sorted(names, key=by_number))}: weights of {amount(size)} do not fit the budget of {amount(budget)}",
            "such a model is served alone, beyond the budget, and each of its loads evicts all others",
            f"set runtime.weight_budget_bytes to at least {size} bytes if the device has them, use a larger device, or "
            "export weights of a smaller dtype",
        )


def _overloaded(case: Case, window: DeviceWindow) -> Iterator[ServerFinding]:
    waiting, most = _waiting(window), window.busiest
    if most is None or window.busy < 0.9 or waiting < FEW:
        return
    wait = merged(SECONDS, (model.queue_wait for model in window.models.values())).quantile(0.5)
    if wait is None or wait < 0.1:
        return
    yield ServerFinding(
        "overloaded",
        "warning",
        f"the device is busy {percent(window.busy)} of the time, and {waiting} requests wait; the median wait is {duration(wait)}",
        f"requests bring more work than the device can do; {most.name} takes {percent(most.device_s / window.seconds)} of it",
        f"add devices, send fewer requests, or export larger batch sizes for {most.name} if a row then costs less "
        f"(`rsrv status {most.name}` shows the cost of each size)",
    )


def _compiled(case: Case, window: DeviceWindow) -> Iterator[ServerFinding]:
    device = window.records.device
    seconds, compiled, cached = device.compile.sum, device.compiled, device.from_cache
    if seconds >= 10.0 and compiled > cached:
        folder = case.now.settings.runtime.compilation_cache_dir
        yield ServerFinding(
            "compiled_at_start",
            "note",
            f"{compiled} executables were compiled since this runtime's start, which took {duration(seconds)}",
            "runtime.compilation_cache_dir is null, so each start compiles all models"
            if folder is None
            else f"the executables were not in {folder} (runtime.compilation_cache_dir): the models or the version of jax are new there",
            "set runtime.compilation_cache_dir to a folder on a volume, or ship executables (`rsrv-gen --compile-for`)"
            if folder is None
            else "nothing, if they were new: the next start finds the executables. If each start compiles, the folder does not outlive "
            "the container: keep the folder on a volume, or ship executables (`rsrv-gen --compile-for`)",
        )


def _no_cache(case: Case, window: DeviceWindow) -> Iterator[ServerFinding]:
    if obstacle := window.records.device.cache_obstacle:
        folder = case.now.settings.runtime.compilation_cache_dir
        yield ServerFinding(
            "no_compilation_cache",
            "warning",
            "executables are kept only until this server ends: each start of the server compiles all models",
            f"runtime.compilation_cache_dir ({folder}) cannot be used: {obstacle}",
            "mount a folder at this path that this user can write and that outlives the container, or set "
            "runtime.compilation_cache_dir to such a folder, or ship executables (`rsrv-gen --compile-for`). If you do not want "
            "a cache, set the key to null",
        )


def _disk_loads(case: Case, window: DeviceWindow) -> Iterator[ServerFinding]:
    device = window.records.device
    read = [
        model
        for model in window.models.values()
        if model.now.device_bytes
        and not model.now.host_bytes
        and model.grown("loads") >= 3
        and (case.now.policy(model.name, "residency") or "system") != "unpinned"
    ]
    if read and device.HasField("host_limit_bytes"):
        yield ServerFinding(
            "disk_loads",
            "warning",
            f"weights of {some([model.name for model in read])} were read from disk {sum(model.grown('loads') for model in read)} "
            f"times; host copies take {amount(device.host.physical_bytes)} of {amount(device.host_limit_bytes)}",
            "host memory has no room for copies of these weights",
            "raise runtime.host_memory_bytes, or the memory limit of the container",
        )


def _together(case: Case, window: DeviceWindow, used: list[ModelActivity]) -> int:
    """Return the bytes of the `used` and the pinned models. Pinned models keep their memory even without requests."""
    sizes = {
        name: model.device_bytes
        for name, model in window.records.models.items()
        if not model.meta and case.now.policy(name, "residency") == "device"
    } | {model.name: model.now.device_bytes for model in used}
    # Count each shared tensor only once.
    saved = sum(
        group.bytes * max(0, len(sizes.keys() & {*group.models}) - 1) for group in window.records.shared
    )
    return sum(sizes.values()) - saved


def _waiting(window: DeviceWindow) -> int:
    return sum(model.now.queued for model in window.models.values())


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _span(case: Case) -> str:
    return duration(case.now.t - case.before.t)


def _short(text: str) -> str:
    """Return the text as one line of at most 300 characters."""
    line = " ".join(text.split())
    return line if len(line) <= 300 else line[:299] + "…"


_ServerRule = Callable[[Case], Iterator[ServerFinding]]
_DeviceRule = Callable[[Case, DeviceWindow], Iterator[ServerFinding]]
SERVER_RULES: tuple[_ServerRule, ...] = (
    _runtime_down,
    _model_failed,
    _slow_import,
    _not_served,
    _runtime_restarts,
    _process_ended,
    _paused,
    _settings,
    _openai_closed,
    _shm_full,
    _uneven,
    _waits_in_triton,
    _traces_lost,
    _renewals,
)
DEVICE_RULES: tuple[_DeviceRule, ...] = (
    _too_big,
    _weights_thrash,
    _over_pinned,
    _overloaded,
    _disk_loads,
    _no_cache,
    _compiled,
)
