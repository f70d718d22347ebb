"""The memory of meta models' calls: which data is copied, and how long it lives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rsrv.stub.connection import RuntimeConnection
from tests.fakes import FakeRequest
from tests.unit.runtime.conftest import Runtime, StartMeta
from tests.unit.runtime.metas import (
    Pause,
    answer_of,
    ask,
    assert_y,
    request,
    rows,
)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Return a list that gets the shape of each array that is made in shared memory."""
    made: list[tuple[int, ...]] = []
    real = RuntimeConnection.array

    def array(self: RuntimeConnection, shape: tuple[int, ...], dtype: Any) -> Any:
        made.append(shape)
        return real(self, shape, dtype)

    monkeypatch.setattr(RuntimeConnection, "array", array)
    return made


PARTS: dict[str, tuple[Any, bool]] = {
    "whole": (lambda a: a, True),
    "first rows": (lambda a: a[:2], True),
    "middle rows": (lambda a: a[1:3], True),
    "one row": (lambda a: a[3][None], True),
    "reshaped": (lambda a: a.reshape(3, 4).reshape(4, 3), True),
    "the same bytes as another type": (lambda a: a.view(np.int32).view(np.float32), True),
    "every second row": (lambda a: a[::2], False),
    "backwards": (lambda a: a[::-1], False),
    "columns first": (lambda a: a.reshape(3, 4).T, False),
    "broadcast": (lambda a: np.broadcast_to(a[:1], (4, 3)), False),
    "computed": (lambda a: a + 1, False),
    "a list": (lambda a: [row.copy() for row in a], False),
}


@pytest.mark.parametrize(("part", "in_place"), PARTS.values(), ids=PARTS.keys())
@pytest.mark.parametrize("source", ["scratch", "result"])
def test_contiguous_parts_travel_by_reference_and_others_are_copied(
    runtime: Runtime,
    start_meta: StartMeta,
    copies: list[tuple[int, ...]],
    source: str,
    part: Any,
    in_place: bool,
) -> None:
    """Contiguous parts of scratch and of results are passed by reference. Other parts are copied."""

    def run(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
        if source == "scratch":
            buffer = call.scratch((4, 3), np.float32)
            assert buffer.shape == (4, 3)
            assert buffer.dtype == np.float32
            buffer[...] = inputs["x"]
        else:
            buffer = call("a", inputs)["y"]
        copies.clear()
        chosen = part(buffer)
        y = call("b", {"x": chosen})["y"]
        np.testing.assert_array_equal(y, 2 * np.asarray(chosen) + 2)
        assert copies[-1] == y.shape
        assert len(copies) == (1 if in_place else 2)
        return {"y": inputs["x"]}

    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    (answer,) = ask(start_meta(runtime, run), FakeRequest({"x": x}))
    assert_y(answer, x)


def test_scratch_takes_any_shape_and_type(runtime: Runtime, start_meta: StartMeta) -> None:
    """`scratch` returns buffers of any shape and type, which do not overlap."""
    specs: list[tuple[Any, Any]] = [
        (5, "u1"),
        ((), np.float64),
        ([2, 3], np.int16),
        ((0, 7), np.float32),
        ((np.int64(4), 1), bool),
        (np.int64(3), "i4"),
        (np.array([2, 3]), "i4"),
    ]

    def run(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
        buffers = [call.scratch(shape, dtype) for shape, dtype in specs]
        shapes = [buffer.shape for buffer in buffers]
        assert shapes == [(5,), (), (2, 3), (0, 7), (4, 1), (3,), (2, 3)]
        for n, buffer in enumerate(buffers):
            buffer[...] = n
        for n, buffer in enumerate(buffers):
            assert (buffer == buffer.dtype.type(n)).all()
        return {"y": call("a", inputs)["y"]}

    (answer,) = ask(start_meta(runtime, run), request())
    assert_y(answer, rows(1, 3))


@pytest.mark.parametrize("closed", [False, True])
def test_results_that_outlive_their_run_stay_as_they_are(
    runtime: Runtime, start_meta: StartMeta, closed: bool
) -> None:
    """A result that a run stores keeps its content, even after later requests or the end of its stub."""
    stored: list[Any] = []

    def run(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
        first = call("a", inputs)["y"]
        if len(stored) < 4:
            buffer = call.scratch((4, 3), np.float32)
            buffer[...] = 77
            stored.extend((first, call("b", {"x": first})["y"][1:], buffer[2:], inputs["x"].copy()))
        return {"y": call("b", {"x": first})["y"]}

    engine = start_meta(runtime, run)
    (answer,) = ask(engine, request(3, 5))
    assert_y(answer, rows(3, 24))
    if closed:
        engine.close()
    for n in range(0 if closed else 200):
        (answer,) = ask(engine, request(3, n))
        assert_y(answer, rows(3, 4 * n + 4))
    for array, expected in zip(stored, (rows(3, 11), rows(2, 24), rows(2, 77), rows(3, 5)), strict=True):
        np.testing.assert_array_equal(array, expected)
    stored.clear()


def test_what_another_run_stored_is_copied(
    runtime: Runtime, start_meta: StartMeta, copies: list[tuple[int, ...]]
) -> None:
    """A table that one run has stored in its scratch memory can be an input of runs on other connections."""
    table: list[Any] = []
    pause = Pause()

    def run(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
        if not table:
            table.append(call.scratch((2, 3), np.float32))
            table[0][...] = 40
        first = call("a", {"x": table[0]})["y"]
        pause()
        return {"y": call("b", {"x": table[0]})["y"] + first + inputs["x"]}

    engine = start_meta(runtime, run)
    pause.go(1)
    (answer,) = ask(engine, request(2, 1))
    assert_y(answer, rows(2, 82 + 81 + 1))
    requests = [request(2, n) for n in range(2)]
    assert engine.execute(requests) is None
    pause.reached(3)
    pause.go(2)
    for n, client_request in enumerate(requests):
        assert_y(answer_of(client_request), rows(2, 163 + n))
    table.clear()
