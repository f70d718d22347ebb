"""Classes of outputs with strings would end tritonserver, so no worker may get a request for them."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from grpc import StatusCode
from tritonclient.grpc import service_pb2

from rsrv.settings_fleet import GatewaySection
from rsrv_gateway.connections import ChannelFactory
from rsrv_gateway.outcomes import Refusal
from rsrv_gateway.probes import GrpcProber
from tests.unit.gateway import http_proxies, proxies
from tests.unit.gateway.proxies import refusal
from tests.waiting import looped

STRINGS = frozenset(["text"])


def request(output: str, classes: int = 1, padding: int = 0) -> Any:
    tensor = service_pb2.ModelInferRequest.InferRequestedOutputTensor(name=output)
    tensor.parameters["classification"].int64_param = classes
    return service_pb2.ModelInferRequest(
        model_name="m", outputs=[tensor], raw_input_contents=[bytes(padding)]
    )


def json_request(output: str, classes: object = 1) -> dict[str, Any]:
    return {"inputs": [], "outputs": [{"name": output, "parameters": {"classification": classes}}]}


@pytest.mark.parametrize("padding", [0, 100_000])
@looped
async def test_over_grpc_classes_of_strings_reach_no_worker(padding: int) -> None:
    """A request for classes of strings is INVALID_ARGUMENT, whether it is small or large. Other requests pass."""
    async with proxies.serving(2) as house:
        house.brain.strings = dict.fromkeys("ab", STRINGS)
        for output in ("text", "text\0z"):
            code, text = await refusal(house.call("ModelInfer", request(output, padding=padding)))
            assert (code, "output 'text' of model 'm' has strings" in text) == ("INVALID_ARGUMENT", True)
        assert all(not worker.got for worker in house.workers)
        await house.call("ModelInfer", request("numbers", padding=padding))
        await house.call("ModelInfer", request("text", classes=0, padding=padding))
        # Each worker is asked for its outputs once a second.
        assert house.brain.asked == ["a", "b"]


@looped
async def test_over_http_classes_of_strings_reach_no_worker() -> None:
    """A request for classes of strings is refused with 400, even if a NUL ends the output's name for Triton. Other requests pass."""
    async with http_proxies.serving(2) as house:
        house.brain.strings = dict.fromkeys("ab", STRINGS)
        for output in ("text", "text\0z"):
            answer = await house.infer(json_request(output))
            assert (answer.status, b"has strings" in answer.body) == (400, True)
        assert all(not worker.got for worker in house.workers)
        assert (await house.infer(json_request("numbers"))).status == 200
        assert (await house.infer(json_request("text", 0))).status == 200
        assert house.brain.asked == ["a", "b"]


@looped
async def test_each_worker_of_a_failover_is_asked_for_its_outputs() -> None:
    """After the first worker refused a request for classes, a worker whose model has strings does not get it."""
    async with http_proxies.serving(2) as house:
        house.brain.strings = {"b": STRINGS}
        house.workers[0].does[""] = house.workers[0].says(503, {"error": "not now"})
        assert (await house.infer(json_request("text"))).status == 400
        assert house.workers[1].got == []


@looped
async def test_each_version_of_a_model_has_its_own_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """If one version of a model has strings, only requests for classes of this version are refused."""

    async def string_outputs(worker: str, model: str, version: str) -> frozenset[str]:
        return STRINGS if version == "2" else frozenset()

    async with proxies.serving(1) as house:
        monkeypatch.setattr(house.brain, "string_outputs", string_outputs)
        for version in ("1", "2", "1"):
            message = request("text")
            message.model_version = version
            if version == "2":
                assert (await refusal(house.call("ModelInfer", message)))[0] == "INVALID_ARGUMENT"
            else:
                await house.call("ModelInfer", message)


@looped
async def test_a_worker_that_does_not_report_its_outputs_gets_no_request_for_classes() -> None:
    """If a worker does not report a model's outputs, the next worker gets the request for classes."""
    async with http_proxies.serving(2) as house:
        house.brain.strings = {"a": Refusal(StatusCode.UNAVAILABLE, "later")}
        assert (await house.infer(json_request("text"))).headers["X-Worker"] == "b"
        assert house.workers[0].got == []


@looped
async def test_messages_of_a_stream_are_checked() -> None:
    """A message for classes of strings is answered with an error. Later messages of the stream are served."""
    async with proxies.serving(1) as house:
        house.brain.strings = {"a": STRINGS}
        stream = house.stream()
        answers = []
        for message in (service_pb2.ModelInferRequest(model_name="m", id="1"), request("text"), request("y")):
            await stream.write(message)
            answers.append(await stream.read())
        assert "has strings" in answers[1].error_message
        assert [answer.error_message for answer in (answers[0], answers[2])] == ["", ""]
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF
        assert house.proxy.counts().outstanding == {}


@looped
async def test_a_client_that_leaves_during_the_check_leaves_no_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream's message is in flight while its worker is asked for its outputs.

    If the client leaves in that time, the message is no longer in flight.
    """
    async with proxies.serving(1) as house:
        check_started, check_answered = asyncio.Event(), asyncio.Event()

        async def string_outputs(worker: str, model: str, version: str) -> frozenset[str]:
            check_started.set()
            await check_answered.wait()
            return frozenset()

        monkeypatch.setattr(house.brain, "string_outputs", string_outputs)
        stream = house.stream()
        await stream.write(request("text"))
        await check_started.wait()
        assert house.proxy.counts().outstanding == {("m", "a"): 1}

        stream.cancel()

        while house.proxy.counts().outstanding:
            await asyncio.sleep(0)


@looped
async def test_a_worker_tells_its_outputs_with_strings() -> None:
    """The prober reads from a model's metadata which outputs have strings, or returns the worker's refusal."""
    async with proxies.serving(1) as house:
        (worker,) = house.workers

        async def metadata(query: Any, context: Any) -> Any:
            if query.name != "m":
                await context.abort(StatusCode.NOT_FOUND, "unknown")
            assert query.version == "3"
            outputs = [
                service_pb2.ModelMetadataResponse.TensorMetadata(name=name, datatype=kind)
                for name, kind in (("text", "BYTES"), ("numbers", "FP32"))
            ]
            return service_pb2.ModelMetadataResponse(outputs=outputs)

        worker.does["ModelMetadata"] = metadata
        prober = GrpcProber(worker.worker, ChannelFactory(GatewaySection()), 5)
        assert await prober.string_outputs("m", "3") == STRINGS
        answer = await prober.string_outputs("other", "3")
        assert isinstance(answer, Refusal)
        assert answer.code is StatusCode.NOT_FOUND
        await prober.close()
