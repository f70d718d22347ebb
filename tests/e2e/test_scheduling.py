"""Order of requests and shares of the device, as clients of a real server see them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc

from rsrv.control.v1 import control_pb2 as pb
from tests.e2e import bundles
from tests.e2e.calls import caller, random_u32, refusal, tensors
from tests.e2e.harness import RunningTriton, make_repository, running_triton
from tests.e2e.lives import Living
from tests.status import read_status
from tests.waiting import wait_until

#: Number of steps of a request to `elastic`. Its execution takes some hundredths of a second.
_STEPS = 100
SETTINGS = """
models:
  steady: {max_batch_size: 1}
  elastic: {weight: 2}
"""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningTriton]:
    folder = tmp_path_factory.mktemp("scheduling")
    sources = [bundles.ensure() / name for name in ("steady", "elastic")]
    repository = make_repository(folder, *sources, settings=SETTINGS)
    # The test of shares saturates the device, which causes these findings.
    expected = ("overloaded", "starved")
    with running_triton(repository, folder / "server.log", expected=expected) as server:
        yield server


@pytest.fixture
def server(running: RunningTriton) -> Iterator[RunningTriton]:
    """The server of all tests. After each test, the fixture sets the discipline to fair."""
    yield running
    set_discipline(running, pb.DISCIPLINE_FAIR)


def set_discipline(server: RunningTriton, discipline: pb.Discipline) -> None:
    """Set the discipline as an operator does. Without an operator's command, the control process sets the discipline of rsrv.yaml."""
    operator = Living(server)
    wait_until(lambda: operator.set_discipline(discipline), what="the runtime to take the discipline")


def status(server: RunningTriton) -> dict[str, Any]:
    models: dict[str, Any] = read_status(server.pid)["models"]
    return models


def arrived(server: RunningTriton) -> int:
    """Return how many requests of `steady` have reached the runtime so far."""
    steady = status(server)["steady"]
    return int(sum(steady["outcomes"].values()) + steady["queued"] + steady["executing"])


@pytest.fixture
def send(server: RunningTriton) -> Iterator[Callable[..., list[str]]]:
    """Yield a function that sends a request to `steady`, and returns when the request has reached the runtime.

    The request executes only after `go()`. The function returns a list, to which the name of each answered request is appended.
    All answers come over one connection, so the names are in the order of the answers.
    """
    answered: list[str] = []
    failed: list[object] = []
    sent = 0
    row = random_u32(np.random.default_rng(0), 1)
    expected = bundles.stepped(row, bundles.STEADY_STEPS)

    def send(name: str, **options: Any) -> list[str]:
        nonlocal sent

        def note(result: Any, error: Any) -> None:
            if error is not None or not np.array_equal(result.as_numpy("y"), expected):
                failed.append(error or result)
            answered.append(name)

        before = arrived(server)
        client.async_infer("steady", tensors(tritonclient.grpc, {"x": row}), note, **options)
        sent += 1
        wait_until(lambda: arrived(server) > before, what=f"{name} to arrive")
        return answered

    with tritonclient.grpc.InferenceServerClient(server.server.grpc_url) as client:
        server.operate("pause", "steady")
        try:
            yield send
        finally:
            go(server)
        wait_until(lambda: len(answered) == sent, what="all answers")
    assert not failed


def go(server: RunningTriton) -> None:
    """Let the waiting requests execute."""
    server.operate("continue", "steady")


def test_urgent_requests_pass_those_that_wait(server: RunningTriton, send: Callable[..., list[str]]) -> None:
    """A request with rsrv_priority 1 executes before a request without a priority, and a request with 9 after it."""
    send("background", parameters={"rsrv_priority": 9})
    send("ordinary")
    answered = send("urgent", parameters={"rsrv_priority": 1})

    go(server)
    wait_until(lambda: len(answered) == 3, what="all answers")
    assert answered == ["urgent", "ordinary", "background"]


def test_deadlines_decide_once_the_discipline_is_edf(
    server: RunningTriton, send: Callable[..., list[str]]
) -> None:
    """The discipline changes to edf while requests wait. The request with the earliest deadline executes first."""
    send("whenever")
    send("late", timeout=1200_000_000)
    set_discipline(server, pb.DISCIPLINE_EDF)
    answered = send("soon", timeout=600_000_000)

    go(server)
    wait_until(lambda: len(answered) == 3, what="all answers")
    assert answered == ["soon", "late", "whenever"]


def test_a_deadline_that_cannot_be_met_is_refused_before_it_passes(server: RunningTriton) -> None:
    """With edf, a request that takes longer than its deadline allows is refused at once, and never executes."""
    set_discipline(server, pb.DISCIPLINE_EDF)
    before = status(server)["steady"]
    timeout = int(before["costs"]["0/1"] * 1e6 / 2)
    x = np.ones((1, 4), np.uint32)
    with caller(server) as call:

        def is_shed() -> bool:
            hopeless = refusal(lambda: call("steady", {"x": x}, timeout=timeout))
            hopeless.assert_is("UNAVAILABLE", "grpc")
            assert hopeless.message.startswith("[rsrv:DEADLINE] "), str(hopeless)
            # On a busy machine, the deadline may pass before the request arrives.
            return "the deadline cannot be met" in hopeless.message

        wait_until(is_shed, what="a request that arrives before its deadline")
    steady = status(server)["steady"]
    assert steady["outcomes"]["shed"] == before["outcomes"].get("shed", 0) + 1
    assert steady["dispatches"] == before["dispatches"]


def test_two_saturated_models_share_the_device_by_weight(server: RunningTriton) -> None:
    """`elastic` has twice the weight of `steady`, and its requests cost much less. It gets two thirds of the device time."""
    row = random_u32(np.random.default_rng(1), 1)
    inputs = {
        "steady": {"x": row},
        "elastic": {"x": row, "steps": np.full((1, 1), _STEPS, np.int32)},
    }
    #: Number of requests of each model. Some of them still wait when the shares are read.
    counts = {"steady": 16, "elastic": 800}
    errors: list[object] = []

    def took(first: dict[str, Any], last: dict[str, Any]) -> dict[str, float]:
        return {model: last[model]["device_seconds"] - first[model]["device_seconds"] for model in counts}

    with tritonclient.grpc.InferenceServerClient(server.server.grpc_url) as client:
        server.operate("pause", "--all")
        try:
            for model, count in counts.items():
                sent = tensors(tritonclient.grpc, inputs[model])
                for _ in range(count):
                    client.async_infer(model, sent, lambda result, error: errors.append(error))
            wait_until(
                lambda: all(status(server)[model]["queued"] == count for model, count in counts.items()),
                what="saturation",
            )
        finally:
            server.operate("continue", "--all")

        def after(turns: int) -> dict[str, Any]:
            """Return the status if `steady` has been executed at least this many times, or nothing."""
            models = status(server)
            return models if models["steady"]["dispatches"] >= turns else {}

        begun = status(server)["steady"]["dispatches"]
        first = wait_until(lambda: after(begun + 2), what="the first turns")
        last = wait_until(lambda: after(first["steady"]["dispatches"] + 8), what="eight turns")
        assert last["steady"]["queued"]
        assert last["elastic"]["queued"]
        wait_until(lambda: len(errors) == sum(counts.values()), what="all answers")
    assert set(errors) == {None}
    shares = took(first, last)
    assert shares["elastic"] / sum(shares.values()) == pytest.approx(2 / 3, abs=0.08), shares
