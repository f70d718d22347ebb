"""The simulator's manual says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rsrv.sim.reference import reference
from rsrv.sim.scenario import load_scenario
from tests.unit.sim.helpers import metrics

DOCS = Path(__file__).parents[3] / "docs"
MANUAL = (DOCS / "simulator.md").read_text(encoding="utf-8")


def test_the_reference_of_scenarios_is_up_to_date() -> None:
    """If not, replace the end of the manual with what python -m rsrv.sim.reference prints."""
    marker = "<!-- python -m rsrv.sim.reference -->"

    assert MANUAL.partition(marker)[2].strip() == reference().strip()


def test_every_metric_is_explained() -> None:
    """And no other."""
    rows = re.findall(r"^\| (`.*?) \| (both|models|total) \|", MANUAL, flags=re.MULTILINE)
    keys = {
        where: {key for cell, at in rows if at == where for key in re.findall(r"`(\w+)`", cell)}
        for _, where in rows
    }

    result = metrics("models: {a: {cost: {1: 1}}}\narrivals: []")
    assert keys["both"] | keys["total"] == set(result["total"])
    assert keys["both"] | keys["models"] == set(result["models"]["a"])


@pytest.mark.parametrize("scenario", sorted((DOCS / "scenarios").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_manuals_scenarios_are_scenarios(scenario: Path) -> None:
    """And the manual speaks of them."""
    load_scenario(scenario)

    assert f"scenarios/{scenario.name}" in MANUAL
