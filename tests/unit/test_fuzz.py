"""Some of the seeds of the ten thousand that `make fuzz` tries."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("what", ["bundles", "frames", "answers"])
def test_hostile_input_is_refused_and_harms_no_process(what: str) -> None:
    """Hostile input is refused; it runs in a new process, because forking is forbidden beside this one's threads."""
    counts = dict.fromkeys(("bundles", "modules", "frames", "answers", "requests"), 0)
    counts[what] = 10 if what == "bundles" else 100
    options = [word for name, count in counts.items() for word in (f"--{name}", str(count))]
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", *options], check=False, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert f"{what}: {counts[what]} in " in done.stdout
