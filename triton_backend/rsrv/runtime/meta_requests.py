"""Waiting and active runs of meta models, and their sub-calls. Belongs to the loop."""

from math import inf
from typing import Any

from rsrv.runtime.call_execution import CallSlice, RunSlice
from rsrv.runtime.catalog import Catalog
from rsrv.runtime.executor import ExecutionEnded
from rsrv.runtime.runs import MetaRun, Runs, find_sources, find_targets
from rsrv.runtime.slices import RequestKind
from rsrv.runtime.timeline import Traces
from rsrv.runtime.transport import PeerConnection
from rsrv.runtime.unanswered import ABORTED, CANCELLED, UnansweredRequests
from rsrv.runtime.weight_manager import Outbox, WeightManager
from rsrv.scheduler import events as ev
from rsrv.wire.calls import Call, unpack_calls, unpack_entrances, unpack_leavings, unpack_releases
from rsrv.wire.frames import ALONE, Completion, Kind, ProtocolError, Status

_NO_RUN = "the meta model's run that this call belongs to has ended or never existed"


class MetaRequests(RequestKind):
    """Runs of meta models, and their sub-calls.

    `UnansweredRequests.pending` has the runs that wait for admission, by the global ids of their ENTER, and all sub-calls, by
    their own global ids.
    """

    def __init__(
        self,
        requests: UnansweredRequests,
        catalog: Catalog,
        weights: WeightManager,
        traces: Traces,
        outbox: Outbox,
    ) -> None:
        self._requests = requests
        self._catalog = catalog
        self._weights = weights
        self._traces = traces
        self._outbox = outbox
        self.runs = Runs()

    # --- frames -------------------------------------------------------------------------------------------

    def take_frame(self, connection: PeerConnection, kind: Kind, count: int, frame: memoryview) -> None:
        """Handle a frame of a meta model's stub."""
        match kind:
            case Kind.CALL:
                for call in unpack_calls(frame, count):
                    self._call(connection, call)
            case Kind.ENTER:
                self._enter(connection, frame, count)
            case Kind.LEAVE:
                for token, status in unpack_leavings(frame, count):
                    if (run := self.runs.of(connection, token)) is not None:
                        self._end_run(run, status)
            case Kind.RELEASE:
                for token, number in unpack_releases(frame, count):
                    if (run := self.runs.of(connection, token)) is not None:
                        run.kept.pop(number, None)

    def _enter(self, connection: PeerConnection, frame: memoryview, count: int) -> None:
        group = connection.group
        if group is None or not self._catalog.ready(group):
            raise ProtocolError("ENTER before REGISTERED")
        limit = self._catalog.policy.queue_depth(group.name)
        runs = []
        for entrance in unpack_entrances(frame, count):
            id = self._requests.new_id(connection, entrance.request)
            run = self._requests.pending[id] = self.runs.enter(connection, group, entrance, id, self)
            runs.append(ev.Run(run.id, group.name, run.deadline, run.priority, limit, group.models))
        self._outbox.append(ev.RunsAsked(tuple(runs)))

    def _call(self, connection: PeerConnection, call: Call) -> None:
        mark = connection.marks.pop(call.request, None)
        run = self.runs.of(connection, call.run)
        if run is None:
            # The run was not admitted or has ended, and its stub knows that.
            self._requests.complete(connection, Completion(call.request, Status.NOT_FOUND, text=_NO_RUN))
            return
        if run.aborted:
            self._requests.complete(connection, Completion(call.request, Status.CANCELLED, text=ABORTED))
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
        id = self._requests.new_id(connection, call.request)
        self._requests.pending[id] = CallSlice(
            connection, call.request, call.rows, run, sources, targets, keep, self
        )
        if keep:
            promised = {
                number: variant.outputs.tensors[index].nbytes(call.rows) for index, number in keep.items()
            }
            held_bytes, more, limit = self.runs.kept_bytes, sum(promised.values()), self._weights.kept_limit
            if limit is not None and held_bytes + more > limit:
                text = (
                    f"running meta models keep {held_bytes} bytes on the device, the limit is {limit}, and this call would "
                    f"keep {more} more; try again later, or keep less at a time"
                )
                self._requests.end(id, Status.QUEUE_FULL, text)
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
            self._requests.arrived.append(request)
        else:
            try:
                self.runs.hold(run, request)
            except ProtocolError:
                del self._requests.pending[id]
                raise
        if mark is not None:
            self._traces.begin(id, mark, model.key)

    def submit(self, place: tuple[Any, ...], request: ev.Request, token: int, step: tuple[int, int]) -> None:
        """Handle a sub-call that arrived as a request of its model's stub."""
        run = self.runs.find(token, self._catalog.get(request.model).name)
        part = self._requests.pending[request.id] = RunSlice(*place)
        part.kind, part.run = self, run
        if run is None:
            self._requests.end(request.id, Status.NOT_FOUND, _NO_RUN)
        elif run.aborted:
            self._requests.end(request.id, Status.CANCELLED, ABORTED)
        else:
            deadline = (
                run.deadline if request.deadline is None else min(request.deadline, run.deadline or inf)
            )
            request = request._replace(deadline=deadline, run=run.id, tag=request.tag or run.tag)
            self._requests.arrived.append(request)

    # --- ends of calls and runs ---------------------------------------------------------------------------

    def executed(self, ended: ExecutionEnded) -> None:
        """Count the device time of an execution's sub-calls, and give the outputs that they keep to their runs.

        After a failure, the runs do not get these outputs, because the execution may be retried.
        """
        dispatch = ended.dispatch
        for part in dispatch.slices:
            if isinstance(part, CallSlice | RunSlice) and part.run is not None:
                part.run.account(ended.seconds * part.rows / max(1, dispatch.execute.rows))
            if isinstance(part, CallSlice):
                part.settle(succeeded=ended.error is None)

    def ended(self, part: CallSlice | RunSlice | MetaRun, status: Status, text: str) -> bool:
        if isinstance(part, CallSlice):
            part.end_promises()
        return True

    def refused(self, id: int, status: Status, text: str) -> None:
        run = self.runs.get(id)
        if run is not None:  # If there is no run, its connection was closed.
            self.runs.remove(run, status)
            self._refuse_entry(run, status, text)

    def admit(self, instruction: ev.Admit) -> None:
        """Begin a run: answer its ENTER, and pass the calls that waited for its admission to the scheduler."""
        run = self.runs.get(instruction.run)
        if run is None:
            return  # The run's connection was closed.
        run.admitted = True
        self._requests.end(run.enter_id, Status.OK, "")
        self._requests.arrived += run.held
        run.held = []

    def cancel(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        for id in ids:
            waiting = self._requests.pending.get(id)
            if isinstance(waiting, MetaRun):
                self._end_run(waiting, Status.CANCELLED)
        return ()

    def abort(self, tag: int) -> tuple[int, set[int]]:
        runs = [run for run in self.runs if run.tag == tag and not run.aborted]
        for run in runs:
            if run.admitted:
                run.aborted = True  # The stub learns this from the reply to its next call.
            else:
                self._end_run(run, Status.CANCELLED, ABORTED)
        pending = self._requests.pending.items()
        return len(runs), {
            id for id, part in pending if isinstance(part, CallSlice | RunSlice) and part.run in runs
        }

    def closed(self, connection: PeerConnection) -> None:
        for run in self.runs.entered_on(connection):
            self._end_run(run, Status.CANCELLED)

    def _end_run(self, run: MetaRun, status: Status, text: str = CANCELLED) -> None:
        """End a run. `text` is the reason for clients if the run still waits for admission."""
        self.runs.remove(run, status)
        if not run.admitted:
            self._refuse_entry(run, Status.CANCELLED, text)
        self._outbox.append(ev.RunEnded(run.id))

    def _refuse_entry(self, run: MetaRun, status: Status, text: str) -> None:
        """Answer the ENTER of a run that is not admitted, and all calls that have waited for its admission."""
        for id in (run.enter_id, *(request.id for request in run.held)):
            self._requests.end(id, status, text)
