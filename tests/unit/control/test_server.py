"""The listeners of the services, and the protection of their ports."""

import asyncio
import os
import re
import stat
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from rsrv.control.grpc_server import ListenError, listen
from rsrv.control.v1 import control_pb2 as pb
from rsrv.control.v1 import control_pb2_grpc
from rsrv.renewal import Renewals
from rsrv.settings import ControlSection
from tests.unit.control.peers import entry, served
from tests.unit.gateway import http2
from tests.waiting import looped

SECRET = "correct-horse"


@pytest.fixture
def token(tmp_path: Path) -> Path:
    """Return a file with a token."""
    path = tmp_path / "token"
    path.write_text(SECRET + "\n")
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def tls(tmp_path: Path, authority: trustme.CA) -> dict[str, Path]:
    """Return settings for TLS."""
    pair = authority.issue_cert("localhost")
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    certificate.write_bytes(b"".join(blob.bytes() for blob in pair.cert_chain_pems))
    key.write_bytes(pair.private_key_pem.bytes())
    return {"tls_certificate": certificate, "tls_key": key}


@asynccontextmanager
async def listening(tmp_path: Path, **settings: Any) -> AsyncIterator[str]:
    """Yield the address of a local port at which the services listen."""
    renewals = settings.pop("renewals", None)
    async with served(tmp_path, models=["a"]) as server:
        section = ControlSection(listen="localhost:0", **settings)
        listener, port = await listen(section, server.service, server.health, renewals=renewals)
        try:
            yield f"localhost:{port}"
        finally:
            await listener.stop(0)


async def pid(channel: Any, token: str | None = None) -> int:
    """Return the runtime's pid from the status."""
    async with channel:
        status = await control_pb2_grpc.ControlStub(channel).GetStatus(
            pb.GetStatusRequest(), metadata=bearing(token)
        )
        return int(status.devices[0].record.pid)


def bearing(token: str | None) -> tuple[tuple[str, str], ...]:
    return () if token is None else (("authorization", token),)


async def answered(channel: Any, token: str | None = None) -> grpc.StatusCode:
    """Return the status code with which a call ends."""
    try:
        await pid(channel, token)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def secure(address: str, *pems: bytes | None) -> Any:
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(*pems))


@looped
async def test_the_unix_socket_is_of_this_user_only(tmp_path: Path) -> None:
    """The Unix socket belongs to the user and has mode 0600."""
    async with served(tmp_path) as server:
        status = server.socket.stat()

        assert stat.S_ISSOCK(status.st_mode)
        assert (stat.S_IMODE(status.st_mode), status.st_uid) == (0o600, os.getuid())


@looped
async def test_a_socket_that_a_dead_process_left_is_replaced(tmp_path: Path) -> None:
    """A socket file that a dead process left is replaced."""
    (tmp_path / "control.sock").write_text("left")
    async with served(tmp_path) as server:
        await server.control.GetStatus(pb.GetStatusRequest())


@looped
async def test_reflection_lists_the_services_and_has_their_messages(tmp_path: Path) -> None:
    """Reflection lists the services and their messages, as grpcurl asks."""
    async with (
        served(tmp_path) as server,
        grpc.aio.insecure_channel(f"unix:{server.socket}") as channel,
    ):
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        requests = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol="rsrv.control.v1.Control"),
        ]

        listed, described = [answer async for answer in stub.ServerReflectionInfo(requests)]

        assert {service.name for service in listed.list_services_response.service} == {
            "rsrv.control.v1.Control",
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
        }
        file = FileDescriptorProto.FromString(described.file_descriptor_response.file_descriptor_proto[0])
        assert "WatchState" in {method.name for method in file.service[0].method}


@looped
async def test_large_requests_are_refused(tmp_path: Path) -> None:
    """A request of two megabytes is refused with RESOURCE_EXHAUSTED."""
    async with served(tmp_path) as server:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await server.control.GetHistory(pb.GetHistoryRequest(model="a" * 2_000_000))
        assert failed.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@looped
async def test_a_token_lets_in(tmp_path: Path, token: Path) -> None:
    """Every service accepts the right token, and refuses a wrong, missing or malformed token."""
    async with listening(tmp_path, token_file=token) as address:
        for right in (f"Bearer {SECRET}", f"bearer {SECRET}"):
            assert await pid(grpc.aio.insecure_channel(address), right) == 4711
        for wrong in (
            None,
            "Bearer wrong",
            SECRET,
            f"Basic {SECRET}",
            f"bearer {SECRET.upper()}",
            f"Bearer {SECRET}x",
            "Bearer ",
            "",
        ):
            assert (
                await answered(grpc.aio.insecure_channel(address), wrong) is grpc.StatusCode.UNAUTHENTICATED
            )
        async with grpc.aio.insecure_channel(address) as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)
            control: Any = control_pb2_grpc.ControlStub(channel)
            for call in (
                health.Check(health_pb2.HealthCheckRequest()),
                control.WatchState(pb.WatchStateRequest()).read(),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as failed:
                    await call
                assert failed.value.code() is grpc.StatusCode.UNAUTHENTICATED


@looped
async def test_a_call_without_token_and_request_is_refused(tmp_path: Path, token: Path) -> None:
    """A call without a token ends at once, although its request never arrives."""
    async with (
        listening(tmp_path, token_file=token) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        # A stream, so that the call begins without a request.
        call: Any = channel.stream_unary("/rsrv.control.v1.Control/GetStatus")()
        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED


@looped
async def test_the_token_is_in_no_log(tmp_path: Path, token: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Neither the right token nor a wrong one appears in the log."""
    with caplog.at_level("DEBUG"):
        async with listening(tmp_path, token_file=token) as address:
            await pid(grpc.aio.insecure_channel(address), f"Bearer {SECRET}")
            wrong = await answered(grpc.aio.insecure_channel(address), "Bearer almost-right")
    assert wrong is grpc.StatusCode.UNAUTHENTICATED
    assert SECRET not in caplog.text
    assert "almost-right" not in caplog.text
    assert "with a token" in caplog.text


async def settled(address: str, secret: str | None = None) -> grpc.StatusCode:
    """Repeat a call until no dying server answers or cancels it, and return the status code."""
    dying = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    while (code := await answered(grpc.aio.insecure_channel(address), secret)) in dying:
        pass
    return code


@pytest.mark.parametrize("local", [True, False])
@looped
async def test_a_method_whose_name_is_no_text(tmp_path: Path, token: Path, local: bool) -> None:
    """A method name that is not UTF-8 ends gRPC's server. A new server replaces it, and existing watches continue."""
    section = ControlSection(listen="127.0.0.1:0", token_file=token)
    async with served(tmp_path, models=["a"]) as server:
        listener, port = await listen(section, server.service, server.health)
        where: Path | int = server.socket if local else port
        address = f"unix:{server.socket}" if local else f"127.0.0.1:{port}"
        secret = None if local else f"Bearer {SECRET}"
        async with grpc.aio.insecure_channel(address) as channel:
            stub: Any = control_pb2_grpc.ControlStub(channel)
            watch = stub.WatchState(pb.WatchStateRequest(), metadata=bearing(secret))
            assert (await watch.read()).HasField("snapshot")
            for _ in range(2):
                await http2.status(where, b"/rsrv.control.v1.Control/\xff")
                assert await settled(address, secret) is grpc.StatusCode.OK
                if not local:
                    assert await settled(address) is grpc.StatusCode.UNAUTHENTICATED
            if local:
                assert stat.S_IMODE(server.socket.stat().st_mode) == 0o600
            server.runtime.change("b@1", entry("b"))
            assert (await watch.read()).change.key == "b@1"
        await listener.stop(0)


@pytest.mark.parametrize("hangs_up", [True, False])
@looped
async def test_a_server_that_has_died_is_stopped(tmp_path: Path, token: Path, hangs_up: bool) -> None:
    """A dead server can be stopped while its last call ends, and by two calls of `stop` at a time.

    gRPC's own `stop` may crash the process in these cases.
    """
    section = ControlSection(listen="127.0.0.1:0", token_file=token)
    secret = f"Bearer {SECRET}"
    async with served(tmp_path, models=["a"]) as server:
        listener, port = await listen(section, server.service, server.health)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub: Any = control_pb2_grpc.ControlStub(channel)
            watch = stub.WatchState(pb.WatchStateRequest(), metadata=bearing(secret))
            assert (await watch.read()).HasField("snapshot")
            await http2.status(port, b"/rsrv.control.v1.Control/\xff")
            assert await settled(f"127.0.0.1:{port}", secret) is grpc.StatusCode.OK
            server.runtime.change("b@1", entry("b"))
            # The watch is the dead server's last call. It ends when the client closes its channel, or else by `stop`.
            assert (await watch.read()).change.key == "b@1"
            if not hangs_up:
                # With two calls of `stop`, the shorter time limit applies.
                await asyncio.gather(listener.stop(20), listener.stop(0))
                assert await watch.code() is not grpc.StatusCode.OK
        await listener.stop(0)


@looped
async def test_tls_refuses_plain_text_and_clients_of_another_authority(
    tmp_path: Path, tls: dict[str, Path], token: Path, authority: trustme.CA
) -> None:
    """With TLS, clients that trust the authority connect; plain text and others are refused."""
    async with listening(tmp_path, token_file=token, **tls) as address:
        ours, other = authority.cert_pem.bytes(), trustme.CA().cert_pem.bytes()
        right = f"Bearer {SECRET}"
        assert await pid(secure(address, ours), right) == 4711
        assert await answered(secure(address, ours)) is grpc.StatusCode.UNAUTHENTICATED
        assert await answered(grpc.aio.insecure_channel(address), right) is grpc.StatusCode.UNAVAILABLE
        assert await answered(secure(address, other), right) is grpc.StatusCode.UNAVAILABLE


@looped
async def test_client_certificates_are_asked_for(
    tmp_path: Path, tls: dict[str, Path], authority: trustme.CA
) -> None:
    """With a client CA, a client needs a certificate of that authority."""
    clients = tmp_path / "clients.pem"
    authority.cert_pem.write_to_path(clients)
    ours = authority.cert_pem.bytes()

    def pair(of: trustme.CA) -> tuple[bytes, bytes]:
        issued = of.issue_cert("client")
        return issued.private_key_pem.bytes(), issued.cert_chain_pems[0].bytes()

    async with listening(tmp_path, tls_client_ca=clients, **tls) as address:
        assert await pid(secure(address, ours, *pair(authority))) == 4711
        assert await answered(secure(address, ours)) is grpc.StatusCode.UNAVAILABLE
        assert await answered(secure(address, ours, *pair(trustme.CA()))) is grpc.StatusCode.UNAVAILABLE


@looped
async def test_renewed_files_are_used_and_broken_ones_are_not(
    tmp_path: Path, tls: dict[str, Path], token: Path, authority: trustme.CA
) -> None:
    """The next connection and call use a replaced certificate and token. Files that cannot be used change nothing."""
    other, renewals = trustme.CA(), Renewals()
    async with listening(tmp_path, renewals=renewals, token_file=token, **tls) as address:

        async def admitted(ca: trustme.CA, bearer: str) -> grpc.StatusCode:
            options = [("grpc.use_local_subchannel_pool", 1)]
            credentials = grpc.ssl_channel_credentials(ca.cert_pem.bytes())
            return await answered(grpc.aio.secure_channel(address, credentials, options), f"Bearer {bearer}")

        old = token.read_text().strip()
        assert await admitted(authority, old) is grpc.StatusCode.OK
        issued = other.issue_cert("localhost")
        tls["tls_certificate"].write_bytes(issued.cert_chain_pems[0].bytes())
        tls["tls_key"].write_bytes(issued.private_key_pem.bytes())
        token.write_text("another")
        renewals.check(time.time())
        assert await admitted(authority, old) is grpc.StatusCode.UNAVAILABLE
        assert await admitted(other, old) is grpc.StatusCode.UNAUTHENTICATED
        assert await admitted(other, "another") is grpc.StatusCode.OK
        for file in (tls["tls_key"], token):
            file.write_text("")
        renewals.check(time.time())
        assert await admitted(other, "another") is grpc.StatusCode.OK
        assert sum(bool(renewed.problem) for renewed in renewals) == 2


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, "needs tls_client_ca (with tls_certificate and tls_key) or token_file"),
        ({"tls_certificate": "cert.pem", "tls_key": "key.pem"}, "needs tls_client_ca "),
        ({"tls_certificate": "cert.pem"}, "needs both tls_certificate and tls_key"),
        ({"tls_client_ca": "cert.pem"}, "needs both tls_certificate and tls_key"),
        ({"tls_certificate": "missing", "tls_key": "key.pem"}, "control.tls_certificate: "),
        (
            {"tls_certificate": "cert.pem", "tls_key": "empty", "token_file": "token"},
            "tls_certificate, tls_key, tls_client_ca: ",
        ),
        ({"token_file": "missing"}, "control.token_file: "),
        ({"token_file": "public"}, "every user can read"),
        ({"token_file": "token", "listen": "localhost:99999"}, "'localhost:99999' is not HOST:PORT"),
    ],
)
@looped
async def test_a_listener_that_anybody_could_use_is_refused(
    tmp_path: Path, tls: dict[str, Path], token: Path, settings: dict[str, str], text: str
) -> None:
    """A listener without protection, or with incomplete or invalid settings, is refused by name."""
    (tmp_path / "empty").touch(mode=0o600)
    (tmp_path / "public").write_text(SECRET)
    (tmp_path / "public").chmod(0o644)
    paths = {key: str(value if key == "listen" else tmp_path / value) for key, value in settings.items()}
    section = ControlSection.model_validate({"listen": "localhost:0", **paths})

    async with served(tmp_path) as server:
        with pytest.raises(ListenError, match=re.escape(text)) as refused:
            await listen(section, server.service, server.health)
        assert SECRET not in str(refused.value)
