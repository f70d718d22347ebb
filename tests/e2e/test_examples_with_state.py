"""The examples with state through the real server: streamed definitions, tagged chunks, and many time series."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import example_bundles
from examples import forecast, glossary, tagger
from tests.e2e.calls import Caller, at_once, caller
from tests.e2e.harness import RunningTriton, make_repository, running_triton
from tests.e2e.stateful import Stream, generate

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
    """Streams of all terms at once are the license's definitions, with characters of every length."""
    known = glossary.definitions()

    def ask(_: Caller, number: int) -> str:
        with Stream(server, "glossary", text_input=list(known)[number]) as stream:
            return "".join(piece["text_output"] for piece in stream)

    assert at_once(server, len(known), ask) == list(known.values())
    whole = generate(server, "glossary", text_input="UTF-8")
    assert whole["text_output"] == known["UTF-8"]
    assert whole["finish_reason"] == "stop"


def test_a_text_is_tagged_as_it_is_typed(server: RunningTriton) -> None:
    """Tags of chunks of eight characters are those of the whole text, although strings are longer than that."""
    (text,) = tagger.texts(1, 160, seed=5)
    found: list[int] = []
    with caller(server, "grpc") as call:
        for at in range(0, len(text), 8):
            ends = {"sequence_start": at == 0, "sequence_end": at + 8 == len(text)}
            answer = call("tagger", {"text": text[None, at : at + 8]}, sequence_id=3, **ends)
            found += answer["tags"][0].tolist()
    assert found == tagger.truth(text.tobytes())


@pytest.mark.long
def test_a_thousand_series_share_64_slots(server: RunningTriton) -> None:
    """Every series is forecast from its own values, though the states of most are in host memory between requests."""
    values = forecast.series(1000, 48)

    def send(call: Caller, part: int) -> None:
        for at in range(0, 48, 16):
            for index in range(part, 1000, 8):
                ends = {"sequence_start": at == 0, "sequence_end": at == 32}
                chunk = {"value": values[index : index + 1, at : at + 16]}
                found = call("forecast", chunk, sequence_id=index + 1, **ends)["forecast"]
                want = forecast.direct(values[index, : at + 16])
                assert found[0, -1] == pytest.approx(want, abs=0.02)

    at_once(server, 8, send)
