"""Process of one part. Each part has a new process, because a part may crash the device, hang, or leave memory behind."""

import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import suppress
from importlib import import_module, metadata
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rsrv.command import put
from rsrv.gpu.report import DeviceFacts, Finding, PartInput, PlannedPart
from rsrv.text import duration

#: Maximum number of seconds to wait until the runtimes of a killed part have ended.
_LEAVE_S = 10.0
#: Title of the finding about all checks that have no verdict when the time of a part is over.
LATE = "the rest"
#: If a finding is FAIL or NOT RUN, this many characters from the end of the part's output are printed.
_LOG_CHARACTERS = 4000


def without_settings() -> dict[str, str]:
    """Return the environment without a server's settings, which would override the settings of a part."""
    return {key: value for key, value in os.environ.items() if not ("__" in key and key.startswith("RSRV_"))}


def describe(tell: Callable[[DeviceFacts], None], device_platform: str) -> None:
    from rsrv.runtime.cuda import MemoryShare
    from rsrv.runtime.jax_device import JaxDevice

    device = JaxDevice(device_platform, memory=MemoryShare(preallocate=False))
    hardware, target = device.hardware, device.target
    versions = [f"rsrv {metadata.version('rsrv')}", f"Python {platform.python_version()}", target.versions]
    if hardware.platform == "cuda":
        versions.insert(0, f"driver {_driver_version()}")
    name = target.card if hardware.platform == "cuda" else f"CPU, {os.cpu_count()} cores"
    tell(DeviceFacts(name, hardware.platform, hardware.has_tf32, device.memory_limit, ", ".join(versions)))


def _driver_version() -> str:
    import pynvml

    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError as error:
        return f"unknown ({error})"


def run_part(tell: Callable[[Finding], None], part: PlannedPart, part_input: PartInput) -> None:
    if not part.on_device:
        # This process exports bundles, and must leave the device to the runtimes that it starts.
        os.environ["JAX_PLATFORMS"] = "cpu"
    module = import_module(f"rsrv.gpu.{part.module}")
    getattr(module, part.function)(part_input, tell)


def run(
    folder: Path, limit_s: float, work: Callable[..., None], *arguments: Any
) -> Generator[Any, None, None]:
    """Run `work` in a separate process, and yield each value that it passes to `tell`. Kill the process after `limit_s` seconds.

    If `work` fails, also yield a finding about that.
    """
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    # Use a folder in /tmp instead of `folder`, because a socket's path is limited to 107 characters.
    with TemporaryDirectory(prefix="rsrv-", dir="/tmp", ignore_cleanup_errors=True) as sockets:
        process = context.Process(target=_work, args=(folder, sockets, send, work, *arguments))
        process.start()
        send.close()
        end = time.monotonic() + limit_s
        complete = True
        try:
            while receive.poll(max(0.0, end - time.monotonic())):
                message = receive.recv()
                complete &= not isinstance(message, Finding) or message.verdict in ("PASS", "MEASURED")
                yield message
            yield _late(limit_s)
        except EOFError:
            process.join(max(0.0, end - time.monotonic()))
            if process.exitcode is None:
                yield _late(limit_s)
            elif process.exitcode:
                complete = False
                reason = f"ended with status {process.exitcode}; its last lines are on stderr"
                yield Finding("process", "FAIL", reason=reason)
        finally:
            # Call `_end` even if the process has already ended. If the process was killed, its servers and their runtimes
            # still run.
            _end(process, Path(sockets))
            if not complete and (log := folder / "log").exists():
                put(log.read_text(errors="replace")[-_LOG_CHARACTERS:], sys.stderr)


def _late(limit_s: float) -> Finding:
    return Finding(LATE, "NOT RUN", reason=f"did not end within {duration(limit_s)}: raise --minutes")


def _end(process: SpawnProcess, sockets: Path) -> None:
    """Kill the process and the servers that it started, and wait until the servers' runtimes have ended."""
    assert process.pid is not None
    with suppress(ProcessLookupError):  # The process has no group yet, or all of the group has ended.
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()
    # The runtimes notice the server's end, and then end. A runtime removes its folder when it ends.
    end = time.monotonic() + _LEAVE_S
    while list(sockets.glob("*")) and time.monotonic() < end:
        time.sleep(0.1)


def _work(
    folder: Path, sockets: str, send: "Connection[Any, Any]", work: Callable[..., None], *arguments: Any
) -> None:
    # Begin a new process group, so that this process and its servers can be killed together.
    os.setsid()
    threading.Thread(target=_end_with_parent, args=(folder.parent, sockets), daemon=True).start()
    with (folder / "log").open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ["RSRV_RUNTIME_DIR"] = sockets
    try:
        work(send.send, *arguments)
    except Exception as error:  # noqa: BLE001 - any error becomes a finding
        traceback.print_exc()
        send.send(Finding("failed", "FAIL", reason=f"{type(error).__name__}: {error}"))
    # End at once, because threads that hang would delay an orderly exit.
    with suppress(OSError):
        send.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _end_with_parent(*folders: Path | str) -> None:
    """Wait for the end of the command. Then kill this process and its servers, and remove the folders."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    subprocess.Popen(["rm", "-rf", *map(str, folders)], start_new_session=True)
    os.killpg(0, signal.SIGKILL)
