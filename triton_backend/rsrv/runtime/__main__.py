"""`python -m rsrv.runtime`: the process that owns one device. Stubs start it."""

import argparse
import faulthandler
import gc
import logging
import os
import resource
import select
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from rsrv import logs
from rsrv.limits import raise_limit
from rsrv.runtime.allocation import use_one_arena
from rsrv.runtime.jax_environment import check_xla_flags, drop_jax_variables
from rsrv.runtime.spare import SpareKeeper, has_room, wait_for_call, wait_for_turn
from rsrv.wire import paths
from rsrv.wire.socket import listen, take_over

if TYPE_CHECKING:
    from rsrv.runtime.preparation import Preparation
    from rsrv.settings import Settings

#: a runtime that has found no device for this time ends when a model asks for it again
_WITHOUT_DEVICE_S = 20.0
#: exit status if the watchdog, or a device that is lost or missing, ends the process, and if the loop failed
_EXIT_HUNG, _EXIT_FAILED = 75, 70
#: executables that were compiled ahead are kept for this time
_FORGET_S = 60.0
#: the process ends after this time even if its last lines cannot be logged
_LAST_LINES_S = 10.0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="rsrv.runtime", description=__doc__)
    parser.add_argument("--directory", type=Path, required=True, help="private directory of this runtime")
    parser.add_argument("--server-pid", type=int, required=True, help="leave when this process ends")
    parser.add_argument("--settings", type=Path, required=True, help="rsrv.yaml")
    parser.add_argument("--device", type=int, default=0, help="position in runtime.devices (default: 0)")
    parser.add_argument("--ready-fd", type=int, help="write 'ready' or the reason of a failure here")
    parser.add_argument("--listener-fd", type=int, help="be the spare of the runtime that listens here")
    parser.add_argument("--runtime-fd", type=int, help="pidfd of that runtime")
    parser.add_argument("--soon", action="store_true", help="the runtime of this spare is about to end")
    options = parser.parse_args(argv)

    # A stub limits its memory because of its hooks, which do not run here.
    raise_limit(resource.RLIMIT_DATA)
    spare = options.listener_fd is not None
    # The stub that starts this process must not be its parent: Triton may unload the stub at any time, and if this
    # process ended first, it would stay a zombie of the stub. A spare is the child of the runtime, which waits for it.
    if not spare:
        if os.fork():
            return 0
        os.setsid()
    use_one_arena()
    # Each load of weights is logged, and must not wait for the log to be written.
    logs.setup(aside=True)
    # Warnings are lines of the log, regardless of PYTHONWARNINGS.
    warnings.simplefilter("default")
    log = logging.getLogger("rsrv.runtime")
    if dropped := drop_jax_variables(os.environ):
        log.warning("variables of jax in the environment of tritonserver are ignored: %s", ", ".join(dropped))
    prepared: list[Preparation | None] = []

    def get_ready() -> None:
        settings = _read_settings(options)
        if options.soon:
            from rsrv.runtime.preparation import prepare

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

    try:
        server = os.pidfd_open(options.server_pid)
        supervises = False
        if spare:
            turn = wait_for_turn(server, options.runtime_fd, check=get_ready, soon=options.soon)
            if turn and paths.asleep_since(options.directory) is not None:
                # Schedules and `rsrv wake` need the control process, and the runtime that looked after it has ended.
                supervises = True
                _supervise_control(options, _read_settings(options))
                turn = wait_for_call(server, options.listener_fd)
            if not turn:
                # There may be no runtime that would do so. The interpreter's own exit would wait for imports.
                from rsrv.runtime.host_memory import remove_left

                remove_left(options.directory.name)
                paths.remove(options.directory)
                os._exit(0)
            os.close(options.runtime_fd)
        # Import the heavy modules only here: an error of the installation is reported to the stub that waits.
        from rsrv.runtime.activity import ActivitySlot, Task, Watchdog, describe
        from rsrv.runtime.child_processes import end_orphans
        from rsrv.runtime.crash_history import BlackBox
        from rsrv.runtime.cuda import MemoryShare, memory_fraction
        from rsrv.runtime.device import DeviceError
        from rsrv.runtime.handover import Handover
        from rsrv.runtime.jax_device import ExecutableSources, JaxDevice
        from rsrv.runtime.known_modules import KnownModules
        from rsrv.runtime.loop import Loop, ServerProcess
        from rsrv.runtime.server_devices import (
            CARD_TIMEOUT_S,
            SHARING_FRACTION,
            hold_card,
            keep_devices,
            resolve,
        )
        from rsrv_bundle.inspection import Inspector

        settings = _read_settings(options)
        logs.setup(settings.logs.format)
        environment = dict(os.environ)
        if not spare:
            check_xla_flags(environment)
        if paths.hold(options.directory) is None:
            # Another runtime serves already: a stub that died has started it, or there were two spares during a restart.
            _say(options.ready_fd, "ready")
            return 0
        slept = paths.asleep_since(options.directory) is not None
        (options.directory / paths.ASLEEP).unlink(missing_ok=True)
        base = options.directory.parent
        paths.sweep(base)
        wanted, platform = settings.runtime.devices, settings.runtime.platform
        first = options.directory if options.device == 0 else paths.runtime_directory(options.server_pid, "0")
        devices = keep_devices(first, lambda: resolve(wanted, platform, environment))
        device = devices[options.device]
        if device == "cpu":
            # Without a list, jax decides, and explains why it finds no GPU.
            platform = platform if wanted == "all" else "cpu"
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = device
        hold_card(
            base,
            device,
            f"tritonserver {options.server_pid} ({options.settings.parent})",
            share=memory_fraction(settings.runtime.memory_fraction, environment) <= SHARING_FRACTION,
            # The first attempt has waited: stubs wait for each further one.
            timeout_s=0.0 if (options.directory / paths.FAILURE).exists() else CARD_TIMEOUT_S,
        )
        # The usual limit of 1024 open files is too low for hundreds of models.
        raise_limit(resource.RLIMIT_NOFILE)
        if spare:
            listener = take_over(options.listener_fd)
        else:
            (options.directory / paths.SOCKET).unlink(missing_ok=True)
            listener = listen(options.directory / paths.SOCKET)
        box = BlackBox(options.directory)
        box.catch_signals()
        known = KnownModules(options.directory / paths.MODULES)
    except Exception as error:
        if not paths.start_time(options.server_pid):
            # The server and its stubs have ended meanwhile, so no other process removes the directory.
            paths.remove(options.directory)
            return 1
        log.exception("the runtime cannot start")
        with suppress(OSError):
            # For `rsrv serve`, because no control process runs without a runtime.
            paths.write_whole(
                options.directory / paths.FAILURE, f"the runtime did not start: {_explain(error)}"
            )
        _say(options.ready_fd, _explain(error))
        return 1
    (options.directory / paths.FAILURE).unlink(missing_ok=True)
    _say(options.ready_fd, "ready")

    # The runtime's threads hand over often and hold the interpreter briefly.
    sys.setswitchinterval(0.0005)
    log.info("runtime %d serves tritonserver %d in %s", os.getpid(), options.server_pid, options.directory)

    def end_without_device(reason: str) -> None:
        # This thread's task has not ended: the next runtime finds the model in the black box.
        box.crashed(f"the device is lost: {reason}")
        _end_soon()
        log.critical("the device is lost: %s; the runtime ends, and the stubs start another", reason)
        logs.flush()
        os._exit(_EXIT_HUNG)

    missing_since = inf

    def make_device() -> JaxDevice:
        nonlocal missing_since
        for one in prepared:
            if one is not None and one.settings == settings:
                # Models that have not registered by then do not return.
                threading.Timer(_FORGET_S, one.executables.clear).start()
                prepared.clear()
                return one.device
        note = options.directory / paths.NO_DEVICE
        try:
            found = JaxDevice(
                platform,
                ExecutableSources(
                    settings.runtime.compilation_cache_dir,
                    options.settings.parent,
                    known,
                    first / paths.COMPILED,
                ),
                memory=MemoryShare(settings.runtime.memory_fraction),
                numerics=settings.runtime.numerics,
                lost=end_without_device,
            )
            note.unlink(missing_ok=True)
            return found
        except DeviceError as error:
            # For operators: neither a process that has ended nor its successor, before it has looked, says why.
            with suppress(OSError):
                paths.write_whole(note, str(error))
            # From the first failure on: importing jax alone may take longer.
            missing_since = min(missing_since, time.monotonic())
            if time.monotonic() - missing_since < _WITHOUT_DEVICE_S:
                raise
            # XLA counts the cards once per process: only the next one finds a card that came, or came back.
            _end_soon()
            log.error("%s; the runtime ends, and the stubs start another to look again", error)
            logs.flush()
            os._exit(_EXIT_HUNG)

    loop = Loop(
        listener,
        ServerProcess(options.server_pid, len(devices)),
        settings,
        make_device,
        blackbox=box,
        inspector=Inspector(known),
    )

    def follow_the_server() -> None:
        select.select([server], [], [])
        log.info("tritonserver is gone")
        paths.remove(options.directory)
        stubs = {}
        for pid, stub in list(loop.stubs.items()):
            with suppress(OSError):  # the stub has just ended
                stubs[pid] = replace(stub, pidfd=os.dup(stub.pidfd))
        end_orphans(stubs, options.server_pid, options.settings.parent)
        with suppress(Exception):  # the loop still runs, and may change its state meanwhile
            loop.end(leave=False)
        # Remove it again: the control supervisor may have created its lock file meanwhile.
        paths.remove(options.directory)
        logging.shutdown()  # write the lines that are still queued
        os._exit(0)

    def end_after_hang(slot: ActivitySlot, task: Task, seconds: float) -> None:
        slot.mark_hung()
        _end_soon()
        log.critical("%s; the runtime ends, and the stubs start another", describe(task, seconds))
        faulthandler.dump_traceback(all_threads=True)
        os._exit(_EXIT_HUNG)

    if settings.runtime.watchdog_s is not None:
        Watchdog(loop.activity, settings.runtime.watchdog_s, lambda: loop.launcher, end_after_hang).start()
    # The server's end is watched on another thread: an execution on the loop may never end.
    threading.Thread(target=follow_the_server, name="server", daemon=True).start()
    if options.device == 0:
        threading.Thread(
            target=_start_others, args=(len(devices), options, environment), name="devices", daemon=True
        ).start()
    command = _command(options.directory, options, str(options.device), environment)
    keeper = SpareKeeper(
        command, environment, listener.fileno(), options.directory, lambda: loop.building or not has_room()
    )
    loop.have_successor(keeper)
    loop.inherit(Handover(options.directory / paths.HANDOVER), slept=slept)
    if settings.runtime.spare:
        threading.Thread(target=keeper.keep, name="spare", daemon=True).start()
    if not supervises:
        _supervise_control(options, settings)
    # A batch makes hundreds of short-lived objects: collect garbage after many batches, not after each.
    gc.set_threshold(20_000, 20, 20)
    status = 0
    try:
        loop.run()
        log.info("the runtime ends for the next one%s", ", and the device sleeps" if loop.sleeps else "")
    except BaseException:
        log.critical("the loop failed; the runtime ends, and the stubs start another", exc_info=True)
        status = _EXIT_FAILED
    loop.end(leave=True)
    # Last, because threads may still begin something: no model is to blame for this end.
    box.clear()
    if status:
        # A request may be: its front tells by this that the runtime was not killed.
        box.crashed("the loop failed")
    # The interpreter's own exit waits for threads, and the stubs would wait as long.
    os._exit(status)


def _read_settings(options: argparse.Namespace) -> "Settings":
    from rsrv.settings_changes import read_or_keep

    settings, broken = read_or_keep(options.settings, options.directory / paths.SETTINGS)
    if broken:
        text = "the settings of the runtime before hold, because the file is broken: %s"
        logging.getLogger("rsrv.runtime").error(text, broken)
    return settings


def _supervise_control(options: argparse.Namespace, settings: "Settings") -> None:
    # One control process suffices for a server.
    if settings.control.enabled and options.device == 0:
        from rsrv.runtime.child_processes import control_command, supervise

        command = control_command(options.directory, options.server_pid, options.settings)
        arguments = command, options.directory
        threading.Thread(target=supervise, args=arguments, name="steering", daemon=True).start()


def _command(
    directory: Path, options: argparse.Namespace, device: str, environment: Mapping[str, str]
) -> list[str]:
    """Return the command of another runtime of this server, with the interpreter that the stub chose for this one."""
    # The variable may name a script.
    python = environment.get("RSRV_RUNTIME_PYTHON") or sys.executable
    return paths.runtime_command(python, directory, options.server_pid, options.settings, device)


def _start_others(count: int, options: argparse.Namespace, environment: Mapping[str, str]) -> None:
    """Start the runtimes of the server's further devices, so that they are there when the first models are compiled.

    A stub starts one that does not come up.
    """
    starting = []
    for number in range(1, count):
        try:
            directory = paths.runtime_directory(options.server_pid, str(number))
            paths.make_private(directory)
            command = _command(directory, options, str(number), environment)
            starting.append(subprocess.Popen(command, env=environment))
        except (OSError, paths.RuntimeDirectoryError) as error:
            logging.getLogger("rsrv.runtime").warning("device %d: %s", number, error)
    for one in starting:
        one.wait()  # it forks the runtime and ends


def _explain(error: Exception) -> str:
    """Return the reason for the stub that waits."""
    if isinstance(error, ImportError):
        return f"{error}, with {sys.executable}. RSRV_RUNTIME_PYTHON must name a Python where 'rsrv[serve]' is installed"
    return f"{type(error).__name__}: {error}" if type(error).__module__ == "builtins" else str(error)


def _end_soon() -> None:
    """End the process even if another thread hangs with the log's lock."""
    timer = threading.Timer(_LAST_LINES_S, os._exit, (_EXIT_HUNG,))
    timer.daemon = True
    timer.start()


def _say(fd: int | None, text: str) -> None:
    """Report to the stub that waits. If it has died, this process goes on: other stubs need it."""
    if fd is None:
        return
    with suppress(BrokenPipeError):
        os.write(fd, text.encode()[:4000])
    os.close(fd)


if __name__ == "__main__":
    sys.exit(main())
