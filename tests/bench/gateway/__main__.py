"""`make bench-gateway`: the cost of a gateway, and the effect of a worker's death. See docs/gateway.md.

Run from the project's root: python -m tests.bench.gateway
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict

from local_triton import ServerFailed
from tests.bench import report
from tests.bench.figures import Target
from tests.bench.gateway import outage, passing
from tests.bench.load import BenchFailed
from tests.bench.phases import say
from tests.bench.places import ROOT, WORK
from tests.bench.run import environment

RESULT = WORK / "gateway.json"
PARTS = ("pairs", "passing", "outage")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts. Return the exit status, which is 0 if everything could be measured."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gateway", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="alternating rounds (%(default)s)")
    parser.add_argument(
        "--window",
        type=float,
        default=0.8,
        metavar="S",
        help="seconds of a window; a sample has three windows (%(default)s)",
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument(
        "--quick", action="store_true", help="one short round, only to see that everything works"
    )
    options = parser.parse_args(argv)
    if options.quick:
        options.rounds, options.window = 1, 0.3
    WORK.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    text: list[str] = []
    targets: list[Target] = []
    result: dict[str, object] = {"environment": environment()}
    try:
        if "pairs" in options.parts:
            say("== pairs")
            lines, part_targets, result["pairs"] = passing.pairs(100 * options.rounds)
            text += lines
            targets += part_targets
        if "passing" in options.parts:
            say("== passing")
            lines, part_targets, result["passing"] = passing.part(options.rounds, options.window)
            text += lines
            targets += part_targets
        if "outage" in options.parts:
            say("== outage")
            lines, part_targets, result["outage"] = outage.part(1 if options.quick else options.rounds)
            text += lines
            targets += part_targets
    except (BenchFailed, ServerFailed, RuntimeError, ValueError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    result["targets"] = [{**asdict(t), "reached": t.reached, "verdict": t.verdict()} for t in targets]
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print("", *text, report.targets_table(targets), sep="\n")
    print(f"\n{time.monotonic() - started:.0f} s; all samples are in {RESULT.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
