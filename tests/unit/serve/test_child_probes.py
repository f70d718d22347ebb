"""The lines about a worker that starts; time is a number."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest

from rsrv.address import Address
from rsrv.serve.child_probes import listens, log_progress, look
from rsrv.serve.devices import WorkerDevice
from rsrv.serve.plan import ChildSpec, NodeWorker, Ports

HERE = Address("127.0.0.1", 1)
WORKER = NodeWorker(
    ChildSpec("worker0", (), {}), WorkerDevice("cpu", ""), Ports(HERE, HERE, HERE), Path("models")
)


def told(ready: Sequence[int], of: int, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the lines for so many ready models second by second; the server is ready in the last."""
    now = 0.0

    async def rest(seconds: float) -> None:
        nonlocal now
        now += seconds

    async def count(pid: int, repository: Path) -> tuple[int, int]:
        assert (pid, repository) == (17, WORKER.repository)
        return ready[int(now) - 1], of

    async def serves(address: Address) -> bool:
        return int(now) == len(ready)

    with caplog.at_level(logging.INFO, "rsrv.node"):
        asyncio.run(log_progress(WORKER, 17, ready=count, serves=serves, rest=rest, clock=lambda: now))
    return [record.getMessage() for record in caplog.records]


def test_a_line_for_each_second_with_more_models(caplog: pytest.LogCaptureFixture) -> None:
    """Each second with more ready models has a line, and the end has one without the failed models."""
    assert told([0, 2, 2, 5, 5, 5], 6, caplog) == [
        "worker0: 2 of 6 models are ready (2.0 s)",
        "worker0: 5 of 6 models are ready (4.0 s)",
        "worker0 serves: 5 of 6 models are ready (6.0 s)",
    ]


def test_a_worker_without_models_has_no_start(caplog: pytest.LogCaptureFixture) -> None:
    """A worker without models has no start; it is started again when there are some."""
    assert told([0, 0], 0, caplog) == []


def test_without_a_runtime_none_is_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a runtime no model is ready; the total is the number of the repository's directories."""
    monkeypatch.setenv("RSRV_RUNTIME_DIR", str(tmp_path / "nobody"))
    for name in "ab":
        (tmp_path / "models" / name).mkdir(parents=True)
    (tmp_path / "models" / "rsrv.yaml").touch()

    async def scenario() -> None:
        assert await look(17, tmp_path / "models") == (0, 2)
        assert await look(17, tmp_path / "none") == (0, 0)

    asyncio.run(scenario())


def test_a_listening_port_serves() -> None:
    """A port that accepts connections serves; a closed one belongs to a server that starts or ends."""

    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as sock:
            address = Address("127.0.0.1", sock.getsockname()[1])
            assert await listens(address)
        assert not await listens(address)

    asyncio.run(scenario())
