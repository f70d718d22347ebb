"""Sequences of models with state, and the slots of the device that they have or wait for.

The module is pure: times are arguments, in seconds of one monotonic clock, and each call returns its consequences. A request is
passed to the scheduler when its sequence has a slot. A sequence has at most one request at a time.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from heapq import heappop, heappush, merge
from math import inf
from operator import itemgetter
from typing import NamedTuple

from rsrv.runtime.state_pool import SequenceTensors, SlotRow
from rsrv.scheduler import events as ev
from rsrv.wire.frames import END, START, Status
from rsrv_bundle.spec import StateSpec

#: Maximum number of sequences of one model at a time, with and without a slot.
MAX_SEQUENCES = 65_536
LOST = (
    "the sequence is not known: it never started or has ended, or its state was dropped because it was idle for too long, host "
    "memory was short, an execution of its model failed, or its runtime ended; start it again"
)
#: Text for the requests of sequences whose state was lost in a failed execution of other requests.
STATE_LOST = (
    "an execution of this model failed, and the state of all its sequences was lost; start the sequence again"
)
_BUSY = "the sequence has a request in progress; send the next one after its answer"


class SequenceState(StrEnum):
    """State of a sequence."""

    #: The sequence's request waits for a slot.
    WAITING = "waiting"
    #: The sequence has a slot and no request.
    IDLE = "idle"
    #: The sequence has a slot, and a request that the scheduler knows.
    STEPPING = "stepping"
    #: The sequence has neither a slot nor a request. Its state is in host memory.
    STORED = "stored"
    ENDED = "ended"


class SequenceEvent(StrEnum):
    """Event that moves a sequence to another state."""

    #: A request arrived for the sequence.
    REQUEST = "request"
    #: The sequence got a slot.
    GRANT = "grant"
    #: The sequence's request was answered, or ended without a change of the state.
    DONE = "done"
    #: Another sequence got the slot.
    DISPLACE = "displace"
    #: The sequence ended: its last request was answered, it was idle for too long, its connection ended, or its state was lost.
    END = "end"


S, E = SequenceState, SequenceEvent

TRANSITIONS: Mapping[tuple[SequenceState, SequenceEvent], SequenceState] = {
    (S.WAITING, E.GRANT): S.STEPPING,
    (S.WAITING, E.DONE): S.STORED,
    (S.WAITING, E.END): S.ENDED,
    (S.STEPPING, E.DONE): S.IDLE,
    (S.STEPPING, E.END): S.ENDED,
    (S.IDLE, E.REQUEST): S.STEPPING,
    (S.IDLE, E.DISPLACE): S.STORED,
    (S.IDLE, E.END): S.ENDED,
    (S.STORED, E.REQUEST): S.WAITING,
    (S.STORED, E.END): S.ENDED,
}

#: Name of the scheduler's event or the method that carries out an event.
EFFECTS: Mapping[SequenceEvent, str] = {E.GRANT: "RequestsArrived", E.DISPLACE: "StatePool.launch"}


@dataclass(slots=True, eq=False)
class SequenceEntry:
    """One sequence. A new sequence waits for a slot."""

    model: str
    id: int
    #: Connection of the latest request.
    owner: int
    state: SequenceState = SequenceState.WAITING
    #: Number of the sequence's slot, or None.
    slot: int | None = None
    tensors: SequenceTensors = field(default_factory=SequenceTensors)
    #: True once an execution has made the sequence's state.
    begun: bool = False
    #: The sequence's request, waiting or with the scheduler.
    request: ev.Request | None = None
    #: Flags of `request`.
    flags: int = 0
    #: True if the sequence ends with its request, whatever the request's outcome.
    doomed: bool = False
    #: Time when the latest request ended.
    used: float = 0.0

    def advance(self, event: SequenceEvent) -> None:
        """Move to the next state of the table. Raises AssertionError if there is none."""
        state = TRANSITIONS.get((self.state, event))
        assert state is not None, f"a sequence that is {self.state} has no event {event}"
        self.state = state

    def go_on(self, request: ev.Request) -> None:
        """Set the next request of a generation after an execution. The sequence keeps its slot and is never idle."""
        self.request, self.flags, self.begun = request, 0, True

    @property
    def row(self) -> SlotRow:
        """The row of the sequence's request in an execution."""
        assert self.slot is not None
        return SlotRow(self.slot, self.tensors, self.flags & START != 0)


class RefusedStep(NamedTuple):
    """A request that ends without an execution."""

    request: int
    status: Status
    text: str


class Verdicts(NamedTuple):
    """Consequences of an event."""

    #: Requests for the scheduler.
    granted: tuple[ev.Request, ...] = ()
    refused: tuple[RefusedStep, ...] = ()
    #: Ids of requests of lost sequences. The scheduler has these requests, and must cancel them.
    cancelled: tuple[int, ...] = ()
    #: Number of sequences that ended because their state was lost or dropped.
    lost: int = 0


@dataclass(slots=True, eq=False)
class _SlotTable:
    """Sequences of one model."""

    spec: StateSpec
    #: Number of times that the model's states were lost.
    losses: int
    free: list[int]
    sequences: dict[int, SequenceEntry] = field(default_factory=dict)
    #: Idle sequences, least recently used first.
    idle: OrderedDict[int, SequenceEntry] = field(default_factory=OrderedDict)
    #: Stored sequences, least recently used first.
    stored: OrderedDict[int, SequenceEntry] = field(default_factory=OrderedDict)
    #: Waiting sequences by request, in the order of arrival.
    waiting: OrderedDict[int, SequenceEntry] = field(default_factory=OrderedDict)
    #: Heap of (deadline, request). Some of these requests do not wait any more.
    deadlines: list[tuple[float, int]] = field(default_factory=list)

    def due(self) -> float:
        """Return the time when the next sequence or waiting request expires."""
        while self.deadlines and self.deadlines[0][1] not in self.waiting:
            heappop(self.deadlines)
        due = self.deadlines[0][0] if self.deadlines else inf
        for resting in (self.idle, self.stored):
            if resting:
                due = min(due, next(iter(resting.values())).used + self.spec.idle_timeout_s)
        return due


class SequenceTable:
    """Sequences of all models with state, by the model's key."""

    def __init__(self) -> None:
        self._models: dict[str, _SlotTable] = {}
        #: True while no sequence gets a slot, because the runtime is about to end.
        self._held = False

    def __bool__(self) -> bool:
        """Return whether there is a sequence."""
        return any(model.sequences for model in self._models.values())

    def due(self, key: str | None = None) -> float:
        """Return the time when the next sequence or waiting request of a model expires. `key`: the model. None: any model."""
        models: Iterable[_SlotTable] = self._models.values() if key is None else (self._models[key],)
        return min((model.due() for model in models), default=inf)

    def count(self, model: str) -> dict[SequenceState, int]:
        """Return the number of a model's sequences in each state."""
        state = self._models.get(model)
        if state is None:
            return {}
        waiting, idle, stored = len(state.waiting), len(state.idle), len(state.stored)
        stepping = len(state.sequences) - waiting - idle - stored
        return {S.WAITING: waiting, S.IDLE: idle, S.STEPPING: stepping, S.STORED: stored}

    # --- events -------------------------------------------------------------------------------------------

    def add(self, key: str, spec: StateSpec, losses: int) -> None:
        """Add a model unless it is known. `losses`: number of times that its states were lost so far."""
        if key not in self._models:
            self._models[key] = _SlotTable(spec, losses, list(reversed(range(spec.slots))))

    def request(
        self, request: ev.Request, sequence: tuple[int, int, int], limit: int, now: float
    ) -> tuple[SequenceEntry | None, Verdicts]:
        """Handle a request. Return its sequence, or None if the request is refused.

        `sequence`: the sequence's id, the connection's id, and the flags. `limit`: maximum number of requests that wait for a
        slot.
        """
        id, owner, flags = sequence
        model = self._models[request.model]
        known = model.sequences.get(id)
        if refusal := _check(request, known, id, flags):
            return None, Verdicts(refused=(refusal,))
        if known is None and (refusal := _check_room(model, request, limit, now)):
            return None, Verdicts(refused=(refusal,))
        if known is None:
            known = model.sequences[id] = SequenceEntry(request.model, id, owner)
        else:
            model.idle.pop(id, None)
            model.stored.pop(id, None)
            known.advance(SequenceEvent.REQUEST)
            if not flags & START:
                # This request continues an existing sequence, which a pause of mode drain allows.
                request = request._replace(accepted=True)
        known.owner, known.request, known.flags = owner, request, flags
        if known.state is SequenceState.STEPPING:
            return known, Verdicts((request,))
        model.waiting[request.id] = known
        if request.deadline is not None:
            heappush(model.deadlines, (request.deadline, request.id))
        return known, Verdicts(self._grant(model))

    def done(self, sequence: SequenceEntry, *, executed: bool, now: float) -> Verdicts:
        """Handle the end of a sequence's request, which executed or ended without a change of the state."""
        model, request = self._models[sequence.model], sequence.request
        assert request is not None
        model.waiting.pop(request.id, None)
        sequence.request = None
        sequence.begun |= executed
        if sequence.doomed or not sequence.begun or (executed and sequence.flags & END):
            self._end(model, sequence)
        else:
            sequence.advance(SequenceEvent.DONE)
            sequence.used = now
            resting = model.idle if sequence.state is SequenceState.IDLE else model.stored
            resting[sequence.id] = sequence
        return Verdicts(self._grant(model))

    def expire(self, now: float) -> Verdicts:
        """End sequences that were idle for too long, and requests that waited beyond their deadline."""
        refused = list[RefusedStep]()
        for model in self._models.values():
            if model.due() > now:
                continue
            for resting in (model.idle, model.stored):
                while resting:
                    oldest = next(iter(resting.values()))
                    if oldest.used + model.spec.idle_timeout_s > now:
                        break
                    self._end(model, oldest)
            while model.deadlines and model.deadlines[0][0] <= now:
                _, id = heappop(model.deadlines)
                if model.waiting.pop(id, None) is not None:
                    text = "the deadline passed while the request waited for a sequence's slot"
                    refused.append(RefusedStep(id, Status.DEADLINE, text))
        return Verdicts(self._grant_all(), tuple(refused))

    def leave(self, owner: int) -> Verdicts:
        """End the sequences of a closed connection. A sequence with a request ends when the request ends."""
        for model in self._models.values():
            self._end_all(
                model, [sequence for sequence in model.sequences.values() if sequence.owner == owner]
            )
        return Verdicts(self._grant_all())

    def hold(self, *, held: bool) -> Verdicts:
        """If `held`, grant no slots any more. Otherwise grant slots again, first to the waiting sequences."""
        self._held = held
        return Verdicts(self._grant_all())

    def accept(self, keys: Iterable[str]) -> None:
        """Mark the requests of these models that wait for a slot as accepted.

        Call this before the pause of these models changes, so that a pause of mode drain refuses only later requests.
        """
        for model in [self._models[key] for key in keys if key in self._models]:
            for sequence in model.waiting.values():
                assert sequence.request is not None
                sequence.request = sequence.request._replace(accepted=True)

    def lose(self, key: str, losses: int) -> Verdicts:
        """If the states of a model were lost since the last call, end its sequences that have a state or a slot.

        `losses`: number of times that the states were lost so far.
        """
        model = self._models[key]
        if model.losses == losses:
            return Verdicts()
        model.losses = losses
        ended = [
            sequence for sequence in model.sequences.values() if sequence.begun or sequence.slot is not None
        ]
        ids = [sequence.request.id for sequence in ended if sequence.request is not None]
        refused = [id for id in ids if model.waiting.pop(id, None) is not None]
        self._end_all(model, ended)
        return Verdicts(
            self._grant(model),
            tuple(RefusedStep(id, Status.SEQUENCE_LOST, STATE_LOST) for id in refused),
            tuple(id for id in ids if id not in refused),
            len(ended),
        )

    def host_bytes(self, resident: Collection[str]) -> int:
        """Return the bytes of state in host memory.

        A sequence has its state in host memory if it is stored, or if it is idle and its model is not in `resident`.
        """
        return sum(len(resting) * model.spec.slot_bytes for model, resting in self._on_host(resident))

    def drop(self, excess: int, resident: Collection[str]) -> Verdicts:
        """End sequences, the longest idle first, until `excess` bytes of state in host memory are free."""
        oldest = merge(
            *(
                [(sequence.used, sequence, model) for sequence in resting.values()]
                for model, resting in self._on_host(resident)
            ),
            key=itemgetter(0),
        )
        dropped = list[tuple[_SlotTable, SequenceEntry]]()
        for _, sequence, model in oldest:
            if excess <= 0:
                break
            dropped.append((model, sequence))
            excess -= model.spec.slot_bytes
        for model, sequence in dropped:
            self._end(model, sequence)
        return Verdicts(self._grant_all(), lost=len(dropped))

    def _on_host(
        self, resident: Collection[str]
    ) -> Iterator[tuple[_SlotTable, OrderedDict[int, SequenceEntry]]]:
        for key, model in self._models.items():
            yield model, model.stored
            if key not in resident:
                yield model, model.idle

    def forget(self, key: str) -> None:
        """Drop a removed model, which has no requests any more."""
        self._models.pop(key, None)

    # --- slots --------------------------------------------------------------------------------------------

    def _grant_all(self) -> tuple[ev.Request, ...]:
        """Grant slots to the waiting sequences of all models. Return their requests."""
        return tuple(verdict for model in self._models.values() for verdict in self._grant(model))

    def _grant(self, model: _SlotTable) -> tuple[ev.Request, ...]:
        """Grant slots to a model's waiting sequences in the order of their requests. Return these requests."""
        granted = []
        while model.waiting and (slot := self._find_slot(model)) is not None:
            _, sequence = model.waiting.popitem(last=False)
            assert sequence.request is not None
            sequence.slot = slot
            sequence.advance(SequenceEvent.GRANT)
            granted.append(sequence.request)
        return tuple(granted)

    def _find_slot(self, model: _SlotTable) -> int | None:
        """Return a free slot, or the slot of the longest idle sequence, whose state then moves to the host. None: no slot."""
        if self._held:
            return None
        if model.free:
            return model.free.pop()
        if model.spec.when_full != "host" or not model.idle:
            return None
        _, displaced = model.idle.popitem(last=False)
        displaced.advance(SequenceEvent.DISPLACE)
        model.stored[displaced.id] = displaced
        slot, displaced.slot = displaced.slot, None
        return slot

    def _end_all(self, model: _SlotTable, sequences: Iterable[SequenceEntry]) -> None:
        """End sequences. A sequence with a request ends when the scheduler or the caller ends the request."""
        for sequence in sequences:
            if sequence.request is None:
                self._end(model, sequence)
            else:
                sequence.doomed = True

    def _end(self, model: _SlotTable, sequence: SequenceEntry) -> None:
        sequence.advance(SequenceEvent.END)
        sequence.tensors.live = False
        del model.sequences[sequence.id]
        model.idle.pop(sequence.id, None)
        model.stored.pop(sequence.id, None)
        if sequence.slot is not None:
            model.free.append(sequence.slot)
            sequence.slot = None


def _check(request: ev.Request, known: SequenceEntry | None, id: int, flags: int) -> RefusedStep | None:
    """Return the refusal of a request that cannot belong to its sequence, or None."""
    if not id:
        text = "this model keeps state, so each request belongs to a sequence: send its id, and start and end with it"
        return RefusedStep(request.id, Status.INVALID, text)
    if request.rows != 1:
        text = f"a request of a sequence has one row, and this one has {request.rows}"
        return RefusedStep(request.id, Status.INVALID, text)
    if known is None:
        return None if flags & START else RefusedStep(request.id, Status.SEQUENCE_LOST, LOST)
    return None if known.request is None else RefusedStep(request.id, Status.INVALID, _BUSY)


def _check_room(model: _SlotTable, request: ev.Request, limit: int, now: float) -> RefusedStep | None:
    """Return the refusal of a new sequence that gets no slot and may not wait for one, or None."""
    spec = model.spec
    if len(model.sequences) >= MAX_SEQUENCES:
        text = f"{MAX_SEQUENCES} sequences of this model are in progress; end some, or try again later"
        return RefusedStep(request.id, Status.QUEUE_FULL, text)
    if model.free or (spec.when_full == "host" and model.idle and not model.waiting):
        return None
    if spec.when_full == "refuse" or len(model.waiting) >= limit:
        after = "later"
        if model.idle:
            seconds = next(iter(model.idle.values())).used + spec.idle_timeout_s - now
            after = f"after {max(0.0, seconds):.1f} s, when an idle one may have expired"
        text = f"all {spec.slots} slots for sequences of this model are in use; retry {after}"
        return RefusedStep(request.id, Status.QUEUE_FULL, text)
    return None
