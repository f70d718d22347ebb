"""Command rsrv-node. Imports nothing heavy before the arguments are parsed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rsrv.command import EXIT_STATUS, CommandParser, command
from rsrv_gen.cli import add_compile_for

_EPILOG = f"""Every other setting is in rsrv.yaml, sections node and gateway, or in the environment (RSRV_NODE__FIRST_PORT).
{EXIT_STATUS}
SIGTERM and SIGINT end it with 0, a second one at once; a process that has used up its restarts with 1."""


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    options = parser().parse(argv)
    from rsrv.serve import node

    return node.run(options)


def parser() -> CommandParser:
    top = CommandParser(
        prog="rsrv-node",
        description="Serves bundles on all devices of this machine: a tritonserver for each, which follows changes of "
        "the bundles, and with two or more the gateway in front of them.",
        epilog=_EPILOG,
    )
    top.add_argument(
        "bundles", metavar="BUNDLES", nargs="+", type=Path, help="a directory of bundles, or a bundle"
    )
    top.add_argument("--config", metavar="FILE", type=Path, help="settings; default: every setting's default")
    devices = top.add_mutually_exclusive_group()
    devices.add_argument(
        "--gpus",
        metavar="LIST",
        type=gpus,
        help="numbers or UUIDs, with commas; default: those of CUDA_VISIBLE_DEVICES, or all (node.gpus)",
    )
    devices.add_argument(
        "--cpu-workers", metavar="N", type=_count, help="servers on the CPU instead (node.cpu_workers)"
    )
    top.add_argument(
        "--directory", metavar="DIR", type=Path, help="folder of the repositories (node.directory)"
    )
    top.add_argument(
        "--tritonserver", metavar="PROGRAM", help="the server to start; default: the one on PATH"
    )
    add_compile_for(top)
    top.add_argument("--dry-run", action="store_true", help="print the commands, and run nothing")
    top.set_defaults(http_port=None, grpc_port=None, metrics_port=None)
    top.add_version()
    return top


def gpus(text: str) -> list[int | str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise argparse.ArgumentTypeError("at least one")
    return [int(word) if word.isdecimal() else word for word in words]


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 64:
        raise argparse.ArgumentTypeError("a number from 1 to 64")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
