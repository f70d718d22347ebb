"""Models from Hugging Face directories, served over both protocols and by OpenAI's endpoints."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest

from rsrv_bundle.hf.export import export_hf
from rsrv_bundle.hf.proof import ServedBundle
from rsrv_bundle.hf.recipe import HubOptions
from tests.e2e.calls import PROTOCOLS, caller, refusal
from tests.e2e.harness import RunningTriton, StartTriton, make_repository
from tests.e2e.openais import running_openai
from tests.e2e.stateful import Stream
from tests.unit.bundle.hf.directories import LABELS, PATCHES, bert, decoder, picture, sentence_transformer
from tests.unit.bundle.hf.test_audio_export import listener
from tests.unit.bundle.hf.test_image_export import file
from tests.unit.hooks.test_audio import wav, whole

pytestmark = pytest.mark.long

TEXTS = np.array([[b"a cat on the mat"], ["Größe, 東京 and more".encode()]], object)
PICTURES = np.array([[file(40, 50)], [file(32, 32)]], object)
SOUNDS = np.array([[wav(whole(16) * 8)], [wav(whole(16) * 14)]], object)


def test_directories_are_served(start_triton: StartTriton, tmp_path: Path) -> None:
    """Clients send texts and files, and get the answers of the exported bundles.

    Bad files and long texts are refused as the client's fault.
    """
    folder, bundles = tmp_path / "models", tmp_path / "bundles"
    quick = HubOptions(batch_sizes=(2,))
    texts = HubOptions(batch_sizes=(2,), lengths=(48,))
    padded = HubOptions(batch_sizes=(2,), lengths=(16, 48))
    square = {"size": {"height": 32, "width": 32}}
    made: dict[str, tuple[Path, HubOptions]] = {
        "tags": (bert(folder / "tags", "BertForTokenClassification", LABELS), padded),
        "classifies": (bert(folder / "classifies", "BertForSequenceClassification", ("a", "b")), texts),
        "embeds": (sentence_transformer(folder / "embeds", "mean"), padded),
        "ranks": (bert(folder / "ranks", "BertForSequenceClassification", num_labels=1), texts),
        "sees": (picture(folder / "sees", "ViTForImageClassification", "ViT", square, **PATCHES), quick),
        "hears": (
            listener(folder / "hears", "Wav2Vec2ForCTC"),
            HubOptions(batch_sizes=(2,), lengths=(1600,)),
        ),
        "writes": (decoder(folder / "writes", "Qwen2"), HubOptions(batch_sizes=(2,), slots=3, context=128)),
    }
    requests = {
        "tags": {"text": TEXTS},
        "classifies": {"text": TEXTS},
        "embeds": {"text": TEXTS},
        "ranks": {"text": TEXTS, "text_pair": TEXTS[::-1]},
        "sees": {"image": PICTURES},
        "hears": {"audio": SOUNDS},
    }
    expected = {}
    for name, (directory, options) in made.items():
        bundle = export_hf(directory, out_dir=bundles / name, options=options)
        if name in requests:
            expected[name] = ServedBundle(bundle)(requests[name])
    # The runtime compiles eleven modules, which takes minutes on a busy machine.
    server = start_triton(make_repository(tmp_path), timeout=600)

    for protocol in PROTOCOLS:
        with caller(server, protocol) as call:
            for name, request in requests.items():
                assert_equal(call(name, request), expected[name])
            bad = {
                "classifies": {"text": np.array([["a " * 100]], object)},
                "sees": {"image": np.array([[file(10_000, 8_000)]], object)},
                "hears": {"audio": np.array([[wav(bytes(4000))]], object)},
            }
            for name, request in bad.items():
                refusal(partial(call, name, request)).assert_is("INVALID_ARG", protocol)
    assert task(server, "sees")["labels"] == [f"class {n}" for n in range(5)]
    assert task(server, "writes") == {
        "kind": "text-generation",
        "inputs": {"text": "text_input"},
        "outputs": {"text": "text_output"},
    }
    with Stream(server, "writes", text_input="a cat", max_tokens=8) as stream:
        pieces = list(stream)
    assert pieces[-1]["completion_tokens"] <= 8
    ask_openai(server, expected)


def ask_openai(server: RunningTriton, expected: dict[str, Any]) -> None:
    """Compare the answers of OpenAI's endpoints with the bundles' answers."""
    first, second = (text.decode() for text in TEXTS[:, 0])
    with running_openai(server.grpc_port, models=["embeds", "ranks", "writes"]) as api:
        answer = api.openai().embeddings.create(model="embeds", input=[first, second])
        embeddings = [entry.embedding for entry in answer.data]
        np.testing.assert_allclose(embeddings, expected["embeds"]["embedding"], atol=1e-5)
        assert answer.usage.prompt_tokens == expected["embeds"]["tokens"].sum()
        (ranked,) = api.cohere().rerank(model="ranks", query=first, documents=[second]).results
        assert abs(ranked.relevance_score - expected["ranks"]["scores"][0, 0]) < 1e-5
        messages = [{"role": "user", "content": first}]
        chat = api.openai().chat.completions.create(model="writes", messages=messages, max_tokens=8)
        assert 0 < chat.usage.completion_tokens <= 8


def assert_equal(got: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare a server's answers with the bundle's. Numbers may differ slightly. Texts must be equal, except for scores in them."""
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        if array.dtype != object:
            np.testing.assert_allclose(got[name].reshape(array.shape), array, atol=1e-5)
            continue
        for value, other in zip(got[name].ravel(), array.ravel(), strict=True):
            if name == "entities":
                value, other = (
                    [{**each, "score": 0} for each in json.loads(text)] for text in (value, other)
                )
            assert value == other


def task(server: RunningTriton, model: str) -> dict[str, Any]:
    """Return a model's task, which clients read from its configuration."""
    with urlopen(f"http://127.0.0.1:{server.http_port}/v2/models/{model}/config", timeout=60) as answer:
        config = json.load(answer)
    settings: dict[str, Any] = json.loads(config["parameters"]["task"]["string_value"])
    return settings
