"""The table of docs/compatibility.md on a real server: models give the right answers in each combination of features."""

from __future__ import annotations

import os
import queue
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, redirect_stdout
from functools import partial
from io import StringIO
from operator import ge
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException, serialize_byte_tensor

from local_triton import TritonServer
from rsrv.wire.socket import Closed
from tests.e2e import compositions
from tests.e2e.bundles import Array
from tests.e2e.calls import Caller, at_once
from tests.e2e.harness import RunningTriton, StartTriton, make_repository
from tests.e2e.stateful import told
from tests.status import read_status
from tests.waiting import PATIENCE_S, wait_until

#: Number of rows of a request that is larger than the largest compiled size.
LARGE = 2 * compositions.SIZES[-1] + 1
ENTRIES = ("", "via_", "ensemble_", "ensemble_via_")


class Region:
    """A file in /dev/shm from which the server reads the input of a request."""

    def __init__(
        self, client: tritonclient.grpc.InferenceServerClient, name: str, size: int = 1 << 16
    ) -> None:
        self.name, self._client = name, client
        self._file = Path("/dev/shm", name)
        self._file.write_bytes(bytes(size))
        client.register_system_shared_memory(name, f"/{name}", size)

    def put(self, tensor: tritonclient.grpc.InferInput, array: Array) -> None:
        data = serialize_byte_tensor(array).item() if array.dtype == object else array.tobytes()
        with self._file.open("r+b") as file:
            file.write(data)
        tensor.set_shared_memory(self.name, len(data))

    def close(self) -> None:
        # The server may still read the region for a cancelled request.
        wait_until(self._is_unregistered, what="the end of the requests in the region")
        self._file.unlink()

    def _is_unregistered(self) -> bool:
        try:
            self._client.unregister_system_shared_memory(self.name)
        except InferenceServerException as error:
            if "currently in use" not in str(error):
                raise
            return False
        return True


def priority_and_deadline() -> dict[str, Any]:
    """Return parameters with a priority and a deadline."""
    return {"rsrv_priority": 7, "rsrv_deadline_unix_ns": time.time_ns() + int(4 * PATIENCE_S * 1e9)}


def assert_close(got: Array, want: Array, model: str) -> None:
    """Check an embedding from a narrow model."""
    assert got.shape == want.shape
    error = np.abs(got - want).max() / np.abs(want).max()
    assert error < compositions.BOUND, f"{model}: {error}"


class Asker:
    """A client that sends random rows to embedding models, with all kinds of requests, and checks the answers."""

    def __init__(self, server: RunningTriton, seed: int) -> None:
        self._client = tritonclient.grpc.InferenceServerClient(server.server.grpc_url)
        self._region = Region(self._client, f"compositions-{os.getpid()}-{seed}")
        self._rng, self._choose = np.random.default_rng(seed), random.Random(seed)

    def request(self, model: str, rows: int) -> tuple[tritonclient.grpc.InferInput, Array, Array]:
        """Return an input without data, its data, and the expected answer."""
        length = (
            self._choose.randint(1, 8) if "padded" in model else self._choose.choice(compositions.LENGTHS)
        )
        ids = self._rng.integers(1, 256, (rows, length)).astype(np.int32)
        want = compositions.EMBEDDERS[model] * compositions.embedded(ids)
        if model.startswith("ids"):
            return tritonclient.grpc.InferInput("ids", ids.shape, "INT32"), ids, want
        texts = np.array([[" ".join(map(str, row)).encode()] for row in ids], object)
        return tritonclient.grpc.InferInput("text", texts.shape, "BYTES"), texts, want

    def ask(self, model: str, entry: str, rows: int, *, shared: bool, **parameters: Any) -> None:
        tensor, data, want = self.request(model, rows)
        if shared:
            self._region.put(tensor, data)
        else:
            tensor.set_data_from_numpy(data)
        result = self._client.infer(f"{entry}{model}", [tensor], parameters=parameters)
        assert_close(result.as_numpy("embedding"), want, f"{entry}{model}")

    def everything(self, model: str, entry: str) -> None:
        """Send a large request in shared memory, with a priority and a deadline, and check the answer."""
        self.ask(model, entry, LARGE, shared=True, **priority_and_deadline())

    def cancel(self, model: str) -> None:
        """Send a request, and cancel it. It must end, with or without an answer."""
        tensor, data, _ = self.request(model, LARGE)
        tensor.set_data_from_numpy(data)
        done = threading.Event()
        context = self._client.async_infer(model, [tensor], lambda result, error: done.set())
        context.cancel()
        assert done.wait(PATIENCE_S)

    def read(self, sequences: Sequence[int]) -> None:
        """Send two requests of each sequence, in shared memory and with a priority and a deadline, and check the answers."""
        ids = self._rng.integers(1, 256, (len(sequences), 12)).astype(np.int32)
        for first, last in ((0, 8), (8, 12)):
            for sequence, row in zip(sequences, ids, strict=True):
                tensor = tritonclient.grpc.InferInput("text", (1, 1), "BYTES")
                self._region.put(tensor, np.array([[" ".join(map(str, row[first:last])).encode()]], object))
                result = self._client.infer(
                    "reader",
                    [tensor],
                    sequence_id=sequence,
                    sequence_start=first == 0,
                    sequence_end=last == 12,
                    parameters=priority_and_deadline(),
                )
                want = compositions.embedded(row[None, :last])
                assert_close(result.as_numpy("embedding"), want, "reader")

    def generate(self) -> None:
        """Send a prompt in shared memory, with a priority and a deadline, and check the text that the model streams."""
        prompt, answers = b"Es war einmal", queue.SimpleQueue[tuple[Any, Exception | None]]()
        tensor = tritonclient.grpc.InferInput("text_input", (1,), "BYTES")
        self._region.put(tensor, np.array([prompt], object))
        self._client.start_stream(lambda result, error: answers.put((result, error)))
        self._client.async_stream_infer(
            "teller",
            [tensor],
            enable_empty_final_response=True,
            parameters={"max_tokens": 40, **priority_and_deadline()},
        )
        text, is_last = b"", False
        while not is_last:
            result, error = answers.get(timeout=PATIENCE_S)
            assert error is None, error
            text += b"".join(result.as_numpy("text_output"))
            is_last = result.get_response().parameters["triton_final_response"].bool_param
        self._client.stop_stream()
        assert text.decode() == told(prompt, 40)

    def at_random(self, models: Sequence[str]) -> None:
        """Send or cancel one random request to one of the models: directly, through a Python model, or through an ensemble."""
        choose, model = self._choose, self._choose.choice(models)
        if choose.random() < 0.1:
            self.cancel(model)
            return
        parameters: dict[str, Any] = {}
        if choose.random() < 0.5:
            parameters["rsrv_priority"] = choose.randint(0, 9)
        if choose.random() < 0.5:
            parameters["rsrv_deadline_unix_ns"] = time.time_ns() + int(4 * PATIENCE_S * 1e9)
        entry = choose.choice(ENTRIES)
        self.ask(model, entry, choose.randint(1, LARGE), shared=choose.random() < 0.5, **parameters)

    def close(self) -> None:
        self._region.close()
        self._client.close()


@contextmanager
def asker(server: RunningTriton, seed: int) -> Iterator[Asker]:
    made = Asker(server, seed)
    try:
        yield made
    finally:
        made.close()


def start(folder: Path, start_triton: StartTriton) -> RunningTriton:
    """Start a server with the models, which are cold, and with Python models and ensembles that call them."""
    compositions.write(folder / "bundles")
    repository = make_repository(folder, settings=compositions.SETTINGS)
    for model in compositions.EMBEDDERS:
        compositions.add_callers(repository, model)
    make = partial(TritonServer, client_shared_memory=True)
    # The death of a runtime is an urgent finding, so any finding is expected.
    return start_triton(repository, spare=True, expected=None, make=make)


def kill(server: RunningTriton, device: int) -> None:
    """Kill the runtime of a device, and wait for the next one."""

    def pid() -> int:
        try:
            return int(read_status(server.pid, str(device))["pid"])
        except (OSError, Closed):
            return 0

    old = wait_until(pid, what="a runtime")
    os.kill(old, signal.SIGKILL)
    wait_until(lambda: pid() not in (0, old), what="the next runtime")


def have_answers(clients: Future[Any], counts: Sequence[int], enough: Sequence[int]) -> bool:
    return clients.done() or all(map(ge, counts, enough))


def storm(server: RunningTriton, models: Sequence[str], seconds: float, seed: int) -> None:
    """Kill runtimes while four clients, which share the models, send random requests.

    Each client checks all its answers.
    """
    stop, counts = threading.Event(), [0, 0, 0, 0]

    def send(_: Caller, number: int) -> None:
        with asker(server, 10 * seed + number) as client:
            while not stop.is_set():
                client.at_random(models[number::4])
                counts[number] += 1

    with ThreadPoolExecutor(1) as pool:
        clients = pool.submit(at_once, server, 4, send)
        try:
            until, device = time.monotonic() + seconds, 0
            while device < 2 or time.monotonic() < until:
                # Each request may lose only one runtime. After a second death, it would be refused as a suspect.
                wait_until(partial(have_answers, clients, counts, [count + 2 for count in counts]))
                kill(server, device % 2)
                device += 1
        finally:
            stop.set()
        clients.result()


@pytest.mark.parametrize("seconds", [0, pytest.param(60, marks=pytest.mark.long)])
def test_the_compositions_answer_as_their_models(
    start_triton: StartTriton, tmp_path: Path, seconds: float
) -> None:
    """Cold models with both fronts, padding, hooks, an alias with a shadow and a meta model answer right.

    Then both runtimes die under load, and all answers are still right.
    """
    server = start(tmp_path, start_triton)
    with asker(server, 0) as client:
        for model in compositions.EMBEDDERS:
            for entry in ENTRIES:
                client.everything(model, entry)
            client.cancel(model)
            client.everything(model, "")
    assert_shadows_agree(server, "alias_padded")
    storm(server, tuple(compositions.EMBEDDERS), seconds=seconds, seed=1)


def assert_shadows_agree(server: RunningTriton, alias: str) -> None:
    """Check how the shadow's answers compare: some are the same, and none is different."""

    def copies() -> str:
        with redirect_stdout(StringIO()) as page:
            server.operate("status", alias)
        (row,) = (line for line in page.getvalue().splitlines() if "shadow" in line)
        return row if " same" in row else ""

    assert "different" not in wait_until(copies, what="compared answers")


def answered(server: RunningTriton, model: str) -> bool:
    """Return True if each device has answered requests of a model."""
    views = [read_status(server.pid, device)["models"].get(model) for device in "01"]
    return all(view is not None and view["answered"] for view in views)


@pytest.mark.long
def test_models_with_state_answer_as_their_models(start_triton: StartTriton, tmp_path: Path) -> None:
    """Narrow sequences with hooks and a narrow generation answer right on two devices.

    The models are cold at first. Requests use shared memory, a priority and a deadline.
    """
    compositions.write_stateful(tmp_path / "bundles")
    repository = make_repository(tmp_path, settings=f"{compositions.DEVICES}placement: {{replicas: all}}")
    server = start_triton(repository, make=partial(TritonServer, client_shared_memory=True))
    with asker(server, 0) as first, asker(server, 1) as second, ThreadPoolExecutor(2) as pool:
        # A new sequence or generation runs on the device with the fewest of them, among the devices that have started the model.
        def have_read() -> bool:
            first.read(range(1, 5))
            return answered(server, "reader")

        def have_generated() -> bool:
            for answer in [pool.submit(client.generate) for client in (first, second)]:
                answer.result()
            return answered(server, "teller")

        wait_until(have_read, what="sequences on both devices")
        wait_until(have_generated, what="answers of both devices")
