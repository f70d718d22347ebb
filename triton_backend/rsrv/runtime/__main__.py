"""`python -m rsrv.runtime`: the process that owns one device, or the spare for it. Stubs start the first runtime."""

import argparse
import logging
import os
import resource
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rsrv import logs
from rsrv.limits import raise_limit
from rsrv.runtime.allocation import use_one_arena
from rsrv.runtime.jax_environment import check_xla_flags, drop_jax_variables
from rsrv.runtime.spare import wait_for_call, wait_for_turn
from rsrv.wire import paths

if TYPE_CHECKING:
    from rsrv.runtime.preparation import Preparation

log = logging.getLogger("rsrv.runtime")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="rsrv.runtime", description=__doc__)
    parser.add_argument("--directory", type=Path, required=True, help="private directory of this runtime")
    parser.add_argument("--server-pid", type=int, required=True, help="exit when this process ends")
    parser.add_argument("--settings", type=Path, required=True, help="rsrv.yaml")
    parser.add_argument("--device", type=int, default=0, help="position in runtime.devices (default: 0)")
    parser.add_argument("--ready-fd", type=int, help="write 'ready' or the reason of a failure to it")
    parser.add_argument("--listener-fd", type=int, help="run as the spare of the runtime that listens on it")
    parser.add_argument("--runtime-fd", type=int, help="pidfd of that runtime")
    parser.add_argument("--soon", action="store_true", help="the runtime of this spare is about to end")
    options = parser.parse_args(argv)

    # Raise the memory limit that this process has inherited from the stub. Stubs limit themselves because of their hooks, and
    # hooks do not run here.
    raise_limit(resource.RLIMIT_DATA)
    spare = options.listener_fd is not None
    # The stub that starts this process must not be its parent: Triton may unload the stub at any time, and if this
    # process ended first, it would stay a zombie of the stub. A spare is the child of the runtime, which waits for it.
    if not spare:
        if os.fork():
            return 0
        os.setsid()
    use_one_arena()
    # Let another thread write the log, because loads of weights are logged and must not wait for the log.
    logs.setup(aside=True)
    # Warnings are lines of the log, regardless of PYTHONWARNINGS.
    warnings.simplefilter("default")
    if dropped := drop_jax_variables(os.environ):
        log.warning("variables of jax in the environment of tritonserver are ignored: %s", ", ".join(dropped))
    prepared: Preparation | None = None
    supervises = False
    # Environment of the processes that this one starts. The preparation of a spare changes the variables of this process.
    environment = dict(os.environ)
    try:
        server = os.pidfd_open(options.server_pid)
        if spare:
            prepared, supervises = _be_spare(options, server)
        # Import the heavy modules only here, so that an error of the installation is reported to the waiting stub.
        from rsrv.runtime.process import DeviceProcess, read_settings

        # Keep the settings with which a device was prepared, because jax makes a GPU's client once per process.
        settings = read_settings(options) if prepared is None else prepared.settings
        logs.setup(settings.logs.format)
        if not spare:
            check_xla_flags(environment)
        if paths.hold(options.directory) is None:
            # Another runtime serves already: a stub that died has started it, or there were two spares during a restart.
            _say(options.ready_fd, "ready")
            return 0
        process = DeviceProcess(options, server, settings, environment, prepared)
    except Exception as error:
        if not paths.start_time(options.server_pid):
            # The server and its stubs have ended, so no other process removes the directory.
            paths.remove(options.directory)
            return 1
        log.exception("the runtime cannot start")
        with suppress(OSError):
            # `rsrv serve` reads this file, because no control process runs without a runtime.
            paths.write_whole(
                options.directory / paths.FAILURE, f"the runtime did not start: {_explain(error)}"
            )
        _say(options.ready_fd, _explain(error))
        return 1
    (options.directory / paths.FAILURE).unlink(missing_ok=True)
    _say(options.ready_fd, "ready")
    # The interpreter's normal exit would wait for threads, and the stubs would wait for that exit.
    os._exit(process.serve(supervises=supervises))


def _be_spare(options: argparse.Namespace, server: int) -> "tuple[Preparation | None, bool]":
    """Wait until this process must become the runtime. End the process if the server ends.

    Return the preparation or None, and whether this process already supervises the control process.
    """
    prepared: list[Preparation | None] = []

    def get_ready() -> None:
        from rsrv.runtime.preparation import prepare
        from rsrv.runtime.process import read_settings

        settings = read_settings(options)
        if options.soon:
            first = paths.runtime_directory(options.server_pid, "0")
            devices = paths.read_devices(first)
            prepared.append(
                prepare(
                    settings,
                    options.settings.parent,
                    options.directory,
                    devices,
                    options.device,
                    first / paths.COMPILED,
                )
            )

    supervises = False
    turn = wait_for_turn(server, options.runtime_fd, check=get_ready, soon=options.soon)
    if turn and paths.asleep_since(options.directory) is not None:
        from rsrv.runtime.process import read_settings, supervise_control

        # Schedules and `rsrv wake` need the control process, and the runtime that supervised it has ended.
        supervises = True
        supervise_control(options, read_settings(options))
        turn = wait_for_call(server, options.listener_fd)
    if not turn:
        # Remove the host copies here, because perhaps no runtime is left to do so. The interpreter's normal exit would wait
        # for imports.
        from rsrv.runtime.host_memory import remove_left

        remove_left(options.directory.name)
        paths.remove(options.directory)
        os._exit(0)
    os.close(options.runtime_fd)
    return (prepared[0] if prepared else None), supervises


def _explain(error: Exception) -> str:
    """Return the text that explains an error to the waiting stub."""
    if isinstance(error, ImportError):
        return f"{error}, with {sys.executable}. RSRV_RUNTIME_PYTHON must name a Python where 'rsrv[serve]' is installed"
    return f"{type(error).__name__}: {error}" if type(error).__module__ == "builtins" else str(error)


def _say(fd: int | None, text: str) -> None:
    """Report to the waiting stub. Ignore the death of that stub, because other stubs need this process."""
    if fd is None:
        return
    with suppress(BrokenPipeError):
        os.write(fd, text.encode()[:4000])
    os.close(fd)


if __name__ == "__main__":
    sys.exit(main())
