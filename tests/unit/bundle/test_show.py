"""`rsrv-bundle show`: the page about a bundle, and its JSON."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rsrv_bundle import cli, read_bundle
from rsrv_bundle.commands import describing
from rsrv_bundle.commands.describing import describe
from rsrv_bundle.commands.showing import page, shape, table
from rsrv_bundle.export import export_bundle
from rsrv_bundle.modules import signature_of
from tests.unit.bundle.forge import META, changed, make_bundle


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export a model that multiplies 100 values by a 100 x 10 matrix, with a hook and its data file."""
    out_dir = tmp_path_factory.mktemp("bundles") / "dense"
    export_bundle(
        lambda p, x: {"y": x @ p["kernel"] + p["bias"]},
        {"kernel": np.ones((100, 10), np.float32), "bias": np.ones(10, np.float32)},
        {"x": np.zeros((1, 100), np.float32)},
        batch_sizes=[1, 4],
        out_dir=out_dir,
        description="One \x1b[31mlayer.",
        hooks="def postprocess(outputs): return outputs\n",
        client_outputs=[{"name": "best", "dtype": "i64", "shape": "nk", "dims": {"k": 1}}],
        exported_at="2026-02-03",
    )
    (out_dir / "labels.txt").write_text("a b c\n")
    return out_dir


def test_the_page_says_what_is_in_a_bundle(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The page has its sections in order, and control characters of the bundle are masked."""
    assert cli.main(["show", str(exported)]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    lines = out.splitlines()
    assert lines[0] == "dense: model, format 3"
    assert lines[1] == "One ?[31mlayer."
    sections = [line for line in lines if line and not line.startswith(" ")][3:]
    assert sections == [
        "Clients send",
        "Clients get",
        "Modules return",
        "Modules",
        "Weights: 2, 4.04 kB: 2 f32 (4.04 kB)",
        "Hooks",
        "Other files",
        "Numerics",
        "Provenance",
    ]
    for line in (
        "  x  f32  [n, a=100]",
        "  best  i64  [n, k=1]",
        "  y  f32  [n, a=10]",
        "  kernel  f32  [100, 10]  4 kB",
        "  postprocess",
        "  labels.txt  6 B",
        "  exported_at  2026-02-03",
    ):
        assert line in lines
    assert any(line.startswith("  model.b4.mlir     4 ") for line in lines)


def test_programs_get_the_same_as_json(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The JSON has bytes and operations as numbers. A multiply-add counts as two operations, an addition as one."""
    assert cli.main(["show", "--json", str(exported)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["costs"] == "stablehlo"
    assert [(module["file"], module["batch_size"], module["flops"]) for module in document["modules"]] == [
        ("model.b1.mlir", 1, 2 * 100 * 10 + 10),
        ("model.b4.mlir", 4, 4 * (2 * 100 * 10 + 10)),
    ]
    assert [(module["input_bytes"], module["output_bytes"]) for module in document["modules"]] == [
        (400, 40),
        (1600, 160),
    ]
    assert document["modules"][1]["bytes_accessed"] >= 1600 + 160 + 4040
    assert document["weights"]["largest"][0] == {
        "name": "kernel",
        "dtype": "f32",
        "dims": [100, 10],
        "bytes": 4000,
    }
    assert document["client_inputs"] == [
        {"name": "x", "dtype": "f32", "shape": "na", "dims": [-1, 100], "batch_axis": 0}
    ]
    assert document["sha256"] == read_bundle(exported).digest


def test_the_compiler_says_what_memory_an_execution_takes(exported: Path) -> None:
    """With `compiled`, the page has the scratch memory of each module, as the compiler reports it for this machine."""
    description = describe(read_bundle(exported), signature_of, "compiled")
    assert all(module["scratch_bytes"] >= 0 for module in description["modules"])
    assert "scratch" in page(description)
    assert "this machine's" in page(description)


def test_without_jax_the_rest_is_shown(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without jax, the page says that costs are not counted, and shows everything else."""
    monkeypatch.setattr(describing, "find_spec", lambda _: None)
    text = page(describe(read_bundle(exported), signature_of))
    assert "FLOPs and bytes moved are not counted; with jax they are." in text
    assert "model.b4.mlir" in text


def test_a_meta_model_shows_its_callees(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The page of a meta model lists its callees and has no modules."""
    calls = {"calls": ["first"], "external": ["resnet"], "restartable": True}
    meta = make_bundle(tmp_path, changed(META, meta=calls), modules=(), hooks="def run(inputs, call): ...\n")
    assert cli.main(["show", str(meta)]) == 0
    out = capsys.readouterr().out
    assert ": meta, format 3, restartable\n" in out
    assert "Calls\n  first\n\nCalls outside of rsrv\n  resnet\n\nHooks\n  run\n" in out
    assert "Modules" not in out


def test_shapes_name_their_axes() -> None:
    """Shapes are printed with the names of their axes; the batch axis has no extent."""
    assert shape({"shape": "hnw", "dims": [3, -1, -1], "batch_axis": 1}) == "[h=3, n, w=any]"
    assert shape({"shape": "", "dims": [], "batch_axis": None}) == "[]"


def test_columns_are_aligned() -> None:
    """Columns of the table are aligned, numbers to the right."""
    rows = [("name", "size"), ("a", "10 B"), ("bcd", "9 B")]
    assert list(table(rows, head=True)) == ["name  size", "a     10 B", "bcd    9 B"]
    assert list(table(rows[1:])) == ["a    10 B", "bcd  9 B"]
