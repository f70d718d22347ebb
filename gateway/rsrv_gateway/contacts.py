"""Connections to workers: gRPC channels, with TLS and the token where the settings say so."""

import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from rsrv.control.triton import restriction
from rsrv.settings_fleet import GatewaySection
from rsrv.tokens import read_token

Metadata = tuple[tuple[str, str], ...]

_OPTIONS: Sequence[tuple[str, int]] = (
    # A proxy is for the world outside.
    ("grpc.enable_http_proxy", 0),
    # A worker that comes back is to be found soon.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Else channels to one address share a connection, and closing one that hangs would bring back the same.
    ("grpc.use_local_subchannel_pool", 1),
)


class ContactError(Exception):
    """A file that the settings name cannot be used; the message says which."""


@dataclass(frozen=True, slots=True)
class Control:
    """A worker's control service, and what every call of it takes along."""

    stub: Any
    metadata: Metadata


class Contacts:
    """Opens channels; the files are read once. Raises ContactError."""

    def __init__(self, section: GatewaySection) -> None:
        ca, certificate, key = (
            None if path is None else _read(name, path)
            for name, path in (
                ("worker_ca", section.worker_ca),
                ("worker_certificate", section.worker_certificate),
                ("worker_key", section.worker_key),
            )
        )
        # gRPC would say nothing of files that it cannot use, and take public authorities where there are none in one.
        tls_context(section)
        # It wants the pair in this order.
        self._credentials = None if ca is None else grpc.ssl_channel_credentials(ca, key, certificate)
        token = section.worker_token_file
        #: of calls to control services
        self.metadata: Metadata = ()
        if token is not None:
            secret = _read("worker_token_file", token).decode("utf-8", "replace").strip()
            if not (secret and secret.isascii() and secret.isprintable()):
                raise ContactError(f"gateway.worker_token_file: {token} holds no token: one line of ASCII")
            self.metadata = (("authorization", f"Bearer {secret}"),)
        #: of what only operators may ask of the workers' Tritons; a client's calls go without
        self.repository_metadata: Metadata = ()
        if section.worker_repository_key is not None and section.worker_repository_value_file is not None:
            try:
                value = read_token(
                    section.worker_repository_value_file, "gateway.worker_repository_value_file"
                ).decode()
            except ValueError as error:
                raise ContactError(str(error)) from None
            self.repository_metadata = (restriction(section.worker_repository_key, value),)
        self._options = [
            *_OPTIONS,
            ("grpc.max_receive_message_length", section.max_message_bytes),
            ("grpc.max_send_message_length", section.max_message_bytes),
        ]

    def open(self, address: str, *options: tuple[str, int]) -> Any:
        """A channel of grpc.aio, with more of gRPC's options. A Unix socket is of this machine and needs no TLS."""
        all_options = [*self._options, *options]
        if self._credentials is None or address.startswith("unix:"):
            return grpc.aio.insecure_channel(address, all_options)
        return grpc.aio.secure_channel(address, self._credentials, all_options)


def tls_context(section: GatewaySection) -> ssl.SSLContext | None:
    """For HTTP; None: without TLS. Raises ContactError."""
    if section.worker_ca is None:
        return None
    try:
        context = ssl.create_default_context(cafile=section.worker_ca.expanduser())
        if section.worker_certificate is not None and section.worker_key is not None:
            context.load_cert_chain(section.worker_certificate.expanduser(), section.worker_key.expanduser())
    except OSError as error:
        raise ContactError(f"gateway.worker_ca, worker_certificate, worker_key: {error}") from None
    return context


def _read(key: str, path: Path) -> bytes:
    try:
        return path.expanduser().read_bytes()
    except OSError as error:
        raise ContactError(f"gateway.{key}: {error}") from None
