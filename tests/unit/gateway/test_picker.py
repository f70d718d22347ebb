"""The endpoint picker. Envoy asks it with a stream of parts for each request."""

from __future__ import annotations

import asyncio
import gzip
import json
import struct
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from tritonclient.grpc import service_pb2

from rsrv.placement.contract import Routes, Table, Worker
from rsrv.settings_fleet import GatewaySection
from rsrv_gateway.ext_proc import DESTINATION
from rsrv_gateway.outcomes import Refusal
from rsrv_gateway.picker import SHOWN_BYTES, PickedRequest, Picker
from rsrv_gateway.v1 import ext_proc_pb2 as pb
from tests.unit.gateway.calls import calls_of
from tests.unit.gateway.proxies import SERVICE, FakeBrain
from tests.unit.gateway.spellings import SPELLINGS
from tests.waiting import looped

Infer: Any = service_pb2.ModelInferRequest
WORKERS = {
    "a": Worker("a", "10.0.0.1:8001", "10.0.0.1:8000"),
    "b": Worker("b", "10.0.0.2:8001", "10.0.0.2:8000"),
    "c": Worker("c", "10.0.0.3:8001"),
}
TABLE = {
    "both": Routes(ready=("a", "b"), placed=("b",)),
    "shared": Routes(ready=("a", "b"), placed=("a", "b"), batch_input=("X", 0), quantum=4),
    "only_c": Routes(ready=("c",)),
    "gone": Routes(ready=()),
}
#: Modes of Envoy's filter: BUFFERED sends a part of the body, STREAMED is the mode of deploy/envoy.yaml, DUPLEX is
#: the mode of the Gateway API, and NONE sends no body.
BUFFERED: Any = pb.ProtocolConfiguration(request_body_mode=pb.BUFFERED_PARTIAL)
STREAMED: Any = pb.ProtocolConfiguration(
    request_body_mode=pb.STREAMED, send_body_without_waiting_for_header_response=True
)
DUPLEX: Any = pb.ProtocolConfiguration(request_body_mode=pb.FULL_DUPLEX_STREAMED)
NONE: Any = pb.ProtocolConfiguration()


class Stream:
    """Envoy's side of a stream for one request."""

    def __init__(self, call: Any) -> None:
        self.call = call

    async def send(self, **part: Any) -> None:
        await self.call.write(pb.ProcessingRequest(**part))

    async def got(self) -> Any:
        while True:
            answer = await self.call.read()
            assert answer is not grpc.aio.EOF
            if not answer.HasField("override_message_timeout"):
                return answer

    async def headers(self, headers: Mapping[str, str], mode: Any, end: bool = False, **more: Any) -> None:
        pairs = [pb.HeaderValue(key=key, raw_value=value.encode()) for key, value in headers.items()]
        part = pb.HttpHeaders(headers=pb.HeaderMap(headers=pairs), end_of_stream=end)
        await self.send(request_headers=part, protocol_config=mode, **more)

    async def body(self, data: bytes, end: bool = True) -> None:
        await self.send(request_body=pb.HttpBody(body=data, end_of_stream=end))

    async def end(self) -> None:
        """Close the sending side. Check that all answers that still arrive belong to parts of the request's body."""
        await self.call.done_writing()
        while (answer := await self.call.read()) is not grpc.aio.EOF:
            assert answer.WhichOneof("response") in ("request_body", None)


class Desk:
    """A picker, and a connection to it."""

    def __init__(self, picker: Picker, brain: FakeBrain, channel: Any) -> None:
        self.picker = picker
        self.brain = brain
        self._process = channel.stream_stream(
            "/envoy.service.ext_proc.v3.ExternalProcessor/Process",
            pb.ProcessingRequest.SerializeToString,
            pb.ProcessingResponse.FromString,
        )

    def stream(self) -> Stream:
        return Stream(self._process())

    async def ask_http(self, path: str, body: bytes | None = None, mode: Any = BUFFERED, **more: Any) -> Any:
        """Return the last answer to an HTTP request. It is a POST if there is a body, and else a GET."""
        stream = self.stream()
        headers = {":method": "GET" if body is None else "POST", ":path": path, **more.pop("headers", {})}
        await stream.headers(headers, mode, end=body is None, **more)
        answer = await stream.got()
        if body is not None and not endpoints(answer) and answer.WhichOneof("response") == "request_headers":
            await stream.body(body)
            answer = await stream.got()
        await stream.end()
        return answer

    async def ask_grpc(self, method: str, message: Any, mode: Any = BUFFERED, **headers: str) -> Any:
        """Return the last answer to a gRPC call."""
        stream = self.stream()
        await stream.headers(call_headers(method, **headers), mode)
        if mode is BUFFERED:
            answer = await stream.got()
            if answer.WhichOneof("response") != "request_headers" or endpoints(answer):
                return answer
        await stream.body(framed(message))
        answer = await stream.got()
        await stream.end()
        return answer

    def in_flight(self) -> Mapping[tuple[str, str], int]:
        return self.picker.counts().outstanding


def call_headers(method: str, **more: str) -> dict[str, str]:
    path = method if method.startswith("/") else SERVICE + method
    return {":method": "POST", ":path": path, "content-type": "application/grpc", **more}


def framed(message: Any, compressed: bool = False) -> bytes:
    data = message.SerializeToString()
    data = gzip.compress(data) if compressed else data
    return struct.pack(">BI", compressed, len(data)) + bytes(data)


def endpoints(answer: Any) -> list[str]:
    """Return the endpoints that an answer names. Its header and its metadata must name the same ones."""
    part = answer.WhichOneof("response")
    if part not in ("request_headers", "request_body"):
        return []
    headers = getattr(answer, part).response.header_mutation.set_headers
    values = [option.header.raw_value.decode() for option in headers if option.header.key == DESTINATION]
    destination = answer.dynamic_metadata["envoy.lb"][DESTINATION] if values else ""
    assert values in ([], [destination])
    return values[0].split(",") if values else []


def refusal(answer: Any) -> tuple[int, str]:
    """Return the status and the text of an immediate response. The status is gRPC's, or else HTTP's."""
    assert answer.WhichOneof("response") == "immediate_response"
    response = answer.immediate_response
    return (
        response.grpc_status.status if response.HasField("grpc_status") else response.status.code
    ), response.body.decode()


@asynccontextmanager
async def picking(
    table: Table = TABLE, workers: Mapping[str, Worker] = WORKERS, **settings: Any
) -> AsyncIterator[Desk]:
    brain = FakeBrain()
    picker = Picker("127.0.0.1:0", GatewaySection(**settings), brain)
    await picker.start()
    try:
        await picker.apply(workers, table)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{picker.port}") as channel:
            yield Desk(picker, brain, channel)
    finally:
        await picker.stop()


@pytest.mark.parametrize("mode", [BUFFERED, STREAMED, DUPLEX], ids=["buffered", "streamed", "duplex"])
@looped
async def test_a_call_goes_to_the_placed_worker_of_the_model_in_its_body(mode: Any) -> None:
    """The placed worker is named first, and others follow for retries. The mode in which Envoy sends the body does not matter."""
    async with picking() as desk:
        answer = await desk.ask_grpc("ModelInfer", Infer(model_name="both"), mode)
        assert endpoints(answer) == ["10.0.0.2:8001", "10.0.0.1:8001"]
        assert answer.WhichOneof("response") == ("request_body" if mode is BUFFERED else "request_headers")


@pytest.mark.parametrize("placed", [("a", "b", "d"), ()], ids=["placed", "ready"])
@looped
async def test_the_requests_of_a_dead_worker_are_spread_over_the_others(placed: tuple[str, ...]) -> None:
    """Requests that are sent first to one worker name the others in equal numbers for the retry.

    This holds even if requests for other models come in between.
    """
    workers = {name: Worker(name, f"10.0.0.{number}:8001") for number, name in enumerate("abd")}
    routes = Routes(ready=("a", "b", "d"), placed=placed)
    pairs = Counter[tuple[str, str]]()
    async with picking({"m": routes, "n": routes, "o": routes}, workers, mode="round_robin") as desk:
        for number in range(360):
            model = "mno"[number % 3]
            first, second, _ = endpoints(await desk.ask_grpc("ModelInfer", Infer(model_name=model)))
            if model == "m":
                pairs[first, second] += 1
    assert len(pairs) == 6
    assert min(pairs.values()) >= 10


@looped
async def test_over_http_the_path_names_the_model_and_the_endpoint_is_the_http_port() -> None:
    """For a request over HTTP, the endpoints are HTTP ports. If no worker of the model has an HTTP port, the request is refused."""
    async with picking() as desk:
        body = json.dumps({"inputs": []}).encode()
        for path in ("/v2/models/both/infer", "/v2/models/both/versions/1/infer", "/v2/models/both/generate"):
            assert endpoints(await desk.ask_http(path, body)) == ["10.0.0.2:8000", "10.0.0.1:8000"]
        status, text = refusal(await desk.ask_http("/v2/models/only_c/infer", body))
        assert (status, "no worker serves model 'only_c'" in text) == (503, True)
        assert desk.in_flight() == {}


@looped
async def test_a_request_counts_until_envoy_ends_its_stream() -> None:
    """A request is in flight at its worker from the choice to the end of its stream. Then it is counted as finished."""
    async with picking() as desk:
        stream = desk.stream()
        await stream.headers(call_headers("ModelInfer"), BUFFERED)
        await stream.got()
        assert desk.in_flight() == {}
        await stream.body(framed(Infer(model_name="both")))
        await stream.got()
        assert desk.in_flight() == {("both", "b"): 1}
        cut = desk.stream()
        await cut.headers(call_headers("ModelInfer"), STREAMED)
        await cut.body(framed(Infer(model_name="both")), end=False)
        await cut.got()
        assert desk.in_flight() == {("both", "b"): 2}
        await stream.end()
        cut.call.cancel()
        while desk.in_flight():
            await asyncio.sleep(0)
        assert desk.picker.counts().requests == {("both", "b", "PICKED"): 2}


@looped
async def test_replicas_share_requests_by_rows() -> None:
    """The number of rows is read from the message's beginning or from JSON.

    Four rows fill a quantum of four, so the next request goes to the other replica.
    """
    async with picking() as desk:

        async def call(rows: int) -> str:
            message = Infer(model_name="shared", raw_input_contents=[b"x" * 20_000])
            message.inputs.add(name="X", datatype="FP32", shape=[rows, 2])
            stream = desk.stream()
            await stream.headers(call_headers("ModelInfer"), BUFFERED)
            await stream.got()
            # Envoy shows only the beginning of the body.
            await stream.body(framed(message)[:9000], end=False)
            return endpoints(await stream.got())[0]

        first = await call(4)
        assert await call(1) != first
        other = {"inputs": [{"name": "X", "shape": [5, 2], "datatype": "FP32", "data": []}]}
        await desk.ask_http("/v2/models/shared/infer", json.dumps(other).encode())
        assert desk.picker.counts().items == {"shared": 5}


@looped
async def test_the_requests_of_a_sequence_go_to_one_worker_without_fallback() -> None:
    """Requests with the same sequence id have the same single endpoint, over both protocols, compressed or not."""
    async with picking(mode="round_robin", table={"m": Routes(ready=("a", "b"))}) as desk:
        message = Infer(model_name="m")
        message.parameters["sequence_id"].int64_param = 7
        hosts = set()
        for _ in range(2):
            targets = endpoints(await desk.ask_grpc("ModelInfer", message))
            assert len(targets) == 1
            hosts.add(targets[0].split(":")[0])
            stream = desk.stream()
            await stream.headers(call_headers("ModelInfer", **{"grpc-encoding": "gzip"}), STREAMED)
            await stream.body(framed(message, compressed=True))
            hosts.add(endpoints(await stream.got())[0].split(":")[0])
            body = json.dumps({"parameters": {"sequence_id": 7}}).encode()
            hosts.add(endpoints(await desk.ask_http("/v2/models/m/infer", body))[0].split(":")[0])
        assert len(hosts) == 1


async def in_pieces(stream: Stream, body: bytes, size: int) -> Any:
    """Send a body in pieces until the picker chooses, and return its answer."""
    for at in range(0, len(body), size):
        await stream.body(body[at : at + size], end=at + size >= len(body))
    return await stream.got()


def http_headers(model: str = "m", **more: str) -> dict[str, str]:
    return {":method": "POST", ":path": f"/v2/models/{model}/infer", **more}


@pytest.mark.parametrize("spelling", [name for name in SPELLINGS if name != "late"])
@looped
async def test_a_sequence_over_http_goes_to_one_worker_however_it_is_written(spelling: str) -> None:
    """A sequence id is found in any spelling and encoding, in one piece or in several."""
    async with picking(mode="round_robin", table={"m": Routes(ready=("a", "b"))}) as desk:
        body, encoding = SPELLINGS[spelling](b'{"parameters": {"sequence_id": 7}}')
        headers = {} if encoding is None else {"content-encoding": encoding}
        plain = endpoints(await desk.ask_http("/v2/models/m/infer", b'{"parameters": {"sequence_id": 7}}'))
        for size in (10, 1000, 1 << 20):
            for mode in (STREAMED, DUPLEX):
                stream = desk.stream()
                await stream.headers(http_headers(**headers), mode)
                assert endpoints(await in_pieces(stream, body, size)) == plain
                await stream.end()


@looped
async def test_a_sequence_id_behind_what_envoy_holds_back_is_refused() -> None:
    """The picker chooses a worker after the first 1 MiB of a body.

    If a sequence id follows later, the request is refused, and the error says what to do. Otherwise, the request
    passes.
    """
    async with picking() as desk:
        for rest, wrong in ((b'"parameters": {"sequence_id": 7}}', True), (b'"parameters": {}}', False)):
            stream = desk.stream()
            await stream.headers(http_headers("both"), STREAMED)
            await stream.body(b'{"id": "' + b"i" * SHOWN_BYTES, end=False)
            assert endpoints(await stream.got()) == ["10.0.0.2:8000", "10.0.0.1:8000"]
            assert (await stream.got()).HasField("request_body")
            await stream.body(b'", ' + rest)
            answer = await stream.got()
            assert answer.HasField("request_body") is not wrong
            if wrong:
                status, text = refusal(answer)
                assert (status, "Put the parameters before the inputs" in text) == (400, True)


@looped
async def test_parameters_in_front_decide_at_once() -> None:
    """A sequence id at the start of a large request chooses its worker before the rest arrives."""
    async with picking(mode="round_robin", table={"m": Routes(ready=("a", "b"))}) as desk:
        plain = endpoints(await desk.ask_http("/v2/models/m/infer", b'{"parameters": {"sequence_id": 7}}'))
        stream = desk.stream()
        await stream.headers(http_headers(), STREAMED)
        await stream.body(b'{"parameters": {"sequence_id": 7}, "inputs": [{"data": [', end=False)
        assert endpoints(await stream.got()) == plain


@looped
async def test_what_ends_a_server_is_refused_at_any_place_of_a_body() -> None:
    """A request with a huge shape is refused when the part with the shape arrives, before or after a worker is chosen.

    So no server gets the whole request.
    """
    claim = b'"inputs": [{"name": "X", "datatype": "FP32", "shape": [2147483648, 64], "data": [1]}]}'
    async with picking() as desk:
        for size in (0, 2 * SHOWN_BYTES):
            body = b'{"id": "' + b"i" * size + b'", ' + claim
            for data, headers in ((body, {}), (gzip.compress(body, 0), {"content-encoding": "gzip"})):
                stream = desk.stream()
                await stream.headers(http_headers("both", **headers), STREAMED)
                answer = await in_pieces(stream, data, 64 << 10)
                while answer.WhichOneof("response") != "immediate_response":
                    answer = await stream.got()
                assert refusal(answer)[0] == 400
        assert desk.in_flight() == {}


@looped
async def test_the_index_is_asked_for_in_json_that_a_server_can_read() -> None:
    """JSON so deep that it would crash a server is refused in requests for the index. Other bodies, or no body, pass."""
    async with picking() as desk:
        deep = b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
        assert refusal(await desk.ask_http("/v2/repository/index", deep))[0] == 400
        for body in (b'{"ready": true}', b""):
            assert endpoints(await desk.ask_http("/v2/repository/index", body))


@looped
async def test_classes_of_strings_are_refused_at_any_place_of_a_body() -> None:
    """A request for classes of an output with strings is refused over both protocols.

    This also holds if the output follows the tensors, or is in a later message of a stream.
    """
    request = Infer(model_name="both")
    request.outputs.add(name="text").parameters["classification"].int64_param = 1
    late = Infer(model_name="both", raw_input_contents=[bytes(SHOWN_BYTES)]).SerializeToString()
    late += Infer(outputs=request.outputs).SerializeToString()
    first = Infer(model_name="both")
    body = json.dumps({"outputs": [{"name": "text", "parameters": {"classification": 1}}]}).encode()
    behind = b'{"id": "' + b"i" * SHOWN_BYTES + b'", ' + body[1:]
    calls: list[tuple[dict[str, str], bytes]] = [
        (call_headers("ModelInfer"), framed(request)),
        (call_headers("ModelInfer"), struct.pack(">BI", 0, len(late)) + late),
        (call_headers("ModelInfer", **{"grpc-encoding": "gzip"}), framed(request, compressed=True)),
        (call_headers("ModelStreamInfer"), framed(first) + framed(request)),
        (http_headers("both"), body),
        (http_headers("both"), behind),
    ]
    async with picking() as desk:
        # Only the worker that is not named first has this output with strings. Envoy may use any of the named
        # workers.
        desk.brain.strings = {"a": frozenset(["text"])}
        for headers, data in calls:
            stream = desk.stream()
            await stream.headers(headers, STREAMED)
            answer = await in_pieces(stream, data, 64 << 10)
            while answer.WhichOneof("response") != "immediate_response":
                answer = await stream.got()
            assert "output 'text' of model 'both' has strings" in refusal(answer)[1]
        desk.brain.strings = {}
        await asyncio.sleep(0)
        assert desk.in_flight() == {}
        desk.picker.traffic._strings.clear()
        for headers, data in calls:
            stream = desk.stream()
            await stream.headers(headers, STREAMED)
            assert len(endpoints(await in_pieces(stream, data, 64 << 10))) == 2
            await stream.end()


@looped
async def test_classes_of_a_model_that_was_unknown_are_checked() -> None:
    """If a request for classes names a model that only a refresh finds, its worker is still asked for its string outputs."""
    request = Infer(model_name="new")
    request.outputs.add(name="text").parameters["classification"].int64_param = 1
    async with picking() as desk:

        async def find() -> None:
            await desk.picker.apply(WORKERS, {**TABLE, "new": Routes(ready=("a",))})

        desk.brain.on_refresh = find
        answer = await desk.ask_grpc("ModelInfer", request, STREAMED)
        assert len(endpoints(answer)) == 1
        assert desk.brain.asked == ["a"]


@looped
async def test_a_worker_that_does_not_name_its_outputs_gets_no_request_for_classes() -> None:
    """A request for classes goes only to workers that report which outputs have strings.

    If no worker reports them, the client gets a refusal.
    """
    request = Infer(model_name="both")
    request.outputs.add(name="text").parameters["classification"].int64_param = 1
    away = Refusal(grpc.StatusCode.UNAVAILABLE, "worker b does not answer")
    async with picking() as desk:
        desk.brain.strings = {"b": away}
        stream = desk.stream()
        await stream.headers(call_headers("ModelInfer"), STREAMED)
        await stream.body(framed(request))
        assert endpoints(await stream.got()) == ["10.0.0.1:8001"]
        assert desk.in_flight() == {("both", "a"): 1}
        await stream.end()
        desk.brain.strings = {"a": away, "b": away}
        desk.picker.traffic._strings.clear()
        assert refusal(await desk.ask_grpc("ModelInfer", request, STREAMED)) == (14, away.message)


@looped
async def test_a_stream_is_for_one_model() -> None:
    """A later message for another model is refused, because tritonserver 24.10 may crash when both models answer."""
    async with picking() as desk:
        stream = desk.stream()
        await stream.headers(call_headers("ModelStreamInfer"), STREAMED)
        await stream.body(framed(Infer(model_name="both")), end=False)
        assert endpoints(await stream.got())
        await stream.got()
        await stream.body(framed(Infer(model_name="shared")), end=False)
        assert "open another stream for 'shared'" in refusal(await stream.got())[1]


@looped
async def test_a_part_of_a_body_is_not_taken_for_all_of_it() -> None:
    """With BUFFERED_PARTIAL, JSON that is shown only in part is refused, and the error names the setting."""
    async with picking() as desk:
        stream = desk.stream()
        await stream.headers(http_headers("both"), BUFFERED)
        await stream.got()
        await stream.body(b'{"id": "' + b"i" * 1000, end=False)
        status, text = refusal(await stream.got())
        assert (status, "request_body_mode: STREAMED" in text) == (500, True)


@looped
async def test_a_slow_client_gets_more_time() -> None:
    """While the picker waits for a body, it asks Envoy to wait longer. After a timeout, Envoy would send the request unread."""
    async with picking() as desk:
        stream = desk.stream()
        await stream.headers(http_headers("both"), STREAMED)
        answer = await stream.call.read()
        assert answer.override_message_timeout.seconds >= 60
        await stream.end()


@looped
async def test_an_error_in_the_picker_lets_no_request_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """If reading a request raises an unexpected error, the picker refuses the request.

    If the picker's stream failed instead, Envoy would send the request unread.
    """
    monkeypatch.setattr("rsrv_gateway.picked_body.HttpHead.steps", lambda *_: 1 / 0)
    async with picking() as desk:
        assert refusal(await desk.ask_http("/v2/models/both/infer", b"{}"))[0] == 500


@looped
async def test_a_compressed_body_is_read_with_pauses_for_other_requests() -> None:
    """A few compressed bytes may become much JSON, so the picker reads them in parts, with pauses.

    `take` returns before that.
    """
    body = gzip.compress(b'{"inputs": [], "more": [' + b"[0]," * 500_000 + b"0]}")
    names = {":method": "POST", ":path": "/v2/models/both/infer", "content-encoding": "gzip"}
    pairs = [pb.HeaderValue(key=key, raw_value=value.encode()) for key, value in names.items()]
    headers = pb.HttpHeaders(headers=pb.HeaderMap(headers=pairs))
    part = pb.HttpBody(body=body, end_of_stream=True)
    rounds = 0

    async def count() -> None:
        nonlocal rounds
        while True:
            rounds += 1
            await asyncio.sleep(0)

    async with picking() as desk:
        request = PickedRequest(desk.picker)
        first = pb.ProcessingRequest(request_headers=headers, protocol_config=STREAMED)
        request.take(first.SerializeToString())
        assert not list(request.take(pb.ProcessingRequest(request_body=part).SerializeToString()))
        counting = asyncio.create_task(count())
        answers = [pb.ProcessingResponse.FromString(answer) for answer in await request.pending_answers()]
        counting.cancel()
        request.end()
    assert endpoints(answers[0]) == ["10.0.0.2:8000", "10.0.0.1:8000"]
    assert rounds > 5


@pytest.mark.parametrize(
    ("method", "request_", "hosts"),
    [
        ("ServerReady", service_pb2.ServerReadyRequest(), {1, 2, 3}),
        ("RepositoryIndex", service_pb2.RepositoryIndexRequest(), {1, 2, 3}),
        ("/grpc.health.v1.Health/Check", service_pb2.ServerLiveRequest(), {1, 2, 3}),
        ("ModelStatistics", service_pb2.ModelStatisticsRequest(), {1, 2, 3}),
        ("ModelReady", service_pb2.ModelReadyRequest(name="only_c"), {3}),
        ("ModelConfig", service_pb2.ModelConfigRequest(name="unknown"), {1, 2, 3}),
    ],
)
@looped
async def test_questions_go_to_a_worker_that_can_answer(method: str, request_: Any, hosts: set[int]) -> None:
    """A question about a model is sent to a worker that has it. Other questions are sent to any worker. Questions are not counted."""
    async with picking() as desk:
        targets = endpoints(await desk.ask_grpc(method, request_))
        assert targets
        assert {int(target.split(":")[0][-1]) for target in targets} <= hosts
        assert desk.picker.counts().requests == {}


@looped
async def test_any_worker_means_each_in_turn() -> None:
    """Requests that name no model, including requests for unknown paths, are sent to the workers in turn."""
    async with picking() as desk:
        paths = ("/v2/health/ready", "/v2", "/v2/models/stats", "/no/such/path")
        firsts = [endpoints(await desk.ask_http(path))[0] for path in paths]
        assert len(set(firsts)) == 2


@looped
async def test_an_unknown_model_is_not_found_after_a_refresh() -> None:
    """For an unknown model, the workers are asked once more. Then the request ends with NOT_FOUND in the client's protocol."""
    async with picking() as desk:
        answer = await desk.ask_grpc("ModelInfer", Infer(model_name="what"))
        assert refusal(answer) == (5, "Request for unknown model: 'what' is not found")
        answer = await desk.ask_http("/v2/models/what/infer", b"{}")
        assert refusal(answer) == (404, '{"error":"Request for unknown model: \'what\' is not found"}')
        assert desk.brain.refreshes == 2
        assert desk.picker.counts().requests == {("", "", "NOT_FOUND"): 2}


@looped
async def test_without_a_live_server_requests_are_unavailable() -> None:
    """A request for a model without a worker is UNAVAILABLE. If there are no workers at all, every request is UNAVAILABLE."""
    async with picking() as desk:
        assert refusal(await desk.ask_grpc("ModelInfer", Infer(model_name="gone")))[0] == 14
    async with picking(table={}, workers={}) as desk:
        assert refusal(await desk.ask_grpc("ModelInfer", Infer(model_name="both")))[0] == 14
        assert refusal(await desk.ask_grpc("ServerReady", service_pb2.ServerReadyRequest()))[0] == 14
        assert refusal(await desk.ask_http("/v2/health/ready"))[0] == 503


@pytest.mark.parametrize(
    "method", ["RepositoryModelLoad", "TraceSetting", "SystemSharedMemoryRegister", "NoSuchMethod"]
)
@looped
async def test_changes_of_one_server_are_refused(method: str) -> None:
    """A call that would change only one of several servers is UNIMPLEMENTED."""
    async with picking() as desk:
        assert refusal(await desk.ask_grpc(method, service_pb2.LogSettingsRequest()))[0] == 12
        assert refusal(await desk.ask_http("/v2/repository/models/both/load", b"{}"))[0] == 501


@looped
async def test_what_is_no_request_is_refused() -> None:
    """Bytes that are not a request, a message with the model's name after the tensors, and a wrong shape are invalid.

    The status is gRPC's INVALID_ARGUMENT or HTTP's 400. A message marked as compressed, without an encoding, is UNIMPLEMENTED.
    """
    async with picking() as desk:
        late = Infer(raw_input_contents=[b"x" * 20_000]).SerializeToString() + b"\x0a\x04both"
        for body in (b"\0\0\0\0\x04abcd", struct.pack(">BI", 0, len(late)) + late[:9000], b"\1\0\0\0\2hi"):
            stream = desk.stream()
            await stream.headers(call_headers("ModelInfer"), BUFFERED)
            await stream.got()
            await stream.body(body, end=False)
            assert refusal(await stream.got())[0] == (12 if body[0] else 3)
            assert await stream.call.read() is grpc.aio.EOF
        body = b'{"inputs":[{"name":"X","shape":[9999999999],"datatype":"FP32"}]}'
        length = {"content-length": str(len(body))}
        status, text = refusal(await desk.ask_http("/v2/models/both/infer", body, headers=length))
        assert (status, "more elements than the request can hold" in text) == (400, True)


@looped
async def test_a_filter_that_hides_what_the_picker_needs_is_named() -> None:
    """If Envoy's filter does not send the headers, or a call's body, the error names the filter's setting."""
    async with picking() as desk:
        stream = desk.stream()
        await stream.body(framed(Infer(model_name="both")))
        assert "request_header_mode: SEND" in refusal(await stream.got())[1]
        stream = desk.stream()
        await stream.headers(call_headers("ModelInfer"), NONE)
        assert "request_body_mode: STREAMED" in refusal(await stream.got())[1]


@looped
async def test_a_client_needs_the_token_and_servers_do_not_get_it(tmp_path: Path) -> None:
    """A request without the token is refused at its headers. With the token, its header is removed."""
    file = tmp_path / "token"
    file.write_text("sesame\n")
    file.chmod(0o600)
    async with picking(token_file=file) as desk:
        for headers in ({}, {"authorization": "Bearer wrong"}):
            answer = await desk.ask_grpc("ModelInfer", Infer(model_name="both"), **headers)
            assert refusal(answer) == (16, "the token is missing, or wrong")
        assert refusal(await desk.ask_http("/v2/health/live"))[0] == 401
        assert desk.picker.counts().requests == {("", "", "UNAUTHENTICATED"): 2}
        answer = await desk.ask_grpc("ModelInfer", Infer(model_name="both"), authorization="Bearer sesame")
        assert list(answer.request_body.response.header_mutation.remove_headers) == ["authorization"]


@looped
async def test_envoy_can_limit_the_endpoints() -> None:
    """If the Gateway API's hint limits the endpoints, only the allowed endpoints are named and counted.

    If no worker has an allowed endpoint, the request is UNAVAILABLE.
    """

    def hint(allowed: Sequence[str]) -> Any:
        metadata: Any = pb.Metadata()
        metadata.filter_metadata["envoy.lb.subset_hint"].update({f"{DESTINATION}-subset": allowed})
        return metadata

    async with picking() as desk:
        stream = desk.stream()
        headers = {":method": "POST", ":path": "/v2/models/both/infer"}
        await stream.headers(headers, STREAMED, metadata_context=hint(["10.0.0.1:8000", "10.0.0.9:8000"]))
        await stream.body(b"{}")
        assert endpoints(await stream.got()) == ["10.0.0.1:8000"]
        assert desk.in_flight() == {("both", "a"): 1}
        for allowed in ([], ["10.0.0.9:8000"]):
            answer = await desk.ask_http("/v2/models/both/infer", b"{}", metadata_context=hint(allowed))
            assert refusal(answer)[0] == 503


@looped
async def test_in_full_duplex_all_bytes_of_both_bodies_come_back() -> None:
    """In the mode of the Gateway API, the picker first answers the headers.

    Then it returns each part of both bodies unchanged and in order.
    """
    message = framed(Infer(model_name="both", raw_input_contents=[b"x" * 20_000]))
    async with picking() as desk:
        stream = desk.stream()
        await stream.headers(call_headers("ModelInfer"), DUPLEX)
        for at in range(0, len(message), 4096):
            await stream.body(message[at : at + 4096], end=at + 4096 >= len(message))
        assert endpoints(await stream.got()) == ["10.0.0.2:8001", "10.0.0.1:8001"]
        back, done = b"", False
        while not done:
            part = (await stream.got()).request_body.response.body_mutation.streamed_response
            back, done = back + part.body, part.end_of_stream
        assert back == message
        await stream.send(response_headers=pb.HttpHeaders())
        assert (await stream.got()).HasField("response_headers")
        await stream.send(response_body=pb.HttpBody(body=b"answer", end_of_stream=False))
        answer = (await stream.got()).response_body.response.body_mutation.streamed_response
        assert (answer.body, answer.end_of_stream) == (b"answer", False)
        await stream.send(response_trailers=pb.HttpTrailers())
        assert (await stream.got()).HasField("response_trailers")
        await stream.end()


@looped
async def test_requests_in_flight_outlive_the_picker() -> None:
    """When the picker stops, it ends open streams with the status OK, so that Envoy continues their requests.

    New streams are refused.
    """
    async with picking() as desk:
        stream = desk.stream()
        await stream.headers(call_headers("ModelInfer"), STREAMED)
        await stream.body(framed(Infer(model_name="both")), end=False)
        for part in ("request_headers", "request_body"):
            assert (await stream.got()).WhichOneof("response") == part
        await desk.picker.drain(5)
        assert await stream.call.read() is grpc.aio.EOF
        assert await stream.call.code() is grpc.StatusCode.OK
        with pytest.raises(grpc.aio.AioRpcError):
            await desk.stream().got()


@looped
async def test_what_the_picker_has_not_read_resets_no_connection() -> None:
    """The picker can stop with unread bytes of a peer without resetting the connection.

    So the peer can read everything that the picker sent.
    """
    async with picking() as desk:
        reader, writer = await asyncio.open_connection("127.0.0.1", desk.picker.port)
        await reader.readexactly(9)
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")

        async def rest() -> bytes:
            data = await reader.read()
            writer.close()
            return data

        # The drain begins before the event loop reads from the connection.
        _, received = await asyncio.gather(desk.picker.drain(30), rest())
        goaway = struct.pack(">HBBBIII", 0, 8, 7, 0, 0, 0, 0)
        assert received.endswith(goaway)


@looped
async def test_workers_are_named_by_address(caplog: pytest.LogCaptureFixture) -> None:
    """A host's name is resolved, because Envoy compares addresses. A worker whose name has no address is left out and logged."""
    workers = {
        "a": Worker("a", "localhost:8001", "localhost:8000"),
        "b": Worker("b", "no.such.host.invalid:8001"),
    }
    async with picking({"m": Routes(ready=("a", "b"), placed=("b",))}, workers) as desk:
        (endpoint,) = endpoints(await desk.ask_grpc("ModelInfer", Infer(model_name="m")))
        assert endpoint in ("127.0.0.1:8001", "[::1]:8001")
        assert "no.such.host.invalid" in caplog.text


@looped
async def test_a_name_that_had_no_address_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that could not be resolved is tried again, even if no new table arrives. All names are resolved concurrently."""
    names: list[str] = []
    known: dict[str, str] = {}

    async def addresses(name: str) -> list[str]:
        names.append(name)
        await asyncio.sleep(0)
        if name not in known:
            raise OSError("unknown")
        return [known[name]]

    monkeypatch.setattr("rsrv_gateway.picker.addresses_of", addresses)
    monkeypatch.setattr("rsrv_gateway.picker.READ_PAUSE_S", 0.01)
    workers = {name: Worker(name, f"{name}.example:8001", f"{name}.example:8000") for name in "ab"}
    async with picking({"m": Routes(ready=("a", "b"))}, workers) as desk:
        assert names[:2] == ["a.example", "b.example"] or names[:2] == ["b.example", "a.example"]
        assert refusal(await desk.ask_grpc("ModelInfer", Infer(model_name="m")))[0] == 14
        known["b.example"] = "10.0.0.2"
        while not endpoints(answer := await desk.ask_grpc("ModelInfer", Infer(model_name="m"))):
            await asyncio.sleep(0)
        assert endpoints(answer) == ["10.0.0.2:8001"]


@looped
async def test_a_worker_keeps_its_address_while_names_cannot_be_resolved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """During an outage of DNS, workers keep their addresses."""
    known = {"a.example": "10.0.0.1"}
    failed = 0

    async def addresses(name: str) -> list[str]:
        nonlocal failed
        await asyncio.sleep(0)
        if name not in known:
            failed += 1
            raise OSError("no answer")
        return [known[name]]

    monkeypatch.setattr("rsrv_gateway.picker.addresses_of", addresses)
    monkeypatch.setattr("rsrv_gateway.picker.READ_PAUSE_S", 0.0)
    async with picking({"m": Routes(ready=("a",))}, {"a": Worker("a", "a.example:8001")}) as desk:
        known.clear()
        while failed < 3:
            await asyncio.sleep(0)
        assert endpoints(await desk.ask_grpc("ModelInfer", Infer(model_name="m"))) == ["10.0.0.1:8001"]


@looped
async def test_a_worker_that_joins_while_names_are_asked_for_keeps_its_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If workers are replaced while names are being resolved again, the new workers get requests at once.

    They still get requests after the older resolution has ended.
    """
    slow = asyncio.Event()
    started = asyncio.Event()
    known = {"a.example": "10.0.0.1", "b.example": "10.0.0.2"}
    times = 0

    async def addresses(name: str) -> list[str]:
        nonlocal times
        if name == "a.example" and (times := times + 1) == 2:
            started.set()
            await slow.wait()
        return [known[name]]

    monkeypatch.setattr("rsrv_gateway.picker.addresses_of", addresses)
    monkeypatch.setattr("rsrv_gateway.picker.READ_PAUSE_S", 0.01)
    before, after = ({name: Worker(name, f"{name}.example:8001")} for name in "ab")
    async with picking({"m": Routes(ready=("a",))}, before) as desk:
        await started.wait()
        monkeypatch.setattr("rsrv_gateway.picker.READ_PAUSE_S", 60)
        await desk.picker.apply(after, {"m": Routes(ready=("b",))})
        slow.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert endpoints(await desk.ask_grpc("ModelInfer", Infer(model_name="m"))) == ["10.0.0.2:8001"]


@looped
async def test_a_decision_takes_few_calls() -> None:
    """A decision takes a bounded number of function calls.

    It reads a request's parts, chooses among a hundred workers, and writes the answers, without gRPC.
    """
    names = [f"w{number}" for number in range(100)]
    workers = {name: Worker(name, f"10.0.1.{number}:8001") for number, name in enumerate(names)}
    table = {f"m{number}": Routes(ready=tuple(names), placed=(names[number],)) for number in range(100)}
    picker = Picker("127.0.0.1:0", GatewaySection(mode="lpt_packing"), FakeBrain())
    await picker.apply(workers, table)
    headers = call_headers("ModelInfer", **{f"x-{number}": "value" for number in range(9)})
    pairs = [pb.HeaderValue(key=key, raw_value=value.encode()) for key, value in headers.items()]
    head = pb.ProcessingRequest(
        request_headers=pb.HttpHeaders(headers=pb.HeaderMap(headers=pairs)), protocol_config=BUFFERED
    )
    parts = []
    for number in range(100):
        message = Infer(model_name=f"m{number}", raw_input_contents=[b"x" * 1000])
        message.inputs.add(name="X", datatype="FP32", shape=[1, 250])
        body = pb.ProcessingRequest(request_body=pb.HttpBody(body=framed(message), end_of_stream=True))
        parts.append((head.SerializeToString(), body.SerializeToString()))

    def decide() -> None:
        for some in parts:
            request = PickedRequest(picker)
            for part in some:
                assert request.take(part)
            request.end()

    # The limit is twice the usual number.
    assert calls_of(decide) < 300 * len(parts)


@looped
async def test_envoy_can_be_asked_for_a_certificate(tmp_path: Path) -> None:
    """With TLS, only a client with a certificate of the authority gets an answer."""
    authority = trustme.CA()
    pair = authority.issue_cert("127.0.0.1")
    ca, chain, key = (tmp_path / name for name in ("ca.pem", "chain.pem", "key.pem"))
    authority.cert_pem.write_to_path(str(ca))
    chain.write_bytes(b"".join(blob.bytes() for blob in pair.cert_chain_pems))
    pair.private_key_pem.write_to_path(str(key))
    async with picking(tls_certificate=chain, tls_key=key, tls_client_ca=ca) as desk:
        address = f"127.0.0.1:{desk.picker.port}"
        own = key.read_bytes(), chain.read_bytes()
        credentials = [grpc.ssl_channel_credentials(ca.read_bytes(), *more) for more in ((), own)]
        for credential, answered in zip(credentials, (False, True), strict=True):
            async with grpc.aio.secure_channel(address, credential) as channel:
                client = Desk(desk.picker, desk.brain, channel)
                call = client.ask_http("/v2/health/live")
                if answered:
                    assert endpoints(await call)
                else:
                    with pytest.raises(grpc.aio.AioRpcError):
                        await call
