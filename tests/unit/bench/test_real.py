"""The tables of the real models, from what was measured."""

from __future__ import annotations

from dataclasses import replace

from examples.build import NAMES
from scheduler_page import DOCS, rewrite
from tests.bench.real.cases import CASES
from tests.bench.real.page import Line, exported, served

LINE = Line(
    title="unet",
    source="Equinox",
    unit="images",
    export_seconds=12.34,
    bundle_bytes=1_500_000,
    errors={32: 1.23e-6, 1: 0.0},
    served={32: [1500.0, 1400.0, 1600.0], 1: [120.0, 30.0, 200.0]},
    eager={1: [60.0, 10.0, 200.0]},
    compiled={1: [240.0, 240.0, 240.0], 32: [3000.0, 2800.0, 3200.0]},
)


def test_a_model_has_a_line_of_what_its_export_costs() -> None:
    """Sizes in order, bytes as megabytes."""
    _, row = exported([LINE])
    assert row == ("`unet`", "Equinox", "12.3", "1.50", "1: 0, 32: 1e-06")


def test_a_model_has_a_line_for_each_size_of_request() -> None:
    """Medians of the rounds; ratios of Triton to what was beside it in the same round; a dash where there is nothing."""
    _, one, many = served([replace(LINE, title="unet (2 bundles)")])
    assert one == ("`unet`", "1 image", "120", "60", "2.00 (1.00 to 3.00)", "240", "0.50 (0.12 to 0.83)")
    assert many == ("`unet`", "32 images", "1,500", "—", "—", "3,000", "0.50 (0.50 to 0.50)")


def test_every_case_is_an_example_and_its_requests_have_their_rows() -> None:
    """What is measured is what `make bundles` builds."""
    for case in CASES.values():
        assert set(case.bundles) <= set(NAMES)
        assert case.model in case.bundles
        for rows in (1, case.most):
            assert {len(array) for array in case.inputs(rows).values()} == {rows}


def test_the_page_has_a_place_for_each_table() -> None:
    """Where `make models` writes them."""
    page = (DOCS / "models.md").read_text(encoding="utf-8")
    made = {"exported": "a", "served": "b", "machine": "c"}
    assert rewrite(rewrite(page, made), made) == rewrite(page, made)
