"""Write the tables of docs/compatibility.md from `rsrv_bundle.compatibility`, or with --count print the number of cells by kind."""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path

from rsrv_bundle.compatibility import ABSENT, FRONTS, PYTHON_ONLY, Cell, Feature, Front, Rule, cell

#: Names of features that are listed together.
GROUPS: Mapping[str, frozenset[Feature]] = {
    "meta models": frozenset((Feature.META, Feature.BLS)),
    "aliases": frozenset((Feature.ALIAS, Feature.SHADOW)),
}

PAGE = Path(__file__).resolve().parents[1] / "docs" / "compatibility.md"
_START, _END = "<!-- compatibility -->\n", "<!-- end compatibility -->"


def cells(front: Front) -> dict[tuple[Feature, Feature], Cell]:
    """Return the cell of each pair of features."""
    return {(feature, second): cell(feature, second, front) for feature, second in combinations(Feature, 2)}


def features() -> Iterator[str]:
    """Return the lines of a table with the pairs of each feature that do not work.

    A feature without any served pair is named only in its own row, and not in the rows of other features.
    """
    pairs = {**(half := cells("python")), **{(b, a): cell_of_pair for (a, b), cell_of_pair in half.items()}}
    kinds = {
        feature: {second: pairs[feature, second].kind for second in Feature if second != feature}
        for feature in Feature
    }
    untested = {
        feature for feature in Feature if not any(kind == "served" for kind in kinds[feature].values())
    }
    yield from _row(["feature", "front", "refused with", "no test with"])
    yield from _row(["---"] * 4)
    for feature in Feature:
        columns = [
            _names(
                second
                for second, kind in kinds[feature].items()
                if kind == outcome and second not in untested
            )
            for outcome in ("refused", "untested")
        ]
        if feature in untested:
            columns[1] = "everything else"
        yield from _row([f"**{feature}**", "Python" if feature in PYTHON_ONLY else "both", *columns])


def differences() -> Iterator[str]:
    """Return the lines of a list of the pairs that the native front treats differently from the Python front."""
    python = cells("python")
    for (feature, second), cell_of_pair in cells("native").items():
        if not {feature, second} & PYTHON_ONLY.keys() and cell_of_pair.kind != python[feature, second].kind:
            yield f"- With the native front, {feature} and {second}: {cell_of_pair.kind}."


def reasons(rules: Sequence[Rule]) -> Iterator[str]:
    """Return the lines of a table with the text of each rule."""
    yield from _row(["feature", "with", "reason"])
    yield from _row(["---"] * 3)
    for rule in rules:
        yield from _row([_names(rule.features), _names(rule.others), rule.text])


def _names(features: Iterable[Feature]) -> str:
    """Return the names of features. A whole group has one name."""
    names = {feature: str(feature) for feature in features}
    for name, group in GROUPS.items():
        if group <= names.keys():
            names.update(dict.fromkeys(group, name))
    return "; ".join(dict.fromkeys(names.values()))


def _row(columns: Sequence[str]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"


def rewrite(page: str) -> str:
    """Return the page with the current tables. Raises ValueError if it lacks the markers."""
    before, start, following = page.partition(_START)
    _, end, after = following.partition(_END)
    if not end:
        raise ValueError(f"docs/compatibility.md needs {_START.strip()} and {_END}")
    parts = (
        ("## Each feature", [*features(), *differences()]),
        ("## Cannot occur", reasons(ABSENT)),
    )
    text = "".join(f"\n{title}\n\n" + "\n".join(lines) + "\n" for title, lines in parts)
    return f"{before}{start}{text}\n{end}{after}"


def main() -> None:
    """Rewrite the page, or print the number of cells."""
    if "--count" in sys.argv[1:]:
        for front in FRONTS:
            print(front, dict(Counter(pair.kind for pair in cells(front).values())))
    else:
        PAGE.write_text(rewrite(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
