"""The weights of all models on the device: their states, their bytes, and the budget.

A tensor is identified by its content. Models with equal tensors share the bytes. Shared bytes are counted once, and stay on the
device while any of these models needs them. Two tensors are in the same *group* if each model has both or neither. Sums over
the groups of a model cost far less than sums over its tensors. A model that shares nothing has one group. In a family of
fine-tunes with one backbone, each member has two groups: the backbone, and its own tensors.

Every load, and every read before a load, has an epoch. Epochs rise across all models, so each report of an end refers to
exactly one load or read, and an outdated report is ignored. One load runs at a time, because there is one link to the device,
and because the next load is chosen as late as possible. One read may run at the same time, so that loads from host memory do
not wait for the disk.
"""

from collections.abc import Iterable, Mapping
from math import inf
from typing import Any

from rsrv.scheduler.events import (
    AbandonLoad,
    CallerError,
    EvictWeights,
    InvariantError,
    LoadWeights,
    Program,
    ReadWeights,
)
from rsrv.scheduler.history import History
from rsrv.scheduler.weight_states import TAKING_BYTES, TRANSITIONS, WeightEvent, WeightState

#: Weight of the latest pause in the moving average `ModelWeights.usual_pause`.
_PAUSE_ALPHA = 0.3
#: Seconds for which a failed load is not retried. They double with each failure, from the first to the longest value.
_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 1.0, 60.0
#: A load must move at least this share of a model's bytes to measure the duration of a load of all its bytes.
_MIN_MEASURED_SHARE = 0.5


class SharedTensorGroup:
    """Tensors that belong to the same models. They are on the device while one of these models uses them."""

    __slots__ = ("bytes", "owners", "pins", "tensors", "users")

    def __init__(self, tensors: dict[Any, int], size: int, owners: list["ModelWeights"]) -> None:
        #: Bytes by key. Empty for the weights of a model whose tensors are unknown.
        self.tensors = tensors
        self.bytes = size
        self.owners = owners
        #: Number of owners whose weights take bytes of the device.
        self.users = 0
        #: Number of pinned users.
        self.pins = 0


class SharedTensorGroups:
    """Divides the tensors of all models into groups. Models whose tensors are unknown take no part."""

    __slots__ = ("_of",)

    def __init__(self) -> None:
        #: Group of each tensor.
        self._of: dict[Any, SharedTensorGroup] = {}

    def check(self, tensors: Mapping[Any, int]) -> None:
        """Check that tensors agree with those of other models.

        Raises:
            CallerError: a tensor has another size in another model.
        """
        for key, size in tensors.items():
            group = self._of.get(key)
            if group is not None and group.tensors[key] != size:
                raise CallerError(f"tensor {key!r} has {size} bytes here and {group.tensors[key]} elsewhere")

    def join(self, weights: "ModelWeights", tensors: Mapping[Any, int]) -> None:
        """Divide the tensors of a new model into groups. Costs O(tensors)."""
        fresh: dict[Any, int] = {}
        common: dict[SharedTensorGroup, dict[Any, int]] = {}
        for key, size in tensors.items():
            group = self._of.get(key)
            (fresh if group is None else common.setdefault(group, {}))[key] = size
        for group, some in common.items():
            whole = len(some) == len(group.tensors)
            shared = group if whole else self._split(group, some)
            shared.owners.append(weights)
            weights.groups.append(shared)
        if fresh:
            own = SharedTensorGroup(fresh, sum(fresh.values()), [weights])
            self._of.update(dict.fromkeys(fresh, own))
            weights.groups.append(own)

    def _split(self, group: SharedTensorGroup, tensors: dict[Any, int]) -> SharedTensorGroup:
        """Move some of a group's tensors to a new group, and return it."""
        part = SharedTensorGroup(tensors, sum(tensors.values()), list(group.owners))
        part.users, part.pins = group.users, group.pins
        group.bytes -= part.bytes
        for key in tensors:
            del group.tensors[key]
            self._of[key] = part
        for owner in part.owners:
            owner.groups.append(part)
        return part

    def leave(self, weights: "ModelWeights") -> None:
        """Remove a model from the owners of its groups. The model must not use any of these groups."""
        for group in weights.groups:
            group.owners.remove(weights)
            if not group.owners:
                for key in group.tensors:
                    del self._of[key]

    def by_tensor(self) -> Mapping[Any, SharedTensorGroup]:
        """Return the group of each tensor."""
        return self._of


class ModelWeights:
    """Weights of one model. Only `WeightAccounts.move` changes their state."""

    __slots__ = (
        "abandoned",
        "backoff_seconds",
        "backoff_until",
        "begun_at",
        "desired",
        "epoch",
        "expected_load_seconds",
        "groups",
        "history",
        "last_arrival",
        "last_load_seconds",
        "last_used",
        "load_bytes",
        "load_error",
        "load_seconds",
        "loaded_at",
        "loads",
        "model",
        "on_disk",
        "pinned",
        "read_seconds",
        "retry_due",
        "state",
        "unserved",
        "usual_pause",
    )

    def __init__(self, program: Program) -> None:
        self.model = program.model
        self.state = WeightState.ABSENT
        self.history = History()
        #: All tensors of the weights. `WeightAccounts` divides them into groups.
        self.groups: list[SharedTensorGroup] = []
        #: True if the weights stay on the device even if other weights need room.
        self.pinned = program.pinned
        #: True if the weights must be on the device even without requests: they were pinned, prefetched, adopted, or present
        #: when loads on demand ended. An eviction ends this, unless the weights return after it.
        self.desired = program.pinned
        #: True if the host has no copy, so that the weights are read from disk before a load.
        self.on_disk = False
        #: Seconds of the latest read.
        self.read_seconds = 0.0
        #: Epoch of the current or latest load or read, or 0 before the first one.
        self.epoch = 0
        #: Bytes that the latest load moves. Tensors that another model has on the device are not moved.
        self.load_bytes = 0
        #: True if the latest read or load that ended was abandoned.
        self.abandoned = False
        #: True if a load found no memory and must be retried once after a compaction.
        self.retry_due = False
        #: Time when the back-off after a failed load ends.
        self.backoff_until = -inf
        #: Length of the latest back-off.
        self.backoff_seconds = 0.0
        #: Reason of the failure. "" means that the load found no memory twice, although all other weights were evicted.
        self.load_error = ""
        #: Number of completed loads.
        self.loads = 0
        #: Expected duration of a load of all bytes. At first, it is the program's value. Loads that move most bytes measure it.
        self.load_seconds = program.load_seconds
        #: Duration of the latest load. Before the first load, this is the program's duration of a load of all bytes.
        self.last_load_seconds = program.load_seconds
        #: True if the weights were loaded for waiting requests, and none of these requests has executed yet.
        self.unserved = False
        #: Time when the latest load or read began.
        self.begun_at = 0.0
        #: Expected duration of the latest load.
        self.expected_load_seconds = 0.0
        #: Time when the latest load ended, or when the weights were adopted.
        self.loaded_at = 0.0
        #: Time when the latest execution with the weights ended, or when they were loaded or the model was added.
        self.last_used = 0.0
        #: Seconds for which the model usually has no work between two requests, or 0.0 before the first such pause.
        self.usual_pause = 0.0
        #: Time when the latest request arrived, or -inf if there was none.
        self.last_arrival = -inf

    @property
    def bytes(self) -> int:
        """Bytes of the weights on the device if no other model shares their tensors."""
        return sum([group.bytes for group in self.groups])

    @property
    def absent_bytes(self) -> int:
        """Bytes that a load has to move now."""
        return sum([group.bytes for group in self.groups if not group.users])

    @property
    def transfer_seconds(self) -> float:
        """Expected duration of a load from host memory now."""
        size = self.bytes
        return self.load_seconds * self.absent_bytes / size if size else self.load_seconds

    @property
    def remaining_seconds(self) -> float:
        """Expected duration of a load now. The read before it is included unless it has begun."""
        reads = self.on_disk and self.state is not WeightState.READING
        return self.transfer_seconds + (self.read_seconds if reads else 0.0)

    @property
    def return_seconds(self) -> float:
        """Expected duration of the read and the load that would follow an eviction of all bytes now."""
        return self.load_seconds + (self.read_seconds if self.on_disk else 0.0)

    def begin_backoff(self, now: float, error: str) -> None:
        """Start the back-off after a failed load.

        It is twice as long as the previous back-off, within the limits. `error`: see `load_error`.
        """
        self.backoff_seconds = min(max(2.0 * self.backoff_seconds, _FIRST_BACKOFF_S), _LONGEST_BACKOFF_S)
        self.backoff_until = now + self.backoff_seconds
        self.load_error = error

    def end_backoff(self) -> None:
        """End the back-off. If the next load also fails, the next back-off is nevertheless longer."""
        self.backoff_until = -inf

    def refused_for(self, now: float) -> float:
        """Seconds for which requests are refused because a load failed. 0: requests are accepted."""
        return 0.0 if self.state in TAKING_BYTES else max(0.0, self.backoff_until - now)

    def observe_pause(self, now: float) -> None:
        """Learn the usual pause from the current one. Call this when a request arrives while the model has no work."""
        if not self.epoch:
            return
        # A pause is limited to four load times, so that a single long pause does not outweigh many short pauses.
        pause = min(now - self.last_used, 4.0 * self.load_seconds)
        self.usual_pause += _PAUSE_ALPHA * (pause - self.usual_pause) if self.usual_pause else pause


class WeightAccounts:
    """States of all weights, and the device bytes that they take. `move` is the only way from one state to another."""

    __slots__ = (
        "_epoch",
        "_seconds_per_byte",
        "abandoning",
        "abandoning_read",
        "budget",
        "bytes",
        "groups",
        "loading",
        "now",
        "pinned_bytes",
        "reading",
        "reserved",
        "unpinned",
    )

    def __init__(self, budget: int | None) -> None:
        self._epoch = 0
        #: Seconds per byte of the latest load that measured its model's duration.
        self._seconds_per_byte = 0.0
        self.groups = SharedTensorGroups()
        #: Device bytes that weights may take, including pinned ones. None means no limit.
        self.budget = budget
        #: Device bytes that weights take. Each tensor is counted once.
        self.bytes = 0
        #: Device bytes that pinned weights take.
        self.pinned_bytes = 0
        #: Weights that take bytes and are not pinned. This is a dictionary to keep the order.
        self.unpinned: dict[ModelWeights, None] = {}
        #: The weights that are loading, or None.
        self.loading: ModelWeights | None = None
        #: True if the load that runs must be abandoned.
        self.abandoning = False
        #: The weights that are being read from disk, or None.
        self.reading: ModelWeights | None = None
        #: True if the read that runs must be abandoned.
        self.abandoning_read = False
        #: Number of models whose weights are reserved for a warm-up.
        self.reserved = 0
        #: Time of the event that the scheduler handles, for the histories.
        self.now = 0.0

    def add(self, program: Program) -> ModelWeights:
        """Return the absent weights of a new model. Costs O(its tensors)."""
        weights = ModelWeights(program)
        weights.last_used = self.now
        if program.tensors is None:
            weights.groups.append(SharedTensorGroup({}, program.weight_bytes, [weights]))
        else:
            self.groups.join(weights, program.tensors)
        return weights

    def move(self, weights: ModelWeights, event: WeightEvent, why: str = "", **details: str | float) -> None:
        """Change the state of weights by the table, account for their bytes, and record the change with its reason.

        `why`: the reason. If it is empty, the event's text is used. `details`: further facts for the history.

        Raises:
            InvariantError: the table has no such change. The error has the model's history.
        """
        before = weights.state
        after = TRANSITIONS.get((before, event))
        if after is None:
            raise InvariantError(
                f"weights that are {before.value} cannot take the event {event.value!r}",
                weights.model,
                tuple(map(str, weights.history.records())),
            )
        weights.state = after
        self.reserved += (after is WeightState.RESERVED) - (before is WeightState.RESERVED)
        take, taken = after in TAKING_BYTES, self.bytes
        if take != (before in TAKING_BYTES):
            (self._take if take else self._give)(weights)
        if after is not before:
            moved = abs(self.bytes - taken)
            facts = {"why": why or event.value, **details, **({"bytes": moved} if moved else {})}
            weights.history.change(self.now, f"weights {after.value}", facts)

    # --- room within the budget -------------------------------------------------------------------------------------

    def missing(self, weights: ModelWeights) -> int:
        """Return the bytes to evict before these absent weights fit. 0 or less: they fit.

        Pinned weights may exceed the budget. Other weights may exceed it if only pinned weights are on the device with them.
        """
        if self.budget is None:
            return 0
        return self.bytes + weights.absent_bytes - max(self.budget, self._bytes_with_pinned(weights))

    @property
    def over_budget(self) -> int:
        """Bytes above the budget. 0 or less: the weights are within the budget."""
        return 0 if self.budget is None else self.bytes - self.budget

    def excess(self) -> int:
        """Return the bytes above the budget that evictions should free. 0 or less: none.

        Pinned weights may exceed the budget. The largest of the other weights may also exceed it if only pinned weights are on
        the device with them. Weights whose tensors all belong to that largest model cause no eviction.
        """
        if self.budget is None or self.bytes <= self.budget:
            return 0
        largest = max(map(self._bytes_with_pinned, self.unpinned), default=self.pinned_bytes)
        return self.bytes - max(self.budget, largest)

    def _bytes_with_pinned(self, weights: ModelWeights) -> int:
        """Bytes of these weights and of all pinned ones."""
        return self.pinned_bytes + sum([group.bytes for group in weights.groups if not group.pins])

    def expected_wait(self, weights: ModelWeights) -> float:
        """Seconds until the weights can be on the device at the earliest."""
        if weights.state not in TAKING_BYTES:
            before = 0.0 if self.loading is None else self.expected_wait(self.loading)
            if weights.on_disk:
                passed = self.now - weights.begun_at if weights is self.reading else 0.0
                before = max(before, weights.read_seconds - passed)
            return before + weights.transfer_seconds
        if weights.state is WeightState.LOADING:
            return max(0.0, weights.begun_at + weights.expected_load_seconds - self.now)
        return 0.0

    def reload_seconds(self, several: Iterable[ModelWeights]) -> float:
        """Return the expected seconds of loading all these weights one after the other, each tensor once."""
        seconds = 0.0
        seen: set[SharedTensorGroup] = set()
        for weights in several:
            fresh = [group for group in weights.groups if not group.users and group not in seen]
            seen.update(fresh)
            size = weights.bytes
            share = sum(group.bytes for group in fresh) / size if size else 1.0
            seconds += weights.load_seconds * share
        return seconds

    # --- loads, evictions, pins ----------------------------------------------------------------------------------

    def adopt(self, weights: ModelWeights) -> None:
        """Account for weights that are already on the device."""
        self._begin(weights)
        weights.loaded_at = weights.last_used = self.now
        self.move(weights, WeightEvent.ADOPT)

    def read(self, weights: ModelWeights, why: str) -> ReadWeights:
        """Start a read from disk, while none runs."""
        self._begin(weights)
        self.reading = weights
        self.move(weights, WeightEvent.READ, why)
        return ReadWeights(weights.model, weights.epoch)

    def load(self, weights: ModelWeights, why: str) -> LoadWeights:
        """Start a load, while none runs."""
        self._begin(weights)
        weights.load_bytes = weights.absent_bytes
        weights.expected_load_seconds = weights.remaining_seconds
        self.loading = weights
        self.move(weights, WeightEvent.LOAD, why)
        return LoadWeights(weights.model, weights.epoch)

    def _begin(self, weights: ModelWeights) -> None:
        self._epoch += 1
        weights.epoch, weights.begun_at = self._epoch, self.now

    def abandon(self, weights: ModelWeights) -> AbandonLoad:
        """Abandon the load or the read. It may still succeed."""
        if weights is self.reading:
            self.abandoning_read = True
        else:
            self.abandoning = True
        self.move(weights, WeightEvent.ABANDON)
        return AbandonLoad(weights.model, weights.epoch)

    def check(self, program: Program) -> None:
        """Check that a model's tensors agree with those of other models.

        Raises:
            CallerError: a tensor has another size in another model.
        """
        self.groups.check(program.tensors or {})

    def check_epoch(self, model: str, epoch: int) -> None:
        """Check that a load or a read with this epoch was started before it ends.

        Raises:
            CallerError: no load or read has had that epoch yet.
        """
        if not 0 < epoch <= self._epoch:
            raise CallerError(
                f"a load of model {model!r} ended with epoch {epoch}; the latest is {self._epoch}"
            )

    def read_ended(self, weights: ModelWeights, seconds: float) -> None:
        """Account for a read that succeeded."""
        self.reading, self.abandoning_read = None, False
        weights.read_seconds = seconds
        self.move(weights, WeightEvent.READ_ENDED, seconds=seconds)

    def loaded(self, weights: ModelWeights, seconds: float) -> None:
        """Account for a load that succeeded, and learn from its duration."""
        self.loading, self.abandoning = None, False
        self.move(weights, WeightEvent.LOADED, seconds=seconds)
        weights.loads += 1
        weights.abandoned = weights.retry_due = False
        weights.backoff_seconds, weights.backoff_until = 0.0, -inf
        weights.last_load_seconds = seconds
        size, moved = weights.bytes, weights.load_bytes
        if moved >= _MIN_MEASURED_SHARE * size:
            weights.load_seconds = seconds * size / moved if size else seconds
            self._seconds_per_byte = seconds / moved if moved else self._seconds_per_byte
        elif not weights.load_seconds:
            # Neither the program nor a measurement gives the duration, so use the rate of other models' loads.
            weights.load_seconds = self._seconds_per_byte * size
        weights.loaded_at = weights.last_used = self.now

    def not_loaded(self, weights: ModelWeights, *, abandoned: bool = False) -> None:
        """Account for a load or a read that failed or was abandoned."""
        if weights is self.reading:
            self.reading, self.abandoning_read = None, False
        else:
            self.loading, self.abandoning = None, False
        weights.abandoned = abandoned
        self.move(weights, WeightEvent.NOT_LOADED, "abandoned" if abandoned else "")

    def evict(
        self, weights: ModelWeights, loading_for: str | None = None, *, why: str = "", family: str = ""
    ) -> EvictWeights:
        """Evict idle weights.

        `loading_for`: key of the model whose load has just started and needs the room; `family`: its name.
        """
        self.move(weights, WeightEvent.EVICT, why, **({"model": family} if family else {}))
        return EvictWeights(weights.model, weights.epoch, loading_for)

    def pin(self, weights: ModelWeights, pinned: bool) -> None:
        """Pin weights, or unpin them."""
        takes = weights.state in TAKING_BYTES
        if takes:
            self._give(weights)
        weights.pinned = pinned
        if takes:
            self._take(weights)

    def _take(self, weights: ModelWeights) -> None:
        if not weights.pinned:
            self.unpinned[weights] = None
        for group in weights.groups:
            if not group.users:
                self.bytes += group.bytes
            group.users += 1
            if weights.pinned:
                if not group.pins:
                    self.pinned_bytes += group.bytes
                group.pins += 1

    def _give(self, weights: ModelWeights) -> None:
        self.unpinned.pop(weights, None)
        for group in weights.groups:
            group.users -= 1
            if not group.users:
                self.bytes -= group.bytes
            if weights.pinned:
                group.pins -= 1
                if not group.pins:
                    self.pinned_bytes -= group.bytes
