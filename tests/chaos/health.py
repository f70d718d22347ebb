"""What the health service reports during a fault."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


class Told:
    """The reports about one service, with their times. A missing answer is also a report: not serving."""

    def __init__(self) -> None:
        self._said: list[tuple[float, bool]] = []

    def note(self, serving: bool) -> None:
        self._said.append((time.monotonic(), serving))

    def seconds_until(self, serving: bool, since: float) -> float:
        """Return the seconds from `since` to the first later report of this state, or inf if there is no such report."""
        return next((at - since for at, reported in self._said if at >= since and reported is serving), inf)


@contextmanager
def watched(socket: Path, service: str) -> Iterator[Told]:
    """Follow the reports during the block: about a model, or about the server if `service` is empty."""
    reports = Told()
    stop = threading.Event()
    with grpc.insecure_channel(f"unix:{socket}", options=[("grpc.max_reconnect_backoff_ms", 100)]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        def follow() -> None:
            while not stop.wait(0.02):
                try:
                    for answer in stub.Watch(health_pb2.HealthCheckRequest(service=service)):
                        reports.note(answer.status == health_pb2.HealthCheckResponse.SERVING)
                except (grpc.RpcError, ValueError):  # A channel that is being closed raises ValueError.
                    reports.note(serving=False)

        thread = threading.Thread(target=follow)
        thread.start()
        try:
            yield reports
        finally:
            stop.set()
            channel.close()
            thread.join()
