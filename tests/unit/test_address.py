"""Addresses in the form HOST:PORT. Gateway, node and control process parse them in the same way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsrv.address import Address, parse_address


@pytest.mark.parametrize(
    ("text", "address", "again"),
    [
        ("gpu1:8001", Address("gpu1", 8001), "gpu1:8001"),
        ("10.0.0.1:65535", Address("10.0.0.1", 65535), "10.0.0.1:65535"),
        ("[::1]:8001", Address("::1", 8001), "[::1]:8001"),
        ("[fe80::1%eth0]:1", Address("fe80::1%eth0", 1), "[fe80::1%eth0]:1"),
    ],
)
def test_host_and_port_are_taken_apart(text: str, address: Address, again: str) -> None:
    """Parsing removes the brackets around an IPv6 host. Writing the address as text adds them."""
    assert parse_address(text) == address
    assert str(address) == again


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        "a",
        "a:",
        ":8001",
        "8001",
        "a:0",
        "a:65536",
        "a:-1",
        "a:+1",
        "a: 1",
        "a:b",
        "a:1_0",
        "a:\u0661",
        "::1",
        "::1:8001",
        "http://a:8001",
        "a/b:80",
        " a:80",
        "a b:80",
        "a:80\n",
        "]:80",
        "[:80",
        "[]:80",
        "[[::1]]:4",
        "x[::1]:4",
    ],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    """A text that is not an address is refused, and the error quotes it."""
    with pytest.raises(ValueError, match="is not HOST:PORT"):
        parse_address(text)


def test_a_server_may_leave_the_host_or_the_port_open() -> None:
    """The host may be empty and the port may be 0 if the caller allows this."""
    assert parse_address("a:0", any_port=True) == Address("a", 0)
    assert parse_address(":1", any_host=True) == Address("", 1)
    for text in ("1", ":", ":0"):
        with pytest.raises(ValueError, match="is not HOST:PORT"):
            parse_address(text, any_host=True)
    with pytest.raises(ValueError, match="is not HOST:PORT"):
        parse_address("a:0", any_host=True)


@given(st.ip_addresses(), st.integers(1, 65535))
def test_what_is_written_is_read(host: object, port: int) -> None:
    """An IPv4 or IPv6 address is the same after it was written as text and parsed."""
    address = Address(str(host), port)
    assert parse_address(str(address)) == address
