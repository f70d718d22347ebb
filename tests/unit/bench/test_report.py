"""The benchmark's tables."""

from __future__ import annotations

from dataclasses import replace

from tests.bench.figures import Rounds, Spread, Target
from tests.bench.report import (
    busy_table,
    load_table,
    rounds_line,
    sizes_lines,
    sizes_text,
    spread_text,
    swapping_table,
    table,
    targets_table,
)
from tests.unit.bench.test_figures import sample, swapping


def test_columns_are_as_wide_as_they_must_be() -> None:
    assert table(["", "n"], [["long name", "1"], ["x", "1000"]]).splitlines() == [
        "              n",
        "long name     1",
        "x          1000",
    ]


def test_sizes_are_shares() -> None:
    assert sizes_text({1: 1, 8: 3}) == "1: 25%, 8: 75%"
    assert sizes_text({}) == "-"


def test_a_spread_shows_its_extremes() -> None:
    assert spread_text(Spread(0.5, 0.25, 1.0)) == "0.50 (0.25-1.00)"


def test_a_role_that_a_side_lacks_is_a_dash() -> None:
    line = load_table(Rounds.of([sample("plain", 0, 1000)]), [("plain", 1)]).splitlines()[1].split()
    #    side, clients, infer/s, p50, p99, tritonserver, stub, runtime, client, total, batches
    assert line == ["plain", "1", "1000", "1000", "2000", "100", "-", "-", "50", "100", "1.0", "2.0"]


def test_one_line_of_sizes_for_each_case() -> None:
    rounds = Rounds.of([sample("rsrv", 0, 1000)])
    assert sizes_lines(rounds, [("rsrv", 1), ("plain", 1)]) == "sizes of rsrv at 1 clients: 2: 100%"


def test_busy_shares_are_percent() -> None:
    cpu_us = {"tritonserver": 1.0, "stub": 2.0, "runtime": 3.0, "client": 4.0}
    samples = [replace(sample("default", 0, 1000, clients=48), cpu_us=cpu_us)]
    assert "50 (50-50) %" in busy_table(Rounds.of(samples), ["default"], 48)


def test_a_side_that_loads_nothing_has_no_end_of_requests_per_load() -> None:
    sides = {"all": [swapping("all", loads=0)], "budget": [swapping("budget", loads=20)]}
    _, every, budget = (line.split() for line in swapping_table(sides).splitlines())
    assert every == ["all", "0", "0", "inf", "100", "(100-100)", "%", "50", "%"]
    assert budget == ["budget", "10", "10", "5.0", "60", "(60-60)", "%", "50", "%"]


def test_noise_is_said_aloud() -> None:
    assert "ALL rounds" in rounds_line(Rounds.of([sample("a", 0, 1, steal=0.5)]))
    assert "ALL rounds" not in rounds_line(Rounds.of([sample("a", 0, 1)]))


def test_targets_show_both_directions() -> None:
    text = targets_table([Target("rate", 0.95, 0.9, True), Target("p50", 2.0, 1.6, False)])
    assert ">= 0.90" in text
    assert "<= 1.60" in text
    assert "falls short by 25%" in text
