"""The examples on the page of the library run as they are printed."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from rsrv.hooks.text import as_text, from_text
from tests.pages import ROOT, blocks

Arrays = dict[str, np.ndarray[Any, Any]]


@pytest.fixture
def example(tmp_path: Path) -> Callable[[str], dict[str, Any]]:
    """Return a function that executes the page's block with this text, beside its files, and returns its definitions."""
    page = (ROOT / "docs" / "hook-library.md").read_text(encoding="utf-8")
    first, *examples = ["\n".join(lines) for language, _, lines in blocks(page) if language == "python"]
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "hello": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "names.txt").write_text("\n".join(f"name {index}" for index in range(10)))

    def run(text: str) -> dict[str, Any]:
        (block,) = (each for each in examples if text in each)
        names = {"__file__": str(tmp_path / "model.py"), "np": np, "Path": Path}
        exec(f"{first}\n{block}", names)  # noqa: S102 - the page is ours
        return names

    return run


def files() -> Arrays:
    """Return two JPEG files with pictures of different sizes."""
    coded = []
    for size in ((300, 400), (900, 280)):
        stream = io.BytesIO()
        PIL.Image.new("RGB", size, (255, 0, 0)).save(stream, "JPEG")
        coded.append(stream.getvalue())
    return {"file": as_text(coded)}


def test_a_classifiers_pictures(example: Callable[[str], dict[str, Any]]) -> None:
    """The example of the classifier decodes, crops and normalises files."""
    pixels = example("resize_crop")["preprocess"](files())["image"]
    assert pixels.dtype == np.float32
    assert pixels.shape == (2, 3, 224, 224)
    assert pixels[:, 0].min() > 2
    assert pixels[:, 1].max() < -1.9


def test_a_detectors_boxes(example: Callable[[str], dict[str, Any]]) -> None:
    """The example of the detector reports one of two equal boxes, in the picture's pixels."""

    def call(name: str, inputs: Arrays) -> Arrays:
        assert inputs["image"].shape == (2, 3, 640, 640)
        # The first picture is 480 x 640 in the middle. The second is 640 x 199, with 220 rows of fill above and 221 below.
        halves = np.array([[320, 0, 560, 640], [320, 220, 640, 419]], np.float32)
        return {
            "boxes": np.repeat(halves[:, None], 2, 1),
            "scores": np.array([[0.5, 0.9]] * 2, np.float32),
            "classes": np.zeros((2, 2), np.int64),
        }

    outputs = example("letterbox")["run"](files(), call)
    assert outputs["count"].tolist() == [[1], [1]]
    np.testing.assert_allclose(outputs["boxes"][:, 0], [[150, 0, 300, 400], [450, 0, 900, 280]], atol=1e-3)


def test_a_classifiers_labels(example: Callable[[str], dict[str, Any]]) -> None:
    """The example of the labels returns the best five of ten classes with their names."""
    outputs = example("top_k")["postprocess"]({"logits": np.arange(20, dtype=np.float32).reshape(2, 10)})
    assert outputs["class"].tolist() == [[9, 8, 7, 6, 5]] * 2
    assert outputs["name"].shape == (2, 5, 32)
    assert from_text(outputs["name"][1]) == [f"name {index}" for index in (9, 8, 7, 6, 5)]


def test_a_text_models_tokens(example: Callable[[str], dict[str, Any]]) -> None:
    """The example of the tokeniser pads rows to the smallest length that fits."""
    outputs = example("Tokeniser")["preprocess"]({"text": as_text(["hello hello", "hello"])})
    assert outputs["input_ids"].shape == (2, 16)
    assert outputs["attention_mask"].sum(1).tolist() == [2, 1]
