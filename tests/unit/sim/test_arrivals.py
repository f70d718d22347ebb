"""A source of traffic has the requested rate, is reproducible, and does not depend on other sources."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from textwrap import dedent

import pytest

from rsrv.sim.arrivals import Arrival, open_arrivals
from rsrv.sim.scenario import parse_scenario

MODELS = "models: {a: {cost: {1: 0.001}}, b: {cost: {1: 0.001}}, c: {cost: {1: 0.001}, count: 8}}\n"


def arrivals(text: str, folder: Path = Path()) -> list[Arrival]:
    return list(open_arrivals(parse_scenario(MODELS + dedent(text), folder=folder)))


def test_poisson_keeps_rate_and_shares() -> None:
    """The number of requests, about 4000, and each model's share are within four standard deviations of the expected values."""
    sent = arrivals("duration: 40\narrivals: {poisson: {rate: 100, models: {a: 3, b: 1}}}")

    assert abs(len(sent) - 4000) < 4 * 4000**0.5
    assert abs(Counter(arrival.model for arrival in sent)["a"] - 3000) < 4 * 3000**0.5
    assert all(0 < arrival.t <= 40 for arrival in sent)
    assert [arrival.t for arrival in sent] == sorted(arrival.t for arrival in sent)


def test_a_group_divides_its_share() -> None:
    """The eight models of a group together get the group's share of the rate."""
    sent = arrivals("duration: 40\narrivals: {poisson: {rate: 100, models: {a: 1, c: 1}}}")

    counts = Counter(arrival.model for arrival in sent)
    assert abs(counts["a"] - 2000) < 4 * 2000**0.5
    assert len(counts) == 9


def test_start_and_stop_bound_a_source() -> None:
    """A source sends requests only between its start and its stop. With a stop, it needs no duration."""
    sent = arrivals("arrivals: {poisson: {rate: 100, start: 2, stop: 3}}")

    assert sent
    assert all(2 < arrival.t <= 3 for arrival in sent)


def test_zipf_falls_with_rank() -> None:
    """With exponent 1 the first of two is twice as popular as the second."""
    counts = Counter(
        arrival.model for arrival in arrivals("duration: 30\narrivals: {zipf: {rate: 100, models: [b, a]}}")
    )

    assert abs(counts["b"] - 2000) < 4 * 2000**0.5
    assert abs(counts["a"] - 1000) < 4 * 1000**0.5


def test_days_and_nights() -> None:
    """The mean rate, and the ratio of the night's rate to the day's, are those of the scenario.

    With `spread`, the models have their peaks at different times.
    """
    text = (
        "duration: 400\narrivals: {{zipf: {{rate: 100, exponent: 0, day_s: 100, night: 0.25, spread: {}}}}}"
    )
    together, spread = ([arrival.t % 100 for arrival in arrivals(text.format(share))] for share in (0, 1))

    for sent in (together, spread):
        assert abs(len(sent) - 40_000) < 4 * 40_000**0.5
    peak, night = (sum(abs((t - at + 50) % 100 - 50) < 5 for t in together) for at in (50, 0))
    assert abs(night / peak - 0.25) < 0.05
    assert 0.5 < sum(abs(t - 50) < 5 for t in spread) / peak < 0.8


def test_zipf_may_be_shuffled() -> None:
    """With shuffling, the most popular model need not be the first listed."""
    text = "seed: {}\nduration: 3\narrivals: {{zipf: {{rate: 100, exponent: 3, models: [c], shuffle: true}}}}"

    most = {
        Counter(arrival.model for arrival in arrivals(text.format(seed))).most_common(1)[0][0]
        for seed in range(8)
    }

    assert len(most) > 1


def test_bursts_come_at_regular_times() -> None:
    """In each burst, each model gets `size` requests."""
    sent = arrivals("duration: 1\narrivals: {bursts: {models: [a, b], every_s: 0.4, size: 2, start: 0.1}}")

    assert [(arrival.t, arrival.model) for arrival in sent] == [
        (t, model) for t in (0.1, 0.5, 0.9) for model in ("a", "a", "b", "b")
    ]


def test_jitter_delays_bursts() -> None:
    """Jitter delays bursts by less than its value and keeps their order."""
    sent = arrivals("duration: 10\narrivals: {bursts: {models: [a], every_s: 1, size: 1, jitter_s: 1.5}}")

    times = [arrival.t for arrival in sent]
    assert times == sorted(times)
    assert any(abs(t - round(t)) > 0.01 for t in times)


def test_a_trace_from_a_spreadsheet_is_read(tmp_path: Path) -> None:
    """A trace may be a CSV file from a spreadsheet, with a byte-order mark and blanks."""
    (tmp_path / "traffic.csv").write_text("\ufefft, model \n0.1, a \n", encoding="utf-8")
    [sent] = arrivals("arrivals: {trace: traffic.csv}", tmp_path)

    assert (sent.t, sent.model) == (0.1, "a")


def test_a_trace_is_read_scaled_and_sorted(tmp_path: Path) -> None:
    """The times of a trace are scaled, and its requests are sorted by time.

    An empty cell means the default. The path of the trace is relative to the scenario's folder.
    """
    (tmp_path / "traffic.csv").write_text(
        "t,model,rows,deadline_s,priority\n0.2,b,,,\n0.1,a,3,0.5,1\n", encoding="utf-8"
    )

    sent = arrivals("arrivals: {trace: {path: traffic.csv, scale: 2}}", tmp_path)

    assert sent == [Arrival(0.2, "a", 3, 0.5, 1), Arrival(0.4, "b", 1, None, 0)]
    assert arrivals("arrivals: {trace: traffic.csv}", tmp_path)[0].t == 0.1


def test_requests_after_the_duration_are_ignored() -> None:
    """Requests after the duration are ignored. A request exactly at the duration still arrives."""
    sent = arrivals("duration: 1\narrivals: [{t: 2, model: a}, {t: 1, model: a}, {t: 0, model: b}]")

    assert [arrival.t for arrival in sent] == [0, 1]


@pytest.mark.parametrize(
    "more",
    ["zipf: {rate: 10}", "poisson: [{rate: 50, models: [a]}, {rate: 10}]", "bursts: {every_s: 1, size: 3}"],
)
def test_another_source_moves_no_request(more: str) -> None:
    """Each source has its own random numbers, so its requests keep their times when another source is added."""
    alone = "poisson: {rate: 50, models: [a]}"
    both = more if more.startswith("poisson") else f"{alone}, {more}"

    def of(sources: str) -> list[float]:
        return [arrival.t for arrival in arrivals(f"duration: 2\narrivals: {{{sources}}}")]

    assert set(of(alone)) <= set(of(both))
