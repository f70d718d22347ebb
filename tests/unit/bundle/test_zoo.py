"""The zoo's list of architectures, and the page that is made of its results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.zoo.models import entries
from tests.zoo.onnx_files import FIRST
from tests.zoo.onnx_files import page as section
from tests.zoo.onnx_files import table as table_of_files
from tests.zoo.page import page, table

PAGE = Path(__file__).parents[3] / "docs" / "what-exports.md"


def test_the_page_counts_every_architecture_of_the_list() -> None:
    """The page's total equals the list's total, so the page must be made again when the list grows or shrinks."""
    assert f"| **all** |  | {len(entries())} |" in PAGE.read_text(encoding="utf-8")


def test_results_are_counted_by_what_the_user_had_to_do() -> None:
    """The page counts first tries, changes, refusals and dynamic results.

    The table has a row for each architecture that was run.
    """
    some = {entry.name: entry for entry in entries() if entry.package == "torchvision"}
    dynamic, changed = (some[f"torchvision {name}"] for name in ("fcos_resnet50_fpn", "RoIAlign"))
    done = {"failed": "", "error": 1e-6, "cpu_s": 3.0, "bytes": 1, "version": "1.0", "licence": "BSD"}
    results: list[dict[str, Any]] = [
        {"name": "torchvision resnet18", **done},
        {"name": changed.name, **done, "error": 2e-5, "first": "refused", "change": "do this"},
        {"name": dynamic.name, "failed": "forward decides by a tensor's values"},
        {"name": "torchvision DeformConv2d", "failed": "torchax has no x\nand no y"},
    ]

    text = page(list(some.values()), results, {"resnet": 1e-7, "vit": 3e-7})
    _, *rows = table(list(some.values()), results)

    assert f"| torchvision 1.0 | BSD | {len(some)} | 4 | 1 | 1 | 1 | 1 |" in text
    assert f"2.0e-05 ({changed.name})" in text
    assert (
        "2 of them were served by Triton (`PYTHONPATH=tools python -m tests.zoo.served`), and their answers were within 3.0e-07"
        in text
    )
    assert "not run yet" not in text
    assert sorted(rows) == [
        ["torchvision", "DeformConv2d", "refused", "torchax has no x"],
        ["torchvision", "RoIAlign", "after one change", "do this"],
        ["torchvision", "fcos_resnet50_fpn", "dynamic", "forward decides by a tensor's values"],
        ["torchvision", "resnet18", "first try", ""],
    ]


def test_a_package_without_results_is_only_named() -> None:
    """The table has no row for a package of which nothing was run."""
    some = [entry for entry in entries() if entry.package in ("torchvision", "vocos")]
    text = page(some, [{"name": "torchvision resnet18", "failed": "torchax has no x"}], {})
    assert "Listed, and not run yet: vocos." in text
    assert "| vocos |" not in text


def test_the_section_of_onnx_files_counts_attempts_and_errors() -> None:
    """The section counts files that are exported at once, after one change, or never.

    It names the files whose error is more than twice the error of onnxruntime.
    """
    file = {"package": "p==1", "licence": "MIT", "purpose": "detector"}
    open_axis = "input 'x': its axis 1 has no fixed size in the file; give one with --input-shape x_1=SIZE"
    results: list[dict[str, Any]] = [
        {**file, "path": "a/a.onnx", "options": [FIRST], "refusals": [], "error": 3e-4, "own": 2e-4},
        {
            **file,
            "path": "a/b.onnx",
            "options": [FIRST, f"{FIRST} --input-shape x_1=8"],
            "refusals": [open_axis],
            "error": 3e-4,
            "own": 1e-5,
        },
        {**file, "path": "a/c.onnx", "options": [FIRST], "refusals": ["operator Foo at node 'n': ..."]},
    ]

    text = section(results).replace("\n", " ")

    assert "1 files were exported. For 1 more," in text
    assert "an axis has no size in the file (1), an operator cannot be compiled (1)." in text
    assert "twice that number: `b.onnx` of p." in text


def test_the_table_of_onnx_files_has_their_errors_or_the_reason_of_the_refusal() -> None:
    """A row has the options of the last attempt, and the error of the answers or the reason of the refusal."""
    file = {"package": "p==1", "licence": "MIT", "purpose": "detector"}
    options = [FIRST, f"{FIRST} --input-shape x_1=8"]
    done = {**file, "path": "a/b.onnx", "options": options, "refusals": [""], "error": 3e-4, "own": 1e-5}
    refused = {**file, "path": "a/c.onnx", "options": [FIRST], "refusals": ["operator Foo at node 'n': ..."]}

    _, *rows = table_of_files([refused, done])

    assert rows == [
        ["p==1", "MIT", "b.onnx", "detector", options[1], "3.0e-04", "1.0e-05"],
        ["p==1", "MIT", "c.onnx", "detector", FIRST, "refused: an operator cannot be compiled", ""],
    ]
