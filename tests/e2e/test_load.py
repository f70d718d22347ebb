"""Load by perf_analyzer, and by clients that mix all kinds of requests. No request is lost, and no resource grows."""

from __future__ import annotations

import os
import random
import re
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from examples import mlp, two_sizes
from tests.e2e import bundles
from tests.e2e.bundles import LEAST_STEPS, deed
from tests.e2e.calls import (
    Array,
    Arrays,
    Caller,
    Refused,
    assert_same,
    at_once,
    caller,
    outcome,
    random_u32,
    refusal,
    tensors,
)
from tests.e2e.harness import RunningTriton, StartTriton, crashed_by_a_cancellation, despite, make_repository
from tests.status import read_status
from tests.waiting import PATIENCE_S, wait_until


def models_status(server: RunningTriton) -> dict[str, Any]:
    models: dict[str, Any] = read_status(server.pid)["models"]
    return models


def wait_until_idle(server: RunningTriton) -> None:
    def idle() -> bool:
        return not any(model["queued"] or model["executing"] for model in models_status(server).values())

    wait_until(idle, what="the runtime to have nothing queued and nothing executing")


# --- perf_analyzer ------------------------------------------------------------------------------------------------


def succeeded_and_failed(server: RunningTriton, model: str) -> tuple[int, int]:
    """Return how many requests of a model succeeded and failed. Triton counts them."""
    answer = server.grpc.get_inference_statistics(model, as_json=True)
    statistics = answer["model_stats"][0].get("inference_stats", {})
    return tuple(int(statistics.get(key, {}).get("count", 0)) for key in ("success", "fail"))  # type: ignore[return-value]


def perf_analyzer(server: RunningTriton, model: str, clients: int, *options: str) -> str:
    """Run Triton's own load generator for three short windows, and return its report. Any error fails the test."""
    command = [str(server.server.installation.perf_analyzer), "-m", model, "-u", server.server.grpc_url]
    # The results of the windows may differ by any amount.
    command += ["-i", "grpc", "--concurrency-range", str(clients), "-p", "400", "-r", "3", "-s", "9999"]
    done = subprocess.run([*command, *options], text=True, capture_output=True, timeout=600, check=False)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert not re.search(r"error|fail", output, re.IGNORECASE), output
    return output


def reported(output: str, what: str) -> int:
    """Return a whole number from perf_analyzer's report."""
    match = re.search(rf"{what}: (\d+)", output)
    assert match, output
    return int(match[1])


@pytest.mark.parametrize("clients", [1, 32])
def test_perf_analyzer_runs_without_an_error(triton: RunningTriton, clients: int) -> None:
    """Triton's own load generator reports no error. Triton and the runtime count every request as answered."""
    wait_until_idle(triton)
    counted, outcomes = succeeded_and_failed(triton, "mlp"), Counter(models_status(triton)["mlp"]["outcomes"])
    output = perf_analyzer(triton, "mlp", clients, "--input-data", "random")
    wait_until_idle(triton)
    answered = Counter(models_status(triton)["mlp"]["outcomes"]) - outcomes
    assert answered.keys() == {"answered"}
    assert answered["answered"] >= reported(output, "Request count") > 0, output

    def more() -> list[int]:
        return list(np.subtract(succeeded_and_failed(triton, "mlp"), counted))

    # Triton counts a request after its answer. Unlike the runtime, it counts a model's error answer as a success.
    wait_until(lambda: more() == [answered["answered"], 0], what="Triton's own count")


# --- longer than ever before --------------------------------------------------------------------------------------


def test_an_execution_far_longer_than_predicted_holds_up_no_other_model(triton: RunningTriton) -> None:
    """While a model runs far longer than predicted, the server answers requests that need no execution, and deadlines pass in time."""
    wait_until_idle(triton)
    u = random_u32(np.random.default_rng(0), 1)
    x = np.ones((1, 64), np.float32)
    exact = {"y": x @ bundles.exact_kernel()}

    def sudden(call: Caller, steps: int, **options: Any) -> Arrays:
        return call("sudden", {"x": u, "steps": np.full((1, 1), steps, np.int32)}, **options)

    with caller(triton) as call, caller(triton) as other, ThreadPoolExecutor(1) as pool:
        for _ in range(30):
            assert_same(sudden(call, 0), {"y": u})
        # The runtime does not expect the first long execution. So this execution may delay other requests.
        started, steps = time.monotonic(), 10_000
        surprise = pool.submit(sudden, other, steps)
        assert_same(call("exact", {"x": x}), exact)
        assert_same(surprise.result(), {"y": bundles.stepped(u, steps)})
        # On this machine, such an execution takes some seconds.
        steps = int(3 * steps / (time.monotonic() - started))

        def meanwhile(steps: int) -> bool:
            """Send requests during a long execution. Return True if the execution lasted until the requests with deadlines had ended."""
            for _ in range(30):
                assert_same(sudden(call, 0), {"y": u})
            before = models_status(triton)
            long = pool.submit(sudden, other, steps)
            wait_until(
                lambda: models_status(triton)["sudden"]["dispatches"] > before["sudden"]["dispatches"],
                what="the long execution",
            )
            empty = {"a": np.zeros((3, 0), np.float32), "b": np.zeros((0, 2), np.float32)}
            assert_same(call("axes", empty), {"sum": np.zeros((2, 0, 3), np.float32)})
            too_many = {"x": np.ones((1025, 64), np.float32)}
            refusal(lambda: call("exact", too_many)).assert_is("INVALID_ARG", "grpc")
            ends = [
                outcome(lambda: sudden(call, 0, timeout=50_000)),
                outcome(lambda: call("exact", {"x": x}, timeout=50_000)),
            ]
            during = models_status(triton)
            # This request has no deadline, so it waits for the end of the long execution.
            assert_same(call("exact", {"x": x}), exact)
            assert_same(long.result(), {"y": bundles.stepped(u, steps)})
            if not during["sudden"]["executing"]:
                return False
            for end in ends:
                assert isinstance(end, Refused)
                end.assert_is("UNAVAILABLE", "grpc")
                assert end.message.startswith("[rsrv:DEADLINE]"), str(end)
            assert during["sudden"]["dispatches"] == before["sudden"]["dispatches"] + 1
            assert during["exact"]["dispatches"] == before["exact"]["dispatches"]
            return True

        # If the machine was slower when the steps were counted, the execution is too short, so longer ones follow.
        assert any(meanwhile(longer * steps) for longer in (1, 4, 16, 64))
        assert_same(sudden(call, 0), {"y": u})


# --- everything at once -------------------------------------------------------------------------------------------

STRESSED = ("mlp", "two_sizes", "exact", "elastic", "sudden", "hooked", "every_dtype")
SETTINGS = """
models:
  elastic: {max_queue_depth: 1}
"""
CLIENTS = 16


@pytest.fixture
def start_stressed(
    start_triton: StartTriton, example_bundles: Path, tmp_path: Path
) -> Callable[[], RunningTriton]:
    """Return a function that starts a server with slow and quick models. One of them has a short queue."""
    folders = {path.name: path for folder in (example_bundles, bundles.ensure()) for path in folder.iterdir()}
    repository = make_repository(tmp_path, *(folders[name] for name in STRESSED), settings=SETTINGS)
    # Clients meet errors by chance, so any finding is expected.
    return lambda: start_triton(repository, expected=None)


class Pending:
    """A gRPC request in flight, and all its ends. There should be one end."""

    def __init__(self, client: Any, model: str, inputs: Mapping[str, Array]) -> None:
        self._ended = threading.Event()
        self.ends: list[tuple[Any, InferenceServerException | None]] = []
        self._context = client.async_infer(model, tensors(tritonclient.grpc, inputs), self._end)

    def _end(self, result: Any, error: InferenceServerException | None) -> None:
        self.ends.append((result, error))
        self._ended.set()

    def cancel_after(self, seconds: float) -> None:
        """Cancel the request after this time, unless it ends earlier."""
        if not self._ended.wait(seconds):
            self._context.cancel()

    def wait(self) -> None:
        assert self._ended.wait(PATIENCE_S), "a request never ended"


class Client:
    """A client that sends random requests one after the other, and checks the end of each."""

    def __init__(self, server: RunningTriton, call: Caller, number: int, seed: int) -> None:
        self._call = call
        self._rng = np.random.default_rng([seed, number])
        self._random = random.Random(f"{seed} {number}")
        self._grpc = tritonclient.grpc.InferenceServerClient(server.server.grpc_url)
        self.counts: Counter[str] = Counter()
        self.pending: list[Pending] = []

    def close(self) -> None:
        self._grpc.close()

    def one(self) -> None:
        kinds = {
            self.plain_mlp: 6, self.plain_two_sizes: 3, self.plain_every_dtype: 2, self.exact: 6,
            self.elastic: 4, self.sudden: 4, self.failing_hook: 2, self.too_many_rows: 1, self.late: 5,
            self.cancelled: 4,
        }  # fmt: skip
        (kind,) = self._random.choices(list(kinds), list(kinds.values()))
        kind()

    def expect(self, end: Arrays | Refused, want: Mapping[str, Array], *refusals: str) -> None:
        """Check that the end is the right answer, or one of these refusals. A refusal is a code and the beginning of the message."""
        if not isinstance(end, Refused):
            assert_same(end, want)
            self.counts["answered"] += 1
            return
        for expected in refusals:
            code, _, start = expected.partition(" ")
            if end.status == f"StatusCode.{code}" and end.message.startswith(start):
                self.counts[expected] += 1
                return
        raise AssertionError(f"unexpected: {end}")

    def rows(self, most: int) -> int:
        return int(self._rng.integers(1, most + 1))

    # The first three kinds of requests must all be answered, because the runtime's count of answers must equal the client's count.

    def plain_mlp(self) -> None:
        inputs = {"x": self._rng.standard_normal((self.rows(32), 256), np.float32)}
        got = self._call("mlp", inputs)["logits"]
        np.testing.assert_allclose(got, mlp.reference(inputs)["logits"], atol=1e-4)
        self.counts["mlp"] += 1

    def plain_two_sizes(self) -> None:
        size = two_sizes.SIZES[int(self._rng.integers(2))]
        image = self._rng.standard_normal((self.rows(4), *size, 3), np.float32)
        got = self._call("two_sizes", {"image": image})
        assert {len(array) for array in got.values()} == {len(image)}
        self.counts["two_sizes"] += 1

    def plain_every_dtype(self) -> None:
        rows = self.rows(4)
        inputs = {
            f"x_{token}": self._rng.integers(0, 2, (rows, 5)).astype(dtype)
            for token, dtype in bundles.DTYPES.items()
        }
        got = self._call("every_dtype", inputs)
        assert_same(got, {name.replace("x", "y"): x[:, ::-1] for name, x in inputs.items()})
        self.counts["every_dtype"] += 1

    def exact_rows(self) -> tuple[Arrays, Arrays]:
        x = self._rng.integers(-50, 51, (self.rows(16), 64)).astype(np.float32)
        return {"x": x}, {"y": x @ bundles.exact_kernel()}

    def stepping_rows(self, most: int, least: int) -> tuple[Arrays, Arrays]:
        u = random_u32(self._rng, self.rows(4))
        steps = self._rng.integers(0, most + 1, len(u), np.int32)
        return {"x": u, "steps": steps.reshape(-1, 1)}, {"y": bundles.stepped(u, steps + least)}

    def exact(self) -> None:
        inputs, want = self.exact_rows()
        self.expect(outcome(lambda: self._call("exact", inputs)), want)

    def elastic(self) -> None:
        inputs, want = self.stepping_rows(400, LEAST_STEPS)
        end = outcome(lambda: self._call("elastic", inputs))
        self.expect(end, want, "UNAVAILABLE [rsrv:QUEUE_FULL]")

    def sudden(self) -> None:
        inputs, want = self.stepping_rows(200 if self._random.random() < 0.1 else 0, 0)
        self.expect(outcome(lambda: self._call("sudden", inputs)), want)

    def failing_hook(self) -> None:
        x = self._rng.standard_normal((self.rows(4), 4), np.float32) + 1000
        fails = self._random.random() < 0.5
        if fails:
            x[0, 0] = deed(self._random.choice(("preprocess", "postprocess")), "raise")
        end = outcome(lambda: self._call("hooked", {"x": x}))
        assert isinstance(end, Refused) == fails, end
        self.expect(end, {"y": 2 * x}, "INTERNAL")

    def too_many_rows(self) -> None:
        refusal(lambda: self._call("exact", {"x": np.ones((1025, 64), np.float32)})).assert_is(
            "INVALID_ARG", "grpc"
        )
        self.counts["INVALID_ARGUMENT"] += 1

    def late(self) -> None:
        """Send a request whose deadline may pass."""
        name = self._random.choice(("exact", "sudden"))
        inputs, want = self.exact_rows() if name == "exact" else self.stepping_rows(0, 0)
        timeout = int(self._random.expovariate(1 / 20_000)) + 1
        end = outcome(lambda: self._call(name, inputs, timeout=timeout))
        self.expect(end, want, "UNAVAILABLE [rsrv:DEADLINE]")

    def impatient(self) -> None:
        """Send a request with gRPC's own deadline, which ends the call in the client."""
        inputs, want = self.exact_rows()
        seconds = self._random.expovariate(1 / 0.02) + 1e-3
        end = outcome(lambda: self._call("exact", inputs, client_timeout=seconds))
        # The server may notice the end of the call before the client, and cancel the request.
        self.expect(end, want, "DEADLINE_EXCEEDED", "CANCELLED")

    def cancelled(self) -> None:
        """Send several requests at the same time, and cancel them in random order, each after a moment."""
        requests = []
        for _ in range(self.rows(4)):
            inputs, want = self.exact_rows() if self._random.random() < 0.5 else self.stepping_rows(40, 0)
            name = "sudden" if "steps" in inputs else "exact"
            requests.append((Pending(self._grpc, name, inputs), want))
        self._random.shuffle(requests)
        for request, _ in requests:
            request.cancel_after(self._random.expovariate(1 / 0.01))
        for request, want in requests:
            request.wait()
            self.pending.append(request)
            result, error = request.ends[0]
            if error is None:
                end: Arrays | Refused = {"y": result.as_numpy("y")}
            else:
                end = Refused(str(error.status()), str(error.message()))
            self.expect(end, want, "CANCELLED")


def stress(
    server: RunningTriton, rounds: int, seed: int, action: Callable[[Client], None] = Client.one
) -> Counter[str]:
    """Run the clients, each of which calls `action` `rounds` times. Return how many requests ended in each way."""

    def work(call: Caller, number: int) -> Client:
        client = Client(server, call, number, seed)
        try:
            for _ in range(rounds):
                action(client)
        finally:
            client.close()
        return client

    clients = at_once(server, CLIENTS, work)
    for client in clients:
        assert {len(request.ends) for request in client.pending} <= {1}, "a request ended twice"
    return sum((client.counts for client in clients), Counter())


def resources(server: RunningTriton) -> dict[int, tuple[int, int]]:
    """Return the open files and the resident bytes of each stub and of the runtime."""
    pids = [*server.stub_pids(), int(read_status(server.pid)["pid"])]
    return {
        pid: (len(os.listdir(f"/proc/{pid}/fd")), int(psutil.Process(pid).memory_info().rss)) for pid in pids
    }


def grown(server: RunningTriton, before: Mapping[int, tuple[int, int]]) -> Iterator[str]:
    """Yield a text for each resource that has grown too much since `before`."""
    for pid, (files, nbytes) in resources(server).items():
        if files > before[pid][0] + 16:
            yield f"process {pid} has {files} files open, before {before[pid][0]}"
        if nbytes > 1.25 * before[pid][1] + 32 * 2**20:
            yield f"process {pid} has {nbytes >> 20} MiB, before {before[pid][1] >> 20} MiB"


@pytest.mark.parametrize(
    ("warm_up", "rounds"),
    [
        pytest.param(10, 25, id="seconds"),
        pytest.param(500, 3000, id="minutes", marks=[pytest.mark.long, pytest.mark.timeout(900)]),
    ],
)
def test_a_mix_of_everything_that_clients_do_loses_nothing(
    start_stressed: Callable[[], RunningTriton], warm_up: int, rounds: int
) -> None:
    """Clients use slow and quick models, deadlines, cancellations and errors. Each request ends once and right, and nothing leaks."""
    despite(crashed_by_a_cancellation, start_stressed, lambda server: lose_nothing(server, warm_up, rounds))


def lose_nothing(stressed: RunningTriton, warm_up: int, rounds: int) -> None:
    processes = set(resources(stressed))
    assert len(processes) == len(STRESSED) + 1
    first = stress(stressed, warm_up, seed=1)
    wait_until_idle(stressed)
    before = resources(stressed)
    ends = stress(stressed, rounds, seed=2)
    wait_until_idle(stressed)
    assert set(before) == set(resources(stressed)) == processes, "a process came or went"
    assert stressed.server.process.poll() is None
    # Some memory of the last requests is freed a moment after their ends.
    wait_until(lambda: not list(grown(stressed, before)), what=f"less than {list(grown(stressed, before))}")
    expected = {"answered", "mlp", "two_sizes", "every_dtype", "INTERNAL", "INVALID_ARGUMENT"}
    # The speed of clients and server decides whether any request ends in these ways.
    possible = {"CANCELLED", "UNAVAILABLE [rsrv:DEADLINE]", "UNAVAILABLE [rsrv:QUEUE_FULL]"}
    assert expected <= set(ends) <= expected | possible, ends
    status = models_status(stressed)
    for name in ("mlp", "two_sizes", "every_dtype"):
        assert status[name]["outcomes"] == {
            **dict.fromkeys(status[name]["outcomes"], 0),
            "answered": (first + ends)[name],
        }
    print(
        f"{ends.total()} requests:", *(f"{kind}: {count}" for kind, count in ends.most_common()), sep="\n  "
    )


@pytest.mark.long
def test_clients_whose_own_deadline_passes_leave_nothing_behind(
    start_stressed: Callable[[], RunningTriton],
) -> None:
    """gRPC ends calls at the client's own deadline. Other requests are answered, and the runtime drops the ended ones."""
    despite(crashed_by_a_cancellation, start_stressed, leave_nothing_behind)


def leave_nothing_behind(stressed: RunningTriton) -> None:
    processes = set(resources(stressed))
    ends = stress(stressed, 30, 3, Client.impatient)
    assert {"DEADLINE_EXCEEDED"} <= set(ends) <= {"answered", "DEADLINE_EXCEEDED", "CANCELLED"}, ends
    wait_until_idle(stressed)
    with caller(stressed) as call:
        x = np.ones((1, 64), np.float32)
        assert_same(call("exact", {"x": x}), {"y": x @ bundles.exact_kernel()})
    assert set(resources(stressed)) == processes
    # Triton 24.10 counts some of these calls as unanswered forever, with any model. At an orderly end, it would wait for them.
    stressed.server.kill()
