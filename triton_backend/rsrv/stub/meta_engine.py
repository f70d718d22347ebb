"""A meta model's stub: each request is one run of model.py's `run(inputs, call)`, on a thread.

The runtime lets in as many runs as it is set to. Up to that number this stub starts runs at once, which ask with their
first sub-call; the others wait in the runtime, not on threads here, until it says that their turn has come.
"""

import inspect
import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from rsrv.logs import of_request
from rsrv.stub.bls import MAX_CALLS, Bls
from rsrv.stub.call_router import CallRouter, ThroughTriton
from rsrv.stub.calls import AsyncCall, Callee, CallError, SyncCall, grace, make_callees, run_async
from rsrv.stub.connection import RuntimeConnection
from rsrv.stub.deferred import SENDER_THREADS, DeferredReplies
from rsrv.stub.direct import DirectRun
from rsrv.stub.endpoint import Array, WireTensor, check_results, hook_raised, read_inputs, told
from rsrv.stub.hook_guard import DrainAndExit, HookGuard
from rsrv.stub.hooks import Hooks
from rsrv.stub.metrics import Meters
from rsrv.stub.outcomes import EntryPoint, Outcomes
from rsrv.stub.replies import RequestFailure, Responses
from rsrv.stub.request import ClientRequest, MetaRequest
from rsrv.stub.session import DOWN, UNREACHABLE, Link, Session
from rsrv.stub.tensors import Tensors
from rsrv.wire.calls import Leaving
from rsrv.wire.frames import Status
from rsrv.wire.socket import Closed

log = logging.getLogger("rsrv.stub")

Run = Callable[[dict[str, Array], Any], Any]

#: seconds that execute() may wait at most, as for other models
_MAX_BLOCK = 0.2
#: weight of the latest run in the learned length of one: single ones are disturbed, none is faster than it can be
_FALL, _RISE = 0.5, 0.02


class MetaEngine:
    """`hooks` are those of the called models, by name; `external` names models outside of the runtime."""

    def __init__(
        self,
        tensors: Tensors,
        responses: Responses,
        run: Run,
        hooks: Mapping[str, Hooks],
        external: Collection[str],
        outputs: Sequence[WireTensor],
        batched: bool,
        session: Session,
        make_bls: Callable[[dict[str, Any]], Bls],
    ) -> None:
        self._tensors = tensors
        self._responses = responses
        self._run = run
        self._hooks = hooks
        self._external = external
        self._outputs = outputs
        self._batched = batched
        self._session = session
        self._guard = HookGuard()
        self.meters = Meters()
        self._outcomes = Outcomes(self.meters, responses)
        self._drain_and_exit = DrainAndExit(session.stop, responses)
        #: whether runs have to be let in: those that call nobody in the runtime do not use the device
        self._gated = bool(hooks)
        link = session.begin()
        settings = link.settings["meta"]
        self._through_triton = settings["transport"] == "bls"
        self._bls = make_bls(settings) if external or self._through_triton else None
        self._concurrency = settings["concurrency"]
        #: what a run takes, seconds; at first it is not waited for
        self._seconds = _MAX_BLOCK
        self._underway = 0
        #: those that were answered in place last: Triton reads their responses after execute() has returned
        self._answered: list[MetaRequest] = []
        self._lock = threading.Lock()
        #: connections that no run uses now, and the callees, of one link
        self._connections: list[RuntimeConnection] = []
        self._link: Link | None = None
        self._callees: dict[str, Callee] = {}
        self._stub_settings = link.settings["stub"]
        threads = SENDER_THREADS + (self._concurrency if self._gated else 0)
        self._threads = threads + (MAX_CALLS if self._bls is not None else 0)
        self._deferred: DeferredReplies[MetaRequest] = DeferredReplies(
            session, responses, RuntimeConnection.enter, self._respond, threads, self._drain_and_exit
        )
        self._entry = EntryPoint(self._answer, self._outcomes, self._deferred.reply, self._drain_and_exit)
        session.on_link = self._watch
        self._watch(link)

    def _watch(self, link: Link) -> None:
        with self._lock:
            old, self._connections = self._connections, [link.direct]
            self._link, self._callees = link, make_callees(link.models, self._hooks, self._guard, self.meters)
            self._outcomes.serve(link.key, traced=link.settings["traces"]["enabled"])
        for connection in old:
            connection.close()
        self._deferred.watch(link)

    @property
    def ready(self) -> bool:
        """Whether there is a runtime that serves all models that this one calls, and takes requests."""
        return self._session.ready

    def guard_hooks(self) -> None:
        """As `Engine`'s."""
        self._guard.start(self._stub_settings, self._threads, self._drain_and_exit, self._session.abandon)

    def close(self) -> None:
        self._guard.close()
        self._deferred.close()
        if self._bls is not None:
            self._bls.close()
        # Runs under way end on their connections: one that is closed wakes nobody who waits for it to become readable.
        self._session.close(direct=False)
        with self._lock:
            connections, self._connections, self._link = self._connections, [], None
        for connection in connections:
            connection.close()

    # --- execute ------------------------------------------------------------------------------------------

    def execute(self, requests: list[Any]) -> list[Any] | None:
        """As `EntryPoint.execute`."""
        return self._entry.execute(requests)

    def _answer(self, requests: list[ClientRequest]) -> list[Any] | None:
        """As `outcomes.Answer`."""
        link = self._session.link
        if link is None:
            return self._outcomes.turned_away(requests, Status.RUNTIME_DOWN, self._session.down)
        ids = link.deferred.next_ids(len(requests))
        visits = [
            MetaRequest(id, request, link, link.deferred) for id, request in zip(ids, requests, strict=True)
        ]
        at_once, waiting = self._divide(visits)
        limit = link.settings["stub"]["in_place_ms"] / 1e3
        if not waiting and self._seconds <= limit:
            return self._in_place(visits, at_once)
        for visit in visits:
            self._deferred.reply(visit.request)
        self._start(at_once)
        for visit in visits:
            if visit.request.failure is not None:
                self._deferred.finish(visit)
        if waiting:
            self._deferred.submit(link, waiting)
        return None

    def _divide(self, visits: list[MetaRequest]) -> tuple[list[MetaRequest], list[MetaRequest]]:
        """Those that run at once, and those that wait for the others' ends; not those that have failed."""
        well = [visit for visit in visits if visit.request.failure is None]
        with self._lock:
            free = max(0, self._concurrency - self._underway) if self._gated else len(well)
            at_once, waiting = well[:free], well[free:]
            self._underway += len(at_once)
        return at_once, waiting

    def _start(self, visits: list[MetaRequest]) -> None:
        for visit in visits:
            self._deferred.run(partial(self._attend, visit))

    def _in_place(self, visits: list[MetaRequest], running: list[MetaRequest]) -> list[Any] | None:
        inbox: queue.SimpleQueue[MetaRequest] = queue.SimpleQueue()
        for visit in running:
            visit.inbox = inbox
        self._start(running)
        until = time.monotonic() + _MAX_BLOCK
        try:
            for _ in running:
                inbox.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            # It takes longer than it used to: let execute() return.
            self._seconds = _MAX_BLOCK
            for visit in visits:
                self._hand_over(visit)
            return None
        self._answered = visits
        return [visit.response or self._failed(visit) for visit in visits]

    def _hand_over(self, visit: MetaRequest) -> None:
        with visit.lock:
            self._deferred.reply(visit.request)
            ended = visit.response is not None or visit.request.failure is not None
        if ended:
            self._deferred.finish(visit)

    # --- one run, on a sending thread ---------------------------------------------------------------------

    def _attend(self, visit: MetaRequest) -> None:
        """A run that was started at once; whoever it is for is told."""
        response = self._serve(visit)
        with visit.lock:
            visit.response = response
            reply = visit.request.reply
        if reply is None:
            assert visit.inbox is not None
            visit.inbox.put(visit)
        else:
            reply.send(response, visit.nbytes)
            visit.release()

    def _respond(self, visit: MetaRequest) -> Any:
        """The response of a visit that was let in, or turned away; never raises."""
        if visit.request.failure is not None:
            return self._failed(visit)
        with self._lock:
            self._underway += 1
        return self._serve(visit)

    def _failed(self, visit: MetaRequest) -> Any:
        assert visit.request.failure is not None
        return self._outcomes.failed(visit.request, visit.request.failure)

    def _serve(self, visit: MetaRequest) -> Any:
        """One run, which counts as under way until it is over."""
        started = time.perf_counter()
        try:
            response = self._responses.answer(self._run_one(visit))
            self._outcomes.ended(visit.request, Status.OK)
            return response
        except RequestFailure as failure:
            return self._outcomes.failed(visit.request, failure)
        except Exception:
            who = visit.request.id
            log.exception("request %r: its run failed", who, extra=of_request(who))
            text = "the request failed; the server's log says why"
            return self._outcomes.failed(visit.request, RequestFailure(Status.INTERNAL, text))
        finally:
            seconds = time.perf_counter() - started
            with self._lock:
                self._underway -= 1
                weight = _FALL if seconds < self._seconds else _RISE
                self._seconds += weight * (min(seconds, 4 * self._seconds) - self._seconds)

    def _run_one(self, visit: MetaRequest) -> list[Any]:
        connection, request = self._take_connection(visit), visit.request
        trace = None if request.trace is None else request.trace.child()
        deadline_ns, priority, _ = request.terms
        run = DirectRun(connection, visit.token, deadline_ns, priority, request.tag, request.id, trace)
        run.entered = visit.let_in
        status = Status.INTERNAL
        try:
            visit.check()
            tensors = self._results(visit, run)
            status = Status.OK
            return tensors
        except RequestFailure as failure:
            status = failure.status
            raise
        finally:
            run.leave(status, grace(deadline_ns))
            if run.broken:
                self._withdraw(visit, status)
            self._give_connection(visit.link, connection, broken=run.broken)

    def _results(self, visit: MetaRequest, run: DirectRun) -> list[Any]:
        arrays = read_inputs(self._tensors, visit.request.triton, visit.link.inputs)
        rows = len(next(iter(arrays.values()))) if self._batched else None
        results = self._call_user(visit, run, arrays)
        checked = check_results(results, self._outputs, rows, "run", visit.request.id)
        visit.results = checked
        return [
            self._tensors.make(wire.name, array, wire.dtype)
            for wire, array in zip(self._outputs, checked, strict=True)
        ]

    def _call_user(self, visit: MetaRequest, run: DirectRun, arrays: dict[str, Array]) -> dict[str, Array]:
        who, deadline_ns = visit.request.id, visit.request.terms.deadline_ns
        triton = None if self._bls is None else ThroughTriton(self._bls, deadline_ns, who, run.trace)
        router = CallRouter(
            run,
            self._callees,
            self._external,
            triton,
            deadline_ns,
            visit.token,
            self._guard,
            through_triton=self._through_triton,
        )
        started, error = time.perf_counter(), ""
        try:
            with self._guard.within("run", who):
                if inspect.iscoroutinefunction(self._run):
                    results = run_async(self._run, arrays, AsyncCall(router, deadline_ns, visit.check))
                else:
                    results = self._run(arrays, SyncCall(router, deadline_ns, visit.check))
                return {key: np.asarray(value) for key, value in results.items()}
        except BaseException as raised:  # noqa: BLE001 - logged by _failure_of
            failure = _failure_of(raised, who, self._guard)
            error = failure.text
            try:
                raise failure from None
            finally:
                # Its traceback leads here: the arrays would live until somebody looks for such rings.
                del failure
        finally:
            router.over = True
            self.meters.hook(self._session.model, "run", time.perf_counter() - started)
            if run.trace is not None:
                run.trace.end("run", started, error, {})

    # --- connections --------------------------------------------------------------------------------------

    def _take_connection(self, visit: MetaRequest) -> RuntimeConnection:
        link = visit.link
        with self._lock:
            if link is not self._link:
                raise RequestFailure(Status.RUNTIME_DOWN, DOWN)  # the runtime that it came for has gone
            if self._connections:
                return self._connections.pop()
        try:
            return self._session.open_connection(link.key)
        except UNREACHABLE as error:
            who = visit.request.id
            log.error("request %r: no connection for its run: %s", who, error, extra=of_request(who))
            self._withdraw(visit, Status.RUNTIME_DOWN)
            raise RequestFailure(Status.RUNTIME_DOWN, DOWN) from None

    def _withdraw(self, visit: MetaRequest, status: Status) -> None:
        """Have a run leave that has no connection of its own, or lost it, by the one that it asked on."""
        if visit.let_in:
            try:
                # Without waiting: execute() sends on that connection, too.
                visit.connection.leave(Leaving(visit.token, status), patience=0)
            except (Closed, OSError):
                # Else the runtime would count the run as under way for ever.
                self._deferred.lose(visit.link)

    def _give_connection(self, link: Link, connection: RuntimeConnection, *, broken: bool) -> None:
        if not broken:
            connection.tidy()
        with self._lock:
            if link is self._link and not broken:
                self._connections.append(connection)
                return
        connection.close()


def _failure_of(error: BaseException, who: str, guard: HookGuard) -> RequestFailure:
    """What the client of the request `who` is told of what its run raised. To be called while that is handled."""
    if isinstance(error, CallError):
        failure = RequestFailure(error.status, told(error))
    elif isinstance(error, RequestFailure):  # there was no memory for a buffer
        failure = error.anew()
    else:
        failure = hook_raised("run", error, who, guard)
    # asyncio keeps the error in the frames that this leads to.
    error.__traceback__ = None
    return failure
