"""More models than fit into memory, and models that are loaded and unloaded. All answers are right, and all memory is freed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.calls import Caller, assert_same, at_once, caller
from tests.e2e.harness import RunningTriton, StartTriton, make_repository
from tests.held import Held, assert_returned, held, settled
from tests.products import WEIGHT_BYTES, answer, make_products, question
from tests.status import read_status
from tests.waiting import wait_until

pytestmark = pytest.mark.long

MODELS = 20

#: A model that does nothing. Its loads show how much memory Triton itself loses with each load.
_PLAIN_CONFIG = """
name: "{name}"
backend: "python"
max_batch_size: 8
input [ {{ name: "x" data_type: TYPE_FP32 dims: [ 512 ] }} ]
output [ {{ name: "y" data_type: TYPE_FP32 dims: [ 512 ] }} ]
instance_group [ {{ kind: KIND_CPU }} ]
dynamic_batching {{ }}
"""
_PLAIN_MODEL = """
import triton_python_backend_utils as pb


class TritonPythonModel:
    def execute(self, requests):
        arrays = [pb.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        return [pb.InferenceResponse([pb.Tensor("y", array)]) for array in arrays]
"""


def serve(start: StartTriton, folder: Path, count: int, settings: str = "", **options: Any) -> RunningTriton:
    """Start a server with `count` products."""
    make_products(folder / "bundles", count)
    return start(make_repository(folder, settings=settings), **options)


def ask(call: Caller, number: int, seed: int, rows: int = 1) -> None:
    x = question(seed, rows)
    assert_same(call(f"product_{number}", {"x": x}), {"y": answer(number, x)})


def models(server: RunningTriton) -> dict[str, Any]:
    by_name: dict[str, Any] = read_status(server.pid)["models"]
    return by_name


def test_many_clients_of_six_models_with_room_for_two(start_triton: StartTriton, tmp_path: Path) -> None:
    """Six models take turns on a device with room for two. All answers are exact, and at most two models are resident."""
    server = serve(start_triton, tmp_path, 6, f"runtime: {{weight_budget_bytes: {2 * WEIGHT_BYTES + 1000}}}")

    def work(call: Caller, number: int) -> int:
        rng = np.random.default_rng(number)
        for seed in range(15):
            ask(call, int(rng.integers(6)), seed, int(rng.integers(1, 5)))
            by_name = models(server)
            assert sum(model["weights"] == "resident" for model in by_name.values()) <= 2, by_name
        return 15

    sent = sum(at_once(server, 8, work))

    by_name = models(server)
    assert sum(model["outcomes"]["answered"] for model in by_name.values()) == sent
    assert all(model["loads"] and model["evictions"] for model in by_name.values()), by_name
    moved = sum(model["loads"] - model["evictions"] for model in by_name.values())
    resident = sum(model["weights"] == "resident" for model in by_name.values())
    assert moved == resident, by_name


# --- coming and going -----------------------------------------------------------------------------------------------


def add_plain_models(repository: Path, count: int) -> None:
    for number in range(count):
        version = repository / f"plain_{number}" / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_text(_PLAIN_MODEL)
        (version.parent / "config.pbtxt").write_text(_PLAIN_CONFIG.format(name=f"plain_{number}"))


def ask_plain(server: RunningTriton, number: int) -> None:
    x = question(number)
    with caller(server) as call:
        assert_same(call(f"plain_{number}", {"x": x}), {"y": x})


def ask_product(server: RunningTriton, number: int) -> None:
    with caller(server) as call:
        for rows in (1, 3):
            ask(call, number, number, rows)


def come_and_go(server: RunningTriton, kind: str, rounds: int) -> None:
    """Load, ask and unload the models of a kind one after the other, `rounds` times in all."""
    use = {"plain": ask_plain, "product": ask_product}[kind]
    for round_ in range(rounds):
        number = round_ % MODELS
        server.grpc.load_model(f"{kind}_{number}")
        use(server, number)
        server.grpc.unload_model(f"{kind}_{number}")


def regions(server: RunningTriton) -> set[str]:
    """Return the names of the shared memory regions that the server maps. Each stub has one region."""
    lines = Path(f"/proc/{server.pid}/maps").read_text().splitlines()
    return {line.split()[-1] for line in lines if "/dev/shm/" in line}


def at_rest(server: RunningTriton) -> tuple[Held, Held]:
    """Wait until no model and no stub is left. Return the resources that the server and the runtime still use."""
    wait_until(lambda: not models(server) and not server.stub_pids(), what="all models to be gone")
    runtime = int(read_status(server.pid)["pid"])
    return settled(lambda: held(server.pid)), settled(lambda: held(runtime))


@pytest.mark.timeout(1800)
def test_models_that_come_and_go_leave_nothing(start_triton: StartTriton, tmp_path: Path) -> None:
    """20 models are loaded and unloaded, 500 times in all. At the end, the runtime uses no more resources than before.

    Triton itself loses no more memory per load than with plain Python models.
    """
    server = serve(start_triton, tmp_path, MODELS, extra_args=["--model-control-mode=explicit"])
    add_plain_models(tmp_path / "gen", MODELS)
    for kind in ("plain", "product"):
        come_and_go(server, kind, MODELS)
    start, runtime = at_rest(server)
    come_and_go(server, "plain", 100)
    control, _ = at_rest(server)
    come_and_go(server, "product", 500)
    end, runtime_then = at_rest(server)

    print(f"tritonserver: {start}; after 100 plain loads {control}; after 500 of ours {end}")
    print(f"runtime: {runtime}; after 500 loads {runtime_then}")
    assert_returned(runtime, runtime_then)
    assert regions(server) == set()
    # The server's thread pools sometimes grow, whichever models are loaded.
    assert end.descriptors < start.descriptors + 5
    assert end.threads < start.threads + 5
    # Triton loses some kilobytes in each load of any model.
    plain = (control.resident - start.resident) / 100
    assert (end.resident - control.resident) / 500 <= max(2 * plain, 8192)
