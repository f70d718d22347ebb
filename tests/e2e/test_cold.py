"""Lazy models on a real server. They are cold when the server is ready, and start with their first requests."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from tests.e2e import bundles
from tests.e2e.calls import at_once, caller, check_exact, check_sudden, random_u32, refusal
from tests.e2e.combinations import recorded
from tests.e2e.fronts import NATIVE
from tests.e2e.harness import RunningTriton, StartTriton, make_repository
from tests.e2e.metas import rows, write_meta, write_scale
from tests.status import read_status


@pytest.fixture
def record(start_triton: StartTriton) -> Iterator[Callable[[RunningTriton], None]]:
    """Return a function that records a server's combinations of states until the end of the test."""
    with ExitStack() as stack:
        yield lambda server: stack.enter_context(recorded(server))


def test_models_start_with_their_first_requests(
    start_triton: StartTriton, record: Callable[[RunningTriton], None], tmp_path: Path
) -> None:
    """A request fails at its deadline if the model's start takes longer. Concurrent requests share one start.

    A start that fails harms no other model.
    """
    made = {path.name: path for path in bundles.ensure().iterdir()}
    lazy = "runtime: {start: lazy, idle: {executable: 2h}}"
    repository = make_repository(tmp_path, made["sudden"], made["exact"], made["elastic"], settings=lazy)
    for module in (repository / "elastic/1/bundle").glob("*.mlir"):
        module.unlink()  # The file may be a link.
        module.write_bytes(b"nonsense")
    # An empty cache makes starts last as long as compilations.
    cache = {"RSRV_RUNTIME__COMPILATION_CACHE_DIR": str(tmp_path / "cache")}
    server = start_triton(repository, env=cache, expected=["model_failed"])
    record(server)
    assert read_status(server.pid)["models"] == {}

    with caller(server) as call:
        x = random_u32(np.random.default_rng(), 1)
        inputs = {"x": x, "steps": np.ones((1, 1), np.int32)}
        late = refusal(lambda: call("sudden", inputs, timeout=20_000))
        assert "[rsrv:DEADLINE] the model is starting" in late.message

        at_once(server, 20, check_sudden)
        assert read_status(server.pid)["models"].keys() == {"sudden"}

        for _ in range(2):
            failed = refusal(lambda: call("elastic", inputs))
            failed.assert_is("UNAVAILABLE", "grpc")
            assert "the model could not be started" in failed.message
        check_exact(call)
        check_sudden(call, 3)

    state = read_status(server.pid)
    assert {name: model["state"] for name, model in state["models"].items()} == {
        "sudden": "ready",
        "exact": "ready",
    }
    if NATIVE:
        return  # A native front has no stubs.
    assert len(server.stub_pids()) == 3


def test_a_meta_model_starts_sleeps_and_returns(
    start_triton: StartTriton, record: Callable[[RunningTriton], None], tmp_path: Path
) -> None:
    """The first request starts a meta model and its callee. Requests after a kill of the runtime and after a sleep are answered."""
    write_scale(tmp_path / "bundles" / "double", 2, internal=True)
    body = 'def run(inputs, call):\n    return call("double", inputs)\n'
    write_meta(tmp_path / "bundles" / "chain", body, ["double"])
    lazy = "runtime: {start: lazy, idle: {executable: 2h}}"
    server = start_triton(make_repository(tmp_path, settings=lazy), expected=None)
    record(server)
    assert read_status(server.pid)["metas"] == {}

    with caller(server) as call:
        assert (call("chain", rows(2, 3.0))["y"] == 6).all()
        assert read_status(server.pid)["metas"].keys() == {"chain"}
        os.kill(read_status(server.pid)["pid"], signal.SIGKILL)
        assert (call("chain", rows(2, 4.0))["y"] == 8).all()
        server.operate("sleep")
        assert (call("chain", rows(2, 5.0))["y"] == 10).all()
