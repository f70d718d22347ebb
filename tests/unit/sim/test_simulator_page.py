"""The simulator's tables in docs/simulator.md show what the current code does."""

import pytest

import simulator_page as tool

TEXT = tool.PAGE.read_text(encoding="utf-8")


@pytest.mark.long
def test_the_tables_are_current() -> None:
    """If not, run make pages, and read whether the text beside it still holds."""
    tables = tool.Comparison("fleet"), tool.Idleness("catalogue"), tool.weights_table("catalogue")
    assert tool.rewritten(TEXT, *tables) == TEXT


@pytest.mark.parametrize("name", [tool.PICTURE.name, "idle.png"])
def test_the_pictures_exist_and_are_small(name: str) -> None:
    """The page shows the pictures that the tool makes, of at most 150 kB each."""
    assert f"(images/{name})" in TEXT
    assert 0 < (tool.PICTURE.parent / name).stat().st_size <= 150_000
