"""The process that owns one device: from the choice of its card to its end. It serves the stubs of one tritonserver."""

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
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from math import inf
from pathlib import Path

from rsrv import logs
from rsrv.limits import raise_limit
from rsrv.runtime.activity import ActivitySlot, Task, Watchdog, describe
from rsrv.runtime.child_processes import control_command, end_orphans, supervise
from rsrv.runtime.crash_history import BlackBox
from rsrv.runtime.cuda import MemoryShare, memory_fraction
from rsrv.runtime.device import DeviceError
from rsrv.runtime.device_executables import ExecutableSources
from rsrv.runtime.handover import Handover
from rsrv.runtime.jax_device import JaxDevice
from rsrv.runtime.known_modules import KnownModules
from rsrv.runtime.loop import Loop, ServerProcess
from rsrv.runtime.preparation import Preparation
from rsrv.runtime.server_devices import CARD_TIMEOUT_S, SHARING_FRACTION, hold_card, keep_devices, resolve
from rsrv.runtime.spare import SpareKeeper, has_room
from rsrv.settings import Settings
from rsrv.settings_changes import read_or_keep
from rsrv.wire import paths
from rsrv.wire.socket import listen, take_over
from rsrv_bundle.inspection import Inspector

log = logging.getLogger(__name__)

#: If a runtime has had no device for this many seconds, it ends when the next build also finds no device.
_WITHOUT_DEVICE_S = 20.0
#: Exit status if the watchdog ends the process, or if the device is lost or missing.
_EXIT_HUNG = 75
#: Exit status if the loop failed.
_EXIT_FAILED = 70
#: Seconds for which executables that were compiled ahead are kept for their models.
_FORGET_S = 60.0
#: The process ends after this many seconds even if its last lines cannot be logged.
_LAST_LINES_S = 10.0


class DeviceProcess:
    """The runtime of one device."""

    def __init__(
        self,
        options: argparse.Namespace,
        server: int,
        settings: Settings,
        environment: Mapping[str, str],
        prepared: Preparation | None,
    ) -> None:
        """Reserve the device's GPU for this runtime, and listen on the runtime's socket.

        Args:
            options: arguments of the command.
            server: pidfd of tritonserver.
            settings: settings of the runtime.
            environment: environment of the processes that this one starts.
            prepared: results of the preparation while this process was the spare.
        """
        self._options, self._server, self._settings = options, server, settings
        self._environment, self._prepared = environment, prepared
        directory = options.directory
        self._slept = paths.asleep_since(directory) is not None
        (directory / paths.ASLEEP).unlink(missing_ok=True)
        base = directory.parent
        paths.sweep(base)
        devices, self._platform = settings.runtime.devices, settings.runtime.platform
        self._first = directory if options.device == 0 else paths.runtime_directory(options.server_pid, "0")
        self._devices = keep_devices(self._first, lambda: resolve(devices, self._platform, environment))
        device = self._devices[options.device]
        if device == "cpu":
            # If `runtime.devices` is `all`, jax chooses the device, and explains why it finds no GPU.
            self._platform = self._platform if devices == "all" else "cpu"
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = device
        hold_card(
            base,
            device,
            f"tritonserver {options.server_pid} ({options.settings.parent})",
            share=memory_fraction(settings.runtime.memory_fraction, environment) <= SHARING_FRACTION,
            # Only the first attempt waits for the card, because stubs wait during each attempt.
            timeout_s=0.0 if (directory / paths.FAILURE).exists() else CARD_TIMEOUT_S,
        )
        # The usual limit of 1024 open files is too low for hundreds of models.
        raise_limit(resource.RLIMIT_NOFILE)
        if options.listener_fd is not None:
            self._listener = take_over(options.listener_fd)
        else:
            (directory / paths.SOCKET).unlink(missing_ok=True)
            self._listener = listen(directory / paths.SOCKET)
        self._box = BlackBox(directory)
        self._box.catch_signals()
        self._known = KnownModules(directory / paths.MODULES)
        #: Time when the device was first missing.
        self._missing_since = inf

    def serve(self, *, supervises: bool) -> int:
        """Serve until an operator restarts the runtime, its device goes to sleep, or the loop fails. Return the exit status.

        `supervises`: True if this process already supervises the control process.
        """
        options, settings, directory = self._options, self._settings, self._options.directory
        # Switch threads often, because the runtime's threads hand work over often and hold the interpreter only briefly.
        sys.setswitchinterval(0.0005)
        log.info("runtime %d serves tritonserver %d in %s", os.getpid(), options.server_pid, directory)
        loop = Loop(
            self._listener,
            ServerProcess(options.server_pid, len(self._devices)),
            settings,
            self._make_device,
            blackbox=self._box,
            inspector=Inspector(self._known),
        )
        if settings.runtime.watchdog_s is not None:
            Watchdog(
                loop.activity, settings.runtime.watchdog_s, lambda: loop.launcher, _end_after_hang
            ).start()
        # Watch the server's end on another thread, because an execution on the loop may never end.
        threading.Thread(target=self._follow_the_server, args=(loop,), name="server", daemon=True).start()
        if options.device == 0:
            threading.Thread(target=self._start_others, name="devices", daemon=True).start()
        keeper = SpareKeeper(
            self._command(directory, options.device),
            self._environment,
            self._listener.fileno(),
            directory,
            lambda: loop.building or not has_room(),
        )
        loop.have_successor(keeper)
        loop.inherit(Handover(directory / paths.HANDOVER), slept=self._slept)
        if settings.runtime.spare:
            threading.Thread(target=keeper.keep, name="spare", daemon=True).start()
        if not supervises:
            supervise_control(options, settings)
        # A batch makes hundreds of short-lived objects: collect garbage after many batches, not after each.
        gc.set_threshold(20_000, 20, 20)
        status = 0
        try:
            loop.run()
            log.info("the runtime ends as planned%s", ", and the device sleeps" if loop.sleeps else "")
        except BaseException:
            log.critical(
                "the main loop failed; the runtime ends, and the stubs start another runtime", exc_info=True
            )
            status = _EXIT_FAILED
        loop.end(leave=True)
        # Clear the black box last, because threads may still begin tasks. The next runtime must not blame a model for this end.
        self._box.clear()
        if status:
            # A request may be the cause. This record shows the request's front that the runtime failed and was not killed.
            self._box.crashed("the loop failed")
        return status

    # --- the device ---------------------------------------------------------------------------------------

    def _make_device(self) -> JaxDevice:
        note, runtime = self._options.directory / paths.NO_DEVICE, self._settings.runtime
        try:
            device = self._take_prepared() or JaxDevice(
                self._platform,
                ExecutableSources(
                    runtime.compilation_cache_dir,
                    self._options.settings.parent,
                    self._known,
                    self._first / paths.COMPILED,
                ),
                memory=MemoryShare(runtime.memory_fraction),
                numerics=runtime.numerics,
                lost=self._end_without_device,
            )
            note.unlink(missing_ok=True)
            return device
        except DeviceError as error:
            # Record the reason for operators. Without this note, operators would see no reason after the end of this process
            # until the next process has looked for the device.
            with suppress(OSError):
                paths.write_whole(note, str(error))
            # Count from the end of the first failed attempt, because importing jax alone may take longer than the limit.
            self._missing_since = min(self._missing_since, time.monotonic())
            if time.monotonic() - self._missing_since < _WITHOUT_DEVICE_S:
                raise
            # XLA counts the cards once per process. Only a new process finds a card that was added or has returned.
            _end_soon()
            log.error("%s; the runtime ends, and the stubs start another runtime, which looks again", error)
            logs.flush()
            os._exit(_EXIT_HUNG)

    def _take_prepared(self) -> JaxDevice | None:
        prepared, self._prepared = self._prepared, None
        if prepared is None:
            return None
        # After `_FORGET_S`, drop the executables that no model uses. Models without a stub are then not expected to return.
        threading.Timer(_FORGET_S, prepared.executables.clear).start()
        prepared.device.claim(self._end_without_device)
        return prepared.device

    def _end_without_device(self, reason: str) -> None:
        # This thread's task stays in the black box, where the next runtime finds the model.
        self._box.crashed(f"the device is lost: {reason}")
        _end_soon()
        log.critical("the device is lost: %s; the runtime ends, and the stubs start another runtime", reason)
        logs.flush()
        os._exit(_EXIT_HUNG)

    # --- other processes ----------------------------------------------------------------------------------

    def _follow_the_server(self, loop: Loop) -> None:
        """Wait for the end of the server, clean up, and end this process."""
        options = self._options
        select.select([self._server], [], [])
        log.info("tritonserver has ended")
        paths.remove(options.directory)
        stubs = {}
        for pid, stub in list(loop.stubs.items()):
            with suppress(OSError):  # The stub has just ended.
                stubs[pid] = replace(stub, pidfd=os.dup(stub.pidfd))
        end_orphans(stubs, options.server_pid, options.settings.parent)
        with suppress(Exception):  # The loop still runs, and may change its state at the same time.
            loop.end(leave=False)
        # Remove the directory again, because the control supervisor may have created its lock file again.
        paths.remove(options.directory)
        logging.shutdown()  # Write the lines that are still queued.
        os._exit(0)

    def _command(self, directory: Path, device: int) -> list[str]:
        """Return the command of another runtime of this server, with the interpreter that the stub chose for this one."""
        # Prefer the variable to sys.executable, because the variable may name a script.
        python = self._environment.get("RSRV_RUNTIME_PYTHON") or sys.executable
        options = self._options
        return paths.runtime_command(python, directory, options.server_pid, options.settings, str(device))

    def _start_others(self) -> None:
        """Start the runtimes of the server's further devices, so that they run when the first models are compiled.

        If a runtime does not start, a stub starts it later.
        """
        starting = []
        for number in range(1, len(self._devices)):
            try:
                directory = paths.runtime_directory(self._options.server_pid, str(number))
                paths.make_private(directory)
                command = self._command(directory, number)
                starting.append(subprocess.Popen(command, env=self._environment))
            except (OSError, paths.RuntimeDirectoryError) as error:
                log.warning("device %d: %s", number, error)
        for starter in starting:
            starter.wait()  # The started process forks the runtime and ends.


def read_settings(options: argparse.Namespace) -> Settings:
    settings, broken = read_or_keep(options.settings, options.directory / paths.SETTINGS)
    if broken:
        log.error("the settings file is broken, so the previous runtime's settings stay in force: %s", broken)
    return settings


def supervise_control(options: argparse.Namespace, settings: Settings) -> None:
    # One control process suffices for a server.
    if settings.control.enabled and options.device == 0:
        command = control_command(options.directory, options.server_pid, options.settings)
        arguments = command, options.directory
        threading.Thread(target=supervise, args=arguments, name="steering", daemon=True).start()


def _end_after_hang(slot: ActivitySlot, task: Task, seconds: float) -> None:
    slot.mark_hung()
    _end_soon()
    log.critical("%s; the runtime ends, and the stubs start another runtime", describe(task, seconds))
    faulthandler.dump_traceback(all_threads=True)
    os._exit(_EXIT_HUNG)


def _end_soon() -> None:
    """End the process after `_LAST_LINES_S`, even if another thread hangs while it has the log's lock."""
    timer = threading.Timer(_LAST_LINES_S, os._exit, (_EXIT_HUNG,))
    timer.daemon = True
    timer.start()
