"""Some hundred seeds of what `make fuzz` tries ten thousand of."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("what", ["bundles", "frames", "answers"])
def test_hostile_input_is_refused_and_harms_nobody(what: str) -> None:
    """In a process of its own, because children are forked there, which this one's threads forbid."""
    counts = {"bundles": 0, "modules": 0, "frames": 0, "answers": 0, what: 120 if what == "bundles" else 1000}
    options = [word for name, count in counts.items() for word in (f"--{name}", str(count))]
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", *options], check=False, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert f"{what}: {counts[what]} in " in done.stdout


def test_what_is_bad_is_found(tmp_path: Path) -> None:
    """The watch over the child is no better than what it notices: a death, a stall, an error, time, memory."""
    script = """
import os, sys, time
from tests.fuzz.watched import watch

def case(seed):
    match seed:
        case 1: os.abort()
        case 2: time.sleep(60)
        case 3: raise KeyError(seed)
        case 4:
            until = time.process_time() + 0.2
            while time.process_time() < until: pass
        case 5: bytearray(50 << 20)[::4096] = b"x" * (50 << 8)
    return "well"

for verdict in watch(case, range(7), seconds=0.1, nbytes=20 << 20):
    print(verdict.seed, verdict.outcome)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], check=False, cwd=ROOT, capture_output=True, text=True
    )
    expected = ["0 well", "1 crash", "2 hang", "3 fault", "4 slow", "5 bloat", "6 well"]
    assert done.stdout.splitlines() == expected, done.stderr
