"""The text pipeline on a real server. Standard clients get the right embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.calls import PROTOCOLS, caller, refusal
from tests.e2e.harness import RunningTriton
from tests.examples.test_minilm import Array, Direct
from tests.status import read_status

pytestmark = pytest.mark.long

SENTENCES = (
    "A man is playing a guitar on stage.",
    "Someone performs music in front of an audience.",
    "The stock market fell sharply today.",
    "Share prices dropped a lot this afternoon.",
    "",
    "Naïve — résumé 漢字",
)


@pytest.fixture(scope="module")
def expected(pipeline_bundles: Path) -> Array:
    """Return the embeddings of the sentences, computed by BERT in 64-bit NumPy."""
    direct = Direct(pipeline_bundles)
    return np.stack([direct.embedding(sentence) for sentence in SENTENCES])


def strings(texts: Sequence[str]) -> Array:
    """Return texts in the form in which clients send them."""
    return np.array([[text.encode()] for text in texts], object)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_cosines_agree_with_a_direct_computation(
    pipelines: RunningTriton, expected: Array, protocol: str
) -> None:
    """Each sentence, alone and with others, gets the embedding that BERT in 64-bit NumPy computes."""
    with caller(pipelines, protocol) as call:
        parts = [
            call("minilm", {"text": strings(part)})["embedding"] for part in (SENTENCES[:4], SENTENCES[4:])
        ]
        together = np.concatenate(parts)
        alone = [call("minilm", {"text": strings([sentence])})["embedding"][0] for sentence in SENTENCES]

    assert together.dtype == np.float32
    for got in (together, np.stack(alone)):
        np.testing.assert_allclose(got @ got.T, expected @ expected.T, atol=1e-4)
        np.testing.assert_allclose(np.linalg.norm(got, axis=1), 1, atol=1e-5)
    cosines = together @ together.T
    assert min(cosines[0, 1], cosines[2, 3]) > max(cosines[0, 2], cosines[0, 3], cosines[1, 2]) + 0.1


def test_the_stages_belong_to_the_pipeline(pipelines: RunningTriton) -> None:
    """Clients cannot call the stages. The runtime counts both calls of each request, and keeps no tensor on the device."""
    before = read_status(pipelines.pid)["metas"]["minilm"]
    with caller(pipelines) as call:
        call("minilm", {"text": strings(["one"])})
        refusal(lambda: call("minilm_encoder", {})).assert_is("NOT_FOUND", "grpc")
    after = read_status(pipelines.pid)["metas"]["minilm"]

    assert after["models"] == ["minilm_encoder", "minilm_pool"]
    assert after["calls"] == before["calls"] + 2
    assert after["device_seconds"] > before["device_seconds"]
    assert after["kept_bytes"] == 0
