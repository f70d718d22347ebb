"""The zoo's list of architectures, and the page that is made of its results."""

from __future__ import annotations

from pathlib import Path

from tests.zoo.models import entries
from tests.zoo.page import page

PAGE = Path(__file__).parents[3] / "docs" / "what-exports.md"


def test_the_page_counts_every_architecture_of_the_list() -> None:
    """The total of the page equals the total of the list, so the page was made after the list last changed."""
    assert f"| **all** |  | {len(entries())} |" in PAGE.read_text(encoding="utf-8")


def test_results_are_counted_by_what_the_user_had_to_do() -> None:
    """First tries, changes, refusals, dynamic results and architectures that were not run are counted apart."""
    some = {entry.name: entry for entry in entries() if entry.package == "torchvision"}
    dynamic, changed = (some[f"torchvision {name}"] for name in ("fcos_resnet50_fpn", "RoIAlign"))
    done = {"failed": "", "error": 1e-6, "cpu_s": 3.0, "bytes": 1, "version": "1.0", "licence": "BSD"}
    text = page(
        list(some.values()),
        [
            {"name": "torchvision resnet18", **done},
            {"name": changed.name, **done, "error": 2e-5, "first": "refused", "change": "do this"},
            {"name": dynamic.name, "failed": "forward decides by a tensor's values"},
            {"name": "torchvision DeformConv2d", "failed": "torchax has no x"},
        ],
        {"resnet": 1e-7, "vit": 3e-7},
    )
    assert f"| torchvision 1.0 | BSD | {len(some)} | 4 | 1 | 1 | 1 | 1 |" in text
    assert f"2.0e-05 ({changed.name})" in text
    assert f"- {changed.name}: do this" in text
    assert (
        "2 of them were served by Triton (`PYTHONPATH=tools python -m tests.zoo.served`), and their answers were within 3.0e-07"
        in text
    )
    assert "- torchvision DeformConv2d: torchax has no x" in text
    assert "not run yet" not in text


def test_a_package_without_results_is_only_named() -> None:
    """The table has no row for a package of which nothing was run."""
    some = [entry for entry in entries() if entry.package in ("torchvision", "vocos")]
    text = page(some, [{"name": "torchvision resnet18", "failed": "torchax has no x"}], {})
    assert "Listed, and not run yet: vocos." in text
    assert "| vocos |" not in text
