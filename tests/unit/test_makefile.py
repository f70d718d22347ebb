"""What make does before it runs a target: which Python it refuses, and what it builds first."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("target", ["demo", "test"])
def test_a_python_that_is_too_old_ends_make_with_one_line(tmp_path: Path, target: str) -> None:
    """If Python is too old, make prints one line with its version, the supported versions and a command that works.

    It makes no virtual environment.
    """
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("pyproject.toml", "requirements.lock"):
        (tmp_path / name).touch()
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\necho 3.10\n")
    old.chmod(0o755)
    done = subprocess.run(
        ["make", target, f"PYTHON={old}"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f"needs Python 3.11 to 3.13, found 3.10; make PYTHON=python3.12 {target}" in line
    assert not (tmp_path / ".venv").exists()


@pytest.mark.parametrize("target", ["test", "test-unit", "test-wheel", "test-long"])
def test_only_long_tests_wait_for_networks_to_be_trained(target: str) -> None:
    """Only the long tests first build the example bundles, which takes training.

    The fixtures of other tests make small bundles, or use the demo's trained networks.
    """
    done = subprocess.run(
        ["make", "-n", target, f"PYTHON={sys.executable}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ("tools/example_bundles.py" in done.stdout) is (target == "test-long")


@pytest.mark.parametrize("target", ["dist", "test-wheel", "test-native", "test-long", "demo", "serve"])
def test_a_changed_native_front_is_built_before_it_is_used(target: str) -> None:
    """If the source of the native front has changed, these targets build it first."""
    source = "triton_backend/rsrv/native/link.c"
    done = subprocess.run(
        ["make", "-n", "-W", source, target, f"PYTHON={sys.executable}"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "tools/native_front.py" in done.stdout
