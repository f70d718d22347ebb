"""grpc.health.v1.Health: of the server as a whole, and of each model by its name."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rsrv.control.protocols import RuntimeView
from rsrv.control.readiness import Readiness

_Response = health_pb2.HealthCheckResponse

#: seconds between two looks for what no change of the view announces: Triton has loaded a model, or one that failed is
#: removed from the repository
_LOOK = 0.25


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Computed when it is asked for, so that it cannot be out of date. (The package's own servicer keeps a table, which
    would have to be told of everything, and forgets watchers when another watcher of the same name leaves.)
    """

    def __init__(self, view: RuntimeView, readiness: Readiness) -> None:
        self._view = view
        self._readiness = readiness

    async def run(self) -> None:
        """For ever: notice which models have been ready, whether or not anybody asks."""
        while True:
            seen = self._view.changes
            self._readiness.missing()
            await self._view.wait_change(seen)

    def status(self, service: str) -> Any:
        """'': the runtime answers, and every model that should serve can; a model's name: it can."""
        if not service:
            serving = self._view.up and not self._readiness.missing()
        elif service in self._readiness.ready():
            serving = True
        elif self._readiness.knows(service):
            serving = False
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
            seen = self._view.changes
            status = self.status(request.service)
            if status != last:
                last = status
                yield _Response(status=status)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._view.wait_change(seen), _LOOK)
