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

from rsrv.logs import fields
from rsrv.stub.endings import Endings, blame
from rsrv.stub.endpoint import Endpoint, WireTensor, check_results, read_inputs
from rsrv.stub.farewell import Farewell
from rsrv.stub.guard import HookGuard
from rsrv.stub.hooks import Hooks
from rsrv.stub.job import Job
from rsrv.stub.lane import Lane, Slab
from rsrv.stub.later import LATE, STUCK, Later
from rsrv.stub.meters import Meters
from rsrv.stub.replies import Failure, Responses
from rsrv.stub.session import DOWN, Link, Session
from rsrv.stub.tensors import Tensors
from rsrv.stub.terms import id_of, read_parameters, read_terms
from rsrv.wire.frames import ProtocolError, Status, request_tag
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
#: bytes of the direct lane's memory: the least, and how much of it stays after a large batch
_LEAST, _KEEP = 64 << 10, 16 << 20
#: requests of a batch that a line of the log names
_MOST_NAMED = 16
_OUR_FAULT = "the request could not be handled; the server's log says why"
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
        self._endings = Endings(self.meters, responses)
        self._farewell = Farewell(session.stop, responses)
        self._execute_ns = 0.0
        #: memory for answers in place: only one batch is ever under way on that lane, and Triton has copied its
        #: answers when the next one comes
        self._slab: Slab | None = None
        #: the lane for answers in place; None while it is handed over
        self._direct: Lane | None = None
        self._link = link = session.begin()
        self._later: Later[Job] = Later(
            session,
            responses,
            Lane.submit,
            self._respond,
            link.settings["stub"]["sender_threads"],
            self._farewell,
        )
        session.on_link = self._later.watch
        self._later.watch(link)
        self._switch(link)

    def _switch(self, link: Link) -> None:
        """On execute()'s thread, which alone uses `_slab` and `_link`."""
        if self._direct is not None:
            self._direct.close()
        self._link, self._direct, self._slab = link, link.direct, None
        self._traced = link.settings["traces"]["enabled"]
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
            self._guard.start(settings, settings["sender_threads"], self._farewell, self._session.abandon)

    def close(self) -> None:
        self._guard.close()
        self._later.close()
        self._session.close()

    # --- execute ------------------------------------------------------------------------------------------

    def execute(self, requests: list[Any]) -> list[Any] | None:
        """Triton's entry: a list of responses, or None when they come later."""
        now, link = time.perf_counter(), self._session.link
        if link is None:
            key = self._link.key if self._traced else None
            return self._endings.turned_away(requests, now, Status.RUNTIME_DOWN, self._session.down, key)
        if link is not self._link:
            self._switch(link)
        try:
            if self._direct is link.direct and self._soon(link, len(requests)):
                return self._in_place(link, link.direct, requests)
        except Exception:  # noqa: BLE001 - logged by _say_failed
            _say_failed(requests)
            self._later.lose(link)  # what it left on the lane must not be taken for the next batch's
            return self._endings.turned_away(requests, now, Status.INTERNAL, _OUR_FAULT)
        try:
            self._answer_later(link, requests)
        except Exception:  # noqa: BLE001 - logged by _say_failed
            # Those that have no answer yet get it when their replies are dropped.
            _say_failed(requests)
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

    def _in_place(self, link: Link, lane: Lane, requests: list[Any]) -> list[Any] | None:
        jobs = self._receive(lane, requests)
        placed = self._place_all(jobs, lane, self._take_direct)
        waiting = {job.id: job for job in placed}
        if self._traced:
            _mark(lane, placed)
        # As many at a time as one execution takes: the device works on the first while the next are written,
        # and on the last while the first are answered.
        step = self._largest
        until = time.monotonic() + _MAX_BLOCK
        try:
            for at in range(0, len(placed), step):
                sending = placed[at : at + step]
                sent = lane.submit([job.write() for job in sending])
                if sent < len(sending):
                    for job in placed[at + sent :]:
                        waiting.pop(job.id).fail(Status.QUEUE_FULL, STUCK)
                    break
            while waiting:
                done = lane.receive(until - time.monotonic())
                for completion in done:
                    waiting[completion.request].finish(completion)
                for completion in done:
                    job = waiting.pop(completion.request)
                    job.response = self._respond(job)
        except TimeoutError:
            self._hand_over(link, lane, jobs, waiting)
            return None
        except (Closed, ProtocolError, OSError):
            self._later.lose(link)
            for job in waiting.values():
                job.fail(Status.RUNTIME_DOWN, DOWN)
        return [job.response or self._respond(job) for job in jobs]

    def _take_direct(self, lane: Lane, nbytes: int, users: int) -> Slab:
        """The direct lane's one slab, made anew when it is too small, or far too large to keep."""
        slab = self._slab
        if slab is None or not nbytes <= slab.place.nbytes <= _KEEP + 8 * nbytes:
            if slab is not None:
                self._slab = None  # also if nothing takes its place: what was given back is not ours to reuse
                lane.release(slab, slab.users)
            slab = self._slab = lane.take(max(nbytes, _LEAST), users)
        slab.users = users
        return slab

    def _hand_over(self, link: Link, lane: Lane, jobs: list[Job], waiting: dict[int, Job]) -> None:
        """It takes longer than predicted: let execute() return, and the lane and its memory with it."""
        self._direct = self._slab = None
        for job in jobs:
            job.reply = self._later.reply(job.request, job.deadline_ns)

        def idle() -> None:
            if self._link is link:
                self._direct = lane

        self._later.adopt(link, lane, waiting.values(), idle)
        for job in jobs:
            if job.id not in waiting:
                self._later.finish(job)

    def _answer_later(self, link: Link, requests: list[Any]) -> None:
        jobs = self._receive(link.later, requests)
        now = time.monotonic()
        for job in jobs:
            job.reply, job.checked = self._later.reply(job.request, job.deadline_ns), now
        if self._endpoint.preprocess_seconds * len(jobs) < _SLOW_HOOK:
            self._submit_later(link, jobs)
            return
        for job in jobs:
            self._later.run(partial(self._submit_later, link, [job]))

    def _submit_later(self, link: Link, jobs: list[Job]) -> None:
        placed = self._place_all(jobs, link.later, Lane.take)
        waiting = {job.id for job in placed}
        for job in jobs:
            if job.id not in waiting:
                self._later.finish(job)
        if self._traced:
            _mark(link.later, placed)
        self._later.submit(link, placed)

    # --- one request --------------------------------------------------------------------------------------

    def _receive(self, lane: Lane, requests: list[Any]) -> list[Job]:
        """Jobs for all requests, with what these ask for, or how they fail."""
        jobs = [
            Job(id, request, lane) for id, request in zip(lane.next_ids(len(requests)), requests, strict=True)
        ]
        now_ns, unix_ns, now = time.monotonic_ns(), time.time_ns(), time.perf_counter()
        for job in jobs:
            job.since = now
            try:
                parameters = read_parameters(job.request)
                if self._traced:
                    job.trace = self.meters.spans.begin(job.request, parameters)
                job.deadline_ns, job.priority, job.run = read_terms(job.request, parameters, now_ns, unix_ns)
                if self._internal and not job.run:
                    raise Failure(Status.NOT_FOUND, _INTERNAL)
            except Exception as error:  # noqa: BLE001 - logged by blame
                blame(job, error)
        return jobs

    def _place_all(self, jobs: list[Job], lane: Lane, take: Callable[[Lane, int, int], Slab]) -> list[Job]:
        """Those of the jobs that need the device, with a place in shared memory; others may fail."""
        resolved: list[Job] = []
        nbytes = 0
        for job in jobs:
            if job.failure is not None:
                continue
            try:
                nbytes += self._resolve_job(job, nbytes)
            except Exception as error:  # noqa: BLE001 - logged by blame
                blame(job, error)
            else:
                resolved.append(job)
        if not resolved:
            return []
        try:
            slab = take(lane, nbytes, len(resolved))
        except OSError:
            log.exception("no memory for %d bytes of requests", nbytes)
            for job in resolved:
                job.fail(Status.QUEUE_FULL, "the server has no memory for this request; try again later")
            return []
        for job in resolved:
            job.put(slab)
        return [job for job in resolved if job.plan is not None and job.plan.rows]

    def _resolve_job(self, job: Job, at: int) -> int:
        """Find out what a request asks for; returns the bytes it needs, of which its inputs start at `at`."""
        if job.reply is not None and job.reply.sent:
            raise Failure(Status.DEADLINE, LATE)  # nobody needs what the hook would do
        arrays = read_inputs(self._tensors, job.request, self._link.inputs)
        if self._batched:
            job.client_rows = len(next(iter(arrays.values())))
        job.tag, who = request_tag(job.request.request_id()), id_of(job.request)
        job.inputs, plan = self._endpoint.prepare(arrays, who, job.trace)
        job.plan = plan
        job.inputs_at = at
        job.outputs_at = at + plan.input_bytes
        return plan.input_bytes + plan.output_bytes

    def _respond(self, job: Job) -> Any:
        """The response of a job whose outcome is known; never raises."""
        if job.failure is None and job.reply is not None and job.reply.sent:
            job.fail(Status.DEADLINE, LATE)
        if job.failure is not None:
            return self._failed(job, job.failure)
        if job.execute_ns:
            self._learn(job.execute_ns)
        try:
            response = self._responses.answer(self._outputs_of(job))
            self._endings.ended(job, self._link.key, Status.OK)
            return response
        except Failure as failure:
            return self._failed(job, failure)
        except Exception:
            who = id_of(job.request)
            log.exception("request %r: answering failed", who, extra=fields(request=who))
            why = "the answer could not be made; the server's log says why"
            return self._failed(job, Failure(Status.INTERNAL, why))

    def _failed(self, job: Job, failure: Failure) -> Any:
        return self._endings.failed(job, self._link.key, failure.status, failure.text, sub_call=job.run != 0)

    def _outputs_of(self, job: Job) -> list[Any]:
        assert job.plan is not None
        assert job.slab is not None
        arrays = {
            spec.name: job.slab.view(job.outputs_at + offset, spec, job.plan.rows)
            for spec, offset in job.plan.outputs
        }
        who = id_of(job.request)
        results = self._endpoint.results(arrays, who, job.trace)
        rows = job.client_rows if self._batched else None
        checked = check_results(results, self._outputs, rows, "postprocess", who)
        return [
            self._tensors.make(wire.name, array, wire.dtype)
            for wire, array in zip(self._outputs, checked, strict=True)
        ]


def _say_failed(requests: list[Any]) -> None:
    """To be called while the exception is handled."""
    named = [who for request in requests if (who := id_of(request))][:_MOST_NAMED]
    log.exception(
        "a batch of %d requests failed: %s",
        len(requests),
        ", ".join(map(repr, named)),
        extra=fields(requests=named),
    )


def _mark(lane: Lane, jobs: Sequence[Job]) -> None:
    """Tell the runtime which of the jobs that come next are traced."""
    marks = [job.trace.mark(job.id) for job in jobs if job.trace is not None]
    if marks:
        lane.mark(marks)
