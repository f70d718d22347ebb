"""One of several processes that carry requests on the same ports; the gateway tells it everything over a socket."""

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from typing import Any

from rsrv import logs
from rsrv.settings_fleet import GatewaySection
from rsrv_gateway import telling
from rsrv_gateway.lines import Lines, PeerError
from rsrv_gateway.plane import Brain, Plane

MakePlane = Callable[[GatewaySection, Brain], Plane]


def main(fd: int, make: MakePlane) -> int:
    """Until the gateway closes the socket `fd`, or ends."""
    # Whoever ends a process group, or presses Ctrl-C, means the gateway, which then drains this one.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    asyncio.run(_serve(socket.socket(fileno=fd), make))
    return 0


async def _serve(sock: socket.socket, make: MakePlane) -> None:
    child = _Child(make)
    child.lines = await Lines.over(sock, child.answer)
    await child.lines.run()
    # The gateway has told it to, or is gone. What is under way has ended already, or cannot be helped; no thread is
    # waited for.
    logs.flush()
    os._exit(0)


class _Child:
    """Answers the gateway's questions, and is its plane's brain."""

    lines: Lines

    def __init__(self, make: MakePlane) -> None:
        self._make = make
        self._plane: Plane | None = None
        self._refreshing: asyncio.Task[None] | None = None

    async def answer(self, question: str, value: Any) -> Any:
        if question == "settings":
            self._plane = self._make(GatewaySection.model_validate(value), self)
            return None
        plane = self._plane
        assert plane is not None, "the settings come first"
        match question:
            case "apply":
                workers, table = value
                await plane.apply(telling.workers_from_json(workers), telling.table_from_json(table))
            case "start":
                await plane.start()
            case "counts":
                return telling.counts_to_json(plane.counts())
            case "drain":
                await plane.drain(value)
            case "stop":
                await plane.stop()
        return None

    def failed(self, worker: str) -> None:
        self.lines.tell("failed", worker)

    async def refresh(self, sure: bool = False) -> None:
        if sure and self._refreshing is not None:
            await asyncio.shield(self._refreshing)
        if self._refreshing is None:
            self._refreshing = asyncio.create_task(self._refresh(sure))
        await asyncio.shield(self._refreshing)

    async def _refresh(self, sure: bool) -> None:
        try:
            # By the time of the answer, the gateway has told this process.
            await self.lines.ask("refresh", sure)
        except PeerError:
            pass
        finally:
            self._refreshing = None
