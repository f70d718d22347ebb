"""The states of a model on one device of the server, as its front sees them, and the table of changes between them.

`Front` moves each device along this table, and raises `FrontError` with the device's history if the table has no such
change. docs/states.md shows the table as a diagram.

`device.FrontDevice` stores these facts in addition to the state, because each fact can be true in several states:

- started: a runtime had the model ready here, and the model has not been cold since. The next runtime starts the model again;
- asked: requests or the placement table require the model here, although it would otherwise stay cold;
- barred: the model has ended runtimes of this device, or its model.py fails. The model then starts on no other device;
- the pause before the next attempt, which doubles with each failure.
"""

from collections.abc import Mapping
from enum import StrEnum


class ServingState(StrEnum):
    """State of a model on one device."""

    #: No attempt was made to reach the device's runtime.
    UNTRIED = "untried"
    #: An attempt is under way to reach the runtime, which may have to start first, and to register the model.
    CONNECTING = "connecting"
    #: The runtime builds the model, and announces its steps.
    STARTING = "starting"
    #: The runtime answers requests.
    READY = "ready"
    #: The runtime holds no part of the model, and the front has no connection, until a request starts the model.
    COLD = "cold"
    #: The last attempt found no runtime, or the runtime ended before the model was ready. Another attempt follows.
    BACKING_OFF = "backing off"
    #: The runtime rejects the model, or the model's start failed. Requests get the reason until the pause is over.
    REJECTED = "rejected"
    #: The model is unloaded.
    CLOSED = "closed"


class ServingEvent(StrEnum):
    """Event that changes the state of a model on one device."""

    #: An attempt begins.
    CONNECT = "connect"
    #: The runtime announces a step of the model's start.
    STEP = "step"
    #: The runtime has the model ready.
    REGISTERED = "registered"
    #: The model is cold until a request comes: the runtime has reported this, or the device sleeps.
    COOL = "cold"
    #: The runtime that had the model ready has ended.
    LOSE = "lost"
    #: The attempt failed: there is no runtime, or it ended before the model was ready.
    FAIL = "failed"
    #: The runtime rejects the model, or the model's own code fails.
    REJECT = "rejected"
    #: The pause after a failed start is over.
    FORGIVE = "pause over"
    #: The model is unloaded.
    CLOSE = "unloaded"


S, E = ServingState, ServingEvent

#: State after each event in each state. No other change is allowed.
TRANSITIONS: Mapping[tuple[ServingState, ServingEvent], ServingState] = {
    (S.UNTRIED, E.CONNECT): S.CONNECTING,
    (S.CONNECTING, E.STEP): S.STARTING,
    (S.CONNECTING, E.REGISTERED): S.READY,
    (S.CONNECTING, E.COOL): S.COLD,
    (S.CONNECTING, E.FAIL): S.BACKING_OFF,
    (S.CONNECTING, E.REJECT): S.REJECTED,
    (S.STARTING, E.STEP): S.STARTING,
    (S.STARTING, E.REGISTERED): S.READY,
    (S.STARTING, E.COOL): S.COLD,
    (S.STARTING, E.FAIL): S.BACKING_OFF,
    (S.STARTING, E.REJECT): S.REJECTED,
    (S.READY, E.LOSE): S.CONNECTING,
    (S.READY, E.COOL): S.COLD,
    (S.COLD, E.CONNECT): S.CONNECTING,
    (S.BACKING_OFF, E.CONNECT): S.CONNECTING,
    (S.REJECTED, E.CONNECT): S.CONNECTING,
    # A request starts the model again, or the placement table if the model serves on another device.
    (S.REJECTED, E.FORGIVE): S.COLD,
    **{(state, E.CLOSE): S.CLOSED for state in S if state is not S.CLOSED},
}

#: The instruction that carries out an event. An event without an instruction only changes the state.
EFFECTS: Mapping[ServingEvent, str] = {E.CONNECT: "Connect", E.LOSE: "Connect"}

#: States in which an attempt is under way.
ATTEMPTING = frozenset({S.CONNECTING, S.STARTING})
#: States in which a start of the model may begin at once.
STARTABLE = frozenset({S.UNTRIED, S.COLD})


class FrontError(AssertionError):
    """An event that a device's state does not allow. The message has the device's history."""
