"""Messages of the commands about a path that is not a bundle."""

from pathlib import Path

import pytest

from rsrv_bundle.mistakes import mistaken, other_models
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
    """If a user names a file in place of a bundle, the message names its kind by its suffix, and says what to do."""
    (tmp_path / name).touch()

    assert mistaken(tmp_path / name).startswith(reason)


def test_a_folder_with_a_checkpoint_is_no_directory_of_bundles(tmp_path: Path) -> None:
    """A folder with a framework's checkpoint is refused as a directory of bundles. An empty folder is accepted."""
    assert mistaken(tmp_path) == ""

    (tmp_path / "net.pth").touch()

    assert mistaken(tmp_path).startswith("net.pth in it is a PyTorch checkpoint; ")


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer_config.json"])
def test_a_hugging_face_directory_is_served_with_a_flag(tmp_path: Path, file: str) -> None:
    """If a user forgets --hf, the message has the command, for the directory itself and for the folder above it."""
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
    """A Triton repository is recognised by its models' configurations, and is not taken for a directory of bundles."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.pbtxt").touch()

    assert mistaken(tmp_path).startswith(
        "this is a Triton model repository; name the directory of the bundles"
    )


def test_bundles_are_found_one_level_up_and_one_level_down(tmp_path: Path) -> None:
    """For a folder above a directory of bundles, the message names that directory.

    If a command needs one bundle and gets a directory of bundles, the message names one of them.
    """
    make_bundle(tmp_path / "bundles", name="cats")

    assert mistaken(tmp_path) == "the bundles are in its directory bundles; name that"
    assert mistaken(tmp_path / "bundles", single=True) == (
        f"this is a directory of bundles; name one of them, such as {tmp_path}/bundles/cats"
    )
    assert mistaken(tmp_path / "bundels") == "there is no such file or directory; did you mean 'bundles'?"


def test_models_among_the_bundles_are_named(tmp_path: Path) -> None:
    """A file, a Hugging Face directory and a folder with a file are named. Bundles, other files and hidden copies are not."""
    make_bundle(tmp_path, name="cats")
    (tmp_path / "cats" / "extra.onnx").touch()
    for path in (
        "cats.onnx",
        "old.onnx",
        "notes.txt",
        ".copy/a.onnx",
        "folder/model.onnx",
        "half/model.mlir",
        "half/weights.safetensors",
        "moods/config.json",
        "moods/model.safetensors",
    ):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).touch()

    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")

    folder, half, moods, old = other_models(tmp_path, ["cats"])

    assert folder.startswith(
        f"{tmp_path}/folder is not served, because it is not a bundle: model.onnx in it is an ONNX model; "
    )
    assert (
        half
        == f"{tmp_path}/half is not served, because it is a bundle without manifest.yaml; copy the whole bundle"
    )
    assert moods.startswith(f"{tmp_path}/moods is not served, because it is a Hugging Face directory; ")
    assert old.startswith(
        f"{tmp_path}/old.onnx is not served, because it is an ONNX model; export it first: "
    )
