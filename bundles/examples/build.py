"""Build the example bundles: `python bundles/examples/build.py -o OUT_DIR [NAME...]`.

A bundle whose maker has not changed since it was built is left alone, and then nothing heavy is imported.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

NAMES = (
    "detector",
    "detector_backbone",
    "detector_head",
    "digits",
    "minilm",
    "minilm_encoder",
    "minilm_pool",
    "mlp",
    "two_sizes",
    "v2_affine",
)

_HERE = Path(__file__).resolve().parent
#: In the output directory: for each bundle, what it was built from.
_STAMPS = ".built"


def build(out_dir: Path, names: Sequence[str] = NAMES) -> None:
    """Build the named examples below `out_dir`, skipping those that are up to date. Prints a line for each."""
    stamps = out_dir / _STAMPS
    stamps.mkdir(parents=True, exist_ok=True)
    for name in names:
        digest = _source_digest(name)
        stamp = stamps / name
        if (
            stamp.is_file()
            and stamp.read_text(encoding="utf-8") == digest
            and (out_dir / name / "manifest.yaml").is_file()
        ):
            print(f"{name}: up to date", flush=True)
            continue
        print(f"{name}: building ...", flush=True)
        started = time.perf_counter()
        stamp.unlink(missing_ok=True)
        _maker(name).make(out_dir / name)
        stamp.write_text(digest, encoding="utf-8")
        print(f"{name}: built in {time.perf_counter() - started:.1f} s", flush=True)


def _maker(name: str) -> Any:
    # As a script, this file's own folder is on the path, but the package it belongs to is not.
    if str(_HERE.parent) not in sys.path:
        sys.path.insert(0, str(_HERE.parent))
    return importlib.import_module(f"examples.{name}")


def _source_digest(name: str) -> str:
    """One hash over everything that decides a bundle's bytes: the maker, the format package, jax's version.

    Makers whose names start with the same word may use each other.
    """
    family = name.partition("_")[0]
    sources = sorted([*_HERE.glob(f"{family}*.py"), *(_HERE.parent / "rsrv_bundle").glob("*.py")])
    total = hashlib.sha256(f"jax {metadata.version('jax')}".encode())
    for source in sources:
        total.update(f"\n{source.name} {hashlib.sha256(source.read_bytes()).hexdigest()}".encode())
    return total.hexdigest()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code."""
    parser = argparse.ArgumentParser(description="Build the example bundles.")
    parser.add_argument("-o", "--out-dir", type=Path, required=True, help="where the bundles go")
    parser.add_argument(
        "names", metavar="NAME", nargs="*", help=f"which to build: {' '.join(NAMES)} (default: all)"
    )
    arguments = parser.parse_args(argv)
    unknown = [name for name in arguments.names if name not in NAMES]
    if unknown:
        parser.error(f"no example '{unknown[0]}'; there are {', '.join(NAMES)}")
    build(arguments.out_dir, arguments.names or NAMES)
    return 0


if __name__ == "__main__":
    sys.exit(main())
