"""Two real servers behind a real Envoy with deploy/envoy.yaml, and a picker in a separate process."""

from __future__ import annotations

import http.client
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from tests.e2e.gateways import Fleet, RunningGateway, running_picker
from tests.envoys import RunningEnvoy, running_envoy
from tests.waiting import PATIENCE_S, wait_until

SIZES = (1000, 100_000, 10_000_000)


@pytest.fixture(scope="module")
def picker(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    folder = tmp_path_factory.mktemp("picker")
    with running_picker(folder, fleet.workers) as running:
        yield running


@pytest.fixture(scope="module")
def envoy(
    fleet: Fleet, picker: RunningGateway, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningEnvoy]:
    grpc, http = ([getattr(worker, f"{kind}_port") for worker in fleet.workers] for kind in ("grpc", "http"))
    with running_envoy(tmp_path_factory.mktemp("envoy"), picker.grpc_port, grpc, http) as running:
        yield running


def tensor(client: Any, x: Any, **options: Any) -> Any:
    made = client.InferInput("X", list(x.shape), "INT32")
    made.set_data_from_numpy(x, **options)
    return made


def echoed(client: Any, x: Any) -> bool:
    return np.array_equal(client.infer("echo", [tensor(tritonclient.grpc, x)]).as_numpy("Y"), x)


def picked(picker: RunningGateway, model: str) -> int:
    """Return for how many requests of a model the picker has picked a server."""
    lines = [
        line for line in picker.get("/metrics")[1].splitlines() if "rsrv_gateway_requests_total{" in line
    ]
    return sum(
        int(float(line.split()[-1])) for line in lines if f'model="{model}"' in line and "PICKED" in line
    )


def test_clients_of_both_protocols_use_one_port(envoy: RunningEnvoy, picker: RunningGateway) -> None:
    """Requests of 1 kB to 10 MB get right answers on one port: over gRPC, compressed or not, and over HTTP, binary or JSON."""
    before = picked(picker, "echo")
    with (
        closing(tritonclient.grpc.InferenceServerClient(envoy.url)) as grpc,
        closing(tritonclient.http.InferenceServerClient(envoy.url)) as http,
    ):
        assert grpc.is_server_ready()
        assert http.is_server_live()
        assert {model["name"] for model in http.get_model_repository_index()} >= {"echo", "several"}
        for size in SIZES:
            x = np.arange(size // 4, dtype=np.int32)
            assert echoed(grpc, x)
            for binary in (True, False) if size < SIZES[-1] else (True,):
                sent = tensor(tritonclient.http, x, binary_data=binary)
                assert np.array_equal(http.infer("echo", [sent]).as_numpy("Y"), x)
        compressed = grpc.infer("echo", [tensor(tritonclient.grpc, x)], compression_algorithm="gzip")
        assert np.array_equal(compressed.as_numpy("Y"), x)
    wait_until(lambda: picked(picker, "echo") == before + 9, what="all requests end")


@pytest.mark.parametrize("size", [33_000, 40_000, 50_000, 1_060_000])
@pytest.mark.parametrize("count", [25, pytest.param(250, marks=pytest.mark.long)])
def test_every_request_gets_its_answer(envoy: RunningEnvoy, size: int, count: int) -> None:
    """Four clients send `count` requests each over each protocol. Bodies around the sizes of Envoy's buffers get right answers."""
    x = np.arange(size // 4, dtype=np.int32)
    body, length = tritonclient.http.InferenceServerClient.generate_request_body(
        [tensor(tritonclient.http, x)],
        outputs=[tritonclient.http.InferRequestedOutput("Y", binary_data=True)],
    )
    headers = {"Inference-Header-Content-Length": str(length)}

    def over_http(_: int) -> int:
        right = 0
        with closing(http.client.HTTPConnection("127.0.0.1", envoy.port, timeout=PATIENCE_S)) as connection:
            for _ in range(count):
                connection.request("POST", "/v2/models/echo/infer", body, headers)
                right += connection.getresponse().read().endswith(x.tobytes())
        return right

    def over_grpc(_: int) -> int:
        with closing(tritonclient.grpc.InferenceServerClient(envoy.url)) as client:
            return sum(echoed(client, x) for _ in range(count))

    with ThreadPoolExecutor(4) as threads:
        assert sum(threads.map(over_http, range(4))) == 4 * count
        assert sum(threads.map(over_grpc, range(4))) == 4 * count


def test_a_stream_has_all_its_answers(envoy: RunningEnvoy) -> None:
    """All answers of a decoupled model to several messages pass through Envoy, in any order."""
    answers: SimpleQueue[Any] = SimpleQueue()
    with closing(tritonclient.grpc.InferenceServerClient(envoy.url)) as client:
        client.start_stream(lambda result, error: answers.put(error or result.as_numpy("Y")[0]))
        for number in (1, 3, 2):
            x = np.array([number, 0], np.int32)
            client.async_stream_infer("several", [tensor(tritonclient.grpc, x)])
        assert sorted(answers.get(timeout=PATIENCE_S) for _ in range(6)) == [1, 2, 2, 3, 3, 3]


def test_errors_are_those_of_the_gateway(envoy: RunningEnvoy) -> None:
    """An unknown model is NOT_FOUND, and a load is UNIMPLEMENTED. Envoy passes on a server's own refusal."""
    x = np.arange(4, dtype=np.int32)
    with (
        closing(tritonclient.grpc.InferenceServerClient(envoy.url)) as grpc,
        closing(tritonclient.http.InferenceServerClient(envoy.url)) as http,
    ):
        with pytest.raises(InferenceServerException, match="unknown model: 'wrong' is not found") as error:
            grpc.infer("wrong", [tensor(tritonclient.grpc, x)])
        assert error.value.status() == "StatusCode.NOT_FOUND"
        with pytest.raises(InferenceServerException, match="unknown model: 'wrong' is not found"):
            http.infer("wrong", [tensor(tritonclient.http, x)])
        with pytest.raises(InferenceServerException, match="several servers") as error:
            grpc.load_model("echo")
        assert error.value.status() == "StatusCode.UNIMPLEMENTED"
        with pytest.raises(InferenceServerException, match="QUEUE_FULL"):
            grpc.infer("refusing", [tensor(tritonclient.grpc, x)])


def test_requests_survive_the_death_of_the_picker(fleet: Fleet, tmp_path: Path) -> None:
    """Under load, a picker is killed and another one is started. No request fails, and Envoy asks the new picker."""
    grpc, http = ([getattr(worker, f"{kind}_port") for worker in fleet.workers] for kind in ("grpc", "http"))
    x, stop, outcomes = np.arange(1000, dtype=np.int32), threading.Event(), Counter[str]()

    def ask(url: str) -> None:
        with closing(tritonclient.grpc.InferenceServerClient(url)) as client:
            while not stop.is_set():
                try:
                    outcomes["right" if echoed(client, x) else "wrong"] += 1
                except InferenceServerException as error:
                    outcomes[str(error)] += 1

    def more() -> None:
        already = outcomes["right"]
        wait_until(lambda: outcomes["right"] >= already + 50, what="50 answers")

    with running_picker(tmp_path, fleet.workers) as first:
        port = first.grpc_port
        with running_envoy(tmp_path, port, grpc, http) as envoy, ThreadPoolExecutor() as threads:
            for _ in range(4):
                threads.submit(ask, envoy.url)
            try:
                more()
                first.process.kill()
                more()
                with running_picker(tmp_path, fleet.workers, grpc=first.url) as second:
                    wait_until(lambda: picked(second, "echo") > 0, what="the new picker is asked")
                    more()
            finally:
                stop.set()
    assert set(outcomes) == {"right"}
