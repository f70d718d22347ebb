"""How clients get in: the address, TLS, and the token."""

import ssl
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import grpc

from rsrv.address import parse_address
from rsrv.control.grpc_server import KEEPALIVE, ListenError
from rsrv.settings_fleet import GatewaySection
from rsrv.tokens import bears, read_token


def server_options(settings: GatewaySection) -> Sequence[tuple[str, int]]:
    return (
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_send_message_length", settings.max_message_bytes),
        ("grpc.so_reuseport", 0),
        *KEEPALIVE,
    )


def open_ports(settings: GatewaySection) -> list[str]:
    """Return the settings of client ports that other machines reach without a token or a client certificate.

    Raises ListenError.
    """
    if settings.token_file is not None or settings.tls_client_ca is not None:
        return []
    found = []
    for key, text in (("gateway.grpc", settings.grpc), ("gateway.http", settings.http)):
        try:
            if text is not None and not parse_address(text, any_host=True, any_port=True).is_loopback:
                found.append(key)
        except ValueError as error:
            raise ListenError(f"{key}: {error}") from None
    return found


def server_credentials(settings: GatewaySection) -> Any:
    """grpc.ServerCredentials, or None without TLS. Raises ListenError."""
    if settings.tls_certificate is None or settings.tls_key is None:
        return None
    pair = (
        _read("tls_key", settings.tls_key),
        _read("tls_certificate", settings.tls_certificate),
    )
    clients = None if settings.tls_client_ca is None else _read("tls_client_ca", settings.tls_client_ca)
    # gRPC only says that it cannot listen, and not even that where a file has no authorities.
    tls_context(settings)
    return grpc.ssl_server_credentials([pair], clients, require_client_auth=clients is not None)


def tls_context(settings: GatewaySection) -> ssl.SSLContext | None:
    """For HTTP; None: without TLS. Raises ListenError."""
    if settings.tls_certificate is None or settings.tls_key is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(settings.tls_certificate.expanduser(), settings.tls_key.expanduser())
        if settings.tls_client_ca is not None:
            context.load_verify_locations(settings.tls_client_ca.expanduser())
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError as error:
        raise ListenError(f"gateway.tls_certificate, tls_key, tls_client_ca: {error}") from None
    return context


class Token:
    """The secret that clients must send, if there is one."""

    def __init__(self, settings: GatewaySection) -> None:
        """Raises ListenError."""
        self._token: bytes | None = None
        if settings.token_file is None:
            return
        try:
            self._token = read_token(settings.token_file, "gateway.token_file")
        except ValueError as error:
            raise ListenError(str(error)) from None

    @property
    def needed(self) -> bool:
        return self._token is not None

    def lets_in(self, headers: Iterable[tuple[str, str | bytes]]) -> bool:
        """`headers` are a request's, with names in lower case."""
        if self._token is None:
            return True
        return bears(next((value for name, value in headers if name == "authorization"), ""), self._token)


def _read(key: str, path: Path) -> bytes:
    try:
        return path.expanduser().read_bytes()
    except OSError as error:
        raise ListenError(f"gateway.{key}: {error}") from None
