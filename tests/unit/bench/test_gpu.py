"""`make bench-gpu` where there is no GPU: it runs, and would notice what is wrong."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest

from rsrv.runtime.device import Array, Buffer, never
from rsrv.runtime.jax_device import JaxDevice
from tests.bench.gpu.client import Wrong, serving
from tests.bench.gpu.models import WIDTH, Shape, make_models
from tests.bench.gpu.serving import settings_for
from tests.bench.places import ROOT


def test_it_runs_in_small_without_a_gpu(tmp_path: Path) -> None:
    """All parts, and nothing is wrong; the figures mean nothing."""
    command = [sys.executable, "-m", "tests.bench.gpu", "--small", "--out", str(tmp_path / "out.json")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "JAX_PLATFORMS": "cpu",
    }

    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["wrong"] == []
    assert {rate["way"] for rate in document["rates"]} >= {"limit", "page-locked", "pageable"}
    assert {(one["treatment"], one["computes"]) for one in document["products"]} == {
        (treatment, "f32") for treatment in ("keep", "strip", "pin")
    }
    assert len(document["cold"]) == 2
    assert [turns["loads_per_s"] > 0 for turns in document["turns"]] == [True, True]
    assert 0 < document["traffic"]["hit_rate"] < 1


class Confused(JaxDevice):
    """Uploads the tensors in another order, or loses a tensor's end."""

    def __init__(self, change: Callable[[list[Array]], list[Array]]) -> None:
        super().__init__("cpu")
        self._change = change

    def upload(self, arrays: Iterable[Array], abandoned: Callable[[], bool] = never) -> list[Buffer]:
        return super().upload(self._change(list(arrays)), abandoned)


def without_the_end(arrays: list[Array]) -> list[Array]:
    last = arrays[-1].copy()
    last[-1] = 0
    return [*arrays[:-1], last]


@pytest.mark.parametrize("change", [lambda arrays: arrays[::-1], without_the_end])
def test_weights_that_arrive_wrong_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[list[Array]], list[Array]]
) -> None:
    """By the model's answer, and a model whose weights are right passes."""
    monkeypatch.setenv("RSRV_RUNTIME_DIR", str(tmp_path / "runtime"))
    (model,) = make_models(tmp_path, Shape(4096, tensors=4), ["model"])
    x = np.ones((1, WIDTH), np.float32)

    with serving(JaxDevice("cpu"), settings_for(1 << 20), [model]) as (client,):
        client.ask(x)
    with (
        serving(Confused(change), settings_for(1 << 20), [model]) as (client,),
        pytest.raises(Wrong, match="expected"),
    ):
        client.ask(x)
