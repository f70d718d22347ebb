"""Comparison of answers with a framework's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rsrv_bundle import BundleError
from rsrv_bundle.hf import proof


@pytest.mark.parametrize("scores", ["[NaN, 0.5]", "[0.5, NaN]", "[Infinity, 0.5]"])
def test_a_number_that_is_not_finite_is_no_proof(scores: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is never as near as the other numbers, wherever it is in the answer."""
    monkeypatch.setattr(
        proof, "ServedBundle", lambda _: lambda _: {"scores": np.array([[scores.encode()]], object)}
    )
    recipe: Any = SimpleNamespace(
        samples={"a": {}}, reference=lambda _: {"scores": [0.5, 0.5]}, source="transformers"
    )
    bundle: Any = SimpleNamespace(name="model")
    with pytest.raises(BundleError, match="sample 'a': scores differs from transformers by inf"):
        proof.prove(bundle, recipe, 1e-4)
