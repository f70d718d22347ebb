"""The supervisor of the control process.

It keeps one control process running as long as the runtime lives, and never starts a second one.
"""

import fcntl
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from rsrv.runtime.child_processes import supervise
from rsrv.wire.paths import CONTROL_LOCK, remove
from tests.logged import logged_here
from tests.waiting import PATIENCE_S


class Over(Exception):
    """Raised to end an endless loop."""


class Rests:
    """Replaces the function that waits. It records the seconds, and ends the loop after a number of calls."""

    def __init__(self, times: int, then: Callable[[], None] | None = None) -> None:
        self.seconds: list[float] = []
        self._times = times
        self._then = then

    def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)
        if len(self.seconds) == self._times:
            if self._then is None:
                raise Over
            self._then()


def python(code: str) -> list[str]:
    """Return a command line that replaces the control process."""
    return [sys.executable, "-c", code]


def test_one_that_ends_is_started_again_later_and_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A control process that fails is started again after 1, 2, 4 ... 60 seconds. The log has its exit status."""
    rests = Rests(8)

    with pytest.raises(Over):
        supervise(python("raise SystemExit(7)"), tmp_path, rests, clock=lambda: 0.0)

    assert rests.seconds == [1, 2, 4, 8, 16, 32, 60, 60]
    messages = [record.getMessage() for record in logged_here(caplog)]
    assert messages[0] == "the control process ended with status 7; starting it again in 1 s"


def test_one_that_lived_long_is_started_again_soon(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """After a control process has lived long, its restart waits only one second again.

    An exit without an error is not logged.
    """
    times = iter([0.0, 1.0, 1.0, 2.0, 2.0, 62.0, 62.0, 63.0])
    rests = Rests(4)

    with pytest.raises(Over):
        supervise(python(""), tmp_path, rests, clock=lambda: next(times))

    assert rests.seconds == [1, 2, 1, 2]
    assert logged_here(caplog) == []


def test_one_that_cannot_be_started_costs_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If the control process cannot be started, the log has one line for each attempt."""
    with pytest.raises(Over):
        supervise([str(tmp_path / "nothing")], tmp_path, Rests(2))

    records = logged_here(caplog)
    assert len(records) == 2
    assert "cannot be started" in records[0].getMessage()


def test_one_of_an_earlier_runtime_is_left_alone_until_it_ends(tmp_path: Path) -> None:
    """No control process is started while that of an earlier runtime holds the lock."""
    fd = os.open(tmp_path / CONTROL_LOCK, os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    started = tmp_path / "started"
    end = threading.Event()

    def run() -> None:
        with pytest.raises(Over):
            supervise(python(f"open({str(started)!r}, 'w')"), tmp_path, Rests(1))
        end.set()

    threading.Thread(target=run, daemon=True).start()
    assert not started.exists()
    os.close(fd)

    assert end.wait(PATIENCE_S)
    assert started.exists()


def test_it_can_take_the_lock_and_belongs_to_no_terminal_of_ours(tmp_path: Path) -> None:
    """The control process can take the lock. It has its own session and an empty stdin."""
    output = tmp_path / "said"
    code = f"""
import fcntl, os, sys
fcntl.flock(os.open({str(tmp_path / CONTROL_LOCK)!r}, os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB)
open({str(output)!r}, "w").write(f"{{os.getsid(0) == os.getpid()}} {{sys.stdin.read()!r}}")
"""

    with pytest.raises(Over):
        supervise(python(code), tmp_path, Rests(1))

    assert output.read_text() == "True ''"


def test_nothing_is_started_when_the_server_has_gone(tmp_path: Path) -> None:
    """If the runtime's directory is gone, as after the server's end, no further control process is started and no directory is left."""
    directory = tmp_path / "runtime"
    directory.mkdir()
    (directory / "control.sock").touch()

    supervise(python(""), directory, Rests(1, then=lambda: remove(directory)))

    assert not directory.exists()
