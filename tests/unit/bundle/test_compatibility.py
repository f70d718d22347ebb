"""The table of features: its page is current, and its cells have tests that exist."""

from __future__ import annotations

import ast
from itertools import combinations
from pathlib import Path

import pytest

import compatibility_page as tool
from rsrv_bundle import compatibility
from rsrv_bundle.compatibility import FRONTS, PROOFS, Feature, cell, native_obstacle, refusal, refusals

ROOT = Path(__file__).resolve().parents[3]


def test_the_page_is_current() -> None:
    """The tables on the page are those of the code. `make pages` writes them."""
    page = tool.PAGE.read_text(encoding="utf-8")

    assert tool.rewrite(page) == page


def test_a_page_without_markers_is_refused() -> None:
    """A page without markers is refused, because its old tables would stay unnoticed."""
    with pytest.raises(ValueError, match="<!-- compatibility -->"):
        tool.rewrite("")


@pytest.mark.parametrize("test", sorted({proof.test for proof in PROOFS}))
def test_the_test_of_each_served_cell_exists(test: str) -> None:
    """The test of a served cell exists. If it is renamed or removed, this test fails."""
    file, _, name = test.partition("::")
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))

    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("proof", PROOFS, ids=lambda proof: proof.test.rpartition("::")[2])
def test_no_cell_with_a_test_is_refused(proof: tuple[str, tuple[str, ...], tuple[Feature, ...]]) -> None:
    """A test that shows that two features work together contradicts a refusal."""
    _, fronts, features = proof
    kinds = {cell(*pair, front).kind for pair in combinations(features, 2) for front in fronts}  # type: ignore[arg-type]

    assert kinds <= {"served", "n/a"}


def test_refusals_have_one_text_for_each_pair() -> None:
    """Both orders of a pair give one text. A refusal also names the manifest's key of the feature to remove."""
    assert refusal(Feature.ALIAS, {Feature.META}) == refusal(Feature.META, {Feature.ALIAS}) != ""
    assert list(refusals({Feature.STATE, Feature.PADDING, Feature.VARIANTS})) == [
        ("pad", "a model with state is not padded: its sequences would remember the padding")
    ]
    assert not list(refusals({Feature.HOOKS, Feature.STRINGS}))


def test_a_pair_without_a_test_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two features without a test of both together are refused, so a new feature is at first refused with every other one."""
    monkeypatch.setattr(compatibility, "PROOFS", ())
    compatibility._proven.cache_clear()
    try:
        ((_, text),) = refusals({Feature.HOOKS, Feature.STRINGS})
    finally:
        compatibility._proven.cache_clear()

    assert text == "no test shows that 'hooks' and 'strings' work together; leave one of them out"


def test_no_refusal_of_a_pair_is_for_want_of_a_test() -> None:
    """No pair in the table is refused for lack of a test. So models with any of these pairs are still accepted."""
    cells = [cell(*pair, front) for pair in combinations(Feature, 2) for front in FRONTS]

    assert not [entry.text for entry in cells if entry.text.startswith("no test shows")]


def test_each_feature_that_the_native_front_lacks_names_itself() -> None:
    """A feature that the native front lacks is named as the obstacle. Models with other features can have the native front."""
    assert native_obstacle({Feature.VARIANTS, Feature.HOOKS}) == "it has hooks"
    assert native_obstacle({Feature.VARIANTS, Feature.PADDING}) == ""
    assert all(cell(Feature.HOOKS, other, "native").kind != "served" for other in Feature if other != "hooks")
    assert FRONTS == ("python", "native")
