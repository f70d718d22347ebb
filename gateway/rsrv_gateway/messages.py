"""The planner's status and the settings as the control service's messages, and the other way round. Pure."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from rsrv.control.grpc_service import InvalidArgument, member, member_name
from rsrv.explain import explain, nearest
from rsrv.placement.contract import Worker
from rsrv.placement.status import ModelStatus, Repacks, WorkerStatus
from rsrv.settings_fleet import GatewayModelSection, GatewaySection
from rsrv.settings_fleet import Replicas as Count
from rsrv_gateway.v1 import gateway_pb2 as pb

S = TypeVar("S", bound=BaseModel)

_ENUMS = {"work_basis": pb.WorkBasis, "fill": pb.Fill, "route": pb.Route}
#: what a policy has
FIELDS = tuple(field.name for field in pb.Policy.DESCRIPTOR.fields)


def policy(section: GatewaySection) -> pb.Policy:
    values = {name: getattr(section, name) for name in FIELDS}
    return pb.Policy(
        **{name: member(enum, values.pop(name)) for name, enum in _ENUMS.items()},
        replicas=replicas(values.pop("replicas")),
        **values,
    )


def changed(
    section: GatewaySection, original: GatewaySection, wanted: pb.Policy, paths: Iterable[str]
) -> GatewaySection:
    """`section` with these fields as `wanted` has them, or `original` where it has none. Raises InvalidArgument."""
    values: dict[str, Any] = {}
    for path in paths:
        if path not in FIELDS:
            raise InvalidArgument(
                f"update_mask: {path!r} is not a field of the policy{nearest(path, FIELDS)}"
            )
        value = _given(wanted, path)
        values[path] = getattr(original, path) if value is None else value
    if not values:
        raise InvalidArgument("update_mask names nothing")
    return _checked(GatewaySection, {**section.model_dump(), **values}, values)


def placement(request: pb.SetPlacementRequest) -> dict[str, Any]:
    """What differs for the model. Raises InvalidArgument."""
    values = {name: _given(request, name) for name in ("replicas", "fill", "fill_factor")}
    return _checked(GatewayModelSection, values, values).model_dump()


def replicas(count: Count) -> pb.Replicas:
    return pb.Replicas(all=True) if count == "all" else pb.Replicas(count=count)


def repacks(status: Repacks, now: float) -> pb.Repacks:
    return pb.Repacks(
        counts={str(trigger): count for trigger, count in status.counts.items()},
        last=status.last or "",
        last_age_s=0.0 if status.last_at is None else now - status.last_at,
        packed=status.packed,
        moved=status.moved,
        held=status.held,
        device_s=status.device_s,
        threshold_device_s=status.threshold_device_s,
    )


def model(status: ModelStatus) -> pb.ModelStatus:
    return pb.ModelStatus(
        name=status.name,
        ready=status.ready,
        placed=status.placed,
        moving_to=status.moving_to,
        along=status.along,
        replicas=replicas(status.replicas),
        effective_replicas=status.effective_replicas,
        utilisation=status.utilisation,
        requests_s=status.requests_s,
        item_s=status.item_s,
        bytes=status.bytes,
        quantum=status.quantum,
        fill=member(pb.Fill, status.fill),
    )


def worker(status: WorkerStatus, workers: Mapping[str, Worker], outstanding: int) -> pb.WorkerStatus:
    known = workers.get(status.name)
    return pb.WorkerStatus(
        name=status.name,
        alive=status.alive,
        grpc="" if known is None else known.grpc,
        models=status.models,
        utilisation=status.utilisation,
        busy=status.busy,
        bytes=status.bytes,
        budget_bytes=status.budget_bytes,
        oversubscribed=status.oversubscribed,
        backlog_s=status.backlog_s,
        outstanding=outstanding,
    )


def _given(message: Any, name: str) -> Any:
    """A field as the settings have it; None: it is absent. Raises InvalidArgument."""
    value = getattr(message, name)
    if name in _ENUMS:
        try:
            return member_name(_ENUMS[name], value) if value else None
        except ValueError as error:
            raise InvalidArgument(f"{name} {error}") from None
    if not message.HasField(name):
        return None
    if name != "replicas":
        return value
    if value.WhichOneof("replicas") is None or (value.WhichOneof("replicas") == "all" and not value.all):
        raise InvalidArgument("replicas must be a count, or all")
    return "all" if value.all else value.count


def _checked(kind: type[S], values: Mapping[str, Any], shown: Mapping[str, Any]) -> S:
    """Raises InvalidArgument."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise InvalidArgument("; ".join(explain(one, kind, shown) for one in error.errors())) from None
