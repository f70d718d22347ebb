"""A gateway in front of two real servers: where requests go, where weights are, and what happens when a server dies."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from tests.e2e import bundles
from tests.e2e.gateways import RunningGateway, entry, running_gateway, write_repository
from tests.e2e.harness import RunningTriton, StartTriton, make_repository, running_triton
from tests.status import read_status
from tests.waiting import PATIENCE_S, wait_until

MODELS = ("first", "second", "third", "fourth")
#: The budget has room for two models of 1536 bytes.
SETTINGS = "runtime: {weight_budget_bytes: 4000}\naliases: {champion: first}\n"
ALIASED = {"champion": "first"}
KERNELS: Mapping[str, bundles.Array] = {
    name: bundles.exact_kernel() + number for number, name in enumerate(MODELS)
}
X = np.random.default_rng(2).integers(-9, 9, (3, 64)).astype(np.float32)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a repository with four copies of `exact`, which have different names and weights."""
    folder = tmp_path_factory.mktemp("gateway")
    for name, kernel in KERNELS.items():
        bundles.with_weights(bundles.ensure() / "exact", folder / "bundles" / name, {"kernel": kernel})
    return make_repository(folder, settings=SETTINGS)


@pytest.fixture(scope="module")
def servers(
    repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mapping[str, RunningTriton]]:
    """Two servers. The last test kills the first one. The second one has two devices, on which a gateway places models."""
    folder = tmp_path_factory.mktemp("servers")
    env = {"RSRV_RUNTIME__DEVICES": '["cpu", "cpu"]', "RSRV_PLACEMENT__MODE": "external"}
    thrash = ["weights_thrash"]  # A server that gets all requests for the four models has this finding.
    with (
        running_triton(repository, folder / "one.log", expected=thrash) as one,
        running_triton(repository, folder / "two.log", env=env, expected=thrash) as two,
    ):
        yield {"one": one, "two": two}


def infer(client: Any, model: str, **options: Any) -> None:
    """Send a request, and check the answer. Raises InferenceServerException."""
    tensor = tritonclient.grpc.InferInput("x", list(X.shape), "FP32")
    tensor.set_data_from_numpy(X)
    answer = client.infer(model, [tensor], **options).as_numpy("y")
    assert np.array_equal(answer, X @ KERNELS[ALIASED.get(model, model)]), model


def models_on(servers: Mapping[str, RunningTriton], device: str) -> dict[str, Any]:
    """Return the status of the models on a device. The gateway calls a device SERVER/NUMBER, or SERVER if it is the only one."""
    name, _, number = device.partition("/")
    models: dict[str, Any] = read_status(servers[name].pid, number or "0")["models"]
    return models


def resident(servers: Mapping[str, RunningTriton], device: str) -> set[str]:
    models = models_on(servers, device)
    return {name for name, model in models.items() if model["weights"] == "resident"}


@dataclass
class Load:
    """Sends requests of all models from several threads until it is stopped."""

    gateway: RunningGateway
    threads: int = 4
    answered: int = 0
    failed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> Self:
        self._running = [threading.Thread(target=self._run, args=(n,)) for n in range(self.threads)]
        for thread in self._running:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._running:
            thread.join()

    def more(self, count: int) -> None:
        """Wait until `count` more requests are answered."""
        until = self.answered + count
        wait_until(lambda: self.answered >= until, what=f"{count} answers; failed: {self.failed[:3]}")

    def _run(self, number: int) -> None:
        with self.gateway.client() as client:
            while not self._over.is_set():
                number += 1
                model = MODELS[number % len(MODELS)]
                try:
                    infer(client, model, client_timeout=PATIENCE_S)
                except InferenceServerException as error:
                    with self._lock:
                        self.failed.append(str(error))
                except AssertionError as error:
                    self.wrong.append(str(error))
                else:
                    with self._lock:
                        self.answered += 1


@pytest.mark.long
def test_a_worker_is_killed(start_triton: StartTriton, tmp_path: Path) -> None:
    """One of two workers crashes under load. No answer is wrong, and HTTP loses no request.

    gRPC loses at most the requests in flight on this worker.
    """
    clients = 4
    plain = [start_triton(write_repository(tmp_path / name, ["echo"])) for name in "ab"]
    answered = [0] * 2 * clients
    failed: dict[str, list[str]] = {"grpc": [], "http": []}
    killed = threading.Event()

    def load(number: int, protocol: str, library: ModuleType, url: str) -> None:
        after = 0
        with closing(library.InferenceServerClient(url)) as client:
            while after < 100:
                after += killed.is_set()
                value = (number << 20) + answered[number]
                tensor = library.InferInput("X", [1], "INT32")
                tensor.set_data_from_numpy(np.array([value], np.int32))
                try:
                    answer = client.infer("echo", [tensor])
                except InferenceServerException as error:
                    failed[protocol].append(str(error))
                    continue
                assert answer.as_numpy("Y") == [value]
                answered[number] += 1

    with (
        running_gateway(tmp_path, plain) as gateway,
        ThreadPoolExecutor(len(answered)) as pool,
    ):
        wait_until(lambda: gateway.grpc.is_model_ready("echo"))
        ways = [("grpc", tritonclient.grpc, gateway.url), ("http", tritonclient.http, gateway.http_url)]
        loads = [pool.submit(load, number, *ways[number % 2]) for number in range(len(answered))]
        wait_until(lambda: min(answered) > 50)
        plain[0].server.kill()
        killed.set()
        for each in loads:
            each.result(60)

    assert len(failed["grpc"]) <= clients, failed["grpc"][:3]
    assert failed["http"] == []
    assert min(answered) >= 150 - clients


def test_an_ending_gateway_answers_or_refuses_each_request(
    servers: Mapping[str, RunningTriton], tmp_path: Path
) -> None:
    """After SIGTERM to the gateway, each request in flight is answered or refused. The server stays ready."""
    server = servers["one"]
    with running_gateway(tmp_path, [entry(server, "one")]) as gateway:
        with Load(gateway) as load:
            load.more(50)
            gateway.process.send_signal(signal.SIGTERM)
            assert gateway.process.wait(PATIENCE_S) == 0, gateway.log_text()
        assert load.wrong == []
        # When gRPC's own server stops, it cancels requests that it has received and not passed on.
        codes = {text.partition("]")[0].removeprefix("[StatusCode.") for text in load.failed}
        assert codes <= {"UNAVAILABLE", "CANCELLED"}
    assert server.grpc.is_server_ready()


def test_models_are_packed_and_their_weights_are_where_requests_go(
    servers: Mapping[str, RunningTriton], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four models are packed onto the three devices of two servers. The second server follows the gateway's placement.

    One server is killed under load. Only its requests in flight may fail, all other answers are right, and its models move to the
    other server.
    """
    monkeypatch.setenv("RSRV_PLACEMENT__REPLICAS", "1")
    devices = ("one", "two/0", "two/1")
    workers = [entry(server, name) for name, server in servers.items()]
    with running_gateway(tmp_path, workers) as gateway:

        def homes() -> dict[str, tuple[str, ...]] | None:
            """Return the home of each model. Return None if a model or the alias of a model does not have exactly one home."""
            placement = {model.name: tuple(model.placed) for model in gateway.status().models}
            complete = placement.pop("champion", ()) == placement.get("first")
            return placement if complete and all(len(home) == 1 for home in placement.values()) else None

        def settled() -> bool:
            known = homes() or {}
            placed = {name: {model for model, home in known.items() if name in home} for name in devices}
            return all(placed[name] and placed[name] <= resident(servers, name) for name in devices)

        def misses() -> int:
            return sum(counts["misses"] for name in devices for counts in models_on(servers, name).values())

        wait_until(homes, what="a home for each model")
        with gateway.client() as client:
            # If another request has evicted weights at their home, the next request loads them again.
            for model in MODELS * 3:
                infer(client, model)
            infer(client, "champion")
        wait_until(settled, what="weights where the models are placed")

        def missed() -> int:
            """Send forty requests one after the other. Return for how many of them the weights were not on the device."""
            before = misses()
            with gateway.client() as client:
                for model in MODELS * 10:
                    infer(client, model)
            return misses() - before

        # A device looks busy while its process waits long for a core. If devices were chosen at random, half of the requests would miss.
        wait_until(lambda: missed() == 0, what="requests that all go where their weights are")
        with Load(gateway) as load:
            load.more(200)
            outstanding = load.threads
            servers["one"].server.kill()
            load.more(200)
            failed = list(load.failed)
            load.more(200)
        assert len(failed) <= outstanding, failed
        assert load.failed == failed
        assert load.wrong == []

        def alive() -> dict[str, bool]:
            return {worker.name: worker.alive for worker in gateway.status().workers}

        wait_until(lambda: alive() == {"one": False, "two/0": True, "two/1": True}, what="the other server")
        located = gateway.rsrv("locate", "first")
        assert f"127.0.0.1:{servers['two'].grpc_port}" in located
        assert str(servers["one"].grpc_port) not in located
