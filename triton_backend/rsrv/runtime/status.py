"""What the runtime says of itself, as the JSON of STATUS_REPLY."""

from typing import Any

from rsrv.runtime.scheduler.snapshot import ModelSnapshot


def model_status(model: ModelSnapshot) -> dict[str, Any]:
    """Keys as in docs/protocol.md; sizes and costs by `variant/size`."""
    return {
        "residency": model.residency.value,
        "queued": model.queued,
        "executing": model.executing,
        "outcomes": {outcome.value: count for outcome, count in model.outcomes.items()},
        "dispatches": model.dispatches,
        "useful_rows": model.useful_rows,
        "padded_rows": model.padded_rows,
        "device_seconds": model.device_seconds,
        "weight_bytes": model.weight_bytes,
        "loads": model.loads,
        "evictions": model.evictions,
        "sizes": {f"{variant}/{size}": count for (variant, size), count in model.sizes.items()},
        "costs": {f"{variant}/{size}": cost for (variant, size), cost in model.costs.items()},
    }
