"""A replica of a model in its stub, on one device. This is the common base of the engines of all kinds of models."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from threading import Lock
from typing import Any, Generic, Protocol

from rsrv.front.events import Dismissed, RuntimeLost, StartTimeoutKnown
from rsrv.front.rules import LOST
from rsrv.placement.batch_shares import Forecast
from rsrv.stub.deferred import DeferredReplies, W
from rsrv.stub.front_loop import FrontLoop
from rsrv.stub.hook_guard import DrainAndExit, HookGuard
from rsrv.stub.metrics import Meters
from rsrv.stub.replies import Responses
from rsrv.stub.request import Answer, ClientRequest, EntryPoint, Outcomes
from rsrv.stub.sequences import SequenceHomes
from rsrv.stub.session import Attachment, Session
from rsrv.stub.tensors import Tensors

log = logging.getLogger(__name__)

#: Maximum number of seconds that execute() waits. If a stub freezes inside execute(), the whole server fails. In addition, the
#: runtime does not see the rest of Triton's queue while execute() waits.
MAX_BLOCK_S = 0.2


class StubProcess:
    """Parts that a model's replicas share: access to Triton, the front, the guard of hooks, and the end of the process."""

    def __init__(self, tensors: Tensors, responses: Responses, guard: HookGuard | None = None) -> None:
        """`guard` is the guard that the models of the process share. None: the process has only this model."""
        self.tensors = tensors
        self.responses = responses
        self.guard = guard or HookGuard()
        #: The thread that decides about requests without a runtime.
        self.front = FrontLoop()
        #: Sessions of all devices.
        self.sessions: list[Session] = []
        #: The model on all of its devices.
        self.model: Placed | None = None
        self.end = DrainAndExit(self._stop, responses)
        #: Number of replicas that the model will have.
        self.devices = 1
        #: Devices of live sequences. None for a model without state.
        self.homes: SequenceHomes | None = None

    def _stop(self) -> None:
        self.front.stop()
        for session in self.sessions:
            session.attachment = None

    def abandon(self) -> None:
        """Close the sockets in a forked process. Otherwise the runtime would not see the end of this process."""
        for session in self.sessions:
            session.abandon()


class Placed(Protocol):
    """A model on all of its devices, as its replicas see it."""

    def live(self) -> Any:
        """Return the replica that gets a waiting request, or None if there is no runtime."""

    def stages(self, device: int) -> Mapping[str, Any]:
        """Return, by model, the replicas for the calls of a run that begins on `device`. {}: all calls are on that device."""


class ModelReplica(ABC, Generic[W]):
    """A model on one device: an `Engine`, a `MetaEngine` or a `GenerationEngine`."""

    #: Number of rsrv's threads that may start, as in `HookGuard.start`. 0: the model has no code of its own.
    _hook_threads = 0

    def __init__(self, session: Session, process: StubProcess, threads: int) -> None:
        """`process` is shared with the model's other replicas; `threads` is as in `DeferredReplies`."""
        self._tensors = process.tensors
        self._responses = process.responses
        self.session = session
        self._process = process
        self.meters = Meters()
        self._outcomes = Outcomes(self.meters, process.responses)
        #: Lock that is held while execute() reads requests and answers them in place.
        self._executing = Lock()
        self._deferred: DeferredReplies[W] = DeferredReplies(self, process.responses, threads)
        #: Answers Triton's requests, like `EntryPoint.execute`.
        self.execute = self._entry(self._answer)
        #: Answers Triton's requests after execute() returned. If the result is a list, it has failures that the caller must send.
        self.execute_later = self._entry(partial(self._answer, at_once=False))

    def _entry(self, answer: Answer) -> Callable[[Sequence[Any]], list[Any] | None]:
        return EntryPoint(answer, self._outcomes, self._deferred.reply, self._process.end).execute

    def use(self, attachment: Attachment) -> None:
        """Prepare the replica for another attachment. Called before any thread submits a request to it."""
        #: Key of the model in the runtime.
        self._key = attachment.key
        self._outcomes.serve(attachment.key, traced=attachment.settings["traces"]["enabled"])
        self._stub_settings = attachment.settings["stub"]

    def watch(self, attachment: Attachment) -> None:
        """Begin to read the answers of an attachment's runtime. This also detects the end of the runtime."""
        self._deferred.watch(attachment, attachment.deferred, {})

    def answers_in_s(self) -> float:
        """Return the seconds until the device would answer a batch that arrived now. Infinite without a runtime that reads."""
        attachment = self.session.reading
        return inf if attachment is None else self._answers_in_s(attachment)

    def forecast(self) -> Forecast | None:
        """Return the device's expected work, or None if no runtime reads, or if batches of this model are not divided."""
        attachment = self.session.reading
        return None if attachment is None else self._forecast(attachment)

    def guard_hooks(self) -> None:
        """Limit the harm that the model's code can do to other models. The limits hold for the whole process."""
        process = self._process
        if self._hook_threads:
            process.guard.start(self._stub_settings, self._hook_threads * process.devices, process.end)

    def rows(self, requests: Sequence[Any]) -> list[int]:
        """Return the number of rows of each request, or 1 if it cannot be read. Never raises."""
        return [1] * len(requests)

    def take_over(self, request: ClientRequest) -> bool:
        """Answer a request that waited for a runtime. Return False if there is no runtime."""
        attachment = self.session.attachment
        if attachment is None:
            return False
        self._take_over(attachment, request)
        return True

    @property
    def idle(self) -> bool:
        """True if no request waits for the runtime or for a sender thread."""
        return self._deferred.idle

    def leave(self) -> bool:
        """Disconnect an idle model from its runtime. Return False if requests are in flight: the model then stays connected."""
        attachment = self.session.attachment
        if attachment is None or not self.idle or not self._executing.acquire(blocking=False):
            return False
        try:
            return self._leave(attachment)
        finally:
            self._executing.release()

    def close(self, *, direct: bool = True) -> None:
        """Fail the requests that the runtime has not answered, and disconnect. `direct` is as in `Session.close`."""
        self._deferred.close()
        self.session.close(direct=direct)

    def _answer(self, requests: list[ClientRequest], *, at_once: bool = True) -> list[Any] | None:
        """Answer a batch, as `request.Answer`. If `at_once` is False, answer only after execute() returned."""
        with self._executing:
            attachment = self.session.attachment
            if attachment is not None:
                return self._answer_by(attachment, requests, at_once)
            self._process.front.add_batch(requests, self._deferred.reply, self._outcomes)
            return None

    def _leave(self, attachment: Attachment) -> bool:
        """Disconnect as `leave` does. The caller holds `_executing`."""
        self.session.attachment = None
        self._deferred.leave(attachment)
        return True

    # --- methods that `DeferredReplies` calls -----------------------------------------------------

    def lost(self, attachment: Attachment, why: object) -> None:
        """Report to the front that the runtime of an attachment is gone."""
        sleeps = attachment.deferred.device_sleeps
        # Post the text only: an exception's traceback would keep the connection and its memory.
        self._process.front.post(partial(self._lose, attachment, str(why), sleeps=sleeps))

    def _lose(self, attachment: Attachment, why: str, *, sleeps: bool) -> None:
        """Detach from a runtime that has ended. Called on the front's thread, which sets the attachment."""
        if self.session.attachment is not attachment:
            return
        self.session.attachment = None
        self.meters.some.set()
        if not sleeps:
            log.error(LOST, why)
        self._process.front.handle(RuntimeLost(self.session.device, sleeps))

    def dismissed(self, attachment: Attachment, start_timeout_s: float) -> None:
        """Report to the front that the runtime has asked the model to disconnect."""
        self._process.front.post(StartTimeoutKnown(start_timeout_s))
        self._process.front.post(Dismissed(self.session.device))

    def end(self, text: str) -> None:
        """End the process."""
        self._process.end(text)

    def take_token(self, work: W, token: int) -> None:
        """Do nothing: only a model that generates tokens gets them."""

    @abstractmethod
    def pack(self, entries: Sequence[Any]) -> bytes:
        """Make the frame that submits requests."""

    @abstractmethod
    def _answers_in_s(self, attachment: Attachment) -> float:
        """Compute `answers_in_s` for a runtime that reads."""

    @abstractmethod
    def _forecast(self, attachment: Attachment) -> Forecast | None:
        """Compute `forecast` for a runtime that reads."""

    @abstractmethod
    def _answer_by(
        self, attachment: Attachment, requests: list[ClientRequest], at_once: bool
    ) -> list[Any] | None:
        """Answer a batch through an attachment, like `_answer`."""

    @abstractmethod
    def _take_over(self, attachment: Attachment, request: ClientRequest) -> None:
        """Answer a request that waited for this runtime."""

    @abstractmethod
    def respond(self, work: W) -> Any:
        """Return the response of a request whose outcome is known; never raises."""

    @abstractmethod
    def rescue(self, work: W) -> None:
        """Requeue or fail a request whose runtime died."""
