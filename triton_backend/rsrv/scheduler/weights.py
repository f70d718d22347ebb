"""What is on the device: whose weights, in which bytes, under which budget. The one place that loads or evicts.

Tensors are known by their content. Models that have equal ones share their bytes: these are counted once, and are
there while any of the models is. Tensors that exactly the same loaded models have are one *piece*. Sums over a model's
pieces cost far less than sums over its tensors: a model that shares nothing is one piece, and a family of fine-tunes
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
_FIRST_REST, _LONGEST_REST = 1.0, 60.0
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


class Piece:
    """Tensors that exactly the same loaded models have. They are on the device while one of these uses them."""

    __slots__ = ("bytes", "owners", "pins", "tensors", "users")

    def __init__(self, tensors: dict[Any, int], size: int, owners: list["Holding"]) -> None:
        #: key -> bytes; empty for the weights of a model whose tensors nobody told.
        self.tensors = tensors
        self.bytes = size
        self.owners = owners
        #: owners whose weights are resident or on their way, and those of them that are pinned.
        self.users = 0
        self.pins = 0


class Pieces:
    """The pieces of all models whose tensors are known."""

    __slots__ = ("_of",)

    def __init__(self) -> None:
        #: tensor -> the piece that it belongs to.
        self._of: dict[Any, Piece] = {}

    def check(self, tensors: Mapping[Any, int]) -> None:
        """Refuse tensors that contradict those of other models.

        Raises:
            CallerError: a tensor has another size.
        """
        for key, size in tensors.items():
            piece = self._of.get(key)
            if piece is not None and piece.tensors[key] != size:
                raise CallerError(f"tensor {key!r} has {size} bytes here and {piece.tensors[key]} elsewhere")

    def join(self, holding: "Holding", tensors: Mapping[Any, int]) -> None:
        """Divide the tensors of a model that has none yet among its pieces. Costs O(tensors)."""
        fresh: dict[Any, int] = {}
        common: dict[Piece, dict[Any, int]] = {}
        for key, size in tensors.items():
            piece = self._of.get(key)
            (fresh if piece is None else common.setdefault(piece, {}))[key] = size
        for piece, some in common.items():
            whole = len(some) == len(piece.tensors)
            shared = piece if whole else self._split(piece, some)
            shared.owners.append(holding)
            holding.pieces.append(shared)
        if fresh:
            own = Piece(fresh, sum(fresh.values()), [holding])
            self._of.update(dict.fromkeys(fresh, own))
            holding.pieces.append(own)

    def _split(self, piece: Piece, tensors: dict[Any, int]) -> Piece:
        """Make some of a piece's tensors a piece of their own."""
        part = Piece(tensors, sum(tensors.values()), list(piece.owners))
        part.users, part.pins = piece.users, piece.pins
        piece.bytes -= part.bytes
        for key in tensors:
            del piece.tensors[key]
            self._of[key] = part
        for owner in part.owners:
            owner.pieces.append(part)
        return part

    def leave(self, holding: "Holding") -> None:
        """Forget the tensors of a model that is gone, and uses none."""
        for piece in holding.pieces:
            piece.owners.remove(holding)
            if not piece.owners:
                for key in piece.tensors:
                    del self._of[key]

    def by_tensor(self) -> Mapping[Any, Piece]:
        """Each tensor's piece."""
        return self._of


class Residency(Enum):
    """Where the weights of a model are."""

    ABSENT = "absent"
    LOADING = "loading"
    RESIDENT = "resident"


class Holding:
    """The weights of one model."""

    __slots__ = (
        "abandoned",
        "asked",
        "epoch",
        "fresh",
        "gap",
        "load_seconds",
        "loads",
        "model",
        "moved",
        "pieces",
        "pinned",
        "residency",
        "rest",
        "rests_until",
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
        self.pieces: list[Piece] = []
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
        self.rests_until = -inf
        self.rest = 0.0
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
        return sum(piece.bytes for piece in self.pieces)

    @property
    def absent_bytes(self) -> int:
        """What a load of it has to move now."""
        return sum(piece.bytes for piece in self.pieces if not piece.users)

    @property
    def remaining_seconds(self) -> float:
        """How long a load of it would take now."""
        size = self.bytes
        return self.load_seconds * self.absent_bytes / size if size else self.load_seconds

    def give_up(self, now: float, *, shut: bool) -> None:
        """A load failed; `shut`: it found no memory though all others had given way."""
        self.rest = min(max(2.0 * self.rest, _FIRST_REST), _LONGEST_REST)
        self.rests_until = now + self.rest
        self.shut = shut

    def end_rest(self) -> None:
        """It may go well now; if it does not, the next rest is longer all the same."""
        self.rests_until = -inf

    def resting(self, now: float) -> float:
        """Seconds for which requests do not cause a load of it; 0: they do, or need none."""
        shut = self.shut and self.residency is Residency.ABSENT
        return max(0.0, self.rests_until - now) if shut else 0.0

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
        "loading",
        "loads",
        "pieces",
        "pinned_bytes",
    )

    def __init__(self, budget: int | None) -> None:
        self._epoch = 0
        #: seconds per byte of the latest telling load of any model.
        self._pace = 0.0
        self.pieces = Pieces()
        #: device bytes that weights may take, pinned ones included; None: no limit.
        self.budget = budget
        #: device bytes of all weights that are resident or on their way, each tensor once; and of pinned ones.
        self.bytes = 0
        self.pinned_bytes = 0
        #: models whose weights are resident or on their way, and not pinned (a dictionary for its order).
        self.evictable: dict[Holding, None] = {}
        #: whose load is under way.
        self.loading: Holding | None = None
        #: whether its end was asked for.
        self.abandoning = False
        #: loads since the start that ended well.
        self.loads = 0

    def add(self, program: Program) -> Holding:
        """The absent weights of a model. Costs O(its tensors)."""
        holding = Holding(program)
        if program.tensors is None:
            holding.pieces.append(Piece({}, program.weight_bytes, [holding]))
        else:
            self.pieces.join(holding, program.tensors)
        return holding

    # --- how much room there is --------------------------------------------------------------------------------

    def missing(self, holding: Holding | None = None) -> int:
        """Bytes that others must give up before absent weights fit, or all that is there does; <= 0: none.

        Pinned weights, and what is larger than all that they leave, go beyond the budget: the latter alone.
        """
        if self.budget is None:
            return 0
        if holding is None:
            return self.bytes - self.budget
        return self.bytes + holding.absent_bytes - max(self.budget, self._alone(holding))

    def excess(self) -> int:
        """Bytes above the budget that are not those of pinned models and of one other; <= 0: none.

        Whoever has nothing but what the other one has, too, is no reason to evict anybody.
        """
        if self.budget is None or self.bytes <= self.budget:
            return 0
        alone = max(map(self._alone, self.evictable), default=self.pinned_bytes)
        return self.bytes - max(self.budget, alone)

    def _alone(self, holding: Holding) -> int:
        """Bytes of its weights and of all that are pinned."""
        return self.pinned_bytes + sum(piece.bytes for piece in holding.pieces if not piece.pins)

    def expected_wait(self, holding: Holding, now: float) -> float:
        """Seconds until it can be resident at the earliest."""
        match holding.residency:
            case Residency.RESIDENT:
                return 0.0
            case Residency.LOADING:
                return max(0.0, holding.since + holding.takes - now)
            case Residency.ABSENT:
                ahead = 0.0 if self.loading is None else self.expected_wait(self.loading, now)
                return ahead + holding.remaining_seconds

    def bring_back(self, holdings: Iterable[Holding]) -> float:
        """Seconds that loads of all of these take, one after the other, each tensor once."""
        seconds = 0.0
        seen: set[Piece] = set()
        for holding in holdings:
            fresh = [piece for piece in holding.pieces if not piece.users and piece not in seen]
            seen.update(fresh)
            size = holding.bytes
            share = sum(piece.bytes for piece in fresh) / size if size else 1.0
            seconds += holding.load_seconds * share
        return seconds

    # --- what happens to them --------------------------------------------------------------------------------

    def adopt(self, holding: Holding, now: float) -> None:
        """Weights that are on the device already."""
        self._epoch += 1
        holding.epoch = self._epoch
        holding.residency = Residency.RESIDENT
        holding.since = holding.used = now
        self._take(holding)

    def load(self, holding: Holding, now: float) -> LoadWeights:
        """Start the load of absent weights, while none is under way."""
        self._epoch += 1
        holding.epoch = self._epoch
        holding.residency = Residency.LOADING
        holding.since = now
        holding.moved = holding.absent_bytes
        holding.takes = holding.remaining_seconds
        self.loading = holding
        self._take(holding)
        return LoadWeights(holding.model, holding.epoch)

    def abandon(self, holding: Holding) -> AbandonLoad:
        """Ask for the end of the load under way; it may still end well."""
        self.abandoning = True
        return AbandonLoad(holding.model, holding.epoch)

    def check(self, program: Program) -> None:
        """Refuse a model whose tensors contradict those of others.

        Raises:
            CallerError: a tensor has another size.
        """
        self.pieces.check(program.tensors or {})

    def check_epoch(self, model: str, epoch: int) -> None:
        """Refuse the completion of a load that was never asked for.

        Raises:
            CallerError: no load had that epoch yet.
        """
        if not 0 < epoch <= self._epoch:
            raise CallerError(
                f"a load of model {model!r} ended with epoch {epoch}; the latest is {self._epoch}"
            )

    def loaded(self, holding: Holding, seconds: float, now: float) -> None:
        """The load under way ended well."""
        self.loading, self.abandoning = None, False
        self.loads += 1
        holding.residency = Residency.RESIDENT
        holding.loads += 1
        holding.abandoned = holding.starved = False
        holding.rest, holding.rests_until = 0.0, -inf
        holding.took = seconds
        size, moved = holding.bytes, holding.moved
        if moved >= _TELLING * size:
            holding.load_seconds = seconds * size / moved if size else seconds
            self._pace = seconds / moved if moved else self._pace
        elif not holding.load_seconds:
            # Nobody said, and too little was moved to tell: as long as others' bytes took.
            holding.load_seconds = self._pace * size
        holding.since = holding.used = now

    def failed(self, holding: Holding, *, abandoned: bool = False) -> None:
        """The load under way ended without weights."""
        self.loading, self.abandoning = None, False
        holding.abandoned = abandoned
        holding.residency = Residency.ABSENT
        self._give(holding)

    def evict(self, holding: Holding, heir: str | None = None) -> EvictWeights:
        """Free resident weights on which nothing executes. `heir`: whose load, just started, needs the room."""
        holding.residency = Residency.ABSENT
        self._give(holding)
        return EvictWeights(holding.model, holding.epoch, heir)

    def pin(self, holding: Holding, pinned: bool) -> None:
        """From now on they stay on the device, or no longer."""
        held = holding.residency is not Residency.ABSENT
        if held:
            self._give(holding)
        holding.pinned = pinned
        if held:
            self._take(holding)

    def _take(self, holding: Holding) -> None:
        if not holding.pinned:
            self.evictable[holding] = None
        for piece in holding.pieces:
            if not piece.users:
                self.bytes += piece.bytes
            piece.users += 1
            if holding.pinned:
                if not piece.pins:
                    self.pinned_bytes += piece.bytes
                piece.pins += 1

    def _give(self, holding: Holding) -> None:
        self.evictable.pop(holding, None)
        for piece in holding.pieces:
            piece.users -= 1
            if not piece.users:
                self.bytes -= piece.bytes
            if holding.pinned:
                piece.pins -= 1
                if not piece.pins:
                    self.pinned_bytes -= piece.bytes
