"""One request on its way through the stub."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rsrv.stub.endpoint import ExecutionPlan
from rsrv.stub.lane import Array, Lane, Slab
from rsrv.stub.replies import Failure
from rsrv.stub.request import Request
from rsrv.wire.frames import Completion, Status, Submission


@dataclass(slots=True, eq=False)
class Job:
    id: int  # unique on its lane
    request: Request
    lane: Lane
    #: what the request asks for, once its shapes are known
    inputs: Sequence[Array] = ()
    plan: ExecutionPlan | None = None
    client_rows: int = 0  # as the client counts them, if Triton batches
    #: where its inputs and outputs lie, bytes from the segment's start
    slab: Slab | None = None
    inputs_at: int = 0
    outputs_at: int = 0
    execute_ns: int = 0  # of the execution it was part of
    response: Any = None  # if it was made before the rest of its batch was done
    checked: float = 0.0  # when its client was last asked after
    cancelling: bool = False

    def put(self, slab: Slab) -> None:
        """Give it its part of a batch's memory, in which `inputs_at` and `outputs_at` were counted from 0."""
        self.slab = slab
        self.inputs_at += slab.place.offset
        self.outputs_at += slab.place.offset

    def write(self) -> Submission:
        """Copy the inputs to shared memory; what to send then."""
        plan, slab = self.plan, self.slab
        assert plan is not None
        assert slab is not None
        for (spec, offset), array in zip(plan.inputs, self.inputs, strict=True):
            slab.view(self.inputs_at + offset, spec, plan.rows)[...] = array
        self.inputs = ()
        deadline_ns, priority, run = self.request.terms
        return Submission(
            self.id,
            deadline_ns,
            plan.rows,
            plan.index,
            priority,
            slab.place.segment,
            self.inputs_at,
            self.outputs_at,
            run,
            self.request.tag,
        )

    @property
    def nbytes(self) -> int:
        """Of the answer, about, as far as it may be sent in two steps.

        Not that of a sub-call: the second one would end the server (24.10 takes it for another answer), while an answer
        that finds no room is missed by its caller for as long as a call through Triton may take.
        """
        return self.plan.output_bytes if self.plan and not self.request.terms.run else 0

    @property
    def attributes(self) -> Mapping[str, int]:
        """What its span tells of it."""
        return {} if self.plan is None else {"rsrv.rows": self.plan.rows}

    def release(self) -> None:
        """It is answered: its memory serves others."""
        if self.slab is not None:
            self.lane.release(self.slab)

    def finish(self, done: Completion) -> None:
        self.execute_ns = done.execute_ns
        if done.status is not Status.OK:
            self.fail(done.status, done.text)

    def fail(self, status: Status, text: str) -> None:
        self.request.failure = Failure(status, text)
