"""What the health service says while a fault is under way."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


class Told:
    """What was said of one service, and when."""

    def __init__(self) -> None:
        self._said: list[tuple[float, bool]] = []

    def note(self, serving: bool) -> None:
        self._said.append((time.monotonic(), serving))

    def not_serving_after(self, moment: float) -> float:
        """Seconds from a moment until it was said not to serve; inf: it never was."""
        return next((at - moment for at, serving in self._said if at >= moment and not serving), inf)


@contextmanager
def watched(socket: Path, service: str) -> Iterator[Told]:
    """Beside the block, follow what is said of a model, or of the server by the empty name."""
    told = Told()
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watch: Any = stub.Watch(health_pb2.HealthCheckRequest(service=service), wait_for_ready=True)

        def follow() -> None:
            try:
                for answer in watch:
                    told.note(answer.status == health_pb2.HealthCheckResponse.SERVING)
            except grpc.RpcError:
                told.note(serving=False)

        thread = threading.Thread(target=follow)
        thread.start()
        try:
            yield told
        finally:
            watch.cancel()
            thread.join()
