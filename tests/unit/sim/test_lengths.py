"""Requests of many lengths in the simulator, and how much is gained if requests of different lengths share executions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rsrv.sim.scenario import ScenarioError
from tests.unit.sim.helpers import decisions, metrics, run

SCENARIOS = Path(__file__).parents[3] / "docs" / "scenarios"
RECORDED = (SCENARIOS / "lengths.yaml").read_text()
LENGTHS = (32, 64, 128, 256, 512)


def total(text: str) -> dict[str, Any]:
    figures: dict[str, Any] = metrics(text, SCENARIOS)["total"]
    return figures


def test_a_length_takes_the_shortest_variant_and_shares_executions() -> None:
    """Requests of the lengths 3 and 9 share an execution of the variant for length 16.

    This execution has 4 rows of 16 elements. Of these 64 elements, 12 are useful.
    """
    text = """
        discipline: fifo
        device: {warm: true}
        models: {a: {variants: [{1: 0.001, 4: 0.001}, {1: 0.001, 4: 0.001}], lengths: [8, 16]}}
        arrivals: [{t: 0, model: a, length: 8}, {t: 0.0005, model: a, length: 3}, {t: 0.0005, model: a, length: 9}]
        """
    assert decisions(text) == [
        "t=0.000000 EXECUTE a size=1 rows=1 variant=0 requests=1",
        "t=0.001000 EXECUTE a size=4 rows=2 variant=1 requests=2",
    ]
    assert [(execution.useful, execution.size) for execution in run(text).executions] == [(8, 8), (12, 64)]
    assert metrics(text)["total"]["padding_ratio"] == pytest.approx(1 - 20 / 72)
    with pytest.raises(
        ScenarioError, match=r"a request of a has the length 17; `lengths` of the model are 8, 16"
    ):
        run(text.replace("length: 9", "length: 17"))
    with pytest.raises(ScenarioError, match="lengths: give one for each of `variants`, in ascending order"):
        run(text.replace("[8, 16]", "[16, 8]"))


def test_sharing_halves_latencies_where_a_long_row_costs_as_much_as_a_short_one() -> None:
    """If a long row costs as much as a short one, sharing executions makes the latencies of recorded requests much shorter."""
    shared = total(RECORDED)
    apart = total(RECORDED.replace("share_lengths: true", "share_lengths: false"))

    assert shared["latency_p99_s"] < 0.7 * apart["latency_p99_s"]
    assert shared["latency_p50_s"] < 0.7 * apart["latency_p50_s"]
    assert shared["dispatches"] < apart["dispatches"]


def test_sharing_costs_nothing_where_a_row_costs_its_length() -> None:
    """The cost of a row grows with its length, as on a CPU, and the load is nine tenths of what the device can execute.

    If lengths share executions, latencies are no longer than without sharing, and there are no more executions.
    """
    first = RECORDED[: RECORDED.index("    variants:")]
    costs = [{size: round(5e-4 + 2e-5 * size * length, 7) for size in (1, 4, 16, 64)} for length in LENGTHS]
    slow = f"{first}    variants: {costs}\narrivals: {{trace: {{path: lengths.csv, scale: 9}}}}\n"
    shared, apart = total(slow), total(slow.replace("share_lengths: true", "share_lengths: false"))

    assert shared["latency_p99_s"] < 1.05 * apart["latency_p99_s"]
    assert shared["latency_p50_s"] <= apart["latency_p50_s"]
    assert shared["dispatches"] <= apart["dispatches"]
    assert shared["padding_ratio"] < apart["padding_ratio"] + 0.02
