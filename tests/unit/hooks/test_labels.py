"""Classes and their names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from rsrv.hooks import labels
from rsrv.hooks.text import from_text

Array = np.ndarray[Any, Any]

logits = arrays.arrays(
    np.float32, st.tuples(st.integers(1, 3), st.integers(1, 9)), elements=st.floats(-1000, 1000, width=32)
)


@given(logits)
def test_probabilities_are_those_of_torch(values: Array) -> None:
    """softmax equals torch's for logits of any size. It keeps their dtype and gives no warning."""
    probabilities = labels.softmax(values)
    assert probabilities.dtype == np.float32
    np.testing.assert_allclose(
        probabilities, torch.softmax(torch.tensor(values), -1).numpy(), rtol=1e-5, atol=1e-30
    )
    np.testing.assert_allclose(labels.softmax(values.T, axis=0), probabilities.T)


def test_many_logits_of_16_bits_are_summed_in_32() -> None:
    """100,000 equal f16 logits are summed in f32, because their sum is too large for f16."""
    probabilities = labels.softmax(np.zeros((1, 100_000), np.float16))
    assert probabilities.dtype == np.float16
    assert (probabilities == np.float16(1e-5)).all()


@pytest.mark.parametrize("dtype", [np.uint16, np.uint8, np.int32, np.bool_])
def test_what_numpy_does_not_take_for_floats_is_refused(dtype: Any) -> None:
    """Types other than floats are refused, because bf16 arrives as u16, whose values are not the numbers."""
    scores = np.zeros((1, 3), dtype)
    with pytest.raises(ValueError, match=f"logits must be floats, not {np.dtype(dtype)}; hooks get bf16"):
        labels.softmax(scores)
    with pytest.raises(ValueError, match=f"scores must be floats, not {np.dtype(dtype)}; hooks get bf16"):
        labels.top_k(scores, 1)


@given(
    arrays.arrays(
        np.float32, st.tuples(st.integers(0, 3), st.integers(1, 9)), elements=st.sampled_from([-1, 0, 0.5, 2])
    ),
    st.integers(1, 12),
)
def test_the_best_come_first_and_of_equals_the_first(scores: Array, k: int) -> None:
    """top_k returns the best classes first, and equal ones by position. It returns at most all classes."""
    best, classes = labels.top_k(scores, k)
    assert classes.dtype == np.int64
    for row, values, order in zip(scores, best, classes, strict=True):
        expected = sorted(range(len(row)), key=lambda index: (-row[index], index))[:k]
        assert order.tolist() == expected
        assert values.tolist() == row[expected].tolist()


def test_what_is_no_number_comes_last() -> None:
    """In top_k, NaN is last."""
    best, classes = labels.top_k(np.array([[np.nan, 1, 2]], np.float32), 2)
    assert (best.tolist(), classes.tolist()) == ([[2, 1]], [[2, 1]])


def test_names_are_tensors_that_are_indexed_by_class(tmp_path: Path) -> None:
    """A file with one name per line becomes a tensor that is indexed by class. A letter with an accent takes two bytes."""
    path = tmp_path / "names.txt"
    path.write_text("cat\nchien bleu\nélan\n", encoding="utf-8")
    names = labels.read_names(path)
    assert names.dtype == np.uint8
    assert names.shape == (3, 10)
    texts = names[np.array([[2, 0], [1, 1]])]
    assert texts.shape == (2, 2, 10)
    assert from_text(texts.reshape(-1, 10)) == ["élan", "cat", "chien bleu", "chien bleu"]
    assert labels.read_names(path, width=16).shape == (3, 16)
    with pytest.raises(ValueError, match="a text has 10 bytes, but a row has only 9"):
        labels.read_names(path, width=9)
