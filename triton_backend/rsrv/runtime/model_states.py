"""States of a model in the runtime, and the table of changes between them.

`ModelEntry` of the catalog holds the state of one model. `registry` sends the events.
"""

from collections.abc import Mapping
from enum import StrEnum


class LifecycleState(StrEnum):
    """State of a model in the runtime, from the time when its bundle has been read."""

    #: The model's modules are read and inspected, or wait for the build thread.
    READING = "reading"
    COMPILING = "compiling"
    #: The scheduler knows the model. Its weights are loaded, then every size of it is executed.
    WARMING_UP = "warming up"
    READY = "ready"
    #: Nothing needs the model any more, but the scheduler still executes it or moves its weights.
    DRAINING = "draining"
    #: The model never became ready. The scheduler may still know it.
    FAILED = "failed"
    GONE = "gone"


class LifecycleEvent(StrEnum):
    """Event that moves a model to another state."""

    MODULES_READ = "modules read"
    COMPILED = "compiled"
    #: The model's costs are known, from a warm-up or from an earlier start.
    WARMED_UP = "warmed up"
    #: Neither a connection nor `Registry.start` needs the model any more.
    UNWANTED = "unwanted"
    FAILED = "failed"
    #: The scheduler has removed the model, or has never known it.
    RELEASED = "released"


S, E = LifecycleState, LifecycleEvent

TRANSITIONS: Mapping[tuple[LifecycleState, LifecycleEvent], LifecycleState] = {
    (S.READING, E.MODULES_READ): S.COMPILING,
    # This transition happens only while the model waits for the build thread.
    (S.READING, E.UNWANTED): S.GONE,
    (S.READING, E.FAILED): S.FAILED,
    # A model that nothing needs any more is compiled to the end, because the build thread cannot stop, and because a stub may
    # register the model again.
    (S.COMPILING, E.COMPILED): S.WARMING_UP,
    (S.COMPILING, E.UNWANTED): S.GONE,
    (S.COMPILING, E.FAILED): S.FAILED,
    (S.WARMING_UP, E.WARMED_UP): S.READY,
    (S.WARMING_UP, E.UNWANTED): S.DRAINING,
    (S.WARMING_UP, E.FAILED): S.FAILED,
    (S.READY, E.UNWANTED): S.DRAINING,
    (S.DRAINING, E.RELEASED): S.GONE,
    (S.FAILED, E.RELEASED): S.GONE,
}

#: States before READY.
BUILDING = {S.READING, S.COMPILING, S.WARMING_UP}
#: States that end as soon as the scheduler releases the model.
ENDING = {S.DRAINING, S.FAILED}

#: Effect of an event: the method that the runtime calls, the event that it passes to the scheduler, or the frame that it sends
#: to the stubs.
EFFECTS: Mapping[LifecycleEvent, str] = {
    E.MODULES_READ: "ModelBuilder.build",
    E.COMPILED: "ModelAdded",
    E.WARMED_UP: "REGISTERED",
    E.UNWANTED: "ModelRemoved",
    E.FAILED: "REJECTED",
}


class LifecycleError(AssertionError):
    """An event that the model's state does not allow. The message has the model's history."""
