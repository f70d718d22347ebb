"""A small fleet in memory: workers with weights, queues and counters. The test advances the fleet's clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rsrv.placement.contract import Act, ModelView, Table, WeightAction, WeightsView, WorkerView
from rsrv.placement.options import PlannerOptions
from rsrv.placement.packing import Packing, UnitLoad, WorkerBudget
from rsrv.placement.planner import Plan, Planner
from rsrv.placement.routing import Router
from rsrv.placement.status import PlannerStatus

#: Seconds between two plans.
ROUND_S = 0.5


@dataclass
class Model:
    bytes: int = 10
    #: Device seconds that a request takes.
    cost: float = 0.01
    #: Requests per second through all gateways together.
    rate: float = 0.0
    max_items: int = 8
    pinned: bool = False


@dataclass
class Copy:
    """A model's weights and counters at a worker."""

    weights: WeightsView = WeightsView.ABSENT
    until: float = 0.0
    used: float = 0.0
    queued: float = 0.0
    requests: int = 0
    device_s: float = 0.0


@dataclass
class Server:
    budget: int | None = None
    ready: set[str] = field(default_factory=set)
    alive: bool = True
    instance: str | None = "1"
    calls: dict[str, frozenset[str]] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    copies: dict[str, Copy] = field(default_factory=dict)
    device: int = 0
    devices: int = 1
    #: The last view of each model.
    shown: dict[str, ModelView] = field(default_factory=dict)


class Fleet:
    """Workers by name. Each has all models, unless the test changes this."""

    def __init__(
        self,
        workers: Iterable[str],
        models: Mapping[str, Model],
        *,
        budget: int | None = None,
        load_s: float = 1.0,
    ) -> None:
        self.now = 0.0
        self.load_s = load_s
        self.models = dict(models)
        self.servers = {name: Server(budget, set(models), instance=name) for name in workers}
        #: Time, worker and model of each request that had to wait for weights.
        self.misses: list[tuple[float, str, str]] = []
        self._due: dict[str, float] = {}
        self._fronts = 0
        self._rounds = 0

    def copy(self, worker: str, model: str) -> Copy:
        return self.servers[worker].copies.setdefault(model, Copy())

    def resident(self, worker: str) -> set[str]:
        copies = self.servers[worker].copies
        return {name for name, copy in copies.items() if copy.weights is WeightsView.RESIDENT}

    def views(self) -> dict[str, WorkerView]:
        self._rounds += 1
        return {name: self._view(server) for name, server in self.servers.items()}

    def _view(self, server: Server) -> WorkerView:
        if not server.alive:
            return WorkerView(alive=False)
        if server.instance is None:
            return WorkerView(alive=True, ready=frozenset(server.ready))
        models = {}
        for name in self.models:
            copy = server.copies.get(name, Copy())
            model = self.models[name]
            view = ModelView(
                bytes=model.bytes,
                weights=copy.weights,
                pinned=model.pinned,
                queued=round(copy.queued),
                requests=copy.requests,
                items=copy.requests,
                device_seconds=copy.device_s,
                max_items=model.max_items,
                batch_input=("x", 0),
            )
            # As in the control process, an unchanged view remains the same object.
            if server.shown.get(name) != view:
                server.shown[name] = view
            models[name] = server.shown[name]
        return WorkerView(
            alive=True,
            ready=frozenset(server.ready),
            instance=server.instance,
            device=server.device,
            devices=server.devices,
            budget_bytes=server.budget,
            models=models,
            calls=server.calls,
            aliases=server.aliases,
            measurement=self._rounds,
        )

    def do(self, steps: Iterable[WeightAction]) -> None:
        for step in steps:
            copy = self.copy(step.worker, step.model)
            if step.act is Act.EVICT:
                if copy.queued < 1:
                    copy.weights = WeightsView.ABSENT
            elif copy.weights is WeightsView.ABSENT:
                self._load(step.worker, step.model)

    def restart(self, worker: str) -> None:
        server = self.servers[worker]
        server.copies.clear()
        server.instance = f"{worker}@{self.now}"
        server.alive = True

    def run(self, routers: Sequence[Router]) -> None:
        """Let ROUND_S pass. Requests arrive through the gateways in turn, and the devices work."""
        self.now += ROUND_S
        for name, model in self.models.items():
            self._due[name] = self._due.get(name, 0.0) + model.rate * ROUND_S
            while self._due[name] >= 1.0:
                self._due[name] -= 1.0
                self._fronts += 1
                self._arrive(name, routers[self._fronts % len(routers)])
        for worker, server in self.servers.items():
            if server.alive:
                self._work(worker, server)

    def _arrive(self, name: str, router: Router) -> None:
        choice = router.select(name)
        if choice is None:
            return
        router.release(choice)
        for worker in (choice.worker, *choice.others):
            if self.servers[worker].alive:
                copy = self.copy(worker, name)
                copy.queued += 1
                copy.used = self.now
                if copy.weights is not WeightsView.RESIDENT:
                    self.misses.append((self.now, worker, name))
                if copy.weights is WeightsView.ABSENT:
                    self._load(worker, name)
                return

    def _work(self, worker: str, server: Server) -> None:
        for copy in server.copies.values():
            if copy.weights is WeightsView.LOADING and copy.until <= self.now:
                copy.weights = WeightsView.RESIDENT
        remaining_s = ROUND_S
        busy = [
            (n, c) for n, c in server.copies.items() if c.weights is WeightsView.RESIDENT and c.queued >= 1
        ]
        for rest, (name, copy) in zip(range(len(busy), 0, -1), sorted(busy, key=_waiting), strict=True):
            cost = self.models[name].cost
            done = min(int(copy.queued), int(remaining_s / rest / cost))
            copy.queued -= done
            copy.requests += done
            copy.device_s += done * cost
            remaining_s -= done * cost

    def _load(self, worker: str, name: str) -> None:
        server = self.servers[worker]
        copy = self.copy(worker, name)
        copy.weights, copy.until, copy.used = WeightsView.LOADING, self.now + self.load_s, self.now
        if server.budget is None:
            return
        held = [
            (c.used, n) for n, c in server.copies.items() if c.weights is not WeightsView.ABSENT and n != name
        ]
        total = self.models[name].bytes + sum(self.models[n].bytes for _, n in held)
        for _, other in sorted(held):
            if total <= server.budget:
                break
            server.copies[other].weights = WeightsView.ABSENT
            total -= self.models[other].bytes


def _waiting(entry: tuple[str, Copy]) -> float:
    return entry[1].queued


class Script:
    """A fake packing, which places models as the test sets. It records the arguments of each call."""

    def __init__(self, **placed: tuple[str, ...]) -> None:
        self.placed = placed
        self.asked: list[tuple[dict[str, UnitLoad], dict[str, int | None], dict[str, Sequence[str]]]] = []

    def __call__(
        self,
        loads: Sequence[UnitLoad],
        workers: Sequence[WorkerBudget],
        *,
        previous: Mapping[str, Sequence[str]],
        hysteresis: float,
        forbid_oversubscription: bool,
    ) -> Packing:
        self.asked.append(
            (
                {load.name: load for load in loads},
                {worker.name: worker.budget_bytes for worker in workers},
                dict(previous),
            )
        )
        placed = {}
        for load in loads:
            allowed = load.allowed or frozenset(worker.name for worker in workers)
            eligible = [worker for worker in self.placed.get(load.name, ()) if worker in allowed]
            placed[load.name] = tuple(eligible or sorted(allowed)[: load.replicas])
        return Packing(placed=placed, utilisation={}, bytes={}, held=(), oversubscribed=())


def homes(table: Table) -> dict[str, tuple[str, ...]]:
    return {name: routes.placed for name, routes in table.items()}


def options(**changes: object) -> PlannerOptions:
    return PlannerOptions.model_validate({"replicas": 1, **changes})


class Scene:
    """A planner for a fleet, and a packing. The steps of its plans are carried out unless the test says otherwise."""

    def __init__(self, fleet: Fleet, script: Script, **changes: object) -> None:
        self.fleet = fleet
        self.script = script
        self.planner = Planner(options(**changes), pack=script)

    def plan(self, *, do: bool = True) -> Plan:
        plan = self.planner.plan(self.fleet.views(), self.fleet.now)
        if do:
            self.fleet.do(plan.steps)
        self.fleet.run([])
        return plan

    def status(self) -> PlannerStatus:
        status = self.planner.status()
        assert status is not None
        return status

    def settle(self, seconds: float = 5.0) -> Plan:
        for _ in range(round(seconds / ROUND_S)):
            plan = self.plan()
        return plan
