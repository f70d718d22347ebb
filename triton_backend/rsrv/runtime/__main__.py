"""`python -m rsrv.runtime`: the process that owns one device. Stubs start it; nobody else needs to."""

import argparse
import gc
import logging
import os
import sys
from contextlib import suppress
from pathlib import Path

from rsrv.wire import paths
from rsrv.wire.socket import listen


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="rsrv.runtime", description=__doc__)
    parser.add_argument("--directory", type=Path, required=True, help="private directory of this runtime")
    parser.add_argument("--server-pid", type=int, required=True, help="leave when this process ends")
    parser.add_argument("--settings", type=Path, help="rsrv.yaml")
    parser.add_argument(
        "--ready-fd", type=int, required=True, help="write 'ready' or the reason of a failure here"
    )
    options = parser.parse_args(argv)

    # The stub that starts this process must not be its parent: it may be unloaded at any time, and would
    # keep a zombie if we died first.
    if os.fork():
        return 0
    os.setsid()
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname).1s %(name)s: %(message)s"
    )
    log = logging.getLogger("rsrv.runtime")
    try:
        server = os.pidfd_open(options.server_pid)
        # Only now are the heavy modules loaded: a broken installation is reported to who waits.
        from rsrv.runtime.device import JaxDevice
        from rsrv.runtime.loop import Loop
        from rsrv.runtime.orphans import end_orphans
        from rsrv.runtime.scheduler.scheduler import Scheduler
        from rsrv.runtime.scheduler.settings import SchedulerSettings
        from rsrv.settings import load_settings

        text = options.settings.read_text() if options.settings and options.settings.exists() else ""
        settings = load_settings(text, str(options.settings))
        paths.sweep(options.directory.parent)
        (options.directory / paths.SOCKET).unlink(missing_ok=True)
        listener = listen(options.directory / paths.SOCKET)
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
        server,
        options.server_pid,
        settings,
        Scheduler(SchedulerSettings(**settings.scheduler.model_dump(exclude={"max_queue_depth"}))),
        lambda: JaxDevice(settings.runtime.platform, settings.runtime.compilation_cache_dir),
    )
    gc.freeze()
    try:
        loop.run()
    finally:
        paths.remove(options.directory)
    end_orphans(loop.stubs)
    # Threads may be deep in XLA; the device is freed by the process's end, and nothing else is left to do.
    os._exit(0)


def _say(fd: int, text: str) -> None:
    """To the stub that waits. It may have died: that is no reason to leave a socket behind, or other stubs without."""
    with suppress(BrokenPipeError):
        os.write(fd, text.encode()[:4000])
    os.close(fd)


if __name__ == "__main__":
    sys.exit(main())
