"""Fixtures with the fake cards, and bundles to execute on them."""

from __future__ import annotations

import os
import signal
import socket
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rsrv.stub.engine import Engine
from rsrv.stub.session import Launcher
from rsrv.wire import paths
from rsrv.wire.socket import connect
from tests.gpu import install
from tests.gpu.fake_gpu import INSTALLED, ROOT, FakeGpu
from tests.unit.runtime.conftest import export_doubling
from tests.unit.runtime.metas import engine_of


@pytest.fixture(autouse=True)
def _installed() -> None:
    file = INSTALLED / install.DIGEST
    if not file.exists():
        pytest.skip("there is no fake card; `make test-gpu` installs it")
    assert file.read_text() == install.digest(), (
        "the fake driver is of other sources; `make test-gpu` makes it again"
    )


@pytest.fixture(autouse=True)
def _own_servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep the servers of this test separate from those of other tests, whose cards have the same names."""
    # The folder is not in tmp_path, because a socket's path may have at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="rsrv-test-", ignore_cleanup_errors=True) as home:
        monkeypatch.setenv("RSRV_RUNTIME_DIR", home)
        # This variable overrides a test's settings. With it, all tests of `make test-gpu` would share one cache.
        monkeypatch.delenv("RSRV_RUNTIME__COMPILATION_CACHE_DIR", raising=False)
        yield


@pytest.fixture
def gpu(tmp_path: Path) -> FakeGpu:
    """One card of 80 GiB. Copies and kernels on it take no time."""
    return FakeGpu(tmp_path)


@pytest.fixture(scope="session")
def doubling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_doubling(tmp_path_factory.mktemp("bundles") / "doubling", w=[1, 1, 1])


StartServed = Callable[..., Engine]


@pytest.fixture
def serve(gpu: FakeGpu, tmp_path: Path) -> Iterator[StartServed]:
    """Return a function that starts a stub's engine for a bundle. The first call starts a real runtime process on the card."""
    settings = tmp_path / "rsrv.yaml"
    launcher = Launcher(os.getpid(), "0", settings, ROOT, {**os.environ, **gpu.environment})
    started: list[Engine] = []

    def start(bundle: Path, name: str, runtime: str = "{platform: cuda}", **options: Any) -> Engine:
        settings.write_text(f"control: {{enabled: false}}\nruntime: {runtime}\n")
        started.append(engine_of(launcher.open, bundle, name, **options))
        return started[-1]

    yield start
    for engine in started:
        engine.close()
    end_runtime(launcher)


def end_runtime(launcher: Launcher) -> None:
    """Kill the runtime, and remove its directory, as at the end of a server."""
    directory = paths.runtime_directory(launcher.server_pid, launcher.device)
    with suppress(OSError):
        with connect(directory / paths.SOCKET) as sock:
            pid, _, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        os.kill(pid, signal.SIGKILL)
    paths.remove(directory)
