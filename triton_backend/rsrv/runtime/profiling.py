"""Recording what the device does, for somebody to look at."""

import logging
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

from rsrv.runtime.device import Device
from rsrv.runtime.threads import Inbox

log = logging.getLogger("rsrv.profiling")


class Refused(Exception):
    """A command of an operator is not done. `code` is the name of a gRPC status; the message says why, and what to do."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class Profiler:
    """One profile at a time. To start and to end one takes seconds, on a thread."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._state: Literal["idle", "changing", "recording"] = "idle"

    def begin(self, device: Device, directory: str | None, ended: Callable[[Refused | None], None]) -> None:
        """Start a profile in a directory, or end the one that runs (None); `ended` is called on the loop.

        Raises Refused.
        """
        if self._state == "changing":
            raise Refused("FAILED_PRECONDITION", "a profile is being started or ended; try again later")
        if directory is None:
            if self._state == "idle":
                raise Refused("FAILED_PRECONDITION", "no profile runs")
            action = device.stop_profile
        else:
            if self._state == "recording":
                raise Refused("FAILED_PRECONDITION", "a profile runs already: stop it first")
            path = Path(directory)
            if not path.is_absolute() or "\0" in directory:
                raise Refused("INVALID_ARGUMENT", f"directory {directory!r:.200} is not an absolute path")
            action = partial(_start, device, path)
        self._state = "changing"

        def run() -> None:
            refused = None
            try:
                action()
            except Refused as error:
                refused = error
            except Exception as error:
                log.exception("profiling failed")
                refused = Refused("INTERNAL", f"{type(error).__name__}: {error}")
            self._inbox.post(lambda: end(refused))

        def end(refused: Refused | None) -> None:
            # A profile whose end failed is over all the same: it could not be ended twice.
            self._state = "recording" if directory is not None and refused is None else "idle"
            ended(refused)

        threading.Thread(target=run, name="profile", daemon=True).start()


def _start(device: Device, directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        raise Refused("INVALID_ARGUMENT", f"{directory} is there already; name a new directory") from None
    except OSError as error:
        raise Refused("FAILED_PRECONDITION", f"{directory} cannot be made: {error.strerror}") from None
    log.info("profiling into %s", directory)
    device.start_profile(directory)
