"""`rsrv check-triton` on the real server."""

from __future__ import annotations

import pytest

from local_triton import LAUNCHER
from rsrv.cli.main import main

pytestmark = pytest.mark.long


def test_all_findings_are_good(capfd: pytest.CaptureFixture[str]) -> None:
    """The command prints a line for each finding, and each finding is good."""
    assert main(["check-triton", "--tritonserver", str(LAUNCHER)]) == 0

    *lines, last = capfd.readouterr().out.splitlines()
    assert {line[8:].partition(":")[0] for line in lines if line.startswith("ok ")} == {
        "flags",
        "shared memory",
        "version",
        "Python of the stubs",
        "numpy of the stubs",
        "python front",
        "native front",
        "calls between models (BLS)",
        "BLS while the runtime restarts",
        "kill -9 of the runtime",
        "reload",
        "end of the server",
    }
    assert last.startswith("This tritonserver works with rsrv")
