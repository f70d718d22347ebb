"""Meta models from their stub to the runtime and back: real loop, scheduler, sockets and memory, a fake device."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rsrv.stub.connection import RuntimeConnection
from rsrv.wire.socket import read_status
from tests.builders import write_meta
from tests.fakes import FakeRequest
from tests.unit.runtime.conftest import Runtime
from tests.unit.runtime.metas import ask, meta_engine, rows

#: model `a` makes 2 x + 1, `b` 2 x + 2, ...


def test_the_second_stage_gets_what_the_first_one_made(
    runtime: Runtime, doublings: dict[str, Path], tmp_path: Path
) -> None:
    """A meta model chains two calls with Python between them."""
    meta = write_meta(
        tmp_path / "chain",
        """
        def run(inputs, call):
            first = call("a", {"x": inputs["x"]})["y"]
            return {"y": call("b", {"x": first + 10})["y"]}
        """,
        ["a", "b"],
    )
    with meta_engine(runtime, meta, {n: doublings[n] for n in "ab"}) as engine:
        for _ in range(20):
            (answer,) = ask(engine, FakeRequest({"x": rows(2, 5)}))
            assert answer.error is None, answer.error.message
            np.testing.assert_array_equal(answer.arrays["y"], rows(2, 2 * (2 * 5 + 1 + 10) + 2))
        status = read_status(os.getpid())["metas"]["chain"]
        assert status["models"] == ["a", "b"]
        assert status["calls"] == 40


@pytest.mark.parametrize("rows_", [1, 3, 4])
def test_a_result_may_stay_on_the_device(
    runtime: Runtime, doublings: dict[str, Path], tmp_path: Path, rows_: int
) -> None:
    """A kept result has a shape, feeds the next call, and is freed at the end."""
    meta = write_meta(
        tmp_path / "kept",
        """
        def run(inputs, call):
            first = call("a", inputs, keep_on_device=True)["y"]
            assert first.shape == inputs["x"].shape, first
            return call("b", {"x": first})
        """,
        ["a", "b"],
    )
    with meta_engine(runtime, meta, {n: doublings[n] for n in "ab"}) as engine:
        (answer,) = ask(engine, FakeRequest({"x": rows(rows_, 5)}))
        assert answer.error is None, answer.error.message
        np.testing.assert_array_equal(answer.arrays["y"], rows(rows_, 24))
        assert runtime.device.in_place == 1
        assert runtime.device.merged == 0
        assert read_status(os.getpid())["metas"]["kept"]["kept_bytes"] == 0


def test_parallel_calls_come_back_in_their_order(
    runtime: Runtime, doublings: dict[str, Path], tmp_path: Path
) -> None:
    """Parallel calls return in order; some of their results stay on the device and are merged."""
    meta = write_meta(
        tmp_path / "many",
        """
        import numpy as np

        def run(inputs, call):
            x = inputs["x"]
            a, b = call.many([("a", {"x": x}, True), ("b", {"x": x}, ["y"])])
            c, d = call.many([("c", {"x": a["y"]}), ("c", {"x": b["y"]})])
            return {"y": c["y"] * 1000 + d["y"]}
        """,
        ["a", "b", "c"],
    )
    with meta_engine(runtime, meta, {n: doublings[n] for n in "abc"}) as engine:
        for count in (1, 2, 3, 5):
            (answer,) = ask(engine, FakeRequest({"x": rows(count, 1)}))
            assert answer.error is None, answer.error.message
            np.testing.assert_array_equal(answer.arrays["y"], rows(count, 9 * 1000 + 11))


def test_an_async_run_awaits_its_calls(runtime: Runtime, doublings: dict[str, Path], tmp_path: Path) -> None:
    """An async run awaits calls one by one, gathered, and by call.many."""
    meta = write_meta(
        tmp_path / "awaits",
        """
        import asyncio

        async def run(inputs, call):
            a = await call("a", inputs)
            b, c = await asyncio.gather(
                call("b", {"x": a["y"]}, keep_on_device=True), call("c", {"x": a["y"]})
            )
            (d, e) = await call.many([("b", {"x": b["y"]}), ("c", {"x": c["y"]})])
            return {"y": d["y"] * 100 + e["y"]}
        """,
        ["a", "b", "c"],
    )
    with meta_engine(runtime, meta, {n: doublings[n] for n in "abc"}) as engine:
        (answer,) = ask(engine, FakeRequest({"x": rows(1, 1)}))
        assert answer.error is None, answer.error.message
        # a: 3; b: 8, c: 9; then 18 and 21
        np.testing.assert_array_equal(answer.arrays["y"], rows(1, 1821))


def test_what_lies_in_shared_memory_is_not_copied_again(
    runtime: Runtime, doublings: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scratch buffers, their parts and earlier results are read in place."""
    meta = write_meta(
        tmp_path / "frugal",
        """
        import numpy as np

        def run(inputs, call):
            buffer = call.scratch((4, 3), np.float32)
            buffer[:2] = inputs["x"]
            a = call("a", {"x": buffer[:2]})
            return call("b", {"x": a["y"]})
        """,
        ["a", "b"],
    )
    with meta_engine(runtime, meta, {n: doublings[n] for n in "ab"}) as engine:
        made: list[tuple[int, ...]] = []
        real = RuntimeConnection.array

        def array(self: RuntimeConnection, shape: tuple[int, ...], dtype: Any) -> Any:
            made.append(shape)
            return real(self, shape, dtype)

        monkeypatch.setattr(RuntimeConnection, "array", array)
        (answer,) = ask(engine, FakeRequest({"x": rows(2, 5)}))
        assert answer.error is None, answer.error.message
        np.testing.assert_array_equal(answer.arrays["y"], rows(2, 24))
        # The buffer, and each call's result.
        assert made == [(4, 3), (2, 3), (2, 3)]
