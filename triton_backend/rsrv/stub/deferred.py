"""Answers that come after execute() returned: one thread reads completions, a few send responses.

The reading thread also looks after those who wait: whether a client is gone, and whether a deadline has passed that nobody
else keeps, because the runtime does not answer or a hook takes its time.
"""

import heapq
import logging
import os
import queue
import select
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, Generic, Protocol, TypeVar

from rsrv.stub.connection import RuntimeConnection
from rsrv.stub.replies import Reply, Responses
from rsrv.stub.request import ClientRequest
from rsrv.stub.session import DOWN, UNLOADED, Link, Session
from rsrv.wire.frames import Completion, ProtocolError, Status
from rsrv.wire.socket import Closed

log = logging.getLogger("rsrv.stub")

#: seconds between looks whether clients are still there; each look costs up to 0.2 ms, so few per round
_CANCEL_ROUND = 0.05
_CANCEL_CHECKS = 16
#: nanoseconds after which a deadline is kept here: the runtime keeps it before, if it is well
_GRACE_NS = 100_000_000
#: late answers per round, as each takes this thread some tenths of a millisecond
_LATE_ANSWERS = 64

#: threads that send deferred replies and run slow hooks: four keep a slow hook from holding up the replies behind it
SENDER_THREADS = 4

LATE = "the deadline passed before the answer was there"
STUCK = "the model runtime takes no requests at the moment; try again later"
_BROKEN = "the model's process cannot go on; it is being restarted"


class DeferredRequest(Protocol):
    """A request that will be answered after execute() returned."""

    id: int  # unique on its connection
    connection: RuntimeConnection
    request: ClientRequest
    #: if it was made already
    response: Any
    checked: float  # when its client was last asked after, seconds of time.monotonic
    cancelling: bool

    def write(self) -> Any:
        """What to send for it."""

    def finish(self, done: Completion) -> None: ...

    def fail(self, status: Status, text: str) -> None: ...

    @property
    def nbytes(self) -> int:
        """Of the answer, about."""

    def release(self) -> None:
        """It is answered."""


W = TypeVar("W", bound=DeferredRequest)


class DeferredReplies(Generic[W]):
    """`send` writes what jobs ask for to a connection, and says for how many it could; `respond` turns a finished job into
    a Triton response, and must not raise; `end` ends the process when it cannot go on."""

    def __init__(
        self,
        session: Session,
        responses: Responses,
        send: Callable[[RuntimeConnection, list[Any]], int],
        respond: Callable[[W], Any],
        threads: int,
        end: Callable[[str], object],
    ) -> None:
        self._session = session
        self._responses = responses
        self._end = end
        self._send_to = send
        self._respond = respond
        self._threads = threads
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._started = 0
        self._lock = threading.Lock()
        #: connections that this object reads: their pending jobs by id, their link, and what to do when none is left
        self._connections: dict[RuntimeConnection, dict[int, W]] = {}
        self._links: dict[RuntimeConnection, Link] = {}
        self._when_idle: dict[RuntimeConnection, Callable[[], None]] = {}
        self._poll = select.poll()
        self._by_fd: dict[int, RuntimeConnection] = {}
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll.register(self._wake, select.POLLIN)
        self._closed = False
        #: whether the reading thread sleeps until it is woken
        self._asleep = False
        self._looked = 0.0
        self._reader = threading.Thread(target=self._read, name="completions", daemon=True)
        self._reader.start()

    # --- from execute() and from reconnecting -------------------------------------------------------------

    def watch(self, link: Link) -> None:
        """Read a new link's connection from now on; also notices at once when the runtime dies."""
        self._add(link, link.deferred, {})

    def adopt(
        self, link: Link, connection: RuntimeConnection, jobs: Iterable[W], when_idle: Callable[[], None]
    ) -> None:
        """Take over a connection with submitted jobs; `when_idle` is called when the last of them is answered."""
        self._add(link, connection, {job.id: job for job in jobs}, when_idle)

    def reply(self, request: ClientRequest) -> Reply:
        """Give a request that is answered later its reply. From now on it is looked after."""
        sender = request.triton.get_response_sender()
        reply = request.reply = Reply(sender, self._responses, request.terms.deadline_ns, request.id)
        if self._asleep:
            os.eventfd_write(self._wake, 1)
        return reply

    def submit(self, link: Link, jobs: Sequence[W]) -> None:
        """Send prepared jobs on the link's connection; each is answered in time, whatever happens to the runtime."""
        submissions = [job.write() for job in jobs]
        with self._lock:
            pending = self._connections.get(link.deferred)
            if pending is not None:
                pending.update((job.id, job) for job in jobs)
        try:
            if pending is None:
                raise Closed("the link was lost")
            sent = self._send_to(link.deferred, submissions)
        except (Closed, OSError):
            self.lose(link)
            # _lose answers what was pending; if the link had been lost before, these jobs were not in it.
            if pending is None:
                self._fail(jobs, Status.RUNTIME_DOWN, DOWN)
            return
        if sent < len(jobs):
            with self._lock:
                # Without those that were answered because the link was lost meanwhile.
                refused = [job for job in jobs[sent:] if pending.pop(job.id, None) is not None]
            self._fail(refused, Status.QUEUE_FULL, STUCK)

    def lose(self, link: Link) -> None:
        """The runtime behind a link is gone: answer all that waited for it, and look for another. Any thread."""
        if link.deferred.robbed or link.direct.robbed:
            log.error(
                "somebody has closed the connection to the runtime: code of model.py that closes all files?"
            )
            self._end(_BROKEN)
        with self._lock:
            handed_over = link.direct in self._connections
            jobs = [
                job
                for connection in (link.deferred, link.direct)
                for job in self._forget(connection).values()
            ]
        self._session.lost(link)
        link.deferred.close()
        if handed_over:
            link.direct.close()
        self._fail(jobs, Status.RUNTIME_DOWN, DOWN)

    def run(self, work: Callable[[], None]) -> None:
        """On one of the sending threads, which are started when first needed."""
        if self._started < self._threads:
            with self._lock:
                if self._started < self._threads:
                    self._start_thread()
        self._work.put(work)

    def _start_thread(self) -> None:
        """Under the lock. Where the system has no thread left, those that there are must do."""
        try:
            threading.Thread(target=self._send, name="sender", daemon=True).start()
            self._started += 1
        except RuntimeError:
            if not self._started:
                self._end(_BROKEN)

    def finish(self, job: W) -> None:
        """Answer a job whose outcome is known, on a sending thread."""
        self.run(lambda: self._answer(job))

    def close(self) -> None:
        """Who still waits is told now: nobody reads their answers any more."""
        self._closed = True
        os.eventfd_write(self._wake, 1)
        self._reader.join(timeout=5)
        with self._lock:
            jobs = [
                job for connection in list(self._connections) for job in self._forget(connection).values()
            ]
        self._fail(jobs, Status.RUNTIME_DOWN, UNLOADED)
        for _ in range(self._started):
            self._work.put(None)

    # --- the reading thread -------------------------------------------------------------------------------

    def _add(
        self,
        link: Link,
        connection: RuntimeConnection,
        pending: dict[int, W],
        when_idle: Callable[[], None] | None = None,
    ) -> None:
        with self._lock:
            self._connections[connection] = pending
            self._links[connection] = link
            if when_idle is not None:
                self._when_idle[connection] = when_idle
            self._by_fd[connection.sock.fileno()] = connection
            self._poll.register(connection.sock, select.POLLIN)
        os.eventfd_write(self._wake, 1)

    def _read(self) -> None:
        try:
            while not self._closed:
                self._round()
        except Exception:
            # Nobody would be answered any more.
            log.exception("the runtime's answers cannot be read any more")
            self._end(_BROKEN)

    def _round(self) -> None:
        # Said before it is looked: who comes in between wakes it.
        self._asleep = True
        waiting = not self._responses.settled
        self._asleep = not waiting
        ready = self._poll.poll(_CANCEL_ROUND * 1e3 if waiting else None)
        self._asleep = False
        for fd, _ in ready:
            if fd == self._wake:
                os.eventfd_read(self._wake)
                continue
            connection = self._by_fd.get(fd)
            if connection is not None:
                self._receive(connection)
        if waiting:
            self._look_for_late()
            self._look_for_cancelled()

    # What goes wrong with one of them must not end the thread.

    def _receive(self, connection: RuntimeConnection) -> None:
        with self._lock:
            link = self._links.get(connection)
        if link is None:
            return  # another thread found out first
        try:
            completions = connection.receive(0)
        except TimeoutError:
            return
        except (Closed, ProtocolError, OSError) as error:
            if not self._closed:
                log.error("lost the runtime: %s", error)
            self.lose(link)
            return
        except Exception:
            log.exception("the runtime's answers cannot be read")
            self.lose(link)
            return
        idle = None
        with self._lock:
            pending = self._connections.get(connection, {})
            jobs = [(pending.pop(done.request), done) for done in completions if done.request in pending]
            if not pending and connection in self._when_idle:
                idle = self._when_idle.pop(connection)
                self._forget(connection)
        for job, done in jobs:
            job.finish(done)
            self.finish(job)
        if idle is not None:
            idle()

    def _look_for_late(self) -> None:
        """Tell those whose time is long up. What they wait for goes on, with its memory, and ends unheard."""
        now = time.monotonic()
        if now - self._looked < _CANCEL_ROUND:
            return
        self._looked = now
        until_ns = time.monotonic_ns() - _GRACE_NS
        late = [reply for reply in self._responses.owed() if 0 < reply.deadline_ns < until_ns]
        for reply in late[:_LATE_ANSWERS]:
            reply.send_failure(Status.DEADLINE, LATE)

    def _look_for_cancelled(self) -> None:
        now = time.monotonic()
        with self._lock:
            due = [
                job
                for pending in self._connections.values()
                for job in pending.values()
                if not job.cancelling and now - job.checked > _CANCEL_ROUND
            ]
        # Those that were not looked at for longest, so that everybody's turn comes.
        for job in heapq.nsmallest(_CANCEL_CHECKS, due, key=attrgetter("checked")):
            job.checked = now
            try:
                if job.request.reply is not None and job.request.reply.cancelled():
                    job.cancelling = job.connection.cancel([job.id])
            except Exception:
                log.exception("looking whether a client is still there")

    def _forget(self, connection: RuntimeConnection) -> dict[int, W]:
        """Under the lock."""
        pending = self._connections.pop(connection, {})
        self._links.pop(connection, None)
        self._when_idle.pop(connection, None)
        for fd, other in list(self._by_fd.items()):
            if other is connection:
                del self._by_fd[fd]
                self._poll.unregister(fd)
        return pending

    def _fail(self, jobs: Iterable[W], status: Status, text: str) -> None:
        for job in jobs:
            job.fail(status, text)
            self.finish(job)

    # --- the sending threads ------------------------------------------------------------------------------

    def _send(self) -> None:
        try:
            while (work := self._work.get()) is not None:
                try:
                    work()
                except Exception:
                    log.exception("answering failed")
                del work  # a job must not live on here: its reply answers when dropped
        except Exception:  # noqa: BLE001
            # There is not even the memory to say what failed.
            self._end(_BROKEN)

    def _answer(self, job: W) -> None:
        assert job.request.reply is not None
        try:
            job.request.reply.send(job.response or self._respond(job), job.nbytes)
        finally:
            job.release()
