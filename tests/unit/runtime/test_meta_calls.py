"""Sub-calls of meta models that wait for the device with other requests or with each other."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rsrv.runtime.device import Array
from rsrv.scheduler.disciplines import DISCIPLINES
from rsrv.settings import load_settings
from tests.unit.runtime.conftest import Runtime, StartEngine, StartMeta, StartRuntime, double
from tests.unit.runtime.metas import (
    Pause,
    answer_of,
    ask,
    assert_y,
    chain,
    model_engine,
    queued,
    request,
    rows,
    send,
    status_of,
    stopping,
)
from tests.unit.runtime.watchers import configure
from tests.waiting import PATIENCE_S, wait_until


class Log:
    """Records the device's executions: the model's weight, and the rows with padding."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, int]] = []

    def compute(self, inputs: Sequence[Array], weights: Sequence[Array]) -> list[Array]:
        self.entries.append((int(weights[0][0]), len(inputs[0])))
        return double(inputs, weights)


@pytest.mark.parametrize("discipline", sorted(DISCIPLINES))
def test_sub_calls_overtake_what_waits_and_take_it_along(
    start_runtime: StartRuntime, start_meta: StartMeta, doublings: dict[str, Path], discipline: str
) -> None:
    """A sub-call is executed before waiting requests of other models.

    Waiting requests for the called model share the execution.
    """
    log, pause = Log(), Pause()
    runtime = start_runtime(compute=log.compute)
    configure(runtime, {"discipline": discipline})

    engine = start_meta(runtime, stopping(pause))
    b, d = (model_engine(runtime, doublings[name]) for name in "bd")
    client_request = request(timeout=PATIENCE_S)
    assert engine.execute([client_request]) is None
    pause.reached()
    runtime.device.gate.clear()
    log.entries.clear()
    # The first request for d executes. Two urgent requests for d wait, and two requests for b.
    requests = [request(8, 9), request(8, 9, 10, priority=1), request(8, 9, 10, priority=1)]
    threads = [send(d, *requests)]
    runtime.device.gate.wait_until_held()
    plain = [request(1, 5), request(2, 6)]
    threads.append(send(b, *plain))
    wait_until(lambda: queued("d") == 2 and queued("b") == 2)
    pause.go()
    wait_until(lambda: queued("b") == 3)
    runtime.device.gate.set()

    assert_y(answer_of(client_request), rows(1, 8))
    for other, count, value in ((plain[0], 1, 5), (plain[1], 2, 6)):
        assert_y(answer_of(other), rows(count, 2 * value + 2))
    for other in requests:
        assert_y(answer_of(other), rows(8, 22))
    for thread in threads:
        thread.join()
    assert log.entries == [(4, 8), (2, 4), (4, 8), (4, 8)]


def test_of_several_calls_side_by_side_the_oldest_goes_first_and_the_others_wait(
    start_runtime: StartRuntime, start_meta: StartMeta, doublings: dict[str, Path]
) -> None:
    """Of many parallel calls, only the oldest is executed before other requests.

    Otherwise the other requests would wait for all of the calls.
    """
    log, pause = Log(), Pause()
    runtime = start_runtime(compute=log.compute)
    configure(runtime, {"discipline": "fifo"})

    def run(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
        pause()
        return {"y": call.many([("a", {"x": rows(8, n)}) for n in range(4)])[3]["y"][:1]}

    engine = start_meta(runtime, run, "a")
    d = model_engine(runtime, doublings["d"])
    client_request = request()
    assert engine.execute([client_request]) is None
    pause.reached()
    runtime.device.gate.clear()
    log.entries.clear()
    holding, waiting = request(8), request(8, priority=1)
    threads = [send(d, holding, waiting)]
    runtime.device.gate.wait_until_held()
    pause.go()
    wait_until(lambda: queued("a") == 4)
    runtime.device.gate.set()
    assert_y(answer_of(client_request), rows(1, 7))
    for thread in threads:
        thread.join()
    d.close()

    assert log.entries[0] == (4, 8)
    assert log.entries[1] == (1, 8)
    assert (4, 8) in log.entries[2:]


def test_runs_share_executions(runtime: Runtime, start_engine: StartEngine, start_meta: StartMeta) -> None:
    """Runs of two meta models share an execution of their callee. Each is charged for its rows."""
    configure(runtime, {"meta_concurrency": 4})
    pause = Pause()

    def run(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
        pause()
        return {"y": call("a", inputs)["y"]}

    engines = [start_meta(runtime, run, "a", name=name) for name in ("one", "other")]
    plain = start_engine()
    requests = [[request(2, n), request(2, n + 10)] for n in range(2)]
    for engine, mine in zip(engines, requests, strict=True):
        assert engine.execute(list(mine)) is None
    pause.reached(4)
    runtime.device.gate.clear()
    thread = send(plain, request())
    runtime.device.gate.wait_until_held()
    runtime.device.executed.clear()
    pause.go(4)
    wait_until(lambda: queued("a") == 4)
    runtime.device.gate.set()
    for n, mine in enumerate(requests):
        assert_y(answer_of(mine[0]), rows(2, 2 * n + 1))
        assert_y(answer_of(mine[1]), rows(2, 2 * n + 21))
    thread.join()
    assert runtime.device.executed == [1, 8]
    for name in ("one", "other"):
        wait_until(lambda name=name: not status_of(name)["running"])  # type: ignore[misc]
        status = status_of(name)
        assert status["calls"] == 2
        assert status["device_seconds"] == pytest.approx(runtime.device.seconds / 2)


def test_runs_are_answered_whether_in_place_or_later(
    start_runtime: StartRuntime, start_meta: StartMeta
) -> None:
    """After some runs have been measured, short runs are answered in place. Slow ones are answered later."""
    # The limit is so long that runs stay below it even on a busy machine. A run that was not measured yet is expected
    # to take 200 ms.
    runtime = start_runtime(load_settings("stub: {in_place_ms: 150}"))
    engine = start_meta(runtime, chain)
    ways: list[bool] = []
    for n in range(100):
        client_request = request(2, n)
        answers = engine.execute([client_request])
        ways.append(answers is not None)
        assert_y(answers[0] if answers is not None else answer_of(client_request), rows(2, 4 * n + 4))
    assert not ways[0]
    assert any(ways)

    several = [request(1, n) for n in range(2)]
    for n, answer in enumerate(ask(engine, *several)):
        assert_y(answer, rows(1, 4 * n + 4))
    runtime.device.gate.clear()
    slow = [request(1, n) for n in range(2)]
    assert engine.execute(slow) is None  # The device is held, so these runs are slow.
    runtime.device.gate.set()
    for n, client_request in enumerate(slow):
        assert_y(answer_of(client_request), rows(1, 4 * n + 4))
    many = [request(1, n) for n in range(40)]
    for n, answer in enumerate(ask(engine, *many)):
        assert_y(answer, rows(1, 4 * n + 4))


# --- awaited ----------------------------------------------------------------------------------------------


def test_many_awaited_calls_are_in_flight_at_once(
    runtime: Runtime, start_engine: StartEngine, start_meta: StartMeta
) -> None:
    """A hundred awaited calls of one run wait for the device together, and each gets its result."""

    async def run(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
        async def double_twice(n: int) -> Any:
            y = (await call("a", {"x": inputs["x"] + n}, keep_on_device=n % 2 == 0))["y"]
            return (await call("b", {"x": y}))["y"]

        results = await asyncio.gather(*(double_twice(n) for n in range(100)))
        for n, result in enumerate(results):
            np.testing.assert_array_equal(result, 4 * (inputs["x"] + n) + 4)
        return {"y": results[99]}

    engine, plain = start_meta(runtime, run), start_engine()
    runtime.device.gate.clear()
    thread = send(plain, request())
    runtime.device.gate.wait_until_held()
    mine = send(engine, client_request := request(1, 3))
    wait_until(lambda: queued("a") == 100)
    runtime.device.gate.set()
    assert_y(answer_of(client_request), rows(1, 4 * 102 + 4))
    for waiting in (thread, mine):
        waiting.join()
