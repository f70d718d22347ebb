"""Some of the ten thousand seeds that `make fuzz` tries."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.fuzz.__main__ import KINDS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "counts",
    [
        pytest.param({"answers": 100}, id="answers"),
        pytest.param({"natives": 2}, id="natives", marks=pytest.mark.long),
        pytest.param({"bundles": 10, "frames": 100}, id="bundles and frames", marks=pytest.mark.long),
    ],
)
def test_hostile_input_is_refused_and_harms_no_process(counts: Mapping[str, int]) -> None:
    """Hostile input is refused. The fuzzer runs in a new process, because it forks, and this process may have threads."""
    options = [word for kind in KINDS for word in (f"--{kind}", str(counts.get(kind, 0)))]
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", *options], check=False, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    for kind, count in counts.items():
        assert f"{kind}: {count} in " in done.stdout
