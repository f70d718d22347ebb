"""Where weights are, as clients and operators of a real server see it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from rsrv_bundle.export import export_bundle
from tests.e2e import bundles
from tests.e2e.calls import assert_same, caller
from tests.e2e.harness import RunningTriton, StartTriton, make_repository, running_triton
from tests.status import read_status
from tests.waiting import wait_until

#: Bytes of the weights of `exact`, a kernel of 64 x 6 f32.
_BYTES = 1536


def write_repository(folder: Path, settings: str, kernels: Mapping[str, bundles.Array]) -> Path:
    """Make a repository with copies of `exact` that have these names and kernels."""
    for name, kernel in kernels.items():
        bundles.with_weights(bundles.ensure() / "exact", folder / "bundles" / name, {"kernel": kernel})
    return make_repository(folder, settings=settings)


def where(server: RunningTriton) -> dict[str, str]:
    models: dict[str, Any] = read_status(server.pid)["models"]
    return {name: model["weights"] for name, model in models.items()}


@pytest.fixture
def x() -> bundles.Array:
    return np.random.default_rng(2).integers(-9, 9, (3, 64)).astype(np.float32)


#: Kernels of three models.
KERNELS: Mapping[str, bundles.Array] = {
    name: bundles.exact_kernel() + number for number, name in enumerate(("first", "second", "third"))
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningTriton]:
    """Serve three models with a budget for two. None of them is pinned, and the third one has no copy on the host."""
    settings = f"runtime: {{weight_budget_bytes: {2 * _BYTES}}}\nmodels: {{third: {{residency: unpinned}}}}"
    folder = tmp_path_factory.mktemp("weights")
    repository, expected = write_repository(folder, settings, KERNELS), ["weights_thrash"]
    with running_triton(repository, folder / "server.log", expected=expected) as running:
        yield running


def test_more_models_than_the_budget_holds(server: RunningTriton, x: bundles.Array) -> None:
    """Three models take turns on a budget for two. Their weights are loaded and evicted, and every answer is exact."""
    with caller(server) as call:
        for _ in range(5):
            for name, kernel in KERNELS.items():
                assert_same(call(name, {"x": x}), {"y": x @ kernel})

    models = read_status(server.pid)["models"]
    assert sum(model["weights"] == "resident" for model in models.values()) == 2
    assert all(model["loads"] >= 4 and model["evictions"] >= 4 for model in models.values()), models


@pytest.mark.long
def test_equal_weights_are_stored_once(start_triton: StartTriton, tmp_path: Path, x: bundles.Array) -> None:
    """The budget has room for one kernel. Three models with equal kernels fit, and the host also stores the kernel once."""
    kernels = dict.fromkeys(("first", "second", "third"), bundles.exact_kernel())
    settings = f"runtime: {{weight_budget_bytes: {_BYTES}}}"
    server = start_triton(write_repository(tmp_path, settings, kernels))

    with caller(server) as call:
        for name, kernel in kernels.items():
            assert_same(call(name, {"x": x}), {"y": x @ kernel})

    status = read_status(server.pid)
    assert {model["evictions"] for model in status["models"].values()} == {0}
    for tier in (status["memory"], status["host"]):
        assert (tier["logical_bytes"], tier["physical_bytes"]) == (3 * _BYTES, _BYTES)


def test_an_operator_moves_weights_between_the_tiers(server: RunningTriton, x: bundles.Array) -> None:
    """A pinned model stays resident while two others take turns. After it is unpinned, it is evicted."""

    def host_bytes() -> int:
        return int(read_status(server.pid)["host"]["physical_bytes"])

    wait_until(lambda: host_bytes() == 2 * _BYTES, what="the host's copies")
    server.operate("pin", "first")
    wait_until(lambda: where(server)["first"] == "resident", what="the pinned model's load")
    with caller(server) as call:
        for _ in range(3):
            for name in ("second", "third"):
                assert_same(call(name, {"x": x}), {"y": x @ KERNELS[name]})
                assert where(server)["first"] == "resident"
        server.operate("compact")
        assert_same(call("first", {"x": x}), {"y": x @ KERNELS["first"]})
        server.operate("unpin", "first")
        for name in ("second", "third"):
            assert_same(call(name, {"x": x}), {"y": x @ KERNELS[name]})
    assert where(server) == {"first": "absent", "second": "resident", "third": "resident"}
    wait_until(lambda: host_bytes() == 2 * _BYTES, what="the host's copy")


@pytest.mark.long
def test_servers_on_one_machine_share_a_host_copy(
    start_triton: StartTriton, tmp_path: Path, x: bundles.Array
) -> None:
    """Two servers on one machine map the same file of weights. The last server removes it at its end, even if it is killed."""
    kernel = np.random.default_rng(3).integers(-9, 9, (64, 512)).astype(np.float32)
    export_bundle(
        lambda params, x: {"y": x @ params["kernel"]},
        {"kernel": jnp.asarray(kernel)},
        {"x": np.zeros((1, 64), np.float32)},
        batch_sizes=[4],
        out_dir=tmp_path / "bundles" / "wide",
    )
    digest = hashlib.sha256(kernel.tobytes()).hexdigest()
    shared = Path(f"/dev/shm/rsrv-weights-u{os.getuid()}") / digest
    settings = "runtime: {shared_host_weights: true}"
    repositories = [
        make_repository(tmp_path / gpu, tmp_path / "bundles", settings=settings) for gpu in ("one", "other")
    ]
    servers = [start_triton(repository) for repository in repositories]

    for server in servers:
        with caller(server) as call:
            assert_same(call("wide", {"x": x}), {"y": x @ kernel})
    assert shared.stat().st_size == kernel.nbytes
    servers[0].server.terminate()
    assert shared.exists()
    servers[1].server.kill()
    wait_until(lambda: not shared.exists(), what="the last one's removal")
