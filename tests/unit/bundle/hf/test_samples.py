"""Samples of the user, on which a bundle's answers are compared with the framework's."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from rsrv_bundle import BundleError
from rsrv_bundle.hf.recipe import row
from rsrv_bundle.hf.samples import read_samples


def recipe(*inputs: str, picture_size: tuple[int, int] | None = None) -> Any:
    return SimpleNamespace(inputs=inputs, picture_size=picture_size)


def test_each_line_is_a_text(tmp_path: Path) -> None:
    """Each line of a file is a sample. The name of a sample has the file and the number of the line. Empty lines are skipped."""
    (file := tmp_path / "texts.txt").write_text("one\n\ntwo\x0bwords\n", encoding="utf-8")
    samples = read_samples([file], recipe("text"))
    assert samples == {f"{file}:1": row(text="one"), f"{file}:3": row(text="two\x0bwords")}


def test_a_tab_is_between_a_query_and_its_document(tmp_path: Path) -> None:
    """A ranking needs two texts, which a tab separates. A line without a tab is an error."""
    (file := tmp_path / "pairs.tsv").write_text("a query\ta document\twith a tab\n")
    samples = read_samples([file], recipe("text", "text_pair"))
    assert samples == {f"{file}:1": row(text="a query", text_pair="a document\twith a tab")}
    file.write_text("no pair\n")
    with pytest.raises(BundleError, match=r"pairs\.tsv:1: has no tab; write a query, a tab"):
        read_samples([file], recipe("text", "text_pair"))


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"\n \n", "has no text; write one sample per line"), (b"a\xff", "is not text in UTF-8")],
)
def test_a_file_without_texts_is_refused(content: bytes, reason: str, tmp_path: Path) -> None:
    """A file without any text is refused, because comparing nothing would look like an agreement.

    A file that is not UTF-8 is also refused.
    """
    (file := tmp_path / "texts.txt").write_bytes(content)
    with pytest.raises(BundleError, match=reason):
        read_samples([file], recipe("text"))


def test_pictures_and_sounds_are_whole_files(tmp_path: Path) -> None:
    """Each file is a sample, with the bytes that a client would send."""
    (file := tmp_path / "one.wav").write_bytes(b"RIFF")
    assert read_samples([file], recipe("audio")) == {str(file): row(audio=b"RIFF")}


def test_pictures_get_the_size_of_a_map(tmp_path: Path) -> None:
    """For a model with maps, pictures are scaled to the network's size first, because a pipeline scales maps to the picture."""
    Image.new("L", (50, 30)).save(tmp_path / "one.png")
    (request,) = read_samples([tmp_path / "one.png"], recipe("image", picture_size=(16, 24))).values()
    assert Image.open(io.BytesIO(request["image"][0, 0])).size == (24, 16)
    (tmp_path / "no.png").write_bytes(b"text")
    with pytest.raises(BundleError, match=r"no\.png: is not a picture that Pillow can read"):
        read_samples([tmp_path / "no.png"], recipe("image", picture_size=(16, 24)))
