"""Some of the seeds of the ten thousand that `make fuzz` tries."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_hostile_input_is_refused_and_harms_no_process() -> None:
    """Hostile input is refused; it runs in a new process, because forking is forbidden beside this one's threads."""
    counts = {"bundles": 10, "modules": 0, "frames": 100, "answers": 100, "requests": 0}
    options = [word for name, count in counts.items() for word in (f"--{name}", str(count))]
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", *options], check=False, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    for what, count in counts.items():
        assert f"{what}: {count} in " in done.stdout or not count
