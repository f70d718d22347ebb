"""What HAProxy's counters say of workers, look by look. Pure."""

from collections import Counter
from collections.abc import Callable, Iterable

from rsrv_gateway.haproxy.admin import ServerCounts
from rsrv_gateway.haproxy.config import GRPC_WORKERS, HTTP_WORKERS

#: all other servers are the plane behind, which counts by itself
_WORKERS = (GRPC_WORKERS, HTTP_WORKERS)


class Seen:
    """`worker_in` tells whose a slot is."""

    def __init__(self, worker_in: Callable[[str], str]) -> None:
        self._worker_in = worker_in
        self._last: dict[tuple[str, str], ServerCounts] = {}
        #: requests that went elsewhere, by the worker that had failed
        self.failovers: Counter[str] = Counter()

    def take(self, servers: Iterable[ServerCounts]) -> set[str]:
        """Returns the workers that may be gone: those that are down now, or refused a connection, and not before."""
        last, self._last = (
            self._last,
            {(server.backend, server.slot): server for server in servers if server.backend in _WORKERS},
        )
        failed = set()
        for key, server in self._last.items():
            before = last.get(key, ServerCounts(server.backend, server.slot, True, 0, 0, 0))
            worker = self._worker_in(server.slot)
            self.failovers[worker] += server.moved - before.moved
            if server.refused > before.refused or (before.up and not server.up):
                failed.add(worker)
        return failed

    def restarted(self) -> None:
        """Its counters start anew."""
        self._last = {}

    def load(self) -> Counter[str]:
        """Requests under way, by worker."""
        load: Counter[str] = Counter()
        for server in self._last.values():
            load[self._worker_in(server.slot)] += server.current
        return load
