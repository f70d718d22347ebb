"""What the runtime says of itself, as the JSON of STATUS_REPLY. Keys as in docs/protocol.md."""

from collections.abc import Iterable, Mapping
from typing import Any

from rsrv.runtime.connection import Group, MetaCounts
from rsrv.runtime.device import Device
from rsrv.runtime.runs import Run
from rsrv.runtime.scheduler.snapshot import ModelSnapshot, Snapshot
from rsrv.runtime.tiers import Tiers


def model_status(model: ModelSnapshot, residency: str) -> dict[str, Any]:
    """Sizes and costs by `variant/size`."""
    return {
        "residency": residency,
        "weights": model.residency.value,
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
    }


def meta_status(group: Group, runs: Iterable[Run], names: Mapping[str, str]) -> dict[str, Any]:
    """`names`: those of models by key. `device_seconds` is time of the device only: waiting and Python are not in it."""
    mine = [run for run in runs if run.group is group]
    counts = group.counts or MetaCounts()
    running = sum(run.admitted for run in mine)
    return {
        "models": [names[key] for key in group.models],
        "waiting": len(mine) - running,
        "running": running,
        "outcomes": counts.outcomes,
        "calls": counts.calls,
        "device_seconds": counts.device_seconds,
        "kept_bytes": sum(run.kept_bytes for run in mine),
    }


def memory_status(snapshot: Snapshot, tiers: Tiers | None, device: Device | None) -> dict[str, Any]:
    """Bytes of weights on both tiers: as if no model shared a tensor (logical), and each tensor once (physical)."""
    host = None if tiers is None else tiers.host.counts
    return {
        "device": {
            "limit_bytes": None if device is None else device.memory_limit,
            "budget_bytes": snapshot.weight_budget_bytes,
            "pinned_bytes": snapshot.pinned_bytes,
            "logical_bytes": snapshot.logical_bytes,
            "physical_bytes": snapshot.weight_bytes,
            # Differs from the one before while something moves.
            "held_bytes": 0 if tiers is None else tiers.device.nbytes,
        },
        "host": {
            "logical_bytes": 0 if host is None else host.logical,
            "physical_bytes": 0 if host is None else host.physical,
            "tensors": 0 if host is None else host.tensors,
        },
    }
