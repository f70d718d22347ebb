"""Answers of models over KServe v2."""

from __future__ import annotations

import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from rsrv.openai.errors import ApiError
from rsrv.openai.inference import read_outputs


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_numbers_that_are_not_finite_are_no_answer(number: float) -> None:
    """Answers with NaN or infinity are refused: JSON does not have these values, and base64 would hide them."""
    response = service_pb2.ModelInferResponse(raw_output_contents=[np.array([1, number], "<f4").tobytes()])
    response.outputs.add(name="embedding", datatype="FP32", shape=[1, 2])
    with pytest.raises(ApiError, match="not finite") as refused:
        read_outputs(response)
    assert refused.value.status == 500
