"""The states of one model's weights on the device, and the table of changes between them.

Weights are in exactly one `WeightState`. `TRANSITIONS` has all changes from one state to another. `WeightAccounts.move`
looks each change up there and updates the byte accounts. If the table has no such change, it raises `InvariantError` with
the model's history. docs/states.md shows the table as a diagram.

The following facts are not states, because each of them may be true in several states:

- pinned: an operator may pin weights in any state, and they stay pinned while they are absent;
- the number of executions: it changes with requests, not with weights;
- shared tensors: one group of bytes has many users, each in its own state;
- whether the host has a copy: this may change in any state;
- an abandoned read or load: it may still succeed, so the weights are reading or loading until it ends;
- an eviction that was requested while the weights load or warm up: it takes effect at the end of the load or warm-up;
- reasons to load: there may be several at a time, and they stay when a load fails;
- desired: the weights must be on the device even without requests;
- a warm-up that is due (`ModelState.needs_warm_up`): it is due before the weights are on the device;
- a retry after a lack of memory: absent weights may wait for the retry of their load, and reserved weights for the
  retry of a warm-up;
- the end of the back-off: requests are refused until then, even if a new reason queues the weights.
"""

from collections.abc import Mapping
from enum import StrEnum


class WeightState(StrEnum):
    """State of a model's weights on the device."""

    #: The weights are not on the device, and there is no reason to load them.
    ABSENT = "absent"
    #: The weights are not on the device, and are in line for a load. `LoadQueue.reason` returns the reason.
    QUEUED = "queued"
    #: The weights are not on the device. They are being read into host memory, so that their load does not wait for the disk.
    READING = "reading"
    #: The weights are being copied to the device.
    LOADING = "loading"
    #: The weights are on the device, for the model's warm-up only.
    RESERVED = "reserved"
    #: The weights are on the device, for requests.
    RESIDENT = "resident"
    #: The weights are on the device. They are evicted once nothing executes on them and nothing must execute first.
    EVICTING = "evicting"
    #: The weights are not on the device, because a load failed. It is retried after the back-off, or for a new reason.
    BACKOFF = "backoff"


class LoadReason(StrEnum):
    """Reason why weights are in line for a load. Members are in order of precedence."""

    #: The model is pinned, or must be warmed up, or its load found no memory and is retried once.
    REQUIRED = "required"
    #: Requests wait for the weights.
    DEMAND = "demand"
    #: The weights were prefetched. Or a request's deadline was too short for their load, and the next request should find
    #: them.
    PREFETCH = "prefetch"
    #: A compaction evicted the weights, or an earlier runtime had them on the device. They load only into free room; if there
    #: is none, they are not restored.
    RESTORE = "restore"


class WeightEvent(StrEnum):
    """Event that changes the state of weights."""

    #: A first reason to load the weights appeared.
    QUEUE = "queue"
    #: The last reason to load the weights is gone.
    WITHDRAW = "withdraw"
    #: The read of the weights from disk starts.
    READ = "read"
    #: The read succeeded, so the weights can be loaded.
    READ_ENDED = "end of read"
    #: The load of the weights starts.
    LOAD = "load"
    #: The read or load must be abandoned. It may still succeed.
    ABANDON = "abandon"
    #: The load succeeded.
    LOADED = "loaded"
    #: The read or load failed, or was abandoned.
    NOT_LOADED = "not loaded"
    #: The weights were on the device before the model was added.
    ADOPT = "adopt"
    #: A warm-up with the weights starts, or is retried.
    WARM_UP = "warm up"
    #: The warm-up ended, successfully or not.
    WARMED_UP = "warmed up"
    #: The weights must be evicted as soon as nothing uses them.
    RELEASE = "release"
    #: The requested eviction of the weights is withdrawn.
    KEEP = "keep"
    #: The weights are evicted.
    EVICT = "evict"
    #: A failed load is not retried for a while.
    BACK_OFF = "back off"
    #: The back-off is over.
    END_BACKOFF = "end of back-off"


#: The next state for each state and event. Other combinations are errors.
TRANSITIONS: Mapping[tuple[WeightState, WeightEvent], WeightState] = {
    (WeightState.ABSENT, WeightEvent.QUEUE): WeightState.QUEUED,
    (WeightState.ABSENT, WeightEvent.ADOPT): WeightState.RESIDENT,
    (WeightState.ABSENT, WeightEvent.BACK_OFF): WeightState.BACKOFF,
    (WeightState.QUEUED, WeightEvent.WITHDRAW): WeightState.ABSENT,
    (WeightState.QUEUED, WeightEvent.READ): WeightState.READING,
    (WeightState.QUEUED, WeightEvent.LOAD): WeightState.LOADING,
    (WeightState.READING, WeightEvent.ABANDON): WeightState.READING,
    (WeightState.READING, WeightEvent.READ_ENDED): WeightState.ABSENT,
    (WeightState.READING, WeightEvent.NOT_LOADED): WeightState.ABSENT,
    (WeightState.LOADING, WeightEvent.ABANDON): WeightState.LOADING,
    (WeightState.LOADING, WeightEvent.LOADED): WeightState.RESIDENT,
    (WeightState.LOADING, WeightEvent.NOT_LOADED): WeightState.ABSENT,
    (WeightState.RESIDENT, WeightEvent.WARM_UP): WeightState.RESERVED,
    (WeightState.RESIDENT, WeightEvent.RELEASE): WeightState.EVICTING,
    (WeightState.RESIDENT, WeightEvent.EVICT): WeightState.ABSENT,
    (WeightState.RESERVED, WeightEvent.WARM_UP): WeightState.RESERVED,
    (WeightState.RESERVED, WeightEvent.WARMED_UP): WeightState.RESIDENT,
    (WeightState.EVICTING, WeightEvent.KEEP): WeightState.RESIDENT,
    (WeightState.EVICTING, WeightEvent.EVICT): WeightState.ABSENT,
    (WeightState.BACKOFF, WeightEvent.QUEUE): WeightState.QUEUED,
    (WeightState.BACKOFF, WeightEvent.END_BACKOFF): WeightState.ABSENT,
}

#: Name of the instruction that carries out an event. Other events need no instruction.
EFFECTS: Mapping[WeightEvent, str] = {
    WeightEvent.READ: "ReadWeights",
    WeightEvent.LOAD: "LoadWeights",
    WeightEvent.ABANDON: "AbandonLoad",
    WeightEvent.WARM_UP: "WarmUp",
    WeightEvent.EVICT: "EvictWeights",
}

#: States in which an execution could run on the weights, if nothing else forbids it.
RUNNABLE = frozenset({WeightState.RESIDENT, WeightState.EVICTING})
#: States in which the weights are on the device.
ON_DEVICE = RUNNABLE | {WeightState.RESERVED}
#: States in which the weights take bytes of the device.
TAKING_BYTES = ON_DEVICE | {WeightState.LOADING}
