"""The list of workers, from the settings, a DNS name and a watched file."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

from pydantic import ValidationError
from watchfiles import awatch

from rsrv.address import Address, bare, parse_address
from rsrv.explain import YamlError, explain, parse_yaml
from rsrv.placement.contract import Worker
from rsrv.settings_fleet import GatewaySection, WorkerEntry, WorkerPorts

log = logging.getLogger(__name__)

#: Function that returns all addresses of a DNS name, the best one first. Raises OSError.
Resolve = Callable[[str], Awaitable[Iterable[str]]]

#: Seconds between two reads of the DNS and the file.
READ_PAUSE_S = 5.0
#: Seconds within which the DNS must answer.
_DNS_TIMEOUT_S = 10.0


class MembersError(Exception):
    """The list of workers cannot be used. The message says why."""


class Members:
    """The current list of workers. If a source cannot be read, its previous workers remain in the list."""

    def __init__(
        self,
        section: GatewaySection,
        resolve: Resolve | None = None,
        pause: float = READ_PAUSE_S,
    ) -> None:
        """Check the settings. Raises MembersError if a list in them is wrong, or if they name no source of workers."""
        if not section.workers and section.workers_dns is None and section.workers_file is None:
            raise MembersError(
                "there are no workers: name some in gateway.workers, gateway.workers_dns, gateway.workers_file or --workers"
            )
        self._section = section
        self._pause = pause
        self._resolve = resolve or addresses_of
        self._listed = _by_name(map(worker_of, section.workers))
        self._filed: Mapping[str, Worker] = {}
        self._found: Mapping[str, Worker] = {}
        #: Last text of the file.
        self._text: str | None = None
        #: Last logged problem of each source.
        self._logged: dict[str, str] = {}

    def workers(self) -> Mapping[str, Worker]:
        """Return the workers by name: first the workers in the settings, then in the file, then in the DNS.

        If several workers have the same name or address, only the first of these workers is used.
        """
        merged: dict[str, Worker] = {}
        addresses: set[str] = set()
        for workers in (self._listed, self._filed, self._found):
            for name, worker in workers.items():
                if name not in merged and worker.grpc not in addresses:
                    merged[name] = worker
                    addresses.add(worker.grpc)
        return merged

    async def refresh(self) -> None:
        """Read the file and the DNS once. Never raises."""
        await asyncio.gather(self._ask(), self._read())

    async def run(self, changed: Callable[[], None]) -> None:
        """Read the file and the DNS repeatedly until the task is cancelled. Call `changed` when `workers` has changed."""
        hint = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            if self._section.workers_file is not None:
                group.create_task(_listen(self._section.workers_file, hint))
            while True:
                # Do not rely on notifications of changes, because network mounts and bind mounts send none.
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._pause):
                        await hint.wait()
                hint.clear()
                before = self.workers()
                await self.refresh()
                if self.workers() != before:
                    changed()

    async def _ask(self) -> None:
        name = self._section.workers_dns
        if name is None:
            return
        ports = self._section.workers_ports.model_dump()
        trouble = ""
        try:
            async with asyncio.timeout(_DNS_TIMEOUT_S):
                hosts = sorted(set(await self._resolve(name)))
            self._found = _by_name(worker_of(WorkerEntry(host=host, **ports)) for host in hosts)
        except (OSError, ValueError) as error:  # This includes timeouts and invalid names.
            trouble = str(error) or "no answer in time"
        self._log("dns", trouble and f"gateway.workers_dns: {name}: {trouble}")

    async def _read(self) -> None:
        path = self._section.workers_file
        if path is None:
            return
        try:
            text = await asyncio.to_thread(path.read_text, "utf-8")
            if text != self._text:
                self._filed = read_workers(text)
                self._text = text
        except (OSError, UnicodeError, RuntimeError, MembersError) as error:
            self._log("file", f"gateway.workers_file: {path}: {error}")
        else:
            self._log("file", "")

    def _log(self, source: str, trouble: str) -> None:
        """Log a new problem once, and later the end of the problem. `trouble` is empty without a problem."""
        if trouble != self._logged.get(source, ""):
            self._logged[source] = trouble
            if trouble:
                log.warning("%s; the workers read last stay in use", trouble)
            else:
                log.info("gateway.workers_%s: can be read again", source)


def worker_of(entry: WorkerEntry) -> Worker:
    def at(port: int) -> str:
        return str(Address(bare(entry.host), port))

    control = entry.control
    if control is not None and control.isdigit():
        control = at(int(control))
    grpc = at(entry.grpc_port)
    return Worker(
        name=entry.name or grpc,
        grpc=grpc,
        http=None if entry.http_port is None else at(entry.http_port),
        metrics=None if entry.metrics_port is None else at(entry.metrics_port),
        control=control,
    )


def read_workers(text: str) -> Mapping[str, Worker]:
    """Parse a YAML list in the form of gateway.workers. Return the workers by name. Raises MembersError."""
    try:
        raw = parse_yaml(text)
    except YamlError as error:
        raise MembersError(str(error)) from None
    if not isinstance(raw, list):
        # Refuse an empty file, because another program is probably writing it at this moment.
        raise MembersError(
            "must be a list of workers, as in gateway.workers; write [] if there are no workers"
        )
    try:
        entries = GatewaySection.model_validate({"workers": raw}).workers
    except ValidationError as error:
        lines = (explain(problem, GatewaySection, {"workers": raw}) for problem in error.errors()[:10])
        raise MembersError("; ".join(lines)) from None
    return _by_name(map(worker_of, entries))


def parse_workers(text: str) -> list[WorkerEntry]:
    """Parse HOST:PORT,... with gRPC ports. The ports for HTTP and metrics have Triton's usual distances from the gRPC port.

    Raises MembersError.
    """
    entries = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        try:
            address = parse_address(part)
        except ValueError as error:
            raise MembersError(f"--workers: {error}; name gRPC ports, as server1:8001,server2:8001") from None
        entries.append(WorkerEntry(host=address.host, **_ports_beside(address.port, WorkerPorts())))
    return entries


def _ports_beside(grpc_port: int, ports: WorkerPorts) -> dict[str, Any]:
    """Return the ports of a server whose gRPC port is `grpc_port`: all ports of `ports`, moved by the same difference.

    A port is None if it would be invalid.
    """
    offset = grpc_port - ports.grpc_port
    moved = {key: port and int(port) + offset for key, port in ports.model_dump().items()}
    return {key: port if port and 0 < port < 65536 else None for key, port in moved.items()}


def _by_name(workers: Iterable[Worker]) -> dict[str, Worker]:
    """Return the workers by name. Raises MembersError if two workers have the same name."""
    by_name: dict[str, Worker] = {}
    for worker in workers:
        if worker.name in by_name:
            raise MembersError(f"two workers are called {worker.name!r}; give each a name of its own")
        by_name[worker.name] = worker
    return by_name


async def addresses_of(name: str) -> Iterable[str]:
    """Return the addresses of a name, the best first. Raises OSError."""
    # Look the name up on a new thread, because a silent name server may delay the lookup for a minute. On a thread of the event
    # loop's pool, the lookup would block a thread that planning needs, and delay the end of the loop.
    answer: Future[list[Any]] = Future()
    answer.set_running_or_notify_cancel()

    def ask() -> None:
        try:
            answer.set_result(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
        except BaseException as error:  # noqa: BLE001  the asking task gets it
            answer.set_exception(error)

    try:
        Thread(target=ask, name="dns", daemon=True).start()
    except RuntimeError as error:
        raise OSError(str(error)) from None
    return dict.fromkeys(str(address[0]) for *_, address in await asyncio.wrap_future(answer))


async def _listen(path: Path, hint: asyncio.Event) -> None:
    """Set `hint` at each change in the file's folder. Return if watching fails.

    The folder is watched instead of the file, because the file may be replaced, or be a link.
    """
    try:
        async for _ in awatch(
            path.absolute().parent, watch_filter=None, step=50, debounce=200, recursive=False
        ):
            hint.set()
    except* (OSError, RuntimeError) as errors:  # The error is a group if the watcher's thread cannot start.
        why = errors.exceptions[0]
        log.info(
            "the kernel does not report changes of %s (%s), so the file is read every %g s",
            path,
            why,
            READ_PAUSE_S,
        )
