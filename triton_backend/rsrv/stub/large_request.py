"""A client's request that is submitted in parts, because it has more rows than the largest compiled size.

The preprocess hook has seen the whole request, and the postprocess hook sees the whole result. In between, each part is a
request of its own: it waits, and moves to the next runtime, as other requests do.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from random import getrandbits

import numpy as np

from rsrv.front.parts import Parts, RowRange
from rsrv.stub.endpoint import ExecutionPlan, copy_rows, rows_of
from rsrv.stub.replies import PartReply, Reply, RequestFailure
from rsrv.stub.request import ClientRequest
from rsrv.stub.tensors import Array


class LargeRequest:
    """The parts of one request, and the outputs of the parts that were answered.

    After `begin`, only the front's thread changes the state of the parts, until the model is unloaded.
    """

    def __init__(
        self,
        request: ClientRequest,
        inputs: Sequence[Array],
        plan: ExecutionPlan,
        submit: Callable[[Sequence["PartRequest"]], None],
        finish: Callable[[RequestFailure | None, Mapping[str, Array]], None],
        post: Callable[[Callable[[], None]], None],
    ) -> None:
        """Make the request. Call `begin` afterwards to submit its first parts.

        Args:
            request: The client's request. It gets a reply before `begin`.
            inputs: The module's inputs.
            plan: Plan of the whole request.
            submit: Submits parts. The first part must reach the runtime first: it takes the request's place in the queue.
            finish: Called once: with the module's outputs when all parts are answered, or with the failure of the first part
                that fails.
            post: Calls a function on the front's thread.
        """
        self.request = request
        self._inputs = inputs
        self._plan = plan
        self._submit = submit
        self._finish = finish
        self._post = post
        #: The module's outputs by name.
        self._outputs: dict[str, Array] = {
            planned.tensor.name: np.empty(planned.shape, planned.dtype) for planned in plan.outputs
        }
        #: Number that all parts of this request carry in the runtime.
        self.number = getrandbits(63) | 1
        self._parts = Parts(plan.rows, plan.largest)

    def begin(self) -> None:
        """Submit the first parts."""
        self._submit_next()

    def failed(self, request: ClientRequest, failure: RequestFailure) -> RequestFailure:
        """Return the outcome of a part that the front has failed: the failure."""
        return failure

    def has_ended(self) -> bool:
        """Return True if the request has its outcome, so that its other parts are useless."""
        return self._parts.ended

    def inputs(self, part: RowRange) -> dict[str, Array]:
        """Return the inputs of a part by name."""
        return {
            planned.tensor.name: array[rows_of(planned, part)]
            for planned, array in zip(self._plan.inputs, self._inputs, strict=True)
        }

    def take(self, part: RowRange, outcome: RequestFailure | Mapping[str, Array]) -> None:
        """Copy the outputs of a part, and end the part with its outcome. Any thread may call this."""
        failure = outcome if isinstance(outcome, RequestFailure) else None
        if not isinstance(outcome, RequestFailure):
            try:
                copy_rows(outcome, part, self._plan, self._outputs)
            except RequestFailure as other_version:
                failure = other_version
        self._post(partial(self._end_part, failure))

    def _end_part(self, failure: RequestFailure | None) -> None:
        """Submit the next parts, or end the request."""
        if self._parts.end(answered=failure is None):
            self._finish(failure, self._outputs)
        else:
            self._submit_next()

    def _submit_next(self) -> None:
        if parts := self._parts.take():
            self._submit([PartRequest(self, part) for part in parts])


class PartRequest(ClientRequest):
    """A part of a large request. It has the deadline, the priority and the id of the whole request."""

    __slots__ = ("large", "part")

    def __init__(self, large: LargeRequest, part: RowRange) -> None:
        whole = large.request
        assert isinstance(whole.reply, Reply)
        # Only the whole request holds Triton's request.
        self.triton = None
        self.since, self.id, self.tag, self.params = whole.since, whole.id, whole.tag, whole.params
        self.span, self.failure, self.number = whole.span, None, -1
        self.rows, self.part = part.rows, part
        self.deaths, self.waiting_since, self.retry_until, self.nbytes = 0, 0.0, 0.0, 0
        self.large, self.is_part, self.whole = large, True, large.number
        self.admitted = bool(part.first or whole.retry_until)
        self.reply = PartReply(whole.reply, large.has_ended, partial(large.take, part))
