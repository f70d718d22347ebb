"""The native front and the Python front on one server. Their answers are equal, and so are the texts of their errors.

With the variable RSRV_STUB__FRONT=native, other files test the native front. The Makefile lists them for `make test-long`.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from rsrv.native import GUARD, LIBRARY
from tests.e2e import bundles
from tests.e2e.calls import (
    PROTOCOLS,
    Arrays,
    Caller,
    Refused,
    assert_same,
    at_once,
    caller,
    outcome,
    random_u32,
)
from tests.e2e.harness import EXPLICIT, RunningTriton, StartTriton, make_repository, running_triton
from tests.runtime_commands import command
from tests.status import read_status
from tests.waiting import wait_until

#: Models with both fronts.
MODELS = ("exact", "every_dtype", "scalars", "only_rows", "axes", "short_queue", "two_sizes", "elastic")
#: Prefix of the names of the models with the native front.
NATIVE = "native_"
#: One of `MODELS`. It is cold when the server is ready, and its start fails.
BROKEN = "elastic"


@pytest.fixture(scope="module")
def both(example_bundles: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningTriton]:
    """A server with each model twice, once with each front."""
    folder = tmp_path_factory.mktemp("fronts")
    (folder / "bundles").mkdir()
    made = bundles.ensure()
    # Without this mode, the control process would repair the modules that are broken below.
    settings = ["lifecycle: {mode: static}", "models:"]
    for name in MODELS:
        source = made / name if (made / name).exists() else example_bundles / name
        (folder / "bundles" / name).symlink_to(source)
        (folder / "bundles" / f"{NATIVE}{name}").symlink_to(source)
        more = {"short_queue": ", max_queue_depth: 2", BROKEN: ", start: lazy"}.get(name, "")
        settings.append(f"  {name}: {{front: python{more}}}")
        settings.append(f"  {NATIVE}{name}: {{front: native{more}}}")
    repository = make_repository(folder, settings="\n".join(settings))
    for module in repository.glob(f"*{BROKEN}/1/bundle/*.mlir"):
        module.unlink()  # The file may be a link.
        module.write_bytes(b"nonsense")
    expected = ("queue_full", "model_failed")
    with running_triton(
        repository, folder / "server.log", extra_args=EXPLICIT, spare=True, expected=expected
    ) as running:
        yield running


def told(call: Caller, model: str, inputs: Arrays, options: Mapping[str, Any]) -> Arrays | str:
    """Return an answer, or the text of an error.

    In the text, the prefix of the model's name is removed, and N replaces the times, so that texts of both fronts are comparable.
    """
    result = outcome(lambda: call(model, inputs, **options))
    if not isinstance(result, Refused):
        return result
    return re.sub(r"(after|waited) [\d.]+ (m?s)", r"\1 N \2", str(result).replace(NATIVE, ""))


X = np.arange(192, dtype=np.float32).reshape(3, 64)
#: Requests: model, inputs, and options of the client.
REQUESTS: list[tuple[str, Arrays, dict[str, Any]]] = [
    ("exact", {"x": X}, {}),
    ("exact", {"x": X}, {"request_id": "an id \u20ac", "parameters": {"tenant": "a", "rsrv_priority": 7}}),
    ("every_dtype", {f"x_{t}": np.arange(10).reshape(2, 5).astype(d) for t, d in bundles.DTYPES.items()}, {}),
    (
        "scalars",
        {"a": np.full(1, 2.5, np.float32), "b": np.full(1, 7), "m": np.arange(6.0).reshape(2, 3)},
        {},
    ),
    ("only_rows", {"x": np.arange(3, dtype=np.int32).reshape(3, 1)}, {}),
    ("axes", {"a": np.ones((3, 4), np.float32), "b": np.ones((4, 2), np.float32)}, {}),
    ("two_sizes", {"image": np.ones((2, 16, 16, 3), np.float32)}, {}),
    ("exact", {"x": X[:, :63]}, {}),
    ("exact", {"x": X[..., None, None]}, {}),
    ("exact", {"x": X.astype(np.float64)}, {}),
    ("exact", {"y": X}, {}),
    ("exact", {"x": X, "y": X}, {}),
    ("exact", {"x": np.zeros((17, 64), np.float32)}, {}),
    ("axes", {"a": np.zeros((3, 5), np.float32), "b": np.zeros((5, 2), np.float32)}, {}),
    ("axes", {"a": np.zeros((3, 2), np.float32), "b": np.zeros((3, 2), np.float32)}, {}),
    ("axes", {"a": np.zeros((4, 2), np.float32), "b": np.zeros((2, 2), np.float32)}, {}),
    ("axes", {"a": np.zeros((3, 0), np.float32), "b": np.zeros((0, 2), np.float32)}, {}),
    ("two_sizes", {"image": np.zeros((1, 17, 16, 3), np.float32)}, {}),
    ("exact", {"x": X}, {"timeout": 1}),
    ("exact", {"x": X}, {"timeout": 2**63 - 1}),
    *(
        ("exact", {"x": X}, {"parameters": {key: value}})
        for key, value in (
            ("rsrv_priority", "high"),
            ("rsrv_priority", 'it\'s\n\\ \u20ac \x01 "so" ' + "y" * 100),
            ("rsrv_priority", True),
            ("rsrv_priority", -1),
            ("rsrv_priority", 65535),
            ("rsrv_deadline_unix_ns", -5),
            ("rsrv_deadline_unix_ns", "tomorrow"),
            ("rsrv_deadline_unix_ns", 1),
            ("rsrv_deadline_unix_ns", 2**63 - 1),
            ("reactant_timeout_ns", False),
            ("reactant_timeout_ns", -1),
            ("reactant_timeout_ns", 1),
            ("rsrv_run", "x"),
            ("rsrv_run", 12345),
            ("rsrv_run", "12345"),
            ("rsrv_run", str(2**64)),
            ("rsrv_device", 1),
            ("rsrv_sticky", "me"),
            ("rsrv_prioriti", 1),
            ("rsrv_deadline_unix_ms", "tomorrow"),
            ("rsrv_it's \u20ac" + "y" * 100, True),
        )
    ),
]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_both_fronts_answer_and_refuse_alike(both: RunningTriton, protocol: str) -> None:
    """For each request of the table, both fronts return the same bits, or the same code and text."""
    with caller(both, protocol) as call:
        for model, inputs, options in REQUESTS:
            python = told(call, model, inputs, options)
            native = told(call, NATIVE + model, inputs, options)
            if isinstance(python, str) or isinstance(native, str):
                assert native == python
            else:
                assert_same(native, python)


@contextmanager
def paused(server: RunningTriton, model: str, mode: str) -> Iterator[None]:
    server.operate("pause", model, "--mode", mode)
    try:
        yield
    finally:
        server.operate("continue", model)


def test_a_full_queue_refuses_alike(both: RunningTriton) -> None:
    """A model has room for two waiting requests. Both fronts refuse the other requests with the same text."""
    inputs = {"x": random_u32(np.random.default_rng(1), 1)}

    def refusals(model: str) -> set[str]:
        texts: list[str] = []

        def ask(call: Caller, _: int) -> None:
            answer = told(call, model, inputs, {})
            if isinstance(answer, str):
                texts.append(answer)

        with ThreadPoolExecutor(1) as pool:
            with paused(both, model, "hold"):
                clients = pool.submit(at_once, both, 12, ask)
                wait_until(lambda: len(texts) == 10 or clients.done(), what="ten refusals")
            clients.result()
        assert len(texts) == 10
        return set(texts)

    (python,) = refusals("short_queue")
    assert refusals(f"{NATIVE}short_queue") == {python}


def test_commands_refuse_alike(both: RunningTriton) -> None:
    """Both fronts have the same texts for a paused model's refusal, and for a request that an operator aborts."""

    def refused(call: Caller, model: str) -> Arrays | str:
        with paused(both, model, "reject"):
            return told(call, model, {"x": X}, {})

    def aborted(call: Caller, model: str) -> Arrays | str:
        with ThreadPoolExecutor(1) as pool, paused(both, model, "hold"):
            answer = pool.submit(told, call, model, {"x": X}, {"request_id": "stop"})
            wait_until(lambda: read_status(both.pid)["models"][model]["queued"] == 1, what="the request")
            assert command(both.pid, {"command": "abort", "request": "stop"})["aborted"] == 1
            return answer.result()

    with caller(both) as call:
        for ask, expected in ((refused, "[rsrv:PAUSED]"), (aborted, "StatusCode.CANCELLED")):
            python = ask(call, "exact")
            assert expected in python
            assert ask(call, f"{NATIVE}exact") == python


@pytest.mark.long
def test_weights_that_are_not_resident_refuse_alike(start_triton: StartTriton, tmp_path: Path) -> None:
    """In explicit mode, a request finds no weights on the device. Both fronts refuse it with the same text."""
    (tmp_path / "bundles").mkdir()
    for name in ("exact", f"{NATIVE}exact"):
        (tmp_path / "bundles" / name).symlink_to(bundles.ensure() / "exact")
    settings = ["lifecycle: {mode: explicit}", "models:", "  exact: {front: python}"]
    settings.append(f"  {NATIVE}exact: {{front: native}}")
    server = start_triton(make_repository(tmp_path, settings="\n".join(settings)), extra_args=EXPLICIT)
    command(server.pid, {"command": "evict", "model": None})
    with caller(server) as call:
        python, native = (told(call, name, {"x": X}, {}) for name in ("exact", f"{NATIVE}exact"))
    assert "[rsrv:NOT_RESIDENT]" in python
    assert native == python


def test_cold_models_refuse_alike(both: RunningTriton) -> None:
    """Both fronts refuse requests to a cold model with the same texts.

    In turn, the deadline passes during the start, the start fails, and the next request arrives in the pause after the failure.
    """
    inputs = {"x": random_u32(np.random.default_rng(1), 1), "steps": np.ones((1, 1), np.int32)}
    with caller(both) as call:
        for options in ({"timeout": 1}, {}, {}):
            python = told(call, BROKEN, inputs, options)
            assert isinstance(python, str)
            assert (
                "the model is starting" in python if options else "the model could not be started" in python
            )
            assert told(call, f"{NATIVE}{BROKEN}", inputs, options) == python


@pytest.mark.parametrize("rounds", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_hundred_cold_models_start_and_fall_back(
    start_triton: StartTriton, tmp_path: Path, rounds: int
) -> None:
    """A hundred cold models take about one thread each in Triton, and no connections.

    Clients that ask for the same cold model at the same time get right answers. The models become cold again.
    """
    (tmp_path / "bundles").mkdir()
    for number in range(100):
        (tmp_path / f"bundles/m{number}").symlink_to(bundles.ensure() / "exact")
    lazy = "stub: {front: native}\nruntime: {start: lazy, idle: {executable: 1s}}"
    server = start_triton(make_repository(tmp_path, settings=lazy))
    process = psutil.Process(server.pid)
    assert process.num_threads() < 100 + 100

    def is_cold() -> bool:
        return not read_status(server.pid)["models"] and process.num_fds() < 100

    def ask_for_ten(call: Caller, client: int) -> None:
        for number in range(10):
            x = X + client
            assert_same(call(f"m{number}", {"x": x}), {"y": x @ bundles.exact_kernel()})

    wait_until(is_cold, what="a server without models and connections")
    at_once(server, 4, ask_for_ten)
    for _ in range(1, rounds):
        # The runtime searches for idle models once a minute.
        wait_until(is_cold, timeout=100, what="the models' return to cold")
        at_once(server, 4, ask_for_ten)


def loaded_libraries(server: RunningTriton) -> int:
    """Return how many copies of the library the server has loaded, as a front or as a guard."""
    maps = Path(f"/proc/{server.pid}/maps").read_text().splitlines()
    return len({line.split()[4] for line in maps if line.endswith((LIBRARY.name, GUARD))})


def test_models_of_a_copied_repository_have_a_library_each(start_triton: StartTriton, tmp_path: Path) -> None:
    """In a copied repository, each model has its own copy of the library.

    Each copy has its own threads and connections. All use the same runtime, and after its death the next one.
    """
    (tmp_path / "bundles").mkdir()
    names = ("one", "two")
    for name in names:
        (tmp_path / "bundles" / name).symlink_to(bundles.ensure() / "exact")
    settings = "lifecycle: {mode: static}\nstub: {front: native}"
    copy = shutil.copytree(make_repository(tmp_path, settings=settings), tmp_path / "copy")
    server = start_triton(copy, extra_args=EXPLICIT, spare=True)
    assert loaded_libraries(server) == 2

    def ask(call: Caller, number: int) -> None:
        x = X + number
        assert_same(call(names[number % 2], {"x": x}), {"y": x @ bundles.exact_kernel()})

    at_once(server, 8, ask)
    runtime = read_status(server.pid)["pid"]
    os.kill(runtime, signal.SIGKILL)
    at_once(server, 8, ask)
    assert read_status(server.pid)["pid"] != runtime
    server.grpc.unload_model("one")
    with caller(server) as call:
        ask(call, 1)
        server.grpc.load_model("one")
        ask(call, 0)


def test_only_the_python_front_has_a_process_per_model(both: RunningTriton) -> None:
    """Models with the native front have no stub, and share one copy of the library. The runtime's status includes them."""
    assert len(both.stub_pids()) == len(MODELS)
    assert loaded_libraries(both) == 1
    with caller(both) as call:
        before = read_status(both.pid)["models"][f"{NATIVE}exact"]["outcomes"]["answered"]
        call(f"{NATIVE}exact", {"x": X})
        assert read_status(both.pid)["models"][f"{NATIVE}exact"]["outcomes"]["answered"] == before + 1


def test_a_killed_runtime_costs_no_answer(both: RunningTriton) -> None:
    """The runtime is killed under load. No request of 16 clients fails: requests in flight and new ones wait for the next runtime."""
    runtime = read_status(both.pid)["pid"]
    is_back, answered = threading.Event(), [0] * 16

    def work(call: Caller, number: int) -> None:
        x = X + number
        while not is_back.is_set():
            assert_same(call("native_exact", {"x": x}), {"y": x @ bundles.exact_kernel()})
            answered[number] += 1

    def kill() -> None:
        wait_until(lambda: min(answered) > 2, what="load")
        os.kill(runtime, signal.SIGKILL)
        wait_until(lambda: not psutil.pid_exists(runtime), what="the death")
        before = list(answered)
        wait_until(
            lambda: all(now > then + 1 for now, then in zip(answered, before, strict=True)),
            what="answers",
        )

    with ThreadPoolExecutor(1) as pool:
        clients = pool.submit(at_once, both, 16, work)
        try:
            kill()
        finally:
            is_back.set()
        clients.result()
    assert read_status(both.pid)["pid"] != runtime


def test_requests_in_flight_are_answered_before_an_unload(both: RunningTriton) -> None:
    """When a model is unloaded, it first answers its requests in flight. It serves again after a load."""
    rng = np.random.default_rng(2)
    x = random_u32(rng, 1)

    def work(call: Caller, number: int) -> Arrays | str:
        if number:
            return told(call, "native_short_queue", {"x": x}, {})
        both.grpc.unload_model("native_short_queue")
        return {}

    for answer in at_once(both, 3, work):
        assert not isinstance(answer, str) or "NOT_FOUND" in answer or "UNAVAILABLE" in answer
    both.grpc.load_model("native_short_queue")
    with caller(both) as call:
        assert_same(call("native_short_queue", {"x": x}), call("short_queue", {"x": x}))
