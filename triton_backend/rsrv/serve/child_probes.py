"""Probes of the server: whether it listens yet, and whether it hangs later.

A process that hangs still accepts connections, because the kernel does that for it, and answers nothing.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import closing, suppress

from rsrv.address import Address

#: Number of unanswered requests in a row that count as a hang. One request may be unanswered because a thread is busy, or because
#: the machine was suspended.
_QUESTIONS = 6


async def listens(address: Address) -> bool:
    """Return True if the port is open. Tritonserver opens it after it has loaded its models."""
    try:
        _, writer = await asyncio.open_connection(address.local, address.port)
    except OSError:
        return False
    writer.close()
    return True


async def wait_for_hang(address: Address, patience_s: float) -> None:
    """Wait until the server has answered nothing for `patience_s` seconds.

    A refused connection is not a hang, because the server is then starting or ending.
    """
    pause = patience_s / _QUESTIONS
    silent = 0
    while silent < _QUESTIONS:
        try:
            async with asyncio.timeout(pause):
                await _ask(address)
        except TimeoutError:
            silent += 1
        else:
            silent = 0
            await asyncio.sleep(pause)


async def _ask(address: Address) -> None:
    """Send a health request to the server. Return when the server has answered or refused the connection."""
    try:
        reader, writer = await asyncio.open_connection(address.local, address.port)
    except OSError:
        return
    with suppress(OSError), closing(writer):
        writer.write(f"GET /v2/health/live HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n".encode())
        await reader.readline()


def bind_error(address: Address) -> str:
    """Return the reason why this process cannot listen at the address, or an empty text if it can."""
    with socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((address.host, address.port))
        except OSError as error:
            return error.strerror or str(error)
    return ""
