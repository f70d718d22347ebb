"""Registrations in flat form, which the native front asks for."""

import gc
import os
import shutil
import tracemalloc
from pathlib import Path

import pytest

from rsrv.wire import frames
from rsrv.wire.frames import HEADER, Kind
from rsrv.wire.socket import Closed
from tests.builders import write_meta
from tests.unit.runtime.conftest import Runtime, answer_to_register
from tests.waiting import wait_until


def test_a_model_is_described_in_flat_form(runtime: Runtime, doubling: Path) -> None:
    """With `flat`, REGISTERED has a document of numbers and names, which is not JSON."""
    greeted = runtime.request_model(model="doubling", bundle=str(doubling), flat=True)

    frame, (fd,) = answer_to_register(greeted)
    document = os.pread(fd, 1 << 20, 0)
    os.close(fd)
    assert frames.read_header(frame)[0] is Kind.REGISTERED
    assert document.startswith(b"FLAT")


def test_an_added_model_takes_few_kilobytes(runtime: Runtime, doubling: Path) -> None:
    """An added model takes few kilobytes, because the runtime keeps nothing that only the build needs.

    Thousands of small models fit.
    """

    def register(name: str) -> None:
        _, (fd,) = answer_to_register(runtime.request_model(model=name, bundle=str(doubling), flat=True))
        os.close(fd)

    for number in range(3):
        register(f"some{number}")
    tracemalloc.start()
    try:
        for number in range(20):
            register(f"more{number}")
        # Memory of the last builds may still be in use for a moment.
        wait_until(lambda: gc.collect() >= 0 and tracemalloc.get_traced_memory()[0] < 20 * 26_000)
    finally:
        tracemalloc.stop()


def test_a_model_that_cannot_be_read_is_rejected_in_flat_form(runtime: Runtime, tmp_path: Path) -> None:
    """With `flat`, REJECTED has the reason, and its count is the reason's length."""
    greeted = runtime.request_model(model="nobody", bundle=str(tmp_path / "nothing"), flat=True)

    frame, _ = answer_to_register(greeted)
    kind, count = frames.read_header(frame)
    assert kind is Kind.REJECTED
    assert count == len(frame) - HEADER.size > 10


def test_what_needs_the_python_front_is_rejected_in_flat_form(
    runtime: Runtime, doubling: Path, tmp_path: Path
) -> None:
    """A bundle with hooks and a meta model are rejected for a flat registration, because its front has no Python.

    The reason says what to do.
    """
    shutil.copytree(doubling, tmp_path / "hooked")
    (tmp_path / "hooked/model.py").write_text("def preprocess(inputs): return inputs\n")
    write_meta(tmp_path / "meta", "def run(inputs, call): return {}\n", ["doubling"])
    for name, calls in [("hooked", {}), ("meta", {"doubling": str(doubling)})]:
        greeted = runtime.request_model(model=name, bundle=str(tmp_path / name), calls=calls, flat=True)

        frame, _ = answer_to_register(greeted)
        assert frames.read_header(frame)[0] is Kind.REJECTED
        assert b"run rsrv-gen again" in bytes(frame)


def test_a_further_connection_has_no_flat_form(runtime: Runtime) -> None:
    """A connection with `key` must not ask for the flat form: this breaks the protocol."""
    with pytest.raises(Closed):
        answer_to_register(runtime.request_model(key="doubling", flat=True))
