"""One request on its way through the stub."""

import time
from dataclasses import dataclass, field
from typing import Any

from rsrv.stub.lane import Lane
from rsrv.stub.replies import Failure, Reply
from rsrv.wire.frames import Completion, Status
from rsrv.wire.layout import Variant
from rsrv.wire.memory import Place


@dataclass(slots=True, eq=False)
class Job:
    id: int  # unique on its lane
    request: Any
    lane: Lane
    #: set by preparing: the variant, its index, rows, and where inputs and then outputs lie
    variant: Variant | None = None
    index: int = 0
    rows: int = 0
    place: Place | None = None
    outputs_at: int = 0  # bytes from the place's start
    failure: Failure | None = None
    #: set when the answer will be sent after execute() returned
    reply: Reply | None = None
    since: float = field(default_factory=time.monotonic)
    checked: float = 0.0
    cancelling: bool = False

    def finish(self, done: Completion) -> None:
        if done.status is not Status.OK:
            self.failure = Failure(done.status, done.text)

    def fail(self, status: Status, text: str) -> None:
        self.failure = Failure(status, text)
