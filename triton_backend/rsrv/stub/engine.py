"""A model's stub inside execute(). It copies requests to shared memory, sends one frame to the runtime, and answers.

If execute() waits and returns a list (an answer in place), that costs a third of the CPU of answering later through response
senders, and lets Triton form batches. But while execute() waits, the runtime does not see the rest of Triton's queue, so the
device idles after a long execution. So execute() waits only for short executions.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from rsrv.front.rules import DOWN, LATE, LONGER_WEIGHT, STUCK
from rsrv.hooks.loader import Hooks
from rsrv.logs import of_request
from rsrv.placement.batch_shares import ExecutionCosts, Forecast
from rsrv.stub.connection import RuntimeConnection, Slab
from rsrv.stub.deferred import SENDER_THREADS, DeferredRequest, no_room
from rsrv.stub.endpoint import (
    SLOW_HOOK_S,
    Endpoint,
    ExecutionPlan,
    LearnedDuration,
    PlannedTensor,
    WireTensor,
    read_inputs,
)
from rsrv.stub.large_request import LargeRequest, PartRequest
from rsrv.stub.replica import MAX_BLOCK_S, ModelReplica, StubProcess
from rsrv.stub.replies import NUMBER, RequestFailure, invalid
from rsrv.stub.request import ClientRequest
from rsrv.stub.sequences import LOST, SequenceStep, read_step
from rsrv.stub.session import Attachment, Session
from rsrv.stub.tensors import Array, size_of
from rsrv.wire.frames import ALONE, WAITED, Completion, ProtocolError, Status, Submission, pack_submissions
from rsrv.wire.socket import Closed

log = logging.getLogger(__name__)

#: execute() waits only if the device is free within this many times `stub.in_place_ms`.
_QUEUE_FACTOR = 5
#: An answer that took at least this many seconds carries the request's number, for `rsrv why`.
_SLOW_S = 0.1
#: Minimum size of the slab for answers in place.
_MIN_SLAB_BYTES = 64 << 10
#: A slab for answers in place is replaced if it has this many bytes more than eight times what a batch needs.
_KEEP_SLAB_BYTES = 16 << 20
_INTERNAL = "only meta models may call this model: its manifest says `internal: true`"


@dataclass(slots=True, eq=False)
class ModelRequest(DeferredRequest):
    """One request of a model in the stub."""

    inputs: Sequence[Array] = ()
    #: Execution and memory of the request. None until the shapes are known.
    plan: ExecutionPlan | None = None
    #: Step of a sequence, for a stateful model.
    step: SequenceStep | None = None
    client_rows: int = 0  # Number of rows of the client's tensors, if Triton batches the model.
    #: Memory of the request's batch. The inputs and outputs lie at the following offsets in its segment.
    slab: Slab | None = None
    inputs_at: int = 0
    outputs_at: int = 0
    execute_ns: int = 0  # Duration of the request's execution.
    answer_bytes: int = 0
    #: The request in parts, until its first parts are submitted. None: it has no parts, or they were submitted.
    large: LargeRequest | None = None
    #: Outputs collected from the parts. None: the request was not submitted in parts.
    collected: Mapping[str, Array] | None = None

    def write(self) -> Submission:
        """Copy the inputs to shared memory, and return the submission to send."""
        plan, slab = self.plan, self.slab
        assert plan is not None
        assert slab is not None
        for planned, array in zip(plan.inputs, self.inputs, strict=True):
            at = self.inputs_at + planned.offset
            np.ndarray(planned.shape, planned.dtype, slab.segment, at)[...] = array
        if plan.output_bytes:
            slab.segment[self.outputs_at] = 0
        self.inputs = ()
        self.request.number = self.id
        deadline_ns, priority, run, _ = self.request.params
        flags = (ALONE if self.request.deaths else 0) | (
            WAITED if self.request.retry_until or self.request.admitted else 0
        )
        return Submission(
            self.id,
            deadline_ns,
            plan.rows,
            plan.variant,
            priority,
            slab.place.segment,
            flags if self.step is None else flags | self.step.flags,
            self.inputs_at,
            self.outputs_at,
            run,
            self.request.tag,
            self.request.whole if self.step is None else self.step.sequence,
            plan.length,
        )

    def written(self) -> dict[str, Array]:
        """Return the module's inputs in shared memory, as `write` copied them."""
        assert self.plan is not None
        return self._arrays(self.plan.inputs, self.inputs_at)

    def outputs(self) -> Mapping[str, Array]:
        """Return the module's outputs in shared memory, or the outputs collected from the parts."""
        if self.collected is not None:
            return self.collected
        assert self.plan is not None
        return self._arrays(self.plan.outputs, self.outputs_at)

    def _arrays(self, tensors: Sequence[PlannedTensor], start: int) -> dict[str, Array]:
        assert self.slab is not None
        return {
            block.tensor.name: np.ndarray(block.shape, block.dtype, self.slab.segment, start + block.offset)
            for block in tensors
        }

    @property
    def nbytes(self) -> int:
        """Approximate size of the answer in bytes, or 0 for a sub-call.

        The answer to a sub-call must not be sent in two steps (`Reply.send`), because the second step would crash the server.
        So if shared memory has no room for this answer, the caller waits until its call times out.
        """
        return 0 if self.request.params.run else self.answer_bytes

    @property
    def launched(self) -> bool:
        """False if the runtime never gave the request to its device. The outputs are then as `write` left them."""
        # If the inputs were not written, the memory still has an earlier request's outputs.
        if self.inputs or self.slab is None:
            return False
        return not self.plan or not self.plan.output_bytes or bool(self.slab.segment[self.outputs_at])

    def release(self) -> None:
        if self.slab is not None:
            self.connection.release(self.slab)

    def finish(self, done: Completion) -> None:
        self.execute_ns = done.execute_ns
        if done.status is not Status.OK:
            self.fail(done.status, done.text)


class Engine(ModelReplica[ModelRequest]):
    """Answers the requests of one model."""

    def __init__(
        self,
        session: Session,
        attachment: Attachment,
        process: StubProcess,
        hooks: Hooks,
        outputs: Sequence[WireTensor],
        batched: bool,
        *,
        internal: bool = False,
    ) -> None:
        super().__init__(session, process, SENDER_THREADS)
        self._hooks = hooks
        self._hook_threads = SENDER_THREADS if hooks.preprocess or hooks.postprocess else 0
        self._outputs = outputs
        #: True if Triton batches this model: then a request has as many rows in every output as in its inputs.
        self._batched = batched
        #: True if only meta models may call it.
        self._internal = internal
        #: Large requests in progress. Between two of its parts, the runtime knows nothing of a large request.
        self._large: set[ModelRequest] = set()
        #: Memory for answers in place. It holds one batch at a time. When the next batch arrives, Triton has copied the answers
        #: of the previous batch.
        self._slab: Slab | None = None
        #: Connection for answers in place. None while it is handed over.
        self._direct: RuntimeConnection | None = None
        self._attachment = self._latest = attachment
        self.use(attachment)
        self._switch(attachment)

    def _switch(self, attachment: Attachment) -> None:
        """Use another attachment for answers in place.

        Called on execute()'s thread, which alone uses `_slab` and `_attachment`.
        """
        if self._direct is not None:
            self._direct.close()
        self._attachment, self._direct, self._slab = attachment, attachment.direct, None

    def use(self, attachment: Attachment) -> None:
        if self._latest is not self._attachment:
            self._latest.direct.close()  # This runtime died before execute() used the connection.
        self._latest = attachment
        #: Variant of the request that was read last.
        self._variant = 0
        self._inputs = attachment.inputs
        (model,) = attachment.models
        self._largest = model.interface.variants[0].sizes[-1]
        self._stateful = model.stateful
        measure = partial(self.meters.hook, model.name)
        # Do not split requests of a model that Triton does not batch, because Triton does not limit their number of rows.
        self._endpoint = Endpoint(
            model.interface,
            self._hooks,
            self._process.guard,
            measure,
            splits=self._batched and not model.stateful,
        )
        self._execution = LearnedDuration(min(map(min, model.costs)), fall=1.0, rise=LONGER_WEIGHT)
        self._costs = [
            ExecutionCosts(variant.sizes, seconds)
            for variant, seconds in zip(model.interface.variants, model.costs, strict=True)
        ]
        super().use(attachment)

    def close(self, *, direct: bool = True) -> None:
        super().close(direct=direct)
        # After a runtime has died, `_direct` is the connection to the dead runtime until execute() uses the next runtime.
        if direct and self._direct is not None:
            self._direct.close()

    def pack(self, entries: Sequence[Any]) -> bytes:
        return pack_submissions(entries)

    def _answers_in_s(self, attachment: Attachment) -> float:
        return attachment.begins_in_s() + self._execution.seconds

    def _forecast(self, attachment: Attachment) -> Forecast:
        return attachment.forecast(self._costs[self._variant])

    def rows(self, requests: Sequence[Any]) -> list[int]:
        return [self._rows(request) for request in requests]

    def _rows(self, request: Any) -> int:
        if self._batched:
            with suppress(Exception):  # A wrong request is refused later, when its inputs are read.
                tensor = request.inputs()[0]
                return len(self._tensors.read(tensor, self._inputs[tensor.name()].dtype))
        return 1

    # --- a batch ------------------------------------------------------------------------------------------

    def _answer_by(
        self, attachment: Attachment, requests: list[ClientRequest], at_once: bool
    ) -> list[Any] | None:
        if attachment is not self._attachment:
            self._switch(attachment)
        if at_once and self._direct is attachment.direct and self._is_soon(attachment, len(requests)):
            try:
                return self._answer_in_place(attachment, attachment.direct, requests)
            except BaseException as error:
                # The next batch must not read frames that are left on the connection.
                self._deferred.lose(attachment, error)
                raise
        self._answer_later(attachment, requests)
        return None

    def _is_soon(self, attachment: Attachment, count: int) -> bool:
        """Return True if execute() should wait: the executions start soon, and take at most stub.in_place_ms.

        The limit for the executions is low, because the runtime sees no further batch of the model while they run. The limit
        for the work before them is `_QUEUE_FACTOR` times as high: that work keeps the device busy, and only delays execute().
        """
        limit_s = attachment.settings["stub"]["in_place_ms"] / 1e3
        executions = 1 + (count - 1) // self._largest
        endpoint = self._endpoint
        hooks = endpoint.preprocess.seconds + endpoint.postprocess.seconds
        own_s = self._execution.seconds * executions + hooks * count
        return bool(own_s <= limit_s and attachment.direct.device_free_in_s() <= _QUEUE_FACTOR * limit_s)

    def _answer_in_place(
        self, attachment: Attachment, connection: RuntimeConnection, requests: list[ClientRequest]
    ) -> list[Any] | None:
        batch = self._receive(connection, requests)
        waiting = self._place(batch, connection, self._take_direct)
        placed = list(waiting.values())
        # Requests that were not placed have failed, have no rows, or are large. If there is a large request, the answers cannot
        # be one list.
        has_large = len(placed) < len(batch) and any(
            model_request.large is not None for model_request in batch
        )
        # Submit the requests in groups of the size of one execution. So the device works while later groups are written and
        # earlier groups are answered.
        step = self._largest
        until = time.monotonic() + MAX_BLOCK_S
        try:
            for at in range(0, len(placed), step):
                sending = placed[at : at + step]
                sent = connection.submit([model_request.write() for model_request in sending])
                if sent < len(sending):
                    for model_request in placed[at + sent :]:
                        waiting.pop(model_request.id).fail(Status.QUEUE_FULL, STUCK)
                    break
            if has_large:
                self._hand_over(attachment, connection, batch, waiting)
                return None
            while waiting:
                completions = connection.receive(until - time.monotonic())
                for done in completions:
                    waiting[done.request].finish(done)
                for done in completions:
                    model_request = waiting.pop(done.request)
                    model_request.response = self.respond(model_request)
        except TimeoutError:
            self._hand_over(attachment, connection, batch, waiting)
            return None
        except (Closed, ProtocolError, OSError) as error:
            self._deferred.lose(attachment, error)
            self._defer(batch, waiting)
            self._deferred.rescue_all(waiting.values())
            return None
        return [model_request.response or self.respond(model_request) for model_request in batch]

    def _take_direct(self, connection: RuntimeConnection, nbytes: int, users: int) -> Slab:
        """Return the direct connection's only slab. Replace it if it is too small, or far too large."""
        slab = self._slab
        if slab is None or not nbytes <= slab.place.nbytes <= _KEEP_SLAB_BYTES + 8 * nbytes:
            if slab is not None:
                self._slab = None  # Forget the released slab even if taking another one fails.
                connection.release(slab, slab.users)
            slab = self._slab = connection.take(max(nbytes, _MIN_SLAB_BYTES), users)
        slab.users = users
        return slab

    def _hand_over(
        self,
        attachment: Attachment,
        connection: RuntimeConnection,
        batch: list[ModelRequest],
        waiting: dict[int, ModelRequest],
    ) -> None:
        """Answer the batch after execute() returned. Until then, the waiting requests keep the connection and its memory."""
        if not waiting:
            self._defer(batch, waiting)
            return
        self._direct = self._slab = None
        self._defer(batch, waiting)

        def idle() -> None:
            if self._attachment is attachment:
                self._direct = connection

        self._deferred.watch(attachment, connection, waiting, idle)

    def _defer(self, batch: list[ModelRequest], waiting: Collection[int]) -> None:
        """Answer a batch after execute() returned.

        Requests that do not wait for the runtime are answered at once.
        """
        for model_request in batch:
            self._deferred.reply(model_request.request)
        for model_request in batch:
            if model_request.id not in waiting:
                self._begin_or_finish(model_request)

    def _begin_or_finish(self, model_request: ModelRequest) -> None:
        """Submit the first parts of a large request, or answer a request that has failed or has no rows."""
        if model_request.large is not None:
            # The parts refer to the request from now on. Clear the reverse reference: without a cycle, the request's tensors
            # are freed as soon as it is answered.
            large, model_request.large = model_request.large, None
            self._large.add(model_request)
            large.begin()
        else:
            self._deferred.finish(model_request)

    def _answer_later(self, attachment: Attachment, requests: list[ClientRequest]) -> None:
        batch = self._receive(attachment.deferred, requests)
        now = time.monotonic()
        for model_request in batch:
            self._deferred.reply(model_request.request)
            model_request.checked = now
        if self._endpoint.preprocess.seconds * len(batch) < SLOW_HOOK_S:
            self._submit_later(attachment, batch)
            return
        for model_request in batch:
            self._deferred.run(partial(self._submit_later, attachment, [model_request]))

    def _submit_later(self, attachment: Attachment, batch: list[ModelRequest]) -> None:
        try:
            placed = self._place(batch, attachment.deferred, RuntimeConnection.take)
        except Closed:  # The runtime died while hooks ran.
            self._deferred.rescue_all(batch)
            return
        for model_request in batch:
            if model_request.id not in placed:
                self._begin_or_finish(model_request)
        if placed:
            self._deferred.submit(attachment, list(placed.values()))

    # --- after a runtime's death --------------------------------------------------------------------------

    def rescue(self, model_request: ModelRequest) -> None:
        request = model_request.request
        if (
            model_request.step is not None and not model_request.step.start
        ):  # No other runtime has the state of the request's sequence.
            model_request.fail(Status.SEQUENCE_LOST, LOST)
            self._deferred.finish(model_request)
            return
        if model_request.launched and model_request.connection.ended_by(self._key):
            request.deaths += 1
            self._remember(request.deaths, model_request)
        # The dead runtime may still write to this memory, so the request gets other memory.
        model_request.release()
        self._process.front.add(
            request, request.large if isinstance(request, PartRequest) else self._outcomes
        )

    def _remember(self, deaths: int, model_request: ModelRequest) -> None:
        """Record how many runtimes died while they executed a request's inputs (see `FrontLoop.record`)."""
        with suppress(Exception):
            try:
                arrays = read_inputs(self._tensors, model_request.request.triton, self._inputs)
            except Exception:  # noqa: BLE001 - an answered request has no inputs any more
                arrays = model_request.written()
            self._process.front.record(deaths, arrays)

    def _submit_parts(self, parts: Sequence[PartRequest]) -> None:
        """Submit parts of a large request to the device that answers first, or to the device of its run."""
        model = self._process.model
        replica = self if parts[0].params.run or model is None else model.live()
        attachment = None if replica is None else replica.session.attachment
        if replica is not None and attachment is not None:
            replica._take_over_all(attachment, parts)
            return
        for part in parts:
            self._process.front.add(part, part.large)

    def _outcome_of_part(self, model_request: ModelRequest) -> RequestFailure | Mapping[str, Array]:
        """Return the failure of a part, or its outputs. The outputs lie in shared memory until the part is released."""
        request = model_request.request
        if isinstance(request, PartRequest) and request.part.first == 0:
            # `rsrv why` finds the request by its first part.
            request.large.request.number = model_request.id
        if request.failure is not None:
            return request.failure
        if model_request.execute_ns:
            self._execution.learn(model_request.execute_ns / 1e9)
        if request.deaths:
            self._remember(0, model_request)
        return model_request.outputs()

    @property
    def idle(self) -> bool:
        return super().idle and not self._large

    def _finish_large(
        self, model_request: ModelRequest, failure: RequestFailure | None, outputs: Mapping[str, Array]
    ) -> None:
        """Answer a large request, on the front's thread."""
        self._large.discard(model_request)
        model_request.request.failure, model_request.collected = failure, outputs
        self._deferred.finish(model_request)

    def _take_over(self, attachment: Attachment, request: ClientRequest) -> None:
        self._take_over_all(attachment, [request])

    def _take_over_all(self, attachment: Attachment, requests: Sequence[ClientRequest]) -> None:
        """Submit requests together, so that they reach the runtime in their order."""
        batch = self._receive(attachment.deferred, requests)
        self._deferred.run(partial(self._submit_later, attachment, batch))

    # --- one request --------------------------------------------------------------------------------------

    def _receive(
        self, connection: RuntimeConnection, requests: Sequence[ClientRequest]
    ) -> list[ModelRequest]:
        """Return the requests of a batch with their numbers on the connection. Some of them have failed."""
        batch = []
        for id, request in zip(connection.next_ids(len(requests)), requests, strict=True):
            if self._internal and request.failure is None and not request.params.run:
                request.failure = RequestFailure(Status.NOT_FOUND, _INTERNAL)
            elif request.params.run and request.params.device != self.session.device:
                # The run is on another device. The meta model repeats the call, and this starts the model on the run's device.
                request.failure = request.failure or RequestFailure(Status.RUNTIME_DOWN, DOWN)
            batch.append(ModelRequest(id, request, connection))
        return batch

    def _place(
        self,
        batch: list[ModelRequest],
        connection: RuntimeConnection,
        take: Callable[[RuntimeConnection, int, int], Slab],
    ) -> dict[int, ModelRequest]:
        """Place each request in shared memory, or fail it. Return the requests that need the device, by id.

        Raises Closed if the runtime died.
        """
        prepared: list[ModelRequest] = []
        nbytes = 0
        for model_request in batch:
            if model_request.request.failure is not None:
                continue
            try:
                nbytes += self._prepare(model_request, nbytes)
            except Exception as error:  # noqa: BLE001 - logged by failure_for
                model_request.request.failure = model_request.request.failure_for(error)
            else:
                if model_request.large is None:
                    prepared.append(model_request)
        if not prepared:
            return {}
        try:
            slab = take(connection, nbytes, len(prepared))
        except OSError as error:
            log.exception(
                "%d bytes of shared memory for requests cannot be allocated", nbytes, extra=of_request("")
            )
            failure = no_room(error)
            for model_request in prepared:
                model_request.fail(failure.status, failure.text)
            self._process.guard.out_of_descriptors(error)
            return {}
        placed = {}
        marks = []
        for model_request in prepared:
            model_request.slab = slab
            model_request.inputs_at += slab.place.offset
            model_request.outputs_at += slab.place.offset
            if model_request.plan is not None and model_request.plan.rows:
                placed[model_request.id] = model_request
                if model_request.request.span is not None:
                    marks.append(model_request.request.span.mark(model_request.id))
        if marks:
            connection.mark(marks)
        return placed

    def _prepare(self, model_request: ModelRequest, at: int) -> int:
        """Read and check a request's tensors. Return the bytes of shared memory that it needs from the offset `at` on."""
        request = model_request.request
        if request.reply is not None and request.reply.sent:
            raise RequestFailure(Status.DEADLINE, LATE)  # The client has its answer, so skip the hook.
        if request.is_part and isinstance(request, PartRequest):
            model_request.inputs, plan = self._plan_part(request)
        else:
            if self._stateful:
                model_request.step = self._read_step(request.triton)
            arrays = read_inputs(self._tensors, request.triton, self._inputs)
            request.deaths = max(request.deaths, self._process.front.check(arrays))
            if self._batched:
                model_request.client_rows = len(next(iter(arrays.values())))
            rows = model_request.client_rows if self._batched else None
            model_request.inputs, plan = self._endpoint.prepare(arrays, request.id, request.span, rows)
            if model_request.step is not None and plan.rows != 1:
                text = (
                    f"a request of a sequence has one row, and this one has {plan.rows}: send each sequence's row in a "
                    "request of its own"
                )
                raise invalid(text)
        model_request.plan = plan
        self._variant = plan.variant
        request.rows = plan.rows
        if plan.rows > plan.largest:
            finish = partial(self._finish_large, model_request)
            model_request.large = LargeRequest(
                request, model_request.inputs, plan, self._submit_parts, finish, self._process.front.post
            )
            return 0
        model_request.inputs_at = at
        model_request.outputs_at = at + plan.input_bytes
        return plan.input_bytes + plan.output_bytes

    def _plan_part(self, request: PartRequest) -> tuple[list[Array], ExecutionPlan]:
        """Return the inputs of a part and their plan. Raises RequestFailure."""
        arrays = request.large.inputs(request.part)
        inputs, plan = self._endpoint.plan_again(arrays, request.id)
        request.deaths = max(request.deaths, self._process.front.check(arrays))
        request.nbytes = plan.input_bytes
        return inputs, plan

    def _read_step(self, triton: Any) -> SequenceStep:
        """Read a request's parameters about its sequence.

        Raises RequestFailure, for example if the sequence's state was lost with a runtime.
        """
        step, homes, attachment = read_step(triton), self._process.homes, self.session.attachment
        if step.start or homes is None or attachment is None:
            return step
        if homes.is_lost(step.sequence, attachment.since):
            raise RequestFailure(Status.SEQUENCE_LOST, LOST)
        return step

    def respond(self, model_request: ModelRequest) -> Any:
        request = model_request.request
        if request.is_part:
            return self._outcome_of_part(model_request)
        if request.failure is None and request.reply is not None and request.reply.sent:
            model_request.fail(Status.DEADLINE, LATE)
        if request.failure is not None:
            return self._outcomes.failed(request, request.failure)
        try:
            rows = model_request.client_rows if self._batched else None
            outputs = model_request.outputs()
            if model_request.execute_ns:
                self._execution.learn(model_request.execute_ns / 1e9)
            results = self._endpoint.results(outputs, self._outputs, rows, request.id, request.span)
            made = [
                self._tensors.make(wire.name, array, wire.dtype)
                for wire, array in zip(self._outputs, results, strict=True)
            ]
            model_request.answer_bytes = sum(map(size_of, results))
            slow = time.perf_counter() - request.since >= _SLOW_S
            response = self._responses.answer(made, {NUMBER: request.number} if slow else None)
            self._outcomes.ended(request, Status.OK)
            if request.deaths:
                self._remember(0, model_request)
            return response
        except Exception as error:  # noqa: BLE001 - logged by failure_for
            return self._outcomes.failed(request, request.failure_for(error))
