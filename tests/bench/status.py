"""Counters from the runtime's status."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelStatus:
    """Counters of one model since the runtime's start."""

    dispatches: int
    rows: int
    device_seconds: float
    #: Number of executions by compiled size. Models here have one input shape.
    sizes: dict[int, int]

    def since(self, earlier: ModelStatus) -> ModelStatus:
        """Return the difference from an earlier reading."""
        sizes = {size: count - earlier.sizes.get(size, 0) for size, count in self.sizes.items()}
        return ModelStatus(
            self.dispatches - earlier.dispatches,
            self.rows - earlier.rows,
            self.device_seconds - earlier.device_seconds,
            {size: count for size, count in sizes.items() if count},
        )


def model_status(status: dict[str, Any], model: str) -> ModelStatus:
    """Return the counters of a model. For a meta model, the counters of its callees are added up."""
    metas = status["metas"]
    statuses = [status["models"][name] for name in (metas[model]["models"] if model in metas else [model])]
    sizes: Counter[int] = Counter()
    for each in statuses:
        sizes.update({int(key.partition("/")[2]): count for key, count in each["sizes"].items()})
    return ModelStatus(
        sum(each["dispatches"] for each in statuses),
        sum(each["useful_rows"] for each in statuses),
        sum(each["device_seconds"] for each in statuses),
        dict(sizes),
    )
