"""Process of one part: it may crash the device, hang, or leave memory behind, and the next part starts afresh."""

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from rsrv.command import put
from rsrv.gpu.report import DeviceFacts, Finding, PartInput, PlannedPart
from rsrv.text import duration

#: seconds for the runtimes of a part that was killed to leave the device
_LEAVE_S = 10.0


def describe(tell: Callable[[DeviceFacts], None], platform: str) -> None:
    from rsrv.runtime.cuda import MemoryShare
    from rsrv.runtime.jax_device import JaxDevice

    device = JaxDevice(platform, memory=MemoryShare(preallocate=False))
    hardware, target = device.hardware, device.target
    tell(DeviceFacts(target.card, hardware.platform, hardware.has_tf32, device.memory_limit, target.versions))


def run_part(tell: Callable[[Finding], None], part: PlannedPart, given: PartInput) -> None:
    if not part.on_device:
        # This process exports bundles, and must leave the device to the runtimes that it starts.
        os.environ["JAX_PLATFORMS"] = "cpu"
    module = import_module(f"rsrv.gpu.{part.module}")
    getattr(module, part.function)(given, tell)


def run(
    folder: Path, limit_s: float, work: Callable[..., None], *arguments: Any
) -> Generator[Any, None, None]:
    """Yield what `work` tells in a process of its own, which is killed after its time, and a finding if it failed."""
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(folder, send, work, *arguments))
    process.start()
    send.close()
    end = time.monotonic() + limit_s
    try:
        while receive.poll(max(0.0, end - time.monotonic())):
            yield receive.recv()
        yield _late(limit_s)
    except EOFError:
        process.join(max(0.0, end - time.monotonic()))
        if process.exitcode is None:
            yield _late(limit_s)
        elif process.exitcode:
            file = folder / "log"
            put(file.read_text(errors="replace")[-4000:] if file.exists() else "", sys.stderr)
            reason = f"ended with status {process.exitcode}; its last lines are above"
            yield Finding("process", "FAIL", reason=reason)
    finally:
        # Also after its own end: if it was killed, its servers and their runtimes are left.
        _end(process, folder)


def _late(limit_s: float) -> Finding:
    return Finding("time", "FAIL", reason=f"did not end within {duration(limit_s)}")


def _end(process: SpawnProcess, folder: Path) -> None:
    """Kill the process with the servers that it started, and wait until its runtimes have left the device."""
    assert process.pid is not None
    with suppress(ProcessLookupError):  # it has no group yet, or nothing of it is left
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()
    # The runtimes see its end, and remove their folders when they end.
    end = time.monotonic() + _LEAVE_S
    while list((folder / "run").glob("*")) and time.monotonic() < end:
        time.sleep(0.1)


def _work(folder: Path, send: "Connection[Any, Any]", work: Callable[..., None], *arguments: Any) -> None:
    # A group of its own, to be killed as a whole.
    os.setsid()
    with (folder / "log").open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ["RSRV_RUNTIME_DIR"] = str(folder / "run")
    try:
        work(send.send, *arguments)
    except Exception as error:  # noqa: BLE001 - it is the finding
        traceback.print_exc()
        send.send(Finding("failed", "FAIL", reason=f"{type(error).__name__}: {error}"))
    # Threads that hang must not keep it.
    with suppress(OSError):
        send.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
