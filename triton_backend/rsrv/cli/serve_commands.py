"""The subcommands of `rsrv` that prepare a server on this machine."""

import argparse
import sys

from rsrv.serve.triton_install import Installation, InstallError, default_folder


def run(options: argparse.Namespace) -> int:
    """Carry out `rsrv triton install`. Return the exit status."""
    installation = Installation.at(options.dir or default_folder())
    try:
        installation.install(lambda line: print(line, flush=True))
    except InstallError as error:
        print(f"rsrv triton install: {error}", file=sys.stderr)
        return 1
    print(f"tritonserver: {installation.launcher}")
    print(f"perf_analyzer: {installation.perf_analyzer}")
    return 0
