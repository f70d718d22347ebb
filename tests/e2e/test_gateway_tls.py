"""TLS on both sides of the gateway, in front of a real server: access needs a certificate and the token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc
import trustme
from tritonclient.utils import InferenceServerException

from local_triton import free_ports
from rsrv.cli import main as cli
from tests.e2e import bundles
from tests.e2e.gateways import lonely_gateway, running_gateway
from tests.e2e.harness import RunningTriton, make_repository, running_triton
from tests.waiting import PATIENCE_S, wait_until

X = np.arange(128, dtype=np.float32).reshape(2, 64)
#: Name of the key without which the worker's Triton does not list its models.
KEY = "admin-key"


@dataclass(frozen=True)
class Files:
    """Files for TLS: a certificate of one authority, which servers and clients use, and a token."""

    ca: Path
    certificate: Path
    key: Path
    token: Path

    def client(self, url: str, **more: Any) -> Any:
        return tritonclient.grpc.InferenceServerClient(url, ssl=True, root_certificates=str(self.ca), **more)

    def own(self) -> Mapping[str, str]:
        return {"private_key": str(self.key), "certificate_chain": str(self.certificate)}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("tls")
    made = Files(*(folder / name for name in ("ca.pem", "chain.pem", "key.pem", "token")))
    authority = trustme.CA()
    pair = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(str(made.ca))
    made.certificate.write_bytes(b"".join(blob.bytes() for blob in pair.cert_chain_pems))
    pair.private_key_pem.write_to_path(str(made.key))
    made.token.write_text("sesame\n")
    made.token.chmod(0o600)
    return made


@dataclass(frozen=True)
class Worker:
    server: RunningTriton
    control: str


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory, files: Files) -> Iterator[Worker]:
    """Start a server. Its gRPC needs mutual TLS, and a key for the repository. Its control service needs mutual TLS and a token."""
    folder = tmp_path_factory.mktemp("worker")
    repository = make_repository(folder, bundles.ensure() / "exact")
    control = f"127.0.0.1:{free_ports(1)[0]}"
    tls = {
        "grpc-use-ssl": "1",
        "grpc-use-ssl-mutual": "1",
        "grpc-server-cert": files.certificate,
        "grpc-server-key": files.key,
        "grpc-root-cert": files.ca,
    }
    env = {
        "RSRV_CONTROL__LISTEN": control,
        "RSRV_CONTROL__TLS_CERTIFICATE": str(files.certificate),
        "RSRV_CONTROL__TLS_KEY": str(files.key),
        "RSRV_CONTROL__TLS_CLIENT_CA": str(files.ca),
        "RSRV_CONTROL__TOKEN_FILE": str(files.token),
    }
    tls["grpc-restricted-protocol"] = f"model-repository:{KEY}={files.token.read_text().strip()}"
    arguments = [f"--{key}={value}" for key, value in tls.items()]
    log = folder / "server.log"
    with running_triton(repository, log, extra_args=arguments, env=env) as server:
        yield Worker(server, control)


def infer(client: Any, **options: Any) -> None:
    tensor = tritonclient.grpc.InferInput("x", list(X.shape), "FP32")
    answer = client.infer("exact", [tensor.set_data_from_numpy(X)], **options).as_numpy("y")
    assert np.array_equal(answer, X @ bundles.exact_kernel())


def test_both_sides(
    tmp_path: Path,
    worker: Worker,
    files: Files,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Clients and operators with the certificate and the token are answered.

    The gateway reads the worker's figures and its restricted repository. Clients need the repository's key to read it through the
    gateway.
    """
    listen = f"127.0.0.1:{free_ports(1)[0]}"
    settings = {
        "tls_certificate": str(files.certificate),
        "tls_key": str(files.key),
        "tls_client_ca": str(files.ca),
        "token_file": str(files.token),
        "worker_ca": str(files.ca),
        "worker_certificate": str(files.certificate),
        "worker_key": str(files.key),
        "worker_token_file": str(files.token),
        "worker_repository_key": KEY,
        "worker_repository_value_file": str(files.token),
        "control_listen": listen,
    }
    where = {
        "host": "127.0.0.1",
        "grpc_port": worker.server.grpc_port,
        "http_port": None,
        "control": worker.control,
    }
    token = {"authorization": "Bearer sesame"}
    with running_gateway(tmp_path, [where], **settings) as gateway:
        url = f"127.0.0.1:{gateway.grpc_port}"
        with files.client(url, **files.own()) as client:
            wait_until(lambda: client.is_model_ready("exact", headers=token), what="the model")
            infer(client, headers=token)
            assert client.get_server_metadata(headers=token).name == "triton"
            with pytest.raises(InferenceServerException, match="restricted"):
                client.get_model_repository_index(headers=token)
            key = {f"triton-grpc-protocol-{KEY}": "sesame"}
            assert client.get_model_repository_index(headers={**token, **key}).models
            with pytest.raises(InferenceServerException, match="UNAUTHENTICATED"):
                infer(client)
        with files.client(url) as stranger, pytest.raises(InferenceServerException, match="UNAVAILABLE"):
            infer(stranger, headers=token)
        with (
            tritonclient.grpc.InferenceServerClient(url) as plain,
            pytest.raises(InferenceServerException, match="UNAVAILABLE"),
        ):
            infer(plain, headers=token)

        wait_until(lambda: any(model.bytes for model in gateway.status().models), what="the worker's figures")
        command = ["gateway", "status", "--server", listen, "--tls-ca", str(files.ca)]
        own = ["--tls-cert", str(files.certificate), "--tls-key", str(files.key)]
        assert cli.main([*command, *own, "--token-file", str(files.token)]) == 0
        assert "exact" in capsys.readouterr().out
        assert cli.main([*command, *own]) != 0
        assert cli.main([*command, "--token-file", str(files.token)]) != 0


def test_renewed_files_are_used_without_a_restart(tmp_path: Path) -> None:
    """A running gateway uses a renewed certificate and a renewed token, and logs this.

    If the next files are broken, it keeps the certificate and the token.
    """
    certificate, key, token = (tmp_path / name for name in ("cert", "key", "token"))
    old, new = trustme.CA(), trustme.CA()

    def issue(authority: trustme.CA, secret: str) -> None:
        issued = authority.issue_cert("127.0.0.1")
        certificate.write_bytes(issued.cert_chain_pems[0].bytes())
        key.write_bytes(issued.private_key_pem.bytes())
        token.write_text(secret)
        token.chmod(0o600)

    def is_live(authority: trustme.CA, secret: str) -> bool:
        credentials = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
        with grpc.secure_channel(url, credentials, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            call = channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
            try:
                return bool(call(b"", metadata=[("authorization", f"Bearer {secret}")], timeout=PATIENCE_S))
            except grpc.RpcError:
                return False

    issue(old, "old")
    own = {"tls_certificate": str(certificate), "tls_key": str(key), "token_file": str(token)}
    with lonely_gateway(tmp_path, **own) as gateway:
        url = f"127.0.0.1:{gateway.grpc_port}"
        wait_until(lambda: is_live(old, "old"), what="the gateway")
        issue(new, "new")
        wait_until(lambda: is_live(new, "new"), what="the renewed files")
        assert not is_live(old, "old")
        wait_until(lambda: "gateway.tls_certificate was renewed, until" in gateway.log_text(), what="the log")
        for file in (certificate, token):
            file.write_text("")
        wait_until(lambda: gateway.get("/metrics")[1].count("renewal_failed{") == 2, what="the metrics")
        wait_until(lambda: gateway.log_text().count("cannot be renewed") == 2, what="the log")
        assert is_live(new, "new")


def test_a_gateway_without_the_key(tmp_path: Path, worker: Worker, files: Files) -> None:
    """Without the key, the gateway serves no model of a worker whose repository is restricted. Its log has the reason."""
    where = {"host": "127.0.0.1", "grpc_port": worker.server.grpc_port, "http_port": None}
    own = {"worker_ca": files.ca, "worker_certificate": files.certificate, "worker_key": files.key}
    with running_gateway(tmp_path, [where], **{key: str(path) for key, path in own.items()}) as gateway:
        wait_until(lambda: "does not list its ready models" in gateway.log_text(), what="the reason")
        assert f"worker_repository_key to {KEY}" in gateway.log_text()
        with (
            tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{gateway.grpc_port}") as client,
            pytest.raises(InferenceServerException, match="exact"),
        ):
            infer(client)


def test_the_server_itself(worker: Worker, files: Files) -> None:
    """The server itself refuses clients without a certificate. Without this, the other tests would prove nothing."""
    credentials = grpc.ssl_channel_credentials(files.ca.read_bytes())
    with grpc.secure_channel(f"127.0.0.1:{worker.server.grpc_port}", credentials) as channel:
        live = channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
        with pytest.raises(grpc.RpcError):
            live(b"", timeout=PATIENCE_S)
