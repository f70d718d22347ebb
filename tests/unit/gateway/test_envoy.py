"""A real Envoy with deploy/envoy.yaml. A picker chooses the server of each request."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from io import BytesIO
from pathlib import Path
from random import Random
from typing import Any

import grpc
import pytest
from aiohttp import ClientSession
from tritonclient.grpc import service_pb2

from rsrv.placement.contract import Routes, Worker
from rsrv.settings_fleet import GatewaySection
from rsrv_gateway.ext_proc import DESTINATION
from rsrv_gateway.picker import Picker
from tests.envoys import Change, ext_proc, manager, running_envoy
from tests.unit.gateway.http_proxies import FakeHttpWorker
from tests.unit.gateway.proxies import SERVICE, FakeBrain, FakeWorker, refusal
from tests.unit.gateway.workers import Relay
from tests.waiting import PATIENCE_S, looped

Infer: Any = service_pb2.ModelInferRequest
_UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class Street:
    """The clients' side of an Envoy, and the parties behind it: a picker, and workers `a`, `b` and `c` with both protocols."""

    def __init__(
        self,
        picker: Picker,
        workers: Mapping[str, FakeWorker],
        http: Mapping[str, FakeHttpWorker],
        relays: Mapping[str, Relay],
    ) -> None:
        self.picker = picker
        self.workers = workers
        self.http = http
        #: Relays of the gRPC connections, by worker. A test can cut them.
        self.relays = relays
        self.url = ""
        self.client: Any = None
        self.session: Any = None

    async def apply(self, table: Mapping[str, Routes]) -> None:
        workers = {
            name: Worker(name, f"127.0.0.1:{relay.port}", f"127.0.0.1:{self.http[name].port}")
            for name, relay in self.relays.items()
        }
        await self.picker.apply(workers, table)

    def infer(self, model: str, size: int = 0, **options: Any) -> Any:
        call = self.client.unary_unary(
            SERVICE + "ModelInfer", Infer.SerializeToString, service_pb2.ModelInferResponse.FromString
        )
        return call(
            Infer(model_name=model, raw_input_contents=[bytes(size)]), **{"timeout": PATIENCE_S, **options}
        )

    def stream(self) -> Any:
        call = self.client.stream_stream(
            SERVICE + "ModelStreamInfer",
            Infer.SerializeToString,
            service_pb2.ModelStreamInferResponse.FromString,
        )
        return call(timeout=PATIENCE_S)

    async def post(self, model: str, body: bytes = b"{}", **headers: str) -> tuple[int, str, bytes]:
        """Send a request over HTTP. Return the answer's status, the worker's name, and the body."""
        url = f"http://{self.url}/v2/models/{model}/infer"
        async with self.session.post(url, data=BytesIO(body), headers=headers) as answer:
            return answer.status, answer.headers.get("X-Worker", ""), await answer.read()

    async def idle(self) -> None:
        """Wait until no request is in flight."""
        while self.picker.counts().outstanding:
            await asyncio.sleep(0)


@asynccontextmanager
async def street(
    tmp_path: Path, change: Change = lambda _: None, token: Path | None = None
) -> AsyncIterator[Street]:
    """Serve model `m` by worker b, or by worker c if b fails."""
    async with AsyncExitStack() as ends:
        workers = {name: FakeWorker(name) for name in "abc"}
        http = {name: FakeHttpWorker(name) for name in "abc"}
        for name in "abc":
            await workers[name].start()
            ends.push_async_callback(workers[name].kill)
            await http[name].start()
            ends.push_async_callback(http[name].kill)
        relays = {name: Relay(worker.port) for name, worker in workers.items()}
        for relay in relays.values():
            await ends.enter_async_context(relay.running())
        picker = Picker("127.0.0.1:0", GatewaySection(mode="lpt_packing", token_file=token), FakeBrain())
        await picker.start()
        ends.push_async_callback(picker.stop)
        scene = Street(picker, workers, http, relays)
        await scene.apply({"m": Routes(ready=("b", "c"), placed=("b",))})
        ports = [relay.port for relay in relays.values()], [worker.port for worker in http.values()]

        def patient(config: Any) -> None:
            # All parties share one event loop. On a busy machine, the picker would be late, and Envoy would use any server.
            ext_proc(config)["message_timeout"] = "60s"
            change(config)

        # Started in a thread, because the start waits for Envoy.
        running = running_envoy(tmp_path, picker.port, *ports, change=patient)
        envoy = await asyncio.to_thread(running.__enter__)
        ends.callback(running.__exit__, None, None, None)
        scene.url = envoy.url
        scene.client = await ends.enter_async_context(grpc.aio.insecure_channel(envoy.url, _UNLIMITED))
        scene.session = await ends.enter_async_context(ClientSession())
        yield scene


@looped
async def test_requests_of_all_sizes_go_where_the_picker_says(tmp_path: Path) -> None:
    """Requests of 1 kB to 10 MB over both protocols, and streams, reach the model's worker. They are in flight until their end."""
    async with street(tmp_path) as town:
        for size in (1000, 100_000, 1_000_000, 10_000_000):
            assert (await town.infer("m", size)).model_version == "b"
            status, worker, body = await town.post("m", b"{" + b" " * size + b"}")
            assert (status, worker, len(body)) == (200, "b", size + 2)
        stream = town.stream()
        for number in range(3):
            size = 10 ** (2 * number + 1)
            await stream.write(Infer(model_name="m", id=str(number), raw_input_contents=[bytes(size)]))
            answer = (await stream.read()).infer_response
            assert (answer.model_version, answer.id) == ("b", str(number))
            assert town.picker.counts().outstanding == {("m", "b"): 1}
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF
        await town.idle()
        assert town.picker.counts().requests == {("m", "b", "PICKED"): 9}


@looped
async def test_requests_in_flight_are_counted_until_their_answer(tmp_path: Path) -> None:
    """A request is in flight until its worker answers, even after the client has sent all of it.

    A cancelled request is no longer in flight.
    """
    async with street(tmp_path) as town:
        gate, arrived = asyncio.Event(), asyncio.Event()

        async def hold(request: Any, _: Any) -> Any:
            arrived.set()
            await gate.wait()
            return await town.workers["b"].echo(request, None)

        async def hold_stream(requests: Any, context: Any) -> None:
            (request,) = [request async for request in requests]
            response = service_pb2.ModelStreamInferResponse(infer_response=await hold(request, context))
            await context.write(response)

        town.workers["b"].does |= {"ModelInfer": hold, "ModelStreamInfer": hold_stream}
        call, stream = town.infer("m", 1000), town.stream()
        await stream.write(Infer(model_name="m"))
        await stream.done_writing()
        lost = asyncio.ensure_future(town.post("m"))
        cancelled = town.http["b"].holds()
        await town.http["b"].called.wait()
        await arrived.wait()
        while town.picker.counts().outstanding != {("m", "b"): 3}:
            await asyncio.sleep(0)
        lost.cancel()
        await cancelled.wait()
        while town.picker.counts().outstanding != {("m", "b"): 2}:
            await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(call, stream.read())
        assert await stream.read() is grpc.aio.EOF
        await town.idle()


def _hurry(config: Any) -> None:
    """Shorten all time limits of Envoy's routes."""
    (host,) = manager(config)["route_config"]["virtual_hosts"]
    for entry in host["routes"]:
        route = entry["route"]
        limits = [limit for limit in (route, route.get("max_stream_duration")) if limit]
        for limit in limits:
            limit |= {key: "0.5s" for key, value in limit.items() if value in ("60s", "65s", "300s")}


@looped
async def test_large_requests_without_raw_tensors_reach_the_worker(tmp_path: Path) -> None:
    """Tensors inside a call's message arrive, even if they are longer than several windows of Envoy."""
    async with street(tmp_path) as town:
        contents = service_pb2.InferTensorContents(int64_contents=[2**62] * 400_000)
        inputs = [Infer.InferInputTensor(name="X", shape=[400_000], contents=contents)]
        call = town.client.unary_unary(
            SERVICE + "ModelInfer", Infer.SerializeToString, service_pb2.ModelInferResponse.FromString
        )
        assert (await call(Infer(model_name="m", inputs=inputs), timeout=PATIENCE_S)).model_version == "b"


@looped
async def test_no_worker_gets_the_end_of_a_request_that_would_end_it(tmp_path: Path) -> None:
    """No worker gets a whole request with a huge shape, wherever the shape is, compressed or not. A late sequence id is also refused."""
    claim = b'"inputs": [{"name": "X", "datatype": "FP32", "shape": [2147483648, 64], "data": [1]}]}'
    async with street(tmp_path) as town:
        for size in (0, 20_000, 40_000, 1_000_000, 3_000_000):
            body = b'{"id": "' + b"i" * size + b'", ' + claim
            assert (await town.post("m", body))[0] == 400
            status, _, text = await town.post("m", gzip.compress(body), **{"Content-Encoding": "gzip"})
            assert (status, b"more elements" in text) == (400, True)
        late = b'{"id": "' + b"i" * 3_000_000 + b'", "parameters": {"sequence_id": 7}}'
        status, _, text = await town.post("m", late)
        assert (status, b"parameters before the inputs" in text) == (400, True)
        message = Infer(model_name="m", raw_input_contents=[bytes(1_000_000)]).SerializeToString()
        message += Infer(inputs=[Infer.InferInputTensor(name="X", shape=[2**40, 2**40])]).SerializeToString()
        call = town.client.unary_unary(SERVICE + "ModelInfer")
        for compression in (grpc.Compression.NoCompression, grpc.Compression.Gzip):
            code, details = await refusal(call(message, timeout=PATIENCE_S, compression=compression))
            assert (code, "more than 2147483647 elements" in details) == ("INVALID_ARGUMENT", True)
        assert [worker.got for worker in town.workers.values()] == [{}, {}, {}]
        assert [worker.got for worker in town.http.values()] == [[], [], []]
        await town.idle()


@looped
async def test_every_request_ends_at_the_limit_of_its_route(tmp_path: Path) -> None:
    """Calls, streams and HTTP requests without an answer end at their route's limit, and so does a request whose body stops arriving."""
    async with street(tmp_path, _hurry) as town:

        async def hold(_: Any, __: Any) -> Any:
            await asyncio.Event().wait()

        town.workers["b"].does |= {"ModelInfer": hold, "ModelStreamInfer": hold}
        town.http["b"].holds()
        stream = town.stream()
        await stream.write(Infer(model_name="m"))
        assert (await refusal(town.infer("m", timeout=None)))[0] == "DEADLINE_EXCEEDED"
        assert (await refusal(stream.read()))[1] == "stream timeout"
        assert (await town.post("m"))[0] == 504
        async with town.session.post(f"http://{town.url}/v2/models/m/generate_stream", data=b"{}") as answer:
            assert answer.status == 504
        host, port = town.url.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 20000\r\n\r\n"
            + b"{"
            + b" " * 9_999
        )
        assert (await reader.readline()).split()[1] == b"408"
        writer.close()
        await town.idle()


@looped
async def test_a_call_may_take_as_long_as_its_client_allows(tmp_path: Path) -> None:
    """A client's deadline replaces the route's limit for calls: a call with a deadline outlives a later call without one."""
    async with street(tmp_path, _hurry) as town:
        gate, arrived = asyncio.Event(), asyncio.Event()

        async def hold(request: Any, _: Any) -> Any:
            arrived.set()
            await gate.wait()
            return await town.workers["b"].echo(request, None)

        town.workers["b"].does["ModelInfer"] = hold
        call = town.infer("m")
        await arrived.wait()
        assert (await refusal(town.infer("m", timeout=None)))[0] == "DEADLINE_EXCEEDED"
        gate.set()
        assert (await call).model_version == "b"


@looped
async def test_no_request_goes_astray(tmp_path: Path) -> None:
    """600 requests of 16 clients are for 40 models, each on one of three workers. Each request reaches its model's worker."""
    async with street(tmp_path) as town:
        homes = {f"model-{number}": "abc"[number % 3] for number in range(40)}
        await town.apply(
            {model: Routes(ready=("a", "b", "c"), placed=(home,)) for model, home in homes.items()}
        )
        astray = []

        async def client(number: int) -> None:
            random = Random(number)
            for _ in range(38):
                model = random.choice(list(homes))
                if random.random() < 0.5:
                    worker = (await town.infer(model, random.choice((10, 20_000)))).model_version
                else:
                    worker = (await town.post(model))[1]
                if worker != homes[model]:
                    astray.append(model)

        await asyncio.gather(*[client(number) for number in range(16)])
        assert astray == []


@looped
async def test_errors_reach_clients_in_their_protocol(tmp_path: Path) -> None:
    """An unknown model is NOT_FOUND, and a model without a server is UNAVAILABLE. Both errors name the model, over both protocols."""
    async with street(tmp_path) as town:
        code, text = await refusal(town.infer("wrong"))
        assert (code, text) == ("NOT_FOUND", "Request for unknown model: 'wrong' is not found")
        status, _, body = await town.post("wrong")
        assert (status, body) == (404, b'{"error":"Request for unknown model: \'wrong\' is not found"}')
        await town.apply({"m": Routes(ready=())})
        assert (await refusal(town.infer("m")))[0] == "UNAVAILABLE"
        assert (await town.post("m"))[0] == 503
        stream = town.stream()
        await stream.write(Infer(model_name="wrong"))
        assert (await refusal(stream.read()))[0] == "NOT_FOUND"


@looped
async def test_when_a_server_dies_envoy_asks_the_next_one_named(tmp_path: Path) -> None:
    """If a server dies, new requests go to the model's next server, and so does a request that waited for an answer."""
    async with street(tmp_path) as town:
        assert (await town.infer("m")).model_version == "b"
        arrived = asyncio.Event()

        async def hold(_: Any, __: Any) -> Any:
            arrived.set()
            await asyncio.Event().wait()

        town.workers["b"].does["ModelInfer"] = hold
        call = town.infer("m", 1000)
        await arrived.wait()
        await asyncio.gather(town.relays["b"].close(), town.http["b"].kill())
        assert (await call).model_version == "c"
        assert {(await town.infer("m", size)).model_version for size in (0, 1000, 100_000)} == {"c"}
        assert (await town.post("m"))[:2] == (200, "c")


@looped
async def test_when_the_picker_dies_envoy_asks_any_server(tmp_path: Path) -> None:
    """Without a picker, requests in flight end well, and Envoy sends new ones to any server.

    A client cannot choose the server with the picker's header.
    """
    async with street(tmp_path) as town:
        gate, arrived = asyncio.Event(), asyncio.Event()

        async def hold(request: Any, context: Any) -> Any:
            arrived.set()
            await gate.wait()
            return await town.workers["b"].echo(request, context)

        town.workers["b"].does["ModelInfer"] = hold
        call = town.infer("m")
        await arrived.wait()
        await town.picker.stop()
        gate.set()
        assert (await call).model_version == "b"
        forged = [(DESTINATION, f"127.0.0.1:{town.relays['b'].port}")]
        answers = [(await town.infer("m", metadata=forged)).model_version for _ in range(20)]
        assert set(answers) == {"a", "b", "c"}
        assert {(await town.post("m"))[0] for _ in range(3)} == {200}


@looped
async def test_an_orderly_end_of_the_picker_costs_no_request(tmp_path: Path) -> None:
    """If the picker ends in order, requests that it has routed are answered, even if Envoy must not go on without a picker."""

    def strict(config: Any) -> None:
        ext_proc(config)["failure_mode_allow"] = False

    async with street(tmp_path, strict) as town:
        gate, arrived = asyncio.Event(), asyncio.Event()

        async def hold(request: Any, context: Any) -> Any:
            arrived.set()
            await gate.wait()
            return await town.workers["b"].echo(request, context)

        town.workers["b"].does["ModelInfer"] = hold
        call = town.infer("m")
        await arrived.wait()
        await town.picker.drain(0)
        await town.picker.stop()
        gate.set()
        assert (await call).model_version == "b"
        assert (await refusal(town.infer("m")))[0] != "OK"


@looped
async def test_the_token_holds_if_envoy_does_not_go_on_without_the_picker(tmp_path: Path) -> None:
    """The picker refuses clients without the token.

    If failure_mode_allow is false, Envoy also refuses them when the picker is dead.
    """
    file = tmp_path / "token"
    file.write_text("sesame")
    file.chmod(0o600)

    def strict(config: Any) -> None:
        ext_proc(config)["failure_mode_allow"] = False

    async with street(tmp_path, strict, file) as town:
        assert (await refusal(town.infer("m")))[0] == "UNAUTHENTICATED"
        assert (await town.post("m"))[0] == 401
        bearer = "Bearer sesame"
        assert (await town.infer("m", metadata=[("authorization", bearer)])).model_version == "b"
        assert "authorization" not in town.workers["b"].metadata["ModelInfer"][0]
        assert (await town.post("m", authorization=bearer))[:2] == (200, "b")
        await town.picker.stop()
        assert (await refusal(town.infer("m")))[0] not in ("OK", "UNAUTHENTICATED")
        assert (await town.post("m"))[0] == 500


@pytest.mark.parametrize(
    ("key", "mode", "named"),
    [
        ("request_header_mode", "SKIP", "request_header_mode: SEND"),
        ("request_body_mode", "NONE", "request_body_mode: STREAMED"),
    ],
)
@looped
async def test_a_filter_that_does_not_show_enough_is_named_to_the_client(
    tmp_path: Path, key: str, mode: str, named: str
) -> None:
    """If Envoy's filter shows too little of a request, the request fails with the setting's name and reaches no server."""

    def hide(config: Any) -> None:
        ext_proc(config)["processing_mode"][key] = mode

    async with street(tmp_path, hide) as town:
        code, text = await refusal(town.infer("m"))
        assert (code, named in text) == ("INTERNAL", True)


@looped
async def test_a_fleet_behind_the_gateway_api_may_send_whole_bodies(tmp_path: Path) -> None:
    """In the mode FULL_DUPLEX_STREAMED, as the Gateway API requires it, bodies of 1 kB to 10 MB arrive unchanged."""

    def duplex(config: Any) -> None:
        ext_proc(config)["processing_mode"] = {
            "request_header_mode": "SEND",
            "response_header_mode": "SEND",
            "request_body_mode": "FULL_DUPLEX_STREAMED",
            "response_body_mode": "FULL_DUPLEX_STREAMED",
            "request_trailer_mode": "SEND",
            "response_trailer_mode": "SEND",
        }

    async with street(tmp_path, duplex) as town:
        for size in (1000, 10_000_000):
            assert (await town.infer("m", size)).model_version == "b"
            status, worker, body = await town.post("m", b"{" + b" " * size + b"}")
            assert (status, worker, len(body)) == (200, "b", size + 2)
        await town.idle()
