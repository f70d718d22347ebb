"""Routing and counting of requests, shared by both proxies. One event loop owns it.

The counters are plain numbers in dicts, because they change with every request. `counts` collects them for the metrics.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from time import monotonic
from typing import Protocol

from rsrv.histogram import Histogram
from rsrv.placement.contract import Table, Worker
from rsrv.placement.routing import Choice, Router
from rsrv.settings_fleet import GatewayMode
from rsrv.throttle import Throttle
from rsrv_gateway.outcomes import Refusal, no_classes, no_worker, not_found, not_served
from rsrv_gateway.suspects import Suspects

#: Upper bounds of the buckets of the histograms of durations, in seconds.
DURATION_BOUNDS: tuple[float, ...] = tuple(0.0005 * 2**k for k in range(17))
#: Code of a request whose client did not wait for the answer.
CANCELLED = "CANCELLED"
#: Seconds for which the cache keeps the names of a model's outputs with strings.
_OUTPUTS_S = 1.0
#: Maximum number of entries of this cache. Each entry is for one worker, model and version.
_OUTPUTS_MAX = 1000
#: The first errors about unknown models, up to this number, suggest a similar name. After that, only one error per second does.
_HINTS_MAX = 5
#: If no worker serves a model, at most this many workers are asked for its state.
_ASKED_WORKERS_MAX = 3


@dataclass(frozen=True, slots=True)
class TrafficCounts:
    """Counters of a proxy since its start, and its requests in flight. Model names that clients invented are absent."""

    #: Numbers of finished inference requests by model, worker (empty if none got the request) and gRPC code, such as "OK".
    requests: Mapping[tuple[str, str, str], int] = field(default_factory=dict)
    #: Numbers of items of forwarded requests, by model.
    items: Mapping[str, int] = field(default_factory=dict)
    #: Load in flight by worker, in the unit of the routes' charges.
    load: Mapping[str, float] = field(default_factory=dict)
    #: Numbers of requests in flight by model and worker, without zeros.
    outstanding: Mapping[tuple[str, str], int] = field(default_factory=dict)
    #: Numbers of requests that moved to another worker after a failure, by the worker that failed.
    failovers: Mapping[str, int] = field(default_factory=dict)
    #: Durations from arrival to the end of the answer, by model.
    durations: Mapping[str, Histogram] = field(default_factory=dict)


class Brain(Protocol):
    """Calls from a proxy to the gateway's loop. They run on the event loop that started the proxy."""

    def failed(self, worker: str) -> None:
        """Probe a worker now because a connection to it broke or could not be made.

        Returns at once, and may be called for every request.
        """

    async def refresh(self, sure: bool = False) -> None:
        """Probe all workers now, because a request names a model that is not in the table.

        Return when the table contains the results, or at once if the last refresh ended less than a second ago. Concurrent calls
        share one refresh. With `sure`, wait for a refresh that starts after this call. Never raises.
        """

    async def has_died(self, worker: str, model: str) -> bool:
        """Probe a worker whose connection broke. Return True if it served the model and nothing listens at its port now.

        Return False if the worker was stopping, or if this is unknown. Never raises.
        """

    async def string_outputs(self, worker: str, model: str, version: str) -> frozenset[str] | Refusal:
        """Ask a worker for the names of the outputs of a model that contain strings. Never raises."""


class Traffic:
    def __init__(self, mode: GatewayMode, brain: Brain) -> None:
        self.router = Router(mode)
        self.brain = brain
        self.suspects = Suspects()
        #: Workers that answer, by name.
        self.workers: Mapping[str, Worker] = {}
        self.table: Table = {}
        #: Limits how many errors name the most similar model.
        self._hints = Throttle(_HINTS_MAX)
        self._requests = Counter[tuple[str, str, str]]()
        self._items = Counter[str]()
        self._failovers = Counter[str]()
        self._durations: dict[str, Histogram] = {}
        #: Cache by worker, model and version: the names of the outputs with strings, and the time when the worker was asked.
        self._strings: dict[tuple[str, str, str], tuple[frozenset[str], float]] = {}

    def apply(self, workers: Mapping[str, Worker], table: Table) -> None:
        self.workers, self.table = workers, table
        self.router.update(table)

    @property
    def serves(self) -> bool:
        """True if some worker serves some model."""
        return any(routes.ready for routes in self.table.values())

    async def find(self, model: str, items: int) -> Choice | Refusal:
        """Choose a worker for a request for which `Router.select` found none. Refresh the table first if the model is unknown."""
        if model not in self.table:
            await self.brain.refresh()
        return self.router.select(model, items) or self.reason_for(model)

    def reason_for(self, model: str) -> Refusal:
        """Return the reason why no worker can be chosen."""
        if model in self.table:
            return not_served(model)
        # Report missing workers instead of an unknown model, because without workers every model is unknown.
        if not self.workers:
            return no_worker()
        # Limit how often names are compared, because a comparison takes milliseconds, and all other requests wait for it.
        known = () if self._hints.take("hint") is None else self.table
        return not_found(model, known)

    async def workers_for(self, model: str) -> Iterable[str]:
        """Return the workers that serve a model. Refresh the table if the model is unknown.

        If no worker serves the model, return some workers that may know why.
        """
        if model not in self.table:
            await self.brain.refresh()
        routes = self.table.get(model)
        if routes is not None and routes.ready:
            return dict.fromkeys(routes.ready)
        return list(self.workers)[:_ASKED_WORKERS_MAX]

    async def refusal_of_classes(
        self, worker: str, model: str, version: str, outputs: Iterable[str]
    ) -> Refusal | None:
        """Return why a worker must not get a request for classes of these outputs, or None if it may get the request."""
        if not outputs:
            return None
        key, now = (worker, model, version), monotonic()
        strings, asked_at = self._strings.get(key, (frozenset(), -_OUTPUTS_S))
        if now - asked_at >= _OUTPUTS_S:
            answer = await self.brain.string_outputs(worker, model, version)
            if isinstance(answer, Refusal):
                return answer
            strings = answer
            if len(self._strings) >= _OUTPUTS_MAX:
                self._strings.clear()
            self._strings[key] = strings, now
        return next((no_classes(model, output) for output in outputs if output in strings), None)

    def pin_sequence(self, choice: Choice, model: str, sequence: int | str) -> None:
        """Move a request of a sequence to the sequence's worker.

        The worker depends only on the sequence, the model and the model's workers. So all gateways that see the same workers
        choose the same worker.
        """
        routes = self.table.get(model)
        if routes is not None and routes.ready:
            home = _home(f"{model}/{sequence}", routes.placed or routes.ready)
            if home != choice.worker:
                self.router.move(choice, home)

    def count_failover(self, failed: str) -> None:
        """Count a request that moved to another worker because this one failed."""
        self._failovers[failed] += 1

    def count_finished(self, model: str, worker: str, code: str, items: int, seconds: float) -> None:
        """Count a finished request. `worker` is the last worker that got the request."""
        self._requests[model, worker, code] += 1
        self._items[model] += items
        durations = self._durations.get(model)
        if durations is None:
            durations = self._durations[model] = Histogram(DURATION_BOUNDS)
        durations.observe(seconds)

    def count_refused(self, model: str, code: str) -> None:
        """Count a request that was sent to no worker.

        `model` is empty for an unknown model, because clients may invent any number of names.
        """
        self._requests[model if model in self.table else "", "", code] += 1

    def counts(self) -> TrafficCounts:
        return TrafficCounts(
            requests=dict(self._requests),
            items=dict(self._items),
            load=self.router.loads(),
            outstanding=self.router.outstanding(),
            failovers=dict(self._failovers),
            durations={
                model: Histogram(DURATION_BOUNDS, [*durations.counts], durations.sum)
                for model, durations in self._durations.items()
            },
        )


def _home(key: str, workers: Sequence[str]) -> str:
    """Return a worker that depends only on `key` and the set of workers. If workers join or leave, few sequences move."""

    def rank(worker: str) -> bytes:
        # Accept surrogates, because the key may come from JSON, where texts may contain them.
        return blake2b(f"{worker}/{key}".encode(errors="surrogatepass"), digest_size=8).digest()

    return max(workers, key=rank)
