"""Streams under random events and parameters: each stream ends once, and the runtime gets only valid requests."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsrv.stub.generation_params import _NUMBERS, read_generation_params
from rsrv.stub.replies import RequestFailure
from rsrv.wire.frames import Kind, Status, read_header, unpack_ids, unpack_json
from rsrv.wire.generation import Generate, pack_generate, read_generate
from tests.fakes import FakeRequest, FakeResponse
from tests.unit.stub.test_generation import Model
from tests.waiting import PATIENCE_S, wait_until

NAMES = [*_NUMBERS, "stop", "stream", "rsrv_priority", "Stop"]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["1", "0.5", '["a"]']),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=5,
)  # fmt: skip


@given(st.dictionaries(st.sampled_from(NAMES) | st.text(), json_values, max_size=4), st.booleans())
def test_parameters_are_right_or_refused(parameters: dict[str, Any], text: bool) -> None:
    """Random parameters are either refused, or within the limits. In the second case, the runtime accepts a frame with them."""
    try:
        params = read_generation_params(parameters, context=64, stop=[2], text=text)
    except RequestFailure:
        return
    assert params.max_tokens is None or 1 <= params.max_tokens <= 64
    assert 0 <= params.temperature <= 100
    assert 0 < params.top_p <= 1
    assert max(params.top_k, params.seed) < 1 << 24
    assert all(params.stop_texts)
    message = Generate(1, [1], *params[:5], params.stop_tokens)
    assert read_generate(unpack_json(pack_generate(message))) == message


class Crowd:
    """Requests to one model, and a runtime that acts at random."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.model = Model()
        self.requests: list[FakeRequest] = []
        #: Ids of the generations in progress in the present runtime.
        self.active: set[int] = set()

    def ask(self) -> None:
        choices: list[dict[str, Any]] = [{}, {}, {"stream": False}, {"stop": "b"}, {"max_tokens": 0}]
        self.requests.append(self.model.ask("hi", **self.rng.choice(choices)))

    def read(self) -> None:
        """Read the frames that the stub has sent so far."""
        life = self.model.life
        life.sock.settimeout(0.02)
        while True:
            try:
                frame, _ = life.receiver.receive()
            except (TimeoutError, BlockingIOError):
                life.sock.settimeout(PATIENCE_S)  # The stub may be slow to read.
                break
            kind, count = read_header(frame)
            if kind is Kind.GENERATE:
                self.active.add(read_generate(unpack_json(frame)).request)
            for id in unpack_ids(frame, count) if kind is Kind.CANCEL else ():
                if id in self.active:
                    self.end(id, Status.CANCELLED)

    def end(self, id: int, status: Status) -> None:
        self.active.discard(id)
        self.model.life.end(id, "length" if status is Status.OK else "why", status)

    def step(self) -> None:
        if self.active and self.rng.random() < 0.8:
            for id in self.rng.sample(sorted(self.active), self.rng.randint(1, len(self.active))):
                self.model.life.say(id, *self.rng.choices("ab\N{SNOWMAN}".encode(), k=self.rng.randint(1, 3)))
        match self.rng.randrange(6):
            case 0 if self.active:
                self.end(self.rng.choice(sorted(self.active)), self.rng.choice([Status.OK, Status.INTERNAL]))
            case 1:
                self.rng.choice(self.requests).cancelled = True
            case 2 | 3:
                self.ask()
            case 4 if self.rng.random() < 0.3:
                self.model.life.sock.close()
                wait_until(lambda: self.model.session.attachment is None)
                self.model.live()
                self.active.clear()


def ends(request: FakeRequest) -> int:
    """Return how many of a request's responses so far are last ones. The responses stay in the queue."""
    responses: list[FakeResponse] = []
    while not request.answers.empty():
        responses.append(request.answers.get())
    for response in responses:
        request.answers.put(response)
    return sum(answer.error is not None or "completion_tokens" in answer.arrays for answer in responses)


@pytest.mark.parametrize("seed", range(4))
def test_each_stream_ends_once(seed: int) -> None:
    """Each stream ends exactly once, even if clients cancel, runtimes die, stop texts occur, and generations fail."""
    crowd = Crowd(seed)
    crowd.ask()
    for _ in range(60):
        crowd.read()
        crowd.step()

    def all_ended() -> bool:
        crowd.read()
        for id in sorted(crowd.active):
            crowd.end(id, Status.OK)
        return all(map(ends, crowd.requests))

    wait_until(all_ended)
    wait_until(lambda: crowd.model.engine.idle)
    assert {ends(request) for request in crowd.requests} == {1}
    crowd.model.close()
