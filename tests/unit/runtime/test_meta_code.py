"""Errors in the code of meta models: they fail their own request and no other."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from rsrv.stub.calls import CallError
from rsrv_bundle.export import export_bundle
from tests.fakes import FakeError
from tests.unit.runtime.conftest import Runtime, StartEngine, StartMeta
from tests.unit.runtime.metas import (
    Run,
    answer_of,
    ask,
    assert_fails,
    assert_served,
    assert_y,
    awaiting,
    chain,
    request,
    rows,
    send,
    status_of,
)
from tests.waiting import wait_until


def raises(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
    call("a", inputs)
    raise RuntimeError("secret detail")


def leaves(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
    call("a", inputs)
    sys.exit(3)


async def raises_awaiting(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
    await call("a", inputs)
    raise RuntimeError("secret detail")


async def leaves_awaiting(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
    await call("a", inputs)
    sys.exit(3)


async def raises_while_calling(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
    call("a", inputs)
    call("b", inputs)
    raise RuntimeError("secret detail")


def misspells_many(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
    return call.many([("a",)])[0]  # type: ignore[no-any-return]


RESULTS: dict[str, Any] = {
    "nothing": None,
    "an array": rows(1),
    "another name": {"z": rows(1)},
    "another dtype": {"y": rows(1).astype(np.float64)},
    "another shape": {"y": np.zeros((1, 4), np.float32)},
    "no axis": {"y": np.float32(3)},
    "more rows": {"y": rows(2)},
    "no rows": {"y": rows(0)},
    "ragged lists": {"y": [[1.0], [1.0, 2.0]]},
}


def returning(result: Any) -> Run:
    return lambda inputs, call: result


BAD: dict[str, Run] = {
    **{f"returns {what}": returning(result) for what, result in RESULTS.items()},
    **{
        run.__name__: run
        for run in (
            raises,
            leaves,
            raises_awaiting,
            leaves_awaiting,
            raises_while_calling,
            misspells_many,
        )
    },
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
def test_user_code_that_goes_wrong_fails_its_request_only(
    runtime: Runtime, start_meta: StartMeta, bad: Run
) -> None:
    """A run that raises, exits or returns a wrong result fails its request; details go to the log only."""
    awaits = asyncio.iscoroutinefunction(bad)

    def run(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
        return chain(inputs, call) if inputs["x"][0, 0] == 100 else bad(inputs, call)

    async def arun(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
        return await (awaiting if inputs["x"][0, 0] == 100 else bad)(inputs, call)

    engine = start_meta(runtime, arun if awaits else run)
    for _ in range(3):
        (answer,) = ask(engine, request())
        assert_fails(answer, FakeError.INTERNAL, "log")
        assert "secret" not in answer.error.message  # type: ignore[union-attr]
    assert_served(engine)


def test_unawaited_calls_end_before_the_next_run(runtime: Runtime, start_meta: StartMeta) -> None:
    """Calls that a run has not awaited end before the next run begins, and the next run does not get their results."""

    async def run(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
        if inputs["x"][0, 0] == 100:
            return await awaiting(inputs, call)
        for _ in range(5):
            call("a", {"x": inputs["x"] + 50})
        return {"y": inputs["x"]}

    engine = start_meta(runtime, run)
    for _ in range(3):
        (answer,) = ask(engine, request())
        assert_y(answer, rows(1))
        assert_served(engine)
    wait_until(lambda: status_of()["running"] == 0)  # The request is answered before its run ends.


def test_one_of_several_awaited_calls_fails_while_others_are_under_way(
    runtime: Runtime, start_engine: StartEngine, start_meta: StartMeta
) -> None:
    """If one of several awaited calls fails, the run ends only after the others have ended."""

    async def run(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
        if inputs["x"][0, 0] == 100:
            return await awaiting(inputs, call)
        await call("a", inputs)
        slow = [call("a", inputs, keep_on_device=True), call("b", inputs)]

        async def fails() -> None:
            await call("b", {})

        await asyncio.gather(*slow, fails())
        raise AssertionError("gather raises")

    engine = start_meta(runtime, run)
    runtime.device.gate.clear(after=1)
    thread = send(engine, failed := request())
    runtime.device.gate.wait_until_held()
    runtime.device.gate.set()
    thread.join()
    assert_fails(answer_of(failed), FakeError.INVALID_ARG, "stage 'b': input 'x' is missing")
    assert_served(engine)


def test_an_awaited_run_may_catch_a_failure_and_go_on(runtime: Runtime, start_meta: StartMeta) -> None:
    """A run may catch the failure of a call, with gather's return_exceptions or with `try`, and continue."""

    async def run(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
        async def refused() -> Any:
            return await call("a", {})

        results: Any = await asyncio.gather(refused(), call("a", inputs), return_exceptions=True)
        assert isinstance(results[0], CallError)
        with pytest.raises(CallError):
            await call.many([("a", inputs), ("b", {})])
        return {"y": (await call("b", {"x": results[1]["y"]}))["y"]}

    (answer,) = ask(start_meta(runtime, run), request())
    assert_y(answer, rows(1, 8))


def test_a_model_without_inputs_may_be_called(
    runtime: Runtime, start_meta: StartMeta, tmp_path: Path
) -> None:
    """A model without inputs, such as a table, can be called."""
    export_bundle(
        lambda params: {"table": 2 * params["w"]},
        {"w": jnp.ones(3, jnp.float32)},
        {},
        batch_sizes=[],
        out_dir=tmp_path / "table",
    )
    runtime.device.compute = lambda inputs, weights: [2 * weights[0]]

    def run(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
        return {"y": inputs["x"] * call("table", {})["table"]}

    engine = start_meta(runtime, run, ["table"], bundles={"table": tmp_path / "table"})
    (answer,) = ask(engine, request())
    assert_y(answer, rows(1, 2))
