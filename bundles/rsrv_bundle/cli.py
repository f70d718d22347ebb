"""The command `rsrv-bundle`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import closing
from importlib.util import find_spec

from rsrv_bundle.errors import BundleError
from rsrv_bundle.hooks import check_hooks
from rsrv_bundle.inspection import Inspector, InspectorError
from rsrv_bundle.modules import Look, check_signatures
from rsrv_bundle.reader import read_bundle
from rsrv_bundle.spec import Bundle


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code: 0 all good, 1 a bundle is broken, 2 wrong usage, or no means to look."""
    parser = argparse.ArgumentParser(prog="rsrv-bundle", description="Work with bundles of compiled models.")
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="check every rule of the format, one line per broken one")
    check.add_argument("directories", metavar="DIR", nargs="+", help="a bundle's directory")
    check.add_argument(
        "--no-signatures", action="store_true", help="do not look inside the modules, which needs jaxlib"
    )
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as e:
        # argparse has said what is wrong, or has printed the help.
        return int(e.code or 0)
    return _check(arguments.directories, signatures=not arguments.no_signatures)


def _check(directories: Sequence[str], *, signatures: bool) -> int:
    if signatures and find_spec("jaxlib") is None:
        message = "jaxlib is not installed; install 'rsrv[runtime]', or pass --no-signatures"
        print(f"rsrv-bundle: {message}", file=sys.stderr)
        return 2
    broken = 0
    with closing(Inspector()) as inspector:
        for directory in directories:
            try:
                print(f"ok {directory}: {_check_one(directory, inspector if signatures else None)}")
            except BundleError as e:
                broken += 1
                for problem in e.problems:
                    print(f"{directory}: {problem}")
            except InspectorError as e:
                # It may be good or not, and the next one will fare no better.
                print(f"rsrv-bundle: {directory}: {e}", file=sys.stderr)
                return 2
            except OSError as e:
                broken += 1
                print(f"{directory}: {e.filename or ''}: {e.strerror}")
    return 1 if broken else 0


def _check_one(directory: str, look: Look | None) -> str:
    """A summary of a good bundle. Raises BundleError with the problems of all the checks that could be made."""
    bundle = read_bundle(directory)
    problems: list[str] = []
    if bundle.hooks is not None:
        try:
            check_hooks(bundle.hooks, bundle.manifest.kind)
        except BundleError as e:
            problems += e.problems
    sizes = sorted({size for _, size in bundle.modules})
    if look is not None and bundle.modules:
        try:
            sizes = sorted({size for _, size in check_signatures(bundle, look)})
        except BundleError as e:
            problems += e.problems
    if problems:
        raise BundleError(problems)
    return _summary(bundle, sizes)


def _summary(bundle: Bundle, sizes: Sequence[int]) -> str:
    manifest = bundle.manifest
    parts = [f"format {manifest.format_version}"]
    if manifest.kind == "meta":
        external = f" and {len(manifest.meta_external)} external" if manifest.meta_external else ""
        parts.append(f"meta model of {len(manifest.meta_calls)} calls{external}")
    else:
        if manifest.batched:
            parts.append(f"batch sizes {' '.join(map(str, sizes))}")
        if bundle.variants > 1:
            parts.append(f"{bundle.variants} variants")
        parts.append(f"{len(bundle.weights)} weights, {bundle.weight_bytes} bytes")
        if manifest.public:
            parts.append("public")
    if bundle.hooks is not None:
        parts.append("hooks")
    parts.append(f"sha256 {bundle.digest[:12]}")
    return ", ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
