"""Translates the runtime's JSON into the service's messages, and messages into settings. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from google.protobuf.message import Message

from rsrv.control.bundle_states import BundleFailure
from rsrv.control.card_memory import CardMemory
from rsrv.control.findings import ServerFinding
from rsrv.control.grpc_service import copied, member, member_name
from rsrv.control.placing import Trial
from rsrv.control.protocols import ModelVersion
from rsrv.control.runtime_link import RuntimeLink, StateChange, StateSnapshot, StateUpdate
from rsrv.control.runtimes import merge
from rsrv.control.v1 import control_pb2 as pb
from rsrv.settings import Settings

Json = Mapping[str, Any]
#: Versions of one model by key, in the order of their registration.
Versions = Mapping[str, ModelVersion]

#: Figures of a model that are summed over its devices; the others are those of the first device.
_SUMS = frozenset(
    (
        *(
            "queued",
            "executing",
            "dispatches",
            "useful_rows",
            "padded_rows",
            "device_seconds",
            "misses",
            "loads",
        ),
        *("evictions", "waiting", "running", "calls", "kept_bytes", "generations"),
    )
)
_COUNTS = frozenset({"outcomes", "sizes", "sequences", "generated"})
#: Precedence among the states of a model's weights on several devices.
_WEIGHT_STATES = (
    *("resident", "evicting", "reserved", "loading", "reading", "queued", "backoff", "absent", "on disk"),
)
#: Fields with the same name and another form in both.
_TRANSLATED = frozenset({"residency", "weights", "discipline", "eviction", "models"})


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
    found: dict[str, dict[str, ModelVersion]] = {}
    for key, entry in entries.items():
        found.setdefault(entry["name"], {})[key] = entry
    return found


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
    name: str, statuses: Mapping[int, Json], devices: Mapping[int, Versions], policy: pb.Policy, starting: str
) -> pb.ModelStatus:
    """Return the status of a model over all devices.

    Args:
        name: of the model.
        statuses: the model's part of each runtime's status; none of a runtime where it is not built.
        devices: its versions on each device that answers; none where it is not known. Without either, it is cold.
        policy: as in `policy`.
        starting: what its start waits for; empty: it does not start.
    """
    status = _sum(list(statuses.values()))
    versions = merge(list(devices.values()))
    served = _served(versions)
    costs, precisions = status.get("costs", {}), status.get("precisions", {})
    unknown = pb.STATE_LOADING if starting else pb.STATE_COLD
    return pb.ModelStatus(
        name=name,
        versions=version_list(versions) if versions or statuses else [pb.Version(state=unknown)],
        starting=starting,
        residency=member(pb.Residency, served["residency"] if served else status.get("residency")),
        weights=member(pb.Weights, served["weights"] if served else status.get("weights")),
        paused=member(pb.Pause, served["paused"] if served else None),
        executables=[
            _executable(
                which, status.get("sizes", {}).get(which, 0), costs.get(which), precisions.get(which, {})
            )
            for which in sorted({*costs, *status.get("sizes", {})}, key=_variant_and_size)
        ],
        policy=policy,
        devices=[
            _on_device(number, statuses.get(number, {}), found)
            for number, versions_there in sorted(devices.items())
            if (found := _served(versions_there)) is not None
        ],
        **_same(pb.ModelStatus, status, _TRANSLATED),
    )


def meta_status(name: str, statuses: Iterable[Json], versions: Versions, starting: str) -> pb.MetaStatus:
    """Return the status of a meta model; `statuses`: its parts of the runtimes' statuses, those that a stub serves.

    `starting` as in `model_status`.
    """
    found = list(versions.values())
    return pb.MetaStatus(
        name=name,
        versions=version_list(versions),
        starting=starting,
        paused=member(pb.Pause, found[-1]["paused"] if found else None),
        **_same(pb.MetaStatus, _sum(list(statuses))),
    )


def _served(versions: Versions) -> ModelVersion | None:
    """Return the version that is served, or else the one to be served next."""
    found = list(versions.values())
    ready = [entry for entry in found if entry["state"] == "ready"] or found
    return ready[-1] if ready else None


def _on_device(number: int, status: Json, served: ModelVersion) -> pb.ModelOnDevice:
    return pb.ModelOnDevice(
        number=number,
        state=member(pb.State, served["state"]),
        error=served["error"] or "",
        weights=member(pb.Weights, served["weights"]),
        **_same(pb.ModelOnDevice, status, _TRANSLATED | {"state"}),
    )


def _sum(statuses: Sequence[Json]) -> dict[str, Any]:
    """Return the statuses of one model on several devices as that of one device."""
    total: dict[str, Any] = {}
    for status in statuses:
        for key, value in status.items():
            before = total.get(key)
            if before is None:
                total[key] = value
            elif key in _SUMS:
                total[key] = before + value
            elif key in _COUNTS:
                total[key] = {one: before.get(one, 0) + value.get(one, 0) for one in {**before, **value}}
            elif key == "costs":
                total[key] = {**value, **before}
            elif key == "weights_state":
                total[key] = min(before, value, key=_WEIGHT_STATES.index)
    return total


def policy(settings: Settings, name: str, changed: Json) -> pb.Policy:
    """Return the policy of a model: `changed` takes precedence over rsrv.yaml."""
    section = settings.for_model(name)
    return pb.Policy(
        weight=changed.get("weight", section.weight),
        max_delay_us=changed.get("max_delay_us", section.max_delay_us),
        max_queue_depth=changed.get(
            "max_queue_depth", section.max_queue_depth or settings.scheduler.max_queue_depth
        ),
    )


def device_status(
    number: int, link: RuntimeLink, status: Json | None, card: CardMemory | None, now: float
) -> pb.DeviceStatus:
    """Return the status of a device; `status`: that of its runtime, if it answers; `now`: Unix time, in seconds."""
    shown = pb.DeviceStatus(
        number=number,
        card=None if card is None else copied(pb.CardMemory, card),
    )
    if link.obstacle:
        shown.error = link.obstacle
    if status is None:
        if link.asleep_since is None:
            shown.down_since_unix_s = now - link.down_s
        else:
            shown.asleep_since_unix_s = link.asleep_since
        return shown
    shown.runtime.MergeFrom(
        pb.Runtime(
            pid=status["pid"],
            instance=link.instance,
            revision=link.revision,
            uptime_s=status["uptime_s"],
            connections=status["connections"],
            compiled=status["compiled"],
            from_cache=status["from_cache"],
            numerics=member(pb.Numerics, status["numerics"]),
            computes=status["computes"] or "",
        )
    )
    memory = status["memory"]
    shown.host.MergeFrom(pb.HostMemory(**_same(pb.HostMemory, memory["host"])))
    shown.memory.MergeFrom(pb.DeviceMemory(**_same(pb.DeviceMemory, memory["device"])))
    return shown


def scheduler(section: Json) -> pb.Scheduler:
    """Translate rsrv.yaml's section as the runtime has it."""
    return pb.Scheduler(
        discipline=member(pb.Discipline, section.get("discipline")),
        eviction=member(pb.Eviction, section.get("eviction")),
        **_same(pb.Scheduler, section, _TRANSLATED),
    )


def scheduler_changes(message: pb.Scheduler) -> dict[str, Any]:
    """Return the keys that the message has. Raises InvalidArgument."""
    changes = given(message)
    for key, enum in (("discipline", pb.Discipline), ("eviction", pb.Eviction)):
        if key in changes:
            changes[key] = member_name(enum, changes[key], key)
    if changes.get("depth") == 0:
        changes["depth"] = None
    return changes


def given(message: Message) -> dict[str, Any]:
    """Return the fields that the message has, by name."""
    return {field.name: value for field, value in message.ListFields()}


def memory_use(number: int, said: Json, settings: Settings) -> pb.MemoryUse:
    """Return the memory of a device, by its runtime's answer to the command `memory`."""
    memory = said["memory"]
    return pb.MemoryUse(
        device=number,
        memory=pb.DeviceMemory(**_same(pb.DeviceMemory, memory["device"])),
        host=pb.HostMemory(**_same(pb.HostMemory, memory["host"])),
        host_limit_bytes=memory["host"]["limit_bytes"],
        weight_budget_bytes=settings.runtime.weight_budget_bytes,
        models=[
            pb.ModelMemory(
                name=name,
                weights=member(pb.Weights, model["weights"]),
                **_same(pb.ModelMemory, model, frozenset({"weights"})),
            )
            for name, model in sorted(said["models"].items())
        ],
        shared=[pb.SharedTensors(**group) for group in said["groups"]],
        **_same(pb.MemoryUse, memory, frozenset({"device", "host"})),
    )


def placement(mode: str, generation: int, trial: Trial) -> pb.GetPlacementResponse:
    status = trial.status
    return pb.GetPlacementResponse(
        mode=mode,
        generation=generation,
        models=[
            copied(pb.PlacedModel, one, devices=map(int, one.placed), moving_to=map(int, one.moving_to))
            for one in sorted(status.models, key=lambda one: one.name)
        ],
        devices=[
            copied(pb.DevicePlacement, one, device=int(one.name))
            for one in sorted(status.workers, key=lambda one: int(one.name))
        ],
        moves=[
            pb.PlacementMove(model=name, before=map(int, before), after=map(int, after))
            for name, (before, after) in trial.moves.items()
        ],
        warnings=status.warnings,
    )


def _positions(said: Mapping[int, Json]) -> list[pb.TimelinePosition]:
    keys = ("instance", "first", "next", "end")
    return [
        pb.TimelinePosition(device=number, **{key: one[key] for key in keys}) for number, one in said.items()
    ]


def arrivals(said: Mapping[int, Json]) -> pb.GetArrivalsResponse:
    """`said`: the answers of the devices."""
    return pb.GetArrivalsResponse(
        positions=_positions(said),
        requests=[
            pb.Arrival(
                model=key.rpartition("@")[0],
                unix_s=one["unix_s"] + at,
                rows=rows,
                variant=variant,
                deadline_s=deadline_s,
                priority=priority,
                call=call,
                device=number,
            )
            for number, one in said.items()
            for at, key, rows, variant, deadline_s, priority, call in one["requests"]
        ],
    )


def timeline(said: Mapping[int, Json], now: float) -> pb.GetTimelineResponse:
    """`said`: the answers of the devices; `now`: Unix time of these, in seconds."""
    return pb.GetTimelineResponse(
        positions=_positions(said),
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
            for number, one in said.items()
            for kind, key, ago, seconds, rows, size, requests, failed in one["spans"]
        ],
    )


def finding(found: ServerFinding) -> pb.Finding:
    return copied(pb.Finding, found, severity=member(pb.Severity, found.severity))


def history(said: Mapping[int, Json]) -> pb.GetHistoryResponse:
    """`said`: the answers of the devices."""
    return pb.GetHistoryResponse(
        histories=[
            pb.History(
                key=key,
                device=number,
                waits_for=one["waits_for"],
                records=[_record(record, answer["unix_s"]) for record in one["records"]],
            )
            for number, answer in said.items()
            for key, one in answer["histories"].items()
        ]
    )


def _record(said: Json, unix_s: float) -> pb.HistoryRecord:
    return pb.HistoryRecord(unix_s=unix_s + said["at"], clock_s=said["at"], **_same(pb.HistoryRecord, said))


def slow_request(said: Json, unix_s: float, device: int) -> pb.SlowRequest:
    """Return a request of one device, whose clock was 0 at `unix_s`."""
    requests, rows, size = said["batch"] or (0, 0, 0)
    return pb.SlowRequest(
        device=device,
        model=said["key"].rpartition("@")[0],
        arrived_unix_s=unix_s + said["at"],
        batch_requests=requests,
        batch_rows=rows,
        batch_size=size,
        evicted=None if said["evicted"] is None else _record(said["evicted"], unix_s),
        **_same(pb.SlowRequest, said, frozenset({"evicted"})),
    )


def failure(name: str, failed: BundleFailure) -> pb.Failure:
    return pb.Failure(name=name, text=failed.text, since_unix_s=failed.since, tries=failed.tries)


def update(device: int, update: StateUpdate) -> pb.WatchStateResponse:
    """Return an update of a device's state."""
    match update:
        case None:
            return pb.WatchStateResponse(down=pb.RuntimeDown(device=device))
        case StateSnapshot(instance, revision, entries):
            found = [_entry(key, entry) for key, entry in entries.items()]
            return pb.WatchStateResponse(
                snapshot=pb.Snapshot(device=device, instance=instance, revision=revision, entries=found)
            )
        case StateChange(instance, revision, key, entry):
            changed = None if entry is None else _entry(key, entry)
            return pb.WatchStateResponse(
                change=pb.Change(device=device, instance=instance, revision=revision, key=key, entry=changed)
            )


def _same(message: Any, status: Json, but: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Return the fields with the same name and meaning in both; null is absent."""
    names = _names(message, but)
    return {key: value for key, value in status.items() if key in names and value is not None}


@cache
def _names(message: Any, but: frozenset[str]) -> frozenset[str]:
    """Return the names of a message's fields. Cached: reading a descriptor takes longer than making a message."""
    return frozenset(field.name for field in message.DESCRIPTOR.fields) - but


def _executable(which: str, count: int, cost: float | None, precision: Json) -> pb.Executable:
    variant, size = _variant_and_size(which)
    return pb.Executable(
        variant=variant, size=size, count=count, cost_s=cost, precision=pb.Precision(**precision)
    )


def _variant_and_size(which: str) -> tuple[int, int]:
    variant, size = which.split("/")
    return int(variant), int(size)
