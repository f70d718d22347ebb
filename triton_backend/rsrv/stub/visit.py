"""One request of a meta model on its way through the stub."""

import queue
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rsrv.stub.endpoint import Array
from rsrv.stub.lane import Lane
from rsrv.stub.replies import Failure
from rsrv.stub.request import Request
from rsrv.stub.session import Link
from rsrv.wire.calls import Entrance
from rsrv.wire.frames import Completion, Status

#: seconds between looks whether the client is still there; each costs up to 0.2 ms
_CHECK = 0.05


@dataclass(slots=True, eq=False)
class Visit:
    id: int  # of its ENTER
    request: Request
    link: Link
    lane: Lane  # that its ENTER goes by, if it has to wait
    #: random, so that nobody else can name it
    token: int = field(default_factory=lambda: secrets.randbits(64) or 1)
    let_in: bool = False
    response: Any = None
    checked: float = 0.0
    cancelling: bool = False
    #: arrays that the response may refer to
    results: Sequence[Array] = ()
    #: where execute() waits for it
    inbox: queue.SimpleQueue["Visit"] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def write(self) -> Entrance:
        deadline_ns, priority, _ = self.request.terms
        return Entrance(self.id, self.token, deadline_ns, priority, self.request.tag)

    def finish(self, done: Completion) -> None:
        self.let_in = done.status is Status.OK
        if self.request.trace is not None:
            self.request.trace.part("queue", self.request.since, done.text)
        if not self.let_in:
            self.fail(done.status, done.text)

    def fail(self, status: Status, text: str) -> None:
        self.request.failure = Failure(status, text)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.results)

    def release(self) -> None:
        self.request.triton, self.results = None, ()

    def check(self) -> None:
        """Raises Failure when nobody needs the answer any more."""
        if 0 < self.request.terms.deadline_ns <= time.monotonic_ns():
            raise Failure(Status.DEADLINE, "the deadline passed before it was called")
        now = time.monotonic()
        reply = self.request.reply
        if reply is not None and now - self.checked > _CHECK:
            self.checked = now
            if reply.cancelled():
                raise Failure(Status.CANCELLED, "the request was cancelled")
