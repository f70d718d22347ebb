"""A request that ends two runtimes fails, and no other request does.

A runtime that is killed has no effect on its requests.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rsrv.front.rules import EQUAL, SUSPECT
from rsrv.hooks.loader import Hooks
from rsrv.runtime.crash_history import BlackBox
from rsrv.runtime.device import Array
from rsrv.settings import load_settings
from rsrv.stub.connection import Greeted, greet
from rsrv.stub.engine import Engine
from rsrv.wire import paths
from rsrv.wire.blackbox import BlackBoxReader
from rsrv.wire.socket import connect
from tests.fakes import FakeError, FakeRequest
from tests.unit.runtime.conftest import Runtime, StartRuntime, double
from tests.unit.runtime.metas import answer_of, assert_y, engine_of
from tests.waiting import PATIENCE_S, wait_until

#: An input with this value makes an execution last until the test ends it.
HOSTILE = 666.0


class Server:
    """The runtimes of one device, one after another, and the stubs of two models."""

    def __init__(self, start: StartRuntime, directory: Path, bundles: dict[str, Path]) -> None:
        self._start = start
        #: Settings of the next runtime.
        self.settings = "stub: {in_place_ms: 0}"
        self._directory, self._bundles = directory, bundles
        #: Gets an item for each execution of a hostile request.
        self.executing: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.released = threading.Event()
        self.start()
        self.hostile, self.other = self.engine("a"), self.engine("b")

    def start(self) -> None:
        self.box = BlackBox(self._directory)
        self.runtime: Runtime = self._start(
            load_settings(self.settings), compute=self._compute, blackbox=self.box
        )

    def crash(self) -> None:
        """Crash the runtime as a fatal signal does, and start the next one."""
        self.box.crashed("Fatal Python error: Segmentation fault")
        self.kill()

    def kill(self) -> None:
        self.runtime.stop()
        self.start()

    def deaths(self) -> dict[str, list[dict[str, Any]]]:
        """Return the crash history."""
        path = self._directory / paths.DEATHS
        records: dict[str, list[dict[str, Any]]] = json.loads(path.read_text()) if path.exists() else {}
        return records

    def _compute(self, inputs: Sequence[Array], weights: Sequence[Array]) -> list[Array]:
        if (inputs[0] == HOSTILE).any() and not self.released.is_set():
            self.executing.put(None)
            self.released.wait(60)
        return double(inputs, weights)

    def engine(self, name: str, hooks: Hooks | None = None) -> Engine:
        def open_connection() -> Greeted:
            greeted = greet(connect(self._directory / paths.SOCKET))
            return replace(greeted, blackbox=BlackBoxReader(self._directory))

        return engine_of(open_connection, self._bundles[name], name, hooks)


@pytest.fixture
def server(start_runtime: StartRuntime, doublings: dict[str, Path], tmp_path: Path) -> Iterator[Server]:
    made = Server(start_runtime, tmp_path, doublings)
    yield made
    made.released.set()
    made.hostile.close()
    made.other.close()


def request(value: float) -> FakeRequest:
    return FakeRequest({"x": np.full((1, 3), value, np.float32)})


def assert_answered(client_request: FakeRequest, expected: float) -> None:
    assert_y(answer_of(client_request), np.full((1, 3), expected, np.float32))


def assert_refused(client_request: FakeRequest, text: str = SUSPECT) -> None:
    answer = answer_of(client_request)
    assert answer.error is not None
    assert answer.error.code == FakeError.INTERNAL
    assert answer.error.message == text


def test_kills_cost_a_request_nothing(server: Server) -> None:
    """Four runtimes are killed while they execute a request. The fifth one answers it, and no model is blamed."""
    hostile = request(HOSTILE)
    assert server.hostile.execute([hostile]) is None
    for _ in range(4):
        server.executing.get(timeout=PATIENCE_S)
        server.kill()
    server.executing.get(timeout=PATIENCE_S)

    server.released.set()

    assert_answered(hostile, 2 * HOSTILE + 1)
    attachment = server.hostile.session.attachment
    assert attachment is not None
    assert attachment.key not in server.deaths()


def test_a_hook_that_writes_into_its_inputs_gets_them_again_as_they_were_sent(server: Server) -> None:
    """A hook that changes its inputs is called again after a runtime was killed.

    It gets the inputs as the client sent them.
    """

    def preprocess(inputs: dict[str, Array]) -> dict[str, Array]:
        inputs["x"] *= 2
        return inputs

    server.hostile.close()
    server.hostile = server.engine("a", Hooks(preprocess))
    hostile = request(HOSTILE / 2)
    assert server.hostile.execute([hostile]) is None
    server.executing.get(timeout=PATIENCE_S)
    server.kill()
    server.executing.get(timeout=PATIENCE_S)

    server.released.set()

    assert_answered(hostile, 2 * HOSTILE + 1)


def test_a_queue_that_became_too_short_refuses_no_request_that_waited(server: Server) -> None:
    """If the next runtime has a shorter queue, it still accepts all requests that the killed runtime had accepted."""
    hostile, others = request(HOSTILE), [request(n) for n in range(10)]
    assert server.hostile.execute([hostile]) is None
    server.executing.get(timeout=PATIENCE_S)
    assert server.hostile.execute(others) is None
    server.settings += "\nscheduler: {max_queue_depth: 2}"
    server.kill()
    server.executing.get(timeout=PATIENCE_S)

    server.released.set()

    assert_answered(hostile, 2 * HOSTILE + 1)
    for value in range(10):
        assert_answered(others[value], 2 * value + 1)


def test_a_hostile_request_ends_two_runtimes_and_fails_alone(server: Server) -> None:
    """A hostile request fails after it has ended two runtimes. All other requests are answered.

    The crash history has one entry, which blames the model of the hostile request.
    """
    hostile, others, strangers = (
        request(HOSTILE),
        [request(n) for n in range(5)],
        [request(n) for n in range(5)],
    )
    assert server.hostile.execute([hostile]) is None
    server.executing.get(timeout=PATIENCE_S)
    assert server.hostile.execute(others) is None
    assert server.other.execute(strangers) is None
    server.crash()
    server.executing.get(timeout=PATIENCE_S)
    server.crash()

    assert_refused(hostile)
    for value in range(5):
        assert_answered(others[value], 2 * value + 1)
        assert_answered(strangers[value], 2 * value + 2)
    ((_, deaths),) = server.deaths().items()
    assert [death["share"] for death in deaths] == [1.0]


@pytest.mark.parametrize("rows", [1, 20])
def test_inputs_that_were_answered_after_a_death_are_as_good_as_new(server: Server, rows: int) -> None:
    """If a request is answered after a runtime died with it, its inputs are no longer suspected.

    This also holds for a part of a large request.
    """
    x = np.zeros((rows, 3), np.float32)
    x[0] = HOSTILE
    client_request, front = FakeRequest({"x": x}), server.hostile._process.front
    assert server.hostile.execute([client_request]) is None
    server.executing.get(timeout=PATIENCE_S)
    server.crash()
    server.executing.get(timeout=PATIENCE_S)
    assert front.check({"x": x[:8]}) == 1

    server.released.set()

    assert_y(answer_of(client_request), 2 * x + 1)
    wait_until(lambda: front.check({"x": x[:8]}) == 0)


def test_a_client_that_repeats_its_hostile_request_ends_no_further_runtime(server: Server) -> None:
    """After a hostile request has failed, a later request with its inputs is refused.

    Another request in the same batch is answered.
    """
    hostile = request(HOSTILE)
    assert server.hostile.execute([hostile]) is None
    for _ in range(2):
        server.executing.get(timeout=PATIENCE_S)
        server.crash()
    assert_refused(hostile)

    again, good = request(HOSTILE), request(1)
    assert server.hostile.execute([again, good]) is None

    assert_refused(again, EQUAL)
    assert_answered(good, 3)
    assert server.executing.empty()


def test_a_client_that_does_not_wait_for_the_second_try_ends_two_runtimes(
    server: Server, pass_stub_time: Callable[[float], None]
) -> None:
    """A hostile request ends at its deadline while its runtime hangs, and its client sends the same inputs again.

    The second request is executed alone. When it has ended a second runtime, it fails.
    """
    late = FakeRequest({"x": np.full((1, 3), HOSTILE, np.float32)}, timeout_us=10**9)
    assert server.hostile.execute([late]) is None
    server.executing.get(timeout=PATIENCE_S)
    pass_stub_time(2000.0)
    answer = answer_of(late)
    assert answer.error is not None
    assert answer.error.message.startswith("[rsrv:DEADLINE]")
    before = server.hostile.session.reading
    server.crash()
    # Until the stub notices the death, it reads the board of the runtime before.
    wait_until(lambda: server.hostile.session.reading not in (None, before))

    again = request(HOSTILE)
    assert server.hostile.execute([again]) is None
    server.executing.get(timeout=PATIENCE_S)
    server.crash()

    assert_refused(again)
    ((_, deaths),) = server.deaths().items()
    assert [death["share"] for death in deaths] == [1.0]


def test_a_request_of_another_model_is_no_suspect(server: Server) -> None:
    """If a device hangs with one model's request, a waiting request of another model is not blamed."""
    hostile, stranger = request(HOSTILE), request(5)
    assert server.hostile.execute([hostile]) is None
    server.executing.get(timeout=PATIENCE_S)
    assert server.other.execute([stranger]) is None
    slot = server.runtime.loop.activity.front(server.runtime.loop.launcher)
    assert slot is not None
    slot.mark_hung()
    server.kill()

    server.executing.get(timeout=PATIENCE_S)
    server.released.set()
    assert_answered(stranger, 12)
    assert_answered(hostile, 2 * HOSTILE + 1)
