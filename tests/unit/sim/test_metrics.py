"""The meaning of the metrics."""

from __future__ import annotations

import json

import pytest

from rsrv.sim.metrics import jain
from rsrv.sim.tally import percentile
from tests.unit.sim.helpers import decisions, metrics

MIXED = """
discipline: fifo
seed: {seed}
duration: 1
device: {{h2d_bytes_per_s: 1.0e+9}}
models:
  a: {{cost: {{1: 0.001, 32: 0.004}}, cost_jitter: 0.1, weight_bytes: 1000000, max_queue_depth: 20}}
  b: {{cost: {{1: 0.002, 8: 0.009}}, count: 4, weight_bytes: 5000000}}
arrivals:
  poisson: {{rate: 300, models: [a], deadline_s: 0.006}}
  zipf: {{rate: 150, models: [b]}}
  bursts: {{models: [a], every_s: 0.2, size: 30, jitter_s: 0.01}}
"""


def test_the_same_seed_gives_the_same_bytes() -> None:
    """The same seed gives equal bytes of metrics and decisions."""
    text = MIXED.format(seed=7)

    assert json.dumps(metrics(text)) == json.dumps(metrics(text))
    assert decisions(text) == decisions(text)


def test_another_seed_gives_other_traffic() -> None:
    """Another seed changes arrivals and costs."""
    assert decisions(MIXED.format(seed=7)) != decisions(MIXED.format(seed=8))


def test_every_request_that_arrived_is_in_one_place() -> None:
    """The numbers of requests by outcome add up to the number that arrived, for each model and in total.

    The models' numbers add up to the totals.
    """
    result = metrics(MIXED.format(seed=7))

    total, models = result["total"], result["models"].values()
    ends = ("served", "shed", "expired", "refused", "cancelled", "failed")
    for of in (total, *models):
        assert of["arrived"] == sum(of[end] for end in ends)
    for key in (*ends, "arrived", "dispatches", "useful_rows", "padded_rows", "loads", "evictions"):
        assert total[key] == sum(model[key] for model in models)
    assert total["expired"] + total["shed"] > 0 < total["refused"]
    assert sum(model["share"] for model in models) == pytest.approx(1.0)


def test_nothing_arrived() -> None:
    """Without arrivals, metrics without a value are null."""
    result = metrics("models: {a: {cost: {1: 0.1}}}\narrivals: []")

    total = result["total"]
    assert total["arrived"] == total["makespan_s"] == 0
    assert [total[key] for key in ("utilisation", "jain", "goodput", "latency_p99_s", "padding_ratio")] == [
        None
    ] * 5
    assert result["models"]["a"]["share"] is None


def test_percentiles_are_values_that_occurred() -> None:
    """A percentile is the value at the nearest rank, so it is always one of the given values."""
    assert percentile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.0
    assert percentile([1.0, 2.0, 3.0, 4.0], 0.99) == 4.0
    assert percentile([1.0], 0.5) == 1.0
    assert percentile([], 0.5) is None


def test_jains_index() -> None:
    """Jain's index is 1 among equals, and 1 / n if one has all."""
    assert jain([2.0, 2.0, 2.0]) == 1.0
    assert jain([3.0, 0.0, 0.0]) == pytest.approx(1 / 3)
    assert jain([0.0]) is None


def test_fairness_is_judged_while_all_want_the_device() -> None:
    """Fairness is measured only while all models have requests.

    Here, model a has no more requests at 28 ms, and model b still has some.
    """
    turns = "{t: 0, model: a}, {t: 0, model: b}, " * 10 + "{t: 0, model: b}, " * 20

    total = metrics(
        f"""
        discipline: fifo
        device: {{warm: true}}
        models: {{a: {{cost: {{1: 0.001}}, weight: 2}}, b: {{cost: {{1: 0.002}}, weight: 4}}}}
        arrivals: [{turns}]
        """
    )["total"]

    assert (total["jain_models"], total["jain_seconds"]) == (2, 0.028)
    # Model a: 10 executions of 1 ms with weight 2, so 5. Model b: 9 executions of 2 ms with weight 4, so 4.5.
    assert total["jain"] == pytest.approx(9.5**2 / (2 * (5**2 + 4.5**2)))


def test_without_contention_fairness_is_that_of_the_traffic() -> None:
    """If models never have requests at the same time, fairness is measured over the whole simulation.

    Only models with requests count.
    """
    total = metrics(
        """
        models: {a: {cost: {1: 0.001}}, b: {cost: {1: 0.001}}, c: {cost: {1: 0.001}}}
        arrivals: [{t: 0, model: a}, {t: 1, model: b}]
        """
    )["total"]

    assert (total["jain"], total["jain_models"]) == (1.0, 2)
    assert total["jain_seconds"] == total["makespan_s"]


def test_the_scenario_is_echoed() -> None:
    """The metrics file contains its scenario."""
    result = metrics("discipline: fifo\nseed: 4\nduration: 3\nmodels: {a: {cost: {1: 1}}}\narrivals: []")

    assert (result["discipline"], result["seed"], result["duration"]) == ("fifo", 4, 3.0)


def test_a_request_hits_if_its_weights_are_there_when_it_arrives() -> None:
    """A request is a hit only if the weights of its model are on the device when it arrives.

    A load under way is not enough.
    """
    result = metrics(
        """
        device: {warm: true, weight_budget_bytes: 100, h2d_bytes_per_s: 1000}
        models: {a: {cost: {1: 0.01}, weight_bytes: 100}, b: {cost: {1: 0.01}, weight_bytes: 80}}
        arrivals: [{t: 0, model: a}, {t: 1, model: b}, {t: 1.01, model: b}, {t: 1.5, model: b}, {t: 2, model: a}]
        """
    )

    assert result["models"]["a"]["hit_ratio"] == 0.5
    assert result["models"]["b"]["hit_ratio"] == pytest.approx(1 / 3)
    assert result["total"]["hit_ratio"] == 0.4
    assert (result["total"]["loads"], result["total"]["loaded_bytes"]) == (2, 180)
