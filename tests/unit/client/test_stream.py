"""Streams of answers: a request is sent again before its first answer, and never after it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rsrv.cli.main import main
from rsrv.client import Client, InputError, RequestError
from rsrv.client.retries import Code
from rsrv.client.transport import Answers, AttemptFailed, InferRequest, InferTensor
from tests.unit.client.fake_server import CONFIG, FakeServer

STREAMING = {**CONFIG, "model_transaction_policy": {"decoupled": True}}
FULL = AttemptFailed(Code.UNAVAILABLE, "[rsrv:QUEUE_FULL] full; retry after 0 ms")
TELLING = {
    **STREAMING,
    "output": [
        {"name": "text", "data_type": "TYPE_STRING", "dims": [-1]},
        {"name": "count", "data_type": "TYPE_INT64", "dims": [1]},
    ],
}


class Teller(FakeServer):
    """A server that answers with three pieces of a text, and then with the number of pieces."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        super().__init__(TELLING)
        self._capsys = capsys
        self.parameters: dict[str, Any] = {}
        #: What the command printed before each answer.
        self.printed: list[str] = []
        self.failure: AttemptFailed | None = None

    async def stream(self, request: InferRequest, timeout_s: float) -> Answers:
        self.parameters = dict(request.parameters)
        for piece in ("on", "ce\nä", "☃"):
            self.printed.append(self._capsys.readouterr().out)
            content = piece.encode()
            yield [InferTensor("text", "BYTES", (1,), len(content).to_bytes(4, "little") + content)]
        self.printed.append(self._capsys.readouterr().out)
        if self.failure:
            raise self.failure
        yield [
            InferTensor("text", "BYTES", (1,), bytes(4)),
            InferTensor("count", "INT64", (1,), np.int64(3).tobytes()),
        ]


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
    """If two attempts are refused, the third one's answers arrive one by one. The request is encoded once."""

    async def before(number: int, _: list[Any]) -> None:
        if number < 3:
            raise FULL

    server.before = before
    answers = [answer["y"].tolist() for answer in client.stream("m", x=[1, 2, 3])]
    assert answers == [[2], [4], [6]]
    assert server.requests == [[1], [1], [1], [2], [3]]
    assert server.encoded == 1


def test_a_stream_is_not_repeated_after_its_first_answer(server: FakeServer, client: Client) -> None:
    """After the first answer, even a temporary failure is reported, because another attempt would send the first answer again."""

    async def before(_: int, values: list[Any]) -> None:
        if values == [2]:
            raise FULL

    server.before = before
    stream = client.stream("m", x=[1, 2, 3])
    assert next(stream)["y"].tolist() == [2]
    with pytest.raises(
        RequestError, match=r"full; retry after 0 ms \(not repeated, because the answer had begun\)"
    ) as error:
        next(stream)
    assert error.value.tag == "QUEUE_FULL"
    assert server.requests == [[1], [2]]


def test_a_reader_that_stops_ends_the_stream(server: FakeServer, client: Client) -> None:
    """If the caller stops reading, the request is cancelled, even while the next answer is on its way."""
    for answer in client.stream("m", x=[1, 2, 3]):
        assert answer["y"].tolist() == [2]
        break
    assert server.requests == [[1]]
    assert server.in_flight == 0


def test_infer_refuses_a_model_that_streams(client: Client) -> None:
    """For a model that streams, `infer` fails, and the error names the method `stream`."""
    with pytest.raises(InputError, match=r"m streams its answers: call stream\(\)"):
        client.infer("m", x=[1])


def test_http_has_no_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream over HTTP is refused, and the error names the gRPC port."""

    async def config(*_: Any) -> Any:
        return STREAMING

    monkeypatch.setattr("rsrv.client.transport._Http.config", config)
    with (
        Client("http://localhost:1") as client,
        pytest.raises(InputError, match="streams need gRPC: give the client the server's gRPC port"),
    ):
        next(client.stream("m", x=[1]))


@pytest.fixture
def teller(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Teller:
    made = Teller(capsys)
    monkeypatch.setattr("rsrv.client.client.connect", lambda *_: made)
    return made


COMMAND = ("infer", "m", "x=[1]", "--parameter", "max_tokens=3", "--parameter", "stop=.")


def test_the_command_line_prints_a_text_while_it_is_generated(
    teller: Teller, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each piece of the text is printed when it arrives. The other outputs follow on their own lines."""
    assert main(COMMAND) == 0
    assert teller.printed == ["", "on", "ce\nä", "☃"]
    assert capsys.readouterr().out == "\ncount  int64 1\n[3]\n"
    assert teller.parameters == {"max_tokens": 3, "stop": "."}


def test_the_command_line_prints_an_answer_per_line_for_programs(
    teller: Teller, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --json, each answer is printed as one line when it arrives."""
    assert main([*COMMAND, "--json"]) == 0
    lines = "".join([*teller.printed, capsys.readouterr().out]).splitlines()
    assert [json.loads(line) for line in lines] == [
        {"text": ["on"]},
        {"text": ["ce\nä"]},
        {"text": ["☃"]},
        {"text": [""], "count": [3]},
    ]


def test_the_command_line_writes_all_pieces(teller: Teller, tmp_path: Path) -> None:
    """With --out, nothing is printed, and the file has the pieces of each output in order."""
    out = tmp_path / "out.npz"
    assert main([*COMMAND, "--out", str(out)]) == 0
    assert teller.printed == [""] * 4
    with np.load(out) as arrays:
        assert {name: array.tolist() for name, array in arrays.items()} == {
            "text": ["on", "ce\nä", "☃", ""],
            "count": [3],
        }


def test_the_command_line_ends_the_line_of_a_broken_text(
    teller: Teller, capsys: pytest.CaptureFixture[str]
) -> None:
    """If a stream breaks after some text, the request is not sent again, and the error is on its own line."""
    teller.failure = FULL
    assert main(COMMAND) == 1
    end = capsys.readouterr()
    assert end.out == "\n"
    assert (
        end.err
        == "rsrv infer: m: [rsrv:QUEUE_FULL] full; retry after 0 ms (not repeated, because the answer had begun)\n"
    )
    assert len(teller.printed) == 4
