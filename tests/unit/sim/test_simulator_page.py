"""The tables in docs/simulator.md have the results of the current code."""

import pytest

import simulator_page as tool

TEXT = tool.PAGE.read_text(encoding="utf-8")


@pytest.mark.long
def test_the_tables_are_current() -> None:
    """The tables on the page are current. If not, run make pages, and check whether the text beside them is still right."""
    tables = tool.Comparison("fleet"), tool.Idleness("catalogue"), tool.weights_table("catalogue")
    assert tool.rewritten(TEXT, *tables) == TEXT


@pytest.mark.parametrize("name", [tool.PICTURE.name, "idle.png"])
def test_the_pictures_exist_and_are_small(name: str) -> None:
    """The page shows the pictures that the tool makes, of at most 150 kB each."""
    assert f"(images/{name})" in TEXT
    assert 0 < (tool.PICTURE.parent / name).stat().st_size <= 150_000
