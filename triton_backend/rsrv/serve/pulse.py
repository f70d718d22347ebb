"""Whether a process still answers: one that hangs takes connections, as the kernel does that for it, and says nothing."""

from __future__ import annotations

import asyncio

from rsrv.address import Address

#: questions in a row that must be left open: one may meet a thread that is busy, or a node that was suspended itself
_QUESTIONS = 6


async def hangs(address: Address, path: str, patience_s: float) -> None:
    """Returns when it has answered nothing for so long, seconds. One that takes no connections starts, or ends."""
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


async def _ask(address: Address, path: str) -> None:
    """Returns with whatever comes, and be it the end."""
    try:
        reader, writer = await asyncio.open_connection(address.local, address.port)
    except OSError:
        return
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n".encode())
        await reader.read(1)
    except OSError:
        return
    finally:
        writer.close()
