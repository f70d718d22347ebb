"""Probes of a child: how many models are ready while it starts, and whether it hangs later.

Until a server answers, only its runtime knows how many of its models are ready. A process that hangs still accepts
connections, because the kernel does that for it, and answers nothing.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from rsrv.address import Address
from rsrv.logs import fields
from rsrv.serve.plan import NodeWorker
from rsrv.wire.frames import ProtocolError
from rsrv.wire.socket import Closed, read_status

log = logging.getLogger("rsrv.node")

#: seconds between two checks, and for an answer
_EVERY = 1.0
_PATIENCE = 5.0


async def log_progress(
    worker: NodeWorker,
    pid: int,
    *,
    ready: Callable[[int, Path], Awaitable[tuple[int, int]]] | None = None,
    serves: Callable[[Address], Awaitable[bool]] | None = None,
    rest: Callable[[float], Awaitable[None]] = asyncio.sleep,
    clock: Callable[[], float] | None = None,
) -> None:
    """Log the number of ready models whenever it rises, until the worker serves.

    `ready` returns the ready models of a repository and their total number; `serves` tells if a port is open.
    """
    ready, serves = ready or look, serves or listens
    clock = clock or asyncio.get_running_loop().time
    name, began, logged, done = worker.child.name, clock(), 0, False
    while not done:
        await rest(_EVERY)
        # Checked first, so that the models ready by then are counted.
        done = await serves(worker.ports.http)
        count, of = await ready(pid, worker.repository)
        if not of:
            return
        if count > logged or done:
            logged, seconds = count, clock() - began
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
    """Return true if the port is open: tritonserver opens it after loading."""
    try:
        _, writer = await asyncio.open_connection(address.local, address.port)
    except OSError:
        return False
    writer.close()
    return True


async def takes_requests(gateway: Address) -> bool:
    """Return true if the gateway with this admin port has found a server: it listens before."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_PATIENCE):
            return b" 200 " in await _ask(gateway, "/readyz")
    return False


async def look(pid: int, repository: Path) -> tuple[int, int]:
    """Return the number of models that this tritonserver's runtime has ready, and the total of the repository."""
    return await asyncio.to_thread(_look, pid, repository)


def _look(pid: int, repository: Path) -> tuple[int, int]:
    names = set(next(os.walk(repository), ((), (), ()))[1])
    try:
        said = read_status(pid, timeout=_PATIENCE)
    except (OSError, Closed, ProtocolError):
        return 0, len(names)  # the runtime has not started
    return len(names & _ready(said)), len(names)


def _ready(said: dict[str, Any]) -> set[str]:
    """Return the names of ready models; a meta model is ready with all models that it calls."""
    models = {name for name, model in said["models"].items() if model["state"] == "ready"}
    return models | {name for name, meta in said["metas"].items() if models.issuperset(meta["models"])}


#: unanswered requests in a row: a single one may meet a busy thread, or a suspended node
_QUESTIONS = 6


async def wait_for_hang(address: Address, path: str, patience_s: float) -> None:
    """Return when the process has answered nothing for so many seconds. Refused connections mean starting or ending."""
    pause = patience_s / _QUESTIONS
    silent = 0
    while silent < _QUESTIONS:
        try:
            async with asyncio.timeout(pause):
                await _ask(address, path)
        except TimeoutError:
            silent += 1
        else:
            silent = 0
            await asyncio.sleep(pause)


async def _ask(address: Address, path: str) -> bytes:
    """Return the first line of an answer, empty if there is none."""
    try:
        reader, writer = await asyncio.open_connection(address.local, address.port)
    except OSError:
        return b""
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n".encode())
        return await reader.readline()
    except OSError:
        return b""
    finally:
        writer.close()
