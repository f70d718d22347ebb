"""Which worker gets a request, and what every worker has under way.

Everything that decides is in the table (`contract.Routes`): the planner makes it, and only the counters are here.
A model that is placed goes to its replicas, a quantum of items to each in turn, so that they share executions:

- a run stays at one replica until its next request no longer fits in the quantum, or nothing of the model is
  under way (a request alone shares an execution with nobody);
- then a replica is opened: of those with the fewest whole quanta under way the one with the least load, or
  (`fill` rr) the next in turn. Ties go to the next in turn.

With a quantum of 1 a run is one request, so that each goes to the replica with the fewest items: that is how
`route: spread` is told. A model that is not placed goes to all workers where it is ready, as the mode says.

Loads are counted in whole billionths of a charge, so that what was added is what is taken away.
"""

from typing import Literal

from rsrv.placement.contract import Routes, Table

Mode = Literal["round_robin", "least_outstanding", "lpt_packing"]

_UNITS = 1_000_000_000


class _WorkerLoad:
    """What one worker has under way, over all models."""

    __slots__ = ("units", "worker")

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self.units = 0


class _ReplicaLoad:
    """What one model has under way at one worker."""

    __slots__ = ("items", "load", "requests")

    def __init__(self, load: _WorkerLoad) -> None:
        self.load = load
        self.items = 0
        self.requests = 0


class _RoutedModel:
    """What is known of one model. It outlives its routes until nothing of it is under way."""

    __slots__ = ("cursor", "name", "placed", "ready", "requests", "routes", "run", "shares", "spent", "units")

    def __init__(self, name: str, cursor: int) -> None:
        self.name = name
        self.routes: Routes | None = None
        self.ready: tuple[_WorkerLoad, ...] = ()
        self.placed: tuple[_ReplicaLoad, ...] = ()
        #: by worker: all that has something under way, and what is placed
        self.shares: dict[str, _ReplicaLoad] = {}
        self.requests = 0
        #: whose turn it is next: an index into `placed`, or else into `ready`; modulo their number
        self.cursor = cursor
        #: the replica that requests go to now, and the items that it has got
        self.run: _ReplicaLoad | None = None
        self.spent = 0
        #: what an item, or a request, adds to a load
        self.units = _UNITS


class Choice:
    """A request's worker, where it is counted until `Router.release`."""

    __slots__ = ("_counted", "_items", "_model", "_others", "_router", "_share", "_units")

    def __init__(
        self, router: "Router", model: _RoutedModel, share: _ReplicaLoad, items: int, units: int
    ) -> None:
        self._router = router
        self._model = model
        self._share = share
        self._items = items
        self._units = units
        self._counted = False
        self._others: tuple[str, ...] | None = None

    @property
    def worker(self) -> str:
        """Where the request goes, or went."""
        return self._share.load.worker

    @property
    def others(self) -> tuple[str, ...]:
        """Where to turn when `worker` fails, the best first; decided when it is first asked for."""
        if self._others is None:
            self._others = self._router._others(self._model, self.worker)
        return self._others


class Router:
    """Chooses workers. One event loop owns it; no method waits.

    select: O(workers that the model may go to).
    """

    def __init__(self, mode: Mode) -> None:
        self._round_robin = mode == "round_robin"
        self._models: dict[str, _RoutedModel] = {}
        self._loads: dict[str, _WorkerLoad] = {}

    def update(self, table: Table) -> None:
        """Choose by this table from now on. What is under way stays counted, also where nothing goes any more."""
        ready: dict[tuple[str, ...], tuple[_WorkerLoad, ...]] = {}
        for name, routes in table.items():
            model = self._models.get(name)
            if model is None:
                # Each begins with another worker, or the first few would get all that is rarely asked for.
                model = self._models[name] = _RoutedModel(name, len(self._models))
            if routes.ready not in ready:
                ready[routes.ready] = tuple([self._load(worker) for worker in routes.ready])
            model.ready = ready[routes.ready]
            if model.routes != routes:
                self._route(model, routes)
        for name in [name for name in self._models if name not in table]:
            model = self._models[name]
            self._route(model, Routes(ready=()))
            model.routes, model.ready = None, ()
            if model.requests == 0:
                del self._models[name]
        known = {load.worker for loads in ready.values() for load in loads}
        known.update(worker for model in self._models.values() for worker in model.shares)
        self._loads = {worker: load for worker, load in self._loads.items() if worker in known}

    def measured(self, model: str) -> tuple[str, int] | None:
        """The input whose shape tells the items of a request, and which axis; None: do not look, it counts as one."""
        state = self._models.get(model)
        return None if state is None or state.routes is None else state.routes.batch_input

    def select(self, model: str, items: int = 1) -> Choice | None:
        """Choose for a request, and count it there until it is released; None: nobody serves the model."""
        state = self._models.get(model)
        if state is None or state.routes is None or not state.ready:
            return None
        items = max(items, 1)
        if state.placed:
            share = self._replica(state, items, state.routes)
        else:
            share = self._share(state, self._turn(state))
        units = state.units * items if state.routes.per_item else state.units
        choice = Choice(self, state, share, items, units)
        _count(choice)
        return choice

    def move(self, choice: Choice, worker: str) -> Choice:
        """Count the request at another worker, to which it goes now. Returns the choice itself; does nothing to one
        that was released."""
        if choice._counted:
            _discount(choice)
            choice._share = self._share(choice._model, self._load(worker))
            _count(choice)
        return choice

    def release(self, choice: Choice) -> None:
        """The request has ended. Does nothing the second time."""
        if choice._counted:
            _discount(choice)

    def outstanding(self) -> dict[tuple[str, str], int]:
        """Requests under way by (model, worker), where there are any."""
        return {
            (model.name, worker): share.requests
            for model in self._models.values()
            if model.requests
            for worker, share in model.shares.items()
            if share.requests
        }

    def loads(self) -> dict[str, float]:
        """What is under way by worker, in charges."""
        return {worker: load.units / _UNITS for worker, load in self._loads.items()}

    # --- choosing ------------------------------------------------------------------------------------------

    def _replica(self, model: _RoutedModel, items: int, routes: Routes) -> _ReplicaLoad:
        """The placed worker that the request goes to."""
        placed = model.placed
        if len(placed) == 1:
            return placed[0]
        if model.run is not None and model.requests and model.spent + items <= routes.quantum:
            model.spent += items
            return model.run
        count = len(placed)
        turn = model.cursor % count
        least = routes.fill == "least"
        best = at = -1
        fewest = 0
        for step in range(count):
            index = turn + step
            if index >= count:
                index -= count
            share = placed[index]
            quanta = share.items // routes.quantum
            units = share.load.units if least else 0
            if at < 0 or quanta < fewest or (quanta == fewest and units < best):
                at, fewest, best = index, quanta, units
        model.cursor = at + 1
        model.run, model.spent = placed[at], items
        return placed[at]

    def _turn(self, model: _RoutedModel) -> _WorkerLoad:
        """The worker that the request goes to when the model is not placed."""
        ready = model.ready
        count = len(ready)
        at = model.cursor % count
        if not self._round_robin:
            turn = at
            for step in range(1, count):
                index = turn + step
                if index >= count:
                    index -= count
                if ready[index].units < ready[at].units:
                    at = index
        model.cursor = at + 1
        return ready[at]

    def _others(self, model: _RoutedModel, chosen: str) -> tuple[str, ...]:
        placed = sorted(model.placed, key=lambda share: (share.items, share.load.units))
        order = [share.load for share in placed]
        if self._round_robin:
            turn = model.cursor % max(len(model.ready), 1)
            order += model.ready[turn:] + model.ready[:turn]
        else:
            order += sorted(model.ready, key=lambda load: load.units)
        return tuple(dict.fromkeys(load.worker for load in order if load.worker != chosen))

    # --- counters ------------------------------------------------------------------------------------------

    def _route(self, model: _RoutedModel, routes: Routes) -> None:
        model.routes = routes
        model.units = max(round(routes.charge * _UNITS), 1)
        model.placed = tuple([self._share(model, self._load(worker)) for worker in routes.placed])
        model.shares = {
            worker: share
            for worker, share in model.shares.items()
            if share.requests or worker in routes.placed
        }
        if model.run not in model.placed:
            model.run = None

    def _load(self, worker: str) -> _WorkerLoad:
        load = self._loads.get(worker)
        if load is None:
            load = self._loads[worker] = _WorkerLoad(worker)
        return load

    def _share(self, model: _RoutedModel, load: _WorkerLoad) -> _ReplicaLoad:
        share = model.shares.get(load.worker)
        if share is None:
            share = model.shares[load.worker] = _ReplicaLoad(load)
        return share


def _count(choice: Choice) -> None:
    share = choice._share
    share.requests += 1
    share.items += choice._items
    share.load.units += choice._units
    choice._model.requests += 1
    choice._counted = True


def _discount(choice: Choice) -> None:
    share = choice._share
    share.requests -= 1
    share.items -= choice._items
    share.load.units -= choice._units
    choice._model.requests -= 1
    choice._counted = False
