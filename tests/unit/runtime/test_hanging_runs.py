"""Waiting for a call is not counted as running time of a meta model's own code."""

import queue
import threading

from tests.fakes import FakeBackstop
from tests.unit.runtime.conftest import Runtime, StartMeta
from tests.unit.runtime.metas import SOON, Run, answer_of, assert_y, both_kinds, request, rows, send


@both_kinds
def test_a_run_that_waits_for_a_call_does_not_hang(runtime: Runtime, start_meta: StartMeta, run: Run) -> None:
    """A run that waits for a call is not reported as hanging, even if it waits longer than a hook that is reported."""
    engine = start_meta(runtime, run)
    guard = engine._process.guard
    guard._backstop = FakeBackstop()
    messages: queue.SimpleQueue[str] = queue.SimpleQueue()
    go = threading.Event()

    def hangs() -> None:
        with guard.within("preprocess", "hung"):
            go.wait(SOON)

    runtime.device.gate.clear()
    client_request = request(value=100)
    sending = send(engine, client_request)
    runtime.device.gate.wait_until_held()
    guard.watch(0.2, messages.put)
    hanging = threading.Thread(target=hangs)
    hanging.start()

    # By this time, the run has waited longer than the hook.
    assert "the model's preprocess hook hangs" in messages.get(timeout=SOON)
    assert messages.empty()

    go.set()
    runtime.device.gate.set()
    for thread in (sending, hanging):
        thread.join()
    assert_y(answer_of(client_request), rows(1, 404))
