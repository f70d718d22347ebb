"""Sequences and streams on a real server, over both protocols. Clients, deadlines or the runtime's death end them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rsrv.cli.main import main
from rsrv.client import Client, RequestError
from tests.e2e.calls import PROTOCOLS, caller, refusal
from tests.e2e.harness import RunningTriton, make_repository, running_triton
from tests.e2e.stateful import (
    Stream,
    close_streams,
    ensure,
    generate,
    grpc_streams,
    sums,
    told,
)
from tests.e2e.test_bls import add
from tests.held import assert_returned, held, settled
from tests.status import read_status
from tests.waiting import wait_until

#: A Python model without rsrv that sends a sequence, asks a storyteller, and answers with the whole text.
_ASKING = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        (request,) = requests
        call = pb_utils.InferenceRequest(
            model_name="teller",
            inputs=request.inputs(),
            requested_output_names=["text_output"],
            parameters={"max_tokens": 30},
        )
        sums = [
            pb_utils.InferenceRequest(
                model_name="sums",
                inputs=[pb_utils.Tensor("x", np.full((1, 1), 2, np.float32))],
                requested_output_names=["y"],
                correlation_id=77,
                flags=flags,
            ).exec()
            for flags in (pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START, 0, pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END)
        ]
        assert [float(one.output_tensors()[0].as_numpy()[0, 0]) for one in sums] == [2, 4, 6]
        parts = [one.output_tensors()[0].as_numpy()[0] for one in call.exec(decoupled=True)]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("text_output", np.array([b"".join(parts)], object))])]
"""
_ASKING_CONFIG = """
backend: "python"
input [{ name: "text_input" data_type: TYPE_STRING dims: [1] }]
output [{ name: "text_output" data_type: TYPE_STRING dims: [1] }]
instance_group [{ kind: KIND_CPU count: 1 }]
"""
#: An ensemble whose only step is a storyteller.
_TOLD = """
platform: "ensemble"
input [{ name: "text_input" data_type: TYPE_STRING dims: [1] }]
output [{ name: "text_output" data_type: TYPE_STRING dims: [1] }]
model_transaction_policy { decoupled: true }
ensemble_scheduling { step [{
  model_name: "teller" model_version: -1
  input_map { key: "text_input" value: "text_input" }
  output_map { key: "text_output" value: "text_output" }
}] }
"""
#: An ensemble whose only step is the model of sums.
_SUMMED = """
platform: "ensemble"
max_batch_size: 4
input [{ name: "x" data_type: TYPE_FP32 dims: [-1] }]
output [{ name: "y" data_type: TYPE_FP32 dims: [-1] }]
ensemble_scheduling { step [{
  model_name: "sums" model_version: -1
  input_map { key: "x" value: "x" }
  output_map { key: "y" value: "y" }
}] }
"""


def add_ensemble(repository: Path, name: str, config: str) -> None:
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(config)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningTriton]:
    """A server with a model of sums, storytellers, a model that calls both, and ensembles."""
    folder = tmp_path_factory.mktemp("sequences")
    repository = make_repository(folder, ensure(), settings="aliases: {champion: teller}")
    add(repository, "asking", _ASKING, _ASKING_CONFIG)
    add_ensemble(repository, "told", _TOLD)
    add_ensemble(repository, "summed", _SUMMED)
    with running_triton(repository, folder / "server.log", spare=True) as running:
        yield running


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_interleaved_sequences_are_as_whole_ones(server: RunningTriton, protocol: str) -> None:
    """Two sequences send their chunks in turns. Each sequence gets the same sums as one request with all of its values."""
    first, second = list(map(float, range(16))), [0.5] * 4
    with caller(server, protocol) as call:
        whole = sums(call, 7, first, start=True, end=True)
        got = sums(call, 8, first[:4], start=True)
        other = sums(call, "nine", second[:1], start=True)
        for at in range(4, 16, 4):
            got += sums(call, 8, first[at : at + 4], end=at == 12)
            other += sums(call, "nine", second[at // 4 :][:1], end=at == 12)
    assert got == whole == list(np.cumsum(first))
    assert other == [0.5, 1.0, 1.5, 2.0]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_sequence_without_its_beginning_is_refused(server: RunningTriton, protocol: str) -> None:
    """A request without an id, without a start, or after the end of its sequence is refused. A second start begins the sequence again."""
    with caller(server, protocol) as call:
        refusal(lambda: sums(call, 99, [1.0])).assert_is("INVALID_ARG", protocol)
        refusal(lambda: sums(call, 0, [1.0])).assert_is("INVALID_ARG", protocol)
        assert sums(call, 10, [1.0], start=True) == [1.0]
        assert sums(call, 10, [2.0], start=True) == [2.0]
        assert sums(call, 10, [2.0], end=True) == [4.0]
        refusal(lambda: sums(call, 10, [1.0])).assert_is("INVALID_ARG", protocol)


def assert_streams(server: RunningTriton, model: str, tokens: int = 1_000_000) -> None:
    """Check that the client gets a part of an answer before the answer is complete.

    The answer is long, because a busy server may send a short answer as a whole.
    """
    with Stream(server, model, text_input="hello", max_tokens=tokens) as stream:
        part = next(iter(stream))
    assert part["text_output"]
    assert "finish_reason" not in part
    wait_until(lambda: not read_status(server.pid)["models"]["teller"]["generations"], what="its end")


def test_text_streams_over_http(server: RunningTriton) -> None:
    """The pieces of a stream are whole characters. The last piece has the reason of the end, and the usage."""
    with Stream(server, "teller", text_input="hello", max_tokens=40) as stream:
        pieces = list(stream)
    assert "".join(piece["text_output"] for piece in pieces) == told(b"hello", 40)
    last = pieces[-1]
    assert (last["finish_reason"], last["prompt_tokens"], last["completion_tokens"]) == ("length", 5, 40)
    assert not any("finish_reason" in piece for piece in pieces[:-1])
    assert_streams(server, "teller")


def test_an_answer_streams_by_the_name_of_an_alias(server: RunningTriton) -> None:
    """An alias streams the same answer as its model. A refusal names the alias and the model."""
    with Stream(server, "champion", text_input="hello", max_tokens=30) as stream:
        parts = list(stream)
    assert "".join(part["text_output"] for part in parts) == told(b"hello", 30)
    assert_streams(server, "champion")
    with Stream(server, "champion", text_input="hello", max_tokens="x") as stream:
        ((message,),) = (part.values() for part in stream)
    assert message.startswith("alias 'champion', model 'teller': parameter max_tokens must be")


def test_an_answer_in_one_response(server: RunningTriton) -> None:
    """`generate` returns an answer in one response. A stop text ends the answer, and a wrong parameter is refused."""
    assert generate(server, "teller", text_input="hello", max_tokens=9)["text_output"] == told(b"hello", 9)
    stopped = generate(server, "teller", text_input="hello", stop="Wald")
    assert stopped["text_output"] == told(b"hello", 100).partition("Wald")[0]
    assert stopped["finish_reason"] == "stop"
    wrong = generate(server, "teller", text_input="hello", top_p=2)
    assert wrong == {"error": "parameter top_p must be a number above 0, at most 1 (off), got 2"}
    answer = generate(server, "tokens", tokens=[5, 6, 7], max_tokens=4)
    assert len(answer["tokens"]) == answer["completion_tokens"] == 4


def test_several_answers_share_a_grpc_stream(server: RunningTriton) -> None:
    """Several answers share a gRPC stream. Each is whole, and has one last response."""
    text: dict[str, str] = {str(n): "" for n in range(6)}
    ends: list[str] = []
    with grpc_streams(server) as streams:
        for id in text:
            streams.ask("teller", id, b"x" * (1 + int(id)), parameters={"max_tokens": 30})
        while len(ends) < len(text):
            id, outputs, last = streams.next()
            text[id] += outputs["text_output"][0].decode()
            ends += [id] * last
    assert text == {id: told(b"x" * (1 + int(id)), 30) for id in text}
    assert sorted(ends) == sorted(text)


def test_a_client_that_goes_frees_its_slot(server: RunningTriton) -> None:
    """A client cancels, closes its connection, or misses its deadline. The next client then gets the only slot."""
    with grpc_streams(server) as streams:
        streams.ask("alone", "long", b"hello")
        assert streams.next()[0] == "long"
    assert generate(server, "alone", text_input="a", max_tokens=5)["text_output"] == told(b"a", 5)

    with Stream(server, "alone", text_input="hello") as stream:
        assert next(iter(stream))["text_output"]
    assert generate(server, "alone", text_input="a", max_tokens=5)["text_output"] == told(b"a", 5)

    with grpc_streams(server) as streams:
        streams.ask("alone", "late", b"hello", timeout=200_000)
        assert "[rsrv:DEADLINE]" in streams.failure()
    assert generate(server, "alone", text_input="a", max_tokens=5)["text_output"] == told(b"a", 5)


def test_answers_that_are_read_late_are_whole(server: RunningTriton) -> None:
    """Two clients read one piece, and then nothing for a while. The server completes their answers, and serves another client.

    When the two clients read again, they get their whole answers.
    """
    reads, tokens = threading.Event(), 1000
    with (
        Stream(server, "alone", buffer_bytes=4096, text_input="late", max_tokens=tokens) as stream,
        grpc_streams(server, reads) as streams,
    ):
        texts = [next(iter(stream))["text_output"].encode(), b""]
        # There is one slot, so an answer begins when the answer before it has been made completely.
        streams.ask("alone", "late", b"late", parameters={"max_tokens": tokens})
        texts[1] += streams.next()[1]["text_output"][0]
        assert generate(server, "alone", text_input="a", max_tokens=5)["text_output"] == told(b"a", 5)

        texts[0] += b"".join(piece["text_output"].encode() for piece in stream)
        reads.set()
        last = False
        while not last:
            _, outputs, last = streams.next()
            texts[1] += b"".join(outputs.get("text_output", ()))
    assert [text.decode() for text in texts] == [told(b"late", tokens)] * 2


def test_a_model_of_tritons_own_asks(server: RunningTriton) -> None:
    """A plain Python model of Triton calls rsrv's models: it sends a sequence, and reads a stream."""
    answer = generate_plain(server, "asking", text_input="hello")
    assert answer["text_output"] == told(b"hello", 30)


def test_an_ensemble_streams_the_answer_of_its_step(server: RunningTriton) -> None:
    """An ensemble has each piece of its step's answer as a response. The client's parameters and deadline reach the step."""
    with Stream(server, "told", text_input="hello", max_tokens=30) as stream:
        parts = list(stream)
    assert "".join(part["text_output"] for part in parts) == told(b"hello", 30)
    # Triton does not tell the step that the client has gone, so the generation continues to its end.
    assert_streams(server, "told", 2_000)
    with Stream(server, "told", text_input="hello", max_tokens="x") as stream:
        ((message,),) = (part.values() for part in stream)
    assert "parameter max_tokens must be" in message
    with grpc_streams(server) as streams:
        streams.ask("told", "late", b"hello", timeout=200_000)
        assert "[rsrv:DEADLINE]" in streams.failure()


def test_an_ensemble_passes_sequences_on(server: RunningTriton) -> None:
    """A client sends a sequence to an ensemble. The ensemble's step gets the id, the start and the end of the sequence."""
    with caller(server) as call:
        for start, end, total in ((True, False, 2.0), (False, False, 4.0), (False, True, 6.0)):
            x = np.full((1, 1), 2, np.float32)
            answer = call("summed", {"x": x}, sequence_id=55, sequence_start=start, sequence_end=end)
            assert answer["y"].tolist() == [[total]]


def generate_plain(server: RunningTriton, model: str, **fields: Any) -> dict[str, Any]:
    """Ask a model that takes no parameters."""
    with Stream(server, model, **fields) as stream:
        (answer,) = stream
    return answer


def test_a_client_reads_a_generation_in_pieces(
    server: RunningTriton, capsys: pytest.CaptureFixture[str]
) -> None:
    """The pieces of `rsrv.client` are the whole text, in Python and on the command line. A refused prompt has the server's reason."""
    url = server.server.grpc_url
    with Client(url) as client:
        stream = client.stream("teller", text="Once", parameters={"max_tokens": 40})
        pieces = [piece["text"][0] for piece in stream]
        assert len(pieces) > 2
        assert b"".join(pieces).decode() == told(b"Once", 40)
        with pytest.raises(RequestError, match="prompt"):
            next(client.stream("teller", text=""))
    capsys.readouterr()
    assert main(["infer", "teller", "text=Once", "--parameter", "max_tokens=40", "--url", url]) == 0
    text, _, rest = capsys.readouterr().out.partition("\n")
    assert text == told(b"Once", 40)
    assert "finish_reason  strings 1\n['length']\n" in rest


@pytest.mark.long
def test_streams_closed_at_every_step_leave_nothing(server: RunningTriton) -> None:
    """Clients leave before, between and after pieces, over both protocols, and some requests are bad.

    Afterwards, the slot is free, and the stub holds no more memory than before.
    """
    runtime, (stub,) = read_status(server.pid)["pid"], server.stub_pids("alone")

    close_streams(server, "alone", clients=4, each=40)
    before = settled(lambda: held(stub))
    close_streams(server, "alone", clients=4, each=40)

    assert generate(server, "alone", text_input="a", max_tokens=5)["text_output"] == told(b"a", 5)
    assert_returned(before, settled(lambda: held(stub)), share=0.1)
    assert server.stub_pids("alone") == [stub]
    assert read_status(server.pid)["pid"] == runtime


def test_the_runtimes_death_ends_streams_and_sequences(server: RunningTriton) -> None:
    """After the runtime's death, streams and sequences end with a tagged error. The next runtime begins new ones."""
    with caller(server) as call, grpc_streams(server) as streams:
        assert sums(call, 20, [1.0], start=True) == [1.0]
        streams.ask("teller", "long", b"hello")
        assert streams.next()[0] == "long"
        killed = read_status(server.pid)["pid"]
        os.kill(killed, signal.SIGKILL)
        assert "[rsrv:RUNTIME_DOWN] the model runtime ended after" in streams.failure()
        lost = refusal(lambda: sums(call, 20, [1.0]))
        lost.assert_is("NOT_FOUND", "grpc")
        assert (
            "[rsrv:SEQUENCE_LOST] the model runtime that had the sequence's state has ended" in lost.message
        )
        assert sums(call, 20, [1.0], start=True) == [1.0]
        assert sums(call, 20, [1.0], end=True) == [2.0]
    assert generate(server, "teller", text_input="a", max_tokens=5)["text_output"] == told(b"a", 5)
    wait_until(lambda: not server.urgent_findings())  # Idle models also become ready.
