"""All gRPC calls through the gateway, except inference."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tritonclient.grpc import service_pb2 as pb

from rsrv.control.grpc_server import ListenError
from rsrv.placement.contract import Routes
from rsrv.renewal import Renewals
from rsrv.settings_fleet import GatewaySection
from rsrv.tokens import TokenError
from rsrv_gateway.connections import CredentialsError, Token, server_credentials
from tests.unit.gateway.proxies import SERVICE, FakeWorker, Handler, House, refusal, refusing, serving, types
from tests.waiting import looped

Code = grpc.StatusCode


def saying(answer: Any) -> Handler:
    async def say(_: Any, __: Any) -> Any:
        return answer

    return say


def ask_all(house: House, method: str, *answers: Handler) -> None:
    """Set the answers of the workers. One answer is used for all workers."""
    for at, worker in enumerate(house.workers):
        worker.does[method] = answers[at % len(answers)]


def asked(house: House, method: str) -> list[str]:
    """Return the workers that received the call."""
    return [worker.name for worker in house.workers if method in worker.got]


def test_the_whole_service() -> None:
    """The gateway has every method of tritonserver's service."""
    service = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]

    async def methods() -> set[str]:
        async with serving(0) as house:
            return {name.rpartition("/")[2] for name in house.proxy.grpc.methods}

    assert {method.name for method in service.methods} <= asyncio.run(methods())


@looped
async def test_the_gateway_lives() -> None:
    """The gateway is live without workers, and ready with a ready worker. The same holds for grpc.health.v1."""
    health: Any = "/grpc.health.v1.Health/Check"
    async with serving(2, {}) as house:
        check = house.client.unary_unary(health, None, None)
        ask_all(house, "ServerReady", saying(pb.ServerReadyResponse(ready=False)))
        assert (await house.call("ServerLive")).live
        assert not (await house.call("ServerReady")).ready

        house.workers[1].does["ServerReady"] = saying(pb.ServerReadyResponse(ready=True))
        assert (await house.call("ServerReady")).ready
        assert await check(b"") == b"\x08\x01"

        await house.apply({}, [])
        assert (await house.call("ServerLive")).live
        assert not (await house.call("ServerReady")).ready
        assert await check(b"") == b"\x08\x02"
        assert (await refusal(house.call("ServerMetadata")))[0] == "UNAVAILABLE"


@looped
async def test_a_ready_model_is_a_ready_gateway() -> None:
    """While a model is ready, the gateway is ready, and asks no worker about it."""
    async with serving(2) as house:
        assert (await house.call("ServerReady")).ready
        assert asked(house, "ServerReady") == []


@looped
async def test_a_worker_that_has_the_model() -> None:
    """A question about a model is sent to a worker that serves it. If the model is unknown there, the next worker is asked."""
    async with serving(3, {"m": Routes(ready=("b", "c"))}) as house:
        for method, request, answer in [
            ("ModelMetadata", pb.ModelMetadataRequest(name="m"), pb.ModelMetadataResponse(name="m")),
            ("ModelConfig", pb.ModelConfigRequest(name="m"), pb.ModelConfigResponse()),
            ("ModelReady", pb.ModelReadyRequest(name="m"), pb.ModelReadyResponse(ready=True)),
        ]:
            ask_all(house, method, saying(answer), refusing(Code.NOT_FOUND, "no"), saying(answer))
            assert await house.call(method, request) == answer
            assert asked(house, method) == ["b", "c"]


@looped
async def test_ready_on_any_worker() -> None:
    """A version of a model is ready if it is ready on one worker."""
    async with serving(2) as house:
        ask_all(
            house,
            "ModelReady",
            saying(pb.ModelReadyResponse(ready=False)),
            saying(pb.ModelReadyResponse(ready=True)),
        )
        assert (await house.call("ModelReady", pb.ModelReadyRequest(name="m", version="2"))).ready

        ask_all(
            house, "ModelReady", saying(pb.ModelReadyResponse(ready=False)), refusing(Code.UNAVAILABLE, "x")
        )
        assert not (await house.call("ModelReady", pb.ModelReadyRequest(name="m"))).ready


@looped
async def test_an_unknown_model() -> None:
    """A question about an unknown model is answered with a worker's refusal, after a probe of all workers."""
    async with serving(2) as house:
        ask_all(
            house, "ModelMetadata", refusing(Code.NOT_FOUND, "Request for unknown model: 'x' is not found")
        )

        assert await refusal(house.call("ModelMetadata", pb.ModelMetadataRequest(name="x"))) == (
            "NOT_FOUND",
            "Request for unknown model: 'x' is not found",
        )
        assert house.brain.refreshes == 1


@looped
async def test_merged_answers() -> None:
    """The repository index is a merge of all workers' indexes."""
    async with serving(2) as house:
        ask_all(
            house,
            "RepositoryIndex",
            *[
                saying(
                    pb.RepositoryIndexResponse(
                        models=[pb.RepositoryIndexResponse.ModelIndex(name=name, version="1", state="READY")]
                    )
                )
                for name in ("m", "n")
            ],
        )

        assert [each.name for each in (await house.call("RepositoryIndex")).models] == ["m", "n"]


@looped
async def test_all_load_a_model() -> None:
    """A model is loaded on all workers, and is known when the call returns. If a worker fails, the error names it."""
    async with serving(2) as house:
        ask_all(house, "RepositoryModelLoad", saying(pb.RepositoryModelLoadResponse()))
        request = pb.RepositoryModelLoadRequest(model_name="m")
        await house.call("RepositoryModelLoad", request)
        assert asked(house, "RepositoryModelLoad") == ["a", "b"]
        assert house.brain.refreshes == 1

        house.workers[1].does["RepositoryModelLoad"] = refusing(Code.INTERNAL, "failed to load 'm'")
        assert await refusal(house.call("RepositoryModelLoad", request)) == (
            "INTERNAL",
            "worker b: failed to load 'm'",
        )


@pytest.mark.parametrize(
    "method",
    ["TraceSetting", "LogSettings"]
    + [
        f"{kind}SharedMemory{verb}"
        for kind in ("System", "Cuda")
        for verb in ("Status", "Register", "Unregister")
    ],
)
@looped
async def test_what_is_a_servers_own(method: str) -> None:
    """Calls about settings and shared memory of one server are UNIMPLEMENTED, and no worker is asked."""
    async with serving(2) as house:
        ask_all(house, method, saying(types(method)[1]()))
        assert await refusal(house.call(method)) == (
            "UNIMPLEMENTED",
            "the gateway serves several servers and does not change their settings; ask a server itself",
        )
        assert asked(house, method) == []


@looped
async def test_metadata_is_forwarded() -> None:
    """Metadata for the restricted APIs of workers reaches all workers."""
    async with serving(2) as house:
        ask_all(house, "RepositoryIndex", saying(pb.RepositoryIndexResponse()))
        await house.call("RepositoryIndex", metadata=(("triton-grpc-protocol-key", "secret"),))

        for worker in house.workers:
            assert worker.metadata["RepositoryIndex"][0]["triton-grpc-protocol-key"] == "secret"


@looped
async def test_a_worker_hangs() -> None:
    """A call to all workers ends within its time limit, even if one worker hangs."""
    async with serving(2, request_timeout_s=0.2) as house:

        async def hang(_: Any, __: Any) -> None:
            await asyncio.Event().wait()

        ask_all(house, "ModelStatistics", saying(pb.ModelStatisticsResponse()), hang)

        assert (await refusal(house.call("ModelStatistics")))[0] == "DEADLINE_EXCEEDED"


@looped
async def test_what_is_no_request() -> None:
    """Bytes that are not a request are refused, and no worker gets them."""
    async with serving(1) as house:
        config = house.client.unary_unary("/inference.GRPCInferenceService/ModelConfig", None, None)

        assert (await refusal(config(b"\x0a\xff")))[0] == "INVALID_ARGUMENT"
        unknown = house.client.unary_unary("/inference.GRPCInferenceService/Unknown", None, None)
        assert (await refusal(unknown(b"")))[0] == "UNIMPLEMENTED"


def test_the_token(tmp_path: Path) -> None:
    """Every call without the token is refused. Workers do not get the token."""
    secret = tmp_path / "token"
    secret.write_text("sesame\n")
    secret.chmod(0o600)
    infer = pb.ModelInferRequest(model_name="m")

    async def run() -> None:
        async with serving(1, token_file=secret) as house:
            for metadata in ((), (("authorization", "Bearer pumpkin"),)):
                for call in (
                    house.call("ServerLive", metadata=metadata),
                    house.call("ModelInfer", infer, metadata=metadata),
                    house.stream(metadata=metadata).read(),
                ):
                    assert (await refusal(call))[0] == "UNAUTHENTICATED"
            assert house.proxy.counts().requests == {("", "", "UNAUTHENTICATED"): 4}
            for scheme in ("Bearer", "bearer"):
                await house.call("ModelInfer", infer, metadata=(("authorization", f"{scheme} sesame"),))
            assert "authorization" not in house.workers[0].metadata["ModelInfer"][0]

    looped(run)()


@pytest.mark.parametrize("contents", ["", "two\nlines", "d\u00fcrfen"])
def test_a_file_without_a_token(tmp_path: Path, contents: str) -> None:
    """If the token file is empty, or has a token that no client could send, the gateway does not start."""
    secret = tmp_path / "token"
    secret.write_text(contents)
    secret.chmod(0o600)

    with pytest.raises(TokenError, match="holds no token"):
        Token(GatewaySection(token_file=secret), Renewals())


def test_tls(tmp_path: Path) -> None:
    """If authorities of clients are set, only clients with their certificates are accepted."""
    ours, others = trustme.CA(), trustme.CA()
    certificate = ours.issue_cert("localhost")
    (tmp_path / "key.pem").write_bytes(certificate.private_key_pem.bytes())
    (tmp_path / "chain.pem").write_bytes(b"".join(each.bytes() for each in certificate.cert_chain_pems))
    (tmp_path / "ca.pem").write_bytes(ours.cert_pem.bytes())

    def credentials(ca: trustme.CA) -> Any:
        mine = ca.issue_cert("client@example.org")
        chain = b"".join(each.bytes() for each in mine.cert_chain_pems)
        return grpc.ssl_channel_credentials(ours.cert_pem.bytes(), mine.private_key_pem.bytes(), chain)

    async def run() -> None:
        files: dict[str, Any] = {
            "tls_certificate": tmp_path / "chain.pem",
            "tls_key": tmp_path / "key.pem",
            "tls_client_ca": tmp_path / "ca.pem",
        }
        async with serving(1, grpc="localhost:0", **files) as house:
            where = f"localhost:{house.proxy.grpc.port}"
            for ca, gets_in in ((ours, True), (others, False)):
                async with grpc.aio.secure_channel(where, credentials(ca)) as channel:
                    live = channel.unary_unary("/inference.GRPCInferenceService/ServerLive", None, None)
                    if gets_in:
                        assert await live(b"") == b"\x08\x01"
                    else:
                        assert (await refusal(live(b"")))[0] == "UNAVAILABLE"

    looped(run)()


def test_workers_use_tls(tmp_path: Path) -> None:
    """Requests are sent only to a worker with a certificate of the right authority. The gateway shows its own certificate."""
    ours, others = trustme.CA(), trustme.CA()
    mine = ours.issue_cert("gateway")
    (tmp_path / "ca.pem").write_bytes(ours.cert_pem.bytes())
    (tmp_path / "key.pem").write_bytes(mine.private_key_pem.bytes())
    (tmp_path / "chain.pem").write_bytes(b"".join(each.bytes() for each in mine.cert_chain_pems))

    def credentials(ca: trustme.CA) -> Any:
        theirs = ca.issue_cert("127.0.0.1")
        pair = (theirs.private_key_pem.bytes(), theirs.cert_chain_pems[0].bytes())
        return grpc.ssl_server_credentials([pair], ours.cert_pem.bytes(), require_client_auth=True)

    async def run() -> None:
        files: dict[str, Any] = {
            "worker_ca": tmp_path / "ca.pem",
            "worker_certificate": tmp_path / "chain.pem",
            "worker_key": tmp_path / "key.pem",
        }
        async with serving(0, **files) as house:
            for name, worker_credentials in (
                ("a", credentials(ours)),
                ("b", credentials(others)),
                ("c", None),
            ):
                worker = FakeWorker(name)
                worker.credentials = worker_credentials
                await worker.start()
                await house.apply({"m": Routes(ready=(name,))}, [worker])
                if name == "a":
                    assert (await house.infer()).model_version == "a"
                else:
                    assert (await refusal(house.infer()))[0] == "UNAVAILABLE"
                await worker.kill()

    looped(run)()


def _issue(folder: Path, authority: trustme.CA, *names: str) -> None:
    """Write a certificate, its key and its authority."""
    issued = authority.issue_cert(*names)
    for name, content in (
        ("cert", b"".join(each.bytes() for each in issued.cert_chain_pems)),
        ("key", issued.private_key_pem.bytes()),
        ("ca", authority.cert_pem.bytes()),
    ):
        (folder / name).write_bytes(content)


@looped
async def test_renewed_certificates_are_used_and_connections_stay(tmp_path: Path) -> None:
    """After a renewal, new connections use the new certificate and the new authority of clients. An open stream continues."""
    old, new = trustme.CA(), trustme.CA()
    _issue(tmp_path, old, "localhost")
    files: dict[str, Any] = {
        "tls_certificate": tmp_path / "cert",
        "tls_key": tmp_path / "key",
        "tls_client_ca": tmp_path / "ca",
    }

    def credentials(ca: trustme.CA) -> Any:
        mine = ca.issue_cert("client@example.org")
        return grpc.ssl_channel_credentials(
            ca.cert_pem.bytes(), mine.private_key_pem.bytes(), mine.cert_chain_pems[0].bytes()
        )

    async def live(ca: trustme.CA, where: str) -> str:
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.secure_channel(where, credentials(ca), options) as channel:
            call = channel.unary_unary(f"{SERVICE}ServerLive", None, None)
            try:
                return "live" if await call(b"") else "not live"
            except grpc.aio.AioRpcError as error:
                return str(error.code().name)

    async with serving(1, grpc="localhost:0", **files) as house:
        where = f"localhost:{house.proxy.grpc.port}"
        async with grpc.aio.secure_channel(where, credentials(old)) as channel:
            stream = House(house.proxy, house.brain, house.workers, channel).stream()
            await stream.write(pb.ModelInferRequest(model_name="m", id="1"))
            assert (await stream.read()).infer_response.id == "1"
            assert (await live(old, where), await live(new, where)) == ("live", "UNAVAILABLE")
            _issue(tmp_path, new, "localhost")
            house.proxy.renewals.check(time.time())
            assert (await live(old, where), await live(new, where)) == ("UNAVAILABLE", "live")
            (tmp_path / "cert").write_text("broken")
            house.proxy.renewals.check(time.time())
            assert await live(new, where) == "live"
            await stream.write(pb.ModelInferRequest(model_name="m", id="2"))
            assert (await stream.read()).infer_response.id == "2"


@looped
async def test_a_renewed_token_replaces_the_old_one(tmp_path: Path) -> None:
    """After a change of the token file, only the new token is accepted. A file without a token changes nothing."""
    secret = tmp_path / "token"
    secret.write_text("old")
    secret.chmod(0o600)
    async with serving(1, token_file=secret) as house:

        async def admitted() -> list[str]:
            tokens = []
            for token in ("old", "new!"):
                with suppress(grpc.aio.AioRpcError):
                    await house.call("ServerLive", metadata=(("authorization", f"Bearer {token}"),))
                    tokens.append(token)
            return tokens

        assert await admitted() == ["old"]
        secret.write_text("new!")
        house.proxy.renewals.check(time.time())
        assert await admitted() == ["new!"]
        secret.write_text("")
        house.proxy.renewals.check(time.time())
        assert await admitted() == ["new!"]


@looped
async def test_workers_get_the_gateways_renewed_certificate(tmp_path: Path) -> None:
    """After a renewal, the gateway connects to workers with its new certificate, and trusts only their new authority."""
    old, new = trustme.CA(), trustme.CA()
    _issue(tmp_path, old, "gateway")
    files: dict[str, Any] = {
        "worker_ca": tmp_path / "ca",
        "worker_certificate": tmp_path / "cert",
        "worker_key": tmp_path / "key",
    }

    async def worker(name: str, ca: trustme.CA) -> FakeWorker:
        theirs = ca.issue_cert("127.0.0.1")
        pair = (theirs.private_key_pem.bytes(), theirs.cert_chain_pems[0].bytes())
        started = FakeWorker(name)
        started.credentials = grpc.ssl_server_credentials(
            [pair], ca.cert_pem.bytes(), require_client_auth=True
        )
        await started.start()
        return started

    first, second = await worker("a", old), await worker("b", new)
    async with serving(0, **files) as house:
        await house.apply({"m": Routes(ready=("a",)), "n": Routes(ready=("b",))}, [first, second])
        assert (await house.infer("m")).model_version == "a"
        assert (await refusal(house.infer("n")))[0] == "UNAVAILABLE"
        _issue(tmp_path, new, "gateway")
        house.proxy.renewals.check(time.time())
        assert (await house.infer("n")).model_version == "b"
        assert (await refusal(house.infer("m")))[0] == "UNAVAILABLE"
        for server in (first, second):
            await server.kill()


@pytest.mark.parametrize("wrong", ["tls_certificate", "tls_key", "tls_client_ca"])
@pytest.mark.parametrize("contents", ["", "not a PEM"])
def test_files_for_tls_that_cannot_be_used(tmp_path: Path, wrong: str, contents: str) -> None:
    """With unusable TLS files, the gateway does not start, and the message names the settings."""
    authority = trustme.CA()
    pair = authority.issue_cert("localhost")
    files = {key: tmp_path / key for key in ("tls_certificate", "tls_key", "tls_client_ca")}
    for path, blob in zip(
        files.values(), (pair.cert_chain_pems[0], pair.private_key_pem, authority.cert_pem), strict=True
    ):
        blob.write_to_path(str(path))
    files[wrong].write_text(contents)

    with pytest.raises(CredentialsError, match=wrong):
        server_credentials(GatewaySection.model_validate(files), Renewals())


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        ({"grpc": "127.0.0.1:99999"}, "gateway.grpc"),
        ({"grpc": "192.0.2.1:8001"}, "gateway.grpc"),
        ({"token_file": "/nowhere"}, "gateway.token_file"),
        ({"tls_certificate": "/nowhere", "tls_key": "/nowhere"}, "gateway.tls_certificate"),
    ],
)
@looped
async def test_it_cannot_listen(settings: dict[str, Any], setting: str) -> None:
    """If the gateway cannot listen at its port, the message names the setting."""
    with pytest.raises((ListenError, CredentialsError, TokenError), match=setting):
        async with serving(0, **settings):
            pass


@looped
async def test_reflection_lists_the_services_and_has_their_messages(tmp_path: Path) -> None:
    """Reflection lists the inference service and its messages for clients without the .proto files.

    If the gateway has a token, reflection needs it.
    """
    secret = tmp_path / "token"
    secret.write_text("secret")
    secret.chmod(0o600)
    for file in (None, secret):
        async with serving(1, token_file=file) as house:
            stub: Any = reflection_pb2_grpc.ServerReflectionStub(house.client)
            questions = [
                reflection_pb2.ServerReflectionRequest(list_services=""),
                reflection_pb2.ServerReflectionRequest(
                    file_containing_symbol="inference.GRPCInferenceService"
                ),
            ]
            metadata = () if file is None else (("authorization", "Bearer secret"),)
            listed, described = [
                answer async for answer in stub.ServerReflectionInfo(questions, metadata=metadata)
            ]
            assert {service.name for service in listed.list_services_response.service} == {
                "inference.GRPCInferenceService",
                "grpc.health.v1.Health",
                "grpc.reflection.v1alpha.ServerReflection",
            }
            files = described.file_descriptor_response.file_descriptor_proto
            assert any(b"ModelInfer" in content for content in files)
            if file is not None:
                # The call writes no question, because gRPC reports a write after the refusal as INTERNAL.
                refused = await stub.ServerReflectionInfo().code()
                assert refused == grpc.StatusCode.UNAUTHENTICATED
