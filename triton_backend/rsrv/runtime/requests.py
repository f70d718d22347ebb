"""Unanswered requests of connections: inferences, calls of meta models, runs that wait for admission, generations.

Belongs to the loop. Frames become the scheduler's requests here, and the scheduler's decisions become answers.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from math import inf
from operator import attrgetter
from typing import Any

from rsrv.runtime.catalog import Catalog
from rsrv.runtime.executor import CallSlice, ExecutionEnded, RequestSlice, Slice
from rsrv.runtime.generation_steps import StepMemory, StepSlice, step_memory
from rsrv.runtime.generations import End, GenerationCounts, find_problem
from rsrv.runtime.runs import MetaRun, Runs, find_sources, find_targets
from rsrv.runtime.sequences import STATE_LOST, SequenceEntry, SequenceState, SequenceTable, Verdicts
from rsrv.runtime.state_pool import SlotRow
from rsrv.runtime.timeline import Traces
from rsrv.runtime.transport import PeerConnection, Transport
from rsrv.runtime.weight_manager import Outbox, WeightManager
from rsrv.scheduler import events as ev
from rsrv.wire.calls import Call, Entrance
from rsrv.wire.frames import ALONE, END, START, WAITED, Completion, ProtocolError, Status
from rsrv.wire.generation import read_generate
from rsrv.wire.layout import ALIGNMENT

log = logging.getLogger("rsrv.state")

#: a connection's own request ids stay below this, so that (connection, id) makes one number
_ID_BITS = 40
_FLAGS = ALONE | WAITED | START | END
#: characters of a request's number
_MAX_NUMBER = 32
_NO_RUN = "the meta model's run that this call belongs to is over, or never was"
_PLACE = attrgetter("place")
_ABORTED = "the request was aborted"
_CANCELLED = "the request was cancelled"


class Requests:
    """All requests by global id, and the completions that are not sent yet."""

    def __init__(
        self,
        catalog: Catalog,
        weights: WeightManager,
        transport: Transport,
        traces: Traces,
        outbox: Outbox,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._catalog = catalog
        self._weights = weights
        self._transport = transport
        self._traces = traces
        self._outbox = outbox
        self._clock = clock
        #: by global id; runs by that of their ENTER
        self.pending: dict[int, Slice | MetaRun] = {}
        #: requests that the scheduler does not know yet
        self.arrived: list[ev.Request] = []
        #: connections with completions to send
        self.answering: set[PeerConnection] = set()
        self.runs = Runs()
        self.sequences = SequenceTable()
        #: generations in progress, by the global id of their GENERATE; `pending` has each one's present step
        self.generations: dict[int, StepSlice] = {}
        #: by the model's key
        self._step_memories: dict[str, StepMemory] = {}
        #: by the model's name
        self.generation_counts: dict[str, GenerationCounts] = {}
        # Negative: ids of connections' requests and of runs are positive.
        self._step_ids = count(-1, -1)

    # --- frames -------------------------------------------------------------------------------------------

    def submit(self, connection: PeerConnection, submissions: Iterable[tuple[int, ...]]) -> None:
        model = self._catalog.served_by(connection)
        if model is None:
            raise ProtocolError("SUBMIT before REGISTERED")
        key, interface, pool = model.key, model.interface, model.pool
        variants, longest = interface.variants, interface.longest
        if pool is not None:
            self.sequences.add(key, pool.spec, pool.losses)
        pending, base = self.pending, connection.id << _ID_BITS
        for submission in submissions:
            (
                request, deadline_ns, rows, index, priority,
                segment_id, flags, inputs_at, outputs_at, token, tag, sequence, length,
            ) = submission  # fmt: skip
            if index >= len(variants):
                raise ProtocolError(f"SUBMIT for variant {index} of {len(variants)}")
            segment = connection.segments.get(segment_id)
            if segment is None:
                raise ProtocolError(f"SUBMIT in unknown segment {segment_id}")
            variant, size = variants[index], len(segment)
            if longest or length:
                if not 0 < length <= longest:
                    raise ProtocolError(f"SUBMIT of length {length}, of 1 to {longest}")
                index, variant = interface.at_length(length)
            if (
                (inputs_at | outputs_at) % ALIGNMENT
                or inputs_at + variant.inputs.places(rows)[1] > size
                or outputs_at + variant.outputs.places(rows)[1] > size
            ):
                raise ProtocolError("SUBMIT outside its segment, or not aligned")
            if flags > _FLAGS or (pool is None and flags > ALONE | WAITED):
                raise ProtocolError(f"SUBMIT with unknown flags {flags}")
            id = base | request
            if request >> _ID_BITS or id in pending:
                self._new_id(connection, request)  # raises
            deadline = deadline_ns / 1e9 if deadline_ns else None
            run = None
            # First: if the request is refused below, the mark must not stay.
            mark = connection.marks.pop(request, None) if connection.marks else None
            pending[id] = part = RequestSlice(
                connection, request, rows, segment, inputs_at, outputs_at, tag=tag
            )
            if length:
                part.shapes = variant
            if token:
                run = part.run = self.runs.find(token, model.name)
                if run is None:
                    self._end_request(id, Status.NOT_FOUND, _NO_RUN)
                    continue
                if run.aborted:
                    self._end_request(id, Status.CANCELLED, _ABORTED)
                    continue
                deadline = run.deadline if deadline is None else min(deadline, run.deadline or inf)
                tag = tag or run.tag
            run_id, exclusive, accepted = (
                0 if run is None else run.id,
                flags & ALONE != 0,
                flags & WAITED != 0,
            )
            whole = sequence if pool is None else 0
            asked = ev.Request(
                id, key, index, rows, deadline, priority, run_id, exclusive, accepted, tag, None, whole
            )
            if mark is not None:
                self._traces.begin(id, mark, key)
            if pool is None:
                self.arrived.append(asked)
            else:
                named, limit = (sequence, connection.id, flags), self._catalog.policy.queue_depth(model.name)
                part.sequence, verdicts = self.sequences.request(asked, named, limit, self._clock())
                self._apply(verdicts)

    def generate(self, connection: PeerConnection, wanted: dict[str, Any]) -> None:
        """Begin a generation, or refuse it."""
        model = self._catalog.served_by(connection)
        if model is None or (spec := model.bundle.manifest.generate) is None or model.pool is None:
            raise ProtocolError("GENERATE before REGISTERED, or of a model that does not generate")
        ask = read_generate(wanted)
        id = self._new_id(connection, ask.request)
        mark = connection.marks.pop(ask.request, None)
        if problem := find_problem(ask, spec):
            self._complete(connection, Completion(ask.request, Status.INVALID, text=problem))
            return
        counts = self.generation_counts.setdefault(model.name, GenerationCounts())
        memory = self._step_memories.get(model.key)
        if memory is None:
            memory = self._step_memories[model.key] = step_memory(model)
        step = self.generations[id] = StepSlice(connection, id, ask, (model, memory, counts), self._clock())
        request = self._next_step(step)
        if mark is not None:
            self._traces.begin(request.id, mark, model.key)
        self.sequences.add(model.key, model.pool.spec, model.pool.losses)
        named, limit = (request.id, connection.id, START), self._catalog.policy.queue_depth(model.name)
        step.sequence, verdicts = self.sequences.request(request, named, limit, self._clock())
        self._apply(verdicts)

    def cancel(self, connection: PeerConnection, requests: Iterable[int]) -> None:
        ids = tuple(_global_id(connection, id) for id in requests)
        for id in ids:
            waiting = self.pending.get(id)
            if isinstance(waiting, MetaRun):
                self._end_run(waiting, Status.CANCELLED)
        self._cancel((*ids, *self._doom(self.generations[id] for id in ids if id in self.generations)))

    def enter(self, connection: PeerConnection, entrances: Sequence[Entrance]) -> None:
        group = connection.group
        if group is None or not self._catalog.ready(group):
            raise ProtocolError("ENTER before REGISTERED")
        limit = self._catalog.policy.queue_depth(group.name)
        asked = []
        for entrance in entrances:
            id = self._new_id(connection, entrance.request)
            run = self.pending[id] = self.runs.enter(connection, group, entrance, id)
            asked.append(ev.Run(run.id, group.name, run.deadline, run.priority, limit, group.models))
        self._outbox.append(ev.RunsAsked(tuple(asked)))

    def call(self, connection: PeerConnection, call: Call) -> None:
        mark = connection.marks.pop(call.request, None)
        run = self.runs.of(connection, call.run)
        if run is None:
            # The run was not admitted, and its stub has been told.
            self._complete(connection, Completion(call.request, Status.NOT_FOUND, text=_NO_RUN))
            return
        if run.aborted:
            self._complete(connection, Completion(call.request, Status.CANCELLED, text=_ABORTED))
            return
        if call.callee >= len(run.group.models):
            raise ProtocolError(f"CALL of model {call.callee} of {len(run.group.models)}")
        model = self._catalog.get(run.group.models[call.callee])
        if call.variant >= len(model.interface.variants):
            raise ProtocolError(f"CALL for variant {call.variant} of {len(model.interface.variants)}")
        if call.flags > ALONE:
            raise ProtocolError(f"CALL with unknown flags {call.flags}")
        if model.interface.longest:
            raise ProtocolError(f"CALL of {model.name}, which has a padded axis")
        variant = model.interface.variants[call.variant]
        sources = find_sources(run, connection, call, variant.inputs)
        targets, keep = find_targets(run, connection, call, variant.outputs)
        id = self._new_id(connection, call.request)
        self.pending[id] = CallSlice(connection, call.request, call.rows, run, sources, targets, keep)
        if keep:
            promised = {
                number: variant.outputs.tensors[index].nbytes(call.rows) for index, number in keep.items()
            }
            held, more, limit = self.runs.kept_bytes, sum(promised.values()), self._weights.kept_limit
            if limit is not None and held + more > limit:
                text = (
                    f"running meta models keep {held} bytes on the device, the limit is {limit}, and this call would "
                    f"keep {more} more; try again later, or keep less at a time"
                )
                self._end_request(id, Status.QUEUE_FULL, text)
                return
            run.promised |= promised
        request = ev.Request(
            id,
            model.key,
            call.variant,
            call.rows,
            run.deadline,
            run.priority,
            run.id,
            call.flags != 0,
            tag=run.tag,
        )
        if run.admitted:
            self.arrived.append(request)
        else:
            try:
                self.runs.hold(run, request)
            except ProtocolError:
                del self.pending[id]
                raise
        if mark is not None:
            self._traces.begin(id, mark, model.key)

    def leave(self, connection: PeerConnection, token: int, status: Status) -> None:
        """End a run."""
        run = self.runs.of(connection, token)
        if run is not None:
            self._end_run(run, status)

    def release(self, connection: PeerConnection, token: int, number: int) -> None:
        """Free one tensor that a run keeps on the device."""
        run = self.runs.of(connection, token)
        if run is not None:
            run.kept.pop(number, None)

    def closed(self, connection: PeerConnection) -> None:
        """Cancel the requests of a closed connection, and end its runs and sequences."""
        gone = tuple(id for id, part in self.pending.items() if part.connection is connection)
        self._doom(step for step in self.generations.values() if step.connection is connection)
        if gone:
            self._cancel(gone)
        if self.sequences:
            self._apply(self.sequences.leave(connection.id))
        for run in self.runs.entered_on(connection) if self.runs else ():
            self._end_run(run, Status.CANCELLED)

    def abort(self, tag: int) -> tuple[int, set[int], set[int]]:
        """Abort the requests, runs and generations with this tag.

        Returns the number of aborted runs and generations, the ids of requests with the tag, and these with the runs' sub-calls. All
        of them end when the scheduler has taken in the event, except those that execute: these are answered as usual,
        but their run gets no further.
        """
        if not tag:
            return 0, set(), set()
        runs = [run for run in self.runs if run.tag == tag and not run.aborted]
        for run in runs:
            if run.admitted:
                run.aborted = True  # its stub learns it with its next call
            else:
                self._end_run(run, Status.CANCELLED, _ABORTED)
        mine = {
            id: part
            for id, part in self.pending.items()
            if not isinstance(part, MetaRun)
            and (_tag(part) == tag or (part.run is not None and part.run in runs))
        }
        own = {id for id, part in mine.items() if _tag(part) == tag}
        steps = self._doom([step for step in self.generations.values() if step.asked_tag == tag], _ABORTED)
        self._cancel((*mine, *steps))
        return len(runs) + len(steps), own, set(mine)

    # --- decisions of the scheduler -----------------------------------------------------------------------

    def forget(self, key: str) -> None:
        """Drop what belongs to a model that is gone; no request of it is left."""
        self.sequences.forget(key)
        self._step_memories.pop(key, None)

    def take_arrived(self) -> tuple[ev.Request, ...]:
        """Hand over all requests that the scheduler does not know yet."""
        arrived, self.arrived = tuple(self.arrived), []
        return arrived

    def slices(self, ids: Iterable[int]) -> tuple[Slice, ...]:
        """Return the requests of an execution: no runs."""
        pending: dict[int, Slice] = self.pending  # type: ignore[assignment]
        return tuple([pending[id] for id in ids])

    def slots(self, slices: Iterable[Slice]) -> tuple[SlotRow, ...]:
        """Return the slots of an execution of a model with state."""
        return tuple([one.row for one in map(_sequence, slices) if one is not None])

    def hold_starts(self, *, held: bool) -> None:
        """Have sequences and generations that begin wait, perhaps for the next runtime, or go on."""
        self._apply(self.sequences.hold(held=held))

    def expire(self) -> None:
        """End the sequences that were idle for too long, and the requests that waited too long for a slot."""
        self._apply(self.sequences.expire(self._clock()))

    def host_bytes(self) -> int:
        """Return the bytes of sequences' state in host memory."""
        return self.sequences.host_bytes(self._catalog.resident()) if self.sequences else 0

    def drop_states(self, excess: int) -> None:
        """End sequences that were idle the longest, with so many bytes of state in host memory."""
        if excess > 0 and self.sequences:
            dropped = self.sequences.drop(excess, self._catalog.resident())
            if dropped.lost:
                log.warning(
                    "%d idle sequences ended, because host memory for their state is short", dropped.lost
                )
            self._apply(dropped)

    def executed(self, ended: ExecutionEnded) -> int:
        """Account for the sub-calls and sequences of an execution, which may still have another try.

        Returns the number of sequences whose state it has lost.
        """
        lost = 0
        dispatch, pool = ended.dispatch, ended.dispatch.model.pool
        if pool is not None and ended.error is not None:
            for one in map(_sequence, dispatch.slices) if not ended.out_of_memory else ():
                if one is not None:
                    one.doomed = True
            verdicts = self.sequences.lose(dispatch.model.key, pool.losses)
            lost = verdicts.lost
            self._apply(verdicts)
        if self.generations and ended.error is None:
            self._take_tokens(dispatch.slices)
        for part in dispatch.slices if self.runs else ():
            if part.run is not None:
                part.run.account(ended.seconds * part.rows / max(1, dispatch.execute.rows))
            if isinstance(part, CallSlice):
                part.settle(succeeded=ended.error is None)
        return lost

    def answer(self, finish: ev.Finish, ended: ExecutionEnded) -> None:
        """Complete a request whose execution succeeded."""
        part = self.pending.pop(finish.request)
        if isinstance(part, StepSlice):
            return  # its token has been taken
        if (sequence := _sequence(part)) is not None:
            self._apply(self.sequences.done(sequence, executed=True, now=self._clock()))
        execute, took_ns = ended.dispatch.execute, int(ended.seconds * 1e9)
        completion = Completion(part.request, Status.OK, execute.size, execute.rows, took_ns)
        self._complete(part.connection, completion)

    def fail(self, finish: ev.Finish) -> None:
        """Complete a request that was not answered, or a run that was not admitted."""
        status, text = _failure(finish)
        run = self.runs.get(finish.request)
        if run is not None:
            self.runs.remove(run, status)
            self._refuse_entry(run, status, text)
        elif finish.request in self.pending:  # else a run that has left meanwhile
            part = self.pending[finish.request]
            sequence = _sequence(part)
            if isinstance(part, StepSlice):
                status, text = _end_of_generation(part, status, text)
            elif sequence is not None and sequence.doomed:
                status, text = _doomed(status, text)
            self._end_request(finish.request, status, text)

    def admit(self, instruction: ev.Admit) -> None:
        """Begin a run: its ENTER is answered, and the calls that have waited arrive."""
        run = self.runs.get(instruction.run)
        if run is None:
            return  # it has left meanwhile
        run.admitted = True
        self._end_request(run.enter_id, Status.OK, "")
        self.arrived += run.held
        run.held = []

    # --- steps of generations -----------------------------------------------------------------------------

    def _next_step(self, step: StepSlice) -> ev.Request:
        others_wait = any(other is not step for other in self.pending.values())
        request = step.next_request(next(self._step_ids), others_wait=others_wait)
        self.pending[request.id] = step
        return request

    def _take_tokens(self, slices: Iterable[Slice]) -> None:
        """Send the tokens of an execution; hand over the next steps, so that they share the next one, or end."""
        now = self._clock()
        # In the order of their memory, which the next execution copies at once.
        for step in sorted((one for one in slices if isinstance(one, StepSlice)), key=_PLACE):
            sequence, token = step.sequence, step.token
            assert sequence is not None
            is_sent, end = step.generation.step(token, now)
            if is_sent and not step.connection.closed:
                step.connection.tokens.append((step.request, token))
                self.answering.add(step.connection)
            if end is None and sequence.doomed:
                end = End(Status.SEQUENCE_LOST, STATE_LOST)
            if end is None:
                request = self._next_step(step)
                sequence.go_on(request)
                self.arrived.append(request)
            else:
                self._end_generation(step, *end)

    def _doom(self, steps: Iterable[StepSlice], text: str = _CANCELLED) -> list[int]:
        """Have generations end with their present steps; return the ids of these."""
        doomed = list(steps)
        for step in doomed:
            step.generation.ending = End(Status.CANCELLED, text)
        return [step.id for step in doomed]

    def _end_generation(self, step: StepSlice, status: Status, text: str) -> None:
        del self.generations[step.number]
        step.end()
        if step.sequence is not None:
            step.sequence.doomed = True
            self._apply(self.sequences.done(step.sequence, executed=True, now=self._clock()))
        self._complete(step.connection, Completion(step.request, status, text=text))

    # --- answers ------------------------------------------------------------------------------------------

    def send_answers(self) -> None:
        """Send all completions."""
        answering, self.answering = self.answering, set()
        for connection in answering:
            self._transport.guard(connection, connection.send_completions)

    def _end_run(self, run: MetaRun, status: Status, text: str = _CANCELLED) -> None:
        """End a run; `text` is for one that waits for its admission."""
        self.runs.remove(run, status)
        if not run.admitted:
            self._refuse_entry(run, Status.CANCELLED, text)
        self._outbox.append(ev.RunEnded(run.id))

    def _refuse_entry(self, run: MetaRun, status: Status, text: str) -> None:
        """Answer the ENTER of a run that is not admitted, and all calls that have waited for its admission."""
        for id in (run.enter_id, *(request.id for request in run.held)):
            self._end_request(id, status, text)

    def _end_request(self, id: int, status: Status, text: str) -> None:
        """Complete a request without an execution, or an ENTER."""
        part = self.pending.pop(id)
        self._traces.live.pop(id, None)  # the scheduler may never have known it
        if isinstance(part, CallSlice):
            part.end_promises()
        if isinstance(part, StepSlice):
            self._end_generation(part, status, text)
            return
        if (sequence := _sequence(part)) is not None:
            self._apply(self.sequences.done(sequence, executed=False, now=self._clock()))
        self._complete(part.connection, Completion(part.request, status, text=text))

    def _cancel(self, ids: tuple[int, ...]) -> None:
        """Cancel requests: the scheduler's, and those that wait for a slot."""
        for id in ids if self.sequences else ():
            sequence = _sequence(self.pending.get(id))
            if sequence is not None and sequence.state is SequenceState.WAITING:
                part = self.pending[id]
                ending = part.generation.ending if isinstance(part, StepSlice) else None
                self._end_request(id, *(ending or (Status.CANCELLED, _CANCELLED)))
        self._outbox.append(ev.RequestsCancelled(ids))

    def _apply(self, verdicts: Verdicts) -> None:
        """Carry out what has become of requests of sequences."""
        self.arrived += verdicts.granted
        for request in verdicts.granted if self.generations else ():
            if isinstance(step := self.pending[request.id], StepSlice):
                step.generation.grant()
        if verdicts.cancelled:
            self._outbox.append(ev.RequestsCancelled(verdicts.cancelled))
        for id, status, text in verdicts.refused:
            self._end_request(id, status, text)

    def _complete(self, connection: PeerConnection, completion: Completion) -> None:
        if not connection.closed:
            connection.completions.append(completion)
            self.answering.add(connection)

    def _new_id(self, connection: PeerConnection, request: int) -> int:
        id = _global_id(connection, request)
        if id in self.pending or id in self.generations:
            raise ProtocolError(f"request {request} is there already, and not answered yet")
        return id


def request_number(id: int) -> str:
    """Return the number by which operators name a request: its connection's, and its own there; or a generation's step."""
    return f"step.{-id}" if id < 0 else f"{id >> _ID_BITS}.{own_number(id)}"


def own_number(id: int) -> int:
    """Return the number that the connection of a request gave it."""
    return id & (1 << _ID_BITS) - 1


def parse_number(text: str) -> int | None:
    """Return the global id that `request_number` names; None if the text is no such number."""
    connection, _, request = text.partition(".")
    if len(text) > _MAX_NUMBER or not (text.isascii() and request.isdigit()):
        return None
    if connection == "step":
        return -int(request)
    return int(connection) << _ID_BITS | int(request) if connection.isdigit() else None


def _global_id(connection: PeerConnection, id: int) -> int:
    if id >> _ID_BITS:
        raise ProtocolError(f"request id {id} has more than {_ID_BITS} bits")
    return connection.id << _ID_BITS | id


def _sequence(part: Slice | MetaRun | None) -> SequenceEntry | None:
    return part.sequence if isinstance(part, RequestSlice) else None


def _doomed(status: Status, text: str) -> tuple[Status, str]:
    """Return status and text of a request with which its sequence ends against its will."""
    if status is Status.CANCELLED:
        return Status.SEQUENCE_LOST, STATE_LOST
    return status, f"{text}. Its sequence has ended; start it again"


def _end_of_generation(step: StepSlice, status: Status, text: str) -> tuple[Status, str]:
    """Return how a generation ends, of which a step ended without an execution."""
    generation = step.generation
    if generation.ending is not None:
        return generation.ending
    if status is Status.CANCELLED:
        return Status.SEQUENCE_LOST, STATE_LOST
    if status is Status.DEADLINE and generation.sent:
        return status, f"the deadline passed; {generation.sent} tokens of the answer were sent before"
    return status, text


def _tag(part: Slice) -> int:
    return part.tag if isinstance(part, RequestSlice) else 0


def _failure(finish: ev.Finish) -> tuple[Status, str]:
    """Return a request's status and the text for its client, without paths or tracebacks."""
    match finish.outcome:
        case ev.Outcome.EXPIRED:
            return Status.DEADLINE, "the deadline passed before the model could run"
        case ev.Outcome.SHED:
            return Status.DEADLINE, "the deadline cannot be met any more"
        case ev.Outcome.CANCELLED:
            return Status.CANCELLED, _CANCELLED
        case ev.Outcome.FAILED if finish.reason is ev.Reason.NOT_LOADED:
            text = f"the model's weights could not be loaded: {finish.error}; send the request again after {finish.retry_after:.1f} s"
            return Status.INTERNAL, text
        case ev.Outcome.FAILED:
            return Status.INTERNAL, "the model failed to execute; the server's log says why"
    match finish.reason:
        case ev.Reason.QUEUE_FULL:
            after = "later" if finish.retry_after is None else f"after {finish.retry_after * 1e3:.0f} ms"
            return Status.QUEUE_FULL, f"too many requests wait for this model; retry {after}"
        case ev.Reason.NO_MEMORY:
            text = f"the device has no memory for this model's weights; they are tried again in {finish.retry_after:.1f} s"
            return Status.QUEUE_FULL, text
        case ev.Reason.TOO_MANY_ROWS:
            return Status.INVALID, "the request has more rows than the model's largest batch"
        case ev.Reason.UNKNOWN_VARIANT:
            return Status.INVALID, "no module is compiled for this input shape"
        case ev.Reason.PAUSED:
            return Status.PAUSED, "the model is paused; try again when an operator lets it go on"
        case ev.Reason.NOT_RESIDENT:
            text = "its weights are not on the device; the control plane must bring them there first"
            return Status.NOT_RESIDENT, text
        case _:
            return Status.NOT_FOUND, "the model is not loaded"
