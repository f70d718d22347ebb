"""One request on its way through the stub."""

from dataclasses import dataclass, field
from typing import Any

from rsrv.stub.lane import Array, Lane, Slab
from rsrv.stub.replies import Failure, Reply
from rsrv.stub.shapes import Plan
from rsrv.wire.frames import Completion, Status, Submission


@dataclass(slots=True, eq=False)
class Job:
    id: int  # unique on its lane
    request: Any
    lane: Lane
    deadline_ns: int = 0  # CLOCK_MONOTONIC, 0: none
    priority: int = 0
    #: what the request asks for, once its shapes are known
    inputs: list[Array] = field(default_factory=list)
    plan: Plan | None = None
    client_rows: int = 0  # as the client counts them, if Triton batches
    #: where its inputs and outputs lie, bytes from the segment's start
    slab: Slab | None = None
    inputs_at: int = 0
    outputs_at: int = 0
    execute_ns: int = 0  # of the execution it was part of
    failure: Failure | None = None
    #: set when the answer will be sent after execute() returned
    reply: Reply | None = None
    checked: float = 0.0  # when its client was last asked after
    cancelling: bool = False

    def submission(self) -> Submission:
        """Once its inputs are written."""
        assert self.slab is not None
        assert self.plan is not None
        return Submission(
            self.id,
            self.deadline_ns,
            self.plan.rows,
            self.plan.index,
            self.priority,
            0,
            self.slab.place.segment,
            self.inputs_at,
            self.outputs_at,
        )

    def finish(self, done: Completion) -> None:
        self.execute_ns = done.execute_ns
        if done.status is not Status.OK:
            self.failure = Failure(done.status, done.text)

    def fail(self, status: Status, text: str) -> None:
        self.failure = Failure(status, text)
