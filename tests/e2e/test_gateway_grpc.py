"""The gateway in front of two real tritonservers. To a client of gRPC, it looks like one tritonserver."""

from __future__ import annotations

import os
import queue
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

from tests.e2e.gateways import Fleet, running_gateway
from tests.waiting import PATIENCE_S, wait_until


def number(value: int, *, dtype: str = "INT32", name: str = "X") -> list[InferInput]:
    tensor = InferInput(name, [1], dtype)
    return [tensor.set_data_from_numpy(np.array([value], {"INT32": np.int32, "INT64": np.int64}[dtype]))]


def outcome(call: Callable[[], Any]) -> Any:
    """Return the answer, or the status and the message of the refusal."""
    try:
        return call()
    except InferenceServerException as error:
        return error.status(), error.message()


#: Calls to which tritonserver and the gateway must answer in the same way.
ALIKE: dict[str, Callable[[InferenceServerClient], Any]] = {
    "an unknown model": lambda client: client.infer("nothing", number(1)),
    "no name": lambda client: client.infer("", number(1)),
    "an unknown version": lambda client: client.infer("echo", number(1), model_version="7"),
    "an unknown input": lambda client: client.infer("echo", number(1, name="Z")),
    "a wrong type": lambda client: client.infer("echo", number(1, dtype="INT64")),
    "no input": lambda client: client.infer("echo", []),
    "a wrong argument": lambda client: client.infer("refusing", number(3)),
    "an internal error": lambda client: client.infer("refusing", number(4)),
    "one answer of several": lambda client: client.infer("several", number(1)),
    "unknown shared memory": lambda client: client.infer(
        "echo", [InferInput("X", [1], "INT32").set_shared_memory("nowhere", 4)]
    ),
    "live": lambda client: client.is_server_live(),
    "ready": lambda client: client.is_server_ready(),
    "a model is ready": lambda client: client.is_model_ready("echo"),
    "an unknown model is ready": lambda client: client.is_model_ready("nothing"),
    "an unknown version is ready": lambda client: client.is_model_ready("echo", "7"),
    "metadata": lambda client: client.get_server_metadata(),
    "a model's metadata": lambda client: client.get_model_metadata("echo"),
    "metadata of an unknown model": lambda client: client.get_model_metadata("nothing"),
    "a model's config": lambda client: client.get_model_config("echo"),
    "config of an unknown model": lambda client: client.get_model_config("nothing"),
    "config of an unknown version": lambda client: client.get_model_config("echo", "7"),
    "the index": lambda client: sorted(
        (each.name, each.version, each.state) for each in client.get_model_repository_index().models
    ),
    "statistics of an unknown model": lambda client: client.get_inference_statistics("nothing"),
    "loading an unknown model": lambda client: client.load_model("nothing"),
    "unloading an unknown model": lambda client: client.unload_model("nothing"),
}


@pytest.mark.parametrize("name", ALIKE)
def test_as_a_tritonserver(fleet: Fleet, name: str) -> None:
    """The gateway's answers and refusals have the same words and the same status as those of a tritonserver."""
    direct = outcome(lambda: ALIKE[name](fleet.workers[0].grpc))

    assert outcome(lambda: ALIKE[name](fleet.gateway.grpc)) == direct


def test_requests_are_answered_by_both(fleet: Fleet) -> None:
    """Each worker answers some of the requests, and the answers are right. The gateway's statistics count all of them."""

    def executed(client: InferenceServerClient) -> int:
        (model,) = client.get_inference_statistics("counted").model_stats
        return int(model.inference_count)

    before = [executed(worker.grpc) for worker in fleet.workers]
    for value in range(40):
        assert fleet.gateway.grpc.infer("counted", number(value)).as_numpy("Y") == [value]

    # Triton counts a request after it has answered.
    wait_until(
        lambda: sum(executed(worker.grpc) for worker in fleet.workers) == sum(before) + 40, what="counts"
    )
    after = [executed(worker.grpc) for worker in fleet.workers]
    assert all(now > then for now, then in zip(after, before, strict=True))
    assert executed(fleet.gateway.grpc) == sum(after)


@pytest.mark.parametrize(
    ("which", "code"), [(0, "RESOURCE_EXHAUSTED"), (1, "DEADLINE_EXCEEDED"), (2, "FAILED_PRECONDITION")]
)
def test_tagged_refusals_have_the_code_of_their_tag(fleet: Fleet, which: int, code: str) -> None:
    """The gateway gives a refusal the code that its tag means, and does not change the message."""
    status, message = outcome(lambda: fleet.gateway.grpc.infer("refusing", number(which)))

    assert status == f"StatusCode.{code}"
    assert message.startswith("[rsrv:")


def test_large_tensors(fleet: Fleet) -> None:
    """A tensor of 16 MB returns unchanged."""
    sent = np.arange(4_000_000, dtype=np.int32)
    tensor = InferInput("X", list(sent.shape), "INT32").set_data_from_numpy(sent)

    assert np.array_equal(fleet.gateway.grpc.infer("echo", [tensor]).as_numpy("Y"), sent)


def streamed(url: str, requests: list[tuple[str, int]]) -> list[Any]:
    """Send these requests in one stream. Return all its answers, as values or as messages of errors."""
    got: queue.Queue[Any] = queue.Queue()
    client = InferenceServerClient(url)
    client.start_stream(
        lambda result, error: got.put(error.message() if error else result.as_numpy("Y").tolist())
    )
    for model, value in requests:
        client.async_stream_infer(model, number(value))
    client.stop_stream()  # This waits until all requests are answered.
    client.close()
    return list(got.queue)


def test_a_stream(fleet: Fleet) -> None:
    """A stream has all answers of its model, even if a request has several answers. Messages for other models are refused."""
    assert sorted(streamed(fleet.gateway.url, [("several", 3), ("several", 1)])) == [[1], [3], [3], [3]]

    got = streamed(fleet.gateway.url, [("echo", 1), ("several", 3), ("echo", 2)])
    assert [answer for answer in got if isinstance(answer, list)] == [[1], [2]]
    (refused,) = [answer for answer in got if isinstance(answer, str)]
    assert "this stream belongs to model 'echo'; open another stream for 'several'" in refused


def test_a_cancelled_request(fleet: Fleet) -> None:
    """If a client cancels its request, the model gets the cancellation."""
    call = fleet.gateway.grpc.async_infer("waiting", number(1), lambda result, error: None, request_id="gone")
    wait_until((fleet.marks / "gone.started").exists)
    call.cancel()

    wait_until((fleet.marks / "gone.cancelled").exists)


def test_a_cancelled_stream(fleet: Fleet) -> None:
    """If a client cancels its stream, the model gets the cancellation."""
    client = InferenceServerClient(fleet.gateway.url)
    client.start_stream(lambda result, error: None)
    client.async_stream_infer("waiting", number(1), request_id="stream")
    wait_until((fleet.marks / "stream.started").exists)
    client.stop_stream(cancel_requests=True)
    client.close()

    wait_until((fleet.marks / "stream.cancelled").exists)


def test_a_deadline(fleet: Fleet) -> None:
    """When the deadline of the client passes, the client gets an error, and the model gets the cancellation."""
    for seconds in (1, 4, 16, 64):
        id = f"late{seconds}"
        status, _ = outcome(
            lambda id=id, seconds=seconds: fleet.gateway.grpc.infer(  # type: ignore[misc]
                "waiting", number(1), request_id=id, client_timeout=seconds
            )
        )
        assert status == "StatusCode.DEADLINE_EXCEEDED"
        # On a busy machine, the deadline may pass before the request reaches the model.
        if (fleet.marks / f"{id}.started").exists():
            break

    wait_until((fleet.marks / f"{id}.cancelled").exists)


def test_a_model_is_unloaded_and_loaded(fleet: Fleet) -> None:
    """Both workers unload and load the model before the call returns."""
    gateway = fleet.gateway.grpc
    gateway.unload_model("several")
    wait_until(lambda: not any(worker.grpc.is_model_ready("several") for worker in fleet.workers))
    gateway.load_model("several")

    assert all(worker.grpc.is_model_ready("several") for worker in fleet.workers)
    assert len(streamed(fleet.gateway.url, [("several", 2)])) == 2


def test_settings_are_a_servers_own(fleet: Fleet) -> None:
    """The gateway refuses calls about a server's settings, and the error says to ask a server itself."""
    for ask in (
        fleet.gateway.grpc.get_log_settings,
        fleet.gateway.grpc.get_trace_settings,
        fleet.gateway.grpc.get_system_shared_memory_status,
    ):
        status, message = outcome(ask)
        assert status == "StatusCode.UNIMPLEMENTED"
        assert "ask a server itself" in message


def test_bytes_that_are_no_request(fleet: Fleet) -> None:
    """The gateway refuses bytes that are not a request."""
    with grpc.insecure_channel(fleet.gateway.url) as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer", None, None)
        with pytest.raises(grpc.RpcError) as refused:
            infer(b"\x0a\xffabc")

    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_worker_hangs(fleet: Fleet, tmp_path: Path) -> None:
    """While one worker is stopped, at most two of 40 requests fail at their deadline. When it continues, it gets requests again.

    The gateway also ends while a worker is stopped.
    """
    servers = fleet.workers
    settings = {"mode": "round_robin", "drain_s": 2}
    with running_gateway(tmp_path, servers, **settings) as gateway:
        wait_until(lambda: gateway.grpc.is_model_ready("echo"))

        def executed() -> int:
            (model,) = servers[0].grpc.get_inference_statistics("echo").model_stats
            return int(model.inference_count)

        def late() -> bool:
            status, _ = outcome(lambda: (None, gateway.grpc.infer("echo", number(1), client_timeout=5)))
            return bool(status)

        os.kill(servers[0].pid, signal.SIGSTOP)
        try:
            assert sum(late() for _ in range(40)) <= 2
        finally:
            os.kill(servers[0].pid, signal.SIGCONT)
        before = executed()
        wait_until(lambda: not late() and executed() > before)

        os.kill(servers[0].pid, signal.SIGSTOP)
        try:
            late()
            gateway.process.send_signal(signal.SIGTERM)
            assert gateway.process.wait(PATIENCE_S) == 0
        finally:
            os.kill(servers[0].pid, signal.SIGCONT)
    wait_until(
        lambda: all(worker.alive for worker in fleet.gateway.status().workers), what="the shared gateway"
    )
