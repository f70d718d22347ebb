"""The real loop in a process without Triton, for figures of the runtime alone. It uses the GPU, or the CPU if there is no GPU."""

import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rsrv.runtime.device_executables import ExecutableSources
from rsrv.runtime.jax_device import JaxDevice
from rsrv.runtime.loop import Loop, ServerProcess
from rsrv.settings import load_settings
from rsrv.wire.paths import SOCKET, runtime_directory
from rsrv.wire.socket import listen
from tests.bench.places import WORK


@contextmanager
def bare_runtime() -> Iterator[tuple[Path, int]]:
    """Start a runtime that treats this process as its server. Yield the runtime's socket and pid."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["RSRV_RUNTIME_DIR"] = folder
        directory = runtime_directory(os.getpid(), "0")
        directory.mkdir(mode=0o700, parents=True)
        path = directory / SOCKET
        process = multiprocessing.get_context("spawn").Process(target=_serve, args=(path,), daemon=True)
        process.start()
        try:
            while not path.exists():
                time.sleep(0.05)
            assert process.pid is not None
            yield path, process.pid
        finally:
            process.kill()
            process.join()


def _serve(path: Path) -> None:
    settings = load_settings()
    platform, sources = settings.runtime.platform, ExecutableSources(WORK / "xla")
    server = ServerProcess(os.getppid())
    Loop(listen(path), server, settings, lambda: JaxDevice(platform, sources)).run()
