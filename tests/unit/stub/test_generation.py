"""The stub of a model that generates: streams of responses, their ends, and wrong requests."""

from __future__ import annotations

import json
import os
import socket
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf
from queue import SimpleQueue
from typing import Any, cast

import numpy as np
import pytest

from rsrv.hooks import BadInput
from rsrv.hooks.text import PromptTokeniser
from rsrv.stub.connection import Greeted, RuntimeConnection
from rsrv.stub.generation import GenerationEngine
from rsrv.stub.replica import StubProcess
from rsrv.stub.replicas import Replicas
from rsrv.stub.replies import Responses
from rsrv.stub.session import Attachment, Remote, Session
from rsrv.stub.tensors import Tensors
from rsrv.wire.frames import (
    Completion,
    Kind,
    Status,
    pack_completions,
    read_header,
    unpack_ids,
    unpack_json,
)
from rsrv.wire.generation import Generate, pack_tokens, read_generate
from rsrv.wire.layout import Interface
from rsrv.wire.socket import Closed, Receiver, send
from tests.fakes import FakePbUtils, FakeRequest, FakeResponse, NewPbUtils, NewResponse
from tests.waiting import PATIENCE_S, wait_until

SETTINGS: dict[str, dict[str, Any]] = {"traces": {"enabled": False}, "stub": {"retry_s": 30.0}}
FACTS = {"context": 16, "stop": [2], "max_tokens": 8, "tokenizer": None, "template": "{text}"}


class Characters:
    """A tokenizer whose tokens are the bytes of the text. It raises an error for a text with an exclamation mark."""

    def encode(self, text: str) -> list[int]:
        if "!" in text:
            raise BadInput("the model's tokeniser cannot process this text")
        return list(text.encode())

    def decode(self, tokens: list[int], *, special: bool = False) -> str:
        return bytes(tokens).decode(errors="replace")


@dataclass
class Life:
    """A runtime from its start to its end. It generates the tokens that the test chooses."""

    sock: socket.socket
    attachment: Attachment
    receiver: Receiver = field(init=False)

    def __post_init__(self) -> None:
        self.receiver = Receiver(self.sock)

    def asked(self) -> Generate:
        frame, _ = self.receiver.receive()
        assert read_header(frame)[0] is Kind.GENERATE
        return read_generate(unpack_json(frame))

    def cancelled(self) -> int:
        frame, _ = self.receiver.receive()
        kind, count = read_header(frame)
        assert kind is Kind.CANCEL
        (id,) = unpack_ids(frame, count)
        return id

    def say(self, id: int, *tokens: int) -> None:
        for frame in pack_tokens([(id, token) for token in tokens]):
            send(self.sock, frame)

    def end(self, id: int, text: str = "length", status: Status = Status.OK) -> None:
        for frame in pack_completions([Completion(id, status, text=text)]):
            send(self.sock, frame)


class FakeSession:
    """A session whose runtimes are sockets of the test."""

    def __init__(self) -> None:
        self.device = 0
        self.attachment: Attachment | None = None
        self.lives: list[Life] = []
        self._alive: SimpleQueue[Life | None] = SimpleQueue()

    def attach(self, on_step: object, *, started: bool, asked: bool) -> Attachment:
        life = self._alive.get()
        if life is None:
            raise Closed("the test is over")
        self.life = life
        self.lives.append(self.life)
        return self.life.attachment

    def publish(self, attachment: Attachment) -> None:
        self.attachment = attachment

    def live(self) -> Life:
        """Start a runtime to which the session may connect, and return it."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(PATIENCE_S)
        board = memoryview(array("Q", [time.monotonic_ns() | 1] * 8))
        connection = RuntimeConnection(Greeted(theirs, Receiver(theirs), board, 1))
        model = Remote("m", cast(Interface, None), (), (), False, (), 0, stateful=True, generate=FACTS)
        life = Life(ours, Attachment("m@1", {}, (model,), SETTINGS, connection, connection))
        self._alive.put(life)
        return life

    @property
    def reading(self) -> Attachment | None:
        return self.attachment

    def tell(self, demand: object) -> None: ...

    def open_connection(self, key: str) -> RuntimeConnection:
        raise Closed("there is none for reports")

    def close(self, *, direct: bool = True) -> None:
        self._alive.put(None)
        for life in self.lives:
            life.sock.close()
            life.attachment.deferred.close()


class Model:
    """A model that generates text or tokens, and its runtime."""

    def __init__(self, *, text: bool = True, pb_utils: type[FakePbUtils] = FakePbUtils) -> None:
        self.session = FakeSession()
        self.process = StubProcess(Tensors(pb_utils), Responses(pb_utils))
        prompts = cast(PromptTokeniser, Characters()) if text else None
        engines: list[GenerationEngine] = []

        def make(session: Session, attachment: Attachment) -> GenerationEngine:
            engines.append(GenerationEngine(session, attachment, self.process, prompts))
            return engines[0]

        self.replicas = Replicas(lambda device: cast(Session, self.session), make, "m", self.process)
        self.session.live()
        self.replicas.load()
        self.engine = engines[0]
        self._text = text

    def close(self) -> None:
        self.replicas.close()

    def live(self) -> Life:
        """Start the next runtime, and return it when requests may use it."""
        life = self.session.live()
        wait_until(lambda: self.session.attachment is life.attachment)
        return life

    @property
    def life(self) -> Life:
        return self.session.life

    def ask(self, prompt: Any = "hi", **parameters: Any) -> FakeRequest:
        if self._text:
            data = prompt if isinstance(prompt, bytes) else prompt.encode()
            inputs = {"text_input": np.asarray([data], object)}
        else:
            inputs = {"tokens": np.asarray(prompt, np.int32)}
        request = FakeRequest(inputs, parameters=json.dumps(parameters))
        assert self.engine.execute([request]) is None
        return request


@pytest.fixture
def model() -> Iterator[Model]:
    made = Model()
    yield made
    made.close()


def next_of(request: FakeRequest) -> FakeResponse:
    return request.answers.get(timeout=PATIENCE_S)


def text_of(response: FakeResponse) -> str:
    assert response.error is None, response.error.message
    (text,) = response.arrays["text_output"]
    return str(text.decode())


def rest_of(request: FakeRequest) -> tuple[str, str]:
    """Return the joined text of all further responses of a request, and the reason why its answer ended."""
    text, response = "", next_of(request)
    while "finish_reason" not in response.arrays:
        text, response = text + text_of(response), next_of(request)
    return text + text_of(response), response.arrays["finish_reason"][0].decode()


def failure_of(request: FakeRequest) -> tuple[str, str]:
    """Return the code and the text of a request's next response, which must be an error."""
    error = next_of(request).error
    assert error is not None
    return error.code, error.message


def test_text_comes_in_pieces_and_the_last_one_has_the_usage(model: Model) -> None:
    """Each token gives one response with its text. The three tokens of one character give one response together.

    The last response has the reason for the end, and the numbers of tokens.
    """
    request = model.ask("hi")
    generation = model.life.asked()
    assert (generation.prompt, generation.stop, generation.temperature) == (list(b"hi"), None, 0.0)

    model.life.say(generation.request, ord("a"))
    assert text_of(next_of(request)) == "a"
    model.life.say(generation.request, *"\N{SNOWMAN}".encode())
    assert text_of(next_of(request)) == "\N{SNOWMAN}"
    model.life.end(generation.request, "stop")

    last = next_of(request)
    assert text_of(last) == ""
    usage = {name: value.tolist() for name, value in last.arrays.items()}
    assert (usage["finish_reason"], usage["prompt_tokens"], usage["completion_tokens"]) == (
        [b"stop"],
        [2],
        [4],
    )
    assert usage["first_token_s"][0] > 0
    assert request.answers.empty()


def test_the_last_response_has_the_usage_as_parameters_where_triton_has_them() -> None:
    """From Triton 25.02 on, the last response has the numbers of tokens not only as outputs but also as parameters."""
    model = Model(pb_utils=NewPbUtils)
    request = model.ask("hi")
    generation = model.life.asked()
    model.life.say(generation.request, ord("a"))
    piece = next_of(request)
    model.life.end(generation.request, "length")

    last = next_of(request)

    assert isinstance(piece, NewResponse)
    assert isinstance(last, NewResponse)
    assert piece.given is None
    assert last.given == {"finish_reason": "length", "prompt_tokens": 2, "completion_tokens": 1}
    assert "finish_reason" in last.arrays
    model.close()


def test_an_answer_that_is_not_streamed_has_one_response() -> None:
    """A request that does not stream gets all tokens in one response, as Triton's `generate` needs it."""
    model = Model(text=False)
    request = model.ask([5, 6], stream=False, max_tokens=3, stop="[9]")
    generation = model.life.asked()
    assert (generation.prompt, generation.stop, generation.max_tokens) == ([5, 6], [2, 9], 3)

    model.life.say(generation.request, 7, 8)
    model.life.end(generation.request)

    assert next_of(request).arrays["tokens"].tolist() == [7, 8]
    assert request.answers.empty()
    model.close()


def test_a_stop_text_ends_the_answer_and_the_work(model: Model) -> None:
    """A stop text ends the answer, and no part of this text is sent. The stub cancels the generation in the runtime."""
    request = model.ask(stop='["END", "x"]')
    generation = model.life.asked()
    model.life.say(generation.request, *b"ab E")
    model.life.say(generation.request, *b"ND more")

    assert model.life.cancelled() == generation.request
    model.life.end(generation.request, "cancelled", Status.CANCELLED)

    assert rest_of(request) == ("ab ", "stop")
    wait_until(lambda: model.engine.idle)
    assert request.answers.empty()


def test_a_client_that_is_gone_ends_the_work(model: Model) -> None:
    """If a client cancels its request, the generation is cancelled in the runtime, even if no token comes."""
    request = model.ask()
    generation = model.life.asked()
    request.cancelled = True

    assert model.life.cancelled() == generation.request
    model.life.end(generation.request, "the client has cancelled", Status.CANCELLED)

    assert failure_of(request) == ("can", "the client has cancelled")


def test_each_answer_has_a_deadline(model: Model) -> None:
    """A generation has the client's deadline. Without one, its deadline is in five minutes."""
    model.ask()
    for timeout_us, seconds in ((0, 300), (2_000_000, 2)):
        request = FakeRequest({"text_input": np.asarray([b"hi"], object)}, timeout_us=timeout_us)
        before = time.monotonic()
        model.engine.execute([request])
        deadline_s = max(model.life.asked().deadline_ns for _ in range(1 if timeout_us else 2)) / 1e9
        assert before <= deadline_s - seconds <= time.monotonic()


def test_an_answer_that_has_begun_ends_with_its_runtime(model: Model) -> None:
    """If a runtime ends after a part of the answer was sent, the answer ends with a tagged error.

    The generation is not repeated by another runtime.
    """
    request = model.ask()
    generation = model.life.asked()
    model.life.say(generation.request, ord("a"))
    assert text_of(next_of(request)) == "a"

    model.life.sock.close()

    code, text = failure_of(request)
    assert code == "una"
    assert text.startswith("[rsrv:RUNTIME_DOWN] the model runtime ended after a part of this answer was sent")


@pytest.mark.parametrize("parameters", [{}, {"stream": False}])
def test_an_answer_of_which_nothing_is_sent_begins_again(model: Model, parameters: dict[str, Any]) -> None:
    """If a runtime ends before any part of the answer was sent, the next runtime generates the answer from the same prompt.

    The answer has no tokens of the first runtime.
    """
    request = model.ask("hi", **parameters)
    generation = model.life.asked()
    if parameters:
        model.life.say(generation.request, ord("a"))
    model.life.sock.close()
    wait_until(lambda: model.session.attachment is None)

    life = model.live()
    again = life.asked()
    assert again.prompt == generation.prompt
    life.say(again.request, ord("b"))
    life.end(again.request)

    assert rest_of(request) == ("b", "length")


def test_a_prompt_that_ended_two_runtimes_is_not_tried_again(model: Model) -> None:
    """If two runtimes end during a generation, its request fails. A later request with the same prompt also fails."""
    request = model.ask("bad")
    for _ in range(2):
        model.session.life.asked()
        model.session.life.sock.close()
        wait_until(lambda: model.session.attachment is None)
        model.live()
    assert "two runtimes ended" in failure_of(request)[1]
    assert "equal inputs" in failure_of(model.ask("bad"))[1]


def test_unloading_ends_answers(model: Model) -> None:
    """An unload ends each answer under way with one error."""
    requests = [model.ask(), model.ask()]
    generation = model.life.asked()
    model.life.say(generation.request, ord("a"))
    wait_until(lambda: any(not request.answers.empty() for request in requests))

    model.close()

    ends = [next_of(request).error or next_of(request).error for request in requests]
    assert ["unloaded" in str(end and end.message) for end in ends] == [True, True]


@pytest.mark.parametrize(
    ("parameters", "why"),
    [
        ({"max_tokens": 0}, "max_tokens must be a whole number from 1 on, got 0"),
        ({"max_tokens": 17}, "max_tokens must be at most this model's context, 16 tokens"),
        ({"max_tokens": 1.5}, "max_tokens must be a whole number"),
        ({"max_tokens": True}, "max_tokens must be a whole number"),
        ({"max_tokens": [1]}, "max_tokens must be a whole number"),
        ({"temperature": -0.1}, "temperature must be a number from 0"),
        ({"temperature": "hot"}, "got 'hot'"),
        ({"temperature": "nan"}, "temperature must be a number from 0"),
        ({"temperature": "1e999"}, "temperature must be a number from 0"),
        ({"top_k": -1}, "top_k must be"),
        ({"top_p": 0}, "top_p must be a number above 0, at most 1"),
        ({"top_p": 1.01}, "top_p must be"),
        ({"tokens_per_s": 0}, "tokens_per_s must be a number above 0, at most 1000"),
        ({"seed": 2**24}, "seed must be a whole number from 0 below 2^24"),
        ({"stop": ""}, "stop must be a text"),
        ({"stop": "[1]"}, "stop must be a text"),
        ({"stop": "[" * 5000}, "stop must be a text"),
        ({"stop": json.dumps(["x"] * 17)}, "at most 16 texts"),
        ({"stream": "yes"}, "stream must be true or false"),
        ({"temprature": 1}, "did you mean 'temperature'"),
        ({"frequency_penalty": 1}, "unknown parameter 'frequency_penalty'"),
        ({"detokenize": True}, "must be a JSON list of tokens"),
        ({"rsrv_run": "5"}, "a meta model cannot call"),
    ],
)  # fmt: skip
def test_parameters_that_make_no_sense_are_refused(
    model: Model, parameters: dict[str, Any], why: str
) -> None:
    """A wrong parameter is refused. The text names the parameter and its rule."""
    code, text = failure_of(model.ask(**parameters))
    assert code == "inv"
    assert why in text


def test_parameters_reach_the_runtime(model: Model) -> None:
    """Parameters may be numbers, or texts of numbers, because some clients cannot send fractions as numbers.

    HTTP headers and Triton's own parameters are ignored.
    """
    model.ask(
        temperature="0.7", top_k=5, top_p=0.9, seed=7, tokens_per_s=20, max_tokens="4", Traceparent="x", triton_x=1, rsrv_priority=3
    )  # fmt: skip
    generation = model.life.asked()
    assert (generation.temperature, generation.top_k, generation.top_p, generation.seed) == (0.7, 5, 0.9, 7)
    assert (generation.max_tokens, generation.priority, generation.tokens_per_s) == (4, 3, 20)


@pytest.mark.parametrize(
    ("prompt", "why"),
    [
        ("", "the prompt has 0 tokens, and this model takes 1 to 15"),
        ("x" * 16, "the prompt has 16 tokens"),
        ("x" * 2000, "text_input has 2000 bytes, far more than fit into this model's context of 16 tokens"),
        (b"a\xff", "text_input is not UTF-8: byte 1 is 0xff"),
        ("a!", "the model's tokeniser cannot process this text"),
    ],
)
def test_prompts_that_cannot_be_answered_are_refused(model: Model, prompt: Any, why: str) -> None:
    """A prompt that cannot be answered is refused, and the text names the limit."""
    code, text = failure_of(model.ask(prompt))
    assert code == "inv"
    assert why in text


def test_a_tokenizer_answers_without_the_runtime(model: Model) -> None:
    """The stub converts texts to tokens, and tokens to texts, without the runtime.

    A text may have more tokens than the model's context, because clients want to know this number.
    """
    answer = json.loads(text_of(next_of(model.ask("ab" * 10, tokenize=True))))
    assert answer == {"tokens": [97, 98] * 10, "max_model_len": 16}
    assert text_of(next_of(model.ask("[97, 98]", detokenize=True))) == "ab"


def test_a_model_of_tokens_refuses_negative_ones_and_texts() -> None:
    """A model whose input is tokens refuses negative tokens, because its module would read a wrong row for them.

    It also refuses to convert texts, because it has no tokenizer.
    """
    model = Model(text=False)
    assert failure_of(model.ask([3], tokenize=True))[1].startswith("this model has no tokenizer")
    assert failure_of(model.ask([3, -1])) == ("inv", "tokens must not be negative, got -1")
    model.close()


def test_the_runtimes_refusal_ends_an_answer(model: Model) -> None:
    """If the runtime ends a generation with an error, the client gets the error, even after some tokens."""
    request = model.ask()
    generation = model.life.asked()
    model.life.say(generation.request, ord("a"))
    model.life.end(generation.request, "the logits are not finite", Status.INTERNAL)
    responses = [next_of(request)]
    if responses[-1].error is None:
        responses.append(next_of(request))
    assert responses[-1].error is not None
    assert responses[-1].error.message == "the logits are not finite"


def test_an_engine_without_a_runtime_is_not_chosen(model: Model) -> None:
    """An engine without a runtime predicts that it never answers, so it is not chosen for a request.

    An engine that generates never returns a forecast, so its batches are not divided.
    """
    assert model.engine.answers_in_s() < 1
    assert model.engine.forecast() is None
    model.life.sock.close()
    wait_until(lambda: model.session.attachment is None)
    assert model.engine.answers_in_s() == inf


def test_a_hundred_answers_end_each_once(model: Model) -> None:
    """Each of a hundred concurrent answers ends once and has its pieces in order. At the end, no state is left."""
    files = len(os.listdir("/proc/self/fd"))
    requests = [model.ask("p") for _ in range(100)]
    ids = [model.life.asked().request for _ in requests]
    words = b"the order of pieces"
    for token in words:
        for frame in pack_tokens([(id, token) for id in ids]):
            send(model.life.sock, frame)
    for id in ids:
        model.life.end(id)

    for request in requests:
        assert rest_of(request) == (words.decode(), "length")
    wait_until(lambda: model.engine.idle)
    assert all(waiting_request.answers.empty() for waiting_request in requests)
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= files)
