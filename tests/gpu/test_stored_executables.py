"""Executables that rsrv-gen compiles without a card, for XLA's CUDA client."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np

from rsrv.runtime.device import run
from rsrv.runtime.device_executables import ExecutableSources
from rsrv.runtime.jax_device import JaxDevice
from rsrv.runtime.models import CompiledModel
from rsrv.runtime.numerics import probes
from rsrv.runtime.stored_executables import StoredExecutables
from rsrv.stub.session import Launcher
from rsrv_bundle.export import export_bundle
from rsrv_bundle.stateful import export_stateful
from rsrv_gen.cli import main as rsrv_gen
from tests.gpu.conftest import end_runtime
from tests.gpu.fake_gpu import INSTALLED, ROOT, FakeGpu
from tests.status import read_status
from tests.unit.runtime.conftest import Runtime, build_here
from tests.unit.runtime.test_cold import Stub
from tests.waiting import PATIENCE_S


def start(repository: Path, cache: Path) -> tuple[int, int]:
    """Start a device and a model as a server does, and execute all sizes. Return how many modules were compiled, and how many loaded."""
    device, model = started(repository, "doubling", cache)
    assert model.weights is not None
    for (_, size), executable in model.executables.items():
        (y,), _ = run(device, executable, model.weights, [np.ones((size, 3), np.float32)])
        assert y.shape == (size, 3)
    return device.cache_counts.compiled, device.cache_counts.from_cache


def start_with_state(repository: Path, cache: Path) -> tuple[int, int]:
    """Start a model with state. Return how many modules were compiled, and how many loaded.

    Nothing is executed, because only a server makes the pools.
    """
    device, _ = started(repository, "sums", cache)
    return device.cache_counts.compiled, device.cache_counts.from_cache


def started(repository: Path, name: str, cache: Path) -> tuple[JaxDevice, CompiledModel]:
    device = JaxDevice("cuda", ExecutableSources(cache, repository))
    # The probes are not executed, because the fake cuBLAS computes nothing.
    for module, signature in probes("auto"):
        device.compile(module, signature)
    return device, build_here(repository / name / "1" / "bundle", device)


#: Variables of a process that compiles without the card.
WITHOUT = {"PYTHONPATH": str(INSTALLED / "site"), "TF_CPP_MIN_LOG_LEVEL": "2"}


def runtime(program: str, *arguments: object, variables: Mapping[str, str] = WITHOUT) -> str:
    """Run a module of the runtime as rsrv-gen or `rsrv gpu profile` does. Return its output."""
    command = [sys.executable, "-m", f"rsrv.runtime.{program}", *map(str, arguments)]
    done = subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_server_loads_what_rsrv_gen_compiled_without_a_card(
    gpu: FakeGpu, doubling: Path, tmp_path: Path
) -> None:
    """rsrv-gen compiles modules for a card, and a server with this card loads all of them. A server with another card loads none.

    A second run of rsrv-gen compiles nothing.
    """
    repository = tmp_path / "gen"
    assert rsrv_gen([str(doubling), "-o", str(repository)]) == 0
    # The programs are the device's probe, and three sizes.
    runtime("compile_for", repository, "a100")
    assert gpu.run(start, repository, tmp_path / "first cache") == (4, 0)

    assert "doubling: 3 modules" in runtime("compile_for", repository, "h100")
    assert gpu.run(start, repository, tmp_path / "second cache") == (0, 4)
    assert "3 kept" in runtime("compile_for", repository, "h100")


def test_a_lazy_model_starts_with_what_rsrv_gen_compiled(
    gpu: FakeGpu, doubling: Path, tmp_path: Path
) -> None:
    """The first request of a cold model loads the stored executables. The server compiles nothing."""
    repository = tmp_path / "gen"
    assert rsrv_gen([str(doubling), "-o", str(repository)]) == 0
    runtime("compile_for", repository, "h100")
    settings = repository / "lazy.yaml"
    settings.write_text("control: {enabled: false}\nruntime: {platform: cuda, start: lazy}\n")
    variables = {**gpu.environment, "RSRV_RUNTIME__COMPILATION_CACHE_DIR": str(tmp_path / "cache")}
    launcher = Launcher(os.getpid(), "0", settings, ROOT, {**os.environ, **variables})
    stub = Stub(cast(Runtime, launcher), doubling)
    try:
        assert read_status(os.getpid())["models"] == {}

        assert stub.send().answers.get(timeout=PATIENCE_S).error is None

        status = read_status(os.getpid())
        assert status["models"].keys() == {"doubling"}
        # The programs are the device's probe, and three sizes.
        assert (status["compiled"], status["from_cache"]) == (0, 4)
    finally:
        stub.model.close()
        end_runtime(launcher)


def export_sums(path: Path) -> None:
    """Write a bundle that adds up the rows of each sequence."""

    def add(params: Any, state: Any, x: jax.Array) -> Any:
        return {"y": state + x}, state + x

    inputs = {"x": np.ones((1, 3), np.float32)}
    export_stateful(
        add, jax.ShapeDtypeStruct((3,), np.float32), {}, inputs, slots=8, batch_sizes=[1, 4], out_dir=path
    )


def test_modules_with_state_are_stored_as_others_are(gpu: FakeGpu, tmp_path: Path) -> None:
    """A module that updates the state of sequences in place is compiled without a card, and the server loads it."""
    repository = tmp_path / "gen"
    export_sums(tmp_path / "sums")
    assert rsrv_gen([str(tmp_path / "sums"), "-o", str(repository)]) == 0

    assert "sums: 2 modules" in runtime("compile_for", repository, "h100")

    assert gpu.run(start_with_state, repository, tmp_path / "cache") == (0, 3)


def export_convolution(path: Path) -> None:
    """Write a bundle with a convolution, which XLA gives to cuDNN."""

    def convolve(params: Any, x: jax.Array) -> dict[str, jax.Array]:
        return {"y": jax.lax.conv(x, params["w"], (1, 1), "SAME")}

    weights = {"w": np.ones((4, 3, 3, 3), np.float32)}
    export_bundle(convolve, weights, {"x": np.ones((1, 3, 8, 8), np.float32)}, batch_sizes=[1], out_dir=path)


def test_a_convolution_is_not_stored_without_a_card(gpu: FakeGpu, tmp_path: Path) -> None:
    """A convolution is not compiled without a card, because cuDNN executes it only with an engine that was tuned on a card.

    A real cuDNN refused to execute a convolution that was compiled without a card: CUDNN_STATUS_BAD_PARAM.
    """
    repository = tmp_path / "gen"
    export_convolution(tmp_path / "convolution")
    assert rsrv_gen([str(tmp_path / "convolution"), "-o", str(repository)]) == 0

    assert "convolution: 0 modules" in runtime("compile_for", repository, "h100")

    with StoredExecutables(repository / "h100.executables") as stored:
        assert len(stored.contents.left) == 1
        assert set(stored.contents.models["convolution"].values()) == set(stored.contents.left)


def test_the_profile_of_a_card_brings_its_tuning_to_another_machine(
    gpu: FakeGpu, doubling: Path, tmp_path: Path
) -> None:
    """A profile has the tuning of a card's kernels. With this profile, a machine without the card compiles tuned kernels.

    A module that is not in the profile is reported, and is compiled without tuning.
    """
    repository, profile = tmp_path / "gen", tmp_path / "h100.profile"
    assert rsrv_gen([str(doubling), "-o", str(repository)]) == 0
    tuned = runtime("card_profile", repository, profile, variables=gpu.environment)
    assert "doubling: 3 modules" in tuned

    compiled = runtime("compile_for", repository, profile)
    assert "not tuned" not in compiled
    with StoredExecutables(repository / "h100.executables") as stored:
        assert stored.contents.tuned
        assert len(stored.contents.digests) == 4
    assert gpu.run(start, repository, tmp_path / "cache") == (0, 4)

    content = json.loads(profile.read_text())
    profile.write_text(json.dumps({**content, "tuning": ""}))
    assert "1 of them not tuned, because the profile lacks them" in runtime(
        "compile_for", repository, profile
    )
