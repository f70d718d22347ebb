"""One request of a meta model on its way through the stub."""

import queue
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rsrv.stub.endpoint import Array
from rsrv.stub.lane import Lane
from rsrv.stub.replies import Failure, Reply
from rsrv.stub.session import Link
from rsrv.stub.tracing import Trace
from rsrv.wire.calls import Entrance
from rsrv.wire.frames import Completion, Status, request_tag

#: seconds between looks whether the client is still there; each costs up to 0.2 ms
_CHECK = 0.05


@dataclass(slots=True, eq=False)
class Visit:
    id: int  # of its ENTER
    request: Any
    link: Link
    lane: Lane  # that its ENTER goes by, if it has to wait
    since: float  # when it came, of time.perf_counter
    deadline_ns: int = 0
    priority: int = 0
    trace: Trace | None = None  # if it is traced
    #: random, so that nobody else can name it
    token: int = field(default_factory=lambda: secrets.randbits(64) or 1)
    let_in: bool = False
    failure: Failure | None = None
    response: Any = None
    reply: Reply | None = None
    checked: float = 0.0
    cancelling: bool = False
    #: arrays that the response may refer to
    results: Sequence[Array] = ()
    #: where execute() waits for it
    inbox: queue.SimpleQueue["Visit"] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    #: its span tells no more of it than those of all requests
    attributes: ClassVar[Mapping[str, int]] = {}

    @property
    def tag(self) -> int:
        return request_tag(self.request.request_id())

    def write(self) -> Entrance:
        return Entrance(self.id, self.token, self.deadline_ns, self.priority, self.tag)

    def finish(self, done: Completion) -> None:
        self.let_in = done.status is Status.OK
        if self.trace is not None:
            self.trace.part("queue", self.since, done.text)
        if not self.let_in:
            self.failure = Failure(done.status, done.text)

    def fail(self, status: Status, text: str) -> None:
        self.failure = Failure(status, text)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.results)

    def release(self) -> None:
        self.request, self.results = None, ()

    def check(self) -> None:
        """Raises Failure when nobody needs the answer any more."""
        if self.deadline_ns and time.monotonic_ns() >= self.deadline_ns:
            raise Failure(Status.DEADLINE, "the deadline passed before it was called")
        now = time.monotonic()
        if self.reply is not None and now - self.checked > _CHECK:
            self.checked = now
            if self.reply.cancelled():
                raise Failure(Status.CANCELLED, "the request was cancelled")
