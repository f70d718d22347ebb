"""HAProxy as a child: which version it is, its start, its end."""

import asyncio
import logging
import os
import re
import signal
import sys
from collections import deque
from pathlib import Path

from rsrv.control.grpc_server import ListenError
from rsrv_gateway.haproxy import bound
from rsrv_gateway.haproxy.admin import Admin, AdminError
from rsrv_gateway.haproxy.files import Files

log = logging.getLogger("rsrv.gateway")

_OLDEST = (2, 4)
#: seconds until it answers, and until it has ended when told to
_START = 20.0
_END = 5.0
#: seconds between two questions whether it answers
_PAUSE = 0.02


async def check_version(program: Path) -> str:
    """The version's number. Raises ListenError where there is none that can be used."""
    wanted = f"gateway.data_plane: haproxy needs HAProxy {_OLDEST[0]}.{_OLDEST[1]} or later"
    cure = (
        "install it (the package is called haproxy), set gateway.haproxy, or set gateway.data_plane: python"
    )
    try:
        process = await asyncio.create_subprocess_exec(
            program, "-v", stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
        )
    except OSError as error:
        raise ListenError(f"{wanted}: {program}: {error.strerror}; {cure}") from None
    said, _ = await process.communicate()
    found = re.search(rb"version ((\d+)\.(\d+)\S*)", said)
    if found is None:
        raise ListenError(f"{wanted}: {program} does not say its version; {cure}")
    if (int(found[2]), int(found[3])) < _OLDEST:
        raise ListenError(f"{wanted}: {program} is {found[1].decode()}; {cure}")
    return found[1].decode()


class Process:
    """One that answers on its admin socket; `start` makes it."""

    def __init__(self, child: asyncio.subprocess.Process, files: Files) -> None:
        self._child = child
        self._files = files
        #: of its output, the last lines that say what is wrong
        self._alerts: deque[str] = deque(maxlen=5)
        self._reader = asyncio.create_task(self._read())

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def runs(self) -> bool:
        return self._child.returncode is None

    @classmethod
    async def start(cls, program: Path, files: Files) -> "Process":
        """Raises ListenError, which says why it did not start."""
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", bound.__file__, str(os.getpid())),
            *(program, "-db", "-f", files.configuration),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            # A Ctrl-C is for the gateway, which ends it in its order.
            start_new_session=True,
        )
        process = cls(child, files)
        try:
            async with asyncio.timeout(_START):
                await process._answers()
        except (TimeoutError, asyncio.CancelledError) as error:
            await process.stop()
            if isinstance(error, asyncio.CancelledError):
                raise
            raise ListenError(f"{program} does not answer on its admin socket within {_START:g} s") from None
        return process

    async def _answers(self) -> None:
        admin = Admin(self._files.admin)
        while True:
            try:
                await admin.ask("show info")
            except AdminError:
                if self._reader.done():
                    status = await self.wait()
                    why = "; ".join(self._alerts) or f"it ends with status {status}"
                    raise ListenError(
                        f"HAProxy does not start: {why}: see gateway.grpc, gateway.http and the settings of TLS"
                    ) from None
                await asyncio.sleep(_PAUSE)
            else:
                return

    async def wait(self) -> int:
        """Until it has ended; its exit status, or the negative number of the signal."""
        # Who waits may be cancelled; the reader is not to be.
        await asyncio.wait([self._reader])
        return await self._child.wait()

    async def drain(self, seconds: float) -> None:
        """Refuse connections, and return when the requests under way have ended, or after `seconds`."""
        self._signal(signal.SIGUSR1)
        try:
            async with asyncio.timeout(seconds):
                await self._child.wait()
        except TimeoutError:
            log.warning("HAProxy still has requests after %g s: they are broken off", seconds)

    async def stop(self) -> None:
        """End it, and what is under way."""
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(_END):
                await self._child.wait()
        except TimeoutError:
            self._signal(signal.SIGKILL)
        await self.wait()

    def _signal(self, number: int) -> None:
        if self.runs:
            self._child.send_signal(number)

    async def _read(self) -> None:
        """Its output, until it ends."""
        assert self._child.stderr is not None
        async for line in self._child.stderr:
            text = line.decode("utf-8", "replace").strip()
            if "[ALERT]" in text:
                # After its level and its pid.
                self._alerts.append(text.partition(" : ")[2] or text)
            if "[NOTICE]" not in text:
                log.info("haproxy: %s", text)
