"""The lines of `rsrv check-triton` about releases of Triton, machines and Python versions that the test machine lacks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rsrv.cli.main import main
from rsrv.gpu import processes
from rsrv.gpu.triton import flags_finding, last_error, line, shm_finding, stub_findings
from rsrv.triton_command_line import ask_flags

#: Flags of releases from 24.10 on that `rsrv serve` uses.
FLAGS = frozenset(
    re.findall(
        r"[\w-]+",
        """
        model-repository model-control-mode load-model exit-on-error strict-readiness disable-auto-complete-config
        model-load-thread-count backend-config exit-timeout-secs http-port grpc-port metrics-port http-address grpc-address
        metrics-address http-restricted-api grpc-restricted-protocol
        """,
    )
)
FACTS = {"python": "3.12.3", "prefix": "/usr", "numpy": "2.3.5", "numpy_works": True, "missing": []}


def test_flags_of_newer_releases_are_named() -> None:
    """If a release has all flags that `rsrv serve` needs, the check passes. The line also explains newer flags."""
    assert line(flags_finding(FLAGS)) == "ok      flags: all 17 that `rsrv serve` needs"
    newer = line(flags_finding(FLAGS | {"allow-client-shm", "http-max-input-size"}))
    assert "`rsrv serve --client-shm` sets --allow-client-shm; --http-max-input-size limits JSON" in newer


def test_a_release_without_a_needed_flag_fails() -> None:
    """If a release lacks a needed flag, the check fails, and the line names the flag."""
    text = line(flags_finding(FLAGS - {"load-model"}))

    assert text == "failed  flags: this release has no --load-model, which `rsrv serve` needs"


def test_a_check_that_does_not_end_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If the tritonserver of the check does not end in time, the check fails."""
    monkeypatch.setattr("rsrv.gpu.triton._LIMIT_S", 0.0)
    program = tmp_path / "tritonserver"
    program.write_text("#!/bin/sh\nexec sleep 60")
    program.chmod(0o755)

    assert main(["check-triton", "--tritonserver", str(program)]) == 1

    output = capsys.readouterr().out
    assert f"failed  {processes.LATE}: did not end within" in output
    assert "This tritonserver does not work with rsrv: 1 failed" in output


def test_a_small_shared_memory_fails_with_the_remedy() -> None:
    """Docker's 64 MB of shared memory are enough for the check. With 8 MB, it fails with the remedy."""
    assert line(shm_finding(64_000_000)).startswith(
        "ok      shared memory: 64 MB free in /dev/shm, for 61 models"
    )
    assert "docker run --shm-size sets the size" in line(shm_finding(8_000_000))
    assert shm_finding(8_000_000).verdict == "FAIL"


@pytest.mark.parametrize(
    ("changed", "lines"),
    [
        (
            {},
            [
                "ok      Python of the stubs: Python 3.12.3 in /usr",
                "ok      numpy of the stubs: numpy 2.3.5 exchanges",
            ],
        ),
        (
            {"numpy_works": False, "missing": ["PIL"]},
            [
                "ok      Python of the stubs",
                "note    packages for hooks: no PIL",
                "note    numpy of the stubs: numpy 2.3.5 does not work with this Triton (rsrv works around it",
            ],
        ),
    ],
)
def test_the_python_of_the_stubs_is_judged(changed: dict[str, Any], lines: list[str]) -> None:
    """If numpy does not work with this Triton, the check prints only a note with the remedy, because rsrv has a workaround."""
    texts = [line(finding) for finding in stub_findings({**FACTS, **changed})]

    assert len(texts) == len(lines)
    assert all(text.startswith(begin) for text, begin in zip(texts, lines, strict=True)), texts


def test_the_last_error_of_a_start_is_shown(tmp_path: Path) -> None:
    """The last error is read from a log with lines of Triton or of `rsrv serve`. If there is no log, the result is empty."""
    log = tmp_path / "log"
    assert last_error(log) == ""
    log.write_text(
        "I1128 18:00:00.0 1 a.cc:1] starting\nE1128 18:00:01.0 1 b.cc:2] failed to load 'm': ModuleNotFoundError: No module named 'rsrv'\n"
    )
    assert last_error(log).endswith("No module named 'rsrv'")
    log.write_text(
        "   1.1 s  the runtime did not start: No module named 'jax'\n\nServing 0 of 2 models, 2 failed:\n"
    )
    assert last_error(log) == "1.1 s  the runtime did not start: No module named 'jax'"


def test_a_program_that_does_not_start_is_reported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """If the tritonserver program does not start, the line shows what it has printed, and the exit status is 1."""
    (program := tmp_path / "tritonserver").write_text(
        "#!/bin/sh\necho libcuda.so.1: cannot open >&2\nexit 127\n"
    )
    program.chmod(0o755)

    assert main(["check-triton", "--tritonserver", str(program)]) == 1

    out = capfd.readouterr().out
    assert out.startswith(
        f"failed  tritonserver: {program} does not start: libcuda.so.1: cannot open\nThis tritonserver does not work"
    )


def test_a_program_that_is_missing_is_a_wrong_option(capsys: pytest.CaptureFixture[str]) -> None:
    """If the program is missing, the error names the option."""
    assert main(["check-triton", "--tritonserver", "/nowhere"]) == 1
    assert "rsrv check-triton: --tritonserver: there is no program /nowhere" in capsys.readouterr().err


def test_flags_are_read_from_the_help_text(tmp_path: Path) -> None:
    """Flags are read from the beginnings of lines of the help text, and not from within other lines.

    The exit status of the program does not matter.
    """
    (program := tmp_path / "tritonserver").write_text(
        "#!/bin/sh\ncat <<'E'\nUsage: tritonserver [options]\n  --model-repository <string>\n\tUse --load-model, too.\n"
        "  --allow-client-shm <boolean>\n\tDefault is false.\nE\nexit 1\n"
    )
    program.chmod(0o755)

    assert ask_flags(str(program)) == {"model-repository", "allow-client-shm"}
