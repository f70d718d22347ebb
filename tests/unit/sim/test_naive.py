"""The baselines do what their names say, and have their known weaknesses."""

from __future__ import annotations

import pytest

from tests.unit.sim.helpers import metrics, run

THREE = """
discipline: {discipline}
duration: 2
device: {{warm: true}}
models:
  cheap: {{cost: {{1: 0.001}}, weight: 1}}
  dear: {{cost: {{1: 0.010}}, weight: 1}}
  first: {{cost: {{1: 0.004}}, weight: 3}}
arrivals: {{closed: {{clients: 4}}}}
"""


def test_round_robin_takes_turns() -> None:
    """Round robin executes the models in turn, so the model with long executions gets most of the device's time."""
    text = THREE.format(discipline="round_robin")

    executions = [execution.execute.model for execution in run(text).executions]
    assert executions[:9] == ["cheap", "dear", "first"] * 3
    models = metrics(text)["models"]
    assert models["dear"]["share"] == pytest.approx(10 / 15, abs=0.01)


def test_static_priority_starves() -> None:
    """While the model with the greatest weight has requests, static priority executes no other model."""
    executions = [
        execution.execute.model for execution in run(THREE.format(discipline="static_priority")).executions
    ]

    assert set(executions[:400]) == {"first"}


def test_fair_shares_follow_weights() -> None:
    """The scheduler's shares follow the weights, and Jain's index shows the difference."""
    models = metrics(THREE.format(discipline="fair"))["models"]
    assert models["first"]["share"] == pytest.approx(3 / 5, abs=0.02)

    jain = {
        name: metrics(THREE.format(discipline=name))["total"]["jain"]
        for name in ("fair", "round_robin", "static_priority")
    }
    assert jain["fair"] > 0.99
    assert 0.4 < jain["round_robin"] < 0.8
    assert jain["static_priority"] < 0.4
