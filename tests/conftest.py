"""What holds for all tests."""

from __future__ import annotations

import shutil
import tempfile

import pytest
from hypothesis import HealthCheck, settings

# The same examples on every run and no time limit for one of them, nor for making them: a test must not fail because the
# machine is busy.
settings.register_profile(
    "repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")


def pytest_configure(config: pytest.Config) -> None:
    """Keep temporary files where paths are short: those of Unix sockets end at 107 characters.

    pytest's own place has the user's name in it. Processes that share the tests (pytest-xdist) get theirs from the first.
    """
    if config.option.basetemp is None:
        config.option.basetemp = config.stash[_MADE] = tempfile.mkdtemp(prefix="t-")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """What is left of tests that failed stays to be looked at."""
    made = session.config.stash.get(_MADE, None)
    if made is not None and exitstatus == pytest.ExitCode.OK:
        shutil.rmtree(made, ignore_errors=True)


_MADE = pytest.StashKey[str]()
