"""All HTTP requests through the gateway, except inference."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import trustme
from aiohttp import ClientError, ClientSession, web

from rsrv.control.grpc_server import ListenError
from rsrv.placement.contract import Routes
from rsrv_gateway.connections import CredentialsError
from rsrv_gateway.http_protocol import Target, UnknownPath, target_of
from tests.unit.gateway.http_proxies import INFER, House, serving
from tests.waiting import looped

READY = "/v2/models/m/ready"
INDEX = "/v2/repository/index"
STATISTICS = "/v2/models/stats"


def ask_all(house: House, path: str, *answers: Any, status: int = 200) -> None:
    """Set the workers' answers for a path. If there are fewer answers than workers, the answers are repeated."""
    for at, worker in enumerate(house.workers):
        worker.does[path] = worker.says(status, answers[at % len(answers)])


def asked(house: House) -> list[tuple[str, str]]:
    """Return the worker and the path of each request that reached a worker."""
    return [(worker.name, got.path) for worker in house.workers for got in worker.got]


@pytest.mark.parametrize(
    ("method", "path", "target"),
    [
        ("GET", "/v2", Target("server")),
        ("GET", "/v2?x=1", Target("server")),
        ("GET", "/v2/models/m", Target("model", "m")),
        ("GET", "/v2/models/%65/versions/2/config", Target("config", "%65")),
        ("GET", "/v2/models/stats", Target("stats")),
        ("GET", "/v2/models/m/versions/1/stats", Target("stats", "m")),
        ("POST", "/v2/models/m/trace/setting", Target("trace/setting", "m")),
        ("POST", "/v2/repository/x/models/m/load", Target("load", "m")),
        ("POST", "/v2/repository/x/index", Target("index")),
        ("GET", "/v2/cudasharedmemory/status", Target("status")),
        ("POST", "/v2/systemsharedmemory/unregister", Target("unregister")),
        ("GET", "/v2/models/m/infer", 405),
        ("HEAD", "/v2/health/live", 405),
        ("POST", "/v2/models/m/ready", 405),
        ("GET", "/v2/", 404),
        ("GET", "/v2/models//ready", 404),
        ("GET", "/v2/models/m#x/ready", 404),
        ("POST", "/v2/models/m#x/infer", 404),
        ("GET", "/v2/models/m/versions/x", 404),
        ("GET", "/metrics", 404),
    ],
)
def test_paths(method: str, path: str, target: Target | int) -> None:
    """Paths are interpreted as tritonserver interprets them."""
    try:
        assert target_of(method, path) == target
    except UnknownPath as error:
        assert error.status == target  # noqa: PT017


@looped
async def test_a_body_that_no_server_can_read_reaches_none() -> None:
    """Requests to the repository API with malformed JSON, or with JSON so deep that it would crash a server, are refused."""
    async with serving(2) as house:
        deep = b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
        for path in (
            "/v2/repository/index",
            "/v2/repository/models/m/load",
            "/v2/repository/models/m/unload",
        ):
            for body in (deep, b"[", b'{"ready": '):
                assert (await house.ask("POST", path, data=body)).status == 400
        assert [worker.got for worker in house.workers] == [[], []]


@looped
async def test_what_there_is_not() -> None:
    """Unknown paths and methods are refused as tritonserver refuses them, and no worker is asked."""
    async with serving(1) as house:
        nothing = await house.ask("GET", "/v2/nonsense")
        wrong = await house.ask("GET", "/v2/models/m/infer")

        assert (nothing.status, nothing.body) == (404, b'{"error":"Not Found"}')
        assert (wrong.status, wrong.body) == (405, b'{"error":"Method Not Allowed"}')
        assert asked(house) == []


@looped
async def test_the_gateway_lives() -> None:
    """The gateway is live without workers, and ready with a ready worker."""
    async with serving(2, {}) as house:
        ask_all(house, "/v2/health/ready", b"", status=400)
        assert (await house.ask("GET", "/v2/health/live")).status == 200
        assert (await house.ask("GET", "/v2/health/ready")).status == 400

        house.workers[1].does["/v2/health/ready"] = house.workers[1].says(200, b"")
        assert (await house.ask("GET", "/v2/health/ready")).status == 200

        await house.apply({}, [])
        assert (await house.ask("GET", "/v2/health/live")).status == 200
        assert (await house.ask("GET", "/v2/health/ready")).status == 503
        assert (await house.ask("GET", "/v2")).status == 503


@looped
async def test_a_ready_model_is_a_ready_gateway() -> None:
    """While a model is ready, the gateway reports itself as ready without asking a worker."""
    async with serving(1) as house:
        assert (await house.ask("GET", "/v2/health/ready")).status == 200
        assert asked(house) == []


@looped
async def test_about_a_model() -> None:
    """A question about a model is sent to a worker that serves it. If the model is unknown there, the next worker is asked."""
    async with serving(3, {"m": Routes(ready=("b", "c"))}) as house:
        _, b, c = house.workers
        b.does["/v2/models/m/config"] = b.says(404, {"error": "unknown"})
        c.does["/v2/models/m/config"] = c.says(200, {"name": "m"})

        assert (await house.ask("GET", "/v2/models/m/config")).json == {"name": "m"}
        assert (await house.ask("GET", "/v2/models/m")).headers["X-Worker"] == "b"


@looped
async def test_a_model_is_ready() -> None:
    """A model is ready if it is ready on any worker. Otherwise, the client gets the answer of one of the workers."""
    async with serving(2) as house:
        ask_all(house, READY, {"error": "not ready"}, status=400)
        assert (await house.ask("GET", READY)).error == (400, "not ready")

        house.workers[1].does[READY] = house.workers[1].says(200, b"")
        assert (await house.ask("GET", READY)).status == 200

        ask_all(house, "/v2/models/new/ready", {"error": "not ready"}, status=400)
        assert (await house.ask("GET", "/v2/models/new/ready")).error == (400, "not ready")
        assert house.brain.refreshes == 1


def statistics(number: int, *sizes: int) -> Any:
    duration = {"count": number, "ns": 10 * number}
    model = {
        "name": "m",
        "version": "1",
        "last_inference": number,
        "inference_count": number,
        "execution_count": 0,
        "inference_stats": {"success": duration, "queue": duration},
        "response_stats": {"0": {"success": duration}},
        "batch_stats": [{"batch_size": size, "compute_infer": duration} for size in sizes],
        "memory_usage": [],
    }
    return {"model_stats": [model]}


@looped
async def test_statistics_are_sums() -> None:
    """Statistics are sums over all workers. Numbers stay numbers, and empty lists stay empty."""
    async with serving(3) as house:
        ask_all(house, STATISTICS, statistics(2**40, 1), statistics(2, 1, 4), statistics(5))
        suspects_worker = house.workers[2]
        suspects_worker.does[STATISTICS] = suspects_worker.says(
            400, {"error": "requested model 'm' is not available"}
        )
        (model,) = (await house.ask("GET", STATISTICS)).json["model_stats"]

        total = 2**40 + 2
        assert (model["name"], model["version"], model["memory_usage"]) == ("m", "1", [])
        assert (model["inference_count"], model["last_inference"], model["execution_count"]) == (
            total,
            2**40,
            0,
        )
        assert model["inference_stats"]["success"] == {"count": total, "ns": 10 * total}
        assert model["inference_stats"]["fail"] == {"count": 0, "ns": 0}
        assert model["response_stats"]["0"]["success"]["count"] == total
        assert [row["batch_size"] for row in model["batch_stats"]] == [1, 4]


@looped
async def test_the_index() -> None:
    """The index shows a model as ready if it is ready on any worker. Dead workers are left out."""
    async with serving(3) as house:
        ready = {"name": "m", "version": "1", "state": "READY"}
        other = {"name": "n", "version": "1", "state": "UNAVAILABLE", "reason": "suspects_worker"}
        ask_all(house, INDEX, [{"name": "m"}, other], [ready])
        await house.workers[2].kill()
        answer = await house.ask("POST", INDEX, data=b'{"ready":false}')

        assert answer.json == [ready, other]
        assert answer.headers["Content-Type"] == "application/json"
        assert house.workers[0].got[0].body == b'{"ready":false}'


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v2/trace/setting"),
        ("POST", "/v2/models/m/trace/setting"),
        ("POST", "/v2/logging"),
        ("GET", "/v2/systemsharedmemory/status"),
        ("GET", "/v2/cudasharedmemory/region/r/status"),
        ("POST", "/v2/systemsharedmemory/region/r/register"),
        ("POST", "/v2/cudasharedmemory/unregister"),
    ],
)
@looped
async def test_what_is_a_servers_own(method: str, path: str) -> None:
    """Requests about settings and shared memory of one server get 501, and no worker is asked."""
    async with serving(2) as house:
        assert (await house.ask(method, path)).error == (
            501,
            "the gateway serves several servers and does not change their settings; ask a server itself",
        )
        assert asked(house) == []


@looped
async def test_what_cannot_be_read() -> None:
    """If a worker's answer is unreadable, the error names the worker."""
    async with serving(2) as house:
        ask_all(house, INDEX, [], b"no JSON")
        status, message = (await house.ask("POST", INDEX)).error

        assert status == 500
        assert message.startswith("worker b: ")


@pytest.mark.parametrize("verb", ["load", "unload"])
@looped
async def test_models_are_loaded_everywhere(verb: str) -> None:
    """Each worker gets the whole load request. After that, all workers are probed."""
    async with serving(2) as house:
        path = f"/v2/repository/models/m/{verb}"
        body = json.dumps({"parameters": {"file:1/model.onnx": "A" * 3_000_000}}).encode()
        ask_all(house, path, b"")
        answer = await house.infer(BytesIO(body), path)

        assert (answer.status, answer.body) == (200, b"")
        assert [worker.got[0].body for worker in house.workers] == [body, body]
        assert house.brain.refreshes == 1

        house.workers[1].does[path] = house.workers[1].says(500, {"error": "failed to load"})
        assert (await house.infer(b"", path)).error == (500, "worker b: failed to load")


@looped
async def test_loading_takes_its_time() -> None:
    """A request to load a model may take longer than `request_timeout_s`."""
    async with serving(1, request_timeout_s=0.05) as house:
        (worker,) = house.workers
        go = asyncio.Event()

        async def slowly(request: Any) -> web.StreamResponse:
            await worker.read(request)
            await go.wait()
            return web.Response()

        worker.does["/v2/repository/models/m/load"] = slowly
        loading = asyncio.ensure_future(house.infer(b"", "/v2/repository/models/m/load"))
        await worker.called.wait()
        worker.holds()
        assert (await house.infer()).status == 504
        go.set()

        assert (await loading).status == 200


@looped
async def test_a_stream_that_stops() -> None:
    """A stream is cut if its worker sends nothing for longer than a request may take."""
    async with serving(1) as house:
        (worker,) = house.workers

        async def stop(request: Any) -> web.StreamResponse:
            house.proxy.http._timeout_s = 0.05
            await worker.read(request)
            response = web.StreamResponse()
            await response.prepare(request)
            await response.write(b"data: 1\n\n")
            await asyncio.Event().wait()
            return response

        worker.does[""] = stop
        with pytest.raises(ClientError):
            await house.infer(path="/v2/models/m/generate_stream")


@looped
async def test_the_token(tmp_path: Path) -> None:
    """A request without the token gets 401, and workers do not see the token."""
    (tmp_path / "token").write_text("secret\n")
    (tmp_path / "token").chmod(0o600)

    async with serving(1, token_file=tmp_path / "token") as house:
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            for method, path in (("GET", "/v2/health/live"), ("POST", "/v2/models/m/infer"), ("GET", "/x")):
                answer = await house.ask(method, path, headers=headers)
                assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
        assert asked(house) == []
        assert house.proxy.counts().requests == {("", "", "UNAUTHENTICATED"): 2}

        for scheme in ("Bearer", "bearer", "Bearer ", "BEARER  "):
            assert (await house.infer(headers={"Authorization": f"{scheme} secret"})).status == 200
        assert "Authorization" not in house.workers[0].got[0].headers


@looped
async def test_a_token_that_is_no_text(tmp_path: Path) -> None:
    """A token of arbitrary bytes is refused as a wrong token."""
    (tmp_path / "token").write_text("secret")
    (tmp_path / "token").chmod(0o600)

    async with serving(1, token_file=tmp_path / "token") as house:
        reader, writer = await asyncio.open_connection("127.0.0.1", house.proxy.http.port)
        writer.write(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 401")
        writer.close()


@looped
async def test_no_token() -> None:
    """If the gateway has no token, the Authorization header is sent to the worker."""
    async with serving(1) as house:
        await house.infer(headers={"Authorization": "Basic x"})
        assert house.workers[0].got[0].headers["Authorization"] == "Basic x"


@looped
async def test_tls(tmp_path: Path) -> None:
    """With TLS on both sides, clients and workers have to show certificates."""
    authority = trustme.CA()
    cert = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(str(tmp_path / "ca"))
    cert.private_key_pem.write_to_path(str(tmp_path / "key"))
    cert.cert_chain_pems[0].write_to_path(str(tmp_path / "cert"))
    worker_tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(tmp_path / "ca"))
    worker_tls.load_cert_chain(tmp_path / "cert", tmp_path / "key")
    worker_tls.verify_mode = ssl.CERT_REQUIRED
    client_tls = ssl.create_default_context(cafile=str(tmp_path / "ca"))
    files: dict[str, Any] = {
        **{f"tls_{what}": tmp_path / name for what, name in (("certificate", "cert"), ("key", "key"))},
        **{f"worker_{what}": tmp_path / name for what, name in (("certificate", "cert"), ("key", "key"))},
        "tls_client_ca": tmp_path / "ca",
        "worker_ca": tmp_path / "ca",
    }

    async with serving(1, worker_tls=worker_tls, client_tls=client_tls, **files) as house:
        with pytest.raises(ClientError):
            await house.infer()
        client_tls.load_cert_chain(tmp_path / "cert", tmp_path / "key")
        assert (await house.infer()).headers["X-Worker"] == "a"


@looped
async def test_renewed_certificates_are_used_and_connections_stay(tmp_path: Path) -> None:
    """After a renewal on both sides, new connections use the new certificates. Open connections are still served."""
    old, new = trustme.CA(), trustme.CA()

    def issue(authority: trustme.CA) -> None:
        issued = authority.issue_cert("127.0.0.1")
        for name, blob in (
            ("ca", authority.cert_pem),
            ("key", issued.private_key_pem),
            ("cert", issued.cert_chain_pems[0]),
        ):
            blob.write_to_path(str(tmp_path / name))

    def client(authority: trustme.CA) -> ssl.SSLContext:
        context = ssl.create_default_context()
        authority.configure_trust(context)
        return context

    issue(old)
    worker_tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    worker_tls.load_cert_chain(tmp_path / "cert", tmp_path / "key")
    files: dict[str, Any] = {
        "tls_certificate": tmp_path / "cert",
        "tls_key": tmp_path / "key",
        "worker_ca": tmp_path / "ca",
    }
    async with serving(1, worker_tls=worker_tls, client_tls=client(old), **files) as house:
        assert (await house.infer()).status == 200

        async def fresh(authority: trustme.CA) -> int:
            async with ClientSession() as session:
                try:
                    async with session.post(house.url(INFER), data=b"{}", ssl=client(authority)) as answer:
                        return answer.status
                except ClientError:
                    return 0

        assert (await fresh(old), await fresh(new)) == (200, 0)
        issue(new)
        worker_tls.load_cert_chain(tmp_path / "cert", tmp_path / "key")
        house.proxy.renewals.check(time.time())
        assert (await fresh(old), await fresh(new)) == (0, 200)
        assert (await house.infer()).status == 200


@looped
async def test_a_renewed_token_replaces_the_old_one(tmp_path: Path) -> None:
    """After a change of the token file, only the new token is accepted."""
    secret = tmp_path / "token"
    secret.write_text("old")
    secret.chmod(0o600)
    async with serving(1, token_file=secret) as house:
        secret.write_text("new!")
        house.proxy.renewals.check(time.time())
        headers = [{"Authorization": f"Bearer {token}"} for token in ("old", "new!")]
        assert [(await house.infer(headers=each)).status for each in headers] == [401, 200]


def test_what_cannot_be_listened_on(tmp_path: Path) -> None:
    """With a wrong address, the gateway does not start, and the error names the setting."""

    async def start(**settings: Any) -> None:
        async with serving(0, **settings):
            pass

    with pytest.raises(ListenError, match=r"gateway\.http: cannot listen on"):
        asyncio.run(start(http="127.0.0.1:x"))
    with pytest.raises(CredentialsError, match=r"gateway\.tls_certificate"):
        asyncio.run(start(tls_certificate=tmp_path / "no", tls_key=tmp_path / "no"))
    with pytest.raises(CredentialsError, match=r"gateway\.worker_ca"):
        asyncio.run(start(worker_ca=tmp_path / "no"))


@looped
async def test_a_port_is_not_shared() -> None:
    """A second gateway cannot listen on the same port."""
    async with serving(1) as house:
        with pytest.raises(ListenError):
            async with serving(1, http=f"127.0.0.1:{house.proxy.http.port}"):
                pass
