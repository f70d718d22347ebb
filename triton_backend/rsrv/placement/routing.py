"""Choice of a worker for each request, and the load in flight of every worker.

The planner makes all decisions in the table (`contract.Routes`). This module only counts requests in flight and follows the
table. The requests of a placed model go to its replicas in turn. Each replica gets a quantum of items at a time, so that the
requests of a quantum share executions:

- A run is a series of requests to one replica. It ends when the next request does not fit into the quantum, or when the model
  has no request in flight (a single request shares no execution).
- Then the next replica is chosen among the replicas with the fewest whole quanta in flight. By default it is the least loaded
  one, or with `fill: rr`, the next in turn. If several replicas are equal, the next in turn is chosen.

With a quantum of 1 a run is one request, so each request goes to the replica with the fewest items (`route: spread`). The
requests of a model that is not placed go to all workers where it is ready, by the rule of the mode.

A worker that stands for several devices is listed once for each device. It gets a turn and a share of the load for each of its
devices.

Loads are whole billionths of a charge, so that additions and subtractions cancel exactly.
"""

from collections import Counter
from dataclasses import dataclass, field

from rsrv.placement.contract import Routes, Table
from rsrv.settings_fleet import GatewayMode

_UNITS = 1_000_000_000


@dataclass(slots=True, eq=False)
class _WorkerLoad:
    """Load in flight of one worker, over all models."""

    worker: str
    units: int = 0
    #: Number of times that the table lists the worker for one model.
    devices: int = 1


@dataclass(slots=True, eq=False)
class _ReplicaLoad:
    """Requests in flight of one model at one worker."""

    load: _WorkerLoad
    items: int = 0
    requests: int = 0
    #: Number of the model's replicas at the worker.
    devices: int = 1


@dataclass(slots=True, eq=False)
class _RoutedModel:
    """Routing state of one model.

    If the table has no routes for it any more, the state is kept until no request is in flight.
    """

    name: str
    #: Next index into `placed`, or into `ready` if nothing is placed, modulo their length.
    cursor: int
    routes: Routes | None = None
    ready: tuple[_WorkerLoad, ...] = ()
    placed: tuple[_ReplicaLoad, ...] = ()
    #: Replicas with requests in flight, and placed replicas, by worker.
    shares: dict[str, _ReplicaLoad] = field(default_factory=dict)
    requests: int = 0
    #: Replica of the current run, or None.
    run: _ReplicaLoad | None = None
    #: Number of items that the replica has got in the current run.
    spent: int = 0
    #: Load of an item, or of a request.
    units: int = _UNITS


@dataclass(slots=True, eq=False)
class Choice:
    """The worker chosen for one request. The request counts as in flight at this worker until `Router.release`."""

    _router: "Router"
    _model: _RoutedModel
    _share: _ReplicaLoad
    _items: int
    _units: int
    _counted: bool = False
    _others: tuple[str, ...] | None = None

    @property
    def worker(self) -> str:
        """Current worker of the request."""
        return self._share.load.worker

    @property
    def others(self) -> tuple[str, ...]:
        """Workers for a failover, in order of preference. They are computed on first use."""
        if self._others is None:
            self._others = self._router._others(self._model, self.worker)
        return self._others


class Router:
    """Chooses workers. One event loop owns the router. No method waits.

    `select` takes O(workers of the model).
    """

    def __init__(self, mode: GatewayMode) -> None:
        self._round_robin = mode == "round_robin"
        self._models: dict[str, _RoutedModel] = {}
        self._loads: dict[str, _WorkerLoad] = {}

    def update(self, table: Table) -> None:
        """Use this table from now on. Requests in flight stay counted, even at workers without routes."""
        ready: dict[tuple[str, ...], tuple[_WorkerLoad, ...]] = {}
        for name, routes in table.items():
            model = self._models.get(name)
            if model is None:
                # Each model begins with another worker. Otherwise, the first workers would get all rare models.
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
        for load in self._loads.values():
            load.devices = 1
        for loads in ready.values():
            for load, times in Counter(loads).items():
                load.devices = max(load.devices, times)
        known = {load.worker for loads in ready.values() for load in loads}
        known.update(worker for model in self._models.values() for worker in model.shares)
        self._loads = {worker: load for worker, load in self._loads.items() if worker in known}

    def measured(self, model: str) -> tuple[str, int] | None:
        """Return the input whose shape gives the number of items of a request, and its axis. None: a request is one item."""
        state = self._models.get(model)
        return None if state is None or state.routes is None else state.routes.batch_input

    def select(self, model: str, items: int = 1) -> Choice | None:
        """Choose a worker for a request, and count the request there until its release. None: no worker serves the model."""
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

    def move(self, choice: Choice, worker: str) -> None:
        """Count the request at another worker from now on. A released choice does not change."""
        if choice._counted:
            _discount(choice)
            choice._share = self._share(choice._model, self._load(worker))
            _count(choice)

    def release(self, choice: Choice) -> None:
        """Stop counting a finished request. A second call has no effect."""
        if choice._counted:
            _discount(choice)

    def outstanding(self) -> dict[tuple[str, str], int]:
        """Return the requests in flight by (model, worker), without zeros."""
        return {
            (model.name, worker): share.requests
            for model in self._models.values()
            if model.requests
            for worker, share in model.shares.items()
            if share.requests
        }

    def loads(self) -> dict[str, float]:
        """Return the load in flight by worker, in charges."""
        return {worker: load.units / _UNITS for worker, load in self._loads.items()}

    # --- choosing ------------------------------------------------------------------------------------------

    def _replica(self, model: _RoutedModel, items: int, routes: Routes) -> _ReplicaLoad:
        """Choose the replica for a request of a placed model."""
        placed = model.placed
        if len(placed) == 1:
            return placed[0]
        if model.run is not None and model.requests and model.spent + items <= routes.quantum:
            model.spent += items
            return model.run
        count = len(placed)
        turn = model.cursor % count
        least = routes.fill == "least"
        at = -1
        best = 0.0
        fewest = 0
        for step in range(count):
            index = turn + step
            if index >= count:
                index -= count
            share = placed[index]
            quanta = share.items // (routes.quantum * share.devices)
            units = _per_device(share.load) if least else 0.0
            if at < 0 or quanta < fewest or (quanta == fewest and units < best):
                at, fewest, best = index, quanta, units
        model.cursor = at + 1
        model.run, model.spent = placed[at], items
        return placed[at]

    def _turn(self, model: _RoutedModel) -> _WorkerLoad:
        """Choose the worker for a request of a model that is not placed."""
        ready = model.ready
        at = model.cursor % len(ready)
        best = ready[at]
        units, devices = best.units, best.devices
        # If this worker has no load, no other worker has less.
        if units and not self._round_robin:
            for index, load in enumerate(ready[at + 1 :] + ready[:at], at + 1):
                if load.units * devices < units * load.devices:
                    best, at, units, devices = load, index, load.units, load.devices
                    if not units:
                        break
        model.cursor = at + 1
        return best

    def _others(self, model: _RoutedModel, chosen: str) -> tuple[str, ...]:
        placed = sorted(
            model.placed, key=lambda share: (share.items / share.devices, _per_device(share.load))
        )
        order = [share.load for share in placed]
        if self._round_robin:
            turn = model.cursor % max(len(model.ready), 1)
            order += model.ready[turn:] + model.ready[:turn]
        else:
            order += sorted(model.ready, key=_per_device)
        return tuple(dict.fromkeys(load.worker for load in order if load.worker != chosen))

    # --- counters ------------------------------------------------------------------------------------------

    def _route(self, model: _RoutedModel, routes: Routes) -> None:
        model.routes = routes
        model.units = max(round(routes.charge * _UNITS), 1)
        model.placed = tuple([self._share(model, self._load(worker)) for worker in routes.placed])
        for share, times in Counter(model.placed).items():
            share.devices = times
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


def _per_device(load: _WorkerLoad) -> float:
    return load.units / load.devices


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
