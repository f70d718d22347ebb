"""Requests and runs of meta models are aborted by their clients' ids."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rsrv.settings import load_settings
from rsrv.stub.calls import CallError
from rsrv.stub.engine import Engine
from rsrv.wire.frames import Status
from tests.fakes import FakeError, FakeRequest
from tests.unit.runtime.conftest import Runtime, StartMeta, StartRuntime
from tests.unit.runtime.engines import make_engine
from tests.unit.runtime.metas import (
    Pause,
    answer_of,
    assert_fails,
    assert_served,
    assert_y,
    queued,
    rows,
    send,
    status_of,
    stopping,
)
from tests.unit.runtime.watchers import Operator
from tests.waiting import wait_until


@pytest.fixture
def runtime(start_runtime: StartRuntime) -> Runtime:
    """Start a runtime for one run of a meta model at a time."""
    return start_runtime(load_settings("stub: {in_place_ms: 0}\nscheduler: {meta_concurrency: 1}"))


@pytest.fixture
def operator(runtime: Runtime) -> Iterator[Operator]:
    with Operator(runtime) as operator:
        yield operator


@pytest.fixture
def engine(runtime: Runtime, doublings: dict[str, Path]) -> Engine:
    """Return an engine of model `c`."""
    return make_engine(runtime, doublings["c"], name="c")


def named(id: str, value: float = 1.0) -> FakeRequest:
    return FakeRequest({"x": rows(1, value)}, id=id)


def test_what_waits_is_aborted_and_what_executes_is_not(
    runtime: Runtime, engine: Engine, operator: Operator
) -> None:
    """An abort ends all waiting requests with the id.

    The executing request is answered, and so are requests with another id or none.
    """
    runtime.device.gate.clear()
    requests = [named("ours")]
    engine.execute(requests)
    runtime.device.gate.wait_until_held()
    requests += [named("ours"), named("theirs"), named("ours"), named("")]
    engine.execute(requests[1:])
    wait_until(lambda: queued("c") == 4)

    assert operator.do("abort", request="") == {"aborted": 0, "executing": 0}
    assert operator.do("abort", request="ours") == {"aborted": 2, "executing": 1}

    for request in (requests[1], requests[3]):
        assert_fails(answer_of(request), FakeError.CANCELLED, "the request was cancelled")
    runtime.device.gate.set()
    for request in (requests[0], requests[2], requests[4]):
        assert_y(answer_of(request), rows(1, 5))
    assert operator.do("abort", request="ours") == {"aborted": 0, "executing": 0}


def test_a_run_that_waits_is_turned_away(runtime: Runtime, start_meta: StartMeta, operator: Operator) -> None:
    """A run that waits for admission is aborted before it begins. The run in progress is answered."""
    pause = Pause()
    meta = start_meta(runtime, stopping(pause))
    first, second = named("first"), named("second")
    threads = [send(meta, first)]
    pause.reached()
    threads.append(send(meta, second))
    wait_until(lambda: status_of()["waiting"] == 1)

    assert operator.do("abort", request="second") == {"aborted": 1, "executing": 0}

    assert_fails(answer_of(second), FakeError.CANCELLED, "the request was aborted")
    pause.go()
    assert_y(answer_of(first), rows(1, 8))
    for thread in threads:
        thread.join()
    pause.go()
    assert_served(meta)


def test_a_run_under_way_ends_with_its_next_call(
    runtime: Runtime, start_meta: StartMeta, operator: Operator
) -> None:
    """An aborted run in progress fails at its next call with CANCELLED, and the next run is admitted."""
    pause = Pause()
    errors: list[CallError] = []

    def run(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
        first = call("a", inputs)
        pause()
        try:
            return {"y": call("b", {"x": first["y"]})["y"]}
        except CallError as error:
            errors.append(error)
            raise

    meta = start_meta(runtime, run)
    request = named("ours")
    thread = send(meta, request)
    pause.reached()

    assert operator.do("abort", request="ours") == {"aborted": 1, "executing": 0}
    assert operator.do("abort", request="ours") == {"aborted": 0, "executing": 0}

    pause.go()
    assert_fails(answer_of(request), FakeError.CANCELLED, "stage 'b': the request was aborted")
    assert [error.status for error in errors] == [Status.CANCELLED]
    thread.join()
    # The request is answered before its run ends.
    wait_until(lambda: status_of()["outcomes"]["cancelled"] == 1)
    pause.go()
    assert_served(meta)


def test_the_calls_of_a_run_end_with_it(
    runtime: Runtime, start_meta: StartMeta, engine: Engine, operator: Operator
) -> None:
    """When a run is aborted, its waiting call ends at once, its executing call completes, and the request fails."""
    meta = start_meta(runtime, lambda inputs, call: call.many([("a", inputs), ("b", inputs)])[1])
    runtime.device.gate.clear()
    request = named("ours")
    thread = send(meta, request)
    runtime.device.gate.wait_until_held()
    wait_until(lambda: queued("a") + queued("b") == 1)

    assert operator.do("abort", request="ours") == {"aborted": 1, "executing": 1}

    runtime.device.gate.set()
    assert_fails(answer_of(request), FakeError.CANCELLED, "the request was cancelled")
    thread.join()
