"""Places the models on the devices of this server. It reads the runtimes' loads, runs the planner, and carries out its plan.

The planner is `rsrv.placement`, which the gateway uses as well. Here its workers are the server's devices, and their names are
the devices' numbers. A plan has a placement table for the stubs, and prefetches and evictions for the runtimes. After a
restart, the control process continues with the last table.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import NoReturn

from rsrv.control import load_messages
from rsrv.control.grpc_service import InvalidArgument, StatusError
from rsrv.control.runtimes import Positions, Runtimes
from rsrv.control.v1 import control_pb2 as pb
from rsrv.placement.contract import Act, ModelView, Table, WeightAction, WeightsView, WorkerView
from rsrv.placement.device_choice import PINNED
from rsrv.placement.options import PlannerOptions
from rsrv.placement.planner import Planner
from rsrv.placement.status import PlannerStatus
from rsrv.settings import Settings
from rsrv.wire.placement_table import PlacementWriter

log = logging.getLogger(__name__)

#: Seconds between two rounds.
_ROUND_S = 1.0
#: Seconds between two rounds while a model moves to another device.
_MOVING_S = 0.25
#: Longest time between two plans while the devices' loads do not change.
_IDLE_S = 10.0
#: Longest time that the first round waits for further runtimes.
_JOIN_S = 2.0
#: The planner ignores a new model for at most this many seconds until it is ready on all devices. Otherwise, the first
#: ready device would get all new models.
_ARRIVAL_S = 5.0
#: Shortest pause between two rounds if runtimes or models change.
_HURRY_S = 0.1

#: After a model becomes cold on a device, the placement waits this many seconds before it starts the model there again.
_COLD_S = 600.0

_DEAD = WorkerView(alive=False)


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of a trial placement."""

    #: The placement after packing all models. If the trial changes no device or model, the current placement.
    status: PlannerStatus
    #: For each model whose devices would change, the current and the new devices.
    moves: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]


def _pinned(settings: Settings) -> set[str]:
    """Return the models that rsrv.yaml restricts to some devices."""
    return {name for name, section in settings.models.items() if section.devices is not None}


class Placing:
    """Decides on which devices models run. Belongs to one event loop. Only the planner runs on other threads."""

    def __init__(
        self, runtimes: Runtimes, settings: Settings, path: Path, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`path` is the path of the placement table."""
        self.mode = settings.placement.mode
        #: Generation of the table that was written last. 0: there is none.
        self.generation = 0
        self._runtimes = runtimes
        self._path = path
        self._clock = clock
        #: True if this object places models. It does not if there is only one device, or if another placement.mode is set.
        self.packs = self.mode == "lpt_packing" and len(runtimes.links) > 1
        # Measure the work of a model by its requests, because the stubs decide which device executes a request.
        self._planner = Planner(PlannerOptions.of(settings.placement, settings.models, work_basis="requests"))
        self._pinned = _pinned(settings)
        self._settings = settings
        #: Latest views of the devices, by number.
        self._seen: dict[int, WorkerView] = {}
        #: Models that are cold on a live device while another device has them ready, by device.
        self._cold: Mapping[int, frozenset[str]] = {}
        #: For each model, the devices where it is cold and where the table makes it start.
        self._starts: Mapping[str, Collection[int]] = {}
        #: Time when a model became cold on a device, by model and device.
        self._cold_since: dict[tuple[str, int], float] = {}
        #: Positions in the runtimes' records, from which the next round reads.
        self._positions: Positions = {}
        self._views: dict[str, WorkerView] = {}
        #: Names of the ready models of each live device in the last round.
        self._ready: Mapping[int, frozenset[str]] = {}
        self._writer: PlacementWriter | None = None
        self._written: Mapping[str, int] = {}
        #: The planner's table that was written last.
        self._table: Table = {}
        self._planning = asyncio.Lock()
        #: True if the planner waits for the load of weights, or until a change of the models has settled.
        self._unfinished = False
        #: New models that are not ready on all devices yet, with the time when this was first seen.
        self._arriving: dict[str, float] = {}
        self._decided = -_IDLE_S

    async def change(self, settings: Settings) -> None:
        """Use the settings of an rsrv.yaml that was read again. The mode does not change."""
        async with self._planning:
            self._pinned, self._settings = _pinned(settings), settings
            options = PlannerOptions.of(settings.placement, settings.models, work_basis="requests")
            self._planner.change(options)

    async def run(self) -> NoReturn:
        """Read the loads, decide and act, until cancelled."""
        while not self.packs:
            await asyncio.Event().wait()
        await self._resume()
        while True:
            try:
                moving = await self.round()
            except Exception:
                # Keep the last table. The next round tries again.
                log.exception("the placement of models was not updated")
                moving = False
            await self._pause(_MOVING_S if moving else _ROUND_S)

    async def round(self) -> bool:
        """Make a plan for the current loads, and carry it out. Return True while a model moves to another device."""
        async with self._planning:
            views, now = await self._read_views(), self._clock()
            if views == self._views and not self._unfinished and now - self._decided < _IDLE_S:
                return False
            # Run the planner on a thread, because with thousands of models it takes longer than an operator should wait.
            plan = await asyncio.to_thread(self._planner.plan, views, now)
            self._views, self._decided, self._unfinished = views, now, plan.moving or plan.settling
            try:
                starts = self._chosen_starts()
                if plan.table is not self._table or starts != self._starts:
                    self._write(
                        {
                            name: [*map(int, routes.placed), *starts.get(name, ())]
                            for name, routes in plan.table.items()
                        }
                    )
                    self._table, self._starts = plan.table, starts
            except OSError as error:
                log.error("the placement table cannot be written, so models stay on their devices: %s", error)
            steps: dict[str, list[WeightAction]] = {}
            for step in plan.steps:
                steps.setdefault(step.worker, []).append(step)
            await asyncio.gather(*map(self._carry_out, steps.values()))
        return plan.moving

    def impose(self, placed: Mapping[str, Collection[int]]) -> int:
        """Replace the table by a gateway's table. Return its generation. Raises StatusError, InvalidArgument."""
        if self.mode != "external":
            raise StatusError(
                "FAILED_PRECONDITION",
                f"placement.mode is {self.mode}; a gateway can place models only if it is external",
            )
        for name, devices in placed.items():
            try:
                self._runtimes.chosen(devices)
            except InvalidArgument as error:
                raise InvalidArgument(f"{name}: {error}") from None
        try:
            self._write(placed)
        except OSError as error:
            raise StatusError("UNAVAILABLE", f"the placement table cannot be written: {error}") from None
        return self.generation

    async def trial(
        self, dead: Collection[int], without: Collection[str], added: Sequence[pb.AddedModel]
    ) -> Trial:
        """Compute the placement that packing all models would give without some devices and models, and with further models.

        Nothing changes. This works only on a server that packs. Raises StatusError, InvalidArgument.
        """
        self._runtimes.chosen(dead)
        for model in added:
            if not (model.name and 0.0 <= model.device_seconds_per_s < inf):
                raise InvalidArgument(
                    f"{model.name or 'a model without a name'}: a model to add needs a name, bytes and device seconds per second"
                )
        async with self._planning:
            return await asyncio.to_thread(self._try, {str(number) for number in dead}, without, added)

    def _try(self, dead: Collection[str], without: Collection[str], added: Sequence[pb.AddedModel]) -> Trial:
        now = self._clock()
        unknown = sorted({*without} - {name for view in self._views.values() for name in view.ready})
        if unknown:
            raise StatusError("NOT_FOUND", f"there is no model {unknown[0]!r}")
        views = {
            worker: _DEAD if worker in dead else _changed(view, without, added)
            for worker, view in self._views.items()
        }
        status = self._planner.status()
        if status is None:
            raise StatusError("UNAVAILABLE", "the runtimes' loads are not known yet; try again in a second")
        packed = self._planner.packed(views, {model.name: model.device_seconds_per_s for model in added}, now)
        targets = self._planner.targets()
        moves = {
            name: (targets.get(name, ()), packed.targets().get(name, ()))
            for name in sorted(targets.keys() | packed.targets().keys())
        }
        changed = {name: move for name, move in moves.items() if move[0] != move[1] and name not in without}
        dry = bool(dead or without or added)
        return Trial((packed.status() if dry else status) or status, changed)

    # --- the runtimes ---------------------------------------------------------------------------------------

    async def _read_views(self) -> dict[str, WorkerView]:
        try:
            records = await self._runtimes.read_records(self._positions)
        except StatusError:
            records = {}
        links = self._runtimes.links
        ready = {number: frozenset(links[number].presence.ready) for number in records}
        self._cold = self._cold_models(ready)
        arriving = self._arrivals(ready)
        server = load_messages.load(range(len(links)), records, self.mode, {})
        self._positions = {number: (position.instance, position.next) for number, position in records.items()}
        self._seen = {
            device.number: load_messages.view_of(
                device,
                server,
                (ready[device.number] | self._cold[device.number]) - arriving,
                self._seen.get(device.number),
            )
            if device.number in records
            else _DEAD
            for device in server.devices
        }
        return {str(number): view for number, view in self._seen.items()}

    def _cold_models(self, ready: Mapping[int, frozenset[str]]) -> dict[int, frozenset[str]]:
        """Return the models that are cold on a live device while another device has them ready, by device.

        A model that may be cold starts on the device that gets its first request. Its stub starts it on every device that the
        table names. Devices where the model has failed or has recently become cold are left out.
        """
        now = self._clock()
        ready_anywhere = frozenset[str]().union(*ready.values())
        for number, names in ready.items():
            self._cold_since |= {(name, number): now for name in self._ready.get(number, names) - names}
        self._cold_since = {
            (name, number): since
            for (name, number), since in self._cold_since.items()
            if name in ready_anywhere and now - since < _COLD_S
        }
        return {
            number: frozenset(name for name in ready_anywhere - names if self._may_start(name, number))
            for number, names in ready.items()
        }

    def _may_start(self, name: str, number: int) -> bool:
        if (name, number) in self._cold_since or not self._settings.may_be_cold(name):
            return False
        states = {version["state"] for version in self._runtimes.links[number].presence.versions(name)}
        # A model that loads for another reason, for example at the server's start, gets its place once it is ready.
        loads = "loading" in states and number not in self._starts.get(name, ())
        return "failed" not in states and not loads

    def _chosen_starts(self) -> dict[str, list[int]]:
        """Return the cold devices that the planner has chosen, by model."""
        targets = self._planner.targets()
        starts: dict[str, list[int]] = {}
        for number, names in self._cold.items():
            for name in names:
                if str(number) in targets.get(name, ()):
                    starts.setdefault(name, []).append(number)
        return starts

    def _arrivals(self, ready: Mapping[int, frozenset[str]]) -> set[str]:
        """Return the new models that are not ready on all devices yet. `ready` has the ready models of each device."""
        if not self._arriving and ready == self._ready:
            return set()
        self._ready = ready
        now, placed = self._clock(), self._planner.targets()
        names = ready.values()
        partly = frozenset().union(*names) - frozenset.intersection(*names) - placed.keys() if ready else ()
        self._arriving = {name: self._arriving.get(name, now) for name in partly}
        return {name for name, since in self._arriving.items() if now - since < _ARRIVAL_S}

    async def _carry_out(self, steps: Sequence[WeightAction]) -> None:
        """Carry out the steps of one device in their order, one at a time."""
        for step in steps:
            command = {"command": "prefetch" if step.act is Act.PREFETCH else "evict", "model": step.model}
            try:
                # Use a separate connection for each step. If the runtime dies, the next runtime does not repeat the step, because
                # only the commands of operators are in the desired document.
                await self._runtimes.slow_command({int(step.worker): command})
            except StatusError as error:
                log.info("device %s did not %s %s: %s", step.worker, step.act.value, step.model, error)

    def _state(self) -> tuple[object, ...]:
        return tuple((link.up, link.state.instance, len(link.state.entries)) for link in self._runtimes.links)

    async def _pause(self, seconds: float) -> None:
        """Wait for this time, or until a runtime starts or ends, or a device gets or loses a model."""
        before, end = self._state(), self._clock() + seconds
        while (left := end - self._clock()) > 0 and self._state() == before:
            await asyncio.sleep(min(left, _HURRY_S))

    # --- the table ------------------------------------------------------------------------------------------

    async def _resume(self) -> None:
        """Wait for the runtimes, and continue with the table that an earlier control process wrote."""
        while not self._runtimes.entries:
            await self._runtimes.wait_change()
        # Wait for the other runtimes as well. Otherwise, models of a device whose runtime has not started yet would move to
        # other devices.
        end = self._clock() + _JOIN_S
        while not all(link.up for link in self._runtimes.links) and self._clock() < end:
            await asyncio.sleep(_HURRY_S)
        try:
            self._writer = PlacementWriter(self._path)
        except OSError as error:
            log.error("the placement table cannot be read, so models are placed anew: %s", error)
            return
        masks = self._writer.read({entry["name"] for entry in self._runtimes.entries.values()})
        placed = {name: tuple(sorted(self._devices(mask))) for name, mask in masks.items()}
        self._planner.resume(placed, self._clock())

    def _devices(self, mask: int) -> list[str]:
        return [str(number) for number, _ in enumerate(self._runtimes.links) if mask >> number & 1]

    def _write(self, placed: Mapping[str, Iterable[int]]) -> None:
        """Write the table if it has changed. Raises OSError.

        The table leaves out models without a place: they may run on all devices.
        """
        devices = {name: tuple(sorted({*numbers})) for name, numbers in placed.items()}
        masks = {
            name: sum(1 << number for number in some) | (PINNED if name in self._pinned else 0)
            for name, some in devices.items()
            if some
        }
        if masks == self._written:
            return
        self._writer = self._writer or PlacementWriter(self._path)
        self.generation = self._writer.write(masks)
        self._written = masks
        self._runtimes.placement = {name: some for name, some in devices.items() if some}


def _changed(view: WorkerView, without: Collection[str], added: Sequence[pb.AddedModel]) -> WorkerView:
    """Return a device's view without some models and with further ones."""
    new = {model.name: ModelView(bytes=model.bytes, weights=WeightsView.ABSENT) for model in added}
    return replace(
        view,
        ready=(view.ready - {*without}).union(new),
        models={name: model for name, model in view.models.items() if name not in without} | new,
        calls={name: called - {*without} for name, called in view.calls.items() if name not in without},
    )
