"""Answers after execute() returned. One thread reads completions, and a few threads send responses.

The reading thread also checks waiting requests. It looks for clients that are gone, and for deadlines that the runtime does not
enforce, because the runtime does not answer or a hook takes long.
"""

import heapq
import logging
import os
import queue
import select
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Generic, Protocol, TypeVar

from rsrv.front.rules import (
    CHECK_PERIOD_S,
    DEADLINE_GRACE_S,
    LATE,
    NO_DESCRIPTORS,
    NO_MEMORY,
    STUCK,
    UNLOADED,
)
from rsrv.stub.connection import RuntimeConnection
from rsrv.stub.replies import Reply, RequestFailure, Responses
from rsrv.stub.request import ClientRequest
from rsrv.stub.session import Attachment
from rsrv.wire.frames import Completion, ProtocolError, Status
from rsrv.wire.socket import Closed, lacks_descriptors

log = logging.getLogger(__name__)

#: Maximum number of checks for cancellation per round, because each takes up to 0.2 ms.
MAX_CHECKS = 16
#: Maximum number of late answers per round, because each takes this thread some tenths of a millisecond.
_MAX_LATE_ANSWERS = 64

#: Number of threads that send deferred replies and run slow hooks. With four threads, later replies do not wait for a slow hook.
SENDER_THREADS = 4

#: Text for clients if this process may open no further file.
OUT_OF_DESCRIPTORS = f"the model's process {NO_DESCRIPTORS}"


def no_room(error: OSError) -> RequestFailure:
    """Return the failure of a request for which shared memory cannot be allocated."""
    if lacks_descriptors(error):
        return RequestFailure(Status.INTERNAL, OUT_OF_DESCRIPTORS)
    return RequestFailure(Status.QUEUE_FULL, NO_MEMORY)


_BROKEN = "the model's process cannot continue; it is being restarted"


@dataclass(slots=True, eq=False)
class DeferredRequest:
    """A request that may be answered after execute() returned."""

    id: int  # Unique on its connection.
    request: ClientRequest
    connection: RuntimeConnection
    #: Triton's response. None until it is made.
    response: Any = field(default=None, kw_only=True)
    checked: float = field(default=0.0, kw_only=True)  # time.monotonic of the latest check for cancellation.
    cancelling: bool = field(default=False, kw_only=True)

    def write(self) -> Any:
        """Return the entry of a frame that submits the request."""
        raise NotImplementedError

    def finish(self, done: Completion) -> None:
        """Store the outcome that the runtime has sent for the request."""
        raise NotImplementedError

    def fail(self, status: Status, text: str) -> None:
        self.request.failure = RequestFailure(status, text)

    @property
    def nbytes(self) -> int:
        """Approximate size of the answer in bytes, or 0 if the answer must be sent in one step."""
        return 0

    def release(self) -> None:
        """Free the request's memory, after the answer."""


W = TypeVar("W", bound=DeferredRequest)
W_contra = TypeVar("W_contra", bound=DeferredRequest, contravariant=True)


class Owner(Protocol[W_contra]):
    """The replica whose requests are answered here."""

    def pack(self, entries: Sequence[Any]) -> bytes:
        """Make the frame that submits requests."""

    def respond(self, work: W_contra) -> Any:
        """Return the Triton response of a request whose outcome is known. This never raises."""

    def rescue(self, work: W_contra) -> None:
        """Requeue or fail a request whose runtime has ended."""

    def take_token(self, work: W_contra, token: int) -> None:
        """Handle a token of a generated answer. Called on the reading thread."""

    def lost(self, attachment: Attachment, why: object) -> None:
        """Handle the end of an attachment's runtime. This may be called repeatedly."""

    def dismissed(self, attachment: Attachment, start_timeout_s: float) -> None:
        """Disconnect the model from the runtime, which has asked for this with COLD.

        `start_timeout_s` limits how long requests wait for a later start of the model.
        """

    def end(self, text: str) -> None:
        """End the process after a fault that it cannot survive."""


class DeferredReplies(Generic[W]):
    """Requests that wait for the runtime, and the threads that answer them."""

    def __init__(self, owner: Owner[W], responses: Responses, threads: int) -> None:
        self._owner = owner
        self._responses = responses
        self._threads = threads
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._started = 0
        self._lock = threading.Lock()
        #: Number of tasks that wait for a sender thread or run on one.
        self._unfinished = 0
        #: For each connection: its pending requests by id, its attachment, and a callback for when none is pending.
        self._connections: dict[RuntimeConnection, dict[int, W]] = {}
        self._attachments: dict[RuntimeConnection, Attachment] = {}
        self._when_idle: dict[RuntimeConnection, Callable[[], None]] = {}
        self._poll = select.poll()
        self._by_fd: dict[int, RuntimeConnection] = {}
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll.register(self._wake, select.POLLIN)
        self._closed = False
        #: True if the reading thread sleeps until it is woken.
        self._asleep = False
        #: time.monotonic of the latest check for late requests.
        self._late_checked = 0.0
        self._reader = threading.Thread(target=self._read, name="completions", daemon=True)
        self._reader.start()

    # --- from execute() and from reconnecting -------------------------------------------------------------

    def watch(
        self,
        attachment: Attachment,
        connection: RuntimeConnection,
        pending: dict[int, W],
        when_idle: Callable[[], None] | None = None,
    ) -> None:
        """Begin to read a connection of an attachment. Reading also detects a crash of the runtime at once.

        `pending` has the connection's submitted requests by id, and belongs to this object from now on. When the last
        pending request is answered, `when_idle` is called, and the connection is not read here any more.
        """
        with self._lock:
            self._connections[connection] = pending
            self._attachments[connection] = attachment
            if when_idle is not None:
                self._when_idle[connection] = when_idle
            self._by_fd[connection.sock.fileno()] = connection
            self._poll.register(connection.sock, select.POLLIN)
        os.eventfd_write(self._wake, 1)

    def reply(self, request: ClientRequest) -> Reply:
        """Open the reply of a request. From now on, the reading thread checks the request's deadline and cancellation."""
        reply = request.open_reply(self._responses)
        if self._asleep:
            os.eventfd_write(self._wake, 1)
        return reply

    def submit(self, attachment: Attachment, requests: Sequence[W]) -> None:
        """Submit prepared requests. Each is answered in time, even if the runtime crashes or hangs."""
        submissions = [request.write() for request in requests]
        with self._lock:
            pending = self._connections.get(attachment.deferred)
            if pending is not None:
                pending.update((request.id, request) for request in requests)
        try:
            if pending is None:
                raise Closed("the runtime was lost")
            sent = attachment.deferred.submit(submissions, self._owner.pack)
        except (Closed, OSError) as error:
            self.lose(attachment, error)
            # `lose` rescues pending requests. These requests are not pending, because the runtime had been lost before.
            if pending is None:
                self.rescue_all(requests)
            return
        if sent < len(requests):
            with self._lock:
                # If another thread has called `lose` during `submit`, it has rescued these requests, so do not fail them.
                refused = [
                    request for request in requests[sent:] if pending.pop(request.id, None) is not None
                ]
            self._fail(refused, Status.QUEUE_FULL, STUCK)

    def lose(self, attachment: Attachment, why: object) -> None:
        """Rescue all requests of an attachment whose runtime is gone, and make the session reconnect. Thread-safe."""
        if attachment.deferred.closed_by_others or attachment.direct.closed_by_others:
            log.error(
                "the connection to the runtime was closed by other code of this process: does model.py close all files?"
            )
            self._owner.end(_BROKEN)
        with self._lock:
            handed_over = attachment.direct in self._connections
            requests = [
                request
                for connection in (attachment.deferred, attachment.direct)
                for request in self._forget(connection).values()
            ]
        self._owner.lost(attachment, why)
        attachment.deferred.close()
        if handed_over:
            attachment.direct.close()
        self.rescue_all(requests)

    def leave(self, attachment: Attachment) -> None:
        """Disconnect from a runtime that the model does not need any more.

        A request that arrives at the same time starts the model again.
        """
        with self._lock:
            requests = self._forget(attachment.deferred)
        for connection in (attachment.direct, attachment.deferred):
            connection.leave_runtime()
        attachment.deferred.close()
        # Wake the reading thread: the runtime sees the end of the connection only after this thread has stopped polling it.
        os.eventfd_write(self._wake, 1)
        self.rescue_all(requests.values())

    def rescue_all(self, requests: Iterable[W]) -> None:
        """Requeue or fail requests whose runtime is gone. All of these requests must have replies."""
        for request in requests:
            self._owner.rescue(request)

    @property
    def idle(self) -> bool:
        """True if no request waits for the runtime or for a sender thread."""
        return not self.pending and not self._unfinished

    @property
    def pending(self) -> int:
        """Number of requests that the runtime has not answered."""
        return sum(map(len, list(self._connections.values())))

    def run(self, work: Callable[[], None]) -> None:
        """Do work on a sender thread. The threads are started when they are first needed."""
        with self._lock:
            self._unfinished += 1
            if self._started < self._threads:
                self._start_thread()
        self._work.put(work)

    def _start_thread(self) -> None:
        """Start a sender thread. The caller holds the lock. If no further thread can start, the running threads do the work."""
        try:
            threading.Thread(target=self._send, name="sender", daemon=True).start()
            self._started += 1
        except RuntimeError:
            if not self._started:
                self._owner.end(_BROKEN)

    def finish(self, deferred: W) -> None:
        """Answer a request whose outcome is known, on a sender thread."""
        self.run(lambda: self._answer(deferred))

    def close(self) -> None:
        """Fail the waiting requests, and end the threads."""
        self._closed = True
        os.eventfd_write(self._wake, 1)
        self._reader.join(timeout=5)
        with self._lock:
            requests = [
                request
                for connection in list(self._connections)
                for request in self._forget(connection).values()
            ]
        self._fail(requests, Status.RUNTIME_DOWN, UNLOADED)
        for _ in range(self._started):
            self._work.put(None)

    # --- the reading thread -------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            while not self._closed:
                self._round()
        except Exception:
            log.exception("the runtime's answers cannot be read any more")
            self._owner.end(_BROKEN)

    def _round(self) -> None:
        # Set this before the check, so that a reply that is added after the check wakes this thread.
        self._asleep = True
        waiting = not self._responses.settled
        self._asleep = not waiting
        ready = self._poll.poll(CHECK_PERIOD_S * 1e3 if waiting else None)
        self._asleep = False
        for fd, _ in ready:
            if fd == self._wake:
                os.eventfd_read(self._wake)
                continue
            connection = self._by_fd.get(fd)
            if connection is not None:
                self._receive(connection)
        if waiting:
            self._fail_late()
            self._check_cancelled()

    def _receive(self, connection: RuntimeConnection) -> None:
        with self._lock:
            attachment = self._attachments.get(connection)
        if attachment is None:
            return  # Another thread has lost the connection.
        try:
            completions = connection.receive(0)
        except TimeoutError:
            return
        except (Closed, ProtocolError, OSError) as error:
            self.lose(attachment, error)
            return
        except Exception as error:
            log.exception("the runtime's answers cannot be read")
            self.lose(attachment, error)
            return
        idle = None
        with self._lock:
            pending = self._connections.get(connection, {})
            tokens = [(pending[id], token) for id, token in connection.take_tokens() if id in pending]
            requests = [(pending.pop(done.request), done) for done in completions if done.request in pending]
            if not pending and connection in self._when_idle:
                idle = self._when_idle.pop(connection)
                self._forget(connection)
        for request, token in tokens:
            self._owner.take_token(request, token)
        for request, done in requests:
            request.finish(done)
            self.finish(request)
        if idle is not None:
            idle()
        if connection.dismissed is not None:
            seconds, connection.dismissed = connection.dismissed, None
            self._owner.dismissed(attachment, seconds)

    def _fail_late(self) -> None:
        """Fail requests whose deadline passed long ago.

        Their executions continue and keep their memory, but the results are not sent.
        """
        now = time.monotonic()
        if now - self._late_checked < CHECK_PERIOD_S:
            return
        self._late_checked = now
        until_ns = time.monotonic_ns() - int(1e9 * DEADLINE_GRACE_S)
        late = [reply for reply in self._responses.owed() if 0 < reply.deadline_ns < until_ns]
        for reply in late[:_MAX_LATE_ANSWERS]:
            reply.send_failure(Status.DEADLINE, LATE)

    def _check_cancelled(self) -> None:
        now = time.monotonic()
        with self._lock:
            due = [
                request
                for pending in self._connections.values()
                for request in pending.values()
                if not request.cancelling and now - request.checked > CHECK_PERIOD_S
            ]
        # Begin with the requests whose latest check was longest ago, so that every request is checked.
        for request in heapq.nsmallest(MAX_CHECKS, due, key=attrgetter("checked")):
            request.checked = now
            if request.request.reply is not None and request.request.reply.cancelled():
                with suppress(Closed, OSError):  # A runtime that has ended has nothing to cancel.
                    request.cancelling = request.connection.cancel([request.id])

    def _forget(self, connection: RuntimeConnection) -> dict[int, W]:
        """Stop reading a connection, and return its pending requests. The caller holds the lock."""
        pending = self._connections.pop(connection, {})
        self._attachments.pop(connection, None)
        self._when_idle.pop(connection, None)
        for fd, open_connection in list(self._by_fd.items()):
            if open_connection is connection:
                del self._by_fd[fd]
                self._poll.unregister(fd)
        return pending

    def _fail(self, requests: Iterable[W], status: Status, text: str) -> None:
        for request in requests:
            request.fail(status, text)
            self.finish(request)

    # --- the sender threads -------------------------------------------------------------------------------

    def _send(self) -> None:
        try:
            while (work := self._work.get()) is not None:
                try:
                    work()
                except Exception:
                    log.exception("answering failed")
                finally:
                    with self._lock:
                        self._unfinished -= 1
                # Drop the request before the next wait, because a dropped reply sends an error at once.
                del work
        except Exception:  # noqa: BLE001
            # There is no memory even for the log.
            self._owner.end(_BROKEN)

    def _answer(self, deferred: W) -> None:
        assert deferred.request.reply is not None
        try:
            deferred.request.reply.send(deferred.response or self._owner.respond(deferred), deferred.nbytes)
        finally:
            deferred.release()
