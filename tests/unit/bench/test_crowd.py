"""What the clients of many models ask, and how often."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.bench.crowd import Questions, popularity


def test_shares_follow_zipfs_law() -> None:
    assert popularity(3, 1.0) == pytest.approx([6 / 11, 3 / 11, 2 / 11])
    assert popularity(4, 0.0) == pytest.approx([1 / 4] * 4)


def test_questions_survive_a_file_in_order(tmp_path: Path) -> None:
    """The order of the models is that of their popularity, whatever their names."""
    questions = Questions(
        {"b": np.ones((2, 3)), "a": np.zeros((2, 3))}, {"b": np.ones((2, 1)), "a": np.zeros((2, 1))}
    )
    questions.save(tmp_path / "questions.npz")
    found = Questions.load(tmp_path / "questions.npz")
    assert list(found.sent) == ["b", "a"]
    assert np.array_equal(found.wanted["b"], questions.wanted["b"])
