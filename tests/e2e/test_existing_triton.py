"""Bundles on a tritonserver that has models of its own, in a second repository."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from tritonclient.grpc import InferInput
from tritonclient.utils import InferenceServerException

from rsrv_bundle.export import export_bundle
from tests.e2e.harness import RunningTriton, StartTriton, make_repository
from tests.e2e.test_bls import add
from tests.e2e.test_sequences import add_ensemble
from tests.waiting import wait_until

_PLAIN = '''
class TritonPythonModel:
    """y = x + 1."""

    def execute(self, requests):
        import triton_python_backend_utils as pb_utils

        inputs = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", x + 1)]) for x in inputs]
'''
_TENSORS = """
max_batch_size: 4
input [{ name: "x" data_type: TYPE_FP32 dims: [4] }]
output [{ name: "y" data_type: TYPE_FP32 dims: [4] }]
"""
_PLAIN_CONFIG = f'backend: "python"\n{_TENSORS}instance_group [{{ kind: KIND_CPU }}]\n'
#: Passes the answer of the operator's model to a model of rsrv.
_ENSEMBLE_CONFIG = f"""platform: "ensemble"
{_TENSORS}
ensemble_scheduling {{ step [
  {{ model_name: "plain" model_version: -1
     input_map {{ key: "x" value: "x" }} output_map {{ key: "y" value: "between" }} }},
  {{ model_name: "double" model_version: -1
     input_map {{ key: "x" value: "between" }} output_map {{ key: "y" value: "y" }} }}
] }}
"""
_X = np.arange(4, dtype=np.float32).reshape(1, 4)


def _export(folder: Path, name: str, factor: float) -> None:
    """Write a bundle that multiplies its input x: f32 [n, 4]."""
    weights = {"factor": np.full(4, factor, np.float32)}
    export_bundle(
        lambda params, x: {"y": x * params["factor"]},
        weights,
        {"x": _X},
        batch_sizes=[4],
        out_dir=folder / name,
    )


def _answer(server: RunningTriton, model: str) -> list[float]:
    x = InferInput("x", list(_X.shape), "FP32")
    x.set_data_from_numpy(_X)
    found = server.grpc.infer(model, [x]).as_numpy("y")
    assert found is not None
    return [float(value) for value in found.ravel()]


@pytest.mark.parametrize(
    "mode",
    [
        ("--model-control-mode=explicit", "--load-model=*"),
        # rsrv loads the other bundle by itself.
        ("--model-control-mode=explicit", *(f"--load-model={name}" for name in ("plain", "both", "double"))),
        (),
    ],
    ids=["explicit", "by name", "fixed"],
)
def test_bundles_join_the_models_of_an_existing_server(
    tmp_path: Path, start_triton: StartTriton, mode: tuple[str, ...]
) -> None:
    """A plain model, an ensemble over it and rsrv's models answer; in explicit mode, bundles are followed and others left alone."""
    own = tmp_path / "models"
    add(own, "plain", _PLAIN, _PLAIN_CONFIG)
    add_ensemble(own, "both", _ENSEMBLE_CONFIG)
    _export(tmp_path / "bundles", "double", 2)
    _export(tmp_path / "bundles", "triple", 3)
    gen = make_repository(tmp_path)
    server = start_triton(own, extra_args=[f"--model-repository={gen}", *mode], expected=None)
    wait_until(lambda: server.grpc.is_model_ready("triple"))
    assert _answer(server, "plain") == [1, 2, 3, 4]
    assert _answer(server, "double") == [0, 2, 4, 6]
    assert _answer(server, "both") == [2, 4, 6, 8]
    assert _answer(server, "triple") == [0, 3, 6, 9]
    if not mode:
        return
    own_pids = server.stub_pids("plain")
    _export(tmp_path / "new", "triple", 30)
    shutil.rmtree(tmp_path / "bundles" / "triple")
    (tmp_path / "new" / "triple").rename(tmp_path / "bundles" / "triple")

    def is_renewed() -> bool:
        # A scan between the two steps finds no bundle, and unloads the model.
        with suppress(InferenceServerException):
            return _answer(server, "triple") == [0, 30, 60, 90]
        return False

    wait_until(is_renewed)
    assert _answer(server, "both") == [2, 4, 6, 8]
    assert server.stub_pids("plain") == own_pids
