"""`rsrv gpu first-hour`: the processes of its parts."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from rsrv.cli.main import main
from rsrv.gpu import processes
from rsrv.gpu.report import Finding

Told = Callable[[Finding], None]


def hang(tell: Told) -> None:
    tell(Finding("before", "MEASURED"))
    threading.Event().wait()


def crash(tell: Told) -> None:
    tell(Finding("before", "MEASURED"))
    os.abort()


def hang_at_its_end(tell: Told) -> None:
    tell.__self__.close()  # type: ignore[attr-defined]
    threading.Event().wait()


def fail(tell: Told) -> None:
    tell(Finding("before", "MEASURED"))
    raise ValueError("the reason")


@pytest.mark.parametrize(
    ("work", "limit_s", "reason"),
    [
        (hang, 2.0, "did not end within 2 s"),
        (hang_at_its_end, 2.0, "did not end within 2 s"),
        (crash, 60.0, "ended with status -6; its last lines are above"),
        (fail, 60.0, "ValueError: the reason"),
    ],
)
def test_a_part_that_fails_keeps_its_findings_and_ends(
    work: Callable[[Told], None], limit_s: float, reason: str, tmp_path: Path
) -> None:
    """A part that hangs is killed, and one that crashes or raises is reported; the command goes on with the next part."""
    *before, last = processes.run(tmp_path, limit_s, work)

    assert [finding.what for finding in before] in (["before"], [])
    assert (last.verdict, last.reason) == ("FAIL", reason)


def name_itself_and_hang(tell: Callable[[int], None]) -> None:
    tell(os.getpid())
    threading.Event().wait()


def test_a_part_ends_with_the_command(tmp_path: Path) -> None:
    """Ctrl-C reaches the command alone, which leaves no process on the card."""
    told = processes.run(tmp_path, 60.0, name_itself_and_hang)
    pid = next(told)

    told.close()

    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_part_with_a_wrong_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the part that was meant."""
    with pytest.raises(SystemExit) as ended:
        main(["gpu", "first-hour", "--parts", "bandwith"])

    assert ended.value.code == 2
    assert "there is no part 'bandwith'" in capsys.readouterr().err
