"""A real server in trouble, and what `rsrv doctor` finds there."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import shutil
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsrv.cli import main as cli
from rsrv.control.triton import Triton
from rsrv_bundle.export import export_bundle
from tests.e2e import bundles
from tests.e2e.calls import Caller, Refused, at_once, caller, outcome
from tests.e2e.harness import EXPLICIT, HURRY, RunningTriton, StartTriton, make_repository, running_triton
from tests.waiting import wait_until

#: Bytes of `exact`, of which two fit beside the pinned models.
_BYTES = 1536
_PINNED = 3 * 256 * 256 * 4
SETTINGS = f"""
runtime: {{weight_budget_bytes: {_PINNED + 2 * _BYTES}}}
models:
  tickets: {{residency: device, weight: 50}}
  defects: {{residency: device}}
  cats: {{residency: device}}
"""
HOOKS = "def preprocess(inputs):\n    raise ValueError('broken')\n"
#: Of the second server: `large` never fits, and neither do the others all at once.
FAULTY_SETTINGS = f"""
runtime: {{weight_budget_bytes: {2 * _BYTES}}}
lifecycle: {{look_s: 0.1}}
models:
  steady: {{max_queue_depth: 1}}
"""
SLOW_HOOKS = "import time\n\n\ndef preprocess(inputs):\n    time.sleep(0.03)\n    return inputs\n"
#: Seconds until a look of a busy machine is sure to have the figures.
_SOON_S = 90.0


def export(folder: Path, name: str, sizes: list[int], steps: int, hooks: str | None = None) -> None:
    """Write a model of 256 x 256 weights that are applied in so many steps."""
    kernel = np.random.default_rng([*name.encode()]).normal(0, 0.05, (256, 256)).astype(np.float32)
    export_bundle(
        lambda w, x: {"y": jax.lax.fori_loop(0, steps, lambda _, y: jnp.tanh(y @ w["k"]), x)},
        {"k": kernel},
        {"x": np.zeros((1, 256), np.float32)},
        batch_sizes=sizes,
        out_dir=folder / name,
        hooks=hooks,
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningTriton]:
    """A server with models that are well until requests come."""
    folder = tmp_path_factory.mktemp("doctor")
    export(folder / "bundles", "tickets", [16], 400)
    export(folder / "bundles", "defects", [1], 1)
    export(folder / "bundles", "cats", [1, 32], 100)
    export(folder / "bundles", "broken", [1], 1, HOOKS)
    for number, name in enumerate(("first", "second", "third")):
        kernel = {"kernel": bundles.exact_kernel() + number}
        bundles.with_weights(bundles.ensure() / "exact", folder / "bundles" / name, kernel)
    repository = make_repository(folder, settings=SETTINGS)
    flags = [*EXPLICIT, HURRY]
    with running_triton(repository, folder / "server.log", extra_args=flags, expected=None) as running:
        yield running


def operate(server: RunningTriton, *command: str) -> None:
    assert cli.main([*command, "--server", str(server.grpc_port)]) == 0


def doctor(server: RunningTriton) -> tuple[dict[str, str], int]:
    """Return the severities of the findings by name, and the exit status."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = cli.main(["doctor", "--json", "--server", str(server.grpc_port)])
    found = json.loads(out.getvalue())["findings"]
    return {one["name"]: one["severity"].removeprefix("SEVERITY_").lower() for one in found}, status


@contextmanager
def asked(server: RunningTriton, models: Mapping[str, tuple[int, int]]) -> Iterator[None]:
    """Send each model requests of so many rows by so many clients until the block ends."""
    end = threading.Event()

    def ask(name: str, rows: int) -> None:
        width = 64 if name in ("first", "second", "third", "slow") else 256
        with caller(server) as call:
            while not end.is_set():
                with contextlib.suppress(Refused):
                    call(name, {"x": np.zeros((rows, width), np.float32)})

    clients = [(name, rows) for name, (rows, count) in models.items() for _ in range(count)]
    with ThreadPoolExecutor(len(clients)) as pool:
        asking = [pool.submit(ask, *client) for client in clients]
        try:
            yield
        finally:
            end.set()
        for one in asking:
            one.result()


@pytest.mark.long
def test_each_trouble_is_found(server: RunningTriton) -> None:
    """A well server has no urgent finding; then weights thrash, rows are padding, a hook raises, and one model starves."""
    found, status = doctor(server)
    assert (status, set(found.values()) - {"note"}) == (0, set())
    with asked(server, {"tickets": (16, 1), "defects": (1, 1)}):
        wait_until(
            lambda: server.grpc.get_inference_statistics("defects").model_stats[0].inference_count > 20
        )
    assert doctor(server)[1] == 0

    with asked(server, {"first": (1, 1), "second": (1, 1), "third": (1, 1)}):
        wait_until(lambda: doctor(server) == ({**found, "weights_thrash": "warning"}, 1), _SOON_S)
    with asked(server, {"cats": (2, 2)}):
        wait_until(lambda: "padding" in doctor(server)[0], _SOON_S)
    with asked(server, {"broken": (1, 1)}):
        wait_until(lambda: doctor(server)[0].get("requests_fail") == "critical", _SOON_S)
    assert doctor(server)[1] == 3
    with asked(server, {"tickets": (16, 4), "defects": (1, 1)}):
        wait_until(lambda: doctor(server)[0].get("starved") == "warning", 2 * _SOON_S)
    assert doctor(server)[0].keys() <= {*found, "weights_thrash", "padding", "requests_fail", "starved"}


@pytest.fixture
def faulty(tmp_path: Path, start_triton: StartTriton) -> RunningTriton:
    """A server whose device has room for two models of a kind, and not for `large`."""
    for number, name in enumerate(("first", "second", "third", "changed", "slow")):
        kernel = {"kernel": bundles.exact_kernel() + number}
        bundles.with_weights(bundles.ensure() / "exact", tmp_path / "bundles" / name, kernel)
    (tmp_path / "bundles" / "slow" / "model.py").write_text(SLOW_HOOKS)
    export(tmp_path / "bundles", "large", [1], 1)
    shutil.copytree(bundles.ensure() / "steady", tmp_path / "bundles" / "steady")
    repository = make_repository(tmp_path, settings=FAULTY_SETTINGS)
    return start_triton(repository, extra_args=[*EXPLICIT, HURRY], expected=None)


def test_troubles_of_requests_and_settings_are_found(faulty: RunningTriton, tmp_path: Path) -> None:
    """Clients and operators make nine troubles at one server: each is found, and no other."""
    x = {"x": np.zeros((1, 64), np.float32)}

    def often(call: Caller, model: str, inputs: Mapping[str, np.ndarray], **options: object) -> None:
        for _ in range(25):
            outcome(lambda: call(model, inputs, **options))

    with caller(faulty) as call:
        often(call, "first", x, parameters={"rsrv_deadline_unix_ns": 1})
        often(call, "third", x, parameters={"rsrv_priority": -1})
        often(call, "slow", x)
        operate(faulty, "pause", "second", "--mode", "reject")
        often(call, "second", x)
    at_once(faulty, 10, lambda call, _: outcome(lambda: call("steady", {"x": np.zeros((1, 4), np.uint32)})))
    for name in ("first", "second", "third"):
        operate(faulty, "residency", name, "device")
    (tmp_path / "bundles" / "changed" / "manifest.yaml").write_text("name: 3")
    (tmp_path / "gen" / "rsrv.yaml").write_text("models: 3")

    expected = {
        "bad_requests": "note",
        "bundle_refused": "warning",
        "deadlines_arrival": "warning",
        "over_pinned": "warning",
        "paused": "warning",
        "queue_full": "warning",
        "settings_refused": "warning",
        "slow_hooks": "note",
        "weights_too_big": "warning",
    }
    wait_until(lambda: doctor(faulty)[0].keys() >= expected.keys())
    assert doctor(faulty)[0] == expected

    async def queues() -> Mapping[str, tuple[int, float]]:
        async with Triton.of(faulty.pid) as triton:
            return await triton.queues()

    assert asyncio.run(queues())["slow"][0] == 25
