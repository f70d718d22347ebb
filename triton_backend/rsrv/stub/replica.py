"""One replica of a model in its stub, on one device: what the engines of all kinds of models have in common."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from threading import Lock
from typing import Any, Generic

from rsrv.placement.batch_shares import Forecast
from rsrv.stub.deferred import DeferredReplies, W
from rsrv.stub.hook_guard import DrainAndExit, HookGuard
from rsrv.stub.metrics import Meters
from rsrv.stub.replies import Responses
from rsrv.stub.request import Answer, ClientRequest, EntryPoint, Outcomes
from rsrv.stub.resubmission import Resubmission
from rsrv.stub.sequences import SequenceHomes
from rsrv.stub.session import Attachment, Session
from rsrv.stub.tensors import Tensors

#: seconds that execute() may wait at most: a stub that is frozen for longer inside execute() brings the
#: whole server down, and the rest of Triton's queue stays hidden meanwhile
MAX_BLOCK_S = 0.2


class StubProcess:
    """Parts that a model's replicas share in its stub: ways to Triton, the guard of hooks, and the process's end."""

    def __init__(self, tensors: Tensors, responses: Responses, guard: HookGuard | None = None) -> None:
        """`guard` is shared with the other models of the process; None: there is no other."""
        self.tensors = tensors
        self.responses = responses
        self.guard = guard or HookGuard()
        #: those of all replicas
        self.sessions: list[Session] = []
        #: devices on which the model is to start although it is cold
        self.wanted: set[int] = set()
        self.end = DrainAndExit(self._stop, responses)
        #: replicas that the model is to have
        self.devices = 1
        #: requests that wait for a runtime
        self.resubmission = Resubmission(self.sessions)
        self.resubmission.place, self.resubmission.tell = self._place, self._tell
        #: the replica that gets a request that waited; None without a runtime
        self.live: Callable[[], Any] = lambda: None
        #: the replicas on whose devices a run that begins on a device calls each model; {}: all of them there
        self.stages: Callable[[int], Mapping[str, Any]] = lambda device: {}
        #: of a stateful model
        self.homes: SequenceHomes | None = None

    def begin(self, session: Session) -> Attachment:
        """Attach a session, known from its first connection on: a hook may fork meanwhile.

        Raises Cold, or one of UNREACHABLE.
        """
        if session.attachment is not None:
            return session.attachment
        self.sessions.append(session)
        session.demand, session.wanted = self.resubmission.demand, session.device in self.wanted
        session.starting = self.resubmission.starting
        try:
            return session.begin()
        except BaseException:
            self.sessions.remove(session)
            raise

    def forget(self, session: Session) -> None:
        """Leave out a session that could not be used."""
        if session in self.sessions:
            self.sessions.remove(session)

    def _place(self, request: ClientRequest) -> bool:
        """Give a request that waits for a runtime to a replica; `Resubmission.place`."""
        one = self.live()
        return one is not None and bool(one.take_over(request))

    def _tell(self, demand: Mapping[str, int]) -> None:
        """Have the runtimes that start the model know which requests wait; `Resubmission.tell`."""
        for session in list(self.sessions):
            session.tell(demand)

    def _stop(self) -> None:
        for session in self.sessions:
            session.stop()
        self.resubmission.close()

    def guard_hooks(self, settings: Mapping[str, Any], threads: int) -> None:
        """Limit the harm that hooks can do to other models; `threads` as in `HookGuard.start`, of each replica."""
        self.guard.start(settings, threads * self.devices, self.end, self.abandon)

    def abandon(self) -> None:
        """Close the sockets in a process that was forked, which must not keep the runtime from seeing the end of this one."""
        for session in self.sessions:
            session.abandon()


class ModelReplica(ABC, Generic[W]):
    """A model on one device: an `Engine`, a `MetaEngine` or a `GenerationEngine`."""

    #: threads that may start beside the model's own code, as in `HookGuard.start`; 0: it has no code of its own
    _hook_threads = 0

    def __init__(
        self, session: Session, process: StubProcess, pack: Callable[[Sequence[Any]], bytes], threads: int
    ) -> None:
        """`process` is shared with the model's other replicas; `pack` and `threads` are as in `DeferredReplies`."""
        self._tensors = process.tensors
        self._responses = process.responses
        self.session = session
        self._process = process
        self.meters = Meters()
        self._outcomes = Outcomes(self.meters, process.responses)
        #: held while execute() reads requests and answers them in place
        self._executing = Lock()
        self._deferred: DeferredReplies[W] = DeferredReplies(
            session, process.responses, pack, self._respond, threads, process.end
        )
        self._deferred.rescue, self._deferred.dismissed = self._rescue, self._fall_back
        #: answers Triton's requests, as `EntryPoint.execute`
        self.execute = self._entry(self._answer)
        #: the same after execute() returned; a list has failures, which are not sent
        self.execute_later = self._entry(partial(self._answer, at_once=False))

    def _entry(self, answer: Answer) -> Callable[[Sequence[Any]], list[Any] | None]:
        return EntryPoint(answer, self._outcomes, self._deferred.reply, self._process.end).execute

    def _use(self, attachment: Attachment) -> None:
        """Prepare requests for another attachment, before any thread submits one to it."""
        #: of the model in the runtime
        self._key = attachment.key
        self._outcomes.serve(attachment.key, traced=attachment.settings["traces"]["enabled"])
        self._stub_settings = attachment.settings["stub"]
        self._process.resubmission.retry_s = self._stub_settings["retry_s"]
        self._deferred.watch(attachment, attachment.deferred, {})

    @property
    def ready(self) -> bool:
        """True if a runtime serves this model and takes requests, or the model is cold."""
        return self.session.ready

    def answers_in_s(self) -> float:
        """Return the seconds until its device would have answered a batch that came now; infinite without a runtime that reads."""
        attachment = self.session.reading
        return inf if attachment is None else self._answers_in_s(attachment)

    def forecast(self) -> Forecast | None:
        """Return its device's work as expected; None without a runtime that reads, or if batches are not divided."""
        attachment = self.session.reading
        return None if attachment is None else self._forecast(attachment)

    def guard_hooks(self) -> None:
        """Limit the harm that the model's code can do to other models, by settings of the whole process."""
        if self._hook_threads:
            self._process.guard_hooks(self._stub_settings, self._hook_threads)

    def rows(self, requests: Sequence[Any]) -> list[int]:
        """Return the rows of Triton's requests, as far as they can be read; never raises."""
        return [1] * len(requests)

    def take_over(self, request: ClientRequest) -> bool:
        """Answer a request that waited for a runtime; False: there is none."""
        attachment = self.session.attachment
        if attachment is None:
            return False
        self._take_over(attachment, request)
        return True

    def close(self, *, direct: bool = True) -> None:
        """Fail the waiting requests, and detach; `direct` as in `Session.close`."""
        self._process.resubmission.close()
        self._process.guard.close()
        self._deferred.close()
        self.session.close(direct=direct)

    def _answer(self, requests: list[ClientRequest], *, at_once: bool = True) -> list[Any] | None:
        """Answer a batch, as `request.Answer`; unless `at_once`, only after execute() returned."""
        with self._executing:
            attachment = self.session.attachment
            if attachment is not None:
                return self._answer_by(attachment, requests, at_once)
            self._process.resubmission.add_batch(requests, self._deferred.reply, self._outcomes)
            return None

    def _fall_back(self, attachment: Attachment, start_timeout_s: float) -> None:
        """Leave a runtime that asks for it, because the model is idle there; with requests in flight, stay."""
        self._process.resubmission.start_timeout_s = start_timeout_s
        if self._deferred.idle and self._executing.acquire(blocking=False):
            try:
                self._leave(attachment)
            finally:
                self._executing.release()

    def _leave(self, attachment: Attachment) -> None:
        self._deferred.leave(attachment)

    @abstractmethod
    def _answers_in_s(self, attachment: Attachment) -> float:
        """Return `answers_in_s` of a runtime that reads."""

    @abstractmethod
    def _forecast(self, attachment: Attachment) -> Forecast | None:
        """Return `forecast` of a runtime that reads."""

    @abstractmethod
    def _answer_by(
        self, attachment: Attachment, requests: list[ClientRequest], at_once: bool
    ) -> list[Any] | None:
        """Answer a batch by a runtime, as `_answer`."""

    @abstractmethod
    def _take_over(self, attachment: Attachment, request: ClientRequest) -> None:
        """Answer a request that waited for this runtime."""

    @abstractmethod
    def _respond(self, one: W) -> Any:
        """Return the response of a request whose outcome is known; never raises."""

    @abstractmethod
    def _rescue(self, one: W) -> None:
        """Have a request, whose runtime died, wait for another one, or end it."""
