"""Fixtures of all unit tests."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

import pytest

from rsrv_gen import run


@pytest.fixture(autouse=True)
def junk_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rsrv-gen run as if jaxlib were not installed, so that it does not parse modules. In most tests, these are junk."""
    monkeypatch.setattr(run, "find_spec", lambda name: None)


@pytest.fixture
def few_descriptors() -> Iterator[list[int]]:
    """Open descriptors until this process can open no more, and return them. A test may close some."""
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
