"""Trouble in a real runtime, and the findings that its figures raise."""

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from rsrv.control.diagnosis import find
from rsrv.control.figures import DeviceFigures, ModelFacts, ServerFigures
from rsrv.control.findings import ServerFinding
from rsrv.hooks.loader import Hooks
from rsrv.runtime.device import DeviceError
from rsrv.settings import Settings, load_settings
from rsrv.stub.engine import Engine
from rsrv.wire.socket import read_status
from tests.fakes import FakeRequest
from tests.unit.runtime.conftest import Runtime, StartRuntime
from tests.unit.runtime.engines import make_engine, ramp
from tests.unit.runtime.metas import ask, send
from tests.unit.runtime.test_metrics import metrics, reporting
from tests.unit.runtime.watchers import Operator, Watcher
from tests.waiting import wait_until

#: Bytes of one model: three f32.
SIZE = 12


class Troubled:
    """A runtime with models `a` and so on, each with a stub that reports."""

    def __init__(self, runtime: Runtime, settings: Settings, engines: dict[str, Engine]) -> None:
        self.runtime, self.settings, self.engines = runtime, settings, engines

    def ask(self, times: int, name: str = "a", count: int = 1, **options: Any) -> None:
        """Send requests one after the other."""
        for _ in range(times):
            ask(self.engines[name], FakeRequest({"x": ramp(count)}, **options))

    def reported(self, status: str, count: int, name: str = "a") -> None:
        """Return when the stub has reported that many answers."""
        wait_until(lambda: metrics(self.runtime)["models"][name]["responses"].get(status) == count)

    def findings(self, costs: Mapping[int, float] | None = None) -> dict[str, ServerFinding]:
        """Return what is found in a minute that ends now, with these seconds of executions by their size."""
        watcher = Watcher(self.runtime)
        models = read_status(os.getpid())["models"]
        now = ServerFigures(
            t=60.0,
            unix_s=60.0,
            devices={0: DeviceFigures("1", 0.0, metrics(self.runtime))},
            entries=watcher.entries,  # type: ignore[arg-type]
            failures={},
            settings=self.settings,
            facts={name: ModelFacts(said["device_bytes"], costs or {}) for name, said in models.items()},
        )
        watcher.close()
        start = ServerFigures(0.0, 0.0, {}, {}, {}, self.settings)
        return {one.name: one for one in find(start, now)}


@pytest.fixture
def troubled(start_runtime: StartRuntime, doublings: dict[str, Path]) -> Iterator[Any]:
    """Start a runtime with these settings and hooks, and models."""
    with ExitStack() as opened:

        @contextmanager
        def engine(runtime: Runtime, name: str, bundle: Path, hooks: Hooks | None) -> Iterator[Engine]:
            made = make_engine(runtime, bundle, hooks, name=name)
            with reporting(made):
                yield made
            runtime.device.gate.set()
            made.close()

        def start(
            settings: str = "", names: str = "a", hooks: Hooks | None = None, bundle: Path | None = None
        ) -> Troubled:
            found = load_settings(settings)
            runtime = start_runtime(found)
            engines = {
                name: opened.enter_context(engine(runtime, name, bundle or doublings[name], hooks))
                for name in names
            }
            return Troubled(runtime, found, engines)

        yield start


def test_a_runtime_that_is_well_has_no_findings(troubled: Any) -> None:
    """Full batches and single rows for three models that fit raise nothing."""
    server = troubled(names="abc")
    for name in "abc":
        server.ask(30, name)
        server.ask(30, name, 8)
        server.reported("ok", 60, name)
    assert server.findings() == {}


def test_weights_thrash(troubled: Any) -> None:
    """Three models take turns on a budget for two."""
    server = troubled(f"runtime: {{weight_budget_bytes: {2 * SIZE}}}", "abc")
    for _ in range(10):
        for name in "abc":
            server.ask(1, name)
    found = server.findings()
    assert found.keys() == {"weights_thrash"}
    assert found["weights_thrash"].evidence.startswith("weights thrash: 36 B are asked for, 24 B fit; ")
    assert found["weights_thrash"].cure.startswith(
        "set runtime.weight_budget_bytes: 36 in rsrv.yaml (12 B more of the device's memory) and `rsrv restart`, or pin"
    )


def test_weights_never_fit(troubled: Any) -> None:
    """A budget below one model's weights is found without requests."""
    assert "weights_too_big" in troubled(f"runtime: {{weight_budget_bytes: {SIZE - 1}}}").findings()


def test_pinned_models_exceed_the_budget(troubled: Any) -> None:
    """Two pinned models on a budget for one are found without requests."""
    pinned = "models: {a: {residency: device}, b: {residency: device}}"
    found = troubled(f"runtime: {{weight_budget_bytes: {SIZE}}}\n{pinned}", "ab").findings()
    assert found["over_pinned"].evidence == "24 B of weights are pinned, 12 B fit"


def test_padding(troubled: Any) -> None:
    """Requests of two rows, of a model that is compiled for 1, 4 and 8, are half padding."""
    server = troubled()
    server.ask(40, count=2)
    found = server.findings({1: 0.001, 4: 0.004, 8: 0.008})
    assert found.keys() == {"padding"}
    assert found["padding"].evidence == "50% of the rows of a are padding (80, beside 80 rows of requests)"
    assert found["padding"].cure.startswith(
        "export batch size 2 as well, `rsrv-bundle export --batch-sizes 1,2,4,8` (saves up to 50% of its device time"
    )


def test_a_full_queue(troubled: Any) -> None:
    """Requests beyond a short queue are refused while the device is held."""
    server = troubled("scheduler: {max_queue_depth: 1}")
    server.runtime.device.gate.clear()
    requests = [FakeRequest({"x": ramp(8)}) for _ in range(20)]
    waiting = [send(server.engines["a"], request) for request in requests]
    wait_until(lambda: metrics(server.runtime)["models"]["a"]["refused"].get("queue_full", 0) >= 10)
    found = server.findings()
    server.runtime.device.gate.set()
    for thread in waiting:
        thread.join()
    assert found.keys() == {"queue_full"}
    assert found["queue_full"].cure.startswith("`rsrv policy a --max-queue-depth 2`")


def test_a_paused_model_with_requests(troubled: Any) -> None:
    """Requests that a pause holds are found; the pause alone is not."""
    server = troubled()
    with Operator(server.runtime) as operator:
        operator.do("pause", model="a", mode="hold")
        assert server.findings() == {}
        thread = send(server.engines["a"], FakeRequest({"x": ramp(1)}))
        wait_until(lambda: metrics(server.runtime)["models"]["a"]["queued"] == 1)
        found = server.findings()
        operator.do("continue", model="a")
        thread.join()
    assert found.keys() == {"paused"}
    assert found["paused"].cure.startswith("`rsrv continue a`")


def test_executions_fail(troubled: Any) -> None:
    """Errors of the device are failures of executions."""
    server = troubled()
    server.runtime.device.fail_next("launch", times=5, error=DeviceError("broken"))
    server.ask(5)
    server.reported("internal", 5)
    found = server.findings()
    assert found.keys() == {"requests_fail"}
    assert found["requests_fail"].cause == "the model failed to execute; the server's log says why"


def test_a_hook_raises(troubled: Any) -> None:
    """Errors of preprocess are failures of model.py, which the runtime never saw."""

    def preprocess(arrays: dict[str, Any]) -> dict[str, Any]:
        raise ValueError("secret contents of a request")

    server = troubled(hooks=Hooks(preprocess))
    server.ask(5)
    server.reported("internal", 5)
    found = server.findings()
    assert found.keys() == {"requests_fail"}
    assert found["requests_fail"].cause == "preprocess raised ValueError"


def test_clients_send_wrong_requests(troubled: Any) -> None:
    """Too many rows are the clients' fault, and a note."""
    server = troubled()
    server.ask(12, count=9)
    server.reported("invalid", 12)
    assert {name: one.severity for name, one in server.findings().items()} == {"bad_requests": "note"}


def test_deadlines_pass_in_the_queue(troubled: Any) -> None:
    """Requests that a held device does not reach in time miss their deadlines in the queue."""
    server = troubled()
    server.runtime.device.gate.clear()
    first = send(server.engines["a"], FakeRequest({"x": ramp(8)}))
    server.runtime.device.gate.waiting.wait()
    late = [send(server.engines["a"], FakeRequest({"x": ramp(8)}, timeout_us=300_000)) for _ in range(8)]
    wait_until(lambda: sum(metrics(server.runtime)["models"]["a"]["missed"].values()) >= 8)
    found = server.findings()
    server.runtime.device.gate.set()
    for thread in (first, *late):
        thread.join()
    assert found.keys() == {"deadlines_queue"}


def test_weights_are_not_loaded_for_requests(troubled: Any) -> None:
    """With lifecycle.mode explicit, requests are refused until the control plane loads the weights."""
    server = troubled("lifecycle: {mode: explicit}")
    server.ask(6)
    assert server.findings().keys() == {"not_resident"}
