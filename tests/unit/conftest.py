"""Fixtures of all unit tests."""

from __future__ import annotations

import pytest

from rsrv_gen import run


@pytest.fixture(autouse=True)
def junk_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have rsrv-gen work as where jaxlib is missing: it does not look into modules, which are junk in most tests."""
    monkeypatch.setattr(run, "find_spec", lambda name: None)
