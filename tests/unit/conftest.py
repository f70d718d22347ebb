"""Fixtures of all unit tests."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

import pytest

from rsrv_gen import run


@pytest.fixture(autouse=True)
def junk_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have rsrv-gen work as where jaxlib is missing: it does not look into modules, which are junk in most tests."""
    monkeypatch.setattr(run, "find_spec", lambda name: None)


@pytest.fixture
def few_descriptors() -> Iterator[list[int]]:
    """Return descriptors that leave this process none; a test may close some."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 20, before[1]))
    try:
        while True:
            try:
                taken.append(os.dup(0))
            except OSError:
                break
        yield taken
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
