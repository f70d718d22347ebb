"""The examples with state on a real server: streamed definitions, a text that is tagged in chunks, and many time series."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import example_bundles
from examples import forecast, glossary, tagger
from tests.e2e.calls import Caller, at_once, caller
from tests.e2e.harness import RunningTriton, make_repository, running_triton
from tests.e2e.stateful import Stream, generate
from tests.e2e.test_load import (
    models_status,
    perf_analyzer,
    reported,
    succeeded_and_failed,
    wait_until_idle,
)

pytestmark = pytest.mark.long

NAMES = ("forecast", "glossary", "tagger")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningTriton]:
    """A server with the three examples."""
    folder = tmp_path_factory.mktemp("examples_with_state")
    built = example_bundles.ensure(NAMES)
    repository = make_repository(folder, *(built / name for name in NAMES))
    with running_triton(repository, folder / "server.log") as running:
        yield running


def test_terms_are_defined_while_others_are(server: RunningTriton) -> None:
    """Concurrent streams return the right definitions of all terms. Some of their characters have several bytes."""
    known = glossary.definitions()

    def ask(_: Caller, number: int) -> str:
        with Stream(server, "glossary", text_input=list(known)[number]) as stream:
            return "".join(piece["text_output"] for piece in stream)

    assert at_once(server, len(known), ask) == list(known.values())
    whole = generate(server, "glossary", text_input="UTF-8")
    assert whole["text_output"] == known["UTF-8"]
    assert whole["finish_reason"] == "stop"


def test_a_text_is_tagged_as_it_is_typed(server: RunningTriton) -> None:
    """A text is sent in chunks of eight characters. The tags are those of the whole text, although strings are longer than a chunk."""
    (text,) = tagger.texts(1, 160, seed=5)
    tags: list[int] = []
    with caller(server, "grpc") as call:
        for at in range(0, len(text), 8):
            ends = {"sequence_start": at == 0, "sequence_end": at + 8 == len(text)}
            answer = call("tagger", {"text": text[None, at : at + 8]}, sequence_id=3, **ends)
            tags += answer["tags"][0].tolist()
    assert tags == tagger.truth(text.tobytes())


def test_a_thousand_series_share_64_slots(server: RunningTriton) -> None:
    """Every series is forecast from its own values, although most states are in host memory between requests."""
    values = forecast.series(1000, 48)

    def send(call: Caller, part: int) -> None:
        for at in range(0, 48, 16):
            for index in range(part, 1000, 8):
                ends = {"sequence_start": at == 0, "sequence_end": at == 32}
                chunk = {"value": values[index : index + 1, at : at + 16]}
                predicted = call("forecast", chunk, sequence_id=index + 1, **ends)["forecast"]
                want = forecast.direct(values[index, : at + 16])
                assert predicted[0, -1] == pytest.approx(want, abs=0.02)

    at_once(server, 8, send)


@pytest.mark.parametrize("options", [(), ("--streaming",)], ids=["unary", "streaming"])
def test_perf_analyzer_sends_sequences(server: RunningTriton, options: tuple[str, ...]) -> None:
    """Triton's own load generator begins and ends sequences. Each step is counted as answered, and no sequence is left."""
    counted, outcomes = succeeded_and_failed(server, "tagger"), outcomes_of(server, "tagger")
    sequences = ("--sequence-length", "20", "--shape", "text:8", "--input-data", "random")
    output = perf_analyzer(server, "tagger", 8, *sequences, *options)
    wait_until_idle(server)
    succeeded, failed = np.subtract(succeeded_and_failed(server, "tagger"), counted)
    assert failed == 0
    assert reported(output, "Sequence count") > 0, output
    assert dict(outcomes_of(server, "tagger") - outcomes) == {"answered": succeeded}
    assert not any(models_status(server)["tagger"]["sequences"].values())


def test_perf_analyzer_reads_streams(server: RunningTriton, tmp_path: Path) -> None:
    """Triton's own load generator gets each generated answer in many responses. No answer is cut off."""
    outcomes = outcomes_of(server, "glossary")
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps({"data": [{"text_input": [term]} for term in glossary.definitions()]}))
    parameters = ("--request-parameter", "max_tokens:40:int")
    output = perf_analyzer(server, "glossary", 4, "--streaming", "--input-data", str(prompts), *parameters)
    wait_until_idle(server)
    assert reported(output, "Response Throughput") > 5 * reported(output, "Throughput") > 0, output
    counts = outcomes_of(server, "glossary") - outcomes
    assert counts.keys() == {"answered"}
    assert counts["answered"] >= reported(output, "Request count") > 0, output


def outcomes_of(server: RunningTriton, model: str) -> Counter[str]:
    return Counter(models_status(server)[model]["outcomes"])
