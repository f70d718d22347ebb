"""What connections asked for and is not answered yet: requests, calls of meta models, and runs that want to be let in.

Belongs to the loop. Frames become the scheduler's requests here, and what the scheduler says of them becomes answers.
"""

from collections.abc import Callable, Iterable, Sequence
from math import inf

from rsrv.runtime.executor import AnySlice, CallSlice, Job, RequestSlice
from rsrv.runtime.registry import Registry
from rsrv.runtime.runs import Run, Runs, find_sources, find_targets
from rsrv.runtime.timeline import Traces
from rsrv.runtime.transport import Connection, Transport
from rsrv.scheduler import events as ev
from rsrv.wire.calls import Call, Entrance
from rsrv.wire.frames import Completion, ProtocolError, Status
from rsrv.wire.layout import ALIGNMENT

#: a connection's own request ids stay below this, so that (connection, id) makes one number
_ID_BITS = 40
_NO_RUN = "the meta model's run that this call belongs to is over, or never was"
_ABORTED = "the request was aborted"


class Requests:
    """`feed` takes the scheduler's events, after all that has arrived before."""

    def __init__(
        self,
        registry: Registry,
        transport: Transport,
        feed: Callable[[ev.Event], None],
        traces: Traces,
    ) -> None:
        self._registry = registry
        self._catalog = registry.catalog
        self._transport = transport
        self._feed = feed
        self._traces = traces
        #: by global id; runs by that of their ENTER
        self._pending: dict[int, AnySlice | Run] = {}
        self._arrived: list[ev.Request] = []
        self._answering: set[Connection] = set()
        self.runs = Runs(feed, self._arrived_later, self._done)

    def __len__(self) -> int:
        return len(self._pending)

    # --- what connections want ----------------------------------------------------------------------------

    def submit(self, connection: Connection, submissions: Iterable[tuple[int, ...]]) -> None:
        model = self._registry.find(connection)
        if model is None:
            raise ProtocolError("SUBMIT before REGISTERED")
        key, variants = model.key, model.interface.variants
        for submission in submissions:
            request, deadline_ns, rows, index, priority, segment_id, inputs_at, outputs_at, token, tag = (
                submission
            )
            if index >= len(variants):
                raise ProtocolError(f"SUBMIT for variant {index} of {len(variants)}")
            segment = connection.segments.get(segment_id)
            if segment is None:
                raise ProtocolError(f"SUBMIT in unknown segment {segment_id}")
            variant, size = variants[index], len(segment)
            if (
                (inputs_at | outputs_at) % ALIGNMENT
                or inputs_at + variant.inputs.places(rows)[1] > size
                or outputs_at + variant.outputs.places(rows)[1] > size
            ):
                raise ProtocolError("SUBMIT outside its segment, or not aligned")
            id = self._new_id(connection, request)
            deadline = deadline_ns / 1e9 if deadline_ns else None
            run = None
            # Now: if it is refused below, the mark would stay.
            mark = connection.marks.pop(request, None) if connection.marks else None
            self._pending[id] = part = RequestSlice(
                connection, request, rows, segment, inputs_at, outputs_at, tag=tag
            )
            if token:
                run = part.run = self.runs.find(token, model.name)
                if run is None:
                    self._done(id, Status.NOT_FOUND, _NO_RUN)
                    continue
                if run.aborted:
                    self._done(id, Status.CANCELLED, _ABORTED)
                    continue
                deadline = run.deadline if deadline is None else min(deadline, run.deadline or inf)
            self._arrived.append(
                ev.Request(id, key, index, rows, deadline, priority, 0 if run is None else run.id)
            )
            if mark is not None:
                self._traces.begin(id, mark, key)

    def cancel(self, connection: Connection, requests: Iterable[int]) -> None:
        ids = tuple(_global_id(connection, id) for id in requests)
        for id in ids:
            waiting = self._pending.get(id)
            if isinstance(waiting, Run):
                self.runs.leave(waiting, Status.CANCELLED)
        self._feed(ev.RequestsCancelled(ids))

    def enter(self, connection: Connection, entrances: Sequence[Entrance]) -> None:
        group = connection.group
        if group is None or not self._catalog.ready(group):
            raise ProtocolError("ENTER before REGISTERED")
        limit = self._catalog.policy.queue_depth(group.name)
        asked = []
        for entrance in entrances:
            asking = self._new_id(connection, entrance.request)
            run = self._pending[asking] = self.runs.enter(connection, group, entrance, asking)
            asked.append(ev.Run(run.id, group.name, run.deadline, run.priority, limit, group.models))
        self._feed(ev.RunsAsked(tuple(asked)))

    def call(self, connection: Connection, call: Call) -> None:
        mark = connection.marks.pop(call.request, None) if connection.marks else None
        run = self.runs.of(connection, call.run)
        if run is None:
            # It was not let in, which its stub has been told by now.
            self._answer_with(connection, Completion(call.request, Status.NOT_FOUND, text=_NO_RUN))
            return
        if run.aborted:
            self._answer_with(connection, Completion(call.request, Status.CANCELLED, text=_ABORTED))
            return
        if call.callee >= len(run.group.models):
            raise ProtocolError(f"CALL of model {call.callee} of {len(run.group.models)}")
        model = self._catalog.get(run.group.models[call.callee])
        if call.variant >= len(model.interface.variants):
            raise ProtocolError(f"CALL for variant {call.variant} of {len(model.interface.variants)}")
        variant = model.interface.variants[call.variant]
        sources = find_sources(run, connection, call, variant.inputs)
        targets, keep = find_targets(run, connection, call, variant.outputs)
        id = self._new_id(connection, call.request)
        self._pending[id] = CallSlice(connection, call.request, call.rows, run, sources, targets, keep)
        limit = self._registry.placement.kept_limit
        if keep:
            promised = {
                number: variant.outputs.tensors[index].nbytes(call.rows) for index, number in keep.items()
            }
            held, more = self.runs.kept_bytes, sum(promised.values())
            if limit is not None and held + more > limit:
                text = (
                    f"running meta models keep {held} bytes on the device, {limit} may be, and {more} more are "
                    "wanted; try again later, or keep less at a time"
                )
                self._done(id, Status.QUEUE_FULL, text)
                return
            run.promised |= promised
        request = ev.Request(id, model.key, call.variant, call.rows, run.deadline, run.priority, run.id)
        try:
            self.runs.call(run, request)
        except ProtocolError:
            del self._pending[id]
            raise
        if mark is not None:
            self._traces.begin(id, mark, model.key)

    def leave(self, connection: Connection, token: int, status: Status) -> None:
        """A run is over."""
        run = self.runs.of(connection, token)
        if run is not None:
            self.runs.leave(run, status)

    def release(self, connection: Connection, token: int, number: int) -> None:
        """A run needs one tensor on the device no longer."""
        run = self.runs.of(connection, token)
        if run is not None:
            run.kept.pop(number, None)

    def closed(self, connection: Connection) -> None:
        """A connection ended: nobody waits for what it asked."""
        gone = tuple(id for id, part in self._pending.items() if part.connection is connection)
        if gone:
            self._feed(ev.RequestsCancelled(gone))
        if self.runs:
            self.runs.closed(connection)

    def abort(self, tag: int) -> tuple[int, int]:
        """End what has this tag: how many requests and runs ended, and how many that execute cannot be stopped.

        The latter are answered as if nobody had asked, but what belongs to a run gets no further than that.
        """
        if not tag:
            return 0, 0
        runs = [run for run in self.runs if run.tag == tag and not run.aborted]
        for run in runs:
            if run.admitted:
                run.aborted = True  # its stub learns it with its next call
            else:
                self.runs.leave(run, Status.CANCELLED, _ABORTED)
        mine = {
            id: part
            for id, part in self._pending.items()
            if not isinstance(part, Run)
            and (_tag(part) == tag or (part.run is not None and part.run in runs))
        }
        self._feed(ev.RequestsCancelled(tuple(mine)))
        executing = mine.keys() & self._pending.keys()
        own = sum(_tag(part) == tag for id, part in mine.items() if id not in executing)
        return len(runs) + own, len(executing)

    # --- what the scheduler is told, and says ---------------------------------------------------------------

    def _arrived_later(self, request: ev.Request) -> None:
        """A sub-call of a run that is let in now."""
        self._arrived.append(request)

    def take_arrived(self) -> tuple[ev.Request, ...]:
        """All that the scheduler does not know yet."""
        if not self._arrived:
            return ()
        arrived, self._arrived = tuple(self._arrived), []
        return arrived

    def parts(self, ids: Iterable[int]) -> tuple[AnySlice, ...]:
        """What the scheduler wants executed: no runs."""
        pending: dict[int, AnySlice] = self._pending  # type: ignore[assignment]
        return tuple([pending[id] for id in ids])

    def executed(self, job: Job, seconds: float, *, well: bool) -> None:
        """An execution ended, which is not the end of its requests if there is another try."""
        for part in job.parts if self.runs else ():
            if part.run is not None:
                part.run.account(seconds * part.rows / max(1, job.rows))
            if isinstance(part, CallSlice):
                part.settle(well=well)

    def finish(self, finish: ev.Finish, job: Job | None, seconds: float) -> None:
        """A request is over, with the execution of `job`, or a run is not let in."""
        if finish.outcome is ev.Outcome.ANSWERED:
            assert job is not None
            part = self._pending.pop(finish.request)
            self._answer_with(
                part.connection, Completion(part.request, Status.OK, job.size, job.rows, int(seconds * 1e9))
            )
            return
        status, text = _failure(finish)
        run = self.runs.get(finish.request)
        if run is not None:
            self.runs.refuse(run, status, text)
        else:
            self._done(finish.request, status, text)

    # --- answers ------------------------------------------------------------------------------------------

    @property
    def has_answers(self) -> bool:
        """Whether there is something to send."""
        return bool(self._answering)

    def answer(self) -> None:
        """Send all completions that there are."""
        if self._answering:
            answering, self._answering = self._answering, set()
            for connection in answering:
                self._transport.guard(connection, connection.send_completions)

    def _done(self, id: int, status: Status, text: str) -> None:
        """Answer a request that was not executed, or tell a run how its asking ended."""
        part = self._pending.pop(id)
        self._traces.live.pop(id, None)  # the scheduler may never have known it
        if isinstance(part, CallSlice):
            part.give_up()
        self._answer_with(part.connection, Completion(part.request, status, text=text))

    def _answer_with(self, connection: Connection, done: Completion) -> None:
        if not connection.closed:
            connection.completions.append(done)
            self._answering.add(connection)

    def _new_id(self, connection: Connection, request: int) -> int:
        id = _global_id(connection, request)
        if id in self._pending:
            raise ProtocolError(f"request {request} is there already, and not answered yet")
        return id


def _global_id(connection: Connection, id: int) -> int:
    if id >> _ID_BITS:
        raise ProtocolError(f"request id {id} has more than {_ID_BITS} bits")
    return connection.id << _ID_BITS | id


def _tag(part: AnySlice) -> int:
    return part.tag if isinstance(part, RequestSlice) else 0


def _failure(finish: ev.Finish) -> tuple[Status, str]:
    """How a request ended, for its client: without paths or tracebacks."""
    match finish.outcome:
        case ev.Outcome.EXPIRED:
            return Status.DEADLINE, "the deadline passed before the model could run"
        case ev.Outcome.SHED:
            return Status.DEADLINE, "the deadline cannot be met any more"
        case ev.Outcome.CANCELLED:
            return Status.CANCELLED, "the request was cancelled"
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
