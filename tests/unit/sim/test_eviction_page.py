"""The page about eviction shows what the present code does."""

from __future__ import annotations

import re

import pytest

import eviction_page as tool

TEXT = tool.PAGE.read_text(encoding="utf-8")


def test_a_row_of_the_curves_is_that_of_the_present_code() -> None:
    """If not, run make pages, and read whether the text beside the tables still holds."""
    exponent, room = tool.EXPONENTS[-1], tool.ROOMS[-1]

    assert tool.line(tool.row(exponent, room, tool.at(exponent, room))) in TEXT.splitlines()


@pytest.mark.parametrize("name", ["visits"])
def test_a_case_is_that_of_the_present_code(name: str) -> None:
    """The one in which the default is better."""
    for cells in tool.case(name):
        assert tool.line(cells) in TEXT.splitlines()


@pytest.mark.parametrize("exponent", tool.EXPONENTS)
@pytest.mark.parametrize("room", tool.ROOMS[::3])
def test_the_limits_are_in_order(exponent: float, room: float) -> None:
    """Who knows what comes has more hits than who knows how popular models are; both stand in the page."""
    known, best = tool.popular(exponent, room), tool.belady(exponent, room)

    assert known < best
    assert re.search(
        f"^[|] {100 * room:g} % .*[|] {100 * known:.1f} % [|] {100 * best:.1f} % [|]", TEXT, re.MULTILINE
    )


def test_every_case_stands_in_the_page() -> None:
    """With a row for each policy."""
    for one in tool.CASES.values():
        for policy in tool.POLICIES:
            assert f"\n| {one.title} | {100 * one.room:g} % | `{policy}` |" in TEXT


def test_the_picture_is_there_and_small() -> None:
    """The page shows it, and it is not above 150 kB."""
    assert f"(images/{tool.IMAGE.name})" in TEXT
    assert 0 < tool.IMAGE.stat().st_size <= 150_000
