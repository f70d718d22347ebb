"""Requests that end tritonserver, and sequences in all spellings of JSON, through a gateway and through Envoy.

No server may end, and no step of a sequence may reach a wrong server.
"""

from __future__ import annotations

import gzip
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2

from local_triton import TritonServer
from rsrv_gateway.http_head import HttpHead
from tests.e2e.calls import post_bytes
from tests.e2e.gateways import Fleet, RunningGateway, running_gateway, running_picker, write_repository
from tests.e2e.harness import is_alive, running_triton
from tests.envoys import running_envoy
from tests.unit.gateway.spellings import SPELLINGS
from tests.waiting import PATIENCE_S, wait_until

Infer: Any = service_pb2.ModelInferRequest

#: Metadata with which the gateway ends a stream at its first error, as tritonserver does.
_ERRORS_END = [("triton_grpc_error", "true")]
#: Ports of HTTP and of gRPC.
Door = tuple[int, int]


@pytest.fixture(scope="module", params=["gateway", "envoy"])
def door(
    request: pytest.FixtureRequest, fleet: Fleet, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Door]:
    folder = tmp_path_factory.mktemp("door")
    if request.param == "gateway":
        with running_gateway(folder, fleet.workers, mode="round_robin") as gateway:
            yield gateway.http_port, gateway.grpc_port
        return
    grpc_ports, http_ports = (
        [getattr(each, f"{kind}_port") for each in fleet.workers] for kind in ("grpc", "http")
    )
    with (
        running_picker(folder, fleet.workers, mode="round_robin") as picker,
        running_envoy(folder, picker.grpc_port, grpc_ports, http_ports) as envoy,
    ):
        yield envoy.port, envoy.port


def post(port: int, model: str, body: bytes, encoding: str | None = None) -> tuple[int, Any]:
    status, answer = post_bytes(port, model, body, {} if encoding is None else {"Content-Encoding": encoding})
    return status, json.loads(answer)


def document(shape: str = "[1]", data: str = "[1]", more: str = "") -> bytes:
    tensor = f'{{"name": "X", "datatype": "INT32", "shape": {shape}, "data": {data}}}'
    return f'{{"inputs": [{tensor}]{more}}}'.encode()


#: Bodies of requests. Each of them ends tritonserver 24.10.
ATTACKS = {
    "huge": document("[2147483648, 64]"),
    "large": document("[2000000000]"),
    "negative": document("[18446744073709551615]"),
    "empty and negative": document("[0, 18446744073709551615]", "[]"),
    "deep": document(data="[" * 100_000 + "1" + "]" * 100_000),
    "classes": document(more=', "outputs": [{"name": "text", "parameters": {"classification": 1}}]'),
    "classes of a cut name": document(
        more=', "outputs": [{"name": "text\\u0000x", "parameters": {"classification": 1}}]'
    ),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_request_over_http_ends_a_server(fleet: Fleet, door: Door, attack: str) -> None:
    """Each attack is refused in each spelling, and both servers stay alive."""
    pids = [server.pid for server in fleet.workers]
    for name, spelling in SPELLINGS.items():
        status, answer = post(door[0], "plain", *spelling(ATTACKS[attack]))
        assert (status, "error" in answer) == (400, True), (name, answer)
    assert all(map(is_alive, pids))
    assert post(door[0], "plain", document())[0] == 200


def test_no_request_over_grpc_ends_a_server(fleet: Fleet, door: Door) -> None:
    """Requests for the classes of strings are refused in calls and streams, compressed or not, after small and large tensors."""
    tensor = Infer.InferInputTensor(name="X", datatype="INT32", shape=[1])
    good = Infer(model_name="plain", inputs=[tensor], raw_input_contents=[b"\1\0\0\0"])
    output = Infer.InferRequestedOutputTensor(name="text")
    output.parameters["classification"].int64_param = 1
    classes = Infer(outputs=[output]).SerializeToString()
    large = Infer(
        model_name="plain",
        inputs=[Infer.InferInputTensor(name="X", datatype="INT32", shape=[1_000_000])],
        raw_input_contents=[bytes(4_000_000)],
    )
    service = "/inference.GRPCInferenceService/"
    with grpc.insecure_channel(f"127.0.0.1:{door[1]}") as channel:
        call, stream = (
            channel.unary_unary(service + "ModelInfer"),
            channel.stream_stream(service + "ModelStreamInfer"),
        )
        for message in (good, large):
            data = message.SerializeToString() + classes
            for compression in (grpc.Compression.NoCompression, grpc.Compression.Gzip):
                with pytest.raises(grpc.RpcError) as error:
                    call(data, timeout=PATIENCE_S, compression=compression)
                assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                messages = iter([good.SerializeToString(), data])
                answers = stream(messages, timeout=PATIENCE_S, compression=compression, metadata=_ERRORS_END)
                # After an answer, Envoy can only break off the stream.
                with pytest.raises(grpc.RpcError):
                    list(answers)
        assert call(good.SerializeToString(), timeout=PATIENCE_S)
    assert all(is_alive(server.pid) for server in fleet.workers)


def _steps(ask: Callable[[int, int], int | str]) -> Counter[str]:
    """Send three steps of three sequences in turns, and count the outcomes. `ask` returns the sum or the error."""
    outcomes = Counter[str]()
    for step in range(3):
        for sequence in range(1, 4):
            answer = ask(sequence, step)
            outcomes["right" if answer == step + 1 else str(answer)] += 1
    return outcomes


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_all_steps_of_a_sequence_reach_its_server(door: Door, spelling: str) -> None:
    """Steps of several sequences in turns get the right sums in each spelling. With Envoy, the picker refuses an id after 1 MiB of body."""
    write = SPELLINGS[spelling]

    def ask(sequence: int, step: int) -> int | str:
        flags = {"sequence_start": step == 0, "sequence_end": step == 2}
        more = json.dumps({"parameters": {"sequence_id": sequence, **flags}})[1:-1]
        status, answer = post(door[0], "sums", *write(document(more=", " + more)))
        return int(answer["outputs"][0]["data"][0]) if status == 200 else str(answer["error"])[:100]

    outcomes = _steps(ask)
    through_envoy = door[0] == door[1]
    if spelling == "late" and through_envoy:
        assert [(key.partition(" of the body")[0], count) for key, count in outcomes.items()] == [
            ("the request's sequence_id is not in the first part", 9)
        ]
    else:
        assert outcomes == {"right": 9}


@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip])
def test_all_steps_of_a_sequence_over_grpc_reach_its_server(door: Door, compression: Any) -> None:
    """Steps of several sequences in turns get the right sums over gRPC, compressed or not."""
    with grpc.insecure_channel(f"127.0.0.1:{door[1]}") as channel:
        call = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            Infer.SerializeToString,
            service_pb2.ModelInferResponse.FromString,
        )

        def ask(sequence: int, step: int) -> int:
            tensor = Infer.InferInputTensor(name="X", datatype="INT32", shape=[1])
            message = Infer(model_name="sums", inputs=[tensor], raw_input_contents=[b"\1\0\0\0"])
            message.parameters["sequence_id"].int64_param = sequence
            message.parameters["sequence_start"].bool_param = step == 0
            message.parameters["sequence_end"].bool_param = step == 2
            answer = call(message, timeout=PATIENCE_S, compression=compression)
            return int.from_bytes(answer.raw_output_contents[0], "little")

        assert _steps(ask) == {"right": 9}


#: Bodies that tritonserver may accept, each with its encoding.
BODIES: dict[str, tuple[bytes, str | None]] = {
    **{
        name: spelling(document(more=', "parameters": {"sequence_id": 7}'))
        for name, spelling in SPELLINGS.items()
    },
    "first of equal ids": (document(more=', "parameters": {"sequence_id": 7, "sequence_id": 8}'), None),
    "first of equal parameters": (
        document(more=', "parameters": {"sequence_id": 7}, "parameters": {}'),
        None,
    ),
    "first of equal shapes": (document('[1], "shape": [2]'), None),
    "text": (document(more=', "parameters": {"sequence_id": "a\\/\\ud83d\\ude00\\u0000b"}'), None),
    "empty": (document(more=', "parameters": {"sequence_id": ""}'), None),
    "zero": (document(more=', "parameters": {"sequence_id": -0}'), None),
    "largest": (document(more=', "parameters": {"sequence_id": 18446744073709551615}'), None),
    "too large": (document(more=', "parameters": {"sequence_id": 18446744073709551616}'), None),
    "negative": (document(more=', "parameters": {"sequence_id": -1}'), None),
    "float": (document(more=', "parameters": {"sequence_id": 7.0}'), None),
    "true": (document(more=', "parameters": {"sequence_id": true}'), None),
    "numbers": (document(more=', "parameters": {"a": -Inf, "b": NaN, "sequence_id": 7}'), None),
    "nested": (document("[2, 1]", "[[1], [2]]", ', "parameters": {"sequence_id": 7}'), None),
    "nested parameters": (document(more=', "x": {"parameters": {"sequence_id": 7}}'), None),
    "half a mark": (b"\xef" + document(more=', "parameters": {"sequence_id": 7}'), None),
    "cut gzip": (gzip.compress(document(more=', "parameters": {"sequence_id": 7}'))[:-8], "gzip"),
    "trailing comma": (document(more=', "parameters": {"sequence_id": 7,}'), None),
}


@pytest.mark.parametrize("name", BODIES)
def test_the_gateway_reads_what_triton_reads(fleet: Fleet, name: str) -> None:
    """If tritonserver accepts a body, its model gets the sequence and the shape that the gateway reads from this body."""
    body, encoding = BODIES[name]
    status, answer = post(fleet.workers[0].http_port, "plain", body, encoding)
    accepted = name not in ("too large", "negative", "float", "true", "trailing comma", "nested")
    assert (status == 200) is accepted, answer
    if accepted:
        head = HttpHead("infer", encoding, None, 1 << 30)
        head.feed(body, last=True)
        assert head.head is not None
        (text,) = [output["data"] for output in answer["outputs"] if output["name"] == "text"]
        id = head.head.sequence
        assert text[0] == (repr(id) if id is not None else text[0] if text[0] in ("0", "''") else "none")
        assert text[1] == repr(head.head.inputs[0][1])


@pytest.mark.long
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_request_that_ends_servers_ends_two_of_three(tmp_path: Path, protocol: str) -> None:
    """A request ends each server that executes it. It is refused after it has ended two servers.

    Later requests that are equal are refused at once, and other requests are answered.
    """
    repository = write_repository(tmp_path / "models", ["killer"])
    with ExitStack() as stack:
        servers = [
            stack.enter_context(running_triton(repository, tmp_path / f"{name}.log", expected=None))
            for name in "abc"
        ]
        gateway = stack.enter_context(running_gateway(tmp_path, servers, mode="round_robin"))
        channel = stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{gateway.grpc_port}"))
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")

        def ask(number: int, id: str) -> str:
            """Send a request. Return the text of its error, or an empty text if it is answered."""
            if protocol == "http":
                body = document(data=f"[{number}]", more=f', "id": "{id}"')
                return str(post(gateway.http_port, "killer", body)[1].get("error", ""))
            tensor = Infer.InferInputTensor(name="X", datatype="INT32", shape=[1])
            raw = number.to_bytes(4, "little", signed=True)
            try:
                call(
                    Infer(
                        model_name="killer", id=id, inputs=[tensor], raw_input_contents=[raw]
                    ).SerializeToString()
                )
            except grpc.RpcError as error:
                return str(error.details())
            return ""

        assert ask(1, "good") == ""
        assert "two servers ended while they executed this request" in ask(-1, "first")
        for number in range(5):
            assert "an equal request" in ask(-1, f"again {number}")
            assert ask(number, "good") == ""
        assert sum(is_alive(server.pid) for server in servers) == 1


def _wait_served(gateway: RunningGateway, worker: str, outcomes: Counter[str]) -> None:
    """Wait until a worker is back and 50 more requests are answered."""
    up = f'rsrv_gateway_worker_up{{worker="{worker}"}} 1'
    wait_until(lambda: up in gateway.get("/metrics")[1], what=f"worker {worker}")
    answered = outcomes["right"]
    wait_until(lambda: outcomes["right"] > answered + 50, what="50 answers")


@pytest.mark.long
def test_a_rolling_restart_of_three_workers_fails_no_request(tmp_path: Path) -> None:
    """Each of three workers is stopped and started again under load. No request fails, and none becomes a suspect."""
    repository = write_repository(tmp_path / "models", ("echo",))
    body = document("[3]", "[1, 2, 3]")
    outcomes = Counter[str]()
    with ExitStack() as stack:
        lives = [ExitStack() for _ in range(3)]
        servers = []
        for number, life in enumerate(lives):
            stack.enter_context(life)
            servers.append(
                life.enter_context(running_triton(repository, tmp_path / f"{number}.log", expected=None))
            )
        gateway = stack.enter_context(running_gateway(tmp_path, servers))
        stop = threading.Event()

        def load() -> None:
            while not stop.is_set():
                status, answer = post(gateway.http_port, "echo", body)
                outcomes["right" if status == 200 else str(answer)] += 1

        def call() -> None:
            tensor = Infer.InferInputTensor(name="X", datatype="INT32", shape=[1])
            message = Infer(model_name="echo", inputs=[tensor], raw_input_contents=[b"\1\0\0\0"])
            with grpc.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
                infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
                while not stop.is_set():
                    try:
                        infer(message.SerializeToString(), timeout=PATIENCE_S)
                        outcomes["right"] += 1
                    except grpc.RpcError as error:
                        outcomes[str(error)] += 1

        threads = [threading.Thread(target=target) for target in (load, load, call, call)]
        for thread in threads:
            thread.start()
        try:
            for number, life in enumerate(lives):
                old = servers[number].server
                life.close()
                same = partial(
                    TritonServer,
                    http_port=old.http_port,
                    grpc_port=old.grpc_port,
                    metrics_port=old.metrics_port,
                )
                life.enter_context(
                    running_triton(repository, tmp_path / f"again{number}.log", expected=None, make=same)
                )
                _wait_served(gateway, "abc"[number], outcomes)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    assert set(outcomes) == {"right"}
