"""Meta models that call through Triton, and the tokens that prove to which run a sub-call belongs."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rsrv.hooks.loader import Hooks
from rsrv.settings import load_settings
from rsrv.stub.meta_engine import MetaEngine
from tests.fakes import FakeError, FakeRequest
from tests.unit.runtime.conftest import Runtime, StartEngine, StartMeta, StartRuntime
from tests.unit.runtime.metas import (
    FakeCallees,
    Pause,
    Run,
    answer_of,
    ask,
    assert_fails,
    assert_served,
    assert_y,
    both_kinds,
    chain,
    model_engine,
    queued,
    request,
    rows,
    send,
    status_of,
    stopping,
    with_token,
)
from tests.waiting import wait_until


@pytest.fixture
def runtime(start_runtime: StartRuntime) -> Runtime:
    return start_runtime(load_settings("meta: {transport: bls}"))


StartThrough = Callable[..., tuple[MetaEngine, FakeCallees]]


@pytest.fixture
def start_through(runtime: Runtime, start_meta: StartMeta, doublings: dict[str, Path]) -> StartThrough:
    """Return a function that starts a meta model and a fake Triton with a stub for each internal model."""

    def start(
        run: Run, calls: str = "ab", *, hooks: dict[str, Hooks] | None = None
    ) -> tuple[MetaEngine, FakeCallees]:
        engines = {
            name: model_engine(runtime, doublings[name], (hooks or {}).get(name), internal=True)
            for name in calls
        }
        triton = FakeCallees(engines=engines)
        return start_meta(runtime, run, calls, triton=triton), triton

    return start


def claim(token: int, value: float = 1) -> FakeRequest:
    """Return a request with a run's token, like a sub-call that the run sends through Triton."""
    return FakeRequest({"x": rows(1, value)}, parameters=with_token(token))


# --- the same results -------------------------------------------------------------------------------------


@both_kinds
def test_calls_through_triton_give_the_same(start_through: StartThrough, run: Run) -> None:
    """Calls through Triton give the same results. Each run has its own token, which becomes invalid when the run ends."""
    engine, triton = start_through(run)
    for n in range(20):
        (answer,) = ask(engine, request(1 + n % 8, n))
        assert_y(answer, rows(1 + n % 8, 4 * n + 4))
    assert len(triton.tokens) == 40
    assert 0 not in triton.tokens
    assert len(set(triton.tokens)) == 20
    # The request is answered before its run ends.
    wait_until(lambda: status_of()["outcomes"]["answered"] == 20)
    assert status_of()["calls"] == 40


def raising(arrays: dict[str, Any]) -> dict[str, Any]:
    raise RuntimeError("secret detail")


@pytest.mark.parametrize(
    ("inputs", "keep", "hooks", "code", "text"),
    [
        (
            {"x": rows(1).astype(np.float64)},
            False,
            None,
            FakeError.INVALID_ARG,
            "stage 'a': input 'x' is float64",
        ),
        (
            {"x": rows(1)[:, :2]},
            False,
            Hooks(preprocess=raising),
            FakeError.INVALID_ARG,
            "stage 'a': input 'x': expected shape",
        ),
        ({}, False, None, FakeError.INVALID_ARG, "stage 'a': input 'x' is missing"),
        ({"x": rows(1)}, ["z"], None, FakeError.INTERNAL, "stage 'a': keep_on_device names 'z'"),
        (
            {"x": rows(1)},
            False,
            Hooks(preprocess=raising),
            FakeError.INTERNAL,
            "stage 'a': the model's preprocess",
        ),
        (
            {"x": rows(1)},
            False,
            Hooks(None, raising),
            FakeError.INTERNAL,
            "stage 'a': the model's postprocess",
        ),
    ],
)
@pytest.mark.parametrize("transport", ["direct", "bls"])
def test_failures_are_told_in_the_same_words_on_both_ways(
    start_runtime: StartRuntime,
    start_meta: StartMeta,
    doublings: dict[str, Path],
    transport: str,
    inputs: Any,
    keep: Any,
    hooks: Hooks | None,
    code: str,
    text: str,
) -> None:
    """With both transports, the client gets the same code and text if a callee refuses the call or its hook raises."""
    runtime = start_runtime(load_settings(f"meta: {{transport: {transport}}}"))
    engines = {"a": model_engine(runtime, doublings["a"], hooks, internal=True)} if transport == "bls" else {}
    engine = start_meta(
        runtime,
        lambda _, call: call("a", inputs, keep_on_device=keep),
        "a",
        hooks={"a": hooks} if hooks else None,
        triton=FakeCallees(engines=engines),
    )
    (answer,) = ask(engine, request())
    assert_fails(answer, code, text)
    assert "secret" not in answer.error.message  # type: ignore[union-attr]


def test_calls_through_triton_have_their_runs_deadline(
    runtime: Runtime, start_engine: StartEngine, start_through: StartThrough
) -> None:
    """A sub-call through Triton has its run's deadline and expires in the runtime."""
    engine, plain = start_through(chain)[0], start_engine()
    runtime.device.gate.clear()
    thread = send(plain, request())
    runtime.device.gate.wait_until_held()
    send(engine, late := request(timeout=1000))
    wait_until(lambda: queued("a") == 1)
    runtime.pass_time(2000.0)
    assert_fails(answer_of(late), FakeError.UNAVAILABLE, "[rsrv:DEADLINE] stage 'a': ")
    runtime.device.gate.set()
    thread.join()
    assert_served(engine)


# --- whose sub-call ---------------------------------------------------------------------------------------


def test_an_internal_model_serves_running_meta_models_only(
    runtime: Runtime, start_through: StartThrough
) -> None:
    """An internal model answers only requests with the token of a running run."""
    pause = Pause()

    engine, triton = start_through(stopping(pause))
    runtime.device.executed.clear()
    refused = [request(), claim(0), claim(1), *(claim(secrets.randbits(64)) for _ in range(20))]
    for client_request in refused:
        answer = triton.ask("b", client_request)
        assert_fails(answer, FakeError.NOT_FOUND, "")
    assert runtime.device.executed == []

    client_request = request()
    assert engine.execute([client_request]) is None
    pause.reached()
    (token,) = set(triton.tokens)
    answer = triton.ask("b", claim(token, 5))
    assert_y(answer, rows(1, 12))
    for wrong in (token + 1, token ^ 1 << 63):
        answer = triton.ask("b", claim(wrong))
        assert_fails(answer, FakeError.NOT_FOUND, "run")
    pause.go()
    assert_y(answer_of(client_request), rows(1, 8))
    answer = triton.ask("b", claim(token))
    assert_fails(answer, FakeError.NOT_FOUND, "has ended")


def test_a_sub_call_with_a_later_deadline_ends_with_its_run(
    runtime: Runtime, start_engine: StartEngine, start_through: StartThrough
) -> None:
    """A request with a run's token ends at the run's deadline, even if its own deadline is later."""
    pause = Pause()
    (engine, triton), plain = start_through(stopping(pause)), start_engine()
    client_request = request(timeout=1000)
    assert engine.execute([client_request]) is None
    pause.reached()
    runtime.device.gate.clear()
    thread = send(plain, request())
    runtime.device.gate.wait_until_held()
    late = FakeRequest({"x": rows(1)}, int(9e9), with_token(triton.tokens[0]))
    send(triton.engines["b"], late)
    wait_until(lambda: queued("b") == 1)

    runtime.pass_time(2000.0)

    assert_fails(answer_of(late), FakeError.UNAVAILABLE, "[rsrv:DEADLINE]")
    runtime.device.gate.set()
    pause.go()
    thread.join()


def test_a_plain_client_that_guesses_is_refused(start_engine: StartEngine) -> None:
    """A public model refuses a request with a guessed token."""
    engine = start_engine()
    (answer,) = ask(engine, claim(12345))
    assert_fails(answer, FakeError.NOT_FOUND, "")
    (answer,) = ask(engine, request())
    assert_y(answer, rows(1, 3))


@pytest.mark.parametrize(
    "parameter",
    ['""', '"-1"', '"0x10"', '"1e3"', '"18446744073709551616"', "true", "null", "[1]", "1.5", '"1 "', '"²"'],
)
def test_a_token_is_decimal_text(start_engine: StartEngine, parameter: str) -> None:
    """A malformed token is refused by name, and other requests are answered."""
    engine = start_engine()
    bad = FakeRequest({"x": rows(1)}, parameters=f'{{"rsrv_run": {parameter}}}')
    answers = ask(engine, request(), bad, request())
    assert_fails(answers[1], FakeError.INVALID_ARG, "rsrv_run")
    for answer in answers[::2]:
        assert_y(answer, rows(1, 3))


def test_a_clients_own_parameter_on_a_meta_model_means_nothing(
    runtime: Runtime, start_through: StartThrough
) -> None:
    """A token that a client sends to a meta model is ignored. The run gets its own token."""
    engine, triton = start_through(chain)
    (answer,) = ask(engine, claim(42))
    assert_y(answer, rows(1, 8))
    assert 42 not in triton.tokens
