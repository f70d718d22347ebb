"""A generating model's stub: one answer to a request in many responses, a token or a piece of text each.

The runtime sends tokens as they come, and never waits for a client. What a slow client leaves unread is bounded by the
answer's limit of tokens; here tokens that wait for a sender thread become one piece, and Triton keeps sent responses.
"""

import logging
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from rsrv.hooks.text import PromptTokeniser, TextStream
from rsrv.logs import of_request
from rsrv.placement.batch_shares import Forecast
from rsrv.stub.connection import RuntimeConnection
from rsrv.stub.deferred import LATE, SENDER_THREADS, DeferredReplies
from rsrv.stub.generation_params import GenerationParams, read_generation_params
from rsrv.stub.metrics import Meters
from rsrv.stub.replicas import StubProcess
from rsrv.stub.replies import RequestFailure, Responses
from rsrv.stub.request import ClientRequest, EntryPoint, Outcomes, parse_parameters
from rsrv.stub.session import Attachment, Session
from rsrv.stub.tensors import Tensors
from rsrv.wire.frames import Completion, ProtocolError, Status
from rsrv.wire.generation import Generate, pack_generate
from rsrv.wire.socket import Closed

log = logging.getLogger("rsrv.stub")

#: seconds that an answer may take if its client sets no deadline: on plain HTTP a client that is gone cannot be seen
_DEADLINE_S = 300.0
#: bytes of text that are read for each token of the context
_BYTES_PER_TOKEN = 64
_DIED = "the model runtime ended after a part of this answer was sent; it is being restarted, ask again for a whole answer"
_BROKEN = "the answer could not be made; the server's log says why"
_SUB_CALL = (
    "a meta model cannot call a model that generates tokens: call it through Triton, with decoupled=True"
)


@dataclass(slots=True, eq=False)
class AnswerStream:
    """One answer while its tokens come. Its lock keeps its responses in order."""

    id: int  # unique on its connection
    request: ClientRequest
    connection: RuntimeConnection
    prompt: Sequence[int] = ()
    frame: bytes = b""
    params: GenerationParams = field(default_factory=GenerationParams)
    #: None for clients that get tokens
    text: TextStream | None = None
    lock: Lock = field(default_factory=Lock)
    #: tokens that wait for a sender thread
    tokens: deque[int] = field(default_factory=deque)
    count: int = 0
    #: of the first and the latest token, by time.perf_counter
    first_at: float = 0.0
    latest_at: float = 0.0
    #: responses sent
    parts: int = 0
    #: text or tokens that are not sent yet
    kept: Any = ""
    #: nothing more is sent: the answer has ended, or another runtime begins it again
    over: bool = False
    finish_reason: str = ""
    response: Any = None
    checked: float = 0.0  # time.monotonic of the latest check for cancellation
    cancelling: bool = False

    #: of an answer in one step; a stream's last response is small
    nbytes = 0

    def write(self) -> bytes:
        return self.frame

    @property
    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The prompt, as `Resubmission` remembers inputs."""
        return {"prompt": np.asarray(self.prompt, np.int32)}

    def finish(self, done: Completion) -> None:
        if done.status is Status.OK:
            self.finish_reason = done.text
        else:
            self.fail(done.status, done.text)

    def fail(self, status: Status, text: str) -> None:
        self.request.failure = RequestFailure(status, text)

    def release(self) -> None:
        """Do nothing: prompts and tokens are in frames."""


class GenerationEngine:
    """Answers the requests of one model that generates, on one device."""

    def __init__(
        self,
        tensors: Tensors,
        responses: Responses,
        prompts: PromptTokeniser | None,
        session: Session,
        process: StubProcess,
    ) -> None:
        """`prompts` is None for clients that send and get tokens; `process` is shared with the model's other replicas."""
        self._tensors = tensors
        self._responses = responses
        self._prompts = prompts
        self.session = session
        self._process = process
        self.meters = Meters()
        self._outcomes = Outcomes(self.meters, responses)
        attachment = process.begin(session)
        self._deferred: DeferredReplies[AnswerStream] = DeferredReplies(
            session, responses, _pack, self._respond, SENDER_THREADS, process.end
        )
        self._deferred.rescue, self._deferred.dismissed = self._rescue, self._fall_back
        self._deferred.on_token = self._feed
        #: answers Triton's requests, as `EntryPoint.execute`; never in place
        self.execute = self.execute_later = EntryPoint(
            self._answer, self._outcomes, self._deferred.reply, process.end
        ).execute
        session.on_attach = self._use
        self._use(attachment)

    def _use(self, attachment: Attachment) -> None:
        """Prepare requests for another attachment, before any thread submits one to it."""
        (model,) = attachment.models
        assert model.generate is not None
        self._context, self._stop = model.generate["context"], model.generate["stop"]
        self._key = attachment.key
        self._outcomes.serve(attachment.key, traced=attachment.settings["traces"]["enabled"])
        self._process.resubmission.retry_s = attachment.settings["stub"]["retry_s"]
        self._deferred.watch(attachment)

    @property
    def ready(self) -> bool:
        """True if a runtime serves this model and takes requests, or the model is cold."""
        return self.session.ready

    def answers_in_s(self) -> float:
        """Return the seconds until its device could begin with an answer; infinite without a runtime that reads."""
        attachment = self.session.reading
        if attachment is None:
            return inf
        # Between two steps a device looks free, so answers under way count besides.
        return attachment.device_free_in_s() + attachment.load_in_s() + 1e-3 * self._deferred.pending

    def forecast(self) -> Forecast | None:
        """Return None: a batch is not divided, as Triton hands out one request at a time."""
        return None

    def rows(self, requests: Sequence[Any]) -> list[int]:
        """Return the answers of each request."""
        return [1] * len(requests)

    def guard_hooks(self) -> None:
        """Do nothing: the model has no hooks."""

    def close(self) -> None:
        self._process.resubmission.close()
        self._deferred.close()
        self.session.close()

    # --- requests -----------------------------------------------------------------------------------------

    def _answer(self, requests: list[ClientRequest]) -> None:
        for request in requests:
            self._deferred.reply(request)
        for request in requests:
            if not self.take_over(request):
                self._process.resubmission.add(request, self._outcomes)

    def take_over(self, request: ClientRequest) -> bool:
        """Begin the answer to a request, on a sender thread; False: there is no runtime."""
        attachment = self.session.attachment
        if attachment is None:
            return False
        self._deferred.run(partial(self._begin, attachment, request))
        return True

    def _begin(self, attachment: Attachment, request: ClientRequest) -> None:
        connection = attachment.deferred
        if not request.params.deadline_ns and request.reply is not None:
            until_ns = time.monotonic_ns() + int(1e9 * _DEADLINE_S)
            request.params = request.params._replace(deadline_ns=until_ns)
            request.reply.deadline_ns = until_ns
        one = AnswerStream(connection.next_ids(1)[0], request, connection, checked=time.monotonic())
        if request.failure is None:
            try:
                self._prepare(one)
            except Exception as error:  # noqa: BLE001 - logged by blame
                request.blame(error)
        if request.failure is None:
            self._deferred.submit(attachment, [one])
        else:
            self._deferred.finish(one)

    def _prepare(self, one: AnswerStream) -> None:
        """Read and check a request. Raises RequestFailure."""
        request, context = one.request, self._context
        if request.params.run:
            raise RequestFailure(Status.INVALID, _SUB_CALL)
        if request.reply is not None and request.reply.sent:
            raise RequestFailure(Status.DEADLINE, LATE)
        one.params = read_generation_params(
            parse_parameters(request.triton.parameters() or "{}"),
            context=context,
            stop=self._stop,
            text=self._prompts is not None,
        )
        (tensor,) = request.triton.inputs()
        if self._prompts is None:
            one.prompt, one.kept = _read_tokens(self._tensors.read(tensor, "i32")), []
        else:
            one.prompt = self._prompts.encode(_read_text(tensor.as_numpy(), context))
            one.text = TextStream(self._prompts.decode, one.params.stop_texts)
        if not 0 < len(one.prompt) < context:
            text = (
                f"the prompt has {len(one.prompt)} tokens, and this model takes 1 to {context - 1}, as {context} are for "
                "prompt and answer together"
            )
            raise RequestFailure(Status.INVALID, text)
        request.deaths = max(request.deaths, self._process.resubmission.check(one.arrays))
        sampling = one.params[:5]  # max_tokens to seed
        times = request.params.deadline_ns, request.params.priority
        try:
            one.frame = pack_generate(
                Generate(one.id, one.prompt, *sampling, one.params.stop_tokens, *times, request.tag)
            )
        except ProtocolError:
            text = (
                f"the prompt of {len(one.prompt)} tokens is longer than can be sent to the model; shorten it"
            )
            raise RequestFailure(Status.INVALID, text) from None
        request.rows = 1

    def _rescue(self, one: AnswerStream) -> bool:
        """Have an answer of which nothing is sent begin again in another runtime; end one that has begun."""
        request = one.request
        with one.lock:
            if one.over:
                return True
            one.over = one.parts == 0
        if not one.over:
            one.fail(Status.RUNTIME_DOWN, _DIED)
            self._deferred.finish(one)
            return True
        if one.connection.ended_by(self._key):
            request.deaths += 1
            self._process.resubmission.remember(request.deaths, one.arrays)
        self._process.resubmission.add(request, self._outcomes)
        return True

    def _fall_back(self, attachment: Attachment, start_timeout_s: float) -> None:
        """Leave a runtime that asks for it, because the model is idle there; with answers under way, stay."""
        self._process.resubmission.start_timeout_s = start_timeout_s
        if self._deferred.idle:
            self._deferred.leave(attachment)

    # --- tokens -------------------------------------------------------------------------------------------

    def _feed(self, one: AnswerStream, token: int) -> None:
        """Take a token from the reading thread."""
        one.latest_at = time.perf_counter()
        one.first_at = one.first_at or one.latest_at
        one.tokens.append(token)
        # With more tokens, a sender thread has been asked, and will find this one, too.
        if len(one.tokens) == 1 and (one.params.stream or one.params.stop_texts):
            self._deferred.run(partial(self._send, one))

    def _send(self, one: AnswerStream) -> None:
        """Send what the tokens give that have come."""
        with one.lock:
            if one.over:
                return
            ended = False
            try:
                self._take(one)
                ended = one.text is not None and one.text.stopped
                if one.kept and one.params.stream and one.request.reply is not None:
                    piece, one.kept = one.kept, one.kept[:0]
                    one.parts += 1
                    one.request.reply.send_part(self._responses.answer([self._piece(piece)]))
            except Exception:
                log.exception(
                    "request %r: answering failed", one.request.id, extra=of_request(one.request.id)
                )
                one.fail(Status.INTERNAL, _BROKEN)
                ended = True
            if not ended:
                return
            # The answer ends before the runtime says so.
            one.finish_reason = "stop"
            response = self._last(one)
            if one.request.reply is not None:
                one.request.reply.send(response)
        with suppress(Closed, OSError):  # a runtime that is gone has nothing to end
            one.cancelling = one.connection.cancel([one.id])

    def _take(self, one: AnswerStream) -> None:
        """Make text or tokens for the client of the tokens that have come."""
        tokens = [one.tokens.popleft() for _ in range(len(one.tokens))]
        one.count += len(tokens)
        one.kept += tokens if one.text is None else one.text.feed(tokens)

    def _respond(self, one: AnswerStream) -> Any:
        """Return the last response of an answer whose outcome is known; None: it was sent before. Never raises."""
        with one.lock:
            return None if one.over else self._last(one)

    def _last(self, one: AnswerStream) -> Any:
        """Return the last response, under the lock; never raises."""
        one.over = True
        request = one.request
        if request.failure is None and request.reply is not None and request.reply.sent:
            one.fail(Status.DEADLINE, LATE)
        if request.failure is None:
            try:
                self._take(one)
                if one.text is not None:
                    one.kept += one.text.finish()
                response = self._responses.answer([self._piece(one.kept), *self._usage(one)])
            except Exception:
                log.exception("request %r: answering failed", request.id, extra=of_request(request.id))
                one.fail(Status.INTERNAL, _BROKEN)
            else:
                self._outcomes.ended(request, Status.OK)
                if request.deaths:
                    self._process.resubmission.remember(0, one.arrays)
                return response
        assert request.failure is not None
        return self._outcomes.failed(request, request.failure)

    def _piece(self, piece: Any) -> Any:
        if self._prompts is None:
            return self._tensors.make("tokens", np.asarray(piece, np.int32), "i32")
        return self._tensors.make("text_output", _text_array(piece))

    def _usage(self, one: AnswerStream) -> list[Any]:
        """Return the tensors that only the last response has."""
        first_s = one.first_at - one.request.since if one.count else 0.0
        token_s = (one.latest_at - one.first_at) / (one.count - 1) if one.count > 1 else 0.0
        numbers = {
            "prompt_tokens": np.asarray([len(one.prompt)], np.int32),
            "completion_tokens": np.asarray([one.count], np.int32),
            "first_token_s": np.asarray([first_s], np.float32),
            "token_s": np.asarray([token_s], np.float32),
        }
        made = [self._tensors.make(name, array) for name, array in numbers.items()]
        if self._tensors.carries_text:
            made.append(self._tensors.make("finish_reason", _text_array(one.finish_reason)))
        return made


def _pack(frames: Sequence[bytes]) -> bytes:
    (frame,) = frames
    return frame


def _text_array(text: str) -> npt.NDArray[Any]:
    return np.asarray([text.encode()], object)


def _read_text(array: npt.NDArray[Any], context: int) -> str:
    """Return a prompt's text. Raises RequestFailure."""
    found = array.reshape(-1).tolist()
    if len(found) != 1 or not isinstance(found[0], bytes):
        raise RequestFailure(Status.INVALID, f"text_input must be one text, got {len(found)} elements")
    if len(found[0]) > _BYTES_PER_TOKEN * context:
        text = f"text_input has {len(found[0])} bytes, far more than this model's {context} tokens hold; shorten it"
        raise RequestFailure(Status.INVALID, text)
    try:
        return bytes(found[0]).decode()
    except UnicodeDecodeError as error:
        text = f"text_input is not UTF-8: byte {error.start} is {found[0][error.start]:#04x}"
        raise RequestFailure(Status.INVALID, text) from None


def _read_tokens(array: npt.NDArray[Any]) -> list[int]:
    """Return a prompt's tokens. Raises RequestFailure."""
    tokens: list[int] = array.reshape(-1).tolist()
    if any(token < 0 for token in tokens):
        raise RequestFailure(Status.INVALID, f"tokens must not be negative, got {min(tokens)}")
    return tokens
