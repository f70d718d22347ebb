"""The spare: a process that has imported everything, and becomes the next runtime when the runtime ends.

The spare shares the runtime's listening socket. After the runtime's death, connections wait at the socket for the spare, so no
stub starts another runtime. If the runtime has ended to put its device to sleep, the spare waits for a connection, from a stub
with a request or from an operator who wakes the device. A spare normally has no device, because jax makes a CUDA context when a
device is first used. Only a spare that is started for a restart prepares its device (`preparation`).
"""

import gc
import importlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from rsrv.limits import spare_memory
from rsrv.wire import paths
from rsrv.wire.frames import PROTOCOL_VERSION
from rsrv.wire.socket import readable

log = logging.getLogger(__name__)

#: A spare starts after this many seconds without a build.
_QUIET_S = 2.0
#: Seconds between two checks for builds.
_CHECK_S = 0.5
#: Seconds between a spare's end and the start of the next one.
_PAUSE_S = 30.0
#: Bytes of memory that a spare takes.
_BYTES = 90 << 20
#: Niceness of the importing thread. Only this thread becomes nicer, because many users may not lower a process's niceness again.
_NICENESS = 19
#: Beginning of the report of a spare that waits for its turn, in all versions.
_CAN = "speaks version"
#: Report of a spare of this version that waits for its turn.
_READY = f"{_CAN} {PROTOCOL_VERSION}"
#: Maximum seconds until a spare that is to serve soon sends its report.
_IMPORT_S = 60.0
#: Modules of rsrv that import its other modules, and modules that jax and other packages import at their first use.
_MODULES = (
    "rsrv.runtime.loop",
    "rsrv.runtime.jax_device",
    "rsrv_bundle.inspection",
    "jax.dlpack",
    "jax.export",
    "jax.monitoring",
    "jaxlib.mlir.dialects.mhlo",
    "safetensors",
    "scipy.linalg",
)


def has_room() -> bool:
    """Return whether the host has memory for a spare and would not be short of memory afterwards."""
    from rsrv.runtime.host_memory import memory_limit

    return not memory_limit(None).lacking(spare_memory() - _BYTES)


class Successor:
    """The process that becomes the next runtime after a planned end of this runtime.

    With this base class, there is no such process, and a stub starts the next runtime later.
    """

    def prepare(self, done: Callable[[str], object], *, fresh: bool) -> None:
        """Prepare the process, which then waits until this runtime ends.

        `fresh`: True if the process must use the packages that are installed now. `done` is called on any thread, with "" or
        the reason why the process cannot serve.
        """
        done("")

    def withdraw(self) -> None:
        """Undo `prepare`, because this runtime does not end."""

    def stay_back(self, record: bytes) -> None:
        """Make the process wait for a connection before it becomes the runtime. Raises OSError.

        `record` is the last record of this runtime. It is reported while the device sleeps.
        """


class SpareKeeper(Successor):
    """Starts and replaces the spare of this process."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        listener: int,
        directory: Path,
        is_building: Callable[[], bool],
        rest: Callable[[float], None] = time.sleep,
    ) -> None:
        """`command` starts a spare. Options for the spare's descriptors are added to it.

        While `is_building` returns True, `keep` starts no spare. `rest` sleeps for a number of seconds.
        """
        self._directory = directory
        # Open a pidfd now, because another process may have the pid later.
        runtime = os.pidfd_open(os.getpid())
        self._descriptors = listener, runtime
        self._command = [*command, "--listener-fd", str(listener), "--runtime-fd", str(runtime)]
        self._environment = environment
        self._is_building = is_building
        self._rest = rest
        self._lock = threading.Lock()
        self._spare: _Spare | None = None
        #: The spare that was started for a restart, with its device.
        self._prepared: _Spare | None = None
        #: True if `keep` keeps a spare even if no end of this runtime is planned.
        self._keeps = False

    def keep(self) -> None:
        """Keep one spare at all times while this process lives."""
        self._keeps = True
        while True:
            quiet_s = 0.0
            while quiet_s < _QUIET_S:
                self._rest(_CHECK_S)
                quiet_s = 0.0 if self._is_building() else quiet_s + _CHECK_S
            try:
                with self._lock:
                    spare = self._spare = self._spare or self._start(self._command)
                status = spare.process.wait()
                spare.sock.close()
                ended = f"ended with status {status}"
                if not status:
                    return  # The server has ended, so this process also ends.
            except OSError as error:
                spare, ended = None, f"cannot be started: {error}"
            with self._lock:
                if self._spare is not spare:
                    continue  # `_renew` or `withdraw` has replaced or ended the spare.
                self._spare = None
            log.error("the spare runtime %s; starting another in %.0f s", ended, _PAUSE_S)
            self._rest(_PAUSE_S)

    def prepare(self, done: Callable[[str], object], *, fresh: bool) -> None:
        """Prepare a spare on a thread.

        `fresh`: start a new spare, which uses the packages that are installed now and prepares its device. `done` gets "", or
        the reason why the spare cannot serve. After a failure, the previous spare stays.
        """
        action = self._renew if fresh else self._have
        thread = threading.Thread(target=lambda: done(action()), name="renewal", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # The system has no thread left.
            done(f"the next runtime cannot be started: {error}")

    def withdraw(self) -> None:
        """End a spare that was started only for a planned end, because it may hold memory of the device.

        If spares are kept, `keep` starts another one.
        """
        with self._lock:
            if self._spare is None or (self._keeps and self._spare is not self._prepared):
                return
            spare, self._spare = self._spare, None
        spare.process.kill()
        # The loop does not wait for the spare's end, because a GPU's driver takes a while to end a context.
        with suppress(RuntimeError):  # The system has no thread left, so the process stays a zombie.
            threading.Thread(target=spare.end, name="withdrawal", daemon=True).start()

    def stay_back(self, record: bytes) -> None:
        """Make the spare wait for a connection when its turn has come. Raises OSError."""
        paths.write_whole(self._directory / paths.LAST_RECORD, record)
        paths.write_whole(self._directory / paths.ASLEEP, str(time.time()))

    def _have(self) -> str:
        try:
            with self._lock:
                spare = self._spare = self._spare or self._start(self._command)
        except OSError as error:
            return f"the next runtime cannot be started: {error}"
        # Do not wait for the imports, because the spare may finish them while the device sleeps. If they fail, a stub starts a
        # runtime.
        return spare.problem(wait_s=0.0)

    def _renew(self) -> str:
        try:
            fresh = self._start([*self._command, "--soon"])
        except OSError as error:
            return f"the next runtime cannot be started: {error}"
        problem = fresh.problem()
        if problem:
            fresh.end()
            return problem
        with self._lock:
            before, self._spare = self._spare, fresh
            self._prepared = fresh
        # End the previous spare, because otherwise both spares would take this process's place.
        if before is not None:
            before.end()
        return ""

    def _start(self, command: Sequence[str]) -> "_Spare":
        ours, theirs = socket.socketpair()
        try:
            process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                pass_fds=self._descriptors,
                start_new_session=True,
                env=self._environment,
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        return _Spare(process, ours)


class _Spare(NamedTuple):
    """A spare's process, and a socket for its report. The socket's other end is the process's standard input."""

    process: "subprocess.Popen[bytes]"
    sock: socket.socket

    def problem(self, wait_s: float = _IMPORT_S) -> str:
        """Return the reason why the spare cannot serve, once it has imported its modules. "": it can serve.

        `wait_s`: maximum seconds to wait for the imports. 0: return "" if they are not done yet.
        """
        self.sock.settimeout(wait_s)
        try:
            # The spare reports once, but `problem` may be called again, so the report stays in the socket.
            message = self.sock.recv(4096, socket.MSG_PEEK).decode(errors="replace")
        except BlockingIOError:
            return ""
        except OSError as error:
            message = f"it has not imported its modules: {error}"
        if message == _READY:
            return ""
        if message.startswith(_CAN):
            message = f"it {message} of the protocol, but the stubs use version {PROTOCOL_VERSION}: restart tritonserver"
        return f"the next runtime could not serve: {message or 'it ended; the server log may say more'}"

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.sock.close()


def wait_for_turn(
    server: int,
    runtime: int,
    modules: Sequence[str] = _MODULES,
    check: Callable[[], object] = lambda: None,
    *,
    soon: bool = False,
) -> bool:
    """Import everything, and wait until the runtime that started this process ends. Called in the spare.

    `server` and `runtime` are pidfds. `check` raises an exception if this process could not serve. `soon`: True if the runtime
    ends as soon as this process reports that it is ready. Returns False at once if the server ends. This process must then also
    end, without waiting for its threads.
    """
    niceness = 0 if soon else _NICENESS
    prepared, preparing = os.pipe()
    arguments = (modules, check, niceness, preparing)
    # The thread is a daemon, because the server may end while imports and `check` take long.
    preparation = threading.Thread(target=_prepare, args=arguments, name="import", daemon=True)
    preparation.start()
    awaited = {prepared, runtime}
    try:
        while awaited:
            ended = readable([server, *awaited])
            if server in ended:
                return False
            awaited.difference_update(ended)
            if awaited == {prepared} and preparation.native_id is not None:
                # The runtime has ended, so requests wait for the imports. Raise the priority of the importing thread. Not every
                # user may do that.
                with suppress(OSError):
                    nice = os.getpriority(os.PRIO_PROCESS, os.getpid())
                    os.setpriority(os.PRIO_PROCESS, preparation.native_id, nice)
        return True
    finally:
        os.close(prepared)


def wait_for_call(server: int, listener: int) -> bool:
    """Wait for a connection. Return False if the server ends. Called in the spare of a device that sleeps."""
    return server not in readable([server, listener])


def _prepare(modules: Sequence[str], check: Callable[[], object], niceness: int, preparing: int) -> None:
    """Import the modules, call `check`, and report the result to the runtime on standard input. Then close `preparing`."""
    try:
        # A thread may not become less nice than its process.
        niceness = max(niceness, os.getpriority(os.PRIO_PROCESS, 0))
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
        problem = _import(modules)
        try:
            check()
        except Exception as error:  # noqa: BLE001 - reported to the runtime
            problem = problem or str(error)
        with suppress(OSError):  # The runtime has just ended.
            os.write(sys.stdin.fileno(), (problem or _READY).encode()[:4000])
    finally:
        os.close(preparing)


def _import(modules: Sequence[str]) -> str:
    """Import the modules. Return the reason why the first of rsrv's modules cannot be imported, or "".

    Errors of other packages' modules are ignored, because these modules are only imported ahead of their use.
    """
    problem = ""
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - reported to the runtime
            if name.startswith("rsrv"):
                problem = problem or f"{name} cannot be imported: {error}"
    # This makes later collections, after each model's build, skip these modules.
    gc.collect()
    gc.freeze()
    return problem
