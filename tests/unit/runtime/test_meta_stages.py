"""Runs of meta models whose callees are on two devices. The tests have a real runtime for each device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rsrv.hooks.loader import Hooks
from rsrv.settings import load_settings
from rsrv.stub.meta_engine import MetaEngine, MetaModel
from rsrv.stub.replica import ModelReplica, StubProcess
from rsrv.stub.replicas import Replicas
from rsrv.stub.replies import Responses
from rsrv.stub.session import Attachment, Session
from rsrv.stub.tensors import Tensors
from tests.builders import write_meta
from tests.fakes import FakePbUtils
from tests.status import status_of
from tests.unit.runtime.conftest import Runtime, StartRuntime
from tests.unit.runtime.metas import OUTPUTS, answer_of, ask, assert_y, request, rows
from tests.waiting import wait_until


class FromFirst(Replicas):
    """A model whose runs always begin on device 0, even after a death, and call `b` on device 1."""

    def live(self) -> ModelReplica[Any] | None:
        return self._replicas[0]

    def stages(self, device: int) -> dict[str, ModelReplica[Any]]:
        return {"a": self._replicas[0], "b": self._replicas[1]}


class StagedMeta:
    """A meta model that calls `a` on device 0 and `b` on device 1, with its engines and runtimes by device."""

    def __init__(self, start: StartRuntime, bundles: dict[str, Path], path: Path, run: Any) -> None:
        self.runtimes: list[Runtime] = []
        self.engines: list[MetaEngine] = []
        process = StubProcess(Tensors(FakePbUtils), Responses(FakePbUtils))
        write_meta(path, "def run(inputs, call): ...", "ab")
        self._start = start
        calls = {name: str(bundles[name]) for name in "ab"}

        def open_session(device: int) -> Session:
            self.start_runtime(device)
            return Session(lambda: self.runtimes[device].open(), "meta", str(path), calls, device)

        def make(session: Session, attachment: Attachment) -> MetaEngine:
            self.engines.append(
                MetaEngine(
                    session,
                    attachment,
                    process,
                    MetaModel(run, {"a": Hooks(), "b": Hooks()}, OUTPUTS),
                    lambda settings: pytest.fail("nothing goes through Triton"),
                )
            )
            return self.engines[-1]

        self.replicas = FromFirst(open_session, make, "meta", process)
        self.replicas.load()

    def start_runtime(self, device: int) -> Runtime:
        """Start a device's first runtime, or the next one after its runtime has ended."""
        runtime = self._start(load_settings("scheduler: {meta_concurrency: 4}"), devices=2)
        # The next runtime takes the socket's path, so this runtime's socket is renamed.
        runtime.socket = runtime.socket.rename(runtime.socket.with_name(f"{device}.sock"))
        self.runtimes[device:] = [runtime, *self.runtimes[device + 1 :]]
        return runtime


def through_device(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
    first = call("a", inputs, keep_on_device=True)["y"]
    return {"y": call("b", {"x": first})["y"]}


async def gathered(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
    (first, second) = await call.many([("a", inputs, True), ("b", inputs, True)])
    return {"y": (await call("b", {"x": first["y"]}))["y"] + 0 * second["y"]}


@pytest.fixture(params=[through_device, gathered])
def staged(
    start_runtime: StartRuntime, doublings: dict[str, Path], tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[StagedMeta]:
    made = StagedMeta(start_runtime, doublings, tmp_path / "meta", request.param)
    yield made
    made.replicas.close()


def test_each_call_is_executed_on_the_device_of_its_model(staged: StagedMeta) -> None:
    """Each call is executed on its model's device.

    A result that the next call needs on another device is passed through the host, even if the run asked to keep it on the
    device.
    """
    before = [len(runtime.device.executed) for runtime in staged.runtimes]
    for value in range(5):
        (answer,) = ask(staged.engines[0], request(2, value))
        assert_y(answer, rows(2, 2 * (2 * value + 1) + 2))

    executed = [
        len(runtime.device.executed) - count for runtime, count in zip(staged.runtimes, before, strict=True)
    ]
    assert executed[0] == 5
    assert executed[1] >= 5
    # The last request is answered before its run ends.
    wait_until(lambda: not any(runtime.device.kept for runtime in staged.runtimes))


def test_a_run_by_stage_counts_as_one_request(staged: StagedMeta) -> None:
    """A run on two devices counts as one request, on the device where it begins. Each device counts its calls."""
    for value in range(5):
        ask(staged.engines[0], request(2, value))

    def counted() -> list[Any]:
        return [status_of(runtime.loop._commands.record())["metas"]["meta"] for runtime in staged.runtimes]

    # The request is answered before its run ends.
    wait_until(lambda: counted()[0]["outcomes"]["answered"] == 5)
    first, second = counted()
    assert not any(second["outcomes"].values())
    assert first["calls"] == 5
    assert second["calls"] >= 5


def test_runs_by_stage_do_not_wait_for_each_other_for_ever(staged: StagedMeta) -> None:
    """More runs than places on two devices do not block each other, because all enter the devices in the same order."""
    requests = [request(1, value) for value in range(20)]

    assert staged.engines[0].execute(requests) is None

    for value, client_request in enumerate(requests):
        assert_y(answer_of(client_request), rows(1, 2 * (2 * value + 1) + 2))


@pytest.mark.parametrize("device", [0, 1])
def test_a_run_by_stage_outlives_one_of_its_runtimes(staged: StagedMeta, device: int) -> None:
    """If one device's runtime dies, a run leaves the other device as well, and enters both again when there is a next runtime."""
    requests = [request(1, value) for value in range(6)]
    staged.runtimes[device].device.gate.clear()
    assert staged.engines[0].execute(requests) is None
    staged.runtimes[device].device.gate.wait_until_held()
    staged.runtimes[device].stop()
    staged.runtimes[device].device.gate.set()

    staged.start_runtime(device)

    for value, client_request in enumerate(requests):
        assert_y(answer_of(client_request), rows(1, 2 * (2 * value + 1) + 2))
    (later,) = ask(staged.engines[0], request(1, 9))
    assert_y(later, rows(1, 40))
