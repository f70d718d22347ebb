"""The gateway's control service: rsrv.gateway.v1.Gateway, and grpc.health.v1.Health.

The first says what the planner knows and does; gateway.proto says what each call means.
"""

import os
from collections import Counter

import rsrv
from rsrv.control.grpc_server import ServiceKind
from rsrv.control.grpc_service import HealthService, InvalidArgument, StatusError, answers, member, steers
from rsrv.placement.planner import Planner
from rsrv.placement.status import PlannerStatus
from rsrv.settings_fleet import GatewaySection
from rsrv_gateway import messages
from rsrv_gateway.brain import Gateway
from rsrv_gateway.v1 import gateway_pb2 as pb
from rsrv_gateway.v1 import gateway_pb2_grpc

GATEWAY = ServiceKind(
    gateway_pb2_grpc.add_GatewayServicer_to_server, pb.DESCRIPTOR, "gateway", "gateway.control_listen"
)

#: fields of the policy that count from the next repack on
_LATER = frozenset({"replicas", "hysteresis", "forbid_memory_oversubscription"})


class GatewayService(gateway_pb2_grpc.GatewayServicer):
    def __init__(self, gateway: Gateway, section: GatewaySection) -> None:
        """`section`: as rsrv.yaml has it."""
        self._gateway = gateway
        self._planner = gateway.planner
        self._section = section

    @answers
    async def GetStatus(self, request: pb.GetStatusRequest) -> pb.GetStatusResponse:
        gateway, status = self._gateway, await self._status()
        models = [one for one in status.models if request.model in ("", one.name)]
        if request.model and not models:
            raise _unknown(request.model)
        outstanding: Counter[str] = Counter()
        for (_, worker), requests in gateway.plane.counts().outstanding.items():
            outstanding[worker] += requests
        workers = gateway.probes.workers()
        return pb.GetStatusResponse(
            mode=member(pb.Mode, status.mode),
            policy=messages.policy(self._planner.options),
            generation=status.generation,
            repacks=messages.repacks(status.repacks, gateway.clock()),
            models=[messages.model(one) for one in models],
            workers=[messages.worker(one, workers, outstanding[one.name]) for one in status.workers],
            warnings=status.warnings,
            pid=os.getpid(),
            version=rsrv.__version__,
        )

    @steers
    async def SetPolicy(self, request: pb.SetPolicyRequest) -> pb.SetPolicyResponse:
        paths = set(request.update_mask.paths)

        def change(planner: Planner) -> None:
            wanted = messages.changed(planner.options, self._section, request.policy, paths)
            if paths != {"work_basis"}:
                self._require_packing("in other modes only work_basis means something")
            planner.change(wanted)

        await self._gateway.steer(change)
        warnings = list((await self._status()).warnings)
        if later := sorted(paths & _LATER):
            warnings.append(f"{', '.join(later)}: from the next repack on")
        return pb.SetPolicyResponse(policy=messages.policy(self._planner.options), warnings=warnings)

    @steers
    async def SetPlacement(self, request: pb.SetPlacementRequest) -> pb.SetPlacementResponse:
        if not request.model:
            raise InvalidArgument("model is empty")
        wanted = messages.placement(request)
        self._require_packing("models are placed by it")
        if request.model not in self._gateway.table and not request.allow_unknown:
            raise _unknown(request.model)
        await self._gateway.steer(lambda planner: planner.set_placement(request.model, **wanted))
        status = await self._status()
        warnings = list(status.warnings)
        shown = next((one for one in status.models if one.name == request.model), None)
        if shown is not None:
            count = len(shown.placed)
            if shown.effective_replicas != count:
                warnings.append(f"{shown.effective_replicas} replicas from the next repack on; now {count}")
            if isinstance(shown.replicas, int) and shown.replicas > shown.effective_replicas:
                warnings.append(f"only {shown.effective_replicas} workers can have it")
        return pb.SetPlacementResponse(warnings=warnings)

    @steers
    async def Repack(self, request: pb.RepackRequest) -> pb.RepackResponse:
        gateway = self._gateway
        self._require_packing("models are packed by it")
        if not any(view.alive for view in gateway.probes.views().values()):
            raise StatusError("UNAVAILABLE", "no worker answers, so there is nothing to pack onto")
        number = await gateway.steer(Planner.repack)
        while request.wait and (await self._status()).repacks.done < number:
            await gateway.next_round()
        return pb.RepackResponse(repacks=messages.repacks((await self._status()).repacks, gateway.clock()))

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
        load = gateway.plane.counts().load
        workers = gateway.probes.workers()
        order = sorted(routes.ready, key=lambda name: (name not in routes.placed, load.get(name, 0.0)))
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

    async def _status(self) -> PlannerStatus:
        status = await self._gateway.status()
        if status is None:
            raise StatusError("UNAVAILABLE", "the gateway has not looked at its workers yet")
        return status

    def _require_packing(self, why: str) -> None:
        if self._planner.options.mode != "lpt_packing":
            raise StatusError("FAILED_PRECONDITION", f"gateway.mode is not lpt_packing: {why}")


def _unknown(model: str) -> StatusError:
    return StatusError("NOT_FOUND", f"there is no model {model!r}")


class GatewayHealth(HealthService):
    """The health of the gateway and of its models."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def serving(self, service: str) -> bool | None:
        if not service:
            return self._gateway.ready
        routes = self._gateway.table.get(service)
        return None if routes is None else self._gateway.ready and bool(routes.ready)
