"""What the fronts share: where requests go, and what became of them. One event loop owns it.

Counting is on every request's way, so it is plain numbers in dicts; whoever wants metrics asks for `counts`.
"""

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b

from rsrv.histogram import Histogram
from rsrv.placement.contract import DURATION_BOUNDS, Brain, Durations, Table, TrafficCounts, Worker
from rsrv.placement.routing import Choice, Mode, Router
from rsrv_gateway.outcomes import Refusal, no_worker, not_found, not_served

#: the code of a request whose client did not wait for the answer
CANCELLED = "CANCELLED"
#: workers that are asked about a model that none serves, for what they say of it
_ASKED = 3


class Traffic:
    def __init__(self, mode: Mode, brain: Brain) -> None:
        self.router = Router(mode)
        self.brain = brain
        #: those that answer, by name
        self.workers: Mapping[str, Worker] = {}
        self.table: Table = {}
        self._requests: dict[tuple[str, str, str], int] = {}
        self._items: dict[str, int] = {}
        self._failovers: dict[str, int] = {}
        self._durations: dict[str, Histogram] = {}

    def apply(self, workers: Mapping[str, Worker], table: Table) -> None:
        self.workers, self.table = workers, table
        self.router.update(table)

    @property
    def serves(self) -> bool:
        """Whether some worker serves some model."""
        return any(routes.ready for routes in self.table.values())

    async def find(self, model: str, items: int) -> Choice | Refusal:
        """For a request whose model nobody seemed to serve: after a look at all workers, if that may help."""
        if model not in self.table:
            await self.brain.refresh()
        return self.router.select(model, items) or self.nobody(model)

    def nobody(self, model: str) -> Refusal:
        """Why no worker can be chosen."""
        if model in self.table:
            return not_served(model)
        # Without workers, nothing is known of any model.
        return not_found(model) if self.workers else no_worker()

    async def workers_for(self, model: str) -> Iterable[str]:
        """The workers that serve it, after a look at all if that may help; if none does, some that can say what is
        wrong."""
        if model not in self.table:
            await self.brain.refresh()
        routes = self.table.get(model)
        return routes.ready if routes is not None and routes.ready else list(self.workers)[:_ASKED]

    def settle(self, choice: Choice, model: str, sequence: int | str) -> None:
        """Sends a request of a sequence to the worker that has the others of the sequence.

        Every gateway finds the same one without being told, until the model goes to other workers.
        """
        routes = self.table.get(model)
        if routes is not None and routes.ready:
            home = _home(f"{model}/{sequence}", routes.placed or routes.ready)
            if home != choice.worker:
                self.router.move(choice, home)

    def moved(self, failed: str) -> None:
        """A request goes to another worker, because this one has failed."""
        self._failovers[failed] = self._failovers.get(failed, 0) + 1

    def ended(self, model: str, worker: str, code: str, items: int, seconds: float) -> None:
        """A request is over; `worker` is the last one that it went to."""
        key = (model, worker, code)
        self._requests[key] = self._requests.get(key, 0) + 1
        durations = self._durations.get(model)
        if durations is None:
            durations = self._durations[model] = Histogram(DURATION_BOUNDS)
            self._items[model] = 0
        durations.observe(seconds)
        self._items[model] += items

    def refused(self, model: str, code: str) -> None:
        """A request is over that went to no worker. A model that there is not is the client's invention, and has no
        name."""
        key = (model if model in self.table else "", "", code)
        self._requests[key] = self._requests.get(key, 0) + 1

    def counts(self) -> TrafficCounts:
        return TrafficCounts(
            requests=dict(self._requests),
            items=dict(self._items),
            load=self.router.loads(),
            outstanding=self.router.outstanding(),
            failovers=dict(self._failovers),
            durations={
                model: Durations(tuple(durations.counts), durations.sum)
                for model, durations in self._durations.items()
            },
        )


def _home(what: str, workers: Sequence[str]) -> str:
    """The same one of the workers each time, and mostly also when another one comes or goes."""

    def rank(worker: str) -> bytes:
        # JSON may say texts that are no Unicode.
        return blake2b(f"{worker}/{what}".encode(errors="surrogatepass"), digest_size=8).digest()

    return max(workers, key=rank)
