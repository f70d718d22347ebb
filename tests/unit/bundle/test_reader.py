"""The files of a bundle: required, optional and forbidden ones."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from rsrv_bundle import BundleError, find_bundles, read_bundle
from tests.unit.bundle.forge import GOOD, VARIANTS, changed, make_bundle, one_weight, problems_of, tensor

HOOKS = "def preprocess(inputs):\n    return inputs\n"
NO_SIZES = changed(GOOD, batching=None)
NO_BATCH = changed(GOOD, batching=None, executable_inputs=[tensor(shape="c", c=2)])


def test_reading_needs_nothing_heavy() -> None:
    """The reader imports no jax, safetensors or ml_dtypes, because the control process uses the reader."""
    code = "import sys, rsrv_bundle, rsrv_bundle.modules, rsrv_bundle.commands.checking; print(*sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not {"jax", "jaxlib", "safetensors", "ml_dtypes"} & set(output.split())


def test_a_good_bundle_is_read_whole(tmp_path: Path) -> None:
    """A valid bundle is read with its name, files, weights and digest."""
    bundle = read_bundle(make_bundle(tmp_path, weights=one_weight(), hooks=HOOKS))
    assert (bundle.name, bundle.path) == ("model_a", tmp_path / "model_a")
    assert set(bundle.modules) == {(0, 1), (0, 4)}
    assert bundle.hooks == tmp_path / "model_a" / "model.py"
    assert [weight.shape for weight in bundle.weights] == [(2, 3)]
    assert (bundle.weight_bytes, len(bundle.digest)) == (24, 64)
    assert bundle.output_names(3) == ("y", "output_1", "output_2")
    assert bundle.output_names(1) == ("y",)


def test_sizes_on_disk_that_are_not_declared_count_too(tmp_path: Path) -> None:
    """Modules are used even if the manifest does not declare their sizes. If there are such modules, `model.mlir` is ignored."""
    names = ["model.b1.mlir", "model.b4.mlir", "model.b8.mlir"]
    made = make_bundle(tmp_path, modules=names, files={"model.mlir": b"junk"})
    assert set(read_bundle(made).modules) == {(0, 1), (0, 4), (0, 8)}


def test_an_unsuffixed_module_alone_has_size_0(tmp_path: Path) -> None:
    """A single module without a size in its name has size 0, because the reader does not look for the size in the file."""
    bundle = read_bundle(make_bundle(tmp_path, modules=["model.mlir"]))
    assert {key: path.name for key, path in bundle.modules.items()} == {(0, 0): "model.mlir"}


def test_variants_have_their_own_prefix(tmp_path: Path) -> None:
    """Each variant has its own prefix `model.v{i}`, and other module files are ignored."""
    names = ["model.v0.mlir", "model.v1.b1.mlir", "model.v1.b4.mlir"]
    others = {"model.mlir": b"junk", "model.v7.mlir": b"junk"}
    made = make_bundle(tmp_path, VARIANTS, modules=names, files=others)
    assert set(read_bundle(made).modules) == {(0, 0), (1, 1), (1, 4)}


@pytest.mark.parametrize(
    ("manifest", "modules", "expected"),
    [
        (GOOD, ["model.b1.mlir"], "model.b4.mlir: is missing, but batching.compiled_batch_sizes declares 4"),
        (GOOD, [], "model.mlir: is missing, and there is no file for any batch size either"),
        (VARIANTS, ["model.b1.mlir", "model.v0.mlir"], "model.v1.mlir: is missing"),
        (NO_BATCH, ["model.b1.mlir", "model.b2.mlir"], "no executable input has a batch axis"),
        (NO_SIZES, ["model.b01.mlir", "model.mlir"], "model.b01.mlir: is not a module name"),
        (NO_SIZES, ["model.b0.mlir", "model.mlir"], "model.b0.mlir: is not a module name"),
        (NO_SIZES, ["model.b9999999999.mlir"], "batch sizes end at 2147483647"),
    ],
)
def test_missing_and_odd_modules_are_named(
    tmp_path: Path, manifest: dict[str, object], modules: list[str], expected: str
) -> None:
    """If a module is missing, or its name is wrong, the message names the file."""
    assert [
        line for line in problems_of(make_bundle(tmp_path, manifest, modules=modules)) if expected in line
    ]


def test_version_2_needs_a_weights_file_even_without_weights(tmp_path: Path) -> None:
    """Format 2.0 needs a weights file even without weights. In format 3 the file may be absent."""
    (line,) = problems_of(make_bundle(tmp_path, changed(GOOD, format_version="2.0")))
    assert line.startswith("weights.safetensors: is missing")
    assert read_bundle(make_bundle(tmp_path, name="b")).weights == ()


def test_julia_hooks_are_refused_with_the_way_out(tmp_path: Path) -> None:
    """Julia hooks are refused with one message, which names model.py as the replacement."""
    manifest = changed(GOOD, format_version="2.0", client_inputs=[tensor(c=1)])
    made = make_bundle(tmp_path, manifest, weights=one_weight(), files={"model.jl": b""})
    (line,) = problems_of(made)
    assert line.startswith("model.jl: ")
    assert "model.py" in line


@pytest.mark.parametrize("name", [".hidden", "a b", "ä", "a:b"])
def test_names_that_triton_cannot_take_are_refused(tmp_path: Path, name: str) -> None:
    """A directory name that is not a valid Triton model name is refused."""
    assert any("directory name is letters" in line for line in problems_of(make_bundle(tmp_path, name=name)))


def test_a_directory_that_is_not_there_is_said_to_be_missing(tmp_path: Path) -> None:
    """A missing directory, and a file in its place, are reported as missing."""
    (tmp_path / "file").touch()
    for name in ("nothing", "file"):
        with pytest.raises(BundleError, match="there is no such directory"):
            read_bundle(tmp_path / name)


def test_a_bundle_that_was_moved_into_its_predecessor_is_reported(tmp_path: Path) -> None:
    """If `old` exists, `mv new old` moves `new` into `old`. The reader reports this, because `old` is still the old model."""
    made = make_bundle(tmp_path, name="cats")
    make_bundle(tmp_path, name="new").rename(made / ".cats.new")
    (line,) = problems_of(made)
    assert line.startswith(".cats.new: is a bundle inside this bundle.")
    assert "Rename cats to a name that starts with '.'" in line


def test_a_file_for_hooks_may_be_called_manifest_yaml(tmp_path: Path) -> None:
    """A bundle may contain a folder with a file manifest.yaml. Without a bundle's other files, this folder is not a bundle."""
    made = make_bundle(tmp_path)
    (made / "images").mkdir()
    (made / "images" / "manifest.yaml").touch()
    assert read_bundle(made).name == made.name


def test_a_directory_without_a_manifest_is_no_bundle(tmp_path: Path) -> None:
    """A directory without a manifest is refused by the reader and skipped by the search."""
    (tmp_path / "empty").mkdir()
    make_bundle(tmp_path)
    make_bundle(tmp_path, name=".tmp")
    with pytest.raises(BundleError, match=r"manifest\.yaml: is missing"):
        read_bundle(tmp_path / "empty")
    assert find_bundles(tmp_path) == [tmp_path / "model_a"]


def test_an_entry_that_cannot_be_looked_into_hides_no_other(tmp_path: Path) -> None:
    """An unreadable entry is listed with the others, and reading it fails with its reason. lost+found is skipped."""
    make_bundle(tmp_path)
    make_bundle(tmp_path, name="lost+found")
    (tmp_path / "odd").symlink_to("x" * 300)
    assert find_bundles(tmp_path) == [tmp_path / "model_a", tmp_path / "odd"]
    with pytest.raises(OSError, match="name too long"):
        read_bundle(tmp_path / "odd")


def test_links_may_not_leave_the_bundle(tmp_path: Path) -> None:
    """Links that leave the bundle are refused: they could serve any file of the machine as weights."""
    made = make_bundle(tmp_path)
    (tmp_path / "secret").write_bytes(b"s")
    (made / "out").symlink_to(tmp_path / "secret")
    (made / "dangling").symlink_to(made / "nothing")
    (made / "loop").symlink_to(made / "loop")
    (made / "folder").symlink_to(made)
    (made / "inside").symlink_to("model.b1.mlir")
    lines = problems_of(made)
    assert [line.partition(":")[0] for line in sorted(lines)] == ["dangling", "folder", "loop", "out"]


def test_a_link_to_the_bundle_itself_is_fine(tmp_path: Path) -> None:
    """A bundle may be a link to a directory, as for versions of a model."""
    made = make_bundle(tmp_path, name="model_v7")
    (tmp_path / "model").symlink_to(made)
    assert read_bundle(tmp_path / "model").name == "model"


def test_pipes_are_refused_without_being_opened(tmp_path: Path) -> None:
    """A pipe is refused without being opened, which could block."""
    made = make_bundle(tmp_path)
    os.mkfifo(made / "pipe")
    assert problems_of(made) == ("pipe: is neither a file nor a directory; remove it",)


def test_the_digest_sees_names_and_contents_but_no_caches(tmp_path: Path) -> None:
    """The digest covers the names and contents of all files except Python's bytecode."""
    made = make_bundle(tmp_path, files={"vocab.txt": b"a"})
    digests = [read_bundle(made).digest]
    (made / "__pycache__").mkdir()
    (made / "__pycache__" / "model.pyc").touch()
    assert read_bundle(made).digest == digests[0]
    (made / "vocab.txt").write_bytes(b"b")
    digests.append(read_bundle(made).digest)
    (made / "vocab.txt").rename(made / "words.txt")
    digests.append(read_bundle(made).digest)
    assert len(set(digests)) == 3
    assert read_bundle(made, digest=False).digest == ""


def test_an_error_survives_pickling() -> None:
    """A BundleError survives pickling, because it travels between processes."""
    error = pickle.loads(pickle.dumps(BundleError(["a: b", "c: d"])))
    assert (error.problems, str(error)) == (("a: b", "c: d"), "a: b\nc: d")


@pytest.mark.parametrize("name", ["weights.safetensors", "extra.bin", "model.b1.mlir"])
def test_a_file_that_is_mostly_holes_is_refused_unread(tmp_path: Path, name: str) -> None:
    """A huge sparse file is refused without being read."""
    made = make_bundle(tmp_path)
    with (made / name).open("ab") as file:
        file.truncate(2**43)
    assert any(line.startswith(f"{name}: is a sparse file") for line in problems_of(made))


def test_a_file_with_small_holes_is_as_good_as_any(tmp_path: Path) -> None:
    """A file with small holes is accepted, because copying tools may leave out runs of zeros."""
    made = make_bundle(tmp_path)
    with (made / "extra.bin").open("wb") as file:
        file.truncate(2**20)
    assert problems_of(made) == ()


def test_directories_without_end_are_refused(tmp_path: Path) -> None:
    """Too deep directories and too many files are refused."""
    deep = make_bundle(tmp_path, name="deep")
    deep.joinpath(*["d"] * 500).mkdir(parents=True)
    assert problems_of(deep) == ("/".join(["d"] * 18) + ": lies more than 16 directories deep",)
    wide = make_bundle(tmp_path, name="wide")
    for i in range(10_001):
        (wide / str(i)).mkdir()
    assert problems_of(wide) == ("wide: holds more than 10000 files and directories",)


@pytest.mark.parametrize("name", [b"two\nlines", b"\xff", b"\xe2\x80\xae"])
def test_files_whose_names_cannot_be_printed_are_refused(tmp_path: Path, name: bytes) -> None:
    """Files with unprintable names are refused in a printable line."""
    made = make_bundle(tmp_path)
    Path(os.fsdecode(bytes(made) + b"/" + name)).touch()
    (line,) = problems_of(made)
    assert line.isprintable()
    assert "has a name that cannot be printed" in line


def test_a_report_stays_short(tmp_path: Path) -> None:
    """The number and the length of the reported lines are limited."""
    names = [f"model.{'x' * 200}{i}.mlir" for i in range(500)]
    made = make_bundle(tmp_path, changed(GOOD, kind="k" * 5000), files=dict.fromkeys(names, b"junk"))
    lines = problems_of(made)
    assert len(lines) == 100
    assert max(map(len, lines)) <= 1003
