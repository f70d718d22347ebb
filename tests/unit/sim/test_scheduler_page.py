"""The page about the scheduler shows what the present code does."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from matplotlib.figure import Figure

import scheduler_page as tool

TEXT = tool.PAGE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def compared() -> Mapping[str, Mapping[str, tool.Run]]:
    return {name: tool.runs(name) for name in tool.COLUMNS}


def test_the_tables_are_those_of_the_present_code(compared: Mapping[str, Mapping[str, tool.Run]]) -> None:
    """If not, run make pages, and read whether the text beside them still holds."""
    assert tool.rewrite(TEXT, tool.tables(compared)) == TEXT


def test_equal_runs_give_equal_pictures(
    compared: Mapping[str, Mapping[str, tool.Run]], tmp_path: Path
) -> None:
    """Byte for byte: a picture in the repository changes only with what it shows."""

    def save(figure: Figure) -> bytes:
        path = tmp_path / "figure.png"
        tool.save(figure, path)
        return path.read_bytes()

    assert save(tool.picture("hog", compared["hog"])) == save(tool.picture("hog", tool.runs("hog")))


def test_the_pictures_are_there_and_small() -> None:
    """The page shows those that the tool makes, none of them above 150 kB."""
    assert set(re.findall(r"\(images/(.*?)\)", TEXT)) == {f"scheduler-{name}.png" for name in tool.COLUMNS}

    for name in tool.COLUMNS:
        assert 0 < tool.image(name).stat().st_size <= 150_000


@pytest.mark.parametrize("page", ["", "<!-- a -->\n\nx\n\n<!-- end a -->\n" * 2], ids=["none", "two"])
def test_a_table_needs_one_pair_of_marks(page: str) -> None:
    """A page that lost its marks would otherwise stay as it is for ever."""
    with pytest.raises(ValueError, match="between one pair of marks"):
        tool.rewrite(page, {"a": "| b |"})
