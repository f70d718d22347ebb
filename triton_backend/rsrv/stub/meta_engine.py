"""A meta model's stub. Each request is one run of model.py's `run(inputs, call)`, on a thread.

The runtime admits as many runs at a time as meta.concurrency says. This stub starts runs at once up to that number; such a run
asks for admission with its first sub-call. Further runs wait in the runtime for admission, and need no thread here until then.
"""

import inspect
import logging
import queue
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from rsrv.front.rules import DOWN
from rsrv.hooks.loader import Hooks
from rsrv.logs import of_request, request_name
from rsrv.placement.batch_shares import ExecutionCosts, Forecast
from rsrv.stub.bls import MAX_CALLS, Bls, ThroughTriton
from rsrv.stub.calls import AsyncCall, Callee, SyncCall, grace, make_callees, run_async
from rsrv.stub.connection import RuntimeConnection
from rsrv.stub.deferred import OUT_OF_DESCRIPTORS, SENDER_THREADS
from rsrv.stub.direct import DirectRun
from rsrv.stub.endpoint import LearnedDuration, WireTensor, check_results, read_inputs, run_hook
from rsrv.stub.meta_run import CallRouter, MetaRequest, PlacedRun, RunPlace
from rsrv.stub.replica import MAX_BLOCK_S, ModelReplica, StubProcess
from rsrv.stub.replies import RequestFailure
from rsrv.stub.request import ClientRequest
from rsrv.stub.session import UNREACHABLE, Attachment, Session
from rsrv.stub.tensors import Array
from rsrv.stub.tracing import OpenSpan
from rsrv.wire.calls import RunExit, pack_entrances
from rsrv.wire.frames import Status
from rsrv.wire.socket import Closed

log = logging.getLogger(__name__)

Run = Callable[[dict[str, Array], Any], Any]

#: Weights of a shorter and of a longer run in the learned duration.
_FALL, _RISE = 0.5, 0.02


@dataclass(frozen=True, slots=True)
class MetaModel:
    """A meta model: its code, and the facts from its manifest."""

    run: Run
    #: Hooks of the callees, by name.
    hooks: Mapping[str, Hooks]
    outputs: Sequence[WireTensor]
    #: True if Triton batches the meta model.
    batched: bool = True
    #: Names of models outside of the runtime, which are called through Triton.
    external: Collection[str] = ()
    #: True if `run` may begin again after the death of a runtime that kept tensors of the run.
    restartable: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _Idle:
    """Connections of one attachment that no run uses. Only a thread that has removed a connection may use or close it."""

    attachment: Attachment
    callees: Mapping[str, Callee]
    connections: list[RuntimeConnection]

    def close(self) -> None:
        with suppress(IndexError):
            while True:
                self.connections.pop().close()


class MetaEngine(ModelReplica[MetaRequest]):
    """Answers the requests of one meta model."""

    def __init__(
        self,
        session: Session,
        attachment: Attachment,
        process: StubProcess,
        model: MetaModel,
        make_bls: Callable[[dict[str, Any]], Bls],
    ) -> None:
        settings = attachment.settings["meta"]
        self._concurrency = settings["concurrency"]
        self._through_triton = settings["transport"] == "bls"
        self._bls = make_bls(settings) if model.external or self._through_triton else None
        #: True if runs need admission. Runs that call no models of the runtime need none, because they do not use the device.
        self._gated = bool(model.hooks)
        threads = SENDER_THREADS + (self._concurrency if self._gated else 0)
        self._hook_threads = threads + (MAX_CALLS if self._bls is not None else 0)
        super().__init__(session, process, threads)
        self._model = model
        #: Learned duration of a run. It begins with a value at which execute() does not wait for the first runs.
        self._run_length = LearnedDuration(MAX_BLOCK_S, _FALL, _RISE)
        self._running: set[MetaRequest] = set()
        #: The requests that were last answered in place. Triton reads their responses after execute() has returned.
        self._answered: list[MetaRequest] = []
        #: Connections for the next runs. None: there is no runtime.
        self._idle: _Idle | None = None
        self.use(attachment)

    def use(self, attachment: Attachment) -> None:
        callees = make_callees(attachment.models, self._model.hooks, self._process.guard, self.meters)
        old, self._idle = self._idle, _Idle(attachment, callees, [attachment.direct])
        if old is not None:
            old.close()
        super().use(attachment)

    def pack(self, entries: Sequence[Any]) -> bytes:
        return pack_entrances(entries)

    def _answers_in_s(self, attachment: Attachment) -> float:
        return self._begins_in_s(attachment) + self._run_length.seconds

    def _begins_in_s(self, attachment: Attachment) -> float:
        """Return the seconds until a run that arrived now would begin."""
        free_s = attachment.begins_in_s()
        if not self._gated:
            return free_s
        # The board includes running and waiting runs, but not yet the latest runs. So also count the runs of this stub.
        ahead: int = (len(self._running) + self._deferred.pending) // self._concurrency
        return free_s + max(self._run_length.seconds * ahead, attachment.direct.admission_in_s())

    def _forecast(self, attachment: Attachment) -> Forecast:
        """Return the device's expected work. A run counts as a row."""
        forecast = attachment.forecast(ExecutionCosts([self._concurrency], [self._run_length.seconds]))
        return forecast._replace(free_s=self._begins_in_s(attachment))

    def close(self, *, direct: bool = False) -> None:
        # Leave the connections of runs open until the runs end, because closing one would not wake a thread that polls it.
        super().close(direct=direct)
        if self._bls is not None:
            self._bls.close()
        self._close_idle()

    def _leave(self, attachment: Attachment) -> bool:
        if self._running:
            return False
        super()._leave(attachment)
        self._close_idle()
        return True

    def _close_idle(self) -> None:
        """Close the connections that no run uses. The other connections are closed when their runs end."""
        idle, self._idle = self._idle, None
        if idle is not None:
            idle.close()

    # --- a batch ------------------------------------------------------------------------------------------

    def _answer_by(
        self, attachment: Attachment, requests: list[ClientRequest], at_once: bool
    ) -> list[Any] | None:
        ids = attachment.deferred.next_ids(len(requests))
        batch = [_request(attachment, request, id) for id, request in zip(ids, requests, strict=True)]
        running, waiting = self._divide(batch)
        limit_s = attachment.settings["stub"]["in_place_ms"] / 1e3
        if at_once and not waiting and self._run_length.seconds <= limit_s:
            return self._answer_in_place(batch, running)
        for meta_request in batch:
            self._deferred.reply(meta_request.request)
        self._start(running)
        for meta_request in batch:
            if meta_request.request.failure is not None:
                self._deferred.finish(meta_request)
        if waiting:
            self._deferred.submit(attachment, waiting)
        return None

    def _divide(self, batch: list[MetaRequest]) -> tuple[list[MetaRequest], list[MetaRequest]]:
        """Return the requests to run at once, and the requests that wait for admission. Leave out requests that have failed."""
        valid = [meta_request for meta_request in batch if meta_request.request.failure is None]
        free = max(0, self._concurrency - len(self._running)) if self._gated else len(valid)
        running, waiting = valid[:free], valid[free:]
        self._running.update(running)
        return running, waiting

    def _start(self, batch: list[MetaRequest]) -> None:
        for meta_request in batch:
            self._deferred.run(partial(self._serve_at_once, meta_request))

    def _answer_in_place(self, batch: list[MetaRequest], running: list[MetaRequest]) -> list[Any] | None:
        inbox: queue.SimpleQueue[MetaRequest] = queue.SimpleQueue()
        for meta_request in running:
            meta_request.inbox = inbox
        self._start(running)
        until = time.monotonic() + MAX_BLOCK_S
        try:
            for _ in running:
                inbox.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            # The runs take longer than predicted. Correct the prediction, and let execute() return.
            self._run_length.seconds = MAX_BLOCK_S
            for meta_request in batch:
                self._hand_over(meta_request)
            return None
        self._answered = batch
        return [meta_request.response or self._failed(meta_request) for meta_request in batch]

    def _hand_over(self, meta_request: MetaRequest) -> None:
        self._deferred.reply(meta_request.request)
        # If the run ends at this moment, its thread answers as well. The reply sends only the first answer.
        if meta_request.response is not None or meta_request.request.failure is not None:
            self._deferred.finish(meta_request)

    def rescue(self, meta_request: MetaRequest) -> None:
        # The run was not admitted before the runtime died.
        self._process.front.add(meta_request.request, self._outcomes)

    def _take_over(self, attachment: Attachment, request: ClientRequest) -> None:
        (id,) = attachment.deferred.next_ids(1)
        self._deferred.submit(attachment, [_request(attachment, request, id)])

    # --- one run, on a sender thread ----------------------------------------------------------------------

    def _serve_at_once(self, meta_request: MetaRequest) -> None:
        """Execute a run that did not wait for admission, and answer its request."""
        # Set the response before checking for a reply. `_hand_over` makes the reply before it checks for a response, so one of
        # the two threads sees both.
        response = meta_request.response = self._serve(meta_request)
        reply = meta_request.request.reply
        if reply is None:
            assert meta_request.inbox is not None
            meta_request.inbox.put(meta_request)
        else:
            reply.send(response, meta_request.nbytes)
            meta_request.release()

    def respond(self, meta_request: MetaRequest) -> Any:
        """Execute a run that was admitted, or fail a request that was refused. Return the response."""
        if meta_request.request.failure is not None:
            return self._failed(meta_request)
        self._running.add(meta_request)
        return self._serve(meta_request)

    def _failed(self, meta_request: MetaRequest) -> Any:
        assert meta_request.request.failure is not None
        return self._outcomes.failed(meta_request.request, meta_request.request.failure)

    def _serve(self, meta_request: MetaRequest) -> Any:
        """Execute a run, which counts as running until it has ended. Returns its response; never raises."""
        started = time.perf_counter()
        try:
            response = self._responses.answer(self._execute_run(meta_request))
            self._outcomes.ended(meta_request.request, Status.OK)
            return response
        except Exception as error:  # noqa: BLE001 - logged by failure_for
            return self._outcomes.failed(meta_request.request, meta_request.request.failure_for(error))
        finally:
            self._running.discard(meta_request)
            self._run_length.learn(time.perf_counter() - started)

    def _execute_run(self, meta_request: MetaRequest) -> list[Any]:
        span = None if meta_request.request.span is None else meta_request.request.span.child()
        run = PlacedRun(
            meta_request,
            partial(self._enter_again, meta_request, span),
            self._process.front,
            self._process.guard,
        )
        status = Status.INTERNAL
        try:
            run.begin(self._try_to_enter(meta_request, span))
            meta_request.check()
            while True:
                try:
                    tensors = self._results(meta_request, run, span)
                    break
                except RequestFailure:
                    if not (self._model.restartable and run.begins_again()):
                        raise
            status = Status.OK
            return tensors
        except RequestFailure as failure:
            status = failure.status
            raise
        finally:
            run.end(status)
            if deaths := meta_request.request.deaths:
                with suppress(Exception):  # An answered request no longer has inputs.
                    self._process.front.record(0 if status is Status.OK else deaths, self._read(meta_request))

    def _enter_again(self, meta_request: MetaRequest, span: OpenSpan | None) -> RunPlace | None:
        """Return a new place for a run whose runtime has died, on the device that admits the run soonest.

        None: there is no place now. Raises RequestFailure.
        """
        model = self._process.model
        engine: MetaEngine | None = None if model is None else model.live()
        attachment = None if engine is None else engine.session.attachment
        if engine is None or attachment is None:
            return None
        return engine._try_to_enter(_request(attachment, meta_request.request), span)

    def _try_to_enter(self, meta_request: MetaRequest, span: OpenSpan | None) -> RunPlace | None:
        """Return a place for a run that begins on this device. None: the runtime is gone. Raises RequestFailure.

        If the callees are on several devices, each of these devices must admit the run. The run enters the devices in ascending
        order, beginning with this device. Otherwise, two runs could wait for each other forever.
        """
        place = RunPlace(meta_request.request.params.deadline_ns)
        try:
            self._join(place, meta_request, span)
            model = self._process.model
            engines = (
                model.stages(self.session.device) if model is not None and self._process.devices > 1 else {}
            )
            if engines:
                self._join_stages(place, meta_request, span, engines)
            return place
        except RequestFailure as failure:
            place.leave(failure.status)
            place.release(failure.status)
            if failure.text != DOWN:
                raise
            return None

    def _join(
        self, place: RunPlace, meta_request: MetaRequest, span: OpenSpan | None, *, further: bool = False
    ) -> tuple[DirectRun, Mapping[str, Callee]]:
        """Add this device to a run's place. `further` is True if the run has begun on another device. Raises RequestFailure."""
        connection, callees = self._take_connection(meta_request)
        entrance = meta_request.write()._replace(further=further)
        run = DirectRun(connection, entrance, meta_request.request.id, span)
        run.entered, run.device, run.alone = (
            meta_request.admitted,
            self.session.device,
            meta_request.request.deaths > 0,
        )
        place.add(run, partial(self._release, meta_request, connection, run))
        place.callees.update({name: (run, callee) for name, callee in callees.items()})
        return run, callees

    def _join_stages(
        self,
        place: RunPlace,
        meta_request: MetaRequest,
        span: OpenSpan | None,
        engines: Mapping[str, "MetaEngine"],
    ) -> None:
        """Add the other devices to the place of a run that begins here. Raises RequestFailure."""
        until_ns = grace(meta_request.request.params.deadline_ns)
        other_engines = {engine.session.device: engine for engine in engines.values() if engine is not self}
        place.first.stage = self.session.device
        place.first.await_admission(until_ns)
        for device, engine in sorted(other_engines.items()):
            attachment = engine.session.attachment
            if attachment is None:
                raise RequestFailure(Status.RUNTIME_DOWN, DOWN)
            further = _request(attachment, meta_request.request)
            further.token = meta_request.token
            mine = place.callees.copy()
            run, callees = engine._join(place, further, span, further=True)
            place.callees = mine | {name: (run, callees[name]) for name in callees if engines[name] is engine}
            run.stage = device
            run.await_admission(until_ns)

    def _read(self, meta_request: MetaRequest) -> dict[str, Array]:
        return read_inputs(self._tensors, meta_request.request.triton, meta_request.attachment.inputs)

    def _results(self, meta_request: MetaRequest, run: PlacedRun, span: OpenSpan | None) -> list[Any]:
        arrays, outputs = self._read(meta_request), self._model.outputs
        meta_request.request.deaths = max(meta_request.request.deaths, self._process.front.check(arrays))
        rows = len(next(iter(arrays.values()))) if self._model.batched else None
        results = self._call_user(meta_request, run, arrays, span)
        meta_request.results = check_results(results, outputs, rows, "run", meta_request.request.id)
        return [
            self._tensors.make(wire.name, array, wire.dtype)
            for wire, array in zip(outputs, meta_request.results, strict=True)
        ]

    def _call_user(
        self, meta_request: MetaRequest, run: PlacedRun, arrays: dict[str, Array], span: OpenSpan | None
    ) -> dict[str, Array]:
        client_id, deadline_ns = meta_request.request.id, meta_request.request.params.deadline_ns
        triton = None
        if self._bls is not None:
            triton = ThroughTriton(self._bls, deadline_ns, client_id, span)
        router = CallRouter(
            run, self._model.external, triton, deadline_ns, through_triton=self._through_triton
        )

        def execute(arrays: dict[str, Array]) -> Any:
            function = self._model.run
            if inspect.iscoroutinefunction(function):
                return run_async(function, arrays, AsyncCall(router, deadline_ns, meta_request.check))
            return function(arrays, SyncCall(router, deadline_ns, meta_request.check))

        started, error = time.perf_counter(), ""
        try:
            return run_hook("run", execute, arrays, client_id, self._process.guard)
        except RequestFailure as failure:
            error = failure.text
            raise
        finally:
            router.over = True
            self.meters.hook(self.session.model, "run", time.perf_counter() - started)
            if span is not None:
                span.end("run", started, error, {})

    # --- connections --------------------------------------------------------------------------------------

    def _take_connection(self, meta_request: MetaRequest) -> tuple[RuntimeConnection, Mapping[str, Callee]]:
        """Return a connection for a run, and the callees on its device."""
        idle = self._idle
        if idle is None or idle.attachment is not meta_request.attachment:
            raise RequestFailure(Status.RUNTIME_DOWN, DOWN)  # The request is for a runtime that has ended.
        with suppress(IndexError):
            return idle.connections.pop(), idle.callees
        try:
            return self.session.open_connection(meta_request.attachment.key), idle.callees
        except UNREACHABLE as error:
            client_id = meta_request.request.id
            log.error(
                "%s: its run got no connection to the runtime: %s",
                request_name(client_id),
                error,
                extra=of_request(client_id),
            )
            self._withdraw(meta_request, Status.RUNTIME_DOWN)
            if self._process.guard.out_of_descriptors(error):
                raise RequestFailure(Status.INTERNAL, OUT_OF_DESCRIPTORS) from None
            raise RequestFailure(Status.RUNTIME_DOWN, DOWN) from None

    def _withdraw(self, meta_request: MetaRequest, status: Status) -> None:
        """End an admitted run that has no working connection of its own. Report the end on the connection of its ENTER."""
        if meta_request.admitted:
            try:
                # Do not wait, because execute() also sends on that connection.
                meta_request.connection.leave(RunExit(meta_request.token, status), patience=0)
            except (Closed, OSError) as error:
                # Give up the connection, because the runtime would otherwise always count the run as running.
                self._deferred.lose(meta_request.attachment, error)

    def _release(
        self, meta_request: MetaRequest, connection: RuntimeConnection, run: DirectRun, status: Status
    ) -> None:
        """Keep the connection of a run for the next run, or close it. The run has ended with `status`."""
        if run.broken:
            self._withdraw(meta_request, status)
        else:
            connection.tidy()
        idle = self._idle
        if idle is None or meta_request.attachment is not idle.attachment or run.broken:
            connection.close()
            run.forget_lost()
            return
        idle.connections.append(connection)
        if self._idle is not idle:
            idle.close()  # The runtime has ended since the check above, and its idle connections may already be closed.


def _request(attachment: Attachment, request: ClientRequest, id: int = 0) -> MetaRequest:
    return MetaRequest(id, request, attachment.deferred, attachment=attachment)
