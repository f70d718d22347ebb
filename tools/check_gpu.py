"""Compile the example and the golden bundles for GPUs, without a GPU, and compare the results with the recorded figures.

    python tools/check_gpu.py              # the largest module of each bundle, for all cards
    python tools/check_gpu.py --cards t4   # for some
    python tools/check_gpu.py --renew      # record the figures in docs/compiled-for-gpus.csv
    python tools/check_gpu.py --narrow     # record figures of narrow weights in docs/narrowed-for-gpus.csv; takes half an hour

It needs jax's CUDA plugin and ptxas (`make check-gpu` installs them). Nothing is executed or tuned. The PTX of the compiler's
own kernels shows what they multiply in TF32. The calls of cuBLAS and cuDNN contain a precision, but this script cannot see what
the library does with it.
"""

from __future__ import annotations

import argparse
import csv
import difflib
import hashlib
import math
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import astuple, dataclass, fields
from functools import cache
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path

from rsrv import progress
from rsrv.cards import CARDS
from rsrv.runtime.device import Hardware
from rsrv.runtime.jax_compiler import LIBRARY_PRODUCTS, AheadCompiler
from rsrv.runtime.numerics import treatment
from rsrv.settings import Numerics
from rsrv_bundle.dtypes import itemsize
from rsrv_bundle.modules import signature_of
from rsrv_bundle.narrow import chosen, rewritten
from rsrv_bundle.narrowing import KEEP, WeightTypes
from rsrv_bundle.precision import treat
from rsrv_bundle.reader import read_bundle
from scheduler_page import DOCS

ROOT = Path(__file__).resolve().parent.parent
FIGURES = DOCS / "compiled-for-gpus.csv"
#: File with the figures of the modules with narrow weights.
NARROW_FIGURES = DOCS / "narrowed-for-gpus.csv"
NARROW_HEADER = "bundle,weights,compute,card,untiled,arguments,temporaries,kernels"
NARROWED = ("minilm_encoder", "mlp", "resnet18", "vit_tiny")
#: Cards that the narrow modules are compiled for.
NARROW_CARDS = ("a100", "h100", "l4")
#: Policies that differ. `tf32` compiles to the same code as `auto`.
POLICIES: tuple[Numerics, ...] = ("auto", "f32")
#: An instruction that multiplies matrices on tensor cores.
_MATRIX = re.compile(r"\b(?:wgmma|mma|tcgen05)\.[\w.:]*")
#: A call of cuBLAS or cuDNN with a result of f32 or of complex numbers of f32.
_LIBRARY = re.compile(r"= \(?(?:f32|c64)\[.*custom_call_target=\"__cu(?:blas|dnn).*")


@dataclass(frozen=True, order=True)
class Figures:
    """Figures of one module as compiled for one card under one `runtime.numerics`: a row of the file."""

    module: str
    card: str
    numerics: str
    #: 1 if XLA, which cannot tune without a card, finds no tile sizes for a product. cuBLAS then computes all products. Else 0.
    untiled: int
    #: Bytes of intermediate results, without the workspace of cuDNN.
    temporaries: int
    kernels: int
    #: Number of instructions that multiply in TF32, in all kernels.
    tf32: int
    #: Number of products of f32 that a library computes without a fixed precision.
    library: int
    #: Number of products of f32 that a library computes with the precision pinned to f32.
    library_f32: int

    @property
    def key(self) -> tuple[str, str, str]:
        return self.module, self.card, self.numerics

    @property
    def line(self) -> str:
        return ",".join(map(str, astuple(self)))


HEADER = ",".join(field.name for field in fields(Figures))


def modules() -> dict[str, Path]:
    """Return the largest module of each bundle by BUNDLE/MODULE. Of identical modules, only the first is returned."""
    files = (*sorted(ROOT.glob("build/bundles/*/*.mlir")), *sorted(ROOT.glob("tests/golden/*/*/*/*.mlir")))
    largest: dict[Path, Path] = {}
    for file in files:
        largest[file.parent] = max(largest.get(file.parent, file), file, key=_order)
    by_digest: dict[bytes, tuple[str, Path]] = {}
    for folder, file in largest.items():
        name = file.stem.removeprefix("model").removeprefix(".") or "only"
        by_digest.setdefault(hashlib.sha256(file.read_bytes()).digest(), (f"{folder.name}/{name}", file))
    return dict(by_digest.values())


def _order(file: Path) -> list[int]:
    """Return the variant and the batch size of model.v1.b16.mlir, as numbers."""
    return [int(number) for number in re.findall(r"\d+", file.stem)]


def _start(folder: str) -> None:
    """Set the environment of a process of the pool. XLA reads its flags once, at the process's first compilation."""
    os.environ["XLA_FLAGS"] = f"--xla_dump_to={_dump(folder)}"
    # Hide the plugin's log lines about its start.
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"


def _dump(folder: str) -> Path:
    return Path(folder, str(os.getpid()))


@cache
def _compiler(card: str) -> AheadCompiler:
    return AheadCompiler(CARDS[card].target())


def _compile(folder: str, label: str, file: Path, card: str, policies: Sequence[Numerics]) -> list[Figures]:
    """Compile a module for a card under each policy. This runs in a process of the pool."""
    blob = file.read_bytes()
    signature = signature_of(blob, file.name)
    hardware = Hardware("cuda", CARDS[card].capability)
    measured: dict[bytes, tuple[int, ...]] = {}
    rows = []
    for numerics in policies:
        module, _ = treat(blob, file.name, treatment(numerics, hardware), signature.precision)
        if module not in measured:
            shutil.rmtree(_dump(folder), ignore_errors=True)
            compiler, untiled = _compiler(card), 0
            try:
                compiled = compiler.compile(module, signature)
            except RuntimeError as error:
                if "Couldn't find output tile sizes" not in str(error):
                    raise
                shutil.rmtree(_dump(folder))
                compiled, untiled = compiler.compile(module, signature, LIBRARY_PRODUCTS), 1
            code = "".join(path.read_text() for path in _dump(folder).glob("*.ptx"))
            calls = _LIBRARY.findall(compiled.as_text())
            pinned = sum("highest" in call.lower() for call in calls)
            measured[module] = (
                untiled,
                compiled.memory_analysis().temp_size_in_bytes,
                code.count(".entry"),
                sum(".tf32" in instruction for instruction in _MATRIX.findall(code)),
                len(calls) - pinned,
                pinned,
            )
        rows.append(Figures(label, card, numerics, *measured[module]))
    return rows


def compile_all(
    files: Mapping[str, Path], cards: Sequence[str], policies: Sequence[Numerics] = POLICIES
) -> list[Figures]:
    """Compile each module for each card, on all cores. Raises the first error, with the module and the card."""
    every: list[Figures] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        # A fork would inherit jax's threads.
        ProcessPoolExecutor(os.cpu_count(), get_context("spawn"), _start, (folder,)) as pool,
        progress.steps("check-gpu", len(files) * len(cards)) as bar,
    ):
        waiting = {
            pool.submit(_compile, folder, label, file, card, policies): f"{label} for {card}"
            for label, file in files.items()
            for card in cards
        }
        for done in as_completed(waiting):
            try:
                every += done.result()
            except Exception as error:
                pool.shutdown(wait=False, cancel_futures=True)
                raise SystemExit(f"{waiting[done]}: {type(error).__name__}: {error}") from error
            bar.step(waiting[done])
    return sorted(every)


def narrow_modules(folder: Path) -> dict[str, Path]:
    """Write the largest modules of some bundles with narrow weights and half-precision products.

    Return the files by the text "BUNDLE WEIGHTS COMPUTE".
    """
    files = {}
    for name in NARROWED:
        bundle = read_bundle(ROOT / "build" / "bundles" / name, digest=False)
        file = max(bundle.modules.values(), key=_order)
        for weights in (KEEP, "bf16", "f8_e4m3", "i8"):
            tensors = chosen(bundle, WeightTypes.parse(weights))
            for compute in (None, "bf16", "f16") if weights != "bf16" else (None, "bf16"):
                label = f"{name} {'f32' if weights == KEEP else weights} {compute or 'f32'}"
                files[label] = folder / f"{label}.mlir"
                files[label].write_bytes(rewritten(bundle, file, tensors, compute))
    return files


def write_narrow(cards: Sequence[str]) -> str:
    """Compile narrow modules for each card. Return the content of the file with their figures."""
    with tempfile.TemporaryDirectory() as folder:
        files = narrow_modules(Path(folder))
        rows_of_files = compile_all(files, cards, ("auto",))
        taken = {
            label: sum(math.prod(shape) * itemsize(dtype) for dtype, shape in signature.inputs)
            for label, file in files.items()
            if (signature := signature_of(file.read_bytes(), file.name))
        }
    rows = [
        f"{row.module.replace(' ', ',')},{row.card},{row.untiled},{taken[row.module]},{row.temporaries},{row.kernels}"
        for row in rows_of_files
    ]
    return "\n".join((versions(), NARROW_HEADER, *rows, ""))


def faults(figures: Iterable[Figures]) -> Iterator[str]:
    """Yield a line for each row that shows a wrong precision."""
    for row in figures:
        if row.numerics == "f32" and (row.tf32 or row.library):
            yield f"{row.line}: runtime.numerics is f32, and a product of f32 is not pinned to it"
        if row.tf32 and CARDS[row.card].tf32_rate is None:
            yield f"{row.line}: this card has no TF32"


def versions() -> str:
    """Return the first line of the file with the figures: the versions of jax, its plugin and ptxas."""
    parts = (f"{name} {version(name)}" for name in ("jax", "jax-cuda13-plugin", "nvidia-cuda-nvcc"))
    return "# " + ", ".join(parts)


def write(head: str, figures: Sequence[Figures]) -> str:
    """Return the content of the file. Its first line is `head`."""
    return "\n".join((head, HEADER, *(row.line for row in figures), ""))


def read(text: str) -> list[Figures]:
    """Return the rows of a file."""
    return [
        Figures(module, card, numerics, *map(int, counts))
        for module, card, numerics, *counts in csv.reader(text.splitlines()[2:])
    ]


def differences(recorded: str, head: str, rows: Sequence[Figures]) -> list[str]:
    """Return the lines of a diff between the recorded file and the new one. Modules that were not compiled are left out."""
    keys = {row.key for row in rows}
    first = recorded.partition("\n")[0]
    old = [first, HEADER, *(row.line for row in read(recorded) if row.key in keys)]
    new = write(head, rows).splitlines()
    # The first line has only the versions. They can explain a difference, but other versions are not a difference.
    if old[1:] == new[1:]:
        return []
    return list(difflib.unified_diff(old, new, "recorded", "now", n=0, lineterm=""))


def main() -> int:
    """Compile, compare or record. Returns 1 if the figures differ from the recorded ones."""
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--renew", action="store_true", help="record the figures")
    top.add_argument("--cards", nargs="+", choices=sorted(CARDS), default=sorted(CARDS))
    top.add_argument("--narrow", action="store_true", help="record the figures of narrow weights")
    options = top.parse_args()
    if options.narrow:
        NARROW_FIGURES.write_text(write_narrow(NARROW_CARDS), encoding="utf-8")
        return 0
    figures = compile_all(modules(), sorted(CARDS) if options.renew else options.cards)
    wrong = list(faults(figures))
    if options.renew and not wrong:
        FIGURES.write_text(write(versions(), figures), encoding="utf-8")
    else:
        wrong += differences(FIGURES.read_text(encoding="utf-8"), versions(), figures)
    print("\n".join(wrong) or f"{len(figures)} compilations are as recorded in {FIGURES.relative_to(ROOT)}")
    if wrong:
        print("If the new figures are right, record them: make check-gpu CHECK=--renew", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
