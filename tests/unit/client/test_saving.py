"""Answers on disk: after any interruption, no row is lost, wrong or duplicated."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rsrv.client import InputError, Outputs
from rsrv.client.client import Answered
from rsrv.client.saving import PartialFile, outputs_of, write
from rsrv.client.signature import ModelSignature, ModelTensor
from tests.unit.client.fake_server import CONFIG

SIGNATURE = ModelSignature.from_config(
    {**CONFIG, "output": [{"name": "y", "data_type": "TYPE_INT16", "dims": [2, -1]}]}
)
Y_ONLY = list(SIGNATURE.outputs.values())
JOB = {"model": "m", "input": ["in.npy", 1, 2]}
ROWS = 100
Y = np.arange(ROWS * 6, dtype=np.int16).reshape(ROWS, 2, 3)


def answered(start: int, stop: int, **arrays: Any) -> Answered:
    return Answered(start, stop, Outputs({"y": Y[start:stop], **arrays}, SIGNATURE))


@pytest.mark.parametrize("seed", range(5))
def test_a_run_that_is_cut_anywhere_goes_on(tmp_path: Path, seed: int) -> None:
    """If the file is cut at any byte after each run, further runs continue until it has all rows."""
    chance = random.Random(seed)
    path, out = tmp_path / "out.npy.partial", tmp_path / "out.npy"
    runs = 0
    while True:
        runs += 1
        with PartialFile(path, JOB, Y_ONLY, resume=True) as partial:
            if partial.rows == ROWS:
                write(partial, out)
                break
            for start in range(partial.rows, min(partial.rows + 28, ROWS), 7):
                partial.append(answered(start, min(start + 7, ROWS)))
        size = path.stat().st_size
        with path.open("r+b") as file:
            file.truncate(size - chance.choice([0, 0, chance.randrange(200)]))
    np.testing.assert_array_equal(np.load(out), Y)
    assert runs > 3
    assert list(tmp_path.iterdir()) == [out]


def test_another_run_is_not_mixed_in(tmp_path: Path) -> None:
    """The answers of an earlier run are not used without --resume, nor for another model or another data file."""
    path = tmp_path / "out.npy.partial"
    PartialFile(path, JOB, Y_ONLY, resume=False).__exit__()
    with pytest.raises(InputError, match="continue it with --resume"):
        PartialFile(path, JOB, Y_ONLY, resume=False)
    with pytest.raises(InputError, match="whose input differs"):
        PartialFile(path, {**JOB, "input": ["in.npy", 1, 3]}, Y_ONLY, resume=True)


def test_a_file_that_is_in_use_or_of_others_is_left_alone(tmp_path: Path) -> None:
    """A file that another run uses is refused. --resume does not replace a file that rsrv map has not written."""
    path = tmp_path / "out.partial"
    with (
        PartialFile(path, JOB, Y_ONLY, resume=True),
        pytest.raises(InputError, match="another process is writing this file"),
    ):
        PartialFile(path, JOB, Y_ONLY, resume=True)
    for content in (b"half a download", b"\x00\xff\n[1]\n", b"[1]\n"):
        path.write_bytes(content)
        with pytest.raises(InputError, match="was not written by rsrv map"):
            PartialFile(path, JOB, Y_ONLY, resume=True)
        assert path.read_bytes() == content


def test_a_record_that_cannot_be_read_is_sent_again(tmp_path: Path) -> None:
    """A record that is damaged, as after a power cut, is dropped, and its rows are sent again."""
    path = tmp_path / "out.partial"
    with PartialFile(path, JOB, Y_ONLY, resume=True) as partial:
        partial.append(answered(0, 50))
    with path.open("ab") as file:
        file.write(b"\x00\x00\n\x00")
    with PartialFile(path, JOB, Y_ONLY, resume=True) as partial:
        assert partial.rows == 50


@pytest.mark.parametrize(
    ("out", "names", "error"),
    [
        ("out.csv", [], "expected a file .npy or .parquet"),
        ("out.npy", ["z"], "m has no output 'z'; its outputs: y, text"),
        ("out.npy", [], "holds one output; choose one with --output: y, text"),
        ("out.npy", ["text"], "the output text has strings"),
    ],
)
def test_files_that_cannot_hold_the_outputs_are_refused_first(out: str, names: list[str], error: str) -> None:
    """If the file's format cannot hold the outputs, the error comes before any request."""
    more = {"name": "text", "data_type": "TYPE_STRING", "dims": [1]}
    signature = ModelSignature.from_config({**CONFIG, "output": [*CONFIG["output"], more]})
    with pytest.raises(InputError, match=error):
        outputs_of(signature, Path(out), names)


def test_rows_of_several_shapes_keep_the_answers(tmp_path: Path) -> None:
    """A .npy file cannot hold rows of several shapes. The error names .parquet, and the answers so far are kept."""
    with PartialFile(tmp_path / "out.npy.partial", JOB, Y_ONLY, resume=False) as partial:
        partial.append(answered(0, 50))
        partial.append(answered(50, 100, y=Y[50:, :, :1]))
        with pytest.raises(InputError, match=r"several shapes.*write .parquet"):
            write(partial, tmp_path / "out.npy")
        assert partial.rows == ROWS


def test_a_parquet_file_has_numbers_lists_and_strings(tmp_path: Path) -> None:
    """In a parquet file, rows of one number are numbers and other rows are lists. Strings are texts, or bytes if they are not UTF-8."""
    parquet = pytest.importorskip("pyarrow.parquet", reason="the extra parquet is not installed")
    arrays = {
        "score": np.arange(ROWS, dtype=np.float32)[:, None],
        "half": np.ones((ROWS, 1), ml_dtypes.bfloat16),
        "text": np.array([[f"ä{n}".encode()] for n in range(ROWS)], object),
        "raw": np.array([[b"\xff"]] * ROWS, object),
        "odd": np.arange(ROWS * 2).reshape(ROWS, 2),
    }
    types = {"score": "FP32", "half": "BF16", "text": "BYTES", "raw": "BYTES", "odd": "INT64"}
    specs = [ModelTensor(name, datatype, (-1,)) for name, datatype in types.items()]
    out = tmp_path / "out.parquet"
    with PartialFile(tmp_path / "partial", JOB, [*Y_ONLY, *specs], resume=False) as partial:
        for start, stop in ((0, 60), (60, 100)):
            part = {name: array[start:stop] for name, array in arrays.items()}
            partial.append(answered(start, stop, **part))
        write(partial, out)
    table = parquet.read_table(out).to_pydict()
    assert table["y"] == Y.tolist()
    assert table["score"] == list(range(ROWS))
    assert table["half"] == [1.0] * ROWS
    assert table["text"] == [f"ä{n}" for n in range(ROWS)]
    assert table["raw"] == [b"\xff"] * ROWS
    assert table["odd"] == arrays["odd"].tolist()
