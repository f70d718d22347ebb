"""Comparison of answers with a framework's."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rsrv_bundle import BundleError
from rsrv_bundle.hf import proof


@pytest.mark.parametrize("scores", ["[NaN, 0.5]", "[0.5, NaN]", "[Infinity, 0.5]"])
def test_a_number_that_is_not_finite_is_no_proof(scores: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer with a NaN or an infinity is refused, wherever this number is in the answer."""
    monkeypatch.setattr(
        proof, "ServedBundle", lambda _: lambda _: {"scores": np.array([[scores.encode()]], object)}
    )
    recipe: Any = SimpleNamespace(
        samples={"a": {}}, reference=lambda _: {"scores": [0.5, 0.5]}, source="transformers"
    )
    bundle: Any = SimpleNamespace(name="model")
    with pytest.raises(BundleError, match="sample 'a': scores differs from transformers by inf"):
        proof.prove(bundle, recipe, 1e-4)


@pytest.mark.parametrize(("objects", "noted"), [("[]", True), ('[{"label": "cat"}]', False)])
def test_empty_answers_are_noted(
    objects: str, noted: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If the answers to all samples are empty, the export notes it, because comparing empty answers proves little."""
    monkeypatch.setattr(
        proof, "ServedBundle", lambda _: lambda _: {"detections": np.array([[objects.encode()]], object)}
    )
    recipe: Any = SimpleNamespace(samples={"a": {}}, reference=lambda _: {"detections": json.loads(objects)})
    bundle: Any = SimpleNamespace(name="model")
    assert proof.prove(bundle, recipe, 1e-4) == {"detections": 0.0}
    assert ("model: detections is empty for all samples" in capsys.readouterr().err) is noted
