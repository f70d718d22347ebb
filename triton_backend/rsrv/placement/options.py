"""Options of the planner: the settings of rsrv.yaml, and the policy that operators change while the planner runs.

Each default of the policy suits most fleets; the gateway's control service and the simulator may set other values.
"""

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field

from rsrv.settings_fleet import GatewayMode, PlacedModelSection, PlacementSection


class ModelOptions(PlacedModelSection):
    """Options of one model. For absent keys, the general value applies."""

    fill: Literal["least", "rr"] | None = Field(None, description="As `fill`, for this model.")
    fill_factor: float | None = Field(None, gt=0, le=1024, description="As `fill_factor`, for this model.")


class PlannerOptions(PlacementSection):
    """Settings of placement with the whole policy of the packing."""

    mode: GatewayMode = Field("lpt_packing", description="As gateway.mode.")  # type: ignore[assignment]
    work_basis: Literal["compute", "items", "requests"] = Field(
        "compute",
        description="Measure of work. requests: each counts the same; items: its rows; compute: its rows times the model's "
        "measured device time of a row.",
    )
    fill: Literal["least", "rr"] = Field(
        "least",
        description="lpt_packing: which of a model's replicas is filled next. least: the one with the least load; rr: each in "
        "turn.",
    )
    route: Literal["run", "spread"] = Field(
        "run",
        description="lpt_packing: run: requests go to one replica until it has a quantum of items, so that they share "
        "executions; spread: each to the replica with the fewest.",
    )
    fill_factor: float = Field(
        1.0, gt=0, le=1024, description="lpt_packing: the quantum, in largest executions of the model."
    )
    rebalance_device_s: float = Field(
        300.0,
        gt=0,
        description="lpt_packing: device seconds, of all devices together, after which all models are packed again.",
    )
    hysteresis: float = Field(
        0.1,
        ge=0,
        le=10,
        description="lpt_packing: a model keeps its device unless that one would be busier than another by more than this "
        "fraction.",
    )
    first_rebalance_device_s: float = Field(
        30.0,
        gt=0,
        description="lpt_packing: device seconds until the first repack, when little is known yet.",
    )
    halflife_device_s: float | None = Field(
        None,
        gt=0,
        description="lpt_packing: device seconds after which a measurement counts half; null: rebalance_device_s.",
    )
    forbid_memory_oversubscription: bool = Field(
        True,
        description="lpt_packing: never place more weights on a worker than fit at once, if that is possible. If false, "
        "busy models may share a worker that swaps weights.",
    )
    models: dict[str, ModelOptions] = Field(default_factory=dict, description="Per model, by name.")

    @property
    def pins(self) -> dict[str, list[int]]:
        """Numbers of the devices that a model may use, by model. Other models may use any device."""
        return {name: own.devices for name, own in self.models.items() if own.devices is not None}

    def of_model(self, name: str, key: str) -> Any:
        """Return an option of a model. If the model has no own value, return the general value."""
        own = getattr(self.models.get(name), key, None)
        return getattr(self, key) if own is None else own

    @classmethod
    def of(cls, section: PlacementSection, models: Mapping[str, PlacedModelSection], **policy: Any) -> Self:
        """Return the options with rsrv.yaml's settings and the policy's defaults.

        `policy` has values in place of these defaults.
        """
        placed = {
            name: {"devices": section.devices, "replicas": section.replicas}
            for name, section in models.items()
            if section.devices is not None or section.replicas is not None
        }
        values = section.model_dump(exclude={"mode"})
        return cls.model_validate({**values, "models": placed, **policy})
