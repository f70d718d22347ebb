"""What holds for all tests."""

from __future__ import annotations

from hypothesis import settings

# The same examples on every run and no time limit for one of them: a test must not fail because the machine is busy.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
