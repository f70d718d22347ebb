"""Command `rsrv-gateway`, also `python -m rsrv_gateway`. Imports nothing heavy before the arguments are parsed."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rsrv.command import EXIT_STATUS, CommandParser, command

_EPILOG = f"""Settings are the section `gateway` of rsrv.yaml, and RSRV_GATEWAY__KEY in the environment, which wins.
{EXIT_STATUS}
SIGTERM and SIGINT end it with 0."""


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT. Requests in flight then have gateway.drain_s; a second signal ends them."""
    options = parser().parse(argv)
    # gRPC logs an error for every peer that leaves.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from rsrv_gateway import main as gateway

    return gateway.run(options.config, options.workers)


def parser() -> CommandParser:
    top = CommandParser(
        prog="rsrv-gateway",
        description="One endpoint in front of several tritonservers.",
        epilog=_EPILOG,
    )
    top.add_argument("--config", type=Path, metavar="FILE", help="rsrv.yaml; without it, the defaults hold")
    top.add_argument(
        "--workers",
        metavar="HOST:PORT,...",
        help="gRPC ports of tritonservers, in place of gateway.workers; their HTTP ports are one below, metrics one above",
    )
    top.add_version()
    return top


if __name__ == "__main__":
    sys.exit(main())
