"""A generating model's stub. It answers a request in many responses, each with a token or a piece of text.

The runtime sends tokens as they come, and never waits for a client. A slow client can leave at most as many tokens
unread as the answer's limit allows. Tokens that wait for a sender thread are joined to one piece, and Triton keeps
sent responses.
"""

import json
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any

import numpy as np

from rsrv.front.rules import LATE
from rsrv.hooks import BadInput
from rsrv.hooks.text import PromptTokeniser, TextStream
from rsrv.stub.deferred import SENDER_THREADS, DeferredRequest
from rsrv.stub.generation_params import GenerationParams, read_generation_params, read_tokens
from rsrv.stub.replica import ModelReplica, StubProcess
from rsrv.stub.replies import Reply, RequestFailure, invalid
from rsrv.stub.request import ClientRequest, parse_parameters
from rsrv.stub.session import Attachment, Session
from rsrv.stub.tensors import Array
from rsrv.wire.frames import Completion, ProtocolError, Status
from rsrv.wire.generation import Generate, pack_generate
from rsrv.wire.socket import Closed

#: Seconds that an answer may take if its client sets no deadline. On plain HTTP, Triton does not notice that a client
#: is gone.
_DEADLINE_S = 300.0
#: bytes of text that are read for each token of the context
_BYTES_PER_TOKEN = 64
_DIED = "the model runtime ended after a part of this answer was sent; it is being restarted, ask again for a whole answer"
_SUB_CALL = (
    "a meta model cannot call a model that generates tokens: call it through Triton, with decoupled=True"
)


@dataclass(slots=True, eq=False)
class AnswerStream(DeferredRequest):
    """One answer while its tokens come. Its lock keeps its responses in order."""

    prompt: Sequence[int] = ()
    frame: bytes = b""
    params: GenerationParams = field(default_factory=GenerationParams)
    #: None for clients that get tokens
    text: TextStream | None = None
    lock: Lock = field(default_factory=Lock)
    #: tokens that wait for a sender thread
    tokens: deque[int] = field(default_factory=deque)
    count: int = 0
    #: Time of the first token, by time.perf_counter.
    first_at: float = 0.0
    #: Time of the latest token, by time.perf_counter.
    latest_at: float = 0.0
    #: responses sent
    parts: int = 0
    #: Text or tokens that are not sent yet.
    kept: Any = ""
    #: True if nothing more is sent: the answer has ended, or another runtime begins it again.
    over: bool = False
    finish_reason: str = ""

    def write(self) -> bytes:
        return self.frame

    @property
    def arrays(self) -> dict[str, Array]:
        """The prompt, as `FrontLoop.record` takes inputs."""
        return {"prompt": np.asarray(self.prompt, np.int32)}

    def finish(self, done: Completion) -> None:
        if done.status is Status.OK:
            self.finish_reason = done.text
        else:
            self.fail(done.status, done.text)


class GenerationEngine(ModelReplica[AnswerStream]):
    """Answers the requests of a generating model, on one device, and never in place."""

    def __init__(
        self, session: Session, attachment: Attachment, process: StubProcess, prompts: PromptTokeniser | None
    ) -> None:
        """`prompts` is None for clients that send and get tokens."""
        super().__init__(session, process, SENDER_THREADS)
        self._prompts = prompts
        self.use(attachment)

    def use(self, attachment: Attachment) -> None:
        (model,) = attachment.models
        assert model.generate is not None
        self._context, self._stop = model.generate["context"], model.generate["stop"]
        super().use(attachment)

    def pack(self, entries: Sequence[bytes]) -> bytes:
        (frame,) = entries
        return frame

    def _answers_in_s(self, attachment: Attachment) -> float:
        # Between two steps a device looks free, so add the answers under way.
        return attachment.begins_in_s() + 1e-3 * self._deferred.pending

    def _forecast(self, attachment: Attachment) -> None:
        """Return None: Triton hands out one request at a time."""

    # --- requests -----------------------------------------------------------------------------------------

    def _answer_by(self, attachment: Attachment, requests: list[ClientRequest], at_once: bool) -> None:
        for request in requests:
            self._deferred.reply(request)
        for request in requests:
            self._take_over(attachment, request)

    def _take_over(self, attachment: Attachment, request: ClientRequest) -> None:
        self._deferred.run(partial(self._begin, attachment, request))

    def _begin(self, attachment: Attachment, request: ClientRequest) -> None:
        connection = attachment.deferred
        if not request.params.deadline_ns and isinstance(request.reply, Reply):
            until_ns = time.monotonic_ns() + int(1e9 * _DEADLINE_S)
            request.params = request.params._replace(deadline_ns=until_ns)
            request.reply.deadline_ns = until_ns
        one = AnswerStream(connection.next_ids(1)[0], request, connection, checked=time.monotonic())
        if request.failure is None:
            try:
                self._prepare(one)
            except BadInput as error:
                request.failure = invalid(str(error))
            except Exception as error:  # noqa: BLE001 - logged by failure_for
                request.failure = request.failure_for(error)
        if one.frame and request.failure is None:
            self._deferred.submit(attachment, [one])
        else:
            self._deferred.finish(one)

    def _prepare(self, one: AnswerStream) -> None:
        """Read and check a request. It has no frame if it generates nothing. Raises RequestFailure."""
        request, context = one.request, self._context
        if request.params.run:
            raise invalid(_SUB_CALL)
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
            text = _read_text(tensor.as_numpy(), context)
            one.text = TextStream(self._prompts.decode, one.params.stop_texts)
            if one.params.detokenize:
                one.kept = self._prompts.decode(read_tokens(text), special=True)
                return
            one.prompt = self._prompts.encode_chat(text) if one.params.chat else self._prompts.encode(text)
            if one.params.tokenize:
                one.kept = json.dumps({"tokens": one.prompt, "max_model_len": context})
                return
        if not 0 < len(one.prompt) < context:
            text = (
                f"the prompt has {len(one.prompt)} tokens, and this model takes 1 to {context - 1}, as {context} are for "
                "prompt and answer together"
            )
            raise invalid(text)
        request.deaths = max(request.deaths, self._process.front.check(one.arrays))
        sampling = one.params[:5]  # max_tokens to seed
        times = request.params.deadline_ns, request.params.priority
        try:
            one.frame = pack_generate(
                Generate(
                    one.id,
                    one.prompt,
                    *sampling,
                    one.params.stop_tokens,
                    *times,
                    request.tag,
                    one.params.tokens_per_s,
                )
            )
        except ProtocolError:
            text = (
                f"the prompt of {len(one.prompt)} tokens is longer than can be sent to the model; shorten it"
            )
            raise invalid(text) from None
        request.rows = 1

    def rescue(self, one: AnswerStream) -> None:
        """Begin an answer again in another runtime if nothing of it was sent. Otherwise, end it."""
        request = one.request
        with one.lock:
            if one.over:
                return
            one.over = one.parts == 0
        if not one.over:
            one.fail(Status.RUNTIME_DOWN, _DIED)
            self._deferred.finish(one)
            return
        if one.connection.ended_by(self._key):
            request.deaths += 1
            self._process.front.record(request.deaths, one.arrays)
        self._process.front.add(request, self._outcomes)

    # --- tokens -------------------------------------------------------------------------------------------

    def take_token(self, one: AnswerStream, token: int) -> None:
        """Take a token from the reading thread."""
        one.latest_at = time.perf_counter()
        one.first_at = one.first_at or one.latest_at
        one.tokens.append(token)
        # With more tokens, a sender thread is already asked, and will also find this one.
        if len(one.tokens) == 1 and (one.params.stream or one.params.stop_texts):
            self._deferred.run(partial(self._send, one))

    def _send(self, one: AnswerStream) -> None:
        """Send the text or tokens that the received tokens yield."""
        with one.lock:
            if one.over:
                return
            ended = False
            try:
                self._take(one)
                ended = one.text is not None and one.text.stopped
                if one.kept and one.params.stream and isinstance(one.request.reply, Reply):
                    piece, one.kept = one.kept, one.kept[:0]
                    one.parts += 1
                    one.request.reply.send_part(self._responses.answer([self._piece(piece)]))
            except Exception as error:  # noqa: BLE001 - logged by failure_for
                one.request.failure = one.request.failure_for(error)
                ended = True
            if not ended:
                return
            # The front ends this answer before the runtime reports an end.
            one.finish_reason = "stop"
            response = self._last(one)
            if one.request.reply is not None:
                one.request.reply.send(response)
        with suppress(Closed, OSError):  # a runtime that is gone has nothing to end
            one.cancelling = one.connection.cancel([one.id])

    def _take(self, one: AnswerStream) -> None:
        """Convert the received tokens to text or tokens for the client."""
        tokens = [one.tokens.popleft() for _ in range(len(one.tokens))]
        one.count += len(tokens)
        one.kept += tokens if one.text is None else one.text.feed(tokens)

    def respond(self, one: AnswerStream) -> Any:
        """Return the last response of an answer. None: it was sent already."""
        with one.lock:
            return None if one.over else self._last(one)

    def _last(self, one: AnswerStream) -> Any:
        """Return the last response, under the lock; never raises."""
        one.over = True
        request = one.request
        if request.failure is None and request.reply is not None and request.reply.sent:
            one.fail(Status.DEADLINE, LATE)
        if request.failure is not None:
            return self._outcomes.failed(request, request.failure)
        try:
            self._take(one)
            if one.text is not None:
                one.kept += one.text.finish()
            response = self._responses.answer(
                [self._piece(one.kept), *self._usage(one)],
                {
                    "finish_reason": one.finish_reason,
                    "prompt_tokens": len(one.prompt),
                    "completion_tokens": one.count,
                },
            )
        except Exception as error:  # noqa: BLE001 - logged by failure_for
            return self._outcomes.failed(request, request.failure_for(error))
        self._outcomes.ended(request, Status.OK)
        if request.deaths:
            self._process.front.record(0, one.arrays)
        return response

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


def _text_array(text: str) -> Array:
    return np.asarray([text.encode()], object)


def _read_text(array: Array, context: int) -> str:
    """Return a prompt's text. Raises RequestFailure."""
    found = array.reshape(-1).tolist()
    if len(found) != 1 or not isinstance(found[0], bytes):
        raise invalid(f"text_input must be one text, got {len(found)} elements")
    if len(found[0]) > _BYTES_PER_TOKEN * context:
        text = f"text_input has {len(found[0])} bytes, far more than this model's {context} tokens hold; shorten it"
        raise invalid(text)
    try:
        return bytes(found[0]).decode()
    except UnicodeDecodeError as error:
        text = f"text_input is not UTF-8: byte {error.start} is {found[0][error.start]:#04x}"
        raise invalid(text) from None


def _read_tokens(array: Array) -> list[int]:
    """Return a prompt's tokens. Raises RequestFailure."""
    tokens: list[int] = array.reshape(-1).tolist()
    if any(token < 0 for token in tokens):
        raise invalid(f"tokens must not be negative, got {min(tokens)}")
    return tokens
