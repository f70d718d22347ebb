"""The command `rsrv-bundle`. Light until it knows what it is to do."""

import argparse
import sys
from collections.abc import Sequence

from rsrv.command import add_version


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code: 0 all good, 1 a bundle is broken, 2 wrong usage, or no means to look."""
    try:
        arguments = parser().parse_args(argv)
    except SystemExit as e:
        # argparse has said what is wrong, or has printed the help.
        return int(e.code or 0)
    from rsrv_bundle import checking

    return checking.check(arguments.directories, signatures=not arguments.no_signatures)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="rsrv-bundle", description="Work with bundles of compiled models.")
    add_version(top)
    commands = top.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="check every rule of the format, one line per broken one")
    check.add_argument("directories", metavar="DIR", nargs="+", help="a bundle's directory")
    check.add_argument(
        "--no-signatures", action="store_true", help="do not look inside the modules, which needs jaxlib"
    )
    return top


if __name__ == "__main__":
    sys.exit(main())
