"""What execute() does: requests into shared memory, one frame to the runtime, answers in place or later.

Waiting inside execute() and returning a list costs a third of the CPU of answering through response
senders, and lets Triton form batches. But while execute() waits, what is still in Triton's queue is hidden
from the runtime, which starves a device on long executions. So it waits only for what will be done soon.
"""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rsrv.logs import of_request
from rsrv.stub.connection import RuntimeConnection, Slab
from rsrv.stub.deferred import LATE, SENDER_THREADS, STUCK, DeferredReplies
from rsrv.stub.endpoint import Endpoint, WireTensor, check_results, read_inputs
from rsrv.stub.hook_guard import DrainAndExit, HookGuard
from rsrv.stub.hooks import Hooks
from rsrv.stub.metrics import Meters
from rsrv.stub.outcomes import EntryPoint, Outcomes, blame
from rsrv.stub.replies import RequestFailure, Responses
from rsrv.stub.request import ClientRequest, ModelRequest
from rsrv.stub.session import DOWN, Link, Session
from rsrv.stub.tensors import Tensors
from rsrv.wire.frames import ProtocolError, Status
from rsrv.wire.socket import Closed

log = logging.getLogger("rsrv.stub")

#: seconds that execute() may wait at most: a stub that is frozen for longer inside execute() brings the
#: whole server down, and what else waits in Triton's queue cannot be seen meanwhile
_MAX_BLOCK = 0.2
#: seconds of preprocessing per request above which it runs on other threads
_SLOW_HOOK = 0.001
#: how much longer than its own executions a request may wait for others' inside execute()
_QUEUE_FACTOR = 5
#: share of a longer execution in the learned length
_RISE = 0.01
#: bytes of the direct connection's memory: the least, and how much of it stays after a large batch
_LEAST, _KEEP = 64 << 10, 16 << 20
_INTERNAL = "this model is a part of meta models and not served by itself; `public: true` in its manifest changes that"


class Engine:
    def __init__(
        self,
        tensors: Tensors,
        responses: Responses,
        hooks: Hooks,
        outputs: Sequence[WireTensor],
        batched: bool,
        session: Session,
        *,
        internal: bool = False,
    ) -> None:
        self._tensors = tensors
        self._responses = responses
        self._hooks = hooks
        self._outputs = outputs
        #: whether Triton batches this model: then a request has as many rows in every output as in its inputs
        self._batched = batched
        #: whether only meta models may call it
        self._internal = internal
        self._session = session
        self._guard = HookGuard()
        self.meters = Meters()
        self._outcomes = Outcomes(self.meters, responses)
        self._drain_and_exit = DrainAndExit(session.stop, responses)
        self._execute_ns = 0.0
        #: memory for answers in place: only one batch is ever under way on that connection, and Triton has copied its
        #: answers when the next one comes
        self._slab: Slab | None = None
        #: the connection for answers in place; None while it is handed over
        self._direct: RuntimeConnection | None = None
        self._link = link = session.begin()
        self._deferred: DeferredReplies[ModelRequest] = DeferredReplies(
            session,
            responses,
            RuntimeConnection.submit,
            self._respond,
            SENDER_THREADS,
            self._drain_and_exit,
        )
        self._entry = EntryPoint(self._answer, self._outcomes, self._deferred.reply, self._drain_and_exit)
        session.on_link = self._deferred.watch
        self._deferred.watch(link)
        self._switch(link)

    def _switch(self, link: Link) -> None:
        """On execute()'s thread, which alone uses `_slab` and `_link`."""
        if self._direct is not None:
            self._direct.close()
        self._link, self._direct, self._slab = link, link.direct, None
        self._outcomes.serve(link.key, traced=link.settings["traces"]["enabled"])
        (model,) = link.models
        self._largest = model.interface.variants[0].sizes[-1]
        self._endpoint = endpoint = Endpoint(
            model.interface, self._hooks, self._guard, partial(self.meters.hook, model.name)
        )
        # Until they are measured.
        endpoint.preprocess_seconds = _SLOW_HOOK if self._hooks.preprocess else 0.0
        endpoint.postprocess_seconds = _SLOW_HOOK if self._hooks.postprocess else 0.0
        self._execute_ns = float(model.cost_ns)

    @property
    def ready(self) -> bool:
        """Whether there is a runtime that serves this model, and takes requests."""
        return self._session.ready

    def guard_hooks(self) -> None:
        """See to it that hooks hurt nobody but this model, by what is done to the whole process."""
        if self._hooks.preprocess or self._hooks.postprocess:
            settings = self._link.settings["stub"]
            self._guard.start(settings, SENDER_THREADS, self._drain_and_exit, self._session.abandon)

    def close(self) -> None:
        self._guard.close()
        self._deferred.close()
        self._session.close()

    # --- execute ------------------------------------------------------------------------------------------

    def execute(self, requests: list[Any]) -> list[Any] | None:
        """As `EntryPoint.execute`."""
        return self._entry.execute(requests)

    def _answer(self, requests: list[ClientRequest]) -> list[Any] | None:
        """As `outcomes.Answer`."""
        link = self._session.link
        if link is None:
            return self._outcomes.turned_away(requests, Status.RUNTIME_DOWN, self._session.down)
        if link is not self._link:
            self._switch(link)
        if self._direct is link.direct and self._soon(link, len(requests)):
            try:
                return self._in_place(link, link.direct, requests)
            except BaseException:
                # What is left on the connection must not be taken for the next batch's.
                self._deferred.lose(link)
                raise
        self._answer_later(link, requests)
        return None

    def _soon(self, link: Link, count: int) -> bool:
        """Whether to wait inside execute(): the executions take at most stub.in_place_ms and start before long.

        The executions' own length decides, for a device waits for the next batch after each of them; a queue in
        front of them keeps it busy meanwhile, so that only bounds how long execute() may be held.
        """
        limit = link.settings["stub"]["in_place_ms"] * 1e6
        rounds = 1 + (count - 1) // self._largest
        endpoint = self._endpoint
        hooks = endpoint.preprocess_seconds + endpoint.postprocess_seconds
        own = self._execute_ns * rounds + hooks * count * 1e9
        return bool(own <= limit and link.direct.device_free_in_ns() <= _QUEUE_FACTOR * limit)

    def _learn(self, execute_ns: int) -> None:
        """Track the length of undisturbed executions: at once downwards, slowly upwards.

        Waiting for a processor makes single ones far longer. Taken at face value, they would send answers the
        dearer way, which makes the machine busier still.
        """
        if execute_ns < self._execute_ns:
            self._execute_ns = float(execute_ns)
        else:
            self._execute_ns += _RISE * (min(execute_ns, 4 * self._execute_ns) - self._execute_ns)

    def _in_place(
        self, link: Link, connection: RuntimeConnection, requests: list[ClientRequest]
    ) -> list[Any] | None:
        jobs = self._receive(connection, requests)
        placed = self._place_all(jobs, connection, self._take_direct)
        waiting = {job.id: job for job in placed}
        _mark(connection, placed)
        # As many at a time as one execution takes: the device works on the first while the next are written,
        # and on the last while the first are answered.
        step = self._largest
        until = time.monotonic() + _MAX_BLOCK
        try:
            for at in range(0, len(placed), step):
                sending = placed[at : at + step]
                sent = connection.submit([job.write() for job in sending])
                if sent < len(sending):
                    for job in placed[at + sent :]:
                        waiting.pop(job.id).fail(Status.QUEUE_FULL, STUCK)
                    break
            while waiting:
                done = connection.receive(until - time.monotonic())
                for completion in done:
                    waiting[completion.request].finish(completion)
                for completion in done:
                    job = waiting.pop(completion.request)
                    job.response = self._respond(job)
        except TimeoutError:
            self._hand_over(link, connection, jobs, waiting)
            return None
        except (Closed, ProtocolError, OSError):
            self._deferred.lose(link)
            for job in waiting.values():
                job.fail(Status.RUNTIME_DOWN, DOWN)
        return [job.response or self._respond(job) for job in jobs]

    def _take_direct(self, connection: RuntimeConnection, nbytes: int, users: int) -> Slab:
        """The direct connection's one slab, made anew when it is too small, or far too large to keep."""
        slab = self._slab
        if slab is None or not nbytes <= slab.place.nbytes <= _KEEP + 8 * nbytes:
            if slab is not None:
                self._slab = None  # also if nothing takes its place: what was given back is not ours to reuse
                connection.release(slab, slab.users)
            slab = self._slab = connection.take(max(nbytes, _LEAST), users)
        slab.users = users
        return slab

    def _hand_over(
        self,
        link: Link,
        connection: RuntimeConnection,
        jobs: list[ModelRequest],
        waiting: dict[int, ModelRequest],
    ) -> None:
        """It takes longer than predicted: let execute() return, and the connection and its memory with it."""
        self._direct = self._slab = None
        for job in jobs:
            self._deferred.reply(job.request)

        def idle() -> None:
            if self._link is link:
                self._direct = connection

        self._deferred.adopt(link, connection, waiting.values(), idle)
        for job in jobs:
            if job.id not in waiting:
                self._deferred.finish(job)

    def _answer_later(self, link: Link, requests: list[ClientRequest]) -> None:
        jobs = self._receive(link.deferred, requests)
        now = time.monotonic()
        for job in jobs:
            self._deferred.reply(job.request)
            job.checked = now
        if self._endpoint.preprocess_seconds * len(jobs) < _SLOW_HOOK:
            self._submit_later(link, jobs)
            return
        for job in jobs:
            self._deferred.run(partial(self._submit_later, link, [job]))

    def _submit_later(self, link: Link, jobs: list[ModelRequest]) -> None:
        placed = self._place_all(jobs, link.deferred, RuntimeConnection.take)
        waiting = {job.id for job in placed}
        for job in jobs:
            if job.id not in waiting:
                self._deferred.finish(job)
        _mark(link.deferred, placed)
        self._deferred.submit(link, placed)

    # --- one request --------------------------------------------------------------------------------------

    def _receive(self, connection: RuntimeConnection, requests: list[ClientRequest]) -> list[ModelRequest]:
        """Return jobs for all requests; some of these have failed."""
        if self._internal:
            for request in requests:
                if request.failure is None and not request.terms.run:
                    request.failure = RequestFailure(Status.NOT_FOUND, _INTERNAL)
        ids = connection.next_ids(len(requests))
        return [ModelRequest(id, request, connection) for id, request in zip(ids, requests, strict=True)]

    def _place_all(
        self,
        jobs: list[ModelRequest],
        connection: RuntimeConnection,
        take: Callable[[RuntimeConnection, int, int], Slab],
    ) -> list[ModelRequest]:
        """Those of the jobs that need the device, with a place in shared memory; others may fail."""
        resolved: list[ModelRequest] = []
        nbytes = 0
        for job in jobs:
            if job.request.failure is not None:
                continue
            try:
                nbytes += self._resolve_job(job, nbytes)
            except Exception as error:  # noqa: BLE001 - logged by blame
                blame(job.request, error)
            else:
                resolved.append(job)
        if not resolved:
            return []
        try:
            slab = take(connection, nbytes, len(resolved))
        except OSError:
            log.exception("no memory for %d bytes of requests", nbytes, extra=of_request(""))
            for job in resolved:
                job.fail(Status.QUEUE_FULL, "the server has no memory for this request; try again later")
            return []
        for job in resolved:
            job.put(slab)
        return [job for job in resolved if job.plan is not None and job.plan.rows]

    def _resolve_job(self, job: ModelRequest, at: int) -> int:
        """Find out what a request asks for; returns the bytes it needs, of which its inputs start at `at`."""
        request = job.request
        if request.reply is not None and request.reply.sent:
            raise RequestFailure(Status.DEADLINE, LATE)  # nobody needs what the hook would do
        arrays = read_inputs(self._tensors, request.triton, self._link.inputs)
        if self._batched:
            job.client_rows = len(next(iter(arrays.values())))
        job.inputs, plan = self._endpoint.prepare(arrays, request.id, request.trace)
        job.plan = plan
        job.inputs_at = at
        job.outputs_at = at + plan.input_bytes
        return plan.input_bytes + plan.output_bytes

    def _respond(self, job: ModelRequest) -> Any:
        """The response of a job whose outcome is known; never raises."""
        request = job.request
        if request.failure is None and request.reply is not None and request.reply.sent:
            job.fail(Status.DEADLINE, LATE)
        if request.failure is not None:
            return self._outcomes.failed(request, request.failure, job.attributes)
        if job.execute_ns:
            self._learn(job.execute_ns)
        try:
            response = self._responses.answer(self._outputs_of(job))
            self._outcomes.ended(request, Status.OK, attributes=job.attributes)
            return response
        except RequestFailure as failure:
            return self._outcomes.failed(request, failure, job.attributes)
        except Exception:
            log.exception("request %r: answering failed", request.id, extra=of_request(request.id))
            why = RequestFailure(Status.INTERNAL, "the answer could not be made; the server's log says why")
            return self._outcomes.failed(request, why, job.attributes)

    def _outputs_of(self, job: ModelRequest) -> list[Any]:
        assert job.plan is not None
        assert job.slab is not None
        arrays = {
            spec.name: job.slab.view(job.outputs_at + offset, spec, job.plan.rows)
            for spec, offset in job.plan.outputs
        }
        who = job.request.id
        results = self._endpoint.results(arrays, who, job.request.trace)
        rows = job.client_rows if self._batched else None
        checked = check_results(results, self._outputs, rows, "postprocess", who)
        return [
            self._tensors.make(wire.name, array, wire.dtype)
            for wire, array in zip(self._outputs, checked, strict=True)
        ]


def _mark(connection: RuntimeConnection, jobs: Sequence[ModelRequest]) -> None:
    """Tell the runtime which of the jobs that come next are traced."""
    marks = [job.request.trace.mark(job.id) for job in jobs if job.request.trace is not None]
    if marks:
        connection.mark(marks)
