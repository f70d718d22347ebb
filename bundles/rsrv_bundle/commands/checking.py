"""`rsrv-bundle check`: check every rule of the format."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing
from importlib.util import find_spec
from json import dumps
from typing import Any

from rsrv.extras import install_command
from rsrv.text import os_error
from rsrv_bundle.commands.agreement import Comparison, SourceError, agree
from rsrv_bundle.errors import BundleError
from rsrv_bundle.hooks import check_hooks
from rsrv_bundle.inspection import Inspector, InspectorError
from rsrv_bundle.modules import Look, check_signatures
from rsrv_bundle.reader import read_bundle
from rsrv_bundle.spec import Bundle


def check(
    directories: Sequence[str], *, signatures: bool, json: bool = False, numerics: Comparison | None = None
) -> int:
    """Print a line per bundle, or per broken rule; return the exit status, as `cli.main`.

    json: print one list with an object per bundle instead: `directory`, `ok`, `lines`.
    numerics: comparison that runs the modules, if any.
    """
    if signatures and find_spec("jaxlib") is None:
        message = f"jaxlib is not installed; run {install_command('export')}, or pass --no-signatures"
        print(f"rsrv-bundle: {message}", file=sys.stderr)
        return 2
    report: list[dict[str, Any]] = []

    def say(directory: str, ok: bool, *lines: str) -> None:
        if not report or report[-1]["directory"] != directory:
            report.append({"directory": directory, "ok": ok, "lines": []})
        report[-1]["ok"] &= ok
        report[-1]["lines"] += lines
        for line in () if json else lines:
            print(f"{'ok ' if ok else ''}{directory}: {line}")

    with closing(Inspector()) as inspector:
        for directory in directories:
            try:
                bundle = read_bundle(directory)
                say(directory, True, _check_one(bundle, inspector if signatures else None))
                if numerics is not None:
                    for line in agree(bundle, numerics, inspector):
                        say(directory, True, line)
            except BundleError as e:
                say(directory, False, *e.problems)
            except (InspectorError, SourceError) as e:
                # The bundle may be good or not, and the next one would meet the same error.
                print(f"rsrv-bundle: {directory}: {e}", file=sys.stderr)
                return 2
            except OSError as e:
                say(directory, False, os_error(e))
    if json:
        print(dumps(report, indent=2))
    return 0 if all(one["ok"] for one in report) else 1


def _check_one(bundle: Bundle, look: Look | None) -> str:
    """Return a summary of a valid bundle. Raises BundleError with the problems of all checks."""
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
        if manifest.internal:
            parts.append("internal")
        if manifest.state is not None:
            parts.append(f"{manifest.state.slots} slots of {manifest.state.slot_bytes} bytes")
        if manifest.generate is not None:
            parts.append(f"generates {'text' if manifest.generate.tokenizer else 'tokens'}")
    if bundle.hooks is not None:
        parts.append("hooks")
    parts.append(f"sha256 {bundle.digest[:12]}")
    return ", ".join(parts)
