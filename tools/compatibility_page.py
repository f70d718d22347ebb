"""Write the tables of docs/compatibility.md from `rsrv_bundle.compatibility`, or with --count print the number of cells by kind."""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path

from rsrv_bundle.compatibility import ABSENT, FRONTS, PYTHON_ONLY, REFUSED, Cell, Feature, Front, Rule, cell

PAGE = Path(__file__).resolve().parents[1] / "docs" / "compatibility.md"
_SIGNS = {"served": "✓", "refused": "✗", "n/a": "-", "untested": "?"}
_START, _END = "<!-- compatibility -->\n", "<!-- end compatibility -->"


def cells(front: Front) -> dict[tuple[Feature, Feature], Cell]:
    """Return the cell of each pair of features."""
    return {(one, other): cell(one, other, front) for one, other in combinations(Feature, 2)}


def matrix(front: Front) -> Iterator[str]:
    """Return the lines of a table with a row and a column for each feature of a front."""
    found = cells(front)
    features = [one for one in Feature if front == "python" or one not in PYTHON_ONLY]
    numbers = [str(number) for number in range(1, len(features))]
    yield from _row(["", *numbers])
    yield from _row(["---"] * len(features))
    for at, one in enumerate(features):
        signs = [_SIGNS[found[other, one].kind] for other in features[:at]]
        yield from _row([f"{at + 1} {one}", *signs, *[""] * (len(numbers) - at)])


def reasons(rules: Sequence[Rule], title: str) -> Iterator[str]:
    """Return the lines of a table with the text of each rule."""
    yield from _row(["feature", "with", title])
    yield from _row(["---"] * 3)
    for rule in rules:
        text = f"... {rule.text}" if rule.text.startswith("which") else rule.text
        yield from _row(["; ".join(rule.features), "; ".join(rule.others), text])


def _row(columns: Sequence[str]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"


def rewrite(page: str) -> str:
    """Return the page with the present tables. Raises ValueError if it lacks the markers."""
    before, start, rest = page.partition(_START)
    _, end, after = rest.partition(_END)
    if not end:
        raise ValueError(f"docs/compatibility.md needs {_START.strip()} and {_END}")
    parts = (
        ("## The Python front", matrix("python")),
        ("## The native front", matrix("native")),
        ("## Refused", reasons(REFUSED, "error")),
        ("## Not applicable", reasons(ABSENT, "reason")),
    )
    text = "".join(f"\n{title}\n\n" + "\n".join(lines) + "\n" for title, lines in parts)
    return f"{before}{start}{text}\n{end}{after}"


def main() -> None:
    """Rewrite the page, or print the number of cells."""
    if "--count" in sys.argv[1:]:
        for front in FRONTS:
            print(front, dict(Counter(found.kind for found in cells(front).values())))
    else:
        PAGE.write_text(rewrite(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
