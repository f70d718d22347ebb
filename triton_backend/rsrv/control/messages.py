"""Converts reports of runtimes to the service's messages, and messages to settings. Pure."""

from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import Any

from google.protobuf.message import Message

from rsrv.control.bundle_states import BundleFailure
from rsrv.control.card_memory import CardMemory
from rsrv.control.findings import ServerFinding
from rsrv.control.grpc_service import copied, member, member_name
from rsrv.control.placing import Trial
from rsrv.control.records import RuntimeRecords, early_failures, total, without_histograms
from rsrv.control.runtime_link import RuntimeLink
from rsrv.control.runtime_state import ModelVersion, StateChange, StateSnapshot, StateUpdate
from rsrv.control.runtimes import merge
from rsrv.control.v1 import control_pb2 as pb
from rsrv.settings import Settings

Json = Mapping[str, Any]
#: Versions of one model by key, in the order of their registration.
Versions = Mapping[str, ModelVersion]


def version(key: str, entry: ModelVersion) -> pb.Version:
    return pb.Version(
        key=key,
        digest=entry["digest"],
        state=member(pb.State, entry["state"]),
        error=entry["error"] or "",
        weights=member(pb.Weights, entry["weights"]),
        paused=member(pb.Pause, entry["paused"]),
        stubs=entry["stubs"],
        calls=entry["models"],
    )


def by_name(entries: Mapping[str, ModelVersion]) -> dict[str, dict[str, ModelVersion]]:
    versions_of: dict[str, dict[str, ModelVersion]] = {}
    for key, entry in entries.items():
        versions_of.setdefault(entry["name"], {})[key] = entry
    return versions_of


def version_list(versions: Versions) -> list[pb.Version]:
    return [version(key, entry) for key, entry in versions.items()]


def _entry(key: str, entry: ModelVersion) -> pb.Entry:
    return pb.Entry(
        name=entry["name"],
        meta=entry["kind"] == "meta",
        residency=member(pb.Residency, entry["residency"]),
        version=version(key, entry),
    )


def model_status(
    name: str,
    records: Mapping[int, pb.ModelRecord],
    devices: Mapping[int, Versions],
    policy: pb.Policy | None,
    starting: str,
    bundle: str,
    front: str = "",
) -> pb.ModelStatus:
    """Return the status of a model or meta model over all devices.

    Args:
        name: Name of the model.
        records: The model's record in each runtime that has built the model.
        devices: The model's versions on each device that answers and knows the model. A model without `records` and
            `devices` is cold.
        policy: The result of the function `policy`. None for a meta model.
        starting: What the model's start waits for. Empty if the model is not starting.
        bundle: State of the model's bundle.
        front: The model's front, or empty.
    """
    versions = merge(list(devices.values()))
    served = _served(versions)
    record = _figures(total([*records.values()]), served)
    if records and not record.meta:
        record.outcomes["failed_before_runtime"] = early_failures(record)
    unknown = pb.STATE_LOADING if starting else pb.STATE_COLD
    return pb.ModelStatus(
        name=name,
        versions=version_list(versions) if versions or records else [pb.Version(state=unknown)],
        paused=member(pb.Pause, served["paused"] if served else None),
        record=record,
        policy=policy,
        devices=[
            pb.ModelOnDevice(
                number=number,
                record=_figures(records.get(number, pb.ModelRecord()), version),
                error=version["error"] or "",
            )
            for number, versions_there in sorted(devices.items())
            if (version := _served(versions_there)) is not None
        ],
        starting=starting,
        bundle=bundle,
        front=front,
    )


def _figures(record: pb.ModelRecord, served: ModelVersion | None) -> pb.ModelRecord:
    """Return a copy of a record without histograms. Its state, residency and weights are those of the served version."""
    copy = pb.ModelRecord()
    copy.CopyFrom(record)
    if served is not None:
        copy.state = member(pb.State, served["state"])
        copy.residency = member(pb.Residency, served["residency"])
        copy.weights = member(pb.Weights, served["weights"])
    return without_histograms(copy)


def _served(versions: Versions) -> ModelVersion | None:
    """Return the version that is served. If there is none, return the one to be served next."""
    entries = list(versions.values())
    ready = [entry for entry in entries if entry["state"] == "ready"] or entries
    return ready[-1] if ready else None


def policy(settings: Settings, name: str, changed: Json) -> pb.Policy:
    """Return the policy of a model. The settings in `changed`, which operators set, take precedence over rsrv.yaml."""
    section = settings.for_model(name)
    return pb.Policy(
        weight=changed.get("weight", section.weight),
        max_delay_us=changed.get("max_delay_us", section.max_delay_us),
        max_queue_depth=changed.get(
            "max_queue_depth", section.max_queue_depth or settings.scheduler.max_queue_depth
        ),
    )


def device_status(
    number: int, link: RuntimeLink, record: pb.DeviceRecord | None, card: CardMemory | None, now: float
) -> pb.DeviceStatus:
    """Return the status of a device. `record` is None if its runtime does not answer. `now` is Unix time in seconds."""
    shown = pb.DeviceStatus(
        number=number,
        card=None if card is None else copied(pb.CardMemory, card),
    )
    if link.obstacle:
        shown.error = link.obstacle
    if record is None:
        if link.asleep_since is None:
            shown.down_since_unix_s = now - link.down_s
        else:
            shown.asleep_since_unix_s = link.asleep_since
        return shown
    shown.record.CopyFrom(record)
    without_histograms(shown.record)
    shown.revision = link.state.revision
    return shown


def scheduler(section: Json) -> pb.Scheduler:
    """Convert the section `scheduler` to a message."""
    return pb.Scheduler(
        discipline=member(pb.Discipline, section.get("discipline")),
        **_same(pb.Scheduler, section, frozenset({"discipline"})),
    )


def scheduler_changes(message: pb.Scheduler) -> dict[str, Any]:
    """Return the keys of the section `scheduler` that a message sets. Raises InvalidArgument."""
    changes = given(message)
    if "discipline" in changes:
        changes["discipline"] = member_name(pb.Discipline, changes["discipline"], "discipline")
    if changes.get("depth") == 0:
        changes["depth"] = None
    return changes


def given(message: Message) -> dict[str, Any]:
    """Return the fields that the message has, by name."""
    return {field.name: value for field, value in message.ListFields()}


def memory_use(number: int, records: RuntimeRecords, budget: int | None = None) -> pb.MemoryUse:
    """Return the use of a device's memory. `records` must be whole. `budget` is the setting runtime.weight_budget_bytes."""
    shared: Counter[str] = Counter()
    for group in records.shared:
        shared.update(dict.fromkeys(group.models, group.bytes))
    use = pb.MemoryUse(device=number, record=records.device, weight_budget_bytes=budget)
    use.record.models.extend(records.models.values())
    use.record.shared.extend(records.shared)
    for name, record in records.models.items():
        if not record.meta:
            use.own_bytes[name] = record.device_bytes - record.state_bytes - shared[name]
    without_histograms(use.record)
    return use


def placement(mode: str, generation: int, trial: Trial) -> pb.GetPlacementResponse:
    status = trial.status
    return pb.GetPlacementResponse(
        mode=mode,
        generation=generation,
        models=[
            copied(pb.PlacedModel, model, devices=map(int, model.placed), moving_to=map(int, model.moving_to))
            for model in sorted(status.models, key=lambda model: model.name)
        ],
        devices=[
            copied(pb.DevicePlacement, worker, device=int(worker.name))
            for worker in sorted(status.workers, key=lambda worker: int(worker.name))
        ],
        moves=[
            pb.PlacementMove(model=name, before=map(int, before), after=map(int, after))
            for name, (before, after) in trial.moves.items()
        ],
        warnings=status.warnings,
    )


def _positions(answers: Mapping[int, Json]) -> list[pb.TimelinePosition]:
    keys = ("instance", "first", "next", "end")
    return [
        pb.TimelinePosition(device=number, **{key: answer[key] for key in keys})
        for number, answer in answers.items()
    ]


def arrivals(answers: Mapping[int, Json]) -> pb.GetArrivalsResponse:
    """Convert the runtimes' answers about the latest requests, by device, to a message."""
    return pb.GetArrivalsResponse(
        positions=_positions(answers),
        requests=[
            pb.Arrival(
                model=key.rpartition("@")[0],
                unix_s=answer["unix_s"] + at,
                rows=rows,
                variant=variant,
                deadline_s=deadline_s,
                priority=priority,
                call=call,
                device=number,
            )
            for number, answer in answers.items()
            for at, key, rows, variant, deadline_s, priority, call in answer["requests"]
        ],
    )


def timeline(answers: Mapping[int, Json], now: float) -> pb.GetTimelineResponse:
    """Convert the runtimes' answers about their latest work, by device, to a message. `now` is the Unix time of the answers."""
    return pb.GetTimelineResponse(
        positions=_positions(answers),
        spans=[
            pb.Span(
                kind=member(pb.SpanKind, kind),
                model=key.rpartition("@")[0],
                key=key,
                start_unix_s=now - ago,
                seconds=seconds,
                rows=rows,
                size=size,
                requests=requests,
                failed=failed,
                device=number,
            )
            for number, answer in answers.items()
            for kind, key, ago, seconds, rows, size, requests, failed in answer["spans"]
        ],
    )


def finding(server_finding: ServerFinding) -> pb.Finding:
    return copied(pb.Finding, server_finding, severity=member(pb.Severity, server_finding.severity))


def history(answers: Mapping[int, Json]) -> pb.GetHistoryResponse:
    """Convert the runtimes' answers about the histories of models, by device, to a message."""
    return pb.GetHistoryResponse(
        histories=[
            pb.History(
                key=key,
                device=number,
                waits_for=history_of_key["waits_for"],
                records=[_record(record, answer["unix_s"]) for record in history_of_key["records"]],
            )
            for number, answer in answers.items()
            for key, history_of_key in answer["histories"].items()
        ]
    )


def _record(record: Json, unix_s: float) -> pb.HistoryRecord:
    return pb.HistoryRecord(
        unix_s=unix_s + record["at"], clock_s=record["at"], **_same(pb.HistoryRecord, record)
    )


def slow_request(slow: Json, unix_s: float, device: int) -> pb.SlowRequest:
    """Convert a record of a slow request to a message. The clock of the device's runtime was 0 at the Unix time `unix_s`."""
    requests, rows, size = slow["batch"] or (0, 0, 0)
    return pb.SlowRequest(
        device=device,
        model=slow["key"].rpartition("@")[0],
        arrived_unix_s=unix_s + slow["at"],
        batch_requests=requests,
        batch_rows=rows,
        batch_size=size,
        evicted=None if slow["evicted"] is None else _record(slow["evicted"], unix_s),
        **_same(pb.SlowRequest, slow, frozenset({"evicted"})),
    )


def failure(name: str, failed: BundleFailure) -> pb.Failure:
    return pb.Failure(name=name, text=failed.text, since_unix_s=failed.since, tries=failed.tries)


def update(device: int, update: StateUpdate) -> pb.WatchStateResponse:
    """Convert an update of a device's state to a message."""
    match update:
        case None:
            return pb.WatchStateResponse(down=pb.RuntimeDown(device=device))
        case StateSnapshot(instance, revision, entries):
            shown = [_entry(key, entry) for key, entry in entries.items()]
            return pb.WatchStateResponse(
                snapshot=pb.Snapshot(device=device, instance=instance, revision=revision, entries=shown)
            )
        case StateChange(instance, revision, key, entry):
            changed = None if entry is None else _entry(key, entry)
            return pb.WatchStateResponse(
                change=pb.Change(device=device, instance=instance, revision=revision, key=key, entry=changed)
            )


def _same(message: Any, status: Json, but: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Return the values in `status` whose keys are names of the message's fields, except null values and the names in `but`."""
    names = _names(message, but)
    return {key: value for key, value in status.items() if key in names and value is not None}


@cache
def _names(message: Any, but: frozenset[str]) -> frozenset[str]:
    """Return the names of a message's fields, except the names in `but`.

    The result is cached, because reading a descriptor takes longer than making a message.
    """
    return frozenset(field.name for field in message.DESCRIPTOR.fields) - but
