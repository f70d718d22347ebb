"""Bundles on a tritonserver that has its own models. The bundles are in a second repository."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.calls import Refused, caller, outcome
from tests.e2e.harness import StartTriton, make_repository
from tests.e2e.lives import place
from tests.e2e.metas import ADDS_11, COLUMNS, plain_model, rows, write_scale
from tests.e2e.test_sequences import add_ensemble
from tests.waiting import wait_until

#: An ensemble that passes the answer of the operator's model to a model of rsrv.
_ENSEMBLE = f"""
platform: "ensemble"
max_batch_size: 4
input [{{ name: "x" data_type: TYPE_FP32 dims: [{COLUMNS}] }}]
output [{{ name: "y" data_type: TYPE_FP32 dims: [{COLUMNS}] }}]
ensemble_scheduling {{ step [
  {{ model_name: "plain" model_version: -1
     input_map {{ key: "x" value: "x" }} output_map {{ key: "y" value: "between" }} }},
  {{ model_name: "double" model_version: -1
     input_map {{ key: "x" value: "between" }} output_map {{ key: "y" value: "y" }} }}
] }}
"""


@pytest.mark.parametrize(
    "loaded",
    [
        # rsrv loads the other bundle.
        pytest.param(("plain", "both", "double"), id="by name"),
        pytest.param(("*",), id="explicit", marks=pytest.mark.long),
        pytest.param((), id="fixed", marks=pytest.mark.long),
    ],
)
def test_bundles_join_the_models_of_an_existing_server(
    tmp_path: Path, start_triton: StartTriton, loaded: tuple[str, ...]
) -> None:
    """A plain model, an ensemble over it and rsrv's models answer.

    In explicit mode, rsrv follows changed bundles, and leaves other models alone.
    """
    own = tmp_path / "models"
    plain_model(own, "plain", ADDS_11)
    add_ensemble(own, "both", _ENSEMBLE)
    write_scale(tmp_path / "bundles" / "double", 2)
    write_scale(tmp_path / "bundles" / "triple", 3)
    flags = [f"--model-repository={make_repository(tmp_path)}"]
    if loaded:
        flags += ["--model-control-mode=explicit", *(f"--load-model={name}" for name in loaded)]
    server = start_triton(own, extra_args=flags, expected=None)
    with caller(server) as call:

        def answer(model: str) -> float | None:
            """Return a model's answer to 5, or None if it does not answer."""
            answer = outcome(lambda: call(model, rows(1, 5.0)))
            return None if isinstance(answer, Refused) else float(answer["y"][0, 0])

        wait_until(lambda: answer("triple") == 15, what="the last bundle")
        assert [answer(model) for model in ("plain", "double", "both")] == [16, 10, 32]
        if not loaded:
            return
        own_pids = server.stub_pids("plain")
        place(write_scale(tmp_path / "new", 30), tmp_path / "bundles" / "triple")
        wait_until(lambda: answer("triple") == 150, what="the changed bundle")
        assert answer("both") == 32
        assert server.stub_pids("plain") == own_pids
