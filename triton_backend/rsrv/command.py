"""What all of rsrv's commands have in common. Nothing is imported here that `--help` does not need."""

import argparse
from collections.abc import Sequence


def add_version(parser: argparse.ArgumentParser) -> None:
    """Adds --version."""
    parser.add_argument(
        "--version",
        action=_ShowVersion,
        nargs=0,
        dest=argparse.SUPPRESS,
        help="show rsrv's version and end",
    )


class _ShowVersion(argparse.Action):
    """As argparse's own, which would have to know the version beforehand: looking it up takes a while."""

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
