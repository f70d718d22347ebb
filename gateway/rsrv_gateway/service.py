"""Control service of the gateway: rsrv.gateway.v1.Gateway, and grpc.health.v1.Health.

gateway.proto documents each call.
"""

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

import rsrv
from rsrv.control.grpc_server import ServiceKind
from rsrv.control.grpc_service import (
    HealthService,
    InvalidArgument,
    StatusError,
    answers,
    copied,
    member,
    member_name,
    steers,
)
from rsrv.explain import explain
from rsrv.placement.contract import Worker
from rsrv.placement.devices import ServerDevice
from rsrv.placement.options import ModelOptions, PlannerOptions
from rsrv.placement.planner import Planner
from rsrv.placement.status import ModelStatus, PlannerStatus, Repacks, WorkerStatus
from rsrv.settings_fleet import Replicas as Count
from rsrv.text import nearest
from rsrv_gateway.brain import GatewayLoop
from rsrv_gateway.v1 import gateway_pb2 as pb
from rsrv_gateway.v1 import gateway_pb2_grpc

GATEWAY = ServiceKind(
    gateway_pb2_grpc.add_GatewayServicer_to_server, pb.DESCRIPTOR, "gateway", "gateway.control_listen"
)

#: Fields of the policy that do not apply at once, but from the next repack on.
_LATER = frozenset({"replicas", "hysteresis", "forbid_memory_oversubscription"})


class GatewayService(gateway_pb2_grpc.GatewayServicer):
    def __init__(self, gateway: GatewayLoop) -> None:
        self._gateway = gateway
        self._planner = gateway.planner
        #: The planner's options as they are in rsrv.yaml.
        self._section = self._planner.options

    @answers
    async def GetStatus(self, request: pb.GetStatusRequest) -> pb.GetStatusResponse:
        gateway, status = self._gateway, await self._status()
        models = [model for model in status.models if request.model in ("", model.name)]
        if request.model and not models:
            raise _unknown(request.model)
        outstanding: Counter[str] = Counter()
        for (_, worker), requests in gateway.proxy.counts().outstanding.items():
            outstanding[worker] += requests
        workers = gateway.probes.workers()
        return pb.GetStatusResponse(
            mode=member(pb.Mode, status.mode),
            policy=policy_message(self._planner.options),
            generation=status.generation,
            repacks=repacks_message(status.repacks, gateway.clock()),
            models=[model_message(model) for model in models],
            workers=[self._worker(worker, workers, outstanding) for worker in status.workers],
            warnings=status.warnings,
            pid=os.getpid(),
            version=rsrv.__version__,
        )

    @steers
    async def SetPolicy(self, request: pb.SetPolicyRequest) -> pb.SetPolicyResponse:
        paths = set(request.update_mask.paths)

        def change(planner: Planner) -> None:
            policy = changed_policy(planner.options, self._section, request.policy, paths)
            if paths != {"work_basis"}:
                self._require_packing("in other modes, only work_basis has an effect")
            planner.change(policy)

        await self._gateway.steer(change)
        warnings = list((await self._status()).warnings)
        if later := sorted(paths & _LATER):
            warnings.append(f"{', '.join(later)}: from the next repack on")
        return pb.SetPolicyResponse(policy=policy_message(self._planner.options), warnings=warnings)

    @steers
    async def SetPlacement(self, request: pb.SetPlacementRequest) -> pb.SetPlacementResponse:
        if not request.model:
            raise InvalidArgument("model is empty")
        placement = placement_values(request)
        self._require_packing("the other modes do not place models")
        if request.model not in self._gateway.table and not request.allow_unknown:
            raise _unknown(request.model)
        await self._gateway.steer(lambda planner: planner.set_placement(request.model, **placement))
        status = await self._status()
        warnings = list(status.warnings)
        model = next((model for model in status.models if model.name == request.model), None)
        if model is not None:
            count = len(model.placed)
            if model.effective_replicas != count:
                warnings.append(f"{model.effective_replicas} replicas from the next repack on; now {count}")
            if isinstance(model.replicas, int) and model.replicas > model.effective_replicas:
                warnings.append(f"only {model.effective_replicas} workers can have the model")
        return pb.SetPlacementResponse(warnings=warnings)

    @steers
    async def Repack(self, request: pb.RepackRequest) -> pb.RepackResponse:
        gateway = self._gateway
        self._require_packing("the other modes do not pack models")
        if not any(view.alive for view in gateway.probes.summaries().values()):
            raise StatusError("UNAVAILABLE", "no worker answers, so models cannot be packed")
        number = await gateway.steer(Planner.repack)
        while request.wait and (await self._status()).repacks.done < number:
            await gateway.next_round()
        return pb.RepackResponse(repacks=repacks_message((await self._status()).repacks, gateway.clock()))

    @answers
    async def Locate(self, request: pb.LocateRequest) -> pb.LocateResponse:
        gateway = self._gateway
        if not request.model:
            raise InvalidArgument("model is empty")
        if request.model not in gateway.table:
            await gateway.refresh()
        routes = gateway.table.get(request.model)
        if routes is None:
            raise _unknown(request.model)
        if not routes.ready:
            raise StatusError("UNAVAILABLE", f"no worker that answers serves {request.model!r} at the moment")
        load = gateway.proxy.counts().load
        workers = gateway.probes.workers()
        ready = dict.fromkeys(routes.ready)
        order = sorted(ready, key=lambda name: (name not in routes.placed, load.get(name, 0.0)))
        return pb.LocateResponse(
            workers=[
                pb.Location(
                    worker=name,
                    grpc=workers[name].grpc,
                    http=workers[name].http or "",
                    placed=name in routes.placed,
                )
                for name in order
                if name in workers
            ]
        )

    def _worker(
        self, status: WorkerStatus, workers: Mapping[str, Worker], outstanding: Mapping[str, int]
    ) -> pb.WorkerStatus:
        device = self._gateway.devices.get(status.name, ServerDevice(status.name, None))
        # A server chooses among its devices itself, so its requests are shown only with the first device.
        requests = outstanding.get(device.server, 0) if not device.number else 0
        return worker_message(status, workers.get(device.server), requests)

    async def _status(self) -> PlannerStatus:
        status = await self._gateway.status()
        if status is None:
            raise StatusError("UNAVAILABLE", "the gateway has not probed its workers yet")
        return status

    def _require_packing(self, why: str) -> None:
        if self._planner.options.mode != "lpt_packing":
            raise StatusError("FAILED_PRECONDITION", f"gateway.mode is not lpt_packing: {why}")


def _unknown(model: str) -> StatusError:
    return StatusError("NOT_FOUND", f"there is no model {model!r}")


class GatewayHealth(HealthService):
    """Health of the gateway and of its models."""

    def __init__(self, gateway: GatewayLoop) -> None:
        self._gateway = gateway

    def serving(self, service: str) -> bool | None:
        if not service:
            return self._gateway.ready
        routes = self._gateway.table.get(service)
        return None if routes is None else self._gateway.ready and bool(routes.ready)


S = TypeVar("S", bound=BaseModel)

_ENUMS = {"work_basis": pb.WorkBasis, "fill": pb.Fill, "route": pb.Route}
#: Names of the policy's fields.
FIELDS = tuple(field.name for field in pb.Policy.DESCRIPTOR.fields)


def policy_message(section: PlannerOptions) -> pb.Policy:
    values = {name: getattr(section, name) for name in FIELDS}
    return pb.Policy(
        **{name: member(enum, values.pop(name)) for name, enum in _ENUMS.items()},
        replicas=replicas_message(values.pop("replicas")),
        **values,
    )


def changed_policy(
    section: PlannerOptions, original: PlannerOptions, policy: pb.Policy, paths: Iterable[str]
) -> PlannerOptions:
    """Return `section` with the fields in `paths` taken from `policy`, or from `original` if `policy` lacks them.

    Raises InvalidArgument.
    """
    values: dict[str, Any] = {}
    for path in paths:
        if path not in FIELDS:
            raise InvalidArgument(
                f"update_mask: {path!r} is not a field of the policy{nearest(path, FIELDS)}"
            )
        value = _given(policy, path)
        values[path] = getattr(original, path) if value is None else value
    if not values:
        raise InvalidArgument("update_mask names nothing")
    return _checked(PlannerOptions, {**section.model_dump(), **values}, values)


def placement_values(request: pb.SetPlacementRequest) -> dict[str, Any]:
    """Return the settings of one model. Raises InvalidArgument."""
    values = {name: _given(request, name) for name in ("replicas", "fill", "fill_factor")}
    return _checked(ModelOptions, values, values).model_dump(include=set(values))


def replicas_message(count: Count) -> pb.Replicas:
    return pb.Replicas(count=count) if isinstance(count, int) else pb.Replicas(**{count: True})


def repacks_message(status: Repacks, now: float) -> pb.Repacks:
    age = 0.0 if status.last_at is None else now - status.last_at
    return copied(pb.Repacks, status, last=status.last or "", last_age_s=age)


def model_message(status: ModelStatus) -> pb.ModelStatus:
    replicas, fill = replicas_message(status.replicas), member(pb.Fill, status.fill)
    return copied(pb.ModelStatus, status, replicas=replicas, fill=fill)


def worker_message(status: WorkerStatus, known: Worker | None, outstanding: int) -> pb.WorkerStatus:
    grpc = "" if known is None else known.grpc
    return copied(pb.WorkerStatus, status, grpc=grpc, outstanding=outstanding)


def _given(message: Any, name: str) -> Any:
    """Return a field in the form of the settings, or None if it is absent. Raises InvalidArgument."""
    value = getattr(message, name)
    if name in _ENUMS:
        return member_name(_ENUMS[name], value, name) if value else None
    if not message.HasField(name):
        return None
    if name != "replicas":
        return value
    kind = value.WhichOneof("replicas")
    if kind is None or (kind != "count" and not getattr(value, kind)):
        raise InvalidArgument("replicas must be a count, auto or all")
    return value.count if kind == "count" else kind


def _checked(kind: type[S], values: Mapping[str, Any], shown: Mapping[str, Any]) -> S:
    """Validate a section. Raises InvalidArgument."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise InvalidArgument(
            "; ".join(explain(problem, kind, shown) for problem in error.errors())
        ) from None
