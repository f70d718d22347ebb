"""`rsrv gpu check`: the processes of its parts, their time limits, and its table."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from unittest.mock import Mock

import pytest

from rsrv.cli.main import main
from rsrv.gpu import models, processes
from rsrv.gpu.__main__ import Table
from rsrv.gpu.report import PARTS, DeviceFacts, Finding, ends_of, heading, table_row, too_late
from tests.waiting import wait_until

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
    ("work", "limit_s", "verdict", "reason"),
    [
        (hang, 2.0, "NOT RUN", "did not end within 2 s: raise --minutes"),
        (hang_at_its_end, 2.0, "NOT RUN", "did not end within 2 s: raise --minutes"),
        (crash, 60.0, "FAIL", "ended with status -6; its last lines are on stderr"),
        (fail, 60.0, "FAIL", "ValueError: the reason"),
    ],
)
def test_a_part_that_fails_keeps_its_findings_and_ends(
    work: Callable[[Told], None], limit_s: float, verdict: str, reason: str, tmp_path: Path
) -> None:
    """A part that hangs is killed at its limit. A part that crashes or raises an error is reported as failed.

    In both cases, the findings of the part so far are kept.
    """
    *before, last = processes.run(tmp_path, limit_s, work)

    assert [finding.what for finding in before] in (["before"], [])
    assert (last.verdict, last.reason) == (verdict, reason)


def name_itself_and_hang(tell: Callable[[int], None]) -> None:
    tell(os.getpid())
    threading.Event().wait()


def test_a_part_ends_with_the_command(tmp_path: Path) -> None:
    """Only the command gets the signal of Ctrl-C. The command then ends the process of the running part."""
    reports = processes.run(tmp_path, 60.0, name_itself_and_hang)
    pid = next(reports)

    reports.close()

    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_part_with_a_wrong_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """If a part's name is wrong, the error has the nearest name."""
    with pytest.raises(SystemExit) as raised:
        main(["gpu", "check", "--parts", "bandwith"])

    assert raised.value.code == 2
    assert "there is no part 'bandwith'" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["0", "-1", "inf", "nan", "ten"])
def test_a_time_that_is_no_number_of_minutes_is_refused(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """If the time is not a number of minutes, the error quotes it."""
    with pytest.raises(SystemExit) as raised:
        main(["gpu", "check", f"--minutes={text}"])

    assert raised.value.code == 2
    assert f"{text!r} is not a number of minutes" in capsys.readouterr().err


def test_every_part_has_a_share_of_the_time() -> None:
    """Each part must end at some time after the start. These times rise in the order of the parts, up to the whole time.

    A single part gets the whole time.
    """
    ends = ends_of(list(PARTS), 600.0)

    assert list(ends) == list(PARTS)
    assert list(ends.values()) == sorted(ends.values())
    assert ends[list(PARTS)[-1]] == pytest.approx(600.0)
    assert ends_of(["eviction"], 600.0) == {"eviction": 600.0}


def test_a_part_that_does_not_fit_is_named_as_not_run() -> None:
    """If too little time is left for a part, the part is NOT RUN. The reason has the seconds that are left, and what to do."""
    part = PARTS["eviction"]

    assert too_late(part, part.seconds) is None
    finding = too_late(part, -3.0)
    assert finding is not None
    assert finding.verdict == "NOT RUN"
    assert finding.reason == "0 s are left, and it takes 20 s or more: raise --minutes"


def test_the_table_is_markdown_and_names_card_and_versions() -> None:
    """Every row of the table has four cells, whatever characters the texts have."""
    device = DeviceFacts("NVIDIA H100", "cuda", True, 76_500_000_000, "driver 580.159, jax 0.11.2")
    rows = [
        table_row("eviction", Finding("requests", "MEASURED", "410/s", "40 models")),
        table_row("eviction", Finding("answers", "FAIL", "3 of 4 right", "two\nlines | and a bar")),
        table_row("fronts", Finding("the part", "NOT RUN", reason="0 s are left")),
        table_row("many", Finding("failed", "FAIL", reason="x" * 301)),
    ]

    assert heading(device).splitlines() == [
        "**NVIDIA H100**, 76.5 GB for jax; driver 580.159, jax 0.11.2",
        "",
        "| part | figure | result | how |",
        "|---|---|---|---|",
    ]
    assert rows == [
        "| `eviction` | requests | 410/s | 40 models |",
        "| `eviction` | answers | FAIL: 3 of 4 right | two lines / and a bar |",
        "| `fronts` | the part | NOT RUN | 0 s are left |",
        f"| `many` | failed | FAIL | {'x' * 300} ... |",
    ]


def test_a_finding_that_counts_further_replaces_the_one_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each finding is written to the file at once. Findings that count further replace each other, so the table has one row."""
    file = tmp_path / "figures.json"
    table = Table(DeviceFacts("NVIDIA H100", "cuda", True, None, ""), file)

    for count in (1, 2):
        table.add("correctness", Finding("bundles", "PASS", f"{count} of 2"))
        findings = json.loads(file.read_text())["parts"]["correctness"]["findings"]
        assert [finding["value"] for finding in findings] == [f"{count} of 2"]
    table.end("correctness", 1.5)

    assert capsys.readouterr().out == "| `correctness` | bundles | PASS: 2 of 2 | |\n"
    assert json.loads(file.read_text())["parts"]["correctness"]["seconds"] == 1.5


def test_the_check_is_compared_with_the_pytorch_of_another_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the check's own Python has no PyTorch with CUDA, the Python that RSRV_TORCH_PYTHON names is tried."""
    without, python = tmp_path / "without", tmp_path / "python"
    without.write_text("#!/bin/sh\nexit 1\n")
    python.write_text("#!/bin/sh\necho 2.9\nwhile read line; do echo 50.0 0.02; done\n")
    for script in (without, python):
        script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(without))
    environment = {**os.environ, "RSRV_TORCH_PYTHON": str(python)}

    with models._torch(Mock(environment=environment, device=Mock(platform="cuda"))) as (version, torch):
        assert version == "torch 2.9"
        assert torch is not None
        assert torch("resnet18", "eager", 1, 1.0) == (50.0, 0.02)
    with models._torch(Mock(environment=dict(os.environ), device=Mock(platform="cuda"))) as (version, torch):
        assert (version, torch) == ("no torch with CUDA is installed", None)


def start_a_server_and_hang(tell: Callable[[int], None]) -> None:
    tell(subprocess.Popen(["sleep", "infinity"]).pid)
    threading.Event().wait()


def hold_a_part(folder: Path, numbers: Connection) -> None:
    reports = processes.run(folder, 60.0, start_a_server_and_hang)
    numbers.send(next(reports))
    threading.Event().wait()


def test_a_part_and_its_servers_end_if_the_command_is_killed(tmp_path: Path) -> None:
    """If the command is killed with `kill -9`, the processes of its running part also end, and its folder is removed."""
    (own := tmp_path / "command" / "part").mkdir(parents=True)
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    command = context.Process(target=hold_a_part, args=(own, send))
    command.start()
    server = receive.recv()

    command.kill()
    command.join()

    def ended() -> bool:
        with suppress(ProcessLookupError, FileNotFoundError):
            os.kill(server, 0)
            return "\nState:\tZ" in Path(f"/proc/{server}/status").read_text()
        return True

    wait_until(ended)
    wait_until(lambda: not own.parent.exists())
