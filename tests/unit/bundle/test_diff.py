"""`rsrv-bundle diff`: what two bundles share, and where they differ."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsrv_bundle import cli, read_bundle
from rsrv_bundle.commands.differing import Tensor, relate, weights_of
from rsrv_bundle.weights import TensorKey
from rsrv_bundle.writer import write_weights
from tests.unit.bundle.forge import GOOD, META, changed, make_bundle, tensor

Array = np.ndarray[Any, Any]
ONES, TWOS = np.ones((2, 3), np.float32), np.full((2, 3), 2, np.float32)


def bundle(
    parent: Path, weights: Mapping[str, Array], manifest: Mapping[str, Any] = GOOD, **options: Any
) -> Path:
    """A bundle with these weights, in this order; its modules are junk, at which diff does not look."""
    path = make_bundle(parent, manifest, **options)
    write_weights(path / "weights.safetensors", list(weights.items()))
    return path


def diff(a: Path, b: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    """The exit code, and what is printed after the first two lines, which name the bundles."""
    status = cli.main(["diff", str(a), str(b)])
    return status, capsys.readouterr().out.splitlines()[2:]


def test_the_same_bundle_twice_is_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 0, as of diff(1); its tensors are all shared."""
    a = bundle(tmp_path / "a", {"w": ONES})
    shutil.copytree(a, tmp_path / "b")
    assert diff(a, tmp_path / "b", capsys) == (
        0,
        [
            "= w: f32 [2, 3], 24 B",
            "weights: 48 B together, 24 B are in both; a server with both stores 24 B",
            "the same",
        ],
    )


def test_a_fine_tuned_head_is_told_from_the_backbone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By content: one that is called otherwise is shared, too, and one of another shape is not."""
    a = bundle(tmp_path / "a", {"backbone": ONES, "head": TWOS, "old": TWOS[0], "turned": ONES})
    b = bundle(tmp_path / "b", {"trunk": ONES, "head": TWOS * 2, "new": TWOS.T, "turned": ONES.T})
    assert diff(a, b, capsys) == (
        1,
        [
            "= backbone: f32 [2, 3], 24 B, in B trunk",
            "= turned: f32 [2, 3], 24 B, in B trunk",
            "~ head: f32 [2, 3], 24 B",
            "- old: f32 [3], 12 B",
            "+ new: f32 [3, 2], 24 B",
            "+ turned: f32 [3, 2], 24 B",
            "weights: 180 B together, 24 B are in both; a server with both stores 132 B",
        ],
    )


def test_differences_of_interfaces_and_files_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line each."""
    a = bundle(tmp_path / "a", {"w": ONES}, hooks="def preprocess(i): ...\n", files={"vocab.txt": b"a"})
    document = changed(
        GOOD,
        executable_inputs=[*GOOD["executable_inputs"], tensor("z", "i32", "nk", k=2)],
        batching={"compiled_batch_sizes": [1, 8]},
        provenance={"by": "me"},
        internal=True,
    )
    modules = {"model.b1.mlir": b"junk", "model.b4.mlir": b"junks", "model.b8.mlir": b"junk"}
    b = bundle(tmp_path / "b", {"w": ONES}, document, modules=modules, files={"vocab.txt": b"b"})
    assert diff(a, b, capsys) == (
        1,
        [
            "internal: False in A, True in B",
            "compiled_batch_sizes: (1, 4) in A, (1, 8) in B",
            "executable input 'z': none in A, i32 nk [-1, 2] in B",
            "provenance.by: none in A, me in B",
            "model.b4.mlir: differs",
            "model.b8.mlir: only in B",
            "model.py: only in A",
            "vocab.txt: differs",
            "= w: f32 [2, 3], 24 B",
            "weights: 48 B together, 24 B are in both; a server with both stores 24 B",
        ],
    )


def test_the_order_of_arguments_is_a_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The modules are called with other tensors, although all are shared."""
    a = bundle(tmp_path / "a", {"v": ONES, "w": TWOS})
    b = bundle(tmp_path / "b", {"w": TWOS, "v": ONES})
    status, lines = diff(a, b, capsys)
    assert status == 1
    assert "weights: the arguments are in another order" in lines


def test_inputs_in_another_order_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By position modules take them."""
    inputs = [tensor("x", c=1), tensor("z", c=1)]
    a = bundle(tmp_path / "a", {}, changed(GOOD, executable_inputs=inputs))
    b = bundle(tmp_path / "b", {}, changed(GOOD, executable_inputs=inputs[::-1]))
    assert "executable inputs: x, z in A, z, x in B" in diff(a, b, capsys)[1]


def test_a_comment_is_no_difference_of_what_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """But the files are not the same, and the exit code says so."""
    a = bundle(tmp_path / "a", {"w": ONES})
    shutil.copytree(a, tmp_path / "b")
    with (tmp_path / "b" / "manifest.yaml").open("a") as file:
        file.write("# A comment.\n")
    status, lines = diff(a, tmp_path / "b", capsys)
    assert (status, lines[-1]) == (1, "the same content, written differently")


def test_meta_models_differ_in_what_they_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They have no weights."""
    hooks = "def run(inputs, call): ...\n"
    a = make_bundle(tmp_path / "a", META, modules=(), hooks=hooks)
    b = make_bundle(tmp_path / "b", changed(META, meta={"calls": ["first"]}), modules=(), hooks=hooks)
    status, lines = diff(a, b, capsys)
    assert (status, lines[0]) == (1, "meta.calls: ['first', 'second'] in A, ['first'] in B")


def test_trouble_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A bundle that cannot be read does not differ from another one."""
    a = bundle(tmp_path / "a", {"w": ONES})
    assert cli.main(["diff", str(a), str(tmp_path / "none")]) == 2
    assert "none: there is no such directory" in capsys.readouterr().err


def test_tensors_are_the_same_if_they_are_for_the_server(tmp_path: Path) -> None:
    """In format 2.0 the file has them in reverse, which is not what the modules take."""
    old = read_bundle(bundle(tmp_path / "a", {"w": ONES.T}, changed(GOOD, format_version="2.0")))
    new = read_bundle(bundle(tmp_path / "b", {"w": ONES}))
    assert weights_of(old) == weights_of(new)


TENSORS = st.lists(
    st.tuples(st.sampled_from("abcde"), st.integers(0, 4)), unique_by=lambda one: one[0], max_size=5
).map(lambda found: [(name, TensorKey(str(content), "u8", (content,)), content) for name, content in found])


@given(TENSORS, TENSORS)
def test_every_tensor_is_in_one_place_and_every_byte_is_counted(a: list[Tensor], b: list[Tensor]) -> None:
    """Whatever their names and contents."""
    related = relate(a, b)
    of_a = (
        [tensor for tensor, _ in related.shared] + [one for one, _ in related.changed] + list(related.only_a)
    )
    assert sorted(of_a) == sorted(a)
    named = {name for _, names in related.shared for name in names}
    named |= {other[0] for _, other in related.changed} | {tensor[0] for tensor in related.only_b}
    assert named == {tensor[0] for tensor in b}
    assert related.total == sum(tensor[2] for tensor in a + b)
    sides = [{tensor[1]: tensor[2] for tensor in side} for side in (a, b)]
    assert related.distinct + related.common == sum(sum(side.values()) for side in sides)
