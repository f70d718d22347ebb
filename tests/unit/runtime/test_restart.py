"""The command `restart`: a runtime ends, and the next one answers the waiting requests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rsrv.settings import load_settings
from rsrv.stub.engine import Engine
from rsrv.wire.frames import Status
from rsrv.wire.socket import Closed
from tests.fakes import FakeRequest
from tests.status import read_status
from tests.unit.runtime.conftest import Runtime, StartMeta, StartRuntime
from tests.unit.runtime.counting import count, expected, export_counting
from tests.unit.runtime.engines import answered, send_one
from tests.unit.runtime.metas import Run, answer_of, assert_y, both_kinds, queued, request, status_of
from tests.unit.runtime.metas import rows as rows_of
from tests.unit.runtime.test_generating import Client
from tests.unit.runtime.watchers import Operator
from tests.waiting import wait_until

SETTINGS = load_settings("stub: {in_place_ms: 0}")


@pytest.fixture
def runtime(start_runtime: StartRuntime) -> Runtime:
    return start_runtime(SETTINGS)


def one_executes_and_one_waits(runtime: Runtime, engine: Engine) -> tuple[FakeRequest, FakeRequest]:
    runtime.device.gate.clear()
    executing = send_one(engine)
    runtime.device.gate.wait_until_held()
    waiting = send_one(engine)
    wait_until(lambda: queued("doubling") == 1)
    return executing, waiting


def until_a_restart_is_under_way(runtime: Runtime) -> None:
    with Operator(runtime) as second:
        refused = second.do("restart", drain_s=30)
        assert refused["error"] == "another restart or sleep is in progress; wait until it has ended"


def test_what_executes_is_answered_and_what_waits_is_given_to_the_next_runtime(
    start_runtime: StartRuntime, runtime: Runtime, engine: Engine
) -> None:
    """During a restart, the old runtime only finishes the execution in progress.

    The next runtime answers the waiting request, and a request that arrives between the two runtimes.
    """
    executing, waiting = one_executes_and_one_waits(runtime, engine)
    runtime.device.executed.clear()
    with Operator(runtime) as operator:
        operator.send(command="restart", drain_s=30.0)
        until_a_restart_is_under_way(runtime)
        runtime.device.gate.set()
        wait_until(lambda: not runtime.alive)

    assert runtime.device.executed == [1]
    between = send_one(engine)
    start_runtime(SETTINGS)
    assert [answered(client_request) for client_request in (executing, waiting, between)] == [1, 1, 1]


def test_a_closed_engine_has_no_connection_to_a_runtime_that_has_ended(
    start_runtime: StartRuntime, runtime: Runtime, engine: Engine
) -> None:
    """After a restart, the next runtime answers a waiting request.

    Closing the engine closes the connections to both runtimes.
    """
    attachment = engine.session.attachment
    assert attachment is not None
    with Operator(runtime) as operator:
        assert operator.do("restart", drain_s=30.0) == {}
    wait_until(lambda: not runtime.alive)
    waiting = send_one(engine)
    start_runtime(SETTINGS)
    assert answered(waiting) == 1

    engine.close()

    assert attachment.direct.sock.fileno() == attachment.deferred.sock.fileno() == -1


@both_kinds
def test_runs_in_progress_end_in_the_old_runtime_and_others_begin_in_the_next_one(
    start_runtime: StartRuntime, runtime: Runtime, start_meta: StartMeta, run: Run
) -> None:
    """Two runs in progress are answered before the old runtime ends. A waiting run begins in the next one."""
    engine = start_meta(runtime, run)
    requests = [request(value=n) for n in range(3)]
    runtime.device.gate.clear()
    assert engine.execute(requests) is None
    runtime.device.gate.wait_until_held()
    wait_until(lambda: (status_of()["running"], status_of()["waiting"]) == (2, 1))
    with Operator(runtime) as operator:
        operator.send(command="restart", drain_s=30)
        until_a_restart_is_under_way(runtime)
        runtime.device.gate.set()
        wait_until(lambda: not runtime.alive)
        assert operator.hear() == {}

    wait_until(lambda: sum(not waiting_request.answers.empty() for waiting_request in requests) == 2)
    start_runtime(SETTINGS)
    for n, client_request in enumerate(requests):
        assert_y(answer_of(client_request), rows_of(1, 4 * n + 4))


def test_generations_in_progress_end_in_the_old_runtime(start_runtime: StartRuntime, tmp_path: Path) -> None:
    """During a restart, a running generation ends in the old runtime.

    A later generation gets no slot in the old runtime, so that its stub can repeat it in the next one.
    """
    runtime = start_runtime(SETTINGS, compute=count)
    client = Client(runtime, export_counting(tmp_path / "counting"))
    runtime.device.gate.clear()
    first = client.ask([3])
    runtime.device.gate.wait_until_held()
    with Operator(runtime) as operator:
        operator.send(command="restart", drain_s=30.0)
        until_a_restart_is_under_way(runtime)
        second = client.ask([1, 2, 3])
        runtime.device.gate.set()
        assert client.end(first)[0] is Status.OK
        wait_until(lambda: not runtime.alive)

    assert client.tokens == {first: expected([3])}
    with pytest.raises(Closed):
        client.end(second)


def test_generations_that_take_too_long_keep_their_runtime(
    start_runtime: StartRuntime, tmp_path: Path
) -> None:
    """If a generation does not end in time, the restart fails. The runtime answers this generation and a later one."""
    runtime = start_runtime(SETTINGS, compute=count)
    client = Client(runtime, export_counting(tmp_path / "counting"))
    with Operator(runtime) as operator:
        assert operator.pause("counting", "hold") == {}
        numbers = [client.ask([3])]
        wait_until(lambda: bool(runtime.loop.stateful.generations))
        operator.send(command="restart", drain_s=0.001)
        assert "0 runs of meta models, 1 generations and 0 executions" in operator.hear()["error"]
        assert operator.pause("counting", None) == {}
    numbers.append(client.ask([3]))

    assert [client.end(number)[0] for number in numbers] == [Status.OK] * 2


def test_nothing_is_restarted_if_it_takes_too_long(runtime: Runtime, engine: Engine) -> None:
    """If an execution takes too long, the restart fails with a count of what is in progress.

    The runtime answers as before.
    """
    executing, waiting = one_executes_and_one_waits(runtime, engine)
    with Operator(runtime) as operator:
        refused = operator.do("restart", drain_s=0.001)

        assert refused["code"] == "FAILED_PRECONDITION"
        assert (
            "0 runs of meta models, 0 generations and 1 executions have not ended in time" in refused["error"]
        )
        runtime.device.gate.set()
        assert [answered(client_request) for client_request in (executing, waiting)] == [1, 1]
        assert operator.do("restart", drain_s=30) == {}


@pytest.mark.parametrize("command", ["restart", "sleep"])
def test_a_forced_end_begins_again_what_is_in_progress(
    start_runtime: StartRuntime, runtime: Runtime, engine: Engine, command: str
) -> None:
    """If a restart or a sleep is forced, the next runtime repeats the execution in progress.

    Each request is answered once.
    """
    requests = one_executes_and_one_waits(runtime, engine)
    with Operator(runtime) as operator:
        assert operator.do(command, drain_s=0, force=True) == {}
    wait_until(lambda: not runtime.alive)

    start_runtime(SETTINGS)
    assert [answered(client_request) for client_request in requests] == [1, 1]


def test_a_restart_whose_caller_left_is_withdrawn(runtime: Runtime, engine: Engine) -> None:
    """If the caller of a restart leaves, the restart is withdrawn: the runtime executes the waiting request and continues."""
    executing, waiting = one_executes_and_one_waits(runtime, engine)
    first = Operator(runtime)
    first.send(command="restart", drain_s=30)
    until_a_restart_is_under_way(runtime)
    before = read_status(os.getpid())["connections"]
    first.close()
    wait_until(lambda: read_status(os.getpid())["connections"] < before)

    runtime.device.gate.set()
    assert [answered(client_request) for client_request in (executing, waiting)] == [1, 1]
    assert runtime.alive
