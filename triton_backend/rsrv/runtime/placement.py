"""Where the weights of models are: what the scheduler says of them is done, and it is told how much room there is."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from rsrv.logs import fields
from rsrv.runtime.catalog import Catalog
from rsrv.runtime.device import CacheCounts, Device
from rsrv.runtime.models import Model, about
from rsrv.runtime.numerics import Computes
from rsrv.runtime.policy import scheduler_settings
from rsrv.runtime.threads import Worker
from rsrv.runtime.weight_mover import Ended, WeightMover
from rsrv.scheduler import events as ev
from rsrv.scheduler.scheduler import Scheduler

log = logging.getLogger("rsrv.placement")

#: share of the device's memory that stays free of weights and scratch, because no allocator packs perfectly;
#: XLA's allocator splits its arena into chunks and does not move them
SLACK_FRACTION = 0.1


@dataclass(frozen=True, slots=True)
class Budget:
    """Device bytes; None: no limit is known or set."""

    #: for all weights
    pool: int | None
    #: what pinned models take of it, or would: over-committed, they go beyond it
    pinned: int
    #: what is left for weights that come and go
    on_demand: int | None

    @property
    def over_commit(self) -> bool:
        return self.pool is not None and self.pinned > self.pool

    def complaint(self, largest: int) -> str | None:
        """What does not fit, and what to do; `largest`: bytes of the largest model that is not pinned."""
        if self.pool is None or self.on_demand is None:
            return None
        more = "raise runtime.weight_budget_bytes if it is set, or serve fewer models on this device"
        if self.over_commit:
            return (
                f"pinned models take {self.pinned} bytes of the device, and weights may take {self.pool}: they go "
                f"beyond it, and executions may find no memory; set models.NAME.residency of some to system, or {more}"
            )
        if largest > self.on_demand:
            return (
                f"the largest model takes {largest} bytes of the device, and {self.pinned} pinned bytes of "
                f"{self.pool} leave {self.on_demand}: it is served alone, beyond the budget, and all others leave the "
                f"device for it; unpin models, or {more}"
            )
        return None


def solve_budget(*, arena: int | None, slack: float, scratch: int, pinned: int, limit: int | None) -> Budget:
    """Divide the device's memory. All arguments but `slack`, a share, are bytes.

        pool      = min((1 - slack) * arena - scratch, limit), at least 0
        on_demand = max(0, pool - pinned)

    `arena` is what the device's allocator may take in all (None: not known), `slack` the share of it that stays
    free, `scratch` what executions need beside weights, `limit` the operator's limit (None: no limit).
    The formula is that of the design, section 6, and of the system whose budgets it matches.
    """
    limits = [] if limit is None else [limit]
    if arena is not None:
        limits.append(int((1.0 - slack) * arena) - scratch)
    if not limits:
        return Budget(None, pinned, None)
    pool = max(0, min(limits))
    return Budget(pool, pinned, max(0, pool - pinned))


class Placement:
    """`feed` gives the scheduler an event and carries out what it says; `let_go` is called when a load has ended.

    Copies on the host are made and given up on `builder`, after what was asked of it before.
    """

    def __init__(
        self,
        catalog: Catalog,
        scheduler: Scheduler,
        builder: Worker,
        feed: Callable[[ev.Event], None],
        let_go: Callable[[str], None],
    ) -> None:
        self._catalog = catalog
        self._scheduler = scheduler
        self._builder = builder
        self._feed = feed
        self._let_go = let_go
        #: the latest complaint about the budget
        self._tight: str | None = None
        #: keys of the models whose weights gave way, by that of the model whose load needed the room
        self._evicted: dict[str, list[str]] = {}
        #: None until they are made
        self.device: Device | None = None
        self.weight_mover: WeightMover | None = None
        #: how the device multiplies by default, where there is a question
        self.computes: Computes | None = None
        #: bytes of the device that executions may take beside weights
        self.scratch = 0
        #: models that are built or warmed up now
        self.builds = 0

    def equip(self, device: Device, weight_mover: WeightMover, computes: Computes | None) -> None:
        """There is a device."""
        self.device, self.weight_mover, self.computes = device, weight_mover, computes
        self.decide()

    @property
    def kept_limit(self) -> int | None:
        """Bytes that runs of meta models may keep on the device: half of what is neither weights nor scratch."""
        arena = None if self.device is None else self.device.memory_limit
        return None if arena is None else int(arena * SLACK_FRACTION / 2)

    @property
    def cache_counts(self) -> CacheCounts:
        return getattr(self.device, "cache_counts", CacheCounts())

    @property
    def _tiers(self) -> WeightMover:
        assert self.weight_mover is not None, "models are built when there is a device"
        return self.weight_mover

    # --- what the scheduler says --------------------------------------------------------------------------

    def load(self, key: str, epoch: int) -> None:
        """Bring a model's weights to the device."""
        model = self._catalog.get(key)
        self._catalog.moved(key, "loading")
        self._tiers.load(model, epoch, lambda event, moved: self._loaded(event, model, moved))

    def abandon(self, epoch: int) -> None:
        """Nobody waits for this load any more."""
        self._tiers.abandon(epoch)

    def evict(self, key: str, loading_for: str | None) -> None:
        """Give the memory of a model's weights back, but for what the next load needs; nothing executes on them."""
        self._catalog.moved(key, "absent")
        model = self._catalog.get(key)
        self._tiers.free(model, None if loading_for is None else self._catalog.get(loading_for))
        if loading_for is None:
            log.info("%s: weights evicted", key, extra=about(model, event="evicted"))
        else:
            self._evicted.setdefault(loading_for, []).append(key)

    def when_moved(self, action: Callable[[], None]) -> None:
        """Do something on the loop when all that was asked for before has been loaded or freed."""
        self._tiers.when_moved(action)

    def _loaded(self, event: Ended, model: Model, moved: int) -> None:
        self._report(event, model, moved)
        # First: the scheduler may have something to say about it at once.
        self._catalog.moved(model.key, "resident" if isinstance(event, ev.WeightsLoaded) else "absent")
        self._feed(event)
        if model.weights is not None and model.residency == "device":
            self.follow(model)
        self._let_go(model.key)

    def _report(self, event: Ended, model: Model, moved: int) -> None:
        """A line for each swap: what came, in which time, in place of what, for how many."""
        evicted = self._evicted.pop(model.key, [])
        place = f", in place of {', '.join(evicted)}" if evicted else ""
        match event:
            case ev.WeightsLoaded(seconds=seconds):
                waiting = self._scheduler.queued(model.key)
                rate = moved / max(seconds, 1e-9)
                log.info(
                    "%s: weights loaded: %.1f MB in %.1f ms (%.0f MB/s)%s; requests that wait: %d",
                    model.key,
                    moved / 1e6,
                    seconds * 1e3,
                    rate / 1e6,
                    place,
                    waiting,
                    extra=about(
                        model,
                        event="loaded",
                        bytes=moved,
                        seconds=round(seconds, 6),
                        bytes_per_second=round(rate),
                        evicted=evicted,
                        waiting=waiting,
                    ),
                )
            case ev.LoadAbandoned():
                log.info(
                    "%s: loading weights given up, nobody waits for them any more%s",
                    model.key,
                    place,
                    extra=about(model, event="abandoned", evicted=evicted),
                )
            case ev.LoadFailed():
                # Who failed has said why. Those that gave way may have left since.
                for key in evicted:
                    told = fields(model=key.rpartition("@")[0], version=key, event="evicted")
                    log.info("%s: weights evicted for %s, whose load failed", key, model.key, extra=told)

    # --- what operators say -------------------------------------------------------------------------------

    def set_residency(self, names: list[str], residency: str) -> None:
        """Where the weights of these models are for sure from now on. Raises SettingsError: there is no such residency."""
        self._catalog.policy.change_models(names, {"residency": residency})
        for key in self._catalog.built(names):
            model = self._catalog.get(key)
            wanted = self._catalog.policy.residency(model.name)
            log.info("%s: residency %s, was %s", key, wanted, model.residency, extra=about(model))
            # Again, if nothing changes: its load, or its copy, may have failed before.
            model.residency = wanted
            if wanted != "device" or model.weights is not None:
                self.follow(model)
            # else the host's copy, if there is one, is what the load reads
            self._feed(ev.Pinned(key, wanted == "device"))
        self.decide()

    def follow(self, model: Model) -> None:
        """Make or give up the host's copy, as the model's residency says."""
        self._builder.put(partial(self._tiers.follow, model))

    # --- how much room there is ---------------------------------------------------------------------------

    def decide(self) -> None:
        """Have the scheduler decide by what holds now: the settings have changed, or the device or the models have."""
        device = self.device
        wanted = scheduler_settings(
            self._catalog.policy.settings, asynchronous=device is not None and device.asynchronous
        )
        wanted = replace(wanted, weight_budget_bytes=self._solve_budget(wanted.depth).pool)
        if wanted != self._scheduler.settings:
            self._feed(ev.SettingsChanged(wanted))

    def _solve_budget(self, depth: int) -> Budget:
        """What weights may take of the device's memory, as the models and the device are now. Says what is tight.

        `depth`: executions that the device has at once.
        """
        runtime = self._catalog.policy.settings.runtime
        models = self._catalog.models()
        pinned = {
            key: size for m in models if m.residency == "device" for key, size in m.host.distinct.items()
        }
        # As many executions have their inputs, outputs and intermediate results there at once; a warm-up's, too.
        largest = max((model.scratch for model in models), default=0)
        self.scratch = (depth + (self.builds > 0)) * largest
        budget = solve_budget(
            arena=None if self.device is None else self.device.memory_limit,
            slack=SLACK_FRACTION,
            scratch=self.scratch,
            pinned=sum(pinned.values()),
            limit=runtime.weight_budget_bytes,
        )
        largest = max((m.host.device_bytes for m in models if m.residency != "device"), default=0)
        tight = budget.complaint(largest)
        if tight and tight != self._tight:
            log.warning("%s", tight)
        self._tight = tight
        return budget
