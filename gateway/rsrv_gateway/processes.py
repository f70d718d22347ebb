"""A plane of several processes that listen on the same ports; the kernel spreads connections over them."""

import asyncio
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from rsrv.address import parse_address
from rsrv.control.grpc_server import ListenError
from rsrv.logs import Format
from rsrv.settings_fleet import GatewaySection
from rsrv_gateway import telling
from rsrv_gateway.contract import Table, Worker
from rsrv_gateway.lines import Lines, PeerError
from rsrv_gateway.plane import Brain, Counts

log = logging.getLogger("rsrv.gateway")

_PATIENCE = 10.0
#: seconds in which they go by a new table; whoever takes longer is told of the newest one when it is ready for that
_PROMPT = 1.0
#: seconds that a process may take to start
_START = 60.0
#: seconds between two questions for what they have done
_COUNT = 1.0
#: seconds before a process that has ended is started again: the first time, and at most
_BACK_OFF = 0.1, 5.0
#: seconds after which its earlier ends are forgotten
_STABLE = 30.0


def command(log_format: Format) -> Sequence[str]:
    """What each is started with, and the number of its end of a socket."""
    return sys.executable, "-m", "rsrv_gateway", "--log-format", log_format, "--process"


class Processes:
    """Each is a process from its start: nothing of gRPC survives a fork."""

    def __init__(
        self,
        section: GatewaySection,
        brain: Brain,
        command: Sequence[str],
        clock: Callable[[], float] = time.monotonic,
        patience: float = _PATIENCE,
    ) -> None:
        """`patience`: seconds that a process may take for what it does at once, before it is stuck, and replaced."""
        self._section = section
        self._brain = brain
        self._command = command
        self._clock = clock
        self._patience = patience
        self._reserved: list[socket.socket] = []
        self._processes: list[_Process] = []
        self._now: tuple[Mapping[str, Worker], Table] = {}, {}
        self._keepers: list[asyncio.Task[None]] = []
        self._ending = False
        #: done by those that are gone
        self._gone = Counts()

    @property
    def pids(self) -> list[int]:
        """Of those that serve."""
        return [process.pid for process in self._processes if process.serves]

    @property
    def listens(self) -> bool:
        return any(process.serves for process in self._processes)

    async def start(self) -> None:
        for key in ("grpc", "http"):
            self._section = self._section.model_copy(update={key: self._reserve(key)})
        self._processes = [
            _Process(self._brain, self._command, self._patience) for _ in range(self._section.processes)
        ]
        try:
            await asyncio.gather(*(self._begin(process) for process in self._processes))
        except PeerError as error:
            raise ListenError(str(error)) from None
        self._keepers = [asyncio.create_task(self._keep(process)) for process in self._processes]
        self._keepers += [asyncio.create_task(self._count(process)) for process in self._processes]

    async def apply(self, workers: Mapping[str, Worker], table: Table) -> None:
        self._now = workers, table
        said = self._said()
        tasks = [process.tell(said) for process in self._processes if process.serves]
        prompt = [task for task in tasks if task is not None]
        if prompt:
            await asyncio.wait(prompt, timeout=_PROMPT)

    def counts(self) -> Counts:
        """As of a second ago at most."""
        return telling.add([self._gone, *(process.counts for process in self._processes)])

    async def drain(self, seconds: float) -> None:
        self._ending = True
        serving = (process for process in self._processes if process.serves)
        await asyncio.gather(
            *(process.ask("drain", seconds, seconds + self._patience) for process in serving)
        )

    async def stop(self) -> None:
        self._ending = True
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*(process.end() for process in self._processes))
        for sock in self._reserved:
            sock.close()

    def _reserve(self, key: str) -> str | None:
        """Takes the port so that nobody else does while processes come and go. Returns HOST:PORT. Raises ListenError."""
        address: str | None = getattr(self._section, key)
        if address is None:
            return None
        try:
            asked = parse_address(address, any_host=True, any_port=True)
            family, *_, where = socket.getaddrinfo(
                asked.host or None, asked.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            # The kernel would let another gateway of this user share the port.
            with socket.socket(family, socket.SOCK_STREAM) as alone:
                alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                alone.bind(where)
            shared = socket.socket(family, socket.SOCK_STREAM)
            self._reserved.append(shared)
            shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            shared.bind(where)
        except (OSError, ValueError) as error:
            raise ListenError(f"gateway.{key}: cannot listen on {address}: {error}") from None
        return str(replace(asked, port=shared.getsockname()[1]))

    def _said(self) -> list[Any]:
        workers, table = self._now
        return [telling.workers_to_json(workers), telling.table_to_json(table)]

    async def _begin(self, process: "_Process") -> None:
        """Raises PeerError."""
        await process.start()
        await process.ask("settings", self._section.model_dump(mode="json"), _START)
        now = self._now
        await process.ask("apply", self._said(), _START)
        await process.ask("start", None, _START)
        process.serves = True
        if self._now is not now:
            process.tell(self._said())

    async def _keep(self, process: "_Process") -> None:
        """Start it again whenever it has ended."""
        least, most = _BACK_OFF
        pause = least
        while True:
            began = self._clock()
            await process.ended()
            self._gone = telling.add([self._gone, telling.of_the_dead(process.counts)])
            process.counts = Counts()
            if self._ending:
                return
            if self._clock() - began > _STABLE:
                pause = least
            log.error("a process of the gateway has ended; another starts in %g s", pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, most)
            try:
                await self._begin(process)
            except (PeerError, OSError) as error:
                log.error("a process of the gateway could not be started: %s", error)
                await process.end()

    async def _count(self, process: "_Process") -> None:
        while True:
            if process.serves:
                with suppress(PeerError):  # it has just ended
                    await process.count()
            await asyncio.sleep(_COUNT)


class _Process:
    """One of them, and its successors."""

    def __init__(self, brain: Brain, command: Sequence[str], patience: float) -> None:
        self._brain = brain
        self._command = command
        self._patience = patience
        self._process: asyncio.subprocess.Process | None = None
        self._lines: Lines | None = None
        self._reading: asyncio.Task[None] | None = None
        #: what it is to go by and has not been told yet, and who tells it
        self._untold: list[Any] | None = None
        self._telling: asyncio.Task[None] | None = None
        #: whether it listens
        self.serves = False
        self.counts = Counts()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                str(theirs.fileno()),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                env={"GRPC_VERBOSITY": "NONE", **os.environ},
            )
        ours.setblocking(False)
        self._lines = await Lines.over(ours, self._answer)
        self._reading = asyncio.create_task(self._lines.run())

    async def ask(self, question: str, value: Any = None, seconds: float | None = None) -> Any:
        """Raises PeerError where it refuses, while it starts; later it is replaced, if it does not do what it is asked
        for."""
        assert self._lines is not None
        try:
            async with asyncio.timeout(self._patience if seconds is None else seconds):
                return await self._lines.ask(question, value)
        except TimeoutError:
            log.error("a process of the gateway does not answer")
            self._kill()
            if not self.serves:
                raise PeerError("a process of the gateway does not answer") from None
        except PeerError as error:
            if not self.serves:
                raise
            log.error("a process of the gateway cannot %s: %s", question, error)
            self._kill()

    def tell(self, said: list[Any]) -> asyncio.Task[None] | None:
        """Have it go by this; what it was not told yet is left out.

        Returns who is done when it does; None: it is late, and still has to answer what it was told before.
        """
        self._untold = said
        if self._telling is not None and not self._telling.done():
            return None
        self._telling = asyncio.create_task(self._tell())
        return self._telling

    async def _tell(self) -> None:
        with suppress(PeerError):  # its successor is told from the start
            while self._untold is not None:
                said, self._untold = self._untold, None
                await self.ask("apply", said)

    async def count(self) -> None:
        said = await self.ask("counts")
        if said is not None:
            self.counts = telling.counts_from_json(said)

    async def ended(self) -> None:
        """Returns when it has."""
        assert self._process is not None
        await self._process.wait()
        self.serves = False
        if self._lines is not None:
            self._lines.close()

    async def end(self) -> None:
        """It has nothing under way that anybody waits for."""
        if self._process is None:
            return
        if self._lines is not None:
            if self.serves:
                await self.ask("stop")
            self._lines.close()
        try:
            async with asyncio.timeout(self._patience):
                await self._process.wait()
        except TimeoutError:
            self._kill()
            await self._process.wait()
        self.serves = False

    def _kill(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()

    async def _answer(self, question: str, value: Any) -> None:
        match question:
            case "failed":
                self._brain.failed(value)
            case "refresh":
                await self._brain.refresh(value)
                if self._telling is not None:
                    await asyncio.wait([self._telling])
