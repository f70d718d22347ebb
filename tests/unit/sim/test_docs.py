"""The pages about the simulator agree with the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rsrv.sim.reference import FIGURES, reference
from rsrv.sim.scenario import load_scenario, parse_scenario
from tests.pages import ROOT, blocks
from tests.unit.sim.helpers import metrics

DOCS = ROOT / "docs"
PAGE = (DOCS / "simulator.md").read_text(encoding="utf-8")


def test_every_metric_is_explained() -> None:
    """`python -m rsrv.sim.reference` has every key of metrics.json and no other."""
    keys = {
        where: {key for cell, at, _ in FIGURES if at == where for key in re.findall(r"`(\w+)`", cell)}
        for _, where, _ in FIGURES
    }

    result = metrics("models: {a: {cost: {1: 1}}}\narrivals: []")
    assert keys["both"] | keys["total"] == set(result["total"])
    assert keys["both"] | keys["models"] == set(result["models"]["a"])


def test_the_reference_has_every_table() -> None:
    """`python -m rsrv.sim.reference` prints one table for each mapping of a scenario, and one for metrics.json."""
    text = reference()
    assert "| `models` | required |" in text
    assert "### metrics.json" in text


def test_the_example_is_a_scenario() -> None:
    """The example of a scenario on the page is valid."""
    (lines,) = (lines for language, _, lines in blocks(PAGE) if language == "yaml")
    assert parse_scenario("\n".join(lines)).duration == 60


@pytest.mark.parametrize("scenario", sorted((DOCS / "scenarios").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_scenario_loads_and_says_what_it_shows(scenario: Path) -> None:
    """Each scenario of the documentation loads, and begins with a comment, as the page promises."""
    load_scenario(scenario)

    assert scenario.read_text(encoding="utf-8").startswith("# ")
