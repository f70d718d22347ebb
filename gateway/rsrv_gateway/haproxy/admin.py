"""HAProxy's admin socket: maps and servers are changed, and counters read, while it runs."""

import asyncio
import csv
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rsrv_gateway.haproxy.maps import text

#: HAProxy reads a whole command into a buffer of 16 kB
_COMMAND = 8000

#: seconds for an answer
_PATIENCE = 10.0


class AdminError(Exception):
    """HAProxy does not answer, or refuses what it was told."""


@dataclass(frozen=True, slots=True)
class ServerCounts:
    """Of one server of one backend. Counters are since HAProxy's start."""

    backend: str
    slot: str
    #: as HAProxy sees it: by its own checks and by what traffic met
    up: bool
    #: requests under way
    current: int
    #: connections that could not be made
    refused: int
    #: requests that went elsewhere after this one had failed
    moved: int


class Admin:
    """Each question has a connection of its own. All methods raise AdminError."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def ask(self, command: str) -> str:
        try:
            async with asyncio.timeout(_PATIENCE):
                reader, writer = await asyncio.open_unix_connection(str(self._path))
                try:
                    writer.write(f"{command}\n".encode())
                    answer = await reader.read(-1)
                finally:
                    writer.close()
        except OSError as error:  # a timeout is one, too
            raise AdminError(
                f"HAProxy's admin socket does not answer: {error or 'no answer in time'}"
            ) from None
        return answer.decode("utf-8", "replace")

    async def do(self, commands: Iterable[str]) -> None:
        """Say these, which have nothing to answer, in as few pieces as fit."""
        for piece in pieces(commands, ";"):
            answer = (await self.ask(piece)).strip()
            if answer:
                raise AdminError(f"HAProxy refuses: {' '.join(answer.split())}")

    async def replace(self, path: Path, entries: Mapping[str, str]) -> None:
        """Change a whole map at once."""
        answer = await self.ask(f"prepare map {path}")
        version = re.search(r"New version created: (\d+)", answer)
        if version is None:
            raise AdminError(f"HAProxy prepares no map: {' '.join(answer.split())}")
        target = f"@{version[1]} {path}"
        for piece in pieces(text(entries).splitlines(), "\n"):
            # An empty line ends what follows the command.
            answer = (await self.ask(f"add map {target} <<\n{piece}\n")).strip()
            if answer:
                raise AdminError(f"HAProxy takes no map: {' '.join(answer.split())}")
        await self.do([f"commit map {target}"])

    async def move(self, server: str, host: str, port: int) -> None:
        """Requests for BACKEND/SLOT go to this address from now on; `host` is an IP address."""
        answer = await self.ask(f"set server {server} addr {host} port {port}")
        # It answers with what has changed, in words.
        if not re.search(r"chang", answer):
            raise AdminError(f"HAProxy does not take {host}:{port} for {server}: {' '.join(answer.split())}")

    async def counts(self) -> list[ServerCounts]:
        return parse_counts(await self.ask("show stat -1 4 -1 no-maint"))


def pieces(parts: Iterable[str], separator: str) -> list[str]:
    """The parts, joined to as few strings as a command may be long."""
    found: list[str] = []
    length = _COMMAND
    for part in parts:
        length += len(part) + len(separator)
        if length > _COMMAND:
            found.append(part)
            length = len(part)
        else:
            found[-1] += separator + part
    return found


def parse_counts(answer: str) -> list[ServerCounts]:
    """Of `show stat`. Raises AdminError."""
    try:
        return [
            ServerCounts(
                backend=row["# pxname"],
                slot=row["svname"],
                up=row["status"].startswith(("UP", "no check")),
                current=int(row["scur"] or 0),
                refused=int(row["econ"] or 0),
                moved=int(row["wredis"] or 0),
            )
            for row in csv.DictReader(answer.splitlines())
        ]
    except (KeyError, ValueError, AttributeError, TypeError) as error:
        raise AdminError(f"HAProxy's counters cannot be read: {error!r}") from None
