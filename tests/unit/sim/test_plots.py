"""Pictures of one model and of a thousand."""

from __future__ import annotations

from pathlib import Path

import pytest

from rsrv.sim.plots import write_plots
from tests.unit.sim.helpers import run


@pytest.mark.parametrize(
    ("models", "sources", "smallest"),
    [
        (1, "closed: {clients: 4}", 10_000),
        (1000, "zipf: {rate: 2000}", 15_000),
        (3, "requests: []", 5_000),
    ],
)
def test_pictures_show_something(models: int, sources: str, smallest: int, tmp_path: Path) -> None:
    """Pictures are not empty, whatever the number of models is, and even if nothing happens."""
    record = run(
        f"""
        discipline: fifo
        duration: 0.3
        device: {{h2d_bytes_per_s: 1.0e+9}}
        models: {{a-model-with-a-rather-long-name: {{cost: {{1: 0.001}}, count: {models}, weight_bytes: 100000}}}}
        arrivals: {{{sources}}}
        """
    )

    paths = write_plots(record, tmp_path)

    assert [path.name for path in paths] == ["latency.png", "shares.png", "timeline.png"]
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert smallest < path.stat().st_size < 1_000_000


def test_a_window_of_the_timeline(tmp_path: Path) -> None:
    """The picture of a window of the timeline differs from the picture of its start."""
    record = run("duration: 1\nmodels: {a: {cost: {1: 0.01}}}\narrivals: {poisson: {rate: 30}}")
    (tmp_path / "later").mkdir()

    first, later = (write_plots(record, tmp_path)[2], write_plots(record, tmp_path / "later", (0.5, 0.7))[2])

    assert first.read_bytes() != later.read_bytes()
