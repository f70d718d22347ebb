"""The common part of rsrv's commands. Imports nothing that `--help` does not need."""

import argparse
from collections.abc import Sequence


def add_version(parser: argparse.ArgumentParser) -> None:
    """Add --version to a parser."""
    parser.add_argument(
        "--version",
        action=_ShowVersion,
        nargs=0,
        dest=argparse.SUPPRESS,
        help="show rsrv's version and end",
    )


class _ShowVersion(argparse.Action):
    """Shows the version. argparse's own action needs it beforehand, and looking it up is slow."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        import rsrv

        print(f"rsrv {rsrv.__version__}")
        parser.exit()
