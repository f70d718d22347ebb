"""Requests with more rows than the largest compiled size are submitted in parts. The tests use the real loop."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rsrv.front.parts import RowRange
from rsrv.front.rules import EQUAL, MAX_PARTS, SUSPECT
from rsrv.hooks import BadInput
from rsrv.hooks.loader import Hooks
from rsrv.settings import load_settings
from rsrv.stub.engine import Engine
from rsrv.stub.large_request import LargeRequest
from rsrv.stub.tensors import Array
from tests.fakes import FakeError, FakePbUtils, FakeRequest, NewResponse
from tests.unit.runtime.conftest import Runtime, StartEngine, StartMeta, StartRuntime
from tests.unit.runtime.engines import make_engine, ramp, refused, send_one
from tests.unit.runtime.metas import answer_of, ask, queued
from tests.unit.runtime.test_poison import HOSTILE, Server
from tests.unit.runtime.watchers import Operator
from tests.waiting import PATIENCE_S, wait_until

#: Rows of a request with seven parts. The largest size of `doubling` is 8.
ROWS = 53


def assert_doubled(request: FakeRequest, x: Array) -> None:
    np.testing.assert_array_equal(answer_of(request).arrays["y"], 2 * x + 1)


def send(engine: Engine, rows: int = ROWS, **options: Any) -> FakeRequest:
    request = FakeRequest({"x": ramp(rows)}, **options)
    assert engine.execute([request]) is None
    return request


def hold_first_parts(runtime: Runtime, engine: Engine, **options: Any) -> FakeRequest:
    """Send a large request, and wait until its first part executes and the next ones are queued."""
    runtime.device.executed.clear()
    runtime.device.gate.clear()
    request = send(engine, **options)
    runtime.device.gate.wait_until_held()
    wait_until(lambda: queued("doubling") == MAX_PARTS - 1)
    return request


@pytest.mark.parametrize("rows", [9, 16, ROWS, 500])
def test_any_number_of_rows_is_answered(runtime: Runtime, start_engine: StartEngine, rows: int) -> None:
    """The answer has all rows in their order, and no execution had more rows than the largest size."""
    engine = start_engine()
    runtime.device.executed.clear()
    assert_doubled(send(engine, rows), ramp(rows))
    assert max(runtime.device.executed) == 8
    assert sum(runtime.device.executed) < rows + 8


def test_small_requests_of_the_same_batch_are_answered_as_well(start_engine: StartEngine) -> None:
    """A batch with small and large requests is answered completely, also if no part of a large one fits in it."""
    engine = start_engine()
    for counts in ([1, ROWS, 3], [ROWS, 20], [2, 1]):
        answers = ask(engine, *(FakeRequest({"x": ramp(rows)}) for rows in counts))
        for rows, answer in zip(counts, answers, strict=True):
            np.testing.assert_array_equal(answer.arrays["y"], 2 * ramp(rows) + 1)


@pytest.fixture
def collected_by_hand() -> Iterator[None]:
    """Run a test without the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.usefixtures("collected_by_hand")
def test_the_tensors_of_an_answered_request_are_free_at_once(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tensors of a large request are freed at once after its answer, because the request is in no reference cycle."""
    made: list[weakref.ref[LargeRequest]] = []
    begin = LargeRequest.begin

    def note(large: LargeRequest) -> None:
        made.append(weakref.ref(large))
        begin(large)

    monkeypatch.setattr(LargeRequest, "begin", note)
    engine = start_engine()
    assert_doubled(send(engine), ramp(ROWS))
    wait_until(lambda: made[0]() is None, timeout=PATIENCE_S)


def test_hooks_see_the_whole_request(start_engine: StartEngine) -> None:
    """For a large request, each hook is called once, with all rows."""
    seen: list[int] = []

    def note(arrays: dict[str, Array]) -> dict[str, Array]:
        seen.extend(len(array) for array in arrays.values())
        return {name: -array for name, array in arrays.items()}

    request = send(start_engine(Hooks(preprocess=note, postprocess=note)))
    np.testing.assert_array_equal(answer_of(request).arrays["y"], 2 * ramp(ROWS) - 1)
    assert seen == [ROWS, ROWS]


def test_a_hook_that_refuses_the_request_lets_no_part_begin(
    runtime: Runtime, start_engine: StartEngine
) -> None:
    """If the hook of a large request raises BadInput, the client gets its text, and no part is executed."""

    def refuse(arrays: dict[str, Array]) -> dict[str, Array]:
        raise BadInput("too dark")

    engine = start_engine(Hooks(preprocess=refuse))
    runtime.device.executed.clear()
    (answer,) = ask(engine, FakeRequest({"x": ramp(ROWS)}))
    assert refused(answer, FakeError.INVALID_ARG, "too dark")
    assert not runtime.device.executed


def test_other_requests_execute_between_the_parts(runtime: Runtime, engine: Engine) -> None:
    """A small request is executed between the parts of a large one, because only some parts are queued at a time."""
    large = hold_first_parts(runtime, engine)
    small = send_one(engine)
    wait_until(lambda: queued("doubling") == MAX_PARTS)
    runtime.device.gate.set()
    assert_doubled(small, ramp(1))
    assert_doubled(large, ramp(ROWS))
    assert 1 in runtime.device.executed[: MAX_PARTS + 1]


def test_the_first_failure_ends_the_request_and_its_other_parts(runtime: Runtime, engine: Engine) -> None:
    """If a part fails, the client gets this failure, and the waiting parts are not executed."""
    request = hold_first_parts(runtime, engine)
    runtime.device.fail = "the card is on fire"
    runtime.device.gate.set()
    assert answer_of(request).error is not None
    wait_until(lambda: queued("doubling") == 0)
    assert len(runtime.device.executed) <= MAX_PARTS


def test_a_client_that_cancels_ends_all_parts(runtime: Runtime, engine: Engine) -> None:
    """If a client cancels a large request, its waiting parts are cancelled, and no further part is submitted."""
    request = hold_first_parts(runtime, engine)
    request.cancelled = True
    assert refused(answer_of(request), FakeError.CANCELLED, "cancelled")
    wait_until(lambda: queued("doubling") == 0)
    runtime.device.gate.set()
    ask(engine, FakeRequest({"x": ramp(1)}))
    assert runtime.device.executed == [8, 1]


def test_all_parts_have_the_deadline_of_the_request(runtime: Runtime, engine: Engine) -> None:
    """When its deadline passes, a large request ends once, although its first part still executes."""
    request = hold_first_parts(runtime, engine, timeout_us=10**9)
    runtime.pass_time(2000.0)
    assert refused(answer_of(request), FakeError.UNAVAILABLE, "DEADLINE")
    wait_until(lambda: queued("doubling") == 0)
    runtime.device.gate.set()
    ask(engine, FakeRequest({"x": ramp(1)}))
    assert runtime.device.executed == [8, 1]


def test_a_full_queue_refuses_a_large_request_only_at_its_first_part(
    start_runtime: StartRuntime, doubling: Path
) -> None:
    """If the first part of a large request is accepted, all later parts are accepted, even if the queue is full.

    Other requests are refused then.
    """
    runtime = start_runtime(load_settings("scheduler: {max_queue_depth: 2}\nstub: {in_place_ms: 0}"))
    engine = make_engine(runtime, doubling)
    large = hold_first_parts(runtime, engine)
    refusals = [send(engine, rows=rows) for rows in (1, ROWS)]
    assert all(refused(answer_of(request), FakeError.UNAVAILABLE, "QUEUE_FULL") for request in refusals)
    runtime.device.gate.set()
    assert_doubled(large, ramp(ROWS))


def test_parts_are_as_small_as_executions_may_be(start_runtime: StartRuntime, doubling: Path) -> None:
    """With a limit of 5 rows, parts of 5 rows execute at size 8."""
    runtime = start_runtime(load_settings("models: {doubling: {max_batch_size: 5}}\nstub: {in_place_ms: 0}"))
    engine = make_engine(runtime, doubling)
    runtime.device.executed.clear()
    assert_doubled(send(engine, 12), ramp(12))
    assert sorted(runtime.device.executed) == [4, 8, 8]


def test_a_slow_answer_carries_the_number_of_its_first_part(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to a slow large request has the number of the request's first part, for `rsrv why`."""
    monkeypatch.setattr(FakePbUtils, "InferenceResponse", NewResponse)
    monkeypatch.setattr("rsrv.stub.engine._SLOW_S", 0.0)
    engine = start_engine()
    assert answer_of(send(engine, 9)).given["rsrv_request"] >= 0  # type: ignore[attr-defined]


def test_operators_see_one_request_with_its_parts(runtime: Runtime, engine: Engine) -> None:
    """Operators see a large request as one request: by its client's id, and later by the number of its first part."""
    request = hold_first_parts(runtime, engine, id="ours")
    with Operator(runtime) as operator:
        (waiting,) = operator.do("find", request="ours")["requests"]
        assert (waiting["parts"], waiting["rows"], waiting["outcome"]) == (
            MAX_PARTS,
            8 * MAX_PARTS,
            "executing",
        )
        runtime.device.gate.set()
        assert_doubled(request, ramp(ROWS))
        ask(engine, FakeRequest({"x": ramp(1)}))
        (entry,) = operator.do("find", request="ours")["requests"]
        assert (entry["parts"], entry["rows"], entry["outcome"]) == (7, ROWS, "answered")
        assert operator.do("find", request=entry["number"])["requests"] == [entry]
        slowest = operator.do("slowest", model="doubling")["requests"]
        assert [slow.get("parts", 0) for slow in slowest] == [7, 0]


# --- runtimes that end ------------------------------------------------------------------------------------------


class CountingServer(Server):
    """A server that counts the executions of each part. A part is identified by the first element of its inputs."""

    def __init__(self, *arguments: Any) -> None:
        self.parts: Counter[float] = Counter()
        super().__init__(*arguments)

    def _compute(self, inputs: Sequence[Array], weights: Sequence[Array]) -> list[Array]:
        outputs = super()._compute(inputs, weights)
        self.parts[float(inputs[0][0, 0])] += 1
        return outputs


@pytest.fixture
def server(
    start_runtime: StartRuntime, doublings: dict[str, Path], tmp_path: Path
) -> Iterator[CountingServer]:
    made = CountingServer(start_runtime, tmp_path, doublings)
    yield made
    made.released.set()
    made.hostile.close()
    made.other.close()


def send_hostile(server: Server) -> FakeRequest:
    """Send a large request whose third part executes until the test ends it, and wait until that part executes."""
    x = ramp(ROWS, 1000)
    x[17] = HOSTILE
    request = FakeRequest({"x": x})
    assert server.hostile.execute([request]) is None
    server.executing.get(timeout=PATIENCE_S)
    return request


def test_a_death_repeats_only_the_parts_without_an_answer(
    server: CountingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a runtime's death, only the parts without an answer are repeated. The parts of both runtimes make one answer."""
    answered, take = list[RowRange](), LargeRequest.take

    def note(large: LargeRequest, part: RowRange, outcome: Any) -> None:
        answered.append(part)
        take(large, part, outcome)

    monkeypatch.setattr(LargeRequest, "take", note)
    request = send_hostile(server)
    x = request.inputs()[0].as_numpy()
    wait_until(lambda: len(answered) == 2)
    server.parts.clear()
    server.kill()
    server.executing.get(timeout=PATIENCE_S)
    server.released.set()
    assert_doubled(request, x)
    firsts = [float(first) for first in x[::8, 0]]
    assert [server.parts[first] for first in firsts[:2]] == [0, 0]
    assert [server.parts[first] for first in firsts[3:]] == [1, 1, 1, 1]


def test_a_part_that_ends_two_runtimes_ends_its_request(server: Server) -> None:
    """If a part ends two runtimes, its request fails.

    A later request with an equal part fails as well, whatever its other rows are.
    """
    request = send_hostile(server)
    server.crash()
    server.executing.get(timeout=PATIENCE_S)
    server.crash()
    assert refused(answer_of(request), FakeError.INTERNAL, SUSPECT)
    again = FakeRequest({"x": np.concatenate([request.inputs()[0].as_numpy()[:40], ramp(8)])})
    assert server.hostile.execute([again]) is None
    assert refused(answer_of(again), FakeError.INTERNAL, EQUAL)


def test_a_large_request_waits_as_a_whole_for_a_runtime(server: Server) -> None:
    """A large request that arrives while there is no runtime is submitted in parts to the next one."""
    server.runtime.stop()
    request = FakeRequest({"x": ramp(ROWS)})
    wait_until(lambda: server.hostile.session.attachment is None)
    assert server.hostile.execute([request]) is None
    server.start()
    assert_doubled(request, ramp(ROWS))


# --- calls of meta models ------------------------------------------------------------------------------------------


def plain_run(inputs: dict[str, Array], call: Any) -> dict[str, Array]:
    return {"y": call("b", {"x": call("a", inputs)["y"]})["y"]}


async def async_run(inputs: dict[str, Array], call: Any) -> dict[str, Array]:
    first, _ = await asyncio.gather(call("a", inputs), call("b", inputs))
    outputs: dict[str, Array] = await call("b", {"x": first["y"]})
    return {"y": outputs["y"]}


@pytest.mark.parametrize("run", [plain_run, async_run])
def test_a_call_with_many_rows_is_executed_in_parts(
    runtime: Runtime, start_meta: StartMeta, run: Any
) -> None:
    """A run calls a model with many rows. It gets all rows in their order, and no execution exceeds the largest size."""
    engine = start_meta(runtime, run)
    runtime.device.executed.clear()
    (answer,) = ask(engine, FakeRequest({"x": ramp(ROWS)}))
    np.testing.assert_array_equal(answer.arrays["y"], 2 * (2 * ramp(ROWS) + 1) + 2)
    assert max(runtime.device.executed) == 8


def test_a_buffer_that_is_filled_again_does_not_change_a_large_call_before(
    runtime: Runtime, start_meta: StartMeta
) -> None:
    """A run changes a buffer after a large call. All parts of the call have the inputs from before the change."""

    async def run(inputs: dict[str, Array], call: Any) -> dict[str, Array]:
        buffer = inputs["x"].copy()
        started = call("a", {"x": buffer})
        buffer[:] = -1
        return {"y": (await started)["y"]}

    (answer,) = ask(start_meta(runtime, run), FakeRequest({"x": ramp(ROWS)}))
    np.testing.assert_array_equal(answer.arrays["y"], 2 * ramp(ROWS) + 1)


def test_a_call_that_keeps_many_rows_on_the_device_is_refused(
    runtime: Runtime, start_meta: StartMeta
) -> None:
    """A call that keeps its output on the device is refused if its rows exceed the largest size.

    Such a call cannot be divided into parts. The error has the compiled sizes.
    """

    def run(inputs: dict[str, Array], call: Any) -> dict[str, Array]:
        return {"y": call("b", {"x": call("a", inputs, keep_on_device=True)["y"]})["y"]}

    (answer,) = ask(start_meta(runtime, run), FakeRequest({"x": ramp(ROWS)}))
    assert refused(answer, FakeError.INVALID_ARG, "53 rows exceed the largest compiled batch size")
