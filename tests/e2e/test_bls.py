"""Calls between models on a real server: several calls at the same time, and calls to models that fail, hang and die."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rsrv.wire.frames import Status
from tests.e2e import called_model, calling_model
from tests.e2e.called_model import ECHO, RAISE, TERMS, TOGETHER, WAIT
from tests.e2e.calling_model import HASTY, TOKENS
from tests.e2e.calls import at_once, caller
from tests.e2e.harness import EXPLICIT, HURRY, RunningTriton, StartTriton, path_with_numpy2, running_triton
from tests.waiting import PATIENCE_S, wait_until

_MIRROR = '''
class TritonPythonModel:
    """Gives what it gets."""

    def execute(self, requests):
        import triton_python_backend_utils as pb_utils

        return [pb_utils.InferenceResponse(request.inputs()) for request in requests]
'''

_TRITON_TYPES = {
    "bool": "BOOL", "i8": "INT8", "i16": "INT16", "i32": "INT32", "i64": "INT64",
    "u8": "UINT8", "u16": "UINT16", "u32": "UINT32", "u64": "UINT64",
    "f16": "FP16", "f32": "FP32", "f64": "FP64", "bf16": "BF16",
}  # fmt: skip


def config(inputs: Mapping[str, str], outputs: Mapping[str, str], dims: str = "[-1]") -> str:
    """Return the config.pbtxt of a Python model. `inputs` and `outputs` map names to rsrv's dtypes."""

    def tensors(kind: str, named: Mapping[str, str]) -> str:
        return "\n".join(
            f'{kind} [{{ name: "{name}" data_type: TYPE_{_TRITON_TYPES[token]} dims: {dims} }}]'
            for name, token in named.items()
        )

    group = "instance_group [{ kind: KIND_CPU count: 1 }]"
    return f'backend: "python"\n{tensors("input", inputs)}\n{tensors("output", outputs)}\n{group}\n'


def add(repository: Path, name: str, code: str, config_text: str) -> None:
    version = repository / name / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(code)
    (version.parent / "config.pbtxt").write_text(config_text)


def source(module: Any) -> str:
    return Path(module.__file__).read_text()


def models(folder: Path) -> Path:
    """Write a repository of five models: `meta` and `hasty` call, `one` and `two` can be called, `mirror` returns its inputs."""
    repository = folder / "models"
    for name in ("meta", "hasty"):
        add(repository, name, source(calling_model), config({"plan": "u8"}, {"result": "u8"}))
    for name in ("one", "two"):
        both = config({"what": "i32", "x": "u8"}, {"x": "u8", "most": "i32"})
        add(repository, name, source(called_model), both)
    every = {token: token for token in TOKENS}
    add(repository, "mirror", _MIRROR, config(every, every, "[-1, -1]"))
    return repository


def ask(server: RunningTriton, caller_: str = "meta", **plan: Any) -> dict[str, Any]:
    """Send a plan to a calling model, and return its answer."""
    with caller(server) as call:
        text = np.frombuffer(json.dumps(plan).encode(), np.uint8)
        answer = call(caller_, {"plan": text}, client_timeout=PATIENCE_S)
        result: dict[str, Any] = json.loads(bytes(answer["result"]))
        return result


def ask_one(server: RunningTriton, caller_: str = "meta", **call: Any) -> dict[str, Any]:
    """Make a calling model call one model once, and return the outcome of the call."""
    calls = [{"model": "one", "what": ECHO, **call}]
    answer: dict[str, Any] = ask(server, caller_, calls=calls)["answers"][0]
    return answer


POOL_OF_TWO = "--backend-config=python,thread-pool-size=2"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningTriton]:
    """A server for tests that leave all its models working."""
    folder = tmp_path_factory.mktemp("bls")
    with running_triton(models(folder), folder / "server.log", extra_args=[*EXPLICIT, HURRY]) as running:
        yield running


@pytest.fixture(scope="module")
def smallest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningTriton]:
    """A server with the smallest pool of threads that allows a call."""
    folder = tmp_path_factory.mktemp("bls")
    with running_triton(models(folder), folder / "server.log", extra_args=[POOL_OF_TWO]) as running:
        yield running


# --- what a call carries ------------------------------------------------------------------------------------------


def test_a_call_is_answered_with_the_outputs_that_were_asked_for(server: RunningTriton) -> None:
    """A call gets the requested outputs in the requested order, or all outputs if it requests none."""
    assert ask_one(server)["names"] == ["x", "most"]
    assert ask_one(server, outputs=["most", "x"])["names"] == ["most", "x"]
    assert ask_one(server, outputs=["x"])["names"] == ["x"]


def test_the_run_and_the_deadline_arrive(server: RunningTriton) -> None:
    """A callee gets the run's number as text, even the largest one, and the microseconds until the deadline."""
    terms = json.loads(ask_one(server, what=TERMS, run=2**64 - 1, deadline_ms=60_000)["text"])
    plain = json.loads(ask_one(server, what=TERMS)["text"])

    assert terms["parameters"] == {"rsrv_run": str(2**64 - 1)}
    assert 0 < terms["timeout"] <= 60_000_000
    assert plain == {"parameters": {}, "timeout": 0}


def test_tensors_of_every_dtype_go_and_come(server: RunningTriton) -> None:
    """Tensors of each type, size and memory layout pass unchanged."""
    assert "do not work together" not in server.log_text()
    assert ask(server, dtypes="mirror")["wrong"] == []


@pytest.mark.long
def test_tensors_of_every_dtype_go_and_come_with_numpy_2(start_triton: StartTriton, tmp_path: Path) -> None:
    """Tensors pass unchanged with a version of numpy that does not work with this Triton, and the log has a warning."""
    repository = models(tmp_path)
    for name in ("one", "two"):
        shutil.rmtree(repository / name)
    running = start_triton(repository, env={"PATH": path_with_numpy2()})

    assert "do not work together" in running.log_text()
    assert ask(running, dtypes="mirror")["wrong"] == []


# --- several at once ----------------------------------------------------------------------------------------------


def test_as_many_calls_as_the_pool_allows_are_under_way_at_once(server: RunningTriton) -> None:
    """With Triton's default of 32 threads, 31 calls run at the same time. The callee answers only after all have arrived."""
    together = {"model": "two", "what": TOGETHER + 31}
    ask(server, calls=[together] * 30, wait=False)
    beside = ask(server)  # A response sender answers this request while 30 calls are in progress.
    (last,) = ask(server, calls=[together])["answers"]

    assert beside["limit"] == 31
    assert last["most"] == 31


def test_more_calls_than_the_pool_allows_take_turns(server: RunningTriton) -> None:
    """A model that calls another model a hundred times makes the calls in turn. Each call gets its own answer."""
    answers = ask(server, calls=[{"model": "one", "what": ECHO}] * 100)["answers"]

    assert all(answer["own"] for answer in answers)


def test_calls_from_many_requests_at_once(smallest: RunningTriton) -> None:
    """In the smallest pool, calls and the answers of the calling model share two threads. All of them complete."""

    def work(_: object, number: int) -> list[bool]:
        answers = []
        for _ in range(20):
            calls = [{"model": ("one", "two")[number % 2], "what": ECHO}] * 5
            answers += ask(smallest, calls=calls)["answers"]
        return [answer["own"] for answer in answers]

    owns = at_once(smallest, 8, work)

    assert ask(smallest)["limit"] == 1
    assert owns == [[True] * 100] * 8


# --- calls that are never answered --------------------------------------------------------------------------------


def release(running: RunningTriton) -> None:
    """Make `one` answer the requests that it holds."""
    with caller(running) as call:
        call("one", {"what": np.array([TOGETHER], np.int32), "x": np.zeros(1, np.uint8)})


def test_a_callee_that_hangs_stops_no_other_call(smallest: RunningTriton) -> None:
    """A call of a callee that hangs ends at its limit. Further calls are refused at once until the callee answers again."""
    hung = {"model": "one", "what": WAIT}
    queued = {"model": "two", "what": ECHO, "deadline_ms": 100}
    ends = ask(smallest, "hasty", calls=[hung, queued])["answers"]
    assert [end["status"] for end in ends] == ["DEADLINE", "DEADLINE"]
    refused = ask_one(smallest, "hasty", model="two")
    assert refused["status"] == "QUEUE_FULL"
    assert "model 'two' cannot be called: 1 calls, the limit, have been in flight" in refused["text"]
    assert "'one'" in refused["text"]

    release(smallest)
    wait_until(lambda: "names" in ask_one(smallest, "hasty", model="two"))


def test_a_call_without_a_deadline_ends_all_the_same(server: RunningTriton) -> None:
    """A call without a deadline ends after the general limit, and the error names the callee. The calling model answers other requests."""
    result = ask(server, "hasty", calls=[{"model": "one", "what": WAIT}])
    answered = ask_one(server, "hasty", model="two")
    release(server)

    (hung,) = result["answers"]
    assert hung["status"] == "DEADLINE"
    assert hung["text"] == f"model 'one' did not answer within {HASTY:g} s"
    assert answered["own"]
    assert result["seconds"] >= HASTY


# --- calls that fail ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [status for status in Status if status is not Status.OK])
def test_the_status_of_a_model_of_ours_comes_through(server: RunningTriton, status: Status) -> None:
    """A callee adds a tag with rsrv's status to its error. The caller gets this status, although Triton loses the code."""
    assert ask_one(server, what=int(status)) == {"status": status.name, "text": "for the test"}


def test_a_callee_that_raises_is_internal(server: RunningTriton) -> None:
    """If a callee raises an error, the caller gets INTERNAL and the reason, without paths."""
    raised = ask_one(server, what=RAISE)

    assert raised == {"status": "INTERNAL", "text": "OSError: cannot open (path)"}
    assert "/secret/place/weights.bin" in server.log_text()


def test_unknown_and_unloaded_models_are_not_found(server: RunningTriton) -> None:
    """A model that was unloaded is NOT_FOUND, as is one that never existed."""
    server.grpc.unload_model("one")
    try:
        unloaded = ask_one(server)
    finally:
        server.grpc.load_model("one")

    for name, answer in (("one", unloaded), ("nobody", ask_one(server, model="nobody"))):
        text = f"model '{name}' is not loaded, or its process has ended"
        assert answer == {"status": "NOT_FOUND", "text": text}


def test_a_call_that_the_callee_does_not_take_is_invalid(server: RunningTriton) -> None:
    """A call with an unknown input or output is INVALID. Triton checks the names before the callee runs."""
    refused = ask_one(server, model="mirror")
    unknown_output = ask_one(server, outputs=["nobody"])

    assert refused["status"] == unknown_output["status"] == "INVALID"
    assert refused["text"].startswith("model 'mirror' cannot be called like this: ")
    assert "'nobody'" in unknown_output["text"]


# --- the end of a callee, after which the server may be short of a model ---------------------------------------------


def test_a_callee_that_dies_is_reported_and_comes_back(server: RunningTriton) -> None:
    """After the process of a callee has died, calls to the callee fail with a reason. After a load, the callee answers again."""
    ask(server, "hasty", calls=[{"model": "one", "what": WAIT}], wait=False)
    # The stub of an earlier load may not have ended yet.
    wait_until(lambda: len(server.stub_pids("one")) == 1)
    (pid,) = server.stub_pids("one")
    os.kill(pid, 9)

    # Triton checks for ended processes from time to time. Until it does so, a call lasts until its limit.
    dead: Any = wait_until(lambda: (answer := ask_one(server, "hasty"))["status"] != "DEADLINE" and answer)
    # Triton 26.01 and later report a dead callee as a model that is not loaded.
    assert dead["status"] in ("INTERNAL", "NOT_FOUND")
    assert "process of model 'one' has ended" in dead["text"] or "its process has ended" in dead["text"]
    assert ask_one(server, model="two")["own"]

    server.grpc.unload_model("one")
    server.grpc.load_model("one")
    assert ask_one(server)["own"]
