"""The states of one model's weights on the device, and the table of changes between them.

Weights are in exactly one `WeightState`. `TRANSITIONS` is the only way from one to another: `WeightAccounts.move` looks
each change up there, updates the byte accounts, and raises `InvariantError` with the model's history if the table
has no such change. docs/states.md shows the table as a diagram.

These facts are attributes beside the state, because each of them holds in several states:

- pinned: an operator may pin weights wherever they are, and they stay pinned while they are absent;
- the number of executions: it changes with requests, not with weights;
- shared tensors: one group of bytes has many users, each in a state of its own;
- whether the host has a copy: it may come or go wherever the weights are;
- an abandoned read or load: it may still end well, so the weights are reading or loading until it ends;
- an eviction that was requested while the weights load or warm up: it takes effect at the end of either;
- reasons to load: several may hold at a time, and those of a load that fails hold on;
- desired: they are to be on the device even without requests, wherever they are now;
- a warm-up that is due (`ModelState.needs_warm_up`): before they are on the device;
- a second try after a lack of memory: of their load while they are absent, of a warm-up while they are reserved;
- the time of the back-off: it goes on when a new reason queues them, and refuses requests.
"""

from collections.abc import Mapping
from enum import StrEnum


class WeightState(StrEnum):
    """State of a model's weights on the device."""

    #: not on the device, without a reason to load them.
    ABSENT = "absent"
    #: not on the device, in line for a load; `LoadQueue.reason` says why.
    QUEUED = "queued"
    #: not on the device, being read from disk into host memory, so that their load does not wait for the disk.
    READING = "reading"
    #: being copied to the device.
    LOADING = "loading"
    #: on the device, for the model's warm-up only.
    RESERVED = "reserved"
    #: on the device, for requests.
    RESIDENT = "resident"
    #: on the device, and to be evicted once no execution runs on them and none has to run before that.
    EVICTING = "evicting"
    #: not on the device: a load failed, and without a new reason it is not retried before the back-off ends.
    BACKOFF = "backoff"


class LoadReason(StrEnum):
    """Reason of a load that weights are in line for, in order of precedence."""

    #: the model is pinned, or is to be warmed up, or its load found no memory and is retried once.
    REQUIRED = "required"
    #: Requests wait for the weights.
    DEMAND = "demand"
    #: The weights were prefetched, or their load took too long for a request's deadline and the next request should find them.
    PREFETCH = "prefetch"
    #: A compaction evicted the weights, or an earlier runtime had them on the device. They load into free room, or are dropped.
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
    #: The end of the read or load is requested. It may still succeed.
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
    #: The weights are to be evicted as soon as they are free.
    RELEASE = "release"
    #: The weights are to stay after all.
    KEEP = "keep"
    #: The weights are evicted.
    EVICT = "evict"
    #: A failed load is not retried for a while.
    BACK_OFF = "back off"
    #: The back-off is over.
    END_BACKOFF = "end of back-off"


#: The table.
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

#: The instruction that an event is carried out by; events without one are bookkeeping.
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
