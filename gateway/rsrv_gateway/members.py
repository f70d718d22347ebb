"""List of workers: from the settings, from a DNS name, and from a watched file."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

from dns.asyncresolver import Resolver
from dns.exception import DNSException, Timeout
from dns.message import Message
from dns.name import Name, root
from dns.rdataclass import IN
from dns.rdatatype import AAAA, SRV, A
from pydantic import ValidationError
from watchfiles import awatch

from rsrv.address import Address, bare, parse_address
from rsrv.explain import YamlError, explain, parse_yaml
from rsrv.placement.contract import Worker
from rsrv.settings_fleet import GatewaySection, WorkerEntry, WorkerPorts

log = logging.getLogger("rsrv.gateway")

T = TypeVar("T")

#: returns all addresses of a name, the best first; raises OSError
Resolve = Callable[[str], Awaitable[Iterable[str]]]

#: seconds between two reads of the DNS and the file
READ_PAUSE_S = 5.0
#: seconds for an answer of the DNS
_DNS_TIMEOUT_S = 10.0
#: seconds for the addresses of all targets of SRV records; with dnspython's 5 s for the records, the answer is in time
_TARGETS_TIMEOUT_S = 4.0
#: targets asked for at a time: each question is an open file, and a burst of them overflows a name server
_TARGETS_MAX = 200


class MembersError(Exception):
    """The list of workers cannot be used; the message says why."""


class Members:
    """Current list of workers. A source that cannot be read keeps its last workers, which probes check in any case."""

    def __init__(
        self,
        section: GatewaySection,
        resolve: Resolve | None = None,
        pause: float = READ_PAUSE_S,
        resolver: Callable[[], Resolver] = Resolver,
    ) -> None:
        """Check the settings. Raises MembersError if they contain a wrong list, or name no workers.

        `resolver` is for SRV names, and made for each look, as the machine's name servers may change.
        """
        if not section.workers and section.workers_dns is None and section.workers_file is None:
            raise MembersError(
                "there are no workers: name some in gateway.workers, gateway.workers_dns, gateway.workers_file or --workers"
            )
        self._section = section
        self._pause = pause
        self._resolve = resolve or addresses_of
        self._resolver = resolver
        self._listed = _by_name(map(worker_of, section.workers))
        self._filed: Mapping[str, Worker] = {}
        self._found: Mapping[str, Worker] = {}
        #: last text of the file, and last log line on each source
        self._text: str | None = None
        self._said: dict[str, str] = {}

    def workers(self) -> Mapping[str, Worker]:
        """Return the workers by name: settings, then file, then DNS. Of equal names or addresses the first one counts."""
        merged: dict[str, Worker] = {}
        addresses: set[str] = set()
        for workers in (self._listed, self._filed, self._found):
            for name, worker in workers.items():
                if name not in merged and worker.grpc not in addresses:
                    merged[name] = worker
                    addresses.add(worker.grpc)
        return merged

    async def look(self) -> None:
        """Read the file and the DNS once. Never raises."""
        await asyncio.gather(self._ask(), self._read())

    async def run(self, changed: Callable[[], None]) -> None:
        """Read both repeatedly, for ever, and call `changed` when `workers` has changed."""
        hint = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            if self._section.workers_file is not None:
                group.create_task(_listen(self._section.workers_file, hint))
            while True:
                # Notifications only hasten the next read: network and bind mounts send none.
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._pause):
                        await hint.wait()
                hint.clear()
                before = self.workers()
                await self.look()
                if self.workers() != before:
                    changed()

    async def _ask(self) -> None:
        name = self._section.workers_dns
        if name is None:
            return
        ask = self._ask_srv if name.startswith("_") else self._ask_addresses
        try:
            async with asyncio.timeout(_DNS_TIMEOUT_S):
                trouble = await ask(name)
        except (OSError, ValueError) as error:  # also a timeout, and a name or a resolv.conf that cannot be
            trouble = str(error) or "no answer in time"
        self._say("dns", trouble and f"gateway.workers_dns: {name}: {trouble}")

    async def _ask_addresses(self, name: str) -> str:
        ports = self._section.workers_ports.model_dump()
        entries = [WorkerEntry(host=host, **ports) for host in sorted(set(await self._resolve(name)))]
        self._found = _by_name(map(worker_of, entries))
        return ""

    async def _ask_srv(self, name: str) -> str:
        """Take the servers of a name's SRV records. Return why one of them has no address: it stays where it was.

        Raises OSError, ValueError.
        """
        ports = self._section.workers_ports
        # In a thread: requests would wait 0.1 s while 1,000 records are read.
        servers = await _ask_aside(lambda: asyncio.run(_servers_of(name, ports, self._resolver)))
        found: dict[str, Worker] = {}
        trouble = ""
        for server, worker in servers.items():
            if isinstance(worker, Worker):
                found[server] = worker
                continue
            trouble = trouble or f"{server}: {_reason(worker)}"
            if server in self._found:
                found[server] = self._found[server]
        self._found = found
        return trouble

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
            self._say("file", f"gateway.workers_file: {path}: {error}")
        else:
            self._say("file", "")

    def _say(self, about: str, trouble: str) -> None:
        """Log a problem once, and its end."""
        if trouble != self._said.get(about, ""):
            self._said[about] = trouble
            if trouble:
                log.warning("%s; its last workers stay", trouble)
            else:
                log.info("gateway.workers_%s: is readable again", about)


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
    """Parse a YAML list as in gateway.workers; return the workers by name. Raises MembersError."""
    try:
        raw = parse_yaml(text)
    except YamlError as error:
        raise MembersError(str(error)) from None
    if not isinstance(raw, list):
        # An empty file is one that is being written.
        raise MembersError("must be a list of workers, as gateway.workers; write [] where there is none")
    try:
        entries = GatewaySection.model_validate({"workers": raw}).workers
    except ValidationError as error:
        lines = (explain(one, GatewaySection, {"workers": raw}) for one in error.errors()[:10])
        raise MembersError("; ".join(lines)) from None
    return _by_name(map(worker_of, entries))


def parse_workers(text: str) -> list[WorkerEntry]:
    """Parse HOST:PORT,… with gRPC ports; HTTP and metrics have Triton's neighbouring ports. Raises MembersError."""
    entries = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        try:
            address = parse_address(part)
        except ValueError as error:
            raise MembersError(f"--workers: {error}; name gRPC ports, as server1:8001,server2:8001") from None
        entries.append(WorkerEntry(host=address.host, **_ports_beside(address.port, WorkerPorts())))
    return entries


def _ports_beside(grpc_port: int, ports: WorkerPorts) -> dict[str, Any]:
    """Return the ports of a server: the others are as far from its gRPC port as in `ports`; None: not a port."""
    offset = grpc_port - ports.grpc_port
    moved = {key: port and int(port) + offset for key, port in ports.model_dump().items()}
    return {key: port if port and 0 < port < 65536 else None for key, port in moved.items()}


def _by_name(workers: Iterable[Worker]) -> dict[str, Worker]:
    """Return the workers by name. Raises MembersError if two have one name."""
    found: dict[str, Worker] = {}
    for worker in workers:
        if worker.name in found:
            raise MembersError(f"two workers are called {worker.name!r}; give each a name of its own")
        found[worker.name] = worker
    return found


async def addresses_of(name: str) -> Iterable[str]:
    """Return the addresses of a name, the best first. Raises OSError."""
    found = await _ask_aside(lambda: socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
    return dict.fromkeys(str(address[0]) for *_, address in found)


async def _ask_aside(question: Callable[[], T]) -> T:
    """Ask the DNS in a thread of its own. Raises OSError if the system has no thread left.

    The event loop's end waits for the threads of its pool, and planning needs one of them: a silent name server may hold
    a question for a minute.
    """
    answer: Future[T] = Future()
    answer.set_running_or_notify_cancel()

    def ask() -> None:
        try:
            answer.set_result(question())
        except BaseException as error:  # noqa: BLE001  the asking task gets it
            answer.set_exception(error)

    try:
        Thread(target=ask, name="dns", daemon=True).start()
    except RuntimeError as error:
        raise OSError(str(error)) from None
    return await asyncio.wrap_future(answer)


async def _servers_of(
    name: str, ports: WorkerPorts, make_resolver: Callable[[], Resolver]
) -> dict[str, Worker | BaseException]:
    """Return the server of each of a name's SRV records, or why it has no address, by TARGET:PORT.

    Raises OSError, ValueError.
    """
    try:
        resolver = make_resolver()
        # In turns, the text of an error would name the name servers in another order each time.
        resolver.rotate = False
        answer = await resolver.resolve(name, SRV, search=True)
    except DNSException as error:
        raise OSError(_reason(error)) from None
    records = {
        str(Address(one.target.canonicalize().to_text(omit_final_dot=True), one.port)): one
        for one in answer
        if one.port and one.target != root  # else there is no server (RFC 2782)
    }
    limit = asyncio.get_running_loop().time() + _TARGETS_TIMEOUT_S
    room = asyncio.Semaphore(_TARGETS_MAX)

    async def address(target: Name) -> str:
        async with asyncio.timeout_at(limit), room:
            return await _address_of(target, answer.response, resolver)

    targets = list(dict.fromkeys(one.target for one in records.values()))
    found = await asyncio.gather(*map(address, targets), return_exceptions=True)
    hosts = dict(zip(targets, found, strict=True))

    def server(key: str) -> Worker | BaseException:
        host, port = hosts[records[key].target], records[key].port
        if isinstance(host, BaseException):
            return host
        return worker_of(WorkerEntry(host=host, name=key, **_ports_beside(port, ports)))

    return {key: server(key) for key in sorted(records)}


async def _address_of(host: Name, response: Message, resolver: Resolver) -> str:
    """Return an IPv4 address of a host, or else an IPv6 address, from the response that names it or from the DNS.

    The same address each time, as several are one server. Raises DNSException, OSError.
    """
    for kind in (A, AAAA):
        records = response.get_rrset(response.additional, host, IN, kind) or await resolver.resolve(
            host, kind, raise_on_no_answer=False
        )
        if addresses := [str(one.address) for one in records]:
            return min(addresses)
    raise OSError("it has no address")


def _reason(error: BaseException) -> str:
    # The text of a timeout has the seconds, which differ each time, and would be logged each time.
    return "no answer in time" if isinstance(error, Timeout | TimeoutError) else str(error).rstrip(".")


async def _listen(path: Path, hint: asyncio.Event) -> None:
    """Set `hint` with each change in the file's folder, as the file may be replaced or be a link; return if watching fails."""
    try:
        async for _ in awatch(
            path.absolute().parent, watch_filter=None, step=50, debounce=200, recursive=False
        ):
            hint.set()
    except* (OSError, RuntimeError) as errors:  # in a group, if its thread cannot start
        why = errors.exceptions[0]
        log.info("changes of %s are not notified (%s); it is read every %g s", path, why, READ_PAUSE_S)
