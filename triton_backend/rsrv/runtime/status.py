"""What the runtime says of itself, as the JSON of STATUS_REPLY. Keys as in docs/protocol.md."""

import os
from collections.abc import Iterable
from typing import Any

from rsrv.runtime.catalog import Catalog, ModelEntry
from rsrv.runtime.device import Device
from rsrv.runtime.registry import Registry
from rsrv.runtime.runs import Run
from rsrv.runtime.transport import MetaCounts, Registration
from rsrv.runtime.weight_mover import WeightMover
from rsrv.scheduler.scheduler import Scheduler
from rsrv.scheduler.statistics import LoadReport, ModelSnapshot, SchedulerSnapshot


def status(registry: Registry, scheduler: Scheduler, runs: Iterable[Run]) -> dict[str, Any]:
    """All but what the loop alone knows."""
    snapshot = scheduler.snapshot()
    placement, catalog = registry.placement, registry.catalog
    counts = placement.cache_counts
    return {
        "pid": os.getpid(),
        "compiled": counts.compiled,
        "from_cache": counts.from_cache,
        "shared": counts.shared,
        "numerics": catalog.policy.settings.runtime.numerics,
        "computes": placement.computes,
        "memory": memory(snapshot, placement.weight_mover, placement.device),
        "models": {
            listed.name: _model(key, listed, snapshot.models[key], catalog.policy.residency(listed.name))
            for key, listed in _by_rank(catalog)
            if key in snapshot.models
        },
        "metas": {group.name: _meta(group, snapshot, runs, catalog) for group in registry.metas()},
    }


def load(registry: Registry, instance: str, load: LoadReport, backlog: float) -> dict[str, Any]:
    """What whoever spreads requests over devices wants to know, often; `backlog` in seconds."""
    catalog, budget, models = registry.catalog, load.weight_budget_bytes, load.models
    return {
        "instance": instance,
        "backlog_s": backlog,
        "free_bytes": None if budget is None else max(0, budget - load.weight_bytes),
        "budget_bytes": budget,
        "models": {
            listed.name: {
                "queued": model.queued,
                "executing": model.executing,
                "weights": listed.weights,
                "pinned": model.pinned,
                "bytes": model.device_bytes,
                "cost_s": model.row_seconds,
                "misses": model.misses,
                "device_seconds": model.device_seconds,
                "rows": model.useful_rows,
                "requests": model.answered,
                "max_rows": model.max_rows,
                "batch_input": catalog.get(key).batch_input,
            }
            for key, listed in _by_rank(catalog)
            if (model := models.get(key)) is not None
        },
        "metas": {group.name: group.calls for group in registry.metas()},
    }


def _by_rank(catalog: Catalog) -> list[tuple[str, ModelEntry]]:
    """Models by key, the ready ones last: among several versions under one name these are the ones to be seen."""
    return sorted(catalog.listed.items(), key=lambda item: item[1].state == "ready")


def _model(key: str, listed: ModelEntry, model: ModelSnapshot, residency: str) -> dict[str, Any]:
    """Sizes and costs by `variant/size`."""
    return {
        "key": key,
        "digest": listed.digest,
        "state": listed.state,
        "residency": residency,
        "weights": model.residency,
        "queued": model.queued,
        "executing": model.executing,
        "outcomes": {outcome.value: count for outcome, count in model.outcomes.items()},
        "dispatches": model.dispatches,
        "useful_rows": model.useful_rows,
        "padded_rows": model.padded_rows,
        "device_seconds": model.device_seconds,
        "weight_bytes": model.weight_bytes,
        "device_bytes": model.device_bytes,
        "misses": model.misses,
        "loads": model.loads,
        "evictions": model.evictions,
        "load_seconds": model.load_seconds,
        "sizes": {f"{variant}/{size}": count for (variant, size), count in model.sizes.items()},
        "costs": {f"{variant}/{size}": cost for (variant, size), cost in model.costs.items()},
        "precisions": listed.model.precisions if listed.model else {},
    }


def _meta(
    group: Registration, snapshot: SchedulerSnapshot, runs: Iterable[Run], catalog: Catalog
) -> dict[str, Any]:
    """`device_seconds` is time of the device only: waiting and Python are not in it."""
    counts = group.counts or MetaCounts()
    gate = snapshot.metas.get(group.name)  # None: nobody has ever asked
    return {
        "models": [catalog.listed[key].name for key in group.models],
        "waiting": 0 if gate is None else gate.waiting,
        "running": 0 if gate is None else gate.running,
        "outcomes": counts.outcomes,
        "calls": counts.calls,
        "device_seconds": counts.device_seconds,
        "kept_bytes": sum(run.kept_bytes for run in runs if run.group is group),
    }


def memory(
    snapshot: SchedulerSnapshot | LoadReport, weight_mover: WeightMover | None, device: Device | None
) -> dict[str, Any]:
    """Bytes of weights on both tiers: as if no model shared a tensor (logical), and each tensor once (physical)."""
    host = None if weight_mover is None else weight_mover.host.counts
    return {
        "device": {
            "limit_bytes": None if device is None else device.memory_limit,
            "budget_bytes": snapshot.weight_budget_bytes,
            "pinned_bytes": snapshot.pinned_bytes,
            "logical_bytes": snapshot.logical_bytes,
            "physical_bytes": snapshot.weight_bytes,
            # Differs from the one before while something moves.
            "held_bytes": 0 if weight_mover is None else weight_mover.device.nbytes,
        },
        "host": {
            "logical_bytes": 0 if host is None else host.logical,
            "physical_bytes": 0 if host is None else host.physical,
            "tensors": 0 if host is None else host.tensors,
        },
    }
