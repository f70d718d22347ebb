"""Admission of meta models' runs: which runs begin, wait, or are refused."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event
from typing import Any

import pytest

from rsrv.settings import load_settings
from rsrv.stub.meta_engine import MetaEngine
from tests.fakes import FakeError
from tests.unit.runtime.conftest import Runtime, StartMeta, StartRuntime
from tests.unit.runtime.metas import (
    Pause,
    answer_of,
    assert_fails,
    assert_y,
    chain,
    request,
    rows,
    send,
    status_of,
    stopping,
)
from tests.unit.runtime.watchers import Operator, configure
from tests.waiting import wait_until


def chained(value: float) -> float:
    """Return the value that the run `stopping` computes for `value`."""
    return 2 * (2 * value + 1) + 2


def waiting(meta: str = "meta") -> int:
    count: int = status_of(meta)["waiting"]
    return count


def running(meta: str = "meta") -> int:
    count: int = status_of(meta)["running"]
    return count


def test_the_third_run_waits_until_one_of_two_leaves(runtime: Runtime, start_meta: StartMeta) -> None:
    """With two places, the third run waits until one of the first two ends."""
    pause = Pause()
    engine = start_meta(runtime, stopping(pause))
    requests = [request(value=n) for n in range(3)]

    for client_request in requests:
        assert engine.execute([client_request]) is None
    pause.reached(2)
    wait_until(lambda: waiting() == 1)
    assert running() == 2
    assert not pause.is_reached
    pause.go()
    pause.reached()  # The third run has begun.
    pause.go(2)

    for n, client_request in enumerate(requests):
        assert_y(answer_of(client_request), rows(1, chained(n)))


def test_runs_that_wait_for_a_held_model_delay_no_other(runtime: Runtime, start_meta: StartMeta) -> None:
    """While a callee is paused, runs that wait for it take no place, so runs of other meta models are admitted."""
    pause = Pause()

    def held(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
        call("b", inputs)
        pause()
        return {"y": call("a", inputs)["y"]}

    def prompt(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
        return {"y": call("b", inputs)["y"]}

    mine, theirs = start_meta(runtime, held), start_meta(runtime, prompt, "b", name="other")
    waits = [request(value=n) for n in range(4)]
    assert mine.execute(waits) is None
    pause.reached(2)
    with Operator(runtime) as operator:
        operator.pause("a", "hold")
        pause.go(2)
        for n in range(3):
            send(theirs, client_request := request(value=n)).join()
            assert_y(answer_of(client_request), rows(1, 2 * n + 2))
        operator.pause("a", None)
    pause.reached(2)
    pause.go(2)

    for n, client_request in enumerate(waits):
        assert_y(answer_of(client_request), rows(1, 2 * n + 1))


def test_what_a_run_does_before_its_first_call_does_not_count(
    runtime: Runtime, start_meta: StartMeta
) -> None:
    """A run takes a place only with its first call."""
    pause = Pause()

    def late(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
        pause()
        return {"y": call("a", inputs)["y"]}

    def prompt(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
        return {"y": call("b", inputs)["y"]}

    slow, quick = start_meta(runtime, late), start_meta(runtime, prompt, name="quick")
    computing = [request(), request()]
    assert slow.execute(computing) is None
    pause.reached(2)

    for n in range(3):
        send(quick, client_request := request(value=n)).join()
        assert_y(answer_of(client_request), rows(1, 2 * n + 2))
    wait_until(lambda: running() == 0)  # The last request is answered before its run ends.
    pause.go(2)
    for client_request in computing:
        assert_y(answer_of(client_request), rows(1, 3))


def test_meta_models_without_callees_are_not_counted(runtime: Runtime, start_meta: StartMeta) -> None:
    """Runs of a meta model without callees take no place."""
    pause = Pause()
    engine = start_meta(runtime, stopping(pause))
    alone = start_meta(runtime, lambda inputs, call: {"y": inputs["x"] * 7}, [], name="alone")
    inside = [request(), request()]
    assert engine.execute(inside) is None
    pause.reached(2)

    for n in range(4):
        send(alone, client_request := request(value=n)).join()
        assert_y(answer_of(client_request), rows(1, 7 * n))
    pause.go(2)
    for client_request in inside:
        assert_y(answer_of(client_request), rows(1, chained(1)))


# --- leaving the line -------------------------------------------------------------------------------------


@pytest.fixture
def full(runtime: Runtime, start_meta: StartMeta) -> tuple[MetaEngine, Pause, Callable[[], None]]:
    """Return a meta model with two runs in progress, their pause, and a function that ends the runs and checks their answers."""
    pause = Pause()
    engine = start_meta(runtime, stopping(pause))
    inside = [request(value=n) for n in range(2)]
    assert engine.execute(inside) is None
    pause.reached(2)

    def end() -> None:
        pause.go(2)
        for n, client_request in enumerate(inside):
            assert_y(answer_of(client_request), rows(1, chained(n)))

    return engine, pause, end


def test_waiting_ends_at_the_deadline(
    runtime: Runtime, full: tuple[MetaEngine, Pause, Callable[[], None]]
) -> None:
    """A run whose deadline passes while it waits for admission is answered, and its code is not called."""
    engine, pause, end = full

    late = request(timeout=1000)
    assert engine.execute([late]) is None
    wait_until(lambda: waiting() == 1)
    runtime.pass_time(2000.0)
    assert_fails(answer_of(late), FakeError.UNAVAILABLE, "[rsrv:DEADLINE]")

    assert running() == 2
    assert not pause.is_reached
    end()
    # The requests are answered before their runs end.
    wait_until(lambda: [status_of()["outcomes"][how] for how in ("answered", "expired")] == [2, 1])


def test_a_client_that_goes_while_it_waits_leaves_the_line(
    full: tuple[MetaEngine, Pause, Callable[[], None]],
) -> None:
    """A cancelled request that waits for admission ends at once, and its run is not called."""
    engine, pause, end = full

    gone = request()
    assert engine.execute([gone]) is None
    wait_until(lambda: waiting() == 1)
    gone.cancelled = True
    assert_fails(answer_of(gone), FakeError.CANCELLED, "cancelled")

    assert not pause.is_reached
    end()


def test_runs_begin_by_priority(runtime: Runtime, full: tuple[MetaEngine, Pause, Callable[[], None]]) -> None:
    """Waiting runs are admitted by priority, and those of equal priority in the order of arrival."""
    engine, pause, end = full
    configure(runtime, {"meta_concurrency": 1})
    requests = [request(value=n, priority=priority) for n, priority in ((10, 0), (11, 0), (12, 1))]
    for client_request in requests:
        assert engine.execute([client_request]) is None
    wait_until(lambda: waiting() == 3)
    end()

    for value in (12, 10, 11):
        pause.reached()
        assert running() == 1
        pause.go()
        assert_y(answer_of(requests[value - 10]), rows(1, chained(value)))


@pytest.mark.parametrize(
    "settings", ["models: {meta: {max_queue_depth: 2}}", "scheduler: {max_queue_depth: 2}"]
)
def test_only_so_many_may_wait(start_runtime: StartRuntime, start_meta: StartMeta, settings: str) -> None:
    """If `max_queue_depth` runs wait for admission, a further run is refused at once."""
    pause = Pause()
    engine = start_meta(start_runtime(load_settings(settings)), stopping(pause))
    requests = [request(value=n) for n in range(4)]
    assert engine.execute(requests) is None
    pause.reached(2)
    wait_until(lambda: waiting() == 2)

    refused = request()
    assert engine.execute([refused]) is None
    assert_fails(answer_of(refused), FakeError.UNAVAILABLE, "[rsrv:QUEUE_FULL]")

    pause.go(4)
    for n, client_request in enumerate(requests):
        assert_y(answer_of(client_request), rows(1, chained(n)))


def test_a_run_that_fails_leaves_its_place(runtime: Runtime, start_meta: StartMeta) -> None:
    """A run that fails, or that ends at its deadline, frees its place."""

    def run(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
        first = call("a", inputs)["y"]
        match int(inputs["x"][0, 0]) % 3:
            case 0:
                raise ValueError("user")
            case 1:
                return {}
            case _:
                Event().wait(max(0.0, call.remaining() or 0.0))
        return {"y": call("b", {"x": first})["y"]}

    engine = start_meta(runtime, run)
    requests = [request(value=n, timeout=0.02 if n % 3 == 2 else 0) for n in range(30)]
    for client_request in requests:
        send(engine, client_request).join()
    for n, client_request in enumerate(requests):
        late = n % 3 == 2
        code = FakeError.UNAVAILABLE if late else FakeError.INTERNAL
        assert_fails(answer_of(client_request), code, "[rsrv:DEADLINE]" if late else "run hook")
    send(engine, last := request(value=2)).join()
    assert_y(answer_of(last), rows(1, chained(2)))


def test_runs_of_another_meta_model_that_wait_make_the_device_look_busy(
    start_runtime: StartRuntime, start_meta: StartMeta
) -> None:
    """If runs of one meta model wait on a device, the stub of another meta model regards the device as busy.

    The stub then prefers another device.
    """
    runtime, pause = start_runtime(devices=2), Pause()
    other = start_meta(runtime, stopping(pause), name="other")
    pause.go()
    first = request()
    assert other.execute([first]) is None
    answer_of(first)
    wait_until(lambda: running("other") == 0)
    engine = start_meta(runtime, chain)
    idle_s = engine.answers_in_s()

    requests = [request() for _ in range(5)]
    other.execute(requests)
    wait_until(lambda: waiting("other") == 3)

    wait_until(lambda: engine.answers_in_s() > idle_s)
    pause.go(5)
    for client_request in requests:
        answer_of(client_request)
    wait_until(lambda: engine.answers_in_s() == idle_s)
