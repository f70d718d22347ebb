"""Routes to simulated devices: the gateway's router, the planner, and the stubs' choice of a device.

The planner has no probes. It reads all devices directly, at the same instant.

At the start, each model is added to the scheduler of one device, and pinned models to all. Any other device's scheduler gets a
model only with the first request or command for it, because ten thousand models on a thousand devices would be ten million
entries. Until then, the planner sees the model as a server shows a model without any request.
"""

from collections.abc import ItemsView, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from types import MappingProxyType

from rsrv.placement.contract import Act, ModelView, Table, WeightAction, WeightsView, WorkerView
from rsrv.placement.device_choice import allowed, by_preference, soonest
from rsrv.placement.devices import ModelDevices, ServerDevice, as_one, placements, routes_to_servers
from rsrv.placement.planner import Planner
from rsrv.placement.routing import Choice, Router
from rsrv.scheduler.events import Event, Evict, Outcome, Prefetch, Program, Request
from rsrv.sim.arrivals import instant
from rsrv.sim.device import SimulatedDevice
from rsrv.sim.scenario import Scenario
from rsrv.sim.schema import GatewayKeys

#: Input and axis that stand for the rows of a request.
_ROWS = ("rows", 0)


class SimulatedGateway:
    """Simulates the gateway's router and planner, and how a stub chooses a device of its server.

    All servers have the same number of devices. A single server has no gateway in front of it, and plans for itself. `names` has
    the devices' names in the order of their indices. The devices of a server have consecutive indices. Without packing, the
    gateway sees each server as one worker.
    """

    def __init__(self, scenario: Scenario, options: GatewayKeys, devices: Sequence[SimulatedDevice]) -> None:
        count = scenario.servers
        self._per_server = each = len(devices) // count
        digits = len(str(count - 1))
        servers = [f"{'gpu' if each == 1 else 'server'}{index:0{digits}}" for index in range(count)]
        self.names = (
            servers if each == 1 else [f"{server}/{number}" for server in servers for number in range(each)]
        )
        #: Time of the next round of probes and planning. The first round comes before all other events.
        self.next_round = 0.0
        self.steps: list[tuple[float, WeightAction]] = []
        #: Numbers of whole repacks by trigger.
        self.repacks: dict[str, int] = {}
        #: Number of changes of a packed model's home.
        self.moves = 0
        self._rounds = 0
        self._pause = options.probe_s
        self._budget = scenario.settings.weight_budget_bytes
        self._devices = devices
        self._index = {name: index for index, name in enumerate(self.names)}
        self._servers = {server: index for index, server in enumerate(servers)}
        #: True if the planner's workers are devices, False if they are servers.
        self._by_device = options.mode == "lpt_packing" or 1 in (count, each)
        self._workers = (
            {
                name: ServerDevice(servers[index // each], index % each if each > 1 else None)
                for index, name in enumerate(self.names)
            }
            if self._by_device
            else {server: ServerDevice(server, None) for server in servers}
        )
        self._router = Router(options.mode)
        self._planner = Planner(options)
        self._table: Table | None = None
        #: Placement tables of the servers with several devices.
        self._placed: Mapping[str, ModelDevices] = {}
        self._ready = frozenset(scenario.programs)
        self._unseen = MappingProxyType(
            {name: _unseen(program) for name, program in scenario.programs.items()}
        )
        #: The router's choice for each outstanding request, by id.
        self._choices: dict[int, Choice] = {}
        self._preference = cache(by_preference)

    def choose(self, request: Request, now: float) -> int:
        """Return the device for a request. The request counts as outstanding there until `ended` is called."""
        model = request.model
        items = request.rows if self._router.measured(model) else 1
        choice = self._router.select(model, items)
        assert choice is not None, (
            "all devices serve all models, and the first round comes before the first request"
        )
        self._choices[request.id] = choice
        return self._device(choice.worker, model, now)

    def _device(self, server: str, model: str, now: float) -> int:
        """Return the device that the model's stub in a server chooses."""
        count = self._per_server
        first = self._servers[server] * count
        if count == 1:
            return first
        mask = sum(1 << number for number in self._placed.get(server, {}).get(model, ()))
        numbers, devices = self._preference(model, count), self._devices
        chosen = allowed(numbers, mask)
        remaining = [number for number in numbers if number not in chosen]
        return first + soonest(
            chosen, remaining, lambda number: devices[first + number].answers_in_s(model, now)
        )

    def ended(self, request: int) -> None:
        self._router.release(self._choices.pop(request))

    def round(self, now: float) -> list[tuple[int, Event]]:
        """Read all devices, apply the planner's table, and return the events for devices."""
        self._rounds += 1
        plan = self._planner.plan(self._views(now), now)
        if plan.table is not self._table:
            self._table = plan.table
            self._router.update(routes_to_servers(plan.table, self._workers))
            self._placed = placements(plan.table, self._workers)
        repacks = self._planner.repacks()
        self.repacks = {str(trigger): times for trigger, times in repacks.counts.items()}
        if repacks.last_at == now:
            self.moves += repacks.moved
        self.next_round = instant(now + self._pause)
        return [self._carry_out(step, now) for step in plan.steps]

    def _views(self, now: float) -> dict[str, WorkerView]:
        views = [
            self._view(name, device, now) for name, device in zip(self.names, self._devices, strict=True)
        ]
        if not self._by_device:
            count = self._per_server
            merged = [as_one(tuple(views[at : at + count])) for at in range(0, len(views), count)]
            views = [replace(view, models=_Models(view.models, self._unseen)) for view in merged]
        return dict(zip(self._workers, views, strict=True))

    def _carry_out(self, step: WeightAction, now: float) -> tuple[int, Event]:
        self.steps.append((now, step))
        index = self._index[step.worker]
        self._devices[index].meet(step.model, now)
        match step.act:
            case Act.PREFETCH:
                return index, Prefetch(step.model)
            case Act.EVICT:
                return index, Evict((step.model,))

    def _view(self, name: str, device: SimulatedDevice, now: float) -> WorkerView:
        snapshot = device.scheduler.snapshot()
        loading = None if device.loading is None else device.loading.model
        seen = {
            model: ModelView(
                bytes=shown.device_bytes,
                weights=_weights(model, device.resident, loading),
                pinned=shown.pinned,
                item_s=shown.row_seconds,
                queued=shown.queued,
                executing=shown.executing,
                requests=shown.outcomes[Outcome.ANSWERED],
                items=shown.useful_rows,
                device_seconds=shown.device_seconds,
                max_items=shown.max_rows,
                batch_input=_ROWS,
            )
            for model, shown in snapshot.models.items()
            if not shown.draining
        }
        return WorkerView(
            alive=True,
            ready=self._ready,
            instance=name,
            budget_bytes=self._budget,
            free_bytes=None if self._budget is None else max(self._budget - snapshot.weight_bytes, 0),
            backlog_s=device.scheduler.backlog_seconds(now),
            models=_Models(seen, self._unseen),
            measurement=self._rounds,
        )


class _Models(Mapping[str, ModelView]):
    """All models of a worker. Iteration yields only models with a request. All other models are alike."""

    __slots__ = ("_seen", "_unseen")

    def __init__(self, seen: Mapping[str, ModelView], unseen: Mapping[str, ModelView]) -> None:
        self._seen = seen
        self._unseen = unseen

    def __getitem__(self, name: str) -> ModelView:
        return self._seen[name] if name in self._seen else self._unseen[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._seen)

    def __len__(self) -> int:
        return len(self._seen)

    def items(self) -> ItemsView[str, ModelView]:
        return self._seen.items()


def _unseen(program: Program) -> ModelView:
    """Return the view of a model without any request on a device."""
    most = program.max_batch_rows or max(size for _, size in program.costs)
    return ModelView(
        bytes=sum((program.tensors or {}).values()),
        weights=WeightsView.ABSENT,
        item_s=min(seconds / min(size, most) for (_, size), seconds in program.costs.items()),
        max_items=most,
        batch_input=_ROWS,
    )


def _weights(name: str, resident: set[str], loading: str | None) -> WeightsView:
    if name in resident:
        return WeightsView.RESIDENT
    return WeightsView.LOADING if name == loading else WeightsView.ABSENT
