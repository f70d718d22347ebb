"""The page about the scheduler has the results of the current code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from matplotlib.figure import Figure

import scheduler_page as tool
from rsrv.sim.plots import save

TEXT = tool.PAGE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def compared() -> Mapping[str, Mapping[str, tool.Run]]:
    return {name: tool.runs(name) for name in tool.COLUMNS}


@pytest.mark.long
def test_the_tables_are_current(compared: Mapping[str, Mapping[str, tool.Run]]) -> None:
    """The tables on the page are current. If not, run make pages, and check whether the text beside them is still right."""
    assert tool.rewrite(TEXT, tool.tables(compared)) == TEXT


@pytest.mark.long
def test_equal_runs_give_equal_pictures(tmp_path: Path) -> None:
    """Equal runs give equal pictures, byte for byte. So a picture in the repository changes only if its figures change."""

    def saved(figure: Figure) -> bytes:
        path = tmp_path / "figure.png"
        save(figure, path)
        return path.read_bytes()

    assert saved(tool.picture(tool.runs("hog"))) == saved(tool.picture(tool.runs("hog")))


def test_the_picture_exists_and_is_small() -> None:
    """The page shows the picture that the tool makes, of at most 150 kB."""
    assert f"(images/{tool.IMAGE.name})" in TEXT
    assert 0 < tool.IMAGE.stat().st_size <= 150_000


@pytest.mark.parametrize("page", ["", "<!-- a -->\n\nx\n\n<!-- end a -->\n" * 2], ids=["none", "two"])
def test_a_table_needs_one_pair_of_marks(page: str) -> None:
    """A page must have exactly one pair of comments around the place of a table. Otherwise it would never be updated."""
    with pytest.raises(ValueError, match="exactly one pair of marks"):
        tool.rewrite(page, {"a": "| b |"})
