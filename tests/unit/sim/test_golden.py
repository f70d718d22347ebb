"""The scheduler decides as it did when somebody last looked."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.sim.golden.__main__ import SCENARIOS, decide


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda path: path.stem)
def test_golden_decisions(scenario: Path) -> None:
    """If they are meant to differ: python -m tests.unit.sim.golden, and read what changed."""
    assert decide(scenario) == scenario.with_suffix(".txt").read_text(encoding="utf-8")
