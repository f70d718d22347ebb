"""Models whose weights found no memory twice, and pinned ones whose load failed: they are not tried again for a while.

Without memory each try costs all others their weights. A rest ends by time, or when an operator makes room: then there may be
memory that was not to be had before. How long it is stays with the model until a load goes well (`Holding`).
"""

from rsrv.scheduler.model import ModelState


class Rests:
    """Those that rest; some of them may have been loaded meanwhile."""

    __slots__ = ("_models",)

    def __init__(self) -> None:
        #: a dictionary for its order.
        self._models: dict[ModelState, None] = {}

    def begin(self, model: ModelState, now: float, *, shut: bool) -> None:
        """`shut`: until it is over requests are refused, too, for want of memory."""
        model.holding.give_up(now, shut=shut)
        self._models[model] = None

    def forget(self, model: ModelState) -> None:
        self._models.pop(model, None)

    def relieve(self) -> None:
        """Memory was given back: nobody rests any longer."""
        for model in self._models:
            model.holding.end_rest()

    def over(self, now: float) -> list[ModelState]:
        """Take out those whose rest is over."""
        if not self._models:
            return []
        over = [model for model in self._models if model.holding.rests_until <= now]
        for model in over:
            del self._models[model]
        return over

    def next(self) -> float | None:
        """When a pinned model's rest is over: others are tried again for requests."""
        rests = (model.holding.rests_until for model in self._models if model.holding.pinned)
        return min(rests, default=None)
