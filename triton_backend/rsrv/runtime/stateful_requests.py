"""Requests of models with state: steps of clients' sequences, and of generations. Belongs to the loop.

`sequences` decides which sequences have a slot of the device. Only requests of these sequences are passed to the scheduler.
"""

import logging
from collections.abc import Callable, Iterable
from itertools import count
from operator import attrgetter
from typing import Any

from rsrv.runtime.catalog import Catalog
from rsrv.runtime.executor import ExecutionEnded
from rsrv.runtime.generation_steps import StepMemory, StepSlice, step_memory
from rsrv.runtime.generations import End, GenerationCounts, find_problem
from rsrv.runtime.models import CompiledModel
from rsrv.runtime.sequences import STATE_LOST, SequenceEntry, SequenceState, SequenceTable, Verdicts
from rsrv.runtime.slices import PendingRequest, RequestKind, Slice
from rsrv.runtime.state_execution import SequenceSlice, StepDispatch
from rsrv.runtime.timeline import Traces
from rsrv.runtime.timers import Timers
from rsrv.runtime.transport import PeerConnection
from rsrv.runtime.unanswered import ABORTED, CANCELLED, UnansweredRequests
from rsrv.runtime.weight_manager import Outbox
from rsrv.scheduler import events as ev
from rsrv.wire.frames import START, Completion, ProtocolError, Status
from rsrv.wire.generation import read_generate

log = logging.getLogger(__name__)

_PLACE = attrgetter("place")


class StatefulRequests(RequestKind):
    """Steps of sequences and of generations."""

    def __init__(
        self,
        requests: UnansweredRequests,
        catalog: Catalog,
        traces: Traces,
        outbox: Outbox,
        clock: Callable[[], float],
        timers: Timers,
    ) -> None:
        self._requests = requests
        self._catalog = catalog
        self._traces = traces
        self._outbox = outbox
        self._clock = clock
        self._timers = timers
        self.sequences = SequenceTable()
        #: Generations in progress, by the global id of their GENERATE. `UnansweredRequests.pending` has their current steps.
        self.generations: dict[int, StepSlice] = {}
        #: Memory for the steps of each model's generations, by its key.
        self._step_memories: dict[str, StepMemory] = {}
        #: Counts of each model's generations, by its name.
        self.generation_counts: dict[str, GenerationCounts] = {}
        # These ids are negative, because the ids of connections' requests and of runs are positive.
        self._step_ids = count(-1, -1)

    # --- frames -------------------------------------------------------------------------------------------

    def submit(self, place: tuple[Any, ...], request: ev.Request, token: int, step: tuple[int, int]) -> None:
        """Handle a step of a client's sequence."""
        part = self._requests.pending[request.id] = SequenceSlice(*place)
        part.kind = self
        self._begin(part, request, step)

    def generate(self, connection: PeerConnection, document: dict[str, Any]) -> None:
        """Begin a generation, or refuse it."""
        model = self._catalog.served_by(connection)
        if model is None or (spec := model.bundle.manifest.generate) is None or model.pool is None:
            raise ProtocolError("GENERATE before REGISTERED, or of a model that does not generate")
        ask = read_generate(document)
        id = self._requests.new_id(connection, ask.request)
        if id in self.generations:
            raise ProtocolError(f"generation {ask.request} exists already, and has not ended yet")
        mark = connection.marks.pop(ask.request, None)
        if problem := find_problem(ask, spec):
            self._requests.complete(connection, Completion(ask.request, Status.INVALID, text=problem))
            return
        counts = self.generation_counts.setdefault(model.name, GenerationCounts())
        memory = self._step_memories.get(model.key)
        if memory is None:
            memory = self._step_memories[model.key] = step_memory(model)
        step = StepSlice(connection, id, ask, (model, memory, counts), self._clock(), self)
        self.generations[id] = step
        request = self._next_step(step)
        if mark is not None:
            self._traces.begin(request.id, mark, model.key)
        self._begin(step, request, (request.id, START))

    def _begin(self, part: SequenceSlice, request: ev.Request, step: tuple[int, int]) -> None:
        """Handle the request of a new or known sequence. `step`: number of the sequence, and the flags."""
        model, (sequence, flags) = self._catalog.get(request.model), step
        assert model.pool is not None
        self.sequences.add(model.key, model.pool.spec, model.pool.losses)
        named, limit = (
            (sequence, part.connection.id, flags),
            self._catalog.policy.queue_depth(model.name),
        )
        part.sequence, verdicts = self.sequences.request(request, named, limit, self._clock())
        self._apply(verdicts)
        self._timers.advance(self.expire, self.sequences.due(model.key))

    # --- the loop -----------------------------------------------------------------------------------------

    def hold_starts(self, *, held: bool) -> None:
        """If `held`, make new sequences and generations wait, perhaps for the next runtime. Otherwise let them continue."""
        self._apply(self.sequences.hold(held=held))

    def expire(self, now: float) -> float:
        """End the sequences that were idle for too long, and the requests that waited too long for a slot.

        Return the time of the next check.
        """
        self._apply(self.sequences.expire(now))
        return self.sequences.due()

    def host_bytes(self) -> int:
        """Return the bytes of sequences' state in host memory."""
        return self.sequences.host_bytes(self._catalog.resident()) if self.sequences else 0

    def drop_states(self, excess: int) -> None:
        """End the sequences that were idle the longest, until `excess` bytes of state in host memory are free."""
        if excess > 0 and self.sequences:
            dropped = self.sequences.drop(excess, self._catalog.resident())
            if dropped.lost:
                log.warning(
                    "%d idle sequences ended, because host memory for their state is short", dropped.lost
                )
            self._apply(dropped)

    def forget(self, key: str) -> None:
        """Drop all data of a removed model, which has no requests any more."""
        self.sequences.forget(key)
        self._step_memories.pop(key, None)

    def dispatch(self, execute: ev.Execute, model: CompiledModel, slices: tuple[Slice, ...]) -> StepDispatch:
        """Return an execution with the slots of its slices."""
        rows = [sequence.row for part in slices if (sequence := _sequence(part)) is not None]
        variant = model.interface.variants[execute.variant]
        return StepDispatch(execute, model, variant, slices, rows)

    # --- ends of requests ---------------------------------------------------------------------------------

    def executed(self, ended: ExecutionEnded) -> int:
        """Take the tokens of an execution, or after a failure, end the sequences that lost their state.

        Return the number of sequences that lost their state. An execution that found no memory may be retried, so its sequences
        continue if they still have their state.
        """
        dispatch, pool = ended.dispatch, ended.dispatch.model.pool
        assert pool is not None
        if ended.error is None:
            if self.generations:
                self._take_tokens(dispatch.slices)
            return 0
        for part in dispatch.slices if not ended.out_of_memory else ():
            if (sequence := _sequence(part)) is not None:
                sequence.doomed = True
        verdicts = self.sequences.lose(dispatch.model.key, pool.losses)
        self._apply(verdicts)
        return verdicts.lost

    def answered(self, part: SequenceSlice) -> bool:
        if isinstance(part, StepSlice):
            return False  # The token has already been taken.
        self._end_step(part, executed=True)
        return True

    def failed(self, part: SequenceSlice, status: Status, text: str) -> tuple[Status, str]:
        if isinstance(part, StepSlice):
            return _end_of_generation(part, status, text)
        if part.sequence is None or not part.sequence.doomed:
            return status, text
        if status is Status.CANCELLED:
            return Status.SEQUENCE_LOST, STATE_LOST
        return status, f"{text}. Its sequence has ended; start it again"

    def ended(self, part: SequenceSlice, status: Status, text: str) -> bool:
        if isinstance(part, StepSlice):
            self._end_generation(part, status, text)
            return False
        self._end_step(part, executed=False)
        return True

    def cancel(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """Cancel generations, and requests that wait for a slot. The scheduler cancels the other requests."""
        named = [self.generations[id] for id in ids if id in self.generations]
        pending = self._requests.pending
        # If a connection has ended, `ids` has the ids of the current steps instead of the ids of the generations.
        present = [part for id in ids if isinstance(part := pending.get(id), StepSlice)]
        for step in (*named, *present):
            step.generation.ending = step.generation.ending or End(Status.CANCELLED, CANCELLED)
        steps = tuple(step.id for step in named)
        for id in (*ids, *steps) if self.sequences else ():
            part = pending.get(id)
            sequence = _sequence(part)
            if sequence is not None and sequence.state is SequenceState.WAITING:
                ending = part.generation.ending if isinstance(part, StepSlice) else None
                self._requests.end(id, *(ending or (Status.CANCELLED, CANCELLED)))
        return steps

    def abort(self, tag: int) -> tuple[int, set[int]]:
        steps = [step for step in self.generations.values() if step.asked_tag == tag]
        for step in steps:
            step.generation.ending = End(Status.CANCELLED, ABORTED)
        if steps:
            present = tuple(step.id for step in steps)
            self.cancel(present)
            self._outbox.append(ev.RequestsCancelled(present))
        return len(steps), set()

    def closed(self, connection: PeerConnection) -> None:
        """End the sequences of a connection."""
        if self.sequences:
            self._apply(self.sequences.leave(connection.id))

    def _end_step(self, part: SequenceSlice, *, executed: bool) -> None:
        if part.sequence is not None:
            self._apply(self.sequences.done(part.sequence, executed=executed, now=self._clock()))
            self._timers.advance(self.expire, self.sequences.due(part.sequence.model))

    def _apply(self, verdicts: Verdicts) -> None:
        """Carry out the decisions of `sequences` about requests."""
        self._requests.arrived += verdicts.granted
        for request in verdicts.granted if self.generations else ():
            if isinstance(step := self._requests.pending[request.id], StepSlice):
                step.generation.grant()
        if verdicts.cancelled:
            self._outbox.append(ev.RequestsCancelled(verdicts.cancelled))
        for id, status, text in verdicts.refused:
            self._requests.end(id, status, text)

    # --- steps of generations -----------------------------------------------------------------------------

    def _next_step(self, step: StepSlice) -> ev.Request:
        others_wait = any(pending is not step for pending in self._requests.pending.values())
        request = step.next_request(next(self._step_ids), others_wait=others_wait)
        self._requests.pending[request.id] = step
        return request

    def _take_tokens(self, slices: Iterable[Slice]) -> None:
        """Send the tokens of an execution. Then submit the next step of each generation, or end the generation.

        All next steps are submitted together, so that they share an execution.
        """
        now = self._clock()
        # Use the order of the steps' memory, so that the next execution copies neighbours at once.
        for step in sorted((part for part in slices if isinstance(part, StepSlice)), key=_PLACE):
            sequence, token = step.sequence, step.token
            assert sequence is not None
            is_sent, end = step.generation.step(token, now)
            if is_sent and not step.connection.closed:
                step.connection.tokens.append((step.request, token))
                self._requests.answering.add(step.connection)
            if end is None and sequence.doomed:
                end = End(Status.SEQUENCE_LOST, STATE_LOST)
            if end is None:
                request = self._next_step(step)
                sequence.go_on(request)
                self._requests.arrived.append(request)
            else:
                self._end_generation(step, *end)

    def _end_generation(self, step: StepSlice, status: Status, text: str) -> None:
        del self.generations[step.number]
        step.end()
        if step.sequence is not None:
            step.sequence.doomed = True
        self._end_step(step, executed=True)
        self._requests.complete(step.connection, Completion(step.request, status, text=text))


def _sequence(part: PendingRequest | None) -> SequenceEntry | None:
    return part.sequence if isinstance(part, SequenceSlice) else None


def _end_of_generation(step: StepSlice, status: Status, text: str) -> tuple[Status, str]:
    """Return the status and the text of a generation if one of its steps ended without an execution."""
    generation = step.generation
    if generation.ending is not None:
        return generation.ending
    if status is Status.CANCELLED:
        return Status.SEQUENCE_LOST, STATE_LOST
    if status is Status.DEADLINE and generation.sent:
        return status, f"the deadline passed; {generation.sent} tokens of the answer were sent before"
    return status, text
