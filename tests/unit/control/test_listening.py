"""Listening for HTTP on IPv4 and IPv6, and the Host headers that are accepted."""

from __future__ import annotations

import asyncio
import socket

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from rsrv.address import Address
from rsrv.listening import KnownHosts, host_of, listen
from tests.waiting import looped


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::"])
@looped
async def test_all_addresses_are_those_of_both_families(host: str) -> None:
    """A host that stands for all addresses accepts clients over IPv4 and over IPv6."""
    server = await listen(asyncio.Protocol, Address(host, 0))
    port = server.sockets[0].getsockname()[1]
    for address in ("127.0.0.1", "::1"):
        _, writer = await asyncio.open_connection(address, port)
        writer.close()
    server.close()


@looped
async def test_one_address_is_that_of_one_family() -> None:
    """A server on 127.0.0.1 has no other address."""
    server = await listen(asyncio.Protocol, Address("127.0.0.1", 0))
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("::1", port)
    server.close()


async def _ok(_: web.Request) -> web.Response:
    return web.Response(text="ok")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8004", 200),
        ("[::1]:8004", 200),
        ("10.1.2.3", 200),
        ("localhost:8004", 200),
        ("LOCALHOST.", 200),
        (socket.gethostname(), 200),
        ("full.example", 200),
        ("listens.example:80", 200),
        ("rsrv:8004", 200),
        ("rsrv.default.svc.cluster.local:8004", 200),
        ("evil.example", 421),
        ("evil.example:8004", 421),
        ("127.0.0.1.evil.example", 421),
        ("[::1].evil.example", 421),
        ("localhost.evil.example:8004", 421),
    ],
)
@looped
async def test_only_known_hosts_are_answered(host: str, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses, names of this machine and names of private networks are accepted as Host. Names of other sites are refused."""
    monkeypatch.setattr(socket, "getfqdn", lambda: "Full.example")
    known = KnownHosts("listens.example:8004", "/healthz")
    app = web.Application(middlewares=[known.middleware])
    app.add_routes([web.get("/", _ok), web.get("/healthz", _ok)])
    async with TestServer(app) as server, ClientSession() as session:
        async with session.get(server.make_url("/"), headers={"Host": host}) as answer:
            assert answer.status == status
        async with session.get(server.make_url("/healthz"), headers={"Host": host}) as answer:
            assert answer.status == 200


def test_a_host_without_its_port() -> None:
    """The name is returned without port and brackets; a malformed Host is returned unchanged."""
    assert [host_of(text) for text in ("a.B:1", "[::1]:2", "[::1]", "", "a:b:c")] == [
        "a.b",
        "::1",
        "::1",
        "",
        "a:b:c",
    ]
