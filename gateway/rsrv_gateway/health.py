"""grpc.health.v1.Health of the gateway: as a whole, and of each model by its name."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rsrv_gateway.brain import Gateway

_Response = health_pb2.HealthCheckResponse

#: seconds between two looks of a watcher
_LOOK = 0.25


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Computed when it is asked for, so that it cannot be out of date."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def status(self, service: str) -> Any:
        """'': requests are taken, and some worker answers; a model's name: some worker serves it."""
        if not service:
            serving = self._gateway.ready
        elif (routes := self._gateway.table.get(service)) is not None:
            serving = self._gateway.ready and bool(routes.ready)
        else:
            return _Response.SERVICE_UNKNOWN
        return _Response.SERVING if serving else _Response.NOT_SERVING

    async def Check(self, request: Any, context: Any) -> Any:
        status = self.status(request.service)
        if status == _Response.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no model {request.service!r}")
        return _Response(status=status)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        last = None
        while True:
            status = self.status(request.service)
            if status != last:
                last = status
                yield _Response(status=status)
            await asyncio.sleep(_LOOK)
