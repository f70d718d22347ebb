"""Fixtures of all unit tests."""

from __future__ import annotations

from collections.abc import Generator

import jax
import pytest

from rsrv_gen import run


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """Compile without optimizations, which cost a unit test more than they save: servers have the product's own."""
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        return (yield)
    finally:
        jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(autouse=True)
def junk_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have rsrv-gen work as where jaxlib is missing: it does not look into modules, which are junk in most tests."""
    monkeypatch.setattr(run, "find_spec", lambda name: None)
