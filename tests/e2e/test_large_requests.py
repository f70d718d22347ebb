"""Requests with more rows than the largest compiled size. Standard clients get one answer with all rows."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples import mlp
from rsrv.wire.socket import Closed
from tests.e2e import bundles
from tests.e2e.answers import LEAST_STEPS, stepped
from tests.e2e.calls import PROTOCOLS, Caller, assert_same, at_once, caller, random_u32
from tests.e2e.harness import RunningTriton, StartTriton, make_repository
from tests.e2e.test_answers import assert_close, exact_answer, exact_rows, mlp_rows
from tests.status import read_status
from tests.waiting import wait_until

#: Number of rows of a large request. The largest compiled sizes of the models are 16 and 32.
ROWS = 500


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_large_request_is_answered_as_its_rows_one_by_one(triton: RunningTriton, protocol: str) -> None:
    """The answer to a large request has the rows of the request in their order."""
    inputs = mlp_rows(np.random.default_rng(1), ROWS)
    assert max(mlp.BATCH_SIZES) < ROWS
    with caller(triton, protocol) as call:
        got = call("mlp", inputs)
        alone = [call("mlp", {"x": inputs["x"][row : row + 1]}) for row in range(0, ROWS, 7)]
    assert len(got["logits"]) == ROWS
    assert_close(
        {"logits": got["logits"][::7]}, {"logits": np.concatenate([answer["logits"] for answer in alone])}
    )


def test_large_and_small_requests_of_many_clients_get_their_own_rows(triton: RunningTriton) -> None:
    """Requests of any number of rows share executions, and every answer is exact."""

    def send(call: Caller, seed: int) -> None:
        rng = np.random.default_rng(seed)
        for rows in rng.choice([1, 3, 16, 17, 100, ROWS], 12):
            inputs = exact_rows(rng, int(rows))
            assert_same(call("exact", inputs), exact_answer(inputs))

    at_once(triton, 8, send)


def executing_runtime(server: RunningTriton, other_than: int = 0) -> int:
    """Return the pid of the runtime if it executes a request of `elastic`, and 0 if not."""
    with suppress(OSError, Closed, KeyError):
        status: dict[str, Any] = read_status(server.pid)
        if status["models"]["elastic"]["executing"] and status["pid"] != other_than:
            return int(status["pid"])
    return 0


def test_kills_between_parts_cost_no_answer(start_triton: StartTriton, tmp_path: Path) -> None:
    """Runtimes are killed while large requests execute. Each request gets one right answer."""
    repository = make_repository(tmp_path, bundles.ensure() / "elastic", bundles.ensure() / "exact")
    # The death of a runtime is an urgent finding, so any finding is expected.
    server, stop = start_triton(repository, spare=True, expected=None), threading.Event()

    def send(call: Caller, seed: int) -> int:
        rng, count = np.random.default_rng(seed), 0
        while not (count and stop.is_set()):
            x, steps = random_u32(rng, 60), rng.integers(0, 20, (60, 1), np.int32)
            want = {"y": stepped(x, steps[:, 0] + LEAST_STEPS)}
            assert_same(call("elastic", {"x": x, "steps": steps}), want)
            inputs = exact_rows(rng, ROWS)
            assert_same(call("exact", inputs), exact_answer(inputs))
            count += 1
        return count

    with ThreadPoolExecutor(1) as pool:
        clients = pool.submit(at_once, server, 4, send)
        try:
            runtime = 0
            for _ in range(2):
                runtime = wait_until(partial(executing_runtime, server, runtime), what="a runtime at work")
                os.kill(runtime, signal.SIGKILL)
        finally:
            stop.set()
        assert min(clients.result()) > 0
