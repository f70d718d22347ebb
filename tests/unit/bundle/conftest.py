"""Fixtures of all tests of bundles."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest

from tests.builders import compiled_before


@pytest.fixture(scope="package", autouse=True)
def executables_of_the_last_run() -> Iterator[None]:
    with compiled_before():
        yield


@pytest.fixture(autouse=True)
def as_jax_begins() -> Iterator[None]:
    """Reset jax's 64-bit types and precision, which tests of the runtime change in this process."""
    with jax.enable_x64(False), jax.default_matmul_precision(None):
        yield
