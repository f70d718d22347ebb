"""The manual's section about several devices shows what the present code does."""

from __future__ import annotations

import pytest

import simulator_page as tool
from scheduler_page import rewrite

TEXT = tool.PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", tool.SCENARIOS)
def test_the_tables_are_those_of_the_present_code(name: str) -> None:
    """If not, run make pages, and read whether the text beside them still holds."""
    assert rewrite(TEXT, {name: tool.Comparison(name).table}) == TEXT


def test_the_picture_is_there_and_small() -> None:
    """The page shows it, and it has at most 150 kB."""
    assert f"(images/{tool.PICTURE.name})" in TEXT
    assert 0 < tool.PICTURE.stat().st_size <= 150_000
