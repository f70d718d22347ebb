import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import native_front
from tests.fuzz.onnx_files import check_onnx
from tests.fuzz.watched import Verdict

KINDS = ("bundles", "modules", "frames", "answers", "onnx", "natives", "requests", "openai")


def main() -> int:
    """Run the checks. Return 0 if there was no failure."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz",
        description="Hostile input, made from seeds.",
        epilog="A seed makes the same input on every run. `--only KIND --first SEED --KIND 1` tries one input alone. This"
        " repeats a fault of this input, but perhaps not a fault that needs several inputs. For bad requests, the outcome"
        " 'crash' names the requests in progress when a process died. 'harm' and 'noise' name some of the requests before.",
    )
    parser.add_argument(
        "--first", type=int, default=0, help="the first seed of each kind; default: %(default)s"
    )
    parser.add_argument("--only", choices=KINDS, help="try only this kind")
    parser.add_argument(
        "--bundles", type=int, default=10_000, metavar="N", help="mutated bundles; default: %(default)s"
    )
    parser.add_argument(
        "--modules",
        type=int,
        default=1000,
        metavar="N",
        help="bundles that are compiled; default: %(default)s",
    )
    parser.add_argument(
        "--frames",
        type=int,
        default=10_000,
        metavar="N",
        help="connections that misbehave; default: %(default)s",
    )
    parser.add_argument(
        "--answers",
        type=int,
        default=10_000,
        metavar="N",
        help="runtimes that misbehave; default: %(default)s",
    )
    parser.add_argument(
        "--onnx", type=int, default=2000, metavar="N", help="ONNX files; default: %(default)s"
    )
    parser.add_argument(
        "--natives",
        type=int,
        default=100,
        metavar="N",
        help="native fronts, each with 60 connections of runtimes that misbehave; default: %(default)s",
    )
    parser.add_argument(
        "--requests",
        type=int,
        default=20_000,
        metavar="N",
        help="requests of bad clients; default: %(default)s",
    )
    parser.add_argument(
        "--openai",
        type=int,
        default=5000,
        metavar="N",
        help="requests to `rsrv openai`; default: %(default)s",
    )
    parser.add_argument(
        "--front",
        choices=("python", "native"),
        default="python",
        help="the front that gets the requests; default: %(default)s",
    )
    options = parser.parse_args()

    def seeds(kind: str) -> range:
        count = getattr(options, kind) if options.only in (None, kind) else 0
        return range(options.first, options.first + count)

    with tempfile.TemporaryDirectory(prefix="rsrv-fuzz-") as scratch:
        folder = Path(scratch)
        # This check is first, because the others import jax. A fork does not copy jax's threads.
        failed = [_report("onnx", check_onnx(seeds("onnx"), folder))]
        from tests.fuzz.bundles import check_bundles, check_modules
        from tests.fuzz.corpus import good_bundles
        from tests.fuzz.frames import check_answers, check_frames

        good = good_bundles(folder / "good") if any(map(seeds, KINDS[:3])) else []
        failed += [
            _report("bundles", check_bundles(seeds("bundles"), good, folder)),
            _report("modules", check_modules(seeds("modules"), good, folder)),
            _report("frames", check_frames(seeds("frames"), good, folder)),
            _report("answers", check_answers(seeds("answers"))),
        ]
        # These checks start threads. So they run after the checks that fork.
        if seeds("natives"):
            from tests.fuzz.natives import check_natives

            failed.append(_report("natives", check_natives(seeds("natives"), folder)))
        if seeds("requests"):
            from tests.fuzz.servers import check_requests

            if options.front == "native":
                native_front.ensure()
            requests = check_requests(seeds("requests"), folder, front=options.front)
            failed.append(_report("requests", requests))
        if seeds("openai"):
            from tests.fuzz.openai_bodies import check_openai

            native_front.ensure()
            failed.append(_report("openai", check_openai(seeds("openai"), folder)))
    return int(any(failed))


def _report(what: str, verdicts: Iterable[Verdict]) -> int:
    """Print each failure at once, and a line at the end. Return the number of failures."""
    started = time.monotonic()
    outcomes: Counter[str] = Counter()
    slowest, largest, bad = 0.0, 0, 0
    for verdict in verdicts:
        outcomes[verdict.outcome] += 1
        slowest, largest = max(slowest, verdict.seconds), max(largest, verdict.nbytes)
        if verdict.bad:
            bad += 1
            print(
                f"{what}: {verdict.outcome}: seed {verdict.seed}, {verdict.seconds:.1f} s,"
                f" {verdict.nbytes >> 20} MiB: {verdict.detail}",
                flush=True,
            )
    counts = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common())
    print(
        f"{what}: {outcomes.total()} in {time.monotonic() - started:.0f} s: {counts or 'none'};"
        f" at most {slowest:.1f} s and {largest >> 20} MiB for one; {bad} bad",
        flush=True,
    )
    return bad


if __name__ == "__main__":
    sys.exit(main())
