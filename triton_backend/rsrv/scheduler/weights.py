"""What is on the device: whose weights, in which bytes, under which budget. The one place that loads or evicts.

Tensors are known by their content. Models that have equal ones share their bytes: these are counted once, and are
there while any of the models is. Tensors that exactly the same loaded models have are one *group*. Sums over a model's
groups cost far less than sums over its tensors: a model that shares nothing is one group, and a family of fine-tunes
with one backbone has two for each member.

Every load has an epoch of its own, rising over all models and loads, so a completion names exactly one
load and a late one hurts nobody. One load is under way at a time: the link to the device is one, and who
comes next is decided as late as possible.
"""

from collections.abc import Iterable, Mapping
from enum import Enum
from math import inf
from typing import Any

from rsrv.scheduler.events import AbandonLoad, CallerError, EvictWeights, LoadWeights, Program

#: share of the latest pause in the usual one.
_ALPHA = 0.3
#: seconds for which a load that failed is not tried again; doubling from the first to the longest.
_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 1.0, 60.0
#: share of a model's bytes that a load must move to say something of how long a whole one takes.
_TELLING = 0.5
#: requests of a model that are remembered. More would tell the popular from the rest a little better where nothing
#: changes, and fewer would follow a change sooner.
_MEMORY = 8

#: when the latest requests for a model came, oldest first. A memory is as long as it takes the model's own
#: requests to come, not a number of seconds.
Uses = tuple[float, ...]


def remember(uses: Uses, requests: int, now: float) -> Uses:
    """The latest uses, after that many more at `now`."""
    return (uses + (now,) * min(requests, _MEMORY))[-_MEMORY:]


class SharedTensorGroup:
    """Tensors that exactly the same loaded models have. They are on the device while one of these uses them."""

    __slots__ = ("bytes", "owners", "pins", "tensors", "users")

    def __init__(self, tensors: dict[Any, int], size: int, owners: list["ModelWeights"]) -> None:
        #: key -> bytes; empty for the weights of a model whose tensors nobody told.
        self.tensors = tensors
        self.bytes = size
        self.owners = owners
        #: owners whose weights are resident or on their way, and those of them that are pinned.
        self.users = 0
        self.pins = 0


class SharedTensorGroups:
    """The groups of all models whose tensors are known."""

    __slots__ = ("_of",)

    def __init__(self) -> None:
        #: tensor -> the group that it belongs to.
        self._of: dict[Any, SharedTensorGroup] = {}

    def check(self, tensors: Mapping[Any, int]) -> None:
        """Refuse tensors that contradict those of other models.

        Raises:
            CallerError: a tensor has another size.
        """
        for key, size in tensors.items():
            group = self._of.get(key)
            if group is not None and group.tensors[key] != size:
                raise CallerError(f"tensor {key!r} has {size} bytes here and {group.tensors[key]} elsewhere")

    def join(self, weights: "ModelWeights", tensors: Mapping[Any, int]) -> None:
        """Divide the tensors of a model that has none yet among its groups. Costs O(tensors)."""
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
        """Make some of a group's tensors a group of their own."""
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
        """Forget the tensors of a model that is gone, and uses none."""
        for group in weights.groups:
            group.owners.remove(weights)
            if not group.owners:
                for key in group.tensors:
                    del self._of[key]

    def by_tensor(self) -> Mapping[Any, SharedTensorGroup]:
        """Each tensor's group."""
        return self._of


class Residency(Enum):
    """Where the weights of a model are."""

    ABSENT = "absent"
    LOADING = "loading"
    RESIDENT = "resident"


class ModelWeights:
    """The weights of one model."""

    __slots__ = (
        "abandoned",
        "asked",
        "backoff_seconds",
        "backoff_until",
        "epoch",
        "fresh",
        "gap",
        "groups",
        "load_seconds",
        "loads",
        "model",
        "moved",
        "pinned",
        "residency",
        "shut",
        "since",
        "starved",
        "takes",
        "took",
        "used",
        "uses",
    )

    def __init__(self, program: Program) -> None:
        self.model = program.model
        #: all of its tensors; `Weights` divides them.
        self.groups: list[SharedTensorGroup] = []
        #: whether it stays on the device, whoever else needs room.
        self.pinned = program.pinned
        #: whether somebody asked for it to come, or to stay, other than by a request. Ends when it leaves.
        self.asked = program.pinned
        self.residency = Residency.ABSENT
        #: of the current or latest load; 0 before the first.
        self.epoch = 0
        #: bytes that this load moves, or moved: those that no other model had there.
        self.moved = 0
        #: whether the latest load that is over was abandoned, or found no memory.
        self.abandoned = False
        self.starved = False
        #: until when it is not loaded by itself, because that failed, and how long that takes in all.
        self.backoff_until = -inf
        self.backoff_seconds = 0.0
        #: whether requests do not cause a load either: it found no memory twice, and each time all others had given way.
        self.shut = False
        #: completed loads.
        self.loads = 0
        #: how long a load of all its bytes takes: as the latest telling one, or as the program says.
        self.load_seconds = program.load_seconds
        #: how long the latest load took; before the first: as long as one of all its bytes.
        self.took = program.load_seconds
        #: whether it came for requests that wait, and nothing has executed on it since.
        self.fresh = False
        #: when the current residency, or the load under way, began; and how long the latter was expected to take.
        self.since = 0.0
        self.takes = 0.0
        #: when an execution on it ended last, or when it came.
        self.used = 0.0
        #: how long the model usually has no work between two requests; 0.0 before that was seen.
        self.gap = 0.0
        #: when its latest requests came, wherever the weights were.
        self.uses: Uses = ()

    @property
    def bytes(self) -> int:
        """What it takes on the device if nobody else has any of it there."""
        return sum(group.bytes for group in self.groups)

    @property
    def absent_bytes(self) -> int:
        """What a load of it has to move now."""
        return sum(group.bytes for group in self.groups if not group.users)

    @property
    def remaining_seconds(self) -> float:
        """How long a load of it would take now."""
        size = self.bytes
        return self.load_seconds * self.absent_bytes / size if size else self.load_seconds

    def give_up(self, now: float, *, shut: bool) -> None:
        """A load failed; `shut`: it found no memory though all others had given way."""
        self.backoff_seconds = min(max(2.0 * self.backoff_seconds, _FIRST_BACKOFF_S), _LONGEST_BACKOFF_S)
        self.backoff_until = now + self.backoff_seconds
        self.shut = shut

    def end_backoff(self) -> None:
        """It may go well now; if it does not, the next back-off is longer all the same."""
        self.backoff_until = -inf

    def backoff_left(self, now: float) -> float:
        """Seconds for which requests do not cause a load of it; 0: they do, or need none."""
        shut = self.shut and self.residency is Residency.ABSENT
        return max(0.0, self.backoff_until - now) if shut else 0.0

    def needed(self, now: float) -> None:
        """A request came after a pause."""
        if not self.epoch:
            return
        # One long pause must not hide for long that they are short.
        gap = min(now - self.used, 4.0 * self.load_seconds)
        self.gap += _ALPHA * (gap - self.gap) if self.gap else gap


class Weights:
    """The weights of all models."""

    __slots__ = (
        "_epoch",
        "_pace",
        "abandoning",
        "budget",
        "bytes",
        "evictable",
        "groups",
        "loading",
        "loads",
        "pinned_bytes",
    )

    def __init__(self, budget: int | None) -> None:
        self._epoch = 0
        #: seconds per byte of the latest telling load of any model.
        self._pace = 0.0
        self.groups = SharedTensorGroups()
        #: device bytes that weights may take, pinned ones included; None: no limit.
        self.budget = budget
        #: device bytes of all weights that are resident or on their way, each tensor once; and of pinned ones.
        self.bytes = 0
        self.pinned_bytes = 0
        #: models whose weights are resident or on their way, and not pinned (a dictionary for its order).
        self.evictable: dict[ModelWeights, None] = {}
        #: whose load is under way.
        self.loading: ModelWeights | None = None
        #: whether its end was asked for.
        self.abandoning = False
        #: loads since the start that ended well.
        self.loads = 0

    def add(self, program: Program) -> ModelWeights:
        """The absent weights of a model. Costs O(its tensors)."""
        weights = ModelWeights(program)
        if program.tensors is None:
            weights.groups.append(SharedTensorGroup({}, program.weight_bytes, [weights]))
        else:
            self.groups.join(weights, program.tensors)
        return weights

    # --- how much room there is --------------------------------------------------------------------------------

    def missing(self, weights: ModelWeights | None = None) -> int:
        """Bytes that others must give up before absent weights fit, or all that is there does; <= 0: none.

        Pinned weights, and what is larger than all that they leave, go beyond the budget: the latter alone.
        """
        if self.budget is None:
            return 0
        if weights is None:
            return self.bytes - self.budget
        return self.bytes + weights.absent_bytes - max(self.budget, self._alone(weights))

    def excess(self) -> int:
        """Bytes above the budget that are not those of pinned models and of one other; <= 0: none.

        Whoever has nothing but what the other one has, too, is no reason to evict anybody.
        """
        if self.budget is None or self.bytes <= self.budget:
            return 0
        alone = max(map(self._alone, self.evictable), default=self.pinned_bytes)
        return self.bytes - max(self.budget, alone)

    def _alone(self, weights: ModelWeights) -> int:
        """Bytes of its weights and of all that are pinned."""
        return self.pinned_bytes + sum(group.bytes for group in weights.groups if not group.pins)

    def expected_wait(self, weights: ModelWeights, now: float) -> float:
        """Seconds until it can be resident at the earliest."""
        match weights.residency:
            case Residency.RESIDENT:
                return 0.0
            case Residency.LOADING:
                return max(0.0, weights.since + weights.takes - now)
            case Residency.ABSENT:
                ahead = 0.0 if self.loading is None else self.expected_wait(self.loading, now)
                return ahead + weights.remaining_seconds

    def bring_back(self, several: Iterable[ModelWeights]) -> float:
        """Seconds that loads of all of these take, one after the other, each tensor once."""
        seconds = 0.0
        seen: set[SharedTensorGroup] = set()
        for weights in several:
            fresh = [group for group in weights.groups if not group.users and group not in seen]
            seen.update(fresh)
            size = weights.bytes
            share = sum(group.bytes for group in fresh) / size if size else 1.0
            seconds += weights.load_seconds * share
        return seconds

    # --- what happens to them --------------------------------------------------------------------------------

    def adopt(self, weights: ModelWeights, now: float) -> None:
        """Weights that are on the device already."""
        self._epoch += 1
        weights.epoch = self._epoch
        weights.residency = Residency.RESIDENT
        weights.since = weights.used = now
        self._take(weights)

    def load(self, weights: ModelWeights, now: float) -> LoadWeights:
        """Start the load of absent weights, while none is under way."""
        self._epoch += 1
        weights.epoch = self._epoch
        weights.residency = Residency.LOADING
        weights.since = now
        weights.moved = weights.absent_bytes
        weights.takes = weights.remaining_seconds
        self.loading = weights
        self._take(weights)
        return LoadWeights(weights.model, weights.epoch)

    def abandon(self, weights: ModelWeights) -> AbandonLoad:
        """Ask for the end of the load under way; it may still end well."""
        self.abandoning = True
        return AbandonLoad(weights.model, weights.epoch)

    def check(self, program: Program) -> None:
        """Refuse a model whose tensors contradict those of others.

        Raises:
            CallerError: a tensor has another size.
        """
        self.groups.check(program.tensors or {})

    def check_epoch(self, model: str, epoch: int) -> None:
        """Refuse the completion of a load that was never asked for.

        Raises:
            CallerError: no load had that epoch yet.
        """
        if not 0 < epoch <= self._epoch:
            raise CallerError(
                f"a load of model {model!r} ended with epoch {epoch}; the latest is {self._epoch}"
            )

    def loaded(self, weights: ModelWeights, seconds: float, now: float) -> None:
        """The load under way ended well."""
        self.loading, self.abandoning = None, False
        self.loads += 1
        weights.residency = Residency.RESIDENT
        weights.loads += 1
        weights.abandoned = weights.starved = False
        weights.backoff_seconds, weights.backoff_until = 0.0, -inf
        weights.took = seconds
        size, moved = weights.bytes, weights.moved
        if moved >= _TELLING * size:
            weights.load_seconds = seconds * size / moved if size else seconds
            self._pace = seconds / moved if moved else self._pace
        elif not weights.load_seconds:
            # Nobody said, and too little was moved to tell: as long as others' bytes took.
            weights.load_seconds = self._pace * size
        weights.since = weights.used = now

    def failed(self, weights: ModelWeights, *, abandoned: bool = False) -> None:
        """The load under way ended without weights."""
        self.loading, self.abandoning = None, False
        weights.abandoned = abandoned
        weights.residency = Residency.ABSENT
        self._give(weights)

    def evict(self, weights: ModelWeights, loading_for: str | None = None) -> EvictWeights:
        """Free resident weights on which nothing executes. `loading_for`: whose load, just started, needs the room."""
        weights.residency = Residency.ABSENT
        self._give(weights)
        return EvictWeights(weights.model, weights.epoch, loading_for)

    def pin(self, weights: ModelWeights, pinned: bool) -> None:
        """From now on they stay on the device, or no longer."""
        held = weights.residency is not Residency.ABSENT
        if held:
            self._give(weights)
        weights.pinned = pinned
        if held:
            self._take(weights)

    def _take(self, weights: ModelWeights) -> None:
        if not weights.pinned:
            self.evictable[weights] = None
        for group in weights.groups:
            if not group.users:
                self.bytes += group.bytes
            group.users += 1
            if weights.pinned:
                if not group.pins:
                    self.pinned_bytes += group.bytes
                group.pins += 1

    def _give(self, weights: ModelWeights) -> None:
        self.evictable.pop(weights, None)
        for group in weights.groups:
            group.users -= 1
            if not group.users:
                self.bytes -= group.bytes
            if weights.pinned:
                group.pins -= 1
                if not group.pins:
                    self.pinned_bytes -= group.bytes
