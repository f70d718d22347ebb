"""`python -m rsrv.runtime`: the process that owns one device. Stubs start it; nobody else needs to."""

import argparse
import faulthandler
import gc
import logging
import os
import resource
import select
import sys
import threading
import warnings
from contextlib import suppress
from pathlib import Path

from rsrv import logs
from rsrv.limits import raise_limit
from rsrv.runtime.allocation import use_one_arena
from rsrv.wire import paths
from rsrv.wire.socket import listen

#: how the process ends when the watchdog ends it
_HUNG = 75
#: seconds that saying what hangs may take
_LAST_WORDS = 10.0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="rsrv.runtime", description=__doc__)
    parser.add_argument("--directory", type=Path, required=True, help="private directory of this runtime")
    parser.add_argument("--server-pid", type=int, required=True, help="leave when this process ends")
    parser.add_argument("--settings", type=Path, help="rsrv.yaml")
    parser.add_argument(
        "--ready-fd", type=int, required=True, help="write 'ready' or the reason of a failure here"
    )
    options = parser.parse_args(argv)

    # The limit of a stub's memory is for its hooks.
    raise_limit(resource.RLIMIT_DATA)
    # The stub that starts this process must not be its parent: it may be unloaded at any time, and would
    # keep a zombie if we died first.
    if os.fork():
        return 0
    os.setsid()
    use_one_arena()
    # Loads of weights are told as they come: they must not wait for the log.
    logs.setup(aside=True)
    # A warning is a line of the log, whatever the environment wants warnings to be.
    warnings.simplefilter("default")
    log = logging.getLogger("rsrv.runtime")
    try:
        server = os.pidfd_open(options.server_pid)
        # Only now are the heavy modules loaded: a broken installation is reported to who waits.
        from rsrv.runtime.activity import ActivitySlot, Task
        from rsrv.runtime.child_processes import control_command, end_orphans, keep_steering
        from rsrv.runtime.crash_history import BlackBox
        from rsrv.runtime.jax_device import JaxDevice
        from rsrv.runtime.loop import Loop
        from rsrv.runtime.watchdog import Watchdog, describe
        from rsrv.settings import load_settings
        from rsrv_bundle.inspection import Inspector

        text = options.settings.read_text() if options.settings and options.settings.exists() else ""
        settings = load_settings(text, str(options.settings))
        logs.setup(settings.logs.format)
        if paths.hold(options.directory) is None:
            # Its starter died before it could say so: the other stubs will find it.
            _say(options.ready_fd, "ready")
            return 0
        paths.sweep(options.directory.parent)
        # The customary 1024 open files would be too few for hundreds of models.
        raise_limit(resource.RLIMIT_NOFILE)
        (options.directory / paths.SOCKET).unlink(missing_ok=True)
        listener = listen(options.directory / paths.SOCKET)
        box = BlackBox(options.directory)
        box.catch_signals()
    except Exception as error:
        if not paths.start_time(options.server_pid):
            # The server ended meanwhile, and its stubs with it: nobody else will clear away.
            paths.remove(options.directory)
            return 1
        log.exception("the runtime cannot start")
        _say(options.ready_fd, f"{type(error).__name__}: {error}")
        return 1
    _say(options.ready_fd, "ready")

    # The scheduler's threads hand over often and hold the interpreter briefly.
    sys.setswitchinterval(0.0005)
    log.info("runtime %d serves tritonserver %d in %s", os.getpid(), options.server_pid, options.directory)
    loop = Loop(
        listener,
        options.server_pid,
        settings,
        lambda: JaxDevice(
            settings.runtime.platform,
            settings.runtime.compilation_cache_dir,
            memory_fraction=settings.runtime.memory_fraction,
            preallocate=settings.runtime.preallocate,
            weight_memory=settings.runtime.weight_memory,
            numerics=settings.runtime.numerics,
        ),
        blackbox=box,
        inspector=Inspector(),
    )

    def follow_the_server() -> None:
        select.select([server], [], [])
        log.info("tritonserver is gone")
        paths.remove(options.directory)
        stubs = {}
        for pid, fd in list(loop.stubs.items()):
            with suppress(OSError):  # ended just now
                stubs[pid] = os.dup(fd)
        end_orphans(stubs)
        with suppress(Exception):  # the loop still runs, and may be in the midst of it
            loop.clear()
        # Again: whoever steers may have looked for the control process meanwhile, and left its lock.
        paths.remove(options.directory)
        logging.shutdown()  # what was logged is to be written
        os._exit(0)

    def end_what_hangs(slot: ActivitySlot, task: Task, seconds: float) -> None:
        slot.hangs()
        # Should whoever hangs hold the log, too.
        late = threading.Timer(_LAST_WORDS, os._exit, (_HUNG,))
        late.daemon = True
        late.start()
        log.critical("%s; the runtime ends, and the stubs start another", describe(task, seconds))
        faulthandler.dump_traceback(all_threads=True)
        os._exit(_HUNG)

    if settings.runtime.watchdog_s is not None:
        Watchdog(loop.activity, settings.runtime.watchdog_s, lambda: loop.launcher, end_what_hangs).start()
    # On a thread of its own: an execution on the loop may take for ever, if a client could make it so.
    threading.Thread(target=follow_the_server, name="server", daemon=True).start()
    if settings.control.enabled:
        keep_steering(
            control_command(options.directory, options.server_pid, options.settings), options.directory
        )
    # A batch is hundreds of short-lived objects: collect after many batches, not after each.
    gc.set_threshold(20_000, 20, 20)
    try:
        loop.run()
    except BaseException:
        log.critical("the loop failed; the runtime ends, and the stubs start another", exc_info=True)
        # Whatever is being built now is not why.
        box.clear()
    # Never through the interpreter's own end, which waits for threads: the stubs would wait as long.
    (options.directory / paths.SOCKET).unlink(missing_ok=True)
    with suppress(Exception):
        loop.clear()
    os._exit(70)


def _say(fd: int, text: str) -> None:
    """To the stub that waits. It may have died: that is no reason to leave a socket behind, or other stubs without."""
    with suppress(BrokenPipeError):
        os.write(fd, text.encode()[:4000])
    os.close(fd)


if __name__ == "__main__":
    sys.exit(main())
