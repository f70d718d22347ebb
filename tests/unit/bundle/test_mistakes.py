"""Messages of the commands about a path that is not a bundle."""

from pathlib import Path

import pytest

from rsrv_bundle.mistakes import mistaken
from tests.unit.bundle.forge import make_bundle


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("net.pt", "this is a PyTorch checkpoint; export it first: rsrv-bundle export --torch "),
        ("NET.ONNX", "this is an ONNX model; export it first: rsrv-bundle export --onnx "),
        ("weights.safetensors", "this is weights without a model; "),
        ("manifest.yaml", "this is a bundle's manifest; name its directory"),
        ("notes", "this is a file; name a bundle, which is a directory with manifest.yaml"),
    ],
)
def test_a_file_is_named_by_its_kind(tmp_path: Path, name: str, reason: str) -> None:
    """A file that a user takes for a bundle is named by its suffix, with what to do."""
    (tmp_path / name).touch()

    assert mistaken(tmp_path / name).startswith(reason)


def test_a_folder_with_a_checkpoint_is_no_directory_of_bundles(tmp_path: Path) -> None:
    """A folder with a model of a framework never gets bundles; an empty one may."""
    assert mistaken(tmp_path) == ""

    (tmp_path / "net.pth").touch()

    assert mistaken(tmp_path).startswith("net.pth in it is a PyTorch checkpoint; ")


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer_config.json"])
def test_a_hugging_face_directory_is_served_with_a_flag(tmp_path: Path, file: str) -> None:
    """A user who forgets --hf reads the command, for the directory itself and for the folder above it."""
    moods = tmp_path / "moods"
    moods.mkdir()
    (moods / "config.json").touch()
    assert mistaken(moods) == ""
    (moods / file).touch()

    assert mistaken(moods) == f"this is a Hugging Face directory; serve it with `rsrv serve --hf {moods}`"
    assert (
        mistaken(tmp_path)
        == f"moods in it is a Hugging Face directory; serve it with `rsrv serve --hf {moods}`"
    )


def test_a_generated_repository_is_not_generated_from(tmp_path: Path) -> None:
    """A Triton repository is told from a directory of bundles by its models' configurations."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.pbtxt").touch()

    assert mistaken(tmp_path).startswith(
        "this is a Triton model repository; name the directory of the bundles"
    )


def test_bundles_are_found_one_level_up_and_one_level_down(tmp_path: Path) -> None:
    """The folder above a directory of bundles names it; where one bundle is wanted, that directory names one."""
    make_bundle(tmp_path / "bundles", name="cats")

    assert mistaken(tmp_path) == "the bundles are in its directory bundles; name that"
    assert mistaken(tmp_path / "bundles", single=True) == (
        f"this is a directory of bundles; name one of them, such as {tmp_path}/bundles/cats"
    )
    assert mistaken(tmp_path / "bundels") == "there is no such file or directory; did you mean 'bundles'?"
