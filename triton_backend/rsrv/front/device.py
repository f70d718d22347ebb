"""A model on one device of the server: its state and related facts. Time is an argument."""

from collections import deque
from dataclasses import dataclass, field
from math import inf

from rsrv.front.states import TRANSITIONS, FrontError, ServingEvent, ServingState
from rsrv.wire.frames import StartProgress

#: Number of latest changes of state that an error shows.
_HISTORY = 16


@dataclass(slots=True, eq=False)
class FrontDevice:
    """A model on one device. `Front` changes it."""

    number: int
    state: ServingState = ServingState.UNTRIED
    #: True if a runtime had the model ready here, and the model has not been cold since then.
    started: bool = False
    #: True if requests or the placement table require the model here, even if it would otherwise stay cold.
    asked: bool = False
    #: True if the model has ended runtimes of this device, or its own code fails.
    barred: bool = False
    #: True if the latest attempt found no runtime.
    is_unreachable: bool = False
    #: Time of the latest death of a runtime that had the model ready.
    lost_at: float = 0.0
    #: Number of failed attempts in a row.
    failures: int = 0
    #: Number of attempts, since the model was ready, that failed because this process and the runtime do not understand each
    #: other.
    misunderstood: int = 0
    #: Latest pause before an attempt, in seconds. 0: there was no pause since the model was last ready or cold.
    pause_s: float = 0.0
    #: Time of the next attempt, or of the end of the pause.
    due: float = inf
    #: While the runtime rejects the model, the text for clients. Otherwise, the reason of the latest failure.
    reason: str = ""
    #: Latest step of a start.
    step: StartProgress | None = None
    #: Time of the latest step of a start.
    stepped_at: float = 0.0
    #: Earliest time at which the starting model can serve. 0: not known.
    ready_at: float = 0.0
    history: deque[str] = field(default_factory=lambda: deque(maxlen=_HISTORY))

    def move(self, event: ServingEvent) -> None:
        """Change the state as the table `TRANSITIONS` says. Raises FrontError if the table has no such change."""
        following = TRANSITIONS.get((self.state, event))
        self.history.append(f"{self.state} + {event}")
        if following is None:
            raise FrontError(f"device {self.number}: {', '.join(self.history)}: there is no such change")
        self.state = following
        self.due = inf
        if following is not ServingState.STARTING:
            self.step, self.ready_at = None, 0.0

    def pause(self, now: float, first_s: float, most_s: float) -> None:
        """Begin a pause that is twice as long as the latest one, within limits."""
        self.pause_s = min(max(2 * self.pause_s, first_s), most_s)
        self.due = now + self.pause_s
