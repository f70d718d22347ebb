"""Progress of long work in the commands of rsrv and `rsrv_bundle`: a bar on a terminal, and plain lines elsewhere.

Servers log their progress instead.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TextIO

from rsrv.command import put
from rsrv.terminal import obeys_codes

#: Shortest time between two plain lines, in seconds. Shorter work has no line, so that a file is not flooded.
LINE_PERIOD_S = 1.0


class Steps(Protocol):
    """Work with a known or unknown number of steps."""

    def step(self, text: str = "", count: int = 1) -> None:
        """Count steps that are done. `text` describes the last one."""


@contextmanager
def steps(
    title: str,
    total: int | None = None,
    *,
    stream: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
    every: float = LINE_PERIOD_S,
) -> Iterator[Steps]:
    """Show how many of `total` steps (None: unknown) are done, on `stream` or stderr.

    On a terminal, if rich is installed, this is a bar with the elapsed time, which is removed at the end. Elsewhere, there is a
    line for a step that ends at least `every` seconds after the start or the last line. If there were lines, the last step also
    has one. `clock` returns seconds.
    """
    stream = stream or sys.stderr
    bar = _bar(title, total, stream, clock)
    if bar is None:
        yield _Lines(title, total, stream, clock, every)
    else:
        with bar as shown:
            yield shown


def _bar(title: str, total: int | None, stream: TextIO, clock: Callable[[], float]) -> "_Bar | None":
    """Return a bar, or None if the stream is not a terminal or rich is missing."""
    if not obeys_codes(stream):
        return None
    try:
        return _Bar(title, total, stream, clock)
    except ImportError:
        return None


class _Lines:
    def __init__(
        self, title: str, total: int | None, stream: TextIO, clock: Callable[[], float], every: float
    ) -> None:
        self._title = title
        self._total = total
        self._stream = stream
        self._clock = clock
        self._every = every
        self._started = self._printed = clock()
        self._done = 0

    def step(self, text: str = "", count: int = 1) -> None:
        self._done += count
        now = self._clock()
        last = self._done == self._total and self._printed > self._started
        if now - self._printed < self._every and not last:
            return
        self._printed = now
        of = "" if self._total is None else f" of {self._total}"
        suffix = f": {text}" if text else ""
        put(f"{self._title}: {self._done}{of} ({now - self._started:.1f} s){suffix}", self._stream)


class _Bar:
    """A bar on a terminal. The constructor raises ImportError if rich is missing."""

    def __init__(self, title: str, total: int | None, stream: TextIO, clock: Callable[[], float]) -> None:
        from rich import progress
        from rich.console import Console

        counted = () if total is None else (progress.BarColumn(), progress.MofNCompleteColumn())
        self._progress = progress.Progress(
            progress.SpinnerColumn(),
            progress.TextColumn("{task.fields[title]}", markup=False),
            *counted,
            progress.TimeElapsedColumn(),
            progress.TextColumn("{task.fields[text]}", markup=False),
            console=Console(file=stream),
            get_time=clock,
            transient=True,
            # Print the command's own output above the bar, unless it is redirected.
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        self._task = self._progress.add_task("", total=total, title=title, text="")

    def __enter__(self) -> Steps:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def step(self, text: str = "", count: int = 1) -> None:
        self._progress.update(self._task, advance=count, text=text)
