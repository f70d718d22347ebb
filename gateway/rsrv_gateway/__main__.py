"""The command `rsrv-gateway`, or `python -m rsrv_gateway`. It imports large modules only after it has parsed the arguments."""

import os
import sys
from argparse import ArgumentTypeError
from collections.abc import Sequence
from pathlib import Path

from rsrv.address import parse_address
from rsrv.command import EXIT_STATUS, CommandParser, command, end_in_order

_EPILOG = f"""Settings are the section `gateway` of rsrv.yaml, and RSRV_GATEWAY__KEY in the environment, which takes precedence.
{EXIT_STATUS}
SIGTERM and SIGINT end it with 0."""


@command("rsrv-gateway", extra="gateway")
def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT. Requests in flight then get gateway.drain_s seconds. A second signal ends them at once."""
    end_in_order()
    options = parser().parse(argv)
    # Disable gRPC's own log, because gRPC logs an error for every peer that disconnects.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from rsrv_gateway import main as gateway

    return gateway.run(options.config, options.workers, options.picker)


def parser() -> CommandParser:
    top = CommandParser(
        prog="rsrv-gateway",
        description="One endpoint in front of several tritonservers.",
        epilog=_EPILOG,
    )
    top.add_argument("--config", type=Path, metavar="FILE", help="rsrv.yaml; without it, the defaults apply")
    top.add_argument(
        "--workers",
        metavar="HOST:PORT,...",
        help="gRPC ports of tritonservers, in place of gateway.workers; their HTTP ports are one less, and their metrics ports one more",
    )
    top.add_argument(
        "--picker",
        nargs="?",
        const="127.0.0.1:9002",
        type=_address,
        metavar="HOST:PORT",
        help="choose servers for Envoy's filter ext_proc, at this address or %(const)s, and serve no clients: gateway.grpc and gateway.http "
        "are ignored",
    )
    top.add_version()
    return top


def _address(text: str) -> str:
    try:
        parse_address(text, any_host=True, any_port=True)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None
    return text


if __name__ == "__main__":
    sys.exit(main())
