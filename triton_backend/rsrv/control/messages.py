"""Translates the runtime's JSON into the service's messages, and messages into settings. Pure."""

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from google.protobuf.message import Message

from rsrv.control.grpc_service import member, member_name
from rsrv.control.protocols import ModelVersion
from rsrv.control.v1 import control_pb2 as pb
from rsrv.settings import Settings

Json = Mapping[str, Any]
#: Versions of one model by key, in the order of their registration.
Versions = Mapping[str, ModelVersion]

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


def entry_message(key: str, entry: ModelVersion) -> pb.Entry:
    return pb.Entry(
        name=entry["name"],
        meta=entry["kind"] == "meta",
        residency=member(pb.Residency, entry["residency"]),
        version=version(key, entry),
    )


def model_status(name: str, status: Json, versions: Versions, policy: pb.Policy) -> pb.ModelStatus:
    """`status`: the model's part of the runtime's status; empty if the model is not built, or could not be built."""
    found = list(versions.values())
    # The version that is served, or else the one to be served next.
    ready = [entry for entry in found if entry["state"] == "ready"] or found
    costs, precisions = status.get("costs", {}), status.get("precisions", {})
    return pb.ModelStatus(
        name=name,
        versions=version_list(versions),
        residency=member(pb.Residency, ready[-1]["residency"] if ready else status.get("residency")),
        weights=member(pb.Weights, ready[-1]["weights"] if ready else status.get("weights")),
        paused=member(pb.Pause, ready[-1]["paused"] if ready else None),
        executables=[
            _executable(
                which, status.get("sizes", {}).get(which, 0), costs.get(which), precisions.get(which, {})
            )
            for which in sorted({*costs, *status.get("sizes", {})}, key=_variant_and_size)
        ],
        policy=policy,
        **_same(pb.ModelStatus, status, _TRANSLATED),
    )


def meta_status(name: str, status: Json, versions: Versions) -> pb.MetaStatus:
    """`status`: the meta model's part of the runtime's status; empty if no stub serves it."""
    found = list(versions.values())
    return pb.MetaStatus(
        name=name,
        versions=version_list(versions),
        paused=member(pb.Pause, found[-1]["paused"] if found else None),
        **_same(pb.MetaStatus, status),
    )


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


def host_memory(status: Json) -> pb.HostMemory:
    return pb.HostMemory(**_same(pb.HostMemory, status))


def device_memory(status: Json) -> pb.DeviceMemory:
    return pb.DeviceMemory(**_same(pb.DeviceMemory, status))


def scheduler(section: Json) -> pb.Scheduler:
    """Translate rsrv.yaml's section as the runtime has it."""
    return pb.Scheduler(
        discipline=member(pb.Discipline, section.get("discipline")),
        eviction=member(pb.Eviction, section.get("eviction")),
        **_same(pb.Scheduler, section, _TRANSLATED),
    )


def scheduler_changes(message: pb.Scheduler) -> dict[str, Any]:
    """Return the keys that the message has. Raises ValueError."""
    changes = given(message)
    for key, enum in (("discipline", pb.Discipline), ("eviction", pb.Eviction)):
        if key in changes:
            try:
                changes[key] = member_name(enum, changes[key])
            except ValueError as error:
                raise ValueError(f"{key} {error}") from None
    if changes.get("depth") == 0:
        changes["depth"] = None
    return changes


def given(message: Message) -> dict[str, Any]:
    """Return the fields that the message has, by name."""
    return {field.name: value for field, value in message.ListFields()}


def load(devices: Iterable[int], said: Mapping[int, Json]) -> pb.GetLoadResponse:
    """`devices`: the numbers of all; `said`: the loads of those whose runtimes answer."""
    metas = {name: models for one in said.values() for name, models in one["metas"].items()}
    return pb.GetLoadResponse(
        devices=[
            _device_load(number, said[number]) if number in said else pb.DeviceLoad(number=number)
            for number in devices
        ],
        metas=[pb.MetaLoad(name=name, models=models) for name, models in metas.items()],
    )


def _device_load(number: int, said: Json) -> pb.DeviceLoad:
    # Called many times a second: spelled out for speed.
    return pb.DeviceLoad(
        number=number,
        instance=said["instance"],
        backlog_s=said["backlog_s"],
        free_bytes=said["free_bytes"],
        budget_bytes=said["budget_bytes"],
        models=[
            pb.ModelLoad(
                name=name,
                queued=model["queued"],
                executing=model["executing"],
                weights=member(pb.Weights, model["weights"]),
                bytes=model["bytes"],
                cost_s=model["cost_s"],
                misses=model["misses"],
                device_seconds=model["device_seconds"],
                rows=model["rows"],
                requests=model["requests"],
                pinned=model["pinned"],
                max_rows=model["max_rows"],
                batch_input=_batch_input(model["batch_input"]),
            )
            for name, model in said["models"].items()
        ],
    )


def _batch_input(said: tuple[str, int] | None) -> pb.BatchInput | None:
    return None if said is None else pb.BatchInput(name=said[0], axis=said[1])


def timeline(said: Json, now: float) -> pb.GetTimelineResponse:
    """`now`: Unix time of the runtime's answer, in seconds."""
    return pb.GetTimelineResponse(
        instance=said["instance"],
        first=said["first"],
        next=said["next"],
        end=said["end"],
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
            )
            for kind, key, ago, seconds, rows, size, requests, failed in said["spans"]
        ],
    )


def snapshot(instance: str, revision: int, entries: Mapping[str, ModelVersion]) -> pb.Snapshot:
    return pb.Snapshot(
        instance=instance,
        revision=revision,
        entries=[entry_message(key, entries[key]) for key in sorted(entries)],
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
