"""The checksums of format 3: a file that differs from its export is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rsrv_bundle import BundleError, cli, load_weights, read_bundle, yaml12
from rsrv_bundle.export import export_bundle
from rsrv_bundle.modules import check_signatures
from rsrv_bundle.weights import tensor_keys
from tests.unit.bundle.forge import (
    changed,
    make_bundle,
    one_weight,
    problems_of,
    safetensors_bytes,
    seal,
)

TORN = "{} does not match the manifest: it is being written, or was changed without exporting. Export the bundle again"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a bundle as the exporter writes it."""
    path = tmp_path_factory.mktemp("exported") / "dense"
    params = {"kernel": np.arange(6, dtype=np.float32).reshape(3, 2), "bias": np.ones(2, np.float32)}
    export_bundle(
        lambda params, x: x @ params["kernel"] + params["bias"],
        params,
        {"x": np.zeros((1, 3), np.float32)},
        batch_sizes=[1, 4],
        out_dir=path,
    )
    return path


@pytest.fixture
def exported(source: Path, tmp_path: Path) -> Path:
    """Return a copy of the bundle `source`."""
    path = tmp_path / source.name
    path.mkdir()
    for file in source.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    return path


def tear(file: Path) -> None:
    """Change the last four bytes of a file, as if they were not written yet."""
    content = file.read_bytes()
    file.write_bytes(content[:-4] + bytes(4) if content[-4:] != bytes(4) else content[:-4] + b"torn")


@pytest.mark.parametrize("name", ["weights.safetensors", "model.b4.mlir"])
def test_a_torn_file_is_refused_by_name(
    exported: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reader, the functions that open a file and the command refuse a torn file until it is complete."""
    content = (exported / name).read_bytes()
    tear(exported / name)
    (problem,) = problems_of(exported)
    assert problem.startswith(TORN.format(name))
    assert "renaming" in problem
    assert cli.main(["check", "--no-signatures", str(exported)]) == 1
    assert f"{exported}: {problem}" in capsys.readouterr().out
    unread = read_bundle(exported, verify=False)
    for opens in (load_weights, tensor_keys) if name.startswith("weights") else (check_signatures,):
        with pytest.raises(BundleError, match="does not match the manifest"):
            opens(unread)
    (exported / name).write_bytes(content)
    assert problems_of(exported) == ()


def test_a_weights_file_that_ends_early_is_torn_before_it_breaks_rules(exported: Path) -> None:
    """A weights file that ends early is reported as torn, because its checksum is wrong.

    If the manifest has the checksum of such a file, the problem is instead that the file breaks the format.
    """
    file = exported / "weights.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    (problem,) = problems_of(exported)
    assert problem.startswith(TORN.format(file.name))
    seal(exported)
    (problem,) = problems_of(exported)
    assert "leave the file's" in problem


def test_bytes_that_are_no_weight_count(tmp_path: Path) -> None:
    """The checksum covers the whole weights file: also its header, and tensors at any position that are not arguments."""
    entries = {
        name: {"dtype": "U8", "shape": [8], "data_offsets": [8 * i, 8 * i + 8]}
        for i, name in enumerate("abcde")
    }
    header = {"__metadata__": {"argument_order": '["d", "b"]', "note": "0"}, **entries}
    made = make_bundle(tmp_path, weights=safetensors_bytes(header, bytes(range(40))))
    bundle = read_bundle(made, verify=False)
    assert [array.tolist() for array in load_weights(bundle)] == [list(range(24, 32)), list(range(8, 16))]
    file = made / "weights.safetensors"
    content = file.read_bytes()
    for at in (content.index(b'"0"') + 1, *(len(content) - 40 + 8 * i for i in range(5))):
        file.write_bytes(content[:at] + b"9" + content[at + 1 :])
        with pytest.raises(BundleError, match="does not match the manifest"):
            load_weights(read_bundle(made, verify=False))


def test_the_digest_is_the_same_whether_the_files_are_read_or_not(exported: Path) -> None:
    """The digest of a bundle is the same with and without reading the files that have checksums."""
    assert read_bundle(exported, verify=False).digest == read_bundle(exported).digest


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"sha256": None}, "manifest.yaml: sha256.model.b1.mlir: is missing; format 3 has the SHA-256"),
        ({"sha256": []}, "manifest.yaml: sha256: must be a mapping"),
        ({"sha256": {"model.b1.mlir": "abc"}}, "sha256.model.b1.mlir: must be text of 64 digits"),
        ({"sha256": {"model.b1.mlir": 5}}, "sha256.model.b1.mlir: must be text of 64 digits"),
        (
            {"sha256": {"model.b8.mlir": "0" * 64}},
            "sha256.model.b8.mlir: is neither a module nor the weights",
        ),
        ({"sha256": {f"m{i}": "" for i in range(1001)}}, "sha256: has 1001 entries; 1000 are allowed"),
    ],
)
def test_checksums_are_those_of_the_weights_and_of_every_module(
    tmp_path: Path, change: dict[str, Any], problem: str
) -> None:
    """A manifest needs checksums of the weights and of all modules, and of no other file."""
    made = make_bundle(tmp_path, weights=one_weight())
    document = yaml12.load((made / "manifest.yaml").read_bytes())
    (made / "manifest.yaml").write_text(json.dumps(changed(document, **change)))
    assert any(problem in line for line in problems_of(made))


@pytest.mark.parametrize(
    ("file", "problem"),
    [
        (
            "weights.safetensors",
            "weights.safetensors: is missing: copy the whole bundle again, or export it again",
        ),
        ("model.b4.mlir", "model.b4.mlir: is missing, but batching.compiled_batch_sizes declares 4"),
    ],
)
def test_a_file_that_is_missing_is_named_once(tmp_path: Path, file: str, problem: str) -> None:
    """A missing file causes one problem, which names the file. Its checksum adds no second problem."""
    made = make_bundle(tmp_path, weights=one_weight())
    (made / file).unlink()
    assert problems_of(made) == (problem,)
