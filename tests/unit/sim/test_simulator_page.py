"""The table about several devices in docs/tuning.md shows what the present code does."""

import pytest

import simulator_page as tool

TEXT = tool.PAGE.read_text(encoding="utf-8")


@pytest.mark.long
def test_the_table_is_current() -> None:
    """If not, run make pages, and read whether the text beside it still holds."""
    assert tool.rewritten(TEXT, tool.Comparison("fleet")) == TEXT


def test_the_picture_exists_and_is_small() -> None:
    """The page shows the picture that the tool makes, of at most 150 kB."""
    assert f"(images/{tool.PICTURE.name})" in TEXT
    assert 0 < tool.PICTURE.stat().st_size <= 150_000
