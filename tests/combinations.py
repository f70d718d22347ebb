"""The table of docs/states.md: which states of the machines that make up a model's life go together."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

_PAGE = Path(__file__).parents[1] / "docs/states.md"


class Combination(NamedTuple):
    """States of one model at one moment."""

    #: Word of docs/operating.md, without details.
    word: str
    #: The bundle, in the control process.
    bundle: str
    #: The model, in Triton.
    triton: str
    #: The model's fronts: connected, or waiting.
    front: str
    #: The version that the runtime shows.
    runtime: str
    weights: str


class Row(NamedTuple):
    """A row of the table: combinations of these states are known. A cell with "any" has all states."""

    word: str
    cells: tuple[frozenset[str], ...]

    def has(self, found: Combination) -> bool:
        pairs = zip(self.cells, found[1:], strict=True)
        return found.word == self.word and all("any" in cell or one in cell for cell, one in pairs)


def table() -> list[Row]:
    """Return the rows of the page's table."""
    text = _PAGE.read_text().partition("<!-- combinations -->")[2].partition("<!-- end combinations -->")[0]
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")][2:]
    return [
        Row(word, tuple(frozenset(cell.strip().split(", ")) for cell in cells)) for word, _, *cells in lines
    ]
