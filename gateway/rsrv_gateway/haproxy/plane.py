"""The plane itself: keeps an HAProxy running, and tells it where requests go."""

import asyncio
import logging
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from rsrv.control.grpc_server import ListenError
from rsrv.settings_fleet import GatewaySection
from rsrv.wire.paths import RuntimeDirectoryError, make_private
from rsrv_gateway import telling
from rsrv_gateway.contract import Table, Worker
from rsrv_gateway.haproxy.admin import Admin, AdminError
from rsrv_gateway.haproxy.config import Target, configuration
from rsrv_gateway.haproxy.files import Files
from rsrv_gateway.haproxy.maps import Slots, maps_of
from rsrv_gateway.haproxy.names import Names, name_in
from rsrv_gateway.haproxy.process import Process, check_version
from rsrv_gateway.haproxy.seen import Seen
from rsrv_gateway.haproxy.state import State, tell, write_maps
from rsrv_gateway.haproxy.told import Told
from rsrv_gateway.listening import Token, read_setting
from rsrv_gateway.plane import Brain, Counts, Plane

log = logging.getLogger("rsrv.gateway")

#: servers in the configuration, at least; workers beyond them are served by the plane behind
_SLOTS = 64
#: seconds between two readings of what HAProxy tells
_PAUSE = 0.1
#: seconds before HAProxy is started again: at first, and at most
_AGAIN = (0.1, 5.0)


def behind(section: GatewaySection, directory: Path) -> GatewaySection:
    """The settings of the plane behind HAProxy: it listens in `directory`, and TLS with clients is HAProxy's."""
    files = Files(directory)
    return section.model_copy(
        update={
            "grpc": None if section.grpc is None else f"unix:{files.rest_grpc}",
            "http": None if section.http is None else f"unix:{files.rest_http}",
            "tls_certificate": None,
            "tls_key": None,
            "tls_client_ca": None,
            "processes": 1,
        }
    )


class HAProxyPlane:
    """A Plane. `rest` is the one behind it, made with the settings that `behind` gives for the same `directory`, which is
    for this plane alone."""

    def __init__(self, section: GatewaySection, brain: Brain, rest: Plane, directory: Path) -> None:
        """Raises ListenError where the token cannot be read."""
        self._section = section
        self._brain = brain
        self._rest = rest
        self._secret = Token(section).secret
        self._files = Files(directory)
        self._admin = Admin(self._files.admin)
        self._names = Names(section.probe_timeout_s)
        self._slots = Slots(max(_SLOTS, 2 * len(section.workers)))
        self._told = Told(self._slots.worker, brain.failed)
        self._seen = Seen(self._slots.worker)
        self._process: Process | None = None
        #: where HAProxy tells what became of requests
        self._ear: socket.socket | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._ending = False
        # Of what is below, one holds the lock who changes it.
        self._lock = asyncio.Lock()
        self._workers: Mapping[str, Worker] = {}
        self._table: Table = {}
        #: what HAProxy knows; None: it does not run, or nobody knows
        self._known: State | None = None
        #: workers that the plane behind serves
        self._left: set[str] = set()

    @property
    def pid(self) -> int | None:
        """HAProxy's process; None: not started."""
        return None if self._process is None else self._process.pid

    @property
    def listens(self) -> bool:
        return self._process is not None and self._process.runs

    async def start(self) -> None:
        section, files = self._section, self._files
        version = await check_version(section.haproxy)
        try:
            make_private(files.directory)
        except RuntimeDirectoryError as error:
            raise ListenError(str(error)) from None
        try:
            for name, path in (("tls", files.certificate), ("worker", files.worker_certificate)):
                _write_pair(_read(section, f"{name}_certificate"), _read(section, f"{name}_key"), path)
            await self._rest.start()
            self._ear = socket.socket(socket.AF_UNIX)
            self._ear.setblocking(False)
            self._ear.bind(str(files.told))
            self._ear.listen()
            self._tasks.append(asyncio.create_task(self._listen(self._ear)))
            async with self._lock:
                await self._launch()
        except BaseException:
            await self.stop()
            raise
        self._tasks += [asyncio.create_task(work) for work in (self._keep(), self._watch(), self._follow())]
        log.info("HAProxy %s carries requests", version)

    async def apply(self, workers: Mapping[str, Worker], table: Table) -> None:
        # Whoever HAProxy sends the rest to must know at least as much.
        await self._rest.apply(workers, table)
        async with self._lock:
            self._workers, self._table = workers, table
            await self._names.meet(self._targets())
            await self._push()

    def counts(self) -> Counts:
        """Of the requests that HAProxy has, the load is their number, and it is only known by worker."""
        own = Counts(
            requests=self._told.requests(),
            load=self._seen.load(),
            failovers=self._seen.failovers,
            durations=self._told.durations(),
        )
        return telling.add([own, self._rest.counts()])

    async def drain(self, seconds: float) -> None:
        self._ending = True
        async with asyncio.TaskGroup() as group:
            group.create_task(self._rest.drain(seconds))
            if self._process is not None:
                group.create_task(self._process.drain(seconds))

    async def stop(self) -> None:
        self._ending = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        if self._process is not None:
            await self._process.stop()
            self._process = None
        if self._ear is not None:
            self._ear.close()
        await self._rest.stop()
        self._files.remove()

    # --- HAProxy's life; whoever calls these holds the lock -------------------------------------------------

    async def _launch(self) -> None:
        """Start it, with what holds now. Raises ListenError."""
        state = self._state()
        write_maps(state, self._files)
        self._files.configuration.write_text(
            configuration(self._section, self._files, self._slots.names, state.targets, self._secret)
        )
        self._seen.restarted()
        self._process = await Process.start(self._section.haproxy, self._files)
        self._known = state

    async def _push(self) -> None:
        """Tell it what holds now, if it runs. What it does not take, it gets with a new start."""
        if self._process is None or self._ending:
            return
        state = self._state()
        try:
            if self._known is not None:
                known, self._known = self._known, None
                await tell(self._admin, self._files, known, state)
                self._known = state
        except AdminError as error:
            # Without knowing what it knows, nothing can be changed.
            log.error("%s; it is started anew", error)
            await self._process.stop()

    def _state(self) -> State:
        targets: dict[str, Target] = {}
        for name, worker in self._workers.items():
            target = self._target(worker)
            if target is not None:
                targets[name] = target
        slots = self._slots.update(targets)
        left = self._workers.keys() - slots.keys()
        if left - self._left:
            log.warning(
                "HAProxy does not serve these workers, the gateway does by itself: %s",
                ", ".join(sorted(left)),
            )
        self._left = left
        maps = maps_of(self._table, slots, in_turn=self._section.mode == "round_robin")
        return State({slot: targets[name] for name, slot in slots.items()}, maps)

    def _targets(self) -> Iterable[str]:
        return [
            target for worker in self._workers.values() for target in (worker.grpc, worker.http) if target
        ]

    def _target(self, worker: Worker) -> Target | None:
        """None: HAProxy cannot reach it."""
        grpc = self._names.address(worker.grpc)
        if grpc is None:
            return None
        http = None if worker.http is None else self._names.address(worker.http)
        # Only for TLS does HAProxy have a map of names.
        name = None if self._section.worker_ca is None else name_in(worker.grpc)
        return Target(grpc, http, name)

    # --- what goes on beside --------------------------------------------------------------------------------

    async def _keep(self) -> None:
        """Start it again when it has ended."""
        pause, longest = _AGAIN
        loop = asyncio.get_running_loop()
        while self._process is not None:
            started = loop.time()
            status = await self._process.wait()
            if self._ending:
                return
            if loop.time() - started > longest:
                pause = _AGAIN[0]
            log.error("HAProxy has ended with status %d: it is started again", status)
            while True:
                await asyncio.sleep(pause)
                pause = min(2 * pause, longest)
                try:
                    async with self._lock:
                        self._known = None
                        await self._launch()
                    break
                except (ListenError, OSError) as error:
                    log.error("%s", error)

    async def _watch(self) -> None:
        """Look at its counters again and again."""
        while True:
            await asyncio.sleep(self._section.probe_s)
            with suppress(AdminError):  # it has ended, and is started again
                for worker in self._seen.take(await self._admin.counts()):
                    self._brain.failed(worker)

    async def _follow(self) -> None:
        """Follow workers' names to other addresses. What is asked of the DNS keeps nobody waiting."""
        while True:
            await asyncio.sleep(self._section.resolve_s)
            await self._names.look(self._targets())
            async with self._lock:
                await self._push()

    async def _listen(self, ear: socket.socket) -> None:
        """To what HAProxy tells of requests: only now and then, as it would cost more to be woken by each."""
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(ear)
            with connection:
                rest = b""
                while (piece := _received(connection)) is not None:
                    *lines, rest = (rest + piece).split(b"\n")
                    for line in lines:
                        self._told.take(line.decode("utf-8", "replace"))
                    if not piece:
                        await asyncio.sleep(_PAUSE)


def _received(connection: socket.socket) -> bytes | None:
    """What is there now; None: that was all."""
    try:
        return connection.recv(1 << 20) or None
    except BlockingIOError:
        return b""
    except OSError:
        return None


def _read(section: GatewaySection, key: str) -> bytes | None:
    """The file that a setting names. Raises ListenError."""
    path = getattr(section, key)
    return None if path is None else read_setting(key, path)


def _write_pair(certificate: bytes | None, key: bytes | None, path: Path) -> None:
    """HAProxy wants both in one file."""
    if certificate is not None and key is not None:
        path.touch(mode=0o600)
        path.write_bytes(certificate.rstrip() + b"\n" + key)
