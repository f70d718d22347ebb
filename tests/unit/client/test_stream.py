"""The answers of models that stream: repeated before the first one, and never after it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rsrv.client import Client, InputError, RequestError
from rsrv.client.retries import Code
from rsrv.client.transport import AttemptFailed
from tests.unit.client.fake_server import CONFIG, FakeServer

STREAMING = {**CONFIG, "model_transaction_policy": {"decoupled": True}}
FULL = AttemptFailed(Code.UNAVAILABLE, "[rsrv:QUEUE_FULL] full; retry after 0 ms")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    made = FakeServer(STREAMING)
    monkeypatch.setattr("rsrv.client.client.connect", lambda *_: made)
    return made


@pytest.fixture
def client(server: FakeServer) -> Iterator[Client]:
    with Client("localhost:1") as made:
        yield made


def test_a_stream_is_repeated_before_its_first_answer(server: FakeServer, client: Client) -> None:
    """Two attempts are refused. The third one's answers come one by one, and nothing was encoded twice."""

    async def before(number: int, _: list[Any]) -> None:
        if number < 3:
            raise FULL

    server.before = before
    answers = [answer["y"].tolist() for answer in client.stream("m", x=[1, 2, 3])]
    assert answers == [[2], [4], [6]]
    assert server.requests == [[1], [1], [1], [2], [3]]
    assert server.encoded == 1


def test_a_stream_is_not_repeated_after_its_first_answer(server: FakeServer, client: Client) -> None:
    """Even a failure that ends by itself is reported, because a repetition would send the first answer twice."""

    async def before(_: int, values: list[Any]) -> None:
        if values == [2]:
            raise FULL

    server.before = before
    stream = client.stream("m", x=[1, 2, 3])
    assert next(stream)["y"].tolist() == [2]
    with pytest.raises(RequestError, match=r"full; retry after 0 ms \(the answer had begun\)") as error:
        next(stream)
    assert error.value.tag == "QUEUE_FULL"
    assert server.requests == [[1], [2]]


def test_a_reader_that_stops_ends_the_stream(server: FakeServer, client: Client) -> None:
    """The request is cancelled while the next answer is under way."""
    for answer in client.stream("m", x=[1, 2, 3]):
        assert answer["y"].tolist() == [2]
        break
    assert server.requests == [[1]]
    assert server.in_flight == 0


def test_infer_refuses_a_model_that_streams(client: Client) -> None:
    """The error names the method that takes it."""
    with pytest.raises(InputError, match=r"m streams its answers: call stream\(\)"):
        client.infer("m", x=[1])


def test_http_has_no_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says which port has them."""

    async def config(*_: Any) -> Any:
        return STREAMING

    monkeypatch.setattr("rsrv.client.transport._Http.config", config)
    with (
        Client("http://localhost:1") as client,
        pytest.raises(InputError, match="streams need gRPC: give the client the server's gRPC port"),
    ):
        next(client.stream("m", x=[1]))
