"""`rsrv-bundle diff`: the tensors that two bundles share, and where the bundles differ."""

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
    """Write a bundle with these weights in this order. Its modules are junk, because diff does not read them."""
    parent.mkdir(exist_ok=True)
    write_weights(parent / "weights", list(weights.items()))
    return make_bundle(parent, manifest, weights=(parent / "weights").read_bytes(), **options)


def diff(a: Path, b: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    """Return the exit code, and the lines printed after the first two, which name the bundles."""
    status = cli.main(["diff", str(a), str(b)])
    return status, capsys.readouterr().out.splitlines()[2:]


def test_the_same_bundle_twice_is_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two identical bundles share all tensors, and the exit code is 0, as in diff(1)."""
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
    """Tensors are compared by content: a renamed tensor is shared, and a tensor of another shape is not."""
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
    """Each difference of interfaces and files has a line."""
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
            "executable_inputs: x in A, x, z in B",
            "batching.compiled_batch_sizes: [1, 4] in A, [1, 8] in B",
            "executable_inputs.z: none in A, i32 nk k=2 in B",
            "internal: none in A, True in B",
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
    """Arguments in another order are a difference, although all tensors are shared."""
    a = bundle(tmp_path / "a", {"v": ONES, "w": TWOS})
    b = bundle(tmp_path / "b", {"w": TWOS, "v": ONES})
    status, lines = diff(a, b, capsys)
    assert status == 1
    assert "weights: the arguments are in another order" in lines


def test_inputs_in_another_order_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Inputs in another order are a difference, because modules take inputs by position."""
    inputs = [tensor("x", c=1), tensor("z", c=1)]
    a = bundle(tmp_path / "a", {}, changed(GOOD, executable_inputs=inputs))
    b = bundle(tmp_path / "b", {}, changed(GOOD, executable_inputs=inputs[::-1]))
    assert "executable_inputs: x, z in A, z, x in B" in diff(a, b, capsys)[1]


def test_a_comment_is_no_difference_of_what_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If only a comment in the manifest differs, the exit code is 1, and the last line says that the content is the same."""
    a = bundle(tmp_path / "a", {"w": ONES})
    shutil.copytree(a, tmp_path / "b")
    with (tmp_path / "b" / "manifest.yaml").open("a") as file:
        file.write("# A comment.\n")
    status, lines = diff(a, tmp_path / "b", capsys)
    assert (status, lines[-1]) == (1, "the same content, written differently")


def test_meta_models_differ_in_what_they_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Meta models differ in the models that they call."""
    hooks = "def run(inputs, call): ...\n"
    a = make_bundle(tmp_path / "a", META, modules=(), hooks=hooks)
    b = make_bundle(tmp_path / "b", changed(META, meta={"calls": ["first"]}), modules=(), hooks=hooks)
    status, lines = diff(a, b, capsys)
    assert (status, lines[0]) == (1, "meta.calls: ['first', 'second'] in A, ['first'] in B")


def test_tensors_are_the_same_if_they_are_for_the_server(tmp_path: Path) -> None:
    """Weights of format 2.0, which are stored transposed, equal weights of format 3 if the modules take the same tensors."""
    old = read_bundle(bundle(tmp_path / "a", {"w": ONES.T}, changed(GOOD, format_version="2.0")))
    new = read_bundle(bundle(tmp_path / "b", {"w": ONES}))
    assert weights_of(old) == weights_of(new)


TENSORS = st.lists(
    st.tuples(st.sampled_from("abcde"), st.integers(0, 4)), unique_by=lambda pair: pair[0], max_size=5
).map(lambda pairs: [(name, TensorKey(str(content), "u8", (content,)), content) for name, content in pairs])


@given(TENSORS, TENSORS)
def test_every_tensor_is_in_one_place_and_every_byte_is_counted(a: list[Tensor], b: list[Tensor]) -> None:
    """For any two lists of tensors, each tensor is in one category and every byte is counted once."""
    related = relate(a, b)
    of_a = (
        [tensor for tensor, _ in related.shared]
        + [item for item, _ in related.changed]
        + list(related.only_a)
    )
    assert sorted(of_a) == sorted(a)
    named = {name for _, names in related.shared for name in names}
    named |= {other[0] for _, other in related.changed} | {tensor[0] for tensor in related.only_b}
    assert named == {tensor[0] for tensor in b}
    assert related.total == sum(tensor[2] for tensor in a + b)
    sides = [{tensor[1]: tensor[2] for tensor in side} for side in (a, b)]
    assert related.distinct + related.common == sum(sum(side.values()) for side in sides)
