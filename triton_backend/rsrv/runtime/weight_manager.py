"""Weights of all models: carries out the scheduler's instructions about them, and sets the scheduler's budget."""

import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

from rsrv.logs import fields
from rsrv.runtime.catalog import Catalog
from rsrv.runtime.device import CacheCounts, Device
from rsrv.runtime.host_copies import HostCopies
from rsrv.runtime.model_builder import DeviceReady
from rsrv.runtime.models import CompiledModel, about
from rsrv.runtime.numerics import Computes
from rsrv.runtime.policy import scheduler_settings
from rsrv.runtime.weight_mover import HostMemoryMeasured, LoadEnded, ReadEnded, WeightMover
from rsrv.scheduler import events as ev
from rsrv.scheduler.scheduler import Scheduler

log = logging.getLogger(__name__)

#: Share of the device's memory that stays free of weights and scratch, because no allocator packs perfectly. XLA's allocator
#: splits its arena into chunks and does not move them.
SLACK_FRACTION = 0.1
#: Bytes of memory for the server's processes. On a CPU, weights may by default take half of the remaining memory, and at least
#: an eighth of all memory. The other half is for executables, copies and requests.
_PROCESSES_BYTES = 256 << 20

#: Events that the loop passes to the scheduler next.
Outbox = deque[ev.Event]


@dataclass(frozen=True, slots=True)
class Budget:
    """Device bytes for weights. None: no limit is known or set."""

    #: Bytes for all weights.
    pool: int | None
    #: Bytes for pinned models. If they are over-committed, they exceed the pool.
    pinned: int
    #: Bytes for weights that are loaded and evicted on demand.
    on_demand: int | None

    @property
    def over_commit(self) -> bool:
        return self.pool is not None and self.pinned > self.pool

    def warning(self, largest: int) -> str | None:
        """Return a text that says what does not fit and what to do.

        None: everything fits, or there is no limit. `largest`: bytes of the largest model that is not pinned.
        """
        if self.pool is None or self.on_demand is None:
            return None
        more = "raise runtime.weight_budget_bytes if it is set, or serve fewer models on this device"
        if self.over_commit:
            return (
                f"pinned models take {self.pinned} bytes of the device, more than the {self.pool} bytes for weights, so "
                f"executions may find no memory; set models.NAME.residency of some to system, or {more}"
            )
        if largest > self.on_demand:
            return (
                f"the largest model takes {largest} bytes of the device, but pinned models leave only {self.on_demand} of "
                f"{self.pool}: it is served alone, beyond the budget, and all other models are evicted for it; unpin "
                f"models, or {more}"
            )
        return None


def solve_budget(*, arena: int | None, slack: float, scratch: int, pinned: int, limit: int | None) -> Budget:
    """Divide the device's memory. All arguments but `slack`, a share, are bytes.

        pool      = min((1 - slack) * arena - scratch, limit), at least 0
        on_demand = max(0, pool - pinned)

    `arena`: all bytes of the device's allocator (None: unknown). `slack`: the share of the arena that stays free. `scratch`:
    bytes that executions take in addition to weights. `limit`: the operator's limit (None: no limit).
    """
    limits = [] if limit is None else [limit]
    if arena is not None:
        limits.append(int((1.0 - slack) * arena) - scratch)
    if not limits:
        return Budget(None, pinned, None)
    pool = max(0, min(limits))
    return Budget(pool, pinned, max(0, pool - pinned))


class WeightManager:
    """Residency of models, and the budget of the device's memory. Belongs to the loop."""

    def __init__(self, catalog: Catalog, scheduler: Scheduler, outbox: Outbox, devices: int = 1) -> None:
        """`devices`: number of the server's devices."""
        self._devices = devices
        self._catalog = catalog
        self._scheduler = scheduler
        self._outbox = outbox
        #: Settings that the scheduler has, or will have when the outbox is empty.
        self.settings = scheduler.settings
        #: The latest warning about the budget.
        self._warning: str | None = None
        #: Keys of evicted models, by the key of the model whose load needs the memory.
        self._evicted: dict[str, list[str]] = {}
        self.copies = HostCopies(catalog, scheduler, outbox)
        #: The device, or None until it is ready.
        self.device: Device | None = None
        #: The threads that move weights, or None until the device is ready.
        self.mover: WeightMover | None = None
        #: Default precision of the device's f32 products, or None on a CPU.
        self.computes: Computes | None = None
        #: Bytes of the device that executions take in addition to weights.
        self.scratch = 0
        #: If the device is the CPU, maximum bytes of host memory that loaded weights will take. Otherwise 0.
        self._on_host = 0

    def device_ready(self, message: DeviceReady) -> None:
        self.device, self.mover, self.computes = message.device, message.weight_mover, message.computes
        self.copies.begin(self.mover)
        self.update_budget()

    @property
    def kept_limit(self) -> int | None:
        """Bytes that runs of meta models may keep on the device: half of the memory that weights and scratch leave free."""
        arena = None if self.device is None else self.device.memory_limit
        return None if arena is None else int(arena * SLACK_FRACTION / 2)

    @property
    def cache_counts(self) -> CacheCounts:
        return getattr(self.device, "cache_counts", CacheCounts())

    @property
    def _mover(self) -> WeightMover:
        assert self.mover is not None, "models are compiled when there is a device"
        return self.mover

    # --- instructions of the scheduler --------------------------------------------------------------------

    def read(self, instruction: ev.ReadWeights) -> None:
        self._mover.read(self._catalog.get(instruction.model), instruction.epoch)

    def load(self, instruction: ev.LoadWeights) -> None:
        self._catalog.moved(instruction.model, "loading")
        self._mover.load(self._catalog.get(instruction.model), instruction.epoch)

    def abandon(self, instruction: ev.AbandonLoad) -> None:
        self._mover.abandon(instruction.epoch)

    def evict(self, instruction: ev.EvictWeights) -> None:
        """Free a model's weights, except tensors that the next load needs. Nothing may execute on them."""
        key, loading_for = instruction.model, instruction.loading_for
        self._catalog.moved(key, "absent")
        model = self._catalog.get(key)
        self._mover.free(model, None if loading_for is None else self._catalog.get(loading_for))
        if loading_for is None:
            log.info("%s: weights evicted", key, extra=about(model, event="evicted"))
        else:
            self._evicted.setdefault(loading_for, []).append(key)

    def retry_when_freed(self, instruction: ev.Execute | ev.WarmUp) -> None:
        """Carry out a retry when the memory of all evicted weights is free."""
        self._mover.post_when_freed(instruction)

    def measured(self, message: HostMemoryMeasured, now: float) -> int:
        """Handle a measurement of the host's free memory. See `HostCopies.measured`."""
        self._promise()
        return self.copies.measured(message, now)

    def _promise(self) -> None:
        """If the device is the CPU, reserve host memory for weights that are not loaded yet, so that copies leave it free."""
        if self.mover is not None:
            self.mover.host.promised = max(0, self._on_host - self.mover.device.nbytes)

    def read_ended(self, message: ReadEnded) -> None:
        model, event = message.model, message.event
        if isinstance(event, ev.WeightsRead):
            log.info(
                "%s: weights read from disk in %.1f ms, ahead of their load",
                model.key,
                event.seconds * 1e3,
                extra=about(model, event="read", seconds=round(event.seconds, 6)),
            )
        self._outbox.append(event)

    def load_ended(self, message: LoadEnded) -> None:
        model, event = message.model, message.event
        model.weights = message.weights
        self._log_load(message)
        # Record this first, because the scheduler's answer may move the weights again.
        self._catalog.moved(model.key, "resident" if isinstance(event, ev.WeightsLoaded) else "absent")
        self._outbox.append(event)
        if model.weights is not None and model.residency == "device":
            self._mover.follow_residency(model)
        if model.weights is not None:
            if model.host.is_read_ahead:
                self._mover.end_read_ahead(model.host)
            self.copies.loaded(model)

    def follow_residency(self, model: CompiledModel) -> None:
        """Make or drop the host copy of a model's weights, depending on its residency."""
        self._mover.follow_residency(model)

    def close(self, model: CompiledModel) -> None:
        """Close a model's weights on the host. The threads first carry out earlier calls that free or copy them."""
        self._mover.close(model.host)

    def end(self, *, leave: bool) -> None:
        """Leave the weights in shared memory to the server's next runtime, or remove them. Call this last, on any thread."""
        if self.mover is not None:
            (self.mover.host.leave if leave else self.mover.host.close)()

    def _log_load(self, message: LoadEnded) -> None:
        """Log one line about a load: the model, the duration, the models evicted for it, and the waiting requests."""
        model, event, nbytes = message.model, message.event, message.nbytes
        evicted = self._evicted.pop(model.key, [])
        place = f", in place of {', '.join(evicted)}" if evicted else ""
        match event:
            case ev.WeightsLoaded(seconds=seconds):
                waiting = self._scheduler.queued(model.key)
                rate = nbytes / max(seconds, 1e-9)
                log.info(
                    "%s: weights loaded: %.1f MB in %.1f ms (%.0f MB/s)%s; requests that wait: %d",
                    model.key,
                    nbytes / 1e6,
                    seconds * 1e3,
                    rate / 1e6,
                    place,
                    waiting,
                    extra=about(
                        model,
                        event="loaded",
                        bytes=nbytes,
                        seconds=round(seconds, 6),
                        bytes_per_second=round(rate),
                        evicted=evicted,
                        waiting=waiting,
                    ),
                )
            case ev.LoadAbandoned():
                log.info(
                    "%s: load of weights abandoned, no request waits for them%s",
                    model.key,
                    place,
                    extra=about(model, event="abandoned", evicted=evicted),
                )
            case ev.LoadFailed():
                # The reason of the failure is logged already. The evicted models may have been removed since then.
                for key in evicted:
                    extra = fields(model=key.rpartition("@")[0], version=key, event="evicted")
                    log.info("%s: weights evicted for %s, whose load failed", key, model.key, extra=extra)

    # --- commands of operators ----------------------------------------------------------------------------

    def follow_residencies(self, names: Iterable[str]) -> None:
        """Apply the policy's residency to all versions of these models. Then update the budget."""
        for key in self._catalog.compiled(names):
            model = self._catalog.get(key)
            residency = self._catalog.policy.residency(model.name)
            log.info("%s: residency %s, was %s", key, residency, model.residency, extra=about(model))
            # Do this even if the residency stays the same, because an earlier load or copy may have failed.
            model.residency = residency
            if residency != "device" or model.weights is not None:
                self.follow_residency(model)
                self.copies.tell(model)
            # For a pinned model without weights on the device, the load that follows uses the host copy, if there is one.
            self._outbox.append(ev.Pinned(key, residency == "device"))

    # --- the budget ---------------------------------------------------------------------------------------

    def update_budget(self) -> None:
        """Pass the scheduler its settings and budget, after a change of the settings, the device or the models."""
        device = self.device
        settings = scheduler_settings(
            self._catalog.policy.settings, asynchronous=device is not None and device.asynchronous
        )
        settings = replace(settings, weight_budget_bytes=self._solve_budget(settings.depth).pool)
        if settings != self.settings:
            self.settings = settings
            self._outbox.append(ev.SettingsChanged(settings))

    def _solve_budget(self, depth: int) -> Budget:
        """Divide the device's memory for the current models, and log what does not fit.

        `depth`: maximum number of concurrent executions.
        """
        limit = self._catalog.policy.settings.runtime.weight_budget_bytes
        host = None if self.mover is None else self.mover.host.limit
        on_cpu = self.device is not None and self.device.hardware.platform == "cpu"
        if limit is None and on_cpu and host is not None:
            limit = max(host.total // 8, (host.total - _PROCESSES_BYTES) // 2) // self._devices
        models = self._catalog.models()
        pinned = {key: size for m in models if m.residency == "device" for key, size in m.tensors.items()}
        # The inputs, outputs and intermediate results of `depth` executions are on the device at once. A warm-up may add one.
        largest = max((model.scratch for model in models), default=0)
        self.scratch = (depth + bool(self._catalog.building)) * largest
        budget = solve_budget(
            arena=None if self.device is None else self.device.memory_limit,
            slack=SLACK_FRACTION,
            scratch=self.scratch,
            pinned=sum(pinned.values()),
            limit=limit,
        )
        sizes = [(sum(m.tensors.values()), m.residency == "device") for m in models]
        largest = max((size for size, is_pinned in sizes if not is_pinned), default=0)
        warning = budget.warning(largest)
        # The largest model is served even if it exceeds the pool. It is then alone on the device.
        room = max(budget.pool or 0, largest)
        self._on_host = min(room, sum(size for size, _ in sizes)) if on_cpu else 0
        self._promise()
        if warning and warning != self._warning:
            log.warning("%s", warning)
        self._warning = warning
        return budget
