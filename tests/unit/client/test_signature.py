"""Inputs are checked against the model before anything is sent."""

from __future__ import annotations

import json
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rsrv.client.errors import InputError
from rsrv.client.signature import ModelSignature, ModelTensor, as_array, from_bytes, to_bytes

TASK = {
    "kind": "text-classification",
    "inputs": {"text": "sentence"},
    "outputs": {"scores": "p"},
    "labels": ["a", "b"],
}
CONFIG = {
    "name": "m",
    "max_batch_size": "8",
    "input": [
        {"name": "x", "data_type": "TYPE_FP32", "dims": ["3", "-1"]},
        {"name": "sentence", "data_type": "TYPE_STRING", "dims": ["1"], "optional": True},
    ],
    "output": [{"name": "p", "data_type": "TYPE_FP32", "dims": ["2"]}],
    "parameters": {"task": {"string_value": json.dumps(TASK)}},
}
X = np.zeros((2, 3, 5), np.float32)


@pytest.fixture
def signature() -> ModelSignature:
    return ModelSignature.from_config(CONFIG)


@pytest.mark.parametrize(
    ("inputs", "error"),
    [
        ({"y": X}, "m has no input 'y'"),
        ({"sentenc": [["a"]], "x": X}, "m has no input 'sentenc'; did you mean 'sentence'?"),
        ({"sentence": [["a"]]}, "m also needs the input 'x'"),
        ({"x": X[0]}, "input x: expected shape [-1, 3, -1] (axis 0 is the batch), got [3, 5]"),
        (
            {"x": X.astype(np.float64)},
            "input x: expected float32, got float64; convert it with .astype('float32')",
        ),
        (
            {"x": X, "sentence": [["a"], [None]]},
            "input sentence: expected texts or bytes; a value is missing",
        ),
        ({"x": [["a"]]}, "input x: expected float32: could not convert string to float"),
        ({"x": np.zeros((9, 3, 1), np.float32)}, "m: 9 rows, and a request has at most 8; map() sends"),
        ({"x": X, "sentence": [["a"]]}, "the inputs disagree on the number of rows: x has 2, sentence has 1"),
    ],
)
def test_wrong_inputs_are_named_with_what_is_allowed(
    signature: ModelSignature, inputs: dict[str, Any], error: str
) -> None:
    """The error names the input, what the model takes, and what to do."""
    with pytest.raises(InputError, match=re.escape(error)):
        signature.check(inputs)


def test_lists_become_the_models_type(signature: ModelSignature) -> None:
    """Lists of numbers and texts are converted to the model's type, and a role of the task names its tensor."""
    arrays = signature.check({"x": [[[1], [2], [3]]], "text": [["häuser"]]})
    assert arrays["x"].dtype == np.float32
    assert bytes(to_bytes(signature.inputs["sentence"], arrays["sentence"])) == b"\7\0\0\0h\xc3\xa4user"


@pytest.mark.parametrize("value", [[[1.5]], np.array([[1.5], None], object)[:1]])
def test_no_fraction_is_cut_unnoticed(value: Any) -> None:
    """Numbers with a fraction are refused for an integer input, in lists and in columns of lists."""
    spec = ModelTensor("x", "INT64", (1,))
    with pytest.raises(InputError, match="input x: expected int64: a value has a fraction"):
        as_array(spec, value, has_rows=True)
    assert as_array(spec, [[2.0]], has_rows=True).tolist() == [[2]]


@pytest.mark.parametrize("datatype", ["BOOL", "INT8", "UINT64", "FP16", "FP64"])
def test_arrays_travel_without_a_change(datatype: str) -> None:
    """An array reads back from its bytes without a change, even if its rows are not contiguous."""
    spec = ModelTensor("x", datatype, (2,))
    array = np.arange(12).reshape(6, 2)[::2].astype(from_bytes(datatype, (0,), b"").dtype)
    np.testing.assert_array_equal(from_bytes(datatype, (3, 2), to_bytes(spec, array)), array)


def test_bfloat16_needs_no_type_of_numpy() -> None:
    """A bfloat16 input accepts float32 values, and rounds each to the nearest bfloat16."""
    values = np.array([1.0, 3.14159, -2.7e30, 1.00390625], np.float32)
    sent = bytes(to_bytes(ModelTensor("x", "BF16", (4,)), values))
    assert sent == values.astype(ml_dtypes.bfloat16).tobytes()
