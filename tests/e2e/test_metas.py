"""Meta models on a real server: standard clients ask for one name, and several models compute the answer."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.calls import PROTOCOLS, Caller, Refused, at_once, caller, outcome
from tests.e2e.harness import RunningTriton, make_repository, running_triton
from tests.e2e.metas import ADDS_11, COLUMNS, HOOKS, plain_model, rows, write_meta, write_scale
from tests.held import Held, assert_returned, held, settled
from tests.status import read_status
from tests.waiting import wait_until

CHAIN = """
import numpy as np


def run(inputs, call):
    buffer = call.scratch(inputs["x"].shape, np.float32)
    buffer[...] = inputs["x"] + 1
    first = call("double", {"x": buffer}, keep_on_device=True)["y"]
    second, third = call.many([("triple", {"x": first}), ("hooked", {"x": inputs["x"]})])
    return {"y": second["y"] + third["y"]}
"""
AWAITS = """
import asyncio


async def run(inputs, call):
    x = inputs["x"]
    a, b = await asyncio.gather(call("double", {"x": x}), call("triple", {"x": x}))
    (c,) = await call.many([("hooked", {"x": a["y"]})])
    return {"y": b["y"] + c["y"]}
"""
OUTSIDE = """
def run(inputs, call):
    once = call("plain", {"x": inputs["x"]})["y"]
    return {"y": call("double", {"x": once})["y"]}
"""
ALONE = """
def run(inputs, call):
    return {"y": inputs["x"] * 7}
"""
BROKEN = """
from rsrv.hooks import BadInput


def run(inputs, call):
    match int(inputs["x"][0, 0]):
        case 0:
            call("secret", inputs)
        case 1:
            call("double", {"x": inputs["x"].astype("float64")})
        case 2:
            call("double", {"x": inputs["x"][:, :3]})
        case 3:
            raise RuntimeError("secret detail")
        case 4:
            return {"y": inputs["x"][:, :3]}
        case 5:
            call("raises", {"x": inputs["x"]})
        case 6:
            call("no_such_model", {"x": inputs["x"]})
        case 7:
            raise BadInput("row 0 is upside down")
        case 8:
            call("raises", {"x": inputs["x"]})
"""
RAISES = """
from rsrv.hooks import BadInput


def preprocess(inputs):
    if inputs["x"][0, 0] == 8:
        raise BadInput("row 0 is upside down")
    raise RuntimeError("secret detail")
"""


def write_bundles(folder: Path) -> Path:
    write_scale(folder / "double", 2, internal=True)
    write_scale(folder / "triple", 3)
    write_scale(folder / "hooked", 5, internal=True, hooks=HOOKS)
    write_scale(folder / "raises", 1, internal=True, hooks=RAISES)
    write_meta(folder / "chain", CHAIN, ["double", "triple", "hooked"])
    write_meta(folder / "awaits", AWAITS, ["double", "triple", "hooked"])
    write_meta(folder / "outside", OUTSIDE, ["double"], ["plain"])
    write_meta(folder / "alone", ALONE, [])
    write_meta(folder / "broken", BROKEN, ["double", "raises"], ["no_such_model"])
    return folder


@pytest.fixture(scope="module", params=["direct", pytest.param("bls", marks=pytest.mark.long)])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningTriton]:
    """Yield a server with the models of `write_bundles` and a plain one, for each transport."""
    folder = tmp_path_factory.mktemp(request.param)
    write_bundles(folder / "bundles")
    repository = make_repository(folder, settings=f"meta: {{transport: {request.param}}}")
    plain_model(repository, "plain", ADDS_11)
    # The machine's speed decides in which stage a short deadline passes.
    expected = (
        "requests_fail",
        *(f"deadlines_{where}" for where in ("arrival", "execute", "gate", "load", "queue")),
    )
    with running_triton(repository, folder / "server.log", expected=expected) as running:
        yield running


def chain(x: float) -> float:
    return 3 * (2 * (x + 1)) + 5 * (x + 100) - 1


def test_both_transports_give_the_same(server: RunningTriton) -> None:
    """Chained, parallel and awaited calls, hooks, external models and all numbers of rows give right answers over each transport."""
    before = read_status(server.pid)["metas"]["chain"]
    for protocol in PROTOCOLS:
        with caller(server, protocol) as call:
            for count in (1, 3, 4, 16):
                x = float(count)
                assert (call("chain", rows(count, x))["y"] == chain(x)).all()
                assert (call("awaits", rows(count, x))["y"] == 3 * x + 5 * (2 * x + 100) - 1).all()
                assert (call("outside", rows(count, x))["y"] == 2 * (x + 11)).all()
                assert (call("alone", rows(count, x))["y"] == 7 * x).all()
            for hidden in ("double", "hooked"):
                with pytest.raises(Refused) as refused:
                    call(hidden, rows(1))
                refused.value.assert_is("NOT_FOUND", protocol)
            assert (call("triple", rows(1, 5.0))["y"] == 15).all()

    def answered(status: dict[str, Any]) -> int:
        return int(status["outcomes"].get("answered", 0))

    # The runtime counts a run only when the run has ended. At this time, the client may already have its answer.
    wait_until(lambda: answered(metas(server)["chain"]) == answered(before) + 8, what="the count of all runs")
    after = metas(server)["chain"]
    assert after["models"] == ["double", "hooked", "triple"]
    assert after["calls"] == before["calls"] + 24
    assert after["device_seconds"] > before["device_seconds"]


@pytest.mark.parametrize(
    ("case", "code", "text"),
    [
        (0, "INTERNAL", "'secret'"),
        (1, "INVALID_ARG", "stage 'double'"),
        (2, "INVALID_ARG", "stage 'double'"),
        (3, "INTERNAL", "run hook"),
        (4, "INTERNAL", "run hook"),
        (5, "INTERNAL", "stage 'raises'"),
        (6, "NOT_FOUND", "stage 'no_such_model'"),
        (7, "INVALID_ARG", "row 0 is upside down"),
        (8, "INVALID_ARG", "stage 'raises': row 0 is upside down"),
    ],
)
def test_each_failure_has_its_code_and_one_line(
    server: RunningTriton, case: int, code: str, text: str
) -> None:
    """Each failure has the right code, and one line of text with the failed stage and no internals."""
    for protocol in PROTOCOLS:
        with caller(server, protocol) as call:
            with pytest.raises(Refused) as refused:
                call("broken", rows(1, float(case)))
            if case != 0:
                refused.value.assert_is(code, protocol)
            assert text in refused.value.message
            assert "\n" not in refused.value.message
            # The next request is answered.
            assert (call("alone", rows(1, 1.0))["y"] == 7).all()
    assert np.isfinite(read_status(server.pid)["metas"]["broken"]["device_seconds"])


# --- many at once ---------------------------------------------------------------------------------------------------


def ask_something(call: Caller, rng: np.random.Generator) -> str:
    """Send one random request, check the answer, and return the outcome. One request in eight has a deadline that may pass."""
    count, x = int(rng.integers(1, 17)), float(rng.integers(0, 50))
    expected = {
        "chain": chain(x),
        "awaits": 3 * x + 5 * (2 * x + 100) - 1,
        "outside": 2 * (x + 11),
        "alone": 7 * x,
        "triple": 3 * x,
    }
    model = str(rng.choice(list(expected), p=[0.4, 0.2, 0.1, 0.1, 0.2]))
    hurry = rng.integers(8) == 0
    options = {"timeout": int(rng.integers(500, 50_000))} if hurry else {}
    answer = outcome(lambda: call(model, rows(count, x), **options))
    if isinstance(answer, Refused):
        assert hurry, f"{model}: {answer}"
        assert answer.message.startswith("[rsrv:DEADLINE]"), f"{model}: {answer}"
        return "late"
    assert answer["y"].shape == (count, COLUMNS)
    assert (answer["y"] == expected[model]).all(), f"{model} of {x}: {answer['y']}"
    return "answered"


def mix(server: RunningTriton, clients: int, seconds: float, least: int = 1) -> Counter[str]:
    """Let many clients send random requests for some seconds, at least `least` each. Return the numbers of outcomes."""

    def work(call: Caller, number: int) -> Counter[str]:
        rng = np.random.default_rng(number)
        until = time.monotonic() + seconds
        outcomes: Counter[str] = Counter()
        while time.monotonic() < until or outcomes.total() < least:
            outcomes[ask_something(call, rng)] += 1
        return outcomes

    return sum(at_once(server, clients, work), Counter())


def metas(server: RunningTriton) -> dict[str, Any]:
    by_name: dict[str, Any] = read_status(server.pid)["metas"]
    return by_name


def assert_idle(server: RunningTriton) -> None:
    wait_until(
        lambda: not any(m["waiting"] or m["running"] or m["kept_bytes"] for m in metas(server).values()),
        what="all runs to have left, and what they kept on the device with them",
    )


def total_held(server: RunningTriton) -> Held:
    """Return the resources that the runtime and all stubs hold."""
    pids = [int(read_status(server.pid)["pid"]), *server.stub_pids()]
    return sum((held(pid) for pid in pids[1:]), held(pids[0]))


def test_many_clients_at_once_get_their_own_answers(server: RunningTriton) -> None:
    """64 clients of meta models and of plain models get right answers. At the end, no tensor stays on the device."""
    outcomes = mix(server, 64, 1, least=3)

    assert outcomes["answered"] > 100, outcomes
    assert_idle(server)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_minute_of_many_clients_loses_nothing(server: RunningTriton) -> None:
    """64 clients ask for up to three minutes. In at least one minute, memory, open files and threads must not grow.

    Several minutes may be needed, because a stub opens some connections and starts some threads only when it first needs them.
    Open files and threads are compared with their earlier maximum, because idle threads end.
    """
    mix(server, 64, 20)
    descriptors = threads = 0
    for last in (False, False, True):
        assert_idle(server)
        before = settled(lambda: total_held(server))
        descriptors, threads = max(descriptors, before.descriptors), max(threads, before.threads)
        before = replace(before, descriptors=descriptors, threads=threads)
        outcomes = mix(server, 64, 60)
        assert_idle(server)
        after = settled(lambda: total_held(server))
        print(f"{dict(outcomes)}; before: {before}; after: {after}")
        assert outcomes["answered"] > 1000, outcomes
        if last or (after.descriptors <= descriptors and after.threads <= threads):
            assert_returned(before, after)
            return
