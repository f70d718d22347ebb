"""Order, shares and residency, seen by clients of a real server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from rsrv.control.v1 import control_pb2 as pb
from tests.e2e import bundles
from tests.e2e.bundles import LEAST_STEPS
from tests.e2e.calls import assert_same, caller, random_u32, refusal
from tests.e2e.harness import RunningTriton, make_repository, running_triton
from tests.e2e.lives import Living
from tests.status import read_status
from tests.waiting import wait_until

#: Steps of `elastic` beyond the least, so that an execution lasts some hundredths of a second.
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
    with running_triton(repository, folder / "server.log") as server:
        yield server


@pytest.fixture
def server(running: RunningTriton) -> Iterator[RunningTriton]:
    """The server of all tests, whose discipline a test may change."""
    yield running
    set_discipline(running, pb.DISCIPLINE_FAIR)


def set_discipline(server: RunningTriton, discipline: pb.Discipline) -> None:
    """Set it as an operator does: the control process, once it has started, gives the runtime rsrv.yaml's otherwise."""
    operator = Living(server)
    wait_until(lambda: operator.set_discipline(discipline), what="the runtime to take the discipline")


def status(server: RunningTriton) -> dict[str, Any]:
    found: dict[str, Any] = read_status(server.pid)["models"]
    return found


def arrived(server: RunningTriton) -> int:
    """Return the number of requests of `steady` that ever reached the runtime."""
    steady = status(server)["steady"]
    return int(sum(steady["outcomes"].values()) + steady["queued"] + steady["executing"])


@pytest.fixture
def send(server: RunningTriton) -> Iterator[Callable[..., list[str]]]:
    """Sends a request of `steady` in the background; returns when it has arrived. None executes until `go()`.

    Returns the names of the requests, in the order of their answers.
    """
    ended: list[str] = []
    row = random_u32(np.random.default_rng(0), 1)

    def work(name: str, options: dict[str, Any]) -> None:
        with caller(server) as call:
            answer = call("steady", {"x": row}, **options)
        ended.append(name)
        assert_same(answer, {"y": bundles.stepped(row, bundles.STEADY_STEPS)})

    futures = []
    with ThreadPoolExecutor(3) as pool:

        def send(name: str, **options: Any) -> list[str]:
            before = arrived(server)
            futures.append(pool.submit(work, name, options))
            wait_until(lambda: arrived(server) > before, what=f"{name} to arrive")
            return ended

        server.operate("pause", "steady")
        try:
            yield send
        finally:
            go(server)
        for future in futures:
            future.result()


def go(server: RunningTriton) -> None:
    """Let the requests execute that wait."""
    server.operate("continue", "steady")


def test_urgent_requests_pass_those_that_wait(server: RunningTriton, send: Callable[..., list[str]]) -> None:
    """rsrv_priority 1 goes before no priority, 9 after it."""
    send("background", parameters={"rsrv_priority": 9})
    send("ordinary")
    ended = send("urgent", parameters={"rsrv_priority": 1})

    go(server)
    wait_until(lambda: len(ended) == 3, what="all answers")
    assert ended == ["urgent", "ordinary", "background"]


def test_deadlines_decide_once_the_discipline_is_edf(
    server: RunningTriton, send: Callable[..., list[str]]
) -> None:
    """After a change to edf at run time, the sooner deadline goes first, also among waiting requests."""
    send("whenever")
    send("late", timeout=60_000_000)
    set_discipline(server, pb.DISCIPLINE_EDF)
    ended = send("soon", timeout=30_000_000)

    go(server)
    wait_until(lambda: len(ended) == 3, what="all answers")
    assert ended == ["soon", "late", "whenever"]


def test_a_deadline_that_cannot_be_met_is_refused_before_it_passes(server: RunningTriton) -> None:
    """Under edf a request that would take longer than its deadline allows ends at once, and never executes."""
    set_discipline(server, pb.DISCIPLINE_EDF)
    before = status(server)["steady"]
    x = np.ones((1, 4), np.uint32)
    with caller(server) as call:
        hopeless = refusal(lambda: call("steady", {"x": x}, timeout=int(before["costs"]["0/1"] * 1e6 / 2)))

    hopeless.assert_is("UNAVAILABLE", "grpc")
    assert hopeless.message.startswith("[rsrv:DEADLINE] the deadline cannot be met"), str(hopeless)
    steady = status(server)["steady"]
    assert steady["outcomes"]["shed"] == before["outcomes"].get("shed", 0) + 1
    assert steady["dispatches"] == before["dispatches"]


def test_two_saturated_models_share_the_device_by_weight(server: RunningTriton) -> None:
    """`elastic` has twice the weight of `steady` and a fraction of its cost: it gets two thirds of the device time."""
    rng = np.random.default_rng(1)
    stop = threading.Event()
    first = status(server)

    def work(model: str) -> None:
        row = random_u32(rng, 1)
        inputs = {"x": row}
        steps = bundles.STEADY_STEPS
        if model == "elastic":
            inputs["steps"] = np.full((1, 1), _STEPS, np.int32)
            steps = _STEPS + LEAST_STEPS
        with caller(server) as call:
            while not stop.is_set():
                assert_same(call(model, inputs), {"y": bundles.stepped(row, steps)})

    # Each sends more than one execution takes, so that some always wait while others execute.
    clients = ["elastic"] * 12 + ["steady"] * 3
    with ThreadPoolExecutor(len(clients)) as pool:
        futures = [pool.submit(work, model) for model in clients]
        try:
            wait_until(
                lambda: all(
                    status(server)[model]["dispatches"] > first[model]["dispatches"] + 2
                    for model in ("elastic", "steady")
                ),
                what="saturation",
            )
            # On a busy machine the clients of one model may be too slow for a while to saturate it.
            for _ in range(4):
                before = status(server)
                turns = 8 + before["steady"]["dispatches"]
                wait_until(
                    lambda turns=turns: status(server)["steady"]["dispatches"] >= turns,  # type: ignore[misc]
                    timeout=120,
                    what="eight turns",
                )
                after = status(server)
                took = {
                    model: after[model]["device_seconds"] - before[model]["device_seconds"]
                    for model in ("elastic", "steady")
                }
                share = took["elastic"] / sum(took.values())
                if share == pytest.approx(2 / 3, abs=0.08):
                    break
        finally:
            stop.set()
        for future in futures:
            future.result()

    assert share == pytest.approx(2 / 3, abs=0.08), took
