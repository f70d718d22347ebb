"""A generating model's stub. It answers a request in many responses, each with a token or a piece of text.

The runtime sends tokens as it generates them, and never waits for a client. Tokens that wait for a sender thread are sent as one
piece. Responses for a slow client wait in Triton. Their number is limited, because each answer has a maximum number of tokens.
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
from rsrv.wire.generation import Generate, find_length_problem, pack_generate
from rsrv.wire.socket import Closed

#: Seconds that an answer may take if its client sets no deadline. On plain HTTP, Triton does not notice that a client
#: is gone.
_DEADLINE_S = 300.0
#: Maximum bytes of a prompt's text for each token of the context. A longer prompt is refused before it is tokenized.
_BYTES_PER_TOKEN = 64
_DIED = (
    "the model runtime ended after a part of this answer was sent; it is being restarted: send the request again for a "
    "whole answer"
)
_SUB_CALL = (
    "a meta model cannot call a model that generates tokens: call it through Triton, with decoupled=True"
)


@dataclass(slots=True, eq=False)
class AnswerStream(DeferredRequest):
    """One answer while the runtime generates its tokens. The lock keeps the responses in order."""

    prompt: Sequence[int] = ()
    frame: bytes = b""
    params: GenerationParams = field(default_factory=GenerationParams)
    #: Converts tokens to text. None for clients that get tokens.
    text: TextStream | None = None
    lock: Lock = field(default_factory=Lock)
    #: Tokens that wait for a sender thread.
    tokens: deque[int] = field(default_factory=deque)
    count: int = 0
    #: Time of the first token, by time.perf_counter.
    first_at: float = 0.0
    #: Time of the latest token, by time.perf_counter.
    latest_at: float = 0.0
    #: Number of responses sent.
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
        """The prompt as the argument `arrays` of `FrontLoop.record` and `FrontLoop.check`."""
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
        # A device looks free between two steps, so add some time for each answer in progress.
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
        stream = AnswerStream(connection.next_ids(1)[0], request, connection, checked=time.monotonic())
        if request.failure is None:
            try:
                self._prepare(stream)
            except BadInput as error:
                request.failure = invalid(str(error))
            except Exception as error:  # noqa: BLE001 - logged by failure_for
                request.failure = request.failure_for(error)
        if stream.frame and request.failure is None:
            self._deferred.submit(attachment, [stream])
        else:
            self._deferred.finish(stream)

    def _prepare(self, stream: AnswerStream) -> None:
        """Read and check a request, and pack its frame, unless it generates nothing. Raises RequestFailure."""
        request, context = stream.request, self._context
        if request.params.run:
            raise invalid(_SUB_CALL)
        if request.reply is not None and request.reply.sent:
            raise RequestFailure(Status.DEADLINE, LATE)
        stream.params = read_generation_params(
            parse_parameters(request.triton.parameters() or "{}"),
            context=context,
            stop=self._stop,
            text=self._prompts is not None,
        )
        (tensor,) = request.triton.inputs()
        if self._prompts is None:
            stream.prompt, stream.kept = _read_tokens(self._tensors.read(tensor, "i32")), []
        else:
            text = _read_text(tensor.as_numpy(), context)
            stream.text = TextStream(self._prompts.decode, stream.params.stop_texts)
            if stream.params.detokenize:
                stream.kept = self._prompts.decode(read_tokens(text), special=True)
                return
            stream.prompt = (
                self._prompts.encode_chat(text) if stream.params.chat else self._prompts.encode(text)
            )
            if stream.params.tokenize:
                stream.kept = json.dumps({"tokens": stream.prompt, "max_model_len": context})
                return
        if problem := find_length_problem(len(stream.prompt), context):
            raise invalid(problem)
        request.deaths = max(request.deaths, self._process.front.check(stream.arrays))
        sampling = stream.params[:5]  # These are the parameters from max_tokens to seed.
        times = request.params.deadline_ns, request.params.priority
        try:
            stream.frame = pack_generate(
                Generate(
                    stream.id,
                    stream.prompt,
                    *sampling,
                    stream.params.stop_tokens,
                    *times,
                    request.tag,
                    stream.params.tokens_per_s,
                )
            )
        except ProtocolError:
            text = (
                f"the prompt has {len(stream.prompt)} tokens, more than can be sent to the model; shorten it"
            )
            raise invalid(text) from None
        request.rows = 1

    def rescue(self, stream: AnswerStream) -> None:
        """Requeue the request for another runtime if no part of its answer was sent. Otherwise, fail it."""
        request = stream.request
        with stream.lock:
            if stream.over:
                return
            stream.over = stream.parts == 0
        if not stream.over:
            stream.fail(Status.RUNTIME_DOWN, _DIED)
            self._deferred.finish(stream)
            return
        if stream.connection.ended_by(self._key):
            request.deaths += 1
            self._process.front.record(request.deaths, stream.arrays)
        self._process.front.add(request, self._outcomes)

    # --- tokens -------------------------------------------------------------------------------------------

    def take_token(self, stream: AnswerStream, token: int) -> None:
        """Store a token for a sender thread. Called on the reading thread."""
        stream.latest_at = time.perf_counter()
        stream.first_at = stream.first_at or stream.latest_at
        stream.tokens.append(token)
        # If more tokens wait, a sender thread was already asked to send them, and will also find this one.
        if len(stream.tokens) == 1 and (stream.params.stream or stream.params.stop_texts):
            self._deferred.run(partial(self._send, stream))

    def _send(self, stream: AnswerStream) -> None:
        """Send the text or tokens that the received tokens yield."""
        with stream.lock:
            if stream.over:
                return
            ended = False
            try:
                self._take(stream)
                ended = stream.text is not None and stream.text.stopped
                if stream.kept and stream.params.stream and isinstance(stream.request.reply, Reply):
                    piece, stream.kept = stream.kept, stream.kept[:0]
                    stream.parts += 1
                    stream.request.reply.send_part(self._responses.answer([self._piece(piece)]))
            except Exception as error:  # noqa: BLE001 - logged by failure_for
                stream.request.failure = stream.request.failure_for(error)
                ended = True
            if not ended:
                return
            # The front ends this answer before the runtime reports an end.
            stream.finish_reason = "stop"
            response = self._last(stream)
            if stream.request.reply is not None:
                stream.request.reply.send(response)
        with suppress(Closed, OSError):  # A runtime that has ended generates nothing any more.
            stream.cancelling = stream.connection.cancel([stream.id])

    def _take(self, stream: AnswerStream) -> None:
        """Convert the received tokens to text or tokens for the client."""
        tokens = [stream.tokens.popleft() for _ in range(len(stream.tokens))]
        stream.count += len(tokens)
        stream.kept += tokens if stream.text is None else stream.text.feed(tokens)

    def respond(self, stream: AnswerStream) -> Any:
        """Return the last response of an answer, or None if it was already sent."""
        with stream.lock:
            return None if stream.over else self._last(stream)

    def _last(self, stream: AnswerStream) -> Any:
        """Return the last response. The caller holds the lock. Never raises."""
        stream.over = True
        request = stream.request
        if request.failure is None and request.reply is not None and request.reply.sent:
            stream.fail(Status.DEADLINE, LATE)
        if request.failure is not None:
            return self._outcomes.failed(request, request.failure)
        try:
            self._take(stream)
            if stream.text is not None:
                stream.kept += stream.text.finish()
            response = self._responses.answer(
                [self._piece(stream.kept), *self._usage(stream)],
                {
                    "finish_reason": stream.finish_reason,
                    "prompt_tokens": len(stream.prompt),
                    "completion_tokens": stream.count,
                },
            )
        except Exception as error:  # noqa: BLE001 - logged by failure_for
            return self._outcomes.failed(request, request.failure_for(error))
        self._outcomes.ended(request, Status.OK)
        if request.deaths:
            self._process.front.record(0, stream.arrays)
        return response

    def _piece(self, piece: Any) -> Any:
        if self._prompts is None:
            return self._tensors.make("tokens", np.asarray(piece, np.int32), "i32")
        return self._tensors.make("text_output", _text_array(piece))

    def _usage(self, stream: AnswerStream) -> list[Any]:
        """Return the tensors that only the last response has."""
        first_s = stream.first_at - stream.request.since if stream.count else 0.0
        token_s = (stream.latest_at - stream.first_at) / (stream.count - 1) if stream.count > 1 else 0.0
        numbers = {
            "prompt_tokens": np.asarray([len(stream.prompt)], np.int32),
            "completion_tokens": np.asarray([stream.count], np.int32),
            "first_token_s": np.asarray([first_s], np.float32),
            "token_s": np.asarray([token_s], np.float32),
        }
        made = [self._tensors.make(name, array) for name, array in numbers.items()]
        if self._tensors.carries_text:
            made.append(self._tensors.make("finish_reason", _text_array(stream.finish_reason)))
        return made


def _text_array(text: str) -> Array:
    return np.asarray([text.encode()], object)


def _read_text(array: Array, context: int) -> str:
    """Return a prompt's text. Raises RequestFailure."""
    texts = array.reshape(-1).tolist()
    if len(texts) != 1 or not isinstance(texts[0], bytes):
        raise invalid(f"text_input must be one text, got {len(texts)} elements")
    if len(texts[0]) > _BYTES_PER_TOKEN * context:
        text = f"text_input has {len(texts[0])} bytes, far more than fit into this model's context of {context} tokens; shorten it"
        raise invalid(text)
    try:
        return bytes(texts[0]).decode()
    except UnicodeDecodeError as error:
        text = f"text_input is not UTF-8: byte {error.start} is {texts[0][error.start]:#04x}"
        raise invalid(text) from None


def _read_tokens(array: Array) -> list[int]:
    """Return a prompt's tokens. Raises RequestFailure."""
    tokens: list[int] = array.reshape(-1).tolist()
    if any(token < 0 for token in tokens):
        raise invalid(f"tokens must not be negative, got {min(tokens)}")
    return tokens
