"""What goes wrong in the scheduler, sorted by whose fault it is.

A request that cannot be served is never an exception: it ends in a `Finish`.
"""


class CallerError(ValueError):
    """The owner of the scheduler broke the contract of `events`. The scheduler's state is unchanged."""


class InvariantError(AssertionError):
    """The scheduler contradicts itself: a bug in it.

    Attributes:
        model: the model concerned, None if it is not about one.
        story: what happened to that model, oldest first, one readable line each.
    """

    def __init__(self, problem: str, model: str | None = None, story: tuple[str, ...] = ()) -> None:
        super().__init__(problem, model, story)
        self.problem = problem
        self.model = model
        self.story = story

    def __str__(self) -> str:
        about = "" if self.model is None else f" (model {self.model!r})"
        return "\n  ".join((self.problem + about, *self.story))
