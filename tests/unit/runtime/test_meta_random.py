"""Random programs over models of known arithmetic, run side by side, give numpy's results."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsrv.settings import load_settings
from rsrv.stub.calls import CallError
from rsrv.stub.engine import Engine
from rsrv.stub.meta_engine import MetaEngine
from rsrv.stub.tensors import Array
from rsrv.wire.frames import Status
from tests.builders import FEW_EXAMPLES
from tests.fakes import FakeError, FakeRequest, FakeResponse
from tests.status import read_status
from tests.unit.runtime.conftest import Runtime, StartMeta, StartRuntime, double, nothing_is_under_way
from tests.unit.runtime.metas import FakeCallees, answer_of, assert_fails, assert_y, memory_of, model_engine
from tests.waiting import wait_until

#: A model computes twice its input plus this number. By model name.
MODELS = {name: n for n, name in enumerate("abcd", 1)}
LARGEST = 8

# --- programs ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class One:
    """A call of a model with the value of a register as its input."""

    model: str
    source: int
    keep: bool


@dataclass(frozen=True)
class Many:
    calls: tuple[One, ...]


@dataclass(frozen=True)
class Refused:
    """A call with a wrong dtype, whose failure the run catches."""

    model: str


@dataclass(frozen=True)
class Buffer:
    """A value that the run writes to scratch memory."""

    source: int


@dataclass(frozen=True)
class Part:
    """Rows of a value by reference. They are contiguous if `step` is 1."""

    source: int
    first: int
    last: int
    step: int


@dataclass(frozen=True)
class Plus:
    source: int
    amount: int


@dataclass(frozen=True)
class Drop:
    source: int


Step = One | Many | Refused | Buffer | Part | Plus | Drop
Program = list[Step]
#: A kind of request of a program, and its arguments. The program then gets the output y of a call, several such outputs, or a
#: buffer.
Want = tuple[str, Any]


def execute(program: Program, x: Array) -> Generator[Want, Any, Array]:
    """Yield the calls of a program and receive their results. Return x plus a sum of all values on the host."""
    # Values, and whether each may be on the device.
    registers: list[tuple[Any, bool]] = [(x, False)]

    def any_of(source: int) -> int:
        return source % len(registers)

    def host(source: int) -> Array:
        here: list[Array] = [value for value, on_device in registers if not on_device]
        return here[source % len(here)]

    for step in program:
        match step:
            case One(model, source, keep):
                value = yield "call", (model, registers[any_of(source)][0], keep)
                registers.append((value, keep))
            case Many(calls):
                arguments = [(call.model, registers[any_of(call.source)][0], call.keep) for call in calls]
                values = yield "many", arguments
                registers.extend(zip(values, (call.keep for call in calls), strict=True))
            case Refused(model):
                yield "refused", model
            case Buffer(source):
                value = host(source)
                buffer = yield "scratch", value.shape
                buffer[...] = value
                registers.append((buffer, False))
            case Part(source, first, last, step_):
                registers.append((host(source)[first:last:step_], False))
            case Plus(source, amount):
                registers.append((host(source) + np.float32(amount), False))
            case Drop(source):
                at = any_of(source)
                if at:
                    del registers[at]
    total = sum(float(value.astype(np.float64).sum()) for value, on_device in registers if not on_device)
    return x + np.float32(total % 4096)


class TooLarge(Exception):
    """Raised if a call keeps more rows on the device than a model's largest size."""


def model(name: str, x: Array, *, keep: bool = False) -> Array:
    if keep and len(x) > LARGEST:
        raise TooLarge
    return 2 * x + np.float32(MODELS[name])


def expected(program: Program, x: Array, *, bls: bool) -> Array:
    """Compute a program's answer with numpy.

    Raises TooLarge if a call keeps too many rows on the device. With `bls`, calls keep no rows on the device.
    """
    running = execute(program, x)
    answer: Any = None
    while True:
        try:
            match running.send(answer):
                case "call", (name, value, keep):
                    answer = model(name, value, keep=keep and not bls)
                case "many", calls:
                    answer = [model(name, value, keep=keep and not bls) for name, value, keep in calls]
                case "scratch", shape:
                    answer = np.empty(shape, np.float32)
                case "refused", _:
                    answer = None
        except StopIteration as stop:
            result: Array = stop.value
            return result


WRONG = {"x": np.zeros((1, 3), np.float64)}


def run_plain(program: Program, x: Array, call: Any) -> Array:
    running = execute(program, x)
    answer: Any = None
    while True:
        try:
            match running.send(answer):
                case "call", (name, value, keep):
                    answer = call(name, {"x": value}, keep_on_device=keep)["y"]
                case "many", calls:
                    results = call.many([(name, {"x": value}, keep) for name, value, keep in calls])
                    answer = [result["y"] for result in results]
                case "scratch", shape:
                    answer = call.scratch(shape, np.float32)
                case "refused", name:
                    with pytest.raises(CallError):
                        call(name, WRONG)
                    answer = None
        except StopIteration as stop:
            result: Array = stop.value
            return result


async def run_awaiting(program: Program, x: Array, call: Any) -> Array:
    running = execute(program, x)
    answer: Any = None
    while True:
        try:
            match running.send(answer):
                case "call", (name, value, keep):
                    answer = (await call(name, {"x": value}, keep_on_device=keep))["y"]
                case "many", calls:
                    results = await call.many([(name, {"x": value}, keep) for name, value, keep in calls])
                    answer = [result["y"] for result in results]
                case "scratch", shape:
                    answer = call.scratch(shape, np.float32)
                case "refused", name:
                    with pytest.raises(CallError) as caught:
                        await call(name, WRONG)
                    assert caught.value.status is Status.INVALID
                    answer = None
        except StopIteration as stop:
            result: Array = stop.value
            return result


# --- their engines ----------------------------------------------------------------------------------------


def slowly(inputs: Sequence[Array], weights: Sequence[Array]) -> list[Array]:
    """Compute slowly, so that other calls wait meanwhile and share executions."""
    Event().wait(0.0005)
    return double(inputs, weights)


class House:
    """Three meta models and a plain model. The third meta model is asynchronous. The test sets the programs."""

    def __init__(
        self, runtime: Runtime, start_meta: StartMeta, doublings: dict[str, Path], *, bls: bool
    ) -> None:
        self.runtime = runtime
        self.bls = bls
        self.programs: list[Program] = [[], [], []]
        self.engines: list[MetaEngine] = []
        for n in range(3):
            internal = {name: model_engine(runtime, doublings[name], internal=True) for name in MODELS}
            triton = FakeCallees(engines=internal if bls else {})
            if not bls:
                for engine in internal.values():
                    engine.close()
            run: Any = self._awaiting(n) if n == 2 else self._plain(n)
            self.engines.append(start_meta(runtime, run, "abcd", name=f"m{n}", triton=triton))
        self.plain: Engine = model_engine(runtime, doublings["a"])

    def _plain(self, n: int) -> Callable[..., Any]:
        return lambda inputs, call: {"y": run_plain(self.programs[n], inputs["x"], call)}

    def _awaiting(self, n: int) -> Callable[..., Any]:
        async def run(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
            return {"y": await run_awaiting(self.programs[n], inputs["x"], call)}

        return run

    def ask(self, batches: list[list[Array]]) -> list[list[FakeResponse]]:
        """Send all batches before waiting for answers. The last batch is for the plain model."""
        requests = [[FakeRequest({"x": x}) for x in batch] for batch in batches]
        executes = [*(engine.execute for engine in self.engines), self.plain.execute]
        answers = [
            execute(list(batch)) if batch else [] for execute, batch in zip(executes, requests, strict=True)
        ]
        return [
            [answer_of(request) for request in batch] if answered is None else answered
            for batch, answered in zip(requests, answers, strict=True)
        ]


@pytest.fixture(params=[pytest.param("direct", marks=pytest.mark.long), "direct, asynchronous", "bls"])
def house(
    request: pytest.FixtureRequest,
    start_runtime: StartRuntime,
    start_meta: StartMeta,
    doublings: dict[str, Path],
) -> House:
    transport, _, way = request.param.partition(", ")
    runtime = start_runtime(
        load_settings(f"meta: {{transport: {transport}}}\nscheduler: {{meta_concurrency: 3}}"),
        asynchronous=bool(way),
        compute=slowly,
    )
    return House(runtime, start_meta, doublings, bls=transport == "bls")


registers = st.integers(0, 7)
models = st.sampled_from(sorted(MODELS))
single_calls = st.builds(One, models, registers, st.booleans())
steps = st.one_of(
    single_calls,
    single_calls,
    st.builds(Many, st.lists(single_calls, min_size=2, max_size=4).map(tuple)),
    st.builds(Many, st.lists(single_calls, min_size=2, max_size=4).map(tuple)),
    st.builds(Refused, models),
    st.builds(Buffer, registers),
    st.builds(Part, registers, st.integers(0, 3), st.integers(1, 9), st.sampled_from([1, 1, 2, -1])),
    st.builds(Plus, registers, st.integers(0, 20)),
    st.builds(Drop, registers),
)
programs = st.lists(steps, min_size=3, max_size=8)
sizes = st.lists(st.sampled_from([0, 1, 1, 2, 3, 4, 5, 7, 8, 9]), min_size=1, max_size=4)


def test_random_programs_give_what_numpy_computes_and_leave_nothing(house: House) -> None:
    """Random programs on several engines return what numpy computes, with both transports, and no memory is left."""

    @FEW_EXAMPLES
    @given(st.tuples(programs, programs, programs), st.tuples(sizes, sizes, sizes, sizes))
    def check(drawn: tuple[Program, ...], counts: tuple[list[int], ...]) -> None:
        house.programs[:] = drawn
        rng = np.random.default_rng(sum(map(sum, counts)))
        batches = [[rng.integers(0, 50, (n, 3)).astype(np.float32) for n in lengths] for lengths in counts]
        answers = house.ask(batches)
        for program, batch, batch_answers in zip([*drawn, None], batches, answers, strict=True):
            for x, answer in zip(batch, batch_answers, strict=True):
                try:
                    y = model("a", x) if program is None else expected(program, x, bls=house.bls)
                except TooLarge:
                    assert_fails(answer, FakeError.INVALID_ARG, "9 rows")
                else:
                    assert_y(answer, y)
        wait_until(nothing_is_under_way)
        for engine in house.engines:
            # Triton may still read the last answers. Earlier ones are freed with their threads.
            wait_until(lambda engine=engine: memory_of(engine)[1] <= 4096, what="free memory")  # type: ignore[misc]

    check()
    wait_until(lambda: not house.runtime.device.kept)
    metas = read_status(os.getpid())["metas"]
    assert set(metas) == {"m0", "m1", "m2"}
    assert min(meta["calls"] for meta in metas.values()) > 20
