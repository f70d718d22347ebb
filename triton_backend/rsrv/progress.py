"""How far long work is, for whoever waits for a command: a bar on a terminal, plain lines elsewhere.

For all of rsrv's commands, `rsrv_bundle`'s included. What nobody waits for is told by the log.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TextIO

#: seconds of work that are worth a plain line: what is sooner done says nothing, so that a file is not flooded
EVERY = 1.0


class Steps(Protocol):
    """Work of known or unknown length."""

    def step(self, text: str = "") -> None:
        """One more step is done; `text`: which."""


@contextmanager
def steps(
    title: str,
    total: int | None = None,
    *,
    stream: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
    every: float = EVERY,
) -> Iterator[Steps]:
    """Shows how many of `total` steps are done (None: nobody knows how many there are), on `stream` or stderr.

    On a terminal, if rich is there, a bar with the time that has passed, which goes away at the end. Elsewhere a line
    for a step that ends `every` seconds or more after the line before, or after the start; and for the last step if
    there were lines, so that the end is seen. `clock` tells seconds.
    """
    stream = stream or sys.stderr
    bar = _bar(title, total, stream, clock)
    if bar is None:
        yield _Lines(title, total, stream, clock, every)
    else:
        with bar as shown:
            yield shown


def _bar(title: str, total: int | None, stream: TextIO, clock: Callable[[], float]) -> "_Bar | None":
    """None where nobody would see it move."""
    if not stream.isatty() or os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
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
        self._began = self._said = clock()
        self._done = 0

    def step(self, text: str = "") -> None:
        self._done += 1
        now = self._clock()
        last = self._done == self._total and self._said > self._began
        if now - self._said < self._every and not last:
            return
        self._said = now
        of = "" if self._total is None else f" of {self._total}"
        what = f": {text}" if text else ""
        print(
            f"{self._title}: {self._done}{of} ({now - self._began:.1f} s){what}",
            file=self._stream,
            flush=True,
        )


class _Bar:
    """Raises ImportError without rich."""

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
            # What the command prints meanwhile goes above the bar, but a file stays a file.
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        self._task = self._progress.add_task("", total=total, title=title, text="")

    def __enter__(self) -> Steps:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def step(self, text: str = "") -> None:
        self._progress.update(self._task, advance=1, text=text)
