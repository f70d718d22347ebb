"""The weights file: hostile headers, and the byte layout of both versions."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import ml_dtypes
import numpy as np
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from rsrv_bundle import BundleError, dtypes, load_weights, read_bundle, writer
from rsrv_bundle.weights import WeightsFile, as_array
from tests.unit.bundle.forge import GOOD, changed, make_bundle, one_weight, problems_of, safetensors_bytes

F32_6 = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
ORDER = {"argument_order": '["w"]'}


def two(first: list[int], second: list[int]) -> dict[str, Any]:
    """Return two weights of 8 bytes at these offsets."""
    entry = {"dtype": "F32", "shape": [2]}
    return {
        "__metadata__": {"argument_order": '["a", "b"]'},
        "a": {**entry, "data_offsets": first},
        "b": {**entry, "data_offsets": second},
    }


ATTACKS: list[tuple[str, bytes, str]] = [
    ("empty", b"", "holds 0 bytes, less than the 8 of a header length"),
    ("length beyond the file", safetensors_bytes({}, length=2**63), "exceeds the file"),
    ("length one too long", safetensors_bytes({}, length=3), "exceeds the file"),
    ("no JSON", safetensors_bytes("{nope}"), "header is not valid JSON"),
    ("a list", safetensors_bytes("[]"), "header does not start with '{'"),
    ("header over the limit", safetensors_bytes(" " * 10_000_001), "the limit of 10000000"),
    ("bad UTF-8", safetensors_bytes({})[:8] + b"{\xff", "header is not valid JSON"),
    ("deep", safetensors_bytes('{"a":' + "[" * 100_000), "header is"),
    ("key twice", safetensors_bytes('{"w":1,"w":2}'), "the key 'w' occurs twice"),
    ("metadata", one_weight(__metadata__={"argument_order": ["w"]}), "must be a mapping from text to text"),
    ("entry", one_weight(w=[1]), "w: must have dtype, shape and data_offsets"),
    ("entry extra", one_weight(w={**F32_6, "x": 1}), "and nothing else"),
    ("dtype", one_weight(dtype="F128"), "w: unsupported dtype 'F128'"),
    (
        "shape negative",
        one_weight(w={**F32_6, "shape": [-2, -3]}),
        "w: shape must be a list of whole numbers",
    ),
    ("shape bool", one_weight(w={**F32_6, "shape": [6, True]}), "w: shape must be a list of whole numbers"),
    ("shape overflow", one_weight(w={**F32_6, "shape": [2**63, 2**63]}), "w: data_offsets span 24 bytes"),
    ("shape long", one_weight(w={**F32_6, "shape": [1] * 65}), "w: shape has more than 64 axes"),
    (
        "axis huge",
        one_weight(w={**F32_6, "shape": [2**64]}),
        "w: shape has more than 64 axes, or one of more",
    ),
    ("shape mismatch", one_weight(w={**F32_6, "shape": [2, 4]}), "f32 with shape [2, 4] needs 32"),
    ("dtype mismatch", one_weight(w={**F32_6, "dtype": "F64"}), "f64 with shape [2, 3] needs 48"),
    ("offsets beyond", one_weight(w={**F32_6, "data_offsets": [8, 32]}), "leave the file's 24 bytes"),
    ("offsets huge", one_weight(w={**F32_6, "data_offsets": [2**64, 2**64 + 24]}), "leave the file's"),
    ("offsets backwards", one_weight(w={**F32_6, "data_offsets": [24, 0]}), "leave the file's"),
    ("offsets float", one_weight(w={**F32_6, "data_offsets": [0, 24.0]}), "must be two whole numbers"),
    ("overlap", safetensors_bytes(two([0, 8], [4, 12]), b"\0" * 12), "b: overlaps the tensor before it"),
    ("same bytes", safetensors_bytes(two([0, 8], [0, 8]), b"\0" * 8), "b: overlaps the tensor before it"),
    ("hole", safetensors_bytes(two([0, 8], [12, 20]), b"\0" * 20), "b: leaves a hole before it"),
    ("tail", one_weight(buffer=b"\0" * 25), "1 bytes at its end belong to no tensor"),
    (
        "name",
        safetensors_bytes({"__metadata__": {"argument_order": "[]"}, "a\nb": F32_6}, b"\0" * 24),
        "printable",
    ),
    ("no order", one_weight(__metadata__=None), "__metadata__.argument_order: is missing"),
    (
        "order no JSON",
        one_weight(__metadata__={"argument_order": "w"}),
        "must be text that holds a JSON array",
    ),
    (
        "order no names",
        one_weight(__metadata__={"argument_order": "[1]"}),
        "must be text that holds a JSON array",
    ),
    ("order twice", one_weight(__metadata__={"argument_order": '["w","w"]'}), "lists a weight twice"),
    (
        "order missing",
        one_weight(__metadata__={"argument_order": '["w","v"]'}),
        "weight 'v' missing from safetensors",
    ),
]


@pytest.mark.parametrize(("content", "fragment"), [a[1:] for a in ATTACKS], ids=[a[0] for a in ATTACKS])
def test_a_hostile_file_is_refused_before_a_tensor_is_read(
    tmp_path: Path, content: bytes, fragment: str
) -> None:
    """A hostile file is refused because of its header. The error names the file and the broken rule."""
    lines = problems_of(make_bundle(tmp_path, weights=content))
    assert any(line.startswith("weights.safetensors: ") and fragment in line for line in lines), lines


def test_a_file_that_only_the_safetensors_library_refuses_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that only the safetensors library refuses is also refused by the reader, because other programs could not read the file."""
    monkeypatch.setattr(safetensors, "safe_open", Mock(side_effect=safetensors.SafetensorError("a new rule")))

    (line,) = problems_of(make_bundle(tmp_path, weights=one_weight()))

    assert line.endswith("the safetensors library refuses it: a new rule")


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [("F8_E8M0", [8]), ("C64", [1]), ("F4", [16]), ("F6_E2M3", [4, 4]), ("F6_E3M2", [16])],
)
def test_an_extra_tensor_may_have_a_type_that_no_weight_has(
    tmp_path: Path, dtype: str, shape: list[int]
) -> None:
    """A tensor that is not a weight is ignored, even if rsrv does not support its type. As a weight, it is refused."""
    nbytes = 12 if dtype.startswith("F6") else 8
    extra = {"dtype": dtype, "shape": shape, "data_offsets": [8, 8 + nbytes]}
    header = {**two([0, 8], [8, 16]), "__metadata__": {"argument_order": '["a"]'}, "b": extra}
    bundle = read_bundle(make_bundle(tmp_path, weights=safetensors_bytes(header, bytes(8 + nbytes))))
    assert [weight.name for weight in bundle.weights] == ["a"]

    header["__metadata__"] = {"argument_order": '["a", "b"]'}
    lines = problems_of(make_bundle(tmp_path / "b", weights=safetensors_bytes(header, bytes(8 + nbytes))))
    assert any(f"b: unsupported dtype '{dtype}'" in line for line in lines), lines


def test_extra_tensors_are_ignored_and_an_empty_file_is_fine(tmp_path: Path) -> None:
    """`argument_order` selects the weights. It may be absent if the file has no tensors."""
    extra = safetensors_bytes(
        {**two([0, 8], [8, 16]), "__metadata__": {"argument_order": '["b"]'}}, bytes(range(16))
    )
    bundle = read_bundle(make_bundle(tmp_path, weights=extra))
    assert [weight.name for weight in bundle.weights] == ["b"]
    np.testing.assert_array_equal(load_weights(bundle)[0].view(np.uint8), range(8, 16))
    assert load_weights(read_bundle(make_bundle(tmp_path, name="b", weights=safetensors_bytes({})))) == []


def test_the_same_bytes_mean_transposed_tensors_in_the_two_versions(tmp_path: Path) -> None:
    """A file of format 2.0 records [2, 3] for a tensor that the module takes as [3, 2]. Loading transposes it and does not reshape it."""
    content = one_weight(buffer=np.arange(6, dtype="<f4").tobytes())
    loaded: dict[Any, Any] = {}
    for version in ("2.0", 3):
        made = make_bundle(
            tmp_path, changed(GOOD, format_version=version), name=f"v{version}", weights=content
        )
        bundle = read_bundle(made)
        (loaded[version],) = load_weights(bundle)
        assert bundle.weights[0].shape == loaded[version].shape
    assert loaded[3].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert loaded["2.0"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert all(array.flags.c_contiguous and not array.flags.writeable for array in loaded.values())


@given(
    st.lists(st.integers(0, 4), max_size=4), st.sampled_from(dtypes.TOKENS), st.randoms(use_true_random=False)
)
def test_version_2_layout_round_trips(
    tmp_path_factory: pytest.TempPathFactory, shape: list[int], token: str, random: Any
) -> None:
    """In format 2.0, a file has the row-major transpose of each array. Every rank and type loads as the original array."""
    dtype = dtypes.numpy_dtype(token)
    raw = bytes(
        random.randrange(2 if token == "bool" else 256) for _ in range(int(np.prod(shape)) * dtype.itemsize)
    )
    array = np.frombuffer(raw, dtype).reshape(shape)
    parent = tmp_path_factory.mktemp("layout")
    header = {
        "__metadata__": ORDER,
        "w": {"dtype": dtypes.safetensors_tag(token), "shape": shape[::-1], "data_offsets": [0, len(raw)]},
    }
    content = safetensors_bytes(header, array.T.tobytes(order="C"))
    bundle = read_bundle(make_bundle(parent, changed(GOOD, format_version="2.0"), weights=content))
    (loaded,) = load_weights(bundle)
    assert (loaded.dtype, loaded.shape, loaded.tobytes()) == (dtype, tuple(shape), raw)


def test_every_element_type_is_written_and_read_back(tmp_path: Path) -> None:
    """Every element type is read back with its values, order, shape and alignment."""
    arrays = [(token, np.ones((3, 2)).astype(dtypes.numpy_dtype(token))) for token in dtypes.TOKENS]
    arrays += [("scalar", np.array(7, np.int64)), ("empty", np.zeros((0, 3), ml_dtypes.bfloat16))]
    path = tmp_path / "w"
    writer.write_weights(path, arrays)
    bundle = read_bundle(make_bundle(tmp_path, weights=path.read_bytes()))
    assert [weight.name for weight in bundle.weights] == [name for name, _ in arrays]
    for (_, array), loaded in zip(arrays, load_weights(bundle), strict=True):
        assert loaded.dtype == array.dtype
        assert loaded.flags.aligned
        np.testing.assert_array_equal(loaded, array)


def test_elements_that_the_file_misaligns_are_aligned_in_memory(tmp_path: Path) -> None:
    """Elements that a header of odd length misaligns in the file are aligned in memory."""
    content = one_weight(buffer=np.arange(6, dtype="<f4").tobytes())
    length = int.from_bytes(content[:8], "little")
    padded = (
        (length + 1 + (-length % 4)).to_bytes(8, "little")
        + content[8 : 8 + length]
        + b" " * (1 + (-length % 4))
    )
    bundle = read_bundle(make_bundle(tmp_path, weights=padded + content[8 + length :]))
    assert bundle.weights[0].offset % 4 == 1
    (array,) = load_weights(bundle)
    assert array.flags.aligned
    assert array.tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("version", ["2.0", 3])
def test_a_weight_that_comes_in_pieces_is_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: Any
) -> None:
    """A weight is read whole even if each read of the file returns only a part of it."""
    content = one_weight(buffer=np.arange(6, dtype="<f4").tobytes())
    bundle = read_bundle(make_bundle(tmp_path, changed(GOOD, format_version=version), weights=content))
    whole = load_weights(bundle)[0].tolist()
    read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: read(fd, [buffers[0][:5]], offset))

    assert load_weights(bundle)[0].tolist() == whole


def test_a_file_that_shrinks_while_it_is_open_is_refused(tmp_path: Path) -> None:
    """A file that shrinks while it is open is refused. A file that another file replaces while it is open can still be read."""
    made = make_bundle(tmp_path, weights=one_weight(buffer=np.arange(6, dtype="<f4").tobytes()))
    file = WeightsFile(read_bundle(made))
    raw = np.empty(24, np.uint8)
    (made / "weights.safetensors").rename(made / "old")
    (made / "weights.safetensors").write_bytes(b"other")
    file.read_into(0, raw)
    assert as_array(raw, "f32", (2, 3)).tolist() == [[0, 1, 2], [3, 4, 5]]
    os.truncate(made / "old", 100)

    with pytest.raises(BundleError, match="was written to since the model was loaded; reload the model"):
        file.read_into(0, raw)

    file.close()
    file.close()


def test_a_file_that_changed_after_reading_is_refused(tmp_path: Path) -> None:
    """A file that changed after the bundle was read is refused."""
    made = make_bundle(tmp_path, weights=one_weight())
    bundle = read_bundle(made)
    (made / "weights.safetensors").write_bytes(b"")
    with pytest.raises(BundleError, match="changed since the bundle was read"):
        load_weights(bundle)
    (made / "weights.safetensors").unlink()
    with pytest.raises(BundleError, match="cannot be read"):
        load_weights(bundle)


def test_element_types_have_five_consistent_names() -> None:
    """The five names of each element type convert to each other."""
    for token in dtypes.TOKENS:
        assert dtypes.token_of(dtypes.numpy_dtype(token)) == token
        assert dtypes.token_of_safetensors(dtypes.safetensors_tag(token)) == token
        assert dtypes.numpy_dtype(token).itemsize == dtypes.itemsize(token)
        name = dtypes.kserve_name(token)
        if name is None:
            assert token.startswith("f8")
            assert dtypes.triton_type(token) is None
        else:
            assert dtypes.triton_type(token) == f"TYPE_{name}"
    with pytest.raises(KeyError):
        dtypes.token_of(np.complex64)


def test_a_file_that_was_just_written_has_no_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file gets no version until some seconds after its last change, because another write could leave the same times.

    The time of the last write is not enough: programs that copy can set it.
    """
    path = tmp_path / "weights.safetensors"
    path.write_bytes(b"content")
    os.utime(path, (1.0, 1.0))
    assert WeightsFile.version_of(str(path)) is None

    settled = time.time_ns() + 3_000_000_000
    monkeypatch.setattr("rsrv_bundle.weights.time.time_ns", lambda: settled)
    assert WeightsFile.version_of(str(path)) is not None
