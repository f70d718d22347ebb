"""How far the start of a worker is: until it answers, its runtime alone knows how many of its models are ready."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from rsrv.address import Address
from rsrv.logs import fields
from rsrv.serve.plan import Worker
from rsrv.wire.frames import ProtocolError
from rsrv.wire.socket import Closed, read_status

log = logging.getLogger("rsrv.node")

#: seconds between two looks, and for each
_EVERY = 1.0
_PATIENCE = 5.0


async def tell(
    worker: Worker,
    pid: int,
    *,
    ready: Callable[[int, Path], Awaitable[tuple[int, int]]] | None = None,
    serves: Callable[[Address], Awaitable[bool]] | None = None,
    rest: Callable[[float], Awaitable[None]] = asyncio.sleep,
    clock: Callable[[], float] | None = None,
) -> None:
    """A line of the log whenever there are more models ready, until the worker serves.

    `ready` says how many models of a repository are, and how many there are; `serves` whether somebody listens.
    """
    ready, serves = ready or look, serves or listens
    clock = clock or asyncio.get_running_loop().time
    name, began, told, done = worker.child.name, clock(), 0, False
    while not done:
        await rest(_EVERY)
        # First: what is ready by then is counted.
        done = await serves(worker.ports.http)
        count, of = await ready(pid, worker.repository)
        if not of:
            return
        if count > told or done:
            told, seconds = count, clock() - began
            text = (
                "%s serves: %d of %d models are ready (%.1f s)"
                if done
                else "%s: %d of %d models are ready (%.1f s)"
            )
            log.info(
                text,
                name,
                count,
                of,
                seconds,
                extra=fields(worker=name, ready=count, of=of, seconds=round(seconds, 3)),
            )


async def listens(address: Address) -> bool:
    """A tritonserver does when it has loaded all that it can."""
    try:
        _, writer = await asyncio.open_connection(address.local, address.port)
    except OSError:
        return False
    writer.close()
    return True


async def look(pid: int, repository: Path) -> tuple[int, int]:
    """Models of the repository that the runtime of this tritonserver has ready, and all."""
    return await asyncio.to_thread(_look, pid, repository)


def _look(pid: int, repository: Path) -> tuple[int, int]:
    names = set(next(os.walk(repository), ((), (), ()))[1])
    try:
        said = read_status(pid, timeout=_PATIENCE)
    except (OSError, Closed, ProtocolError):
        return 0, len(names)  # there is none yet
    return len(names & _ready(said)), len(names)


def _ready(said: dict[str, Any]) -> set[str]:
    """Names. A meta model is as ready as those that it calls."""
    models = {name for name, model in said["models"].items() if model["state"] == "ready"}
    return models | {name for name, meta in said["metas"].items() if models.issuperset(meta["models"])}
