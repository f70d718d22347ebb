"""Options of the planner: the settings of rsrv.yaml, and the policy that operators change while the gateway runs.

Each default of the policy suits most fleets; the control service and the simulator may set other values.
"""

from typing import Annotated, Literal, Self

from pydantic import Field

from rsrv.settings_fleet import GatewayModelSection, GatewaySection


class ModelOptions(GatewayModelSection):
    """Options of one model; absent keys take the general value."""

    devices: list[Annotated[int, Field(ge=0)]] | None = Field(
        None, min_length=1, description="Numbers of the devices that may have it; null: all."
    )
    fill: Literal["least", "rr"] | None = Field(None, description="As `fill`, for this model.")
    fill_factor: float | None = Field(None, gt=0, le=1024, description="As `fill_factor`, for this model.")


class PlannerOptions(GatewaySection):
    """Settings of the gateway with the whole policy of the packing."""

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
    models: dict[str, ModelOptions] = Field(default_factory=dict, description="Per model, by name.")  # type: ignore[assignment]

    @classmethod
    def of(cls, section: GatewaySection) -> Self:
        """Return the options with rsrv.yaml's settings and the policy's defaults."""
        first = section.rebalance_device_s / 10
        return cls.model_validate({**section.model_dump(), "first_rebalance_device_s": first})
