"""Build the example bundles: `python bundles/examples/build.py -o OUT_DIR [NAME...]`.

Bundles whose sources and package versions have not changed are not built again. If no bundle is built, neither jax nor a
framework is imported.
"""

from __future__ import annotations

import argparse
import ast
import functools
import hashlib
import importlib
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

#: Bundles that `make test` needs. They are built in seconds, without training.
UNTRAINED = ("mlp", "two_sizes", "v2_affine")
DETECTOR = ("detector", "detector_backbone", "detector_head")
MINILM = ("minilm", "minilm_encoder", "minilm_pool")
#: Bundles that answer within milliseconds.
SMALL = (*UNTRAINED, *DETECTOR, *MINILM, "digits")
#: Bundles with real architectures, each with a README.
MODELS = (
    "family_half",
    "family_large",
    "family_loop",
    "family_odd",
    "family_prime",
    "family_rest",
    "family_square",
    "family_zero",
    "fno_f32",
    "fno_f64",
    "resnet18",
    "unet",
    "vit_tiny",
)
#: Small bundles with a state for each sequence.
STATEFUL = ("forecast", "glossary", "glossary_bytes", "tagger")
NAMES = (*SMALL, *MODELS, *STATEFUL)
#: Bundles of half a gigabyte, which are built only if they are named.
LARGE = ("smollm2",)

#: Files other than Python sources from which bundles are built, by the first word of the bundle's name.
_FILES = {"glossary": (Path(__file__).resolve().parents[2] / "LICENSE",)}
#: Packages in addition to jax whose versions decide a bundle's bytes, by the first word of the bundle's name.
_PACKAGES = {
    "digits": ("scikit-learn",),
    "family": ("scikit-learn",),
    "fno": ("optax",),
    "resnet18": ("torch", "torchax"),
    "smollm2": ("gguf",),
    "unet": ("equinox", "optax"),
    "vit": ("flax",),
}

_HERE = Path(__file__).resolve().parent
_HOOKS = _HERE.parents[1] / "triton_backend" / "rsrv" / "hooks"
#: File in the output directory with a digest of each bundle's sources.
_STAMPS = ".built"


def build(out_dir: Path, names: Sequence[str] = NAMES) -> None:
    """Build the named examples below `out_dir`, except examples that are up to date. Prints a line for each example."""
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
    # If this file runs as a script, its own folder is on the path, but its package is not.
    if str(_HERE.parent) not in sys.path:
        sys.path.insert(0, str(_HERE.parent))
    word = _word(name)
    return importlib.import_module(f"examples.{word if (_HERE / word).is_dir() else name}")


def _word(name: str) -> str:
    """Return the first word of a bundle's name.

    Bundles with the same first word share their sources. If there is a folder of that name, it makes all these bundles.
    """
    return name.partition("_")[0]


def _source_digest(name: str) -> str:
    """Return one hash over everything that decides a bundle's bytes: sources and versions of packages.

    Raises PackageNotFoundError if one of these packages is not installed.
    """
    packages = ("jax", *_PACKAGES.get(_word(name), ()))
    total = hashlib.sha256(
        " ".join(f"{package} {metadata.version(package)}" for package in packages).encode()
    )
    for source in sorted(_sources(name)):
        total.update(f"\n{source.name} {hashlib.sha256(source.read_bytes()).hexdigest()}".encode())
    return total.hexdigest()


def _sources(name: str) -> set[Path]:
    """Return the files that decide a bundle's bytes.

    These are the maker with the examples that it imports, the format package without its command line, and the library for hooks,
    which also makes training data.
    """
    word = _word(name)
    makers: set[Path] = set()
    waiting = [*_HERE.glob(f"{word}*.py"), *_HERE.glob(f"{word}/*.py")]
    while waiting:
        maker = waiting.pop()
        if maker not in makers:
            makers.add(maker)
            waiting += _imported(maker)
    package = _HERE.parent / "rsrv_bundle"
    commands = {package / "cli.py", *(package / "commands").rglob("*.py")}
    return {*makers, *_FILES.get(word, ()), *package.rglob("*.py"), *_HOOKS.glob("*.py")} - commands


@functools.cache
def _imported(source: Path) -> list[Path]:
    """Return the examples that a source imports."""
    names: list[str] = []
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("examples"):
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    files = [_HERE.parent.joinpath(*name.split(".")) for name in names]
    return [
        path for file in files for path in (file.with_suffix(".py"), file / "__init__.py") if path.is_file()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code."""
    parser = argparse.ArgumentParser(description="Build the example bundles.")
    parser.add_argument("-o", "--out-dir", type=Path, required=True, help="where the bundles go")
    parser.add_argument(
        "names",
        metavar="NAME",
        nargs="*",
        help=f"which to build: {' '.join(NAMES)} (default: these), {' '.join(LARGE)}",
    )
    arguments = parser.parse_args(argv)
    unknown = [name for name in arguments.names if name not in NAMES + LARGE]
    if unknown:
        parser.error(f"no example '{unknown[0]}'; there are {', '.join(NAMES + LARGE)}")
    try:
        build(arguments.out_dir, arguments.names or NAMES)
    except metadata.PackageNotFoundError as error:
        print(
            f"{error.name}, which examples are made with, is missing: run `make bundles`, which installs it",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
