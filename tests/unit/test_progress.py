"""Progress of long work, on a terminal and elsewhere. A fake clock gives the time."""

import builtins
import io
import subprocess
import sys
from typing import Any

import pytest

from rsrv.progress import steps


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """A clock that moves only when the test moves it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def done_at(stream: io.StringIO, total: int | None, *moments: float) -> list[str]:
    """Return the progress lines of work whose steps end at these times, in seconds after the start."""
    clock = Clock()
    with steps("packing", total, stream=stream, clock=clock, every=1.0) as progress:
        for number, moment in enumerate(moments):
            clock.now = 100.0 + moment
            progress.step(f"box {number}")
    return stream.getvalue().splitlines()


def test_each_slow_step_has_its_line() -> None:
    """Without a terminal, each slow step has a line with its number, the total, the seconds and its name."""
    assert done_at(io.StringIO(), 3, 2, 4.5, 9) == [
        "packing: 1 of 3 (2.0 s): box 0",
        "packing: 2 of 3 (4.5 s): box 1",
        "packing: 3 of 3 (9.0 s): box 2",
    ]


def test_quick_work_prints_nothing() -> None:
    """Quick work prints nothing."""
    assert done_at(io.StringIO(), 3, 0.1, 0.2, 0.3) == []


def test_quick_steps_share_lines_and_the_last_one_is_printed() -> None:
    """Quick steps share one line per second. The last step is always printed."""
    assert done_at(io.StringIO(), 5, 0.5, 1.0, 1.5, 2.0, 2.1) == [
        "packing: 2 of 5 (1.0 s): box 1",
        "packing: 4 of 5 (2.0 s): box 3",
        "packing: 5 of 5 (2.1 s): box 4",
    ]


def test_work_of_unknown_length_has_no_total() -> None:
    """Work of unknown length counts its steps without a total."""
    stream, clock = io.StringIO(), Clock()
    with steps("packing", stream=stream, clock=clock) as progress:
        clock.now += 2
        progress.step()
    assert stream.getvalue() == "packing: 1 (2.0 s)\n"


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal, a bar shows counts, time and the step without markup, and vanishes at the end."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    stream, clock = Terminal(), Clock()
    with steps("packing", 2, stream=stream, clock=clock) as progress:
        clock.now += 65
        progress.step("[b]box")
    # The bar is drawn a last time at the end, so the output has the latest figures.
    output = stream.getvalue()
    assert "packing" in output
    assert "1/2" in output
    assert "0:01:05" in output
    assert "[b]box" in output
    assert output.endswith("\x1b[2K")


@pytest.mark.parametrize("term", ["dumb", "unknown", None])
def test_a_terminal_that_cannot_move(term: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dumb terminal gets lines, as a file does."""
    if term is None:
        monkeypatch.delenv("TERM", raising=False)
    else:
        monkeypatch.setenv("TERM", term)
    assert done_at(Terminal(), 1, 2) == ["packing: 1 of 1 (2.0 s): box 0"]


def test_a_terminal_without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal without rich, which is an extra, gets lines."""
    monkeypatch.setenv("TERM", "xterm")
    original = builtins.__import__

    def import_(name: str, *rest: Any) -> Any:
        if name.startswith("rich"):
            raise ImportError(name)
        return original(name, *rest)

    monkeypatch.setattr(builtins, "__import__", import_)
    assert done_at(Terminal(), 1, 2) == ["packing: 1 of 1 (2.0 s): box 0"]


def test_work_that_fails_leaves_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the work fails, the bar vanishes, and the error is raised."""
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with pytest.raises(ValueError, match="no box"), steps("packing", 2, stream=stream):
        raise ValueError("no box")
    assert "\x1b[?25h" in stream.getvalue(), "the cursor is shown again"


def test_it_is_light() -> None:
    """Without a bar, only the standard library is loaded."""
    program = (
        "import sys; before = set(sys.modules)\n"
        "from rsrv.progress import steps\n"
        "with steps('a', 1) as progress: progress.step()\n"
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before})"
    )
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL
    )
    assert set(out.stdout.split()) <= sys.stdlib_module_names | {"rsrv"}
