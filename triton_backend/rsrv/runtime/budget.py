"""How much of the device's memory weights may take."""

from dataclasses import dataclass


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


def solve_budget(
    *, arena: int | None, fraction: float, slack: float, scratch: int, pinned: int, limit: int | None
) -> Budget:
    """Divide the device's memory. All arguments but the two shares are bytes.

        pool      = min(fraction * arena, (1 - slack) * arena - scratch, limit), at least 0
        on_demand = max(0, pool - pinned)

    `arena` is what the device's allocator may take in all (None: not known), `fraction` the share of it that
    weights may take at most, `slack` the share that stays free because no allocator packs perfectly, `scratch`
    what executions need beside weights, `limit` what the operator allows (None: no more than the rest says).
    The formula is that of the design, section 6, and of the system whose budgets it matches.
    """
    limits = [] if limit is None else [limit]
    if arena is not None:
        limits += [int(fraction * arena), int((1.0 - slack) * arena) - scratch]
    if not limits:
        return Budget(None, pinned, None)
    pool = max(0, min(limits))
    return Budget(pool, pinned, max(0, pool - pinned))
