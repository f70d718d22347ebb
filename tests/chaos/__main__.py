"""`make chaos`: cause all faults in turn on real servers under load until the time is over, and print a table of the effects.

The exit status is 1 if an answer was wrong or missing, if a fault harmed a model that it should not harm, or if a model did not
recover.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator, Sequence

from tests.bench.report import table
from tests.chaos.catalogue import CATALOGUE, ComesAndGoes
from tests.chaos.endurance import ENDURANCE
from tests.chaos.faults import FAULTS, Fault
from tests.chaos.figures import HEADERS, Row, cells, remarks, together
from tests.chaos.house import NotPossible, houses
from tests.chaos.run import FULL, QUICK, run_fault
from tests.chaos.streams import STREAMS
from tests.e2e.harness import ROOT

RESULT = ROOT / "build" / "chaos.md"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the faults, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="inject each fault once, with short pauses")
    parser.add_argument(
        "--only",
        metavar="WORD",
        nargs="+",
        help="only faults whose names contain one of these words; 'deaths': the deaths in a row",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the clients' requests (%(default)s)")
    options = parser.parse_args(argv)
    known: Sequence[type[Fault]] = (*FAULTS, *STREAMS, *CATALOGUE, *ENDURANCE, ComesAndGoes)
    kinds = (
        [kind for kind in known if any(word in kind.name for word in options.only)]
        if options.only
        else (*FAULTS, *STREAMS, *CATALOGUE)
    )
    if not kinds:
        parser.error("no fault has such a name; they are:\n" + "\n".join(f"  {kind.name}" for kind in known))
    minutes = 0.0 if options.quick else options.minutes
    until = time.monotonic() + 60 * minutes
    rows: dict[type[Fault], list[Row]] = {}
    impossible: dict[type[Fault], str] = {}
    with houses() as get:
        for number, kind in enumerate(_turns(kinds, until, impossible)):
            try:
                pace = QUICK if options.quick else FULL
                seed = options.seed + number
                row = run_fault(kind.planned(minutes, seed), get(kind.house), pace, seed)
            except NotPossible as why:
                impossible[kind] = str(why)
                print(f"{kind.name}: not tried: {why}", flush=True)
                continue
            rows.setdefault(kind, []).append(row)
            _tell(kind, row)
    text = report(rows, impossible)
    print(f"\n{text}")
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(text + "\n")
    return int(any(row.problems for some in rows.values() for row in some))


def _turns(
    kinds: Sequence[type[Fault]], until: float, impossible: Iterable[type[Fault]]
) -> Iterator[type[Fault]]:
    """Yield each fault once. Then yield the faults that take only seconds again, until the time is over."""
    yield from kinds
    again = [kind for kind in kinds if kind in (*FAULTS, *STREAMS, *CATALOGUE)]
    while time.monotonic() < until and (possible := [kind for kind in again if kind not in set(impossible)]):
        for kind in possible:
            if time.monotonic() >= until:
                return
            yield kind


def _tell(kind: type[Fault], row: Row) -> None:
    line = ", ".join(f"{h} {c}" for h, c in zip(HEADERS[2:], cells(row, kind.expected)[2:], strict=True))
    print(f"{kind.name}: {line}", *remarks(row, kind.expected), sep="\n    ", flush=True)


def report(rows: dict[type[Fault], list[Row]], impossible: dict[type[Fault], str]) -> str:
    """Return the table with its remarks. The text is also Markdown."""
    merged = {kind: together(some) for kind, some in rows.items()}
    lines = ["```", table(HEADERS, [cells(row, kind.expected) for kind, row in merged.items()]), "```", ""]
    for kind, row in merged.items():
        if texts := remarks(row, kind.expected):
            lines += [f"{kind.name}:", *(f"- {text}" for text in texts), ""]
    lines += [f"{kind.name}: not tried: {why}" for kind, why in impossible.items()]
    return "\n".join(lines).rstrip()


if __name__ == "__main__":
    sys.exit(main())
