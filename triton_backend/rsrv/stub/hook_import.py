"""The import of a bundle's `model.py`. It runs on a thread of its own, so that the model's load fails if the import hangs.

An import that takes seconds is reported to the runtime, because Triton does not show imports, and opens its ports only
when all of its first models are loaded.
"""

import asyncio
import itertools
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Generic, TypeVar

from rsrv.hooks.loader import HookError, import_limit_s
from rsrv.stub.connection import RuntimeConnection
from rsrv.stub.hook_guard import BACKSTOP_TIMEOUTS, CHECKS, Backstop, Faulthandler, frame_of
from rsrv.stub.metrics import REPORT_TIMEOUT_S, Meters
from rsrv.stub.session import UNREACHABLE, Attachment, Session

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Maximum number of seconds between two reports of an import that continues.
_REPORT_PERIOD_S = 5.0
#: Hint in errors about functions that work only on the main thread.
_THREAD_HINT = "model.py is imported on a thread of its own, where signal handlers cannot be set"


class HookImport(Generic[T]):
    """Import of a `model.py` by `load`, once for all replicas of the model.

    Python cannot end a thread. So an import that hangs continues, and the next attempt waits for the same import.
    """

    def __init__(
        self, path: Path, load: Callable[[], T], backstop: Backstop | None = None, more: Iterable[Path] = ()
    ) -> None:
        """`load` executes the file `path` and the files `more`.

        If the file `path` does not exist, `load` is called on the caller's thread.
        """
        self._path = path
        self._files = {str(path), *map(str, more)}
        self._load = load
        self._backstop = backstop or Faulthandler()
        self._lock = threading.Lock()
        self._result: Future[T] | None = None
        self._thread = 0
        self._began = 0.0

    def result(self, session: Session, attachment: Attachment) -> T:
        """Return the functions of the file. The first call executes the file.

        Raises any error of the file. Raises HookError if the import takes too long.
        """
        if not self._path.exists():
            return self._load()
        if (result := self._result) is not None and result.done() and result.exception() is None:
            return result.result()
        timeout = import_limit_s(attachment.settings["stub"]["hook_timeout_s"])
        with ExitStack() as stack:
            report = self._reporting(session, attachment.key, stack)
            if timeout is not None:
                stack.callback(self._backstop.cancel)
                self._backstop.put_off(BACKSTOP_TIMEOUTS * timeout)
            result = self._begin(report)
            for period in _periods(timeout):
                wait([result], period)
                if result.done():
                    return result.result()
                report()
        raise self._hang()

    def _reporting(self, session: Session, key: str, stack: ExitStack) -> Callable[[], None]:
        """Return a function that reports the import if a runtime can be reached. Closing `stack` closes the connection for it."""
        connection: RuntimeConnection | None = None
        with suppress(*UNREACHABLE):
            connection = session.open_connection(key)
            stack.callback(connection.close)

        def report() -> None:
            nonlocal connection
            if connection is not None:
                importing = [time.monotonic() - self._began, self._place()[0]]
                try:
                    connection.report({**Meters().take(), "importing": importing}, REPORT_TIMEOUT_S)
                except (TimeoutError, *UNREACHABLE):
                    # Do not connect again: this takes time, and the backstop is not postponed any more. The runtime keeps the
                    # latest report.
                    connection = None

        return report

    def _begin(self, report: Callable[[], None]) -> "Future[T]":
        """Return the future of an import that is in progress or has succeeded. Otherwise, report and start a new import."""
        with self._lock:
            result = self._result
            if result is None or (result.done() and result.exception() is not None):
                self._began = time.monotonic()
                # Report before the import: a library may hang while it holds the interpreter's lock.
                report()
                result = Future()
                threading.Thread(target=self._execute, args=(result,), name="import", daemon=True).start()
                self._result = result
            return result

    def _execute(self, result: "Future[T]") -> None:
        self._thread = threading.get_ident()
        try:
            with _event_loop():
                hooks = self._load()
        except BaseException as error:  # noqa: BLE001 - the waiting thread raises the error, and sys.exit() as well
            if isinstance(error, (ValueError, RuntimeError)) and "main thread" in str(error):
                error.args = (f"{error} ({_THREAD_HINT})",)
            result.set_exception(error)
        else:
            result.set_result(hooks)

    def _hang(self) -> HookError:
        """Log where the import is, and return the error of the load."""
        line, stack = self._place()
        log.error("model.py is still being imported. It is here:\n%s", stack)
        return HookError(
            f"the import of model.py has taken {time.monotonic() - self._began:.0f} s and is at line {line}. If that line "
            "waits, end the wait. If it downloads files, put them into the bundle. If the import needs more time, raise "
            "stub.hook_timeout_s"
        )

    def _place(self) -> tuple[int, str]:
        """Return the line of model.py that the import executes, or 0 if it is elsewhere, and the whole stack."""
        frame = frame_of(self._thread)
        if frame is None:
            return 0, "(it has ended)"
        frames = traceback.walk_stack(frame)
        lines = (line for frame, line in frames if frame.f_code.co_filename in self._files)
        return next(lines, 0), "".join(traceback.format_stack(frame))


@contextmanager
def _event_loop() -> Iterator[None]:
    """Set an event loop for this thread, because the main thread has one. Afterwards, close it unless model.py keeps it."""
    loop = asyncio.new_event_loop()
    references = sys.getrefcount(loop)
    asyncio.set_event_loop(loop)
    try:
        yield
    finally:
        asyncio.set_event_loop(None)
        if sys.getrefcount(loop) <= references:
            loop.close()


def _periods(timeout: float | None) -> Iterable[float]:
    """Return the seconds to wait before each check of an import. The import may take `timeout` seconds (None: no limit).

    The caller counts checks and not seconds, as `HookGuard` does. So an import is not blamed for the time in which the process
    was stopped.
    """
    if timeout is None:
        return itertools.repeat(_REPORT_PERIOD_S)
    period = min(_REPORT_PERIOD_S, timeout / CHECKS)
    return itertools.repeat(period, round(timeout / period))
