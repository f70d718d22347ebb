"""The scheduler's decisions equal the reviewed ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.sim.golden.__main__ import SCENARIOS, decide


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda path: path.stem)
def test_golden_decisions(scenario: Path) -> None:
    """The decisions of each scenario equal its file.

    If the decisions have changed on purpose, run python -m tests.unit.sim.golden and read the differences.
    """
    assert decide(scenario) == scenario.with_suffix(".txt").read_text(encoding="utf-8")
