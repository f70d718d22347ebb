"""Narrow the examples that have trained weights, measure how well they do their tasks, and write docs/narrowed-examples.csv.

    PYTHONPATH=tools python -m tests.examples.narrowed

Each figure is measured on data that the example was not trained with. The bounds of `rsrv-bundle narrow` are lifted, so that each
type of weights has a figure.
"""

from __future__ import annotations

import csv
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

import example_bundles
from examples import digits, family, fno, unet
from examples.build import DETECTOR, MINILM
from examples.detector import held_out
from examples.detector_scenes import recall_and_precision
from rsrv_bundle import read_bundle
from rsrv_bundle.narrow import narrow_into
from rsrv_bundle.narrowing import TASK_BOUNDS, TYPES
from rsrv_bundle.numerics import ModuleRunner
from tests.examples.built import Array, Model
from tests.examples.smollm2_directory import prompts
from tests.examples.test_detector import Detector
from tests.examples.test_minilm import Pipeline

TABLE = Path(__file__).resolve().parents[2] / "docs" / "narrowed-examples.csv"
TITLES = ("example", "weights", "bytes", "figure", "value")
#: Number of rows in one execution.
_ROWS = 32
#: A bound that no error exceeds.
_LOOSE = 1e9


class Example(NamedTuple):
    """An example, and the figure that shows how well it does its task."""

    name: str
    #: Bundles of the example. Bundles without large weights stay as they are.
    bundles: tuple[str, ...]
    #: Description of the figure, for the table.
    figure: str
    #: Returns the figure of the bundles in a folder. The second folder has the wide bundles.
    measure: Callable[[Path, Path], float]


def _answers(folder: Path, name: str, values: Array) -> Array:
    """Return the only output of a bundle for the rows of its only input."""
    model = Model(folder / name)
    [input_spec], [output_spec] = model.bundle.manifest.inputs, model.bundle.manifest.outputs
    parts = np.split(values, range(_ROWS, len(values), _ROWS))
    return np.concatenate([model({input_spec.name: part})[output_spec.name] for part in parts])


def _accuracy(folder: Path, name: str, images: Array, labels: Array) -> float:
    """Return the share of images whose best class is the label."""
    return float((_answers(folder, name, images).argmax(1) == labels).mean())


def _digits(folder: Path, _: Path) -> float:
    return _accuracy(folder, "digits", *digits.held_out())


def _family(folder: Path, _: Path) -> float:
    return _accuracy(folder, "family_square", *family.held_out("family_square"))


def _unet(folder: Path, _: Path) -> float:
    known = unet.held_out()
    return unet.overlap(_answers(folder, "unet", known.images), known)


def _fno(folder: Path, _: Path) -> float:
    unseen, ends = fno.held_out()
    return fno.mean_error(_answers(folder, "fno_f32", unseen.astype(np.float32)), ends)


def _detector(folder: Path, _: Path) -> float:
    unseen = held_out()
    return min(recall_and_precision(unseen, Detector(folder)(unseen.images)))


def _minilm(folder: Path, wide: Path) -> float:
    texts = prompts()[::13]
    narrow, expected = (Pipeline(root, "minilm").run(texts) for root in (folder, wide))
    return float((narrow * expected).sum(1).min())


EXAMPLES = (
    Example("digits", ("digits",), "share of 360 images with the right digit", _digits),
    Example("family_square", ("family_square",), "share of 360 images with the right answer", _family),
    Example("unet", ("unet",), "intersection over union of the pixels of shapes in 32 images", _unet),
    Example("fno_f32", ("fno_f32",), "mean relative error of 200 solutions", _fno),
    Example("detector", DETECTOR, "smaller one of recall and precision in 200 images", _detector),
    Example("minilm", MINILM, "smallest cosine with the f32 embedding, 16 texts", _minilm),
)


def rows_of(example: Example, root: Path) -> Iterator[list[str]]:
    """Yield a row of the table for f32, and a row for each type of weights."""
    yield [example.name, "f32", *_measured(example, root, root)]
    for token in TYPES:
        with tempfile.TemporaryDirectory() as folder:
            for name in example.bundles:
                _narrow(root / name, Path(folder, name), token)
            yield [example.name, token, *_measured(example, Path(folder), root)]


def _narrow(source: Path, target: Path, token: str) -> None:
    """Write a bundle with narrow weights, or a copy of a bundle without weights to narrow."""
    bundle = read_bundle(source)
    if not any(len(weight.shape) > 1 for weight in bundle.weights):
        shutil.copytree(source, target)
        return
    outputs = (spec.dtype for spec in bundle.manifest.outputs)
    narrow_into(
        ModuleRunner(bundle), target, token, tolerance=dict.fromkeys((*outputs, *TASK_BOUNDS), _LOOSE)
    )


def _measured(example: Example, folder: Path, wide: Path) -> list[str]:
    """Return the last cells of a row: bytes of weights, description of the figure, and its value."""
    size = sum(read_bundle(folder / name).weight_bytes for name in example.bundles)
    return [str(size), example.figure, f"{example.measure(folder, wide):.5g}"]


def main() -> None:
    """Build the examples, and write the table."""
    root = example_bundles.ensure([name for example in EXAMPLES for name in example.bundles])
    with TABLE.open("w", newline="") as output:
        writer = csv.writer(output, lineterminator="\n")
        writer.writerow(TITLES)
        for example in EXAMPLES:
            for row in rows_of(example, root):
                print(*row, flush=True)
                writer.writerow(row)


if __name__ == "__main__":
    main()
