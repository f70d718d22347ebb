"""Functions that print the control service's answers for people."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence

from rsrv.cli.changes import shown
from rsrv.cli.device_pages import shared_bytes, shared_with_each, weights_text
from rsrv.cli.output import headline, print_pairs, print_section, print_table
from rsrv.control.aliases import answered, copies, errors, share
from rsrv.control.grpc_service import word
from rsrv.control.sentences import failed_how, life, lives, meta_facts, model_facts, state_of, weights_of
from rsrv.control.v1 import control_pb2 as pb
from rsrv.terminal import styled
from rsrv.text import amount, duration, one_line, some


def status_page(answer: pb.GetStatusResponse) -> None:
    """Print the server, the models that are neither cold nor asleep, the meta models, the aliases and the failures."""
    _print_server(answer)
    where = lives(answer)
    models_table(answer, [model for model in answer.models if where[model.name] not in ("cold", "asleep")])
    _print_aliases(answer)
    _print_failures(answer)


def pattern_page(answer: pb.GetStatusResponse) -> None:
    """Print the models, meta models and aliases that match a pattern, and the failures."""
    models_table(answer, answer.models)
    _print_aliases(answer)
    _print_failures(answer)


def alias_status_page(answer: pb.GetStatusResponse, name: str) -> None:
    """Print the details of an alias, and of the models behind it."""
    (alias,) = (shown for shown in answer.aliases if shown.name == name)
    sums = [sum(map(count, alias.targets)) for count in (answered, errors)]
    pairs = [("alias", name), ("requests", f"{sums[0]} answered, {sums[1]} errors")]
    print_pairs([*pairs, ("not in force", one_line(alias.failure))] if alias.failure else pairs)
    del answer.aliases[:]
    answer.aliases.append(alias)
    _print_aliases(answer)
    models_table(answer, answer.models)
    _print_failures(answer)


def doctor_page(answer: pb.DiagnoseResponse) -> None:
    """Print the findings, each with its cause and the change that cures it."""
    counts = Counter(word(pb.Severity, finding.severity) for finding in answer.findings)
    counted = ", ".join(
        f"{count} {word}{'s' if word != 'critical' and count > 1 else ''}" for word, count in counts.items()
    )
    print(f"{counted or 'no findings'}, from the figures of the last {duration(answer.seconds)}")
    for finding in answer.findings:
        print(
            f"\n{styled(word(pb.Severity, finding.severity))}: {one_line(finding.evidence)}  [{finding.name}]"
        )
        print(f"  why: {one_line(finding.cause)}")
        print(f"  do:  {one_line(finding.cure)}")


def alias_page(answer: pb.SetAliasResponse) -> None:
    """Print each alias with the models behind it."""
    for alias in answer.aliases:
        print(alias_line(alias))
    if not answer.aliases:
        print("no aliases")


def alias_line(alias: pb.Alias) -> str:
    """Return an alias with the models behind it, and their shares of its requests."""
    parts = [f"{target.model} {share(alias, target)}" for target in alias.targets]
    failure = f" (not in force: {one_line(alias.failure)})" if alias.failure else ""
    return f"{alias.name}: {', '.join(parts)}{failure}"


def models_table(answer: pb.GetStatusResponse, models: Sequence[pb.ModelStatus]) -> None:
    """Print a line for each of these models, and for each meta model."""
    where = lives(answer)
    print_section(
        models,
        {
            "MODEL": lambda model: model.name,
            "STATE": lambda model: where[model.name],
            "PAUSED": lambda model: word(pb.Pause, model.paused),
            **({"ON": lambda model: " ".join(_holders(model))} if len(answer.devices) > 1 else {}),
            "SIZE": lambda model: amount(model.record.device_bytes),
            "QUEUED": lambda model: str(model.record.queued),
            "RUNNING": lambda model: str(model.record.executing),
            "ANSWERED": lambda model: str(model.record.outcomes.get("answered", 0)),
            "ERRORS": lambda model: str(
                sum(model.record.outcomes.values()) - model.record.outcomes.get("answered", 0)
            ),
            "MISSES": lambda model: str(model.record.misses),
            "DEVICE TIME": lambda model: duration(model.record.device_seconds),
            "RESIDENCY": lambda model: word(pb.Residency, model.record.residency),
            "STUBS": _stubs,
        },
    )
    print_section(
        answer.metas,
        {
            "META MODEL": lambda meta: meta.name,
            "STATE": lambda meta: where[meta.name],
            "STUBS": _stubs,
            "QUEUED": lambda meta: str(meta.record.queued),
            "RUNNING": lambda meta: str(meta.record.executing),
            "ENDED": lambda meta: str(sum(meta.record.outcomes.values())),
            "CALLS": lambda meta: str(meta.record.calls),
            "DEVICE TIME": lambda meta: duration(meta.record.device_seconds),
            "PAUSED": lambda meta: word(pb.Pause, meta.paused),
            "CALLS MODELS": lambda meta: ", ".join(meta.record.calls_models),
        },
    )


def _print_aliases(answer: pb.GetStatusResponse) -> None:
    """Print a line for each model behind each alias."""
    where = lives(answer)
    rows = [(alias, target) for alias in answer.aliases for target in alias.targets]
    print_section(
        rows,
        {
            "ALIAS": lambda row: row[0].name,
            "MODEL": lambda row: row[1].model,
            "SHARE": lambda row: share(*row),
            "STATE": lambda row: where.get(row[1].model, ""),
            "ANSWERED": lambda row: str(answered(row[1])),
            "ERRORS": lambda row: str(errors(row[1])),
            **({"COPIES": lambda row: copies(row[1])} if any(target.shadow for _, target in rows) else {}),
        },
    )


def model_page(answer: pb.GetStatusResponse, memory: pb.GetMemoryResponse | None = None) -> None:
    """Print the details of one model or meta model. `memory` has the memory of all models, to show shared tensors."""
    for model in answer.models:
        pairs = [
            ("model", model.name),
            ("state", lives(answer)[model.name]),
            ("weights", f"{amount(model.record.device_bytes)}{_sharing(memory, model.name)}{_places(model)}"),
            *([("task", model.record.task)] if model.record.task else []),
            ("residency", word(pb.Residency, model.record.residency)),
            ("paused", word(pb.Pause, model.paused) or "no"),
            *_aliases_of(answer, model.name),
            *model_facts(model),
        ]
        print_pairs(pairs)
        _print_versions(model.versions)
        if len(answer.devices) > 1:
            print()
            print_table(
                model.devices,
                {
                    "DEVICE": lambda device: str(device.number),
                    "STATE": lambda device: life(
                        word(pb.State, device.record.state), weights_of(device.record)
                    ),
                    "QUEUED": lambda device: str(device.record.queued),
                    "RUNNING": lambda device: str(device.record.executing),
                    "EXECUTIONS": lambda device: str(device.record.dispatches),
                    "BUSY": lambda device: duration(device.record.device_seconds),
                    "MISSES": lambda device: str(device.record.misses),
                    "LOADS": lambda device: str(device.record.loads),
                    "ERROR": lambda device: one_line(device.error),
                },
            )
        print_section(
            model.record.executables,
            {
                "VARIANT": lambda executable: str(executable.variant),
                "SIZE": lambda executable: str(executable.size),
                "EXECUTIONS": lambda executable: str(executable.count),
                "COST": lambda executable: (
                    duration(executable.cost_s) if executable.HasField("cost_s") else "-"
                ),
                "PRODUCTS OF F32": lambda executable: _precision(executable.precision),
            },
        )
    for meta in answer.metas:
        print_pairs(
            [
                ("meta model", meta.name),
                ("paused", word(pb.Pause, meta.paused) or "no"),
                *meta_facts(meta),
            ]
        )
        _print_versions(meta.versions)
    _print_failures(answer)


def _aliases_of(answer: pb.GetStatusResponse, model: str) -> list[tuple[str, str]]:
    """Return the line about the aliases that lead to a model, if there are any."""
    aliases = [
        f"{alias.name} ({share(alias, target)})"
        for alias in answer.aliases
        for target in alias.targets
        if target.model == model
    ]
    return [("aliases", ", ".join(aliases))] if aliases else []


def reasons(answer: pb.GetStatusResponse) -> list[str]:
    """Return the reasons why a server, or the one model in its status, does not serve."""
    where = lives(answer)
    lines = [
        f"{failure.name} {_failed(failure, where)}: {one_line(failure.text)}" for failure in answer.failures
    ]
    named = {failure.name for failure in answer.failures}
    for model in (*answer.models, *answer.metas):
        version = model.versions[-1] if model.versions else None
        state = life(state_of(model.versions), "", model.starting)
        if model.name in named or state == "cold":
            continue
        if version is None:
            lines.append(f"{model.name} is not loaded")
        elif state != "ready":
            lines.append(
                f"{model.name} {state if state == 'failed' else f'is {state}'}"
                + (f": {one_line(version.error)}" if version.error else "")
            )
        elif not any(version.stubs for version in model.versions):
            lines.append(f"{model.name} has no stub process; the model is loaded again")
    above = ("model_failed", "not_served")
    lines += [
        one_line(finding.evidence)
        for finding in answer.findings
        if finding.severity == pb.SEVERITY_CRITICAL and finding.name not in above
    ]
    return lines or ["a model of the repository is not loaded; the server's log says why"]


def scheduler_page(answer: pb.SetSchedulerResponse) -> None:
    print_pairs([(field.name, shown(field, value)) for field, value in answer.scheduler.ListFields()])


def print_update(update: pb.WatchStateResponse) -> None:
    """Print the lines about an update at once."""
    match update.WhichOneof("update"):
        case "snapshot":
            snapshot = update.snapshot
            print(
                f"runtime {snapshot.instance}{_which(snapshot.device)}, revision {snapshot.revision}",
                flush=True,
            )
            for entry in snapshot.entries:
                _print_entry(snapshot, entry.version.key, entry)
        case "change":
            change = update.change
            _print_entry(change, change.key, change.entry if change.HasField("entry") else None)
        case "down":
            print(f"the runtime{_which(update.down.device)} does not answer", flush=True)
        case "failures":
            failed = (
                f"{failure.name} is not served as its bundle is now: {one_line(failure.text)}"
                for failure in update.failures.failures
            )
            print("\n".join(failed) or "all models are served as their bundles are now", flush=True)


def _which(device: int) -> str:
    return f" of device {device}" if device else ""


def _print_entry(where: pb.Snapshot | pb.Change, key: str, entry: pb.Entry | None) -> None:
    """Print a line that begins with the revision. The device follows, unless it is device 0."""
    number = f"{where.revision}{_which(where.device)}"
    if entry is None:
        print(f"{number} {key} was removed", flush=True)
        return
    version = entry.version
    parts = [
        life(word(pb.State, version.state), word(pb.Weights, version.weights)),
        word(pb.Residency, entry.residency) and f"residency {word(pb.Residency, entry.residency)}",
        f"{len(version.stubs)} stub{'' if len(version.stubs) == 1 else 's'}",
        word(pb.Pause, version.paused) and f"paused ({word(pb.Pause, version.paused)})",
        one_line(version.error),
    ]
    print(f"{number} {key} {', '.join(filter(None, parts))}", flush=True)


def _print_server(answer: pb.GetStatusResponse) -> None:
    server, scheduler = answer.server, answer.scheduler
    live = [device for device in answer.devices if device.HasField("record")]
    findings = [(word(pb.Severity, finding.severity), finding.evidence) for finding in answer.findings]
    severity, colon, evidence = headline(findings, "`rsrv doctor`").partition(":")
    pairs = [("findings", f"{styled(severity)}{colon}{evidence}")] if severity else []
    pairs += [("server", f"tritonserver {server.pid}, {word(pb.Mode, server.mode)}, {server.repository}")]
    for device in answer.devices:
        if len(answer.devices) > 1:
            pairs.append((f"device {device.number}", _device_name(device)))
        if device.HasField("record"):
            pairs += _device_pairs(device, alone=len(answer.devices) == 1)
        elif len(answer.devices) == 1:
            pairs.append(("device", _device_name(device)))
    if live:
        runtime = live[0].record
        computes = f"; the device multiplies in {runtime.computes}" if runtime.computes else ""
        pairs += [
            ("numerics", word(pb.Numerics, runtime.numerics) + computes),
            ("scheduler", f"{word(pb.Discipline, scheduler.discipline)}, depth {scheduler.depth}"),
        ]
    if answer.models:
        pairs.append(("models", _count(answer)))
    pairs += [("rsrv.yaml", note) for note in server.settings_notes]
    print_pairs(pairs)


def _device_name(device: pb.DeviceStatus) -> str:
    memory = device.record.memory
    if device.HasField("asleep_since_unix_s"):
        since = time.strftime("%H:%M:%S", time.localtime(device.asleep_since_unix_s))
        return f"asleep since {since}; the next request or `rsrv wake` wakes it"
    if not device.HasField("record"):
        since = time.strftime("%H:%M:%S", time.localtime(device.down_since_unix_s))
        return f"its runtime has not answered since {since}; " + (device.error or "see the server's log")
    if device.error:
        return f"none: {device.error}"
    limit = (
        f", {amount(memory.limit_bytes)} for weights and executions" if memory.HasField("limit_bytes") else ""
    )
    card = device.card
    used = f", {amount(card.used_bytes)} of {amount(card.total_bytes)} in use" if card.total_bytes else ""
    return f"{memory.name or 'none yet'}{limit}{used}"


def _device_pairs(device: pb.DeviceStatus, *, alone: bool) -> list[tuple[str, str]]:
    """Return the lines about a device whose runtime answers. With several devices, the lines are indented."""
    runtime, memory = device.record, device.record.memory
    budget = f" of {amount(memory.budget_bytes)}" if memory.HasField("budget_bytes") else ""
    pairs = [
        (
            "runtime",
            (
                f"{runtime.pid}, up {duration(runtime.uptime_s)}, instance {runtime.instance}, "
                f"{runtime.compiled} compiled, {runtime.from_cache} from the cache"
            ),
        ),
        (
            "weights",
            (
                f"{weights_text(memory)}{budget} on the device, "
                f"{amount(memory.pinned_bytes)} pinned; "
                f"{weights_text(runtime.host)} in host memory"
            ),
        ),
    ]
    if alone:
        return [pairs[0], ("device", _device_name(device)), pairs[1]]
    return [(f"  {name}", text) for name, text in pairs]


def _sharing(memory: pb.GetMemoryResponse | None, name: str) -> str:
    """Return a text with the bytes of weights that only this model has, and the bytes that it shares with other models.

    The text is empty if the model shares no tensors.
    """
    for use in () if memory is None else memory.devices:
        for model in use.record.models:
            if model.name == name and (sharers := shared_with_each(use).get(name)):
                shared = amount(shared_bytes(use, model))
                return f", {amount(use.own_bytes[name])} own, {shared} shared with {some(sharers)}"
    return ""


def _places(model: pb.ModelStatus) -> str:
    """Return a text that lists the devices with a model's weights.

    It is empty if no device has the weights, or if only one device knows the model.
    """
    holders = _holders(model)
    return f" on device {', '.join(holders)}" if holders and len(model.devices) > 1 else ""


def _holders(model: pb.ModelStatus) -> list[str]:
    """Return the devices that have the weights of a model."""
    return [str(device.number) for device in model.devices if device.record.weights == pb.WEIGHTS_RESIDENT]


def _print_failures(answer: pb.GetStatusResponse) -> None:
    for model in answer.models:
        for device in model.devices if state_of(model.versions) == "ready" else ():
            if device.record.state == pb.STATE_FAILED:
                print(f"\n{model.name} does not run on device {device.number}: {one_line(device.error)}")
    where = lives(answer)
    for failure in answer.failures:
        tries = f"{failure.tries} {'try' if failure.tries == 1 else 'tries'}"
        print(f"\n{failure.name} {_failed(failure, where)}, {tries}: {one_line(failure.text)}")


def _failed(failure: pb.Failure, where: Mapping[str, str]) -> str:
    """Return how a failure affects its model. `where` is the state of each model."""
    return failed_how(serves=where.get(failure.name, "failed") != "failed")


def _print_versions(versions: Sequence[pb.Version]) -> None:
    print_section(
        versions,
        {
            "VERSION": lambda version: version.key,
            "STATE": lambda version: life(word(pb.State, version.state), word(pb.Weights, version.weights)),
            "STUBS": lambda version: " ".join(map(str, version.stubs)),
            "ERROR": lambda version: one_line(version.error),
        },
    )


def _precision(precision: pb.Precision) -> str:
    """Return a text with the number of products of each precision, if it is not 0. docs/exporting.md explains the names."""
    counts = [(field.name, value) for field, value in precision.ListFields() if field.name != "ungovernable"]
    ungovernable = sorted(precision.ungovernable.items())
    return ", ".join(f"{name} {count}" for name, count in (*counts, *ungovernable)) or "none"


def _count(answer: pb.GetStatusResponse) -> str:
    """Return a text with the number of models in each state. Details of states are left out."""
    metas = {meta.name for meta in answer.metas}
    counts = Counter(text.partition(",")[0] for name, text in lives(answer).items() if name not in metas)
    text = ", ".join(f"{count} {word}" for word, count in sorted(counts.items()))
    return text + (" (`rsrv status '*'` lists them)" if counts["cold"] or counts["asleep"] else "")


def _stubs(model: pb.ModelStatus) -> str:
    """Return the number of a model's stubs."""
    return str(len({pid for version in model.versions for pid in version.stubs}))
