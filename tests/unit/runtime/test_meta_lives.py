"""Stubs of meta models, their callees and the runtime end and return."""

from __future__ import annotations

import os
import threading
from typing import Any

from tests.fakes import FakeError
from tests.status import read_status
from tests.unit.runtime.conftest import Runtime, StartMeta, StartRuntime
from tests.unit.runtime.metas import (
    Run,
    answer_of,
    assert_fails,
    assert_served,
    assert_y,
    both_kinds,
    chain,
    request,
    rows,
    status_of,
)
from tests.waiting import PATIENCE_S, wait_until


@both_kinds
def test_the_stub_closes_while_runs_are_under_way(runtime: Runtime, start_meta: StartMeta, run: Run) -> None:
    """Closing a stub does not wait for its runs: a waiting run fails at once, and executing runs are answered."""
    engine = start_meta(runtime, run)
    runtime.device.gate.clear()
    *inside, outside = [request(value=n) for n in range(3)]
    for client_request in inside:
        assert engine.execute([client_request]) is None
    wait_until(lambda: status_of()["running"] == 2)
    assert engine.execute([outside]) is None
    wait_until(lambda: status_of()["waiting"] == 1)
    runtime.device.gate.wait_until_held()

    closing = threading.Thread(target=engine.close)
    closing.start()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    assert_fails(answer_of(outside), FakeError.UNAVAILABLE, "the model is being unloaded")
    runtime.device.gate.set()
    for n, client_request in enumerate(inside):
        assert_y(answer_of(client_request), rows(1, 4 * n + 4))


def test_two_meta_models_share_a_callee(runtime: Runtime, start_meta: StartMeta) -> None:
    """When one of two meta models leaves, its own callees leave, and a shared callee stays."""
    first = start_meta(runtime, chain, "ab")
    second = start_meta(runtime, lambda inputs, call: call("c", call("b", inputs)), "bc", name="second")
    del second
    assert runtime.device.resident == 3
    assert_served(first)

    third = start_meta(runtime, chain, "ab", name="third")
    first.close()
    wait_until(lambda: set(read_status(os.getpid())["metas"]) == {"second", "third"})
    assert_served(third)
    third.close()
    wait_until(lambda: runtime.device.resident == 2)


def test_a_further_stub_of_the_same_meta_model_shares_its_models(
    runtime: Runtime, start_meta: StartMeta
) -> None:
    """Two stubs of a meta model share its callees. When one stub leaves, the other one is served."""
    engines = [start_meta(runtime, chain) for _ in range(2)]
    assert runtime.device.resident == 2
    for engine in engines:
        assert_served(engine)
    engines[0].close()
    assert_served(engines[1])
    assert runtime.device.resident == 2
    assert status_of()["models"] == ["a", "b"]


def test_a_model_without_calls_waits_for_the_next_runtime(
    start_runtime: StartRuntime, start_meta: StartMeta
) -> None:
    """Runs of a meta model without callees need no admission.

    Requests that arrive without a runtime are answered when there is one.
    """

    def run(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
        return {"y": inputs["x"]}

    runtime = start_runtime()
    engine = start_meta(runtime, run, "")
    runtime.stop()
    wait_until(lambda: engine.session.reading is None)
    waiting = [request(value=n) for n in range(3)]
    assert engine.execute(waiting) is None

    start_runtime()

    for n, client_request in enumerate(waiting):
        assert_y(answer_of(client_request), rows(1, n))
