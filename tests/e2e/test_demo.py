"""The demonstration that newcomers run first."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.e2e.harness import compilation_cache

ROOT = Path(__file__).resolve().parents[2]


def test_the_demo_shows_its_points_and_ends() -> None:
    """`make demo` serves ready-made models.

    It shows coalescing, a stream, shared weights, loads and evictions, and what a user can try next.
    """
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "demo.py"), "--once"],
        cwd=ROOT,
        env={**os.environ, "RSRV_RUNTIME__COMPILATION_CACHE_DIR": str(compilation_cache())},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "Serving 7 of 7 models" in done.stdout
    assert "/v2/models/digits/infer -d @" in done.stdout
    (executions,) = re.findall("720 requests took ([0-9]+) executions ", done.stdout)
    assert int(executions) < 720
    assert done.stdout.count("   Licensor shall mean the copyright owner") == 2
    assert "/v1/completions" in done.stdout
    assert "330 kB if nothing were shared" in done.stdout
    assert "unet: loaded " in done.stdout
