"""The command rsrv-gen, which turns bundles into a Triton model repository. `--help` does not import `rsrv_gen.run`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rsrv.cards import CARDS
from rsrv.command import EXIT_STATUS, CommandParser, command
from rsrv.text import nearest


@command("rsrv-gen", extra="bundles")
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return 0 on success.

    Return 1 if a bundle is broken, or with --check if anything would change. Return 2 if no path has bundles.
    """
    options = parser().parse(argv)
    from rsrv_gen import run

    return run.run(options)


def parser() -> CommandParser:
    top = CommandParser(
        prog="rsrv-gen",
        description="Write a Triton model repository: one Python-backend model for each bundle.",
        epilog="Example: rsrv-gen bundles/ -o gen/\n"
        "Serve it with: tritonserver --model-repository=gen/ --model-control-mode=explicit --load-model=* "
        "--exit-on-error=false --strict-readiness=false\n"
        f"`rsrv serve bundles/` does both.\n{EXIT_STATUS}",
    )
    top.add_argument(
        "bundles", metavar="BUNDLES", nargs="+", type=Path, help="a bundle, or a directory of bundles"
    )
    top.add_argument("-o", "--output", metavar="GEN", required=True, type=Path, help="the model repository")
    top.add_argument(
        "--config",
        metavar="FILE",
        type=Path,
        help="settings of the runtime; all of them, with the defaults, are written to GEN/rsrv.yaml",
    )
    top.add_argument(
        "--link",
        choices=("hard", "copy"),
        help="how the bundles' files get into GEN; default: lifecycle.link. hard: large files are hard links, or copies where the file system has no "
        "links; never rewrite such a file in place, but write a new one and rename it. copy: no file is shared",
    )
    top.add_argument(
        "--prune",
        action="store_true",
        help="remove models that rsrv-gen made from bundles that are no longer given",
    )
    only = top.add_mutually_exclusive_group()
    only.add_argument(
        "--check",
        action="store_true",
        help="write nothing; exit with 1 if anything would change or is broken",
    )
    add_compile_for(only)
    top.add_argument("--json", action="store_true", help="print the actions as JSON, for programs")
    top.add_version()
    return top


def add_compile_for(parser: argparse._ActionsContainer) -> None:
    """Add --compile-for, which `rsrv serve` also has."""
    parser.add_argument(
        "--compile-for",
        metavar="CARD",
        type=_card,
        help="compile the models for this GPU, so that the server need not; needs jax's CUDA plugin, but no GPU. "
        f"{', '.join(sorted(CARDS))}, or a file that `rsrv gpu profile` wrote, which also has the results of tuning",
    )


def _card(text: str) -> str:
    if text not in CARDS and not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"unknown card {text!r}, and no such file{nearest(text, CARDS)}")
    return text


if __name__ == "__main__":
    sys.exit(main())
