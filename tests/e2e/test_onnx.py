"""A model that is served from its ONNX file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rsrv_bundle.from_onnx import eager_onnx, export_onnx
from tests.e2e.calls import caller
from tests.e2e.harness import StartTriton, make_repository
from tests.onnx_files import encoder

#: A bundle from an ONNX file is served like other bundles, and unit tests compare it with onnxruntime.
pytestmark = pytest.mark.long


def test_a_served_onnx_file_answers_as_onnxruntime(start_triton: StartTriton, tmp_path: Path) -> None:
    """Requests with several lengths and numbers of rows, over both protocols, get onnxruntime's results."""
    file = encoder(tmp_path / "encoder.onnx")
    shapes = [{"sequence": 4}, {"sequence": 16}]
    export_onnx(file, out_dir=tmp_path / "bundles" / "encoder", batch_sizes=(1, 4), input_shapes=shapes)
    server = start_triton(make_repository(tmp_path))
    rng = np.random.default_rng(0)
    reference = eager_onnx(file)
    for protocol in ("grpc", "http"):
        with caller(server, protocol) as call:
            for rows, length in ((1, 4), (3, 16), (4, 4)):
                ids = rng.integers(0, 40, (rows, length))
                [expected] = reference(ids=ids).values
                np.testing.assert_allclose(call("encoder", {"ids": ids})["y"], expected, rtol=1e-5, atol=1e-6)
