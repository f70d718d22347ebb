"""`rsrv-bundle check`: check every rule of the format."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from importlib.util import find_spec
from json import dumps
from pathlib import Path
from typing import Any

from rsrv.extras import install_command
from rsrv.text import counted, os_error
from rsrv.triton_install import Installation, default_folder
from rsrv_bundle.commands.agreement import Comparison, SourceError, agree
from rsrv_bundle.errors import BundleError
from rsrv_bundle.hooks import check_hooks
from rsrv_bundle.inspection import Inspector, InspectorError
from rsrv_bundle.modules import SignatureReader, check_signatures
from rsrv_bundle.reader import read_bundle
from rsrv_bundle.spec import Bundle

#: Program that imports a bundle's model.py as its stub does: sys.argv has the path and the name of the loader's function.
_IMPORT = "import sys; from pathlib import Path; from rsrv.hooks import loader; getattr(loader, sys.argv[2])(Path(sys.argv[1]))"
#: Seconds that the import may take.
_IMPORT_S = 120.0


def check(
    directories: Sequence[str],
    *,
    signatures: bool,
    json: bool = False,
    numerics: Comparison | None = None,
    run: bool = False,
) -> int:
    """Print a line for each valid bundle and for each broken rule. Return the exit status, as `cli.main` does.

    json: print one list instead. It has an object with `directory`, `ok` and `lines` for each bundle.
    numerics: a comparison that runs the modules, or None.
    run: also import each bundle's model.py with the Python of the stubs.
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
                if run and bundle.hooks is not None:
                    say(directory, True, _import_hooks(bundle, bundle.hooks))
                if numerics is not None:
                    for line in agree(bundle, numerics, inspector):
                        say(directory, True, line)
            except BundleError as e:
                say(directory, False, *e.problems)
            except (InspectorError, SourceError) as e:
                # This error says nothing about the bundle, and the next bundle would have the same error.
                print(f"rsrv-bundle: {directory}: {e}", file=sys.stderr)
                return 2
            except OSError as e:
                say(directory, False, os_error(e))
    if json:
        print(dumps(report, indent=2))
    return 0 if all(entry["ok"] for entry in report) else 1


def _import_hooks(bundle: Bundle, hooks: Path) -> str:
    """Import model.py in a separate process, with the Python of the stubs. Return a line for the user.

    Raises BundleError with the last line that the import wrote, and OSError if that Python cannot be started.
    """
    installed = Installation.at(default_folder()).stub_python
    # In a container, Triton's stubs run on the first python3 of the server's PATH.
    python = str(installed) if installed.exists() else shutil.which("python3") or sys.executable
    load = "load_run" if bundle.manifest.kind == "meta" else "load_hooks"
    command = [python, "-c", _IMPORT, str(hooks.absolute()), load]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_IMPORT_S)
    except subprocess.TimeoutExpired:
        raise BundleError([f"model.py: its import takes longer than {_IMPORT_S:.0f} s"]) from None
    if done.returncode == 0:
        return f"model.py is imported by {python}"
    *_, last = done.stderr.strip().splitlines() or [f"the import ended with status {done.returncode}"]
    if last == "ModuleNotFoundError: No module named 'rsrv'":
        last = (
            f"{python} runs hooks, but has no rsrv. Run `rsrv triton install`, which makes a Python with rsrv"
        )
    raise BundleError([f"model.py: {last.removeprefix('rsrv.hooks.loader.HookError: model.py: ')}"])


def _check_one(bundle: Bundle, read_signature: SignatureReader | None) -> str:
    """Return a summary of a valid bundle. Raises BundleError with the problems of all checks."""
    problems: list[str] = []
    if bundle.hooks is not None:
        try:
            check_hooks(bundle.hooks, bundle.manifest.kind)
        except BundleError as e:
            problems += e.problems
    sizes = sorted({size for _, size in bundle.modules})
    if read_signature is not None and bundle.modules:
        try:
            sizes = sorted({size for _, size in check_signatures(bundle, read_signature)})
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
        parts.append(f"{counted(len(bundle.weights), 'weight')}, {bundle.weight_bytes} bytes")
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
