"""Registrations in flat form, which the native front asks for."""

import os
from pathlib import Path

import pytest

from rsrv.wire import frames
from rsrv.wire.frames import HEADER, Kind
from rsrv.wire.socket import Closed, send
from tests.unit.runtime.conftest import Runtime


def test_a_model_is_described_in_flat_form(runtime: Runtime, doubling: Path) -> None:
    """REGISTERED comes with a document of numbers and names, without JSON."""
    greeted = runtime.open()
    wanted = {"model": "doubling", "bundle": str(doubling), "flat": True}
    send(greeted.sock, frames.pack_json(Kind.REGISTER, wanted))

    frame, (fd,) = greeted.receiver.receive()
    document = os.pread(fd, 1 << 20, 0)
    os.close(fd)
    assert frames.read_header(frame)[0] is Kind.REGISTERED
    assert document.startswith(b"FLAT")
    greeted.sock.close()


def test_a_model_that_cannot_be_read_is_rejected_in_flat_form(runtime: Runtime, tmp_path: Path) -> None:
    """REJECTED has the reason's length as its count, then the reason."""
    greeted = runtime.open()
    wanted = {"model": "nobody", "bundle": str(tmp_path / "nothing"), "flat": True}
    send(greeted.sock, frames.pack_json(Kind.REGISTER, wanted))

    frame, _ = greeted.receiver.receive()
    kind, count = frames.read_header(frame)
    assert kind is Kind.REJECTED
    assert count == len(frame) - HEADER.size > 10
    greeted.sock.close()


def test_a_meta_model_has_no_flat_form(runtime: Runtime, doubling: Path) -> None:
    """A front that asks for one breaks the protocol."""
    greeted = runtime.open()
    wanted = {"model": "meta", "bundle": str(doubling), "calls": {"a": str(doubling)}, "flat": True}
    send(greeted.sock, frames.pack_json(Kind.REGISTER, wanted))

    with pytest.raises(Closed):
        greeted.receiver.receive()
    greeted.sock.close()
